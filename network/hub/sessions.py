"""The session registry: the connected sessions, and the frames that are written to each session once per tick of the
loop.

`intake` and `publisher` queue frames in the registry, and `flush_session` writes them to the connection. The registry
runs on the hub's loop and needs no locks, because no other code runs between two awaits. It makes no decisions about
the network. `participants` records the messages that each participant has handled, `pages` serves sessions that are
behind, and `redelivery` repeats failed messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from msgspec import UNSET

from roundelay.network.clock import NewId
from roundelay.network.config import Limits
from roundelay.network.core.entries import Origin, error_bytes
from roundelay.network.core.state import State
from roundelay.network.core.tables import Participant
from roundelay.network.errors import RoundelayError
from roundelay.network.frames import NoticeFrame, encode
from roundelay.network.ledger import Ledger, Meta

from .delivery import Delivery, Outbox
from .pages import Pages, RecentRows
from .participants import LiveParticipants
from .read_budget import ReadBudget, SessionReads
from .redelivery import Redelivery
from .repeated_errors import RepeatedErrorLog
from .session import LIVE, Connection, PauseReason, Session, SessionState
from .subscriptions import Subscriptions

log = logging.getLogger(__name__)

WRITE_BYTES = 1 << 18
"""Maximum number of bytes of deliveries in one write."""
INBOX_NOTICE = encode(NoticeFrame(kind="inbox", body={}))


class SessionRegistry:
    """The registry of the hub's sessions. ``meta`` describes the ledger; the batch writer and retention replace this
    value.

    Implements `SessionOutput`.
    """

    def __init__(self, limits: Limits, ledger: Ledger, now: Callable[[], int], new_id: NewId) -> None:
        self.counts: Counter[str] = Counter()
        """Number of events of each kind since the start, for the metrics."""
        self.participants = LiveParticipants()
        self.meta = Meta(epoch="", name="", first_seq=1, head=0, stamp=0)
        self.sessions: dict[str, Session] = {}
        self.joined = 0
        """Number of sessions that were welcomed and have not ended."""
        self.joining = 0
        """Number of sessions whose ``hello`` waits for its batch."""
        self.deliveries = 0
        """Number of deliveries queued since the start."""
        self._limits = limits
        self._reactor_ends: dict[str, asyncio.Future[bool]] = {}
        """Futures by agent id. Each is done when the agent's reactor ends. The result is True if the reactor said
        goodbye."""
        self._dirty: dict[Session, None] = {}
        """Sessions to be flushed at the end of this tick of the loop."""
        self._operators: dict[Session, None] = {}
        self._flush_is_due = False
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.read_errors = RepeatedErrorLog(
            "the ledger cannot be read", "the ledger can be read again", self._loop.time, new_id
        )
        """Log of errors in all ledger reads outside the batches."""
        self.recent = RecentRows(self.participants)
        self.pages = Pages(self, self.participants, ledger, limits, self.read_errors, self.recent)
        self.redelivery = Redelivery(self, self.participants, ledger, now, self.read_errors)
        self.subscriptions = Subscriptions(self, self.participants)
        self.read_budget = ReadBudget(limits)

    @property
    def state(self) -> State:
        """The committed state."""
        return self.participants.state

    # --- start and end of sessions

    def open(self, session_id: str, connection: Connection) -> Session:
        """Add a session for a new connection. The first frame of the session must be ``hello``."""
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
        at_ack_cursor: bool,
        is_silent: bool,
    ) -> None:
        """Make a welcomed session live. Pages bring it up to date, unless the session is silent."""
        live = self.participants.activate(participant)
        # Check this before the session is added. If the participant already has a session, it is announced again only
        # if its card changed.
        if not live.sessions or live.announced_card != participant.card:
            live.announced_card = participant.card
            self.subscriptions.announce_presence(participant, "online")
        session.origin = origin
        session.state = SessionState.LIVE
        if origin.is_operator:
            self._operators[session] = None
        session.connection.admit()
        self.joining -= 1
        session.starts_at_ack_cursor = at_ack_cursor
        session.joined_at = self.state.head
        if at_ack_cursor:
            # Use a snapshot. The participant's other sessions may acknowledge messages later, but the deliveries of
            # this session must not depend on how fast it reads.
            session.handled_at_join = live.mailbox.snapshot_at_join()
        session.outbox.is_silent = is_silent
        session.outbox.start(cursor)
        self.participants.join(live, session)
        self.joined += 1
        log.info("joined", extra={**_log_fields(session, participant.agent_id), "kind": participant.kind})
        self.redelivery.resume(live)

    def leave(self, session: Session, code: int | None = None) -> None:
        """Remove a session whose connection has ended or is being closed with a code. Idempotent."""
        self.sessions.pop(session.session_id, None)
        self._dirty.pop(session, None)
        self._operators.pop(session, None)
        self.subscriptions.remove(session)
        # Read the state before it changes below: a session whose hello waits in the batch is counted as joining.
        self.joining -= session.state is SessionState.JOINING
        session.state = SessionState.CLOSED
        for arrival in session.arrivals:
            # Cancel the read instead of waking it. Otherwise, the read would compute an answer that nobody receives.
            arrival.cancel()
        session.arrivals.clear()
        if session.reads is not None:
            self.read_budget.close_session(session.reads)
            session.reads = None
        if session.origin is None:
            return
        live = self.participants.get(session.origin.agent_id)
        if live is None or session not in live.sessions:
            return
        self.participants.leave(live, session)
        self.joined -= 1
        log.info("left", extra={**_log_fields(session, live.agent_id), "code": code})
        if session.is_reactor and (reactor_end := self._reactor_ends.pop(live.agent_id, None)) is not None:
            # Code 1000 is a goodbye. Any other code may mean a lost connection, and then the runner comes back.
            reactor_end.set_result(code == 1000)
        if live.sessions:
            # A redelivery goes to only one session. When this session ends, another session must receive its
            # redeliveries.
            self.redelivery.reassign(live)
            return
        participant = self.state.participant(live.agent_id)
        if participant is not None:
            self.subscriptions.announce_presence(participant, "offline")

    def has_reactor(self, agent_id: str) -> bool:
        """Return whether a runner serves an agent."""
        return any(session.is_reactor for session in self.participants.sessions_of(agent_id))

    async def wait_until_unserved(self, agent_id: str, grace_s: float) -> None:
        """Wait until no runner serves an agent. A runner that was lost without a goodbye may return within the grace
        period."""
        while self.has_reactor(agent_id):
            reactor_end = self._reactor_ends.setdefault(agent_id, self._loop.create_future())
            # Shield the future, because all callers that wait for this agent share it.
            has_said_bye = await asyncio.shield(reactor_end)
            if not has_said_bye:
                await asyncio.sleep(grace_s)

    @property
    def admitted(self) -> int:
        """Number of sessions that were welcomed or whose ``hello`` is in the batch."""
        return self.joined + self.joining

    @property
    def opening(self) -> int:
        """Number of connections that have not been welcomed."""
        return len(self.sessions) - self.joined

    def end(self, session: Session, code: int, reason: str) -> None:
        """Write all queued frames, then close the connection with this code."""
        # Write the answers to committed entries before the close frame. Otherwise the client would repeat these
        # entries.
        self.flush_session(session)
        session.connection.end(code, reason)
        session.said_bye = True  # the hub ended the session, so its reactor does not count as lost
        self.leave(session, code)

    def refuse(self, session: Session, code: int, error: RoundelayError | None) -> None:
        """End a session. If ``error`` is given, its frame is the last one before the close frame."""
        if error is not None:
            session.is_inbox_changed = False  # otherwise a notice would follow the error
            self.flush_session(session)
            log.info("a session is refused", extra={**_log_fields(session), "code": error.code})
            session.outgoing.append(error_bytes(error))
        reason = "bye" if code == 1000 else "A newer reactor has taken over."
        self.end(session, code, str(error) if error is not None else reason)

    def end_all(self, reason: str) -> None:
        """Close every session with 4503, which asks the client to reconnect."""
        for session in list(self.sessions.values()):
            self.end(session, 4503, reason)

    def operators(self) -> list[Session]:
        """Return the live sessions whose participants are operators."""
        return list(self._operators)

    def reset(self) -> None:
        """Drop all data that was derived from the state. Called before the state is loaded again."""
        self.redelivery.cancel_all()
        self.participants.reset()
        self.recent.clear()

    async def close(self) -> None:
        """Cancel the registry's tasks and timers. The caller has already ended the sessions."""
        self.reset()
        self.read_budget.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task until it ends or the hub closes."""
        task: asyncio.Task[None] = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- queue

    def push(self, sessions: Iterable[Session], delivery: Delivery, sender_session: str) -> None:
        """Queue a published message for each session that is up to date, except ``sender_session``.

        A session that is behind is skipped, because it gets the message from a page of the ledger (see `delivery`).
        """
        seq, _, needs_ack = delivery
        dirty = self._dirty
        for session in sessions:
            outbox = session.outbox
            if needs_ack and session.arrivals:
                session.wake_arrivals()
            if session.session_id == sender_session:
                # The sender already has the message. Advance the outbox past the message, because the next page would
                # otherwise contain it.
                outbox.skip_own(seq)
            elif not outbox.is_behind:
                self.deliveries += 1
                if not outbox.push(delivery):
                    # This notice is sent only at the overflow itself: from now on, `is_behind` skips the session.
                    self.write(session, encode(NoticeFrame(kind="behind", body={"from_seq": outbox.position})))
                if session not in dirty:
                    self.schedule_flush(session)

    def write(self, session: Session, frame: bytes) -> None:
        """Queue a frame that is not a delivery. The frame is written in this tick, before deliveries."""
        session.outgoing.append(frame)
        if session not in self._dirty:
            self.schedule_flush(session)

    def notice(self, sessions: Iterable[Session], kind: Any, thread_id: str | None, body: object) -> None:
        """Send a notice to several sessions. Sessions that do not read their answers do not receive it."""
        frame = encode(NoticeFrame(kind=kind, thread_id=UNSET if thread_id is None else thread_id, body=body))
        for session in sessions:
            if PauseReason.ANSWERS not in session.pauses:
                self.write(session, frame)

    def notify_inbox(self, agent_ids: Iterable[str], *, operators: bool = False) -> None:
        """Notify people that their inbox changed, and also operators if ``operators`` is true. Several changes before
        the next write become one notice."""
        sessions = [session for agent_id in agent_ids for session in self.participants.sessions_of(agent_id)]
        for session in (*sessions, *(self._operators if operators else ())):
            origin = session.origin
            if origin is not None and (origin.kind == "human" or origin.is_operator):
                session.is_inbox_changed = True
                self.schedule_flush(session)

    def open_reads(self, session: Session) -> SessionReads:
        """Return the session's part of the read budget. The first call creates it."""
        if session.reads is None:
            agent_id = session.live_origin().agent_id
            session.reads = self.read_budget.open_session(agent_id, partial(self._end_unread, session))
        return session.reads

    def write_result(self, session: Session, frame: bytes) -> None:
        """Queue the result of a read. The result is written alone, after the connection has accepted all earlier data.

        Unlike a delivery, a result cannot be read from the ledger again. The read budget limits the waiting results.
        """
        reads = self.open_reads(session)
        self.read_budget.add_result(reads, len(frame))
        reads.results.append(frame)
        self.schedule_flush(session)

    def _end_unread(self, session: Session) -> None:
        max_bytes = self._limits.hub_result_bytes
        log.info("closing a session that does not read its results", extra={"session_id": session.session_id})
        reason = f"hub_result_bytes ({max_bytes}) is reached, and this session did not read its results; ask again."
        self.end(session, 4429, reason)

    # --- write

    def schedule_flush(self, session: Session) -> None:
        """Flush the session at the end of this tick of the loop."""
        self._dirty[session] = None
        if not self._flush_is_due:
            self._flush_is_due = True
            # Flush at the end of the tick, so that all frames of a batch for one session leave in one write.
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        # Swap the dicts first: flushing may end sessions, and may mark other sessions as dirty for the next tick.
        dirty, self._dirty = self._dirty, {}
        for session in dirty:
            self.flush_session(session)

    def flush_session(self, session: Session) -> None:
        """Write as much as the connection accepts. Also stop reading from a session that does not read its answers, and
        start to read pages for a session that is behind."""
        connection, outbox = session.connection, session.outbox
        while not connection.is_paused and session.state is not SessionState.CLOSED:
            # Write one result per round, and only after the connection has accepted all earlier data. A result may have
            # several megabytes.
            has_written_result = session.reads is not None and self._write_next_result(session, session.reads)
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
            if not has_written_result and not (outbox.queued_bytes and frames):
                break  # no delivery waits, or the window of unacknowledged deliveries is full
        if session.state is not LIVE:
            return
        if connection.is_paused and PauseReason.ANSWERS not in session.pauses:
            # Unlike deliveries, answers cannot be dropped and read again later. Stop reading, so that the client cannot
            # request more answers.
            if sum(map(len, session.outgoing)) > self._limits.session_queue_bytes:
                session.pause_reading(PauseReason.ANSWERS)
        elif session.pauses and not connection.is_paused:
            session.resume_reading(PauseReason.ANSWERS)
        if outbox.is_behind and outbox.wants_page() and not connection.is_paused:
            # Start a page only while the connection accepts bytes. A page for a blocked reader would only take memory.
            self.pages.start(session)

    def _write_next_result(self, session: Session, reads: SessionReads) -> bool:
        """Free the budget of the last result, which the connection has accepted, and write the next result. Return
        False if no result waits."""
        # The connection accepts bytes again, so it has accepted the whole result that was written last.
        written, reads.written = reads.written, 0
        if written:
            self.read_budget.drop_result(reads, written)
        if not reads.results:
            return False
        frame = reads.results.pop(0)
        reads.written = len(frame)
        session.connection.write([frame])
        return True


def _log_fields(session: Session, agent_id: str | None = None) -> dict[str, object]:
    """Return the fields of a log line about a session."""
    agent_id = session.origin.agent_id if session.origin is not None else agent_id
    return {"agent_id": agent_id, "session_id": session.session_id}
