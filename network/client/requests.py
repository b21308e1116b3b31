"""Requests of a client that the hub has not answered. Both the client and the hub limit their number.

`RequestQueue` decides which requests are sent and which ones wait. A request is in one of three states:

    unanswered   sent, and sent again by each new session until it is answered; in the order of sending
    waiting      without room among the unanswered ones; in the order of asking
    held         a call beyond the hub's ``max_reads``, which the hub would refuse

`link` owns the connection. It adds requests, reports answers, and asks the queue to send everything again. No IO and no
clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from roundelay.network.errors import Closed, InternalError, InvalidArguments, RoundelayError, TooLarge

from .transport import MAX_FRAME_BYTES

MAX_UNANSWERED, MAX_UNANSWERED_BYTES = 4096, 16 * 1024 * 1024
"""Maximum number and size of unanswered requests. A single larger request is sent alone."""
MAX_LOSSES = 3
"""Number of connections that a request may end while it is the oldest unanswered one, each with a code of
`BLAMING_CODES`."""
BLAMING_CODES = (1002, 1003, 1007, 1011, 4400, 4413)
"""Close codes of a hub that refuses what the client sent. A network failure has another code, so no request is
blamed."""
ANSWER_TOO_LARGE = 1009
"""Close code of a client that received a frame beyond its limit (RFC 6455, 7.4.1)."""


class _Request(Struct):
    frame: bytes
    answer: asyncio.Future[Any]
    losses: int = 0

    def resolve(self, outcome: object) -> None:
        """Set the answer, or the error to raise instead."""
        if self.answer.done():
            return
        if isinstance(outcome, RoundelayError):
            self.answer.set_exception(outcome)
            self.answer.exception()  # mark it as retrieved, because the caller may have been cancelled
        else:
            self.answer.set_result(outcome)


class RequestQueue:
    """The requests of one link, by key. A key is a prefix with an id: ``m:`` for a message, ``r:`` for a record, ``c:``
    for a call.

    ``send`` writes a frame to the current connection, and drops the frame without one.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._limits: Mapping[str, int] = {}
        self._unanswered: dict[str, _Request] = {}
        self._unanswered_bytes = 0
        self._waiting: dict[str, _Request] = {}
        self._held: dict[str, _Request] = {}
        self._calls: set[str] = set()
        """Keys of the calls that are unanswered or waiting."""
        self._is_ended = False

    async def ask(self, key: str, frame: bytes) -> Any:
        """Send a frame now, or as soon as there is room, and return its answer. Raises the error in the hub's answer.
        Raises `InvalidArguments` for a key in use, and `TooLarge` for a frame that would make the hub close the
        connection."""
        if key in self._unanswered or key in self._waiting or key in self._held:
            raise InvalidArguments(f"A request with the id {key[2:]!r} is unanswered; choose another id.")
        self.check_size(frame)
        request = _Request(frame, asyncio.get_running_loop().create_future())
        # Only calls are held. A message or a record must not wait behind too many reads.
        if key.startswith("c:") and (self._held or not self._may_call()):
            self._held[key] = request
        else:
            self._admit(key, request)
        try:
            return await request.answer
        finally:
            if request.answer.cancelled():
                # The caller gave up. The hub may still store the message, but the client does not send it again.
                self._remove(key)
                self._send_waiting()

    def resend(self, limits: Mapping[str, int]) -> None:
        """Send all unanswered requests again in a new session. The arguments are the limits of its hub."""
        self._limits = limits
        # Keep the order of the first sending: the hub orders messages by arrival, and repeats keep their ids.
        for key, request in list(self._unanswered.items()):
            self._send_request(key, request)
        self._send_waiting()

    def answer(self, key: str, outcome: object) -> None:
        """Complete a request with its answer, or with the error to raise instead."""
        request = self._remove(key)
        # Send waiting requests before the caller runs. The caller may send another request at once, which must not
        # overtake requests that have waited longer.
        self._send_waiting()
        if request is not None:
            request.resolve(outcome)

    def count_loss(self, closed: Closed) -> None:
        """Give up requests that would end the next session too. Otherwise no later request would ever be answered."""
        if closed.code == ANSWER_TOO_LARGE:
            error = TooLarge(
                f"The hub's answer to one of the unanswered calls is larger than {MAX_FRAME_BYTES} bytes. Ask for less "
                "at a time."
            )
            # The call with the large answer is unknown, so give up all calls: repeating them would end every session.
            # Messages and records have small answers.
            for key in [key for key in self._unanswered if key.startswith("c:")]:
                self.answer(key, error)
        elif closed.code in BLAMING_CODES and self._unanswered:
            # Blame only the oldest request. If a later request is at fault, it becomes the oldest as soon as earlier
            # ones are answered. Then it is given up.
            key, oldest = next(iter(self._unanswered.items()))
            oldest.losses += 1
            if oldest.losses >= MAX_LOSSES:
                reason = (
                    f"The hub ended {MAX_LOSSES} connections while this request was the oldest without an answer "
                    f"({closed}). It is not repeated, and whether the hub stored it is unknown."
                )
                self.answer(key, InternalError(reason))

    def end(self, error: RoundelayError) -> None:
        """Make every request raise this error. No later request is sent."""
        self._is_ended = True
        for key in [*self._unanswered, *self._waiting, *self._held]:
            self.answer(key, error)

    def check_size(self, frame: bytes) -> None:
        """Raise `TooLarge` for a frame beyond the hub's ``max_frame_bytes``."""
        max_bytes = self._limits.get("max_frame_bytes")
        if max_bytes is not None and len(frame) > max_bytes:
            raise TooLarge(
                f"The frame has {len(frame)} bytes, and this hub allows {max_bytes} (max_frame_bytes). Send it in "
                "parts, or a reference to it."
            )

    def _admit(self, key: str, request: _Request) -> None:
        if key.startswith("c:"):
            self._calls.add(key)
        # Requests that already wait go first, even if this one would fit.
        if self._waiting or not self._has_room(request):
            self._waiting[key] = request
        else:
            self._send_request(key, request)

    def _send_request(self, key: str, request: _Request) -> None:
        # A repeat in a new session is already counted. Counting it twice would shrink the room with each reconnect.
        self._unanswered_bytes += 0 if key in self._unanswered else len(request.frame)
        self._unanswered[key] = request
        try:
            # Check again: a hub may come back with lower limits, and would close each session at this frame.
            self.check_size(request.frame)
        except TooLarge as error:
            self._remove(key)
            request.resolve(error)
        else:
            self._send(request.frame)

    def _remove(self, key: str) -> _Request | None:
        self._calls.discard(key)
        request = self._unanswered.pop(key, None)
        if request is None:
            return self._waiting.pop(key, None) or self._held.pop(key, None)
        self._unanswered_bytes -= len(request.frame)
        return request

    def _send_waiting(self) -> None:
        """Send requests that waited for room, then the calls that the hub accepts now."""
        # ``_is_ended``: `end` completes one request after another. Without this check, each completion would send the
        # next request.
        while self._waiting and not self._is_ended and self._has_room(next(iter(self._waiting.values()))):
            key = next(iter(self._waiting))
            self._send_request(key, self._waiting.pop(key))
        while self._held and not self._is_ended and self._may_call():
            key = next(iter(self._held))
            self._admit(key, self._held.pop(key))

    def _may_call(self) -> bool:
        max_calls = self._limits.get("max_reads")
        return max_calls is None or len(self._calls) < max_calls

    def _has_room(self, request: _Request) -> bool:
        size = self._unanswered_bytes + len(request.frame)
        # A single request may exceed the maximum size. Without other requests under way, it would otherwise wait
        # forever.
        return not self._unanswered or (len(self._unanswered) < MAX_UNANSWERED and size <= MAX_UNANSWERED_BYTES)
