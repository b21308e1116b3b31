"""Tests of promise P9, results that nobody reads: unread results are bounded per session, per participant and per
hub. A session that reads gets every answer, and others are served meanwhile.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from roundelay.network.hub import read_budget as room
from tests.chaos.bare import resident_bytes
from tests.support.node import Node, node_process, running_node
from tests.support.wire import WireSession

KB, MB = 1 << 10, 1 << 20
ASKED = 64
RESULT_BYTES, SESSION_BYTES, PARTICIPANT_BYTES, HUB_BYTES = 256 * KB, 1 * MB, 2 * MB, 4 * MB
LIMITS = {
    "max_result_bytes": RESULT_BYTES,
    "session_result_bytes": SESSION_BYTES,
    "participant_result_bytes": PARTICIPANT_BYTES,
    "hub_result_bytes": HUB_BYTES,
}
THREAD = "direct:ann~bob"

Figures = Callable[[], Awaitable[dict[str, float]]]


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    """Run a node with low limits, and with a thread of `ann` and `bob` that fills a result."""
    async with running_node(limits={**LIMITS, "root_messages_per_s": 100_000}) as running:
        await fill_thread(running, 3, 100_000)
        yield running


@pytest.fixture
async def figures(node: Node) -> Figures:
    """Function that returns the hub's figures, as an operator gets them over the wire."""
    operator = await node.person("operator")

    async def ask() -> dict[str, float]:
        found: dict[str, float] = await operator.call("network.status")
        return found

    return ask


async def fill_thread(node: Node, messages: int, size: int) -> None:
    ann, bob = await node.agent("ann"), await node.agent("bob")
    for _ in range(messages):
        await ann.send("agent:bob", "x" * size)
        await bob.ack((await bob.delivery())["message"]["seq"])
    await bob.bye()


async def deaf_session(node: Node, agent_id: str = "bob") -> WireSession:
    """Return a session that reads a frame only on request, through a small buffer."""
    session = await node.connect(max_queue=1, receive_buffer_bytes=8 * KB)
    await session.hello(agent_id, token=node.token_of(agent_id))
    return session


async def ask_histories(session: WireSession, count: int = ASKED) -> None:
    for number in range(count):
        args = {"thread_id": THREAD}
        await session.send_frame({"type": "call", "call_id": f"h{number}", "op": "network.history", "args": args})


async def read_histories(session: WireSession, count: int = ASKED) -> None:
    for number in range(count):
        answer = await session.answer(f"h{number}")
        assert answer["type"] == "result", answer
        assert len(answer["value"]["messages"]) == 2


async def until(figures: Figures, is_so: Callable[[dict[str, float]], bool], most: int) -> dict[str, float]:
    """Return the hub's figures once the condition is true. The held results must stay within the bound at each poll.
    The poll's own results count too.
    """
    async with asyncio.timeout(20):
        while True:
            found = await figures()
            assert found["result_bytes"] <= most + 2 * RESULT_BYTES, found
            if is_so(found):
                return found


async def test_what_a_session_does_not_read_is_bounded_and_comes_when_it_reads(node: Node, figures: Figures) -> None:
    ann = await node.agent("ann")
    deaf = await deaf_session(node)
    await ask_histories(deaf)
    await deaf.send_frame({"type": "send", "message_id": "m", "to": "broadcast", "content": "sends go on"})
    assert (await ann.delivery())["message"]["content"] == "sends go on"  # the hub has therefore received all the calls
    await until(figures, lambda it: it["reads_waiting"] == ASKED - 3, SESSION_BYTES)
    assert (await ann.call("network.history", {"thread_id": THREAD}))["has_more"]  # other sessions are served meanwhile
    await read_histories(deaf)
    await until(figures, lambda it: it["result_bytes"] <= 2 * RESULT_BYTES, SESSION_BYTES)


async def test_eight_sessions_of_one_agent_share_its_bound(node: Node, figures: Figures) -> None:
    ann = await node.agent("ann")
    sessions = [await deaf_session(node) for _ in range(8)]
    for session in sessions:
        await ask_histories(session, 8)
        await session.send_frame({"type": "send", "message_id": f"m{id(session)}", "to": "broadcast", "content": 1})
    for _ in sessions:
        await ann.delivery()
    found = await until(figures, lambda it: it["result_bytes"] > SESSION_BYTES, PARTICIPANT_BYTES)
    assert found["reads_waiting"] > 32
    await ann.call("network.history", {"thread_id": THREAD})
    await asyncio.gather(*(read_histories(session, 8) for session in sessions))


async def test_who_leaves_gives_its_room_back(node: Node, figures: Figures) -> None:
    deaf = await deaf_session(node)
    await ask_histories(deaf)
    await until(figures, lambda it: it["reads_waiting"] > 0, SESSION_BYTES)
    await deaf.drop()
    found = await until(figures, lambda it: it["result_bytes"] <= 2 * RESULT_BYTES, SESSION_BYTES)
    assert found["reads_waiting"] == 0


async def test_who_holds_most_goes_when_everybody_waits(
    node: Node, figures: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "FULL_S", 0.05)
    deaf = []
    for number in range(7):
        eve = await node.agent(f"eve{number}")
        await eve.send("agent:bob", "x" * 200_000)
        for _ in range(2):
            deaf.append(await deaf_session(node, f"eve{number}"))
            args = {"thread_id": f"direct:bob~eve{number}"}
            for asked in range(8):
                call = {"type": "call", "call_id": f"h{asked}", "op": "network.history", "args": args}
                await deaf[-1].send_frame(call)
    ann = await node.agent("ann")
    await ask_histories(ann, 1)
    await read_histories(ann, 1)  # ann's call is answered in bounded time although the others do not read
    await until(figures, lambda it: it["result_bytes"] <= HUB_BYTES, HUB_BYTES)
    ended = {asyncio.create_task(session.closed()) for session in deaf}
    done, others = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
    assert {task.result() for task in done} == {4429}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def test_a_call_that_waits_for_news_holds_no_room(node: Node, figures: Figures) -> None:
    operator = await node.person("mia")
    head = (await operator.call("network.info"))["head"]
    for number in range(8):  # the test starts more reads than one session may hold
        args = {"after": head, "wait_ms": 20_000}
        await operator.send_frame({"type": "call", "call_id": f"w{number}", "op": "network.log", "args": args})
    assert (await operator.call("network.info"))["head"] == head
    await operator.send("broadcast", "news")
    for number in range(8):
        assert (await operator.answer(f"w{number}"))["value"]["messages"]


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells how much memory the hub holds")
async def test_the_memory_of_a_node_stays_bounded_and_comes_back(tmp_path: Path) -> None:
    async with node_process(tmp_path / "team.db") as node:
        await fill_thread(node, 20, 200_000)
        quiet = resident_bytes(node.pid)
        sessions = [await deaf_session(node) for _ in range(8)]
        for session in sessions:
            await ask_histories(session)
        operator = await node.person("operator")
        peak = 0
        for _ in range(500):  # this loop polls the held bytes; each answer triggers the next poll
            await operator.call("network.info")
            peak = max(peak, resident_bytes(node.pid))
        assert peak < quiet + 256 * MB
        for session in sessions:
            await session.drop()
        async with asyncio.timeout(20):
            while (await operator.call("network.status"))["result_bytes"] > 8 * MB:
                pass
        assert resident_bytes(node.pid) < quiet + 64 * MB
