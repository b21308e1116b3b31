"""`roundelay tui` under test, with real widgets, a terminal in memory and a real hub. A test reads the screen as text
or as a picture.

Pictures are SVG files. The committed pictures are in tests/tui/pictures. RENEW_PICTURES=1 overwrites these files.
Look at each changed picture before you commit it.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest
from textual.pilot import Pilot

from roundelay.app import Network
from roundelay.network.client import NetworkClient
from roundelay.tui.app import RoundelayTerminal
from roundelay.tui.messages import MessageBox, MessageWindow

PICTURES = Path(__file__).parents[1] / "tui" / "pictures"
NINE_MS = 1_767_258_000_000
"""2026-01-01 09:00 UTC."""
WITHIN_S = 60.0
LOOK_EVERY_S = 0.02


class FullScreen:
    """The terminal of one person."""

    def __init__(self, app: RoundelayTerminal, pilot: Pilot[None]) -> None:
        self.app = app
        self.pilot = pilot

    @property
    def svg(self) -> str:
        return self.app.export_screenshot()

    @property
    def text(self) -> str:
        """Return the text on the screen, row by row."""
        strips = self.app.screen._compositor.render_strips()
        return "\n".join(strip.text.replace("\xa0", " ").rstrip() for strip in strips)

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait until the condition is true. On a timeout, the error shows the screen."""
        try:
            async with asyncio.timeout(WITHIN_S):
                while not holds():
                    await self.pilot.pause(LOOK_EVERY_S)
        except TimeoutError:
            raise AssertionError(f"not within {WITHIN_S} s; the screen:\n{self.text}") from None

    async def shows(self, pattern: str) -> str:
        """Wait until the pattern is on the screen, and return the screen's text."""
        await self.until(lambda: re.search(pattern, self.text, re.MULTILINE))
        return self.text

    async def shows_no(self, pattern: str) -> None:
        await self.until(lambda: not re.search(pattern, self.text, re.MULTILINE))

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def type(self, text: str) -> None:
        await self.pilot.press(*(_KEYS.get(it, it) for it in text))

    @property
    def window(self) -> MessageWindow:
        return self.app.pane.query_one(MessageWindow)

    @property
    def boxes(self) -> list[MessageBox]:
        return self.window.boxes


_KEYS = {" ": "space", "\n": "enter"}


@asynccontextmanager
async def full_screen(
    client: NetworkClient, size: tuple[int, int] = (80, 24), to: str | None = None
) -> AsyncIterator[FullScreen]:
    app = RoundelayTerminal(client, to)
    async with app.run_test(size=size) as pilot:
        yield FullScreen(app, pilot)


@asynccontextmanager
async def steady_network() -> AsyncIterator[Network]:
    """Open a network in this process with a fixed clock (nine o'clock) and numbered IDs, so that its pictures never
    change.
    """
    numbers = count(1)
    async with Network.open(name="studio", clock=lambda: NINE_MS, new_id=lambda: f"{next(numbers):032x}") as network:
        yield network


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the time zone to UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def compare_picture(name: str, svg: str, found: Path) -> None:
    """Compare the screen with the committed picture. Write a different picture to the folder ``found``."""
    now = re.sub(r"terminal-\d+", "terminal", svg)
    committed = PICTURES / f"{name}.svg"
    if os.environ.get("RENEW_PICTURES") == "1":
        PICTURES.mkdir(exist_ok=True)
        committed.write_text(now, encoding="utf-8")
        return
    if not committed.exists() or committed.read_text(encoding="utf-8") != now:
        (found / f"{name}.svg").write_text(now, encoding="utf-8")
        raise AssertionError(
            f"{name} looks different: compare {found}/{name}.svg with {committed}. If it is right, run this test with RENEW_PICTURES=1."
        )
