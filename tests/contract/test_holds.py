"""Tests of takeovers, in which a person controls a thread for a while: docs/protocol/takeover.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.node import Node, running_node
from tests.support.wire import Frame, WireSession, expect_error

DIRECT = "direct:bob~mia"


async def begin(bob: WireSession, reaction: str, seq: int) -> Frame:
    return await bob.record(reaction, "started", {"trigger": seq, "manifest": [seq]})


async def test_an_agent_answers_neither_in_a_held_thread_nor_afterwards_from_before(node: Node) -> None:
    mia, bob = await node.person("mia"), await node.agent("bob", role="reactor")
    question = (await mia.send("agent:bob", "question"))["seq"]
    await begin(bob, "before", question)
    taken = await mia.call("network.take", {"thread_id": DIRECT})
    again = await mia.call("network.take", {"thread_id": DIRECT})
    assert again == taken, "to take what one holds changes nothing"
    note = (await mia.send("agent:bob", "note"))["seq"]

    refused = await bob.refused("held", "agent:mia", "an answer", reply_to=question, cause=question)
    assert "mia has taken over direct:bob~mia" in refused["message"]
    await bob.refused("held", "agent:mia", "a word without a cause")
    expect_error(await bob.submit_record("during", "started", {"trigger": note}), "held")
    await bob.send("broadcast", "elsewhere it may speak", cause=question)

    given = await mia.call("network.give", {"thread_id": DIRECT})
    assert given == {"thread_id": DIRECT, "seq": given["seq"], "taken": taken["seq"], "by": "mia"}
    await bob.refused("held", "agent:mia", "an old answer", cause=question)
    assert (await mia.submit_call("network.give", {"thread_id": DIRECT}))["code"] == "invalid_arguments"
    await begin(bob, "after", note)
    await bob.send("agent:mia", "an answer to what was said", reply_to=note, cause=note)
    await begin(bob, "anew", question)
    await bob.send("agent:mia", "an answer that knows of it", cause=question)
    assert [it["message"]["content"] for it in await mia.deliveries_until("an answer that knows of it")] == [
        "elsewhere it may speak", "an answer to what was said",
    ]  # fmt: skip


async def test_a_reaction_begun_while_the_thread_was_held_does_not_answer_afterwards(node: Node) -> None:
    mia, bob = await node.person("mia"), await node.agent("bob", role="reactor")
    await mia.send("agent:bob", "hello")
    await mia.call("network.take", {"thread_id": DIRECT})
    elsewhere = (await mia.send("broadcast", "tell me about it"))["seq"]
    await begin(bob, "elsewhere", elsewhere)
    await mia.call("network.give", {"thread_id": DIRECT})
    await bob.refused("held", "agent:mia", cause=elsewhere)
    await bob.send("broadcast", "an answer where nobody held anything", cause=elsewhere)


async def test_who_keeps_no_records_may_answer_what_was_said_meanwhile_and_not_what_was_before(node: Node) -> None:
    mia, bob = await node.person("mia"), await node.agent("bob")
    before = (await mia.send("agent:bob", "before"))["seq"]
    await mia.call("network.take", {"thread_id": DIRECT})
    during = (await mia.send("agent:bob", "during"))["seq"]
    await mia.call("network.give", {"thread_id": DIRECT})
    await bob.refused("held", "agent:mia", cause=before)
    await bob.send("agent:mia", "of the time between", cause=during)


@pytest.mark.parametrize("held", ["channel:dev", "thread:SEQ"])
async def test_a_reply_to_what_stands_in_a_held_place_is_refused_too(node: Node, held: str) -> None:
    mia, bob = await node.person("mia"), await node.agent("bob")
    await mia.call("channels.create", {"name": "dev"})
    await bob.call("channels.join", {"name": "dev"})
    question = (await mia.send("channel:dev", "question"))["seq"]
    await mia.call("network.take", {"thread_id": held.replace("SEQ", str(question))})
    await bob.refused("held", "channel:dev", reply_to=question, cause=question)
    await bob.call_refused("held", "channels.reply", {"reply_to": question, "text": "by an operation"})
    expect_error(await bob.submit_record("r", "started", {"trigger": question}), "held")
    other = await bob.submit("channel:dev", "beside it")
    assert (other["type"] == "stored") is (held != "channel:dev")


async def test_a_channel_and_everybody_are_taken_over_by_those_who_have_the_right(node: Node) -> None:
    """Without a rights file, operators and the channel's owner have the right."""
    host = await node.person("host")
    mia, zoe = [await node.invite(host, name) for name in ("mia", "zoe")]
    await mia.call("channels.create", {"name": "dev"})
    await zoe.call("channels.join", {"name": "dev"})
    asked = (await mia.send("channel:dev", "question"))["seq"]
    await mia.send("channel:dev", "more", reply_to=asked)
    everybody = (await mia.send("broadcast", "hello"))["seq"]
    for thread_id in ("channel:dev", f"thread:{asked}", "broadcast", f"thread:{everybody}"):
        refused = await zoe.call_refused("forbidden", "network.take", {"thread_id": thread_id})
        assert "rights.ROLE.take" in refused["message"]
    listed = {name: await who.call("network.list_threads", {}) for name, who in (("mia", mia), ("zoe", zoe))}
    may = {name: {it["thread_id"]: it.get("may_take", False) for it in its["threads"]} for name, its in listed.items()}
    assert may["mia"] == {"channel:dev": True, f"thread:{asked}": True, "broadcast": False}
    assert may["zoe"] == {"channel:dev": False, f"thread:{asked}": False, "broadcast": False}
    await mia.call("network.take", {"thread_id": f"thread:{asked}"})
    await host.call("network.take", {"thread_id": "broadcast"})


