"""Network session of the MCP server that a bridged host starts. The session omits messages that the host's hooks have
shown.

A host starts its MCP servers only once. A server that fails at that time stays unavailable until the host restarts.
This server therefore starts without a connection to a node. Each tool call looks for the node, and returns an error if
there is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

from roundelay.network.client import NetworkClient
from roundelay.network.errors import ConnectError, RoundelayError

from .hooks import describe_problem, find_folder, list_shown_seqs
from .hosts import Host
from .participants import (
    HostProcess,
    claim_name,
    find_host_process,
    find_hub,
    find_project,
    make_card,
    remember_hub,
)

CONNECT_TIMEOUT_S = 5.0
CALL_S = 29.0
"""Maximum duration of one tool call, in seconds. A tool may wait up to 25 s for messages."""


class BridgeClient(NetworkClient):
    """Client that omits some messages from `network.receive`: those that hooks have shown and that are not acknowledged
    yet.
    """

    host_process: HostProcess

    async def call(self, op: str, args: Mapping[str, Any] | None = None, *, call_id: str | None = None) -> Any:
        query, is_unhandled_only = dict(args or {}), (args or {}).get("after") is None
        # Do not filter a peek after a seq. A tool waits for an answer this way, and must find it even if a hook has
        # shown it.
        if op != "network.receive" or (query.get("peek") and not is_unhandled_only):
            return await super().call(op, args, call_id=call_id)
        loop = asyncio.get_running_loop()
        until = loop.time() + query.get("wait_ms", 0) / 1000
        while True:
            # Peek first. A call that finds nothing new must not mark messages as delivered.
            peeked = await super().call(op, query | {"peek": True})
            answer, count = self._leave_out_shown(peeked), len(peeked["messages"])
            if answer["messages"] and not query.get("peek"):
                # Fetch exactly the messages of the peek. With the original limit, the page could also contain newer
                # messages.
                answer = self._leave_out_shown(await super().call(op, query | {"limit": count, "wait_ms": 0}))
            left_ms = max(int((until - loop.time()) * 1000), 0)
            if answer["messages"] or not (answer["has_more"] or left_ms):
                return answer
            query |= {"after": answer["next"], "unhandled": is_unhandled_only, "wait_ms": left_ms}

    def _leave_out_shown(self, page: dict[str, Any]) -> dict[str, Any]:
        """Return a page of messages without those that hooks have shown."""
        shown = list_shown_seqs(self.host_process)
        return page | {"messages": [message for message in page["messages"] if message["seq"] not in shown]}


class BridgeSession:
    """Session of an MCP server that a host has started. Use this class as ``async with BridgeSession(host) as
    session``.
    """

    def __init__(self, host: Host, url: str | None = None) -> None:
        self.host = host
        self._url = url
        self._process = find_host_process()
        self.project = find_project(host, find_folder(host))
        self._client: BridgeClient | None = None
        self._connecting = asyncio.Lock()
        """Lock that a call holds while it connects, so that concurrent calls share one client."""
        self._early_connect: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        # Connect in the background. A host waits until its MCP servers have started, and the node may be slow.
        self._early_connect = asyncio.create_task(self._connect_early(), name="bridge-connect")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._early_connect is not None:
            self._early_connect.cancel()
            await asyncio.gather(self._early_connect, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    @asynccontextmanager
    async def lend(self, _: object) -> AsyncIterator[NetworkClient]:
        """Provide the client for one tool call. Raises `ConnectError`, which explains the reason and what to do."""
        client = await self._connect()
        try:
            async with asyncio.timeout(CALL_S if client.is_connected else CONNECT_TIMEOUT_S):
                yield client
        except TimeoutError as error:
            # Keep a client that another call has opened in the meantime.
            if self._client is client:
                self._client = None  # the next call connects again
            await client.close()
            raise ConnectError(
                f"{self._describe(error, client)} It is unknown whether your message was stored: send it again with the same "
                "message_id, or check with history first."
            ) from error

    async def count_unseen(self, first: int) -> int:
        """Return the number of unhandled messages that neither a hook nor a tool has shown, starting at the seq
        ``first``. Raises `ConnectError` like `lend`.
        """
        async with self.lend(None) as client:
            args = {"after": first - 1, "limit": 500, "peek": True, "unhandled": True}
            page = await client.call("network.receive", args)
        shown = list_shown_seqs(self._process, with_shown=True)
        return sum(message["seq"] not in shown for message in page["messages"])

    async def _connect_early(self) -> None:
        """Connect when the server starts, if a node is running. Other participants can then write to this host before
        its first tool call.
        """
        with suppress(RoundelayError, OSError):
            await self._connect()

    async def _connect(self) -> BridgeClient:
        async with self._connecting:
            if self._client is not None and self._client.failure is None:
                return self._client
            name = claim_name(self.host, self.project, self._process)
            hub = find_hub(name, self._url)
            client = BridgeClient(
                name,
                hub,
                card=make_card(self.host, self.project),
                deliver=False,
                connect_timeout_s=CONNECT_TIMEOUT_S,
            )
            client.host_process = self._process
            try:
                await client.connect()
            except (RoundelayError, OSError) as error:
                raise ConnectError(self._describe(error, client)) from error
            remember_hub(name, hub)
            self._client = client
            return client

    def _describe(self, error: Exception, client: BridgeClient) -> str:
        problem = describe_problem(error, client.agent_id, client.url)
        return f"{problem[0].upper()}{problem[1:]}"
