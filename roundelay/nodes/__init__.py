"""A node and its agents as processes of a machine: their first files, their start, trial runs, and health checks."""
