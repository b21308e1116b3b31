"""Tests of a thread's screen: rendered texts, the scroll position while messages arrive, and sending."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.async_api import Page, expect

from roundelay.network.client import NetworkClient
from tests.support.page_modules import run_module
from tests.web.conftest import OpenWindow
from tests.web.payloads import MARKDOWN, MARKUP
from tests.web.screens import ThreadScreen, log_in
from tests.web.team import WebNode

pytestmark = pytest.mark.asyncio(loop_scope="session")

ELEMENTS = {
    *("p", "h3", "h4", "h5", "h6", "hr", "blockquote", "ol", "ul", "li", "div", "figure", "figcaption", "pre", "code"),
    *("table", "thead", "tbody", "tr", "th", "td", "bdi", "button", "span", "a", "img", "strong", "em", "del", "br"),
}
ATTRIBUTES = {
    *("class", "title", "dir", "role", "tabIndex", "aria-label", "start", "type", "onClick", "href", "target"),
    *("rel", "src", "alt", "token", "text", "language", "label"),
}
MARKDOWN_MODULE = """
import { readFileSync } from "node:fs";
import { registerHooks } from "node:module";
const names = JSON.parse(readFileSync("vendor/vendored.json", "utf8")).imports;
const parentURL = `file://${process.cwd()}/ui/main.js`;
const resolve = (name, context, next) => names[name] ? next(names[name], { ...context, parentURL }) : next(name, context);
registerHooks({ resolve });
const { growBlocks, readBlocks, renderMarkdown } = await import("#ui/markdown.js");
"""
"""Names in imports of the vendored libraries. The page's import map resolves them, but node does not."""
DOCUMENT = """# Title

A paragraph with *soft*, **loud** and `code`.
Its second line.

- one
- two

  more of two
    1. deep

```js
let a = 1;

let b = 2;
```

| a | b |
| - | -: |
| 1 | 2 |

> a quote
goes on

<b>not bold</b>

    indented

The end
=======
"""


async def open_thread(window: Any, team: WebNode, person: str, thread_id: str) -> ThreadScreen:
    inbox = await log_in(window.page, await team.link(person))
    return await inbox.open_thread(thread_id)


def at_top(page: Page) -> Any:
    """Return the first visible message and its distance from the top, after it is drawn."""
    # Look up the start of the list each time: the header above it grows when the page learns about other readers.
    script = """async () => { const topOf = (it) => it.getBoundingClientRect().top - document.querySelector(".scroller").getBoundingClientRect().top;
        const find = () => [...document.querySelectorAll(".log-item")].find((it) => topOf(it) + it.offsetHeight > 8);
        let row = find();
        while (!row || topOf(row) > 40) {
          await new Promise(requestAnimationFrame);
          row = find();
        }
        return [row.querySelector("article").dataset.seq, Math.round(topOf(row))]; }"""
    return page.evaluate(script)


def assert_held(before: Any, after: Any) -> None:
    """Check that the scroll position is unchanged. Two readings may round a shift of less than a pixel differently."""
    assert after[0] == before[0]
    assert abs(after[1] - before[1]) <= 2


# --- Markdown


async def test_markdown_becomes_elements_of_a_short_list() -> None:
    """The test runs in node without a browser. Everything that is not an element in the result is text."""
    given = [it.replace("RUN", "alert(1)").replace("THERE", "https://there.example") for it in (*MARKUP, *MARKDOWN)]
    seen = await run_module(
        MARKDOWN_MODULE,
        """(texts) => texts.map((text) => { const found = [];
            const walk = (it) => Array.isArray(it) ? it.forEach(walk) : it && typeof it === "object" && visit(it);
            const visit = ({type, props}) => {
              if (typeof type === "function" && type.name !== "CopyButton") return walk(type(props));
              if (typeof type === "string") found.push([type, Object.entries(props).filter(([key]) => key !== "children").map(([key, value]) => [key, String(value)])]);
              walk(props.children);
            };
            walk(renderMarkdown(text));
            return found; })""",
        given,
    )
    for text, elements in zip(given, seen, strict=True):
        for name, attributes in elements:
            assert name in ELEMENTS, (text, name)
            for key, value in attributes:
                assert key in ATTRIBUTES, (text, name, key)
                if key in ("href", "src"):
                    assert re.match(r"https?://|mailto:|data:image/(png|jpeg|gif|webp|avif);base64,", value), (
                        text,
                        value,
                    )
                if key == "src":
                    assert value.startswith("data:image/"), (text, value)


