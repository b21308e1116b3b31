"""The gateway's own HTTP API, its reading of requests, and its limits on connections."""
