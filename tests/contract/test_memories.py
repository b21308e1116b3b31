"""Tests of `network.memory`: an agent's memory of a thread is returned only if everything that it summarizes may be
shown. docs/protocol.md.
"""

from __future__ import annotations

from typing import Any

import pytest

from roundelay.network.addresses import memory_of
from tests.contract.test_explaining import Team
from tests.support.node import Node
from tests.support.wire import Frame, WireSession

THREAD = "direct:helper~worker"


async def write(session: WireSession, text: str, seqs: list[int], earlier: int | None = None) -> int:
    body: dict[str, Any] = {"thread_id": THREAD, "text": text, "seqs": seqs, "earlier": earlier}
    seq: int = (await session.record(memory_of(THREAD), "memory", body))["seq"]
    return seq


async def recall(session: WireSession, trigger: Frame, **args: Any) -> list[tuple[str, int]]:
    value = await session.call("network.memory", {"threads": [THREAD], "trigger": trigger["seq"], **args})
    return [(it["text"], it["messages"]) for it in value["memories"]]


@pytest.fixture
async def team(node: Node) -> Team:
    return await Team.gather(node)


async def tell(team: Team, session: WireSession, text: str) -> Frame:
    """Let a person ask helper, and helper ask worker. Return helper's message."""
    asked = await session.send("agent:helper", text)
    return await team.helper.send("agent:worker", f"about {text}", cause=asked["seq"])


async def test_a_memory_is_given_where_everything_that_it_was_made_of_may_be_shown(team: Team) -> None:
    bobs = [await tell(team, team.bob, f"bob {number}") for number in range(2)]
    mias = [await tell(team, team.mia, f"mia {number}") for number in range(3)]
    assert await recall(team.worker, mias[-1]) == []
    of_bob = await write(team.worker, "bob's", [it["seq"] for it in bobs])
    of_mia = await write(team.worker, "mia's", [mias[0]["seq"]])
    await write(team.worker, "both", [mias[1]["seq"]], earlier=of_bob)
    await write(team.worker, "mia's, and on", [mias[1]["seq"]], earlier=of_mia)
    assert await recall(team.worker, mias[-1]) == [("mia's, and on", 2)]
    assert await recall(team.worker, mias[-1], visibility="strict") == [("mia's, and on", 2)]
    assert await recall(team.worker, await tell(team, team.bob, "bob 3")) == [("bob's", 2)]
    # A memory of later or unknown messages is never returned.
    assert await recall(team.worker, mias[0]) == [("mia's", 1)]
    await write(team.worker, "of nothing", [])
    await write(team.worker, "of what is gone", [mias[0]["seq"], 999_999])
    await write(team.worker, "of a chain that is cut", [mias[0]["seq"]], earlier=1)
    await team.worker.record(memory_of(THREAD), "memory", {"thread_id": THREAD, "text": 5})
    assert await recall(team.worker, mias[-1]) == [("mia's, and on", 2)]


async def test_a_memory_that_sums_up_too_much_at_once_is_none_and_a_long_chain_is_one(team: Team) -> None:
    """A program may write anything into its records, but one record limits the cost of a recall."""
    trigger = await tell(team, team.mia, "mia")
    await write(team.worker, "too long", [trigger["seq"]] * 1001)
    assert await recall(team.worker, trigger) == []
    earlier: int | None = None
    for number in range(50):
        earlier = await write(team.worker, f"memory {number}", [trigger["seq"]] * 1000, earlier=earlier)
    await write(team.worker, "of nothing but an earlier one", [], earlier=earlier)
    await write(team.worker, "of a number that is no seq", [2**64], earlier=earlier)
    assert await recall(team.worker, trigger) == [("of nothing but an earlier one", 50_000)]


async def test_a_memory_is_its_writers_alone(team: Team) -> None:
    trigger = await tell(team, team.mia, "mia")
    await write(team.helper, "the helper's", [trigger["seq"]])
    assert await recall(team.worker, trigger) == []
    assert await recall(team.helper, trigger) == [("the helper's", 1)]
