"""A client that is named another node by the one that it knows: where it goes, and where it does not. docs/protocol.md."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

from roundelay.network.client import NetworkClient
from roundelay.network.errors import ConnectError
from tests.support.node import running_node


@asynccontextmanager
async def follower(*leaders: str) -> AsyncIterator[tuple[str, list[str]]]:
    """What refuses each connection, and names one leader after the other; gives its URL, and the paths that were asked for."""
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


async def test_nodes_that_name_each_other_hold_nobody() -> None:
    ports = [f"127.0.0.1:{number}" for number in range(1, 40)]
    async with follower(*ports) as (url, asked), asyncio.timeout(20):
        with pytest.raises(ConnectError):
            async with NetworkClient("mia", f"{url},ws://127.0.0.1:1/", kind="human", token="t", reconnect=False):
                pass
        assert len(asked) <= 2
