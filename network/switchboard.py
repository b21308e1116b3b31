"""Who is connected, and the second half of step 8: published rows, pages and notices go out to sessions.

Everything here runs on the hub's loop, without a lock: between two awaits nothing else moves. Frames are gathered per session and
written once per tick. Nothing here changes the network. `mailboxes` knows what each participant has handled, `pages` brings sessions
up to date that are behind, `redelivery` hands over again what failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from msgspec import UNSET

from .clock import NewId
from .config import Limits
from .delivery import Outbox
from .entries import Origin, error_bytes
from .errors import RoundelayError
from .frames import NoticeFrame, PresenceFrame, deliver_bytes, encode
from .ledger import Ledger, Meta, Row
from .mailboxes import LiveParticipant, Mailboxes
from .outage import Outage
from .pages import Pages
from .redelivery import Redelivery
from .room import Place, Room
from .session import Connection, Pause, Session, SessionState
from .state import State
from .tables import Participant
from .visibility import hearing, is_recipient, parties

log = logging.getLogger(__name__)

WRITE_BYTES = 1 << 18


class Switchboard:
    """The hub's sessions. ``meta`` is the ledger's; the hub refreshes it, and the committed state of ``mailboxes``. Implements `Outlet`."""

    def __init__(
        self,
        limits: Limits,
        ledger: Ledger,
        now: Callable[[], int],
        new_id: NewId,
        on_reactor_lost: Callable[[Origin], None],
    ) -> None:
        self.mailboxes = Mailboxes()
        self.meta = Meta(epoch="", name="", first_seq=1, head=0, stamp=0)
        self.sessions: dict[str, Session] = {}
        self.joined = 0
        self.joining = 0
        """Sessions whose ``hello`` is in the batch."""
        self.deliveries = 0
        self._limits = limits
        self._on_reactor_lost = on_reactor_lost
        self._dirty: dict[Session, None] = {}
        self._watchers: dict[Session, None] = {}
        """Those that are told who comes and goes."""
        self._listeners: dict[Session, None] = {}
        """Those that are sent signals."""
        self._operators: dict[Session, None] = {}
        self._flush_is_due = False
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.read_outage = Outage("the ledger cannot be read", "the ledger can be read again", self._loop.time, new_id)
        """Of whatever is read beside the batches."""
        self.pages = Pages(self, self.mailboxes, ledger, limits, self.read_outage)
        self.redelivery = Redelivery(self, self.mailboxes, ledger, now, self.read_outage)
        self.room = Room(limits)

    @property
    def state(self) -> State:
        """The committed state."""
        return self.mailboxes.state

    # --- sessions come and go

    def open(self, session_id: str, connection: Connection) -> Session:
        outbox = Outbox(self._limits.max_unacked, self._limits.session_queue_bytes)
        session = Session(session_id, connection, outbox, self._limits.max_depth)
        self.sessions[session_id] = session
        return session

    def join(self, session: Session, origin: Origin, participant: Participant, cursor: int, *, at_floor: bool) -> None:
        """The session is live from here on; its first page brings it up to date."""
        live = self.mailboxes.of(participant)
        if not live.sessions:
            self._announce(participant, "online")
        session.origin = origin
        session.state = SessionState.LIVE
        if origin.is_operator:
            self._operators[session] = None
        session.connection.admit()
        self.joining -= 1
        session.starts_at_floor = at_floor
        session.joined_at = self.state.head
        if at_floor:
            session.settled_at_join = live.mailbox.settled_now()
        session.outbox.start(cursor)
        self.mailboxes.join(live, session)
        self.joined += 1
        self.redelivery.take_up(live)

    def leave(self, session: Session) -> None:
        """The session's connection is gone. Idempotent."""
        self.sessions.pop(session.session_id, None)
        self._dirty.pop(session, None)
        self._watchers.pop(session, None)
        self._listeners.pop(session, None)
        self._operators.pop(session, None)
        self.joining -= session.state is SessionState.JOINING
        session.state = SessionState.CLOSED
        if session.room is not None:
            session.results.clear()
            self.room.close(session.room)
            session.room = None
        if session.origin is None:
            return
        live = self.mailboxes.get(session.origin.agent_id)
        if live is None or session not in live.sessions:
            return
        self.mailboxes.leave(live, session)
        self.joined -= 1
        if live.sessions:
            self.redelivery.pass_on(live)
            return
        participant = self.state.participant(live.agent_id)
        if participant is not None:
            self._announce(participant, "offline")

    @property
    def taken(self) -> int:
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
        if was_live and not session.said_bye and session.origin is not None and session.origin.fence is not None:
            self._on_reactor_lost(session.origin)

    def end(self, session: Session, code: int, reason: str) -> None:
        """Write what is queued, then close with this code."""
        self.flush_session(session)
        session.connection.end(code, reason)
        session.said_bye = True
        self.leave(session)

    def refuse(self, session: Session, code: int, error: RoundelayError | None) -> None:
        """End a session; the error goes before the close code, if there is one."""
        if error is not None:
            session.outgoing.append(error_bytes(error))
        silent = "bye" if code == 1000 else "A newer reactor has taken over."
        self.end(session, code, str(error) if error is not None else silent)

    def end_all(self, reason: str) -> None:
        """Close every session with 4503: come back."""
        for session in list(self.sessions.values()):
            self.end(session, 4503, reason)

    def operators(self) -> list[Session]:
        return list(self._operators)

    def forget(self) -> None:
        """Drop everything: the ledger is reopened and its state loaded anew."""
        self.redelivery.forget()
        self.mailboxes.forget()
        self.pages.forget()

    async def close(self) -> None:
        self.forget()
        self.room.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- publishing

    def publish(self, row: Row, sender_session: str) -> None:
        """Hand a committed message to every live session that it is for."""
        head = row.head
        assert head is not None
        frame = b""
        sender = head.sender_id
        if head.kind == "direct":  # nearly every message: to one participant, and to the sender's other sessions
            frame = deliver_bytes(row.data)
            name = row.target[6:]
            self._push(name, row.seq, frame, sender_session, needs_ack=name != sender)
            if name != sender:
                self._push(sender, row.seq, frame, sender_session, needs_ack=False)
            return
        if head.kind == "broadcast":
            before, excluded = hearing(head)
            targets: Iterable[LiveParticipant] = (
                live
                for live in self.mailboxes.online()
                if (live.registered_seq < before and live.agent_id not in excluded) or live.agent_id == sender
            )
        elif head.kind == "channel":
            inside = self.mailboxes.online_in(head.to[8:])
            targets = (live for live in inside if is_recipient(self.state, live.agent_id, head))
        else:
            targets = [live for name in dict.fromkeys(parties(head)) if (live := self.mailboxes.get(name)) is not None]
        for live in targets:
            needs_ack = live.agent_id != row.actor
            for session in live.sessions:
                outbox = session.outbox
                if session.session_id == sender_session:
                    outbox.pass_over(row.seq)
                    continue
                if outbox.is_behind:
                    continue
                frame = frame or deliver_bytes(row.data)
                self.deliveries += 1
                if not outbox.push(row.seq, frame, needs_ack):
                    self._tell_behind(session)
                self.touch(session)

    def _push(self, agent_id: str, seq: int, frame: bytes, sender_session: str, *, needs_ack: bool) -> None:
        for session in self.mailboxes.sessions(agent_id):
            outbox = session.outbox
            if session.session_id == sender_session:
                outbox.pass_over(seq)
            elif not outbox.is_behind:
                self.deliveries += 1
                if not outbox.push(seq, frame, needs_ack):
                    self._tell_behind(session)
                if session not in self._dirty:
                    self.touch(session)

    def _tell_behind(self, session: Session) -> None:
        body = {"from_seq": session.outbox.position}
        self.write(session, encode(NoticeFrame(kind="behind", body=body)))

    # --- writing

    def write(self, session: Session, frame: bytes) -> None:
        """Queue a frame that is no delivery; it is written this tick, before deliveries."""
        session.outgoing.append(frame)
        if session not in self._dirty:
            self.touch(session)

    def place(self, session: Session) -> Place:
        """Where a read of this session takes room for its result."""
        if session.room is None:
            session.room = self.room.open(session.live_origin().agent_id, partial(self._end_holder, session))
        return Place(self.room, session.room)

    def write_result(self, session: Session, frame: bytes) -> None:
        """Queue what a read gave; it is written when the connection has taken what was written before. Unlike deliveries it cannot be read
        again: the session's room bounds what waits."""
        assert session.room is not None
        self.room.keep(session.room, len(frame))
        session.results.append(frame)
        self.touch(session)

    def touch(self, session: Session) -> None:
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
        """Write what the connection takes. What it does not take waits; a session that does not read its answers is not read."""
        connection, outbox = session.connection, session.outbox
        while not connection.is_paused and session.state is not SessionState.CLOSED:
            is_more = session.room is not None and self._write_result(session)
            frames, session.outgoing = session.outgoing, []
            if session.state is SessionState.LIVE:
                frames += outbox.take(WRITE_BYTES)
            if frames:
                connection.write(frames)
            elif not is_more:
                break
        if session.state is not SessionState.LIVE:
            return
        if connection.is_paused and Pause.ANSWERS not in session.pauses:
            if sum(map(len, session.outgoing)) > self._limits.session_queue_bytes:
                session.pause_reading(Pause.ANSWERS)
        elif not connection.is_paused:
            session.resume_reading(Pause.ANSWERS)
        if outbox.wants_page() and not connection.is_paused:
            self.pages.begin(session)

    def _write_result(self, session: Session) -> bool:
        """The connection has taken everything: the next result may go, alone, for it may be large. False when there is none."""
        assert session.room is not None
        written, session.result_written = session.result_written, 0
        if written:
            self.room.drop(session.room, written)
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
            if Pause.ANSWERS not in session.pauses:
                self.write(session, frame)

    def around(self, to: str) -> Iterable[str]:
        """Who may be told of what goes on at an address of many, ``broadcast`` or a channel: those who are here and, of all, watch signals."""
        if to == "broadcast":
            return dict.fromkeys(session.live_origin().agent_id for session in self._listeners)
        return [live.agent_id for live in self.mailboxes.online_in(to.partition(":")[2])]

    def signal(self, readers: Iterable[str], sender_session: str, frame: bytes) -> None:
        """Pass a signal on to the readers that watch signals; dropped for those that are slow."""
        for agent_id in readers:
            for session in self.mailboxes.sessions_of(agent_id):
                is_free = not session.connection.is_paused
                if session in self._listeners and session.session_id != sender_session and is_free:
                    self.write(session, frame)

    def watch(self, session: Session, presence: bool) -> None:
        """Tell a session, or no longer, who comes and goes."""
        if presence:
            self._watchers[session] = None
        else:
            self._watchers.pop(session, None)

    def listen(self, session: Session, signals: bool) -> None:
        """Send a session, or no longer, the signals of threads that it may read."""
        if signals:
            self._listeners[session] = None
        else:
            self._listeners.pop(session, None)

    def _announce(self, participant: Participant, state: Any) -> None:
        frame = encode(PresenceFrame(agent_id=participant.agent_id, state=state, card=participant.card))
        for session in self._watchers:
            if not session.connection.is_paused:
                self.write(session, frame)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task of the hub's until it ends or the hub closes."""
        task: asyncio.Task[None] = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
