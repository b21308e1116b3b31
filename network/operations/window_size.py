"""Size of a window: the number of messages of each thread that it shows. Also determines whether the network has other
participants."""

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
    """Maximum number of messages of threads outside the trigger's direct thread, channel or broadcasts. None means
    ``per_thread``."""

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
        # A channel and its reply threads belong together. Each direct thread is separate.
        is_near = own.kind in ("channel", "broadcast") and any(
            group is not None and group.head.to == own.to for group in groups
        )
        return self.per_thread if is_near else self.per_other


def is_alone(reading: Reading, trigger: MessageHead) -> bool:
    """Return whether the network had no participants other than the caller and the trigger's sender at the trigger."""
    # Later registrations do not count, so that a replay gets the same answer.
    registered = reading.hub.state.registered_before(trigger.seq)
    return all(participant.agent_id in (reading.origin.agent_id, trigger.sender_id) for participant in registered)
