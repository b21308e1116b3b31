"""Indexes of the state. A value belongs to groups, and some values are also entries of ordered lists ("orders").

`State` updates the indexes with each write. Pure.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Any, TypeAlias

from msgspec import UNSET

from .due_time import DueTime
from .reserved_ids import skeleton
from .tables import Member, OpenReaction, Participant

Group: TypeAlias = tuple[str, str]
"""Name of a kind of group, and the owner of this group, for example a channel or an agent."""


class Order:
    """The changes that one level of the state makes to an ordered list: pairs added at this level, ascending, and pairs
    removed from lower levels."""

    __slots__ = ("added", "gone")

    def __init__(self) -> None:
        self.added: list[tuple[int, str]] = []
        self.gone: set[tuple[int, str]] = set()

    def add(self, entry: tuple[int, str]) -> None:
        """Add a pair that is not yet in the order."""
        # Registrations arrive in ascending order, so this call nearly always appends.
        insort(self.added, entry)

    def remove(self, entry: tuple[int, str]) -> None:
        """Remove a pair that is in the order."""
        at = bisect_left(self.added, entry)
        if at < len(self.added) and self.added[at] == entry:
            del self.added[at]
        else:
            self.gone.add(entry)

    def over(self, older: Iterable[tuple[int, str]]) -> Iterable[tuple[int, str]]:
        """Return the pairs of the lower levels with the changes of this level applied, ascending."""
        kept = (entry for entry in older if entry not in self.gone) if self.gone else older
        return heapq.merge(kept, self.added) if self.added else kept


def groups_of(table: str, key: str, value: Any) -> tuple[tuple[Group, Any], ...]:
    """Return the groups to which a value belongs, and the value's key in each group."""
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
            asked = (
                (("questions of", agent_id), int(seq)),
                (("questions in", f"{agent_id}/{value.thread_id}"), int(seq)),
            )
            # The root of a question stored by an older release is unknown.
            return (*asked, (("open in", str(value.root)), f"question {key}")) if value.root else asked
        case "stored":
            return ((("near a quota", ""), key),) if value.is_near else ()
        case "token":
            return (("tokens", value.agent_id), key), (("looks", skeleton(value.agent_id)), value.agent_id)
        case "login":
            return ((("logins", value.agent_id), key),)
        case "participant":  # participants and tokens are never deleted, so entries of "looks" never have to be removed
            looks = (("looks", skeleton(key)), key)
            groups: tuple[tuple[Group, Any], ...] = (looks,)
            if value.fault is not UNSET or value.is_lost:
                groups += ((("faults", ""), key),)
            if value.fence and value.removed_seq is None:
                groups += ((("reactors", ""), key),)
            return groups
        case "reaction":
            head = value.trigger_head
            groups = (
                (("reactions of", value.agent_id), key),
                (("reactions named", value.reaction), key),
                (("reactions in", head.thread_id), key),
                (("reactions to", f"{value.agent_id}/{value.trigger}"), key),
                (("open in", str(head.root)), f"reaction {key}"),
            )
            if head.kind == "direct" and head.cause is not None:
                groups += ((("reactions asked by", f"{head.sender_id}/{head.cause}"), key),)
            return groups
        case "open_item":
            return (("open in", str(value.root)), f"open_item {key}"), (("open items of", key.partition("/")[0]), key)
        case _:
            return ()


def registration_entry(participant: Participant | None) -> tuple[int, str] | None:
    """Return a participant's entry in the order of registration, or None for a removed or unknown participant."""
    if participant is None or participant.removed_seq is not None:
        return None
    return participant.registered_seq, participant.agent_id


def arrival_entry(agent_id: str, member: Member | None) -> tuple[int, str] | None:
    """Return a member's entry in the order of joining, or None if the member has left the channel."""
    return (member.spans[0][0], agent_id) if member is not None and member.is_in else None


def beginning_entry(key: str, reaction: OpenReaction | None) -> tuple[int, str] | None:
    """Return a reaction's entry in the order of the oldest seq in each prompt, or None without a reaction."""
    return (reaction.oldest, key) if reaction is not None else None


def due_entry(key: str, due: DueTime | None) -> tuple[int, str] | None:
    """Return a due time's entry in the order of its mod's due times, or None without a due time."""
    return (due.at, key) if due is not None else None


INDEXED = frozenset(
    {
        "member",
        "token",
        "participant",
        "channel",
        "reaction",
        "attempt",
        "stored",
        "mark",
        "question",
        "login",
        "open_item",
        "due",
        "delivery",
    }
)
"""Tables whose values belong to groups or orders."""
