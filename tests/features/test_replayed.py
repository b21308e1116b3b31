"""Test that a run with several features can be replayed from its log, without a model and its tools."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from roundelay.agents.features.evaluations import Evaluations, Grounding
from roundelay.agents.features.forced_tools import ForcedTools
from roundelay.agents.features.fragments import Fragments
from roundelay.agents.features.postprocessors import FollowUps, Postprocessors
from roundelay.agents.features.prompts import Prompts
from roundelay.agents.features.references import References
from roundelay.agents.models.model import NamedTool
from roundelay.agents.models.scripted import ScriptedModel, call, say
from roundelay.agents.models.tape import NamedModel
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import Output, Tool, tool
from roundelay.app import Network
from roundelay.runs.replay import ReplayOptions, replay
from tests.support.agents import Person
from tests.support.recorded import record, written


def make_tool(name: str, runs: list[str]) -> Tool:
    def look() -> Output:
        """Look something up."""
        runs.append(name)
        found: Any = {"id": name, "title": name.title(), "text": f"{name} says so"}
        return Output("found", {"references": [found], "fragments": [{**found, "id": f"{name}-2", "score": 1}]})

    return tool(name=name, idempotent=True)(look)


def make_bob(model: Any, runs: list[str]) -> SimpleAgentRunner:
    layers = [
        ForcedTools("search", "archive"), Prompts(), References(), Fragments(), Evaluations(always=[Grounding()]),
        Postprocessors(FollowUps()),
    ]  # fmt: skip
    tools = [make_tool(name, runs) for name in ("search", "archive")]
    return SimpleAgentRunner("bob", instruction="x", model=model, tools=tools, middleware=layers)


def script(request: Any) -> Any:
    names = [it.name for it in request.tools]
    if names == ["verdict"]:
        return call("verdict", is_grounded="surely" in request.messages[1].content)
    if names == ["suggest"]:
        return call("suggest", questions=["Why?"])
    if isinstance(request.tool_choice, NamedTool):
        return call(request.tool_choice.name)
    return say("It is so, surely [1] [4]." if "was not given" in request.messages[-1].content else "It may be so [1].")


async def test_features_play_again_from_the_log(tmp_path: Path) -> None:
    runs: list[str] = []

    async def talk(network: Network, people: dict[str, Person]) -> None:
        heard = await people["mia"].ask("bob", "Is it so?")
        assert heard.text == "It is so, surely [1] [4]."
        assert heard.metadata is not None
        assert set(heard.metadata) == {"sources", "follow_ups", "passed_checks"}
        assert heard.metadata["passed_checks"] == ["grounding"]
        await written(network, lambda row: row.label == "finished")

    model = ScriptedModel(script, name="small")
    recording = await record(tmp_path / "run.db", [make_bob(model, runs)], talk)
    assert sorted(runs) == ["archive", "search"]
    again: list[str] = []
    report = await asyncio.to_thread(replay, recording, [make_bob(NamedModel("small"), again)], ReplayOptions())
    assert [str(it) for it in report.differences] == []
    assert report.rows == len(recording.rows)
    assert again == []
