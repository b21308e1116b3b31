"""Tests of `call`: a change is idempotent by (caller, call_id), and a read is always answered with fresh data.
docs/protocol/operations.md.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.node import Node
from tests.support.wire import WireSession, expect_error


@pytest.fixture
async def alice(node: Node) -> WireSession:
    return await node.agent("alice")


async def test_a_result_holds_its_call_id_and_value(alice: WireSession) -> None:
    answer = await alice.submit_call("network.info", call_id="c1")
    assert set(answer) == {"type", "call_id", "value"}
    assert (answer["type"], answer["call_id"]) == ("result", "c1")


async def test_a_repeated_change_returns_the_first_result(node: Node, alice: WireSession) -> None:
    first = await alice.submit_call("channels.create", {"name": "dev"}, call_id="c1")
    head = (await alice.call("network.info"))["head"]
    assert await alice.submit_call("channels.create", {"name": "dev"}, call_id="c1") == first
    again = await node.agent("alice")
    assert await again.submit_call("channels.create", {"name": "dev"}, call_id="c1") == first
    assert (await alice.call("network.info"))["head"] == head


async def test_repeats_in_one_burst_change_once(alice: WireSession) -> None:
    frame = {"type": "call", "call_id": "c1", "op": "channels.create", "args": {"name": "dev"}}
    for _ in range(4):
        await alice.send_frame(frame)
    answers = [await alice.answer("c1") for _ in range(4)]
    assert [answer["type"] for answer in answers] == ["result"] * 4
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize(
    ("op", "args"), [("channels.create", {"name": "ops"}), ("channels.join", {"name": "dev"})], ids=["args", "op"]
)
async def test_the_same_call_id_for_something_else_is_a_conflict(
    alice: WireSession, op: str, args: dict[str, Any]
) -> None:
    await alice.call("channels.create", {"name": "dev"}, call_id="c1")
    error = await alice.call_refused("id_conflict", op, args, call_id="c1")
    assert error["call_id"] == "c1"
    await alice.refused("unknown_recipient", "channel:ops")


async def test_call_ids_of_different_callers_are_different(node: Node, alice: WireSession) -> None:
    bob = await node.agent("bob")
    await alice.call("channels.create", {"name": "dev"}, call_id="c1")
    await bob.call("channels.create", {"name": "ops"}, call_id="c1")
    await bob.send("channel:ops", "mine")


async def test_a_call_id_and_a_message_id_may_be_the_same(node: Node, alice: WireSession) -> None:
    await node.agent("bob")
    await alice.call("channels.create", {"name": "dev"}, call_id="same")
    assert (await alice.send("agent:bob", "x", message_id="same"))["duplicate"] is False


async def test_reads_are_answered_afresh(node: Node, alice: WireSession) -> None:
    await node.agent("bob")
    before = await alice.call("network.info", call_id="c1")
    await alice.send("agent:bob", "x")
    assert (await alice.call("network.info", call_id="c1"))["head"] > before["head"]
    threads = await alice.call("network.list_threads", call_id="c1")
    assert [thread["thread_id"] for thread in threads["threads"]] == ["direct:alice~bob"]


async def test_refusals_are_answered_afresh(node: Node, alice: WireSession) -> None:
    bob = await node.agent("bob")
    refused = await bob.submit_call("channels.join", {"name": "dev"}, call_id="c1")
    assert refused["type"] == "error"
    await alice.call("channels.create", {"name": "dev"})
    await bob.call("channels.join", {"name": "dev"}, call_id="c1")
    await bob.send("channel:dev", "in")


async def test_a_refused_call_frees_its_id_for_other_arguments(alice: WireSession) -> None:
    await alice.call_refused("invalid_arguments", "channels.create", {"name": "Not A Name"}, call_id="c1")
    await alice.call("channels.create", {"name": "dev"}, call_id="c1")


async def test_calls_of_one_session_take_effect_in_order(alice: WireSession) -> None:
    frames: list[dict[str, Any]] = [
        {"type": "call", "call_id": "c1", "op": "channels.create", "args": {"name": "dev"}},
        {"type": "send", "message_id": "m1", "to": "channel:dev", "content": "first"},
        {"type": "call", "call_id": "c2", "op": "channels.leave", "args": {"name": "dev"}},
        {"type": "send", "message_id": "m2", "to": "channel:dev", "content": "second"},
    ]
    for frame in frames:
        await alice.send_frame(frame)
    assert (await alice.answer("c1"))["type"] == "result"
    assert (await alice.answer("m1"))["type"] == "stored"
    assert (await alice.answer("c2"))["type"] == "result"
    expect_error(await alice.answer("m2"), "forbidden")


async def test_a_read_after_a_send_sees_it(node: Node, alice: WireSession) -> None:
    await node.agent("bob")
    await alice.send_frame({"type": "send", "message_id": "m1", "to": "agent:bob", "content": "x"})
    await alice.send_frame(
        {"type": "call", "call_id": "c1", "op": "network.history", "args": {"thread_id": "direct:alice~bob"}}
    )
    stored = await alice.answer("m1")
    history = await alice.answer("c1")
    assert [message["seq"] for message in history["value"]["messages"]] == [stored["seq"]]
