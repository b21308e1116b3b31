"""Tests of the first minute on the page: what a person sees right after login, and what happens to the first typed
words.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from tests.support.fake_openai import FakeOpenAI, text
from tests.web.conftest import OpenWindow
from tests.web.screens import Screen, ThreadScreen, ThreadsScreen, log_in
from tests.web.team import WebNode, streaming, team_up

pytestmark = pytest.mark.asyncio(loop_scope="session")
often = pytest.mark.parametrize("browser", ["chromium", pytest.param("firefox", marks=pytest.mark.full)], indirect=True)

QUESTION = "Can you refund order 17? n/g i, r? /approve"
"""Contains every letter that is a shortcut on another screen."""
WELCOME = "Who do you want to talk to?"


async def enter(page: Page, link: str) -> None:
    """Open a login link, and do nothing else."""
    await page.goto(link)
    await Screen(page).expect_online()


# -- the first screen


@often
async def test_a_newcomer_is_shown_whom_to_talk_to_and_types_at_once(
    shared_team: WebNode, open_window: OpenWindow, browser_name: str
) -> None:
    page = (await open_window(shared_team.origin)).page
    await enter(page, await shared_team.link(f"newt-{browser_name}"))
    await expect(page.get_by_role("heading", level=1, name=WELCOME)).to_be_visible()
    echo = page.get_by_role("main").get_by_role("button", name="echo")
    await expect(echo).to_contain_text("says it again")
    await expect(echo).to_contain_text("Available")
    await echo.click()
    await page.keyboard.type(QUESTION)  # types without waiting, faster than a person
    thread = ThreadScreen(page)
    await expect(thread.composer).to_have_value(QUESTION)
    await page.keyboard.press("Enter")
    await expect(thread.message(f"You wrote: {QUESTION}")).to_be_visible()


@pytest.mark.full
async def test_the_first_screen_is_the_last_conversation(shared_team: WebNode, open_window: OpenWindow) -> None:
    async with shared_team.client("nils") as nils, shared_team.client("noel") as noel, shared_team.client("nico"):
        await nils.send("agent:nico", "the older one")
        await nils.send("agent:noel", "the newer one")
        await noel.send("broadcast", "hello all")
    page = (await open_window(shared_team.origin)).page
    await enter(page, await shared_team.link("nils"))
    await expect(ThreadScreen(page).message("the newer one")).to_be_visible()
    await expect(page).to_have_url(re.compile(r"#/thread/direct%3Anils~noel$"))
    await expect(ThreadScreen(page).composer).to_be_focused()
    await page.goto(f"{shared_team.origin}/#/inbox")  # an address always opens its own screen
    await expect(page.get_by_role("main").get_by_role("heading", level=1)).to_have_text("Inbox")


@pytest.mark.full
async def test_an_operator_is_not_shown_a_conversation_of_others_first(
    shared_team: WebNode, open_window: OpenWindow
) -> None:
    async with shared_team.client("nina") as nina:
        await nina.send("agent:echo", "private")
    page = (await open_window(shared_team.origin)).page
    await enter(page, await shared_team.link("otto", operator=True))
    await expect(page.get_by_role("heading", level=1, name=WELCOME)).to_be_visible()


@pytest.mark.full
async def test_a_second_conversation_with_an_agent_is_a_new_one(shared_team: WebNode, open_window: OpenWindow) -> None:
    async with shared_team.client("nell") as nell:
        await nell.send("agent:echo", "the first one")
    page = (await open_window(shared_team.origin)).page
    await log_in(page, await shared_team.link("nell"))
    await Screen(page).go("#/threads")
    await page.get_by_role("main").get_by_role("button", name="echo").click()
    thread = ThreadScreen(page)
    await thread.say("the second one")
    await expect(thread.message("You wrote: the second one")).to_be_visible()
    await expect(thread.message("the first one")).to_have_count(0)


# -- titles


async def test_conversations_are_called_by_agent_and_first_words(shared_team: WebNode, open_window: OpenWindow) -> None:
    async with shared_team.client("tilda") as tilda:
        await tilda.call("channels.create", {"name": "titles"})
        asked = await tilda.post("titles", "Who has an axe?")
        await tilda.send("channel:titles", "I have", reply_to=asked.seq)
    page = (await open_window(shared_team.origin)).page
    screen = await log_in(page, await shared_team.link("tilda"))
    thread = await screen.open_thread("direct:echo~tilda:c-1")
    await expect(thread.heading).to_have_text("echo · New conversation")
    await thread.say("Can you refund order 17?")
    await expect(thread.heading).to_have_text("echo · Can you refund order 17?")
    await expect(page).to_have_title(re.compile("^(\\(1\\) )?echo · Can you refund order 17\\? · tea$"))
    rows = ThreadsScreen(page)
    await expect(rows.row("echo · Can you refund order 17?")).to_be_visible()
    await expect(rows.row("#titles · Who has an axe?")).to_be_visible()
    await page.get_by_role("button", name="This thread").click()
    await page.get_by_role("menuitem", name="Rename…").click()
    await page.get_by_label("Name (only for you").fill("My refund")
    await page.get_by_role("button", name="Save").click()
    await expect(thread.heading).to_have_text("echo · My refund")
    await expect(rows.row("echo · My refund")).to_be_visible()


# -- channels


async def test_a_channel_is_made_of_any_name_and_managed_on_the_page(
    shared_team: WebNode, open_window: OpenWindow
) -> None:
    async with shared_team.client("nuria") as nuria:
        page = (await open_window(shared_team.origin)).page
        screen = await log_in(page, await shared_team.link("norbert"))
        await screen.go("#/threads")
        await page.get_by_role("button", name="New conversation").first.click()
        await page.get_by_label("To", exact=True).fill("Project Alpha")
        await page.get_by_role("button", name="By invitation").click()
        await page.get_by_role("button", name="Create #project-alpha").click()
        thread = ThreadScreen(page)
        await thread.say("Welcome")
        await expect(thread.message("Welcome")).to_be_visible()
        await expect(thread.heading).to_have_text("#Project Alpha")

        await page.get_by_role("button", name="This thread").click()
        await page.get_by_role("menuitem", name="Members and settings").click()
        dialog = page.get_by_role("dialog")
        await dialog.get_by_label("Invite").and_(dialog.get_by_role("searchbox")).fill("nuria")
        await dialog.get_by_role("button", name="Invite").click()
        await expect(dialog.get_by_text("Invited")).to_be_visible()
        await nuria.join_channel("project-alpha")
        await dialog.get_by_label("Name", exact=True).fill("Project Beta")
        await dialog.get_by_label("Topic").fill("What comes next")
        await dialog.get_by_role("button", name="Save").click()
        await expect(thread.heading).to_have_text("#Project Beta")
        await expect(dialog.get_by_role("list", name="Members")).to_contain_text("nuria")
        await dialog.get_by_role("listitem").filter(has_text="nuria").get_by_role("button", name="Remove").click()
        await expect(dialog.get_by_role("list", name="Members")).not_to_contain_text("nuria")
        [listed] = [it for it in (await nuria.call("channels.list"))["channels"] if it["name"] == "project-alpha"]
        assert (listed["title"], listed["topic"], listed["is_member"]) == ("Project Beta", "What comes next", False)
        await dialog.get_by_role("button", name="Leave #project-alpha").click()
        await expect(page).to_have_url(re.compile("#/threads$"))
    assert await page.evaluate(NAMES) == ["project-alpha", "ubung", "a.b_c", "x", "", ""]


NAMES = """async () => {
  const {makeChannelName} = await import("#ui/channel.js");
  return ["Project Alpha", "  Übung! ", "--A.b_c--", "x".repeat(1), "日本", "…"].map(makeChannelName);
}"""


# -- a takeover


@pytest.mark.full
async def test_a_tap_on_a_phone_asks_before_agents_are_silenced(shared_team: WebNode, open_window: OpenWindow) -> None:
    async with shared_team.client("nele") as nele:
        await nele.send("agent:echo", "hello")
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    page = (await open_window(shared_team.origin, **phone)).page
    thread = await (await log_in(page, await shared_team.link("nele"))).open_thread("direct:echo~nele")
    take = page.get_by_role("button", name="Take over")
    await expect(take).to_have_text("Take over")  # text, and not only an icon
    await take.tap()
    dialog = page.get_by_role("dialog", name="Take over echo?")
    await expect(dialog).to_contain_text("echo will not answer here until you give the thread back or the time is over")
    await dialog.get_by_role("button", name="Cancel").tap()
    await expect(page.get_by_text("You have taken over this thread")).to_have_count(0)
    await take.tap()
    await dialog.get_by_role("button", name="15 minutes").tap()
    await dialog.get_by_role("button", name="Take over").tap()
    await expect(page.get_by_text(re.compile(r"Agents do not answer here until \d\d:\d\d"))).to_be_visible()
    await page.get_by_role("button", name="Give back").tap()
    await expect(take).to_be_visible()
    await thread.open_thread("broadcast")
    await expect(thread.heading).to_have_text("Everybody")
    await expect(take).to_have_count(0)


# -- search


@pytest.mark.full
async def test_a_search_finds_other_forms_and_chooses_by_person_and_day(
    shared_team: WebNode, open_window: OpenWindow
) -> None:
    async with shared_team.client("sissi") as sissi, shared_team.client("sepp") as sepp:
        await sissi.send("agent:sepp", "Two teapots, please")
        await sepp.send("agent:sissi", "A teapot is enough")
    page = (await open_window(shared_team.origin)).page
    await (await log_in(page, await shared_team.link("sissi"))).go("#/search")
    await page.get_by_label("Words to search for").fill("teapot")
    hits = page.get_by_role("list", name="Messages with").get_by_role("listitem")
    await expect(hits).to_have_count(2)
    await expect(hits.last.locator("mark")).to_have_text("teapots")
    await page.get_by_label("From").select_option("sepp")
    await expect(hits).to_have_count(1)
    await expect(hits).to_contain_text("A teapot is enough")
    await expect(page).to_have_url(re.compile("from%3Asepp"))
    await page.get_by_label("Before", exact=True).fill("2020-01-01")
    await expect(page.get_by_text("No messages found")).to_be_visible()


# -- stopped answers


async def test_a_stopped_answer_keeps_its_text_and_says_by_whom(tmp_path: Path, open_window: OpenWindow) -> None:
    ends = asyncio.Event()
    async with (
        FakeOpenAI(lambda body: text("Three things come back:\n\n1. the **tide**\n", ends=ends)) as provider,
        team_up(tmp_path, [streaming("poet", provider.base_url)]) as team,
    ):
        window = await open_window(team.origin)
        page = window.page
        thread = await (await log_in(page, await team.link("tom", operator=True))).open_thread("direct:poet~tom")
        await thread.say("Write a poem")
        await expect(thread.live.locator("strong")).to_have_text("tide")
        await thread.live.get_by_role("button", name="Stop").click()
        stopped = thread.message("Stopped by tom.")
        await expect(stopped.locator("strong")).to_have_text("tide")
        await expect(thread.live).to_have_count(0)
        await page.reload()
        await expect(stopped.locator("strong")).to_have_text("tide")
        await thread.go("#/cost")
        row = page.get_by_role("table").get_by_role("row", name="poet")
        await expect(row).to_be_visible()  # a call without cost would have no row
        await window.leave()


# -- letters as text and as shortcuts


@often
@pytest.mark.full
async def test_what_is_typed_after_opening_a_conversation_is_text(
    shared_team: WebNode, open_window: OpenWindow, browser_name: str
) -> None:
    person = f"nora-{browser_name}"
    async with shared_team.client(person) as nora:
        for name in ("echo", "bank"):
            await nora.send(f"agent:{name}", "hello")
    page = (await open_window(shared_team.origin)).page
    await log_in(page, await shared_team.link(person))
    await Screen(page).open_threads()
    thread = ThreadScreen(page)
    rows = page.get_by_role("list", name="Conversations").get_by_role("link")
    await rows.first.wait_for()
    for opener in ("click", "keys", "focus lost"):
        if opener == "keys":
            await Screen(page).go("#/threads")
            await expect(page).to_have_url(re.compile("#/threads$"))
            await page.get_by_role("heading", level=1, name="Threads").focus()
            await page.keyboard.press("j")
            await page.keyboard.press("Enter")
        else:
            await rows.nth(1).click()
        if opener == "focus lost":
            await expect(thread.composer).to_be_focused()
            await thread.messages.first.click()  # a click to read selects no row
        await page.keyboard.type(QUESTION)
        await expect(thread.composer).to_have_value(QUESTION)
        await expect(page.get_by_role("dialog")).to_have_count(0)
        await thread.composer.fill("")


@pytest.mark.full
async def test_letters_are_shortcuts_on_a_row_that_the_keyboard_chose(
    shared_team: WebNode, open_window: OpenWindow
) -> None:
    async with shared_team.client("nick-2") as nick:
        await nick.send("agent:echo", "hello")
    page = (await open_window(shared_team.origin)).page
    thread = await (await log_in(page, await shared_team.link("nick-2"))).open_thread("direct:echo~nick-2")
    await expect(thread.message("You wrote: hello")).to_be_visible()
    await page.keyboard.press("Escape")
    await page.keyboard.press("k")
    await expect(thread.message(re.compile("^.*hello")).first).to_be_focused()
    await page.keyboard.press("r")
    await expect(page.get_by_text("Replying to")).to_be_visible()
    await expect(thread.composer).to_have_value("")
    await page.keyboard.press("Escape")  # this key leaves the reply to one message
    await page.keyboard.press("Escape")
    await page.keyboard.press("n")
    await expect(page.get_by_role("dialog", name="New conversation")).to_be_visible()


@pytest.mark.full
async def test_a_finger_opens_a_conversation_without_a_keyboard_over_it(
    shared_team: WebNode, open_window: OpenWindow
) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    page = (await open_window(shared_team.origin, **phone)).page
    await enter(page, await shared_team.link("nadia"))
    await page.get_by_role("main").get_by_role("button", name="echo").tap()
    thread = ThreadScreen(page)
    await expect(thread.heading).to_contain_text("echo")
    await expect(thread.heading).to_be_focused()
    await expect(thread.composer).not_to_be_focused()
