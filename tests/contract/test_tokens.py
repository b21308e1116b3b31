"""Tests of tokens that an operator creates, and of people who are not operators. docs/protocol/identity.md."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from tests.support.node import Node
from tests.support.wire import WireSession, expect_error, hello_frame, make_token


@pytest.fixture
async def operator(node: Node) -> WireSession:
    return await node.person("operator")


def token_args(agent_id: str, kind: str, token: str, **fields: Any) -> dict[str, Any]:
    digest = hashlib.sha256(token.encode()).hexdigest()
    return {"agent_id": agent_id, "kind": kind, "token_hash": digest, **fields}


async def refused_hello(node: Node, hello: dict[str, Any], code: str, close_code: int) -> None:
    session = await node.connect()
    await session.send_frame(hello)
    expect_error(await session.next_frame(), code)
    assert await session.closed() == close_code


@pytest.mark.parametrize("kind", ["agent", "human", "service"])
async def test_a_made_token_joins_its_id_as_its_kind(node: Node, operator: WireSession, kind: str) -> None:
    session = await node.invite(operator, "zoe", kind=kind)
    token = node.token_of("zoe")
    assert (session.welcome["agent_id"], session.welcome["kind"]) == ("zoe", kind)
    await refused_hello(node, hello_frame("yan", kind=kind, token=token), "not_authenticated", 4401)
    other = "human" if kind != "human" else "agent"
    await refused_hello(node, hello_frame("zoe", kind=other, token=token), "forbidden", 4403)


async def test_a_made_token_works_through_a_browser_too(node: Node, operator: WireSession) -> None:
    token = make_token()
    await operator.call("network.create_token", token_args("zoe", "agent", token))
    session = await node.connect(origin=node.origin)
    await session.hello("zoe", token=token)


async def test_an_id_that_has_a_made_token_is_not_bound_by_first_use(node: Node, operator: WireSession) -> None:
    await operator.call("network.create_token", token_args("zoe", "agent", make_token()))
    await refused_hello(node, hello_frame("zoe", token=make_token()), "not_authenticated", 4401)


async def test_only_operators_make_and_revoke_tokens(node: Node, operator: WireSession) -> None:
    alice = await node.agent("alice")
    zoe = await node.invite(operator, "zoe")
    for session in (alice, zoe):
        await session.call_refused("forbidden", "network.create_token", token_args("eve", "human", make_token()))
        await session.call_refused("forbidden", "network.revoke_token", {"agent_id": "operator"})
        await session.call_refused("forbidden", "network.list_tokens")
    second = await node.invite(operator, "second", operator=True)
    await second.call("network.create_token", token_args("eve", "human", make_token()))


async def test_a_token_is_never_shown(node: Node, operator: WireSession) -> None:
    await node.agent("alice")
    await node.invite(operator, "zoe")
    answer = await operator.submit_call("network.list_tokens")
    assert {entry["agent_id"] for entry in answer["value"]["tokens"]} == {"alice", "zoe"}
    for secret in (node.token_of("zoe"), node.token_of("alice")):
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
    await operator.send("agent:alice", "while you were locked out")  # a revoked participant is not removed
    back = await node.invite(operator, "alice", kind="agent")
    await back.message("while you were locked out")


async def test_a_hello_without_a_kind_joins_as_what_its_token_is(node: Node, operator: WireSession) -> None:
    await node.agent("alice")
    await node.invite(operator, "zoe")
    for agent_id, kind in (("alice", "agent"), ("zoe", "human")):
        session = await node.connect()
        frame = hello_frame(agent_id, token=node.token_of(agent_id))
        del frame["kind"]
        await session.send_frame(frame)
        assert (await session.expect("welcome"))["kind"] == kind
    for agent_id, token in (("alice", make_token()), ("nobody", make_token()), ("nobody", node.owner_token)):
        frame = hello_frame(agent_id, token=token)
        del frame["kind"]
        await refused_hello(node, frame, "not_authenticated", 4401)
    frame = hello_frame("zoe", token=node.owner_token)
    del frame["kind"]
    session = await node.connect()
    await session.send_frame(frame)
    assert (await session.expect("welcome"))["kind"] == "human"


# -- people who are no operators
