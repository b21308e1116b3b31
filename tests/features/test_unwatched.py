"""Tests that live activity is sent only while somebody watches. The tests check the signals that an agent sends.
docs/protocol/signals.md.
"""

from __future__ import annotations

import asyncio
from typing import Any

from roundelay.agents.models.model import ModelDelta, ModelReply, ModelRequest, OnDelta, Usage
from roundelay.agents.models.scripted import call, say
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import tool
from roundelay.app import Network
from roundelay.network.client import NetworkClient, Signal
from tests.support.agents import Person, make_runner


class Counting:
    """A client that records the signals that it should send."""

    def __init__(self, client: NetworkClient) -> None:
        self._client = client
        self.sent: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def signal(self, kind: Any, body: Any, **options: Any) -> None:
        self.sent.append((kind, body))
        await self._client.signal(kind, body, **options)


async def begin(network: Network, runner: SimpleAgentRunner) -> tuple[Counting, asyncio.Task[None]]:
    client = Counting(await network.join(runner.agent_id, role="reactor"))
    task = asyncio.create_task(runner.run(client))  # type: ignore[arg-type]
    await runner.ready()
    return client, task


async def test_nothing_is_signalled_while_nobody_watches(network: Network) -> None:
    @tool(idempotent=True)
    def look() -> str:
        """Look."""
        return "it rains"

    mia = await Person.join(network, "mia")
    runner = make_runner("bob", lambda request: say("done") if request.turn == 2 else call("look"), tools=[look])
    client, task = await begin(network, runner)
    assert (await mia.ask("bob", "go")).text == "done"
    assert client.sent == []
    await mia.client.call("network.watch", {"signals": True})
    assert (await mia.ask("bob", "go")).text == "done"
    await runner.stop()
    await task
    assert [kind for kind, _ in client.sent][:3] == ["thinking", "tool", "tool"]


async def test_whoever_begins_to_watch_in_the_middle_sees_the_state_and_the_rest_of_a_text(network: Network) -> None:
    goes_on, waits = asyncio.Event(), asyncio.Event()

    class Slow:
        name = "slow"

        async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
            assert on_delta is not None
            on_delta(ModelDelta("It "))
            waits.set()
            await goes_on.wait()
            on_delta(ModelDelta("rains."))
            await asyncio.sleep(0.3)  # the runner sends pieces ten times per second
            return ModelReply("It rains.", usage=Usage())

    mia = await Person.join(network, "mia")
    runner = SimpleAgentRunner("bob", instruction="x", model=Slow())
    _, task = await begin(network, runner)
    await mia.client.send_text("bob", "go")
    await waits.wait()
    await mia.client.call("network.watch", {"signals": True})
    signals = (event async for event in mia.client.events() if isinstance(event, Signal))
    first = await anext(signals)
    assert (first.kind, first.body["active"]) == ("thinking", True)
    goes_on.set()
    second = await anext(signals)
    [piece] = second.body["pieces"]
    assert (second.kind, piece["at"], piece["text"]) == ("delta", 3, "rains.")
    assert (await mia.hear()).text == "It rains."
    await runner.stop()
    await task
