"""The client: one participant's connection to a hub, for programs. This package imports the protocol's modules, but no
module of the hub."""

from .acks import Delivery
from .client import NetworkClient
from .values import (
    AnyMessage,
    Batched,
    Cursor,
    Event,
    History,
    Notice,
    OpenEntry,
    OpenItems,
    Presence,
    Reconnected,
    Reconnecting,
    Signal,
    Stored,
    Welcome,
    Window,
    WindowSizes,
)

__all__ = [
    "AnyMessage",
    "Batched",
    "Cursor",
    "Delivery",
    "Event",
    "History",
    "NetworkClient",
    "Notice",
    "OpenEntry",
    "OpenItems",
    "Presence",
    "Reconnected",
    "Reconnecting",
    "Signal",
    "Stored",
    "Welcome",
    "Window",
    "WindowSizes",
]
