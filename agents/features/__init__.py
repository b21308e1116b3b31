"""Optional features of an agent. Each is middleware in a module of its own, so unused ones cost nothing.
docs/middleware.md and docs/tools.md describe them."""
