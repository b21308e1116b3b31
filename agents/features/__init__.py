"""What an agent may have beside the loop, each a module of its own: middleware that is left out costs nothing.
`docs/agents.md` lists them."""
