"""The demo, ``roundelay demo``: `run` plays it, on the `screen`; the `team` are processes of their own, with their `skills`."""
