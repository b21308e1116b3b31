"""Read a run back from the ledger: messages and their causes, reactions, usage and cost. Replay and export runs."""
