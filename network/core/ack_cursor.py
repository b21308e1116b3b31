"""Ack cursors, which record the messages that a participant has handled. They are stored in the table ``floor``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from msgspec import Struct


class AckCursor(Struct, frozen=True):
    """Acknowledged position of a participant. All messages up to ``seq`` are handled, except the seqs in ``open``.
    ``above`` lists later seqs that were acknowledged individually. Both lists are ascending.

    A cursor never moves back, because a handled message must not be delivered again after a restart.
    """

    seq: int
    above: tuple[int, ...] = ()
    open: tuple[int, ...] = ()

    def with_handled(self, seqs: Iterable[int]) -> AckCursor:
        """Return a copy of this cursor with more seqs marked as handled."""
        handled = set(seqs)
        above = {*self.above, *(seq for seq in handled if seq > self.seq)}
        return AckCursor(self.seq, tuple(sorted(above)), tuple(seq for seq in self.open if seq not in handled))

    def is_handled(self, seq: int) -> bool:
        if seq <= self.seq:
            return not _contains(self.open, seq)
        return _contains(self.above, seq)


def _contains(ascending: tuple[int, ...], seq: int) -> bool:
    at = bisect_left(ascending, seq)
    return at < len(ascending) and ascending[at] == seq
