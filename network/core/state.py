"""The state of a network: all loaded tables, and indexes over these tables.

A `State` looks up a value first in its own tables and then in the tables of its parent. The hub's committed state is
the bottom level. Each batch changes a draft on top of the committed state. After the commit, the draft is merged into
the committed state. If the commit fails, the draft is discarded. The ledger stores each `TableWrite` in the same
transaction as the rows that caused it, so a start only loads tables and replays no rows. No IO, no clock.

Each level also records its changes to two kinds of indexes. A *group* contains the values of one owner, such as the
members of a channel. An *order* contains ids sorted by a number, such as participants by registration. The cost of an
update depends on the size of the change, not on the size of the index. The cost of a query for one owner depends on the
number of the owner's values.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import ChainMap, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .ack_cursor import AckCursor
from .buckets import Bucket, RecentMessages
from .entries import Outcome
from .indexes import INDEXED, Group, Order, arrival_entry, beginning_entry, due_entry, groups_of, registration_entry
from .open_items import OpenDelivery
from .reserved_ids import skeleton
from .rights import Rights
from .tables import (
    COLD_TABLES,
    VOLATILE_TABLES,
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


class State:
    """One level of tables, with an optional parent level below it. Reads never copy a table. `apply_writes` changes
    only this level."""

    def __init__(
        self, parent: State | None = None, *, head: int = 0, stamp: int = 0, rights: Rights | None = None
    ) -> None:
        self.rights: Rights | None = parent.rights if parent is not None else rights
        """Rights of the node, which no entry can change. None if the node's file has no section ``rights``."""
        self._parent = parent
        self.tables: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        """Values of this level, by table and key. The committed state contains all values. A draft contains only values
        that it has changed. None in a draft stands for a deleted value."""
        self.durable_writes: dict[tuple[Table, str], TableWrite] = {}
        """The writes of a draft that the ledger must store: the last write of each key."""
        self.everyone: Mapping[str, Participant] = self.tables["participant"] if parent is None else parent.everyone
        """All participants ever registered, by id. A draft shares its parent's mapping until the draft changes a
        participant."""
        self.takeovers: Mapping[str, Takeover] = self.tables["hold"] if parent is None else parent.takeovers
        """Newest takeover of each thread, whether active or ended. Nearly always empty."""
        self._groups: dict[Group, dict[Any, Any]] = {}
        """Groups of this level, by name and owner. A value of None means that this level removed the value."""
        self._orders: dict[str, Order] = {}
        self._ascending: dict[str, list[str]] = {}
        """Sorted keys of the tables that were listed at least once. The first listing of a table builds the list, and
        each write updates it."""
        self.recent_messages: RecentMessages = parent.recent_messages if parent is not None else RecentMessages()
        """Newest stored messages by destination. All drafts share this object, because it describes only stored
        messages."""
        self.head: int = parent.head if parent is not None else head
        self.stamp: int = parent.stamp if parent is not None else stamp

    def draft(self, stamp: int | None = None) -> State:
        """Return an empty draft on top of this state. ``stamp`` is the draft's time, by default the time of this
        state."""
        draft = State(self)
        if stamp is not None:
            draft.stamp = stamp
        return draft

    # --- reading

    def get(self, table: Table, key: str, absent: Any = None) -> Any:
        """Return the value of a key. `VALUE_TYPES` lists the type of each table's values. If the key is unknown, return
        ``absent``. If a draft has deleted the value, return None."""
        values = self.tables[table]
        if key in values:
            return values[key]
        # None at a level means that the value was deleted there, so ask the parent only if the key is missing.
        return absent if self._parent is None else self._parent.get(table, key, absent)

    def items(self, table: Table) -> Iterator[tuple[str, Any]]:
        """Yield all keys and values of a loaded table. A newer level's value replaces an older level's value."""
        seen: set[str] = set()
        for level in self._levels():
            for key, value in level.tables[table].items():
                if key not in seen:
                    seen.add(key)
                    if value is not None:
                        yield key, value

    def ascending(self, table: Table, after: str = "") -> Iterator[tuple[str, Any]]:
        """Yield the keys above ``after`` and their values, in ascending order. Call this method only on the committed
        state, and do not change the state during the iteration."""
        values = self.tables[table]
        keys = self._ascending.get(table)
        if keys is None:
            keys = self._ascending[table] = sorted(values)
        # Use indexes instead of copying a slice: a page usually needs only a few keys of a long list.
        for index in range(bisect_right(keys, after), len(keys)):
            yield keys[index], values[keys[index]]

    def count(self, table: Table) -> int:
        """Return the number of values in a loaded table. This is slow in a draft, which must iterate over all
        values."""
        return len(self.tables[table]) if self._parent is None else sum(1 for _ in self.items(table))

    # --- reading: participants

    def participant(self, agent_id: str) -> Participant | None:
        return self.everyone.get(agent_id)

    def present(self, agent_id: str) -> Participant | None:
        """Return a participant, or None if the id is unknown or the participant was removed."""
        participant = self.everyone.get(agent_id)
        return participant if participant is not None and participant.removed_seq is None else None

    def participants(self) -> Iterator[Participant]:
        """Yield the participants that are not removed, in the order of registration."""
        return self.registered_before(None)

    def registered_before(self, seq: int | None) -> Iterator[Participant]:
        """Yield the present participants that were registered before a seq (None: all), in the order of
        registration."""
        for agent_id in self._below("present", seq):
            yield self.everyone[agent_id]

    def count_participants(self) -> int:
        """Return the number of participants that are not removed."""
        return self._count_order("present")

    def is_person(self, agent_id: str) -> bool:
        """Return whether the id belongs to a participant of kind ``human``, removed or not."""
        participant = self.participant(agent_id)
        return participant is not None and participant.kind == "human"

    def people_before(self, seq: int | None) -> Iterator[str]:
        """Yield the present people who were registered before a seq (None: all), in the order of registration."""
        return self._below("people", seq)

    def has_token(self, agent_id: str) -> bool:
        """Return whether an id has any login or token, even a revoked token."""
        return bool(self.tokens(agent_id)) or bool(self.logins(agent_id))

    def look_alikes(self, agent_id: str) -> Iterable[str]:
        """Return the known ids that look like ``agent_id``, which may include ``agent_id`` itself. An id is known if it
        was ever registered or ever had a token."""
        return self._group("looks", skeleton(agent_id))

    def tokens(self, agent_id: str) -> Mapping[str, Token]:
        """Return the tokens of a participant by hash, including revoked tokens."""
        return self._group("tokens", agent_id)

    def logins(self, agent_id: str) -> Mapping[str, Login]:
        """Return the one-time logins of an id by hash, including used and expired logins."""
        return self._group("logins", agent_id)

    def near_quota(self) -> Mapping[str, DayStored]:
        """Return the participants that used nearly all of their quota on their last stored day, by id."""
        return self._group("near a quota", "")

    def faults(self) -> Mapping[str, Participant]:
        """Return the agents that have a fault or whose process was lost during a reaction, by id."""
        return self._group("faults", "")

    def bucket(self, agent_id: str) -> Bucket:
        """Return the counters of a participant. After a start of the hub, the counters begin with the sums that the
        ledger has stored."""
        bucket: Bucket | None = self.get("bucket", agent_id)
        if bucket is not None:
            return bucket
        stored: DayStored | None = self.get("stored", agent_id)
        # Start from the stored sums. Otherwise each restart would reset the quotas.
        return Bucket(0.0, 0.0, stored.day, stored.bytes, stored.messages) if stored is not None else _IDLE

    def ack_cursor(self, agent_id: str) -> AckCursor:
        cursor: AckCursor = self.get("floor", agent_id) or _NOTHING_HANDLED
        return cursor

    def attempts(self, agent_id: str) -> Mapping[int, Attempt]:
        """Return the failed deliveries to a participant, by seq. Messages that were handled or became dead letters are
        not included."""
        return self._group("attempts", agent_id)

    # --- reading: channels

    def channel(self, name: str) -> Channel | None:
        channel: Channel | None = self.get("channel", name)
        return channel

    def member(self, channel: str, agent_id: str) -> Member:
        member: Member = self.get("member", f"{channel}/{agent_id}") or _NO_MEMBER
        return member

    def members(self, channel: str) -> Mapping[str, Member]:
        """Return everyone who is or was in a channel, by id."""
        return self._group("members", channel)

    def memberships(self, agent_id: str) -> Mapping[str, Member]:
        """Return the channels that a participant is or was in, by name."""
        return self._group("memberships", agent_id)

    def people_of(self, channel: str) -> Mapping[str, Member]:
        """Return the people who are or were in a channel, by id."""
        return self._group("people", channel)

    def people_in_before(self, channel: str, seq: int | None) -> Iterator[str]:
        """Yield the people who are in a channel now and joined it first before a seq (None: all), in the order of
        joining."""
        return self._below(f"people in {channel}", seq)

    def channels_by(self, agent_id: str) -> Mapping[str, Channel]:
        """Return the channels that a participant created, by name."""
        return self._group("channels by", agent_id)

    # --- reading: due times of mods

    def due_keys(self, mod: str, now: int) -> Iterator[str]:
        """Yield the keys of a mod's due times that are not later than ``now``, earliest first."""
        return self._below(f"due of {mod}", now + 1)

    def count_due_times(self, mod: str) -> int:
        """Return the number of a mod's due times."""
        return self._count_order(f"due of {mod}")

    # --- reading: reactions

    def reactions_of(self, agent_id: str) -> Mapping[str, OpenReaction]:
        """Return the open reactions of an agent, by key."""
        return self._group("reactions of", agent_id)

    def reactions_named(self, reaction: str) -> Mapping[str, OpenReaction]:
        """Return the open reactions with this id, by key. Several agents may use the same id."""
        return self._group("reactions named", reaction)

    def reactions_in(self, thread_id: str) -> Mapping[str, OpenReaction]:
        """Return the open reactions to messages of a thread, by key."""
        return self._group("reactions in", thread_id)

    def reactions_to(self, agent_id: str, trigger: int) -> Mapping[str, OpenReaction]:
        """Return the open reactions of an agent to one message, by key."""
        return self._group("reactions to", f"{agent_id}/{trigger}")

    def reactions_asked_by(self, agent_id: str, cause: int) -> Mapping[str, OpenReaction]:
        """Return the open reactions to direct messages that an agent sent because of a given message, by key."""
        return self._group("reactions asked by", f"{agent_id}/{cause}")

    def reactions_by_oldest(self) -> Iterator[OpenReaction]:
        """Yield the open reactions, ordered by the oldest seq of their prompts."""
        for key in self._below("oldest", None):
            reaction: OpenReaction = self.get("reaction", key)
            yield reaction

    # --- reading: read state and questions

    def read_states_of(self, agent_id: str) -> Mapping[str, ReadState]:
        """Return a participant's read states by thread. The value under the empty id applies to all other threads."""
        return self._group("marks of", agent_id)

    def questions_of(self, agent_id: str) -> Mapping[int, Question]:
        """Return the unanswered questions to a person, by seq."""
        return self._group("questions of", agent_id)

    def may_have_questions(self, agent_id: str) -> bool:
        """Return False only if a person certainly has no questions. This check runs for every message, so it must be
        cheaper than `questions_of`."""
        return self._may_have("questions of", agent_id)

    def _may_have(self, name: str, owner: str) -> bool:
        """Return False only if a group is certainly empty."""
        group, level = (name, owner), self
        while group not in level._groups:
            if level._parent is None:
                return False
            level = level._parent
        return True

    def questions_in(self, agent_id: str, thread_id: str) -> Mapping[int, Question]:
        """Return the unanswered questions to a person in one thread, by seq."""
        return self._group("questions in", f"{agent_id}/{thread_id}")

    # --- reading: conversations

    def open_in(self, root: int) -> Mapping[str, Any]:
        """Return the open items of a conversation. They are values of several tables (`quiet`), and each key contains
        the name of its table."""
        return self._group("open in", str(root))

    def list_changed_conversations(self) -> list[int]:
        """Return the roots of the conversations in which this level has opened or closed an item."""
        return [int(owner) for name, owner in self._groups if name == "open in"]

    def reactors(self) -> Mapping[str, Participant]:
        """Return the present participants that a reactor has served at least once, by id."""
        return self._group("reactors", "")

    def deliveries_to(self, agent_id: str) -> Mapping[int, str]:
        """Return the keys of the messages that a reactor has not handled, by seq."""
        return self._group("deliveries to", agent_id)

    def count_deliveries(self, agent_id: str) -> int:
        """Return the number of messages that a reactor has not handled. The number is exact in the committed state and
        approximate in a draft."""
        group = ("deliveries to", agent_id)
        return sum(len(level._groups[group]) for level in self._levels() if group in level._groups)

    def answers_of(self, agent_id: str) -> Mapping[int, OpenDelivery]:
        """Return the messages that require an answer from a program that is not a reactor, by seq."""
        return self._group("answers of", agent_id)

    def answers_in(self, agent_id: str, thread_id: str) -> Mapping[int, OpenDelivery]:
        """Return the messages of one thread that require an answer from a program, by seq."""
        return self._group("answers in", f"{agent_id}/{thread_id}")

    def may_have_answers(self, agent_id: str) -> bool:
        """Return False only if certainly no message requires an answer from a program. This check is cheaper than
        `answers_of`."""
        return self._may_have("answers of", agent_id)

    def open_items_of(self, mod_id: str) -> Mapping[str, Any]:
        """Return the open items of a mod, by key."""
        return self._group("open items of", mod_id)

    # --- writing

    def apply_writes(self, writes: Iterable[TableWrite]) -> None:
        """Apply writes to this level."""
        for write in writes:
            name, value = write.table, write.value
            if name not in VOLATILE_TABLES:
                # Update the indexes first, because they need the old value to remove it from its groups.
                self._update_indexes(write)
            # The bottom level deletes the value. A draft stores None, which hides the value of its parent.
            if value is None and self._parent is None:
                self.tables[name].pop(write.key, None)
            else:
                self.tables[name][write.key] = value

    def apply_outcome(self, outcome: Outcome) -> None:
        """Make the outcome of an entry visible to the next entries of the batch."""
        if outcome.rows:
            self.head = outcome.rows[-1].seq
        if outcome.writes:
            self.apply_writes(outcome.writes)

    def merge(self, draft: State) -> None:
        """Merge a draft into this state after the commit (step 8). Values of cold tables are left out, because only the
        ledger keeps them."""
        # Apply only the last value of each key. The ledger never stored the values before it.
        self.apply_writes(write for write in draft.durable_writes.values() if write.table not in COLD_TABLES)
        for name in VOLATILE_TABLES:
            self.tables[name].update(draft.tables[name])
        # There is no await in this method, so other tasks never see the new head without the new values.
        self.head = draft.head
        self.stamp = draft.stamp

    def _update_indexes(self, write: TableWrite) -> None:
        """Update everything that is derived from the tables. Called just before a write is applied."""
        name, key, value = write.table, write.key, write.value
        if name in INDEXED:
            self._index(write)
        if name in self._ascending:
            keys, is_there = self._ascending[name], key in self.tables[name]
            if value is None and is_there:
                del keys[bisect_left(keys, key)]
            # If a value only changes, its key is already in the list.
            elif value is not None and not is_there:
                insort(keys, key)
        if self._parent is not None:
            self.durable_writes[name, key] = write
            # Create a ChainMap only in the few batches that change a participant, because lookups in a plain dict are
            # faster.
            if name == "participant" and self.everyone is self._parent.everyone:
                self.everyone = ChainMap(self.tables[name], self.everyone)  # type: ignore[arg-type]
            elif name == "hold" and self.takeovers is self._parent.takeovers:
                self.takeovers = ChainMap(self.tables[name], self.takeovers)  # type: ignore[arg-type]

    def _levels(self) -> Iterator[State]:
        """Yield this level and the levels below it, down to the committed state."""
        level: State | None = self
        while level is not None:
            yield level
            level = level._parent

    # --- indexes

    def _index(self, write: TableWrite) -> None:
        """Update the groups and orders of a table. Called just before a write is applied."""
        table, key, value = write.table, write.key, write.value
        before = self.get(table, key)
        if table == "delivery":
            self._index_delivery(key, before, value)
            return
        entries = groups_of(table, key, value) if value is not None else ()
        if before is not None:
            for group, name in groups_of(table, key, before):
                # Remove the value only from the groups that it leaves. In its other groups, the value is overwritten
                # below.
                if (group, name) not in entries:
                    self._set(group, name, None)
        for group, name in entries:
            self._set(group, name, value)
        if table == "participant":
            self._index_participant(key, before, value)
        elif table == "reaction":
            self._reorder("oldest", beginning_entry(key, before), beginning_entry(key, value))
        elif table == "due":
            mod, _, own_key = key.partition("/")
            self._reorder(f"due of {mod}", due_entry(own_key, before), due_entry(own_key, value))
        elif table == "member":
            channel, _, agent_id = key.partition("/")
            if self.is_person(agent_id):
                self._index_person_in(channel, agent_id, before, value)

    def _index_delivery(self, key: str, before: OpenDelivery | None, now: OpenDelivery | None) -> None:
        """Update the groups of an open delivery. This method does not use `groups_of`, because it runs twice for each
        message to an agent and must be fast."""
        known = now or before
        if known is None:
            return
        seq = int(key)
        self._set(("open in", str(known.root)), f"delivery {key}", now)
        was_waiting, waiting = before.waiting if before is not None else (), now.waiting if now is not None else ()
        # Compare sets: a thousand agents may have to handle one broadcast.
        for agent_id in waiting if not was_waiting else set(waiting).difference(was_waiting):
            self._set(("deliveries to", agent_id), seq, key)
        for agent_id in was_waiting if not waiting else set(was_waiting).difference(waiting):
            self._set(("deliveries to", agent_id), seq, None)
        if known.answers or (before is not None and before.answers):
            answers = now.answers if now is not None else ()
            for agent_id in {*known.answers, *(before.answers if before is not None else ())}:
                value = now if agent_id in answers else None
                self._set(("answers of", agent_id), seq, value)
                self._set(("answers in", f"{agent_id}/{known.thread_id}"), seq, value)

    def _index_participant(self, agent_id: str, before: Participant | None, now: Participant | None) -> None:
        self._reorder("present", registration_entry(before), registration_entry(now))
        was_person = before is not None and before.kind == "human"
        is_person = now is not None and now.kind == "human"
        self._reorder(
            "people", registration_entry(before) if was_person else None, registration_entry(now) if is_person else None
        )
        if is_person is not was_person:  # members may be loaded before participants
            for channel, member in self.memberships(agent_id).items():
                previous, current = (member if was_person else None), (member if is_person else None)
                self._index_person_in(channel, agent_id, previous, current)

    def _index_person_in(self, channel: str, agent_id: str, before: Member | None, now: Member | None) -> None:
        self._set(("people", channel), agent_id, now)
        self._reorder(f"people in {channel}", arrival_entry(agent_id, before), arrival_entry(agent_id, now))

    def _group(self, name: str, owner: str) -> Mapping[Any, Any]:
        """Return all values of a group. They are copied only if a draft has changed the group."""
        group = (name, owner)
        levels: list[dict[Any, Any]] = []
        level: State | None = self
        while level is not None:
            values = level._groups.get(group)
            if values is not None:
                levels.append(values)
                # No draft has changed the group, so return the dict of the committed state itself. A copy for each
                # query would cost too much.
                if level._parent is None and len(levels) == 1:
                    return values
            level = level._parent
        merged: dict[Any, Any] = {}
        # Go from the oldest level to the newest, so that newer values replace older ones.
        for values in reversed(levels):
            merged.update(values)
        return {key: value for key, value in merged.items() if value is not None}

    def _set(self, group: Group, key: Any, value: Any) -> None:
        values = self._groups.get(group)
        if value is not None or self._parent is not None:
            if values is None:
                values = self._groups[group] = {}
            values[key] = value
        elif values is not None:
            values.pop(key, None)
            if not values:  # delete an empty group
                del self._groups[group]

    def _reorder(self, name: str, before: tuple[int, str] | None, now: tuple[int, str] | None) -> None:
        if before == now:
            return
        order = self._orders.get(name)
        if order is None:
            order = self._orders[name] = Order()
        if before is not None:
            order.remove(before)
        if now is not None:
            order.add(now)
        if self._parent is None and not order.added:
            del self._orders[name]

    def _count_order(self, name: str) -> int:
        orders = [level._orders[name] for level in self._levels() if name in level._orders]
        return sum(len(order.added) - len(order.gone) for order in orders)

    def _below(self, name: str, number: int | None) -> Iterator[str]:
        """Yield the ids of an order below a number (None: all), ascending by number."""
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


_NO_MEMBER = Member()
_NOTHING_HANDLED = AckCursor(0)
_IDLE = Bucket()
