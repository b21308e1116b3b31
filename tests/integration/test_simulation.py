"""Tests of whole networks in simulated time: a seed always gives the same ledger, and nothing is lost, whatever
happens to the network.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from roundelay.agents.models.model import Model, ModelReply, ModelRequest, OnDelta
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import Answer, ScriptedModel, call, finish, send
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import tool
from roundelay.network.config import Limits
from roundelay.network.messages import DirectMessage
from roundelay.simulation import Setting, Simulation, SimulationError, simulate
from roundelay.simulation.faults import FaultPlan, inject_faults
from roundelay.simulation.links import Delay
from roundelay.simulation.virtual_time import Stalled

ORDERS = 4
FAULTS = FaultPlan(drops=3, agent_kills=3, hub_restarts=2, within_s=3)


def desk_script(request: ModelRequest) -> Answer:
    """Script in which the desk asks finance for each person's order, and reports the answer."""
    view = read_prompt(request)
    if view.turn > 1:
        return finish()
    match view.incoming_sender.partition("-")[0], request.agent_id:
        case "mia", "desk":
            return [send("finance", f"{view.incoming_sender}: {view.incoming_text}"), finish()]
        case "desk", "finance":
            return [send("desk", f"approved for {view.incoming_text}"), finish()]
        case _:
            return [
                send(view.incoming_text.removeprefix("approved for ").partition(":")[0], view.incoming_text),
                finish(),
            ]


def make(agent_id: str) -> Callable[[], SimpleAgentRunner]:
    return lambda: SimpleAgentRunner(
        agent_id,
        instruction="You are under test.",
        model=ScriptedModel(desk_script),
        policy=AgentPolicy(model_attempts=20),
    )


async def run_desk(simulation: Simulation, plan: FaultPlan = FaultPlan()) -> bytes:  # noqa: B008 (frozen)
    for agent_id in ("desk", "finance"):
        await simulation.start_agent(make(agent_id))
    people = [await simulation.join_person(f"mia-{number}") for number in range(2)]
    faults = asyncio.create_task(inject_faults(simulation, plan))
    for number in range(ORDERS):
        for person in people:
            await person.client.send_text("desk", f"order {number}")
        await asyncio.sleep(0.7)
    await faults
    await simulation.idle()
    for person in people:
        name = person.client.agent_id
        heard = sorted(message.text for message in person.heard)
        assert heard == [f"approved for {name}: order {number}" for number in range(ORDERS)]
    return simulation.export()


def digest(seed: int, plan: FaultPlan) -> str:
    setting = Setting(seed, model_failure_rate=0.1 if plan else 0.0)
    return hashlib.sha256(simulate(lambda simulation: run_desk(simulation, plan), setting)).hexdigest()


@pytest.mark.parametrize(
    "plan", [pytest.param(FaultPlan(), id="calm", marks=pytest.mark.full), pytest.param(FAULTS, id="faults")]
)
def test_a_seed_gives_one_ledger_in_this_process_and_in_another(plan: FaultPlan) -> None:
    here = [digest(seed, plan) for seed in (1, 2, 1)]
    assert here[0] == here[2]
    assert here[0] != here[1]  # the seed has an effect
    program = f"from tests.integration.test_simulation import *; print(digest(1, {plan!r}))"
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == here[0]


def test_hours_of_waiting_take_no_hours_and_times_are_virtual() -> None:
    async def main(simulation: Simulation) -> int:
        mia, bob = [await simulation.join_person(agent_id) for agent_id in ("mia", "bob")]
        await mia.client.send_text("bob", "see you")
        await asyncio.sleep(7_200)
        await bob.client.send_text("mia", "hello again")
        await simulation.idle()
        first, second = simulation.messages
        assert [message.text for message in mia.heard] == ["hello again"]
        return second.sent_at - first.sent_at

    began = time.monotonic()
    assert abs(simulate(main) - 7_200_000) < 1000
    assert time.monotonic() - began < 30


def test_idle_waits_for_what_is_under_way_and_for_nothing_else() -> None:
    async def main(simulation: Simulation) -> None:
        def script(request: ModelRequest) -> Answer:
            view = read_prompt(request)
            if view.turn > 1:
                return finish()
            if request.agent_id == "asker":
                return call("ask", agent_ids=["mia"], text="Which one?", timeout_s=600)
            return [send("mia", "heard"), finish()]

        mia = await simulation.join_person("mia")
        for agent_id in ("asker", "away"):
            await simulation.start_agent(
                lambda agent_id=agent_id: SimpleAgentRunner(  # type: ignore[misc]
                    agent_id, instruction="x", model=ScriptedModel(script)
                )
            )
        await simulation.kill("away")
        await mia.client.send_text("away", "are you there?")
        await mia.client.send_text("asker", "do it")
        began_s = simulation.elapsed_s
        await simulation.idle()  # the question waits for mia, and the killed agent does not block idle
        assert [message.text for message in mia.heard] == ["Which one?"]
        assert 0 < simulation.elapsed_s - began_s < 5
        await simulation.restart("away")
        await simulation.idle()
        assert [message.text for message in mia.heard] == ["Which one?", "heard"]

    simulate(main, model_delay=Delay(100, 2000))


def test_idle_waits_for_a_tool_that_takes_its_time() -> None:
    async def main(simulation: Simulation) -> None:
        @tool
        async def think() -> str:
            """Think for a while."""
            await asyncio.sleep(30)
            return "thought"

        def script(request: ModelRequest) -> Answer:
            return call("think") if read_prompt(request).turn == 1 else [send("mia", "done"), finish()]

        await simulation.start_agent(
            lambda: SimpleAgentRunner("sage", instruction="x", model=ScriptedModel(script), tools=[think])
        )
        mia = await simulation.join_person("mia")
        await mia.client.send_text("sage", "think")
        await simulation.idle()
        assert [message.text for message in mia.heard] == ["done"]
        assert simulation.elapsed_s > 30

    simulate(main)


