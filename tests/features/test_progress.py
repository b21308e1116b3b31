"""Tests of thinking steps and progress: their start and end, their display, and a tool's debug information."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.agent import Agent
from roundelay.agents.events import Event, Progress, ToolCallEnd, ToolCallStart, event_to_json
from roundelay.agents.features.data_policy import NOT_KEPT
from roundelay.agents.features.evaluations import Evaluations, Rule
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.team import build_runner, load_agents
from roundelay.agents.tools import Output, ToolContext, tool
from roundelay.app import Network
from roundelay.network.client import NetworkClient, Signal
from tests.support.agents import Person, Provider, running
from tests.support.announced import announced_node
from tests.support.command import invoke, run
from tests.support.loops import Loop, by_turn, survives_kills, use


@tool(idempotent=True)
async def dig(context: ToolContext) -> Output:
    """Dig for something."""
    context.report("opens the archive")
    context.report("reads 3 files")
    return Output("Found it.", {"debug": {"files": 3, "took_ms": 12}})


SCRIPT = by_turn(use(("dig", {})), "Here it is.")


def steps(events: list[Event]) -> list[tuple[str, Any]]:
    kinds = (Progress, ToolCallStart, ToolCallEnd)
    told = [it for it in events if isinstance(it, kinds)]
    return [
        (str(event_to_json(it)["type"]), (it.text, it.is_done) if isinstance(it, Progress) else it.tool) for it in told
    ]


async def test_thinking_steps_and_progress_are_events_with_a_clear_end() -> None:
    async with Provider(SCRIPT) as provider:
        layers = [Evaluations(always=[Rule("polite", "Here", "Be polite.")])]
        loop = Loop(Agent("bob", "", provider.model(), [dig], middleware=layers))
        await loop.drive()
    assert steps(loop.events) == [
        ("tool_call_start", "dig"),
        ("progress", ("opens the archive", False)),
        ("progress", ("reads 3 files", False)),
        ("progress", ("", True)),
        ("tool_call_end", "dig"),
        ("progress", ("checks its answer", False)),
        ("progress", ("", True)),
    ]
    assert "archive" not in str(provider.requests), "progress is for people, not for the model"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("{}", ([], [])),
        ("{thinking: true, progress: true}", (["I should dig."], [["opens the archive", "reads 3 files"]])),
        ("{thinking: true, progress: true}\nmiddleware: [{data_policy: {text: false, results: [other]}}]", ([NOT_KEPT], [[NOT_KEPT]])),
    ],
)  # fmt: skip
async def test_thinking_and_progress_are_records_where_the_agent_keeps_them(
    tmp_path: Path, stream: bool, keep: str, kept: tuple[list[str], list[list[str]]]
) -> None:
    file = tmp_path / "bob.yaml"
    file.write_text(f"id: bob\ninstruction: x\nmodel: {{rules: []}}\ntools: ['{__name__}:dig']\nkeep: {keep}\n")
    script = by_turn(use(("dig", {}), reasoning="I should dig."), "Here it is.")
    async with Provider(script) as provider:
        agent = build_runner(load_agents(file)[0], model=provider.model(stream=stream)).agent
        loop = Loop(agent)
        if "data_policy" in keep:  # a resumed agent writes its answer again under this policy
            await loop.drive()
        else:
            loop.records = (await survives_kills(provider, lambda model: replace(agent, model=model))).records
    bodies = loop.records.bodies
    assert ([it["text"] for it in bodies("thinking")], [it["steps"] for it in bodies("progress")]) == kept
    assert "I should dig." not in str([bodies("model_reply"), provider.requests])


async def test_a_call_says_how_long_it_took() -> None:
    @tool(idempotent=True)
    async def doze() -> str:
        """Doze."""
        await asyncio.sleep(0.05)
        return "rested"

    async with Provider(by_turn(use(("doze", {}), ("nap", {})), "Fine.")) as provider:
        loop = Loop(Agent("bob", "", provider.model(), [doze]))
        await loop.drive()
    took_s = {it.tool: it.duration_s for it in loop.events if isinstance(it, ToolCallEnd)}
    assert took_s["nap"] == 0, "it was not run"
    assert 0.05 <= took_s["doze"] < 60


async def test_a_step_ends_with_a_call_that_fails() -> None:
    @tool(idempotent=True)
    async def fail(context: ToolContext) -> str:
        """Fail."""
        context.report("is at it")
        raise LookupError("gone")

    async with Provider(by_turn(use(("fail", {})), "Pity.")) as provider:
        loop = Loop(Agent("bob", "", provider.model(), [fail]))
        await loop.drive()
    assert steps(loop.events)[1:] == [
        ("progress", ("is at it", False)), ("progress", ("", True)), ("tool_call_end", "fail"),
    ]  # fmt: skip


async def test_progress_reaches_the_threads_readers_while_it_lasts() -> None:
    """Progress is sent as signals, which `chat` shows. The tool waits until the person has seen it."""
    seen = asyncio.Event()

    @tool(idempotent=True)
    async def wait(context: ToolContext) -> str:
        """Wait."""
        context.report("waits for mia")
        await seen.wait()
        return "done"

    async with Provider(by_turn(use(("wait", {})), "Here.")) as provider, Network.open() as network:
        bob = SimpleAgentRunner("bob", instruction="x", model=provider.model(), tools=[wait])
        async with running(network, bob):
            mia = await Person.join(network, "mia")
            await mia.client.call("network.watch", {"signals": True})
            await mia.client.send_text("bob", "hi")
            async for event in mia.client.events():
                if isinstance(event, Signal) and event.kind == "delta":
                    [piece] = [it for it in event.body["pieces"] if it["kind"] == "progress"]
                    break
            seen.set()
            assert (await mia.hear()).text == "Here."
    assert (piece["text"], piece["turn"], piece["call"]) == ("waits for mia", 1, 0)


AGENT = """
id: bob
instruction: You dig.
tools: ['digging:dig']
model:
  rules:
    - when: {turn: 1}
      do: [{tool: dig}]
    - when: {after: dig}
      do: [{say: 'Here it is.'}]
