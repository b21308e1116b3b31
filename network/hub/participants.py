"""The live participants: their sessions, and the messages that each participant has handled.

`intake` marks acknowledged messages as handled here. `publisher`, `pages` and `redelivery` look up the sessions of
recipients here. `LiveParticipants` also holds the committed state, into which the publisher merges each batch. Works in
memory; no IO.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable

from roundelay.network.core.state import State
from roundelay.network.core.tables import Attempt, Participant

from .delivery import Mailbox
from .session import Session

MAX_KNOWN = 10_000
"""Maximum number of participants whose departure is remembered."""


class Absences:
    """Times at which the last sessions of participants ended.

    The times come from the event loop's clock. With the wall clock, which may jump, a participant could seem to have
    been absent for an hour.

    The hub does not store these times. After `restart`, every offline participant counts as absent since the restart. A
    reported absence may therefore be too short, but never too long.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        """Time of the last restart, or time of the newest departure that was dropped because of `MAX_KNOWN`."""
        self._left_at: OrderedDict[str, float] = OrderedDict()

    def restart(self) -> None:
        """Forget all departures and measure absences from now on. Called after the hub has loaded its state."""
        self._left_at.clear()
        self._since = self._loop.time()

    def record(self, agent_id: str) -> None:
        """Record that the last session of a participant has ended."""
        self._left_at[agent_id] = self._loop.time()
        self._left_at.move_to_end(agent_id)
        if len(self._left_at) > MAX_KNOWN:
            self._since = max(self._since, self._left_at.popitem(last=False)[1])

    def measure(self, agent_id: str) -> int:
        """Return how long an offline participant has been absent, in ms. At least 1."""
        return max(1, round((self._loop.time() - self._left_at.get(agent_id, self._since)) * 1000))


class LiveParticipant:
    """A participant that has a session, or whose mailbox differs from its stored version in the ledger."""

    __slots__ = ("agent_id", "announced_card", "mailbox", "registered_seq", "sessions")

    def __init__(self, participant: Participant, mailbox: Mailbox) -> None:
        self.agent_id = participant.agent_id
        self.registered_seq = participant.registered_seq
        self.announced_card = participant.card
        """The participant's card as it was in the last presence event."""
        self.mailbox = mailbox
        self.sessions: list[Session] = []


