"""The size of a window: how many messages of each thread it shows. The module also checks whether the network has other
participants.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from roundelay.network.core.rows import MessageHead

from .head_cache import HeadGroup
from .reading import Reading


class WindowSize(NamedTuple):
    """Number of messages that a window shows of each thread."""

    trigger: MessageHead
    per_thread: int
    per_other: int | None
    """Maximum number of messages of each thread outside the trigger's direct thread, channel or broadcasts. None means
    ``per_thread``."""

    after: int
    """Seq after which messages of the trigger's thread are shown, or 0 to show all of them."""

    def limit(self, thread_id: str, seqs: list[int]) -> list[int]:
        """Return those seqs of a thread that the window may show. ``seqs`` must be ascending."""
        if not self.after or thread_id != self.trigger.thread_id:
            return seqs
        return seqs[bisect_right(seqs, self.after) :]

    def count_shown(self, thread_id: str, groups: Iterable[HeadGroup | None]) -> int:
        """Return how many messages of a thread the window shows. ``groups`` are the groups of the thread's messages."""
        own = self.trigger
        if self.per_other is None or thread_id == own.thread_id:
            return self.per_thread
        # Treat a channel and its reply threads as one place. Each direct thread is a separate place.
        is_near = own.kind in ("channel", "broadcast") and any(
            group is not None and group.head.to == own.to for group in groups
        )
        return self.per_thread if is_near else self.per_other


def is_alone(reading: Reading, trigger: MessageHead) -> bool:
    """Return whether the network had no participants except the caller and the trigger's sender at the time of the
    trigger."""
    # Ignore later registrations, so that a replay gets the same answer.
    registered = reading.hub.state.registered_before(trigger.seq)
    return all(participant.agent_id in (reading.origin.agent_id, trigger.sender_id) for participant in registered)
