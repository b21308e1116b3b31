"""As whom the command line joins when nobody was named, and how long it waits for a hub that is gone. No IO but the
login user's name."""

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
"""Who looks around: a service, since another person would change whom broadcasts are for, and so what prompts may hold.
"""


def find_login_id() -> str:
    """The login user's name, made an id: a person's, in the conversation."""
    try:
        name = getpass.getuser().lower()
    except (OSError, KeyError):  # a user without a name
        name = ""
    return re.sub(r"[^a-z0-9._-]+", "-", name).lstrip("._-")[:64] or "person"


class ReconnectLimit:
    """Follows a connection's events. Without ``within_s`` it waits for ever."""

    def __init__(self, within_s: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self._within_s = within_s
        self._now = now
        self._lost_at: float | None = None

    def handle_event(self, event: Event) -> bool:
        """Whether the event is news: the loss and the return are, further tries are not. Raises `ConnectError` when it
        takes too long."""
        from roundelay.network.client import Reconnected, Reconnecting  # not at the start of every command
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
                f"The hub has been gone for {self._within_s:g} s: {event.reason.rstrip('. ')}. Start it, and run "
                "this again."
            )
        return False


def make_output_limit() -> ReconnectLimit:
    """A person sees that the hub is gone, and waits or leaves; nobody may be there to end what runs in a pipe."""
    return ReconnectLimit(None if sys.stdout.isatty() else PIPE_PATIENCE_S)
