"""How fast one participant is read: its rate, counted where its frames come in, all its sessions together.

`guard` counts the same rate exactly, in the order of the log; here it is known at once, before anything was spent on a frame. Decides in
memory; no clock.
"""

from __future__ import annotations

LOOKS_PER_S = 100
"""At full rate the clock is looked at so often: for every frame it would cost as much as to decode one."""
OVERDRAFT = 64
"""How many frames beyond the rate are taken in, each to be answered, before the participant is not read for `PAUSE_S`."""
PAUSE_S = 0.1


class Pace:
    """What one participant may send without being looked at (``credit``, in frames), and since when it has sent too much.

    As `guard.next_arrival`: a rate of ``per_s`` with a burst of one second's worth, here in steps of a hundredth of it.
    """

    __slots__ = ("__weakref__", "_arrival", "_per_s", "_step", "beyond", "credit", "is_paused", "signals", "wait_ms")

    def __init__(self, per_s: int) -> None:
        self.credit = 0
        self.beyond = 0
        """How many frames came beyond the rate since the last pause."""
        self.wait_ms = 0
        """How long it takes until the rate allows another frame, as of the last look."""
        self.is_paused = False
        self.signals = 0.0
        """When its next signal would be due at exactly their own rate (`guard.due_next`)."""
        self._per_s = per_s
        self._step = max(1, per_s // LOOKS_PER_S)
        self._arrival = 0.0

    def look(self, now: int) -> None:
        """The credit is used up: give another step's, if the rate allows it at ``now`` (ms)."""
        due = max(self._arrival, now)
        ahead = due - now - 1000.0
        if ahead > 0:
            self.wait_ms = int(ahead) + 1
            return
        self._arrival = due + 1000.0 * self._step / self._per_s
        self.credit = self._step
