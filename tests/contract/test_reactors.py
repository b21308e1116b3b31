"""Tests of the reactor, the one session that reacts for an agent: its fencing token, and the records of its turns.
docs/protocol/delivery.md.
"""

from __future__ import annotations

import pytest

from tests.support.node import Node
from tests.support.wire import WireSession, contents, expect_error, hello_frame


@pytest.fixture
async def alice(node: Node) -> WireSession:
    return await node.agent("alice")


@pytest.fixture
async def reactor(node: Node) -> WireSession:
    return await node.agent("bot", role="reactor")


async def begin(reactor: WireSession, sender: WireSession, reaction: str, content: str = "do it") -> tuple[int, int]:
    """Start a reaction. Return the seqs of the trigger and of the first record."""
    trigger = (await sender.send("agent:bot", content))["seq"]
    await reactor.message(content)
    return trigger, (await reactor.record(reaction, "started", {"trigger": trigger}))["seq"]


# -- fencing tokens


async def test_a_newer_reactor_supersedes_the_older(node: Node, reactor: WireSession) -> None:
    newer = await node.agent("bot", role="reactor")
    assert newer.welcome["fence"] > reactor.welcome["fence"]
    assert [(frame["type"], frame["kind"]) for frame in await reactor.rest()] == [("notice", "superseded")]
    assert await reactor.closed() == 4409
    await newer.settle()


async def test_observers_are_not_superseded(node: Node, reactor: WireSession) -> None:
    observer = await node.agent("bot")
    assert "fence" not in observer.welcome
    await node.agent("bot", role="reactor")
    await observer.settle()
    assert await reactor.closed() == 4409


async def test_reactors_of_different_agents_do_not_meet(node: Node, reactor: WireSession) -> None:
    other = await node.agent("other", role="reactor")
    await other.settle()
    await reactor.settle()


async def test_what_a_superseded_session_still_sends_has_no_effect(
    node: Node, alice: WireSession, reactor: WireSession
) -> None:
    trigger = (await alice.send("agent:bot", "do it"))["seq"]
    reactor.socket.transport.pause_reading()  # the session has not noticed its end yet
    newer = await node.agent("bot", role="reactor")
    await reactor.send_frame({"type": "send", "message_id": "late", "to": "agent:alice", "content": "too late"})
    await reactor.send_frame({"type": "ack", "seq": trigger})
    reactor.socket.transport.resume_reading()
    frames = await reactor.rest()
    assert all(frame["code"] == "forbidden" for frame in frames if frame["type"] == "error")
    assert "stored" not in [frame["type"] for frame in frames]
    await newer.message("do it")
    stored = await newer.send("agent:alice", "in time", message_id="late")
    assert stored["duplicate"] is False
    assert await alice.contents_until("in time") == []


async def test_an_outdated_fence_is_closed_with_4409_and_no_error(node: Node, reactor: WireSession) -> None:
    newer = await node.agent("bot", role="reactor")
    late = await node.connect()
    hello = hello_frame("bot", token=node.token_of("bot"), role="reactor", fence=reactor.welcome["fence"])
    await late.send_frame(hello)
    assert [frame for frame in await late.rest() if frame["type"] in ("error", "welcome")] == []
    assert await late.closed() == 4409
    await newer.settle()


async def test_the_newest_fence_is_welcome_again_with_a_higher_one(node: Node, reactor: WireSession) -> None:
    await reactor.drop()
    again = await node.agent("bot", role="reactor", fence=reactor.welcome["fence"])
    assert again.welcome["fence"] > reactor.welcome["fence"]
    third = await node.agent("bot", role="reactor", fence=again.welcome["fence"])
    assert third.welcome["fence"] > again.welcome["fence"]
    assert await again.closed() == 4409


async def test_a_reactor_whose_welcome_was_lost_is_welcome_with_the_fence_that_it_has(
    node: Node, reactor: WireSession
) -> None:
    await reactor.drop()
    fence, newest = reactor.welcome["fence"], reactor.welcome["fence"]
    for _ in range(3):  # the lost process never learns the higher tokens
        again = await node.agent("bot", role="reactor", fence=fence)
        assert again.welcome["fence"] > newest
        newest = again.welcome["fence"]
        if newest < fence + 3:
            await again.bye()
    # The newest token is in use now. A session with an older token is an older reactor.
    for outdated in (fence, 0):
        late = await node.connect()
        await late.send_frame(hello_frame("bot", token=node.token_of("bot"), role="reactor", fence=outdated))
        assert await late.closed() == 4409


