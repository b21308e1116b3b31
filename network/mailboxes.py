"""The participants that are live: their sessions, and what each has handled, as `Mailbox`es loaded from the state when needed.

Stands between `intake`, which settles what is acknowledged, and what goes out (`switchboard`, `pages`, `redelivery`). Decides in
memory; no IO, no clock. Holds the committed state, which the hub moves on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .delivery import Mailbox
from .session import Session
from .state import State
from .tables import Attempt, Participant


class LiveParticipant:
    """A participant with at least one session, or whose mailbox is of use yet."""

    __slots__ = ("agent_id", "mailbox", "registered_seq", "sessions")

    def __init__(self, participant: Participant, mailbox: Mailbox) -> None:
        self.agent_id = participant.agent_id
        self.registered_seq = participant.registered_seq
        self.mailbox = mailbox
        self.sessions: list[Session] = []


class Mailboxes:
    """Every participant with a session, and those whose mailbox is of use yet. ``state`` is the committed one; the hub refreshes it."""

    def __init__(self) -> None:
        self.state = State()
        self._live: dict[str, LiveParticipant] = {}
        self._idle: set[str] = set()
        """Those of them that may have no session."""

    def all(self) -> Iterable[LiveParticipant]:
        return self._live.values()

    def get(self, agent_id: str) -> LiveParticipant | None:
        return self._live.get(agent_id)

    def leave(self, live: LiveParticipant, session: Session) -> None:
        """One of a participant's sessions is gone."""
        live.sessions.remove(session)
        mailbox = live.mailbox
        mailbox.delivered = max(mailbox.delivered, session.outbox.delivered)
        if not live.sessions:
            # whoever comes next gets what the last one held on another attempt, also from a cursor above it
            mailbox.waiting |= mailbox.tried
            self._idle.add(live.agent_id)

    def attempt(self, agent_id: str, seq: int) -> Attempt | None:
        """The failures of one message at one participant, if it failed and is not settled."""
        found: Attempt | None = self.state.get("attempt", f"{agent_id}/{seq}")
        return found

    def forget(self) -> None:
        """Drop everything: the state is loaded anew."""
        self._live.clear()
        self._idle.clear()

    def sessions(self, agent_id: str) -> Sequence[Session]:
        """The participant's sessions, as they are now: not to be kept."""
        live = self._live.get(agent_id)
        return live.sessions if live is not None else ()

    def sessions_of(self, agent_id: str) -> list[Session]:
        live = self._live.get(agent_id)
        return list(live.sessions) if live is not None else []

    def mailbox(self, agent_id: str) -> Mailbox | None:
        """The mailbox of a participant, or None if nobody is registered so."""
        participant = self.state.participant(agent_id)
        return self.of(participant).mailbox if participant is not None else None

    def of(self, participant: Participant) -> LiveParticipant:
        """The participant, live from here on if it was not."""
        live = self._live.get(participant.agent_id)
        if live is None:
            mailbox = self._load(participant.agent_id)
            live = self._live[participant.agent_id] = LiveParticipant(participant, mailbox)
            self._idle.add(participant.agent_id)
        return live

    def drop_idle(self) -> None:
        """Forget participants without a session whose mailbox the ledger holds as it is."""
        for agent_id in list(self._idle):
            live = self._live.get(agent_id)
            if live is not None and not live.sessions:
                mailbox = live.mailbox
                if mailbox.is_dirty or mailbox.waiting or mailbox.delivered > mailbox.floor:
                    continue
                if mailbox.as_floor() != self.state.floor(agent_id):
                    continue  # its commit is under way
                del self._live[agent_id]
            self._idle.discard(agent_id)

    def is_handled(self, agent_id: str, seq: int) -> bool:
        live = self._live.get(agent_id)
        if live is not None:
            return live.mailbox.is_handled(seq)
        attempt = self.attempt(agent_id, seq)
        return self.state.floor(agent_id).is_handled(seq) and not (attempt is not None and attempt.is_revived)

    def is_waiting(self, agent_id: str, seq: int) -> bool:
        """Whether a message that failed has yet to be handed over again."""
        live = self._live.get(agent_id)
        if live is not None:
            return seq in live.mailbox.waiting
        return self.attempt(agent_id, seq) is not None and not self.is_handled(agent_id, seq)

    def delivered_up_to(self, agent_id: str) -> int:
        """The highest seq that any session of this participant was handed, as far as it is known."""
        live = self._live.get(agent_id)
        if live is None:
            return 0
        return max([live.mailbox.delivered, *(session.outbox.delivered for session in live.sessions)])

    def _load(self, agent_id: str) -> Mailbox:
        mailbox = Mailbox(self.state.floor(agent_id))
        open_triggers = {seq for agent, seq in self.open_triggers() if agent == agent_id}
        for key, attempt in self.state.items("attempt"):
            owner, _, seq = key.partition("/")
            if owner != agent_id or int(seq) in open_triggers:
                continue
            if attempt.is_revived or not mailbox.is_handled(int(seq)):
                mailbox.wait(int(seq))
            else:  # acknowledged just before a crash
                mailbox.settled.append(int(seq))
                mailbox.is_dirty = True
        return mailbox

    def open_triggers(self) -> set[tuple[str, int]]:
        """Agents with the triggers of their open reactions, whose attempts count until those are finished."""
        return {(reaction.agent_id, reaction.trigger) for _, reaction in self.state.items("reaction")}

    def floor_of(self, participant: Participant, first_seq: int) -> int:
        """Where delivery from the floor begins. What retention dropped meanwhile is given up, after this one answer."""
        mailbox = self.of(participant).mailbox
        floor = max(mailbox.starts_after(), participant.registered_seq)
        if mailbox.floor >= first_seq - 1:
            mailbox.give_up_before(first_seq)
        return floor

    def changed(self) -> list[tuple[str, Mailbox]]:
        """Mailboxes that changed since their last snapshot."""
        return [(live.agent_id, live.mailbox) for live in self._live.values() if live.mailbox.is_dirty]
