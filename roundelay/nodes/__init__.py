"""Run a node and its agents as processes of a machine. Create the first files, try an agent, and check the health of a
node."""
