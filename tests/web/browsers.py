"""Runs the installed Chromium and Firefox, and records everything that a page must never do.

`Watched` is one person's browser window with its own storage and cookies. `Watched` records every console error,
every violation of the page's policy, every dialog, and every request. A test ends with `Watched.check`, which allows
only requests to the node that serves the page.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from playwright.async_api import Browser, BrowserContext, Page, Playwright, Request, Response

from tests.web.stock_firefox import write_launcher

BrowserName = Literal["chromium", "firefox"]
COMMANDS: dict[BrowserName, tuple[str, ...]] = {
    "chromium": ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"),
    "firefox": ("firefox-esr", "firefox"),
}
HOW_TO = "apt install chromium firefox-esr (any Chromium and any Firefox on PATH will do)"
LOST_CONNECTION = r"WebSocket connection to|can’t establish a connection|was interrupted while the page was loading|ERR_CONNECTION|Failed to load resource"
"""Console errors of browsers when a hub is unreachable. Tests that stop the hub allow them."""


def find_browser(name: BrowserName) -> str | None:
    """Return the path of a browser, or None if it is not installed."""
    return next(filter(None, map(shutil.which, COMMANDS[name])), None)


async def launch(playwright: Playwright, name: BrowserName, folder: Path) -> Browser:
    path = find_browser(name)
    assert path is not None
    if name == "firefox":
        launcher = write_launcher(folder, path)
        return await playwright.firefox.launch(channel="moz-firefox", executable_path=launcher)
    flags = [
        "--disable-gpu", "--disable-software-rasterizer", "--in-process-gpu", "--renderer-process-limit=1",
        "--disable-background-networking", "--disable-component-update",
        "--disable-features=Translate,OptimizationHints,MediaRouter",
    ]  # fmt: skip
    flags += [*(["--no-sandbox"] if os.geteuid() == 0 else [])]
    return await playwright.chromium.launch(executable_path=path, args=flags)


@dataclass
class Watched:
    """The window of one person, on a node at this ``origin``."""

    context: BrowserContext
    page: Page
    origin: str
    requested: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    allowed: str = ""
    """Regular expression of errors that a test provokes."""

    @classmethod
    async def open(cls, browser: Browser, origin: str, **options: Any) -> Watched:
        options = {"locale": "en-GB", "viewport": {"width": 1280, "height": 800}} | options
        context = await browser.new_context(**options)
        context.set_default_timeout(30_000)
        window = cls(context, await context.new_page(), origin)
        context.on("request", window._note_request)
        context.on("console", lambda it: window.faults.append(f"console: {it.text}") if it.type == "error" else None)
        context.on("response", window._note_response)
        context.on("weberror", lambda it: window.faults.append(f"error: {it.error}"))
        window.page.on("dialog", window._note_dialog)
        window.page.on("websocket", lambda it: window.requested.append(it.url))
        return window

    def check(self) -> None:
        """Check that nothing went wrong in the page, and that it sent requests only to its node."""
        unexpected = [it for it in self.faults if not (self.allowed and re.search(self.allowed, it))]
        assert not unexpected, unexpected
        host = urlsplit(self.origin).netloc
        local = ("data", "blob", "about")
        elsewhere = [it for it in self.requested if urlsplit(it).scheme not in local and urlsplit(it).netloc != host]
        assert not elsewhere, elsewhere

    async def leave(self) -> None:
        """Check and close the window. Call this before the node stops, because the page would report the lost node."""
        self.check()
        await self.close()

    async def close(self) -> None:
        await self.context.close()

    def _note_request(self, request: Request) -> None:
        self.requested.append(request.url)

    def _note_response(self, response: Response) -> None:
        if response.status >= 400:
            self.faults.append(f"answer: {response.status} {response.url}")

    async def _note_dialog(self, dialog: Any) -> None:
        self.faults.append(f"dialog: {dialog.message}")
        await dialog.dismiss()
