"""Delays between the attempts of a retry loop.

Pure: each retry loop counts its failures, sleeps and adds jitter itself. It passes the number of failures to `Backoff`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff: ``first_s``, then ``factor`` times the previous delay, up to ``max_s``."""

    first_s: float
    max_s: float
    factor: float = 2.0

    def delay_s(self, failures: int) -> float:
        """Return the delay in seconds after ``failures`` failures in a row (at least 1)."""
        try:
            return min(self.first_s * self.factor ** (failures - 1), self.max_s)
        except OverflowError:  # after days of failures the power no longer fits into a float
            return self.max_s
