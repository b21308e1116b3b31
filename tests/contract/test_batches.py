"""Tests of `batch`, which stores several messages and records in one commit: docs/protocol/frames.md."""

from __future__ import annotations

import json
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from tests.support.node import Node, running_node
from tests.support.wire import WireSession, expect_error


def record(name: str, kind: str = "note", **body: Any) -> dict[str, Any]:
    return {"type": "record", "record_id": name, "reaction": "work", "kind": kind, "body": body}


def send(name: str, to: str, content: object = "hi", **fields: Any) -> dict[str, Any]:
    return {"type": "send", "message_id": name, "to": to, "content": content, **fields}


async def kinds(session: WireSession) -> list[str]:
    return [it["kind"] for it in (await session.call("network.records", {"reaction": "work"}))["records"]]


async def reactor(node: Node) -> tuple[WireSession, WireSession, int]:
    """Return sessions of mia and bob, and the seq of mia's question. Bob has not started a reaction."""
    mia, bob = await node.person("mia"), await node.agent("bob", role="reactor")
    asked = await mia.send("agent:bob", "what is it?")
    return mia, bob, asked["seq"]


async def test_a_whole_reaction_in_one_batch_is_stored_in_its_order_and_delivered() -> None:
    async with running_node() as node:
        mia, bob, seq = await reactor(node)
        usage = {"prompt_tokens": 7, "completion_tokens": 2}
        answer = await bob.submit_batch(
            record("r1", "started", trigger=seq),
            record("r2", "model_reply", turn=1, reply={"text": "40", "usage": usage, "model": "m"}),
            send("m1", "agent:mia", "40", reply_to=seq, cause=seq),
            record("r3", "finished", status="finished", reason="", turns=1, usage=usage),
        )
        assert answer["type"] == "batched"
        assert "error" not in answer
        stored = answer["stored"]
        assert [it.get("record_id", it.get("message_id")) for it in stored] == ["r1", "r2", "m1", "r3"]
        first = stored[0]["seq"]
        assert [it["seq"] for it in stored] == [first, first + 1, first + 2, first + 3]
        assert stored[2]["thread_id"] == "direct:bob~mia"
        delivered = (await mia.expect("deliver"))["message"]
        assert (delivered["seq"], delivered["content"], delivered["cause"]) == (first + 2, "40", seq)
        assert await kinds(bob) == ["started", "model_reply", "finished"]
        status = await mia.call("network.message_status", {"seq": seq})
        assert [it["reaction_status"] for it in status["recipients"]] == ["finished"]
        spent = (await mia.call("network.spent", {"seq": seq}))["of_root"]
        assert {name: it["prompt_tokens"] for name, it in spent.items()} == {"m": 7}


async def test_nothing_behind_a_refused_frame_of_a_batch_is_stored() -> None:
    async with running_node() as node:
        _, bob, seq = await reactor(node)
        answer = await bob.submit_batch(
            record("r1", "started", trigger=seq),
            send("m1", "agent:nobody"),
            record("r2", "finished", status="finished"),
        )
        assert [it["record_id"] for it in answer["stored"]] == ["r1"]
        assert (answer["error"]["code"], answer["error"]["message_id"]) == ("unknown_recipient", "m1")
        assert await kinds(bob) == ["started"]
        opened = (await bob.call("network.open_reactions"))["reactions"]
        assert [it["reaction"] for it in opened] == ["work"]


async def test_a_repeated_batch_stores_nothing_again_and_goes_on_where_it_was_refused() -> None:
    async with running_node() as node:
        _, bob, seq = await reactor(node)
        frames = [record("r1", "started", trigger=seq), send("m1", "agent:zoe", "late"), record("r2")]
        assert (await bob.submit_batch(*frames))["error"]["code"] == "unknown_recipient"
        await node.person("zoe")
        again = await bob.submit_batch(*frames)
        assert [it["duplicate"] for it in again["stored"]] == [True, False, False]
        assert [it["duplicate"] for it in (await bob.submit_batch(*frames))["stored"]] == [True, True, True]
        assert await kinds(bob) == ["started", "note"]


@pytest.mark.parametrize("other", [{"text": "other"}, {"text": "one"}], ids=["another body", "the same"])
async def test_an_id_that_is_twice_in_a_batch_is_a_repeat_of_itself(other: dict[str, str]) -> None:
    async with running_node() as node:
        _, bob, _ = await reactor(node)
        answer = await bob.submit_batch(record("r1", text="one"), record("r1", **other), record("r2"))
        if other["text"] == "one":
            assert [it["duplicate"] for it in answer["stored"]] == [False, True, False]
        else:
            assert answer["error"]["code"] == "id_conflict"
            assert len(answer["stored"]) == 1
        assert await kinds(bob) == ["note"] * (2 if other["text"] == "one" else 1)
        await bob.record("work", "note", {})  # the hub still works


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [{"type": "call", "call_id": "c", "op": "network.info", "args": {}}],
        [{"type": "batch", "batch_id": "x", "frames": [record("r1")]}],
        [record("r1"), record("")],
        [record("r1"), send("m1", "agent:mia", conversation="No Id")],
        [record("r1"), {**send("m1", "agent:mia"), "more": 1}],
    ],
    ids=["none", "a call", "a batch", "no record_id", "a wrong conversation", "an unknown field"],
)
async def test_a_malformed_batch_is_refused_as_a_whole(frames: list[dict[str, Any]]) -> None:
    async with running_node() as node:
        _, bob, _ = await reactor(node)
        refused = await bob.submit_batch(*frames, batch_id="b1")
        assert expect_error(refused, "invalid_frame")["batch_id"] == "b1"
        assert await kinds(bob) == []


