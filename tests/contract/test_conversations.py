"""Tests of several conversations between the same two participants, with `send.conversation`:
docs/protocol/messages.md.
"""

from __future__ import annotations

import pytest

from tests.support.node import Node
from tests.support.wire import WireSession, contents


@pytest.fixture
async def mia(node: Node) -> WireSession:
    return await node.person("mia")


@pytest.fixture
async def bob(node: Node) -> WireSession:
    return await node.agent("bob")


async def test_each_conversation_is_a_thread_of_its_own(mia: WireSession, bob: WireSession, node: Node) -> None:
    seqs = {}
    for name in ("", "plans", "a.b-c_1"):
        stored = await mia.send("agent:bob", f"in {name}", **({"conversation": name} if name else {}))
        assert stored["thread_id"] == ("direct:bob~mia:" + name if name else "direct:bob~mia")
        seqs[name] = stored["seq"]
        message = (await bob.next_frame())["message"]
        assert (message["thread_id"], message["to"], message["kind"]) == (stored["thread_id"], "agent:bob", "direct")
        assert "conversation" not in message  # the thread's ID contains the conversation
    history = await bob.call("network.history", {"thread_id": "direct:bob~mia:plans"})
    assert contents(history["messages"]) == ["in plans"]
    listed = await mia.call("network.list_threads", {})
    assert [it["thread_id"] for it in listed["threads"]] == [
        "direct:bob~mia:a.b-c_1",
        "direct:bob~mia:plans",
        "direct:bob~mia",
    ]
    eve = await node.agent("eve")
    await eve.call_refused("unknown_message", "network.history", {"thread_id": "direct:bob~mia:plans"})
    await eve.call_refused("unknown_message", "network.why", {"seq": seqs["plans"]})


async def test_a_reply_stays_in_the_conversation_of_what_it_answers(mia: WireSession, bob: WireSession) -> None:
    first = await mia.send("agent:bob", "17 and 23?", conversation="sums")
    other = await mia.send("agent:bob", "tea?", conversation="tea")
    answer = await bob.send("agent:mia", "40.", reply_to=first["seq"])
    assert answer["thread_id"] == "direct:bob~mia:sums"
    named = await bob.send("agent:mia", "40, again.", reply_to=first["seq"], conversation="sums")
    assert named["thread_id"] == "direct:bob~mia:sums"
    for wrong in (
        {"conversation": "tea", "reply_to": first["seq"]},
        {"conversation": "sums", "reply_to": other["seq"]},
    ):
        await bob.refused("invalid_arguments", "agent:mia", **wrong)


async def test_a_repeat_with_another_conversation_is_another_message(mia: WireSession, bob: WireSession) -> None:
    first = await mia.send("agent:bob", "x", message_id="m", conversation="one")
    again = await mia.send("agent:bob", "x", message_id="m", conversation="one")
    assert again == first | {"duplicate": True}
    for other in ({"conversation": "two"}, {}):
        await mia.refused("id_conflict", "agent:bob", "x", message_id="m", **other)
    await mia.send("agent:bob", "y", message_id="n")
    await mia.refused("id_conflict", "agent:bob", "y", message_id="n", conversation="one")
    reply = await bob.send("agent:mia", "z", message_id="r", reply_to=first["seq"])
    assert await bob.send("agent:mia", "z", message_id="r", reply_to=first["seq"]) == reply | {"duplicate": True}


@pytest.mark.parametrize("conversation", ["", "A", "a b", "a:b", "-a", "x" * 65, 7, None])
async def test_a_conversation_is_an_id(mia: WireSession, bob: WireSession, conversation: object) -> None:
    await mia.refused("invalid_frame", "agent:bob", conversation=conversation)


@pytest.mark.parametrize("to", ["broadcast", "channel:dev", "mod:channels"])
async def test_only_two_have_conversations(mia: WireSession, bob: WireSession, to: str) -> None:
    await mia.refused("invalid_frame", to, conversation="plans")


@pytest.mark.parametrize("op", ["network.history", "network.mark", "network.take"])
@pytest.mark.parametrize(
    "thread_id",
    ["direct:bob~mia:", "direct:bob~mia:A", "direct:mia~bob:plans", "direct:bob~mia:a:b", "direct:bob~eve:plans"],
)
async def test_what_is_the_id_of_no_conversation_is_no_thread(
    mia: WireSession, bob: WireSession, op: str, thread_id: str
) -> None:
    await mia.call_refused("unknown_message", op, {"thread_id": thread_id})


async def test_one_conversation_is_held_and_the_other_goes_on(mia: WireSession, bob: WireSession) -> None:
    held = await mia.send("agent:bob", "a", conversation="held")
    free = await mia.send("agent:bob", "b", conversation="free")
    await mia.call("network.take", {"thread_id": "direct:bob~mia:held"})
    await bob.refused("held", "agent:mia", reply_to=held["seq"], cause=held["seq"])
    went = await bob.send("agent:mia", "yes", reply_to=free["seq"], cause=free["seq"])
    assert went["thread_id"] == "direct:bob~mia:free"
