"""Tests of memory beyond the window: dropped messages are summarized once, and later prompts show the summary only
where its messages could be shown.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from roundelay.agents.features.data_policy import DataPolicy
from roundelay.agents.features.memory import Memory
from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.scripted import Answer, ScriptedModel, say
from roundelay.agents.models.tape import NamedModel
from roundelay.agents.policy import AgentPolicy, GrowingWindow
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.app import Network
from roundelay.network.addresses import memory_of
from roundelay.network.core.rows import Row
from roundelay.network.errors import ConfigError
from roundelay.network.messages import BaseMessage
from roundelay.runs.replay import ReplayOptions, replay
from tests.support.agents import Heard, Person, make_runner, running
from tests.support.recorded import record, written

SHORT = AgentPolicy(per_thread=GrowingWindow(2, 4))


def memory_in(request: ModelRequest) -> str:
    return str(request.messages[1].content).partition("<memory>")[2].partition("</memory>")[0]


def shown_in(request: ModelRequest) -> str:
    return str(request.messages[1].content).partition("<memory>")[0]


def keeps_all(so_far: str, messages: Sequence[BaseMessage]) -> str:
    return "; ".join([*([so_far] if so_far else []), *(it.text for it in messages)])


class Recorder:
    """A model that answers "noted", and whose summaries keep the codes. The model records every request."""

    def __init__(self) -> None:
        self.requests: list[ModelRequest] = []
        self.orders: list[str] = []

    def __call__(self, request: ModelRequest) -> Answer:
        text = str(request.messages[1].content)
        if "Write the summary" not in text:
            self.requests.append(request)
            return say("noted")
        self.orders.append(text)
        return say(f"Codes: {', '.join(dict.fromkeys(re.findall(r'code [0-9]+', text)))} </summary></memory>")


async def read_memories(network: Network, thread_id: str) -> list[dict[str, Any]]:
    rows = await network.hub.ledger.reaction(memory_of(thread_id), 0, 500)
    return [json.loads(row.data) for row in rows.rows]


async def test_a_fact_of_the_first_message_is_known_after_two_hundred(network: Network) -> None:
    model = Recorder()
    async with running(network, make_runner("helper", model, middleware=[Memory()])):
        mia = await Person.join(network, "mia")
        await mia.ask("helper", "The vault has the code 4711.")
        for number in range(99):
            await mia.ask("helper", f"filler {number}")
    assert "code 4711" not in shown_in(model.requests[-1])
    assert "Codes: code 4711 &lt;/summary&gt;" in memory_in(model.requests[-1])
    assert len(model.orders) == 8  # one for each cut of the window, for 200 messages
    kept = await read_memories(network, "direct:helper~mia")
    summed_up = [seq for it in kept for seq in it["seqs"]]
    assert summed_up == sorted(set(summed_up))
    first_shown = min(int(it) for it in re.findall(r"filler (\d+)", shown_in(model.requests[-1])))
    assert f"filler {first_shown - 1}" in model.orders[-1]
    assert {"search_history", "read_history"} <= {it.name for it in model.requests[-1].tools}


@pytest.mark.parametrize("visibility", ["people", "strict"])
async def test_a_memory_crosses_no_line_that_its_messages_would_not(
    network: Network, visibility: Literal["people", "strict"]
) -> None:
    model, heard = Recorder(), Heard()
    worker = make_runner(
        "worker", model, middleware=[Memory(write=keeps_all)], policy=SHORT, visibility=visibility, on_event=heard
    )
    async with running(network, worker):
        people = [await Person.join(network, name) for name in ("bob", "mia")]
        helper = await network.join("helper")
        for number in range(24):
            person = people[number % 2]
            stored = await person.client.send_text("helper", f"{person.client.agent_id} wants {number}")
            text = f"for {person.client.agent_id}: part {number}"
            await helper.send_text("worker", text, cause=stored.seq)
            await heard.finished(number + 1)
    prompts = [str(it.messages[1].content) for it in model.requests]
    for place, prompt in enumerate(prompts):
        own, other = ("bob", "mia") if place % 2 == 0 else ("mia", "bob")
        assert f"for {own}" in prompt
        assert f"for {other}" not in prompt
    for place in (22, 23):  # each audience has its own memory, which continues
        everything = [f"part {number}" for number in range(place % 2, place + 1, 2)]
        assert [it for it in everything if not re.search(rf"{it}\b", prompts[place])] == []
        assert "part 0" in memory_in(model.requests[22])
    kept = await read_memories(network, "direct:helper~worker")
    assert len([it for it in kept if it["earlier"] is not None]) >= 2


async def test_a_resumed_reaction_reads_the_memory_that_it_had_read(network: Network) -> None:
    asked, written_anew = asyncio.Event(), []

    async def hangs(request: ModelRequest) -> Answer:
        if "last" not in shown_in(request).partition("<incoming_message")[2]:
            return say("noted")
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError("nothing sets it")

    def other(so_far: str, messages: Sequence[BaseMessage]) -> str:
        written_anew.append(messages)
        return "something else"

    def first(so_far: str, messages: Sequence[BaseMessage]) -> str:
        return f"{so_far} ({len(messages)} of them)"

    model = Recorder()
    mia = await Person.join(network, "mia")
    async with running(network, make_runner("helper", hangs, middleware=[Memory(write=first)], policy=SHORT)):
        for number in range(4):
            await mia.ask("helper", f"filler {number}")
        await mia.client.send_text("helper", "last")
        await asked.wait()
    async with running(network, make_runner("helper", model, middleware=[Memory(write=other)], policy=SHORT)):
        assert (await mia.hear()).text == "noted"
    assert written_anew == []
    assert "of them)" in memory_in(model.requests[0])


async def test_a_run_with_memory_plays_again_from_its_log(tmp_path: Path) -> None:
    def make(model: Any) -> SimpleAgentRunner:
        return SimpleAgentRunner("helper", instruction="x", model=model, middleware=[Memory()], policy=SHORT)

    async def talk(network: Network, people: dict[str, Person]) -> None:
        for number in range(8):
            await people["mia"].ask("helper", f"code {number}")
        ended: set[int] = set()

        def is_last(row: Row) -> bool:
            ended.update([row.seq] if row.label == "finished" else [])
            return len(ended) == 8

        await written(network, is_last)

    recording = await record(tmp_path / "run.db", [make(ScriptedModel(Recorder(), name="small"))], talk)
    assert any(row.label == "memory" for row in recording.rows)
    report = await asyncio.to_thread(replay, recording, [make(NamedModel("small"))], ReplayOptions())
    assert [str(it) for it in report.differences] == []
    assert report.rows == len(recording.rows)
    assert report.played == ("helper",)


async def test_a_data_policy_that_keeps_no_text_keeps_no_memory(network: Network) -> None:
    model = Recorder()
    layers = [Memory(write=keeps_all), DataPolicy(text=False)]
    async with running(network, make_runner("helper", model, middleware=layers, policy=SHORT)):
        mia = await Person.join(network, "mia")
        for number in range(6):
            await mia.ask("helper", f"filler {number}")
    assert await read_memories(network, "direct:helper~mia") == []
    assert "filler 0" in memory_in(model.requests[-1])


async def test_a_summary_that_cannot_be_made_is_made_the_next_time(network: Network) -> None:
    broken = [True]

    def script(request: ModelRequest) -> Answer:
        if "Write the summary" in str(request.messages[1].content) and broken:
            raise RuntimeError("out of order")
        return model(request)

    model = Recorder()
    policy = AgentPolicy(per_thread=GrowingWindow(2, 4), model_attempts=1)
    async with running(network, make_runner("helper", script, middleware=[Memory()], policy=policy)):
        mia = await Person.join(network, "mia")
        for number in range(4):
            await mia.ask("helper", f"code {number}")
        assert memory_in(model.requests[-1]) == ""
        broken.clear()
        await mia.ask("helper", "code 4")
    assert "code 0, code 1" in memory_in(model.requests[-1])


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="max_chars"):
        Memory(max_chars=10)
