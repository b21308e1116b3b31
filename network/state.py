"""The network's state: what `apply` reads and what a commit changes, in the tables of `tables`.

A `State` answers from its own tables, then from its parent's: the hub's state is the bottom, and each batch works on a draft on
top of it that is merged after the commit or thrown away. Changes are `Put`s; the ledger stores the same puts in the transaction of
the rows that caused them, so that a start loads tables and replays nothing. No IO, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .tables import COLD_TABLES, VOLATILE_TABLES, Channel, Floor, Member, Participant, Put, Table


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
        found: Participant | None = self.get("participant", agent_id)
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
            name, value = put.table, put.value
            table = self._tables.get(name)
            if table is None:
                table = self._tables[name] = {}
            if value is None and self._parent is None:
                table.pop(put.key, None)
            else:
                table[put.key] = value
            if name in _INDEXED:
                self._index(put)

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

    def _index(self, put: Put) -> None:
        if put.table == "member":
            self._index_member(put)
        elif put.table == "token" and put.value is not None:
            self._token_owners.add(put.value.agent_id)
        elif put.table == "participant" and put.value is not None and put.value.kind == "human":
            self.people = {**self.people, put.key: put.value}

    def _index_member(self, put: Put) -> None:
        channel, _, agent_id = put.key.partition("/")
        member: Member = put.value if put.value is not None else _NEVER
        if channel not in self._members:  # copied once per draft, so that the parent stays as it is
            self._members[channel] = dict(self.members(channel))
        self._members[channel][agent_id] = member
        if agent_id not in self._memberships:
            self._memberships[agent_id] = dict(self.memberships(agent_id))
        self._memberships[agent_id][channel] = member


_INDEXED = frozenset({"member", "token", "participant"})
"""Tables of which more is kept than their values."""
_NEVER = Member()
_UNTOUCHED = Floor(0)
