"""Tests of the page on a real node, in Chromium and Firefox: logins, a live conversation, an approval, and a hub that
crashes and restarts.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from roundelay.demo.play import QUESTION
from roundelay.network.client import NetworkClient
from tests.crash.test_takeovers import OWNER, ClusterNode, find_leader, follows, running
from tests.support.fake_openai import FakeOpenAI, text
from tests.support.nats import nats_server
from tests.web.browsers import LOST_CONNECTION
from tests.web.conftest import OpenWindow
from tests.web.line import line_to
from tests.web.screens import InboxScreen, LoginPage, Screen, log_in
from tests.web.team import ECHO, WebNode, streaming, team_up

pytestmark = pytest.mark.asyncio(loop_scope="session")
often = pytest.mark.parametrize("browser", ["chromium", pytest.param("firefox", marks=pytest.mark.full)], indirect=True)
"""The marked tests run in Firefox too with ``--full``."""


async def stored_in(page: Page) -> str:
    return str(
        await page.evaluate("JSON.stringify({...localStorage}) + JSON.stringify({...sessionStorage}) + document.cookie")
    )


# -- logging in


@often
async def test_a_link_logs_in_once_and_leaves_the_address_at_once(
    open_window: OpenWindow, shared_team: WebNode
) -> None:
    link = await shared_team.link("lena")
    code = link.partition("~")[2]
    lena = await open_window(shared_team.origin)
    await log_in(lena.page, link)
    assert code not in lena.page.url
    assert [it for it in lena.requested if code in it] == []
    assert code not in await stored_in(lena.page)
    await lena.page.reload()
    await Screen(lena.page).expect_online()

    other = await open_window(shared_team.origin)
    await other.page.goto(link)
    await expect(other.page.get_by_text("This login was used")).to_be_visible()
    await expect(other.page.locator(".myself .dot.online")).to_have_count(0)


async def test_who_logs_out_leaves_nothing_behind(open_window: OpenWindow, shared_team: WebNode) -> None:
    window = await open_window(shared_team.origin)
    await log_in(window.page, await shared_team.link("vera"))
    thread = await Screen(window.page).open_thread("direct:echo~vera")
    await thread.say("my secret")
    await expect(thread.message("You wrote: my secret")).to_be_visible()
    await thread.composer.fill("half a secret")
    await window.page.get_by_role("button", name="Log out").click()
    await window.page.get_by_role("dialog").get_by_role("button", name="Log out").click()
    await expect(LoginPage(window.page).link).to_be_visible()
    assert "secret" not in await window.page.content()
    kept = await stored_in(window.page)
    assert "secret" not in kept
    assert "vera" not in kept

    await log_in(window.page, await shared_team.link("walt"))
    await Screen(window.page).open_threads()
    await expect(window.page.get_by_role("heading", name="Threads", exact=True)).to_be_visible()
    assert "secret" not in await window.page.content()
    assert "vera" not in await window.page.content()


# -- conversations


@often
@pytest.mark.parametrize("gives", ["return null", "throw new DOMException('denied', 'SecurityError')"])
@pytest.mark.full
async def test_a_browser_that_keeps_nothing_shows_the_page_until_it_is_left(
    open_window: OpenWindow, shared_team: WebNode, gives: str
) -> None:
    window = await open_window(shared_team.origin)
    await window.page.add_init_script(
        f"Object.defineProperty(window, 'localStorage', {{configurable: true, get() {{ {gives}; }}}})"
    )
    await window.page.goto(await shared_team.link("nemo"))  # the link still works after the warning
    await expect(window.page.get_by_role("alert")).to_contain_text("This browser stores nothing")
    await window.page.get_by_role("button", name="Log in").click()
    thread = await Screen(window.page).open_thread("direct:echo~nemo")
    await thread.say("is this kept?")
    await expect(thread.message("You wrote: is this kept?").last).to_be_visible()
    await window.page.get_by_role("button", name="Log out").click()
    await window.page.get_by_role("dialog").get_by_role("button", name="Log out").click()
    await expect(LoginPage(window.page).link).to_be_visible()


@pytest.mark.full
async def test_the_demos_conversation_is_seen_live(
    open_window: OpenWindow, shared_team: WebNode, browser_name: str
) -> None:
    person = f"zoe-{browser_name}"
    zoe = await open_window(shared_team.origin)
    await log_in(zoe.page, await shared_team.link(person))
    thread = await Screen(zoe.page).open_thread("direct:" + "~".join(sorted(["desk", person])))
    await thread.say(QUESTION)
    await expect(thread.live.filter(has_text="desk")).to_be_visible()
    await expect(thread.message(re.compile("391.*roundelay.*checked its part", re.DOTALL))).to_be_visible()
    await expect(thread.live).to_have_count(0)
    assert await thread.message("What is 17").count() == 1


@often
async def test_an_answer_is_seen_while_it_is_written(open_window: OpenWindow, tmp_path: Path) -> None:
    ends = asyncio.Event()
    said = "# A poem\n\nRoses are **red**, and so on."
    async with (
        FakeOpenAI(lambda body: text(said, ends=ends), api_key="key-of-the-tests") as provider,
        team_up(tmp_path, [streaming("poet", provider.base_url)]) as node,
    ):
        mia = await open_window(node.origin)
        await log_in(mia.page, await node.link("mia"))
        thread = await Screen(mia.page).open_thread("direct:mia~poet")
        await thread.say("A poem, please.")
        await expect(thread.live.locator("strong")).to_have_text("red")
        assert await thread.message("Roses").count() == 1
        ends.set()
        await expect(thread.live).to_have_count(0)
        await expect(thread.message("Roses").locator("strong")).to_have_text("red")
        assert await thread.message("Roses").count() == 1
        await mia.leave()


# -- approvals


@often
@pytest.mark.full
async def test_of_two_people_who_decide_one_approval_one_wins_and_both_see_it(
    open_window: OpenWindow, shared_team: WebNode, browser_name: str
) -> None:
    names = [f"{it}-{browser_name}" for it in ("ann", "mia")]
    inboxes: list[InboxScreen] = []
    async with AsyncExitStack() as stack:
        for name in names:
            client = await stack.enter_async_context(shared_team.client(name))
            await client.call("channels.join", {"name": "bills"})
            inboxes.append(await log_in((await open_window(shared_team.origin)).page, await shared_team.link(name)))
        asked = await client.post("bills", f"@bank pay {browser_name} 5")
        items = [it.item(browser_name) for it in inboxes]
        await asyncio.gather(*(expect(it.place).to_be_visible() for it in items))
        await asyncio.gather(items[0].approve(), items[1].approve())
        await asyncio.gather(*(expect(it.place).to_have_count(0) for it in items))
        shown = []
        for inbox in inboxes:
            thread = await inbox.open_thread(f"thread:{asked.seq}")
            await expect(thread.message(f"5 paid to {browser_name}")).to_have_count(1)
            shown.append(
                await thread.page.get_by_text(re.compile("^approved once by"))
                .or_(thread.page.locator(".decided"))
                .inner_text()
            )
        assert shown[0] == shown[1]
        assert sum(name in shown[0] for name in names) == 1
        history = await client.history(f"thread:{asked.seq}")
    assert [it.text for it in history.messages].count(f"5 paid to {browser_name}") == 1


# -- lost connections


@often
async def test_a_hub_that_is_killed_loses_neither_draft_nor_message(open_window: OpenWindow, tmp_path: Path) -> None:
    async with team_up(tmp_path, [ECHO]) as node:
        mia = await open_window(node.origin)
        mia.allowed = LOST_CONNECTION
        await log_in(mia.page, await node.link("mia"))
        thread = await Screen(mia.page).open_thread("direct:echo~mia")
        await thread.say("before")
        await expect(thread.message("You wrote: before")).to_be_visible()
        await node.kill()
        await thread.expect_offline()
        await thread.say("meanwhile")
        await expect(thread.message("meanwhile")).to_be_visible()
        await thread.composer.fill("not yet said")
        await node.start()
        await expect(thread.message("You wrote: meanwhile")).to_be_visible()
        await thread.expect_online()
        await expect(thread.composer).to_have_value("not yet said")
        await expect(thread.messages.get_by_text("meanwhile", exact=True)).to_have_count(1)
        await thread.composer.press("Enter")
        await expect(thread.message("You wrote: not yet said")).to_be_visible()
        async with node.client("mia") as client:
            said = [it.text for it in (await client.history("direct:echo~mia")).messages if it.sender_id == "mia"]
        assert said == ["before", "meanwhile", "not yet said"]
        await mia.leave()


@often
@pytest.mark.full
async def test_a_page_of_a_node_that_follows_reads_and_writes_once_that_leads(
    open_window: OpenWindow, tmp_path: Path
) -> None:
    async with nats_server(tmp_path / "nats") as server:
        made = [ClusterNode(tmp_path / "nodes", name, server.url("lab")) for name in ("leads", "follows")]
        async with running(made[:1]) as [leader]:
            await find_leader([leader])
            follower = made[1]
            await follower.start("--web")
            try:
                await follows(follower)
                async with NetworkClient("mia", leader.url, kind="human", token=OWNER) as at_leader:
                    await at_leader.broadcast("said before")
                    mia = await open_window(f"http://127.0.0.1:{follower.port}")
                    mia.allowed = rf"{LOST_CONNECTION}|503"
                    login = json.dumps({"agent_id": "mia", "token": OWNER})
                    await mia.page.add_init_script(
                        f"if (location.port) localStorage['roundelay.login'] = JSON.stringify({login})"
                    )
                    await mia.page.goto(f"{mia.origin}/#/thread/broadcast")
                    bar = mia.page.get_by_role("status").get_by_text("This node is a read replica")
                    await expect(bar).to_have_text(re.compile(r"as of \d+:\d\d:\d\d"))
                    told = mia.page.get_by_role("status").get_by_role("link")
                    await expect(told).to_have_attribute("href", f"http://127.0.0.1:{leader.port}/")
                    messages = mia.page.get_by_role("main")
                    await expect(messages.get_by_text("said before")).to_be_visible()
                    await at_leader.broadcast("said meanwhile")
                    await expect(messages.get_by_text("said meanwhile")).to_be_visible()
                    before = await bar.text_content()
                    await expect(bar).not_to_have_text(before or "", timeout=15_000)
                    composer = mia.page.get_by_role("textbox", name="Message")
                    await expect(composer).to_have_count(0)
                await leader.end()
                await expect(composer).to_be_visible(timeout=20_000)
                await expect(bar).to_have_count(0)
                await composer.fill("said by the page")
                await composer.press("Enter")
                async with NetworkClient("yuri", follower.url, kind="human", token=OWNER) as yuri, asyncio.timeout(10):
                    while "said by the page" not in [  # noqa: ASYNC110 (nothing tells of it here)
                        it.text for it in (await yuri.history("broadcast")).messages
                    ]:
                        await asyncio.sleep(0.05)
                await mia.leave()
            finally:
                await follower.end()


@often
@pytest.mark.full
async def test_a_page_that_was_offline_for_a_minute_has_what_was_said(
    open_window: OpenWindow, shared_team: WebNode, browser_name: str
) -> None:
    person = f"otto-{browser_name}"
    thread_id = "direct:" + "~".join(sorted(["olga", person]))
    async with line_to(shared_team.url) as line, shared_team.client("olga") as olga:
        otto = await open_window(line.origin)
        otto.allowed = LOST_CONNECTION
        await otto.page.clock.install()
        link = await shared_team.link(person)
        await log_in(otto.page, link.replace(shared_team.origin, line.origin))
        thread = await Screen(otto.page).open_thread(thread_id)
        await olga.send_text(person, "one")
        await expect(thread.message("one")).to_be_visible()
        await line.cut()
        await thread.expect_offline()
        for number in range(3):
            await olga.send_text(person, f"while you were away {number}")
        await thread.say("I am away")
        await otto.page.clock.fast_forward(60_000)
        await line.mend()
        await otto.page.clock.fast_forward(60_000)
        await expect(thread.message("while you were away")).to_have_count(3)
        await expect(thread.message("I am away")).to_have_count(1)
        await thread.expect_online()
        await otto.leave()
        said = [it.text for it in (await olga.history(thread_id)).messages]
    assert sorted(said) == sorted(["one", *(f"while you were away {it}" for it in range(3)), "I am away"])