async def test_a_frame_in_a_batch_may_be_as_deep_as_by_itself() -> None:
    async with running_node(limits={"max_depth": 6}) as node:
        _, bob, _ = await reactor(node)
        deep: Any = {"a": {"a": {"a": {"a": 1}}}}
        await bob.record("work", "note", deep, record_id="alone")
        assert "error" not in await bob.submit_batch(record("r1", **deep), record("r2"))
        refused = await bob.submit_batch(record("r3", a={"a": deep}), batch_id="b1")
        assert expect_error(refused, "invalid_frame")["batch_id"] == "b1"


async def test_a_superseded_reactor_stores_nothing_by_a_batch() -> None:
    async with running_node() as node:
        mia, old, seq = await reactor(node)
        await node.agent("bob", role="reactor")
        with suppress(ConnectionClosed):
            await old.send_frame({"type": "batch", "batch_id": "b", "frames": [send("m1", "agent:mia", "late")]})
        assert await old.closed() == 4409
        assert (await mia.call("network.history", {"thread_id": "direct:bob~mia"}))["messages"][-1]["seq"] == seq


ROOMY = {"sends_per_s": 100_000, "root_messages_per_s": 100_000, "max_root_messages": 100_000}
BODIES: list[dict[str, Any]] = [
    {},
    {"turn": 1, "call": 0},
    {"status": "finished"},
    {"usage": {"prompt_tokens": 1}},
    {"usage": {"prompt_tokens": "many"}},
    {"failure": "budget", "reason": "r" * 5000},
]
KINDS = ("started", "started", "note", "tool_started", "tool_result", "waiting", "model_failed", "finished")


def make_frames(random: Random, head: int) -> list[dict[str, Any]]:
    """Return random frames. Frames refer to earlier messages, to messages in the same batch, and to messages that do
    not exist.
    """
    seqs, frames = [1, 6, 7, head, head + 1, head + 2, 10**15], []
    for _ in range(random.choice((1, 2, 3, 5, 9))):
        named = {name: random.choice(seqs) for name in ("reply_to", "cause") if random.random() < 0.2}
        if random.random() < 0.5:
            to = random.choice(("agent:mia", "agent:mia", "agent:bob", "agent:nobody", "broadcast", "channel:no"))
            content = random.choice(("hi", "", None, [], {"": [None]}, "x" * 3000))
            frames.append(send(f"m{random.randint(0, 40)}", to, content, **named))
        else:
            body = random.choice([*BODIES, {"trigger": random.choice(seqs)}, {"trigger": random.choice((4, 5, 6))}])
            made = {**record(f"r{random.randint(0, 60)}", random.choice(KINDS)), "body": body}
            frames.append({**made, "reaction": random.choice(("work", "play"))})
    return frames


async def list_rows(session: WireSession) -> list[str]:
    """Return the rows of the log, with all times set to 0."""
    rows = []
    for raw in (await session.call("network.rows", {"after": 0, "limit": 500}))["rows"]:
        row = raw if isinstance(raw, dict) else json.loads(raw)
        rows.append(json.dumps({**row, "at": 0, "data": {**row["data"], "sent_at": 0}}, sort_keys=True))
    return rows


@pytest.mark.parametrize("seed", range(3))
async def test_random_batches_store_what_their_frames_store_one_by_one(seed: int) -> None:
    random, counts = Random(seed), [0, 0]
    async with running_node(limits=ROOMY) as one, running_node(limits=ROOMY) as other:
        (mia, bob), (mia_2, bob_2) = [
            (await it.person("mia"), await it.agent("bob", role="reactor")) for it in (one, other)
        ]
        for person in (mia, mia_2):
            for number in range(3):
                await person.send("agent:bob", "hi", message_id=f"q{number}")
        for _ in range(40):
            frames = make_frames(random, (await mia.call("network.info"))["head"])
            answer = await bob.submit_batch(*frames)
            refused = [answer["error"]] if "error" in answer else []
            for frame, expected in zip(frames, [*answer["stored"], *refused], strict=not refused):
                await bob_2.send_frame(frame)
                name = "message_id" if frame["type"] == "send" else "record_id"
                alone = await bob_2.expect(expected["type"], **{name: frame[name]})
                assert alone == expected
            counts[bool(refused)] += 1
        assert await list_rows(mia) == await list_rows(mia_2)
        assert min(counts) > 3
