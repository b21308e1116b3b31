"""Nodes for tests: in the test's own event loop (fast), or as a real process that a test can kill.

Both kinds provide the same `Node` with a `url`, an `owner_token` and sessions that exchange plain frames. A node object
stores the tokens of the agents that joined through it. An agent can therefore join again with its ID alone, even
after a restart.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, Self

from roundelay.app import serve
from roundelay.network.config import NodeConfig, Quota
from tests.support.forks import Forked, start_roundelay
from tests.support.wire import WireSession, make_token

Durability = Literal["full", "normal", "memory"]
Visibility = Literal["people", "strict", "all", "current"]

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Folder for nodes whose files no test looks at: there a sync to disk is free."""
DEFAULT_MODS = ("channels", "discovery")
_URL = re.compile(r"ws://[^\s'\"]+")


class Node:
    """A running node, seen from outside."""

    def __init__(self, url: str, owner_token: str) -> None:
        self.url = url
        self.owner_token = owner_token
        self.tokens: dict[str, str] = {}
        self.sessions: list[WireSession] = []

    @property
    def origin(self) -> str:
        """Return the `Origin` header that a browser sends for the page of this node."""
        return "http" + self.url.removeprefix("ws").rstrip("/")

    async def connect(self, **options: Any) -> WireSession:
        """Open a connection without a `hello`. `options` are those of `WireSession.open`."""
        session = await WireSession.open(self.url, **options)
        self.sessions.append(session)
        return session

    async def join(self, agent_id: str, *, kind: str, token: str, **hello: Any) -> WireSession:
        session = await self.connect()
        await session.hello(agent_id, kind=kind, token=token, **hello)
        return session

    async def agent(self, agent_id: str, **hello: Any) -> WireSession:
        """Join as this agent, with the same token each time."""
        return await self.join(agent_id, kind="agent", token=self.token_of(agent_id), **hello)

    async def person(self, agent_id: str, **hello: Any) -> WireSession:
        """Join as a person at this machine. The person uses the owner's token and is therefore an operator."""
        return await self.join(agent_id, kind="human", token=self.owner_token, **hello)

    async def service(self, agent_id: str, **hello: Any) -> WireSession:
        return await self.join(agent_id, kind="service", token=self.owner_token, **hello)

    async def invite(self, host: WireSession, agent_id: str, *, kind: str = "human", **made: Any) -> WireSession:
        """Join with a new token that `host`, an operator, creates. The participant is an operator only with
        ``operator=True``.
        """
        token = self.tokens[agent_id] = make_token()
        digest = hashlib.sha256(token.encode()).hexdigest()
        args = {"agent_id": agent_id, "kind": kind, "token_hash": digest, **made}
        await host.call("network.create_token", args)
        return await self.join(agent_id, kind=kind, token=token)

    def token_of(self, agent_id: str) -> str:
        return self.tokens.setdefault(agent_id, make_token())

    async def close_sessions(self) -> None:
        sessions, self.sessions = self.sessions, []
        await asyncio.gather(*(session.close() for session in sessions), return_exceptions=True)


@asynccontextmanager
async def running_node(
    *,
    limits: Mapping[str, int] | None = None,
    quotas: Mapping[str, Quota] | None = None,
    visibility: Visibility = "people",
    durability: Durability = "memory",
    mods: Sequence[str] = DEFAULT_MODS,
    db: Path | None = None,
    registration: Literal["open", "local", "closed"] = "local",
    behind_proxy: bool = False,
    rights: Mapping[str, Any] | None = None,
    **fields: Any,
) -> AsyncIterator[Node]:
    """Run a node in this event loop, on a free port of loopback. At the end, close its sessions and then the node.
    ``fields`` are further fields of its configuration.
    """
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        config = NodeConfig.model_validate(
            {
                "name": "contract",
                "host": "127.0.0.1",
                "port": 0,
                "db": str(db or Path(folder) / "node.db"),
                "durability": durability,
                "visibility": visibility,
                "mods": list(mods),
                "limits": dict(limits or {}),
                "quotas": dict(quotas or {}),
                "registration": registration,
                "behind_proxy": behind_proxy,
                "rights": rights,
                **fields,
            }
        )
        async with serve(config) as served:
            node = Node(served.url, served.owner_token)
            try:
                yield node
            finally:
                await node.close_sessions()


class ProcessNode(Node):
    """`roundelay up` as a separate process. A test can kill it and start it again on the same database."""

    def __init__(
        self, db: Path, durability: Durability, limits: Mapping[str, int], env: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(url="", owner_token="")
        self.db = db
        self.keeps_port = False
        """Whether the node uses the same port after a restart, for clients that do not learn a new address."""
        self.printed = ""
        """Output of the processes that have ended."""
        self._env = env
        self._durability = durability
        self._limits = dict(limits)
        self._process: asyncio.subprocess.Process | Forked | None = None
        self._output: asyncio.Task[bytes] | None = None

    @classmethod
    async def start(
        cls,
        db: Path,
        *,
        durability: Durability = "full",
        limits: Mapping[str, int] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Self:
        """Start the node. ``env`` is added to the inherited environment."""
        node = cls(db, durability, limits or {}, env)
        await node._spawn()
        return node

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def kill9(self) -> None:
        """Kill the process, as in a crash. The node's sessions lose their connections."""
        assert self._process is not None
        self._process.kill()
        await self._process.wait()
        await self._forget()

    async def stop(self) -> int:
        """Stop the process with SIGTERM, and return its exit code. Do nothing if it has already ended."""
        if self._process is None:
            return 0
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                code = await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
            raise AssertionError(f"the node did not stop within {STOP_TIMEOUT_S} s of SIGTERM") from None
        finally:
            await self._forget()
        return code

    async def restart(self) -> None:
        """Start the node again on its database, and stop it first if it runs. The port may change."""
        await self.stop()
        await self._spawn()

    async def _spawn(self) -> None:
        command = ["up"]
        if self._limits:
            config = self.db.with_suffix(".yaml")
            config.write_text(json.dumps({"limits": self._limits}))  # YAML parsers accept JSON
            command.append(str(config))
        port = self.url.rstrip("/").rpartition(":")[2] if self.keeps_port else "0"
        command += ["--host", "127.0.0.1", "--port", port, "--db", str(self.db), "--durability", self._durability]
        self._process = await start_roundelay(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=self.db.parent,
            env={**os.environ, **(self._env or {})},
        )  # fmt: skip
        assert self._process.stdout is not None
        seen: list[str] = []
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while (found := _URL.search(seen[-1] if seen else "")) is None:
                    line = await self._process.stdout.readline()
                    assert line, f"the node ended before it was ready: {''.join(seen)}"
                    seen.append(line.decode())
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
            raise AssertionError(f"no ready line within {START_TIMEOUT_S} s: {''.join(seen)}") from None
        self._output = asyncio.create_task(self._process.stdout.read())  # a full pipe would block the node
        self.url = found.group(0)
        self.owner_token = self.db.with_name(self.db.name + ".owner").read_text().strip()

    async def _forget(self) -> None:
        if self._output is not None:
            self.printed += (await self._output).decode()
        self._output = None
        self._process = None


@asynccontextmanager
async def node_process(
    db: Path,
    *,
    durability: Durability = "full",
    limits: Mapping[str, int] | None = None,
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[ProcessNode]:
    """Run a `ProcessNode`. The node is always stopped at the end."""
    node = await ProcessNode.start(db, durability=durability, limits=limits, env=env)
    try:
        yield node
    finally:
        await node.close_sessions()
        await node.stop()