@pytest.mark.parametrize("step", [1, 3, 7, 40])
async def test_a_text_that_grows_reads_as_it_does_when_it_is_whole(step: int) -> None:
    grown, whole, parsed = await run_module(
        MARKDOWN_MODULE,
        """({text, step}) => { let state = null; let parsed = 0;
            for (let end = 0; end < text.length + step; end += step) {
              const before = new Set(state?.blocks);
              state = growBlocks(state, text.slice(0, end));
              parsed += state.blocks.filter((it) => !before.has(it)).length;
            }
            return [state.blocks, readBlocks(text), parsed / (text.length / step)]; }""",
        {"text": DOCUMENT, "step": step},
    )
    assert grown == whole
    if step == 1:
        assert parsed < 4  # each piece parses only the last blocks, not all of them


@pytest.mark.parametrize("text", [">" * 60_000, "_a" * 30_000, "a." * 30_000 + "@", "[" * 60_000, "- " * 30_000])
async def test_a_text_that_would_take_a_reader_long_is_shown_without_markdown(text: str) -> None:
    """A text that takes the parser a second would block the page of every recipient."""
    took = await run_module(
        MARKDOWN_MODULE,
        "(text) => { const begun = process.cpuUsage().user; renderMarkdown(text); return (process.cpuUsage().user - begun) / 1000; }",
        text,
    )
    assert took < 400


# --- reading


async def fill(team: WebNode, channel: str, person: NetworkClient, reader: str, count: int) -> list[int]:
    """Create a channel with messages of different heights. Return their seqs."""
    await person.call("channels.create", {"name": channel, "history": "members"})
    async with team.client(reader) as other:
        await other.call("channels.join", {"name": channel})
    texts = [f"Message {number} " + "and so on " * (number % 7 * 8) for number in range(count)]
    return [(await person.send(f"channel:{channel}", it)).seq for it in texts]


async def test_what_one_looks_at_stays_while_others_write_and_earlier_ones_load(
    shared_team: WebNode, open_window: OpenWindow
) -> None:
    async with shared_team.client("quinn") as quinn:
        seqs = await fill(shared_team, "tower", quinn, "rosa", 600)
        window = await open_window(shared_team.origin)
        screen = await open_thread(window, shared_team, "rosa", "channel:tower")
        await expect(screen.message("Message 599")).to_be_visible()
        assert await screen.messages.count() < 100
        for _ in range(2):
            height = await window.page.evaluate("document.querySelector('.scroller').scrollHeight")
            await window.page.evaluate("document.querySelector('.scroller').scrollTop = 300")
            before = await at_top(window.page)
            longer = "height => document.querySelector('.scroller').scrollHeight > height + 500"
            await window.page.wait_for_function(longer, arg=height)
            after = await at_top(window.page)
            assert_held(before, after)
        before = await at_top(window.page)
        for number in range(5):
            await quinn.send("channel:tower", f"Late {number}")
        button = window.page.get_by_role("button", name="5 new")
        await expect(button).to_be_visible()
        assert_held(before, await at_top(window.page))
        await button.click()
        await expect(screen.message("Late 4")).to_be_in_viewport()
        await quinn.send("channel:tower", "And the last one")
        await expect(screen.message("And the last one")).to_be_in_viewport()
        await screen.go(f"#/thread/channel%3Atower?at={seqs[3]}")
        await expect(screen.message(re.compile(r"Message 3\b"))).to_be_in_viewport()
        assert await screen.messages.count() < 100


async def test_every_own_message_that_is_seen_says_what_became_of_it(
    shared_team: WebNode, open_window: OpenWindow
) -> None:
    async with shared_team.client("rolf") as rolf:
        for number in range(10):
            await rolf.send("agent:echo", f"Question {number}")
        answers = (it async for it in rolf if it.sender_id == "echo")
        for _ in range(10):
            await anext(answers)
    window = await open_window(shared_team.origin)
    screen = await open_thread(window, shared_team, "rolf", "direct:echo~rolf")
    receipts = screen.messages.locator(".receipt")
    await expect(receipts).to_have_count(10)
    await expect(receipts.filter(has_text="Seen by the agent")).to_have_count(10)


@pytest.mark.full
async def test_an_agent_that_finishes_without_an_answer_is_named(shared_team: WebNode, open_window: OpenWindow) -> None:
    window = await open_window(shared_team.origin)
    screen = await open_thread(window, shared_team, "silas", "direct:bank~silas")
    await screen.say("And now?")
    told = window.page.get_by_role("status").filter(has_text="bank finished without an answer.")
    await expect(told).to_be_visible()
    await screen.say("pay mia 5")
    await expect(told).to_have_count(0)


