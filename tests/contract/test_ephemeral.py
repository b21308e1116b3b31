"""Tests of everything that is never stored: presence, signals, notices; leaving, draining; and HTTP on the same port."""

from __future__ import annotations

import pytest

from tests.support.node import Node
from tests.support.wire import WireSession, ask_http, get_http


@pytest.fixture
async def alice(node: Node) -> WireSession:
    return await node.agent("alice")


@pytest.fixture
async def bob(node: Node) -> WireSession:
    return await node.agent("bob")


async def signal(session: WireSession, **fields: object) -> None:
    await session.send_frame({"type": "signal", "kind": "typing", "body": {}, **fields})


# -- presence


async def test_watchers_see_participants_come_and_go(node: Node, alice: WireSession) -> None:
    assert await alice.call("network.watch", {"presence": True}) == {}
    card = {"description": "knows things", "tags": ["a"]}
    bob = await node.agent("bob", card=card)
    assert await alice.expect("presence") == {"type": "presence", "agent_id": "bob", "state": "online", "card": card}
    await bob.bye()
    gone = await alice.expect("presence")
    assert (gone["agent_id"], gone["state"]) == ("bob", "offline")


async def test_presence_is_about_participants_not_sessions(node: Node, alice: WireSession) -> None:
    await alice.call("network.watch", {"presence": True})
    first, second = await node.agent("bob"), await node.agent("bob")
    await first.drop()
    await node.agent("carol")
    states = [await alice.expect("presence") for _ in range(2)]
    assert [(frame["agent_id"], frame["state"]) for frame in states] == [("bob", "online"), ("carol", "online")]
    await second.drop()
    assert (await alice.expect("presence"))["state"] == "offline"


async def test_second_session_announces_only_a_changed_card(node: Node, alice: WireSession) -> None:
    await alice.call("network.watch", {"presence": True})
    await node.agent("bob")
    await node.agent("bob", card={"description": "bob helps"})
    await node.agent("bob", card={"description": "bob helps"})
    await node.agent("carol")
    frames = [await alice.expect("presence") for _ in range(3)]
    shown = [(frame["agent_id"], frame.get("card")) for frame in frames]
    assert shown == [("bob", None), ("bob", {"description": "bob helps"}), ("carol", None)]


async def test_who_does_not_watch_sees_no_presence(node: Node, alice: WireSession, bob: WireSession) -> None:
    other = await node.agent("alice")
    await alice.call("network.watch", {"presence": True})
    await bob.call("network.watch", {"presence": True})
    assert await bob.call("network.watch", {"presence": False}) == {}
    await node.agent("carol")
    await alice.expect("presence", agent_id="carol")
    for session in (other, bob):
        await session.settle()
        assert [frame for frame in session.unread if frame["type"] == "presence"] == []


async def test_a_channels_members_operators_and_whom_it_is_about_are_told_that_its_members_change(node: Node) -> None:
    mia = await node.person("mia")
    alice, bob, carol = [await node.agent(it) for it in ("alice", "bob", "carol")]
    everybody = (mia, alice, bob, carol)
    for session in everybody:
        await session.call("network.watch", {"presence": True})
    await alice.call("channels.create", {"name": "tea", "access": "closed"})
    await alice.call("channels.invite", {"name": "tea", "agent_id": "bob"})
    for op, by, args in (
        ("channels.join", bob, {"name": "tea"}),
        ("channels.set_topic", alice, {"name": "tea", "topic": "Tea"}),
        ("channels.set_history", alice, {"name": "tea", "history": "members"}),
        ("channels.remove", alice, {"name": "tea", "agent_id": "bob"}),
        ("network.remove", mia, {"agent_id": "bob"}),
    ):
        await by.call(op, args)
    heard: dict[str, list[object]] = {name: [] for name in ("mia", "alice", "bob", "carol")}
    for name, session in zip(heard, everybody, strict=True):
        await (session.closed() if session is bob else session.settle())
        heard[name] = [
            (it.get("thread_id"), it["body"].get("agent_id")) for it in session.unread if it.get("kind") == "members"
        ]
    tea = "channel:tea"
    assert heard["mia"] == [(tea, "alice"), (tea, "bob"), (tea, None), (tea, "bob"), (None, "bob")]
    assert heard["alice"] == heard["mia"]
    assert heard["bob"] == [(tea, "bob"), (tea, None), (tea, "bob")]
    assert heard["carol"] == [(None, "bob")]


# -- signals


async def test_a_signal_reaches_readers_that_watch(alice: WireSession, bob: WireSession) -> None:
    await bob.call("network.watch", {"signals": True})
    await signal(alice, to="agent:bob", body={"since": 1})
    assert await bob.next_frame() == {
        "type": "signal",
        "sender_id": "alice",
        "thread_id": "direct:alice~bob",
        "kind": "typing",
        "body": {"since": 1},
    }


