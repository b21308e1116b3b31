"""Participants on raw frames that reconnect after every loss, repeat unanswered frames, and record everything that
they receive.

The participants use plain `websockets` and `json`, like `tests.support.wire`, because these tests do not trust the
project's own client.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake

from tests.support.node import Node
from tests.support.wire import WireSession

SILENCE_S = 20.0


@dataclass(frozen=True, slots=True)
class Heard:
    """One delivery."""

    seq: int
    attempt: int
    sender_id: str
    message_id: str
    thread_id: str
    content: Any

    @classmethod
    def read(cls, frame: dict[str, Any]) -> Heard:
        message = frame["message"]
        return cls(
            message["seq"], frame["attempt"], message["sender_id"], message["message_id"], message["thread_id"], message["content"]
        )  # fmt: skip


class Peer:
    """One participant. Tests send with `send`, wait with `settled`, and call `come_back` and `lose`.

    ``answers`` has every answer by ``message_id``. ``heard`` has every delivery of all sessions in order, and
    ``heard_seqs`` their seqs. `until` checks its condition at each frame, so the condition must be cheap.
    ``on_heard`` may answer a delivery. Without it, each delivery is acknowledged alone, or ``ack_every`` deliveries
    at once, or (with 0) none. With ``keeps_cursor``, the participant resumes from its own cursor instead of the hub's
    ack cursor.
    """

    def __init__(
        self, node: Node, agent_id: str, *, ack_every: int = 1, keeps_cursor: bool = False, **hello: Any
    ) -> None:
        self.agent_id = agent_id
        self.answers: dict[str, list[dict[str, Any]]] = {}
        self.heard: list[Heard] = []
        self.heard_seqs: set[int] = set()
        self.notices: list[dict[str, Any]] = []
        self.welcomes: list[dict[str, Any]] = []
        self.on_heard: Callable[[Heard], dict[str, Any] | None] | None = None
        self._node = node
        self._ack_every = ack_every
        self._keeps_cursor = keeps_cursor
        self._hello = hello
        self._session: WireSession | None = None
        self._reading: asyncio.Task[None] | None = None
        self._unanswered: dict[str, str] = {}
        self._taken = 0
        self._has_left = False
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    @property
    def unanswered(self) -> int:
        return len(self._unanswered)

    @property
    def stored(self) -> dict[str, int]:
        """Return the seq of each acknowledged message."""
        return {
            message_id: found["seq"]
            for message_id, answers in self.answers.items()
            for found in answers[:1]
            if found["type"] == "stored"
        }

    # --- the connection

    async def come_back(self) -> None:
        """Connect, send hello, and repeat the unanswered frames in their order."""
        assert self._session is None
        hello = dict(self._hello)
        if self._keeps_cursor and self.welcomes:
            hello["resume"] = {"epoch": self.welcomes[-1]["network"]["epoch"], "cursor": self._cursor()}
        session = await self._node.connect()
        welcome = await session.hello(self.agent_id, token=self._node.token_of(self.agent_id), **hello)
        self.welcomes.append(welcome)
        self._has_left = False
        self._session = session
        self._reading = asyncio.create_task(self._read(session))
        for raw in list(self._unanswered.values()):
            await self._push(raw)

    async def come_back_if_possible(self) -> bool:
        """Call `come_back`. Return False if the node is down again."""
        try:
            await self.come_back()
        except (OSError, ConnectionClosed, InvalidHandshake, AssertionError):
            self._session = None
            return False
        return True

    async def lose(self) -> None:
        """Drop the connection without a close frame."""
        session = self._session
        if session is not None:
            session.socket.transport.abort()
        await self.lost()

    async def leave(self) -> None:
        """Send ``bye``, so that the hub processes all earlier frames. Deliveries after it do not count."""
        self._has_left = True
        await self._push('{"type":"bye"}')
        await self.lost()

    async def lost(self) -> None:
        """Wait until the connection has ended."""
        if self._reading is not None:
            await self._reading

    def _cursor(self) -> int:
        return self.heard[-1].seq if self.heard else self.welcomes[0]["cursor"]

    # --- sending

    async def send(self, message_id: str, to: str, content: Any, **fields: Any) -> None:
        """Send without waiting for the answer. While the connection is down, the message waits for the next one."""
        frame = {"type": "send", "message_id": message_id, "to": to, "content": content, **fields}
        raw = json.dumps(frame)
        self._unanswered[message_id] = raw
        await self._push(raw)

    async def call(self, op: str, **args: Any) -> None:
        """Call an operation and wait for its result."""
        call_id = f"{op}-{len(self.answers)}"
        raw = json.dumps({"type": "call", "call_id": call_id, "op": op, "args": args})
        self._unanswered[call_id] = raw
        await self._push(raw)
        await self.until(lambda: call_id in self.answers)
        assert self.answers[call_id][-1]["type"] == "result", self.answers[call_id]

    async def settled(self) -> None:
        """Wait until every frame has an answer."""
        await self.until(lambda: not self._unanswered)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until a condition is true that frames may change."""
        if not is_so():
            changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((is_so, changed))
            taken = -1
            while not (await asyncio.wait({changed}, timeout=SILENCE_S))[0]:
                assert self._taken > taken, f"{self.agent_id} heard nothing for {SILENCE_S} s; {self.unanswered=}"
                taken = self._taken

    async def _push(self, raw: str) -> None:
        if self._session is None:
            return
        try:
            await self._session.socket.send(raw)
        except ConnectionClosed:
            return  # the reader notices the loss, and unanswered frames are repeated

    # --- reading

    async def _read(self, session: WireSession) -> None:
        try:
            for frame in session.unread:
                await self._take(frame)
            async for raw in session.socket:
                await self._take(json.loads(raw))
        except ConnectionClosed:
            pass
        finally:
            self._session = None

    async def _take(self, frame: dict[str, Any]) -> None:
        self._taken += 1
        match frame["type"]:
            case "stored" | "error" | "result":
                request_id = frame.get("message_id") or frame.get("call_id")
                assert request_id is not None, frame
                self.answers.setdefault(request_id, []).append(frame)
                self._unanswered.pop(request_id, None)
            case "deliver" if not self._has_left:
                heard = Heard.read(frame)
                self.heard.append(heard)
                self.heard_seqs.add(heard.seq)
                reply = self.on_heard(heard) if self.on_heard is not None else None
                if reply is not None:
                    await self._push(json.dumps(reply))
                elif self._ack_every == 1:
                    await self._push(f'{{"type":"ack","seq":{heard.seq},"only":true}}')
                elif self._ack_every and len(self.heard) % self._ack_every == 0:
                    await self._push(f'{{"type":"ack","seq":{heard.seq}}}')
            case "notice":
                self.notices.append(frame)
        for waiting in self._waiting[:]:
            is_so, changed = waiting
            if is_so():
                self._waiting.remove(waiting)
                if not changed.done():
                    changed.set_result(None)
