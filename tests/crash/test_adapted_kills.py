"""Tests of promise P6 for agents of other frameworks: an agent that is killed anywhere answers once, and runs its
framework again only if nothing was recorded. docs/adapters.md.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from roundelay.agents.reaction_ids import reaction_id
from roundelay.network.client import NetworkClient
from tests.support.forks import Process, start_python
from tests.support.node import running_node

PROCESS = Path(__file__).with_name("adapted_process.py")
TIMEOUT_S = 60.0
PLACES = [
    (place, when) for place in ("started", "run", "model_reply", "reply", "finished") for when in ("before", "after")
]
RUN_AGAIN = {("run", "after"), ("model_reply", "before"), ("reply", "before"), ("finished", "before")}
"""Points at which the framework had run, but the ledger did not show it."""
ROUNDS = 3
KINDS = ["started", "note", "model_reply", "finished"]


async def live(place: str, when: str, folder: Path, url: str) -> Process:
    environment = {**os.environ, "ROUNDELAY_URL": url, "ROUNDELAY_HOME": str(folder)}
    return await start_python(PROCESS, place, when, folder, env=environment)


async def kill_at(folder: Path, *places: tuple[str, str], **limits: int) -> int:
    """Kill an agent at these points, with one question for each, and start it again. Return the number of framework
    runs.
    """
    async with (
        running_node(limits=limits) as node,
        NetworkClient("mia", node.url, kind="human", token=node.owner_token) as mia,
    ):
        messages = mia.__aiter__()
        first = await live("", "", folder, node.url)
        while "bob" not in {it["agent_id"] for it in (await mia.call("network.list_agents", {}))["agents"]}:
            pass
        first.kill()
        await first.wait()
        for number, (place, when) in enumerate(places):
            asked = await mia.send_text("bob", f"question {number}")
            async with asyncio.timeout(TIMEOUT_S):
                mortal = await live(place, when, folder, node.url)
                assert await mortal.wait() == -9, "it came there"
                other = await live("", "", folder, node.url)
                try:
                    assert (await anext(messages)).text == f"question {number}!"
                    reaction, kinds = reaction_id("bob", asked.seq, mia.welcome.network.epoch), list[str]()
                    while "finished" not in kinds:
                        page = await mia.call("network.records", {"reaction": reaction})
                        kinds = [it["kind"] for it in page["records"]]
                finally:
                    other.kill()
                    await other.wait()
            assert kinds == KINDS, (place, when)
        said = [it.text for it in (await mia.history("direct:bob~mia", limit=200)).messages if it.sender_id == "bob"]
        assert said == [f"question {number}!" for number in range(len(places))]
    return len((folder / "runs").read_text().splitlines())


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_an_adapted_agent_that_is_killed_anywhere_answers_once(tmp_path: Path) -> None:
    assert await kill_at(tmp_path, *PLACES * ROUNDS) == ROUNDS * (len(PLACES) + len(RUN_AGAIN))


async def test_killed_behind_its_answer_it_does_not_answer_again(tmp_path: Path) -> None:
    """The hub has no batches, so the end is not in the same commit as the answer."""
    assert await kill_at(tmp_path, ("reply", "after"), max_batch=1) == 1


async def test_killed_behind_the_record_of_its_run_it_does_not_run_again(tmp_path: Path) -> None:
    assert await kill_at(tmp_path, ("model_reply", "after")) == 1
