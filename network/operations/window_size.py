"""Size of a window: how many messages of each thread it shows. Also says whether the caller has nobody else to write
to."""

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
    """Number for threads outside the trigger's place. None: ``per_thread``."""

    after: int
    """The trigger's thread shows only messages after this seq."""

    def limit(self, thread_id: str, seqs: list[int]) -> list[int]:
        """Return the seqs of a thread that the window may show. ``seqs`` must be ascending."""
        if not self.after or thread_id != self.trigger.thread_id:
            return seqs
        return seqs[bisect_right(seqs, self.after) :]

    def count_shown(self, thread_id: str, groups: Iterable[HeadGroup | None]) -> int:
        """Return the number of messages to show of a thread that has messages of these groups."""
        own = self.trigger
        if self.per_other is None or thread_id == own.thread_id:
            return self.per_thread
        # A channel and its reply threads are one place. Each direct thread is a place of its own.
        is_near = own.kind in ("channel", "broadcast") and any(
            group is not None and group.head.to == own.to for group in groups
        )
        return self.per_thread if is_near else self.per_other


def is_alone(reading: Reading, trigger: MessageHead) -> bool:
    """Return whether the network had no participants other than the caller and the trigger's sender at the trigger."""
    # Stops at the first other participant. Later registrations do not count, so that a replay gets the same answer.
    registered = reading.hub.state.registered_before(trigger.seq)
    return all(participant.agent_id in (reading.origin.agent_id, trigger.sender_id) for participant in registered)
