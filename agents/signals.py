"""What an agent lets others see while it works: that it thinks, that it uses a tool. Sent beside the reactions, and
dropped when it gets too much."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Literal

from roundelay.network.client import NetworkClient
from roundelay.network.errors import RoundelayError

from .events import Event, OnEvent, RemoteCall
from .live import LivePieces, describe_call

SignalKind = Literal["thinking", "tool", "delta"]

MAX_SIGNALS = 256

_logger = logging.getLogger(__name__)


class Display:
    """What is seen of an agent's reactions while they run: by ``on_event``, and by signals in their threads. It never
    waits: a full queue of signals drops the newest, since it must never hold up a reaction."""

    def __init__(self, agent_id: str, on_event: OnEvent | None) -> None:
        self._agent_id = agent_id
        self._on_event = on_event
        self._queue: asyncio.Queue[tuple[SignalKind, dict[str, object], str, int | None]]
        self._queue = asyncio.Queue(maxsize=MAX_SIGNALS)
        self._triggers: dict[object, int] = {}  # by reaction, as long as it is under way
        self._pieces = LivePieces(partial(self._put, "delta"))

    def begin(self, reaction: str, thread_id: str, trigger: int) -> None:
        """A reaction begins. What is seen of it is for those alone who may know of its trigger."""
        self._triggers[reaction] = trigger
        self._put("thinking", {"reaction": reaction, "active": True}, thread_id)

    def end(self, reaction: str, thread_id: str) -> None:
        self._pieces.end(reaction)
        self._put("thinking", {"reaction": reaction, "active": False}, thread_id)
        self._triggers.pop(reaction, None)

    def tell(self, event: Event, thread_id: str, *, is_watched: bool, shows_text: bool) -> None:
        """Pass an event on; calls to the thread's readers, and what streams if a person watches. ``shows_text``: the
        model's own text goes to that thread."""
        body = describe_call(event, is_watched=is_watched)
        if body is not None:
            self._put("tool", body, thread_id, is_own=not isinstance(event, RemoteCall))
        if is_watched:  # nobody else does
            self._pieces.take(event, thread_id, shows_text=shows_text)
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:  # of who listens: it must not end what it listens to
                _logger.exception("on_event failed", extra={"agent_id": self._agent_id})

    async def send(self, client: NetworkClient) -> None:
        """Send the signals as they come, for ever."""
        while True:
            kind, body, thread_id, trigger = await self._queue.get()
            try:
                await client.signal(kind, body, thread_id=thread_id, trigger=trigger)
            except RoundelayError as error:
                _logger.debug("signal refused", extra={"kind": kind, "code": error.code})

    def close(self) -> None:
        self._pieces.close()

    def _put(self, kind: SignalKind, body: dict[str, object], thread_id: str, *, is_own: bool = True) -> None:
        """``is_own`` is False of what is only passed on, for which half of the queue is enough."""
        if self._queue.qsize() < (MAX_SIGNALS if is_own else MAX_SIGNALS // 2):
            self._queue.put_nowait((kind, body, thread_id, self._triggers.get(body["reaction"])))
