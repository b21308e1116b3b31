"""The demo, ``roundelay demo``: an example team (`team.yaml`, with its scripts in `agents` and its `tools`) that `play`
starts on a node, and shows on the `screen`."""
