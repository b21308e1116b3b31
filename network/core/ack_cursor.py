"""`AckCursor`: which messages a participant has handled. A value of the table ``floor`` (`tables`)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from msgspec import Struct


class AckCursor(Struct, frozen=True):
    """Acknowledged position of a participant: everything up to ``seq`` is handled except the seqs in ``open``.
    ``above`` lists the later seqs that were acknowledged one by one. Both lists are ascending.

    A cursor never moves back, because a restart must not deliver a handled message again.
    """

    seq: int
    above: tuple[int, ...] = ()
    open: tuple[int, ...] = ()

    def with_handled(self, seqs: Iterable[int]) -> AckCursor:
        """Return this cursor with more seqs handled."""
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