@pytest.mark.full
async def test_the_end_is_not_offered_where_all_is_in_view(shared_team: WebNode, open_window: OpenWindow) -> None:
    async with shared_team.client("rita") as rita:
        seqs = await fill(shared_team, "hut", rita, "ruth", 2)
    window = await open_window(shared_team.origin)
    inbox = await log_in(window.page, await shared_team.link("ruth"))
    await inbox.go(f"#/thread/channel%3Ahut?at={seqs[0]}")
    await expect(ThreadScreen(window.page).message("Message 0")).to_be_focused()
    await window.page.evaluate("() => new Promise(it => requestAnimationFrame(() => requestAnimationFrame(it)))")
    await expect(window.page.get_by_role("button", name="Jump to the end")).to_have_count(0)


async def test_a_thread_takes_over_in_every_page(shared_team: WebNode, open_window: OpenWindow) -> None:
    async with shared_team.client("sven") as sven:
        await fill(shared_team, "cellar", sven, "tess", 2)
    one, other = [await open_window(shared_team.origin) for _ in range(2)]
    await open_thread(one, shared_team, "sven", "channel:cellar")
    await open_thread(other, shared_team, "tess", "channel:cellar")
    await one.page.get_by_role("button", name="Take over").click()
    await one.page.get_by_role("dialog").get_by_role("button", name="Take over").click()
    await expect(one.page.get_by_text("You have taken over this thread")).to_be_visible()
    await expect(other.page.get_by_role("button", name="Take over")).to_have_count(0)
    await expect(other.page.get_by_text("sven has taken over this thread")).to_be_visible()
    await other.page.get_by_role("button", name="Give back").click()
    await expect(one.page.get_by_role("button", name="Take over")).to_be_visible()


# --- writing


async def test_a_draft_survives_a_reload_and_asks_whom_it_names(shared_team: WebNode, open_window: OpenWindow) -> None:
    async with shared_team.client("uma") as uma:
        [first, _] = await fill(shared_team, "attic-2", uma, "vito", 2)
        async with shared_team.wire("cleo", "agent") as cleo:
            await cleo.call("channels.join", {"name": "attic-2"})
            window = await open_window(shared_team.origin)
            screen = await open_thread(window, shared_team, "vito", "channel:attic-2")
            await screen.message("Message 0").hover()
            await screen.message("Message 0").get_by_role("button", name="Reply").click()
            await screen.composer.press_sequentially("What do you say, @cl")
            await expect(window.page.get_by_role("option", name="cleo")).to_be_visible()
            await screen.composer.press("Enter")
            await expect(screen.composer).to_have_value("What do you say, @cleo ")
            await window.page.reload()
            await expect(screen.composer).to_have_value("What do you say, @cleo ")
            await expect(window.page.get_by_text("Replying to")).to_be_visible()
            await expect(window.page.get_by_text("Asks cleo for an answer")).to_be_visible()
            await screen.composer.press("Enter")
            await expect(screen.message("What do you say, @cleo")).to_be_visible()
            assert window.page.url.endswith(f"#/thread/thread%3A{first}")
        page = await uma.call("network.history", {"thread_id": f"thread:{first}"})
        [said] = page["messages"]
        assert (said["reply_to"], said["requires_response"]) == (first, ["cleo"])


# Starts a reply to a message, and types the first letter as soon as the composer is drawn, before the next frame.
ANSWER_AT_ONCE = """async () => {
  [...document.querySelectorAll("article button")].find((it) => it.textContent === "Reply").click();
  await Promise.resolve();
  const field = document.querySelector("textarea");
  field.value = "W";
  field.dispatchEvent(new InputEvent("input", {bubbles: true}));
}"""


async def test_the_first_letter_of_an_answer_stays(shared_team: WebNode, open_window: OpenWindow) -> None:
    async with shared_team.client("ulla") as ulla:
        await fill(shared_team, "attic-3", ulla, "veit", 1)
    window = await open_window(shared_team.origin)
    screen = await open_thread(window, shared_team, "veit", "channel:attic-3")
    await expect(screen.message("Message 0")).to_be_visible()
    await window.page.evaluate(ANSWER_AT_ONCE)
    await expect(window.page.get_by_text("Replying to")).to_be_visible()
    await screen.composer.press_sequentially("hy?")
    await expect(screen.composer).to_have_value("Why?")


async def test_a_letter_that_is_being_chosen_sends_nothing(shared_team: WebNode, open_window: OpenWindow) -> None:
    window = await open_window(shared_team.origin)
    screen = await open_thread(window, shared_team, "wilma", "direct:echo~wilma")
    await screen.composer.fill("日本")
    composing = {"key": "Enter", "isComposing": True, "bubbles": True, "cancelable": True}
    await screen.composer.dispatch_event("keydown", composing)
    await screen.composer.dispatch_event(
        "keydown", {"key": "Enter", "keyCode": 229, "bubbles": True, "cancelable": True}
    )
    await expect(screen.composer).to_have_value("日本")
    await screen.composer.press("Shift+Enter")
    await screen.composer.press_sequentially("語")
    await expect(screen.composer).to_have_value("日本\n語")
    await screen.composer.press("Enter")
    await expect(screen.message("You wrote: 日本")).to_be_visible()


