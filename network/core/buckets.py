"""Counters that live in memory only: rates, today's usage, and answers without a cause.

They start empty with the hub, so a restart forgets at most one second of rates and one step of a daily quota
(`limits`). No IO, no clock.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

Rates: TypeAlias = tuple[float, float]
"""The ``sends`` and ``roots`` of a bucket."""


class AnswerCount(Struct, frozen=True, gc=False):
    """Answers that an agent sent without a cause since a person wrote to it (`uncaused_answers`).

    ``since`` is the head of the log before the first counted answer, ``last`` the seq of the newest one.
    """

    count: int = 0
    last: int = 0
    since: int = 0
    is_reported: bool = False
    """Whether the agent was notified that it is stopped."""
    thread_id: str = ""
    """Thread of the newest answer, if no person reads it."""
    in_a_row: int = 0
    """Number of the newest answers in that thread."""


class Bucket(Struct, frozen=True, gc=False):
    """The counters of one participant (the key).

    ``sends`` and ``roots`` are the times in ms at which the next entry, and the next message without a cause, would be
    due at exactly their rates (`limits.next_arrival`). ``bytes`` and ``messages`` were stored on ``day``. Below
    ``next_bytes`` and ``next_messages`` a message needs no check against the quota (`limits.count_stored`).
    """

    sends: float = 0.0
    roots: float = 0.0
    day: int = 0
    bytes: int = 0
    messages: int = 0
    next_bytes: int = 0
    next_messages: int = 0
    answer_count: AnswerCount = AnswerCount()

    def at_rates(self, rates: Rates) -> Bucket:
        """Return this bucket with new rates."""
        return Bucket(
            *rates, self.day, self.bytes, self.messages, self.next_bytes, self.next_messages, self.answer_count
        )


class RecentMessages:
    """Newest seqs of messages since the hub started, for `uncaused_answers`.

    ``delivered`` holds the newest seq that each participant received alone. ``group_posts`` holds, for each broadcast
    or channel, the newest seq, its sender, and the newest seq of any other sender. ``newest`` is the newest group post
    anywhere. ``from_people`` holds, by address, the newest message of a person and its sender.
    """

    __slots__ = ("delivered", "from_people", "group_posts", "newest")

    def __init__(self) -> None:
        self.delivered: dict[str, int] = {}
        self.group_posts: dict[str, tuple[int, str, int]] = {}
        self.newest = 0
        self.from_people: dict[str, tuple[int, str]] = {}

    def record_group_post(self, to: str, seq: int, sender: str) -> None:
        """Record a message to a channel or a broadcast."""
        previous = self.group_posts.get(to)
        newest_of_others = 0 if previous is None else previous[2] if previous[1] == sender else previous[0]
        self.group_posts[to] = (seq, sender, newest_of_others)
        self.newest = seq
