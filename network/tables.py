"""What the network's tables hold: the value of each, frozen and replaced whole, a change of one (`Put`), and what the ledger
knows of a batch beside the loaded tables (`Facts`). No IO, no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, MutableMapping
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from .frames import Kind

Table: TypeAlias = Literal[
    "participant", "token", "channel", "member", "floor", "attempt", "reaction", "mod", "day", "stored",  # loaded at start
    "root", "call", "dead", "tried", "triggered",  # cold: looked up as facts of a batch
    "bucket",  # in memory only
]  # fmt: skip

LOADED_TABLES: tuple[Table, ...] = (
    "participant", "token", "channel", "member", "floor", "attempt", "reaction", "mod", "day", "stored",
)  # fmt: skip
VOLATILE_TABLES: frozenset[str] = frozenset({"bucket"})
COLD_TABLES: frozenset[str] = frozenset({"root", "call", "dead", "tried", "triggered"})


class Participant(Struct, frozen=True):
    """A registered id. ``fence`` is the newest one given to a reactor session, ``fence_shown`` what that session had shown, if any."""

    agent_id: str
    kind: Kind
    registered_seq: int
    card: Raw | UnsetType = UNSET  # of `Raw | None` msgspec reads back only the null
    fence: int = 0
    removed_seq: int | None = None
    fence_shown: int | None = None


class Token(Struct, frozen=True):
    """What a token's hash (the key) allows. A revoked one stays, so that it is never bound again."""

    agent_id: str
    kind: Kind
    created_at: int
    operator: bool = False
    revoked: bool = False


class Channel(Struct, frozen=True):
    """A channel; ``history`` says what late joiners may read."""

    name: str
    created_seq: int
    created_by: str
    topic: str = ""
    history: Literal["since_join", "members"] = "since_join"


DAY_MS = 86_400_000
MAX_STOPPED_IN = 256
"""In how many threads of one conversation its readers are told that its budget is spent."""
MAX_SPANS = 4096
"""How often a participant may come to a channel again after messages that it missed: each time is kept, for what it may read depends on it."""


class Member(Struct, frozen=True):
    """When one participant was in one channel: spans of seqs (from, until), both exclusive; until None while it is in."""

    spans: tuple[tuple[int, int | None], ...] = ()

    @property
    def is_in(self) -> bool:
        return bool(self.spans) and self.spans[-1][1] is None

    def joined(self, seq: int) -> Member:
        """In from here on. Where nothing at all was stored since it left, nothing was missed: it goes on as if it had stayed."""
        if self.spans and self.spans[-1][1] == seq - 1:
            return Member((*self.spans[:-1], (self.spans[-1][0], None)))
        return Member((*self.spans, (seq, None)))

    def left(self, seq: int) -> Member:
        """Out from here on. A span within which nothing was stored is not kept, unless it is the only one."""
        start = self.spans[-1][0]
        if start == seq - 1 and len(self.spans) > 1:
            return Member(self.spans[:-1])
        return Member((*self.spans[:-1], (start, seq)))

    def was_in(self, seq: int) -> bool:
        at = bisect_left(self.spans, seq, key=_start) - 1  # of the last that began before
        if at < 0:
            return False
        until = self.spans[at][1]
        return until is None or seq < until


def _start(span: tuple[int, int | None]) -> int:
    return span[0]


class Floor(Struct, frozen=True):
    """Everything up to ``seq`` is handled but ``open``, and ``above`` it those acknowledged one by one; both ascending. It only ever grows."""

    seq: int
    above: tuple[int, ...] = ()
    open: tuple[int, ...] = ()

    def with_handled(self, seqs: Iterable[int]) -> Floor:
        """This floor, and these handled too."""
        more = set(seqs)
        above = {*self.above, *(seq for seq in more if seq > self.seq)}
        return Floor(self.seq, tuple(sorted(above)), tuple(seq for seq in self.open if seq not in more))

    def is_handled(self, seq: int) -> bool:
        if seq <= self.seq:
            return not _holds(self.open, seq)
        return _holds(self.above, seq)


def _holds(ascending: tuple[int, ...], seq: int) -> bool:
    at = bisect_left(ascending, seq)
    return at < len(ascending) and ascending[at] == seq


class Attempt(Struct, frozen=True):
    """Failures of one message at one recipient; ``due_at`` is when it may be delivered again.

    ``is_revived``: it was a dead letter, so its floor no longer waits for it.
    """

    failures: int
    due_at: int
    reason: str
    is_revived: bool = False


