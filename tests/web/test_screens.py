"""Tests of all screens except the thread, as a person uses them: threads by keyboard, explanations, agents, cost,
search, login and logout.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from tests.support.agents import cancel
from tests.web.browsers import LOST_CONNECTION
from tests.web.conftest import OpenWindow
from tests.web.screens import InboxScreen, Screen, ThreadsScreen, log_in
from tests.web.team import WebNode, team_up

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def heading(page: Page, text: str) -> None:
    await expect(page.get_by_role("main").get_by_role("heading", level=1)).to_have_text(text)


async def ask_desk(team: WebNode, person: str, question: str = "What is 17*23?") -> int:
    """Ask the demo's team, and return the seq of the complete answer."""
    async with team.client(person) as client:
        await client.send("agent:desk", question)
        async for message in client:
            if message.sender_id == "desk" and message.thread_id.startswith("direct:"):
                return message.seq
    raise AssertionError("desk is silent")


async def test_a_link_logs_in_once_and_stands_nowhere_afterwards(shared_team: WebNode, open_window: OpenWindow) -> None:
    window = await open_window(shared_team.origin)
    await window.page.goto(await shared_team.link("wendy"))
    await Screen(window.page).expect_online()
    assert window.page.url == f"{shared_team.origin}/#/"
    await window.page.reload()
    await InboxScreen(window.page).expect_online()
    await window.page.get_by_role("button", name="Log out").click()
    await window.page.get_by_role("dialog").get_by_role("button", name="Log out").click()
    await expect(window.page.get_by_label("Login link")).to_be_visible()
    assert await window.page.evaluate("localStorage.getItem('roundelay.login')") is None


@pytest.mark.full
async def test_a_used_link_is_refused_in_the_hubs_words(shared_team: WebNode, open_window: OpenWindow) -> None:
    link = await shared_team.link("xenia")
    await log_in((await open_window(shared_team.origin)).page, link)
    second = await open_window(shared_team.origin)
    await second.page.goto(link)
    await expect(second.page.get_by_role("alert")).to_contain_text("link")
    await expect(second.page.get_by_label("Login link")).to_be_visible()
    told = await second.page.get_by_role("main").inner_text()
    assert told.count("roundelay web --as ID") == told.count("roundelay web") == 1
    await expect(second.page.get_by_role("button", name="Try again")).to_have_count(0)


@pytest.mark.full
async def test_a_broken_link_asks_for_another(shared_team: WebNode, open_window: OpenWindow) -> None:
    window = await open_window(shared_team.origin)
    await window.page.goto(f"{shared_team.origin}/#login=%E0%A4%A~abc")
    await expect(window.page.get_by_text("roundelay web").first).to_be_visible()


async def test_what_waits_is_done_with_in_the_inbox(shared_team: WebNode, open_window: OpenWindow) -> None:
    """The person has two windows. A change in one window appears in the other too."""
    here, there = [await open_window(shared_team.origin) for _ in range(2)]
    for window in (here, there):
        await log_in(window.page, await shared_team.link("nora"))
    mine, other = InboxScreen(here.page), InboxScreen(there.page)
    await expect(here.page.get_by_text("Your inbox is empty")).to_be_visible()
    async with shared_team.client("nick") as nick, shared_team.client("nora") as nora:
        await nick.send("agent:nora", "Tea at four?", requires_response=["nora"])
        await nick.send("agent:nora", "Cake?", requires_response=["nora"])
        await nora.send("agent:bank", "pay ann 3")
        await expect(other.items).to_have_count(3)
        await expect(there.page).to_have_title(re.compile(r"^\(3\) Inbox"))
        await mine.item("Cake?").place.get_by_role("button", name="Dismiss").click()
        await expect(other.item("Cake?").place).to_have_count(0)
        await mine.item("pay").deny("Not this month")
        await expect(other.item("pay").place).to_have_count(0)
        await nora.send("agent:nick", "Yes")
        await expect(mine.items).to_have_count(0)
    said = (await (await shared_team.operator()).call("network.history", {"thread_id": "direct:bank~nora"}))["messages"]
    assert any(it["content"] == "/deny Not this month" and it["sender_id"] == "nora" for it in said)


