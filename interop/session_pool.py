"""Who calls: the sessions of participants that come by another protocol, one for each token, bounded in number.

A caller shows ``ID:TOKEN``; the hub alone judges it. Its session is delivered nothing (`network.receive` gives what is
asked for), lives from one call to the next, and is closed when others need its place or nobody has called for a while.
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
"""Sessions at a time."""
MAX_PROVING = 32
"""Callers at a time whose token the hub has yet to take: they take nobody's place."""
MAX_CALLS = 32
"""Calls of one participant at a time: half of the reads that the hub takes of a session."""
REFUSAL_S = 0.5
"""How long whoever has too many calls under way waits for the answer that says so."""
WAIT_PART_S = 5.0
"""So long at most a call of the hub waits for a message: whoever has given up holds a read of its session no longer."""
IDLE_S = 600.0
CONNECT_TIMEOUT_S = 10.0
HOW = "Send `Authorization: Bearer ID:TOKEN`; roundelay token create ID makes a token."


token_taken: ContextVar[Callable[[], None]] = ContextVar("token_taken", default=lambda: None)
"""Called once the hub has taken the token of the request that this task answers."""


class Credentials(NamedTuple):
    """Who somebody says to be, and what proves it."""

    agent_id: str
    token: str

    @property
    def key(self) -> tuple[str, str]:
        """The same for the same caller; holds no token."""
        return self.agent_id, hashlib.sha256(self.token.encode()).hexdigest()


def read_authorization(header: str | None) -> Credentials:
    """Read ``Bearer ID:TOKEN``, or the same as ``Basic``. Raises `NotAuthenticated`."""
    scheme, _, value = (header or "").strip().partition(" ")
    if scheme.lower() == "basic":
        try:
            value = base64.b64decode(value, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise NotAuthenticated(f"The Authorization header is no Basic one. {HOW}") from error
    elif scheme.lower() != "bearer":
        raise NotAuthenticated(f"A call needs a participant's token. {HOW}")
    agent_id, colon, token = value.strip().partition(":")
    if not (is_id(agent_id) and colon and token and token.isascii() and token.isprintable()):
        raise NotAuthenticated(f"The token is to be ID:TOKEN, with the participant's id before it. {HOW}")
    return Credentials(agent_id, token)


async def receive_messages(client: NetworkClient, *, after: int | None, limit: int, wait_s: float) -> dict[str, Any]:
    """`network.receive`, waiting up to ``wait_s``. What is waited for is only looked at and taken then: who has gone
    meanwhile, by which this is cancelled, has been delivered nothing."""
    loop = asyncio.get_running_loop()
    until, args = loop.time() + wait_s, {"after": after, "limit": limit}
    while (left_s := until - loop.time()) > 0:
        # in parts: the hub does not hear that a wait was given up
        look = {**args, "peek": True, "wait_ms": math.ceil(min(left_s, WAIT_PART_S) * 1000)}
        page = await client.call("network.receive", look)
        if page["messages"] or page.get("damaged"):
            break
    taken: dict[str, Any] = await client.call("network.receive", args)
    return taken


@dataclass
class _Caller:
    client: NetworkClient
    conversations: Conversations
    used_at: float
    calls: int = 0


class Callers:
    """The sessions with one node. Use as ``async with Callers(url) as callers``."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._callers: dict[tuple[str, str], _Caller] = {}
        self._proving = 0
        self._lines: dict[tuple[str, str], asyncio.Lock] = {}
        """One at a time joins by the same token."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        callers, self._callers = list(self._callers.values()), {}
        await asyncio.gather(*(it.client.close() for it in callers))

    @asynccontextmanager
    async def session(self, credentials: Credentials) -> AsyncIterator[NetworkClient]:
        """The caller's session, for one call; raises as `conversations`."""
        async with self.conversations(credentials) as conversations:
            yield conversations.client

    @asynccontextmanager
    async def conversations(self, credentials: Credentials, *, is_rest: bool = False) -> AsyncIterator[Conversations]:
        """What the caller asks agents, on its session, for one call. Raises what refuses it: `NotAuthenticated`,
        `Forbidden`, `ConnectError`; or `Overloaded` where too much is under way. ``is_rest``: what is left to do of a
        call that has had its place (to stop what it began) waits for no other."""
        key = credentials.key
        caller = self._callers.get(key)
        if caller is None or caller.client.failure is not None:
            caller = await self._prove(credentials)
        if caller.calls >= MAX_CALLS and not is_rest:
            await asyncio.sleep(REFUSAL_S)  # whoever comes again at once is slowed down, and nobody else is
            raise Overloaded(f"{credentials.agent_id} has {MAX_CALLS} calls under way here; wait for one.", 1000)
        caller.calls += 1
        token_taken.get()()
        try:
            yield caller.conversations
        finally:
            caller.calls -= 1
            caller.used_at = asyncio.get_running_loop().time()

    async def _prove(self, credentials: Credentials) -> _Caller:
        """Join by these; only who is welcome takes a place. Raises what refuses them."""
        key = credentials.key
        if self._proving >= MAX_PROVING:
            raise Overloaded("Too many callers that are not known yet come at once; try again.", 1000)
        self._proving += 1
        try:
            async with self._lines.setdefault(key, asyncio.Lock()):
                known = self._callers.get(key)
                if known is not None and known.client.failure is None:
                    return known  # another call of it was faster
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
                except NotAuthenticated as error:  # in the words of whoever joins by the protocol itself
                    raise NotAuthenticated(f"This token is none of {credentials.agent_id}'s. {HOW}") from error
                try:
                    await self._make_room()
                except Overloaded:
                    await client.close()
                    raise
                caller = self._callers[key] = _Caller(client, Conversations(client), asyncio.get_running_loop().time())
                return caller
        finally:
            self._proving -= 1
            if not self._proving:
                self._lines.clear()

    async def _make_room(self) -> None:
        """Close sessions that nobody has used for long, and the one that was used the longest ago if all places are
        taken. Raises `Overloaded` where all are in use."""
        now = asyncio.get_running_loop().time()
        resting = sorted((it.used_at, key) for key, it in self._callers.items() if not it.calls)
        going = [key for used_at, key in resting if now - used_at > IDLE_S]
        if len(self._callers) - len(going) >= MAX_OPEN:
            if len(going) == len(resting):
                raise Overloaded("Every session of this gateway is in use; wait for one.", 1000)
            going.append(resting[len(going)][1])
        closing = [self._callers.pop(key).client for key in going]
        await asyncio.gather(*(it.close() for it in closing))
