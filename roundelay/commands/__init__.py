"""The commands of ``roundelay``, by topic.

These modules import only click at the top, so that every command starts fast.
"""
