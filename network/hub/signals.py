"""Signals: what is told of work under way, passed on to those who may read it, and stored nowhere.

A signal names a place, and reaches who is there now; or a thread, and reaches who may read every message that it may
be about: its trigger, or else the newest of the thread and whatever the sender has an open reaction to there. Signals
may be dropped, and are, beyond their rate and for slow readers.
"""

from __future__ import annotations

from collections.abc import Callable

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
from roundelay.network.core.entries import Entry, Origin, RefusedFrame
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
from roundelay.network.ledger import find_newest

from .publisher import SessionRegistry
from .session import Session, SessionState

MAX_JUDGES = 64
"""So many open reactions are looked through for one signal that does not name its trigger (docs/protocol.md)."""
MAX_LOOKED_BACK = 64
"""So many messages of a thread are, for one that its sender may read (docs/protocol.md)."""


class Signals:
    """Passes signals on. What is refused goes by ``enter``, to be answered in its order."""

    def __init__(self, board: SessionRegistry, rules: Rules, clock: Clock, enter: Callable[[Entry], None]) -> None:
        self._board = board
        self._limits = rules.limits
        self._mods = rules.mods
        self._clock = clock
        self._enter = enter

    def accept(self, session: Session, origin: Origin, frame: SignalFrame, *, is_beyond: bool) -> None:
        """Take one signal, of a participant that may be beyond the rate of its frames. Raises what refuses it."""
        pace = session.send_rate
        due = (
            next_arrival_or_none(pace.next_signal_at, self._clock(), self._limits.signals_per_s)
            if not is_beyond
            else None
        )
        if due is None:  # it is dropped, as signals may be
            self._board.counts["signals_dropped"] += 1
            return
        pace.next_signal_at = due
        if frame.to is UNSET:
            if session.reads_under_way < self._limits.max_reads:  # else it is dropped, as signals may be
                session.reads_under_way += 1
                self._board.spawn(self._signal_thread(session, frame))
            return
        kind, name = parse_address(frame.to)
        check_right_to_send(self._board.state, origin, kind, name)
        thread_id, readers = self._signal_readers(origin.agent_id, kind, name)
        self._pass_signal(session, frame, thread_id, readers)

    def _signal_readers(self, sender: str, kind: str, name: str) -> tuple[str, list[str]]:
        state = self._board.state
        if kind == "agent" and state.present(name) is not None:
            return direct_thread(sender, name), list(dict.fromkeys((name, sender)))
        if kind == BROADCAST:
            return BROADCAST, list(self._board.around(BROADCAST))
        if kind == "channel" and state.member(name, sender).is_in:
            to = channel_address(name)
            return to, [agent_id for agent_id in self._board.around(to) if hears_channel(state, agent_id, name)]
        if kind == "mod" and name in self._mods:
            return mod_thread(name, sender), [sender]
        raise UnknownRecipient(f"{kind}:{name} is no place where {sender} may signal.")

    async def _signal_thread(self, session: Session, frame: SignalFrame) -> None:
        """Pass a signal on to those who may know of what is worked on: of its ``trigger``, or of all that it may be
        about."""
        assert frame.thread_id is not UNSET
        sender = session.live_origin().agent_id
        outage, who = self._board.read_outage, f"a signal of {sender}"
        try:
            if frame.trigger is not UNSET:
                judges = await self._find_trigger(sender, frame.thread_id, frame.trigger)
            else:
                judges = await self._find_judges(sender, frame.thread_id)
            if outage.is_failing:
                outage.record_success(who)
        except LedgerError as error:
            outage.record(error, who)
            return
        except RoundelayError as error:
            self._enter(RefusedFrame(session.live_origin(), error, {}))
            return
        finally:
            session.reads_under_way -= 1
        state, head = self._board.state, judges[0]
        near = parties(head) if head.kind in ("direct", "mod") else self._board.around(head.to)
        readers = [agent_id for agent_id in dict.fromkeys(near) if follows_live(state, agent_id, judges)]
        if state.rights is not None:
            readers = [agent_id for agent_id in readers if _may_address(state, session.live_origin(), head, agent_id)]
        self._pass_signal(session, frame, frame.thread_id, readers)

    async def _find_trigger(self, sender: str, thread_id: str, trigger: int) -> list[MessageHead]:
        """The message that a signal says it is about. Raises `UnknownMessage` unless it is one of the thread that the
        sender may read."""
        opened = next(iter(self._board.state.reactions_to(sender, trigger).values()), None)
        head = opened.trigger_head if opened is not None else (await self._board.ledger.heads([trigger])).get(trigger)
        if head is None or head.thread_id != thread_id or not may_read(self._board.state, sender, head):
            raise UnknownMessage(
                f"There is no message {trigger} in {thread_id[:80]!r} that {sender} may read; trigger is the seq of "
                "one."
            )
        return [head]

    async def _find_judges(self, sender: str, thread_id: str) -> list[MessageHead]:
        """What a signal may be about that does not say it: the newest message of the thread, the newest one that the
        sender may read, and whatever it has an open reaction to there. Raises `UnknownMessage` if it may read none,
        `InvalidArguments` if there is too much."""
        row = await find_newest(self._board.ledger, thread_id)
        newest = row.head if row is not None else None
        page = None
        if newest is not None and not may_read(self._board.state, sender, newest):
            page = await self._board.ledger.thread(thread_id, before=newest.seq, limit=MAX_LOOKED_BACK)
        state = self._board.state
        begun = min(state.reactions_of(sender), state.reactions_in(thread_id), key=len)
        if len(begun) > MAX_JUDGES:
            raise InvalidArguments(
                f"{sender} has more than {MAX_JUDGES} reactions open; a signal names the message that it is about as "
                "its trigger."
            )
        mine = [it for it in begun.values() if it.agent_id == sender and it.trigger_head.thread_id == thread_id]
        known = [newest, *(row.head for row in reversed(page.rows))] if page is not None else [newest]
        given = next((head for head in known if head is not None and may_read(state, sender, head)), None)
        judges = [head for head in (given, *(it.trigger_head for it in mine)) if head is not None]
        if newest is None or not any(may_read(state, sender, head) for head in judges):
            raise UnknownMessage(f"There is no thread {thread_id[:80]!r} that {sender} may read.")
        return [newest, *judges]

    def _pass_signal(self, session: Session, frame: SignalFrame, thread_id: str, readers: list[str]) -> None:
        sender = session.live_origin().agent_id
        if session.state is not SessionState.LIVE:  # its participant, or its token, went while its thread was looked up
            return
        data = encode(SignalOutFrame(sender_id=sender, thread_id=thread_id, kind=frame.kind, body=frame.body))
        self._board.signal(readers, session.session_id, data)


def _may_address(state: State, origin: Origin, head: MessageHead, reader: str) -> bool:
    """Whether the page lets somebody send to a reader of a thread, by a message of that: else its signals do not
    reach it either."""
    kind, name = parse_address(head.to) if head.kind in ("broadcast", "channel") else ("agent", reader)
    try:
        check_right_to_send(state, origin, kind, name)
    except Forbidden:
        return False
    return True
