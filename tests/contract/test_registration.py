"""Tests of first-use binding of IDs by source address, and of connections through a proxy. docs/operations.md,
"Tokens" and "Behind a proxy".
"""

from __future__ import annotations

import hashlib
import socket as sockets
from collections.abc import Mapping
from urllib.parse import urlsplit

import pytest
from websockets.asyncio.client import connect
from websockets.datastructures import Headers
from websockets.typing import Subprotocol

from roundelay.network.hub.handshakes import read_forwarded_address
from tests.support.node import Node, running_node
from tests.support.wire import Frame, WireSession, expect_error, hello_frame, make_token

PLACES = 8
PATIENT = {"max_unauthenticated": PLACES, "hello_timeout_ms": 60_000}
FORWARDED = {"X-Forwarded-For": "10.0.0.1"}


async def refused(session: WireSession, agent_id: str = "alice") -> Frame:
    """Return the error for a newcomer with its own token. The hub closes the connection with 4401."""
    await session.send_frame(hello_frame(agent_id, token=make_token()))
    error = expect_error(await session.next_frame(), "not_authenticated")
    assert await session.closed() == 4401
    return error


async def open_from(url: str, address: str, headers: Mapping[str, str]) -> WireSession:
    """Open a connection from a given loopback address."""
    parts = urlsplit(url)
    sock = sockets.create_connection((parts.hostname, parts.port), source_address=(address, 0))
    return WireSession(
        await connect(
            url, sock=sock, subprotocols=[Subprotocol("roundelay.v1")], compression=None, proxy=None,
            additional_headers=dict(headers), ping_interval=None, close_timeout=1,
        )
    )  # fmt: skip


async def test_where_registration_is_closed_an_operator_makes_each_token() -> None:
    async with running_node(registration="closed") as node:
        error = await refused(await node.connect())
        assert "registration: closed" in error["message"]
        assert "roundelay token create alice" in error["message"]
        mia = await node.person("mia")
        digest = hashlib.sha256(node.token_of("alice").encode()).hexdigest()
        await mia.call("network.create_token", {"agent_id": "alice", "kind": "agent", "token_hash": digest})
        await node.agent("alice")


async def test_where_registration_is_open_whoever_comes_binds_an_id_but_a_page_in_a_browser() -> None:
    async with running_node(registration="open") as node:
        far = await node.connect(headers=FORWARDED)
        await far.hello("alice", token=make_token())
        assert "browser" in (await refused(await node.connect(origin=node.origin), "bob"))["message"]
        taken = await node.connect(headers=FORWARDED)
        await refused(taken)


@pytest.mark.parametrize(
    "headers",
    [{"Via": "1.1 cache"}, {"X-Forwarded-Port": "443"}, {"x-forwarded-server": "front"}, {"X-Real-IP": "10.0.0.1"}],
    ids=lambda headers: next(iter(headers)),
)
async def test_what_tells_of_a_proxy_makes_a_connection_not_local(node: Node, headers: dict[str, str]) -> None:
    error = await refused(await node.connect(headers=headers))
    assert "registration: local" in error["message"]


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("hub.example.org", False), ("10.0.0.1:8700", False), ("localhost.example.org", False), ("127.0.0.1.example.org", False),
        ("localhost:8700", True), ("127.0.0.2", True), ("[::1]:8700", True), ("hub.localhost", True),
    ],
)  # fmt: skip
async def test_a_request_for_another_host_is_not_local(node: Node, host: str, is_local: bool) -> None:
    """A proxy that adds no header may forward the requested host name. A browser with a false DNS answer also sends
    another name.
    """
    parts = urlsplit(node.url)
    socket = await connect(
        f"ws://{host}/", host=parts.hostname, port=parts.port, subprotocols=[Subprotocol("roundelay.v1")], proxy=None
    )
    session = WireSession(socket)
    node.sessions.append(session)
    if is_local:
        await session.hello("alice", token=make_token())
    else:
        await refused(session)


async def test_behind_a_proxy_nothing_is_local() -> None:
    """A proxy on this machine may add no header at all, so a connection that looks local is not trusted."""
    async with running_node(behind_proxy=True) as node:
        assert "behind_proxy" in (await refused(await node.connect()))["message"]
        await refused(await node.connect(headers=FORWARDED))
        await node.person("mia")  # a token is valid from anywhere


async def test_behind_a_proxy_one_address_takes_the_places_of_no_other() -> None:
    """A client can invent every address before the last hop."""
    async with running_node(behind_proxy=True, limits=PATIENT) as node:
        quiet = await node.connect(headers={"X-Forwarded-For": "10.9.9.9, 10.0.0.1"})
        loud = [
            await node.connect(headers={"X-Forwarded-For": f"10.1.1.{number}, 10.9.9.9"})
            for number in range(2 * PLACES)
        ]
        assert await loud[0].closed() == 4408
        await quiet.hello("mia", kind="human", token=node.owner_token)


async def test_where_no_proxy_is_nobody_chooses_its_address() -> None:
    async with running_node(limits=PATIENT) as node:
        quiet = await open_from(node.url, "127.0.0.2", {})
        node.sessions.append(quiet)
        loud = [await node.connect(headers={"X-Forwarded-For": f"10.1.1.{number}"}) for number in range(2 * PLACES)]
        assert await loud[0].closed() == 4408
        await quiet.hello("mia", kind="human", token=node.owner_token)


@pytest.mark.parametrize(
    ("lines", "address"),
    [
        (["10.0.0.1"], "10.0.0.1"), (["1.1.1.1, 10.0.0.1"], "10.0.0.1"), (["1.1.1.1", "2.2.2.2 ,10.0.0.1"], "10.0.0.1"),
        (["10.0.0.1:4711"], "10.0.0.1"), (["2001:db8::1"], "2001:db8::1"), (["[2001:db8::1]:4711"], "2001:db8::1"),
        ([], None), ([""], None), (["10.0.0.1,"], None), (["unknown"], None), (["10.0.0.1, _hidden"], None),
    ],
)  # fmt: skip
def test_the_last_hop_names_the_address(lines: list[str], address: str | None) -> None:
    assert read_forwarded_address(Headers([("X-Forwarded-For", line) for line in lines])) == address
