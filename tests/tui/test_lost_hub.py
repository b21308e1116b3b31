"""Test of a hub that is killed and restarts while a screen is open: the screen reports the loss, keeps the draft, and
sends each message once.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from roundelay.network.client import NetworkClient
from tests.support.full_screen import full_screen
from tests.support.processes import hub_up


@pytest.mark.parametrize("sends_meanwhile", [pytest.param(False, marks=pytest.mark.full), True])
async def test_a_killed_hub_returns_under_a_draft(tmp_path: Path, sends_meanwhile: bool) -> None:
    async with (
        hub_up(tmp_path) as hub,
        NetworkClient("mia", hub.url, kind="human") as mia,
        NetworkClient("ann", hub.url, kind="human") as ann,
    ):
        async with full_screen(mia, (80, 24), "ann") as screen:
            await screen.shows("to ann")
            await screen.type("before\n")
            await screen.shows("  before")
            await screen.type("a draft")
            await hub.kill()
            await screen.shows("○ not connected")
            if sends_meanwhile:
                await screen.press("enter")
                await screen.shows("on its way to the hub: a draft")
                await screen.type("another")
            await hub.start()
            await screen.shows("● mia in")
            await screen.shows("another" if sends_meanwhile else "a draft")
            await ann.send_text("mia", "after")
            await screen.shows("  after")
            if not sends_meanwhile:
                await screen.press("enter")
            await screen.shows("^█?.? *a draft$")
            await screen.shows_no("on its way")
            await screen.until(lambda: len(screen.boxes) == 3)
            assert {box.message.text for box in screen.boxes} == {"before", "a draft", "after"}
        history = await ann.history("direct:ann~mia")
        assert sorted(it.text for it in history.messages) == ["a draft", "after", "before"]
