"""Tests of channels on the wire: membership by seq, the sender's rights, reply threads, and late joiners."""

from __future__ import annotations

import pytest

from roundelay.mods import channels
from tests.support.node import Node
from tests.support.wire import WireSession, contents


@pytest.fixture
async def alice(node: Node) -> WireSession:
    """Alice's session. Alice has created `channel:dev` and is a member."""
    session = await node.agent("alice")
    await session.call("channels.create", {"name": "dev"})
    return session


@pytest.fixture
async def bob(node: Node, alice: WireSession) -> WireSession:
    session = await node.agent("bob")
    await session.call("channels.join", {"name": "dev"})
    return session


@pytest.fixture
async def outsider(node: Node, alice: WireSession) -> WireSession:
    return await node.agent("oscar")


async def test_what_an_operation_sends_is_delivered_to_the_session_that_called_too(
    node: Node, alice: WireSession, bob: WireSession
) -> None:
    other = await node.agent("alice")
    posted = await alice.call("channels.post", {"name": "dev", "text": "posted"}, call_id="c7")
    stored = await alice.send("channel:dev", "sent")
    for session in (alice, other, bob):
        message = await session.message("posted")
        assert (message["seq"], message["message_id"], message["sender_id"]) == (posted["seq"], "call:c7", "alice")
    await other.message("sent")
    await bob.message("sent")
    await alice.settle()
    assert [it for it in alice.unread if it["type"] == "deliver"] == [], "of what it sent itself it got only `stored`"
    assert stored["seq"] > posted["seq"]
    await alice.close()
    again = await node.agent("alice")
    await again.settle()
    assert [it for it in again.unread if it["type"] == "deliver"] == [], "and it is handled"


async def test_a_channel_message_reaches_the_members_only(
    alice: WireSession, bob: WireSession, outsider: WireSession
) -> None:
    stored = await alice.send("channel:dev", "hi dev")
    assert stored["thread_id"] == "channel:dev"
    message = await bob.message("hi dev")
    assert (message["kind"], message["to"], message["thread_id"]) == ("channel", "channel:dev", "channel:dev")
    await bob.send("channel:dev", "hi alice")
    await alice.message("hi alice")
    await alice.send("broadcast", "marker")
    assert await outsider.contents_until("marker") == []


async def test_who_is_not_a_member_may_not_send_and_an_operator_may_not_either(
    node: Node, alice: WireSession, outsider: WireSession
) -> None:
    for session in (outsider, await node.person("mia")):
        await session.refused("forbidden", "channel:dev")


async def test_membership_counts_at_the_messages_seq(node: Node, alice: WireSession, outsider: WireSession) -> None:
    await alice.send("channel:dev", "before")
    await outsider.call("channels.join", {"name": "dev"})
    await alice.send("channel:dev", "during")
    during = await outsider.message("during")
    assert "before" not in str(outsider.unread)
    await outsider.call("channels.leave", {"name": "dev"})
    await alice.send("channel:dev", "after")
    await alice.send("agent:oscar", "marker")
    assert await outsider.contents_until("marker") == []
    again = await node.agent("oscar")  # a resumed session follows the same rule
    assert (await again.message("during"))["seq"] == during["seq"]
    assert await again.contents_until("marker") == []


async def test_who_left_may_not_send_and_repeats_are_still_answered(alice: WireSession, bob: WireSession) -> None:
    first = await bob.send("channel:dev", "said as a member", message_id="m1")
    await bob.call("channels.leave", {"name": "dev"})
    await bob.refused("forbidden", "channel:dev", "one more", message_id="m2")
    assert await bob.send("channel:dev", "said as a member", message_id="m1") == first | {"duplicate": True}
    await bob.refused("id_conflict", "channel:dev", "said otherwise", message_id="m1")
    await bob.call("channels.join", {"name": "dev"})
    assert (await bob.send("channel:dev", "back", message_id="m2"))["duplicate"] is False


async def test_a_reply_in_a_channel_joins_its_thread_with_the_channels_readers(
    alice: WireSession, bob: WireSession, outsider: WireSession
) -> None:
    first = await alice.send("channel:dev", "first")
    await bob.message("first")
    reply = await bob.send("channel:dev", "reply", reply_to=first["seq"])
    thread_id = f"thread:{first['seq']}"
    assert reply["thread_id"] == thread_id
    message = await alice.message("reply")
    assert (message["kind"], message["to"], message["thread_id"]) == ("channel", "channel:dev", thread_id)
    assert (await alice.send("channel:dev", "deeper", reply_to=reply["seq"]))["thread_id"] == thread_id
    assert contents((await alice.call("network.history", {"thread_id": thread_id}))["messages"]) == ["reply", "deeper"]
    await outsider.call_refused("unknown_message", "network.history", {"thread_id": thread_id})
    refusal = await outsider.submit("channel:dev", "let me in", reply_to=first["seq"])
    assert refusal["code"] in ("forbidden", "unknown_message")  # both codes are true, and the protocol allows both


