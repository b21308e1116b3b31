"""Tests of the operations of every hub, and of the access checks in each. docs/protocol/operations.md."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.node import Node
from tests.support.wire import WireSession, contents, expect_error


@pytest.fixture
async def alice(node: Node) -> WireSession:
    return await node.agent("alice")


@pytest.fixture
async def bob(node: Node) -> WireSession:
    return await node.agent("bob")


@pytest.fixture
async def stranger(node: Node) -> WireSession:
    return await node.agent("stranger")


@pytest.fixture
async def operator(node: Node) -> WireSession:
    return await node.person("mia")


# -- info, agents


async def test_info(node: Node, alice: WireSession, bob: WireSession) -> None:
    stored = await alice.send("agent:bob", "x")
    info = await alice.call("network.info")
    assert set(info) == {
        "name",
        "epoch",
        "server",
        "head",
        "participants",
        "mods",
        "has_operators",
        "has_human_operators",
    }
    assert info["name"] == alice.welcome["network"]["name"]
    assert info["epoch"] == alice.welcome["network"]["epoch"]
    assert info["server"] == alice.welcome["server"]
    assert info["head"] >= stored["seq"]


async def test_list_agents_names_everybody_with_kind_state_and_card(
    node: Node, alice: WireSession, operator: WireSession
) -> None:
    card = {"description": "a clock", "tools": ["now"], "tags": ["time"]}
    await node.service("clock", card=card)
    bob = await node.agent("bob")
    await bob.bye()
    agents = {agent["agent_id"]: agent for agent in (await alice.call("network.list_agents"))["agents"]}
    assert {name: (agent["kind"], agent["state"]) for name, agent in agents.items()} == {
        "alice": ("agent", "online"),
        "bob": ("agent", "offline"),
        "clock": ("service", "online"),
        "mia": ("human", "online"),
    }
    assert agents["clock"]["card"] == card
    assert set(agents["alice"]) <= {"agent_id", "kind", "state", "card"}


async def test_list_agents_filters_by_kind_and_state(node: Node, alice: WireSession, operator: WireSession) -> None:
    await (await node.agent("bob")).bye()

    async def ids(**filters: Any) -> list[str]:
        agents = (await alice.call("network.list_agents", filters))["agents"]
        return sorted(agent["agent_id"] for agent in agents)

    assert await ids(kind="agent") == ["alice", "bob"]
    assert await ids(kind="human") == ["mia"]
    assert await ids(kind="service") == []
    assert await ids(online=True) == ["alice", "mia"]
    assert await ids(online=False) == ["bob"]
    assert await ids(kind="agent", online=True) == ["alice"]


@pytest.mark.parametrize("args", [{"kind": "robot"}, {"kind": 5}, {"online": "yes"}, {"state": "online"}])
async def test_list_agents_refuses_other_arguments(alice: WireSession, args: dict[str, Any]) -> None:
    await alice.call_refused("invalid_arguments", "network.list_agents", args)


async def test_a_card_is_renewed_by_the_next_hello(node: Node, alice: WireSession) -> None:
    await (await node.agent("bob", card={"description": "old"})).bye()
    await node.agent("bob", card={"description": "new"})
    agents = (await alice.call("network.list_agents"))["agents"]
    assert next(agent["card"] for agent in agents if agent["agent_id"] == "bob") == {"description": "new"}


# -- threads, history


async def test_list_threads_is_newest_first_and_holds_what_one_may_read(
    node: Node, alice: WireSession, bob: WireSession, stranger: WireSession, operator: WireSession
) -> None:
    await alice.send("agent:bob", "1")
    public = await alice.send("broadcast", "2")
    await bob.send("agent:stranger", "3")
    last = await bob.send("agent:alice", "4")

    async def threads(session: WireSession, **args: Any) -> list[str]:
        return [t["thread_id"] for t in (await session.call("network.list_threads", args))["threads"]]

    assert await threads(alice) == ["direct:alice~bob", "broadcast"]
    assert await threads(alice, limit=1) == ["direct:alice~bob"]
    assert await threads(stranger) == ["direct:bob~stranger", "broadcast"]
    assert await threads(operator) == ["direct:alice~bob", "direct:bob~stranger", "broadcast"]
    first, second = (await alice.call("network.list_threads"))["threads"]
    assert set(first) == {"thread_id", "title", "last_seq", "messages", "readers", "last", "unread"}
    assert first["last"] == {
        "seq": last["seq"],
        "sender_id": "bob",
        "sender_kind": "agent",
        "sent_at": first["last"]["sent_at"],
        "text": "4",
    }
    assert (first["last_seq"], first["messages"], sorted(first["readers"])) == (last["seq"], 2, ["alice", "bob"])
    assert (second["last_seq"], second["messages"]) == (public["seq"], 1)


async def test_history_is_oldest_first_with_the_messages_as_delivered(alice: WireSession, bob: WireSession) -> None:
    await alice.send("agent:bob", "one", metadata={"n": 1}, text_representation="eins")
    await bob.send("agent:alice", {"two": 2})
    delivered = await bob.message("one")
    history = await alice.call("network.history", {"thread_id": "direct:alice~bob"})
    assert set(history) == {"messages", "has_more"}
    assert contents(history["messages"]) == ["one", {"two": 2}]
    assert history["messages"][0] == delivered
    assert history["has_more"] is False


@pytest.mark.parametrize("with_trigger", [False, True])
async def test_history_before_0_is_before_everything(alice: WireSession, bob: WireSession, with_trigger: bool) -> None:
    sent = await alice.send("agent:bob", "first")
    args = {"trigger": sent["seq"]} if with_trigger else {}
    history = await bob.call("network.history", {"thread_id": "direct:alice~bob", "before": 0, **args})
    assert history == {"messages": [], "has_more": False}


async def test_history_gives_50_unless_asked_and_500_at_most(alice: WireSession, bob: WireSession) -> None:
    for number in range(49):
        await alice.send("agent:bob", number)
    await bob.message(0)
    for number in range(49, 60):
        await alice.send("agent:bob", number)
    history = await alice.call("network.history", {"thread_id": "direct:alice~bob"})
    assert contents(history["messages"]) == list(range(10, 60))
    assert history["has_more"] is True
    history = await alice.call("network.history", {"thread_id": "direct:alice~bob", "limit": 500})
    assert (len(history["messages"]), history["has_more"]) == (60, False)


@pytest.mark.parametrize(
    "args",
    [{"limit": 0}, {"limit": 501}, {"limit": "5"}, {"limit": True}, {"limit": 2.5}, {"before": "x"}, {"after": 1}],
    ids=str,
)
async def test_history_refuses_arguments_out_of_range(
    alice: WireSession, bob: WireSession, args: dict[str, Any]
) -> None:
    await alice.send("agent:bob", "x")
    await alice.call_refused("invalid_arguments", "network.history", {"thread_id": "direct:alice~bob"} | args)


# -- message_status


async def test_message_status_tells_how_far_it_came(node: Node, alice: WireSession, bob: WireSession) -> None:
    async def state(seq: int) -> str:
        status = await alice.call("network.message_status", {"seq": seq})
        assert status["seq"] == seq
        (recipient,) = status["recipients"]
        assert recipient["agent_id"] == "bob"
        assert isinstance(recipient["attempts"], int)
        result: str = recipient["state"]
        return result

    await bob.bye()
    seq = (await alice.send("agent:bob", "x"))["seq"]
    assert await state(seq) == "queued"
    again = await node.agent("bob")
    await again.message("x")
    assert await state(seq) == "delivered"
    await again.ack(seq)
    await again.settle()
    assert await state(seq) == "handled"


async def test_message_status_names_every_recipient(
    alice: WireSession, bob: WireSession, stranger: WireSession
) -> None:
    stored = await alice.send("broadcast", "x", exclude_agent_ids=["stranger"])
    status = await alice.call("network.message_status", {"seq": stored["seq"]})
    assert [recipient["agent_id"] for recipient in status["recipients"]] == ["bob"]


async def test_message_status_tells_what_entered_a_prompt(node: Node, alice: WireSession) -> None:
    bot = await node.agent("bot", role="reactor")
    context = (await alice.send("agent:bot", "context"))["seq"]
    trigger = (await alice.send("agent:bot", "trigger"))["seq"]
    await bot.deliveries_until("trigger")
    await bot.record("r1", "started", {"trigger": trigger, "as_of": trigger, "manifest": [context, trigger]})
    for seq in (context, trigger):
        (recipient,) = (await alice.call("network.message_status", {"seq": seq}))["recipients"]
        assert (recipient["agent_id"], recipient["state"], recipient["reaction"]) == ("bot", "in_prompt", "r1")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"status": "finished"}, "finished"),
        ({"status": "stopped"}, "stopped"),
        ({"status": "cancelled"}, "cancelled"),
        ({"status": "failed"}, "failed"),
        ({"status": ["of another shape"]}, "finished"),
        ({}, "finished"),
    ],
)  # fmt: skip
async def test_readers_of_a_message_poll_whether_the_reaction_to_it_is_over(
    node: Node, alice: WireSession, body: Any, status: str
) -> None:
    """Readers need no operator's rights and do not see their own records. The end of another reaction in between does
    not count.
    """

    async def poll(seq: int) -> str:
        (recipient,) = (await alice.call("network.message_status", {"seq": seq}))["recipients"]
        found: str = recipient.get("reaction_status", "none yet")
        return found

    bot = await node.agent("bot", role="reactor")
    first, second = [(await alice.send("agent:bot", it))["seq"] for it in ("one", "two")]
    assert await poll(first) == "none yet"
    await bot.deliveries_until("two")
    for number, seq in ((1, first), (2, second)):
        await bot.record(f"r{number}", "started", {"trigger": seq, "as_of": seq, "manifest": [seq]})
    assert await poll(first) == await poll(second) == "open"
    await bot.record("r2", "finished", {"status": "finished"})
    assert (await poll(first), await poll(second)) == ("open", "finished")
    await bot.record("r1", "finished", body)
    assert await poll(first) == status


# -- why


async def test_why_leads_from_a_message_to_its_root(alice: WireSession, bob: WireSession) -> None:
    root = await alice.send("agent:bob", "root")
    middle = await bob.send("agent:alice", "middle", cause=root["seq"])
    leaf = await alice.send("agent:bob", "leaf", cause=middle["seq"])
    chain = (await bob.call("network.why", {"seq": leaf["seq"]}))["chain"]
    assert [link["content"] for link in chain if "content" in link] == ["leaf", "middle", "root"]
    (alone,) = (await bob.call("network.why", {"seq": root["seq"]}))["chain"]
    assert alone["seq"] == root["seq"]


async def test_why_keeps_the_causes_that_one_may_not_read(
    alice: WireSession, bob: WireSession, stranger: WireSession, operator: WireSession
) -> None:
    secret = await alice.send("agent:bob", "canary")
    told = await bob.send("agent:stranger", "please", cause=secret["seq"])
    answer = await stranger.submit_call("network.why", {"seq": told["seq"]})
    assert answer["type"] == "result"
    assert "please" in answer.raw
    assert "canary" not in answer.raw
    assert "alice" not in answer.raw
    assert "canary" in (await operator.submit_call("network.why", {"seq": told["seq"]})).raw


async def test_why_shows_the_reaction_in_between(node: Node, alice: WireSession, operator: WireSession) -> None:
    bot = await node.agent("bot", role="reactor")
    trigger = (await alice.send("agent:bot", "do it"))["seq"]
    await bot.message("do it")
    await bot.record("r1", "started", {"trigger": trigger, "manifest": [trigger]})
    done = await bot.send("agent:alice", "done", cause=trigger)
    answer = await operator.submit_call("network.why", {"seq": done["seq"]})
    assert "r1" in answer.raw


# -- cancel


async def test_a_person_in_the_thread_cancels_a_reaction_and_nobody_else_does(
    node: Node, operator: WireSession, stranger: WireSession
) -> None:
    zoe, yan = await node.invite(operator, "zoe"), await node.invite(operator, "yan")
    bot = await node.agent("bot", role="reactor")
    trigger = (await zoe.send("agent:bot", "long work"))["seq"]
    await bot.record("r1", "started", {"trigger": trigger})
    for session in (yan, stranger):
        for args in ({"reaction": "r1"}, {"thread_id": "direct:bot~zoe"}):
            assert await session.call("network.cancel", args) == {"reactions": []}
    await bot.settle()
    assert [frame for frame in bot.unread if frame["type"] == "signal"] == []
    assert await zoe.call("network.cancel", {"reaction": "r1"}) == {"reactions": ["r1"]}
    asked = await bot.expect("signal")
    assert (asked["kind"], asked["sender_id"], asked["body"]) == ("cancel", "zoe", {"reaction": "r1"})
    await zoe.call_refused("invalid_arguments", "network.cancel", {})


async def test_whoever_asked_an_agent_directly_takes_it_back(node: Node, operator: WireSession) -> None:
    form, other = [await node.invite(operator, it, kind="service") for it in ("form", "other")]
    bot = await node.agent("bot", role="reactor")
    for reaction, to in (("r1", "agent:bot"), ("r2", "broadcast")):
        await bot.record(reaction, "started", {"trigger": (await form.send(to, reaction))["seq"]})
    assert await other.call("network.cancel", {"reaction": "r1"}) == {"reactions": []}
    assert await form.call("network.cancel", {"reaction": "r2"}) == {"reactions": []}
    await bot.settle()
    assert [frame for frame in bot.unread if frame["type"] == "signal"] == []
    assert await form.call("network.cancel", {"reaction": "r1"}) == {"reactions": ["r1"]}
    asked = await bot.expect("signal")
    assert (asked["kind"], asked["sender_id"], asked["body"]) == ("cancel", "form", {"reaction": "r1"})


async def test_cancel_by_thread_asks_every_open_reaction_in_it(node: Node, operator: WireSession) -> None:
    bot = await node.agent("bot", role="reactor")
    alice = await node.agent("alice")
    for reaction, sender in (("r1", operator), ("r2", operator), ("r3", alice)):
        trigger = (await sender.send("agent:bot", reaction))["seq"]
        await bot.message(reaction)
        await bot.record(reaction, "started", {"trigger": trigger})
    await bot.record("r2", "finished", {"status": "finished"})
    assert await operator.call("network.cancel", {"thread_id": "direct:bot~mia"}) == {"reactions": ["r1"]}
    assert (await bot.expect("signal", kind="cancel"))["body"] == {"reaction": "r1"}


async def test_who_was_asked_for_a_stopped_reaction_stops_too_and_nobody_else(
    node: Node, operator: WireSession
) -> None:
    guide, helper, digger = [await node.agent(it, role="reactor") for it in ("guide", "helper", "digger")]
    first = (await operator.send("agent:guide", "long work"))["seq"]
    await guide.record("r1", "started", {"trigger": first})
    second = (await guide.send("agent:helper", "help me", cause=first))["seq"]
    await helper.record("r2", "started", {"trigger": second})
    third = (await helper.send("agent:digger", "dig", cause=second))["seq"]
    await digger.record("r3", "started", {"trigger": third})
    other = (await operator.send("agent:helper", "something else"))["seq"]
    await helper.record("r4", "started", {"trigger": other})
    shout = (await guide.send("broadcast", "all of you", cause=first))["seq"]
    await digger.record("r5", "started", {"trigger": shout})
    stopped = await operator.call("network.cancel", {"thread_id": "direct:guide~mia"})
    assert sorted(stopped["reactions"]) == ["r1", "r2", "r3"]
    for agent, reaction in ((guide, "r1"), (helper, "r2"), (digger, "r3")):
        assert (await agent.expect("signal", kind="cancel"))["body"] == {"reaction": reaction}


# -- remove


async def test_an_operator_removes_a_participant(
    node: Node, alice: WireSession, bob: WireSession, operator: WireSession
) -> None:
    await operator.call_refused("unknown_recipient", "network.remove", {"agent_id": "nobody"})
    assert await operator.call("network.remove", {"agent_id": "bob"}) == {}
    frames = await bob.rest()
    expect_error(frames[-1], "forbidden")
    assert await bob.closed() == 4403
    await alice.refused("unknown_recipient", "agent:bob")
    agents = (await alice.call("network.list_agents"))["agents"]
    assert "bob" not in [agent["agent_id"] for agent in agents]
    await alice.send("broadcast", "without bob")
    back = await node.connect()
    await back.send_frame(
        {"type": "hello", "protocol": 1, "agent_id": "bob", "kind": "agent", "token": node.token_of("bob")}
    )
    assert (await back.next_frame())["type"] == "error"
    assert await back.closed() in (4401, 4403)


async def test_what_a_removed_participant_said_stays(
    alice: WireSession, bob: WireSession, operator: WireSession
) -> None:
    await bob.send("agent:alice", "said")
    await operator.call("network.remove", {"agent_id": "bob"})
    history = await alice.call("network.history", {"thread_id": "direct:alice~bob"})
    assert contents(history["messages"]) == ["said"]


async def test_calls_that_wait_for_a_decision_are_listed_for_who_may_read_the_request(node: Node) -> None:
    """The list comes from agents' records. A record that claims a message of others as its request shows nothing."""
    mia, zoe, eve = await node.person("mia"), await node.person("zoe"), await node.agent("eve", role="reactor")
    bot = await node.agent("bot", role="reactor")
    triggers = [(await mia.send("agent:bot", text))["seq"] for text in ("one", "two", "three")]
    eves = (await mia.send("agent:eve", "four"))["seq"]
    asked = []
    for number, trigger in enumerate(triggers):
        await bot.record(f"r{number}", "started", {"trigger": trigger})
        asked.append((await bot.send("agent:mia", "May I?", reply_to=trigger))["seq"])
        wait = {"turn": 1, "call": 0, "questions": {"a person": asked[-1]}, "until": 9, "is_approval": True}
        await bot.record(f"r{number}", "waiting", wait)
    await eve.record("r", "started", {"trigger": eves})
    claimed = {"turn": 1, "call": 0, "questions": {"a person": asked[0]}, "until": 9, "is_approval": True}
    await eve.record("r", "waiting", claimed)

    async def listed(session: WireSession, **args: object) -> list[tuple[int, bool]]:
        page = await session.call("network.approvals", args)
        return [(it["seq"], it["may_decide"]) for it in page["approvals"]]

    assert await listed(mia) == [(seq, True) for seq in asked]
    assert await listed(mia, after=asked[0], limit=1) == [(asked[1], True)]
    assert await listed(eve) == []
    assert await listed(bot) == [(seq, False) for seq in asked]
    assert await listed(zoe) == [(seq, False) for seq in asked], "an operator, who is in none of these threads"
    await bot.record("r0", "approval", {"turn": 1, "call": 0})
    await bot.record("r1", "tool_result", {"turn": 1, "call": 0})
    [left] = (await mia.call("network.approvals"))["approvals"]
    assert {name: left[name] for name in ("agent_id", "reaction", "call", "trigger", "thread_id", "until")} == {
        "agent_id": "bot", "reaction": "r2", "call": "1.0", "trigger": triggers[2], "thread_id": "direct:bot~mia",
        "until": 9,
    }  # fmt: skip
    assert left["message"]["content"] == "May I?"
    await mia.call("network.cancel", {"reaction": "r2"})
    assert await listed(mia) == []


