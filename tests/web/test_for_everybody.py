"""Tests of the page for people who cannot see, do not use a mouse, have a small screen, or write from right to left."""

from __future__ import annotations

import re
from typing import Any, Literal
from urllib.parse import quote

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, expect

from tests.web.conftest import OpenWindow
from tests.web.screens import InboxScreen, LoginPage, Screen, ThreadScreen, log_in
from tests.web.team import WebNode

pytestmark = pytest.mark.asyncio(loop_scope="session")
ARABIC = "مرحبا، هل يمكنك **مساعدتي** في `code` من فضلك؟"
TABLE = "| a | b |\n|--|--|\n| 1 | " + "wide" * 100 + " |\n\n```python\n" + "x = 1  # " + "long " * 60 + "\n```"


async def prepare(node: WebNode, person: str) -> tuple[str, list[str]]:
    """Fill every screen of this person with content. Return a thread and the addresses of the screens."""
    thread_id = "direct:" + "~".join(sorted(["bank", person]))
    async with node.client(person) as client:
        await client.send_text("bank", "pay zoe 5")
        async for message in client:
            if message.sender_id == "bank":
                break
        await client.send_text("bank", ARABIC)
        last = await client.send_text("bank", TABLE)
        await client.send_text("echo", "# Hello\n\n- one\n- [two](https://example.org)\n\n> three")
    thread = f"#/thread/{quote(thread_id, safe='')}"
    places = [
        "#/inbox",
        "#/threads",
        thread,
        f"#/why/{last.seq}",
        f"#/why/{message.seq}",
        "#/agents",
        "#/agents/bank",
        "#/cost",
        "#/timeline",
        "#/search?q=pay",
    ]
    return thread_id, places


async def settle(page: Page) -> None:
    await expect(page.get_by_role("heading", level=1).first).to_be_visible()
    await expect(page.locator(".loading")).to_have_count(0)


def serious(found: Any) -> list[str]:
    return [
        f"{it['impact']}: {it['id']}: {it['help']}: {node['target']} {node['html'][:160]}"
        for it in found.response["violations"]
        if it["impact"] in ("serious", "critical")
        for node in it["nodes"]
    ]


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.full)])
async def test_axe_finds_nothing_serious_on_any_screen(
    open_window: OpenWindow, shared_team: WebNode, theme: Literal["light", "dark"]
) -> None:
    window = await open_window(shared_team.origin, color_scheme=theme)
    await window.page.goto(shared_team.origin)
    await expect(LoginPage(window.page).enter).to_be_visible()
    found = {"#": serious(await Axe().run(window.page))}
    person = f"axel-{theme}"
    inbox = await log_in(window.page, await shared_team.link(person))
    _, places = await prepare(shared_team, person)
    for place in places:
        await inbox.go(place)
        await settle(window.page)
        found[place] = serious(await Axe().run(window.page))
    await inbox.go("#/inbox")  # the search field has the focus, where "?" is a letter
    await settle(window.page)
    await window.page.keyboard.press("?")
    await expect(window.page.get_by_role("dialog")).to_be_visible()
    found["keys"] = serious(await Axe().run(window.page))
    assert {place: them for place, them in found.items() if them} == {}


async def test_everything_is_done_with_the_keyboard_alone(open_window: OpenWindow, shared_team: WebNode) -> None:
    window = await open_window(shared_team.origin)
    page, press = window.page, window.page.keyboard.press
    await page.goto(shared_team.origin)
    await expect(LoginPage(page).link).to_be_visible()
    await tab_to(page, "Login link")
    await page.keyboard.type(await shared_team.link("kim"))
    await press("Enter")
    await Screen(page).expect_online()
    await expect(page.get_by_role("heading", name="Who do you want to talk to?")).to_be_visible()
    await press("g")
    await press("i")
    thread_id, _ = await prepare(shared_team, "kim")

    inbox = InboxScreen(page)
    await expect(inbox.item("pay").place).to_be_visible()
    await page.locator("body").press("g")
    await press("t")
    await expect(page.get_by_role("list", name="Conversations")).to_be_visible()
    await press("j")
    for _ in range(20):
        if "bank" in str(await page.evaluate("document.activeElement.textContent")):
            break
        await press("j")
    await press("Enter")
    thread = ThreadScreen(page)
    await expect(thread.message("pay zoe 5").first).to_be_visible()
    await expect(thread.composer).to_be_focused()
    await press("Escape")
    await press("k")
    await press("r")
    await expect(thread.composer).to_be_focused()
    await page.keyboard.type("from the keyboard")
    await press("Enter")
    await expect(thread.message("from the keyboard")).to_be_visible()
    await press("Escape")
    await press("g")
    await press("i")
    await expect(inbox.items.first).to_be_visible()
    await press("j")
    await tab_to(page, "Approve once")
    await press("Enter")
    await expect(inbox.item("pay").place).to_have_count(0)
    await inbox.open_thread(thread_id)
    await expect(thread.message("5 paid to zoe")).to_be_visible()


