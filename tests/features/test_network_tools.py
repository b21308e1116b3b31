"""Tests of the author's choice of an agent's network tools, by the requests that its model gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.models.scripted import ScriptedModel
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.team import build_runner, load_agents
from roundelay.agents.tools import ToolError, tool
from roundelay.app import Network
from roundelay.network.errors import ConfigError
from tests.support.agents import Person, Provider, running
from tests.support.fake_openai import text


@tool(name="ask")
def consult(question: str) -> str:
    """Ask the oracle."""
    return "yes"


@pytest.mark.parametrize(
    ("chosen", "offered"),
    [
        (["send_text_message", "finish"], {"send_text_message", "finish", "ask"}),
        (["discovery_*", "finish"], {"discovery_find", "finish", "ask"}),
        ([], {"ask"}),
    ],
)
async def test_an_agent_has_the_network_tools_that_its_file_names(
    network: Network, tmp_path: Path, chosen: list[str], offered: set[str]
) -> None:
    """One of the agent's own tools may have the name of an omitted tool. The prompt describes how to end with the
    available tools.
    """
    mia, file = await Person.join(network, "mia"), tmp_path / "bob.yaml"
    file.write_text(
        f"id: bob\ninstruction: x\nmodel: {{rules: []}}\nprompt: full\nnetwork_tools: {json.dumps(chosen)}\ntools: ['{__name__}:consult']\n"
    )
    async with Provider(lambda body: text("Fine.")) as provider:
        async with running(network, build_runner(load_agents(file)[0], model=provider.model())):
            assert (await mia.ask("bob", "hello")).text == "Fine."
        [request] = provider.requests
    assert {it["function"]["name"] for it in request["tools"]} == offered
    assert ("call finish" in request["messages"][1]["content"]) == ("finish" in offered)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"network_tools": ["finish", "send_text_mesage"]}, 'network_tools names "send_text_mesage", which this network does not have; did you mean send_text_message?'),
        ({"network_tools": ["xyz_*"]}, 'network_tools names "xyz_*", which this network does not have; it has ask, broadcast_text_message, channels_'),
    ],
)  # fmt: skip
async def test_a_tool_that_the_network_does_not_have_is_told_before_anything_is_taken_in(
    network: Network, options: dict[str, Any], told: str
) -> None:
    runner = SimpleAgentRunner("bob", instruction="x", model=ScriptedModel(lambda request: "x"), **options)
    with pytest.raises(ConfigError) as caught:
        await runner.run(await network.join("bob", role="reactor"))
    assert caught.value.message.startswith(f"Agent bob: {told}")


def test_what_cannot_end_is_refused(tmp_path: Path) -> None:
    sentence = "Agent bob: with on_text nudge, only finish can end a reaction. Add finish to network_tools."
    model = ScriptedModel(lambda request: "x")
    with pytest.raises(ValueError, match=sentence):
        SimpleAgentRunner(
            "bob", instruction="x", model=model, network_tools=["ask"], policy=AgentPolicy(on_text="nudge")
        )
    file = tmp_path / "bob.yaml"
    file.write_text("id: bob\ninstruction: x\nmodel: {rules: []}\non_text: nudge\nnetwork_tools: []\n")
    with pytest.raises(ConfigError, match=rf"bob\.yaml:5: {sentence}"):
        build_runner(load_agents(file)[0])
    with pytest.raises(ToolError, match="Two tools are named finish"):
        SimpleAgentRunner("bob", instruction="x", model=model, network_tools=[], tools=[tool(name="finish")(print_all)])


def print_all(text: str) -> str:
    """Print all of it."""
    return text