async def test_a_request_that_nobody_waits_for_any_more_says_so(shared_team: WebNode, open_window: OpenWindow) -> None:
    """The notice appears in the window that saw the reaction stop, after a reload, and for an operator."""
    mine, theirs = [(await open_window(shared_team.origin)).page for _ in range(2)]
    await log_in(mine, await shared_team.link("stella"))
    await log_in(theirs, await shared_team.link("oscar", operator=True))
    async with shared_team.client("stella") as stella:
        await stella.send("agent:bank", "pay ann 4")
        cards = []
        for page in (mine, theirs):
            await Screen(page).open_thread("direct:bank~stella")
            cards.append(page.get_by_label("Approval of pay"))
            await expect(cards[-1]).to_contain_text("Expires in 7 d")
        await expect(theirs.get_by_role("button", name="Approve once")).to_have_count(0)
        await cancel(stella, thread_id="direct:bank~stella")
        for card in cards:
            await expect(card).to_contain_text("No longer needed")
            await expect(card.get_by_role("button")).to_have_count(0)
        await mine.reload()
        await expect(cards[0]).to_contain_text("No longer needed")


@pytest.mark.full
async def test_why_of_what_is_no_message_leads_on(shared_team: WebNode, open_window: OpenWindow) -> None:
    page = (await open_window(shared_team.origin)).page
    screen = await log_in(page, await shared_team.link("walt"))
    await screen.go("#/why/999999")
    await expect(page.get_by_text("There is no such message")).to_be_visible()
    await expect(page.get_by_text(re.compile(r"\bseq\b|network\."))).to_have_count(0)
    for name, place in (("Threads", "#/threads"), ("Search", "#/search")):
        await expect(page.get_by_role("main").get_by_role("link", name=name)).to_have_attribute("href", place)


NOWHERE = {
    "nonsense": "There is no such conversation",
    "thread:999999": "There is no such conversation",
    "direct:echo~desk": "There is no such conversation",
    "direct:nobody-1~wim": "There is no participant nobody-1",
    "channel:nosuch": "There is no channel #nosuch",
    "channel:wine-cellar": "You are not a member of #wine-cellar",
}
"""Threads' addresses, and the text that the page shows there to wim."""


async def test_an_address_that_leads_nowhere_says_so_and_leaves_nothing_behind(
    shared_team: WebNode, open_window: OpenWindow
) -> None:
    async with shared_team.client("wendelin") as wendelin:
        await wendelin.call("channels.create", {"name": "wine-cellar", "access": "invite"})
    page = (await open_window(shared_team.origin)).page
    screen = await log_in(page, await shared_team.link("wim"))
    for thread_id, told in NOWHERE.items():
        thread = await screen.open_thread(thread_id)
        await expect(page.get_by_text(told)).to_be_visible()
        await expect(thread.composer).to_have_count(0)
        await expect(page.get_by_role("button", name=re.compile("^(Take over|Join)"))).to_have_count(0)
        await expect(page.get_by_text(re.compile(r"network\.|channels\."))).to_have_count(0)
        await expect(ThreadsScreen(page).rows).to_have_count(0)
    await screen.go("#/threads")
    await expect(page.get_by_text("No conversations yet")).to_be_visible()


@pytest.mark.full
async def test_an_open_channel_is_joined_where_its_address_leads(shared_team: WebNode, open_window: OpenWindow) -> None:
    async with shared_team.client("wenzel") as wenzel:
        await wenzel.call("channels.create", {"name": "wood", "topic": "Birch and oak", "history": "members"})
        await wenzel.send("channel:wood", "Who has an axe?")
    page = (await open_window(shared_team.origin)).page
    screen = await log_in(page, await shared_team.link("willa"))
    thread = await screen.open_thread("channel:wood")
    await expect(page.get_by_text("Birch and oak")).to_be_visible()
    await expect(thread.composer).to_have_count(0)
    await page.get_by_role("button", name="Join #wood").click()
    await expect(thread.message("Who has an axe?")).to_be_visible()
    await thread.say("I have")
    await expect(ThreadsScreen(page).row("#wood")).to_contain_text("You: I have")


