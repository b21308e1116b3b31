"""Tests of delivery: ack cursor, acks, nacks, dead letters, resume, window, several sessions.
docs/protocol/delivery.md.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.node import Node, running_node
from tests.support.wire import WireSession, expect_error

MAX_ATTEMPTS = 5


@pytest.fixture
async def alice(node: Node) -> WireSession:
    return await node.agent("alice")


@pytest.fixture
async def bob(node: Node) -> WireSession:
    return await node.agent("bob")


async def send_all(session: WireSession, to: str, *contents: str) -> list[int]:
    """Send these messages one after the other, and return their seqs."""
    return [(await session.send(to, content))["seq"] for content in contents]


async def returned(node: Node, session: WireSession, agent_id: str = "bob", **hello: object) -> WireSession:
    """Leave and join again. The hub has then processed all earlier acks."""
    await session.bye()
    return await node.agent(agent_id, **hello)


# -- acks and the ack cursor


async def test_an_ack_handles_everything_up_to_it(node: Node, alice: WireSession, bob: WireSession) -> None:
    seqs = await send_all(alice, "agent:bob", "a", "b", "c", "marker")
    await bob.contents_until("marker")
    await bob.ack(seqs[1])
    again = await returned(node, bob)
    assert again.welcome["resume"] == "full"
    assert seqs[1] <= again.welcome["cursor"] < seqs[2]
    assert await again.contents_until("marker") == ["c"]


async def test_what_is_not_acked_is_delivered_again_on_return(node: Node, alice: WireSession, bob: WireSession) -> None:
    seqs = await send_all(alice, "agent:bob", "a", "b")
    await bob.message("a")
    again = await returned(node, bob)
    frames = [await again.delivery() for _ in seqs]
    assert [frame["message"]["seq"] for frame in frames] == seqs
    assert [frame["attempt"] for frame in frames] == [1, 1]  # neither message was nacked


async def test_only_acks_just_that_one(node: Node, alice: WireSession, bob: WireSession) -> None:
    seqs = await send_all(alice, "agent:bob", "a", "b", "c", "marker")
    await bob.contents_until("marker")
    await bob.ack(seqs[1], only=True)
    again = await returned(node, bob)
    assert again.welcome["cursor"] < seqs[0]
    assert await again.contents_until("marker") == ["a", "c"]
    await again.ack(seqs[0])  # the ack cursor advances past the messages acked above it
    third = await returned(node, again)
    assert seqs[0] <= third.welcome["cursor"] < seqs[2]
    assert await third.contents_until("marker") == ["c"]


async def test_an_ack_above_the_highest_delivered_is_invalid(alice: WireSession, bob: WireSession) -> None:
    (seq,) = await send_all(alice, "agent:bob", "a")
    await bob.message("a")
    await bob.ack(seq + 1)
    expect_error(await bob.next_frame(), "invalid_arguments")
    await bob.ack(seq)
    await bob.settle()
    assert bob.unread == []


async def test_an_ack_of_anothers_message_beyond_ones_own_is_invalid(alice: WireSession, bob: WireSession) -> None:
    carol_was_never_sent_anything = (await alice.send("agent:bob", "a"))["seq"]
    await alice.ack(carol_was_never_sent_anything)
    expect_error(await alice.next_frame(), "invalid_arguments")


async def test_a_second_ack_of_the_same_is_no_error(alice: WireSession, bob: WireSession) -> None:
    (seq,) = await send_all(alice, "agent:bob", "a")
    await bob.message("a")
    for _ in range(2):
        await bob.ack(seq)
        await bob.ack(seq, only=True)
    await bob.settle()
    assert bob.unread == []


async def test_the_floor_never_goes_back(node: Node, alice: WireSession, bob: WireSession) -> None:
    seqs = await send_all(alice, "agent:bob", "a", "b", "marker")
    await bob.contents_until("marker")
    await bob.ack(seqs[1])
    await bob.ack(seqs[0])
    again = await returned(node, bob)
    assert again.welcome["cursor"] >= seqs[1]
    assert await again.contents_until("marker") == []


# -- several sessions


async def test_every_session_gets_every_message(node: Node, alice: WireSession, bob: WireSession) -> None:
    second = await node.agent("bob")
    await alice.send("agent:bob", "to both")
    await bob.message("to both")
    await second.message("to both")


async def test_any_session_moves_the_one_floor(node: Node, alice: WireSession, bob: WireSession) -> None:
    second = await node.agent("bob")
    seqs = await send_all(alice, "agent:bob", "a", "b", "marker")
    for session in (bob, second):
        await session.contents_until("marker")
    await bob.ack(seqs[0])
    await second.ack(seqs[1], only=True)
    await bob.settle()
    await second.settle()
    assert await (await node.agent("bob")).contents_until("marker") == []


async def test_own_messages_count_as_handled(node: Node, alice: WireSession, bob: WireSession) -> None:
    await alice.send("agent:bob", "mine")
    await alice.send("broadcast", "mine too")
    await bob.send("agent:alice", "marker")
    again = await returned(node, alice, "alice")
    assert await again.contents_until("marker") == []


# -- resume


async def test_resume_starts_at_its_cursor_and_leaves_out_nothing(
    node: Node, alice: WireSession, bob: WireSession
) -> None:
    start, epoch = bob.welcome["cursor"], bob.welcome["network"]["epoch"]
    await send_all(alice, "agent:bob", "a", "b")
    await bob.message("a")
    await bob.ack((await bob.message("b"))["seq"])
    await bob.send("agent:alice", "mine")
    await send_all(alice, "agent:bob", "marker")
    again = await returned(node, bob, resume={"epoch": epoch, "cursor": start})
    assert again.welcome["resume"] == "full"
    assert again.welcome["cursor"] == start
    assert await again.contents_until("marker") == ["a", "b", "mine"]


async def test_resume_continues_after_its_cursor(node: Node, alice: WireSession, bob: WireSession) -> None:
    seqs = await send_all(alice, "agent:bob", "a", "b", "c", "marker")
    resume = {"epoch": bob.welcome["network"]["epoch"], "cursor": seqs[1]}
    again = await returned(node, bob, resume=resume)
    assert again.welcome["cursor"] == seqs[1]
    assert await again.contents_until("marker") == ["c"]


async def test_resume_at_the_head_delivers_only_what_comes(node: Node, alice: WireSession, bob: WireSession) -> None:
    await send_all(alice, "agent:bob", "old")
    info = await bob.call("network.info")
    again = await returned(node, bob, resume={"epoch": info["epoch"], "cursor": info["head"]})
    assert again.welcome["resume"] == "full"
    await send_all(alice, "agent:bob", "new")
    await again.message("new")


async def test_resume_moves_no_floor(node: Node, alice: WireSession, bob: WireSession) -> None:
    seqs = await send_all(alice, "agent:bob", "a", "b", "marker")
    again = await returned(node, bob, resume={"epoch": bob.welcome["network"]["epoch"], "cursor": seqs[1]})
    await again.message("marker")
    third = await returned(node, again)
    assert await third.contents_until("marker") == ["a", "b"]


@pytest.mark.parametrize("case", ["another epoch", "beyond the head"])
async def test_an_impossible_resume_is_limited_and_starts_at_what_is_left(
    node: Node, alice: WireSession, bob: WireSession, case: str
) -> None:
    start, epoch = bob.welcome["cursor"], bob.welcome["network"]["epoch"]
    seqs = await send_all(alice, "agent:bob", "a", "b", "marker")
    await bob.contents_until("marker")
    await bob.ack(seqs[1])
    resume = {"epoch": "another", "cursor": start} if case == "another epoch" else {"epoch": epoch, "cursor": 2**50}
    again = await returned(node, bob, resume=resume)
    welcome = again.welcome
    assert welcome["resume"] == "limited"
    assert welcome["missing_before"] <= seqs[0]
    assert welcome["cursor"] < seqs[0]
    assert await again.contents_until("marker") == ["a", "b"]


async def test_a_cursor_of_a_message_to_somebody_else_is_fine(node: Node, alice: WireSession, bob: WireSession) -> None:
    carol = await node.agent("carol")
    (elsewhere,) = await send_all(alice, "agent:carol", "elsewhere")
    await carol.message("elsewhere")
    await send_all(alice, "agent:bob", "here")
    again = await returned(node, bob, resume={"epoch": bob.welcome["network"]["epoch"], "cursor": elsewhere})
    await again.message("here")


async def test_each_seq_comes_once_and_ascending_while_new_ones_arrive(
    node: Node, alice: WireSession, bob: WireSession
) -> None:
    await bob.bye()
    seqs = await send_all(alice, "agent:bob", *(f"waiting {n}" for n in range(100)))
    again = await node.agent("bob")
    seqs += await send_all(alice, "agent:bob", *(f"live {n}" for n in range(50)), "marker")
    frames = await again.deliveries_until("marker")
    assert [frame["message"]["seq"] for frame in frames] == seqs[:-1]


async def test_nothing_is_lost_or_doubled_while_the_recipient_comes_and_goes(
    node: Node, alice: WireSession, bob: WireSession
) -> None:
    carol = await node.agent("carol")
    sent: list[int] = []

    async def talk(session: WireSession) -> None:
        for number in range(150):
            sent.append((await session.send("agent:bob" if number % 2 else "broadcast", number))["seq"])

    async def listen() -> set[int]:
        handled: set[int] = set()
        session = bob
        while len(handled) < 300:
            seen: list[int] = []
            for _ in range(min(25, 300 - len(handled))):
                seen.append((await session.delivery())["message"]["seq"])
            assert seen == sorted(set(seen))
            assert not handled & set(seen)  # acked messages are not delivered again
            await session.ack(seen[-1])
            handled |= set(seen)
            session = await returned(node, session)
        return handled

    _, _, handled = await asyncio.gather(talk(alice), talk(carol), listen())
    assert handled == set(sent)


# -- nack and dead letters


async def test_a_nacked_message_comes_again_with_a_higher_attempt(alice: WireSession, bob: WireSession) -> None:
    (seq,) = await send_all(alice, "agent:bob", "hard")
    await bob.message("hard")
    await bob.nack(seq)
    second = await bob.delivery()
    assert (second["message"]["seq"], second["attempt"]) == (seq, 2)
    await bob.ack(seq)
    await send_all(alice, "agent:bob", "next")
    await bob.message("next")


async def test_retry_after_ms_is_waited_for(alice: WireSession, bob: WireSession) -> None:
    (seq,) = await send_all(alice, "agent:bob", "hard")
    await bob.message("hard")
    nacked_at = time.monotonic()
    await bob.nack(seq, retry_after_ms=150)
    assert (await bob.delivery())["attempt"] == 2
    assert time.monotonic() - nacked_at >= 0.15


async def test_others_are_delivered_while_one_waits_for_its_next_attempt(alice: WireSession, bob: WireSession) -> None:
    (seq,) = await send_all(alice, "agent:bob", "hard")
    await bob.message("hard")
    await bob.nack(seq, retry_after_ms=60_000)
    await send_all(alice, "agent:bob", "easy", "marker")
    assert await bob.contents_until("marker") == ["easy"]


async def test_an_ack_of_later_ones_does_not_lose_a_nacked_one_with_only(
    node: Node, alice: WireSession, bob: WireSession
) -> None:
    seqs = await send_all(alice, "agent:bob", "hard", "easy", "marker")
    await bob.contents_until("marker")
    await bob.nack(seqs[0], retry_after_ms=60_000)
    await bob.ack(seqs[1], only=True)
    await bob.ack(seqs[2], only=True)
    again = await returned(node, bob)
    assert again.welcome["cursor"] < seqs[0]


@pytest.mark.parametrize("nacking", [0, 1])
async def test_what_one_session_nacks_comes_again_though_another_holds_it(
    node: Node, alice: WireSession, bob: WireSession, nacking: int
) -> None:
    sessions = [bob, await node.agent("bob")]
    (seq,) = await send_all(alice, "agent:bob", "hard")
    for session in sessions:
        await session.message("hard")
    await sessions[nacking].nack(seq)
    again = await sessions[nacking].delivery()
    assert (again["message"]["seq"], again["attempt"]) == (seq, 2)


async def test_attempts_outlive_sessions(node: Node, alice: WireSession, bob: WireSession) -> None:
    (seq,) = await send_all(alice, "agent:bob", "hard")
    await bob.message("hard")
    await bob.nack(seq)
    await bob.expect("deliver", attempt=2)
    await bob.nack(seq)
    again = await returned(node, bob)
    assert (await again.delivery())["attempt"] == 3


async def test_the_fifth_failure_makes_a_dead_letter_and_the_thread_goes_on(
    node: Node, alice: WireSession, bob: WireSession
) -> None:
    operator = await node.person("mia")
    (seq,) = await send_all(alice, "agent:bob", "poison")
    for attempt in range(1, MAX_ATTEMPTS + 1):
        delivery = await bob.delivery()
        assert (delivery["message"]["seq"], delivery["attempt"]) == (seq, attempt)
        await bob.nack(seq)
    for session in (bob, operator):
        notice = await session.expect("notice", kind="dead_letter")
        assert set(notice) <= {"type", "kind", "thread_id", "body"}
        assert notice["body"]["seq"] == seq
    await send_all(alice, "agent:bob", "marker")
    assert await bob.contents_until("marker") == []
    status = await alice.call("network.message_status", {"seq": seq})
    assert [(r["agent_id"], r["state"], r["attempts"]) for r in status["recipients"]] == [("bob", "dead", MAX_ATTEMPTS)]
    again = await returned(node, bob)
    assert await again.contents_until("marker") == []
    alice_hears_once = [frame["body"] for frame in alice.unread if frame["type"] == "notice"]
    # The report contains no text of bob.
    assert alice_hears_once == [{"seq": seq, "agent_id": "bob", "attempts": MAX_ATTEMPTS}]


async def test_the_dead_letter_notice_waits_for_nobody_else(node: Node, alice: WireSession, bob: WireSession) -> None:
    carol = await node.agent("carol")
    stored = await alice.send("broadcast", "poison for bob")
    for _ in range(MAX_ATTEMPTS):
        await bob.delivery()
        await bob.nack(stored["seq"])
    await bob.expect("notice", kind="dead_letter")
    assert (await carol.delivery())["attempt"] == 1
    await carol.settle()
    assert carol.unread == []


async def test_a_nack_of_something_never_delivered_is_invalid(node: Node, alice: WireSession, bob: WireSession) -> None:
    carol = await node.agent("carol")
    (seq,) = await send_all(alice, "agent:bob", "for bob")
    await bob.message("for bob")
    for session, nacked in ((carol, seq), (alice, seq), (bob, seq + 1)):
        await session.nack(nacked)
        expect_error(await session.next_frame(), "invalid_arguments")


# -- window (its size and slow readers: test_limits.py)


async def test_the_window_is_each_sessions_own() -> None:
    async with running_node(limits={"max_unacked": 2}) as node:
        alice, bob, second = await node.agent("alice"), await node.agent("bob"), await node.agent("bob")
        seqs = await send_all(alice, "agent:bob", *"abc")
        for session in (bob, second):
            assert [(await session.delivery())["message"]["content"] for _ in range(2)] == ["a", "b"]
        await bob.ack(seqs[1])
        await bob.message("c")
        await second.settle()
        assert second.unread == []
        await second.ack(seqs[1])  # an ack below the ack cursor still makes room in this session's window
        await second.message("c")


async def test_own_messages_take_no_room_in_the_window() -> None:
    async with running_node(limits={"max_unacked": 2}) as node:
        alice, second, bob = await node.agent("alice"), await node.agent("alice"), await node.agent("bob")
        await send_all(alice, "agent:bob", *"abc")
        await send_all(alice, "broadcast", *"def")
        assert [(await second.delivery())["message"]["content"] for _ in range(6)] == list("abcdef")
        await bob.send("agent:alice", "still there?")
        await second.message("still there?")


async def test_own_messages_to_a_mod_take_no_room_in_the_window() -> None:
    async with running_node(limits={"max_unacked": 2}) as node:
        alice, bob = await node.agent("alice"), await node.agent("bob")
        second = await node.agent("alice")
        for number in range(3):
            await alice.send("mod:channels", number)
        await bob.send("agent:alice", "marker")
        assert await second.contents_until("marker") == [0, 1, 2]


async def test_the_window_holds_for_a_backlog_too() -> None:
    async with running_node(limits={"max_unacked": 4}) as node:
        alice, bob = await node.agent("alice"), await node.agent("bob")
        await bob.bye()
        sent = [f"m{n}" for n in range(30)]
        await send_all(alice, "agent:bob", *sent)
        again = await node.agent("bob")
        read: list[str] = []
        while len(read) < len(sent):
            delivery = await again.delivery()
            read.append(delivery["message"]["content"])
            if len(read) % 4 == 0:
                await again.settle()
                assert again.unread == []
                await again.ack(delivery["message"]["seq"])
        assert read == sent
