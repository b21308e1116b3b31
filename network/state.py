"""The network's tables: what `apply` reads and what a commit changes.

A `State` answers from its own tables, then from its parent's: the hub's state is the bottom, and each batch works on a draft on
top of it that is merged after the commit or thrown away. Values are frozen and replaced whole. Changes are `Put`s; the ledger
stores the same puts in the transaction of the rows that caused them, so that a start loads tables and replays nothing.
No IO, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from .frames import Kind

Table: TypeAlias = Literal[
    "participant", "token", "channel", "member", "floor", "attempt", "reaction", "mod", "day",  # loaded at start
    "root", "call", "dead", "triggered",  # cold: looked up as facts of a batch
    "bucket",  # in memory only
]  # fmt: skip

LOADED_TABLES: tuple[Table, ...] = (
    "participant", "token", "channel", "member", "floor", "attempt", "reaction", "mod", "day",
)  # fmt: skip
VOLATILE_TABLES: frozenset[str] = frozenset({"bucket"})
COLD_TABLES: frozenset[str] = frozenset({"root", "call", "dead", "triggered"})


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
        return any(start < seq and (until is None or seq < until) for start, until in self.spans)


class Floor(Struct, frozen=True):
    """Everything up to ``seq`` is handled but ``open``, and ``above`` it those acknowledged one by one. It only ever grows."""

    seq: int
    above: tuple[int, ...] = ()
    open: tuple[int, ...] = ()

    def with_handled(self, seqs: Iterable[int]) -> Floor:
        """This floor, and these handled too."""
        more = set(seqs)
        above = {*self.above, *(seq for seq in more if seq > self.seq)}
        return Floor(self.seq, tuple(sorted(above)), tuple(seq for seq in self.open if seq not in more))

    def is_handled(self, seq: int) -> bool:
        return seq in self.above or (seq <= self.seq and seq not in self.open)


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


class Triggered(Struct, frozen=True):
    """The reaction that one agent (the key's first half) began for one message (its second half)."""

    reaction: str
    seq: int


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
    "triggered": Triggered,
    "day": DaySpent,
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
    """What is stored under an idempotency key."""

    seq: int
    thread_id: str
    digest: str
    data: bytes = b"{}"


class Facts(Struct):
    """What the ledger says about a batch before it is applied. A key that is absent from a table does not exist."""

    known: dict[tuple[str, str], Known] = {}
    heads: MutableMapping[int, MessageHead] = {}
    cold: dict[tuple[str, str], Any] = {}


T = TypeVar("T")


class State:
    """Tables over an optional parent; see the module. Reads never copy, `change` writes to this level only."""

    def __init__(self, parent: State | None = None, *, head: int = 0, stamp: int = 0) -> None:
        self._parent = parent
        self._tables: dict[str, dict[str, Any]] = {}
        self._members: dict[str, dict[str, Member]] = {}
        self._memberships: dict[str, dict[str, Member]] = {}
        self._token_owners: set[str] = set()
        self.people: dict[str, Participant] = parent.people if parent is not None else {}
        self.head: int = parent.head if parent is not None else head
        self.stamp: int = parent.stamp if parent is not None else stamp

    def draft(self) -> State:
        """Give an empty state on top of this one."""
        return State(self)

    # --- reading

    def get(self, table: Table, key: str, absent: Any = None) -> Any:
        """The value under a key of a table (its type is in `VALUE_TYPES`), None if it was deleted, ``absent`` if nothing is known."""
        level: State | None = self
        while level is not None:
            values = level._tables.get(table)
            if values is not None and key in values:
                return values[key]
            level = level._parent
        return absent

    def participant(self, agent_id: str) -> Participant | None:
        found: Participant | None = self.get("participant", agent_id)
        return found

    def present(self, agent_id: str) -> Participant | None:
        """The participant, unless it is unknown or removed."""
        found = self.participant(agent_id)
        return found if found is not None and found.removed_seq is None else None

    def has_token(self, agent_id: str) -> bool:
        """Whether any token, revoked ones included, is this participant's."""
        level: State | None = self
        while level is not None:
            if agent_id in level._token_owners:
                return True
            level = level._parent
        return False

    def channel(self, name: str) -> Channel | None:
        found: Channel | None = self.get("channel", name)
        return found

    def members(self, channel: str) -> Mapping[str, Member]:
        """Everyone who is or was in a channel, by id."""
        level: State | None = self
        while level is not None:
            if channel in level._members:
                return level._members[channel]
            level = level._parent
        return {}

    def member(self, channel: str, agent_id: str) -> Member:
        return self.members(channel).get(agent_id, _NEVER)

    def memberships(self, agent_id: str) -> Mapping[str, Member]:
        """The channels that a participant is or was in, by name."""
        level: State | None = self
        while level is not None:
            if agent_id in level._memberships:
                return level._memberships[agent_id]
            level = level._parent
        return {}

    def floor(self, agent_id: str) -> Floor:
        found: Floor | None = self.get("floor", agent_id)
        return found if found is not None else _UNTOUCHED

    def items(self, table: Table) -> Iterator[tuple[str, Any]]:
        """Every key and value of a loaded table, newer levels over older ones."""
        seen: set[str] = set()
        level: State | None = self
        while level is not None:
            for key, value in level._tables.get(table, {}).items():
                if key not in seen:
                    seen.add(key)
                    if value is not None:
                        yield key, value
            level = level._parent

    def participants(self) -> Iterator[Participant]:
        """Those present, in no order."""
        return (p for _, p in self.items("participant") if p.removed_seq is None)

    # --- writing

    def change(self, puts: Iterable[Put]) -> None:
        """Apply puts to this level."""
        for put in puts:
            table = self._tables.get(put.table)
            if table is None:
                table = self._tables[put.table] = {}
            if put.value is None and self._parent is None:
                table.pop(put.key, None)
            else:
                table[put.key] = put.value
            if put.table == "member":
                self._index_member(put)
            elif put.table == "token" and put.value is not None:
                self._token_owners.add(put.value.agent_id)
            elif put.table == "participant" and put.value is not None and put.value.kind == "human":
                self.people = {**self.people, put.key: put.value}

    def changes(self) -> list[Put]:
        """What this level changed, the last value of each key: what the ledger keeps of a batch."""
        return [
            Put(name, key, value)  # type: ignore[arg-type]
            for name, values in self._tables.items()
            if name not in VOLATILE_TABLES
            for key, value in values.items()
        ]

    def merge(self, draft: State) -> None:
        """Take over a draft of this state: step 8, after the commit. Cold tables stay in the ledger alone."""
        for name, values in draft._tables.items():
            if name in COLD_TABLES:
                continue
            own = self._tables.setdefault(name, {})
            for key, value in values.items():
                if value is None and self._parent is None:
                    own.pop(key, None)
                else:
                    own[key] = value
        self._members.update(draft._members)
        self._memberships.update(draft._memberships)
        self._token_owners |= draft._token_owners
        self.people = draft.people
        self.head = draft.head
        self.stamp = draft.stamp

    def _index_member(self, put: Put) -> None:
        channel, _, agent_id = put.key.partition("/")
        member: Member = put.value if put.value is not None else _NEVER
        if channel not in self._members:  # copied once per draft, so that the parent stays as it is
            self._members[channel] = dict(self.members(channel))
        self._members[channel][agent_id] = member
        if agent_id not in self._memberships:
            self._memberships[agent_id] = dict(self.memberships(agent_id))
        self._memberships[agent_id][channel] = member


_NEVER = Member()
_UNTOUCHED = Floor(0)


def encode_value(value: Any) -> bytes:
    """Encode a table's value for the ledger."""
    return msgspec.json.encode(value)


def decode_value(table: Table, data: bytes | str) -> Any:
    """Decode what `encode_value` wrote. Raises `msgspec.DecodeError` on another shape."""
    return msgspec.json.decode(data, type=VALUE_TYPES[table])
