"""Counters that exist only in memory: rates, today's usage, and answers without a cause.

The counters are empty when the hub starts. A restart therefore forgets at most one second of each rate and one step of
each daily quota (`limits`). No IO, no clock.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

Rates: TypeAlias = tuple[float, float]
"""Values of the fields ``sends`` and ``roots`` of a bucket."""


class AnswerCount(Struct, frozen=True, gc=False):
    """Number of answers without a cause that an agent has sent since a person last wrote to this agent
    (`uncaused_answers`).

    ``since`` is the newest seq of the log before the first counted answer. ``last`` is the seq of the newest counted
    answer.
    """

    count: int = 0
    last: int = 0
    since: int = 0
    is_reported: bool = False
    """Whether the agent has already received a message that its answers are stopped."""
    thread_id: str = ""
    """Thread of the newest answer. Empty if a person reads this thread."""
    in_a_row: int = 0
    """Number of consecutive answers in ``thread_id``, including the newest answer."""


class Bucket(Struct, frozen=True, gc=False):
    """Rate and quota counters of one participant. The key is the participant's id.

    ``sends`` and ``roots`` are times in ms (`limits.next_arrival`). At exactly the allowed rate, the participant's next
    entry would arrive at ``sends``, and its next message without a cause at ``roots``. ``bytes`` and ``messages`` are
    the amounts stored on ``day``. The quota is checked only when one of these amounts reaches ``next_bytes`` or
    ``next_messages`` (`limits.count_stored`).
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
        """Return a copy of this bucket with other rates."""
        return Bucket(
            *rates, self.day, self.bytes, self.messages, self.next_bytes, self.next_messages, self.answer_count
        )


class RecentMessages:
    """Newest seqs of messages since the hub started, used by the module `uncaused_answers`.

    ``delivered`` maps each participant to the newest message that was sent only to this participant. ``group_posts``
    maps the broadcast address and each channel to three values: the newest seq, its sender, and the newest seq from any
    other sender. ``newest`` is the newest seq of all group posts. ``from_people`` maps each address to the newest
    message from a person, and to this person's id.
    """

    __slots__ = ("delivered", "from_people", "group_posts", "newest")

    def __init__(self) -> None:
        self.delivered: dict[str, int] = {}
        self.group_posts: dict[str, tuple[int, str, int]] = {}
        self.newest = 0
        self.from_people: dict[str, tuple[int, str]] = {}

    def record_group_post(self, to: str, seq: int, sender: str) -> None:
        """Record a broadcast or a message to a channel."""
        previous = self.group_posts.get(to)
        newest_of_others = 0 if previous is None else previous[2] if previous[1] == sender else previous[0]
        self.group_posts[to] = (seq, sender, newest_of_others)
        self.newest = seq
