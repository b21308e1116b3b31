"""Several nodes that share one log: the leader appends records, and the other nodes follow."""