async def test_a_page_gives_a_role_the_right_to_take_over() -> None:
    every: dict[str, Any] = {
        "join": ["*"],
        "read": ["*"],
        "write": ["*"],
        "broadcast": True,
        "call": ["*"],
        "create": ["*"],
    }
    page = {"staff": {"ids": ["mia"], **every, "take": ["dev", "broadcast"]}, "guests": {"ids": ["zoe"], **every}}
    async with running_node(rights=page) as node:
        host = await node.person("host")
        mia, zoe = [await node.invite(host, name) for name in ("mia", "zoe")]
        for name in ("dev", "den"):
            await zoe.call("channels.create", {"name": name})
            await mia.call("channels.join", {"name": name})
        refused = await zoe.call_refused("forbidden", "network.take", {"thread_id": "channel:dev"})
        assert "zoe may not take over dev" in refused["message"]
        assert "rights.guests.take: [dev]" in refused["message"]
        await mia.call_refused("forbidden", "network.take", {"thread_id": "channel:den"})
        await mia.call("network.take", {"thread_id": "channel:dev"})
        await mia.call("network.take", {"thread_id": "broadcast"})


async def test_a_takeover_ends_by_itself_and_agents_answer_again(tmp_path: Path) -> None:
    """The takeover also ends if the node was down at its end."""
    db = tmp_path / "a.db"
    async with running_node(db=db, durability="normal") as node:
        mia, bob = await node.person("mia"), await node.agent("bob", role="reactor")
        await mia.send("agent:bob", "question")
        taken = await mia.call("network.take", {"thread_id": DIRECT})
        [listed] = (await mia.call("network.list_threads", {}))["threads"]
        assert listed["held"]["until"] == taken["until"] == listed["held"]["at"] + 3_600_000
        again = await mia.call("network.take", {"thread_id": DIRECT, "ttl_ms": 1_000})
        assert (again["seq"], again["until"] < taken["until"]) == (taken["seq"], True)
        await bob.refused("held", "agent:mia", "an answer")
        given = await bob.expect("notice", kind="given")
        assert (given["thread_id"], given["body"]["by"]) == (DIRECT, "mia")
        await bob.send("agent:mia", "an answer")
        await mia.call("network.take", {"thread_id": DIRECT, "ttl_ms": 1_000})
    async with running_node(db=db, durability="normal") as node:
        mia = await node.person("mia")
        while "held" in (await mia.call("network.history", {"thread_id": DIRECT})):
            pass


