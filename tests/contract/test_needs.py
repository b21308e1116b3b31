"""Tests of the inbox: docs/protocol/inbox.md."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from roundelay.network.config import Quota
from tests.support.node import Node, node_process, running_node
from tests.support.wire import WireSession

Item = dict[str, Any]
FEW: dict[str, Any] = {"max_root_messages": 8, "root_messages_per_s": 100_000}


async def inbox(session: WireSession, **args: Any) -> list[Item]:
    """Return all items of the inbox, page by page."""
    page = await session.call("network.inbox", args)
    found: list[Item] = page["items"]
    while page["has_more"]:
        page = await session.call("network.inbox", {**args, "before": page["next"]})
        found += page["items"]
    return found


async def kinds(session: WireSession) -> list[tuple[str, int]]:
    return [(it["kind"], it["seq"]) for it in await inbox(session)]


async def hears_of_it(session: WireSession) -> None:
    assert (await session.expect("notice", kind="inbox"))["body"] == {}


async def hears_nothing(*sessions: WireSession) -> None:
    for session in sessions:
        await session.settle()
        assert not [it for it in session.unread if it["type"] == "notice" and it["kind"] == "inbox"]


# -- questions


async def test_a_question_waits_until_it_is_answered_or_dismissed(node: Node) -> None:
    host, bob = await node.person("host"), await node.agent("bob")
    mia, zoe = await node.invite(host, "mia"), await node.invite(host, "zoe")
    await bob.send("agent:mia", "just telling")
    asked = await bob.send("agent:mia", "tea\n or coffee?", requires_response=True)
    await hears_of_it(mia)
    [item] = await inbox(mia)
    assert item == {
        "kind": "question", "seq": asked["seq"], "thread_id": "direct:bob~mia", "at": item["at"], "text": "tea or coffee?",
        "agent_id": "bob", "sender_kind": "agent", "to": "agent:mia",
    }  # fmt: skip
    await mia.send("agent:zoe", "elsewhere")
    assert len(await inbox(mia)) == 1
    await mia.send("agent:bob", "tea")
    await hears_of_it(mia)
    assert await inbox(mia) == []

    all_of_us = await bob.send(
        "broadcast", "who comes?", requires_response=["mia", "zoe", "host"], exclude_agent_ids=["host"]
    )
    await bob.send("broadcast", "to nobody by name", requires_response=True)
    await mia.send("broadcast", "a word that answers nothing")
    for session in (mia, zoe):
        await hears_of_it(session)
        assert await kinds(session) == [("question", all_of_us["seq"])]
    assert await inbox(host) == [], "it was not written to it"
    await mia.send("broadcast", "me", reply_to=all_of_us["seq"])
    assert (await inbox(mia), len(await inbox(zoe))) == ([], 1)
    await hears_of_it(mia)
    assert await zoe.call("network.dismiss", {"kind": "question", "seq": all_of_us["seq"]}) == {}
    assert await zoe.call("network.dismiss", {"kind": "question", "seq": all_of_us["seq"]}) == {}
    await hears_of_it(zoe)
    assert await inbox(zoe) == []
    await hears_nothing(mia, zoe, host, bob)


async def test_what_an_agent_or_oneself_is_asked_waits_for_nobody(node: Node) -> None:
    mia, bob = await node.person("mia"), await node.agent("bob")
    await mia.send("agent:bob", "and you?", requires_response=True)
    await mia.send("agent:mia", "to myself", requires_response=True)
    await mia.send("broadcast", "to us", requires_response=["mia", "bob", "nobody"])
    assert (await inbox(mia), await inbox(bob)) == ([], [])
    await hears_nothing(mia, bob)


async def test_questions_outlive_a_restart_and_go_with_who_asked_and_who_was_asked(tmp_path: Path) -> None:
    db = tmp_path / "team.db"
    async with running_node(db=db, durability="normal") as node:
        host, bob, cat = await node.person("host"), await node.agent("bob"), await node.agent("cat")
        await node.invite(host, "mia")
        await node.invite(host, "zoe")
        for session in (bob, cat):
            await session.send("agent:mia", "and?", requires_response=True)
        await bob.send("agent:zoe", "and?", requires_response=["zoe"])
        tokens = node.tokens
    async with running_node(db=db, durability="normal") as node:
        host, mia = await node.person("host"), await node.join("mia", kind="human", token=tokens["mia"])
        assert [it["agent_id"] for it in await inbox(mia)] == ["cat", "bob"]
        await host.call("network.remove", {"agent_id": "bob"})
        assert [it["agent_id"] for it in await inbox(mia)] == ["cat"]
        await hears_of_it(mia)
        zoe = await node.join("zoe", kind="human", token=tokens["zoe"])
        assert await inbox(zoe) == []


async def test_what_was_answered_is_there_after_a_kill(tmp_path: Path) -> None:
    async with node_process(tmp_path / "team.db") as node:
        mia, bob = await node.person("mia"), await node.agent("bob")
        asked = await bob.send("agent:mia", "and?", requires_response=True)
        place = {"thread_id": asked["thread_id"], "is_pinned": True, "read_upto": asked["seq"]}
        marked = await mia.call("network.mark", place, call_id="c1")
        await node.kill9()
        await node.restart()
        mia = await node.person("mia")
        assert await kinds(mia) == [("question", asked["seq"])]
        assert await mia.call("network.mark", place, call_id="c1") == marked
        [thread] = (await mia.call("network.list_threads"))["threads"]
        assert (thread["mark"]["is_pinned"], thread["unread"]) == (True, 0)


async def test_of_too_many_questions_the_oldest_are_forgotten() -> None:
    async with running_node(limits={"max_questions": 10}) as node:
        mia, bob = await node.person("mia"), await node.agent("bob")
        asked = [(await bob.send("agent:mia", "and?", requires_response=True))["seq"] for _ in range(12)]
        assert await kinds(mia) == [("question", seq) for seq in reversed(asked[2:])]
        assert await inbox(mia, limit=3) == await inbox(mia)


async def test_a_question_that_one_may_not_read_any_more_is_not_shown(tmp_path: Path) -> None:
    db = tmp_path / "team.db"
    async with running_node(db=db, durability="normal") as node:
        host, bob = await node.person("host"), await node.agent("bob")
        mia = await node.invite(host, "mia")
        await bob.call("channels.create", {"name": "dev"})
        for session in (bob, mia):
            await session.call("channels.join", {"name": "dev"})
        await bob.send("channel:dev", "a secret?", requires_response=["mia"])
        assert len(await inbox(mia)) == 1
        await mia.call("channels.leave", {"name": "dev"})
        assert len(await inbox(mia)) == 1, "it was given it, and may read it"
        tokens = node.tokens
    page = {"people": {"kinds": ["human"], "call": ["*"]}}
    async with running_node(db=db, durability="normal", rights=page) as node:
        mia = await node.join("mia", kind="human", token=tokens["mia"])
        assert await inbox(mia) == []


# -- decisions


async def test_a_decision_waits_for_those_who_may_make_it_and_is_no_question(node: Node) -> None:
    host, bob = await node.person("host"), await node.agent("bob", role="reactor")
    mia, zoe = await node.invite(host, "mia"), await node.invite(host, "zoe")
    trigger = (await mia.send("agent:bob", "order tea"))["seq"]
    await bob.record("r1", "started", {"trigger": trigger, "manifest": [trigger]})
    seq = (await bob.send("agent:mia", "May I pay?", cause=trigger, requires_response=True))["seq"]
    await hears_of_it(mia)
    wait = {"turn": 1, "call": 0, "questions": {"a person": seq}, "until": 99, "is_approval": True}
    await bob.record("r1", "waiting", wait)
    for session in (mia, host):
        await hears_of_it(session)
    assert await inbox(mia) == [
        {
            "kind": "approval", "seq": seq, "thread_id": "direct:bob~mia", "at": (await inbox(mia))[0]["at"], "text": "May I pay?",
            "agent_id": "bob", "reaction": "r1", "call": "1.0", "trigger": trigger, "until": 99,
        }
    ]  # fmt: skip
    [item] = await inbox(host)
    assert (item["seq"], item["may_call"]) == (seq, True), "an operator decides without reading the thread"
    assert [await inbox(session) for session in (zoe, bob)] == [[], []]
    await mia.call_refused("invalid_arguments", "network.dismiss", {"kind": "approval", "seq": seq})
    await mia.send("agent:bob", "/approve", reply_to=seq)
    await bob.record("r1", "tool_result", {"turn": 1, "call": 0})
    for session in (mia, host):
        await hears_of_it(session)
    assert await inbox(mia) == []
    await hears_nothing(zoe, bob)


async def test_of_named_approvers_each_is_shown_her_own_copy_and_nobody_else_decides(node: Node) -> None:
    host, bob = await node.person("host"), await node.agent("bob", role="reactor")
    tom, mia, zoe, eve = [await node.invite(host, name) for name in ("tom", "mia", "zoe", "eve")]
    trigger = (await tom.send("agent:bob", "my money back"))["seq"]
    await bob.record("r1", "started", {"trigger": trigger, "manifest": [trigger]})
    copies = {}
    request = (await bob.send("agent:tom", "I ask mia and zoe.", cause=trigger))["seq"]
    for name in ("mia", "zoe", "eve"):
        copies[name] = (await bob.send(f"agent:{name}", "May I pay tom?", cause=trigger))["seq"]
    place = {"turn": 1, "call": 0, "until": 99, "is_approval": True}
    wait = {**place, "questions": {"a person": request, **copies}, "deciders": ["mia", "zoe"]}
    await bob.record("r1", "waiting", wait)
    for session, name in ((mia, "mia"), (zoe, "zoe")):
        await hears_of_it(session)
        [item] = await inbox(session)
        assert (item["seq"], item["thread_id"], item["deciders"]) == (
            copies[name],
            f"direct:bob~{name}",
            ["mia", "zoe"],
        )
        [entry] = (await session.call("network.approvals"))["approvals"]
        assert (entry["seq"], entry["thread_id"]) == (copies[name], f"direct:bob~{name}"), "not where tom wrote"
        assert (entry["may_decide"], entry["may_call"], entry["message"]["seq"]) == (True, True, copies[name])
    for session in (tom, host, eve, bob):
        assert [it for it in await inbox(session) if it["kind"] == "approval"] == []
    [seen] = (await tom.call("network.approvals"))["approvals"]
    assert (seen["seq"], seen["may_decide"], seen["may_call"], seen["deciders"]) == (
        request,
        False,
        False,
        ["mia", "zoe"],
    )
    [seen] = (await host.call("network.approvals"))["approvals"]
    assert (seen["seq"], seen["may_decide"], seen["may_call"]) == (request, False, False)
    [seen] = (await eve.call("network.approvals"))["approvals"]
    assert (seen["seq"], seen["may_decide"], seen["may_call"]) == (copies["eve"], False, False), "a copy gives no right"

    approve = {"decision": "/approve"}
    for session, seq in ((tom, request), (host, request), (eve, copies["eve"])):
        refused = await session.call_refused("forbidden", "network.decide", {"seq": seq, **approve})
        assert "its approvers are mia, zoe" in refused["message"]
    await mia.call_refused("unknown_message", "network.decide", {"seq": copies["zoe"], **approve})
    await bob.call_refused("forbidden", "network.decide", {"seq": request, **approve})
    for wrong in ("yes", "/approve for ever", "/edit", "/approved"):
        await mia.call_refused("invalid_arguments", "network.decide", {"seq": copies["mia"], "decision": wrong})

    made = await mia.call("network.decide", {"seq": copies["mia"], **approve}, call_id="c1")
    assert await mia.call("network.decide", {"seq": copies["mia"], **approve}, call_id="c1") == made, "told once"
    while (told := (await bob.delivery())["message"])["sender_id"] != "network":
        pass
    assert (told["seq"], told["kind"], told["to"], told["cause"]) == (made["seq"], "mod", "agent:bob", copies["mia"])
    assert told["content"] == {"kind": "decision", "request": copies["mia"], "by": "mia", "decision": "/approve"}

    votes = [{"by": "mia", "seq": made["seq"], "at": 1, "said": "/approve"}]
    await bob.record("r1", "waiting", {**wait, "needed": 2, "votes": votes}, record_id="again")
    for session in (mia, zoe):
        await hears_of_it(session)
    assert await inbox(mia) == []
    assert (await inbox(zoe))[0]["approved_by"] == ["mia"]
    await mia.call_refused("invalid_arguments", "network.decide", {"seq": copies["mia"], **approve})
    await bob.record("r1", "approval", {"turn": 1, "call": 0})
    await hears_of_it(zoe)
    assert await inbox(zoe) == []
    await zoe.call_refused("invalid_arguments", "network.decide", {"seq": copies["zoe"], **approve})


async def test_where_nobody_is_named_operators_decide_one_call_at_a_time(node: Node) -> None:
    host, bob = await node.person("host"), await node.agent("bob", role="reactor")
    tom, eve = [await node.invite(host, name) for name in ("tom", "eve")]
    trigger = (await tom.send("agent:bob", "my money back"))["seq"]
    await bob.record("r1", "started", {"trigger": trigger, "manifest": [trigger]})
    request = (await bob.send("agent:tom", "May I?", cause=trigger))["seq"]
    wait = {"turn": 1, "call": 0, "questions": {"a person": request}, "until": 99, "is_approval": True}
    await bob.record("r1", "waiting", wait)
    [entry] = (await host.call("network.approvals"))["approvals"]
    assert (entry["may_decide"], entry["may_call"]) == (False, True)
    await eve.call_refused("unknown_message", "network.decide", {"seq": request, "decision": "/approve"})
    await host.call_refused("invalid_arguments", "network.decide", {"seq": request, "decision": "/approve always"})
    await host.call("network.decide", {"seq": request, "decision": "/deny no"})
    warden = await node.service("warden")
    await warden.call_refused("forbidden", "network.decide", {"seq": request, "decision": "/approve"})


async def test_what_a_taken_over_reaction_asks_for_is_no_decision_any_more(node: Node) -> None:
    host, bob = await node.person("host"), await node.agent("bob", role="reactor")
    mia = await node.invite(host, "mia")
    trigger = (await mia.send("agent:bob", "order tea"))["seq"]
    await bob.record("r1", "started", {"trigger": trigger, "manifest": [trigger]})
    seq = (await bob.send("agent:mia", "May I pay?", cause=trigger, requires_response=True))["seq"]
    await hears_of_it(mia)
    wait = {"turn": 1, "call": 0, "questions": {"a person": seq}, "until": 99, "is_approval": True}
    await bob.record("r1", "waiting", wait)
    await hears_of_it(mia)
    assert await kinds(mia) == [("approval", seq)]
    await mia.call("network.take", {"thread_id": "direct:bob~mia"})
    await hears_of_it(mia)
    assert await kinds(mia) == [("question", seq)], "it is a message that asks, like others"
    assert (await mia.call("network.approvals"))["approvals"] == []
    await mia.call("network.give", {"thread_id": "direct:bob~mia"})
    assert await kinds(mia) == [("question", seq)], "the reaction was begun before, and may not go on"
    await hears_nothing(mia)


async def test_an_agent_takes_nobodys_question_away_by_calling_it_a_decision_of_its_own(node: Node) -> None:
    mia, bob, evil = await node.person("mia"), await node.agent("bob"), await node.agent("evil", role="reactor")
    trigger = (await mia.send("agent:evil", "go"))["seq"]
    asked = (await bob.send("agent:mia", "tea?", requires_response=True))["seq"]
    await evil.record("r1", "started", {"trigger": trigger, "manifest": [trigger]})
    await evil.record(
        "r1", "waiting", {"turn": 1, "call": 0, "questions": {"a": asked}, "until": 99, "is_approval": True}
    )
    assert await kinds(mia) == [("question", asked)]


# -- failures


async def fail(alice: WireSession, bob: WireSession) -> int:
    seq: int = (await alice.send("agent:bob", "poison"))["seq"]
    for _ in range(5):
        await bob.expect("deliver")
        await bob.nack(seq)
    await bob.expect("notice", kind="dead_letter")
    return seq


async def test_a_message_that_failed_waits_for_its_sender_its_recipient_and_operators(node: Node) -> None:
    host, bob = await node.person("host"), await node.agent("bob")
    mia, zoe = await node.invite(host, "mia"), await node.invite(host, "zoe")
    seq = await fail(mia, bob)
    for session in (mia, host):
        await hears_of_it(session)
    shown = {
        "kind": "dead_letter",
        "seq": seq,
        "thread_id": "direct:bob~mia",
        "text": "poison",
        "agent_id": "bob",
        "attempts": 5,
    }
    for session, more in (
        (mia, {"may_retry": False}),
        (host, {"may_retry": True, "reason": "handler failed"}),
        (bob, {"may_retry": True, "reason": "handler failed"}),
    ):
        [item] = await inbox(session)
        assert item == {**shown, "at": item["at"], **more}
    assert await inbox(zoe) == []

    await host.call("network.dismiss", {"kind": "dead_letter", "seq": seq})
    assert (await inbox(host), len(await inbox(mia))) == ([], 1)
    await hears_of_it(host)
    await bob.call("network.retry_dead_letter", {"seq": seq})
    for session in (mia, host):
        await hears_of_it(session)
    assert [await inbox(session) for session in (mia, host, bob)] == [[], [], []]
    for _ in range(5):
        await bob.expect("deliver")
        await bob.nack(seq)
    await hears_of_it(host)
    assert [await kinds(session) for session in (mia, host)] == [[("dead_letter", seq)]] * 2, "it has failed again"
    await hears_nothing(zoe)


# -- stopped conversations


async def stop(mia: WireSession, bob: WireSession) -> int:
    """Let a conversation stop at its limit. Return the conversation's root."""
    root: int = (await mia.send("agent:bob", "go on"))["seq"]
    while (await bob.submit("agent:mia", "more", cause=root))["type"] == "stored":
        pass
    return root


