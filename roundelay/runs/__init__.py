"""Reads back from the ledger what happened in a run: what was said and why, which reactions there were, what they used
and cost."""