async def test_a_reply_must_name_the_channel_it_is_in(alice: WireSession, bob: WireSession) -> None:
    first = await alice.send("channel:dev", "first")
    await alice.call("channels.create", {"name": "ops"})
    await alice.refused("invalid_arguments", "channel:ops", reply_to=first["seq"])
    await alice.refused("invalid_arguments", "broadcast", reply_to=first["seq"])
    await alice.refused("invalid_arguments", "agent:bob", reply_to=first["seq"])


async def test_a_channel_may_open_its_past_to_its_members(alice: WireSession, outsider: WireSession) -> None:
    await alice.call("channels.create", {"name": "open", "history": "members"})
    early = await alice.send("channel:open", "early")
    await outsider.call("channels.join", {"name": "open"})
    history = await outsider.call("network.history", {"thread_id": "channel:open"})
    assert contents(history["messages"]) == ["early"]
    reply = await outsider.send("channel:open", "a late reply", reply_to=early["seq"])
    assert reply["thread_id"] == f"thread:{early['seq']}"
    await alice.send("channel:open", "marker")
    assert await outsider.contents_until("marker") == []  # a reader is not a recipient


@pytest.mark.parametrize("args", [{}, {"name": 5}, {"name": "Dev"}, {"name": ""}, {"name": "ok", "colour": "red"}])
async def test_wrong_arguments_of_a_mods_operation_are_invalid(node: Node, args: dict[str, object]) -> None:
    session = await node.agent("alice")
    error = await session.call_refused("invalid_arguments", "channels.create", args)
    is_name_wrong = isinstance(args.get("name"), str) and "colour" not in args
    assert ("a name of lower case letters" in error["message"]) is is_name_wrong
    assert "regex" not in error["message"]


async def test_a_channel_is_created_once_and_joined_when_it_is_there(bob: WireSession) -> None:
    await bob.call_refused("invalid_arguments", "channels.create", {"name": "dev"})
    await bob.call_refused("unknown_recipient", "channels.join", {"name": "nowhere"})


async def test_who_was_delivered_a_reply_may_cite_and_read_it_after_leaving_too(node: Node) -> None:
    alice, dave = await node.agent("alice"), await node.agent("dave")
    await alice.call("channels.create", {"name": "open", "history": "members"})
    first = await alice.send("channel:open", "before dave's time")
    await dave.call("channels.join", {"name": "open"})
    reply = await alice.send("channel:open", "a reply to it", reply_to=first["seq"])
    assert (await dave.message("a reply to it"))["seq"] == reply["seq"]
    assert (await dave.call("network.why", {"seq": first["seq"]}))["chain"]
    await dave.call("channels.leave", {"name": "open"})
    listed = {it["thread_id"]: it["readers"] for it in (await dave.call("network.list_threads"))["threads"]}
    assert listed == {reply["thread_id"]: ["alice", "dave"]}
    assert {it["thread_id"]: it["readers"] for it in (await alice.call("network.list_threads"))["threads"]} == {
        "channel:open": ["alice"],  # only current members may read messages from before they joined
        reply["thread_id"]: ["alice", "dave"],
    }
    shown = (await dave.call("network.history", {"thread_id": reply["thread_id"]}))["messages"]
    assert contents(shown) == ["a reply to it"]
    await dave.send("agent:alice", "about that reply", cause=reply["seq"])
    await dave.refused("unknown_message", "agent:alice", cause=first["seq"])


async def test_a_list_of_crowded_channels_has_small_pages_and_says_truly_whether_there_are_more(
    alice: WireSession, bob: WireSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "MEMBERS_COUNTED", 1)  # `dev` has two members
    await alice.call("channels.create", {"name": "ops"})
    pages = [await bob.call("channels.list"), await bob.call("channels.list", {"after": "dev"})]
    assert [([it["name"] for it in page["channels"]], page["has_more"]) for page in pages] == [
        (["dev"], True),
        (["ops"], False),
    ]
    await alice.call("channels.join", {"name": "ops"})
    await bob.call("channels.join", {"name": "ops"})
    assert (await bob.call("channels.list", {"after": "dev"}))["has_more"] is False
