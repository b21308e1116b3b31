"""Signals: short-lived reports of work in progress. The hub forwards them to participants who may read them, and never
stores them.

A signal to an address reaches the participants who are connected now. A signal to a thread may be about several
messages, and reaches the participants who may read all of these messages. If the signal names a trigger, it is about
this message only. Otherwise it is about the newest message of the thread and the triggers of the sender's open
reactions in the thread. Signals beyond the rate and signals for slow readers are dropped.
"""

from __future__ import annotations

from msgspec import UNSET

from roundelay.network.addresses import (
    BROADCAST,
    channel_address,
    direct_thread,
    mod_thread,
    parse_address,
)
from roundelay.network.clock import Clock
from roundelay.network.core.access import check_right_to_send
from roundelay.network.core.entries import Origin, RefusedFrame
from roundelay.network.core.limits import next_arrival_or_none
from roundelay.network.core.rows import MessageHead
from roundelay.network.core.sending import Rules
from roundelay.network.core.state import State
from roundelay.network.core.visibility import follows_live, hears_channel, may_read, parties
from roundelay.network.errors import (
    Forbidden,
    InvalidArguments,
    LedgerError,
    RoundelayError,
    UnknownMessage,
    UnknownRecipient,
)
from roundelay.network.frames import SignalFrame, SignalOutFrame, encode
from roundelay.network.ledger import Ledger, find_newest_message

from .pending import PendingEntries
from .session import Session, SessionState
from .sessions import SessionRegistry

MAX_OPEN_REACTIONS = 64
"""Maximum number of open reactions that are checked for a signal without a trigger (docs/protocol.md)."""
MAX_MESSAGES_BACK = 64
"""Maximum number of older messages in a thread that are searched for one that the sender may read
(docs/protocol.md)."""