async def test_a_conversation_that_stopped_waits_for_who_may_let_it_go_on() -> None:
    async with running_node(limits=FEW) as node:
        host, bob = await node.person("host"), await node.agent("bob")
        mia, zoe = await node.invite(host, "mia"), await node.invite(host, "zoe")
        root = await stop(mia, bob)
        for session in (mia, host):
            await hears_of_it(session)
            [item] = [it for it in await inbox(session) if it["kind"] == "stopped"]
            assert (item["seq"], item["root"], item["thread_id"]) == (root, root, "direct:bob~mia")
            assert (item["limit"], item["used_by"], item["used"]) == ("limits.max_root_messages", "bob", 7)
        assert [await inbox(session) for session in (zoe, bob)] == [[], []]
        await host.call("network.dismiss", {"kind": "stopped", "seq": root})
        assert (await inbox(host), await kinds(mia)) == ([], [("stopped", root)])
        await mia.call("network.resume_root", {"root": root})
        for session in (mia, host):
            await hears_of_it(session)
        assert await inbox(mia) == []
        await hears_nothing(zoe, bob)


async def test_who_only_read_how_it_began_is_not_told_who_used_it_up() -> None:
    async with running_node(limits=FEW) as node:
        host, bob = await node.person("host"), await node.agent("bob")
        mia, zoe = await node.invite(host, "mia"), await node.invite(host, "zoe")
        root = (await mia.send("broadcast", "who knows?", requires_response=["bob"]))["seq"]
        while (await bob.submit("agent:bob", "a secret", cause=root))["type"] == "stored":
            pass
        [item] = await inbox(zoe)
        await hears_of_it(zoe)
        assert item["text"] == f"The conversation that began with #{root} has stopped (limits.max_root_messages)."
        assert set(item) == {"kind", "seq", "thread_id", "at", "text", "root", "limit"}


