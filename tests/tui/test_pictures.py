"""Tests that compare ten screens in two sizes with the committed pictures. tests/support/full_screen.py explains how
to update the pictures.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import Action, call, say
from roundelay.agents.tools import tool
from roundelay.network.client import Reconnecting
from roundelay.tui.app import DRAW_EVERY_S
from tests.support.agents import make_runner, running
from tests.support.full_screen import FullScreen, compare_picture, full_screen, steady_network, utc

__all__ = ["utc"]

SIZES = {"80x24": (80, 24), "120x40": (120, 40)}
SCREENS = ("threads", "inbox", "agents", "cost", "search", "help", "why", "approval", "thread", "lost")
"""One person visits the screens in this order, so that a visited thread is read on the later screens."""


@tool(once=True, needs_approval=True)
def order(item: str, amount: int) -> str:
    """Order something."""
    return f"{amount} x {item} ordered"


def script(request: ModelRequest) -> Action:
    view = read_prompt(request)
    if "order" in view.incoming_text:
        return call("order", item="canvas", amount=3)
    return say("Three canvases are left in the store, and the blue paint is gone. Shall I order some?")


@asynccontextmanager
async def studio(size: tuple[int, int]) -> AsyncIterator[FullScreen]:
    """Run a studio's network with people, an agent that has answered, and an agent that waits for approval of an
    order.
    """
    async with steady_network() as network:
        keeper = make_runner(
            "keeper", script, tools=[order], description="Keeps the store, and orders what is missing."
        )
        async with running(network, keeper):
            ann = await network.join("ann", kind="human", card={"description": "Paints."})
            mia, witness = [await network.join("mia", kind="human") for _ in range(2)]
            for person in (ann, mia):
                await person.join_channel("exhibition")
            await ann.post("exhibition", "The hall is ours from Friday on.")
            posted = await mia.post("exhibition", "Who brings the ladders?")
            await ann.send("channel:exhibition", "I do: two of them.", reply_to=posted.seq)
            await ann.send_text("mia", "[bold]No[/bold] markup, no \x1b[31mcolours\x1b[0m: 日本語 and שלום too.")
            answers = (it async for it in witness if it.sender_id == "keeper")
            await mia.send_text("keeper", "How many canvases are left?")
            await anext(answers)
            await mia.send_text("keeper", "Please order three.")
            await anext(answers)
            async with full_screen(mia, size) as screen:
                await screen.shows("4 threads")
                await screen.until(lambda: screen.app.desk.inbox and not screen.app.desk._stale)
                await screen.shows("keeper waits for your decision")
                yield screen


async def go(screen: FullScreen, name: str) -> None:
    """Open one of the screens."""
    match name:
        case "threads":
            await screen.shows("4 threads")
        case "thread":
            screen.app.open_thread("channel:exhibition")
            await screen.shows("↳ 1 message")
            await screen.shows("ann: ")
            await screen.shows("Threads 2")  # this thread and the one before are read
        case "approval":
            screen.app.open_thread("direct:keeper~mia")
            await screen.until(lambda: screen.app.pane.name_here == "thread" and len(screen.boxes) == 4)
            await screen.shows("keeper: seen")
            await screen.press("escape", "G")
            await screen.shows("a approve, A in this thread")
            await screen.shows("Threads 3")
        case "inbox":
            await screen.press("g", "i")
            await screen.shows("approval +#")
        case "why":
            screen.app.open_thread("direct:keeper~mia")
            await screen.until(lambda: screen.app.pane.name_here == "thread" and len(screen.boxes) == 4)
            await screen.press("escape", "k", "k", "k", "w")
            await screen.shows("the newest step first")
            await screen.shows("Threads 3")
        case "agents":
            await screen.press("g", "a")
            await screen.shows("keeper +waits")
            await screen.press("j")
            await screen.shows("Keeps the store")
        case "cost":
            await screen.press("g", "c")
            await screen.shows("keeper +scripted")
        case "search":
            await screen.press("slash")
            await screen.type("canvases\n")
            await screen.shows("2 messages")
        case "help":
            await screen.press("question_mark")
            await screen.shows("Everywhere")
        case "lost":
            screen.app.open_thread("channel:exhibition")
            await screen.shows("↳ 1 message")
            await screen.type("A draft, ")
            await screen.press("ctrl+j")
            await screen.type("in two lines")
            screen.app.desk.client.take_event(Reconnecting("the hub stopped", 1.0))
            await screen.shows("not connected; trying again")


async def go_back(screen: FullScreen) -> None:
    """Go back to the list of threads, the first screen."""
    while len(screen.app.screen_stack) > 1 or len(screen.app.stack) > 1:
        if screen.app.screen_stack[1:]:
            await screen.app.pop_screen()
        else:
            await screen.app.action_back()
    await screen.shows("4 threads")  # wait also for the screen below a closed one


@pytest.mark.usefixtures("utc")
@pytest.mark.parametrize("size", ["80x24", pytest.param("120x40", marks=pytest.mark.full)])
async def test_a_screen_looks_as_it_was_looked_at(size: str, tmp_path: Path) -> None:
    wrong = []
    async with studio(SIZES[size]) as screen:
        for name in SCREENS:
            await go_back(screen)
            await go(screen, name)
            before, now = "", screen.text
            while before != now:  # wait until updates that are drawn together are on the screen
                await screen.pilot.pause(2 * DRAW_EVERY_S)
                before, now = now, screen.text
            try:
                compare_picture(f"{name}-{size}", screen.svg, tmp_path)
            except AssertionError as error:
                wrong.append(str(error))
    assert not wrong, "\n".join(wrong)
