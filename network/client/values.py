"""Values that `NetworkClient` returns and yields. `link` and `client` build them from frames."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypedDict

import msgspec
from msgspec import Struct

from roundelay.network.errors import RoundelayError
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
    """A client's own position in the log. Resuming from this position does not move the hub's ack cursor."""

    epoch: str
    seq: int


class Welcome(Struct, frozen=True, kw_only=True):
    """The hub's answer to a join. The fields are the same as in the ``welcome`` frame."""

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
    is_watched: bool = True
    """Whether any client received signals at the time of the welcome."""

    is_read_only: bool = False
    follows: Follows | None = None
    """State of the read replica that sent the welcome. None if the hub is a leader."""


class Stored(Struct, frozen=True):
    """A message or record that the hub has stored. ``duplicate`` is true if an earlier request had already stored the
    same message or record."""

    seq: int
    id: str
    duplicate: bool
    thread_id: str = ""


class Batched(Struct, frozen=True):
    """Answer to a batch: the stored messages and records in order, and the error of the first refused frame, if any."""

    stored: tuple[Stored, ...]
    error: RoundelayError | None = None


class Presence(Struct, frozen=True):
    """Event for a participant that came online or went offline. The hub sends it to clients that called
    ``network.watch`` with ``presence``."""

    agent_id: str
    state: Literal["online", "offline"]
    card: dict[str, Any] | None = None


class Signal(Struct, frozen=True):
    """Live activity of a participant (docs/protocol/signals.md). Signals are never stored."""

    sender_id: str
    thread_id: str
    kind: str
    body: Any


class Notice(Struct, frozen=True):
    """A notice of the hub. docs/protocol/notices.md lists the kinds and their bodies."""

    kind: str
    thread_id: str | None
    body: Any


class Reconnecting(Struct, frozen=True):
    """The connection was lost, or an attempt to reconnect failed. The next attempt follows after ``delay_s``."""

    reason: str
    delay_s: float


class Reconnected(Struct, frozen=True):
    """The connection is restored, and unanswered requests have been sent again."""

    welcome: Welcome


Event: TypeAlias = Presence | Signal | Notice | Reconnecting | Reconnected


class History(Struct, frozen=True):
    """One page of a thread's messages, oldest first. ``has_more`` is true if the thread has earlier messages."""

    messages: list[AnyMessage]
    has_more: bool

    @classmethod
    def read(cls, value: dict[str, Any]) -> History:
        """Parse the value of ``network.history``."""
        return cls([message_from_wire(message) for message in value["messages"]], value["has_more"])


class WindowSizes(TypedDict, total=False):
    """Options of `NetworkClient.window` about the messages of each thread."""

    per_thread: int | None
    per_other: int | None
    """Maximum number of messages per thread outside the trigger's direct thread, channel or broadcasts."""

    after: int | None
    """The trigger's thread shows only messages after this seq."""

    visibility: str | None
    """Visibility rule for this window. It can only restrict what the participant's card and the network allow."""


class OpenEntry(Struct, frozen=True, kw_only=True):
    """An open item: something that a conversation has been waiting for since the time ``since`` (ms).

    ``kind`` is ``delivery`` (an agent has not handled the message ``seq``), ``reaction`` (an agent works on the
    message), ``approval`` (the agent waits for a decision), ``question`` (the message requires an answer), or a kind
    that a mod defines. ``agent_id`` is the participant who has to act.
    """

    kind: str
    seq: int
    since: int
    agent_id: str = ""
    note: str = ""
    reaction: str = ""
    waits_for: list[str] = []
    """Participants that the reaction waits for."""
    request: int | None = None
    """Seq of the message that requests the decision."""
    mod: str = ""
    key: str = ""


class OpenItems(Struct, frozen=True):
    """The open items of a conversation, oldest first. ``hidden`` is the number of items that this participant may not
    see. ``has_more`` is true if the list is truncated."""

    root: int
    is_quiet: bool
    items: list[OpenEntry]
    hidden: int = 0
    has_more: bool = False

    @classmethod
    def read(cls, value: dict[str, Any]) -> OpenItems:
        """Parse the value of ``network.open_items``."""
        return msgspec.convert(value, cls)


class Window(Struct, frozen=True):
    """The messages that a prompt may contain, up to the seq ``as_of``."""

    threads: list[MessageThread]
    as_of: int
    omitted_threads: int = 0
    """Number of omitted threads that have messages for the prompt. The hub counts only threads that it has checked, and
    does not count at all if ``per_other`` is given."""

    is_alone: bool = False
    """Whether the network has no participants other than the caller and the trigger's sender."""

    standing: dict[str, Any] = {}
    """The answers that the agent owes and waits for, and the rest of the conversation's budget. Empty if there is
    nothing to report."""

    @classmethod
    def read(cls, value: dict[str, Any]) -> Window:
        """Parse the value of ``network.window``."""
        threads = [
            MessageThread(
                thread_id=thread["thread_id"],
                messages=[message_from_wire(message) for message in thread["messages"]],
                omitted=thread.get("omitted", 0),
            )
            for thread in value["threads"]
        ]
        return cls(
            threads,
            value["as_of"],
            value.get("omitted_threads", 0),
            value.get("is_alone", False),
            value.get("standing", {}),
        )
