"""A2A 1.0: serves each agent as an A2A server, with tasks and push notifications."""
