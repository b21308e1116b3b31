"""Reads a run back from the ledger: messages and their causes, reactions, usage and cost. Replays and exports runs."""
