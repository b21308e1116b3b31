"""Tests of foreign pages in a real browser: such a page opens no session with a node, reads nothing from it, and
cannot frame it.

One of the pages has a name that DNS points at the node (DNS rebinding), so that Origin and Host agree.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Page, async_playwright

from tests.support.node import Node, running_node
from tests.web.browsers import HOW_TO, find_browser

CONNECT = """address => new Promise(tell => {
  const socket = new WebSocket(address, "roundelay.v1");
  socket.onopen = () => tell("open");
  socket.onerror = () => tell("refused");
})"""
FETCH = "address => fetch(address, {mode: 'no-cors'}).then(it => it.type, () => 'refused')"
FRAME = """address => new Promise(tell => {
  const frame = document.createElement("iframe");
  frame.src = address;
  frame.onload = () => tell(frame.contentDocument === null ? "not ours" : "ours");
  document.body.append(frame);
})"""
ELSEWHERE = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n<!doctype html><title>elsewhere</title><body>"


@asynccontextmanager
async def other_site() -> AsyncIterator[str]:
    """Serve a foreign page on another port of this machine."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ELSEWHERE)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"


@asynccontextmanager
async def browsing() -> AsyncIterator[tuple[Node, Page]]:
    """Run a node, and a browser that resolves evil.example to this machine."""
    path = find_browser("chromium")
    if path is None:
        pytest.skip(HOW_TO)
    flags = ["--disable-gpu", "--host-resolver-rules=MAP evil.example 127.0.0.1"]
    flags += ["--no-sandbox"] if os.geteuid() == 0 else []
    async with running_node() as node, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=flags)
        try:
            yield node, await browser.new_page()
        finally:
            await browser.close()


async def test_a_page_of_another_origin_gets_nothing_of_a_node() -> None:
    async with browsing() as (node, page), other_site() as elsewhere:
        await page.goto(elsewhere)
        assert await page.evaluate(CONNECT, node.url) == "refused"
        assert await page.evaluate(FETCH, f"{node.origin}/") == "refused"
        assert await page.evaluate(FRAME, f"{node.origin}/") == "not ours"
        assert [it.url for it in page.frames[1:]] == ["chrome-error://chromewebdata/"]
        await page.goto(f"{node.origin}/")
        assert await page.evaluate(CONNECT, node.url) == "open", "the node's own page does"


async def test_a_page_whose_name_is_pointed_at_a_node_gets_nothing_of_it() -> None:
    async with browsing() as (node, page):
        place = f"evil.example:{node.origin.rpartition(':')[2]}"
        answer = await page.goto(f"http://{place}/")
        assert answer is not None
        assert answer.status == 421
        assert "web_hosts" in await answer.text()
        assert await page.evaluate(CONNECT, f"ws://{place}/") == "refused"
