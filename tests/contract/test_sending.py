"""Tests of `send`, `stored` and `deliver`: addresses, threads, replies, order, idempotence.
docs/protocol/messages.md.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.support.node import Node
from tests.support.wire import WireSession, contents, expect_error, new_id

MESSAGE_FIELDS = {
    "seq",
    "message_id",
    "kind",
    "sender_id",
    "sender_kind",
    "to",
    "thread_id",
    "root",
    "hops",
    "sent_at",
    "content",
}


@pytest.fixture
async def alice(node: Node) -> WireSession:
    return await node.agent("alice")


@pytest.fixture
async def bob(node: Node) -> WireSession:
    return await node.agent("bob")


@pytest.fixture
async def carol(node: Node) -> WireSession:
    return await node.agent("carol")


# -- direct


async def test_a_direct_message_is_stored_and_delivered(alice: WireSession, bob: WireSession) -> None:
    await alice.send_frame({"type": "send", "message_id": "m1", "to": "agent:bob", "content": {"a": [1, None]}})
    stored = await alice.next_frame()
    assert set(stored) == {"type", "message_id", "seq", "thread_id", "duplicate"}
    assert (stored["message_id"], stored["thread_id"], stored["duplicate"]) == ("m1", "direct:alice~bob", False)
    delivery = await bob.next_frame()
    assert set(delivery) == {"type", "message", "attempt"}
    assert delivery["attempt"] == 1
    message = delivery["message"]
    assert set(message) == MESSAGE_FIELDS  # a field without a value is absent
    sent_at = message.pop("sent_at")
    assert isinstance(sent_at, int)
    assert message == {
        "seq": stored["seq"],
        "message_id": "m1",
        "kind": "direct",
        "sender_id": "alice",
        "sender_kind": "agent",
        "to": "agent:bob",
        "thread_id": "direct:alice~bob",
        "root": stored["seq"],
        "hops": 0,
        "content": {"a": [1, None]},
    }


async def test_every_optional_field_is_delivered(alice: WireSession, bob: WireSession) -> None:
    first = await alice.send("agent:bob", "first")
    optional = {
        "text_representation": "as text",
        "reply_to": first["seq"],
        "cause": first["seq"],
        "requires_response": True,
        "metadata": {"trace": "t1", "seq": 7},
    }
    await alice.send("agent:bob", "second", **optional)
    await bob.message("first")
    message = await bob.message("second")
    assert set(message) == MESSAGE_FIELDS | set(optional)
    assert {name: message[name] for name in optional} == optional


async def test_a_response_can_be_required_from_a_list(alice: WireSession, bob: WireSession) -> None:
    await alice.send("broadcast", "who?", requires_response=["bob", "carol"])
    assert (await bob.message("who?"))["requires_response"] == ["bob", "carol"]


async def test_both_directions_share_one_thread(alice: WireSession, bob: WireSession) -> None:
    there = await alice.send("agent:bob", "there")
    back = await bob.send("agent:alice", "back")
    assert there["thread_id"] == back["thread_id"] == "direct:alice~bob"


async def test_a_direct_message_reaches_a_person_and_a_service(node: Node, alice: WireSession) -> None:
    mia, clock = await node.person("mia"), await node.service("clock")
    await alice.send("agent:mia", "to mia")
    await alice.send("agent:clock", "to clock")
    await mia.message("to mia")
    await clock.message("to clock")
    await mia.send("agent:alice", "from mia")
    assert (await alice.message("from mia"))["sender_kind"] == "human"
    await clock.send("agent:alice", "from clock")
    assert (await alice.message("from clock"))["sender_kind"] == "service"


async def test_nobody_else_gets_a_direct_message_nor_does_an_operator(
    node: Node, alice: WireSession, bob: WireSession, carol: WireSession
) -> None:
    mia = await node.person("mia")
    await alice.send("agent:bob", "private")
    await alice.send("broadcast", "marker")
    for session in (carol, mia):
        assert await session.contents_until("marker") == []


async def test_an_offline_recipient_gets_it_on_return(node: Node, alice: WireSession, bob: WireSession) -> None:
    await bob.bye()
    await alice.send("agent:bob", "while you were out")
    returned = await node.agent("bob")
    assert returned.welcome["resume"] == "full"
    assert (await returned.delivery())["attempt"] == 1


@pytest.mark.parametrize("to", ["agent:nobody", "channel:nowhere", "mod:nothing"])
async def test_an_unknown_recipient_is_an_error(alice: WireSession, to: str) -> None:
    error = await alice.refused("unknown_recipient", to, message_id="m1")
    assert error["message_id"] == "m1"


# -- broadcast


async def test_a_broadcast_reaches_everybody_but_the_sending_session(
    node: Node, alice: WireSession, bob: WireSession
) -> None:
    mia, other = await node.person("mia"), await node.agent("alice")
    stored = await alice.send("broadcast", "hear, hear")
    assert stored["thread_id"] == "broadcast"
    for session in (bob, mia, other):
        message = await session.message("hear, hear")
        assert (message["kind"], message["to"], message["thread_id"]) == ("broadcast", "broadcast", "broadcast")
    await bob.send("agent:alice", "marker")
    assert await alice.contents_until("marker") == []


async def test_excluded_participants_do_not_get_a_broadcast_nor_later(
    node: Node, alice: WireSession, bob: WireSession, carol: WireSession
) -> None:
    dora = await node.agent("dora")
    await dora.bye()
    await alice.send("broadcast", "not for carol and dora", exclude_agent_ids=["carol", "dora"])
    await alice.send("broadcast", "for all")
    await bob.message("not for carol and dora")
    for session in (carol, await node.agent("dora")):
        assert await session.contents_until("for all") == []


async def test_who_leaves_itself_out_of_a_broadcast_gets_it_in_its_other_sessions_all_the_same(
    node: Node, alice: WireSession, bob: WireSession
) -> None:
    other = await node.agent("alice")
    await alice.send("broadcast", "mine", exclude_agent_ids=["alice"])
    await bob.message("mine")
    await other.message("mine")  # another session gets the message in the same way as after a reconnect


async def test_a_chain_of_replies_does_not_carry_on_all_the_names_that_it_left_out(
    node: Node, alice: WireSession
) -> None:
    operator = await node.person("mia")
    await node.agent("carol")
    fields: dict[str, Any] = {}
    for number in range(5):
        names = [f"nobody{number}-{other}" for other in range(1000)]
        stored = await alice.send("broadcast", number, exclude_agent_ids=["carol", *names], **fields)
        fields = {"reply_to": stored["seq"]}
    rows = [json.loads(line) for line in (await operator.call("network.rows"))["rows"]]
    assert [row["excluded"] for row in rows if row["type"] == "message"] == [["carol"]] * 5


async def test_who_registers_while_offline_messages_wait_gets_only_later_ones(
    node: Node, alice: WireSession, bob: WireSession
) -> None:
    early = await alice.send("broadcast", "early")
    dora = await node.agent("dora")
    assert dora.welcome["cursor"] >= early["seq"]
    await dora.drop()
    await alice.send("broadcast", "late")
    assert await (await node.agent("dora")).contents_until("late") == []


async def test_own_messages_reach_the_other_sessions(node: Node, alice: WireSession, bob: WireSession) -> None:
    other = await node.agent("alice")
    stored = await alice.send("agent:bob", "mine")
    assert (await other.message("mine"))["seq"] == stored["seq"]
    await bob.send("agent:alice", "marker")
    assert await alice.contents_until("marker") == []


async def test_a_message_to_oneself_reaches_ones_other_session_once(node: Node, alice: WireSession) -> None:
    other = await node.agent("alice")
    stored = await alice.send("agent:alice", "note to self")
    assert (await other.message("note to self"))["seq"] == stored["seq"]
    await alice.send("broadcast", "marker")
    assert await other.contents_until("marker") == []


# -- mods


async def test_a_message_to_a_mod_has_a_thread_of_its_own(node: Node, alice: WireSession) -> None:
    other = await node.agent("alice")
    stored = await alice.send("mod:discovery", "anyone?")
    assert stored["thread_id"] == "mod:discovery~alice"
    message = await other.message("anyone?")
    assert (message["kind"], message["to"], message["thread_id"]) == ("mod", "mod:discovery", "mod:discovery~alice")
    reply = await alice.send("mod:discovery", "hello?", reply_to=stored["seq"])
    assert reply["thread_id"] == "mod:discovery~alice"


# -- replies


async def test_a_reply_in_broadcast_joins_the_thread_of_the_chains_first_message(
    alice: WireSession, bob: WireSession, carol: WireSession
) -> None:
    first = await alice.send("broadcast", "first")
    reply = await bob.send("broadcast", "reply", reply_to=first["seq"])
    assert reply["thread_id"] == f"thread:{first['seq']}"
    deeper = await carol.send("broadcast", "deeper", reply_to=reply["seq"])
    assert deeper["thread_id"] == f"thread:{first['seq']}"
    again = await bob.send("broadcast", "again", reply_to=first["seq"])
    assert again["thread_id"] == f"thread:{first['seq']}"
    assert contents((await carol.call("network.history", {"thread_id": f"thread:{first['seq']}"}))["messages"]) == [
        "reply",
        "deeper",
        "again",
    ]
    await alice.message("reply")
    message = await alice.message("deeper")
    assert message["thread_id"] == f"thread:{first['seq']}"
    assert (message["to"], message["kind"], message["reply_to"]) == ("broadcast", "broadcast", reply["seq"])


async def test_a_reply_in_a_direct_thread_stays_in_it(alice: WireSession, bob: WireSession) -> None:
    first = await alice.send("agent:bob", "first")
    reply = await bob.send("agent:alice", "reply", reply_to=first["seq"])
    own = await alice.send("agent:bob", "p.s.", reply_to=first["seq"])
    assert reply["thread_id"] == own["thread_id"] == "direct:alice~bob"


async def test_a_reply_to_another_place_is_invalid(alice: WireSession, bob: WireSession, carol: WireSession) -> None:
    direct = await alice.send("agent:bob", "direct")
    public = await alice.send("broadcast", "public")
    threaded = await bob.send("broadcast", "threaded", reply_to=public["seq"])
    for to, reply_to in [
        ("agent:carol", direct),
        ("broadcast", direct),
        ("mod:discovery", direct),
        ("agent:bob", public),
        ("agent:bob", threaded),
    ]:
        await alice.refused("invalid_arguments", to, reply_to=reply_to["seq"])
    await bob.refused("invalid_arguments", "agent:carol", reply_to=direct["seq"])


async def test_a_record_is_no_message_to_reply_to(node: Node, alice: WireSession) -> None:
    reactor = await node.agent("dora", role="reactor")
    stored = await reactor.record("reaction-1", "note", {"text": "mine"})
    await reactor.refused("unknown_message", "agent:alice", reply_to=stored["seq"])
    await reactor.refused("unknown_message", "agent:alice", cause=stored["seq"])


# -- order and time


async def test_answers_come_in_the_order_of_the_sends(alice: WireSession, bob: WireSession) -> None:
    frames: list[dict[str, Any]] = []
    for number in range(60):
        frame = {"type": "send", "message_id": f"m{number}", "to": "agent:bob", "content": number}
        if number % 3 == 1:
            frame["to"] = "agent:nobody"
        if number % 7 == 2:
            frame["colour"] = "red"
        frames.append(frame)
    for frame in frames:
        await alice.send_frame(frame)
    answers = [await alice.next_frame() for _ in frames]
    assert [answer["message_id"] for answer in answers] == [frame["message_id"] for frame in frames]
    good = [n for n in range(60) if n % 3 != 1 and n % 7 != 2]
    assert [answer["message_id"] for answer in answers if answer["type"] == "stored"] == [f"m{n}" for n in good]
    seqs = [answer["seq"] for answer in answers if answer["type"] == "stored"]
    assert seqs == sorted(set(seqs))
    assert [(await bob.delivery())["message"]["content"] for _ in good] == good


async def test_everybody_reads_one_order(node: Node) -> None:
    names = ["alice", "bob", "carol", "dora"]
    sessions = [await node.agent(name) for name in names]
    mia = await node.person("mia")

    async def speak(session: WireSession, name: str) -> None:
        for number in range(10):
            await session.send("broadcast", f"{name} {number}")

    await asyncio.gather(*(speak(session, name) for session, name in zip(sessions, names, strict=True)))
    await mia.send("broadcast", "end")
    read = [await session.deliveries_until("end") for session in sessions]
    history = await mia.call("network.history", {"thread_id": "broadcast", "limit": 500})
    order = [message["seq"] for message in history["messages"] if message["content"] != "end"]
    assert order == sorted(order)
    for name, frames in zip(names, read, strict=True):
        others = [m["seq"] for m in history["messages"] if m["sender_id"] != name and m["content"] != "end"]
        assert [frame["message"]["seq"] for frame in frames] == others
    times = [message["sent_at"] for message in history["messages"]]
    assert times == sorted(times)


# -- idempotence


async def test_a_repeat_answers_with_the_first_seq_and_is_delivered_once(alice: WireSession, bob: WireSession) -> None:
    first = await alice.send("agent:bob", "once", message_id="m1")
    repeat = await alice.send("agent:bob", "once", message_id="m1")
    assert repeat == first | {"duplicate": True}
    await alice.send("agent:bob", "marker")
    assert await bob.contents_until("marker") == ["once"]


async def test_repeats_in_one_burst_are_stored_once(alice: WireSession, bob: WireSession) -> None:
    frame = {"type": "send", "message_id": "m1", "to": "agent:bob", "content": "once"}
    for _ in range(5):
        await alice.send_frame(frame)
    answers = [await alice.next_frame() for _ in range(5)]
    assert len({answer["seq"] for answer in answers}) == 1
    assert [answer["duplicate"] for answer in answers] == [False, True, True, True, True]
    await alice.send("agent:bob", "marker")
    assert await bob.contents_until("marker") == ["once"]


async def test_a_repeat_is_recognised_from_another_session(node: Node, alice: WireSession, bob: WireSession) -> None:
    first = await alice.send("agent:bob", "once", message_id="m1")
    again = await node.agent("alice")
    assert await again.send("agent:bob", "once", message_id="m1") == first | {"duplicate": True}


async def test_message_ids_of_different_senders_are_different(alice: WireSession, bob: WireSession) -> None:
    first = await alice.send("agent:bob", "a", message_id="m1")
    second = await bob.send("agent:alice", "b", message_id="m1")
    assert second["duplicate"] is False
    assert second["seq"] != first["seq"]


@pytest.mark.parametrize(
    "change",
    [
        {"content": "other"},
        {"content": ["same"]},
        {"to": "agent:carol"},
        {"text_representation": "other"},
        {"cause": 0},
        {"requires_response": True},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_another_body_under_the_same_id_is_a_conflict(
    alice: WireSession, bob: WireSession, carol: WireSession, change: dict[str, Any]
) -> None:
    before = await alice.send("agent:bob", "before")
    if "cause" in change:
        change = {"cause": before["seq"]}
    await alice.send("agent:bob", "same", message_id="m1", text_representation="text")
    frame = {"to": "agent:bob", "content": "same", "text_representation": "text", "message_id": "m1"} | change
    error = expect_error(await alice.submit(**frame), "id_conflict")
    assert error["message_id"] == "m1"
    # The first message remains the valid one.
    await alice.send("agent:bob", "same", message_id="m1", text_representation="text")


async def test_a_conflict_in_one_burst_is_seen_too(alice: WireSession, bob: WireSession) -> None:
    for content in ("one", "two"):
        await alice.send_frame({"type": "send", "message_id": "m1", "to": "agent:bob", "content": content})
    assert (await alice.next_frame())["type"] == "stored"
    expect_error(await alice.next_frame(), "id_conflict")
    await alice.send("agent:bob", "marker")
    assert await bob.contents_until("marker") == ["one"]


@pytest.mark.parametrize(("first", "second"), [('{"a":1}', '{"a": 1}'), ("1", "1.0"), ('"A"', '"\\u0041"')])
async def test_content_is_compared_byte_by_byte(alice: WireSession, bob: WireSession, first: str, second: str) -> None:
    for raw, expected in ((first, "stored"), (second, "error"), (first, "stored")):
        await alice.send_raw(f'{{"type":"send","message_id":"m1","to":"agent:bob","content":{raw}}}')
        assert (await alice.next_frame())["type"] == expected


async def test_the_order_of_fields_and_blanks_outside_content_do_not_matter(
    alice: WireSession, bob: WireSession
) -> None:
    await alice.send_raw('{"type":"send","message_id":"m1","to":"agent:bob","content":"x"}')
    await alice.send_raw('{ "content":"x",  "to":"agent:bob","message_id":"m1","type":"send" }')
    assert [(await alice.next_frame())["duplicate"] for _ in range(2)] == [False, True]


async def test_other_metadata_is_still_a_repeat(alice: WireSession, bob: WireSession) -> None:
    first = await alice.send("agent:bob", "x", message_id="m1", metadata={"try": 1})
    assert await alice.send("agent:bob", "x", message_id="m1", metadata={"try": 2}) == first | {"duplicate": True}
    assert await alice.send("agent:bob", "x", message_id="m1") == first | {"duplicate": True}
    assert (await bob.message("x"))["metadata"] == {"try": 1}


async def test_a_repeat_is_a_repeat_though_the_recipient_was_removed(
    node: Node, alice: WireSession, bob: WireSession
) -> None:
    first = await alice.send("agent:bob", "x", message_id="m1")
    operator = await node.person("mia")
    await operator.call("network.remove", {"agent_id": "bob"})
    await alice.refused("unknown_recipient", "agent:bob", "y", message_id=new_id())
    assert await alice.send("agent:bob", "x", message_id="m1") == first | {"duplicate": True}
