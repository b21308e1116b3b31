"""Limits the gateway's connections whose token the hub has not accepted. A new connection always gets a slot.

A connection occupies a slot until the hub has accepted the token of its request, and again after the response. If all
slots are occupied, the address with the most connections loses its oldest connection. The hub limits its pending
connections by the same rule (`network.hub.handshakes.HandshakeLimiter`). `session_pool` limits the calls whose token
was accepted.
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
"""Maximum time in which a client must send the complete header of a request, in seconds."""
MAX_UNAUTHENTICATED = 1000
"""Maximum number of connections whose token the hub has not accepted."""
LOG_EVERY_S = 60.0


class RefusalLog:
    """Counts refused connections, and logs at most one line about them per period."""

    def __init__(self, period_s: float = LOG_EVERY_S) -> None:
        self._period_s = period_s
        self._counts: Counter[str] = Counter()
        self._due: asyncio.TimerHandle | None = None

    def count(self, reason: str) -> None:
        # Log the first refusal at once and summarize the later ones. A flood of refusals must not flood the log.
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
            # Log the refusals since the last line. Otherwise the log would not show the end of a flood.
            self._due.cancel()
            self._write()
        if self._due is not None:
            self._due.cancel()


class ConnectionLimit:
    """The connections of one gateway whose token was not accepted yet, and the log of refused connections."""

    def __init__(self, places: int | None = None) -> None:
        self.limiter = HandshakeLimiter(MAX_UNAUTHENTICATED if places is None else places)
        self.refusals = RefusalLog()


class _QuietLogger(logging.LoggerAdapter[logging.Logger]):
    """Logger for uvicorn. Any client can cause uvicorn's warnings, so they are counted as refusals instead of logged
    one by one.
    """

    def __init__(self, logger: logging.Logger, refusals: RefusalLog) -> None:
        super().__init__(logger)
        self._refusals = refusals

    @property
    # Define ``level``, because uvicorn reads this attribute and `LoggerAdapter` lacks it.
    def level(self) -> int:
        return self.logger.level

    def warning(self, msg: object, *args: object, **options: Any) -> None:
        self._refusals.count(str(msg).rstrip("."))


class LimitedConnection(H11Protocol):
    """HTTP connection that is closed if a request's header is late, or if another connection needs its slot."""

    _due: asyncio.TimerHandle | None = None
    source = ""

    def __init__(self, limit: ConnectionLimit, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limit = limit
        self.logger = _QuietLogger(self.logger, limit.refusals)  # type: ignore[assignment]

    # uvicorn narrows the type of the argument too. The class of uvicorn is not typed as a subclass of asyncio's
    # protocol.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._due = self.loop.call_later(HEAD_TIMEOUT_S, transport.abort)
        self.source = source_of(transport.get_extra_info("peername"))
        # Count a connection from the start. A connection that never sends a request occupies a slot too.
        self._limit.limiter.add(self)

    def evict(self) -> None:
        """Close this connection, because a new connection needs its slot."""
        self._limit.refusals.count("ended for newcomers")
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        # Set the callback in the context before the request starts. The task that answers the request copies this
        # context.
        reset = token_accepted.set(_release_later(self))
        try:
            super().data_received(data)
        finally:
            token_accepted.reset(reset)
        # IDLE with remaining bytes means that only a part of the header has arrived.
        is_partial = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not is_partial:
            self._cancel_timeout()
        # Never restart a running timer. Otherwise a client that sends one byte at a time would never time out.
        elif self._due is None:
            self._due = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    # Count the connection again after each response, because a token is valid only for its own request. Otherwise an
    # idle connection would never count.
    def on_response_complete(self) -> None:
        if not self.transport.is_closing():
            self._limit.limiter.add(self)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        # Release the slot at once. Otherwise a lost connection could cause the eviction of a live one.
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
    """Return a function that calls `release_place` through a weak reference. A pooled session keeps the context of the
    request that opened it. Without the weak reference, this context would keep the closed connection in memory.
    """
    reference = weakref.ref(connection)

    def release() -> None:
        connection = reference()
        if connection is not None:
            connection.release_place()

    return release
