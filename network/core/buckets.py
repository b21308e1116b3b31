"""Counters that are kept in memory only: rates, today's usage, and answers without a cause.

The counters are empty when the hub starts. So a restart forgets at most one second of rates and one step of a daily
quota (`limits`). No IO, no clock.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

Rates: TypeAlias = tuple[float, float]
"""The fields ``sends`` and ``roots`` of a bucket."""


class AnswerCount(Struct, frozen=True, gc=False):
    """Number of answers without a cause that an agent has sent since a person wrote to it (`uncaused_answers`).

    ``since`` is the newest seq of the log before the first counted answer. ``last`` is the seq of the newest counted
    answer.
    """

    count: int = 0
    last: int = 0
    since: int = 0
    is_reported: bool = False
    """Whether the agent was notified that it is stopped."""
    thread_id: str = ""
    """Thread of the newest answer. Empty if a person reads the thread."""
    in_a_row: int = 0
    """Number of answers in a row in that thread, up to the newest one."""


class Bucket(Struct, frozen=True, gc=False):
    """The counters of one participant (the key).

    ``sends`` and ``roots`` are times in ms (`limits.next_arrival`). At exactly the allowed rate, the next entry and the
    next message without a cause would be due at these times. ``bytes`` and ``messages`` are the amounts stored on
    ``day``. Below ``next_bytes`` and ``next_messages`` a message needs no check against the quota
    (`limits.count_stored`).
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
        """Return a copy of this bucket with new rates."""
        return Bucket(
            *rates, self.day, self.bytes, self.messages, self.next_bytes, self.next_messages, self.answer_count
        )


class RecentMessages:
    """Newest seqs of messages since the hub started, for `uncaused_answers`.

    ``delivered`` maps each participant to the newest message that was sent to it alone. ``group_posts`` maps each
    broadcast or channel to three values: the newest seq, its sender, and the newest seq of another sender. ``newest``
    is the newest group post of all. ``from_people`` maps each address to the newest message of a person and its sender.
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
