"""The hub accepts, orders, stores and delivers messages. It is the only writer of the ledger."""

from .hub import Hub

__all__ = ["Hub"]
