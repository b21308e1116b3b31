"""Delays between the attempts of a retry loop.

Each retry loop counts its failures, sleeps and adds jitter itself. `Backoff` only computes the delay from the number of
failures.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff. The first delay is ``first_s``, and each later delay is ``factor`` times longer, up to
    ``max_s``."""

    first_s: float
    max_s: float
    factor: float = 2.0

    def delay_s(self, failures: int) -> float:
        """Return the delay in seconds after a number of failures in a row. ``failures`` must be at least 1."""
        try:
            return min(self.first_s * self.factor ** (failures - 1), self.max_s)
        except OverflowError:  # after days of failures, the exponential no longer fits into a float
            return self.max_s
