"""Implement ``roundelay demo``. `play` starts the example team of `team.yaml` on a node, and shows its work on the
`screen`.

The team's scripts are in `agents`, and its tools are in `tools`.
"""