class Spent(Struct, frozen=True, omit_defaults=True):
    """Tokens of model calls, added up. ``cached_tokens`` are part of ``prompt_tokens``, ``reasoning_tokens`` of ``completion_tokens``."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class DaySpent(Struct, frozen=True):
    """What one agent (the key) has spent on the newest day, counted from the Unix epoch in UTC, on which it spent anything; by model."""

    day: int
    spent: dict[str, Spent]


class DayStored(Struct, frozen=True):
    """What one participant (the key) has stored on a day, counted from the Unix epoch in UTC: what `quotas` keeps over a restart."""

    day: int
    bytes: int
    messages: int
    is_near: bool = False
    """Whether little of its quota is left."""


class Bucket(Struct, frozen=True, gc=False):
    """What one participant (the key) does just now, in memory only: when its next entry, and its next message without a cause, would be
    due at exactly their rates (`guard.next_arrival`), and what it has stored on ``day`` (`quotas`)."""

    sends: float = 0.0
    roots: float = 0.0
    day: int = 0
    bytes: int = 0
    messages: int = 0


class OpenReaction(Struct, frozen=True):
    """A reaction begun and not finished, under ``AGENT/REACTION``; ``seq`` is that of its ``started`` record."""

    reaction: str
    agent_id: str
    trigger: int
    seq: int
    trigger_head: MessageHead
    oldest: int
    """The oldest seq of its prompt: retention keeps everything from here on."""
    is_cancelled: bool = False
    spent: dict[str, Spent] = {}
    """What its records say so far, by model."""


class RootBudget(Struct, frozen=True):
    """How much of its budget the conversation that a root message began has used."""

    messages: int
    last_seq: int
    extra_messages: int = 0
    extra_hops: int = 0
    stopped_in: tuple[str, ...] = ()
    """Threads whose readers were told that it is spent."""

    spent: dict[str, Spent] = {}
    """What the records of its reactions say, by model."""

    resumed: int = 0
    """How often it was let go on."""


class CallResult(Struct, frozen=True):
    """The first result of a call that changed something, repeated for its ``call_id`` for 24 hours."""

    digest: str
    at: int
    value: Raw


class DeadLetter(Struct, frozen=True):
    """A message that its recipient failed to handle too often."""

    agent_id: str
    seq: int
    reason: str
    failures: int
    at: int


class Tried(Struct, frozen=True):
    """How many attempts a message took in all that failed at least once and needs no more: the last one handled it, or it was given up."""

    attempts: int


class Begun(Struct, frozen=True):
    """A reaction, as it was begun by the ``started`` record of this seq."""

    reaction: str
    seq: int


MAX_BEGUN = 64
"""How many of the reactions to one message are known: the first, and the newest."""


class Triggered(Struct, frozen=True):
    """The newest reaction that one agent (the key's first half) began for one message (its second half), and the ``earlier`` ones."""

    reaction: str
    seq: int
    earlier: tuple[Begun, ...] = ()

    @property
    def first(self) -> Begun:
        return self.all[0]

    @property
    def all(self) -> tuple[Begun, ...]:
        """All of them, ascending."""
        return (*self.earlier, Begun(self.reaction, self.seq))

    def then(self, reaction: str, seq: int) -> Triggered:
        """These, and one that is begun now."""
        first, *others = self.all
        return Triggered(reaction, seq, (first, *others[2 - MAX_BEGUN :]))


VALUE_TYPES: dict[Table, Any] = {
    "participant": Participant,
    "token": Token,
    "channel": Channel,
    "member": Member,
    "floor": Floor,
    "attempt": Attempt,
    "reaction": OpenReaction,
    "mod": Raw,
    "root": RootBudget,
    "call": CallResult,
    "dead": DeadLetter,
    "tried": Tried,
    "triggered": Triggered,
    "day": DaySpent,
    "stored": DayStored,
}


class Put(Struct, frozen=True, gc=False):
    """One change of one table; ``value`` None deletes the key."""

    table: Table
    key: str
    value: Any


class MessageHead(Struct, frozen=True, kw_only=True, gc=False):
    """What rules need to know of a stored message; never its content.

    ``label`` is the seq of the message whose people are this one's audience (its own, or that of a cause that had people).
    ``excluded`` are those whom a broadcast, or the message that a reply thread began with, left out.
    """

    seq: int
    sender_id: str
    sender_kind: str
    kind: str
    to: str
    thread_id: str
    root: int
    hops: int
    label: int
    cause: int | None = None
    excluded: tuple[str, ...] = ()


class Known(Struct, frozen=True, gc=False):
    """What is stored under an idempotency key: of a row, what tells whether a repeat is the same. A `ledger.Row` is one."""

    seq: int
    stream: str = ""
    digest: str = ""
    data: bytes = b"{}"

    @property
    def is_damaged(self) -> bool:
        """Whether it stands in for a row that is not what was stored: of that nothing is known but the seq."""
        return not self.data


class Facts(Struct):
    """What the ledger says about a batch before it is applied. A key that is absent from a table does not exist, but those of
    ``damaged``: (table, key) of values that are no longer what was stored."""

    known: dict[tuple[str, str], Known] = {}
    heads: MutableMapping[int, MessageHead] = {}
    cold: dict[tuple[str, str], Any] = {}
    damaged: set[tuple[str, str]] = set()


def encode_value(value: Any) -> bytes:
    """Encode a table's value for the ledger."""
    return msgspec.json.encode(value)


def decode_value(table: Table, data: bytes | str) -> Any:
    """Decode what `encode_value` wrote. Raises `msgspec.DecodeError` on another shape."""
    return msgspec.json.decode(data, type=VALUE_TYPES[table])
