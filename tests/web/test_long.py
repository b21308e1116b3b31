"""Tests of a long thread: the page holds a window of it, and can scroll through all of it."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from playwright.async_api import WebSocketRoute, expect

from tests.support.counts import Note
from tests.web.conftest import OpenWindow
from tests.web.screens import log_in
from tests.web.team import WebNode

pytestmark = pytest.mark.asyncio(loop_scope="session")
MAX_NODES = 6_000
"""Maximum number of nodes in the document: enough for some dozens of messages, but not for all."""
WATCH = """() => {
  globalThis.longFrames = [];
  new PerformanceObserver((list) => { for (const it of list.getEntries()) globalThis.longFrames.push(Math.round(it.duration)); })
    .observe({type: "long-animation-frame"});
}"""
SCROLL = """async (log) => {
  const frame = () => new Promise((it) => requestAnimationFrame(it));
  let most = 0, still = 0;
  for (let steps = 0; steps < 4000 && still < 40; steps++) {
    const before = log.scrollTop;
    log.scrollTop -= log.clientHeight * 0.9;
    await frame();
    most = Math.max(most, document.getElementsByTagName("*").length);
    if (log.textContent.includes("message 0 of")) break;
    still = log.scrollTop === before ? still + 1 : 0;
    if (still) await new Promise((it) => setTimeout(it, 50));
  }
  return most;
}"""


@pytest.mark.parametrize("messages", [500, pytest.param(5000, marks=pytest.mark.full)])
async def test_a_long_thread_is_scrolled_to_its_beginning(
    open_window: OpenWindow, shared_team: WebNode, note: Note, messages: int
) -> None:
    window = await open_window(shared_team.origin)
    async with shared_team.client(f"lang-{messages}") as lang, shared_team.client(f"long-{messages}") as other:
        await lang.call("channels.create", {"name": f"long-{messages}"})
        await other.call("channels.join", {"name": f"long-{messages}"})
        await asyncio.gather(
            *(
                other.post(
                    f"long-{messages}", f"message {number} of **{messages}**: `code` and [a link](https://example.org)"
                )
                for number in range(messages)
            )
        )
    inbox = await log_in(window.page, await shared_team.link(f"lang-{messages}"))
    thread = await inbox.open_thread(f"channel:long-{messages}")
    await expect(thread.message(f"message {messages - 1} of")).to_be_visible()
    await window.page.evaluate(WATCH)
    most = await thread.log.evaluate(SCROLL)
    await expect(thread.message("message 0 of")).to_be_visible()
    longest = sorted(await window.page.evaluate("globalThis.longFrames"))[-5:]
    note(elements_at_most=most, frames_above_50_ms=longest)
    assert most < MAX_NODES


@pytest.mark.full
async def test_earlier_messages_come_also_where_the_first_try_was_refused(
    open_window: OpenWindow, shared_team: WebNode
) -> None:
    window = await open_window(shared_team.origin)
    async with shared_team.client("lara") as lara, shared_team.client("lord") as lord:
        await lara.call("channels.create", {"name": "tall"})
        await lord.call("channels.join", {"name": "tall"})
        await asyncio.gather(*(lord.post("tall", f"message {number} of 200") for number in range(200)))
    refused = list[str]()

    def pass_on(route: WebSocketRoute) -> None:
        hub = route.connect_to_server()

        def ask(frame: str | bytes) -> None:
            call = json.loads(frame)
            if call.get("op") == "network.history" and "before" in call["args"] and not refused:
                refused.append(call["call_id"])
                told = {"code": "overloaded", "message": "Later.", "retry_after_ms": 1, "call_id": call["call_id"]}
                route.send(json.dumps({"type": "error", **told}))
            else:
                hub.send(frame)

        route.on_message(ask)

    await window.page.route_web_socket(re.compile("."), pass_on)
    inbox = await log_in(window.page, await shared_team.link("lara"))
    thread = await inbox.open_thread("channel:tall")
    await expect(thread.message("message 199 of")).to_be_visible()
    async with asyncio.timeout(20):
        while not refused:
            await thread.log.evaluate("log => new Promise((it) => { log.scrollTop = 0; requestAnimationFrame(it); })")
    await expect(thread.log).to_contain_text("This is the beginning of")  # nobody scrolls again
    assert refused
