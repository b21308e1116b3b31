"""Tests of thousands of simple agents in one simulation: they use the hub's own sessions and limits, and a seed
always gives the same run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest

from bench.simulated_crowd import Crowd, Incoming, Message
from roundelay.network.config import Limits
from roundelay.network.errors import LoopStopped, UnknownRecipient
from roundelay.simulation import Setting, Simulation, SimulationError, simulate
from tests.support.counts import Note


def spread(simulation: Simulation, heard: list[str], **options: bool) -> Crowd:
    def pass_on(incoming: Incoming) -> Iterable[Message]:
        if incoming.agent_id in heard:
            return
        heard.append(incoming.agent_id)
        number = int(incoming.agent_id.removeprefix("a-"))
        for step in (1, 3):
            yield Message(f"a-{(number * 7 + step) % 50}", incoming.text)

    return Crowd(simulation, pass_on, **options)


async def run_rumour(simulation: Simulation) -> tuple[list[str], bytes]:
    heard: list[str] = []
    crowd = spread(simulation, heard)
    await crowd.join([f"a-{number}" for number in range(50)])
    crowd.send("a-0", "a-1", "a rumour")
    await simulation.idle()
    assert crowd.errors == []
    return heard, simulation.export()


def test_the_seed_decides_who_reacts_first_and_gives_one_ledger() -> None:
    first, again, other = (simulate(run_rumour, Setting(seed)) for seed in (1, 1, 2))
    assert first == again
    assert sorted(first[0]) == sorted(other[0])
    assert first[0] != other[0]


def test_what_a_crowd_says_has_causes_and_limits_and_reaches_everybody_else() -> None:
    async def main(simulation: Simulation) -> None:
        def echo(incoming: Incoming) -> Iterable[Message]:
            return [Message(incoming.sender_id, incoming.text), Message("mia", "heard it"), Message("nobody", "?")]

        mia = await simulation.join_person("mia")
        crowd = Crowd(simulation, echo)
        await crowd.join(["a", "b"])
        crowd.send("a", "b", "ping")
        await simulation.idle()
        assert len(crowd) == 2
        assert {message.sender_id for message in mia.heard} == {"a", "b"}
        assert max(message.hops for message in simulation.messages) == 4
        kinds = {type(error) for error in crowd.errors}
        assert kinds == {UnknownRecipient, LoopStopped}
        await simulation.network.join("watcher")
        crowd.leave()
        assert len(crowd) == 0

    simulate(main, limits=Limits(max_hops=4))


def test_prompts_are_rendered_under_the_same_visibility_as_an_agents() -> None:
    prompts: list[str] = []

    async def main(simulation: Simulation) -> None:
        def read(incoming: Incoming) -> Iterable[Message]:
            prompts.append(incoming.prompt)
            return []

        mia, bob = [await simulation.join_person(it) for it in ("mia", "bob")]
        crowd = Crowd(simulation, read, renders_prompts=True)
        await crowd.join(["a"])
        for person, text in ((mia, "first of mia"), (bob, "secret of bob"), (mia, "second <of> mia")):
            await person.client.send_text("a", text)
            await simulation.idle()
        assert crowd.prompts_rendered == 3

    simulate(main)
    assert "first of mia" in prompts[2]
    assert "<content>second &lt;of&gt; mia</content>" in prompts[2]
    assert "secret of bob" in prompts[1]
    assert "secret of bob" not in prompts[2]


def test_who_left_and_comes_back_says_something_new() -> None:
    async def main(simulation: Simulation) -> None:
        for _ in range(2):
            crowd = Crowd(simulation, lambda incoming: [])
            for text in ("once", "again"):
                await crowd.join(["a", "b"])
                crowd.send("a", "b", text)
                await simulation.idle()
                crowd.leave()
            assert crowd.errors == []
        assert [message.text for message in simulation.messages] == ["once", "again"] * 2

    simulate(main)


def test_a_crowd_that_is_refused_says_so() -> None:
    async def main(simulation: Simulation) -> None:
        await simulation.join_person("mia")
        with pytest.raises(SimulationError, match="mia was closed with 4403"):
            await Crowd(simulation, lambda incoming: []).join(["mia"])
        await simulation.kill_hub()
        with pytest.raises(SimulationError, match="down"):
            await Crowd(simulation, lambda incoming: []).join(["a"])

    simulate(main)


def test_two_thousand_agents_hear_a_broadcast(note: Note) -> None:
    heard: set[str] = set()

    async def main(simulation: Simulation) -> None:
        def hear(incoming: Incoming) -> Iterable[Message]:
            heard.add(incoming.agent_id)
            return []

        crowd = Crowd(simulation, hear)
        await crowd.join([f"a-{number}" for number in range(2_000)])
        mia = await simulation.join_person("mia")
        await mia.client.broadcast("hello everybody")
        await simulation.idle()

    began_s = time.perf_counter()
    simulate(main)
    assert len(heard) == 2_000
    note(agents=2_000, heard=len(heard), seconds=round(time.perf_counter() - began_s, 1))
