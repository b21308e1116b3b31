"""Optional features of an agent. Each feature is middleware in a separate module, so unused features cost nothing.
docs/middleware.md and docs/tools.md describe the features."""
