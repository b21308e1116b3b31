"""Writes of notes are linearizable: the results of concurrent clients are those of one client after the other.

Each operation has a version, so the versions are the order to check. A checker compares each result with a sequential
model, and the order with real time. The long form kills the hub and connections meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import WebSocketException

from roundelay import Network
from tests.support.node import Node, node_process
from tests.support.wire import WireSession

NOTE = "broadcast/plan"
Call = Callable[[str, dict[str, Any], str], Awaitable[dict[str, Any]]]


@dataclass
class Done:
    """One operation: its place in real time, its arguments and its result."""

    op: str
    args: dict[str, Any]
    began: int
    ended: int
    result: dict[str, Any]


@dataclass
class History:
    done: list[Done] = field(default_factory=list)
    _time: itertools.count[int] = field(default_factory=itertools.count)

    async def run(self, call: Call, op: str, args: dict[str, Any], call_id: str) -> dict[str, Any]:
        began = next(self._time)
        result = await call(f"notes.{op}", {"note": NOTE, **args}, call_id)
        self.done.append(Done(op, args, began, next(self._time), result))
        return result


def check(first: str, history: History) -> None:
    """Raise `AssertionError` unless the results are those of some sequential order that respects real time."""
    texts = {1: first}
    writes = [it for it in history.done if it.op != "read" and not it.result.get("is_conflict")]
    for write in sorted(writes, key=lambda it: it.result["version"]):
        version = write.result["version"]
        assert version not in texts, f"version {version} was written twice"
        assert version - 1 in texts, f"version {version - 1} is missing"
        match write.op:
            case "write":
                assert write.args["expected_version"] == version - 1, "an outdated write was stored"
                texts[version] = write.args["text"]
            case "append":
                texts[version] = f"{texts[version - 1].rstrip()}\n\n{write.args['text']}"
            case "patch":
                assert texts[version - 1].count(write.args["find"]) == 1
                texts[version] = texts[version - 1].replace(write.args["find"], write.args["replace"])
    for it in history.done:
        version = it.result["version"]
        if it.op == "read":
            assert it.result["text"] == texts[version], f"version {version} was read with another text"
        elif it.result.get("is_conflict"):
            assert it.args["expected_version"] != version, "a current write was refused"
            assert it.result["current"] == texts[version]
    reached, pending = 1, sorted(history.done, key=lambda it: it.ended)
    for it in sorted(history.done, key=lambda it: it.began):
        while pending and pending[0].ended < it.began:
            reached = max(reached, pending.pop(0).result["version"])
        is_write = it.op != "read" and not it.result.get("is_conflict")
        assert it.result["version"] >= reached + is_write, f"{it.op} does not see what was written before it began"


async def work(name: str, number: int, call: Call, history: History, chance: random.Random) -> None:
    version, text = 1, ""
    for step in range(number):
        mark, call_id = f"[{name}-{step}]", f"{name}-{step}"
        match chance.choice(["read", "read", "write", "append", "patch"]):
            case "read":
                found = await history.run(call, "read", {}, call_id)
                version, text = found["version"], found["text"]
            case "write":
                args = {"text": f"{text[-2000:]} {mark}", "expected_version": version}
                version = (await history.run(call, "write", args, call_id))["version"]
            case "append":
                version = (await history.run(call, "append", {"text": mark}, call_id))["version"]
            case "patch":
                with suppress(LookupError):  # somebody has replaced that passage
                    await history.run(call, "patch", {"find": text[-20:] or "first", "replace": mark}, call_id)


async def test_concurrent_results_are_those_of_one_order() -> None:
    history, chance = History(), random.Random(7)
    async with Network.open(mods=["notes"]) as network:
        clients = [await network.join(f"a{number}") for number in range(20)]
        await clients[0].call("notes.create", {"name": "plan", "text": "first", "thread_id": "broadcast"})

        def call_by(client: Any) -> Call:
            async def call(op: str, args: dict[str, Any], call_id: str) -> dict[str, Any]:
                try:
                    result: dict[str, Any] = await client.call(op, args, call_id=call_id)
                except Exception as error:
                    raise LookupError(str(error)) from error
                return result

            return call

        works = [work(it.agent_id, 15, call_by(it), history, random.Random(chance.random())) for it in clients]
        await asyncio.gather(*works)
    check("first", history)
    assert {it.op for it in history.done} == {"read", "write", "append", "patch"}
    assert any(it.result.get("is_conflict") for it in history.done)


@pytest.mark.parametrize(
    "wrong",
    [
        Done("read", {}, 8, 9, {"version": 1, "text": "first"}),
        Done("read", {}, 8, 9, {"version": 2, "text": "first"}),
        Done("write", {"text": "x", "expected_version": 1}, 8, 9, {"version": 3}),
        Done("write", {"text": "x", "expected_version": 1}, 0, 9, {"version": 2}),
        Done("write", {"text": "x", "expected_version": 2}, 8, 9, {"version": 2, "is_conflict": True, "current": "x"}),
    ],
)
def test_checker_finds_each_violation(wrong: Done) -> None:
    good = Done("write", {"text": "second", "expected_version": 1}, 1, 2, {"version": 2})
    history = History([good])
    check("first", history)
    with pytest.raises(AssertionError):
        check("first", History([good, wrong]))


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_results_are_those_of_one_order_despite_kills(tmp_path: Path) -> None:
    history, chance = History(), random.Random(11)
    async with node_process(tmp_path / "team.db", env={"ROUNDELAY_MODS": "notes"}) as node:
        first = await node.agent("a0")
        await first.call("notes.create", {"name": "plan", "text": "first", "thread_id": "broadcast"})
        running = asyncio.Event()
        running.set()
        workers = [_Worker(node, f"a{number}", running, random.Random(chance.random())) for number in range(20)]
        works = [work(it.name, 640, it.call, history, random.Random(chance.random())) for it in workers]
        everything = asyncio.gather(*works)
        kills = 0
        while not everything.done():
            await asyncio.wait([everything], timeout=chance.uniform(0.3, 1))
            if not everything.done() and kills < 50:
                running.clear()
                await node.kill9()
                await node.restart()
                running.set()
                kills += 1
        await everything
    check("first", history)
    print(f"{len(history.done)} operations, {kills} kills of the hub, {sum(it.cuts for it in workers)} cut connections")
    assert len(history.done) >= 10_000
    assert kills >= 5


class _Worker:
    """A client that repeats each call under its id until it is answered, over new connections."""

    def __init__(self, node: Node, name: str, running: asyncio.Event, chance: random.Random) -> None:
        self.name = name
        self.cuts = 0
        self._node = node
        self._running = running
        self._chance = chance
        self._session: WireSession | None = None

    async def call(self, op: str, args: dict[str, Any], call_id: str) -> dict[str, Any]:
        while True:
            try:
                await self._running.wait()
                async with asyncio.timeout(10):
                    if self._session is None:
                        self._session = await self._node.agent(self.name)
                    session = self._session
                    await session.send_frame({"type": "call", "call_id": call_id, "op": op, "args": args})
                    if self._chance.random() < 0.02:  # cut the connection while the call may be on its way
                        self.cuts += 1
                        self._session = None
                        session.socket.transport.abort()
                        continue
                    while (answer := await session.next_frame()).get("call_id") != call_id:
                        pass
            except (OSError, TimeoutError, AssertionError, WebSocketException):
                self._session = None
                await asyncio.sleep(0.05)
                continue
            if answer["type"] == "result":
                result: dict[str, Any] = answer["value"]
                return result
            if answer["code"] == "invalid_arguments":
                raise LookupError(answer["message"])
            await asyncio.sleep(0.05)