async def tab_to(page: Page, name: str) -> None:
    """Press Tab until the element with this name has the focus. The focus must be visible."""
    for _ in range(60):
        await page.keyboard.press("Tab")
        focused = page.locator(":focus")
        told = (
            await focused.evaluate(
                "it => (it.labels?.[0]?.textContent ?? it.getAttribute('aria-label') ?? it.textContent).trim()"
            )
            if await focused.count()
            else ""
        )
        if str(told).startswith(name):
            assert await focused.evaluate(
                "it => { const s = getComputedStyle(it); return s.outlineStyle !== 'none' || s.boxShadow !== 'none' }"
            )
            return
    raise AssertionError(f"Tab does not lead to {name}")


@pytest.mark.parametrize("direction", ["ltr", pytest.param("rtl", marks=pytest.mark.full)])
async def test_nothing_is_wider_than_a_phone(open_window: OpenWindow, shared_team: WebNode, direction: str) -> None:
    window = await open_window(shared_team.origin, viewport={"width": 360, "height": 640})
    person = f"pia-{direction}"
    inbox = await log_in(window.page, await shared_team.link(person))
    _, places = await prepare(shared_team, person)
    await window.page.evaluate("it => { document.documentElement.dir = it }", direction)
    wide = {}
    for place in places:
        await inbox.go(place)
        await settle(window.page)
        width = await window.page.evaluate("document.documentElement.scrollWidth")
        if width > 360:
            wide[place] = width
    assert wide == {}
    thread = await inbox.open_thread("direct:" + "~".join(sorted(["bank", person])))
    await expect(thread.composer).to_be_in_viewport()


@pytest.mark.full
async def test_on_a_phone_no_bar_of_the_timeline_is_out_of_sight(shared_team: WebNode, open_window: OpenWindow) -> None:
    """The rule holds while nobody zooms in."""
    window = await open_window(shared_team.origin, viewport={"width": 360, "height": 640})
    inbox = await log_in(window.page, await shared_team.link("tina", operator=True))
    await prepare(shared_team, "tina")
    await inbox.go("#/timeline")
    place = window.page.get_by_role("region", name="Reactions")
    await expect(place.get_by_role("listitem").first).to_be_visible()
    assert await place.evaluate("it => it.scrollWidth <= it.clientWidth")
    await window.page.get_by_role("button", name="Zoom in").click()
    await expect(window.page.get_by_role("button", name="Zoom out")).to_be_enabled()
    assert await place.evaluate("it => it.scrollWidth > it.clientWidth")


async def test_what_is_written_from_right_to_left_is_shown_so(open_window: OpenWindow, shared_team: WebNode) -> None:
    window = await open_window(shared_team.origin)
    inbox = await log_in(window.page, await shared_team.link("rami"))
    thread_id, _ = await prepare(shared_team, "rami")
    thread = await inbox.open_thread(thread_id)
    for text, direction in (("مرحبا", "rtl"), ("paid|pay zoe", "ltr")):
        shown = thread.messages.locator("p").filter(has_text=re.compile(text)).last
        assert await shown.evaluate("it => getComputedStyle(it).direction") == direction
    await thread.composer.fill(ARABIC)
    assert await thread.composer.evaluate("it => getComputedStyle(it).direction") == "rtl"
