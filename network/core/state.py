"""The network's state: what `apply` reads and what a commit changes, in the tables of `tables`.

A `State` answers from its own tables, then from its parent's: the hub's state is the bottom, and each batch works on a
draft on top of it that is merged after the commit or thrown away. Changes are `TableWrite`s; the ledger stores the same puts
in the transaction of the rows that caused them, so that a start loads tables and replays nothing. No IO, no clock.

Beside its tables each level keeps what it changed in indexes over them: *groups* (the values that share an owner, as
the members of a channel) and *orders* (ids by a number, as participants by their registration). A change of either
costs what changed, however many are there; a question about one owner costs what that owner has.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import ChainMap, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from msgspec import UNSET

from .buckets import Bucket, RecentMessages
from .entries import Outcome
from .reserved_ids import skeleton
from .rights import Rights
from .tables import (
    COLD_TABLES,
    VOLATILE_TABLES,
    AckCursor,
    Attempt,
    Channel,
    DayStored,
    Login,
    Member,
    OpenReaction,
    Participant,
    Question,
    ReadState,
    Table,
    TableWrite,
    Takeover,
    Token,
)

Group: TypeAlias = tuple[str, str]
"""What the values of a group share: the group's name and the owner."""


class State:
    """Tables over an optional parent; see the module. Reads of tables never copy, `change` writes to this level
    only."""

    def __init__(
        self, parent: State | None = None, *, head: int = 0, stamp: int = 0, rights: Rights | None = None
    ) -> None:
        self.rights: Rights | None = parent.rights if parent is not None else rights
        """The node's page of rights, which no entry changes; None without one."""
        self._parent = parent
        self.tables: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        """What this level holds, by table and key: all of the committed state, of a draft what it changed (None:
        deleted)."""
        self.durable_writes: dict[tuple[Table, str], TableWrite] = {}
        """What a draft changed that the ledger keeps, the last value of each key."""
        self.everyone: Mapping[str, Participant] = self.tables["participant"] if parent is None else parent.everyone
        """All who were ever registered, by id: the committed table itself, as long as a draft changes nobody."""
        self.takeovers: Mapping[str, Takeover] = self.tables["hold"] if parent is None else parent.takeovers
        """The last time that a person took each thread over, given back or not: nearly always there is none."""
        self._groups: dict[Group, dict[Any, Any]] = {}
        """By key; None for one that this level took out."""
        self._orders: dict[str, _Order] = {}
        self._ascending: dict[str, list[str]] = {}
        """The keys of tables that were listed, in order: made at the first asking, kept up by `change` and `merge`."""
        self.recent_messages: RecentMessages = parent.recent_messages if parent is not None else RecentMessages()
        """The same in all drafts: it tells of what is stored."""
        self.head: int = parent.head if parent is not None else head
        self.stamp: int = parent.stamp if parent is not None else stamp

    def draft(self, stamp: int | None = None) -> State:
        """Give an empty state on top of this one, at the same time or a later one."""
        draft = State(self)
        if stamp is not None:
            draft.stamp = stamp
        return draft

    # --- reading

    def get(self, table: Table, key: str, absent: Any = None) -> Any:
        """The value under a key of a table (its type is in `VALUE_TYPES`), None if it was deleted, ``absent`` if
        nothing is known."""
        values = self.tables[table]
        if key in values:
            return values[key]
        return absent if self._parent is None else self._parent.get(table, key, absent)

    def items(self, table: Table) -> Iterator[tuple[str, Any]]:
        """Every key and value of a loaded table, newer levels over older ones."""
        seen: set[str] = set()
        for level in self._levels():
            for key, value in level.tables[table].items():
                if key not in seen:
                    seen.add(key)
                    if value is not None:
                        yield key, value

    def ascending(self, table: Table, after: str = "") -> Iterator[tuple[str, Any]]:
        """Keys above ``after`` and their values, ascending by key, of the committed state. To be used up before
        anything changes."""
        values = self.tables[table]
        keys = self._ascending.get(table)
        if keys is None:
            keys = self._ascending[table] = sorted(values)
        for place in range(bisect_right(keys, after), len(keys)):
            yield keys[place], values[keys[place]]

    def count(self, table: Table) -> int:
        """How many values a loaded table has; of a draft they are counted one by one."""
        return len(self.tables[table]) if self._parent is None else sum(1 for _ in self.items(table))

    # --- reading: participants

    def participant(self, agent_id: str) -> Participant | None:
        return self.everyone.get(agent_id)

    def present(self, agent_id: str) -> Participant | None:
        """The participant, unless it is unknown or removed."""
        found = self.everyone.get(agent_id)
        return found if found is not None and found.removed_seq is None else None

    def participants(self) -> Iterator[Participant]:
        """Those present, as they were registered."""
        return self.registered_before(None)

    def registered_before(self, seq: int | None) -> Iterator[Participant]:
        """Those present that were registered before a seq (None: all), as they were registered."""
        for agent_id in self._below("present", seq):
            yield self.everyone[agent_id]

    def count_participants(self) -> int:
        """How many are present."""
        orders = [level._orders["present"] for level in self._levels() if "present" in level._orders]
        return sum(len(order.added) - len(order.gone) for order in orders)

    def is_person(self, agent_id: str) -> bool:
        """Whether this is a participant of kind ``human``, removed or not."""
        found = self.participant(agent_id)
        return found is not None and found.kind == "human"

    def people_before(self, seq: int | None) -> Iterator[str]:
        """The people present that were registered before a seq (None: all), as they were registered."""
        return self._below("people", seq)

    def has_token(self, agent_id: str) -> bool:
        """Whether any token, revoked ones included, or login is this participant's."""
        return bool(self.tokens(agent_id)) or bool(self.logins(agent_id))

    def look_alikes(self, agent_id: str) -> Iterable[str]:
        """The ids that look like this one, itself among them: those that were ever registered, and those that have
        or had a token."""
        return self._group("looks", skeleton(agent_id))

    def tokens(self, agent_id: str) -> Mapping[str, Token]:
        """A participant's tokens, revoked ones included, by hash."""
        return self._group("tokens", agent_id)

    def logins(self, agent_id: str) -> Mapping[str, Login]:
        """The logins to an id that are kept, used ones and those whose time is over among them, by hash."""
        return self._group("logins", agent_id)

    def near_quota(self) -> Mapping[str, DayStored]:
        """Those who have, on some day, stored nearly all that they may, by id."""
        return self._group("near a quota", "")

    def faults(self) -> Mapping[str, Participant]:
        """The agents that have a fault, or whose process was lost in the middle of a reaction, by id."""
        return self._group("faults", "")

    def bucket(self, agent_id: str) -> Bucket:
        """What a participant does just now; after a start, with what was kept of its day."""
        bucket: Bucket | None = self.get("bucket", agent_id)
        if bucket is not None:
            return bucket
        kept: DayStored | None = self.get("stored", agent_id)
        return Bucket(0.0, 0.0, kept.day, kept.bytes, kept.messages) if kept is not None else _IDLE

    def ack_cursor(self, agent_id: str) -> AckCursor:
        found: AckCursor = self.get("floor", agent_id) or _UNTOUCHED
        return found

    def attempts(self, agent_id: str) -> Mapping[int, Attempt]:
        """The failures of a participant's messages that are not settled, by seq."""
        return self._group("attempts", agent_id)

    # --- reading: channels

    def channel(self, name: str) -> Channel | None:
        found: Channel | None = self.get("channel", name)
        return found

    def member(self, channel: str, agent_id: str) -> Member:
        found: Member = self.get("member", f"{channel}/{agent_id}") or _NEVER
        return found

    def members(self, channel: str) -> Mapping[str, Member]:
        """Everyone who is or was in a channel, by id."""
        return self._group("members", channel)

    def memberships(self, agent_id: str) -> Mapping[str, Member]:
        """The channels that a participant is or was in, by name."""
        return self._group("memberships", agent_id)

    def people_of(self, channel: str) -> Mapping[str, Member]:
        """The people among those who are or were in a channel, by id."""
        return self._group("people", channel)

    def people_in_before(self, channel: str, seq: int | None) -> Iterator[str]:
        """The people who are in a channel now and first came to it before a seq (None: all), as they came."""
        return self._below(f"people in {channel}", seq)

    def channels_by(self, agent_id: str) -> Mapping[str, Channel]:
        """The channels that a participant created, by name."""
        return self._group("channels by", agent_id)

    # --- reading: reactions

    def reactions_of(self, agent_id: str) -> Mapping[str, OpenReaction]:
        """The open reactions of an agent, by their key."""
        return self._group("reactions of", agent_id)

    def reactions_named(self, reaction: str) -> Mapping[str, OpenReaction]:
        """The open reactions with an id, which every agent may use, by their key."""
        return self._group("reactions named", reaction)

    def reactions_in(self, thread_id: str) -> Mapping[str, OpenReaction]:
        """The open reactions to messages of a thread, by their key."""
        return self._group("reactions in", thread_id)

    def reactions_to(self, agent_id: str, trigger: int) -> Mapping[str, OpenReaction]:
        """The open reactions of an agent to one message, by their key."""
        return self._group("reactions to", f"{agent_id}/{trigger}")

    def reactions_asked_by(self, agent_id: str, cause: int) -> Mapping[str, OpenReaction]:
        """The open reactions to what an agent wrote to others directly because of a message, by their key."""
        return self._group("reactions asked by", f"{agent_id}/{cause}")

    def reactions_by_oldest(self) -> Iterator[OpenReaction]:
        """The open reactions by the oldest seq of their prompts."""
        for key in self._below("oldest", None):
            found: OpenReaction = self.get("reaction", key)
            yield found

    # --- reading: what people keep for themselves

    def read_states_of(self, agent_id: str) -> Mapping[str, ReadState]:
        """What a participant keeps of threads, by thread; under an empty id of all others."""
        return self._group("marks of", agent_id)

    def questions_of(self, agent_id: str) -> Mapping[int, Question]:
        """What a person has been asked and not answered, by seq."""
        return self._group("questions of", agent_id)

    def may_have_questions(self, agent_id: str) -> bool:
        """Whether there may be any: for who asks with each message."""
        group, level = ("questions of", agent_id), self
        while group not in level._groups:
            if level._parent is None:
                return False
            level = level._parent
        return True

    def questions_in(self, agent_id: str, thread_id: str) -> Mapping[int, Question]:
        """Of these, those of one thread."""
        return self._group("questions in", f"{agent_id}/{thread_id}")

    # --- writing

    def apply_writes(self, puts: Iterable[TableWrite]) -> None:
        """Apply puts to this level."""
        for put in puts:
            name, value = put.table, put.value
            if name not in VOLATILE_TABLES:
                self._note(put)
            if value is None and self._parent is None:
                self.tables[name].pop(put.key, None)
            else:
                self.tables[name][put.key] = value

    def apply_outcome(self, outcome: Outcome) -> None:
        """Let the next entries of the batch see what one came to."""
        if outcome.rows:
            self.head = outcome.rows[-1].seq
        if outcome.writes:
            self.apply_writes(outcome.writes)

    def merge(self, draft: State) -> None:
        """Take over a draft of this state: step 8, after the commit. Cold tables stay in the ledger alone."""
        self.apply_writes(put for put in draft.durable_writes.values() if put.table not in COLD_TABLES)
        for name in VOLATILE_TABLES:
            self.tables[name].update(draft.tables[name])
        self.head = draft.head
        self.stamp = draft.stamp

    def _note(self, put: TableWrite) -> None:
        """Let all that is kept beside the tables follow a put that is about to be made."""
        name, key, value = put.table, put.key, put.value
        if name in _INDEXED:
            self._index(put)
        if name in self._ascending:
            keys, is_there = self._ascending[name], key in self.tables[name]
            if value is None and is_there:
                del keys[bisect_left(keys, key)]
            elif value is not None and not is_there:
                insort(keys, key)
        if self._parent is not None:
            self.durable_writes[name, key] = put
            if name == "participant" and self.everyone is self._parent.everyone:
                self.everyone = ChainMap(self.tables[name], self.everyone)  # type: ignore[arg-type]
            elif name == "hold" and self.takeovers is self._parent.takeovers:
                self.takeovers = ChainMap(self.tables[name], self.takeovers)  # type: ignore[arg-type]

    def _levels(self) -> Iterator[State]:
        """This one and those below it, down to the committed state."""
        level: State | None = self
        while level is not None:
            yield level
            level = level._parent

    # --- indexes

    def _index(self, put: TableWrite) -> None:
        """Let the indexes follow a put that is about to be made."""
        table, key, value = put.table, put.key, put.value
        before = self.get(table, key)
        places = _groups_of(table, key, value) if value is not None else ()
        if before is not None:
            for group, name in _groups_of(table, key, before):
                if (group, name) not in places:
                    self._set(group, name, None)
        for group, name in places:
            self._set(group, name, value)
        if table == "participant":
            self._index_participant(key, before, value)
        elif table == "reaction":
            self._reorder("oldest", _beginning(key, before), _beginning(key, value))
        elif table == "member":
            channel, _, agent_id = key.partition("/")
            if self.is_person(agent_id):
                self._index_person_in(channel, agent_id, before, value)

    def _index_participant(self, agent_id: str, before: Participant | None, now: Participant | None) -> None:
        self._reorder("present", _registration(before), _registration(now))
        was_person = before is not None and before.kind == "human"
        is_person = now is not None and now.kind == "human"
        self._reorder(
            "people", _registration(before) if was_person else None, _registration(now) if is_person else None
        )
        if is_person is not was_person:  # a ledger gives its tables in any order
            for channel, member in self.memberships(agent_id).items():
                known, wanted = (member if was_person else None), (member if is_person else None)
                self._index_person_in(channel, agent_id, known, wanted)

    def _index_person_in(self, channel: str, agent_id: str, before: Member | None, now: Member | None) -> None:
        self._set(("people", channel), agent_id, now)
        self._reorder(f"people in {channel}", _arrival(agent_id, before), _arrival(agent_id, now))

    def _group(self, name: str, owner: str) -> Mapping[Any, Any]:
        """Everything in a group. Copied only where a draft changed it."""
        group = (name, owner)
        levels: list[dict[Any, Any]] = []
        level: State | None = self
        while level is not None:
            found = level._groups.get(group)
            if found is not None:
                levels.append(found)
                if level._parent is None and len(levels) == 1:
                    return found
            level = level._parent
        together: dict[Any, Any] = {}
        for found in reversed(levels):
            together.update(found)
        return {key: value for key, value in together.items() if value is not None}

    def _set(self, group: Group, key: Any, value: Any) -> None:
        values = self._groups.get(group)
        if value is not None or self._parent is not None:
            if values is None:
                values = self._groups[group] = {}
            values[key] = value
        elif values is not None:
            values.pop(key, None)
            if not values:  # owners come and go: of one that has nothing nothing is kept
                del self._groups[group]

    def _reorder(self, name: str, before: tuple[int, str] | None, now: tuple[int, str] | None) -> None:
        if before == now:
            return
        order = self._orders.get(name)
        if order is None:
            order = self._orders[name] = _Order()
        if before is not None:
            order.remove(before)
        if now is not None:
            order.add(now)
        if self._parent is None and not order.added:
            del self._orders[name]

    def _below(self, name: str, number: int | None) -> Iterator[str]:
        """The ids of an order whose number is below one (None: all), ascending by it."""
        orders = [level._orders[name] for level in self._levels() if name in level._orders]
        if not orders:
            return
        entries: Iterable[tuple[int, str]] = orders[-1].added
        for order in reversed(orders[:-1]):
            entries = order.over(entries)
        for at, agent_id in entries:
            if number is not None and at >= number:
                return
            yield agent_id


