"""Runs a node and its agents as processes of a machine: first files, start, trial runs and health checks."""
