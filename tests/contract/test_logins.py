"""Tests of one-time logins: a code binds a token that the client has made to an ID, once. docs/protocol/identity.md."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest

from roundelay.app import Network
from roundelay.network.core.entries import Join, Peer
from roundelay.network.core.joining import identify
from roundelay.network.core.state import State
from roundelay.network.core.tables import Login, TableWrite
from roundelay.network.errors import Forbidden, NotAuthenticated
from roundelay.network.frames import HelloFrame
from roundelay.network.operations.operators import MAX_LOGINS
from tests.support.node import Node, node_process
from tests.support.wire import WireSession, expect_error, hello_frame, make_token

CLOSED_WITH = {"invalid_frame": 4400, "not_authenticated": 4401, "forbidden": 4403}


@pytest.fixture
async def operator(node: Node) -> WireSession:
    return await node.person("operator")


async def make_login(host: WireSession, agent_id: str = "mia", **made: Any) -> str:
    """Create a login code for an ID, as `roundelay web` does."""
    code = make_token()
    value = await host.call("network.create_login", {"agent_id": agent_id, "login_hash": digest(code), **made})
    assert value.keys() == {"expires_at"}
    return code


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


async def open_page(node: Node, code: str, new_token: str, agent_id: str = "mia", kind: str = "human") -> WireSession:
    """Open a page that sends its login code. The next frame is the result."""
    page = await node.connect(origin=node.origin)
    await page.send_frame(hello_frame(agent_id, kind=kind, token=code, new_token=new_token))
    return page


async def log_in(node: Node, code: str, new_token: str, agent_id: str = "mia", kind: str = "human") -> WireSession:
    page = await open_page(node, code, new_token, agent_id, kind)
    page.welcome = await page.expect("welcome")
    return page


async def refused(page: WireSession, code: str) -> str:
    error = expect_error(await page.next_frame(), code)
    assert await page.rest() == []
    assert await page.closed() == CLOSED_WITH[code]
    return str(error["message"])


async def test_a_page_logs_in_once_and_comes_back_by_its_own_token(node: Node, operator: WireSession) -> None:
    code, token = await make_login(operator), make_token()
    page = await log_in(node, code, token)
    assert (page.welcome["agent_id"], page.welcome["kind"]) == ("mia", "human")
    assert "is_operator" not in page.welcome
    await page.bye()
    again = await node.connect(origin=node.origin)
    await again.hello("mia", kind="human", token=token)
    await again.send("agent:operator", "here")
    await again.call_refused("forbidden", "network.list_tokens")


async def test_an_operator_s_login_makes_an_operator_and_welcome_says_so(node: Node, operator: WireSession) -> None:
    assert operator.welcome["is_operator"] is True
    token = make_token()
    page = await log_in(node, await make_login(operator, operator=True), token)
    assert page.welcome["is_operator"] is True
    await page.call("network.list_tokens")
    again = await node.join("mia", kind="human", token=token)
    assert again.welcome["is_operator"] is True


async def test_a_lost_welcome_is_asked_for_again_and_another_page_is_too_late(
    node: Node, operator: WireSession
) -> None:
    code, token = await make_login(operator), make_token()
    lost = await open_page(node, code, token)
    await lost.close()
    await log_in(node, code, token)
    await log_in(node, code, token)
    told = await refused(await open_page(node, code, make_token()), "not_authenticated")
    assert "another page" in told
    assert "roundelay web" in told


async def test_of_two_pages_with_one_code_exactly_one_gets_in(node: Node, operator: WireSession) -> None:
    code = await make_login(operator)
    pages = await asyncio.gather(*(open_page(node, code, make_token()) for _ in range(8)))
    firsts = [(await page.next_frame())["type"] for page in pages]
    assert sorted(firsts) == ["error"] * 7 + ["welcome"]


async def test_a_login_and_what_came_of_it_outlive_a_kill(tmp_path: Path) -> None:
    async with node_process(tmp_path / "node.db") as node:
        operator = await node.person("operator")
        waiting, used, token = await make_login(operator, "ann"), await make_login(operator), make_token()
        await log_in(node, used, token)
        await node.kill9()
        await node.restart()
        await log_in(node, used, token)
        await refused(await open_page(node, used, make_token()), "not_authenticated")
        await log_in(node, waiting, make_token(), "ann")


@pytest.mark.parametrize("end", ["network.revoke_token", "network.remove"])
async def test_a_revoke_ends_a_login_used_or_not(node: Node, operator: WireSession, end: str) -> None:
    used, waiting, token = await make_login(operator), await make_login(operator), make_token()
    page = await log_in(node, used, token)
    value = await operator.call(end, {"agent_id": "mia"})
    assert value in ({}, {"revoked": 2})
    *before, last = await page.rest()
    assert (last["type"], last["code"]) == ("error", "forbidden"), "nothing stands between an error and its close"
    assert not [it for it in before if it["type"] == "error"]
    for code, new_token in ((used, make_token()), (waiting, make_token())):
        told = await refused(await open_page(node, code, new_token), "not_authenticated")
        assert "roundelay web" in told
    await refused(await open_page(node, used, token), "forbidden")


async def test_one_login_is_ended_and_the_others_of_that_person_go_on(node: Node, operator: WireSession) -> None:
    phone, desk = make_token(), make_token()
    at_phone = await log_in(node, await make_login(operator), phone)
    at_desk = await log_in(node, await make_login(operator), desk)
    listed = (await operator.call("network.list_tokens"))["tokens"]
    digest = hashlib.sha256(phone.encode()).hexdigest()[:12]
    assert {(it["hash"], it["sessions"]) for it in listed if it["agent_id"] == "mia"} >= {(digest, 1)}
    args = {"agent_id": "mia", "token_hash": digest}
    assert await operator.call("network.revoke_token", args) == {"revoked": 1}
    *_, last = await at_phone.rest()
    assert (last["type"], last["code"]) == ("error", "forbidden")
    await at_desk.send("agent:operator", "still here")
    await refused(await open_page(node, make_token(), phone), "forbidden")
    await operator.call_refused("unknown_recipient", "network.revoke_token", args)
    await operator.call_refused("unknown_recipient", "network.revoke_token", {"agent_id": "zoe", "token_hash": digest})
    await operator.call_refused("invalid_arguments", "network.revoke_token", {"agent_id": "mia", "token_hash": "x"})


async def test_a_login_that_nobody_used_can_be_revoked(node: Node, operator: WireSession) -> None:
    code = await make_login(operator)
    assert await operator.call("network.revoke_token", {"agent_id": "mia"}) == {"revoked": 1}
    await refused(await open_page(node, code, make_token()), "not_authenticated")
    await operator.call_refused("unknown_recipient", "network.revoke_token", {"agent_id": "mia"})


async def test_a_code_is_good_for_its_own_id_and_kind_and_a_refusal_uses_nothing_up(
    node: Node, operator: WireSession
) -> None:
    await node.agent("alice")
    code, token = await make_login(operator), make_token()
    await refused(await open_page(node, code, token, "bob"), "not_authenticated")
    await refused(await open_page(node, code, token, "alice", "agent"), "not_authenticated")
    await refused(await open_page(node, code, token, "mia", "service"), "forbidden")
    await refused(await open_page(node, code, code), "invalid_frame")
    await refused(await open_page(node, code, "short"), "invalid_frame")
    await refused(await open_page(node, code, node.token_of("alice")), "not_authenticated")
    bare = await node.connect()
    await bare.send_frame(hello_frame("mia", kind="human", token=code))
    assert "new_token" in await refused(bare, "not_authenticated")
    tokenless = await node.connect()
    await tokenless.send_frame({**hello_frame("mia", kind="human"), "new_token": token})
    await refused(tokenless, "invalid_frame")
    await log_in(node, code, token)


async def test_a_new_token_goes_with_a_login_alone(node: Node, operator: WireSession) -> None:
    """Neither the owner's token nor another participant's token is a login code."""
    await node.invite(operator, "mia")
    for token in (node.owner_token, node.token_of("mia"), make_token()):
        await refused(await open_page(node, token, make_token()), "not_authenticated")


async def test_an_id_with_a_login_is_bound_by_no_first_use(node: Node, operator: WireSession) -> None:
    code = await make_login(operator)
    thief = await node.connect()
    await thief.send_frame(hello_frame("mia", token=make_token()))
    await refused(thief, "not_authenticated")
    await log_in(node, code, make_token())


async def test_a_login_adds_a_token_to_those_that_there_are(node: Node, operator: WireSession) -> None:
    first = await node.invite(operator, "mia")
    await log_in(node, await make_login(operator), make_token())
    await first.send("agent:operator", "still here")
    assert await operator.call("network.revoke_token", {"agent_id": "mia"}) == {"revoked": 2}


@pytest.mark.parametrize(
    "args",
    [
        {"agent_id": "mia", "login_hash": "short"},
        {"agent_id": "Mia", "login_hash": digest("x")},
        {"agent_id": "mia", "login_hash": digest("x"), "kind": "agent"},
        {"agent_id": "alice", "login_hash": digest("x")},
        {"agent_id": "network", "login_hash": digest("x")},
        {"agent_id": "gone", "login_hash": digest("x")},
        {"agent_id": "mia", "login_hash": digest("x"), "ttl_ms": 999},
        {"agent_id": "mia", "login_hash": digest("x"), "ttl_ms": 86_400_001},
        {"agent_id": "mia", "login_hash": digest("known")},
    ],
    ids=repr,
)
async def test_a_wrong_login_is_not_made(node: Node, operator: WireSession, args: dict[str, Any]) -> None:
    await node.agent("alice")
    await node.person("gone")
    await operator.call("network.remove", {"agent_id": "gone"})
    await operator.call("network.create_login", {"agent_id": "ann", "login_hash": digest("known")})
    await operator.call_refused("invalid_arguments", "network.create_login", args)


async def test_only_operators_make_logins_and_are_warned_of_ids_that_pass_for_others(
    node: Node, operator: WireSession
) -> None:
    zoe = await node.invite(operator, "zoe")
    args = {"agent_id": "operat0r", "login_hash": digest(make_token())}
    await zoe.call_refused("forbidden", "network.create_login", args)
    assert "operator" in (await operator.call("network.create_login", args))["warning"]


def test_a_login_ends_at_its_time() -> None:
    state, key, new = State(stamp=999), digest("code"), digest("new")
    state.apply_writes([TableWrite("login", key, Login("mia", "human", expires_at=1000))])
    hello = HelloFrame(protocol=1, agent_id="mia", kind="human", token="code", new_token="n" * 43)
    join = Join("s", hello, key, Peer(is_page=True), is_owner=False, new_hash=new)
    assert identify(state, join, (), "closed").login is not None
    state.stamp = 1000
    with pytest.raises(NotAuthenticated, match="time is over"):
        identify(state, join, (), "closed")


async def test_logins_are_bounded_and_those_whose_time_is_over_leave_room() -> None:
    """The network runs in memory with a manual clock, which advances by one second."""
    now = [1_000_000]
    async with Network.open(clock=lambda: now[0]) as network:
        operator = await network.join("operator", kind="human")
        for number in range(MAX_LOGINS):
            args = {"agent_id": "mia", "login_hash": digest(str(number)), "ttl_ms": 1000}
            await operator.call("network.create_login", args)
        late = {"agent_id": "ann", "login_hash": digest("ann")}
        with pytest.raises(Forbidden, match=str(MAX_LOGINS)):
            await operator.call("network.create_login", late)
        now[0] += 1000
        assert (await operator.call("network.create_login", late))["expires_at"] == now[0] + 600_000
        assert network.hub.state.count("login") == 1
