"""Tests of messages that arrive in a thread during a reaction: they are queued, or the reaction reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.scripted import call
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.tools import Tool, tool
from roundelay.app import Network
from roundelay.network.errors import ConnectError
from tests.support.agents import Heard, Person, make_runner, running, until_recorded
from tests.support.busy import BusyClient

INJECT = AgentPolicy(on_new_message="inject")


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with Network.open() as opened:
        yield opened


class Desk:
    """An agent whose tool waits for the test's permission. The agent records the last input of its model."""

    def __init__(self, policy: AgentPolicy) -> None:
        self.begun, self.release = asyncio.Event(), asyncio.Event()
        self.read: list[str] = []
        self.heard = Heard()
        self.runner = make_runner("bob", self._script, tools=[self._tool()], policy=policy, on_event=self.heard)

    def _tool(self) -> Tool:
        @tool(idempotent=True)
        async def work() -> str:
            """Work."""
            self.begun.set()
            await self.release.wait()
            return "done"

        return work

    def _script(self, request: ModelRequest) -> Any:
        self.read.append("\n".join(str(message.content) for message in request.messages))
        return call("work") if request.turn == 1 else f"answer {len(self.read)}"


async def test_an_injected_message_is_read_before_the_next_turn_and_gets_no_reaction(network: Network) -> None:
    mia, zoe = await Person.join(network, "mia"), await Person.join(network, "zoe")
    desk = Desk(INJECT)
    async with running(network, desk.runner):
        await mia.client.send_text("bob", "go")
        await desk.begun.wait()
        late = await mia.client.send_text("bob", "and <more>, please")
        await mia.client.send_text("bob", "thanks")
        await until_delivered(mia, late.seq)
        desk.release.set()
        assert (await mia.hear()).text == "answer 2"
        [end] = await desk.heard.finished()
        await until_recorded(mia, end.reaction, "finished")
        [body] = [it["body"] for it in await mia.records(end.reaction) if it["kind"] == "finished"]
        assert body["read_meanwhile"][0] == late.seq
        assert len(body["read_meanwhile"]) == 2
        assert (await zoe.ask("bob", "hi")).text == "answer 4"
    assert "<content>and &lt;more&gt;, please</content>" in desk.read[1]
    assert desk.read[1].index("please") < desk.read[1].index("thanks")
    assert len([it for it in await mia.history("direct:bob~mia") if it[0] == "bob"]) == 1


async def test_what_not_everybody_may_read_who_waits_for_the_reaction_gets_its_own(network: Network) -> None:
    """Both messages are in one thread, but the answer to one of them must not reveal the other."""
    mia, zoe = await Person.join(network, "mia"), await Person.join(network, "zoe")
    desk = Desk(INJECT)
    async with running(network, desk.runner):
        await zoe.client.broadcast("go")
        await desk.begun.wait()
        withheld = await mia.client.send("broadcast", "mia's canary", exclude_agent_ids=["zoe"])
        late = await mia.client.broadcast("for all")
        for seq in (withheld.seq, late.seq):
            await until_delivered(mia, seq)
        desk.release.set()
        await desk.heard.finished(2)
    assert "for all" in desk.read[1]
    assert "canary" not in desk.read[1]
    assert "canary" in desk.read[2]


async def until_delivered(mia: Person, seq: int, agent_id: str = "bob") -> None:
    while True:
        recipients = (await mia.client.call("network.message_status", {"seq": seq}))["recipients"]
        [state] = [it for it in recipients if it["agent_id"] == agent_id]
        if state["state"] != "queued":
            return


async def test_a_queued_message_gets_its_own_reaction(network: Network) -> None:
    mia, desk = await Person.join(network, "mia"), Desk(AgentPolicy())
    async with running(network, desk.runner):
        await mia.client.send_text("bob", "go")
        await desk.begun.wait()
        await mia.client.send_text("bob", "more")
        desk.release.set()
        assert [(await mia.hear()).text, (await mia.hear()).text] == ["answer 2", "answer 4"]
    assert "more" not in desk.read[1]


@pytest.mark.parametrize("cut_at", ["new_messages", "started2", "finished", "model_reply2", "finished2"])
async def test_a_killed_agent_reads_what_it_had_read_and_answers_once(network: Network, cut_at: str) -> None:
    mia, desk = await Person.join(network, "mia"), Desk(INJECT)
    kind, nth = (cut_at[:-1], 2) if cut_at[-1].isdigit() else (cut_at, 1)
    client = BusyClient(await network.join("bob", role="reactor"), kind, cut_at=nth)
    task = asyncio.create_task(desk.runner.run(client))  # type: ignore[arg-type]
    await desk.runner.ready()
    await mia.client.send_text("bob", "go")
    await desk.begun.wait()
    late = await mia.client.send_text("bob", "more")
    await until_delivered(mia, late.seq)
    desk.release.set()
    with pytest.raises(ConnectError, match="cut"):
        await task
    again = Desk(INJECT)
    again.release.set()
    async with running(network, again.runner):
        [end] = await again.heard.finished()
        await until_recorded(mia, end.reaction, "finished")
    answers = [text for sender, text in await mia.history("direct:bob~mia") if sender == "bob"]
    assert len(answers) == 1
    assert (await network.join("bob", role="reactor")).welcome.open_reactions == []
    assert network.hub.view.is_handled("bob", late.seq)
    assert "more" in (desk.read + again.read)[-1]
