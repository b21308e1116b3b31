"""Signed webhooks: their registration, their delivery, and the HTTP endpoints that manage them."""
