"""Tests of hostile participants: their texts are shown and do nothing, and private texts never reach other people's
browsers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import quote

import pytest
from playwright.async_api import Page, expect

from tests.support.wire import WireSession
from tests.web.browsers import Watched
from tests.web.conftest import OpenWindow
from tests.web.payloads import OBJECTS, TEXTS, arm
from tests.web.screens import Screen, log_in
from tests.web.team import WebNode

pytestmark = pytest.mark.asyncio(loop_scope="session")
often = pytest.mark.parametrize("browser", ["chromium", pytest.param("firefox", marks=pytest.mark.full)], indirect=True)

FOREIGN = """() => [...document.querySelectorAll("*")].flatMap((it) => [
    ...(it.matches("script:not([type=importmap]):not([src^='/web/']), iframe, object, embed, base, meta[http-equiv], link:not([href^='/web/'], [rel=icon])")
        ? [it.outerHTML.slice(0, 200)] : []),
    ...(it.matches("link[rel=icon]") ? [] : [...it.attributes]).filter(({name, value}) => /^on/i.test(name) || name === "srcdoc" || name === "ping"
        || (/^(href|src|action|formaction|data|xlink:href)$/i.test(name) && !/^(#|\\/web\\/|https?:|mailto:|data:image\\/(png|jpeg|gif|webp|avif)|blob:)/i.test(value)))
      .map(({name, value}) => `${it.tagName} ${name}=${value.slice(0, 200)}`)])"""
"""Script for the page that lists every element and attribute that could run code, load data or lead to a place
outside of the page.
"""


class Canary:
    """A server that no page should contact. The server counts its visitors."""

    def __init__(self) -> None:
        self.visits = 0
        self.address = ""

    async def _count(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.visits += 1
        writer.close()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Canary]:
        async with await asyncio.start_server(self._count, "127.0.0.1", 0) as server:
            self.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield self


async def expect_harmless(window: Watched, canary: Canary) -> None:
    assert await window.page.evaluate("globalThis.whatRan ?? []") == []
    assert await window.page.evaluate(FOREIGN) == []
    assert canary.visits == 0
    window.check()


async def write_everywhere(
    mallory: WireSession, trigger: int, person: str, texts: list[str], objects: list[object]
) -> list[int]:
    """Send each payload as a message's text, as a message's data, and in every record of the reaction that sends it.
    Return the seqs.
    """
    seqs = []
    for number, text in enumerate(texts):
        reaction = hashlib.sha256(f"{trigger} {number}".encode()).hexdigest()[:32]
        records = (
            (
                "started",
                {"trigger": trigger, "thread_id": text, "as_of": trigger, "manifest": [trigger], "config_hash": text},
            ),
            (
                "model_reply",
                {
                    "turn": 1,
                    "agent": text,
                    "reply": {
                        "text": text,
                        "model": text,
                        "tool_calls": [{"id": "c", "name": text, "arguments": json.dumps({text: text})}],
                    },
                },
            ),
            ("tool_started", {"turn": 1, "call": 0, "tool": text, "arguments": text}),
            ("tool_result", {"turn": 1, "call": 0, "tool": text, "content": text, "is_error": True}),
        )
        for kind, body in records:
            await record(mallory, reaction, kind, body)
        seqs.append(
            (
                await mallory.send(
                    f"agent:{person}",
                    text,
                    cause=trigger,
                    metadata={
                        "approval": {
                            "reaction": reaction,
                            "tool": text,
                            "arguments": text,
                            "reason": text,
                            "timeout_s": 9e9,
                        }
                    }
                    if number % 2
                    else {
                        "sources": [{"n": 1, "title": text, "url": text}],
                        "follow_ups": [text],
                        "failed_checks": [text],
                    },
                )
            )["seq"]
        )
        await record(mallory, reaction, "finished", {"status": "finished", "reason": text, "turns": 1})
    for it in objects:
        seqs.append((await mallory.send(f"agent:{person}", it, cause=trigger))["seq"])
    return seqs


async def record(session: WireSession, reaction: str, kind: str, body: object) -> None:
    name = f"{reaction}-{kind}"
    await session.send_frame({"type": "record", "record_id": name, "reaction": reaction, "kind": kind, "body": body})
    await session.answer(name)


@often
async def test_what_hostile_participants_write_is_shown_and_runs_nowhere(
    open_window: OpenWindow, shared_team: WebNode, browser_name: str
) -> None:
    canary = Canary()
    person, enemy = f"mia-{browser_name}", f"mallory-{browser_name}"
    thread_id = "direct:" + "~".join(sorted([person, enemy]))
    async with canary.listening():
        texts = [str(arm(it, number, canary.address)) for number, it in enumerate(TEXTS)]
        objects = [arm(it, number, canary.address) for number, it in enumerate(OBJECTS)]
        window = await open_window(shared_team.origin)
        card = {
            "description": texts[7],
            "tags": texts[:20],
            "tools": [*texts[20:30], {"name": texts[31], "description": texts[32]}],
            "model": texts[33],
            texts[7]: texts[7],
        }
        async with shared_team.wire(enemy, card=card) as mallory:
            await log_in(window.page, await shared_team.link(person))
            async with shared_team.client(person) as client:
                trigger = (await client.send_text(enemy, "begin")).seq
            seqs = await write_everywhere(mallory, trigger, person, texts, objects)
            screen = Screen(window.page)
            thread = await screen.open_thread(thread_id)
            await expect(thread.messages.last).to_be_visible()
            await expect(thread.message("javascript:").last).to_be_attached()
            await look_through(window.page)
            await expect_harmless(window, canary)

            async with shared_team.client(person) as client:
                trigger = (await client.send_text(enemy, "and now?")).seq
            await screen.open_inbox()
            await screen.open_thread(thread_id)  # this call returns to the end of the thread
            await expect(thread.message("and now?")).to_be_visible()
            await signal_everything(mallory, thread_id, trigger, texts)
            await expect(thread.live.first).to_be_visible()
            await expect_harmless(window, canary)

            await mallory.call("channels.create", {"name": f"bad-{browser_name}", "topic": texts[7]})
            for seq in (seqs[7], seqs[20], seqs[-1]):
                await screen.go(f"#/why/{seq}")
                await expect(screen.heading).to_be_visible()
                await expect_harmless(window, canary)
            places = ["#/inbox", "#/threads", "#/agents", f"#/agents/{enemy}", "#/cost"]
            places += (
                [f"#/search?q={quote(it)}" for it in texts[:60:6]]
                + [f"#/thread/{quote(it, safe='')}" for it in texts[:60:6]]
                + [f"#/agents/{quote(it, safe='')}" for it in texts[:60:12]]
            )
            for place in places:
                await screen.go(place)
                await expect(window.page.get_by_role("heading", level=1).first).to_be_visible()
                await expect_harmless(window, canary)
    for fragment in (
        "#login=%E0%A4%A~abc",
        "#login=<img src=x onerror=alert(1)>~abc",
        "#/thread/%E0%A4%A",
        "#/<script>alert(1)</script>",
        "#__proto__",
        "#/constructor",
    ):
        await window.page.goto("about:blank")
        await window.page.goto(f"{shared_team.origin}/{fragment}")
        await expect(window.page.get_by_role("heading", level=1).first).to_be_visible()
        await expect_harmless(window, canary)


@pytest.mark.parametrize("browser", ["chromium"], indirect=True)
async def test_a_text_becomes_html_by_no_script_of_the_page_either(
    open_window: OpenWindow, shared_team: WebNode
) -> None:
    window = await open_window(shared_team.origin)
    window.allowed = "TrustedHTML"
    await window.page.goto(shared_team.origin)
    write = "() => { try { document.body.innerHTML = '<p>'; return 'drawn'; } catch (error) { return error.name; } }"
    assert await window.page.evaluate(write) == "TypeError"


async def look_through(page: Page) -> None:
    """Scroll up to the beginning, so that every message is drawn once."""
    log = page.get_by_role("log")
    before = -1
    while (top := await log.evaluate("it => { it.scrollTop -= it.clientHeight; return it.scrollTop }")) != before:
        before = top
        await page.evaluate("() => new Promise(it => requestAnimationFrame(() => requestAnimationFrame(it)))")


async def signal_everything(mallory: WireSession, thread_id: str, trigger: int, texts: list[str]) -> None:
    """Send each payload as a tool's name, in a stream of each kind, as a reaction ID, and in malformed signals."""
    for number, text in enumerate(texts):
        reaction = f"r{number % 4}"
        call = {
            "reaction": reaction,
            "tool": text,
            "active": True,
            "turn": 1,
            "call": number,
            "ok": False,
            "asked": [text],
        }
        pieces = [
            {
                "index": number,
                "turn": 1,
                "kind": kind,
                "at": 0,
                "text": text,
                "tool": text,
                "call": number if kind in ("tool", "progress") else None,
            }
            for kind in ("text", "reasoning", "tool", "progress")
        ]
        pieces = [{name: it for name, it in piece.items() if it is not None} for piece in pieces]
        for kind, body in (
            ("thinking", {"reaction": reaction, "active": True}),
            ("tool", call),
            ("delta", {"reaction": reaction, "pieces": pieces}),
            ("typing", {"active": text}),
            ("viewing", {"active": text}),
        ):
            await mallory.send_frame(
                {"type": "signal", "thread_id": thread_id, "trigger": trigger, "kind": kind, "body": body}
            )


# -- private


@often
@pytest.mark.full
async def test_a_private_thread_is_nowhere_in_another_persons_browser(
    open_window: OpenWindow, shared_team: WebNode, browser_name: str
) -> None:
    ann, bob, eve = (f"{it}-{browser_name}" for it in ("anna", "bobo", "evil"))
    secret, thread_id = f"moonlight-{browser_name}", f"direct:{ann}~{bob}"
    window = await open_window(shared_team.origin)
    frames: list[str] = []
    window.page.on("websocket", lambda socket: socket.on("framereceived", lambda frame: frames.append(str(frame))))
    inbox = await log_in(window.page, await shared_team.link(eve))
    async with shared_team.client(ann) as one, shared_team.client(bob) as other:
        await one.send_text(bob, f"{secret} at eight?")
        await other.send_text(ann, f"{secret} it is.", requires_response=True)
        await one.send_text("echo", f"say {secret}")
        await one.send_text(eve, "nothing for you")
        threads = await inbox.open_threads()
        await expect(threads.row(ann)).to_be_visible()
        places = [
            "#/inbox",
            "#/agents",
            "#/agents/echo",
            "#/cost",
            f"#/search?q={secret}",
            f"#/thread/{quote(thread_id, safe='')}",
        ]
        for place in places:
            await threads.go(place)
            await expect(window.page.get_by_role("heading", level=1).first).to_be_visible()
            await window.page.wait_for_load_state("networkidle")
            shown = await window.page.content()
            for own in (secret, quote(secret)):  # the person asked for these values herself
                shown = re.sub(rf'value="{own}"|q={own}|“{own}”', "", shown)
            assert secret not in shown.replace(f"direct:{ann}~{bob}", "")
    kept = await window.page.evaluate(
        """async () => JSON.stringify([{...localStorage}, {...sessionStorage}, await indexedDB.databases(), await caches.keys()])"""
    )
    assert secret not in kept
    assert frames == [] or secret not in "".join(frames)
    if browser_name == "chromium":
        assert any(eve in it for it in frames), "frames are seen"
