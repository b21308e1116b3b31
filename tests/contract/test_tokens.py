"""Tokens that an operator makes, and people who are no operators. docs/protocol.md, "Identity"."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from tests.support.node import Node, running_node
from tests.support.wire import WireSession, contents, expect_error, hello_frame, make_token


@pytest.fixture
async def operator(node: Node) -> WireSession:
    return await node.person("operator")


def token_args(agent_id: str, kind: str, token: str, **fields: Any) -> dict[str, Any]:
    digest = hashlib.sha256(token.encode()).hexdigest()
    return {"agent_id": agent_id, "kind": kind, "token_hash": digest, **fields}


async def invite(
    node: Node, host: WireSession, agent_id: str, kind: str = "human", **fields: Any
) -> tuple[WireSession, str]:
    """A session with a token of its own that the operator made, and that token."""
    token = make_token()
    assert await host.call("network.create_token", token_args(agent_id, kind, token, **fields)) == {}
    return await node.join(agent_id, kind=kind, token=token), token


async def refused_hello(node: Node, hello: dict[str, Any], code: str, close_code: int) -> None:
    session = await node.connect()
    await session.send_frame(hello)
    expect_error(await session.next_frame(), code)
    assert await session.closed() == close_code


@pytest.mark.parametrize("kind", ["agent", "human", "service"])
async def test_a_made_token_joins_its_id_as_its_kind(node: Node, operator: WireSession, kind: str) -> None:
    session, token = await invite(node, operator, "zoe", kind)
    assert (session.welcome["agent_id"], session.welcome["kind"]) == ("zoe", kind)
    await refused_hello(node, hello_frame("yan", kind=kind, token=token), "not_authenticated", 4401)
    other = "human" if kind != "human" else "agent"
    await refused_hello(node, hello_frame("zoe", kind=other, token=token), "forbidden", 4403)


async def test_a_made_token_works_through_a_browser_too(node: Node, operator: WireSession) -> None:
    token = make_token()
    await operator.call("network.create_token", token_args("zoe", "agent", token))
    session = await node.connect(origin="http://localhost")
    await session.hello("zoe", token=token)


async def test_an_id_that_has_a_made_token_is_not_bound_by_first_use(node: Node, operator: WireSession) -> None:
    await operator.call("network.create_token", token_args("zoe", "agent", make_token()))
    await refused_hello(node, hello_frame("zoe", token=make_token()), "not_authenticated", 4401)


async def test_only_operators_make_and_revoke_tokens(node: Node, operator: WireSession) -> None:
    alice = await node.agent("alice")
    zoe, _ = await invite(node, operator, "zoe")
    for session in (alice, zoe):
        await session.call_refused("forbidden", "network.create_token", token_args("eve", "human", make_token()))
        await session.call_refused("forbidden", "network.revoke_token", {"agent_id": "operator"})
        await session.call_refused("forbidden", "network.list_tokens")
    second, _ = await invite(node, operator, "second", operator=True)
    await second.call("network.create_token", token_args("eve", "human", make_token()))


async def test_a_token_is_never_shown(node: Node, operator: WireSession) -> None:
    await node.agent("alice")
    _, token = await invite(node, operator, "zoe")
    answer = await operator.submit_call("network.list_tokens")
    assert {entry["agent_id"] for entry in answer["value"]["tokens"]} == {"alice", "zoe"}
    for secret in (token, node.token_of("alice")):
        assert secret not in answer.raw
        assert hashlib.sha256(secret.encode()).hexdigest() not in answer.raw


async def test_a_revoked_token_is_forbidden_and_its_sessions_are_closed_with_4403(
    node: Node, operator: WireSession
) -> None:
    alice = await node.agent("alice")
    assert await operator.call("network.revoke_token", {"agent_id": "alice"}) == {"revoked": 1}
    expect_error((await alice.rest())[-1], "forbidden")
    assert await alice.closed() == 4403
    await refused_hello(node, hello_frame("alice", token=node.token_of("alice")), "forbidden", 4403)
    await refused_hello(node, hello_frame("alice", token=make_token()), "not_authenticated", 4401)
    await operator.send("agent:alice", "while you were locked out")  # revoked is not removed
    back, _ = await invite(node, operator, "alice", "agent")
    await back.message("while you were locked out")


# -- people who are no operators


async def test_a_person_reads_what_is_its_own(node: Node, operator: WireSession) -> None:
    alice, bob = await node.agent("alice"), await node.agent("bob")
    zoe, _ = await invite(node, operator, "zoe")
    private = await alice.send("agent:bob", "private")
    await alice.send("agent:zoe", "for zoe")
    await bob.message("private")
    await zoe.message("for zoe")
    for op, args in (
        ("network.history", {"thread_id": "direct:alice~bob"}),
        ("network.why", {"seq": private["seq"]}),
        ("network.message_status", {"seq": private["seq"]}),
    ):
        await zoe.call_refused("unknown_message", op, args)
    threads = (await zoe.call("network.list_threads"))["threads"]
    assert [thread["thread_id"] for thread in threads] == ["direct:alice~zoe"]
    assert contents((await zoe.call("network.history", {"thread_id": "direct:alice~zoe"}))["messages"]) == ["for zoe"]
    await zoe.call_refused("forbidden", "network.remove", {"agent_id": "bob"})


async def test_a_person_in_the_thread_resumes_a_root_and_another_does_not() -> None:
    async with running_node(limits={"max_root_messages": 2}) as node:
        operator = await node.person("operator")
        (zoe, _), (yan, _) = await invite(node, operator, "zoe"), await invite(node, operator, "yan")
        bob = await node.agent("bob")
        root = (await zoe.send("agent:bob", "root"))["seq"]
        await bob.send("agent:zoe", "1", cause=root)
        await bob.refused("loop_stopped", "agent:zoe", "2", cause=root)
        assert (await yan.submit_call("network.resume_root", {"root": root}))["type"] == "error"
        await bob.refused("loop_stopped", "agent:zoe", "2", cause=root)
        await zoe.call("network.resume_root", {"root": root})
        await bob.send("agent:zoe", "2", cause=root)


async def test_a_person_in_the_thread_cancels_and_another_does_not(node: Node, operator: WireSession) -> None:
    (zoe, _), (yan, _) = await invite(node, operator, "zoe"), await invite(node, operator, "yan")
    bot = await node.agent("bot", role="reactor")
    trigger = (await zoe.send("agent:bot", "long work"))["seq"]
    await bot.message("long work")
    await bot.record("r1", "started", {"trigger": trigger})
    for args in ({"reaction": "r1"}, {"thread_id": "direct:bot~zoe"}):
        answer = await yan.submit_call("network.cancel", args)
        assert answer["type"] == "error" or answer["value"] == {"reactions": []}
    assert await zoe.call("network.cancel", {"thread_id": "direct:bot~zoe"}) == {"reactions": ["r1"]}
    await bot.expect("signal", kind="cancel")


async def test_a_person_sees_no_records_and_no_dead_letters_of_others(node: Node, operator: WireSession) -> None:
    zoe, _ = await invite(node, operator, "zoe")
    alice, bot = await node.agent("alice"), await node.agent("bot", role="reactor")
    poison = (await alice.send("agent:bot", "poison"))["seq"]
    await bot.record("r1", "note", {"canary": True})
    for _ in range(5):
        await bot.delivery()
        await bot.nack(poison)
    await operator.expect("notice", kind="dead_letter")
    assert "canary" not in (await zoe.submit_call("network.records", {"reaction": "r1"})).raw
    assert zoe.unread == []
