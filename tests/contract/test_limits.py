"""Tests of every limit that `welcome` announces: it can be set, and an honest client reaches it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from websockets.exceptions import InvalidStatus

from roundelay.network.config import Limits
from tests.chaos.bare import read_without_pongs
from tests.support.node import Node, running_node
from tests.support.wire import Frame, WireSession, expect_error, hello_frame

Reach = Callable[[Node], Awaitable[None]]
REACHED: dict[str, tuple[dict[str, int], Reach]] = {}


def reaches(limit: str, value: int, **others: int) -> Callable[[Reach], Reach]:
    """Decorator of a case. The decorator names the limit, its value and other limits of the case."""

    def keep(reach: Reach) -> Reach:
        assert limit not in REACHED
        REACHED[limit] = ({limit: value, **others}, reach)
        return reach

    return keep


@pytest.mark.parametrize("limit", Limits.model_fields)
async def test_a_limit_is_announced_and_reached(limit: str) -> None:
    limits, reach = REACHED[limit]
    async with running_node(limits=limits) as node:
        first = await node.agent("first")
        assert first.welcome["limits"] == Limits(**limits).model_dump(exclude_none=True)
        await first.bye()
        async with asyncio.timeout(20):
            await reach(node)


async def deaf_session(node: Node) -> WireSession:
    """Return a session of `bob` that reads one frame at a time through a small buffer."""
    session = await node.connect(max_queue=1, receive_buffer_bytes=8 * 1024)
    await session.hello("bob", token=node.token_of("bob"))
    return session


async def send_at_once(session: WireSession, count: int, content: str = "hello") -> list[Frame]:
    """Send messages at once, and return the answers. No message waits for another one's answer, so all arrive at the
    same time even on a slow machine.
    """
    for number in range(count):
        await session.send_frame({"type": "send", "message_id": f"m{number}", "to": "broadcast", "content": content})
    return [await session.answer(f"m{number}") for number in range(count)]


@reaches("max_frame_bytes", 2048)
async def a_larger_frame_ends_the_connection(node: Node) -> None:
    ann = await node.agent("ann")
    await ann.send_frame({"type": "send", "message_id": "m", "to": "broadcast", "content": "x" * 2048})
    assert await ann.closed() == 4413


@reaches("max_depth", 5)
async def deeper_json_is_an_invalid_frame(node: Node) -> None:
    ann = await node.agent("ann")
    await ann.send("broadcast", [[[1]]])
    await ann.refused("invalid_frame", "broadcast", [[[[[1]]]]])


@reaches("max_record_bytes", 1024)
async def a_larger_record_is_too_large(node: Node) -> None:
    ann = await node.agent("ann")
    error = await ann.submit_record("r", "note", {"text": "x" * 1024}, record_id="r1")
    assert expect_error(error, "too_large")["record_id"] == "r1"
    assert "body" in error["message"]
    await ann.record("r", "note", {"text": "x" * 900}, record_id="r1")


@reaches("max_batch", 2)
async def a_larger_batch_is_too_large(node: Node) -> None:
    ann = await node.agent("ann")
    frame = {"type": "record", "reaction": "r", "kind": "note", "body": {}}
    error = await ann.submit_batch(*({**frame, "record_id": f"r{number}"} for number in range(3)), batch_id="b")
    assert "max_batch" in expect_error(error, "too_large")["message"]
    assert error["batch_id"] == "b"
    stored = await ann.submit_batch(*({**frame, "record_id": f"r{number}"} for number in range(2)))
    assert [it["duplicate"] for it in stored["stored"]] == [False, False]


@reaches("max_unacked", 2)
async def the_window_takes_no_more(node: Node) -> None:
    ann, bob = await node.agent("ann"), await node.agent("bob")
    seqs = [(await ann.send("agent:bob", text))["seq"] for text in "abcdef"]
    for text in "ab":
        await bob.message(text)
    await bob.settle()
    assert bob.unread == []
    await bob.ack(seqs[1], only=True)
    await bob.message("c")
    await bob.settle()
    assert bob.unread == []
    await bob.ack(seqs[2])
    await bob.message("d")
    await bob.message("e")


@reaches("hello_timeout_ms", 200)
async def silence_is_closed(node: Node) -> None:
    session = await node.connect()
    assert await session.rest() == []
    assert await session.closed() == 4408


@reaches("stall_timeout_ms", 200, session_queue_bytes=64 * 1024)
async def a_stalled_reader_is_closed(node: Node) -> None:
    ann, other, bob = await node.agent("ann"), await node.agent("other"), await deaf_session(node)
    await other.call("network.watch", {"presence": True})
    for _ in range(30):
        seq = (await ann.send("broadcast", "x" * 60_000))["seq"]
        assert (await other.delivery())["message"]["seq"] == seq
        await other.ack(seq)
    await other.expect("presence", agent_id="bob", state="offline")  # bob has read no byte for that time
    assert await bob.closed() == 4429
    await other.settle()


@reaches("ping_interval_ms", 100)
async def an_unanswered_ping_is_closed(node: Node) -> None:
    ann = await node.agent("ann")
    assert await read_without_pongs(node, "deaf") == 1011
    await ann.settle()


@reaches("session_queue_bytes", 64 * 1024)
async def beyond_its_queue_a_session_is_behind(node: Node) -> None:
    ann, bob = await node.agent("ann"), await deaf_session(node)
    seqs = [(await ann.send("agent:bob", "x" * 60_000))["seq"] for _ in range(40)]
    assert [(await bob.delivery())["message"]["seq"] for _ in range(40)] == seqs
    assert (await bob.expect("notice", kind="behind"))["body"]["from_seq"] in seqs


@reaches("sends_per_s", 2)
async def more_sends_are_rate_limited(node: Node) -> None:
    answers = await send_at_once(await node.person("mia"), 6)
    assert expect_error(answers[-1], "rate_limited")["retry_after_ms"] <= 1000


@reaches("root_messages_per_s", 2)
async def more_messages_without_a_cause_are_rate_limited(node: Node) -> None:
    answers = await send_at_once(await node.agent("ann"), 6)
    assert expect_error(answers[-1], "rate_limited")["retry_after_ms"] <= 1000


@reaches("signals_per_s", 2)
async def more_signals_are_dropped(node: Node) -> None:
    ann, bob = await node.agent("ann"), await node.agent("bob")
    await bob.call("network.watch", {"signals": True})
    for number in range(50):
        await ann.send_frame({"type": "signal", "kind": "typing", "to": "agent:bob", "body": number})
    await ann.send("agent:bob", "the last of them was taken in")
    await bob.message("the last of them was taken in")
    passed = [frame["body"] for frame in bob.unread if frame["type"] == "signal"]
    assert passed[:3] == [0, 1, 2]
    assert len(passed) < 25


@reaches("max_hops", 1)
async def a_longer_chain_is_stopped(node: Node) -> None:
    ann = await node.agent("ann")
    seq = (await ann.send("broadcast", "root"))["seq"]
    seq = (await ann.send("broadcast", "one hop", cause=seq))["seq"]
    await ann.refused("loop_stopped", "broadcast", "two hops", cause=seq)


@reaches("max_root_messages", 2)
async def a_larger_conversation_is_stopped(node: Node) -> None:
    ann = await node.agent("ann")
    root = (await ann.send("broadcast", "root"))["seq"]
    await ann.send("broadcast", "second", cause=root)
    await ann.refused("loop_stopped", "broadcast", "third", cause=root)


@reaches("max_root_tokens", 100)
async def used_tokens_reduce_the_announced_rest(node: Node) -> None:
    """The hub announces the rest. Agents refuse model calls beyond it (`tests/features/test_conversation_budget.py`)."""
    ann, bob = await node.agent("ann"), await node.agent("bob", role="reactor")
    seq = (await ann.send("agent:bob", "work"))["seq"]
    assert "standing" not in await bob.call("network.window", {"trigger": seq})
    await bob.record("r", "started", {"trigger": seq})
    await bob.record("r", "model_reply", {"reply": {"usage": {"prompt_tokens": 90}, "model": "m"}})
    assert (await bob.call("network.window", {"trigger": seq}))["standing"] == {
        "messages_left": 1023,
        "tokens_left": 10,
    }


@reaches("max_uncaused_answers", 1)
async def more_answers_without_a_cause_are_stopped(node: Node) -> None:
    ann, bob = await node.agent("ann"), await node.agent("bob")
    await ann.send("agent:bob", "hello")
    await bob.send("agent:ann", "an answer")
    await ann.send("agent:bob", "another one")
    error = await bob.refused("loop_stopped", "agent:ann", "one too many")
    assert "max_uncaused_answers" in error["message"]


@reaches("max_record_tokens", 100)
async def more_tokens_of_a_record_do_not_count(node: Node) -> None:
    ann, bob = await node.agent("ann"), await node.agent("bob", role="reactor")
    seq = (await ann.send("agent:bob", "work"))["seq"]
    await bob.record("r", "started", {"trigger": seq})
    await bob.record("r", "model_reply", {"reply": {"usage": {"prompt_tokens": 101}, "model": "m"}})
    assert (await bob.call("network.spent", {"seq": seq}))["of_root"]["m"]["prompt_tokens"] == 100


@reaches("max_connections", 2)
async def further_sessions_are_refused(node: Node) -> None:
    await node.agent("ann")
    await node.agent("bob")
    with pytest.raises(InvalidStatus) as refusal:
        await node.connect()
    assert refusal.value.response.status_code == 503


@reaches("max_unauthenticated", 2)
async def the_longest_without_a_welcome_makes_room(node: Node) -> None:
    one, two = await node.connect(), await node.connect()
    three = await node.connect()
    assert await one.closed() == 4408
    for session, agent_id in ((two, "ann"), (three, "bob")):
        await session.hello(agent_id, token=node.token_of(agent_id))


@reaches("max_pending_bytes", 4096)
async def a_writer_with_too_much_to_do_is_overloaded(node: Node) -> None:
    answers = await send_at_once(await node.person("mia"), 50, "x" * 500)
    refused = [answer for answer in answers if answer["type"] == "error"]
    assert {expect_error(answer, "overloaded")["retry_after_ms"] > 0 for answer in refused} == {True}


@reaches("max_reads", 1)
async def a_second_read_is_overloaded(node: Node) -> None:
    mia = await node.person("mia")
    head = (await mia.call("network.info"))["head"]
    args = {"after": head, "wait_ms": 10_000}
    await mia.send_frame({"type": "call", "call_id": "waits", "op": "network.log", "args": args})
    assert (await mia.call_refused("overloaded", "network.info"))["retry_after_ms"] > 0
    await mia.send("broadcast", "that is what it waits for")
    assert (await mia.answer("waits"))["type"] == "result"
    await mia.call("network.info")


@reaches("max_result_bytes", 4096)
async def a_larger_result_says_that_there_is_more(node: Node) -> None:
    ann = await node.agent("ann")
    for number in range(5):
        await ann.send("broadcast", f"{number}" * 1500)
    value = await ann.call("network.history", {"thread_id": "broadcast"})
    assert ([message["content"][0] for message in value["messages"]], value["has_more"]) == (["3", "4"], True)


@reaches("max_card_bytes", 1024)
async def a_larger_card_is_refused(node: Node) -> None:
    session = await node.connect()
    await session.send_frame(hello_frame("ann", token=node.token_of("ann"), card={"description": "x" * 1024}))
    expect_error(await session.next_frame(), "invalid_frame")
    assert await session.closed() == 4400


@reaches("bytes_per_day", 2048)
async def more_bytes_a_day_are_refused(node: Node) -> None:
    ann = await node.agent("ann")
    await ann.send("broadcast", "x" * 1000)
    refusal = await ann.refused("budget_exhausted", "broadcast", "x" * 1000)
    assert "bytes_per_day" in refusal["message"]


@reaches("messages_per_day", 2)
async def more_messages_a_day_are_refused(node: Node) -> None:
    answers = await send_at_once(await node.person("mia"), 3)
    assert "messages_per_day" in expect_error(answers[-1], "budget_exhausted")["message"]


@reaches("max_created_channels", 1)
async def a_second_channel_is_forbidden(node: Node) -> None:
    ann = await node.agent("ann")
    await ann.call("channels.create", {"name": "dev"})
    assert (
        "max_created_channels" in (await ann.call_refused("forbidden", "channels.create", {"name": "ops"}))["message"]
    )


@reaches("max_reactions_per_message", 1)
async def a_second_open_reaction_is_forbidden(node: Node) -> None:
    ann, mia = await node.agent("ann"), await node.person("mia")
    body = {"trigger": (await mia.send("agent:ann", "hi"))["seq"]}
    await ann.record("r1", "started", body)
    assert (
        "max_reactions_per_message"
        in expect_error(await ann.submit_record("r2", "started", body), "forbidden")["message"]
    )


@reaches("max_put_off", 1)
async def a_second_message_is_not_put_off(node: Node) -> None:
    ann, bob = await node.agent("ann"), await node.agent("bob")
    for number in range(2):
        await ann.send("agent:bob", number)
        await bob.nack((await bob.message(number))["seq"], retry_after_ms=60_000)
    assert "max_put_off" in expect_error(await bob.expect("error"), "rate_limited")["message"]


@reaches("max_marks", 1)
async def the_mark_that_was_read_the_longest_ago_makes_room(node: Node) -> None:
    ann, bob = await node.agent("ann"), await node.agent("bob")
    for to in ("agent:ann", "broadcast"):
        said = await bob.send(to, "hello")
        await ann.call("network.mark", {"thread_id": said["thread_id"], "read_upto": said["seq"]})
    shown = (await ann.call("network.list_threads"))["threads"]
    assert [it["thread_id"] for it in shown if "mark" in it] == ["broadcast"]


@reaches("max_questions", 1)
async def the_oldest_question_is_forgotten(node: Node) -> None:
    mia, bob = await node.person("mia"), await node.agent("bob")
    asked = [(await bob.send("agent:mia", "and?", requires_response=True))["seq"] for _ in range(2)]
    assert [it["seq"] for it in (await mia.call("network.inbox"))["items"]] == asked[1:]


@reaches("registrations_per_minute", 1)
async def further_first_uses_are_put_off(node: Node) -> None:
    await node.agent("ann")  # the burst allows one minute's registrations plus the first one
    session = await node.connect()
    await session.send_frame(hello_frame("bob", token=node.token_of("bob")))
    assert "registrations_per_minute" in expect_error(await session.next_frame(), "rate_limited")["message"]
    assert await session.closed() == 4503


@reaches("max_reason_chars", 5)
async def a_longer_reason_is_cut(node: Node) -> None:
    ann, bob = await node.agent("ann"), await node.agent("bob")
    await ann.send("agent:bob", "cannot be handled")
    for _ in range(5):
        seq = (await bob.delivery())["message"]["seq"]
        await bob.nack(seq, reason="too long a story")
    await bob.expect("notice", kind="dead_letter")
    assert [letter["reason"] for letter in (await bob.call("network.dead_letters"))["dead_letters"]] == ["too l"]


async def ask_for_twice(node: Node, *sessions: WireSession) -> None:
    """Let each session request its history twice through small buffers, until one of the calls waits for its turn."""
    mia = await node.person("mia")
    for session in sessions:
        for call_id in ("one", "two"):
            args = {"thread_id": "direct:ann~bob"}
            await session.send_frame({"type": "call", "call_id": call_id, "op": "network.history", "args": args})
    while not (await mia.call("network.status"))["reads_waiting"]:
        pass


async def unread_session(node: Node) -> WireSession:
    """Return a session of `bob` that joined after a history of 200 KB, and that reads little."""
    bob, ann = await node.agent("bob"), await node.agent("ann")
    await ann.send("agent:bob", "x" * 200_000)
    await bob.ack((await bob.delivery())["message"]["seq"])
    await bob.bye()
    return await deaf_session(node)


@reaches("session_result_bytes", 256 * 1024)
async def a_read_waits_until_its_session_has_taken_results(node: Node) -> None:
    bob = await unread_session(node)
    await ask_for_twice(node, bob)
    assert {(await bob.answer(call_id))["type"] for call_id in ("one", "two")} == {"result"}


@reaches("participant_result_bytes", 256 * 1024)
async def a_read_waits_until_its_participant_has_taken_results(node: Node) -> None:
    bob = await unread_session(node)
    other = await deaf_session(node)
    await ask_for_twice(node, bob, other)
    for session in (bob, other):
        assert {(await session.answer(call_id))["type"] for call_id in ("one", "two")} == {"result"}


@reaches("hub_result_bytes", 256 * 1024)
async def who_holds_results_while_everybody_waits_is_closed(node: Node) -> None:
    bob = await unread_session(node)
    for number in range(16):
        args = {"thread_id": "direct:ann~bob"}
        await bob.send_frame({"type": "call", "call_id": f"h{number}", "op": "network.history", "args": args})
    await (await node.agent("eve")).call("network.info")
    assert await bob.closed() == 4429


@reaches("takeover_ms", 200)
async def a_takeover_ends_by_itself(node: Node) -> None:
    mia, bob = await node.person("mia"), await node.agent("bob", role="reactor")
    await mia.send("agent:bob", "question")
    await mia.call("network.take", {"thread_id": "direct:bob~mia"})
    assert (await bob.expect("notice", kind="given"))["thread_id"] == "direct:bob~mia"
