"""Tests of clients that a node refers to another node: where they connect, and where they do not. docs/protocol.md."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from roundelay.commands.options import check_url
from roundelay.network.client import NetworkClient, Reconnected, Reconnecting
from roundelay.network.errors import ConfigError, ConnectError, NotAuthenticated
from roundelay.network.home import expand_url, token_path
from roundelay.network.tls import server_context
from tests.support.certificates import make_certificate
from tests.support.nats import free_port
from tests.support.node import Node, running_node
from tests.support.wire import make_token


@asynccontextmanager
async def follower(*leaders: str) -> AsyncIterator[tuple[str, list[str]]]:
    """Run a node that refuses each connection and names one leader after the other. Yield the node's URL and the
    requested paths.
    """
    asked = list[str]()

    def refuse(connection: ServerConnection, request: Request) -> Response:
        asked.append(request.path)
        response = connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "This node does not serve.\n")
        response.headers["Roundelay-Leader"] = leaders[(len(asked) - 1) % len(leaders)]
        return response

    async with serve(lambda _: asyncio.sleep(0), "127.0.0.1", 0, process_request=refuse) as server:
        yield f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}/", asked


async def test_who_is_named_the_one_that_leads_goes_there() -> None:
    async with (
        running_node() as node,
        follower(node.url.removeprefix("ws://").rstrip("/")) as (url, asked),
        NetworkClient("ann", url) as ann,
    ):
        assert (await ann.send_text("ann", "here")).seq
        assert asked == ["/"]


@pytest.mark.parametrize(
    "leader", ["user@127.0.0.1:{port}", "127.0.0.1:{port}/other", "127.0.0.1", "[::1", "a b:1", "x" * 300 + ":1"]
)
async def test_what_is_no_address_is_not_gone_to(leader: str) -> None:
    async with (
        follower("127.0.0.1:1") as (other, asked),
        follower(leader.format(port=other.rpartition(":")[2].rstrip("/"))) as (url, _),
    ):
        with pytest.raises(ConnectError, match="does not serve"):
            async with NetworkClient("mia", url, kind="human", token="t", reconnect=False):
                pass
        assert asked == []


@asynccontextmanager
async def deposed(
    reason: str, tls: ssl.SSLContext | None = None, port: int = 0, epoch: str = "e"
) -> AsyncIterator[tuple[str, list[str]]]:
    """Run a node that welcomes clients. With a ``reason``, it ends each session like a deposed leader. Yield the
    node's URL and the IDs that joined.
    """
    joined = list[str]()

    async def welcome(connection: ServerConnection) -> None:
        hello = json.loads(await connection.recv())
        joined.append(hello["agent_id"])
        who = {name: hello[name] for name in ("agent_id", "kind")}
        network = {"name": "lab", "epoch": epoch}
        frame = {
            "protocol": 1,
            "server": "s",
            "network": network,
            **who,
            "role": "observer",
            "session_id": f"s{len(joined)}",
        }
        place = {"cursor": 0, "head": 0, "resume": "new", "mods": [], "limits": {}}
        await connection.send(json.dumps({"type": "welcome", **frame, **place}))
        if reason:
            await connection.close(4503, reason)
        await connection.wait_closed()

    subprotocols = [Subprotocol("roundelay.v1")]
    async with serve(welcome, "127.0.0.1", port, subprotocols=subprotocols, ssl=tls) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        yield f"{'ws' if tls is None else 'wss'}://127.0.0.1:{port}/", joined


async def read_epoch(node: Node) -> str:
    epoch: str = (await node.person("mia")).welcome["network"]["epoch"]
    return epoch


async def test_who_is_closed_by_a_node_that_leads_no_longer_goes_where_it_says() -> None:
    async with (
        running_node() as node,
        deposed(f"Another node leads now. Roundelay-Leader: {node.url[5:-1]}", epoch=await read_epoch(node)) as (
            url,
            joined,
        ),
        NetworkClient("ann", url) as ann,
    ):
        assert (await ann.send_text("ann", "here")).seq
        assert joined == ["ann"]


async def test_a_node_that_was_named_is_tried_again_when_who_named_it_is_gone(tmp_path: Path) -> None:
    port = free_port()
    async with AsyncExitStack() as stack:
        leading = partial(running_node, port=port, db=tmp_path / "a.db", durability="full")
        async with leading() as node:
            epoch = await read_epoch(node)
        async with deposed(f"Another node leads now. Roundelay-Leader: 127.0.0.1:{port}", epoch=epoch) as (url, _):
            ann = await stack.enter_async_context(NetworkClient("ann", url))
        async with asyncio.timeout(20):
            async for event in ann.events():  # the client has tried the named node, where nobody listens yet
                if isinstance(event, Reconnecting) and f"No hub answers at {url}" in event.reason:
                    break
            await stack.enter_async_context(leading())
            assert (await ann.send_text("ann", "here")).seq
        assert ann.url == f"ws://127.0.0.1:{port}/"


@pytest.mark.parametrize(
    "reason",
    [
        "The hub is stopping; reconnect in a moment.",
        "Roundelay-Leader: user@127.0.0.1:{port}",
        "Roundelay-Leader: 127.0.0.1:{port}/other",
        "Roundelay-Leader: 127.0.0.1:{port} was here",
        "Another node leads now.",
    ],
)
async def test_a_reason_that_ends_with_no_address_leads_nowhere(reason: str) -> None:
    async with (
        follower("127.0.0.1:1") as (other, asked),
        deposed(reason.format(port=other.rpartition(":")[2].rstrip("/"))) as (url, joined),
        NetworkClient("mia", url, kind="human", token="t"),
        asyncio.timeout(20),
    ):
        while len(joined) < 3:  # noqa: ASYNC110 (the other end tells nobody)
            await asyncio.sleep(0.01)
        assert asked == []


async def test_who_came_encrypted_goes_on_encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = make_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not heard.done():
            heard.set_result(await reader.read(1))
        writer.close()

    async with await asyncio.start_server(listen, "127.0.0.1", 0) as plain:
        port = plain.sockets[0].getsockname()[1]
        tls = server_context(certificate, key)
        async with (
            deposed(f"Another node leads now. Roundelay-Leader: 127.0.0.1:{port}", tls) as (url, _),
            NetworkClient("mia", url, kind="human", token="t"),
            asyncio.timeout(20),
        ):
            assert await heard == b"\x16", "a TLS handshake, and no token"


async def test_nodes_that_name_each_other_hold_nobody() -> None:
    ports = [f"127.0.0.1:{number}" for number in range(1, 40)]
    async with follower(*ports) as (url, asked), asyncio.timeout(20):
        with pytest.raises(ConnectError):
            async with NetworkClient("mia", f"{url},ws://127.0.0.1:1/", kind="human", token="t", reconnect=False):
                pass
        assert len(asked) <= 2


# --- several addresses


@pytest.mark.parametrize(
    ("short", "meant"),
    [
        ("roundelay://a,b:8701,[::1]/", "ws://a:8700/,ws://b:8701/,ws://[::1]:8700/"),
        ("roundelays://hub.example.org", "wss://hub.example.org:8700/"),
        ("ws://a:1/,ws://b:2/", "ws://a:1/,ws://b:2/"),
        ("roundelay://a/b", "roundelay://a/b"),
        ("roundelay:///", "roundelay:///"),
    ],
)
def test_a_network_of_several_nodes_has_a_short_address(short: str, meant: str) -> None:
    assert expand_url(short) == meant
    if meant != short:
        assert check_url(short) == meant


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"urls": []}, "got an empty urls"),
        ({"urls": [""]}, "'' is not the address"),
        ({"urls": ["ws://127.0.0.1:1/", "nonsense"]}, "'nonsense' is not the address"),
        ({"url": "ws://127.0.0.1:1/,"}, "'' is not the address"),
        ({"url": "roundelay://127.0.0.1:99999/"}, "99999/' is not the address"),
        ({"url": "ws://127.0.0.1:99999/"}, "99999/' is not the address"),
        ({"url": "http://127.0.0.1/"}, "is not the address"),
    ],
)
def test_what_is_no_address_is_refused_at_once(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        NetworkClient("ann", **given)


def test_what_the_environment_names_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDELAY_URL", "roundelay://127.0.0.1:99999/")
    with pytest.raises(ConfigError, match="is not the address"):
        NetworkClient("ann")


async def test_of_several_addresses_the_client_says_which_one_serves_and_brings_the_same_token_to_each() -> None:
    async with running_node() as node, follower("") as (url, _):
        host = node.url.removeprefix("ws://").rstrip("/")
        other = url.removeprefix("ws://").rstrip("/")
        for named in (
            {"url": node.url},
            {"url": f"roundelay://{other},{host}/"},
            {"urls": [node.url, url]},
            {"url": f"{url},{node.url}"},
        ):
            async with NetworkClient("ann", **named) as ann:  # type: ignore[arg-type]
                assert ann.url == node.url
                assert (await ann.send_text("ann", "here")).seq
        with pytest.raises(ConfigError, match="not both"):
            NetworkClient("ann", url, urls=[url])
        async with follower("") as (third, _):
            with pytest.raises(ConnectError, match=f"Tried before: {url}"):
                async with NetworkClient("ann", f"{url},{third}", reconnect=False):
                    pass


# --- tokens


@pytest.mark.parametrize("is_led_first", [False, True])
async def test_a_token_is_that_of_each_way_to_a_network(is_led_first: bool) -> None:
    async with running_node() as node, follower(node.url.removeprefix("ws://").rstrip("/")) as (url, _):
        for urls in ([url], [node.url]) if is_led_first else ([node.url], [url]):
            async with NetworkClient("ann", urls=urls) as ann:
                assert ann.url == node.url
        for urls in ([node.url], [url], [url, node.url], [node.url, url]):
            async with NetworkClient("ann", urls=urls):
                pass


def list_tokens(agent_id: str) -> list[Path]:
    return sorted(Path(os.environ["ROUNDELAY_HOME"]).glob(f"tokens/*/{agent_id}"))


async def test_what_a_hub_refuses_is_saved_nowhere_and_what_was_saved_is_named() -> None:
    async with running_node() as node, follower(node.url.removeprefix("ws://").rstrip("/")) as (url, _):
        bound = make_token()
        async with NetworkClient("ann", node.url, token=bound):
            pass
        for urls in ([url], [node.url], [url, node.url]):
            with pytest.raises(NotAuthenticated, match=r"No token was saved in .*/tokens/.*/ann\. .* has been deleted"):
                await NetworkClient("ann", urls=urls).connect()
            assert list_tokens("ann") == []
        path = token_path(url, "ann")
        path.parent.mkdir(parents=True)
        path.write_text(f"{make_token()}\n")
        with pytest.raises(NotAuthenticated, match=f"This is not the token of ann.* refused token is in {path}"):
            await NetworkClient("ann", urls=[node.url, url]).connect()
        assert list_tokens("ann") == [path]
        path.write_text(f"{bound}\n")
        async with NetworkClient("ann", url):
            pass
        assert token_path(node.url, "ann").read_text() == f"{bound}\n"


# --- foreign networks


async def read_reasons(client: NetworkClient, wanted: str) -> str:
    """Return the first reconnect reason that contains a text."""
    async with asyncio.timeout(20):
        async for event in client.events():
            assert not isinstance(event, Reconnected)
            if isinstance(event, Reconnecting) and wanted in event.reason:
                return event.reason
    raise AssertionError("it has ended")


@pytest.mark.parametrize("role", ["observer", "reactor"])
async def test_what_was_meant_for_one_network_is_not_sent_to_another(role: Literal["observer", "reactor"]) -> None:
    port = free_port()
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(running_node(name="other"))
        async with running_node(port=port, name="lab") as node:
            ann = NetworkClient("ann", urls=[node.url, other.url], role=role)
            await stack.enter_async_context(ann)
            epoch, fence = ann.welcome.network.epoch, ann.welcome.fence
        sending = asyncio.create_task(ann.send_text("ann", "for the lab"))
        reason = await read_reasons(ann, "another network")
        assert reason == (
            f"{other.url} serves another network (other) than {node.url}. Check the addresses, or connect with a new client."
        )
        assert (ann.welcome.network.epoch, ann.welcome.fence) == (epoch, fence)
        assert not ann.is_connected
        reader = await other.person("reader")
        assert (await reader.call("network.search", {"query": "lab"}))["messages"] == []
        await stack.enter_async_context(running_node(port=port, name="lab"))  # the node's file is lost
        assert (await asyncio.wait_for(sending, 20)).seq
        assert ann.url == node.url
        assert ann.welcome.network.epoch != epoch


async def test_another_network_that_does_not_know_the_token_ends_no_client() -> None:
    port = free_port()
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(running_node(registration="closed"))
        async with running_node(port=port) as node:
            ann = await stack.enter_async_context(NetworkClient("ann", urls=[node.url, other.url]))
        reason = await read_reasons(ann, "another network")
        assert reason.startswith(f"{other.url} serves another network than {node.url}, which accepted ann. ")
        await stack.enter_async_context(running_node(port=port))
        async with asyncio.timeout(20):
            assert (await ann.send_text("ann", "here")).seq
        assert ann.url == node.url


async def test_another_network_keeps_a_client_from_no_node_of_its_own() -> None:
    """The client also tries the node that it was referred to, although another network answers first."""
    port = free_port()
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(running_node(name="other"))
        leader = f"127.0.0.1:{port}"
        async with deposed(f"Another node leads now. Roundelay-Leader: {leader}") as (url, _):
            ann = await stack.enter_async_context(NetworkClient("ann", urls=[url, other.url]))
        await read_reasons(ann, "another network")
        async with deposed("", port=port), asyncio.timeout(20):
            async for event in ann.events():
                if isinstance(event, Reconnected):
                    break
            assert ann.url == f"ws://{leader}/"