async def test_a_node_may_let_takeovers_last(tmp_path: Path) -> None:
    async with running_node(limits={"takeover_ms": 0}) as node:
        mia, _ = await node.person("mia"), await node.agent("bob", role="reactor")
        await mia.send("agent:bob", "question")
        assert "until" not in await mia.call("network.take", {"thread_id": DIRECT})


RIGHTS = {
    "mia": ("ok", "ok"),
    "zoe": ("forbidden", "ok"),
    "host": ("held", "ok"),
    "outsider": ("unknown_message", "unknown_message"),
    "bob": ("forbidden", "forbidden"),
    "stranger": ("unknown_message", "unknown_message"),
}
"""Results of starting and ending a takeover in a channel that mia controls. mia and zoe are people in the channel,
host is an operator outside, outsider is a person outside, bob is an agent in it, and stranger is an agent outside.
"""


@pytest.mark.parametrize("who", RIGHTS)
async def test_people_in_a_thread_and_operators_take_it_and_give_it_back(node: Node, who: str) -> None:
    host = await node.person("host")
    sessions = {name: await node.invite(host, name) for name in ("mia", "zoe", "outsider")}
    sessions |= {"host": host, "bob": await node.agent("bob"), "stranger": await node.agent("stranger")}
    await sessions["mia"].call("channels.create", {"name": "dev", "access": "closed"})
    for name in ("zoe", "bob"):
        await sessions["mia"].call("channels.invite", {"name": "dev", "agent_id": name})
        await sessions[name].call("channels.join", {"name": "dev"})
    await sessions["mia"].call("network.take", {"thread_id": "channel:dev"})
    for op, expected in zip(("network.take", "network.give"), RIGHTS[who], strict=True):
        answer = await sessions[who].submit_call(op, {"thread_id": "channel:dev"})
        assert answer.get("code", "ok") == expected, answer
        if expected == "unknown_message":
            nothing = await sessions[who].submit_call(op, {"thread_id": "channel:none"})
            assert nothing["message"].replace("none", "dev") == answer["message"]


@pytest.mark.parametrize(
    "thread_id",
    [
        "direct:bob~nobody",
        "direct:mia~bob",
        "thread:1",
        "thread:0{said}",
        "thread:x",
        "thread:99999999999999999999",
        "mod:channels~mia",
        "x",
    ],
)
async def test_what_is_no_thread_is_not_taken(node: Node, thread_id: str) -> None:
    mia = await node.person("mia")
    await node.agent("bob")
    said = (await mia.send("broadcast", "hello"))["seq"]
    for op in ("network.take", "network.give"):
        await mia.call_refused("unknown_message", op, {"thread_id": thread_id.format(said=said)})


async def test_readers_are_told_and_read_who_holds_it(node: Node) -> None:
    host = await node.person("host")
    mia, zoe, bob = await node.invite(host, "mia"), await node.invite(host, "zoe"), await node.agent("bob")
    await mia.send("agent:bob", "hello")
    taken = (await mia.call("network.take", {"thread_id": DIRECT}))["seq"]
    for reader in (mia, bob):
        notice = await reader.expect("notice", kind="taken")
        assert (notice["thread_id"], notice["body"]) == (DIRECT, {"seq": taken, "agent_id": "mia"})
        shown = (await reader.call("network.history", {"thread_id": DIRECT}))["held"]
        assert shown == {"by": "mia", "seq": taken, "at": shown["at"], "until": shown["at"] + 3_600_000}
        assert [it["held"] for it in (await reader.call("network.list_threads"))["threads"]] == [shown]
    given = (await host.call("network.give", {"thread_id": DIRECT}))["seq"]
    notice = await bob.expect("notice", kind="given")
    assert notice["body"] == {"seq": given, "agent_id": "host", "by": "mia"}
    assert "held" not in await mia.call("network.history", {"thread_id": DIRECT})
    await zoe.settle()
    assert not [frame for frame in zoe.unread if frame["type"] == "notice"], "who does not read it is told nothing"


