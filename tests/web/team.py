"""The team behind the page in these tests: `roundelay up` with each agent as a separate process.

`WebNode` is that node. `WebNode` creates login links as its operator does. A test can kill it and start it again on
the same port. The agents' processes load the scripts and tools at the end of this file. An agent's answer depends
only on its input.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import yaml

from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import Action, call, finish, say, think
from roundelay.agents.tools import tool
from roundelay.network.client import NetworkClient
from roundelay.network.frames import Kind
from tests.support.command import Command
from tests.support.wire import WireSession, make_token

ROOT = Path(__file__).parents[2]
DEMO = cast("list[dict[str, Any]]", yaml.safe_load((ROOT / "roundelay/demo/team.yaml").read_text("utf-8"))["agents"])
BANK: dict[str, Any] = {
    "id": "bank",
    "description": "pays bills",
    "instruction": "Pay what you are told to pay.",
    "model": {"script": "tests.web.team:bank"},
    "tools": ["tests.web.team:pay"],
    "channels": ["bills"],
}
ECHO: dict[str, Any] = {
    "id": "echo",
    "description": "says it again",
    "instruction": "Repeat.",
    "model": {"rules": [{"do": [{"say": "You wrote: {{ text }}"}]}]},
}


class WebNode:
    """`roundelay up` on its own port and database."""

    def __init__(
        self, folder: Path, agents: Sequence[Mapping[str, Any]], limits: Mapping[str, int], mods: Sequence[str] = ()
    ) -> None:
        self.url = ""
        self._folder = folder
        self._agents = [dict(it) for it in agents]
        self._limits = dict(limits)
        self._mods = list(mods)
        self._process: Command | None = None
        self._operator: NetworkClient | None = None

    @property
    def origin(self) -> str:
        return self.url.replace("ws://", "http://").rstrip("/")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start the node. A restart uses the first port, because pages and agents reconnect to it."""
        port = int(self.url.rpartition(":")[2].strip("/") or 0)
        node: dict[str, Any] = {
            "name": "tea",
            "port": port,
            "db": "team.db",
            "limits": self._limits,
            "agents": self._agents,
        }
        if self._mods:
            node["mods"] = self._mods
        (self._folder / "roundelay.yaml").write_text(json.dumps(node), encoding="utf-8")  # YAML parsers accept JSON
        home = self._folder / "home"
        home.mkdir(mode=0o700, exist_ok=True)
        own = {"ROUNDELAY_HOME": str(home), "PYTHONPATH": str(ROOT), "OPENAI_API_KEY": "key-of-the-tests"}
        self._process = await Command.start("up", cwd=self._folder, **own)
        self.url = (await self._process.line(r"^Roundelay is ready at (ws://\S+) "))[1]

    async def kill(self) -> None:
        """Kill the node, as a crash does."""
        assert self._process is not None
        await self._process.kill()

    async def stop(self) -> None:
        if self._operator is not None:
            await self._operator.__aexit__(None, None, None)
            self._operator = None
        if self._process is not None and self._process.process.returncode is None:
            await self._process.stop()

    async def operator(self) -> NetworkClient:
        """Return a service with all rights. The first call opens the service's connection."""
        if self._operator is None:
            token = (self._folder / "team.db.owner").read_text(encoding="utf-8").strip()
            self._operator = NetworkClient("warden", self.url, kind="service", token=token)
            await self._operator.__aenter__()
        return self._operator

    async def link(self, agent_id: str, *, operator: bool = False) -> str:
        """Return a link with which this person can log in once."""
        code = secrets.token_urlsafe(32)
        digest = hashlib.sha256(code.encode()).hexdigest()
        args = {"agent_id": agent_id, "kind": "human", "login_hash": digest, "operator": operator}
        await (await self.operator()).call("network.create_login", args)
        return f"{self.origin}/#login={agent_id}~{code}"

    async def token(self, agent_id: str, kind: Kind = "human", *, operator: bool = False) -> str:
        """Return a token with which a program can join under this ID."""
        token = make_token()
        digest = hashlib.sha256(token.encode()).hexdigest()
        args = {"agent_id": agent_id, "kind": kind, "token_hash": digest, "operator": operator}
        await (await self.operator()).call("network.create_token", args)
        return token

    @asynccontextmanager
    async def client(self, agent_id: str, kind: Kind = "human", **options: Any) -> AsyncIterator[NetworkClient]:
        """Connect a participant who has no page."""
        token = await self.token(agent_id, kind)
        async with NetworkClient(agent_id, self.url, kind=kind, token=token, **options) as client:
            yield client

    @asynccontextmanager
    async def wire(self, agent_id: str, kind: Kind = "agent", **hello: Any) -> AsyncIterator[WireSession]:
        """Open a raw session for a participant who sends arbitrary frames."""
        session = await WireSession.open(self.url)
        try:
            await session.hello(agent_id, kind=kind, token=await self.token(agent_id, kind), **hello)
            yield session
        finally:
            await session.close()


@asynccontextmanager
async def team_up(
    folder: Path,
    agents: Sequence[Mapping[str, Any]] = (ECHO,),
    limits: Mapping[str, int] | None = None,
    mods: Sequence[str] = (),
) -> AsyncIterator[WebNode]:
    node = WebNode(folder, agents, limits or {}, mods)
    try:
        await node.start()
        yield node
    finally:
        await node.stop()


def streaming(agent_id: str, base_url: str) -> dict[str, Any]:
    """Return the configuration of an agent whose model is a provider of the test. The test can pause it in the middle
    of a sentence.
    """
    model = {"openai": {"name": f"{agent_id}-model", "base_url": base_url}}
    return {"id": agent_id, "description": "writes", "instruction": "Write what you are told to write.", "model": model}


# -- loaded by the agents' processes


@tool(once=True, needs_approval=True)
def pay(to: str, amount: int) -> str:
    """Pay somebody."""
    return f"{amount} paid to {to}"


def bank(request: ModelRequest) -> Sequence[Action]:
    view = read_prompt(request)
    asked = view.incoming_text.removeprefix("@bank ")
    if not asked.startswith("pay "):
        return [finish("nothing to pay")]
    if request.turn == 1:
        _, to, amount = asked.split()
        return [think("Is there enough?"), say(f"{to} sent a bill."), call("pay", to=to, amount=int(amount))]
    return [say(view.tool_results[-1].content)]
