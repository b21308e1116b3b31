"""A2A 1.0: each agent as a server, its tasks, and push notifications."""