async def test_who_has_left_is_not_told_who_holds_the_thread_that_it_still_reads(node: Node) -> None:
    """Otherwise, a former member would learn the name of a later member, which neither `readers` nor a notice shows."""
    host = await node.person("host")
    mia, zoe = await node.invite(host, "mia"), await node.invite(host, "zoe")
    await mia.call("channels.create", {"name": "dev"})
    await zoe.call("channels.join", {"name": "dev"})
    await mia.send("channel:dev", "early")
    await zoe.call("channels.leave", {"name": "dev"})
    later = await node.invite(host, "later", operator=True)
    await later.call("channels.join", {"name": "dev"})
    await later.call("network.take", {"thread_id": "channel:dev"})
    for session, is_told in ((zoe, False), (mia, True), (host, True)):
        history = await session.call("network.history", {"thread_id": "channel:dev"})
        [thread] = (await session.call("network.list_threads"))["threads"]
        assert [it.get("held", {}).get("by") for it in (history, thread)] == ["later" if is_told else None] * 2


async def test_what_was_asked_for_a_held_thread_stops_and_work_there_counts_as_cancelled(node: Node) -> None:
    mia = await node.person("mia")
    bob, ann = await node.agent("bob", role="reactor"), await node.agent("ann", role="reactor")
    question = (await mia.send("agent:bob", "question"))["seq"]
    await begin(bob, "of-bob", question)
    asked = (await bob.send("agent:ann", "asked", cause=question))["seq"]
    await begin(ann, "of-ann", asked)
    await mia.call("network.take", {"thread_id": DIRECT})
    assert (await ann.expect("signal", kind="cancel"))["body"] == {"reaction": "of-ann"}
    assert await fate(mia, question) == ("cancelled", True, None)
    await mia.call("network.give", {"thread_id": DIRECT})
    assert await fate(mia, question) == ("cancelled", True, None)
    await begin(bob, "of-bob-again", question)
    assert await fate(mia, question) == ("cancelled", None, {"reaction": "of-bob-again", "reaction_status": "open"})


async def fate(session: WireSession, seq: int) -> tuple[Any, ...]:
    [status] = (await session.call("network.message_status", {"seq": seq}))["recipients"]
    return status["reaction_status"], status.get("is_overtaken"), status.get("again")


async def test_whoever_is_removed_holds_nothing(node: Node) -> None:
    host = await node.person("host")
    mia, bob = await node.invite(host, "mia", operator=True), await node.agent("bob")
    await mia.call("network.take", {"thread_id": "broadcast"})
    await host.call("network.remove", {"agent_id": "mia"})
    assert (await bob.expect("notice", kind="given"))["body"]["by"] == "mia"
    await bob.send("broadcast", "again")


async def test_a_hold_outlives_the_hub_and_stands_in_the_log(tmp_path: Path) -> None:
    db = tmp_path / "held.db"
    async with running_node(db=db, durability="full") as node:
        mia, bob = await node.person("mia"), await node.agent("bob", role="reactor")
        before = (await mia.send("agent:bob", "before"))["seq"]
        await begin(bob, "old", before)
        await mia.call("network.take", {"thread_id": DIRECT}, call_id="take-1")
        tokens = node.tokens
    async with running_node(db=db, durability="full") as node:
        node.tokens = tokens
        mia, bob = await node.person("mia"), await node.agent("bob", role="reactor")
        [opened] = bob.welcome["open_reactions"]
        assert opened["overtaken"] is True
        await bob.refused("held", "agent:mia")
        await mia.call("network.give", {"thread_id": DIRECT})
        await bob.refused("held", "agent:mia", cause=before)
    async with running_node(db=db, durability="full") as node:
        node.tokens = tokens
        mia, bob = await node.person("mia"), await node.agent("bob", role="reactor")
        await bob.refused("held", "agent:mia", cause=before)
        rows: list[Any] = (await mia.call("network.rows"))["rows"]
        held = [row for row in rows if '"type":"hold"' in row]
        assert ['"event":"taken"' in row for row in held] == [True, False]