@pytest.mark.full
async def test_a_quota_of_gigabytes_is_told_in_gigabytes(shared_team: WebNode, open_window: OpenWindow) -> None:
    async with shared_team.client("wanda") as wanda:
        await wanda.send("agent:echo", "Hello")
    page = (await open_window(shared_team.origin)).page
    await (await log_in(page, await shared_team.link("wanda"))).go("#/cost")
    await expect(page.get_by_text("of 4.3 GB").first).to_be_visible()


# Records each text of the status line, until there are three.
WATCH_OFFLINE = """() => {
  window.told = new Promise(resolve => {
    const seen = [];
    const look = () => {
      const second = /^Offline for (\\d+) s/.exec(document.querySelector(".connection")?.textContent ?? "")?.[1];
      if (second && seen.at(-1) !== Number(second)) seen.push(Number(second));
      if (seen.length === 3) resolve(seen);
    };
    new MutationObserver(look).observe(document.body, {subtree: true, childList: true, characterData: true});
  });
}"""


@pytest.mark.full
async def test_seconds_without_the_hub_are_seen_to_pass(tmp_path: Path, open_window: OpenWindow) -> None:
    async with team_up(tmp_path) as team:
        window = await open_window(team.origin)
        window.allowed = LOST_CONNECTION
        await log_in(window.page, await team.link("wolf"))
        await window.page.evaluate(WATCH_OFFLINE)
        await team.kill()
        first, second, third = await window.page.evaluate("window.told")
        assert min(second - first, third - second) == 1
        await window.leave()


# Presses j at the moment when the first row appears, and reports later whether that row has the focus.
PRESS_AT_ONCE = """() => {
  window.hasChosen = new Promise(resolve => new MutationObserver((_, observer) => {
    if (!document.querySelector("[data-row]")) return;
    observer.disconnect();
    document.dispatchEvent(new KeyboardEvent("keydown", {key: "j"}));
    let frames = 10; // by then the page has put the focus where it wants it
    const look = () => frames-- ? requestAnimationFrame(look) : resolve(document.activeElement.matches("[data-row]"));
    look();
  }).observe(document.body, {childList: true, subtree: true}));
}"""


# Opens a thread and leaves it before the browser has notified the page. Real key presses can be that fast.
LEAVE_AT_ONCE = """() => {
  document.querySelector("[data-row]").click();
  const opened = location.hash;
  document.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"}));
  return opened;
}"""


@pytest.mark.full
async def test_threads_are_used_by_keys_alone(shared_team: WebNode, open_window: OpenWindow) -> None:
    async with shared_team.client("yuri") as yuri:
        for name in ("first", "second"):
            await yuri.send("agent:echo", f"the {name}")
        await yuri.call("channels.create", {"name": "yard"})
        await yuri.send("channel:yard", "Swept")
    window = await open_window(shared_team.origin)
    page = window.page
    await log_in(page, await shared_team.link("yuri"))
    threads = ThreadsScreen(page)
    await page.evaluate(PRESS_AT_ONCE)
    await page.keyboard.press("g")
    await page.keyboard.press("t")
    await expect(threads.row("echo")).to_be_visible()
    assert await page.evaluate("hasChosen"), "the key was lost, or its row lost the focus to the heading"
    await page.keyboard.press("j")
    await expect(page.locator("[data-row]:focus")).to_be_visible()
    await page.keyboard.press("Enter")
    await expect(page).to_have_url(re.compile("#/thread/"))
    await expect(page.get_by_role("article").first).to_be_visible()
    await page.keyboard.press("Escape")  # this key leaves the composer
    await page.keyboard.press("Escape")
    await expect(page).to_have_url(re.compile("#/threads$"))
    opened = await page.evaluate(LEAVE_AT_ONCE)
    assert "#/thread/" in opened
    await expect(page).to_have_url(re.compile("#/threads$"))
    await page.keyboard.press("?")
    await expect(page.get_by_role("dialog", name="Keys")).to_contain_text("New conversation")
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("dialog")).to_have_count(0)


