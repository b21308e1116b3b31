"""Several nodes that share one log: the leader appends records, the others follow."""
