"""The hub: accepts, orders, stores and delivers; the only writer of the ledger."""

from .hub import Hub

__all__ = ["Hub"]