class Signals:
    """Forwards signals. A refusal goes through ``pending``, so that it keeps its place in the order of answers."""

    def __init__(
        self, registry: SessionRegistry, rules: Rules, ledger: Ledger, pending: PendingEntries, clock: Clock
    ) -> None:
        self._registry = registry
        self._limits = rules.limits
        self._mods = rules.mods
        self._ledger = ledger
        self._pending = pending
        self._clock = clock

    def accept(self, session: Session, origin: Origin, frame: SignalFrame, *, is_beyond_rate: bool) -> None:
        """Forward one signal, or drop it if its participant has sent too many signals in a second. Raises an error if
        the signal is refused."""
        send_rate = session.send_rate
        due = None
        if not is_beyond_rate:
            due = next_arrival_or_none(send_rate.next_signal_at, self._clock(), self._limits.signals_per_s)
        if due is None:
            self._registry.counts["signals_dropped"] += 1
            return
        # Count the signal before the checks below: refused signals use up the rate too.
        send_rate.next_signal_at = due
        if frame.to is UNSET:
            reads = self._registry.open_reads(session)
            # A signal to a thread reads the ledger, so it counts as a read. Dropping a signal does no harm.
            if reads.in_progress < self._limits.max_reads:  # otherwise the signal is dropped
                reads.in_progress += 1
                self._registry.spawn(self._signal_thread(session, frame))
            return
        kind, name = parse_address(frame.to)
        check_right_to_send(self._registry.state, origin, kind, name)
        thread_id, readers = self._find_readers(origin.agent_id, kind, name)
        self._send(session, frame, thread_id, readers)

    def _find_readers(self, sender: str, kind: str, name: str) -> tuple[str, list[str]]:
        """Return the thread and the readers of a signal to an address. Raises `UnknownRecipient`."""
        state, subscriptions = self._registry.state, self._registry.subscriptions
        if kind == "agent" and state.present(name) is not None:
            return direct_thread(sender, name), list(dict.fromkeys((name, sender)))
        if kind == BROADCAST:
            return BROADCAST, list(subscriptions.list_signal_readers(BROADCAST))
        if kind == "channel" and state.member(name, sender).is_in:
            to = channel_address(name)
            return to, [
                agent_id for agent_id in subscriptions.list_signal_readers(to) if hears_channel(state, agent_id, name)
            ]
        if kind == "mod" and name in self._mods:
            return mod_thread(name, sender), [sender]
        raise UnknownRecipient(f"{sender} cannot send a signal to {kind}:{name}.")

    async def _signal_thread(self, session: Session, frame: SignalFrame) -> None:
        """Send a signal to a thread. It reaches the participants who may read every message that the signal may be
        about."""
        assert frame.thread_id is not UNSET
        origin, reads = session.live_origin(), session.reads
        sender, read_errors, reader = origin.agent_id, self._registry.read_errors, f"a signal of {origin.agent_id}"
        try:
            if frame.trigger is not UNSET:
                heads = await self._find_trigger(sender, frame.thread_id, frame.trigger)
            else:
                heads = await self._find_heads(sender, frame.thread_id)
            if read_errors.is_failing:
                read_errors.record_success(reader)
        except LedgerError as error:
            read_errors.record(error, reader)
            return
        except RoundelayError as error:
            self._pending.add(RefusedFrame(origin, error, {}))
            return
        finally:
            if reads is not None:
                reads.in_progress -= 1
        # Read the state only after the ledger: members may have left in the meantime.
        state, head = self._registry.state, heads[0]
        is_private = head.kind in ("direct", "mod")
        # Start from the participants who can be readers. Checking the rules for every participant would cost too much
        # per signal.
        near = parties(head) if is_private else self._registry.subscriptions.list_signal_readers(head.to)
        readers = [agent_id for agent_id in dict.fromkeys(near) if follows_live(state, agent_id, heads)]
        if state.rights is not None:
            readers = [agent_id for agent_id in readers if _may_address(state, origin, head, agent_id)]
        self._send(session, frame, frame.thread_id, readers)

    async def _find_trigger(self, sender: str, thread_id: str, trigger: int) -> list[MessageHead]:
        """Return the message that a signal names as its trigger. Raises `UnknownMessage` unless the message is in the
        thread and the sender may read it."""
        state = self._registry.state
        reaction = next(iter(state.reactions_to(sender, trigger).values()), None)
        head = reaction.trigger_head if reaction is not None else None
        if head is None:
            head = (await self._ledger.heads([trigger])).get(trigger)
        if head is None or head.thread_id != thread_id or not may_read(self._registry.state, sender, head):
            raise UnknownMessage(
                f"There is no message {trigger} in {thread_id[:80]!r} that {sender} may read; trigger must be the "
                "seq of such a message."
            )
        return [head]

    async def _find_heads(self, sender: str, thread_id: str) -> list[MessageHead]:
        """Return the messages that a signal without a trigger may be about: the newest message of the thread, the
        newest message that the sender may read, and the triggers of the sender's open reactions in the thread.

        Raises `UnknownMessage` if the sender may read no message, and `InvalidArguments` if the sender has too many
        open reactions.
        """
        row = await find_newest_message(self._ledger, thread_id)
        newest = row.head if row is not None else None
        page = None
        if newest is not None and not may_read(self._registry.state, sender, newest):
            # The sender may have the right to read only older messages, like a member who has left.
            page = await self._ledger.thread(thread_id, before=newest.seq, limit=MAX_MESSAGES_BACK)
        state = self._registry.state
        # Search the smaller group. Either group may have thousands of reactions, and a result must be in both.
        reactions = min(state.reactions_of(sender), state.reactions_in(thread_id), key=len)
        if len(reactions) > MAX_OPEN_REACTIONS:
            raise InvalidArguments(
                f"{sender} has more than {MAX_OPEN_REACTIONS} open reactions, so a signal must name the message that "
                "it is about as its trigger."
            )
        own = [
            reaction
            for reaction in reactions.values()
            if reaction.agent_id == sender and reaction.trigger_head.thread_id == thread_id
        ]
        messages = [newest, *(row.head for row in reversed(page.rows))] if page is not None else [newest]
        readable = next((head for head in messages if head is not None and may_read(state, sender, head)), None)
        heads = [head for head in (readable, *(reaction.trigger_head for reaction in own)) if head is not None]
        if newest is None or not any(may_read(state, sender, head) for head in heads):
            raise UnknownMessage(f"There is no thread {thread_id[:80]!r} that {sender} may read.")
        return [newest, *heads]

    def _send(self, session: Session, frame: SignalFrame, thread_id: str, readers: list[str]) -> None:
        sender = session.live_origin().agent_id
        if session.state is not SessionState.LIVE:  # the session was removed or revoked while its thread was looked up
            return
        data = encode(SignalOutFrame(sender_id=sender, thread_id=thread_id, kind=frame.kind, body=frame.body))
        self._registry.subscriptions.send_signal(readers, session.session_id, data)


def _may_address(state: State, origin: Origin, head: MessageHead, reader: str) -> bool:
    """Return whether the sender has the right to answer ``head`` to a reader. Without this right, the sender's signals
    do not reach the reader either."""
    kind, name = parse_address(head.to) if head.kind in ("broadcast", "channel") else ("agent", reader)
    try:
        check_right_to_send(state, origin, kind, name)
    except Forbidden:
        return False
    return True
