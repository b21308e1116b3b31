"""Limit of the gateway's connections without an accepted token. A new connection always gets a slot.

A connection counts until the hub has accepted the token of its request, and again after the response. These connections
share slots like pending connections of the hub (`network.hub.handshakes.HandshakeLimiter`): the address with the most
connections loses its oldest. `session_pool` limits the calls with an accepted token.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import h11

from roundelay.interop.session_pool import token_accepted
from roundelay.network.extras import needs
from roundelay.network.hub.handshakes import HandshakeLimiter, source_of

with needs("gateway"):
    from uvicorn.protocols.http.h11_impl import H11Protocol


log = logging.getLogger(__name__)

HEAD_TIMEOUT_S = 10.0
"""Maximum time until a client has sent the complete header of a request, in seconds."""
MAX_UNAUTHENTICATED = 1000
"""Maximum number of connections without an accepted token."""
LOG_EVERY_S = 60.0


class RefusalLog:
    """Counts refusals and logs them in at most one line per period."""

    def __init__(self, period_s: float = LOG_EVERY_S) -> None:
        self._period_s = period_s
        self._counts: Counter[str] = Counter()
        self._due: asyncio.TimerHandle | None = None

    def count(self, reason: str) -> None:
        # Log the first refusal at once and summarize the rest. A flood of refusals must not become a flood of lines.
        self._counts[reason] += 1
        if self._due is None:
            self._write()

    def _write(self) -> None:
        self._due = None
        if not self._counts:
            return
        counts = ", ".join(f"{reason} ({number})" for reason, number in sorted(self._counts.items()))
        log.warning("connections of callers were refused: %s", counts)
        self._counts.clear()
        self._due = asyncio.get_running_loop().call_later(self._period_s, self._write)

    def close(self) -> None:
        if self._due is not None:
            # Log the refusals since the last line. Otherwise the end of a flood would not be logged.
            self._due.cancel()
            self._write()
        if self._due is not None:
            self._due.cancel()


class ConnectionLimit:
    """The connections of one gateway without an accepted token."""

    def __init__(self, places: int | None = None) -> None:
        self.limiter = HandshakeLimiter(MAX_UNAUTHENTICATED if places is None else places)
        self.refusals = RefusalLog()


class _QuietLogger(logging.LoggerAdapter[logging.Logger]):
    """uvicorn's logger. Any client can cause its warnings, so they are counted as refusals instead of logged."""

    def __init__(self, logger: logging.Logger, refusals: RefusalLog) -> None:
        super().__init__(logger)
        self._refusals = refusals

    @property
    # uvicorn reads the level directly, and `LoggerAdapter` has no such attribute.
    def level(self) -> int:
        return self.logger.level

    def warning(self, msg: object, *args: object, **options: Any) -> None:
        self._refusals.count(str(msg).rstrip("."))


class LimitedConnection(H11Protocol):
    """HTTP connection that is closed if the header of a request is late, or if a new connection needs its slot."""

    _due: asyncio.TimerHandle | None = None
    source = ""

    def __init__(self, limit: ConnectionLimit, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limit = limit
        self.logger = _QuietLogger(self.logger, limit.refusals)  # type: ignore[assignment]

    # uvicorn narrows the argument in the same way, and its class is not typed as a subclass of asyncio's protocol
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._due = self.loop.call_later(HEAD_TIMEOUT_S, transport.abort)
        self.source = source_of(transport.get_extra_info("peername"))
        # Count a connection from the start: a connection that never sends a request occupies a slot too.
        self._limit.limiter.add(self)

    def evict(self) -> None:
        """Close the connection, because another connection needs its slot."""
        self._limit.refusals.count("ended for newcomers")
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        # Tasks copy the context in which they start. The task that answers this request finds its connection there.
        reset = token_accepted.set(_release_later(self))
        try:
            super().data_received(data)
        finally:
            token_accepted.reset(reset)
        # IDLE with remaining bytes means that a part of a header has arrived and the rest is missing.
        is_partial = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not is_partial:
            self._cancel_timeout()
        # Never restart a running timer. Otherwise a client that sends one byte at a time would never be late.
        elif self._due is None:
            self._due = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    # A token counts only for its own request. Otherwise an idle connection could stay uncounted forever.
    def on_response_complete(self) -> None:
        if not self.transport.is_closing():
            self._limit.limiter.add(self)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        # Forget the connection at once. A lost connection in a counted slot would evict a live connection for nothing.
        self._limit.limiter.remove(self)
        self._cancel_timeout()
        super().connection_lost(exc)

    def release_place(self) -> None:
        """Stop counting this connection, because the hub has accepted the token of its request."""
        if not self.transport.is_closing():
            self._limit.limiter.remove(self)

    def _cancel_timeout(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None


def _release_later(connection: LimitedConnection) -> Callable[[], None]:
    """Return a function that calls `release_place` through a weak reference. A session of the pool keeps the context
    of the request that opened it, and must not keep that connection in memory.
    """
    reference = weakref.ref(connection)

    def release() -> None:
        connection = reference()
        if connection is not None:
            connection.release_place()

    return release