@pytest.mark.full
async def test_what_was_gone_to_is_replaced_by_nothing_that_is_late(
    shared_team: WebNode, open_window: OpenWindow
) -> None:
    page = (await open_window(shared_team.origin)).page
    screen = await log_in(page, await shared_team.link("yves"))
    await screen.go("#/agents")
    await page.evaluate("""async () => {
      const {go} = await import("#ui/router.js");
      location.hash = "#/cost";
      go("#/threads", {replace: true}); // as of a screen that does not know of it yet
    }""")
    await expect(page).to_have_url(re.compile("#/cost$"))
    await expect(page.get_by_role("main").get_by_role("heading", name="Cost")).to_be_visible()


@pytest.mark.full
async def test_a_view_of_threads_is_ones_own_in_each_browser(shared_team: WebNode, open_window: OpenWindow) -> None:
    async with shared_team.client("vera") as vera:
        await vera.send("agent:echo", "Hello")
        await vera.call("channels.create", {"name": "attic"})
        await vera.send("channel:attic", "Dust")
    here, there = [await open_window(shared_team.origin) for _ in range(2)]
    for window in (here, there):
        await log_in(window.page, await shared_team.link("vera"))
        await Screen(window.page).open_threads()
    mine, other = ThreadsScreen(here.page), ThreadsScreen(there.page)
    await expect(mine.row("attic")).to_be_visible()
    await here.page.get_by_role("button", name="Actions for echo").click()
    await here.page.get_by_role("menuitem", name="Rename…").click()
    await here.page.get_by_label("Name (only for you").fill("<b>Parrot</b>")
    await here.page.get_by_role("button", name="Save").click()
    await expect(other.row("<b>Parrot</b>")).to_be_visible()
    await here.page.get_by_role("button", name="Actions for echo · <b>Parrot</b>").click()
    await here.page.get_by_role("menuitem", name="Pin").click()
    await expect(other.rows.first).to_contain_text("Parrot")
    await here.page.get_by_role("button", name="Actions for #attic").click()
    await here.page.get_by_role("menuitem", name="Archive").click()
    await expect(other.row("attic")).to_have_count(0)
    await there.page.get_by_role("button", name="Archived").click()
    await expect(other.row("attic")).to_be_visible()


async def test_a_channel_that_one_is_not_in_is_joined(shared_team: WebNode, open_window: OpenWindow) -> None:
    async with shared_team.client("ursula") as ursula:
        await ursula.call("channels.create", {"name": "library", "topic": "Books"})
    window = await open_window(shared_team.origin)
    page = window.page
    await log_in(page, await shared_team.link("tess"))
    await Screen(page).open_threads()
    await page.get_by_role("button", name="New conversation").click()
    await page.get_by_label("To", exact=True).fill("libr")
    await page.get_by_role("listitem").filter(has_text="#library").get_by_role("button", name="Join").click()
    await expect(page).to_have_url(re.compile("#/thread/channel%3Alibrary"))
    async with shared_team.client("ursula") as ursula:
        members = await ursula.call("channels.members", {"name": "library"})
        assert "tess" in members["members"]


@pytest.mark.full
async def test_why_tells_operators_what_others_may_not_see(shared_team: WebNode, open_window: OpenWindow) -> None:
    seq = await ask_desk(shared_team, "sara")
    owner = await open_window(shared_team.origin)
    await log_in(owner.page, await shared_team.link("owen", operator=True))
    await Screen(owner.page).go(f"#/why/{seq}")
    await heading(owner.page, f"Why #{seq}")
    main = owner.page.get_by_role("main")
    await expect(main.get_by_text("send_text_message").first).to_be_visible()
    await expect(main.get_by_role("heading", name="Messages in the prompt")).to_be_visible()
    await expect(main.get_by_label("Led to it").get_by_text("What is 17*23?").first).to_be_visible()
    asker = await open_window(shared_team.origin)
    await log_in(asker.page, await shared_team.link("sara"))
    main = asker.page.get_by_role("main")
    await Screen(asker.page).go(f"#/why/{seq}")  # part of a reaction to a message between agents
    await expect(main.get_by_text("is hidden from you, and so is the reaction")).to_be_visible()
    shared = (await (await shared_team.operator()).call("network.history", {"thread_id": "broadcast"}))["messages"]
    to_all = next(it["seq"] for it in reversed(shared) if "sara asks" in it["content"])
    await Screen(asker.page).go(f"#/why/{to_all}")  # part of the reaction to her question
    await expect(main.get_by_text("visible only to its agent and to operators")).to_be_visible()
    await expect(main.get_by_role("heading", name="Messages in the prompt")).to_have_count(0)


