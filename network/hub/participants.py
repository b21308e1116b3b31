"""The participants that are live: their sessions, and what each has handled, as `Mailbox`es loaded from the state when
needed.

Stands between `intake`, which settles what is acknowledged, and what goes out (`publisher`, `pages`, `redelivery`).
Decides in memory; no IO, no clock. Holds the committed state, which the publisher moves on."""

from __future__ import annotations

from collections.abc import Iterable

from roundelay.network.core.state import State
from roundelay.network.core.tables import Attempt, Participant

from .delivery import Mailbox
from .session import Session


class LiveParticipant:
    """A participant with at least one session, or whose mailbox is of use yet."""

    __slots__ = ("agent_id", "mailbox", "registered_seq", "sessions")

    def __init__(self, participant: Participant, mailbox: Mailbox) -> None:
        self.agent_id = participant.agent_id
        self.registered_seq = participant.registered_seq
        self.mailbox = mailbox
        self.sessions: list[Session] = []


class LiveParticipants:
    """Every participant with a session, and those whose mailbox is of use yet. ``state`` is the committed one."""

    def __init__(self) -> None:
        self.state = State()
        self.live: dict[str, LiveParticipant] = {}
        """By id; where a message is published, this is looked up for each of its recipients."""
        self._online: dict[str, LiveParticipant] = {}
        """Those of them that have a session."""
        self._in_channels: dict[str, dict[str, LiveParticipant]] = {}
        """Those that have a session, by the channels that they are or were in."""
        self._idle: dict[str, None] = {}
        """Those without a session that `drop_idle` has yet to look at."""
        self._changed: dict[str, Mailbox] = {}

    def update_members(self, members: Iterable[str]) -> None:
        """These have come to channels or left them, by ``CHANNEL/ID``."""
        for key in members:
            channel, _, agent_id = key.partition("/")
            live = self.live.get(agent_id)
            if live is not None and live.sessions:
                self._in_channels.setdefault(channel, {})[agent_id] = live

    def online(self) -> Iterable[LiveParticipant]:
        """Those that have a session."""
        return self._online.values()

    def online_in(self, channel: str) -> Iterable[LiveParticipant]:
        """Those that have a session and are or were in a channel."""
        return self._in_channels.get(channel, {}).values()

    def get(self, agent_id: str) -> LiveParticipant | None:
        return self.live.get(agent_id)

    def join(self, live: LiveParticipant, session: Session) -> None:
        """A participant has one more session."""
        if not live.sessions:
            self._online[live.agent_id] = live
            for channel in self.state.memberships(live.agent_id):
                self._in_channels.setdefault(channel, {})[live.agent_id] = live
        live.sessions.append(session)

    def leave(self, live: LiveParticipant, session: Session) -> None:
        """One of a participant's sessions is gone."""
        live.sessions.remove(session)
        mailbox = live.mailbox
        mailbox.delivered = max(mailbox.delivered, session.outbox.delivered)
        if live.sessions:
            return
        # whoever comes next gets what the last one held on another attempt, also from a cursor above it
        mailbox.awaiting_retry |= mailbox.failed
        self._idle[live.agent_id] = None
        del self._online[live.agent_id]
        for channel in self.state.memberships(live.agent_id):
            inside = self._in_channels[channel]
            del inside[live.agent_id]
            if not inside:
                del self._in_channels[channel]

    def find_attempt(self, agent_id: str, seq: int) -> Attempt | None:
        """The failures of one message at one participant, if it failed and is not settled."""
        found: Attempt | None = self.state.get("attempt", f"{agent_id}/{seq}")
        return found

    def reset(self) -> None:
        """Drop everything: the state is loaded anew."""
        for known in (self.live, self._online, self._in_channels, self._idle):
            known.clear()
        self._changed = {}  # a mailbox from before has its own

    def sessions_of(self, agent_id: str) -> list[Session]:
        live = self.live.get(agent_id)
        return list(live.sessions) if live is not None else []

    def find_mailbox(self, agent_id: str) -> Mailbox | None:
        """The mailbox of a participant, or None if nobody is registered so."""
        participant = self.state.participant(agent_id)
        return self.activate(participant).mailbox if participant is not None else None

    def activate(self, participant: Participant) -> LiveParticipant:
        """The participant, live from here on if it was not."""
        live = self.live.get(participant.agent_id)
        if live is None:
            mailbox = self._load(participant.agent_id)
            live = self.live[participant.agent_id] = LiveParticipant(participant, mailbox)
            self._idle[participant.agent_id] = None
        return live

    def drop_idle(self) -> None:
        """Forget participants without a session whose mailbox the ledger holds as it is. One that is of use yet is
        looked at again when it changes (`changed`): nothing else ends its use."""
        for agent_id in list(self._idle):
            live = self.live.get(agent_id)
            if live is not None and not live.sessions:
                mailbox = live.mailbox
                if mailbox.is_dirty:
                    continue
                if not mailbox.awaiting_retry and mailbox.delivered <= mailbox.ack_cursor:
                    if mailbox.as_floor() != self.state.ack_cursor(agent_id):
                        continue  # its commit is under way
                    del self.live[agent_id]
            del self._idle[agent_id]

    def is_handled(self, agent_id: str, seq: int) -> bool:
        live = self.live.get(agent_id)
        if live is not None:
            return live.mailbox.is_handled(seq)
        attempt = self.find_attempt(agent_id, seq)
        return self.state.ack_cursor(agent_id).is_handled(seq) and not (attempt is not None and attempt.is_revived)

    def is_waiting(self, agent_id: str, seq: int) -> bool:
        """Whether a message that failed has yet to be handed over again."""
        live = self.live.get(agent_id)
        if live is not None:
            return seq in live.mailbox.awaiting_retry
        return self.find_attempt(agent_id, seq) is not None and not self.is_handled(agent_id, seq)

    def delivered_up_to(self, agent_id: str) -> int:
        """The highest seq that any session of this participant was handed, as far as it is known."""
        live = self.live.get(agent_id)
        if live is None:
            return 0
        return max([live.mailbox.delivered, *(session.outbox.delivered for session in live.sessions)])

    def _load(self, agent_id: str) -> Mailbox:
        mailbox = Mailbox(self.state.ack_cursor(agent_id), agent_id, self._changed)
        open_triggers = self.open_triggers(agent_id)
        for seq, attempt in self.state.attempts(agent_id).items():
            if seq in open_triggers:
                continue
            if attempt.is_revived or not mailbox.is_handled(seq):
                mailbox.schedule_retry(seq)
            else:  # acknowledged just before a crash
                mailbox.handled_failures.append(seq)
                mailbox.mark_changed()
        return mailbox

    def open_triggers(self, agent_id: str) -> set[int]:
        """The triggers of an agent's open reactions, whose attempts count until those are finished."""
        return {reaction.trigger for reaction in self.state.reactions_of(agent_id).values()}

    def find_delivery_start(self, participant: Participant, first_seq: int) -> int:
        """Where delivery from the floor begins. What retention dropped meanwhile is given up, after this one answer."""
        mailbox = self.activate(participant).mailbox
        floor = max(mailbox.delivery_start(), participant.registered_seq)
        if mailbox.ack_cursor >= first_seq - 1:
            mailbox.drop_before(first_seq)
        return floor

    def list_changed(self) -> list[Mailbox]:
        """LiveParticipants that changed since their last snapshot, which is to be taken now."""
        found = list(self._changed.values())
        self._idle.update((mailbox.agent_id, None) for mailbox in found if mailbox.agent_id not in self._online)
        return found
