"""Sessions of participants that call through other protocols. Each token has one session, and the number of sessions is
limited.

A caller sends ``ID:TOKEN``, which only the hub checks. The hub does not push messages to these sessions.
`network.receive` returns messages on request. A session stays open between calls. A session is closed after `IDLE_S`
seconds without calls, or earlier if another caller needs its slot.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from roundelay.network.client import NetworkClient
from roundelay.network.errors import NotAuthenticated, Overloaded
from roundelay.network.frames import is_id

from .conversations import Conversations

MAX_OPEN = 256
"""Maximum number of open sessions in the pool."""
MAX_PROVING = 32
"""Maximum number of callers whose tokens the hub is checking at the same time. These callers occupy no session slot
until the hub accepts their tokens.
"""
MAX_CALLS = 32
"""Maximum number of concurrent calls of one participant. The limit is half of the reads that the hub allows per
session.
"""
REFUSAL_S = 0.5
"""Delay before a participant with too many concurrent calls gets the error, in seconds."""
WAIT_PART_S = 5.0
"""Maximum time that a single call to the hub waits for a message, in seconds. Longer waits are split into several
calls. The limit matters because the hub does not notice when a caller disconnects, and keeps the read occupied until
the call ends.
"""
IDLE_S = 600.0
CONNECT_TIMEOUT_S = 10.0
HOW = "Send `Authorization: Bearer ID:TOKEN`; roundelay token create ID makes a token."


token_accepted: ContextVar[Callable[[], None]] = ContextVar("token_accepted", default=lambda: None)
"""Callback for the current request. The callback runs when the hub has accepted the caller's token."""


class Credentials(NamedTuple):
    """The id that a caller claims, and the token that proves the claim."""

    agent_id: str
    token: str

    @property
    def key(self) -> tuple[str, str]:
        """Key that identifies the caller in tables. The key contains a hash instead of the token."""
        return self.agent_id, hashlib.sha256(self.token.encode()).hexdigest()


