"""The gateway's own HTTP API, and how it reads requests and limits connections."""
