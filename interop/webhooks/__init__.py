"""Signed webhooks: registrations, delivery, and their HTTP endpoints."""