async def test_a_fence_never_given_out_is_forbidden(node: Node, reactor: WireSession) -> None:
    forger = await node.connect()
    fence = reactor.welcome["fence"] + 1000
    await forger.send_frame(hello_frame("bot", token=node.token_of("bot"), role="reactor", fence=fence))
    expect_error(await forger.next_frame(), "forbidden")
    assert await forger.closed() == 4403
    await reactor.settle()


# -- records


async def test_a_record_is_stored_in_the_numbering_of_messages(alice: WireSession, reactor: WireSession) -> None:
    trigger, seq = await begin(reactor, alice, "r1")
    after = await alice.send("agent:bot", "after")
    assert trigger < seq < after["seq"]


async def test_a_records_answer_holds_its_record_id(alice: WireSession, reactor: WireSession) -> None:
    stored = await reactor.record("r1", "model_reply", {"turn": 1, "reply": "x"}, record_id="rec1")
    assert set(stored) <= {"type", "record_id", "seq", "thread_id", "duplicate"}
    assert (stored["record_id"], stored["duplicate"]) == ("rec1", False)


async def test_a_repeated_record_answers_with_the_first_seq(alice: WireSession, reactor: WireSession) -> None:
    first = await reactor.record("r1", "model_reply", {"turn": 1}, record_id="rec1")
    assert await reactor.record("r1", "model_reply", {"turn": 1}, record_id="rec1") == first | {"duplicate": True}
    error = expect_error(await reactor.submit_record("r1", "model_reply", {"turn": 2}, record_id="rec1"), "id_conflict")
    assert error["record_id"] == "rec1"
    records = (await reactor.call("network.records", {"reaction": "r1"}))["records"]
    assert [record["body"] for record in records] == [{"turn": 1}]


async def test_record_ids_of_different_agents_are_different(node: Node, reactor: WireSession) -> None:
    other = await node.agent("other", role="reactor")
    first = await reactor.record("r1", "note", {"by": "bot"}, record_id="rec1")
    second = await other.record("r1", "note", {"by": "other"}, record_id="rec1")
    assert second["duplicate"] is False
    assert second["seq"] != first["seq"]
    records = (await other.call("network.records", {"reaction": "r1"}))["records"]
    assert [record["body"] for record in records] == [{"by": "other"}]
    operator = await node.person("mia")
    records = (await operator.call("network.records", {"reaction": "r1"}))["records"]
    assert [(record["agent_id"], record["body"]) for record in records] == [
        ("bot", {"by": "bot"}),
        ("other", {"by": "other"}),
    ]
    records = (await operator.call("network.records", {"reaction": "r1", "agent_id": "bot"}))["records"]
    assert [record["body"] for record in records] == [{"by": "bot"}]
    assert (await other.call("network.records", {"reaction": "r1", "agent_id": "bot"}))["records"] == []


async def test_records_are_read_by_every_session_of_their_agent_and_operators(
    node: Node, alice: WireSession, reactor: WireSession
) -> None:
    await begin(reactor, alice, "r1")
    await reactor.record("r1", "model_reply", {"reply": "canary"}, record_id="rec1")
    operator = await node.person("mia")
    for session in (reactor, await node.agent("bot"), operator):
        records = (await session.call("network.records", {"reaction": "r1"}))["records"]
        assert [record["kind"] for record in records] == ["started", "model_reply"]
        assert set(records[1]) == {"seq", "agent_id", "record_id", "kind", "body", "at"}
        assert (records[1]["record_id"], records[1]["body"]) == ("rec1", {"reply": "canary"})


async def test_records_are_delivered_to_nobody_and_are_no_messages(
    node: Node, alice: WireSession, reactor: WireSession
) -> None:
    observer, operator = await node.agent("bot"), await node.person("mia")
    await begin(reactor, alice, "r1")
    await reactor.record("r1", "finished", {"status": "finished"})
    await alice.send("broadcast", "marker")
    assert await observer.contents_until("marker") == ["do it"]
    assert await operator.contents_until("marker") == []
    history = await operator.call("network.history", {"thread_id": "direct:alice~bot"})
    assert contents(history["messages"]) == ["do it"]


