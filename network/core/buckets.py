"""Counters that live in memory only. They start empty with the hub. No IO, no clock."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

Rates: TypeAlias = tuple[float, float]
"""A bucket's ``sends`` and ``roots``."""


class AnswerCount(Struct, frozen=True, gc=False):
    """How often an agent has answered without a cause since a person spoke to it (`shares`): ``since`` that seq,
    the last time at ``last``."""

    count: int = 0
    last: int = 0
    since: int = 0
    is_reported: bool = False
    """Whether it was said that it has to stop."""
    thread_id: str = ""
    """The thread of the last of them, if no person reads it."""
    in_a_row: int = 0
    """How many of the last ones were in that thread."""


class Bucket(Struct, frozen=True, gc=False):
    """What one participant (the key) does just now, in memory only: when its next entry, and its next message without a
    cause, would be due at exactly their rates (`limits.next_arrival`), and what it has stored on ``day``; below
    ``next_bytes`` and ``next_messages`` of that, nothing is to be looked at or kept (`limits.count_stored`). With its
    answers without a cause."""

    sends: float = 0.0
    roots: float = 0.0
    day: int = 0
    bytes: int = 0
    messages: int = 0
    next_bytes: int = 0
    next_messages: int = 0
    answer_count: AnswerCount = AnswerCount()

    def at_rates(self, rates: Rates) -> Bucket:
        """This bucket, its rates counted on."""
        return Bucket(
            *rates, self.day, self.bytes, self.messages, self.next_bytes, self.next_messages, self.answer_count
        )


class RecentMessages:
    """The newest seqs of what was said, since the hub's start (`shares`): ``given`` to each participant,
    ``shared`` at each place of many, with its sender and the newest of anybody else; ``newest`` at any such place.
    ``people``, by address, are those of people, and who said them."""

    __slots__ = ("delivered", "from_people", "group_posts", "newest")

    def __init__(self) -> None:
        self.delivered: dict[str, int] = {}
        self.group_posts: dict[str, tuple[int, str, int]] = {}
        self.newest = 0
        self.from_people: dict[str, tuple[int, str]] = {}

    def record_group_post(self, to: str, seq: int, sender: str) -> None:
        """Somebody has said something at a place of many."""
        known = self.group_posts.get(to)
        other = 0 if known is None else known[2] if known[1] == sender else known[0]
        self.group_posts[to] = (seq, sender, other)
        self.newest = seq
