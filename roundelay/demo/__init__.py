"""The demo, ``roundelay demo``: `play` runs it, on the `screen`; the agents of `team.yaml` are processes of their own
(`member`)."""
