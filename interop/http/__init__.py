"""The gateway's own HTTP API, and the parts that all HTTP protocols share: reading requests and limiting
connections.
"""