async def test_every_kind_of_signal_passes(alice: WireSession, bob: WireSession) -> None:
    await bob.call("network.watch", {"signals": True})
    for kind in ("typing", "viewing", "thinking", "delta", "tool"):
        await signal(alice, to="agent:bob", kind=kind, body=kind)
        assert (await bob.expect("signal"))["kind"] == kind


async def test_a_signal_can_name_a_thread(alice: WireSession, bob: WireSession) -> None:
    await alice.send("agent:bob", "hi")
    await bob.call("network.watch", {"signals": True})
    await signal(alice, thread_id="direct:alice~bob")
    assert (await bob.expect("signal"))["thread_id"] == "direct:alice~bob"


async def test_a_signal_to_oneself_reaches_ones_other_session_once(node: Node, alice: WireSession) -> None:
    other = await node.agent("alice")
    await other.call("network.watch", {"signals": True})
    await signal(alice, to="agent:alice", body="once")
    await signal(alice, to="broadcast", body="marker")
    bodies = [(await other.expect("signal"))["body"] for _ in range(2)]
    assert bodies == ["once", "marker"]


async def test_a_signal_reaches_nobody_else(node: Node, alice: WireSession, bob: WireSession) -> None:
    carol, operator = await node.agent("carol"), await node.person("mia")
    for session in (carol, operator):
        await session.call("network.watch", {"signals": True})
    await signal(alice, to="agent:bob", body="private")
    await signal(alice, to="broadcast", body="public")
    for session in (carol, operator):
        assert (await session.expect("signal"))["body"] == "public"
    await bob.settle()
    assert bob.unread == []  # bob does not watch


async def test_signals_are_not_stored(alice: WireSession, bob: WireSession) -> None:
    head = (await alice.call("network.info"))["head"]
    await signal(alice, to="agent:bob")
    await signal(alice, to="broadcast")
    await alice.settle()
    assert (await alice.call("network.info"))["head"] == head
    assert alice.unread == []  # signals have no answers


async def test_a_signal_to_nobody_is_an_error(alice: WireSession) -> None:
    await signal(alice, to="agent:nobody")
    assert (await alice.expect("error"))["code"] == "unknown_recipient"


# -- leaving


async def test_bye_is_closed_with_1000(alice: WireSession) -> None:
    await alice.send_frame({"type": "bye"})
    assert await alice.rest() == []
    assert await alice.closed() == 1000


async def test_what_was_sent_before_bye_is_answered(alice: WireSession, bob: WireSession) -> None:
    await alice.send_frame({"type": "send", "message_id": "m1", "to": "agent:bob", "content": "last words"})
    await alice.send_frame({"type": "bye"})
    assert [frame["type"] for frame in await alice.rest()] == ["stored"]
    await bob.message("last words")


async def test_what_a_lost_session_sent_is_stored_or_not_but_never_twice(
    node: Node, alice: WireSession, bob: WireSession
) -> None:
    await alice.send_frame({"type": "send", "message_id": "m1", "to": "agent:bob", "content": "did it arrive?"})
    await alice.drop()
    again = await node.agent("alice")
    await again.send("agent:bob", "did it arrive?", message_id="m1")
    await again.send("agent:bob", "marker")
    assert await bob.contents_until("marker") == ["did it arrive?"]


# -- HTTP


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_health_is_served_on_the_same_port(node: Node, path: str) -> None:
    status, _ = await get_http(node.url, path)
    assert status == 200


async def test_metrics_are_served_on_the_same_port(node: Node, alice: WireSession, bob: WireSession) -> None:
    await alice.send("agent:bob", "a private sentence")
    status, body = await get_http(node.url, "/metrics")
    assert status == 200
    samples = [line for line in body.splitlines() if line and not line.startswith("#")]
    assert samples
    for line in samples:
        float(line.rpartition(" ")[2])
    assert "a private sentence" not in body


async def test_another_path_is_not_found(node: Node) -> None:
    status, _ = await get_http(node.url, "/etc/passwd")
    assert 400 <= status < 500


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
async def test_head_gives_the_headers_alone(node: Node, path: str) -> None:
    got, head = await ask_http(node.url, "GET", path), await ask_http(node.url, "HEAD", path)
    assert (head.status, head.body) == (200, "")
    assert {name for name, _ in head.headers} == {name for name, _ in got.headers}
    assert len(head.headers) == len(dict(head.headers)), "no header twice"
    assert int(dict(head.headers)["Content-Length"]) > 0


async def test_head_opens_no_session(node: Node) -> None:
    answer = await ask_http(node.url, "HEAD", "/", headers={"Upgrade": "websocket", "Connection": "upgrade"})
    assert answer.status == 426


@pytest.mark.parametrize("body", [b"", b"a=1", b"GET / HTTP/1.1\r\n\r\n", b"x" * 300_000], ids=len)
@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/", "/nowhere"])
async def test_other_methods_are_refused_and_the_right_ones_named(node: Node, path: str, body: bytes) -> None:
    answer = await ask_http(node.url, "POST", path, body)
    assert answer.status == 405
    assert dict(answer.headers)["Allow"] == "GET, HEAD"
    assert "POST" in answer.body