async def test_a_budget_that_ended_a_reaction_waits_until_it_goes_on(node: Node) -> None:
    host, bob = await node.person("host"), await node.agent("bob", role="reactor")
    mia, zoe = await node.invite(host, "mia"), await node.invite(host, "zoe")

    async def spend_all(reaction: str, trigger: int) -> None:
        await bob.record(reaction, "started", {"trigger": trigger, "manifest": [trigger]})
        await bob.record(reaction, "model_failed", {"turn": 1, "failure": "budget", "reason": "All 5 EUR are spent."})
        await bob.record(reaction, "finished", {"status": "stopped"})
        await mia.expect("notice", kind="budget_exhausted")

    seq = (await mia.send("agent:bob", "work"))["seq"]
    await spend_all("r1", seq)
    await hears_of_it(mia)
    shown = {
        "kind": "budget",
        "seq": seq,
        "thread_id": "direct:bob~mia",
        "text": "All 5 EUR are spent.",
        "agent_id": "bob",
    }
    for session in (mia, host):
        [item] = await inbox(session)
        assert item == {**shown, "at": item["at"], "root": seq, "reaction": "r1"}
    assert await inbox(zoe) == []
    await mia.call("network.resume_root", {"root": seq})
    assert await inbox(mia) == []
    await spend_all("r2", seq)
    assert await kinds(mia) == [("budget", seq)]
    await bob.record("r3", "started", {"trigger": seq, "manifest": [seq]})
    assert await inbox(mia) == []
    await hears_nothing(zoe, bob)


