"""Tests of each screen of `roundelay tui`, used by a person while agents with scripted models work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.color import Color
from rich.style import Style
from textual.widgets._footer import FooterKey

from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import Action, call, say, think
from roundelay.agents.tools import tool
from roundelay.app import Network
from roundelay.network.client import NetworkClient, Reconnecting, Signal
from roundelay.network.config import Limits
from roundelay.network.errors import LoopStopped
from roundelay.terminal.actions import watch
from roundelay.tui.composer import Composer
from roundelay.tui.parts import Rows
from tests.support.agents import make_runner, running, until_state
from tests.support.full_screen import FullScreen, full_screen


@tool(once=True, needs_approval=True)
def pay(to: str, amount: int) -> str:
    """Pay."""
    return f"{amount} paid to {to}"


@dataclass
class Room:
    """Mia with a terminal, Ann at another machine, and the agent bob."""

    screen: FullScreen
    mia: NetworkClient
    ann: NetworkClient
    goes_on: asyncio.Event


@asynccontextmanager
async def room(to: str | None = None, size: tuple[int, int] = (80, 24)) -> AsyncIterator[Room]:
    goes_on = asyncio.Event()

    async def script(request: ModelRequest) -> Action | list[Action]:
        view = read_prompt(request)
        if view.incoming_text.startswith("pay "):
            if view.tool_results:
                return say(view.tool_results[-1].content)
            return call("pay", to=view.incoming_text.removeprefix("pay "), amount=5)
        if view.incoming_text == "think":
            await goes_on.wait()
            return [think("about it"), say("I have thought.")]
        return say(f"You said: {view.incoming_text}")

    async with Network.open() as network, running(network, make_runner("bob", script, tools=[pay])):
        ann = await network.join("ann", kind="human")
        mia = await network.join("mia", kind="human")
        async with full_screen(mia, size, to) as screen:
            yield Room(screen, mia, ann, goes_on)


async def send(it: Room, text: str) -> None:
    await it.screen.type(text)
    await it.screen.press("enter")


async def test_a_text_is_sent_and_answered_and_its_way_into_the_prompt_is_told() -> None:
    async with room("bob") as it:
        await it.screen.shows("to bob")
        await send(it, "hello bob")
        await it.screen.shows("You said: hello bob")
        shown = await it.screen.shows("bob: seen")
        assert "mia → bob" in shown
        assert "bob → mia (re #" in shown
        assert it.screen.app.desk.drafts == {}


async def test_lines_of_a_text_are_one_message_and_ids_are_offered() -> None:
    async with room("channel:dev") as it:
        await it.screen.shows("to channel:dev")
        await it.screen.type("one")
        await it.screen.press("ctrl+j")
        await it.screen.type("two @an")
        await it.screen.shows("^ *ann *$")
        await it.screen.press("tab")
        await it.screen.type("three")
        await it.screen.press("enter")
        await it.screen.shows("two @ann three")
        history = await it.mia.history("channel:dev")
        assert [message.text for message in history.messages] == ["one\ntwo @ann three"]


async def test_what_begins_with_a_slash_is_no_message_unless_it_is_doubled() -> None:
    async with room("ann") as it:
        await it.screen.shows("to ann")
        await send(it, "/stop")
        await it.screen.shows("The commands of a chat are keys here")
        await it.screen.press("home", "slash")
        await it.screen.press("enter")
        await it.screen.until(lambda: it.screen.boxes)
        assert [box.message.text for box in it.screen.boxes] == ["/stop"]


async def test_nothing_is_acknowledged_that_was_not_on_the_screen() -> None:
    async with room() as it:
        seqs = [(await it.ann.send_text("mia", f"text {number}")).seq for number in range(40)]
        await it.screen.shows("40 +ann")
        await it.screen.until(lambda: len(it.screen.app.desk._held.get("direct:ann~mia", ())) == 40)
        assert [await state(it, seq) for seq in (seqs[0], seqs[-1])] == ["delivered", "delivered"]
        await it.screen.press("enter")
        await it.screen.shows("text 0")
        await until_state(it.ann, seqs[0], "mia", "handled")
        assert await state(it, seqs[-1]) == "delivered"  # this message is scrolled out of view
        await it.screen.press("escape", "G")
        await it.screen.shows("text 39")
        await until_state(it.ann, seqs[-1], "mia", "handled")
        await it.screen.press("escape")
        await it.screen.shows_no("40 +ann")


async def state(it: Room, seq: int) -> str:
    [recipient] = (await it.ann.call("network.message_status", {"seq": seq}))["recipients"]
    return str(recipient["state"])


async def test_what_is_read_pinned_and_named_is_kept_at_the_hub() -> None:
    async with room() as it:
        await it.ann.send_text("mia", "hi")
        await it.ann.broadcast("all of you")
        await it.screen.shows("2 threads")
        await it.screen.press("j", "p")
        await it.screen.shows("▲ ann")
        await it.screen.press("T")
        await it.screen.type("my sister\n")
        await it.screen.shows("▲ ann · my sister")
        await it.screen.press("u")
        await it.screen.shows_no("1 ▲")
        await it.screen.until(lambda: not it.screen.app.desk._marks)
        listed = (await it.mia.call("network.list_threads"))["threads"]
        [row] = [row for row in listed if row["thread_id"] == "direct:ann~mia"]
        assert (row["unread"], row["mark"]["is_pinned"], row["mark"]["title"]) == (0, True, "my sister")


async def test_an_approval_is_given_in_the_inbox_and_a_refusal_with_its_reason_in_the_thread() -> None:
    async with room() as it:
        await it.mia.send_text("bob", "pay ann")
        await it.screen.press("g", "i")
        await it.screen.shows("approval +#")
        await it.screen.press("a")
        await it.screen.shows("Nothing waits for you")
        await it.mia.send_text("bob", "pay zoe")
        await it.screen.shows("approval +#")
        await it.screen.press("enter")
        await it.screen.shows("5 paid to ann")
        await it.screen.shows("waits until .* a approve")
        await it.screen.press("d")
        await it.screen.shows("The reason, if you like")
        await it.screen.type("too much\n")
        await it.screen.shows(r"mia denied pay\(.*\): too much")
        await it.screen.shows_no("a approve")


@pytest.mark.full
async def test_yes_decides_in_the_thread_of_the_request_and_edited_arguments_are_checked() -> None:
    async with room("bob") as it:
        await it.screen.shows("to bob")
        await send(it, "pay ann")
        await it.screen.shows("waits until")
        await send(it, "yes")
        await it.screen.shows("5 paid to ann")
        await send(it, "pay zoe")
        await it.screen.shows("waits until")
        await it.screen.press("escape", "e")
        await it.screen.shows("The arguments for pay")
        await it.screen.press("home")
        await it.screen.type("no JSON\n")
        await it.screen.shows("as a JSON object")
        assert "5 paid to zoe" not in it.screen.text


async def test_work_is_seen_and_stopped() -> None:
    async with room("bob") as it:
        await it.screen.shows("to bob")
        await send(it, "think")
        await it.screen.shows("^ bob: Thinking…")
        await it.screen.press("escape", "s")
        await it.screen.shows("Asked 1 reaction in direct:bob~mia to stop")
        await it.screen.shows_no("^ bob: Thinking…")


async def test_a_thread_is_taken_over_and_given_back() -> None:
    async with room("bob") as it:
        await it.screen.shows("to bob")
        await send(it, "hello")
        await it.screen.shows("You said: hello")
        await it.screen.press("escape", "o", "enter")
        await it.screen.shows("taken over by you: agents are silent here")
        await it.screen.press("i")
        await send(it, "only for me")
        await it.screen.shows("only for me")
        await it.screen.press("escape", "o")
        await it.screen.shows("You said: only for me")
        assert "taken over by" not in it.screen.text


async def test_a_reply_in_a_channel_begins_a_thread_that_its_message_shows() -> None:
    async with room("channel:dev") as it:
        await it.screen.shows("to channel:dev")
        await it.ann.join_channel("dev")
        await it.ann.post("dev", "who knows?")
        await it.screen.shows("who knows")
        await it.screen.press("escape", "k", "r")
        await it.screen.shows("Reply to #.* of ann")
        await send(it, "I do")
        await it.screen.shows("↳ 1 message, the newest of mia: I do")
        await it.screen.press("escape", "k", "t")
        await it.screen.shows("#dev · ")
        await it.screen.shows("  I do")


async def test_why_tells_the_way_up_the_prompt_and_the_cost() -> None:
    async with room("bob") as it:
        await it.screen.shows("to bob")
        await send(it, "hello")
        await it.screen.shows("You said: hello")
        await it.screen.press("escape", "k", "w")
        shown = await it.screen.shows("What the conversation that began with")
        assert "Sent in the reaction" in shown
        assert "Its prompt contained 1 message" in shown
        assert "What followed from it" in shown
        await it.screen.press("escape")
        await it.screen.shows("to bob")


async def test_agents_are_listed_with_what_they_do_and_written_to() -> None:
    async with room() as it:
        await it.screen.press("g", "a")
        await it.screen.shows("● bob +idle")
        await it.mia.send_text("bob", "think")
        await it.screen.shows("● bob +works on #")
        await it.screen.press("j")
        await it.screen.shows("now: works on #")
        await it.screen.press("enter")
        await it.screen.shows("to bob")
        it.goes_on.set()
        await it.screen.shows("I have thought")


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("1", "bob"),
        pytest.param("3", "direct:bob~mia", marks=pytest.mark.full),
        pytest.param("5", r"20\d\d-", marks=pytest.mark.full),
    ],
)
async def test_the_cost_is_told_by_group(key: str, name: str) -> None:
    async with room() as it:
        await it.mia.send_text("bob", "hello")
        await it.screen.shows("You said")
        await it.screen.press("g", "c")
        await it.screen.shows("Usage of models by agent")
        await it.screen.press(key)
        await it.screen.shows(rf"^ {name}.* \d+")


@pytest.mark.full
async def test_what_is_found_is_gone_to() -> None:
    async with room() as it:
        await it.ann.join_channel("dev")
        await it.mia.join_channel("dev")
        for number in range(120):
            await it.ann.post("dev", f"needle {number}" if number == 30 else f"hay {number}")
        await it.screen.shows("1 thread")
        await it.screen.press("slash")
        await it.screen.type("needle\n")
        await it.screen.shows("1 message")
        await it.screen.press("enter")
        await it.screen.shows("needle 30")
        [selected] = [box for box in it.screen.boxes if box.has_class("-selected")]
        assert selected.message.text == "needle 30"
        await it.screen.press("G")
        await it.screen.shows("hay 119")


@pytest.mark.full
async def test_a_thread_that_is_left_before_it_is_there_harms_nothing() -> None:
    async with room() as it:
        await it.ann.send_text("mia", "hi")
        await it.screen.shows("1 thread")
        for _ in range(5):
            it.screen.app.open_thread("direct:ann~mia")
            it.screen.app.call_later(it.screen.app.action_back)
        await it.screen.pilot.pause()
        await it.screen.shows("1 thread")
        it.screen.app.open_thread("direct:ann~mia")
        await it.screen.shows("  hi$")


@pytest.mark.full
async def test_the_mouse_goes_to_a_screen_and_selects_a_message() -> None:
    async with room() as it:
        await it.ann.send_text("mia", "hi")
        await it.screen.shows("1 thread")
        await it.screen.pilot.click("#tab-agents")
        await it.screen.shows("bob +idle")
        await it.screen.pilot.click("#tab-threads")
        await it.screen.shows("ann: hi")
        await it.screen.pilot.click(it.screen.app.pane.query_one(Rows), offset=(5, 0))
        await it.screen.shows("to ann")
        await it.screen.until(lambda: it.screen.boxes)
        await it.screen.pilot.click("MessageBox")
        await it.screen.until(lambda: it.screen.window.selected is not None)


async def test_who_looks_at_a_thread_is_told_there_and_its_reader_is_told_to_others() -> None:
    async with room() as it:
        stored = await it.ann.send_text("mia", "hi")
        await it.screen.shows("ann: hi")
        await watch(it.ann)
        heard = (event async for event in it.ann.events() if isinstance(event, Signal) and event.kind == "viewing")
        await it.screen.press("enter")
        await it.screen.shows("to ann")
        event = await anext(heard)
        assert (event.sender_id, event.thread_id, event.body) == ("mia", stored.thread_id, {"active": True})
        await it.ann.signal("viewing", {"active": True}, thread_id=stored.thread_id)
        await it.screen.shows("ann looks here")
        await it.ann.signal("viewing", {"active": False}, thread_id=stored.thread_id)
        await it.screen.shows_no("looks here")
        await it.screen.press("escape", "escape")
        while (await anext(heard)).body["active"]:
            pass


async def test_what_its_own_sender_says_anew_replaces_a_message_and_what_others_say_does_not() -> None:
    async with room("ann") as it:
        await it.screen.shows("to ann")
        await send(it, "come at 9")
        await it.screen.shows("  come at 9")
        await it.screen.type("a draft")
        await it.screen.press("escape", "k", "E")
        await it.screen.shows("Replaces #")
        await it.screen.press("backspace")
        await it.screen.type("8\n")
        shown = await it.screen.shows("replaced by #")
        assert "come at 9" not in shown
        assert "come at 8" in shown
        assert "│ a draft" in shown
        old, new = (await it.ann.history("direct:ann~mia")).messages
        assert (new.text, new.metadata) == ("come at 8", {"replaces": old.seq})
        await it.ann.send_text("mia", "never", metadata={"replaces": new.seq})
        await it.screen.shows("  never")
        assert "  come at 8" in it.screen.text
        assert it.screen.text.count("replaced by") == 1
        await it.screen.press("escape", "k", "k", "k", "enter")
        await it.screen.shows("  come at 9")


@pytest.mark.parametrize("is_given_back", [False, pytest.param(True, marks=pytest.mark.full)])
async def test_saying_anew_stops_the_reaction_to_what_was_said(is_given_back: bool) -> None:
    async with room("bob") as it:
        await it.screen.shows("to bob")
        await send(it, "think")
        await it.screen.shows("^ bob: Thinking…")
        if is_given_back:  # then a second reaction has replaced the first
            await it.mia.call("network.take", {"thread_id": "direct:bob~mia"})
            await it.screen.shows_no("^ bob: Thinking…")
            await it.mia.call("network.give", {"thread_id": "direct:bob~mia"})
            await it.screen.shows("^ bob: Thinking…")
        await it.screen.press("escape", "k", "E")
        await it.screen.shows("Replaces #")
        await it.screen.type("!\n")
        await it.screen.shows("You said: think!")
        assert "I have thought" not in it.screen.text


async def test_questions_dead_letters_and_stopped_conversations_wait_in_the_inbox() -> None:
    async with Network.open(limits=Limits(max_root_messages=2)) as network:
        ann, mia = await network.join("ann"), await network.join("mia", kind="human")
        asked = await ann.send_text("mia", "When?", requires_response=["mia"])
        async with full_screen(mia, (100, 24)) as screen:
            await screen.press("g", "i")
            await screen.shows(rf"question +#{asked.seq} ann")
            await screen.press("x")
            await screen.shows("Nothing waits for you")
            poison = await mia.send_text("ann", "poison")
            async for delivery in ann.deliveries():
                if delivery.message.seq == poison.seq:
                    await delivery.nack("no", retry_after_ms=0)
                    if delivery.attempt == 5:
                        break
            await screen.shows(rf"dead letter +#{poison.seq} ann")
            await screen.press("R")
            await screen.shows(f"#{poison.seq} is delivered again")
            await screen.shows("Nothing waits for you")
            root = await mia.send_text("ann", "go")
            await ann.send_text("mia", "one", cause=root.seq)
            with pytest.raises(LoopStopped):
                await ann.send_text("mia", "two", cause=root.seq)
            await screen.shows("stopped +#")
            await screen.press("R")
            await screen.shows(f"The conversation that began with #{root.seq} may go on")
            await screen.shows("Nothing waits for you")
            await ann.send_text("mia", "two", cause=root.seq)


@pytest.mark.full
async def test_where_one_types_search_is_not_offered_by_its_letter() -> None:
    async with room("bob") as it:
        await it.screen.shows("to bob")
        await it.screen.shows("^ \\^q Quit  esc Back$")
        await it.screen.type("/")
        await it.screen.shows("│ /")
        await it.screen.press("escape", "escape")
        await it.screen.shows("/ Search")


@pytest.mark.full
async def test_why_is_told_of_the_newest_message_where_none_is_selected() -> None:
    async with room("bob") as it:
        await it.screen.shows("to bob")
        await it.screen.press("escape", "w")
        await it.screen.shows("There is no message here yet")
        await it.screen.press("i")
        await send(it, "hello")
        await it.screen.shows("You said: hello")
        newest = it.screen.boxes[-1].seq
        await it.screen.press("escape", "w")
        await it.screen.shows(f"Why #{newest} was said, the newest step first")


@pytest.mark.parametrize("key", ["a", *(pytest.param(it, marks=pytest.mark.full) for it in "rtE")])
async def test_what_a_key_needs_is_told_as_long_as_its_screen_is_there(key: str) -> None:
    async with room("bob") as it:
        await it.screen.shows("to bob")
        await it.screen.press("escape", key)
        await it.screen.shows("^ (No call waits here|Select a message)")
        await it.screen.press("g", "i")
        await it.screen.shows("Nothing waits for you")
        await it.screen.shows_no("No call waits here|Select a message")


@pytest.mark.full
async def test_where_one_writes_can_be_read_without_the_focus() -> None:
    async with room("bob") as it:
        await it.screen.shows("to bob")
        await it.screen.press("escape")
        await it.screen.until(lambda: not it.screen.app.pane.query_one(Composer).has_focus)
        await it.screen.pilot.pause()
        segments = [part for strip in it.screen.app.screen._compositor.render_strips() for part in strip]
        title = next(part.style for part in segments if "to bob" in part.text)
        frame = next(part.style for part in segments if "╰" in part.text)
        assert contrast(title) >= 4.5
        assert contrast(frame) >= 3


def contrast(style: Style | None) -> float:
    """Return the contrast between text and background as WCAG 2 defines it."""
    assert style is not None
    assert style.color is not None
    assert style.bgcolor is not None
    dark, light = sorted(map(luminance, (style.color, style.bgcolor)))
    return (light + 0.05) / (dark + 0.05)


def luminance(color: Color) -> float:
    parts = [it / 255 for it in color.get_truecolor()]
    red, green, blue = [it / 12.92 if it <= 0.04045 else ((it + 0.055) / 1.055) ** 2.4 for it in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.full
async def test_the_narrowest_terminal_says_who_one_is_and_whether_the_hub_is_there() -> None:
    async with room("bob", (40, 12)) as it:
        await it.screen.shows("to bob")
        await it.screen.shows("^ ● mia +I  Threads  A  C  S$")
        await it.screen.press("escape", "g", "i")
        await it.screen.shows("^ ● mia in roundelay +Inbox  T  A  C  S$")
        it.mia.take_event(Reconnecting("the hub stopped", 1.0))
        await it.screen.shows("^ ○ not connected +Inbox  T  A  C  S$")


@pytest.mark.parametrize("width", [40, *(pytest.param(it, marks=pytest.mark.full) for it in (61, 80, 100, 140))])
async def test_the_line_of_keys_has_whole_ones_and_the_one_that_lists_all(width: int) -> None:
    async with room("bob", (width, 24)) as it:
        await it.screen.shows("to bob")
        await it.screen.press("escape")
        await it.screen.shows(r"^ i Write .*\? Help")
        named = {(key.key_display, key.description) for key in it.screen.app.query(FooterKey)}
        shown = it.screen.text.splitlines()[-1].strip().split("  ")
        assert shown == [f"{key} {does}" for key, does in sorted(named, key=lambda it: shown.index(" ".join(it)))]
        await it.screen.pilot.resize_terminal(150, 24)
        await it.screen.shows("o Take over / give back .* esc Back")


@pytest.mark.full
async def test_one_is_not_told_of_what_one_types_at_another_screen() -> None:
    async with Network.open() as network:
        ann, mia, elsewhere = [await network.join(it, kind="human") for it in ("ann", "mia", "mia")]
        stored = await ann.send_text("mia", "hi")
        async with full_screen(mia) as screen:
            await screen.shows("ann: hi")
            await elsewhere.signal("typing", {}, thread_id=stored.thread_id)
            await ann.signal("typing", {}, thread_id=stored.thread_id)
            await screen.shows("^ ann: Typing…$")


MARKDOWN = """# Order 17