@pytest.mark.full
async def test_cost_is_what_the_command_line_adds_up(shared_team: WebNode, open_window: OpenWindow) -> None:
    await ask_desk(shared_team, "rosa")
    calls, after = 0, 0
    operator = await shared_team.operator()
    while True:
        page_of_usage = await operator.call("network.usage", {"agent_id": "words", "after": after})
        calls += sum(it["kind"] == "model_reply" for it in page_of_usage["calls"])
        if not page_of_usage["has_more"]:
            break
        after = page_of_usage["calls"][-1]["seq"]
    window = await open_window(shared_team.origin)
    await log_in(window.page, await shared_team.link("rita", operator=True))
    await Screen(window.page).go("#/cost?agent=words")
    row = window.page.get_by_role("table").get_by_role("row", name="words")
    await expect(row.get_by_role("cell").nth(2)).to_have_text(str(calls))


@pytest.mark.full
async def test_what_search_finds_is_text(shared_team: WebNode, open_window: OpenWindow) -> None:
    async with shared_team.client("paul") as paul:
        await paul.send("agent:echo", "<img src=x onerror=alert(1)> Zanzibar <b>spice</b>")
    window = await open_window(shared_team.origin)
    await log_in(window.page, await shared_team.link("paul"))
    await window.page.keyboard.press("/")
    await window.page.get_by_label("Words to search for").fill("zanzi*")
    hits = window.page.get_by_role("list", name="Messages with")
    await expect(hits.locator("mark").first).to_have_text("Zanzibar")
    await expect(hits).to_contain_text("<b>spice</b>")
    await expect(hits.locator("img, b")).to_have_count(0)
    await hits.get_by_role("link").last.click()
    await expect(window.page).to_have_url(re.compile(r"#/thread/direct%3Aecho~paul\?at=\d+"))


TYPE_AT_ONCE = """() => new MutationObserver((_, observer) => {
  const field = document.querySelector("input[type=search]");
  if (!field) return;
  observer.disconnect();
  field.value = "zanzi*";
  field.dispatchEvent(new Event("input", {bubbles: true}));
}).observe(document.body, {childList: true, subtree: true})"""


@pytest.mark.full
async def test_words_typed_in_the_moment_in_which_the_search_appears_are_searched_for(
    shared_team: WebNode, open_window: OpenWindow
) -> None:
    window = await open_window(shared_team.origin)
    screen = await log_in(window.page, await shared_team.link("quick"))
    await window.page.evaluate(TYPE_AT_ONCE)
    await screen.go("#/search")
    await expect(window.page).to_have_url(re.compile(r"#/search\?q=zanzi"))
    await expect(window.page.get_by_label("Words to search for")).to_have_value("zanzi*")


async def test_the_focus_and_the_title_follow_the_screen(shared_team: WebNode, open_window: OpenWindow) -> None:
    window = await open_window(shared_team.origin)
    page = window.page
    await log_in(page, await shared_team.link("olga"))
    await page.get_by_role("navigation").get_by_role("link", name="Agents").click()
    await expect(page).to_have_title("Agents · tea")
    await expect(page.get_by_role("heading", level=1, name="Agents")).to_be_focused()
    await page.get_by_role("link", name="desk").click()
    await expect(page.get_by_role("heading", level=1, name="desk")).to_be_focused()
    await page.go_back()
    await expect(page.get_by_role("heading", level=1, name="Agents")).to_be_focused()
