"""Test of an agent that exceeds its daily quota: its reaction ends, the waiting person is notified, and it continues
on the next day. In simulated time.
"""

from __future__ import annotations

import asyncio

import pytest

from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import Answer, ScriptedModel
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.network.client.values import Notice
from roundelay.network.config import Limits
from roundelay.simulation import Simulation, network, simulate


def write_essay(request: ModelRequest) -> Answer:
    """Return as many characters as the message says."""
    return "x" * int(read_prompt(request).incoming_text)


async def hear_notice(events: asyncio.Queue[Notice]) -> Notice:
    """Return the next notice with content. An `inbox` notice only reports that something waits."""
    async with asyncio.timeout(120):
        while (notice := await events.get()).kind == "inbox":
            pass
        return notice


async def live_two_days(simulation: Simulation) -> None:
    bob = SimpleAgentRunner("bob", instruction="You are under test.", model=ScriptedModel(write_essay))
    await simulation.start_agent(lambda: bob)
    mia = await simulation.join_person("mia")
    notices: asyncio.Queue[Notice] = asyncio.Queue()

    async def listen() -> None:
        async for event in mia.client.events():
            if isinstance(event, Notice):
                notices.put_nowait(event)

    listening = asyncio.create_task(listen())
    await mia.client.send_text("bob", "10")
    await simulation.wait_for(lambda message: message.sender_id == "bob")
    long = await mia.client.send_text("bob", "30000")
    answer = await simulation.wait_for(lambda message: message.sender_id == "bob" and message.cause == long.seq)
    assert answer.text.startswith("I have to stop here. bob has stored")
    assert "bytes_per_day" in answer.text
    await simulation.idle()
    [status] = (await mia.client.call("network.message_status", {"seq": long.seq}))["recipients"]
    assert status["reaction_status"] == "stopped"
    while True:  # the rest of the day's quota does not even allow a start
        short = await mia.client.send_text("bob", "10")
        await asyncio.sleep(30)
        [status] = (await mia.client.call("network.message_status", {"seq": short.seq}))["recipients"]
        if "reaction_status" not in status:
            break
    while (await hear_notice(notices)).body["seq"] != short.seq:
        pass  # the previous reaction may have used the rest of the day's quota
    assert (await mia.client.call("network.open_reactions"))["reactions"] == []
    said = len([message for message in simulation.messages if message.sender_id == "bob"])
    answer = await simulation.wait_for(
        lambda message: message.sender_id == "bob" and message.cause == short.seq, at_most_s=90_000
    )
    assert len([message for message in simulation.messages if message.sender_id == "bob"]) == said + 1
    assert answer.sent_at % 86_400_000 < 60_000  # shortly after midnight
    assert (await mia.client.call("network.dead_letters", {"agent_id": "bob"}))["dead_letters"] == []
    listening.cancel()


def test_a_reaction_beyond_the_quota_ends_and_what_waited_is_answered_the_next_day(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "START_MS", network.START_MS + 22 * 3_600_000)  # a whole day takes 4 seconds of CPU
    simulate(live_two_days, limits=Limits(bytes_per_day=12_000), horizon_s=200_000, operators=("mia",))
