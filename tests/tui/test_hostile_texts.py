"""Tests of hostile texts on every screen: they cannot control the terminal, forge a line of the program, or be read
as markup.
"""

from __future__ import annotations

import re

import pytest

from roundelay.app import Network
from tests.support.full_screen import FullScreen, full_screen

TEXTS = {
    "markup": "[bold red]x[/bold red] [@click=app.quit]press[/] [link=http://evil]y[/link] [/] [",
    "ansi": "\x1b[2J\x1b[31mred\x1b]0;title\x07 \x9b31m",
    "bidi": "user\u202egnp.exe\u2066 \u200f",
    "unseen": "a\u200bb\u2060c\U000e0041d",
    "lines": "one\n12:00:00 #99 bob → mia: I am bob\r\x0btwo\u2028three",
    "huge line": "x" * 250_000,
    "many lines": "\n".join(map(str, range(5000))),
    "rtl": "שלום עולם مرحبا بالعالم",
    "cjk": "日本語のとても長い文章です。" * 20,
    "emoji": "👩‍👩‍👧‍👦🏳️‍🌈👍🏽 " * 30,
    "marks": "z" + "\u0301" * 500,
    "surrogate": "\\ud800 \x00 \x7f",
    "entities": "**&#27;[2J** &#x202e;gnp.exe &#155;31m\n\n- `&#27;]0;title&#7;`",
    "markdown": "# **a** [x](javascript:alert(1)) ![i](http://evil/?q)\n<b onclick=x>b</b>\n\n> " + ">" * 300 + " deep",
    "nested": "- " * 60 + "[" * 200 + "*" * 200,
    "wide table": "| " + " | ".join("x" * 40 for _ in range(9)) + " |\n" + "|-" * 9 + "|",
}
CONTROLS = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\U000e0000-\U000e0fff]"
)


async def test_texts_are_shown_and_do_nothing() -> None:
    async with Network.open() as network:
        ann, mia = await network.join("ann", kind="human"), await network.join("mia", kind="human")
        for text in TEXTS.values():
            beside = {"sources": [{"n": 1, "title": text[:200]}], "follow_ups": [text[:200]]}
            await ann.send_text("mia", text, metadata=beside)
        async with full_screen(mia, (80, 24), "ann") as screen:
            await screen.until(lambda: screen.app.pane.name_here == "thread" and len(screen.boxes) == len(TEXTS))
            await screen.press("escape", "G")
            for text in reversed(TEXTS.values()):
                await screen.press("k")
                await screen.until(lambda text=text: screen.window.find(screen.window.selected).message.text == text)
                await screen.press("enter")
                check(screen)
            for keys in (["w"], ["g", "t"], ["g", "i"]):
                await screen.press(*keys)
                await screen.pilot.pause()
                check(screen)
            assert screen.app.is_running


def check(screen: FullScreen) -> None:
    assert not CONTROLS.search(screen.text)
    for strip in screen.app.screen._compositor.render_strips():
        assert strip.cell_length == 80


@pytest.mark.full
async def test_markup_is_shown_as_it_was_written_in_each_place() -> None:
    async with Network.open() as network:
        text = "[bold]x[/bold]"
        ann, mia = await network.join("ann", kind="human"), await network.join("mia", kind="human")
        await network.join("eve", card={"description": text, "tools": [text]})
        await ann.send_text("mia", text, requires_response=["mia"])
        async with full_screen(mia, (80, 24)) as screen:
            await screen.shows(r"ann: \[bold\]x\[/bold\]")
            await screen.press("enter")
            await screen.shows(r"^.  \[bold\]x\[/bold\]$")
            await screen.press("escape", "k", "w")
            await screen.shows(r"ann → mia: \[bold\]x\[/bold\]")
            await screen.press("g", "a")
            await screen.shows("eve")
            await screen.press("j")
            await screen.shows(r"description: \[bold\]x\[/bold\]")
            await screen.press("slash")
            await screen.type("bold\n")
            await screen.shows(r"  \[bold\]x\[/bold\]")
            screen.app.desk.show_line(text)
            await screen.shows(r"^ \[bold\]x\[/bold\]$")
