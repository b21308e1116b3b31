"""The commands of ``roundelay``, one module per topic.

At the top level, these modules import only click. Every command therefore starts fast.
"""
