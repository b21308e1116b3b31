"""Tests of operators on the page: they see which agents cannot answer and why, and start, stop and reload them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.support.fake_openai import FakeOpenAI, error, text
from tests.web.conftest import OpenWindow
from tests.web.screens import Screen, log_in
from tests.web.team import team_up

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_broken_key_is_shown_to_operators_and_a_changed_file_is_reloaded(
    tmp_path: Path, open_window: OpenWindow
) -> None:
    async with FakeOpenAI([error(401, "wrong key", code="invalid_api_key"), text("All is well.")]) as server:
        model = {"openai": {"name": "m", "base_url": server.base_url}}
        desk = {"id": "desk", "instruction": "Help.", "model": model}
        async with team_up(tmp_path, agents=[desk]) as team:
            window = await open_window(team.origin)
            page, screen = window.page, Screen(window.page)
            inbox = await log_in(page, await team.link("olga", operator=True))
            async with team.client("tom") as tom:
                await tom.send("agent:desk", "Hello")
                async with tom.receive() as answer:
                    pass
            assert answer.text == "desk cannot answer right now; the operator has been notified."
            item = page.get_by_role("listitem").filter(has_text="desk")
            await expect(item).to_contain_text("its model refuses the key")
            await expect(item).to_contain_text("wrong key")
            await item.get_by_role("link", name="Agent", exact=True).click()
            await expect(page.get_by_role("main")).to_contain_text("cannot answer: its model refuses the key")
            visitor = (await open_window(team.origin)).page
            await log_in(visitor, await team.link("zed"))
            await Screen(visitor).go("#/")
            await expect(visitor.get_by_role("main")).to_contain_text("Cannot answer right now")
            await visitor.close()

            process = page.get_by_role("region", name="Process")
            await expect(process).to_contain_text("running")
            await process.get_by_role("button", name="Stop agent").click()
            await expect(process).to_contain_text("stopped")
            await process.get_by_role("button", name="Start", exact=True).click()
            await expect(process).to_contain_text("running")
            await expect(process.get_by_text(re.compile("has changed"))).to_have_count(0)
            file = tmp_path / "roundelay.yaml"
            file.write_text(file.read_text().replace("Help.", "Help kindly."))
            await screen.go("#/inbox")
            await screen.go("#/agents/desk")
            await expect(process.get_by_text(re.compile("has changed"))).to_be_visible()
            await process.get_by_role("button", name="Reload").click()
            await expect(process.get_by_text(re.compile("has changed"))).to_have_count(0)
            async with team.client("tom") as tom:
                await tom.send("agent:desk", "Again")
                async with tom.receive() as answer:
                    assert answer.text == "All is well."
            await expect(page.get_by_role("main")).not_to_contain_text("refuses the key")
            await screen.go("#/inbox")
            await expect(inbox.heading).to_have_text("Inbox")
            await expect(page.get_by_text("Your inbox is empty")).to_be_visible()
            window.allowed = "ERR_CONNECTION_REFUSED"  # the node stops before the window closes


@pytest.mark.full
async def test_operators_make_a_login_link_for_a_person_and_end_a_login(
    tmp_path: Path, open_window: OpenWindow
) -> None:
    async with team_up(tmp_path) as team:
        window, other = await open_window(team.origin), await open_window(team.origin)
        await log_in(window.page, await team.link("olga", operator=True))
        await log_in(other.page, await team.link("mia"))
        await Screen(window.page).go("#/agents/mia")
        logins = window.page.get_by_role("region", name="Logins")
        await expect(logins).to_contain_text("1 session")
        await logins.get_by_role("button", name="New login link").click()
        link = await logins.get_by_label("Login link for mia").input_value()
        assert link.startswith(f"{team.origin}/#login=mia~")
        third = await open_window(team.origin)
        await third.page.goto(link)
        await Screen(third.page).expect_online()
        await logins.get_by_role("button", name="Log out").first.click()
        await expect(logins.get_by_role("button", name="Log out")).to_have_count(1)
        for it in (window, other, third):
            it.allowed = "ERR_CONNECTION_REFUSED|4403"  # the node stops before the windows close