async def test_a_quota_that_is_nearly_used_up_is_told_to_its_participant_and_operators() -> None:
    async with running_node(quotas={"mia": Quota(messages_per_day=10)}) as node:
        host = await node.person("host")
        mia, zoe = await node.invite(host, "mia"), await node.invite(host, "zoe")
        for number in range(9):
            assert await inbox(mia) == [], number
            await mia.send("agent:host", f"{number}")
        for session in (mia, host):
            await hears_of_it(session)
            [item] = await inbox(session)
            assert (item["kind"], item["seq"], item["agent_id"], item["limit"]) == (
                "budget",
                0,
                "mia",
                "messages_per_day",
            )
            assert item["text"] == "mia has used 90% of its messages_per_day today."
        assert await inbox(zoe) == []
        await mia.call("network.dismiss", {"kind": "budget", "seq": 0})
        assert await inbox(mia) == []


# -- all questions


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(it, marks=pytest.mark.full) for it in range(2, 6))])
async def test_questions_are_those_that_reading_everything_finds_unanswered(seed: int, tmp_path: Path) -> None:
    """The test compares random histories, with a restart in between, with the log message by message."""
    chance = random.Random(seed)
    db, tokens = tmp_path / "team.db", dict[str, str]()
    dismissed: set[tuple[str, int]] = set()
    people, names = ("mia", "zoe"), ("mia", "zoe", "bob", "cat")
    for _ in range(2):
        async with running_node(db=db, durability="normal") as node:
            host = await node.person("host")
            joined = {
                name: await (node.join(name, kind="human", token=tokens[name]) if tokens else node.invite(host, name))
                for name in people
            }
            tokens = tokens or {name: node.tokens[name] for name in people}
            node.tokens |= {name: token for name, token in tokens.items() if name not in people}
            sessions = joined | {name: await node.agent(name) for name in ("bob", "cat")}
            tokens |= {name: node.tokens[name] for name in ("bob", "cat")}
            for _ in range(80):
                name = chance.choice(names)
                others = [it for it in names if it != name]
                asks = chance.choice(({}, {"requires_response": True}, {"requires_response": chance.sample(names, 2)}))
                match chance.choice(("direct", "direct", "broadcast", "reply", "dismiss")):
                    case "direct":
                        await sessions[name].send(f"agent:{chance.choice(others)}", "x", **asks)
                    case "broadcast":
                        await sessions[name].send("broadcast", "x", **asks)
                    case "reply":
                        said = [it for it in await _log(host) if it["thread_id"] == "broadcast"]
                        if said:
                            await sessions[name].send("broadcast", "x", reply_to=chance.choice(said)["seq"], **asks)
                    case "dismiss" if name in people and (items := await inbox(sessions[name])):
                        seq = chance.choice(items)["seq"]
                        await sessions[name].call("network.dismiss", {"kind": "question", "seq": seq})
                        dismissed.add((name, seq))
            log = await _log(host)
            for name in people:
                wanted = [it["seq"] for it in log if _asks(it, name) and (name, it["seq"]) not in dismissed]
                wanted = [seq for seq in wanted if not any(_answers(it, seq, name, log) for it in log)]
                assert await kinds(sessions[name]) == [("question", seq) for seq in reversed(wanted)]


async def _log(host: WireSession) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await host.call("network.log", {"limit": 500}))["messages"]
    return found


def _asks(message: dict[str, Any], name: str) -> bool:
    asked = message.get("requires_response")
    is_named = name in asked if isinstance(asked, list) else bool(asked) and message["to"] == f"agent:{name}"
    is_given = message["kind"] == "broadcast" or message["to"] == f"agent:{name}"
    return is_named and is_given and message["sender_id"] != name


def _answers(message: dict[str, Any], seq: int, name: str, log: list[dict[str, Any]]) -> bool:
    if message["sender_id"] != name or message["seq"] <= seq:
        return False
    [question] = [it for it in log if it["seq"] == seq]
    is_there = question["kind"] == "direct" and message["thread_id"] == question["thread_id"]
    return is_there or message.get("reply_to") == seq