def test_idle_gives_up_in_time() -> None:
    async def main(simulation: Simulation) -> None:
        def ping(request: ModelRequest) -> Answer:
            view = read_prompt(request)
            other = "b" if request.agent_id == "a" else "a"
            return finish() if view.turn > 1 else [send(other, "ping"), finish()]

        for agent_id in ("a", "b"):
            await simulation.start_agent(
                lambda agent_id=agent_id: SimpleAgentRunner(  # type: ignore[misc]
                    agent_id, instruction="x", model=ScriptedModel(ping)
                )
            )
        mia = await simulation.join_person("mia")
        await mia.client.send_text("a", "go")
        with pytest.raises(TimeoutError):
            await simulation.idle(at_most_s=5)
        assert len(simulation.messages) > 5

    simulate(main, limits=Limits(max_root_messages=10_000, max_hops=10_000))


def test_a_sync_tool_runs_in_the_loop_at_one_moment() -> None:
    times: list[float] = []

    async def main(simulation: Simulation) -> bytes:
        @tool
        def look() -> str:
            """Look at the clock."""
            times.append(simulation.elapsed_s)
            time.sleep(0.05)  # in a thread, simulated time would exceed the tool's timeout
            return "seen"

        def script(request: ModelRequest) -> Answer:
            return call("look") if read_prompt(request).turn == 1 else finish()

        await simulation.start_agent(
            lambda: SimpleAgentRunner("watch", instruction="x", model=ScriptedModel(script), tools=[look])
        )
        mia = await simulation.join_person("mia")
        await mia.client.send_text("watch", "look")
        await simulation.idle()
        return simulation.export()

    assert simulate(main, seed=3) == simulate(main, seed=3)
    assert times[0] == times[1]
    assert b'"tool":"look","content":"seen"' in simulate(main, seed=3)


def test_what_a_killed_hub_had_not_committed_is_sent_again() -> None:
    async def main(simulation: Simulation) -> None:
        mia, bob = [await simulation.join_person(agent_id) for agent_id in ("mia", "bob")]
        sending = [asyncio.create_task(mia.client.send_text("bob", str(number))) for number in range(20)]
        await asyncio.sleep(0.012)
        await simulation.kill_hub()
        stored = len(simulation.messages)
        await asyncio.sleep(5)
        assert len(simulation.messages) == stored
        await simulation.restart_hub()
        await asyncio.gather(*sending)
        await simulation.idle()
        assert sorted(message.text for message in bob.heard) == sorted(map(str, range(20)))
        assert len(simulation.messages) == 20

    for seed in range(5):
        simulate(main, seed=seed, link_delay=Delay(0, 30))


def test_what_cannot_be_done_says_so() -> None:
    async def main(simulation: Simulation) -> None:
        for work in (simulation.kill("nobody"), simulation.stop("nobody"), simulation.disconnect("nobody")):
            with pytest.raises(SimulationError, match="nobody"):
                await work
        with pytest.raises(SimulationError, match="The agent nobody was never started"):
            await simulation.restart("nobody")
        await simulation.start_agent(make("desk"))
        with pytest.raises(SimulationError, match="running already"):
            await simulation.start_agent(make("desk"))
        await simulation.join_person("mia")
        with pytest.raises(SimulationError, match="mia has joined already"):
            await simulation.join_person("mia")

    simulate(main)


class Sleepy:
    """A model that waits for an event that never happens in simulated time."""

    name = "sleepy"

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        await asyncio.sleep(0.1)
        return ModelReply("late")


async def never_answer(_: ModelRequest) -> Answer:
    await asyncio.get_running_loop().create_future()
    return None


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Sleepy(), "the model sleepy of desk waits.*clock: real"),
        (ScriptedModel(never_answer), "the model scripted of desk"),
    ],
)
def test_a_model_that_waits_for_ever_is_named(model: Model, said: str) -> None:
    async def main(simulation: Simulation) -> None:
        policy = AgentPolicy(model_timeout_s=math.inf)
        await simulation.start_agent(lambda: SimpleAgentRunner("desk", instruction="x", model=model, policy=policy))
        mia = await simulation.join_person("mia")
        await mia.client.send_text("desk", "hello")
        await simulation.idle(math.inf)

    with pytest.raises(Stalled, match=said):
        simulate(main, horizon_s=600)


def test_options_hold_beside_a_setting() -> None:
    async def main(simulation: Simulation) -> Setting:
        return simulation.setting

    assert simulate(main, Setting(visibility="strict"), seed=7) == Setting(visibility="strict", seed=7)


async def test_a_coroutine_is_told_to_call_from_a_plain_function() -> None:
    with pytest.raises(SimulationError, match="plain function"):
        simulate(run_desk)


def test_the_export_holds_every_message_as_it_was_delivered() -> None:
    async def main(simulation: Simulation) -> bytes:
        mia, bob = [await simulation.join_person(agent_id) for agent_id in ("mia", "bob")]
        await mia.client.send_text("bob", "hello")
        await simulation.idle()
        [message] = bob.heard
        assert isinstance(message, DirectMessage)
        return simulation.export()

    _, *lines = [json.loads(line) for line in simulate(main).splitlines()]
    assert [line["type"] for line in lines] == ["registered", "registered", "message"]
    assert lines[-1]["data"]["content"] == "hello"
