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
    """A client's own position in the log. Resuming from it does not move the ack cursor on the hub."""

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
    """Whether somebody received signals at the time of the welcome."""

    is_read_only: bool = False
    follows: Follows | None = None
    """State of a read replica, with the leader that it follows. None at a leader."""


class Stored(Struct, frozen=True):
    """A durable message or record. ``duplicate``: an earlier send had already stored it."""

    seq: int
    id: str
    duplicate: bool
    thread_id: str = ""


class Batched(Struct, frozen=True):
    """Answer to a batch: what is stored, in order, and the refusal of the next frame, if there was one."""

    stored: tuple[Stored, ...]
    error: RoundelayError | None = None


class Presence(Struct, frozen=True):
    """A participant came online or went offline. Sent to clients that called ``network.watch`` with ``presence``."""

    agent_id: str
    state: Literal["online", "offline"]
    card: dict[str, Any] | None = None


class Signal(Struct, frozen=True):
    """Live activity of a participant (docs/protocol/signals.md). Never stored."""

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
    """A page of a thread, oldest first. ``has_more``: there are earlier messages."""

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
    """Number of messages of threads outside the trigger's place: its direct thread, its channel, or the broadcasts."""

    after: int | None
    """The trigger's thread shows only messages after this seq."""

    visibility: str | None
    """Narrows what the participant's card and the network allow."""


class OpenEntry(Struct, frozen=True, kw_only=True):
    """Something that is open in a conversation since the time ``since`` (ms), and the participant whose turn it is.

    ``kind`` is ``delivery`` (an agent has not handled the message ``seq``), ``reaction`` or ``approval`` (an agent
    works on it, or waits for a decision), ``question`` (it requires an answer), or a kind of a mod.
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
    """Message that asks for the decision."""
    mod: str = ""
    key: str = ""


class OpenItems(Struct, frozen=True):
    """What is open in a conversation, oldest first. ``hidden``: number of further items that this participant may not
    see. ``has_more``: the list is cut."""

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
    """Number of further threads with messages for the prompt, among those that the hub has checked. The hub does not
    count them if ``per_other`` is given."""

    is_alone: bool = False
    """Whether the network has no participants other than the caller and the trigger's sender."""

    standing: dict[str, Any] = {}
    """What the agent owes and waits for, and what is left of the conversation's budget. Empty if there is nothing to
    say."""

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