async def test_a_reaction_named_like_a_thread_stays_out_of_it(node: Node, alice: WireSession) -> None:
    carol, operator = await node.agent("carol"), await node.person("mia")
    mallory = await node.agent("mallory", role="reactor")
    await alice.send("agent:carol", "private")
    public = await alice.send("broadcast", "public")
    await alice.send("broadcast", "reply", reply_to=public["seq"])
    before = await operator.call("network.list_threads")
    for thread_id in ("direct:alice~carol", "broadcast", f"thread:{public['seq']}"):
        history = await operator.call("network.history", {"thread_id": thread_id})
        await mallory.record(thread_id, "note", {"content": "forged"})
        assert await operator.call("network.history", {"thread_id": thread_id}) == history
        answer = await mallory.submit_call("network.records", {"reaction": thread_id})
        assert [record["body"] for record in answer["value"]["records"]] == [{"content": "forged"}]
        assert "private" not in answer.raw
    assert await operator.call("network.list_threads") == before
    await mallory.call_refused("unknown_message", "network.history", {"thread_id": "direct:alice~carol"})
    await alice.send("broadcast", "marker")
    assert "forged" not in str(await carol.deliveries_until("marker"))


async def test_one_agents_reaction_id_takes_nothing_from_another(
    node: Node, alice: WireSession, reactor: WireSession
) -> None:
    mallory = await node.agent("mallory", role="reactor")
    public = await alice.send("broadcast", "who does it?")
    for session in (reactor, mallory):
        await session.message("who does it?")
    await mallory.record("r1", "started", {"trigger": public["seq"]})
    await reactor.record("r1", "started", {"trigger": public["seq"]})
    await mallory.record("r1", "finished", {"status": "finished"})
    again = await node.agent("bot", role="reactor")
    assert [reaction["reaction"] for reaction in again.welcome["open_reactions"]] == ["r1"]


# -- open reactions


async def test_started_opens_a_reaction_until_finished(node: Node, alice: WireSession, reactor: WireSession) -> None:
    trigger, seq = await begin(reactor, alice, "r1")
    await reactor.drop()
    again = await node.agent("bot", role="reactor", fence=reactor.welcome["fence"])
    assert again.welcome["open_reactions"] == [{"reaction": "r1", "trigger": trigger, "seq": seq}]
    await again.record("r1", "finished", {"status": "finished"})
    await again.drop()
    third = await node.agent("bot", role="reactor")
    assert third.welcome["open_reactions"] == []


async def test_several_reactions_are_open_at_once(node: Node, alice: WireSession, reactor: WireSession) -> None:
    first, _ = await begin(reactor, alice, "r1", "one")
    second, _ = await begin(reactor, alice, "r2", "two")
    third, _ = await begin(reactor, alice, "r3", "three")
    await reactor.record("r2", "finished", {"status": "finished"})
    again = await node.agent("bot", role="reactor")
    assert [(r["reaction"], r["trigger"]) for r in again.welcome["open_reactions"]] == [("r1", first), ("r3", third)]
    assert second not in [r["trigger"] for r in again.welcome["open_reactions"]]


async def test_started_acks_its_trigger(node: Node, alice: WireSession, reactor: WireSession) -> None:
    await begin(reactor, alice, "r1")
    await alice.send("agent:bot", "marker")
    await reactor.drop()
    again = await node.agent("bot", role="reactor")
    assert await again.contents_until("marker") == []


async def test_started_acks_just_its_trigger(node: Node, alice: WireSession, reactor: WireSession) -> None:
    await alice.send("agent:bot", "earlier")
    await reactor.message("earlier")
    await begin(reactor, alice, "r1")
    await alice.send("agent:bot", "marker")
    await reactor.drop()
    again = await node.agent("bot", role="reactor")
    assert await again.contents_until("marker") == ["earlier"]


async def test_a_reaction_whose_session_is_lost_counts_an_attempt(
    node: Node, alice: WireSession, reactor: WireSession
) -> None:
    trigger, _ = await begin(reactor, alice, "r1")

    async def attempts() -> int:
        status = await alice.call("network.message_status", {"seq": trigger})
        counted: int = status["recipients"][0]["attempts"]
        return counted

    await alice.call("network.watch", {"presence": True})
    before = await attempts()
    await reactor.drop()
    await alice.expect("presence", agent_id="bot", state="offline")  # the hub has noticed
    again = await node.agent("bot", role="reactor")
    assert await attempts() == before + 1
    await again.record("r1", "finished", {"status": "finished"})
    finished = await attempts()
    await again.drop()
    await alice.expect("presence", agent_id="bot", state="offline")
    await node.agent("bot", role="reactor")
    assert await attempts() == finished  # no attempt was open any more


