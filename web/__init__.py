"""The page: what a browser gets from the node's port, under ``page/``, and how it is served. Imports `roundelay.network`
alone."""
