"""Queue of a client's requests that the hub has not answered. Both the client and the hub limit their number.

`RequestQueue` decides which requests are sent and which requests wait. A request is in one of three states:

    unanswered   sent, and sent again in each new session until it is answered
    waiting      not sent, because the maximum number or size of unanswered requests is reached
    held         a call that is not sent, because the hub accepts only ``max_reads`` calls at a time

`link` owns the connection. It adds requests, reports answers, and after a reconnect asks the queue to send all
unanswered requests again. This module does no IO and reads no clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from roundelay.network.errors import PING_UNANSWERED, Closed, InternalError, InvalidArguments, RoundelayError, TooLarge

from .transport import MAX_FRAME_BYTES

MAX_UNANSWERED, MAX_UNANSWERED_BYTES = 4096, 16 * 1024 * 1024
"""Maximum number of unanswered requests, and their maximum size in bytes. A single larger request is sent alone."""
MAX_LOSSES = 3
"""Number of connections that may end with a code of `BLAMING_CODES` while the same request is the oldest unanswered
request. After that, the request fails and is not sent again."""
BLAMING_CODES = (1002, 1003, 1007, 1011, 4400, 4413)
"""Close codes of a hub that could not accept a frame of the client. Network failures count against no request. They
have other codes, or the reason `PING_UNANSWERED`."""
ANSWER_TOO_LARGE = 1009
"""Close code that a client sends after it received a frame larger than its limit (RFC 6455, 7.4.1)."""


class _Request(Struct):
    frame: bytes
    answer: asyncio.Future[Any]
    losses: int = 0

    def resolve(self, outcome: object) -> None:
        """Complete the request with its answer, or with the error to raise instead."""
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

    ``send`` writes a frame to the current connection, and drops the frame if there is no connection.
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
        """Send a request now, or as soon as there is room, and return its answer. Raises the error in the hub's answer.
        Raises `InvalidArguments` for a key that is in use, and `TooLarge` for a frame that is larger than the hub
        accepts."""
        if key in self._unanswered or key in self._waiting or key in self._held:
            raise InvalidArguments(f"Another request with the id {key[2:]!r} is still unanswered; choose another id.")
        self.check_size(frame)
        request = _Request(frame, asyncio.get_running_loop().create_future())
        # Hold only calls, because a message or a record must not wait until reads are answered.
        if key.startswith("c:") and (self._held or not self._may_call()):
            self._held[key] = request
        else:
            self._admit(key, request)
        try:
            return await request.answer
        finally:
            if request.answer.cancelled():
                # The caller was cancelled. The hub may still store the message, but the client does not send it again.
                self._remove(key)
                self._send_waiting()

    def resend(self, limits: Mapping[str, int]) -> None:
        """Send all unanswered requests again in a new session. ``limits`` are the limits of the hub."""
        self._limits = limits
        # Keep the order in which the requests were first sent, because the hub orders messages by arrival.
        for key, request in list(self._unanswered.items()):
            self._send_request(key, request)
        self._send_waiting()

    def answer(self, key: str, outcome: object) -> None:
        """Complete a request with its answer, or with the error to raise instead."""
        request = self._remove(key)
        # Send waiting requests before the caller continues. The caller may send another request at once, which must not
        # overtake requests that have waited longer.
        self._send_waiting()
        if request is not None:
            request.resolve(outcome)

    def count_loss(self, closed: Closed) -> None:
        """After a lost connection, fail the requests that would also end the next session. If they were repeated, no
        later request could ever be answered."""
        if closed.code == ANSWER_TOO_LARGE:
            error = TooLarge(
                f"The hub's answer to one of the unanswered calls is larger than {MAX_FRAME_BYTES} bytes. Request less "
                "data per call."
            )
            # It is unknown which call has the large answer, so fail all calls. Repeating the calls would end every
            # session. Messages and records have small answers.
            for key in [key for key in self._unanswered if key.startswith("c:")]:
                self.answer(key, error)
        elif closed.code in BLAMING_CODES and closed.reason != PING_UNANSWERED and self._unanswered:
            # Count the loss against the oldest request only. If a later request caused the loss, that request becomes
            # the oldest as soon as the earlier requests are answered, and then fails.
            key, oldest = next(iter(self._unanswered.items()))
            oldest.losses += 1
            if oldest.losses >= MAX_LOSSES:
                reason = (
                    f"The hub ended {MAX_LOSSES} connections while this request was the oldest unanswered request "
                    f"({closed}). The client does not repeat it. It is unknown whether the hub stored it."
                )
                self.answer(key, InternalError(reason))

    def end(self, error: RoundelayError) -> None:
        """Make every request raise this error, and send no further requests."""
        self._is_ended = True
        for key in [*self._unanswered, *self._waiting, *self._held]:
            self.answer(key, error)

    def check_size(self, frame: bytes) -> None:
        """Raise `TooLarge` for a frame that is larger than the hub's ``max_frame_bytes``."""
        max_bytes = self._limits.get("max_frame_bytes")
        if max_bytes is not None and len(frame) > max_bytes:
            raise TooLarge(
                f"The frame has {len(frame)} bytes, but this hub allows {max_bytes} (max_frame_bytes). Send the content "
                "in parts, or send a reference to it."
            )

    def _admit(self, key: str, request: _Request) -> None:
        if key.startswith("c:"):
            self._calls.add(key)
        # Requests that already wait are sent first, even if this request would fit now.
        if self._waiting or not self._has_room(request):
            self._waiting[key] = request
        else:
            self._send_request(key, request)

    def _send_request(self, key: str, request: _Request) -> None:
        # A request that is sent again in a new session is already counted. Counting it twice would reduce the room with
        # each reconnect.
        self._unanswered_bytes += 0 if key in self._unanswered else len(request.frame)
        self._unanswered[key] = request
        try:
            # Check the size again. A restarted hub may have lower limits, and would close each session at this frame.
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
        # A single request may exceed the maximum size if no other request is unanswered. Otherwise it would wait
        # forever.
        return not self._unanswered or (len(self._unanswered) < MAX_UNANSWERED and size <= MAX_UNANSWERED_BYTES)
