"""Tests of `adapter: module:function` in an agent file: `roundelay up` runs an agent of another framework."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from roundelay.agents.team import build_runner, load_agents
from roundelay.network.client import NetworkClient
from roundelay.network.errors import ConfigError
from tests.support.command import command, run

MODULE = """
from functools import partial
from pydantic_ai import Agent
from pydantic_ai.models.test import TestModel
from roundelay.adapters.pydantic_ai import PydanticAIAgent

agent = Agent(TestModel(custom_output_text="Good day."))
greeter = partial(PydanticAIAgent, agent=agent)

def of_another_id(agent_id, **options):
    return greeter("somebody", **options)

def of_no_adapter(agent_id, **options):
    return agent
"""


async def test_it_answers_at_the_node_that_starts_it_and_its_run_is_replayed(tmp_path: Path) -> None:
    (tmp_path / "greetings.py").write_text(MODULE)
    (tmp_path / "roundelay.yaml").write_text(
        "port: 0\nagents: [{id: ann, adapter: 'greetings:greeter', description: Greets, channels: [hall]}]\n"
    )
    async with command("up", cwd=tmp_path) as up:
        url = (await up.line(r"^Roundelay is ready at (ws://\S+) .*agents ann"))[1]
        async with asyncio.timeout(30), NetworkClient("mia", url, kind="human") as mia:
            asked = await mia.send_text("ann", "hello")
            async for message in mia:
                assert (message.sender_id, message.text, message.reply_to) == ("ann", "Good day.", asked.seq)
                break
            [ann] = [it for it in (await mia.call("network.list_agents", {}))["agents"] if it["agent_id"] == "ann"]
        assert (ann["card"]["description"], ann["kind"]) == ("Greets", "agent")
        await up.stop()
    assert "No differences" in (await run("replay", "roundelay.db", "roundelay.yaml", cwd=tmp_path)).out


REFUSED = {
    "no module": ("adapter: 'nowhere:greeter'", "ModuleNotFoundError"),
    "no such name": ("adapter: 'greetings2:nobody'", "has no attribute 'nobody'"),
    "the framework's agent": ("adapter: 'greetings2:agent'", "not a function"),
    "no import path": ("adapter: greetings2", "write package.module:function"),
    "another id": ("adapter: 'greetings2:of_another_id'", "returns the agent somebody: pass on the id"),
    "no agent of ours": ("adapter: 'greetings2:of_no_adapter'", "returns a Agent, not an agent of roundelay.adapters"),
    "other arguments": ("adapter: 'json:dumps'", "fails .TypeError"),
    "what it cannot keep": ("on_new_message: inject\nadapter: 'greetings2:greeter'", "inject"),
    "a model too": ("adapter: 'greetings2:greeter'\nmodel: {rules: []}", "has adapter, so it cannot have model"),
    "both": ("adapter: 'greetings2:greeter'\na2a: 'https://far.example'", "has a2a, so it cannot have adapter"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_file_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    text, sentence = REFUSED[name]
    (tmp_path / "greetings2.py").write_text(MODULE)
    file = tmp_path / "ann.yaml"
    file.write_text(f"id: ann\n{text}\n")
    with pytest.raises(ConfigError, match=sentence) as refused:
        build_runner(load_agents(file)[0])
    assert refused.value.line is not None