async def test_a_call_asks_for_one_decision_whatever_else_its_records_claim(node: Node) -> None:
    """The hub's work is bounded by the number of waiting calls, and not by the size of an agent's records."""
    mia, bot = await node.person("mia"), await node.agent("bot", role="reactor")
    trigger = (await mia.send("agent:bot", "go"))["seq"]
    asked = [(await bot.send("agent:mia", f"May I {number}?", reply_to=trigger))["seq"] for number in range(100)]
    await bot.record("r", "started", {"trigger": trigger})
    for place in (0, *range(80)):
        claims = {f"person {number}": seq for number, seq in enumerate(asked[place:])}
        body = {"turn": 1, "call": place, "questions": claims, "until": 10**30, "is_approval": True}
        await bot.record("r", "waiting", body)
    await bot.record("r", "waiting", {"turn": 1, "call": 0, "questions": {"a person": 2**53}, "is_approval": True})
    listed = (await mia.call("network.approvals", {"limit": 500}))["approvals"]
    assert [it["seq"] for it in listed] == asked[: len(listed)]
    assert 1 < len(listed) <= 64
    assert {it["until"] for it in listed} == {2**53 - 1}


async def test_open_reactions_are_ones_own_and_all_for_operators(node: Node, alice: WireSession) -> None:
    bot, other = await node.agent("bot", role="reactor"), await node.agent("other", role="reactor")
    mia = await node.person("mia")
    trigger = (await alice.send("broadcast", "who does it?"))["seq"]
    begun = [
        (await session.record(reaction, "started", {"trigger": trigger}))["seq"]
        for session, reaction in ((bot, "r1"), (other, "r2"), (bot, "r3"))
    ]
    page = await bot.call("network.open_reactions")
    assert page["reactions"][0] == {
        "reaction": "r1", "agent_id": "bot", "trigger": trigger, "thread_id": "broadcast", "seq": begun[0], "is_cancelled": False,
    }  # fmt: skip
    assert [it["reaction"] for it in page["reactions"]] == ["r1", "r3"]
    await bot.call_refused("forbidden", "network.open_reactions", {"agent_id": "other"})
    assert (await alice.call("network.open_reactions"))["reactions"] == []
    await mia.call("network.cancel", {"reaction": "r2"})
    first = await mia.call("network.open_reactions", {"limit": 2})
    assert ([it["is_cancelled"] for it in first["reactions"]], first["has_more"]) == ([False, True], True)
    rest = await mia.call("network.open_reactions", {"after": first["reactions"][-1]["seq"]})
    assert ([it["reaction"] for it in rest["reactions"]], rest["has_more"]) == (["r3"], False)
    await bot.record("r1", "finished", {"status": "finished"})
    only = await mia.call("network.open_reactions", {"agent_id": "bot"})
    assert [it["reaction"] for it in only["reactions"]] == ["r3"]
