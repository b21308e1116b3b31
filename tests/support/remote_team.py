"""A team of three agents that call each other, and a person who watches. The test controls the model of the last
agent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from roundelay.agents.agent_tools import remote_agent_tool, remote_handoff
from roundelay.agents.events import Event
from roundelay.agents.models.model import ModelReply, ModelRequest, OnDelta
from roundelay.agents.models.scripted import call
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import Tool, ToolContext, tool
from roundelay.app import Network
from roundelay.display.screen import PLAIN
from roundelay.live_activity import LiveActivity
from roundelay.network.client import Signal
from roundelay.terminal.activity_lines import draw_growing_texts
from tests.support.agents import Person, make_runner, running


class Stepped:
    """A model that streams text under the control of the test."""

    name = "stepped"

    def __init__(self) -> None:
        self.asked: asyncio.Queue[OnDelta] = asyncio.Queue()
        self.reply: asyncio.Queue[ModelReply] = asyncio.Queue()

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        assert on_delta is not None
        self.asked.put_nowait(on_delta)
        return await self.reply.get()


@tool(idempotent=True)
def dig(context: ToolContext) -> str:
    """Dig."""
    context.report("digging")
    return "gold"


def asks(name: str, **arguments: str) -> Any:
    """Return a script that makes one call, and answers with its result."""
    return lambda request: (
        next((it.content for it in request.messages[::-1] if type(it).__name__ == "ToolMessage"), None)
        or call(name, **arguments)
    )


@dataclass
class Team:
    """A team in which guide calls supervisor, and supervisor calls researcher. The test controls researcher's model.
    Mia watches guide.
    """

    network: Network
    model: Stepped
    mia: Person
    view: LiveActivity = field(default_factory=LiveActivity)
    events: list[Event] = field(default_factory=list)

    async def signal(self, kind: str, *, by: str = "guide", **wanted: object) -> dict[str, Any]:
        """Return the next signal of this kind whose body contains ``wanted``."""
        async for event in self.mia.client.events():
            if isinstance(event, Signal):
                self.view.handle_event(event)
                if (event.kind, event.sender_id) == (kind, by) and wanted.items() <= event.body.items():
                    return event.body
        raise AssertionError

    async def pieces(self, count: int) -> list[dict[str, Any]]:
        pieces: list[dict[str, Any]] = []
        while len(pieces) < count:
            pieces += (await self.signal("delta"))["pieces"]
        return pieces

    def lines(self) -> list[str]:
        return draw_growing_texts(self.view, "direct:guide~mia", width=100, rows=8, paint=PLAIN)


@asynccontextmanager
async def team(*first: Tool, tools: tuple[Tool, ...] = (dig,), **options: Any) -> AsyncIterator[Team]:
    model, events = Stepped(), []
    asked = first or (remote_handoff("supervisor"),)
    guide = make_runner("guide", asks(asked[0].name, **({"note": ""} if not first else {"task": "gold"})), tools=asked, on_event=events.append, **options)  # fmt: skip
    supervisor = make_runner("supervisor", asks("researcher", task="gold"), tools=[remote_agent_tool("researcher")])
    researcher = SimpleAgentRunner("researcher", instruction="Dig.", model=model, tools=tools)
    async with asyncio.timeout(20), Network.open() as network, running(network, researcher, supervisor, guide):
        mia = await Person.join(network, "mia")
        await mia.client.call("network.watch", {"signals": True})
        yield Team(network, model, mia, events=events)
