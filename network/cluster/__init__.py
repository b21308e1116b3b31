"""A cluster: several nodes share one log. The leader appends records to the log, and the other nodes follow it."""
