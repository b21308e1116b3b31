"""Tests of a thread with more messages than the screen shows: only a window of them is drawn, and scrolling reaches
every message.
"""

from __future__ import annotations

import pytest

from roundelay.app import Network
from roundelay.network.config import Limits
from roundelay.tui.messages import MAX_SHOWN, MessageBox
from tests.support.full_screen import FullScreen, full_screen

MESSAGES = 1200


def numbers(screen: FullScreen) -> list[int]:
    return [int(box.message.text.split()[1]) for box in screen.boxes]


@pytest.mark.full
async def test_a_long_thread_is_read_from_end_to_end_in_a_window() -> None:
    limits = Limits(sends_per_s=1_000_000)
    async with Network.open(limits=limits) as network:
        ann, mia = await network.join("ann", kind="human"), await network.join("mia", kind="human")
        await ann.join_channel("dev")
        for number in range(MESSAGES):
            await ann.post("dev", f"message {number}")
        await mia.join_channel("dev")
        async with full_screen(mia, (80, 24), "channel:dev") as screen:
            most = 0
            await screen.shows("to channel:dev")
            await screen.shows(f"message {MESSAGES - 1}")
            screen.window.focus()
            while numbers(screen)[0] > MESSAGES - 600:
                before = numbers(screen)[0]
                await screen.until(
                    lambda before=before: screen.window.scroll_home(animate=False) or numbers(screen)[0] < before
                )
                found = numbers(screen)
                assert found == list(range(found[0], found[-1] + 1)), "a gap, or another order"
                most = max(most, len(screen.app.query(MessageBox)))
            assert f"message {MESSAGES - 1}" not in screen.text
            await ann.post("dev", f"message {MESSAGES}")
            while numbers(screen)[-1] < MESSAGES:
                before = numbers(screen)[-1]
                await screen.until(
                    lambda before=before: screen.window.scroll_end(animate=False) or numbers(screen)[-1] > before
                )
                found = numbers(screen)
                assert found == list(range(found[0], found[-1] + 1)), "a gap, or another order"
                most = max(most, len(screen.app.query(MessageBox)))
            last = f"message {MESSAGES}"
            await screen.until(lambda: screen.window.scroll_end(animate=False) or last in screen.text)
            assert most <= MAX_SHOWN + 50  # the screen may exceed its limit while it inserts a page
            assert len(screen.app.query(MessageBox)) <= MAX_SHOWN
