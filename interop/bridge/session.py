"""The session of a bridged host's MCP server: it begins when the node is there, and shows nothing that the host's hooks
have told.

A host starts its MCP servers once, and a server that does not start then has no tools for as long as the host runs. So
this one starts without the node: each call looks for it, and says what is wrong until it is there.
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
"""Of one call: a tool may wait 25 s for messages."""


class BridgeClient(NetworkClient):
    """What hooks have told and not acknowledged yet is not shown again."""

    host_process: HostProcess

    async def call(self, op: str, args: Mapping[str, Any] | None = None, *, call_id: str | None = None) -> Any:
        asked, is_from_floor = dict(args or {}), (args or {}).get("after") is None
        if op != "network.receive" or (asked.get("peek") and not is_from_floor):  # who looks for an answer finds it
            return await super().call(op, args, call_id=call_id)
        loop = asyncio.get_running_loop()
        until = loop.time() + asked.get("wait_ms", 0) / 1000
        while True:
            # Look first: a call that shows nothing new must not make messages `delivered`.
            looked = await super().call(op, asked | {"peek": True})
            answer, found = self._leave_out_told(looked), len(looked["messages"])
            if answer["messages"] and not asked.get("peek"):
                # The same page again: with the old limit, it could hold newer messages too.
                answer = self._leave_out_told(await super().call(op, asked | {"limit": found, "wait_ms": 0}))
            left_ms = max(int((until - loop.time()) * 1000), 0)
            if answer["messages"] or not (answer["has_more"] or left_ms):
                return answer
            asked |= {"after": answer["next"], "unhandled": is_from_floor, "wait_ms": left_ms}

    def _leave_out_told(self, page: dict[str, Any]) -> dict[str, Any]:
        """Return a page without the messages that hooks have told."""
        told = list_shown_seqs(self.host_process)
        return page | {"messages": [it for it in page["messages"] if it["seq"] not in told]}


class BridgeSession:
    """Who the MCP server that a host has started here is. Use as ``async with BridgeSession(host) as session``."""

    def __init__(self, host: Host, url: str | None = None) -> None:
        self.host = host
        self._url = url
        self._process = find_host_process()
        self.project = find_project(host, find_folder(host))
        self._client: BridgeClient | None = None
        self._line = asyncio.Lock()
        """One call at a time connects."""
        self._first: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._first = asyncio.create_task(self._begin(), name="bridge-begin")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._first is not None:
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    @asynccontextmanager
    async def take(self, _: object) -> AsyncIterator[NetworkClient]:
        """The session, for one call. Raises what keeps it from the node, with the next step."""
        client = await self._connect()
        try:
            async with asyncio.timeout(CALL_S if client.is_connected else CONNECT_TIMEOUT_S):
                yield client
        except TimeoutError as error:
            if self._client is client:
                self._client = None  # the next call looks where the node is now
            await client.close()
            raise ConnectError(
                f"{self._describe(error, client)} What you have sent may be stored or not: send it again with the same "
                "message_id, or look with history first."
            ) from error

    async def count_untold(self, first: int) -> int:
        """Of the messages from this seq on that are not handled: how many neither a hook nor a tool has shown. Raises
        as `take`."""
        async with self.take(None) as client:
            asked = {"after": first - 1, "limit": 500, "peek": True, "unhandled": True}
            page = await client.call("network.receive", asked)
        told = list_shown_seqs(self._process, with_shown=True)
        return sum(it["seq"] not in told for it in page["messages"])

    async def _begin(self) -> None:
        """Be there from the start where the node is, so that others can write to this host."""
        with suppress(RoundelayError, OSError):
            await self._connect()

    async def _connect(self) -> BridgeClient:
        async with self._line:
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
        told = describe_problem(error, client.agent_id, client.url)
        return f"{told[0].upper()}{told[1:]}"
