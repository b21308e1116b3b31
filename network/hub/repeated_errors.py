"""A failure that repeats is logged once: each distinct reason when it appears and once a minute while it lasts, then
its end.

A storage that fails is tried again twenty times in a minute, and a participant that cannot be served comes back at
once. A line for each would hide the first, which says why. This module writes the log, nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

REPEAT_AFTER_S = 60.0
MAX_REASONS = 20
"""Beyond so many the reasons are no longer told apart: one that holds a number may be new each time."""


class RepeatedErrorLog:
    """One thing that fails for a while, for one or for many, and what is said of it: ``what`` before each reason,
    ``over`` at the end.

    With ``new_id`` each reason is said with an id to quote, which `fail` gives too.
    """

    def __init__(
        self, what: str, over: str, now_s: Callable[[], float], new_id: Callable[[], str] | None = None
    ) -> None:
        self._what = what
        self._over = over
        self._now_s = now_s
        self._new_id = new_id
        self._failing: dict[str, float] = {}
        """For whom, and when it did last; the longest ago first."""
        self._said: dict[str, tuple[float, str]] = {}
        """By reason: when it was said last, and the id to quote."""
        self._began_s = 0.0
        self._failures = 0

    @property
    def is_failing(self) -> bool:
        """Whether it lasts: asked before `end` where that is often called."""
        return bool(self._failing)

    def record(self, error: Exception, who: str = "", *, is_defect: bool = False) -> str:
        """It has failed, for somebody; gives the id to quote, the same for the same reason. A defect is said with its
        traceback."""
        now_s, reason = self._now_s(), str(error) or type(error).__name__
        if not self._failing:
            self._began_s, self._failures = now_s, 0
            self._said.clear()
        self._failing.pop(who, None)
        self._failing[who] = now_s
        self._failures += 1
        if reason not in self._said and len(self._said) >= MAX_REASONS:
            reason = "..."
        said_at_s, quote = self._said.get(reason, (None, ""))
        if said_at_s is not None and now_s - said_at_s < REPEAT_AFTER_S:
            return quote
        quote = quote or (self._new_id() if self._new_id is not None else "")
        more = {"quote": quote} if quote else {}
        if said_at_s is None:
            log.error("%s: %s", self._what, error, exc_info=error if is_defect else None, extra=more)
        else:
            for_s = now_s - self._began_s
            log.error("%s, for %.0f s and %d times now: %s", self._what, for_s, self._failures, error, extra=more)
        self._said[reason] = now_s, quote
        return quote

    def record_success(self, who: str = "") -> None:
        """It has succeeded for somebody. It is over when it has for everybody for whom it failed of late: who has not
        tried again for `REPEAT_AFTER_S` may never do."""
        if not self._failing:
            return
        now_s = self._now_s()
        self._failing.pop(who, None)
        while self._failing and now_s - next(iter(self._failing.values())) > REPEAT_AFTER_S:
            del self._failing[next(iter(self._failing))]
        if not self._failing:
            log.warning("%s, after %.1f s; failures: %d", self._over, now_s - self._began_s, self._failures)