def read_authorization(header: str | None) -> Credentials:
    """Read ``Bearer ID:TOKEN`` or its equivalent in ``Basic`` form from an Authorization header. Raises
    `NotAuthenticated`.
    """
    scheme, _, value = (header or "").strip().partition(" ")
    if scheme.lower() == "basic":
        try:
            value = base64.b64decode(value, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise NotAuthenticated(f"The Authorization header is not valid Basic authentication. {HOW}") from error
    elif scheme.lower() != "bearer":
        raise NotAuthenticated(f"A call needs a participant's token. {HOW}")
    agent_id, colon, token = value.strip().partition(":")
    # Check the form of the token here, so that malformed tokens cause no connections to the hub.
    if not (is_id(agent_id) and colon and token and token.isascii() and token.isprintable()):
        raise NotAuthenticated(f"The token must be ID:TOKEN, with the participant's id before it. {HOW}")
    return Credentials(agent_id, token)


async def receive_messages(client: NetworkClient, *, after: int | None, limit: int, wait_s: float) -> dict[str, Any]:
    """Call `network.receive`. Wait up to ``wait_s`` seconds if there is no message.

    The waiting calls only peek (``peek``), and a final call fetches the messages. If the caller disconnects, this
    function is cancelled, and the messages stay undelivered.
    """
    loop = asyncio.get_running_loop()
    until, args = loop.time() + wait_s, {"after": after, "limit": limit}
    while (left_s := until - loop.time()) > 0:
        look = {**args, "peek": True, "wait_ms": math.ceil(min(left_s, WAIT_PART_S) * 1000)}
        page = await client.call("network.receive", look)
        if page["messages"] or page.get("damaged"):
            break
    received: dict[str, Any] = await client.call("network.receive", args)
    return received


@dataclass
class _PooledSession:
    client: NetworkClient
    conversations: Conversations
    used_at: float
    calls: int = 0


class SessionPool:
    """Sessions of many callers with one node. Use this class as ``async with SessionPool(url) as pool``."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._sessions: dict[tuple[str, str], _PooledSession] = {}
        self._proving = 0
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}
        """Lock of each token. Without the locks, concurrent first calls with one token would open several sessions."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        sessions, self._sessions = list(self._sessions.values()), {}
        await asyncio.gather(*(session.client.close() for session in sessions))

    @asynccontextmanager
    async def session(self, credentials: Credentials) -> AsyncIterator[NetworkClient]:
        """Provide the caller's session for one call. Raises the same errors as `conversations`."""
        async with self.conversations(credentials) as conversations:
            yield conversations.client

    @asynccontextmanager
    async def conversations(
        self, credentials: Credentials, *, is_cleanup: bool = False
    ) -> AsyncIterator[Conversations]:
        """Provide the caller's conversations with agents for one call.

        ``is_cleanup`` marks work that remains from an admitted call, such as stopping its reaction. Cleanup work is
        exempt from the limit of concurrent calls. Raises the hub's refusal (`NotAuthenticated`, `Forbidden`,
        `ConnectError`), or `Overloaded`.
        """
        session = self._sessions.get(credentials.key)
        # Replace a session that has lost its connection permanently. A lost session stays in the pool until its next
        # use.
        if session is None or session.client.failure is not None:
            session = await self._open(credentials)
        if session.calls >= MAX_CALLS and not is_cleanup:
            await asyncio.sleep(REFUSAL_S)  # slow down clients that retry without a delay
            raise Overloaded(
                f"{credentials.agent_id} has {MAX_CALLS} concurrent calls here, the maximum. Wait for one to end.", 1000
            )
        session.calls += 1  # no await since the check, so concurrent calls cannot exceed the limit
        token_accepted.get()()
        try:
            yield session.conversations
        finally:
            session.calls -= 1
            session.used_at = asyncio.get_running_loop().time()

    async def _open(self, credentials: Credentials) -> _PooledSession:
        """Open a session. The session occupies a slot in the pool only after the hub has accepted the token. Raises the
        hub's refusal.
        """
        key = credentials.key
        # Refuse before connecting. Otherwise callers with wrong tokens could fill the hub's limit of pending
        # connections.
        if self._proving >= MAX_PROVING:
            raise Overloaded("Too many new callers at once. Try again.", 1000)
        self._proving += 1
        try:
            async with self._locks.setdefault(key, asyncio.Lock()):
                existing = self._sessions.get(key)
                if existing is not None and existing.client.failure is None:
                    return existing  # a concurrent call has opened it
                client = NetworkClient(
                    credentials.agent_id,
                    self.url,
                    kind=None,
                    token=credentials.token,
                    deliver=False,
                    connect_timeout_s=CONNECT_TIMEOUT_S,
                )
                try:
                    await client.connect()
                except NotAuthenticated as error:  # the hub's text does not fit HTTP callers
                    raise NotAuthenticated(f"This token is not valid for {credentials.agent_id}. {HOW}") from error
                try:
                    await self._make_room()
                except Overloaded:
                    await client.close()
                    raise
                now = asyncio.get_running_loop().time()
                session = self._sessions[key] = _PooledSession(client, Conversations(client), now)
                return session
        finally:
            self._proving -= 1
            # Locks are needed only while sessions are being opened. Clear the locks, so that wrong tokens cannot use up
            # memory.
            if not self._proving:
                self._locks.clear()

    async def _make_room(self) -> None:
        """Close idle sessions. If all slots are still occupied, close the session that has been unused for the longest
        time. Raises `Overloaded` if every session is in use.
        """
        now = asyncio.get_running_loop().time()
        resting = sorted((session.used_at, key) for key, session in self._sessions.items() if not session.calls)
        evicted = [key for used_at, key in resting if now - used_at > IDLE_S]
        if len(self._sessions) - len(evicted) >= MAX_OPEN:
            if len(evicted) == len(resting):
                raise Overloaded("Every session of this gateway is in use. Wait for one to end.", 1000)
            evicted.append(resting[len(evicted)][1])
        # Remove the sessions from the pool before the first await. Otherwise a call that arrives meanwhile could get a
        # closing session.
        clients = [self._sessions.pop(key).client for key in evicted]
        await asyncio.gather(*(client.close() for client in clients))