It was **refunded** and `closed`, see [the bill](https://shop.example/17).

1. one
   - two
2. three

> as said

```py
print("<b>")
```

| what | how |
| - | - |
| tea | hot |
"""


async def test_markdown_is_drawn_and_its_signs_are_gone() -> None:
    async with room() as it:
        await it.ann.send_text("mia", MARKDOWN)
        await it.screen.shows("1 thread")
        await it.screen.press("enter")
        await it.screen.shows("│ print")
        shown = [line[3:].rstrip() for line in it.screen.text.splitlines()]
        start = shown.index("Order 17")
        assert shown[start : start + 15] == [
            "Order 17", "", "It was refunded and closed, see the bill (https://shop.example/17).", "", "1. one", "   • two",
            "2. three", "", "▏ as said", "", '│ print("<b>")', "", "what │ how", "tea │ hot", "",
        ]  # fmt: skip
        [box] = it.screen.boxes
        styles = {box.render().plain[span.start : span.end]: str(span.style) for span in box.render().spans}
        assert ("bold" in styles["refunded"], "underline" in styles["the bill"]) == (True, True)


async def test_whom_to_write_to_is_chosen_from_a_list() -> None:
    async with room() as it:
        await it.screen.shows("Threads")
        await it.screen.press("g", "t", "n")
        await it.screen.shows("Who do you want to talk to")
        await it.screen.shows("bob +available · ")
        await it.screen.shows("ann +available · human")
        await it.screen.shows("broadcast +Everybody")
        await it.screen.press("down", "enter")
        await it.screen.shows("to ann")
        await it.screen.press("escape", "escape", "n")
        await it.screen.type("bo\n")
        await it.screen.shows("to bob")
        await it.screen.press("escape", "escape", "n")
        await it.screen.type("nobody\n")
        await it.screen.shows("Nobody is registered as 'nobody'")


@pytest.mark.full
async def test_a_direct_thread_of_others_is_called_by_both() -> None:
    async with room() as it:
        named = [it.screen.app.desk.name_thread(f"direct:{name}") for name in ("ann~bob", "ann~bob:plan", "bob~mia")]
        assert named == ["ann and bob", "ann and bob · New conversation", "bob"]


async def test_key_saves_files_of_the_selected_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with Network.open(mods=["channels", "discovery", "files"]) as network:
        ann = await network.join("ann", kind="human")
        mia = await network.join("mia", kind="human")
        file = await ann.call("files.save", {"name": "plan.md", "content": "# Plan"})
        await ann.send("agent:mia", {"text": "The plan.", "files": [file]})
        async with full_screen(mia, (100, 24), "ann") as screen:
            await screen.shows(f"plan.md, text/markdown, 6 bytes, {file['file']}")
            await screen.shows("to ann")
            await screen.until(lambda: screen.boxes)
            await screen.press("escape", "k", "S")
            await screen.shows("Saved")
    assert (tmp_path / "plan.md").read_text() == "# Plan"


async def test_edited_and_deleted_messages_change_on_the_screen() -> None:
    async with Network.open(mods=["channels", "messages"]) as network:
        ann, mia = [await network.join(name, kind="human") for name in ("ann", "mia")]
        async with full_screen(mia, (80, 24), "ann") as screen:
            await screen.shows("to ann")
            seq = (await ann.send("agent:mia", "The first words")).seq
            await screen.shows("The first words")
            await ann.call("messages.edit", {"seq": seq, "text": "The second words"})
            await screen.shows("The second words")
            await screen.shows_no("The first words")
            await ann.call("messages.delete", {"seq": seq})
            await screen.shows(r"\(deleted\)")
            await screen.shows_no("The second words")