"""
DIGGING = '''
from roundelay import ToolContext, tool
from roundelay.agents.tools import Output


@tool(idempotent=True)
def dig(context: ToolContext) -> Output:
    """Dig for something."""
    context.report("reads 3 files")
    return Output("Found it.", {"debug": {"files": 3}})
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "digging.py").write_text(DIGGING)
    (tmp_path / "bob.yaml").write_text(AGENT)
    return tmp_path / "bob.yaml"


async def test_agent_try_shows_progress(file: Path) -> None:
    lines = (await run("agent", "try", file, "dig")).lines
    assert "* 1.0 reads 3 files" in lines
    assert (
        lines.index("* 1.0 calls dig {}")
        < lines.index("* 1.0 reads 3 files")
        < lines.index("* 1.0 dig gave: Found it.")
    )


async def test_debug_info_of_a_tool_is_out_of_the_conversation_and_in_the_ledger(file: Path, tmp_path: Path) -> None:
    """`roundelay reactions show --json` shows the information to the agent's operator."""
    async with Provider(SCRIPT) as provider, announced_node(tmp_path) as node:
        bob = SimpleAgentRunner("bob", instruction="x", model=provider.model(), tools=[dig], url=node.url)
        working = asyncio.create_task(bob.run())
        await bob.ready()
        async with NetworkClient("mia", node.url, kind="human", token=node.owner_token) as client:
            heard = await Person(client).ask("bob", "dig")
            [status] = (await client.call("network.message_status", {"seq": heard.reply_to}))["recipients"]
        shown = json.loads((await invoke("reactions", "show", status["reaction"], "--json")).out)
        await bob.stop()
        await working
    assert "took_ms" not in str(provider.requests)
    assert (heard.text, "took_ms" in heard.model_dump_json()) == ("Here it is.", False)
    [result] = [it["body"] for it in shown["records"] if it["kind"] == "tool_result"]
    assert result["data"] == {"debug": {"files": 3, "took_ms": 12}}
