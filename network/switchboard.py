"""Who is connected, and the second half of step 8: published rows, pages and notices go out to sessions.

Everything here runs on the hub's loop, without a lock: between two awaits nothing else moves. Frames are gathered per session and
written once per tick. Nothing here changes the network.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from msgspec import UNSET

from .config import Limits
from .delivery import Mailbox, Outbox
from .entries import Origin, error_bytes
from .errors import LedgerError, RoundelayError
from .frames import NoticeFrame, PresenceFrame, deliver_bytes, encode
from .ledger import Ledger, Meta, Row
from .session import Connection, Pause, Session, SessionState
from .state import Attempt, Participant, State
from .visibility import anchor, inbox_spans, is_recipient, parties

log = logging.getLogger(__name__)

PAGE_ROWS, PAGE_BYTES = 256, 1 << 18
"""One page of a session that is behind. It has its pages to itself, where those that are live share each frame: so they are small."""
RECENT_ROWS = 2048
RECENT_BYTES = 4 << 20
WRITE_BYTES = 1 << 18
REREAD_AFTER_MS = 5000


class LiveParticipant:
    """A participant with at least one session, or whose mailbox is of use yet."""

    __slots__ = ("agent_id", "mailbox", "registered_seq", "sessions")

    def __init__(self, participant: Participant, mailbox: Mailbox) -> None:
        self.agent_id = participant.agent_id
        self.registered_seq = participant.registered_seq
        self.mailbox = mailbox
        self.sessions: list[Session] = []


class Switchboard:
    """The hub's sessions. ``state`` is the committed one, ``meta`` the ledger's, ``published`` the newest seq that was handed on; the hub refreshes them."""

    def __init__(
        self, limits: Limits, ledger: Ledger, now: Callable[[], int], on_reactor_lost: Callable[[Origin], None]
    ) -> None:
        self.state = State()
        self.meta = Meta(epoch="", name="", first_seq=1, head=0, stamp=0)
        self.published = 0
        self.sessions: dict[str, Session] = {}
        self.joined = 0
        self.deliveries = 0
        self.pages = 0
        self._limits = limits
        self._ledger = ledger
        self._now = now
        self._on_reactor_lost = on_reactor_lost
        self._live: dict[str, LiveParticipant] = {}
        self._idle: set[str] = set()
        """Those of them that may have no session."""
        self._recent: deque[Row] = deque()
        self._recent_bytes = 0
        self._dirty: dict[Session, None] = {}
        self._watchers: dict[Session, None] = {}
        """Those that are told who comes and goes."""
        self._flush_is_due = False
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: dict[tuple[str, int], asyncio.TimerHandle] = {}

    # --- sessions come and go

    def open(self, session_id: str, connection: Connection) -> Session:
        outbox = Outbox(self._limits.max_unacked, self._limits.session_queue_bytes)
        session = Session(session_id, connection, outbox, self._limits.max_depth)
        self.sessions[session_id] = session
        return session

    def join(self, session: Session, origin: Origin, participant: Participant, cursor: int, *, at_floor: bool) -> None:
        """The session is live from here on; its first page brings it up to date."""
        live = self._live_of(participant)
        if not live.sessions:
            self._announce(participant, "online")
        session.origin = origin
        session.state = SessionState.LIVE
        session.starts_at_floor = at_floor
        session.joined_at = self.state.head
        session.outbox.start(cursor)
        live.sessions.append(session)
        self.joined += 1
        for seq in sorted(live.mailbox.waiting):
            attempt: Attempt | None = self.state.get("attempt", f"{origin.agent_id}/{seq}")
            if attempt is not None:
                self.retry(origin.agent_id, seq, attempt.failures + 1, attempt.due_at)

    def leave(self, session: Session) -> None:
        """The session's connection is gone. Idempotent."""
        self.sessions.pop(session.session_id, None)
        self._dirty.pop(session, None)
        self._watchers.pop(session, None)
        session.state = SessionState.CLOSED
        if session.origin is None:
            return
        live = self._live.get(session.origin.agent_id)
        if live is None or session not in live.sessions:
            return
        live.sessions.remove(session)
        self.joined -= 1
        live.mailbox.delivered = max(live.mailbox.delivered, session.outbox.delivered)
        if live.sessions:
            self._pass_on(live)
        else:
            # whoever comes next gets what the last one held on another attempt, also from a cursor above it
            live.mailbox.waiting |= live.mailbox.tried
            self._idle.add(live.agent_id)
            participant = self.state.participant(live.agent_id)
            if participant is not None:
                self._announce(participant, "offline")

    def _pass_on(self, live: LiveParticipant) -> None:
        """A message on another attempt goes to one session alone: if that one is gone, another gets it."""
        mailbox = live.mailbox
        for seq in sorted(mailbox.tried - mailbox.waiting):
            attempt: Attempt | None = self.state.get("attempt", f"{live.agent_id}/{seq}")
            if attempt is not None and not any(session.outbox.has_or_will_get(seq) for session in live.sessions):
                self.retry(live.agent_id, seq, attempt.failures + 1, attempt.due_at)

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

    def sessions_of(self, agent_id: str) -> list[Session]:
        live = self._live.get(agent_id)
        return list(live.sessions) if live is not None else []

    def operators(self) -> list[Session]:
        return [
            session for session in self.sessions.values() if session.origin is not None and session.origin.is_operator
        ]

    def mailbox(self, agent_id: str) -> Mailbox | None:
        """The mailbox of a participant, or None if nobody is registered so."""
        participant = self.state.participant(agent_id)
        return self._live_of(participant).mailbox if participant is not None else None

    def _live_of(self, participant: Participant) -> LiveParticipant:
        live = self._live.get(participant.agent_id)
        if live is None:
            mailbox = self._load_mailbox(participant.agent_id)
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
        attempt: Attempt | None = self.state.get("attempt", f"{agent_id}/{seq}")
        return self.state.floor(agent_id).is_handled(seq) and not (attempt is not None and attempt.is_revived)

    def is_waiting(self, agent_id: str, seq: int) -> bool:
        """Whether a message that failed has yet to be handed over again."""
        live = self._live.get(agent_id)
        if live is not None:
            return seq in live.mailbox.waiting
        return self.state.get("attempt", f"{agent_id}/{seq}") is not None and not self.is_handled(agent_id, seq)

    def delivered_up_to(self, agent_id: str) -> int:
        """The highest seq that any session of this participant was handed, as far as it is known."""
        live = self._live.get(agent_id)
        if live is None:
            return 0
        return max([live.mailbox.delivered, *(session.outbox.delivered for session in live.sessions)])

    def _load_mailbox(self, agent_id: str) -> Mailbox:
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
        mailbox = self._live_of(participant).mailbox
        floor = max(mailbox.starts_after(), participant.registered_seq)
        if mailbox.floor >= first_seq - 1:
            mailbox.give_up_before(first_seq)
        return floor

    def dirty_mailboxes(self) -> list[tuple[str, Mailbox]]:
        """Mailboxes that changed since their last snapshot."""
        return [(live.agent_id, live.mailbox) for live in self._live.values() if live.mailbox.is_dirty]

    def forget(self) -> None:
        """Drop everything: the ledger is reopened and its state loaded anew."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._live.clear()
        self._idle.clear()
        self._recent.clear()
        self._recent_bytes = 0

    async def close(self) -> None:
        self.forget()
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
        while self._recent_bytes > RECENT_BYTES or len(self._recent) > RECENT_ROWS:
            self._recent_bytes -= len(self._recent.popleft().data)
        frame = b""
        sender = head.sender_id
        if head.kind == "direct":  # nearly every message: to one participant, and to the sender's other sessions
            frame = deliver_bytes(row.data)
            name = row.target[6:]
            self._push(name, row.seq, frame, sender_session, needs_ack=name != sender)
            if name != sender:
                self._push(sender, row.seq, frame, sender_session, needs_ack=False)
            return
        if head.kind == "broadcast" and anchor(head.thread_id) is None:
            excluded = head.excluded
            targets: Iterable[LiveParticipant] = (
                live for live in self._live.values() if live.registered_seq < row.seq and live.agent_id not in excluded
            )
        elif head.kind in ("broadcast", "channel"):
            targets = (
                live for live in self._live.values() if live.sessions and is_recipient(self.state, live.agent_id, head)
            )
        else:
            targets = [live for name in dict.fromkeys(parties(head)) if (live := self._live.get(name)) is not None]
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
                if not outbox.push(row.seq, frame, needs_ack=needs_ack):
                    self._tell_behind(session)
                self.touch(session)

    def _push(self, agent_id: str, seq: int, frame: bytes, sender_session: str, *, needs_ack: bool) -> None:
        live = self._live.get(agent_id)
        if live is None:
            return
        for session in live.sessions:
            if session.session_id == sender_session:
                session.outbox.pass_over(seq)
                continue
            if session.outbox.is_behind:
                continue
            self.deliveries += 1
            if not session.outbox.push(seq, frame, needs_ack=needs_ack):
                self._tell_behind(session)
            self.touch(session)

    def _tell_behind(self, session: Session) -> None:
        body = {"from_seq": session.outbox.position}
        self.write(session, encode(NoticeFrame(kind="behind", body=body)))

    def retry(self, agent_id: str, seq: int, attempt: int, due_at: int) -> None:
        """Deliver a refused message again when it is due; the participant's floor waits for it."""
        live = self._live.get(agent_id)
        if live is None:
            return
        if live.mailbox.is_handled(seq) and not self._is_taken_back(agent_id, seq):
            return  # another session acknowledged it while the refusal was on its way
        live.mailbox.wait(seq)
        timer = self._timers.pop((agent_id, seq), None)
        if timer is not None:
            timer.cancel()
        delay_s = max(0, due_at + 1 - self._now()) / 1000  # a stamp is cut to its millisecond: never early
        self._timers[agent_id, seq] = self._loop.call_later(delay_s, self._redeliver, agent_id, seq, attempt)

    def _is_taken_back(self, agent_id: str, seq: int) -> bool:
        """Whether this is a dead letter that an operator gave another life, not failed since."""
        attempt: Attempt | None = self.state.get("attempt", f"{agent_id}/{seq}")
        return attempt is not None and attempt.is_revived and attempt.failures == 0

    def _redeliver(self, agent_id: str, seq: int, attempt: int) -> None:
        self._timers.pop((agent_id, seq), None)
        self.spawn(self._redeliver_row(agent_id, seq, attempt))

    async def _redeliver_row(self, agent_id: str, seq: int, attempt: int) -> None:
        try:
            row = (await self._ledger.messages([seq])).get(seq)
        except LedgerError:
            log.exception("reading a message failed", extra={"agent_id": agent_id, "seq": seq})
            self.retry(agent_id, seq, attempt, self._now() + REREAD_AFTER_MS)
            return
        live = self._live.get(agent_id)
        if live is not None and row is None:
            live.mailbox.settle(seq)  # retention dropped it: the session's welcome said `limited`
        if row is None or live is None or not live.sessions or seq not in live.mailbox.waiting:
            return
        # a session that has it may yet acknowledge it; the one that refused it does not
        able = [session for session in live.sessions if not session.outbox.has(seq)]
        if not able:
            return
        passed_by = [session for session in able if seq in session.outbox.skipped]
        chosen = passed_by or [max(able, key=lambda session: session.live_origin().fence or 0)]
        live.mailbox.waiting.discard(seq)
        for session in chosen:
            session.outbox.skipped.discard(seq)
            if seq <= session.outbox.position:  # else its page is still to come, and brings it: once is enough
                session.outbox.push_again(seq, deliver_bytes(row.data, attempt))
                self.touch(session)

    # --- pages

    def _page(self, session: Session) -> None:
        session.outbox.is_paging = True
        self.spawn(self._read_pages(session))

    async def _read_pages(self, session: Session) -> None:
        """Bring a session up to date from the ledger, as far as its window goes, then let it go live without a gap."""
        outbox, agent_id = session.outbox, session.live_origin().agent_id
        try:
            while session.state is SessionState.LIVE and outbox.is_behind:
                participant = self.state.participant(agent_id)
                if participant is None:
                    return
                until = self.published
                spans = inbox_spans(self.state, participant)
                max_bytes = min(PAGE_BYTES, self._limits.session_queue_bytes)
                page = await self._ledger.inbox(spans, agent_id, outbox.position, until, PAGE_ROWS, max_bytes=max_bytes)
                self.pages += 1
                if session.state is not SessionState.LIVE:
                    return
                if self._push_page(session, page.rows):
                    return
                if page.has_more:
                    continue
                outbox.position = max(outbox.position, until)
                self._go_live(session)
        except LedgerError:
            log.exception("reading a page failed", extra={"agent_id": agent_id})
            if session.state is SessionState.LIVE:
                self.end(session, 4503, "The hub cannot read what is to be delivered; reconnect and resume.")
        finally:
            outbox.is_paging = False
            self.touch(session)

    def _push_page(self, session: Session, rows: Iterable[Row]) -> bool:
        """Queue a page's rows. True when the queue has no room for another page before some are acknowledged."""
        outbox = session.outbox
        for row in rows:
            if row.seq <= outbox.position:
                continue
            frame = self._frame_for(session, row)
            if frame is None:
                outbox.position = row.seq
                continue
            if outbox.queued_bytes and outbox.queued_bytes + len(frame) > self._limits.session_queue_bytes:
                return True
            self.deliveries += 1
            outbox.push(row.seq, frame, needs_ack=session.live_origin().agent_id != row.actor)
            outbox.is_behind = True
        self.flush_session(session)
        return outbox.queued > 0

    def _frame_for(self, session: Session, row: Row) -> bytes | None:
        """The ``deliver`` frame of a row for a session, or None when it is not for it."""
        agent_id = session.live_origin().agent_id
        assert row.head is not None
        if not is_recipient(self.state, agent_id, row.head):
            return None
        mailbox = self._live[agent_id].mailbox
        if session.outbox.is_own(row.seq):
            return None
        if row.actor == agent_id and row.seq <= session.joined_at and session.starts_at_floor:
            return None
        if session.starts_at_floor and mailbox.is_handled(row.seq) and row.actor != agent_id:
            return None
        if row.seq in mailbox.waiting and session.starts_at_floor:
            session.outbox.skipped.add(row.seq)
            return None  # its timer brings it; from a cursor nothing is left out
        attempt: Attempt | None = (
            self.state.get("attempt", f"{agent_id}/{row.seq}") if row.seq in mailbox.tried else None
        )
        return deliver_bytes(row.data, attempt.failures + 1 if attempt is not None else 1)

    def _go_live(self, session: Session) -> None:
        """Close the gap between the last page and what was published meanwhile, from memory; then publish reaches the session."""
        outbox = session.outbox
        if outbox.position < self.published:
            if not self._recent or self._recent[0].seq > outbox.position + 1:
                return
            missed = [row for row in self._recent if row.seq > outbox.position]
            if self._push_page(session, missed):
                return
            outbox.position = max(outbox.position, self.published)
        outbox.is_behind = False

    # --- writing

    def write(self, session: Session, frame: bytes) -> None:
        """Queue a frame that is no delivery; it is written this tick, before deliveries."""
        session.outgoing.append(frame)
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
            frames, session.outgoing = session.outgoing, []
            if session.state is SessionState.LIVE:
                frames += outbox.take(WRITE_BYTES)
            if not frames:
                break
            connection.write(frames)
        if session.state is not SessionState.LIVE:
            return
        if connection.is_paused and Pause.ANSWERS not in session.pauses:
            if sum(map(len, session.outgoing)) > self._limits.session_queue_bytes:
                session.pause_reading(Pause.ANSWERS)
        elif not connection.is_paused:
            session.resume_reading(Pause.ANSWERS)
        if outbox.wants_page() and not connection.is_paused:
            self._page(session)

    # --- what is not stored

    def notice(self, sessions: Iterable[Session], kind: Any, thread_id: str | None, body: object) -> None:
        frame = encode(NoticeFrame(kind=kind, thread_id=UNSET if thread_id is None else thread_id, body=body))
        for session in sessions:
            self.write(session, frame)

    def signal(self, readers: Iterable[str], sender_session: str, frame: bytes) -> None:
        """Pass a signal on to the readers that watch signals; dropped for those that are slow."""
        for agent_id in readers:
            for session in self.sessions_of(agent_id):
                is_free = not session.connection.is_paused
                if session.watches_signals and session.session_id != sender_session and is_free:
                    self.write(session, frame)

    def watch(self, session: Session, presence: bool) -> None:
        """Tell a session, or no longer, who comes and goes."""
        if presence:
            self._watchers[session] = None
        else:
            self._watchers.pop(session, None)

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
