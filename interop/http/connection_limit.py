"""Connections of a gateway that no token vouches for: their number is bounded, and a newcomer always finds a place.

A connection is a newcomer until the hub has taken the token of its request, and again when that is answered. Newcomers
share places as those of the hub do (`network.hub.admission.HandshakeLimiter`): the address with the most of them loses the oldest.
What callers do with their tokens is bounded by `callers`.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import h11

from roundelay.interop.session_pool import token_taken
from roundelay.network.extras import needs
from roundelay.network.hub.handshakes import HandshakeLimiter, source_of

with needs("gateway"):
    from uvicorn.protocols.http.h11_impl import H11Protocol


log = logging.getLogger(__name__)

HEAD_TIMEOUT_S = 10.0
"""Maximum time without the whole head of a request on an open connection."""
MAX_NEWCOMERS = 1000
"""Connections at a time for which no token was taken."""
LOG_EVERY_S = 60.0


class RefusalLog:
    """Counts refusals, and logs them in at most one line per period."""

    def __init__(self, period_s: float = LOG_EVERY_S) -> None:
        self._period_s = period_s
        self._counts: Counter[str] = Counter()
        self._due: asyncio.TimerHandle | None = None

    def note(self, reason: str) -> None:
        self._counts[reason] += 1
        if self._due is None:
            self._write()

    def _write(self) -> None:
        self._due = None
        if not self._counts:
            return
        told = ", ".join(f"{reason} ({number})" for reason, number in sorted(self._counts.items()))
        log.warning("connections of callers were refused: %s", told)
        self._counts.clear()
        self._due = asyncio.get_running_loop().call_later(self._period_s, self._write)

    def close(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._write()
        if self._due is not None:
            self._due.cancel()


class Arrivals:
    """The newcomers of one gateway."""

    def __init__(self, places: int | None = None) -> None:
        self.gate = HandshakeLimiter(MAX_NEWCOMERS if places is None else places)
        self.refusals = RefusalLog()


class _QuietLogger(logging.LoggerAdapter[logging.Logger]):
    """uvicorn's logger, whose warnings are refusals that anybody can cause."""

    def __init__(self, logger: logging.Logger, refusals: RefusalLog) -> None:
        super().__init__(logger)
        self._refusals = refusals

    @property
    def level(self) -> int:
        return self.logger.level

    def warning(self, msg: object, *args: object, **options: Any) -> None:
        self._refusals.note(str(msg).rstrip("."))


class HeadInTime(H11Protocol):
    """An HTTP connection that is cut unless each request's head comes in time, or when others need its place."""

    _due: asyncio.TimerHandle | None = None
    source = ""

    def __init__(self, arrivals: Arrivals, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._arrivals = arrivals
        self.logger = _QuietLogger(self.logger, arrivals.refusals)  # type: ignore[assignment]

    # uvicorn narrows the argument in the same way, and is not typed as a subclass of what asyncio declares
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._due = self.loop.call_later(HEAD_TIMEOUT_S, transport.abort)
        self.source = source_of(transport.get_extra_info("peername"))
        self._arrivals.gate.add(self)

    def evict(self) -> None:
        """End the connection: another one needs its place."""
        self._arrivals.refusals.note("ended for newcomers")
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        # the task that answers the request takes this along
        reset = token_taken.set(_leave_later(self))
        try:
            super().data_received(data)
        finally:
            token_taken.reset(reset)
        is_partial = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not is_partial:
            self._cancel_due()
        elif self._due is None:
            self._due = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def on_response_complete(self) -> None:
        if not self.transport.is_closing():
            self._arrivals.gate.add(self)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrivals.gate.remove(self)
        self._cancel_due()
        super().connection_lost(exc)

    def leave_newcomers(self) -> None:
        """The hub has taken the token of the request under way."""
        if not self.transport.is_closing():
            self._arrivals.gate.remove(self)

    def _cancel_due(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None


def _leave_later(protocol: HeadInTime) -> Callable[[], None]:
    """A call of `HeadInTime.leave_newcomers` that keeps no connection in memory: sessions take it along."""
    known = weakref.ref(protocol)

    def leave() -> None:
        found = known()
        if found is not None:
            found.leave_newcomers()

    return leave
