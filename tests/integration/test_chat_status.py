"""Tests of the activity of agents and of takeovers, as a person sees them in chat, in commands and on the screen."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.announced import announced_node
from tests.support.command import command, invoke, run
from tests.support.node import Node
from tests.support.terminals import at_terminal
from tests.support.wire import WireSession

CALL = {"turn": 1, "call": 0}


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with announced_node(tmp_path) as running:
        yield running


async def begin(node: Node, agent_id: str, asker: WireSession) -> tuple[WireSession, int]:
    """Let an agent start to work on a question. Return the agent's session and the question's seq."""
    agent = await node.agent(agent_id, role="reactor")
    seq: int = (await asker.send(f"agent:{agent_id}", "question"))["seq"]
    await agent.record(f"of-{agent_id}", "started", {"trigger": seq})
    return agent, seq


async def test_chat_agents_and_status_tell_the_same_of_what_agents_do(node: Node) -> None:
    zoe = await node.person("zoe")
    _, works_on = await begin(node, "bob", zoe)
    ann, _ = await begin(node, "ann", zoe)
    await ann.record("of-ann", "waiting", {**CALL, "questions": {"bob": 1}, "is_approval": False})
    eve, _ = await begin(node, "eve", zoe)
    await eve.bye()
    await node.agent("kim")
    async with command("chat", "--as", "mia") as chat:
        await chat.line(r"^\* ann waits for bob\.$")
        await chat.line(rf"^\* bob works on #{works_on}\.$")
        await chat.type("/who", "/agents")
        await chat.line(r"^ann +waits for bob +direct:ann~zoe +\d+ s$")
        await chat.line(rf"^bob +works on #{works_on} +direct:bob~zoe +\d+ s$")
        await chat.line(r"^eve +was interrupted on #\d+ +direct:eve~zoe +\d+ s$")
        await chat.line("^kim +idle$")
        await chat.line("^ann +agent +waits for bob")
        await chat.line("^eve +agent +gone, with 1 open reaction")
        await chat.type("/quit")
        await chat.end()
    listed = await invoke("agents")
    assert len(listed.lines) - 1 == json.loads((await invoke("status", "--json")).out)["participants"]
    assert [line.split("  ")[0] for line in listed.lines if "waits for bob" in line] == ["ann"]
    [told] = [line for line in (await invoke("status", "--over", "0.1")).lines if line.startswith("agents")]
    assert told.split(None, 1)[1] == (
        f"ann waits for bob; bob works on #{works_on}; eve is gone, with 1 open reaction; 1 idle"
    )


async def test_a_place_that_is_nobodys_is_noticed_at_the_start(node: Node) -> None:
    await node.agent("bob")
    done = await run("chat", "--as", "mia", "--to", "bbo", stdin="hello\n", code=1)
    assert "Nobody is registered as 'bbo'. Did you mean bob?" in done.err


async def test_a_person_takes_over_and_gives_back_and_others_see_it(node: Node) -> None:
    zoe, bob = await node.person("zoe"), await node.agent("bob", role="reactor")
    await zoe.call("channels.create", {"name": "dev"})
    await bob.call("channels.join", {"name": "dev"})
    async with (
        command("chat", "--as", "noa", "--to", "channel:dev") as other,
        at_terminal("--to", "channel:dev") as mia,
    ):
        await other.type("here I am")
        await mia.shows("noa → channel:dev: here I am")
        mia.type("/take\r")
        await mia.shows(r"(?m)^\* You have taken over channel:dev")
        await mia.shows(r"(?m)^\(taken over by you\) channel:dev>")
        await other.line(r"^\* mia has taken over channel:dev: agents are silent there until /give$")
        await bob.refused("held", "channel:dev")
        await other.type("/take")
        await other.error("mia has already taken over channel:dev")
        mia.type("/give\r")
        await mia.shows(r"(?m)^\* You gave channel:dev back")
        await mia.shows(r"(?m)^channel:dev>")
        await other.line(r"^\* mia gave channel:dev back: agents answer there again$")
        await bob.send("channel:dev", "at your service")
        await mia.shows("bob → channel:dev: at your service")


async def test_who_comes_sees_who_is_at_work_and_leaving_is_not_stopping(node: Node) -> None:
    zoe = await node.person("zoe")
    bob, _ = await begin(node, "bob", zoe)
    async with at_terminal(columns=80) as mia:
        await mia.shows(r"(?m)^\(bob: Thinking…\) broadcast>")
        mia.type("\x03")
        await mia.shows(r"bob is at work: /stop THREAD stops that; Ctrl-C again only leaves")
        assert mia.process.returncode is None
        mia.type("\x03")
        await mia.process.wait()
    await bob.record("of-bob", "finished", {"status": "finished"})


async def test_places_are_listed_and_gone_to(node: Node) -> None:
    bob = await node.agent("bob")
    await bob.call("channels.create", {"name": "dev", "topic": "what we build"})
    await bob.send("broadcast", "hello")
    async with command("chat", "--as", "mia") as chat:
        await chat.type("/channels", "/threads", "/to bob", "/to bbo", "/take", "/threads", "/to")
        await chat.line("^dev +1 +open +what we build$")
        await chat.line(r"^broadcast +Everybody +1 +#\d+$")
        await chat.line("^. Lines now go to bob.$")
        await chat.error("Nobody is registered as 'bbo'. Did you mean bob")
        await chat.line("^. You have taken over direct:bob~mia")
        await chat.line("^. Lines now go to bob.$")
        await chat.type("/to dev", "/to channel:de", "/to channel:qa")
        await chat.error("Nobody is registered as 'dev'. Did you mean channel:dev?")
        await chat.error(r"There is no channel 'de'. Did you mean channel:dev\? /create de makes a new one.")
        await chat.line("Created the channel qa.")
