"""Test of a hub from before read states and the inbox: the screens show the available data, and report what is
missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundelay.app import Network
from roundelay.network.client import NetworkClient
from roundelay.network.errors import UnknownOperation
from tests.support.full_screen import full_screen

NEWER = ("network.mark", "network.inbox", "network.dismiss")


class OlderHub(NetworkClient):
    """Client of a hub without newer operations, which lists threads in the old format."""

    async def call(self, op: str, args: Mapping[str, Any] | None = None, *, call_id: str | None = None) -> Any:
        if op in NEWER:
            raise UnknownOperation(f"There is no operation {op!r}.")
        value = await super().call(op, args, call_id=call_id)
        if op == "network.list_threads":
            for thread in value["threads"]:
                for name in ("last", "unread", "mark"):
                    thread.pop(name, None)
        return value


async def test_an_older_hub_is_shown_as_far_as_it_goes() -> None:
    async with Network.open() as network:
        ann, mia = await network.join("ann", kind="human"), await network.join("mia", kind="human")
        mia.__class__ = OlderHub
        await ann.send_text("mia", "hi")
        async with full_screen(mia, (100, 24)) as screen:
            await screen.shows("Messages since you joined count as unread")
            await screen.shows("  1 ann")
            await screen.press("p")
            await screen.shows("so threads cannot be pinned")
            await screen.press("enter")
            await screen.shows("  hi$")
            await screen.type("hello\n")
            await screen.shows("  hello$")
            await screen.press("escape", "escape")
            await screen.shows("mia: hello")
            await screen.shows_no("  1 ann")
            await screen.press("g", "i")
            await screen.shows("This hub does not store an inbox")