async def test_a_trigger_that_kills_its_reactor_five_times_is_a_dead_letter(
    node: Node, alice: WireSession, reactor: WireSession
) -> None:
    operator = await node.person("mia")
    await operator.call("network.watch", {"presence": True})
    trigger, _ = await begin(reactor, alice, "r1", "poison")
    for _ in range(5):
        await reactor.drop()
        await operator.expect("presence", agent_id="bot", state="offline")
        reactor = await node.agent("bot", role="reactor")
    notice = await operator.expect("notice", kind="dead_letter")
    assert notice["body"]["seq"] == trigger
    (recipient,) = (await alice.call("network.message_status", {"seq": trigger}))["recipients"]
    assert (recipient["state"], recipient["attempts"]) == ("dead", 5)
    await alice.send("agent:bot", "the thread goes on")
    await reactor.message("the thread goes on")


BAD_TRIGGERS = {
    "missing": ({}, "invalid_arguments", "missing"),
    "a_text": ({"trigger": "5"}, "invalid_arguments", '"5"'),
    "true": ({"trigger": True}, "invalid_arguments", "true"),
    "a_fraction": ({"trigger": 1.5}, "invalid_arguments", "1.5"),
    "null": ({"trigger": None}, "invalid_arguments", "null"),
    "a_list": ({"trigger": [1]}, "invalid_arguments", "[1]"),
    "zero": ({"trigger": 0}, "unknown_message", "message 0;"),
    "negative": ({"trigger": -3}, "unknown_message", "message -3;"),
    "beyond_the_head": ({"trigger": 987_654}, "unknown_message", "message 987654 "),
    "beyond_2_53": ({"trigger": 2**60}, "unknown_message", f"message {2**60};"),
}


@pytest.mark.parametrize(("body", "code", "named"), BAD_TRIGGERS.values(), ids=BAD_TRIGGERS.keys())
async def test_a_started_record_with_a_wrong_trigger_is_refused_and_the_trigger_named(
    reactor: WireSession, body: dict[str, object], code: str, named: str
) -> None:
    error = expect_error(await reactor.submit_record("r1", "started", body, record_id="first"), code)
    assert error["record_id"] == "first"
    assert named in error["message"]
    assert (await reactor.call("network.records", {"reaction": "r1"}))["records"] == []


async def test_a_body_that_is_no_object_begins_no_reaction(reactor: WireSession) -> None:
    frame = {"type": "record", "record_id": "first", "reaction": "r1", "kind": "started", "body": [1]}
    await reactor.send_frame(frame)
    expect_error(await reactor.answer("first"), "invalid_arguments")


async def test_what_one_may_read_but_was_not_sent_is_no_trigger(node: Node, alice: WireSession) -> None:
    await alice.call("channels.create", {"name": "dev", "history": "members"})
    before = await alice.send("channel:dev", "before it came")
    late = await node.agent("late", role="reactor")
    await late.call("channels.join", {"name": "dev"})
    assert (await late.call("network.history", {"thread_id": "channel:dev"}))["messages"][0]["seq"] == before["seq"]
    answer = await late.submit_record("r1", "started", {"trigger": before["seq"]})
    assert str(before["seq"]) in expect_error(answer, "unknown_message")["message"]


async def test_a_refused_record_id_is_free_again(node: Node, alice: WireSession, reactor: WireSession) -> None:
    expect_error(await reactor.submit_record("r1", "started", {}, record_id="first"), "invalid_arguments")
    stored = await alice.send("agent:bot", "go")
    await reactor.record("r1", "started", {"trigger": stored["seq"]}, record_id="first")
    again = await node.agent("bot", role="reactor")
    assert [reaction["trigger"] for reaction in again.welcome["open_reactions"]] == [stored["seq"]]


async def test_a_reaction_to_a_message_of_ones_own_is_taken_and_named_to_who_may_read_that(
    node: Node, reactor: WireSession, alice: WireSession
) -> None:
    note = (await reactor.send("agent:bot", "remember the milk"))["seq"]
    told = (await reactor.send("agent:alice", "I begin by myself"))["seq"]
    for name, trigger in (("r-note", note), ("r-told", told)):
        await reactor.record(name, "started", {"trigger": trigger})
    answer = (await reactor.send("agent:alice", "done", cause=told))["seq"]
    listed = (await reactor.call("network.open_reactions"))["reactions"]
    assert [(it["reaction"], it["trigger"]) for it in listed] == [("r-note", note), ("r-told", told)]
    chain = (await alice.call("network.why", {"seq": answer}))["chain"]
    assert [step.get("reaction") for step in chain if "reaction" in step] == ["r-told"]
    await alice.call_refused("unknown_message", "network.why", {"seq": note})
    for name in ("r-note", "r-told"):
        await reactor.record(name, "finished", {"status": "finished"})
    assert (await reactor.call("network.open_reactions"))["reactions"] == []
