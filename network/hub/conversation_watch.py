"""`ConversationWatch`: reads that wait until a conversation is quiet, and sessions that subscribed to
`conversation_quiet`.

`publisher` compares each batch with the committed state and reports the conversations that changed. While no read waits
and no session is subscribed, `publisher` skips the comparison. Works in memory; no IO, no clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from roundelay.network.core.rows import MessageHead
from roundelay.network.core.state import State

from .participants import LiveParticipants
from .session import Session, SessionOutput


class ConversationWatch:
    """The reads that wait for a change of a conversation, and the sessions that receive the notice
    `conversation_quiet`."""

    def __init__(self, output: SessionOutput, participants: LiveParticipants) -> None:
        self._output = output
        self._participants = participants
        self._waiting: dict[int, dict[asyncio.Future[None], None]] = {}
        """Futures of waiting reads, by the root of their conversation."""
        self.subscribers: dict[Session, None] = {}

    async def wait_for_change(self, root: int, timeout_s: float) -> None:
        """Wait until the set of open items in a conversation changes, or until the timeout."""
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(root, {})
        waiting[change] = None
        try:
            async with asyncio.timeout(timeout_s):
                await change
        except TimeoutError:
            return
        finally:
            waiting.pop(change, None)
            if not waiting and self._waiting.get(root) is waiting:
                del self._waiting[root]

    def list_open(self, state: State, draft: State) -> dict[int, bool]:
        """Return the conversations that a batch changes. The value says whether the conversation was open before the
        batch. Call this method before the draft is merged."""
        if not self._waiting and not self.subscribers:
            return {}
        return {root: bool(state.open_in(root)) for root in draft.list_changed_conversations()}

    def wake(self, state: State, before: dict[int, bool]) -> list[int]:
        """Wake the reads that wait for the conversations in ``before``. Return the conversations that have become
        quiet. Call this method after the draft is merged."""
        for root in before:
            for change in self._waiting.get(root, ()):
                if not change.done():
                    change.set_result(None)
        if not self.subscribers:
            return []
        return [root for root, was_open in before.items() if was_open and not state.open_in(root)]

    def announce(self, roots: Iterable[MessageHead]) -> None:
        """Send the notice `conversation_quiet` to the subscribed sessions of the participants who began these
        conversations."""
        for head in roots:
            own = self._participants.sessions_of(head.sender_id)
            sessions = [session for session in own if session in self.subscribers]
            self._output.notice(sessions, "conversation_quiet", head.thread_id, {"root": head.seq})
