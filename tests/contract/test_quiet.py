"""Tests of quiet conversations: unhandled messages, reactions, questions and items of mods keep a conversation open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from roundelay.app import Network
from roundelay.network.client import NetworkClient, Notice
from roundelay.network.errors import UnknownMessage


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with Network.open() as opened:
        yield opened


async def next_message(client: NetworkClient) -> int:
    """Receive one message without acknowledging it."""
    delivery = await anext(client.deliveries())
    return delivery.message.seq


async def kinds(client: NetworkClient, root: int, *, others: bool = False) -> list[tuple[str, str]]:
    found = await client.open_items(root, others=others)
    assert found.is_quiet == (not found.items and not found.hidden)
    return [(item.kind, item.agent_id) for item in found.items]


async def quiet(client: NetworkClient, root: int) -> None:
    assert (await client.wait_until_quiet(root, 5)).is_quiet


async def start(client: NetworkClient, trigger: int) -> None:
    await client.record(f"r{trigger}", "started", {"trigger": trigger}, record_id=f"s{trigger}")


async def finish(client: NetworkClient, trigger: int) -> None:
    await client.record(f"r{trigger}", "finished", {"status": "completed"}, record_id=f"f{trigger}")


async def test_conversation_is_open_from_delivery_to_the_end_of_the_reaction(network: Network) -> None:
    ann, bob = await network.join("ann", kind="human"), await network.join("bob", role="reactor")
    root = (await ann.send_text("bob", "hello")).seq
    assert await kinds(ann, root) == [("delivery", "bob")]
    assert await next_message(bob) == root
    await start(bob, root)
    assert await kinds(ann, root) == [("reaction", "bob")]
    await bob.send_text("ann", "hi", reply_to=root, cause=root)
    assert await kinds(ann, root) == [("reaction", "bob")]
    await finish(bob, root)
    assert await kinds(ann, root) == []


async def test_conversation_stays_open_while_work_is_handed_on(network: Network) -> None:
    ann, bob = await network.join("ann"), await network.join("bob", role="reactor")
    cat = await network.join("cat", role="reactor")
    root = (await ann.send_text("bob", "hello")).seq
    await start(bob, root)
    asked = (await bob.send_text("cat", "please", cause=root)).seq
    await finish(bob, root)
    assert await kinds(cat, asked) == [("delivery", "cat")]
    found = await ann.open_items(root)
    # ann may not read the message to cat, so this item is only counted.
    assert (found.is_quiet, found.items, found.hidden) == (False, [], 1)
    await start(cat, asked)
    answered = (await cat.send_text("bob", "done", cause=asked)).seq
    await finish(cat, asked)
    assert not (await ann.open_items(root)).is_quiet
    assert await next_message(bob) == root
    assert await next_message(bob) == answered
    await bob.ack(answered)
    await quiet(ann, root)


async def test_broadcast_is_open_until_each_reactor_has_handled_it(network: Network) -> None:
    ann = await network.join("ann", kind="human")
    reactors = [await network.join(name, role="reactor") for name in ("bob", "cat", "dan")]
    await network.join("eve")
    root = (await ann.broadcast("hello")).seq
    assert await kinds(ann, root) == [("delivery", name) for name in ("bob", "cat", "dan")]
    for reactor in reactors[:2]:
        assert await next_message(reactor) == root
        await reactor.ack(root)
    found = await ann.wait_until_quiet(root, 1)
    assert [item.agent_id for item in found.items] == ["dan"]
    await start(reactors[2], root)
    await finish(reactors[2], root)
    await quiet(ann, root)


async def test_required_answer_of_a_person_keeps_the_conversation_open(network: Network) -> None:
    mia, bob = await network.join("mia", kind="human"), await network.join("bob", role="reactor")
    root = (await bob.send_text("mia", "which one?", requires_response=True)).seq
    assert await kinds(mia, root) == [("question", "mia")]
    await mia.send_text("bob", "the first", reply_to=root, cause=root)
    assert await kinds(mia, root) == [("delivery", "bob")]


@pytest.mark.parametrize("names_cause", [True, False])
async def test_required_answer_of_a_program_keeps_the_conversation_open(network: Network, names_cause: bool) -> None:
    ann, coder = await network.join("ann", kind="human"), await network.join("coder")
    root = (await ann.send_text("coder", "do it", requires_response=True)).seq
    later = (await ann.send_text("coder", "no answer needed")).seq
    assert await kinds(ann, root) == [("question", "coder")]
    assert await kinds(ann, later) == []
    await coder.send_text("ann", "done", **({"cause": root} if names_cause else {}))
    await quiet(ann, root)


async def test_removed_agent_leaves_nothing_open(network: Network) -> None:
    ann = await network.join("ann", kind="human")
    bob = await network.join("bob", role="reactor")
    root, other = (await ann.send_text("bob", "one")).seq, (await ann.send_text("bob", "two")).seq
    await start(bob, root)
    await ann.call("network.remove", {"agent_id": "bob"})
    assert await kinds(ann, root) == await kinds(ann, other) == []


async def test_dead_letter_closes_and_its_return_opens_again(network: Network) -> None:
    ann, bob = await network.join("ann", kind="human"), await network.join("bob", role="reactor")
    root = (await ann.send_text("bob", "hello")).seq
    for _ in range(5):
        assert await next_message(bob) == root
        assert await kinds(ann, root) == [("delivery", "bob")]
        await bob.nack(root, "no", retry_after_ms=0)
    await quiet(ann, root)
    await ann.call("network.retry_dead_letter", {"seq": root, "agent_id": "bob"})
    assert await kinds(ann, root) == [("delivery", "bob")]
    # The ack cursor is already above the message. Another ack must not close it.
    other = (await ann.send_text("bob", "more")).seq
    assert {await next_message(bob), await next_message(bob)} == {root, other}
    await bob.ack(other, only=True)
    await quiet(ann, other)
    assert await kinds(ann, root) == [("delivery", "bob")]
    await bob.ack(root, only=True)
    await quiet(ann, root)


async def test_open_items_survive_a_restart_and_close_afterwards(tmp_path: Path) -> None:
    file = tmp_path / "network.db"
    async with Network.open(file) as network:
        ann = await network.join("ann", kind="human")
        await network.join("bob", role="reactor")
        root, other = (await ann.send_text("bob", "hello")).seq, (await ann.broadcast("all")).seq
    async with Network.open(file) as network:
        ann, bob = await network.join("ann", kind="human"), await network.join("bob", role="reactor")
        assert await kinds(ann, root) == await kinds(ann, other) == [("delivery", "bob")]
        assert await next_message(bob) == root
        assert await next_message(bob) == other
        await bob.ack(other)
        await quiet(ann, root)
        await quiet(ann, other)


async def test_notice_reaches_whoever_began_once_per_quiet_period(network: Network) -> None:
    ann, eve = await network.join("ann", kind="human"), await network.join("eve", kind="human")
    bob = await network.join("bob", role="reactor")
    for client in (ann, eve):
        await client.call("network.watch", {"quiet": True})
    notices: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    async def collect(client: NetworkClient) -> None:
        async for event in client.events():
            if isinstance(event, Notice) and event.kind == "conversation_quiet":
                notices.put_nowait((client.agent_id, event.body["root"]))

    tasks = [asyncio.create_task(collect(client)) for client in (ann, eve)]
    root = (await ann.send_text("bob", "hello")).seq
    await start(bob, root)
    await finish(bob, root)
    again = (await ann.send_text("bob", "more", cause=root)).seq
    await start(bob, again)
    await finish(bob, again)
    async with asyncio.timeout(5):
        assert [await notices.get(), await notices.get()] == [("ann", root), ("ann", root)]
    # A later answer shows that no other notice was on its way.
    await quiet(eve, root)
    assert notices.empty()
    for task in tasks:
        task.cancel()


async def test_wait_of_an_agent_leaves_out_its_own_reaction_and_those_that_wait_for_it(network: Network) -> None:
    ann, lead = await network.join("ann", kind="human"), await network.join("lead", role="reactor")
    bob = await network.join("bob", role="reactor")
    root = (await ann.send_text("lead", "hello")).seq
    await start(lead, root)
    assert await kinds(lead, root, others=True) == []
    asked = (await lead.send_text("bob", "please", cause=root)).seq
    assert await kinds(lead, root, others=True) == [("delivery", "bob")]
    await start(bob, asked)
    place = {"turn": 1, "call": 0}
    await lead.record(f"r{root}", "tool_started", place, record_id="call")
    await lead.record(f"r{root}", "waiting", {**place, "questions": {"bob": asked}, "until": 0}, record_id="wait")
    # Neither bob's own reaction nor the lead's, which waits for bob, counts for bob.
    assert (await bob.open_items(asked, others=True)).is_quiet
    assert not (await lead.open_items(root, others=True)).is_quiet
    assert [(item.agent_id, item.waits_for) for item in (await ann.open_items(root)).items] == [
        ("lead", ["bob"]),
        ("bob", []),
    ]


async def test_conversation_of_others_is_refused(network: Network) -> None:
    ann, bob, eve = [await network.join(name) for name in ("ann", "bob", "eve")]
    root = (await ann.send_text("bob", "hello")).seq
    answer = (await bob.send_text("ann", "hi", cause=root)).seq
    for seq in (root, answer, answer + 100):
        with pytest.raises(UnknownMessage, match=f"no message {seq}"):
            await eve.open_items(seq)
    assert (await ann.open_items(answer)).root == root
