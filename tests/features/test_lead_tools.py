"""Tests of the tools of agents that lead others, in simulated time: `gather` with quorum and deadline,
`wait_until_quiet`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from roundelay.agents.lead_tools import gather, wait_until_quiet
from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import Action, Answer, ScriptedModel, call, finish, say, send
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import Tool, tool
from roundelay.network.client.gather import SchemaForm
from roundelay.network.client.gather import gather as gather_from_program
from roundelay.network.errors import InvalidArguments
from roundelay.simulation import Simulation, simulate

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
Script = Callable[[ModelRequest], Answer]
SLOW_S = 100


def make(agent_id: str, script: Script, *tools: Tool) -> Callable[[], SimpleAgentRunner]:
    return lambda: SimpleAgentRunner(agent_id, instruction="x", model=ScriptedModel(script), tools=tools)


@tool(idempotent=True, timeout_s=1000)
async def be_slow() -> str:
    """Take some time."""
    await asyncio.sleep(SLOW_S)
    return "done"


def worker(answer: str) -> Script:
    return lambda _: [say(answer), finish()]


def slow(request: ModelRequest) -> Answer:
    return call("be_slow") if read_prompt(request).turn == 1 else [say('{"n": 9}'), finish()]


WORKERS: dict[str, Script] = {
    "ann": worker('{"n": 1}'),
    "bob": worker('```json\n{"n": 2}\n```'),
    "cat": worker("seven, I think"),
    "dan": slow,
}


def lead(*first: Action) -> Script:
    """Return a script for a lead that makes one call and sends its result to the person."""

    def script(request: ModelRequest) -> Answer:
        view = read_prompt(request)
        if view.incoming_sender != "mia":  # a late answer
            return finish()
        return list(first) if view.turn == 1 else [say(view.tool_results[-1].content), finish()]

    return script


async def start(simulation: Simulation, *first: Action) -> Any:
    for agent_id, script in WORKERS.items():
        await simulation.start_agent(make(agent_id, script, be_slow))
    await simulation.start_agent(make("lead", lead(*first), gather, wait_until_quiet))
    return await simulation.join_person("mia")


def run_gather(**options: Any) -> tuple[str, float, list[str]]:
    """Let the lead gather. Return the lead's message to the person, the seconds that the lead took, and all texts
    that the lead received.
    """

    async def main(simulation: Simulation) -> tuple[str, float, list[str]]:
        mia = await start(simulation, call("gather", agent_ids=[*WORKERS], text="How many?", schema=SCHEMA, **options))
        began_s = simulation.elapsed_s
        await mia.client.send_text("lead", "count")
        answer = await simulation.wait_for(lambda message: message.to == "agent:mia", 10_000)
        elapsed_s = simulation.elapsed_s - began_s
        await simulation.idle(10_000)
        await asyncio.sleep(SLOW_S)
        await simulation.idle(10_000)
        started = [row for row in simulation.rows if row.type == "record" and row.label == "started"]
        return answer.text, elapsed_s, [row.actor for row in started]

    return simulate(main)


def test_gather_waits_for_all_and_names_the_answer_that_does_not_match() -> None:
    text, elapsed_s, _ = run_gather()
    assert text.startswith("3 of 4 answered; missing: cat (its answer is not JSON: 'seven, I think').")
    assert '<answer sender="ann">{"n": 1}</answer>' in text
    assert '<answer sender="bob">{"n": 2}</answer>' in text
    assert elapsed_s > SLOW_S


def test_gather_ends_at_its_quorum_and_late_answers_start_nothing() -> None:
    text, elapsed_s, started = run_gather(quorum=2)
    assert text.startswith("2 of 4 answered; missing: ")
    assert "dan (not needed any more)" in text
    assert elapsed_s < SLOW_S
    assert started.count("lead") == 1


def test_gather_ends_at_its_deadline() -> None:
    text, elapsed_s, _ = run_gather(timeout_s=30)
    assert "dan (no answer within 30 s)" in text
    assert elapsed_s < SLOW_S


@pytest.mark.parametrize("kill_after_s", [0.5, 2.0, 20.0, 60.0])
def test_killed_gather_asks_nobody_twice(kill_after_s: float) -> None:
    async def main(simulation: Simulation) -> tuple[str, list[str]]:
        mia = await start(simulation, call("gather", agent_ids=["ann", "dan"], text="How many?", schema=SCHEMA))
        await mia.client.send_text("lead", "count")
        await asyncio.sleep(kill_after_s)
        await simulation.restart("lead")
        await simulation.wait_for(lambda message: message.to == "agent:mia", 10_000)
        await simulation.idle(10_000)
        asked = [message.to for message in simulation.messages if message.sender_id == "lead"]
        return mia.heard[-1].text, asked

    text, asked = simulate(main)
    assert text.startswith("2 of 2 answered.")
    assert sorted(asked) == ["agent:ann", "agent:dan", "agent:mia"]


def test_lead_waits_until_the_work_that_it_handed_out_is_done() -> None:
    async def main(simulation: Simulation) -> tuple[str, float]:
        mia = await start(simulation, send("dan", "work"), call("wait_until_quiet", timeout_s=1000))
        began_s = simulation.elapsed_s
        await mia.client.send_text("lead", "go")
        await simulation.wait_for(lambda message: message.to == "agent:mia", 10_000)
        answer = next(message for message in simulation.messages if message.to == "agent:mia")
        return answer.text, simulation.elapsed_s - began_s

    text, elapsed_s = simulate(main)
    assert text == "All done: nothing of this conversation is open at anybody else."
    assert elapsed_s > SLOW_S


def test_wait_that_ends_too_early_names_who_still_works() -> None:
    async def main(simulation: Simulation) -> str:
        mia = await start(simulation, send("dan", "work"), call("wait_until_quiet", timeout_s=10))
        await mia.client.send_text("lead", "go")
        await simulation.wait_for(lambda message: message.to == "agent:mia", 10_000)
        return next(message.text for message in simulation.messages if message.to == "agent:mia")

    assert simulate(main).startswith("Not everything is done after 10 s. Still open:\ndan: work (#")


def test_program_gathers_answers_and_repeats_under_the_same_id() -> None:
    async def main(simulation: Simulation) -> list[Any]:
        mia = await start(simulation, finish())
        found = []
        for _ in range(2):
            found.append(
                await gather_from_program(
                    mia.client, [*WORKERS, "nobody"], "How many?", SCHEMA, timeout_s=1000, gather_id="g1"
                )
            )
        asked = [message for message in simulation.messages if message.sender_id == "mia"]
        return [found, len(asked)]

    [first, second], asked = simulate(main)
    assert first == second
    assert first.answers == {"ann": {"n": 1}, "bob": {"n": 2}, "dan": {"n": 9}}
    assert set(first.missing) == {"cat", "nobody"}
    assert asked == len(WORKERS)


def test_program_learns_at_once_that_nobody_will_answer() -> None:
    async def main(simulation: Simulation) -> tuple[str, float]:
        await simulation.start_agent(make("mute", lambda _: finish()))
        mia = await simulation.join_person("mia")
        began_s = simulation.elapsed_s
        found = await gather_from_program(mia.client, ["mute"], "How many?", SCHEMA, timeout_s=5000, gather_id="g1")
        return found.summary, simulation.elapsed_s - began_s

    summary, elapsed_s = simulate(main)
    assert summary.startswith("0 of 1 answered; missing: mute (")
    assert elapsed_s < 100


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "string", "pattern": "(a+)+$"}, "may not use pattern"),
        ({"$ref": "http://localhost/x"}, r"may not use \$ref"),
        ({"type": 7}, "invalid"),
        ({"enum": ["x" * 9000]}, "At most 8192 bytes"),
    ],
)
def test_hostile_schema_is_refused(schema: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArguments, match=problem):
        SchemaForm(schema)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"n": 1}', ""),
        ('{"n": "1"}', "n: '1' is not of type 'integer'"),
        ("[" * 100_000, "its answer is not JSON"),
        (json.dumps({"n": "x" * 5000}), "its answer does not match"),
    ],
)
def test_answer_is_checked_and_its_problem_is_short(text: str, problem: str) -> None:
    found = SchemaForm(SCHEMA).read(text, None)[1]
    assert problem in found
    assert bool(found) == bool(problem)
    assert len(found) <= 200
