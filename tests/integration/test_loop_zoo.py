"""Tests of all known loops: each ends within its budget, and its initiator and the operators are notified.
Conversations that are not loops are never stopped.

Loops run with small limits, so that they end soon, and in simulated time. Conversations that are not loops run with a
node's default limits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest

from roundelay.agents.agent_tools import remote_agent_tool, remote_handoff
from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import Script, call, finish, send
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.config import Limits
from roundelay.network.errors import LoopStopped
from roundelay.simulation import Simulation, simulate
from tests.support.agents import make_runner

Mode = Literal["causes", "none", "fresh"]
SMALL, LONG = 12, 300


def limits(budget: int) -> Limits:
    return Limits(
        max_hops=budget, max_root_messages=2 * budget, max_uncaused_answers=budget, root_messages_per_s=100_000, sends_per_s=100_000
    )  # fmt: skip


class Zoo:
    """Clients that answer every message. ``aims`` maps each to its recipients. In the mode ``fresh``, every fifth
    message names no cause.
    """

    def __init__(self, simulation: Simulation, mode: Mode) -> None:
        self.simulation = simulation
        self.mode = mode
        self.stops: list[LoopStopped] = []
        self.taken = 0

    async def join(self, agent_id: str, aim: str, kind: Literal["agent", "human"] = "agent") -> NetworkClient:
        client = await self.simulation.network.join(agent_id, kind=kind)
        self.simulation._loop.create_task(self._answer(client, aim))
        return client

    async def _answer(self, client: NetworkClient, aim: str) -> None:
        async for message in client:
            if message.kind == "mod":
                continue
            is_caused = self.mode == "causes" or (self.mode == "fresh" and message.hops < 5)
            try:
                await client.send(aim, "and on it goes", cause=message.seq if is_caused else None)
                self.taken += 1
            except LoopStopped as error:
                self.stops.append(error)


def told(simulation: Simulation) -> list[AnyMessage]:
    return [message for message in simulation.messages if message.sender_id == "network"]


RINGS = {"pair": 2, "triangle": 3, "ring": 17}


async def run_loop(simulation: Simulation, kind: str, mode: Mode, budget: int) -> None:
    zoo = Zoo(simulation, mode)
    operator = await simulation.join_person("mia")
    turns = 6 if mode == "fresh" else 1  # number of messages of which one names no cause
    most = budget * 2
    if kind == "bridge":  # a program that joins as a person and returns every message
        await zoo.join("a0", "agent:bridge")
        await zoo.join("bridge", "agent:a0", kind="human")
        most = 8 * budget * turns
    elif kind == "storm":
        for number in range(10):
            await zoo.join(f"a{number}", "broadcast")
        most = (
            40 * budget * turns
        )  # each of the ten has its own limit of messages without a cause, and simultaneous ones count once
    else:
        for number in range(RINGS[kind]):
            await zoo.join(f"a{number}", f"agent:a{(number + 1) % RINGS[kind]}")
        most = max(most, (budget + 6) * RINGS[kind] * turns)
    sent = await operator.client.send("broadcast" if kind == "storm" else "agent:a0", "begin")
    await simulation.idle(at_most_s=3600)
    assert zoo.stops
    assert zoo.taken <= most
    stopped = await operator.client.call("network.stopped")
    if mode == "causes":
        assert [it["root"] for it in stopped["conversations"]] == [sent.seq]
        assert {message.to for message in told(simulation)} == {"agent:mia"}
        assert [message.to for message in operator.heard if message.sender_id == "network"]
    else:
        assert stopped["agents"] or stopped["conversations"]
        heard = {message.to for message in told(simulation)}
        assert {f"agent:{it['agent_id']}" for it in stopped["agents"]} <= heard
    assert 0 < len(told(simulation)) <= 3 * (len(stopped["agents"]) + len(stopped["conversations"]))


LOOPS = [*RINGS, "storm", "bridge"]


@pytest.mark.parametrize("mode", ["causes", "none", "fresh"])
@pytest.mark.parametrize("kind", LOOPS)
def test_a_loop_ends_within_its_budget_and_is_told(kind: str, mode: Mode) -> None:
    simulate(lambda simulation: run_loop(simulation, kind, mode, SMALL), limits=limits(SMALL), operators=("mia",))


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["causes", "none", "fresh"])
@pytest.mark.parametrize("kind", LOOPS)
def test_a_loop_ends_within_a_large_budget_too(kind: str, mode: Mode) -> None:
    simulate(lambda simulation: run_loop(simulation, kind, mode, LONG), limits=limits(LONG), operators=("mia",))


def other(agent_id: str) -> str:
    return "bob" if agent_id == "ann" else "ann"


def by_ask(request: ModelRequest) -> Any:
    if request.turn > 1:
        return read_prompt(request).tool_results[-1].content
    return call("ask", agent_ids=[other(request.agent_id)], text="and you?", timeout_s=5)


def by_handoff(request: ModelRequest) -> Any:
    return call(f"transfer_to_{other(request.agent_id)}", message="you do it") if request.turn == 1 else finish()


def by_tools(request: ModelRequest) -> Any:
    return call(f"ask_{other(request.agent_id)}", request="and you?") if request.turn == 1 else finish()


def by_message(request: ModelRequest) -> Any:
    return send(other(request.agent_id), "after you") if request.turn == 1 else finish()


@pytest.mark.parametrize("script", [by_ask, by_handoff, by_tools, by_message])
def test_a_loop_of_agents_ends_by_whatever_they_use(script: Script) -> None:
    async def main(simulation: Simulation) -> None:
        mia = await simulation.join_person("mia")

        def make(agent_id: str) -> Callable[[], Any]:
            peer = other(agent_id)
            tools = {by_handoff: [remote_handoff(peer)], by_tools: [remote_agent_tool(peer)]}.get(script, [])  # type: ignore[call-overload]
            return lambda: make_runner(agent_id, script, tools=tools)

        for agent_id in ("ann", "bob"):
            await simulation.start_agent(make(agent_id))
        sent = await mia.client.send_text("ann", "begin")
        await simulation.idle(at_most_s=3600)
        assert len([it for it in simulation.messages if it.root == sent.seq]) <= 13
        stopped = [it["root"] for it in (await mia.client.call("network.stopped"))["conversations"]]
        if stopped:  # agents that wait for each other never reach the limit, because the circle is detected
            assert stopped == [sent.seq]
            assert [it.to for it in told(simulation)] == ["agent:mia"]
        else:
            assert script is not by_message

    simulate(main, limits=Limits(max_hops=6, max_root_messages=12), operators=("mia",))


# -- conversations that are not loops, with a node's default limits


def say(request: ModelRequest) -> Any:
    return read_prompt(request).tool_results[-1].content[:200]


def team(shape: str) -> dict[str, list[str]]:
    """Return the agents that each agent asks. Mia asks ``a0``."""
    if shape == "chain":
        return {f"a{n}": [f"a{n + 1}"] if n < 39 else [] for n in range(40)}
    if shape == "tree":
        return {f"a{n}": [f"a{child}" for child in (2 * n + 1, 2 * n + 2) if child < 22] for n in range(22)}
    if shape == "star":
        return {f"a{n}": [f"a{m}" for m in range(1, 22)] if n == 0 else [] for n in range(22)}
    size = 100  # the rate limit counts by second, so a plan takes several
    return {"a0": ["a1"], "a1": [f"a{n}" for n in range(2, size + 2)], **{f"a{n}": [] for n in range(2, size + 2)}}


@pytest.mark.parametrize("shape", ["chain", "tree", "star", "fan-out"])
def test_what_is_no_loop_is_not_stopped(shape: str) -> None:
    asks = team(shape)

    async def main(simulation: Simulation) -> None:
        mia = await simulation.join_person("mia")
        clients = {name: await simulation.network.join(name) for name in asks}
        waiting: dict[str, tuple[AnyMessage, int]] = {}
        errors: list[Exception] = []

        async def work(name: str) -> None:
            async for message in clients[name]:
                try:
                    if asks[name] and name not in waiting:
                        waiting[name] = (message, len(asks[name]))
                        for to in asks[name]:
                            await clients[name].send_text(to, "and you?", cause=message.seq)
                        continue
                    question, left = waiting.get(name, (message, 1))
                    waiting[name] = (question, left - 1)
                    if left <= 1:
                        await clients[name].send_text(
                            question.sender_id, "done", cause=question.seq, reply_to=question.seq
                        )
                except LoopStopped as error:
                    errors.append(error)

        for name in asks:
            simulation._loop.create_task(work(name))
        await mia.client.send_text("a0", "begin")
        answer = await simulation.wait_for(lambda message: message.to == "agent:mia", at_most_s=600)
        assert (answer.text, errors, told(simulation)) == ("done", [], [])

    simulate(main)


def test_a_question_to_a_hundred_is_answered_by_all_of_them() -> None:
    async def main(simulation: Simulation) -> None:
        mia = await simulation.join_person("mia")
        zoo = Zoo(simulation, "causes")
        for number in range(100):
            await zoo.join(f"a{number}", "agent:mia")
        await mia.client.broadcast("who is there?")
        await simulation.idle()
        assert (zoo.taken, zoo.stops, len(mia.heard)) == (100, [], 100)

    simulate(main)