async def test_a_message_is_sent_anew_with_its_files_in_place_of_the_old_one(
    shared_team: WebNode, open_window: OpenWindow
) -> None:
    async with shared_team.client("yves") as yves:
        window = await open_window(shared_team.origin)
        screen = await open_thread(window, shared_team, "xaver", "direct:xaver~yves")
        await window.page.set_input_files("input[type=file]", files=[file("notes.txt", b"one\ntwo")])
        await screen.say("Read thiss")
        own = screen.message("Read thiss")
        await expect(own).to_contain_text("notes.txt")
        await own.hover()
        await own.get_by_role("button", name="Edit").click()
        await expect(screen.composer).to_have_value("Read thiss")
        await screen.say("Read this")
        await expect(window.page.get_by_text("edited this")).to_be_visible()
        await expect(screen.message("Read thiss")).to_have_count(0)
        [old, new] = (await yves.call("network.history", {"thread_id": "direct:xaver~yves"}))["messages"]
        assert old["content"]["files"] == new["content"]["files"]
        assert new["content"]["files"][0]["text"] == "one\ntwo"
        assert (new["content"]["text"], new["metadata"]) == ("Read this", {"replaces": old["seq"]})
        await yves.send("agent:xaver", "In your name", metadata={"replaces": new["seq"]})
        await expect(screen.message("In your name")).to_be_visible()
        await expect(screen.message("Read this")).to_have_count(1)


async def test_what_does_not_fit_or_is_refused_stays_with_its_reason(
    shared_team: WebNode, open_window: OpenWindow
) -> None:
    async with shared_team.client("zora") as zora:
        window = await open_window(shared_team.origin)
        screen = await open_thread(window, shared_team, "abel", "direct:abel~zora")
        await window.page.set_input_files("input[type=file]", files=[file("film.mp4", b"x" * 220_000)])
        await screen.say("Look")
        await expect(window.page.get_by_role("alert")).to_contain_text("the limit of this network is")
        await expect(screen.composer).to_have_value("Look")
        await window.page.get_by_role("button", name="Remove film.mp4").click()
        await screen.composer.press("Enter")
        await expect(screen.message("Look")).to_be_visible()
        await anext(zora.deliveries())  # the page shows a message before it is stored
        assert len((await zora.call("network.history", {"thread_id": "direct:abel~zora"}))["messages"]) == 1
    await (await shared_team.operator()).call("network.remove", {"agent_id": "zora"})
    await screen.say("Are you there?")
    refused = screen.message("Are you there?")
    await expect(refused.get_by_role("alert")).to_contain_text("zora")
    await refused.get_by_role("button", name="Discard").click()
    await expect(refused).to_have_count(0)


def file(name: str, content: bytes) -> Any:
    kinds = {"txt": "text/plain", "mp4": "video/mp4"}
    return {"name": name, "mimeType": kinds[name.rpartition(".")[2]], "buffer": content}


async def test_a_person_has_several_conversations_with_the_same_agent(
    shared_team: WebNode, open_window: OpenWindow
) -> None:
    async with shared_team.client("yana") as yana:
        window = await open_window(shared_team.origin)
        screen = await open_thread(window, shared_team, "xeno", "direct:xeno~yana")
        await screen.say("Of the tea")
        await expect(screen.message("Of the tea")).to_be_visible()
        await window.page.get_by_role("button", name="This thread").click()
        await window.page.get_by_role("menuitem", name="New conversation").click()
        await expect(screen.messages).to_have_count(0)
        await screen.say("Of the bill")
        await expect(screen.message("Of the bill")).to_be_visible()
        await expect(screen.heading).to_have_text("yana · Of the bill")
        threads = [it["thread_id"] for it in (await yana.call("network.list_threads", {}))["threads"]]
        [named] = [it for it in threads if it.startswith("direct:xeno~yana:c-")]
        [bill] = (await yana.call("network.history", {"thread_id": named}))["messages"]
        await yana.send("agent:xeno", "It is paid", reply_to=bill["seq"])
        await expect(screen.message("It is paid")).to_be_visible()
        await screen.open_thread("direct:xeno~yana")
        await expect(screen.message("Of the tea")).to_be_visible()
        await expect(screen.messages).to_have_count(1)
