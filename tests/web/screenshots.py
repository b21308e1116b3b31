"""Take pictures of each screen in both themes, for docs/pictures: ``python -m tests.web.screenshots [FOLDER]``.

The node is real, with the demo's team, an agent that asks for an approval, and one that is in the middle of a
sentence. Look at each picture before you commit it, because tests miss visual errors.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from playwright.async_api import Browser, Page, async_playwright, expect

from roundelay.demo.play import QUESTION
from tests.support.fake_openai import FakeOpenAI, text
from tests.web.browsers import launch
from tests.web.screens import Screen, log_in
from tests.web.team import BANK, DEMO, WebNode, streaming, team_up

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
WIDE, PHONE = {"width": 1120, "height": 700}, {"width": 390, "height": 780}
POEM = "Three things come back:\n\n1. the **tide**\n2. the swallow\n3. `refrain()`, and with it"


async def take_all(folder: Path) -> None:
    ends = asyncio.Event()
    with tempfile.TemporaryDirectory() as work:
        async with (
            FakeOpenAI(lambda body: text(POEM, ends=ends), api_key="key-of-the-tests") as provider,
            team_up(Path(work), [*DEMO, BANK, streaming("poet", provider.base_url)]) as node,
            async_playwright() as playwright,
        ):
            browser = await launch(playwright, "chromium", Path(work))
            why = await fill(node)
            for theme in THEMES:
                await take(browser, node, folder, theme, why, ends)
            await browser.close()


async def fill(node: WebNode) -> int:
    """Create the conversations of mia's morning. Return the seq of the message whose history is shown."""
    async with node.client("ann") as ann, node.client("mia") as mia:
        await mia.call("channels.create", {"name": "tea", "topic": "What to drink, and when"})
        await ann.call("channels.join", {"name": "tea"})
        await ann.post("tea", "Tea is ready. The blue pot is **Earl Grey**, the other one is `rooibos`.")
        await mia.post("tea", "On my way!")
        await ann.send_text("mia", "Can you look over the bill from zoe before noon?", requires_response=True)
        await mia.send_text("desk", QUESTION)
        why = 0
        async for message in mia:
            if message.sender_id == "desk" and "checked its part" in message.text:
                why = message.seq
                break
        await mia.send_text("bank", "pay zoe 45")
        async for message in mia:
            if message.sender_id == "bank":
                break
    return why


async def take(
    browser: Browser, node: WebNode, folder: Path, theme: Literal["light", "dark"], why: int, ends: asyncio.Event
) -> None:
    context = await browser.new_context(color_scheme=theme, viewport=WIDE, locale="en-GB")
    page = await context.new_page()
    await page.goto(node.origin)
    await shoot(page, folder / f"login-{theme}.png")
    await log_in(page, await node.link("mia", operator=True))
    screen = Screen(page)
    places = {
        "inbox": "#/inbox",
        "thread": f"#/thread/{quote('direct:desk~mia', safe='')}",
        "approval": f"#/thread/{quote('direct:bank~mia', safe='')}",
        "channel": f"#/thread/{quote('channel:tea', safe='')}",
        "why": f"#/why/{why}",
        "agents": "#/agents",
        "agent": "#/agents/desk",
        "cost": "#/cost",
        "timeline": "#/timeline",
        "search": "#/search?q=zoe",
    }
    for name, place in places.items():
        await screen.go(place)
        await shoot(page, folder / f"{name}-{theme}.png")
    thread = await screen.open_thread("direct:mia~poet")
    ends.clear()
    await thread.say("Write a poem about things that come back.")
    await expect(thread.live.locator("strong")).to_have_text("tide")
    await shoot(page, folder / f"live-{theme}.png")
    await page.set_viewport_size(PHONE)
    await shoot(page, folder / f"phone-{theme}.png")
    ends.set()
    await expect(thread.live).to_have_count(0)
    await context.close()


async def shoot(page: Page, file: Path) -> None:
    await expect(page.get_by_role("heading", level=1).first).to_be_visible()
    await expect(page.locator(".loading")).to_have_count(0)
    await page.wait_for_load_state("networkidle")
    await page.screenshot(path=file, animations="disabled", caret="hide")


if __name__ == "__main__":
    wanted = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    wanted.mkdir(parents=True, exist_ok=True)
    asyncio.run(take_all(wanted))
