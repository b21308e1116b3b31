"""Optional features of an agent. Each feature is middleware in a separate module, and unused features are never
imported. docs/middleware.md and docs/tools.md describe the features.
"""
