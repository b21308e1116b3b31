"""Tests that writes of notes are linearizable: some sequential order explains the results of concurrent clients."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from roundelay import Network
from roundelay.network.client import NetworkClient
from tests.support.histories import Call, is_linearizable
from tests.support.history_clients import NoteWriter, check, note_step, perform

NOTE = "notes/broadcast/plan"


async def test_concurrent_results_are_those_of_one_order() -> None:
    history, moments, chance = list[Call](), itertools.count(), random.Random(7)

    async def work(client: NetworkClient) -> None:
        writer = NoteWriter()
        for step in range(15):
            op, args = writer.choose(chance, f"[{client.agent_id}-{step}]")
            called = next(moments)
            result = await perform(client, f"notes.{op}", {"note": "broadcast/plan", **args})
            history.append(Call(client.agent_id, op, called, next(moments), result, args))
            writer.learn(op, result)

    async with Network.open(mods=["notes"]) as network:
        clients = [await network.join(f"a{number}") for number in range(20)]
        await clients[0].call("notes.create", {"name": "plan", "text": "first", "thread_id": "broadcast"})
        await asyncio.gather(*map(work, clients))
    assert check({NOTE: history}) == 300
    assert {it.op for it in history} == {"read", "write", "append", "patch"}
    assert any(it.result[0] == "conflict" for it in history)


@pytest.mark.parametrize(
    "wrong",
    [
        Call("b", "read", 8, 9, [1, "first"]),
        Call("b", "read", 8, 9, [2, "first"]),
        Call("b", "append", 8, 9, [2], {"text": "x"}),
        Call("b", "write", 8, 9, [3], {"text": "x", "expected_version": 1}),
        Call("b", "write", 0, 9, [2], {"text": "x", "expected_version": 1}),
        Call("b", "write", 8, 9, ["conflict", 2, "x"], {"text": "x", "expected_version": 2}),
        Call("b", "patch", 8, 9, "refused", {"find": "second", "replace": "x"}),
    ],
)
def test_checker_finds_each_violation(wrong: Call) -> None:
    good = Call("a", "write", 1, 2, [2], {"text": "second", "expected_version": 1})
    assert is_linearizable([good], (1, "first"), note_step)
    assert not is_linearizable([good, wrong], (1, "first"), note_step)