# -- signals about a message reach only those who may know the message


async def watching(node: Node, *names: str) -> dict[str, WireSession]:
    sessions = {name: await node.agent(name) for name in names}
    for session in sessions.values():
        await session.call("network.watch", {"signals": True})
    return sessions


async def hears(session: WireSession) -> list[object]:
    """Return the bodies of the signals to a session, up to the sender's `marker`."""
    heard = []
    while (body := (await session.expect("signal"))["body"]) != "marker":
        heard.append(body)
    return heard


WAYS = ("by_trigger", "by_reaction", "by_both")
"""Ways in which a signal names its message."""


async def tell(session: WireSession, way: str, trigger: int, thread_id: str, entitled: WireSession) -> None:
    """Stream an answer to a message. When the entitled session has received it, send `marker` to everybody."""
    if way in ("by_reaction", "by_both"):
        await session.record(f"r{trigger}", "started", {"trigger": trigger})
    named = {"trigger": trigger} if way in ("by_trigger", "by_both") else {}
    await signal(session, kind="delta", body="the SECRET is ...", thread_id=thread_id, **named)
    await entitled.expect("signal", body="the SECRET is ...")
    await signal(session, to="broadcast", body="marker")


@pytest.mark.parametrize("way", WAYS)
async def test_who_is_left_out_of_a_message_sees_no_answer_to_it_come(node: Node, bob: WireSession, way: str) -> None:
    it = await watching(node, "ann", "zoe")
    asked = await it["ann"].send("broadcast", "what is the secret?", exclude_agent_ids=["zoe"])
    await it["ann"].send("broadcast", "good morning")  # the newest message is for everybody
    await tell(bob, way, asked["seq"], "broadcast", it["ann"])
    assert await hears(it["zoe"]) == []


@pytest.mark.parametrize("way", WAYS)
async def test_who_came_after_a_question_or_left_since_sees_no_answer_to_it_come(
    node: Node, bob: WireSession, way: str
) -> None:
    it = await watching(node, "ann", "eve", "dan")
    await it["ann"].call("channels.create", {"name": "dev"})
    for session in (bob, it["dan"]):
        await session.call("channels.join", {"name": "dev"})
    asked = await it["ann"].send("channel:dev", "what is the secret?")
    await it["dan"].call("channels.leave", {"name": "dev"})
    await it["eve"].call("channels.join", {"name": "dev"})
    await it["ann"].send("channel:dev", "hello eve")
    await tell(bob, way, asked["seq"], "channel:dev", it["ann"])
    assert await hears(it["eve"]) == []
    assert await hears(it["dan"]) == []


@pytest.mark.parametrize("way", [*WAYS, "unknown"])
async def test_a_newer_message_that_the_sender_is_left_out_of_hinders_no_signal(
    node: Node, bob: WireSession, way: str
) -> None:
    it = await watching(node, "ann", "zoe")
    asked = await it["ann"].send("broadcast", "a question")
    await it["ann"].send("broadcast", "not for bob", exclude_agent_ids=["bob", "zoe"])
    await tell(
        bob, way, asked["seq"], "broadcast", it["ann"]
    )  # without a trigger, the newest message counts, and bob received it
    assert await hears(it["zoe"]) == (["the SECRET is ..."] if way in ("by_trigger", "by_both") else [])
    await bob.settle()
    assert [frame for frame in bob.unread if frame["type"] == "error"] == []


async def test_a_trigger_is_a_message_of_the_thread_that_the_sender_may_read(
    node: Node, alice: WireSession, bob: WireSession
) -> None:
    ann = await node.agent("ann")
    hidden = (await ann.send("agent:alice", "x"))["seq"]
    elsewhere = (await ann.send("agent:bob", "x"))["seq"]
    await ann.send("broadcast", "x")
    refusals = set()
    for trigger in (hidden, elsewhere, 2**40):
        await signal(bob, thread_id="broadcast", trigger=trigger)
        refused = await bob.expect("error", code="unknown_message")
        refusals.add(refused["message"].replace(str(trigger), "IT"))
    assert len(refusals) == 1
    await signal(bob, to="broadcast", trigger=elsewhere)
    await bob.expect("error", code="invalid_frame")


async def test_with_many_open_reactions_a_signal_names_its_trigger(
    node: Node, alice: WireSession, bob: WireSession
) -> None:
    await alice.call("network.watch", {"signals": True})
    for number in range(65):
        asked = await alice.send("agent:bob", number)
        await bob.record(f"r{number}", "started", {"trigger": asked["seq"]})
    await signal(bob, thread_id="direct:alice~bob", body="which?")
    await bob.expect("error", code="invalid_arguments")
    await signal(bob, thread_id="direct:alice~bob", body="this", trigger=asked["seq"])
    assert (await alice.expect("signal"))["body"] == "this"
