"""Agents that other frameworks run, as participants of a network: one module for each framework, imported by name;
`a2a` for agents elsewhere.

Nothing here is imported by the rest of the package, and nothing here imports a framework but the module that is named
for it.
"""
