"""What a client is told by its hub: plain values, given out by `NetworkClient`. Made by `link` and `client`."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import Struct

from roundelay.network.frames import Follows, Kind, ModInfo, NetworkInfo, OpenReactionInfo
from roundelay.network.messages import (
    BroadcastMessage,
    ChannelMessage,
    DirectMessage,
    MessageThread,
    ModMessage,
    message_from_wire,
)

AnyMessage: TypeAlias = DirectMessage | BroadcastMessage | ChannelMessage | ModMessage


class Cursor(Struct, frozen=True):
    """A client's own place in the log: resuming from it moves nothing on the hub."""

    epoch: str
    seq: int


class Welcome(Struct, frozen=True, kw_only=True):
    """What the hub said when this session joined; fields as in the ``welcome`` frame."""

    server: str
    network: NetworkInfo
    agent_id: str
    kind: Kind
    is_operator: bool = False
    role: str
    session_id: str
    cursor: int
    head: int
    resume: str
    missing_before: int | None = None
    fence: int | None = None
    open_reactions: list[OpenReactionInfo] = []
    mods: list[ModInfo] = []
    limits: dict[str, int] = {}
    is_read_only: bool = False
    follows: Follows | None = None
    """Of a node that follows, and lets read what it has."""


class Stored(Struct, frozen=True):
    """A message or record is durable under ``seq``. ``duplicate``: it was before this send."""

    seq: int
    id: str
    duplicate: bool
    thread_id: str = ""


class Presence(Struct, frozen=True):
    """A participant came or went; only clients that called ``network.watch`` with ``presence`` are told."""

    agent_id: str
    state: Literal["online", "offline"]
    card: dict[str, Any] | None = None


class Signal(Struct, frozen=True):
    """What somebody tells of work under way ("Signals of agents" in docs/protocol.md). It was never stored."""

    sender_id: str
    thread_id: str
    kind: str
    body: Any


class Notice(Struct, frozen=True):
    """What the hub tells this client; docs/protocol.md, "Notices", has the kinds and the body of each."""

    kind: str
    thread_id: str | None
    body: Any


class Reconnecting(Struct, frozen=True):
    """The connection was lost, or could not be made again; the next try comes after ``delay_s``."""

    reason: str
    delay_s: float


class Reconnected(Struct, frozen=True):
    """The connection is back; what was not answered has been sent again."""

    welcome: Welcome


Event: TypeAlias = Presence | Signal | Notice | Reconnecting | Reconnected


class History(Struct, frozen=True):
    """A page of a thread, oldest first; ``has_more``: there are earlier messages."""

    messages: list[AnyMessage]
    has_more: bool

    @classmethod
    def read(cls, value: dict[str, Any]) -> History:
        """Make it of the value of ``network.history``."""
        return cls([message_from_wire(message) for message in value["messages"]], value["has_more"])


class Window(Struct, frozen=True):
    """The conversation that may enter a prompt, up to the message with the seq ``as_of``."""

    threads: list[MessageThread]
    as_of: int
    omitted_threads: int = 0
    """Further threads of which something could be shown, as far as the hub has looked."""

    @classmethod
    def read(cls, value: dict[str, Any]) -> Window:
        """Make it of the value of ``network.window``."""
        found = [
            MessageThread(
                thread_id=thread["thread_id"],
                messages=[message_from_wire(message) for message in thread["messages"]],
                omitted=thread.get("omitted", 0),
            )
            for thread in value["threads"]
        ]
        return cls(found, value["as_of"], value.get("omitted_threads", 0))
