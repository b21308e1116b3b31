"""Fixtures: one browser of each kind per worker, a node with a team that the tests share, and a window for each
person of a test.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, async_playwright

from tests.web.browsers import HOW_TO, BrowserName, Watched, find_browser, launch
from tests.web.team import BANK, DEMO, ECHO, WebNode, team_up

SHARED = {"scope": "session", "loop_scope": "session"}
OWN = {"loop_scope": "session"}

OpenWindow = Callable[..., Awaitable[Watched]]


class Browsers:
    """Browsers that are launched on first use."""

    def __init__(self, playwright: Any, folder: Path) -> None:
        self._playwright = playwright
        self._folder = folder
        self._running: dict[BrowserName, Browser] = {}

    async def get(self, name: BrowserName) -> Browser:
        if name not in self._running:
            self._running[name] = await launch(self._playwright, name, self._folder)
        return self._running[name]

    async def close(self) -> None:
        for browser in self._running.values():
            await browser.close()


@pytest_asyncio.fixture(**SHARED)
async def browsers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browsers]:
    async with async_playwright() as playwright:
        running = Browsers(playwright, tmp_path_factory.mktemp("browsers"))
        try:
            yield running
        finally:
            await running.close()


@pytest_asyncio.fixture(**SHARED)
async def shared_team(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WebNode]:
    """A node with the demo's agents, an agent that pays, and one that repeats texts. Tests share it without conflicts
    because each uses its own people.
    """
    async with team_up(tmp_path_factory.mktemp("team"), [*DEMO, BANK, ECHO]) as node:
        yield node


@pytest_asyncio.fixture(**OWN)
async def browser(request: pytest.FixtureRequest, browsers: Browsers) -> Browser:
    """Chromium, unless the test selects another browser with `both` or ``indirect``."""
    name: BrowserName = getattr(request, "param", "chromium")
    if find_browser(name) is None:
        pytest.skip(f"no {name} here: {HOW_TO}")
    return await browsers.get(name)


@pytest_asyncio.fixture(**OWN)
async def open_window(browser: Browser) -> AsyncIterator[OpenWindow]:
    """Function that opens windows. After a successful test, each window is checked."""
    opened: list[Watched] = []

    async def open_one(origin: str, **options: Any) -> Watched:
        opened.append(await Watched.open(browser, origin, **options))
        return opened[-1]

    try:
        yield open_one
        for window in opened:
            window.check()
    finally:
        for window in opened:
            await window.close()  # closing a window twice has no effect


@pytest.fixture
def browser_name(browser: Browser) -> str:
    return browser.browser_type.name
