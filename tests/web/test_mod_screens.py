"""Tests of mods' screens on the page: a board and a document that the page draws from data, including hostile texts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.web.conftest import OpenWindow
from tests.web.screens import Screen, log_in
from tests.web.team import team_up

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOSTILE = '<img src=x onerror="document.title=1"><b>bold</b>'


async def test_a_person_works_with_the_boards_and_documents_of_mods(tmp_path: Path, open_window: OpenWindow) -> None:
    async with team_up(tmp_path, [], mods=["channels", "discovery", "tasks", "notes"]) as node:
        async with node.client("mia") as mia:
            await mia.call("channels.create", {"name": "dev"})
            await mia.call("channels.join", {"name": "dev"})
            await mia.call("tasks.create", {"title": HOSTILE, "body": HOSTILE, "channel": "dev"})
            note = {"name": "plan", "thread_id": "channel:dev", "text": "# Plan\n\nBuy teapots."}
            await mia.call("notes.create", note)
        page = (await open_window(node.origin)).page
        await log_in(page, await node.link("mia"))
        nav, main = page.get_by_role("navigation"), page.get_by_role("main")

        await nav.get_by_role("link", name="Tasks").click()
        await expect(main.get_by_role("button", name=HOSTILE)).to_be_visible()
        await expect(main.locator("b, img")).to_have_count(0)
        await main.get_by_role("button", name="New task").click()
        await page.get_by_label("Title").fill("Fix the pump")
        await page.get_by_role("dialog").get_by_role("button", name="New task").click()
        await main.get_by_role("button", name="Fix the pump").click()
        await page.get_by_role("dialog").get_by_role("button", name="Claim").click()
        claimed = main.locator(".board-column", has=page.get_by_role("heading", name="claimed"))
        await expect(claimed.get_by_role("button", name="Fix the pump")).to_be_visible()

        await nav.get_by_role("link", name="Notes").click()
        await main.get_by_role("button", name="channel:dev/plan").click()
        await page.get_by_role("dialog").get_by_role("button", name="Edit").click()
        await page.get_by_label("Text").fill("# Plan\n\nBuy two teapots.")
        await page.get_by_role("dialog").get_by_role("button", name="Edit").click()
        await main.get_by_role("button", name="channel:dev/plan").click()
        opened = page.get_by_role("dialog")
        await expect(opened.get_by_text("Buy two teapots.")).to_be_visible()
        await opened.get_by_role("button", name="Changes since").nth(1).click()
        await expect(opened.locator("pre")).to_contain_text("-Buy teapots.\n+Buy two teapots.")
        await page.go_back()
        await expect(main.get_by_role("button", name="Fix the pump")).to_be_visible()
        await expect(page.get_by_role("dialog")).to_have_count(0)

        async with node.client("mia") as mia, node.client("tom") as tom:
            asked = await mia.send("agent:tom", "Which pump?", requires_response=["tom"])
            await Screen(page).open_thread("direct:mia~tom")
            await expect(
                main.get_by_role("status").get_by_text(re.compile(r"^Waiting for tom \(\d+ s\)$"))
            ).to_be_visible()
            made = await mia.call("tasks.create", {"title": HOSTILE, "assignee": "tom", "cause": asked.seq})
            await tom.send_text("mia", "The left one.", reply_to=asked.seq, cause=asked.seq)
            await expect(main.get_by_text(f"Waiting for task “{HOSTILE}” of tom")).to_be_visible()
            await tom.call("tasks.complete", {"task": made["task"]})
            await expect(main.get_by_text("All done")).to_be_visible()
        await page.goto("about:blank")  # this call leaves the page before the node stops
