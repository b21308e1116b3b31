"""Step 8: the committed state takes a batch over, and what it came to goes out to sessions.

`Publisher` turns outcomes into deliveries, answers, notices, welcomes and goodbyes. `SessionRegistry` has the sessions: who
is connected, what is to be written to whom, once per tick. Both run on the hub's loop, without a lock: between two
awaits nothing else moves. They decide nothing about the network. `LiveParticipants` know what each participant has handled,
`pages` brings sessions up to date that are behind, `redelivery` hands over again what failed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, assert_never

from msgspec import UNSET, Raw, UnsetType

from roundelay.network.addresses import channel_address, name_of, parse_address
from roundelay.network.clock import NewId
from roundelay.network.config import Limits
from roundelay.network.core.entries import (
    AcceptSession,
    DisconnectParticipant,
    Entry,
    MarkHandled,
    ModEntry,
    NotifyMembership,
    Origin,
    OtherEffect,
    Outcome,
    RefuseSession,
    RequestCancel,
    ScheduleRetry,
    Send,
    SendNotice,
    SessionReply,
    error_bytes,
)
from roundelay.network.core.mod import AfterContext, Mod
from roundelay.network.core.rows import Row
from roundelay.network.core.sending import Rules
from roundelay.network.core.state import State
from roundelay.network.core.tables import Participant
from roundelay.network.core.takeovers import is_blocked_by_takeover
from roundelay.network.core.uncaused_answers import record_message, record_person
from roundelay.network.core.visibility import broadcast_readers, is_recipient, parties, thread_readers
from roundelay.network.errors import Forbidden, LedgerError, RoundelayError
from roundelay.network.frames import (
    FIRST_DELIVERY,
    PROTOCOL_VERSION,
    Follows,
    NetworkInfo,
    NoticeFrame,
    OpenReactionInfo,
    PresenceFrame,
    ResumePoint,
    SignalOutFrame,
    WelcomeFrame,
    encode,
)
from roundelay.network.ledger import Ledger, Meta

from .delivery import Delivery, Outbox
from .inbox_changes import find_inbox_changes
from .pages import Pages
from .participants import LiveParticipants
from .reads import ReadBudget, ReadSlot
from .redelivery import Redelivery
from .repeated_errors import RepeatedErrorLog
from .session import LIVE, Connection, PauseReason, Session, SessionState

log = logging.getLogger(__name__)

BEHIND = "This node follows, and does not have yet what this session has seen; reconnect in a moment."

WRITE_BYTES = 1 << 18
INBOX_NOTICE = encode(NoticeFrame(kind="inbox", body={}))
RECENT_ROWS, RECENT_BYTES = 2048, 4 << 20
"""How much of what was published is kept in memory, for sessions that are about to be up to date."""


class SessionRegistry:
    """The hub's sessions. ``meta`` is the ledger's; the hub refreshes it, and the committed state of ``mailboxes``.
    Implements `SessionOutput`."""

    def __init__(
        self,
        limits: Limits,
        ledger: Ledger,
        now: Callable[[], int],
        new_id: NewId,
        on_reactor_lost: Callable[[Origin], None],
    ) -> None:
        self.ledger = ledger
        self.counts: Counter[str] = Counter()
        """What the figures tell of, since the start."""
        self.participants = LiveParticipants()
        self.meta = Meta(epoch="", name="", first_seq=1, head=0, stamp=0)
        self.sessions: dict[str, Session] = {}
        self.joined = 0
        self.joining = 0
        """Sessions whose ``hello`` is in the batch."""
        self.deliveries = 0
        self._limits = limits
        self._on_reactor_lost = on_reactor_lost
        self._away: dict[str, asyncio.Future[bool]] = {}
        """Who waits for the end of an agent's runner: whether that says goodbye."""
        self._dirty: dict[Session, None] = {}
        self._watchers: dict[Session, None] = {}
        """Those that are told who comes and goes."""
        self._listeners: dict[Session, None] = {}
        """Those that are sent signals."""
        self._operators: dict[Session, None] = {}
        self._flush_is_due = False
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.read_outage = RepeatedErrorLog(
            "the ledger cannot be read", "the ledger can be read again", self._loop.time, new_id
        )
        """Of whatever is read beside the batches."""
        self._recent: deque[Row] = deque()
        self._recent_bytes = 0
        self.pages = Pages(self, self.participants, ledger, limits, self.read_outage, self._recent)
        self.redelivery = Redelivery(self, self.participants, ledger, now, self.read_outage)
        self.room = ReadBudget(limits)

    @property
    def state(self) -> State:
        """The committed state."""
        return self.participants.state

    # --- sessions come and go

    def open(self, session_id: str, connection: Connection) -> Session:
        outbox = Outbox(self._limits.max_unacked, self._limits.session_queue_bytes)
        session = Session(session_id, connection, outbox)
        self.sessions[session_id] = session
        return session

    def join(
        self,
        session: Session,
        origin: Origin,
        participant: Participant,
        cursor: int,
        *,
        at_floor: bool,
        is_silent: bool,
    ) -> None:
        """The session is live from here on; its first page brings it up to date, unless it is silent."""
        live = self.participants.activate(participant)
        if not live.sessions:
            self._announce(participant, "online")
        session.origin = origin
        session.state = SessionState.LIVE
        if origin.is_operator:
            self._operators[session] = None
        session.connection.admit()
        self.joining -= 1
        session.starts_at_ack_cursor = at_floor
        session.joined_at = self.state.head
        if at_floor:
            session.handled_at_join = live.mailbox.snapshot_at_join()
        session.outbox.is_silent = is_silent
        session.outbox.start(cursor)
        self.participants.join(live, session)
        self.joined += 1
        log.info("joined", extra={**_name(session, participant.agent_id), "kind": participant.kind})
        self.redelivery.resume(live)

    def leave(self, session: Session, code: int | None = None) -> None:
        """The session's connection is gone, or is ended with a code. Idempotent."""
        self.sessions.pop(session.session_id, None)
        self._dirty.pop(session, None)
        self._watchers.pop(session, None)
        self._listeners.pop(session, None)
        self._operators.pop(session, None)
        self.joining -= session.state is SessionState.JOINING
        session.state = SessionState.CLOSED
        for arrival in session.arrivals:
            arrival.cancel()
        session.arrivals.clear()
        if session.room is not None:
            session.results.clear()
            self.room.close_session(session.room)
            session.room = None
        if session.origin is None:
            return
        live = self.participants.get(session.origin.agent_id)
        if live is None or session not in live.sessions:
            return
        self.participants.leave(live, session)
        self.joined -= 1
        log.info("left", extra={**_name(session, live.agent_id), "code": code})
        if session.origin.fencing_token is not None and (away := self._away.pop(live.agent_id, None)) is not None:
            away.set_result(code == 1000)
        if live.sessions:
            self.redelivery.reassign(live)
            return
        participant = self.state.participant(live.agent_id)
        if participant is not None:
            self._announce(participant, "offline")

    def has_reactor(self, agent_id: str) -> bool:
        """Whether a runner serves an agent."""
        sessions = self.participants.sessions_of(agent_id)
        return any(it.origin is not None and it.origin.fencing_token is not None for it in sessions)

    async def wait_until_away(self, agent_id: str, grace_s: float) -> None:
        """Wait until no runner serves an agent, and for one that was lost as long as it may take to come back."""
        while self.has_reactor(agent_id):
            away = self._away.setdefault(agent_id, self._loop.create_future())
            has_said_bye = await asyncio.shield(away)
            if not has_said_bye:
                await asyncio.sleep(grace_s)

    @property
    def admitted(self) -> int:
        """Sessions that were welcomed, or are about to be."""
        return self.joined + self.joining

    @property
    def opening(self) -> int:
        """Connections that have not been welcomed."""
        return len(self.sessions) - self.joined

    def lose(self, session: Session) -> None:
        """The connection is gone. Idempotent."""
        was_live = session.state is SessionState.LIVE
        self.leave(session)
        if (
            was_live
            and not session.said_bye
            and session.origin is not None
            and session.origin.fencing_token is not None
        ):
            self._on_reactor_lost(session.origin)

    def end(self, session: Session, code: int, reason: str) -> None:
        """Write what is queued, then close with this code."""
        self.flush_session(session)
        session.connection.end(code, reason)
        session.said_bye = True
        self.leave(session, code)

    def refuse(self, session: Session, code: int, error: RoundelayError | None) -> None:
        """End a session; the error goes before the close code, if there is one, and nothing between them."""
        if error is not None:
            session.is_inbox_changed = False
            self.flush_session(session)
            log.info("a session is refused", extra={**_name(session), "code": error.code})
            session.outgoing.append(error_bytes(error))
        silent = "bye" if code == 1000 else "A newer reactor has taken over."
        self.end(session, code, str(error) if error is not None else silent)

    def end_all(self, reason: str) -> None:
        """Close every session with 4503: come back."""
        for session in list(self.sessions.values()):
            self.end(session, 4503, reason)

    def operators(self) -> list[Session]:
        return list(self._operators)

    def reset(self) -> None:
        """Drop everything: the ledger is reopened and its state loaded anew."""
        self.redelivery.cancel_all()
        self.participants.reset()
        self._recent.clear()
        self._recent_bytes = 0

    async def close(self) -> None:
        self.reset()
        self.room.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- publishing

    def publish(self, row: Row, sender_session: str) -> None:
        """Hand a committed message to every live session that it is for."""
        head = row.head
        assert head is not None
        self._recent.append(row)
        self._recent_bytes += len(row.data)
        seq, sender, kind = row.seq, head.sender_id, head.kind
        state, live = self.participants.state, self.participants.live
        frame = FIRST_DELIVERY % row.data
        if kind == "direct":  # nearly every message: to one participant, and to the sender's other sessions
            _, name = parse_address(row.target)
            state.recent_messages.delivered[name] = seq
            if head.sender_kind == "human":
                record_person(self._limits, state, head)
            if name != sender and name in live:
                self._push(live[name].sessions, (seq, frame, True), sender_session)
            if sender in live:
                self._push(live[sender].sessions, (seq, frame, False), sender_session)
            return
        record_message(self._limits, state, head)
        if kind == "broadcast":
            before, excluded = broadcast_readers(head)
            targets = [
                it
                for it in self.participants.online()
                if (it.registered_seq < before and it.agent_id not in excluded) or it.agent_id == sender
            ]
        elif kind == "channel":
            inside = self.participants.online_in(name_of(head.to))
            targets = [it for it in inside if is_recipient(state, it.agent_id, head)]
        else:
            targets = [live[name] for name in dict.fromkeys(parties(head)) if name in live]
        others = [session for it in targets if it.agent_id != row.actor for session in it.sessions]
        self._push(others, (seq, frame, True), sender_session)
        own = [session for it in targets if it.agent_id == row.actor for session in it.sessions]
        self._push(own, (seq, frame, False), sender_session)

    def may_have_new(self, agent_id: str, after: int) -> bool:
        """Whether a message above ``after`` may be there that is delivered to a participant. Only memory is asked:
        what it no longer holds may have been one."""
        if self.state.head <= after:
            return False
        if not self._recent or self._recent[0].seq > after + 1:
            return True
        newer = itertools.takewhile(lambda row: row.seq > after, reversed(self._recent))
        return any(
            row.actor != agent_id and row.head is not None and is_recipient(self.state, agent_id, row.head)
            for row in newer
        )

    def forget_older(self) -> None:
        """Of what was published, the newest stays in memory, within bounds."""
        while self._recent_bytes > RECENT_BYTES or len(self._recent) > RECENT_ROWS:
            self._recent_bytes -= len(self._recent.popleft().data)

    def _push(self, sessions: list[Session], delivery: Delivery, sender_session: str) -> None:
        seq, _, needs_ack = delivery
        dirty = self._dirty
        for session in sessions:
            outbox = session.outbox
            if needs_ack and session.arrivals:
                self._wake(session)
            if session.session_id == sender_session:
                outbox.skip_own(seq)
            elif not outbox.is_behind:
                self.deliveries += 1
                if not outbox.push(delivery):
                    self._tell_behind(session)
                if session not in dirty:
                    self.schedule_flush(session)

    def _wake(self, session: Session) -> None:
        """What this session's reads wait for has come."""
        for arrival in session.arrivals:
            if not arrival.done():
                arrival.set_result(None)
        session.arrivals.clear()

    def _tell_behind(self, session: Session) -> None:
        body = {"from_seq": session.outbox.position}
        self.write(session, encode(NoticeFrame(kind="behind", body=body)))

    # --- writing

    def write(self, session: Session, frame: bytes) -> None:
        """Queue a frame that is no delivery; it is written this tick, before deliveries."""
        session.outgoing.append(frame)
        if session not in self._dirty:
            self.schedule_flush(session)

    def place(self, session: Session) -> ReadSlot:
        """Where a read of this session takes room for its result."""
        if session.room is None:
            session.room = self.room.open_session(session.live_origin().agent_id, partial(self._end_holder, session))
        return ReadSlot(self.room, session.room)

    def write_result(self, session: Session, frame: bytes) -> None:
        """Queue what a read gave; it is written when the connection has taken what was written before. Unlike
        deliveries it cannot be read again: the session's room bounds what waits."""
        assert session.room is not None
        self.room.add_result(session.room, len(frame))
        session.results.append(frame)
        self.schedule_flush(session)

    def schedule_flush(self, session: Session) -> None:
        """Let the session's frames be written at the end of this tick."""
        self._dirty[session] = None
        if not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        dirty, self._dirty = self._dirty, {}
        for session in dirty:
            self.flush_session(session)

    def flush_session(self, session: Session) -> None:
        """Write what the connection takes. What it does not take waits; a session that does not read its answers is not
        read."""
        connection, outbox = session.connection, session.outbox
        while not connection.is_paused and session.state is not SessionState.CLOSED:
            is_more = session.room is not None and self._write_result(session)
            if session.is_inbox_changed:
                session.is_inbox_changed = False
                session.outgoing.append(INBOX_NOTICE)
            frames = session.outgoing
            if frames:
                session.outgoing = []
            if outbox.queued_bytes and session.state is LIVE:
                frames = frames + outbox.take_frames(WRITE_BYTES) if frames else outbox.take_frames(WRITE_BYTES)
            if frames:
                connection.write(frames)
            if not is_more and not (outbox.queued_bytes and frames):
                break  # what is to be written now is written: nothing waits, or the window is full
        if session.state is not LIVE:
            return
        if connection.is_paused and PauseReason.ANSWERS not in session.pauses:
            if sum(map(len, session.outgoing)) > self._limits.session_queue_bytes:
                session.pause_reading(PauseReason.ANSWERS)
        elif session.pauses and not connection.is_paused:
            session.resume_reading(PauseReason.ANSWERS)
        if outbox.is_behind and outbox.wants_page() and not connection.is_paused:
            self.pages.start(session)

    def _write_result(self, session: Session) -> bool:
        """The connection has taken everything: the next result may go, alone, for it may be large. False when there is
        none."""
        assert session.room is not None
        written, session.result_written = session.result_written, 0
        if written:
            self.room.drop_result(session.room, written)
        if not session.results:
            return False
        frame = session.results.pop(0)
        session.result_written = len(frame)
        session.connection.write([frame])
        return True

    def _end_holder(self, session: Session) -> None:
        most = self._limits.hub_result_bytes
        log.info("a session that does not take its results is closed", extra={"session_id": session.session_id})
        self.end(session, 4429, f"hub_result_bytes ({most}) is reached, and these results were not read; ask again.")

    # --- what is not stored

    def notice(self, sessions: Iterable[Session], kind: Any, thread_id: str | None, body: object) -> None:
        """Tell sessions something; dropped for those that do not take even their answers."""
        frame = encode(NoticeFrame(kind=kind, thread_id=UNSET if thread_id is None else thread_id, body=body))
        for session in sessions:
            if PauseReason.ANSWERS not in session.pauses:
                self.write(session, frame)

    def tell_inbox(self, agent_ids: Iterable[str], *, operators: bool = False) -> None:
        """Tell the sessions of these people, and operators, that what waits for them has changed: once, however often
        it does until their connections take anything."""
        sessions = [it for agent_id in agent_ids for it in self.participants.sessions_of(agent_id)]
        for session in (*sessions, *(self._operators if operators else ())):
            origin = session.origin
            if origin is not None and (origin.kind == "human" or origin.is_operator):
                session.is_inbox_changed = True
                self.schedule_flush(session)

    def around(self, to: str) -> Iterable[str]:
        """Who may be told of what goes on at an address of many, ``broadcast`` or a channel: those who are here and, of
        all, watch signals."""
        if to == "broadcast":
            return dict.fromkeys(session.live_origin().agent_id for session in self._listeners)
        return [live.agent_id for live in self.participants.online_in(name_of(to))]

    def signal(self, readers: Iterable[str], sender_session: str, frame: bytes) -> None:
        """Pass a signal on to the readers that watch signals; dropped for those that are slow."""
        for agent_id in readers:
            for session in self.participants.sessions_of(agent_id):
                is_free = not session.connection.is_paused
                if session in self._listeners and session.session_id != sender_session and is_free:
                    self.write(session, frame)

    def watch(self, session: Session, presence: bool | None, signals: bool | None) -> None:
        """Tell a session, or no longer, who comes and goes; and send it the signals of threads that it may read."""
        for told, is_wanted in ((self._watchers, presence), (self._listeners, signals)):
            if is_wanted:
                told[session] = None
            elif is_wanted is not None:
                told.pop(session, None)

    def _announce(self, participant: Participant, state: Any) -> None:
        frame = encode(PresenceFrame(agent_id=participant.agent_id, state=state, card=participant.card))
        for session in self._watchers:
            if not session.connection.is_paused:
                self.write(session, frame)

    def tell_of_members(self, channel: str | None, agent_id: str | None) -> None:
        """Tell those who watch who comes and goes that a channel's members have changed, or what these may read: its
        members, whom it is about, and operators. Without a channel all are told."""
        told = [it for it in self._watchers if channel is None or self._hears_of(it, channel, agent_id)]
        thread_id = channel_address(channel) if channel is not None else None
        self.notice(told, "members", thread_id, {"agent_id": agent_id} if agent_id is not None else {})

    def _hears_of(self, session: Session, channel: str, agent_id: str | None) -> bool:
        own = session.live_origin().agent_id
        return session in self._operators or own == agent_id or self.state.member(channel, own).is_in

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task of the hub's until it ends or the hub closes."""
        task: asyncio.Task[None] = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Publisher:
    """Performs what a committed batch came to. ``release`` lets in what a session sent before its welcome, ``enter``
    takes entries. ``follows`` is told of by a hub of a node that follows."""

    def __init__(
        self,
        board: SessionRegistry,
        rules: Rules,
        *,
        server: str,
        release: Callable[[Session], None],
        enter: Callable[[Entry], None],
        follows: Callable[[], Follows] | None = None,
    ) -> None:
        self._board = board
        self._server = server
        self._release = release
        self._enter = enter
        # what comes after a message is done where it was decided
        self._after = tuple(mod for mod in rules.mods.values() if mod.overrides("after") and follows is None)
        self._mod_infos = [mod.describe() for mod in rules.mods.values()]
        self._limits = rules.limits.model_dump()
        self._quotas = rules.quotas
        self._is_read_only = rules.is_read_only
        self._follows = follows

    def publish(self, draft: State, outcomes: Sequence[tuple[Entry, Outcome]]) -> None:
        """Step 8: the committed state takes a batch over, then it is handed on in its order: each entry's messages,
        then its effects."""
        board, sessions, messages = self._board, self._board.sessions, 0
        waiting = find_inbox_changes(board.participants.state, draft)
        board.participants.state.merge(draft)
        if waiting is not None:
            board.tell_inbox(waiting.list_people(board.state), operators=waiting.operators)
            if waiting.seqs:
                board.spawn(self._tell_readers(waiting.seqs))
        if members := draft.tables.get("member"):
            board.participants.update_members(members)
        for entry, outcome in outcomes:
            for row in outcome.rows:
                if row.head is not None:
                    messages += 1
                    # what an operation or a hook sent is delivered to the caller's session too: it gets no `stored` for
                    # it
                    sender_session = entry.origin.session_id if isinstance(entry, Send) and row.key else ""
                    board.publish(row, sender_session)
                    for mod in self._after:
                        self._run_after(mod, row)
            for effect in outcome.effects:
                if isinstance(effect, SessionReply):  # before the match, whose class patterns cost
                    session = sessions.get(effect.session_id)
                    if session is not None:
                        board.write(session, effect.data)
                else:
                    self._perform(effect)
        board.forget_older()
        if log.isEnabledFor(logging.DEBUG):
            for row in (row for _, outcome in outcomes for row in outcome.rows):
                place = {"seq": row.seq, "type": row.type, "agent_id": row.actor, "to": row.target, "in": row.stream}
                log.debug("stored", extra=place)
        self._board.counts["messages"] += messages

    async def _tell_readers(self, seqs: set[int]) -> None:
        """Tell those who may read these messages that what waits for them has changed."""
        board = self._board
        try:
            heads = await board.ledger.heads(seqs)
        except LedgerError as error:
            board.read_outage.record(error, "a notice of the inbox")
            return
        board.tell_inbox({it for head in heads.values() for it in thread_readers(board.state, head)})

    def _run_after(self, mod: Mod, row: Row) -> None:
        def submit(payload: object) -> None:
            self._enter(ModEntry(mod.id, payload, cause=row.seq))

        try:
            work = mod.after(AfterContext(self._board.state, submit), row)
        except Exception:  # one mod's defect must not end the hub
            log.exception("a mod's after hook failed", extra={"mod": mod.id})
            return
        if work is not None:
            self._board.spawn(_finish(work))

    def _perform(self, effect: OtherEffect) -> None:
        board = self._board
        match effect:
            case AcceptSession():
                self._welcome(effect)
            case RefuseSession():
                session = board.sessions.get(effect.session_id)
                if session is not None:
                    self._board.refuse(session, effect.code, effect.error)
            case SendNotice():
                sessions = {
                    session.session_id: session
                    for agent_id in sorted(effect.agent_ids)  # the same order in every process
                    for session in board.participants.sessions_of(agent_id)
                }
                if effect.to_operators:
                    self._board.counts["loops_stopped"] += effect.kind == "loop_stopped"
                    sessions |= {session.session_id: session for session in board.operators()}
                sessions.pop(effect.except_session, None)
                board.notice(sessions.values(), effect.kind, effect.thread_id, effect.body)
                if effect.sender_id is not None:
                    others = [
                        it for it in board.participants.sessions_of(effect.sender_id) if it.session_id not in sessions
                    ]
                    less = {name: value for name, value in effect.body.items() if name != "reason"}
                    board.notice(others, effect.kind, effect.thread_id, less)
            case NotifyMembership():
                board.tell_of_members(effect.channel, effect.agent_id)
            case MarkHandled():
                self._settle(effect)
            case ScheduleRetry():
                board.redelivery.schedule(effect.agent_id, effect.seq, effect.attempt, effect.due_at)
            case DisconnectParticipant():
                for session in list(board.participants.sessions_of(effect.agent_id)):
                    if not effect.token or (session.origin is not None and session.origin.token == effect.token):
                        self._board.refuse(session, 4403, Forbidden(effect.reason))
            case RequestCancel():
                self._ask_to_stop(effect)
            case _:
                assert_never(effect)

    def _settle(self, effect: MarkHandled) -> None:
        mailbox = self._board.participants.find_mailbox(effect.agent_id)
        if mailbox is None:
            return
        mailbox.mark_handled(effect.seq)
        for session in self._board.participants.sessions_of(effect.agent_id):
            session.outbox.release(effect.seq)
            if session.starts_at_ack_cursor:
                mailbox.compact(session.outbox)
            self._board.schedule_flush(session)

    def _ask_to_stop(self, effect: RequestCancel) -> None:
        body = Raw(encode({"reaction": effect.reaction}))
        frame = SignalOutFrame(sender_id=effect.sender_id, thread_id=effect.thread_id, kind="cancel", body=body)
        for session in self._board.participants.sessions_of(effect.agent_id):
            if session.origin is not None and session.origin.fencing_token is not None:
                self._board.write(session, encode(frame))

    # --- welcome

    def _welcome(self, effect: AcceptSession) -> None:
        hello, participant, origin, meta = effect.hello, effect.participant, effect.origin, self._board.meta
        # Even if the new session is gone by now: the older fencing token is refused from here on.
        if origin.fencing_token is not None:
            self._supersede(participant.agent_id)
        session = self._board.sessions.get(origin.session_id)
        if session is None or session.state is not SessionState.JOINING:
            return
        # to begin at an earlier place would show again what was seen
        if self._follows is not None and self._is_beyond(hello.resume):
            self._board.end(session, 4503, BEHIND)
            return
        cursor, resume, missing_before = self._where_to_start(effect)
        reactions = [
            OpenReactionInfo(
                reaction.reaction, reaction.trigger, reaction.seq, is_blocked_by_takeover(self._board.state, reaction)
            )
            for reaction in self._board.state.reactions_of(participant.agent_id).values()
        ]
        frame = WelcomeFrame(
            protocol=PROTOCOL_VERSION,
            server=self._server,
            network=NetworkInfo(meta.name, meta.epoch),
            agent_id=participant.agent_id,
            kind=participant.kind,
            is_operator=origin.is_operator,
            is_read_only=self._is_read_only,
            follows=UNSET if self._follows is None else self._follows(),
            role=hello.role,
            session_id=session.session_id,
            fence=UNSET if origin.fencing_token is None else origin.fencing_token,
            cursor=cursor,
            head=self._board.state.head,
            resume=resume,
            missing_before=UNSET if missing_before is None else missing_before,
            open_reactions=UNSET if origin.fencing_token is None else sorted(reactions, key=lambda info: info.seq),
            mods=self._mod_infos,
            limits=self._show_limits(participant.agent_id),
        )
        self._board.write(session, encode(frame))
        at_floor = hello.resume is UNSET
        self._board.join(session, origin, participant, cursor, at_floor=at_floor, is_silent=not hello.deliver)
        for asked in effect.cancel_requests:
            self._ask_to_stop(asked)
        self._release(session)

    def _show_limits(self, agent_id: str) -> dict[str, int]:
        """The limits as they hold for one participant; one that does not hold for it is left out."""
        if agent_id not in self._quotas.own:
            return self._limits
        shown = {**self._limits, **self._quotas.describe(agent_id)}
        return {name: number for name, number in shown.items() if number is not None}

    def _is_beyond(self, resume: ResumePoint | UnsetType) -> bool:
        """Whether that is a place in this history which is still to come."""
        return resume is not UNSET and resume.epoch == self._board.meta.epoch and resume.cursor > self._board.state.head

    def _where_to_start(self, effect: AcceptSession) -> tuple[int, Any, int | None]:
        """The cursor, how the session resumes, and, if the history was cut, where it begins."""
        resume, meta = effect.hello.resume, self._board.meta
        if resume is UNSET:
            floor = self._board.participants.find_delivery_start(effect.participant, meta.first_seq)
            if floor < meta.first_seq - 1:
                return meta.first_seq - 1, "limited", meta.first_seq
            return floor, "new" if effect.is_new else "full", None
        if resume.epoch == meta.epoch and meta.first_seq - 1 <= resume.cursor <= self._board.state.head:
            return resume.cursor, "full", None
        return meta.first_seq - 1, "limited", meta.first_seq

    def _supersede(self, agent_id: str) -> None:
        for other in self._board.participants.sessions_of(agent_id):
            if other.origin is not None and other.origin.fencing_token is not None:
                self._board.notice([other], "superseded", None, {"agent_id": agent_id})
                self._board.end(other, 4409, "A newer reactor has taken over.")


def _name(session: Session, agent_id: str | None = None) -> dict[str, object]:
    """What a line of the log says of a session."""
    agent_id = session.origin.agent_id if session.origin is not None else agent_id
    return {"agent_id": agent_id, "session_id": session.session_id}


async def _finish(work: Awaitable[None]) -> None:
    try:
        await work
    except Exception:  # one mod's IO must not end the hub
        log.exception("a mod's after hook failed")
