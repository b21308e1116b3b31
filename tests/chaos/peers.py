"""Participants of the chaos tests: the project's own client, and a record of all frames on each of its connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from roundelay.network.client import Cursor, NetworkClient
from roundelay.network.client.transport import WebSocketTransport, Wire
from roundelay.network.errors import ConnectError


@dataclass
class SessionRecord:
    """The hub's frames in one session."""

    welcome: dict[str, Any]
    delivered: list[tuple[int, int]] = field(default_factory=list)
    """(seq, attempt), in order of arrival."""

    def repeats(self) -> int:
        return len(self.delivered) - len(set(self.delivered))

    def is_in_order(self) -> bool:
        seqs = [self.welcome["cursor"], *(seq for seq, attempt in self.delivered if attempt == 1)]
        return seqs == sorted(set(seqs))


class _RecordingWire:
    def __init__(self, wire: Wire, sessions: list[SessionRecord]) -> None:
        self._wire = wire
        self._sessions = sessions
        self._session: SessionRecord | None = None

    @property
    def is_full(self) -> bool:
        return self._wire.is_full

    def send(self, data: bytes) -> None:
        self._wire.send(data)

    async def frames(self) -> AsyncIterator[bytes]:
        async for data in self._wire.frames():
            frame = json.loads(data)
            if frame["type"] == "welcome":
                self._session = SessionRecord(frame)
                self._sessions.append(self._session)
            elif frame["type"] == "deliver":
                assert self._session is not None
                self._session.delivered.append((frame["message"]["seq"], frame["attempt"]))
            yield data

    async def drop(self) -> None:
        await self._wire.drop()


CONNECT_TIMEOUT_S = 2.0
"""Time that these clients wait for a welcome, in seconds. The timeout is short because the proxy lets some clients
wait forever.
"""


class RecordingTransport:
    """The client's WebSocket transport. ``sessions`` records the frames of each session."""

    def __init__(self, url: str) -> None:
        self.sessions: list[SessionRecord] = []
        self._transport = WebSocketTransport(url, CONNECT_TIMEOUT_S)

    async def connect(self) -> Wire:
        return _RecordingWire(await self._transport.connect(), self.sessions)


@dataclass
class Received:
    """The messages that each agent received. An event signals each change."""

    by_agent: dict[str, dict[int, Any]] = field(default_factory=dict)
    """Content by agent and seq."""
    again: int = 0
    """Number of messages that a client passed to its program again."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, agent_id: str, seq: int, content: Any) -> None:
        mine = self.by_agent.setdefault(agent_id, {})
        self.again += seq in mine
        assert mine.setdefault(seq, content) == content
        self.changed.set()

    async def until(self, expected: dict[str, set[int]], timeout_s: float) -> dict[str, int]:
        """Wait until every agent has the expected messages. Return the number of missing messages by agent if the
        timeout expires first.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while any(self.lacking(expected).values()):
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            pass
        return {agent_id: count for agent_id, count in self.lacking(expected).items() if count}

    def lacking(self, expected: dict[str, set[int]]) -> dict[str, int]:
        return {agent_id: len(seqs - self.by_agent.get(agent_id, {}).keys()) for agent_id, seqs in expected.items()}


class ChaosPeer:
    """One client behind the proxy. The client sends continuously and acknowledges its deliveries, some of them late."""

    def __init__(
        self, agent_id: str, url: str, token: str, received: Received, random: Random, resume: Cursor | None
    ) -> None:
        self.agent_id = agent_id
        self.stored: dict[str, tuple[str, Any, int]] = {}
        """Address, content and seq of each answered message, by message ID."""
        self.transport = RecordingTransport(url)
        self.client = NetworkClient(
            agent_id, token=token, resume=resume, transport=self.transport, connect_timeout_s=CONNECT_TIMEOUT_S
        )
        self._received = received
        self._random = random

    async def connect(self) -> None:
        """Join. The client itself does not retry its first connection."""
        while True:
            try:
                await self.client.connect()
            except ConnectError:
                continue
            return

    async def send_until(self, is_over: asyncio.Event, name: str, addresses: list[str], pause_s: float) -> None:
        """Send messages of 1 to 3,000 characters one after the other, until ``is_over`` is set."""
        number = 0
        while not is_over.is_set():
            number += 1
            message_id, to = f"{name}-{number}", self._random.choice(addresses)
            content = {"n": number, "from": name, "text": "é" * self._random.choice((1, 100, 100, 1500))}
            stored = await self.client.send(to, content, message_id=message_id)
            assert message_id not in self.stored
            self.stored[message_id] = (to, content, stored.seq)
            await asyncio.sleep(self._random.random() * pause_s)

    async def listen(self) -> None:
        """Read deliveries until cancelled."""
        late = []
        async for delivery in self.client.deliveries():
            self._received.take(self.agent_id, delivery.message.seq, delivery.message.content)
            if self._random.random() < 0.2:
                late.append(delivery)
            else:
                await delivery.ack()
            if len(late) > 10:
                for older in late:
                    await older.ack()
                late.clear()
