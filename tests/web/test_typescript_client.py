"""Test of the built TypeScript client in a bare page: packed modules, without a bundler, an import map or
dependencies.

A proxy serves the page and the node under one name and port, as users' proxies do. A node refuses sessions of pages
with another origin.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.node import running_node
from tests.support.typescript import CLIENT, use_client
from tests.web.conftest import OpenWindow

pytestmark = pytest.mark.asyncio(loop_scope="session")
TYPES = {".js": "text/javascript", ".html": "text/html"}


@asynccontextmanager
async def page_beside(url: str, built: Path) -> AsyncIterator[str]:
    """Serve the example's page, with the node on the same port. Yield the page's address."""
    target = urlsplit(url)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split()[1].decode()
        if path.startswith("/own/"):
            page = CLIENT / "examples" / "page.html"
            file = page if path.endswith(".html") else built / path.removeprefix("/own/roundelay/")
            body = file.read_bytes()
            kind = f"Content-Type: {TYPES[file.suffix]}\r\nContent-Length: {len(body)}\r\nConnection: close"
            writer.write(f"HTTP/1.1 200 OK\r\n{kind}\r\n\r\n".encode() + body)
            writer.close()
            return
        node_reader, node_writer = await asyncio.open_connection(target.hostname, target.port)
        node_writer.write(head)
        await asyncio.gather(pump(reader, node_writer), pump(node_reader, writer))

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_it_sends_and_receives_in_a_bare_page(
    open_window: OpenWindow, tmp_path_factory: pytest.TempPathFactory
) -> None:
    built = use_client(tmp_path_factory) / "node_modules" / "roundelay-client" / "dist"
    async with running_node() as node, page_beside(node.url, built) as origin:
        host = await node.person("host")
        await node.invite(host, "mia")
        bob = await node.agent("bob")
        window = await open_window(origin)
        await window.page.goto(f"{origin}/own/chat.html")
        await window.page.fill("#id", "mia")
        await window.page.fill("#token", node.tokens["mia"])
        await window.page.click("#join button")
        await window.page.fill("#to", "agent:bob")
        await window.page.fill("#text", "17 and 23?")
        await window.page.click("#say button")
        asked = (await bob.expect("deliver"))["message"]
        assert (asked["sender_id"], asked["content"]) == ("mia", "17 and 23?")
        await bob.send("agent:mia", "<b>40</b>", reply_to=asked["seq"], cause=asked["seq"])
        await window.page.get_by_text("bob: <b>40</b>").wait_for()
        assert [it for it in window.requested if it.startswith("ws")] == [f"{origin.replace('http', 'ws')}/"]
        await window.leave()