class _Order:
    """What one level changed of ids that stand by a number: pairs that it added, ascending, and pairs of its parent
    that it took out."""

    __slots__ = ("added", "gone")

    def __init__(self) -> None:
        self.added: list[tuple[int, str]] = []
        self.gone: set[tuple[int, str]] = set()

    def add(self, entry: tuple[int, str]) -> None:
        """Add a pair that is not there."""
        insort(self.added, entry)

    def remove(self, entry: tuple[int, str]) -> None:
        """Take out a pair that is there."""
        at = bisect_left(self.added, entry)
        if at < len(self.added) and self.added[at] == entry:
            del self.added[at]
        else:
            self.gone.add(entry)

    def over(self, older: Iterable[tuple[int, str]]) -> Iterable[tuple[int, str]]:
        """The pairs of the levels below, as this level leaves them, ascending."""
        kept = (entry for entry in older if entry not in self.gone) if self.gone else older
        return heapq.merge(kept, self.added) if self.added else kept


def _groups_of(table: str, key: str, value: Any) -> tuple[tuple[Group, Any], ...]:
    """The groups that a value belongs to, and its key in each."""
    match table:
        case "member":
            channel, _, agent_id = key.partition("/")
            return (("members", channel), agent_id), (("memberships", agent_id), channel)
        case "attempt":
            agent_id, _, seq = key.partition("/")
            return ((("attempts", agent_id), int(seq)),)
        case "channel":
            return ((("channels by", value.created_by), key),)
        case "mark":
            agent_id, _, thread_id = key.partition("/")
            return ((("marks of", agent_id), thread_id),)
        case "question":
            agent_id, _, seq = key.partition("/")
            return (("questions of", agent_id), int(seq)), (("questions in", f"{agent_id}/{value.thread_id}"), int(seq))
        case "stored":
            return ((("near a quota", ""), key),) if value.is_near else ()
        case "token":
            return (("tokens", value.agent_id), key), (("looks", skeleton(value.agent_id)), value.agent_id)
        case "login":
            return ((("logins", value.agent_id), key),)
        case "participant":  # neither its row nor a token's is ever deleted, so that what is in "looks" stays there
            looks = (("looks", skeleton(key)), key)
            faulty = value.fault is not UNSET or value.is_lost
            return (looks, (("faults", ""), key)) if faulty else (looks,)
        case "reaction":
            head = value.trigger_head
            found: tuple[tuple[Group, Any], ...] = (
                (("reactions of", value.agent_id), key),
                (("reactions named", value.reaction), key),
                (("reactions in", head.thread_id), key),
                (("reactions to", f"{value.agent_id}/{value.trigger}"), key),
            )
            if head.kind == "direct" and head.cause is not None:
                found += ((("reactions asked by", f"{head.sender_id}/{head.cause}"), key),)
            return found
        case _:
            return ()


def _registration(participant: Participant | None) -> tuple[int, str] | None:
    """Where a participant stands among those present, if it is."""
    if participant is None or participant.removed_seq is not None:
        return None
    return participant.registered_seq, participant.agent_id


def _arrival(agent_id: str, member: Member | None) -> tuple[int, str] | None:
    """Where somebody stands among those who are in a channel, if it is."""
    return (member.spans[0][0], agent_id) if member is not None and member.is_in else None


def _beginning(key: str, reaction: OpenReaction | None) -> tuple[int, str] | None:
    """Where a reaction stands by the oldest seq of its prompt."""
    return (reaction.oldest, key) if reaction is not None else None


_INDEXED = frozenset(
    {"member", "token", "participant", "channel", "reaction", "attempt", "stored", "mark", "question", "login"}
)
"""Tables of which more is kept than their values."""
_NEVER = Member()
_UNTOUCHED = AckCursor(0)
_IDLE = Bucket()
