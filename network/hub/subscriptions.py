"""`Subscriptions`: events for subscribed sessions: presence, channel members, signals, and quiet conversations. Events
are never stored.

`SessionRegistry` owns one `Subscriptions`. This module decides which sessions receive an event. `signals` and the core
decide who may see a thread. Events for slow sessions are dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Literal

from roundelay.network.addresses import channel_address, name_of
from roundelay.network.core.rows import MessageHead
from roundelay.network.core.state import State
from roundelay.network.core.tables import Participant
from roundelay.network.frames import PresenceFrame, encode

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


UNWATCHED_S = 10.0
"""Time in seconds between the end of the last signal subscription and the notice that reactors need not send
signals."""


class Subscriptions:
    """The sessions that subscribed to presence notices, to signals, or to the notice `conversation_quiet`."""

    def __init__(self, output: SessionOutput, participants: LiveParticipants) -> None:
        self._output = output
        self._participants = participants
        self._presence: dict[Session, None] = {}
        self._signals: dict[Session, None] = {}
        self.conversations = ConversationWatch(output, participants)
        self.is_watched = False
        """Whether the hub's last notice asked reactors to send signals."""
        self._unwatched: asyncio.TimerHandle | None = None

    def subscribe(self, session: Session, presence: bool | None, signals: bool | None, quiet: bool | None) -> None:
        """Start (True), end (False) or keep (None) each subscription of a session."""
        wanted = (self._presence, presence), (self._signals, signals), (self.conversations.subscribers, quiet)
        for subscribers, is_wanted in wanted:
            if is_wanted:
                subscribers[session] = None
            elif is_wanted is not None:
                subscribers.pop(session, None)
        self._update_watched()

    def _update_watched(self) -> None:
        """Notify reactors when the first session subscribes to signals, and some time after the last subscription has
        ended."""
        if self._signals and self._unwatched is not None:
            self._unwatched.cancel()
            self._unwatched = None
        if self._signals and not self.is_watched:
            self._announce_watched(is_watched=True)
        elif not self._signals and self.is_watched and self._unwatched is None:
            # Wait before the notice, because a page that reloads subscribes again at once.
            loop = asyncio.get_running_loop()
            self._unwatched = loop.call_later(UNWATCHED_S, partial(self._announce_watched, is_watched=False))

    def _announce_watched(self, *, is_watched: bool) -> None:
        self.is_watched, self._unwatched = is_watched, None
        reactors = [session for live in self._participants.online() for session in live.sessions if session.is_reactor]
        self._output.notice(reactors, "watched", None, {"is_watched": is_watched})

    def remove(self, session: Session) -> None:
        """End all subscriptions of a session. Idempotent."""
        self.conversations.subscribers.pop(session, None)
        self._presence.pop(session, None)
        self._signals.pop(session, None)
        self._update_watched()

    def announce_presence(self, participant: Participant, state: Literal["online", "offline"]) -> None:
        """Report that a participant came online or went offline."""
        frame = encode(PresenceFrame(agent_id=participant.agent_id, state=state, card=participant.card))
        for session in self._presence:
            # Skip a slow session. The event would be out of date when it arrives, and would delay answers.
            if not session.connection.is_paused:
                self._output.write(session, frame)

    def announce_members(self, channel: str | None, agent_id: str | None) -> None:
        """Report that the members of a channel, or their rights, changed. The channel's members, operators and the
        participant ``agent_id`` receive the report. Without a channel, every session that subscribed to presence
        receives it."""
        sessions = [
            session
            for session in self._presence
            if channel is None or self._hears_of_members(session, channel, agent_id)
        ]
        thread_id = channel_address(channel) if channel is not None else None
        self._output.notice(sessions, "members", thread_id, {"agent_id": agent_id} if agent_id is not None else {})

    def _hears_of_members(self, session: Session, channel: str, agent_id: str | None) -> bool:
        origin = session.live_origin()
        is_member = self._participants.state.member(channel, origin.agent_id).is_in
        return origin.is_operator or origin.agent_id == agent_id or is_member

    def list_signal_readers(self, address: str) -> Iterable[str]:
        """Return the ids of the participants whom a signal may reach: for ``broadcast`` the subscribers, for a channel
        its members who are online."""
        if address == "broadcast":
            return dict.fromkeys(session.live_origin().agent_id for session in self._signals)
        return [live.agent_id for live in self._participants.online_in(name_of(address))]

    def send_signal(self, readers: Iterable[str], sender_session: str, frame: bytes) -> None:
        """Send a signal to the subscribed sessions of ``readers``, except to the session that sent it."""
        for agent_id in readers:
            for session in self._participants.sessions_of(agent_id):
                if session.session_id == sender_session or session.connection.is_paused:
                    continue
                if session in self._signals:
                    self._output.write(session, frame)
