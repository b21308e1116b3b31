"""`RepeatedErrorLog`: logs an error when it first appears and then once a minute while it lasts. Also logs the
recovery.

The hub retries a failing storage many times a minute, and a participant that cannot be served reconnects at once. If
each failure were logged, the first line, which has the reason, would be hard to find. Writes only to the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

REPEAT_AFTER_S = 60.0
MAX_REASONS = 20
"""Maximum number of reasons that are logged separately. All further reasons count as one. Without this limit, a reason
that contains a changing number would be logged each time."""


class RepeatedErrorLog:
    """Log of an operation that may fail for a while, for one subject or for many subjects.

    ``what`` starts each line about a failure, and ``over`` starts the line about the recovery. With ``new_id``, each
    reason gets an id that users can quote. The id is logged, and `record` returns it.
    """

    def __init__(
        self, what: str, over: str, now_s: Callable[[], float], new_id: Callable[[], str] | None = None
    ) -> None:
        self.is_failing = False
        """Whether any subject fails. Callers on the hot path read this attribute to avoid calling `record_success`."""
        self._what = what
        self._over = over
        self._now_s = now_s
        self._new_id = new_id
        self._failing: dict[str, float] = {}
        """Time of the last failure of each subject, oldest first."""
        self._logged: dict[str, tuple[float, str]] = {}
        """Time of the last log line and the id to quote, for each reason."""
        self._began_s = 0.0
        self._failures = 0

    def record(self, error: Exception, subject: str = "", *, is_defect: bool = False) -> str:
        """Record a failure and return the id to quote. The same reason keeps its id. A bug is logged with its
        traceback."""
        now_s, reason = self._now_s(), str(error) or type(error).__name__
        if not self._failing:
            self._began_s, self._failures = now_s, 0
            # A new outage logs each reason again, even within a minute of the last line.
            self._logged.clear()
        self.is_failing = True
        # Remove the subject first, so that the dict stays sorted by the time of the last failure.
        self._failing.pop(subject, None)
        self._failing[subject] = now_s
        self._failures += 1
        if reason not in self._logged and len(self._logged) >= MAX_REASONS:
            reason = "..."
        logged_at_s, quote = self._logged.get(reason, (None, ""))
        if logged_at_s is not None and now_s - logged_at_s < REPEAT_AFTER_S:
            return quote
        quote = quote or (self._new_id() if self._new_id is not None else "")
        extra = {"quote": quote} if quote else {}
        if logged_at_s is None:
            log.error("%s: %s", self._what, error, exc_info=error if is_defect else None, extra=extra)
        else:
            for_s = now_s - self._began_s
            log.error("%s, for %.0f s and %d times so far: %s", self._what, for_s, self._failures, error, extra=extra)
        self._logged[reason] = now_s, quote
        return quote

    def record_success(self, subject: str = "") -> None:
        """Record that a subject succeeded. The outage ends when every subject that failed recently has succeeded. A
        subject that has not tried for `REPEAT_AFTER_S` does not count, because it may never try again."""
        if not self._failing:
            return
        now_s = self._now_s()
        self._failing.pop(subject, None)
        # Drop old failures. Otherwise a participant that failed and never returned would keep the outage open forever.
        while self._failing and now_s - next(iter(self._failing.values())) > REPEAT_AFTER_S:
            del self._failing[next(iter(self._failing))]
        if not self._failing:
            self.is_failing = False
            log.warning("%s, after %.1f s; failures: %d", self._over, now_s - self._began_s, self._failures)
