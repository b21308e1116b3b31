"""Participant id of the commands, and the time limit for their reconnects. The only IO in this module is reading the
login name.
"""

from __future__ import annotations

import getpass
import re
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roundelay.network.client import Event

PIPE_PATIENCE_S = 30.0
READER_ID = "roundelay-cli"
"""Participant id with which commands read. This participant is a service: a person would count as a recipient of
broadcasts, which would change what prompts may contain.
"""


def find_login_id() -> str:
    """Return the login user's name as an id for a person."""
    try:
        name = getpass.getuser().lower()
    except (OSError, KeyError):  # the operating system knows no name for this user
        name = ""
    return re.sub(r"[^a-z0-9._-]+", "-", name).lstrip("._-")[:64] or "person"


class ReconnectLimit:
    """Time limit for reconnecting. Ends a connection that has been lost for ``within_s`` seconds; None means no
    limit."""

    def __init__(self, within_s: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self._within_s = within_s
        self._now = now
        self._lost_at: float | None = None

    def handle_event(self, event: Event) -> bool:
        """Return whether to show this event. Repeated reconnection attempts are not shown.

        Raises `ConnectError` when the hub has been unreachable for longer than the limit.
        """
        from roundelay.network.client import Reconnected, Reconnecting  # keeps the start of commands fast
        from roundelay.network.errors import ConnectError

        if isinstance(event, Reconnected):
            self._lost_at = None
        if not isinstance(event, Reconnecting):
            return True
        if self._lost_at is None:
            self._lost_at = self._now()
            return True
        if self._within_s is not None and self._now() - self._lost_at >= self._within_s:
            raise ConnectError(
                f"The hub has been unreachable for {self._within_s:g} s: {event.reason.rstrip('. ')}. Start it and run "
                "the command again."
            )
        return False


def make_output_limit() -> ReconnectLimit:
    """Return a `ReconnectLimit`: no limit at a terminal, where a person can stop the command, and `PIPE_PATIENCE_S` for
    a pipe.
    """
    return ReconnectLimit(None if sys.stdout.isatty() else PIPE_PATIENCE_S)
