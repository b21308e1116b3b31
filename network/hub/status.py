"""`HubStatus`: the lifecycle of a hub, shared by the hub's parts. It shows whether the ledger is open and responds, and
whether the hub drains.

`batch_writer` and `hub` write the status; `server`, `hub_view` and `maintenance` read it.
"""

from __future__ import annotations

import asyncio

from roundelay.network.ledger import Ledger

MAX_COMMIT_S = 2.0
"""Duration of a commit, in seconds, after which the hub counts as not ready. SQLite silently retries for up to 10 s
when it cannot get a lock."""


class HubStatus:
    """State of one hub's ledger and of its shutdown."""

    def __init__(self, ledger: Ledger) -> None:
        self.is_open = False
        """Whether the ledger is open and the outcome of every commit is known."""
        self.opened = asyncio.Event()
        """Event that is set while the ledger is open and no part of the hub has asked to reopen it."""
        self.draining = asyncio.Event()
        """Event that is set when `Hub.close` starts. From then on, the hub accepts no more frames from sessions."""
        self.failed = asyncio.Event()
        """Event that is set when a task of the hub has failed. The caller that runs the hub must then close it."""
        self.commit_started_s: float | None = None
        """Loop time at which the commit in progress began. None if no commit is in progress."""
        self._ledger = ledger
        self._loop = asyncio.get_running_loop()

    @property
    def is_ready(self) -> bool:
        """Whether the hub accepts sessions: the ledger is open and answers in time."""
        started_s = self.commit_started_s
        is_quick = started_s is None or self._loop.time() - started_s < MAX_COMMIT_S
        return self.is_open and is_quick and self._ledger.is_answering