class LiveParticipants:
    """All live participants, and the committed state. Mailboxes are loaded from the state when needed."""

    def __init__(self) -> None:
        self.absences = Absences()
        self.state = State()
        """The committed state."""
        self.live: dict[str, LiveParticipant] = {}
        """Live participants by id. The publisher uses this dict to look up each recipient of each message."""
        self._online: dict[str, LiveParticipant] = {}
        """Participants that have a session, by id."""
        self._in_channels: dict[str, dict[str, LiveParticipant]] = {}
        """Participants that have a session, by each channel that they are or were in, and by id."""
        self._idle: dict[str, None] = {}
        """Participants without a session that `drop_idle` has not checked yet."""
        self._changed: dict[str, Mailbox] = {}
        self._head_moved = asyncio.Event()
        """Event that is set and then replaced by a new event whenever the head moves. Setting the event wakes the tasks
        that wait for a higher head."""

    # --- the state

    def merge(self, draft: State) -> None:
        """Merge a draft into the committed state."""
        head = self.state.head
        self.state.merge(draft)
        # Keep members who left in this index, because they may still read earlier messages. `is_recipient` decides for
        # each message.
        for key in draft.tables.get("member", ()):  # members who joined or left; the keys are CHANNEL/ID
            channel, _, agent_id = key.partition("/")
            live = self.live.get(agent_id)
            if live is not None and live.sessions:
                self._in_channels.setdefault(channel, {})[agent_id] = live
        if self.state.head != head:
            self._head_moved.set()
            self._head_moved = asyncio.Event()

    async def wait_beyond(self, seq: int, timeout_s: float) -> None:
        """Wait until a row with a seq above ``seq`` is committed, or until the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.state.head <= seq:
                    await self._head_moved.wait()
        except TimeoutError:
            return

    def reset(self) -> None:
        """Drop all data that was derived from the state. Called before the state is loaded again."""
        for participants in (self.live, self._online, self._in_channels, self._idle):
            participants.clear()
        self._changed = {}  # a new dict, because old mailboxes still refer to the old dict

    # --- sessions

    def online(self) -> Iterable[LiveParticipant]:
        """Return the participants that have a session."""
        return self._online.values()

    def online_in(self, channel: str) -> Iterable[LiveParticipant]:
        """Return the participants that have a session and are or were in a channel."""
        return self._in_channels.get(channel, {}).values()

    def get(self, agent_id: str) -> LiveParticipant | None:
        return self.live.get(agent_id)

    def sessions_of(self, agent_id: str) -> list[Session]:
        live = self.live.get(agent_id)
        return list(live.sessions) if live is not None else []

    def join(self, live: LiveParticipant, session: Session) -> None:
        """Add a session of a participant."""
        if not live.sessions:
            self._online[live.agent_id] = live
            for channel in self.state.memberships(live.agent_id):
                self._in_channels.setdefault(channel, {})[live.agent_id] = live
        live.sessions.append(session)

    def leave(self, live: LiveParticipant, session: Session) -> None:
        """Remove a session of a participant."""
        live.sessions.remove(session)
        mailbox = live.mailbox
        # Keep the highest delivered seq after the session has ended. Otherwise a receipt could change from "delivered"
        # back to undelivered when a client disconnects.
        mailbox.delivered = max(mailbox.delivered, session.outbox.delivered)
        if live.sessions:
            return
        self.absences.record(live.agent_id)
        # The next session receives the last session's unhandled failed messages as another attempt, even if the next
        # session starts from a cursor above them.
        mailbox.awaiting_retry |= mailbox.failed
        self._idle[live.agent_id] = None
        del self._online[live.agent_id]
        for channel in self.state.memberships(live.agent_id):
            online = self._in_channels[channel]
            del online[live.agent_id]
            if not online:
                del self._in_channels[channel]

    # --- mailboxes

    def activate(self, participant: Participant) -> LiveParticipant:
        """Return the live participant. If it is not in memory, load it from the state."""
        live = self.live.get(participant.agent_id)
        if live is None:
            mailbox = self._load_mailbox(participant.agent_id)
            live = self.live[participant.agent_id] = LiveParticipant(participant, mailbox)
            self._idle[participant.agent_id] = None
        return live

    def find_mailbox(self, agent_id: str) -> Mailbox | None:
        """Return a participant's mailbox, or None if the id is not registered."""
        participant = self.state.participant(agent_id)
        return self.activate(participant).mailbox if participant is not None else None

    def _load_mailbox(self, agent_id: str) -> Mailbox:
        mailbox = Mailbox(self.state.ack_cursor(agent_id), agent_id, self._changed)
        open_triggers = self.open_triggers(agent_id)
        for seq, attempt in self.state.attempts(agent_id).items():
            # The agent still works on this message, and its reaction will be resumed. Another delivery would start a
            # second reaction.
            if seq in open_triggers:
                continue
            if attempt.is_revived or not mailbox.is_handled(seq):
                mailbox.schedule_retry(seq)
            else:  # the hub crashed after the acknowledgement, before it deleted the failures
                mailbox.handled_failures.append(seq)
                mailbox.mark_changed()
        return mailbox

    def open_triggers(self, agent_id: str) -> set[int]:
        """Return the triggers of an agent's open reactions. The failures of a trigger count until its reaction has
        ended."""
        return {reaction.trigger for reaction in self.state.reactions_of(agent_id).values()}

    def find_attempt(self, agent_id: str, seq: int) -> Attempt | None:
        """Return the stored failures of a message at a participant. Return None if the message is handled or never
        failed."""
        attempt: Attempt | None = self.state.get("attempt", f"{agent_id}/{seq}")
        return attempt

    def find_delivery_start(self, participant: Participant, first_seq: int) -> int:
        """Return the cursor at which delivery starts for a session that begins at its participant's ack cursor.

        The call also removes messages that retention has deleted from the mailbox. So only the first call can return a
        cursor below ``first_seq``, and only that session is welcomed as ``limited``.
        """
        mailbox = self.activate(participant).mailbox
        start = max(mailbox.delivery_start(), participant.registered_seq)
        if mailbox.ack_cursor >= first_seq - 1:
            mailbox.drop_before(first_seq)
        return start

    def list_changed(self) -> list[Mailbox]:
        """Return the mailboxes that changed since their last snapshot. The caller must take a snapshot of each."""
        changed = list(self._changed.values())
        self._idle.update((mailbox.agent_id, None) for mailbox in changed if mailbox.agent_id not in self._online)
        return changed

    def drop_idle(self) -> None:
        """Forget participants that have no session and whose mailbox equals its stored version in the ledger.

        `list_changed` adds other mailboxes to the check again after they have changed, because only a change can make a
        mailbox equal to its stored version.
        """
        for agent_id in list(self._idle):
            live = self.live.get(agent_id)
            if live is not None and not live.sessions:
                mailbox = live.mailbox
                if mailbox.is_dirty:
                    continue
                if not mailbox.awaiting_retry and mailbox.delivered <= mailbox.ack_cursor:
                    # If the mailbox were forgotten now, the state would provide an older cursor, and handled messages
                    # would be delivered again.
                    if mailbox.to_ack_cursor() != self.state.ack_cursor(agent_id):
                        continue  # the commit of the cursor is in progress
                    del self.live[agent_id]
            del self._idle[agent_id]

    # --- handled messages

    def is_handled(self, agent_id: str, seq: int) -> bool:
        live = self.live.get(agent_id)
        if live is not None:
            return live.mailbox.is_handled(seq)
        attempt = self.find_attempt(agent_id, seq)
        return self.state.ack_cursor(agent_id).is_handled(seq) and not (attempt is not None and attempt.is_revived)

    def is_awaiting_retry(self, agent_id: str, seq: int) -> bool:
        """Return whether a failed message has yet to be delivered again."""
        live = self.live.get(agent_id)
        if live is not None:
            return seq in live.mailbox.awaiting_retry
        return self.find_attempt(agent_id, seq) is not None and not self.is_handled(agent_id, seq)

    def delivered_up_to(self, agent_id: str) -> int:
        """Return the highest seq that any session of this participant received. Return 0 if the hub remembers no
        delivery."""
        live = self.live.get(agent_id)
        if live is None:
            return 0
        return max([live.mailbox.delivered, *(session.outbox.delivered for session in live.sessions)])
