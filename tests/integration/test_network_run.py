"""Tests of agents that run in a program's own process until a context ends."""

from __future__ import annotations

import pytest

from roundelay.app import Network
from roundelay.network.errors import Superseded
from tests.support.agents import Person, make_runner


class Broken(RuntimeError):
    """Error of an agent's own code."""


async def test_agents_answer_inside_the_block_and_are_offline_after_it() -> None:
    runner = make_runner("ann", lambda request: "Hello!")
    async with Network.open() as network:
        mia = await Person.join(network, "mia")
        for _ in range(2):
            async with network.run(runner):
                assert (await mia.ask("ann", "Are you there?")).text == "Hello!"
            listed = await mia.client.call("network.list_agents", {"online": True})
            assert [it["agent_id"] for it in listed["agents"]] == ["mia"]


async def test_agent_that_fails_to_start_ends_the_block_and_stops_the_others() -> None:
    ann, bob = make_runner("ann", lambda request: "Hello!"), make_runner("bob", lambda request: "Hello!")

    async def fail() -> None:
        raise Broken

    bob.setup = fail  # type: ignore[method-assign]
    async with Network.open() as network:
        with pytest.raises(Broken):
            async with network.run(ann, bob):
                pytest.fail("the block has begun")
        with pytest.raises(RuntimeError):
            _ = ann.client


async def test_agent_that_is_superseded_ends_the_block_with_its_error() -> None:
    runner = make_runner("ann", lambda request: "Hello!")
    async with Network.open() as network:
        with pytest.raises(Superseded, match="ann"):
            async with network.run(runner):
                await network.join("ann", role="reactor")
