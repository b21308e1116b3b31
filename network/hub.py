"""The hub: accepts, orders, stores and delivers; the only writer of the ledger.

Eight steps (docs/design.md): per frame `accept` does 1 auth and 2 shape (`session`), 3 the mods' ``before``, 4 into the pending
batch; per batch `_commit` does 5 `Ledger.lookup`, 6 `apply` in order, 7 `Ledger.append`, durable, 8 merge and publish
(`switchboard`). Nothing is answered or delivered before step 7 has returned. If it fails, its outcome is unknown: nothing is
answered, sessions are closed with 4503, the ledger is reopened, and the senders' repeats settle what happened.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, assert_never

import msgspec
from msgspec import UNSET, Raw

from .apply import apply, body_digest, send_digest, wanted
from .auth import hash_token
from .change import Rules
from .clock import Clock, NewId
from .config import Limits
from .entries import (
    Answer,
    AskToStop,
    Disconnect,
    Effect,
    Entry,
    Handled,
    Join,
    Leave,
    Lost,
    ModEntry,
    Nack,
    Notify,
    Operate,
    Outcome,
    Record,
    Refuse,
    Refused,
    Retry,
    Send,
    Settle,
    Welcome,
    error_bytes,
)
from .errors import (
    Forbidden,
    InternalError,
    InvalidArguments,
    LedgerError,
    Overloaded,
    RoundelayError,
    TooLarge,
    UnknownMessage,
    UnknownOperation,
    UnknownRecipient,
)
from .frames import (
    PROTOCOL_VERSION,
    AckFrame,
    ByeFrame,
    CallFrame,
    FrameError,
    HelloFrame,
    NackFrame,
    NetworkInfo,
    OpenReactionInfo,
    RecordFrame,
    ResultFrame,
    SendFrame,
    SignalFrame,
    SignalOutFrame,
    WelcomeFrame,
    encode,
)
from .guard import parse_address
from .ledger import Ledger, Meta, Row
from .metrics import read_metrics
from .mod import AfterContext, Incoming, Mod, Operation, Reading
from .operations import NetworkOperations
from .session import Connection, ProtocolBreach, Session, SessionState
from .state import Facts, Known, Put, State
from .switchboard import Switchboard
from .visibility import Visibility, direct_thread, may_read, mod_thread, thread_readers

log = logging.getLogger(__name__)

FLOOR_FLUSH_S = 0.5
"""Acknowledgements reach the ledger at most this late (docs/protocol.md allows 1 s)."""
MAX_READS_PER_SESSION = 64
MAX_CARD_BYTES = 16384
MAX_REASON_CHARS = 2000
WELCOME_LIMITS = (
    "max_frame_bytes", "max_depth", "max_record_bytes", "max_unacked", "hello_timeout_ms", "stall_timeout_ms", "ping_interval_ms",
    "session_queue_bytes", "sends_per_s", "root_messages_per_s", "max_hops", "max_root_messages",
)  # fmt: skip


class Hub:
    """One network's hub over one ledger. Use: ``start``, then sessions by ``connect`` / ``receive`` / ``disconnect``, then ``close``.

    ``owner_hash`` is the hash of the owner's token, if there is one. Time and ids come in as arguments.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        limits: Limits,
        mods: Sequence[Mod] = (),
        visibility: Visibility = "people",
        server: str = "roundelay",
        owner_hash: str | None = None,
        clock: Clock,
        new_id: NewId,
    ) -> None:
        self.ledger = ledger
        self.server = server
        self.name = ""
        self.epoch = ""
        self.is_ready = False
        self.counts: Counter[str] = Counter()
        self.commit_s = 0.0
        self._limits = limits
        self._mods = {mod.id: mod for mod in mods}
        self._visibility: Visibility = visibility
        self._owner_hash = owner_hash
        self._clock = clock
        self._new_id = new_id
        self._first_seq = 1
        self._operations = _gather_operations((NetworkOperations(), *mods))
        self._before = tuple(mod for mod in mods if mod.overrides("before"))
        self._after = tuple(mod for mod in mods if mod.overrides("after"))
        apply_hooks = tuple(mod for mod in mods if mod.overrides("apply"))
        self._rules = Rules(limits, self._operations, self._mods, apply_hooks)
        self._state = State()
        self._pending: list[Entry] = []
        self._pending_bytes = 0
        self._work = asyncio.Event()
        self._is_draining = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._writer: asyncio.Task[None] | None = None
        self._flusher: asyncio.Task[None] | None = None
        self.switchboard = Switchboard(limits, ledger, clock)

    # --- lifetime

    async def start(self) -> None:
        """Open the ledger, load the state and begin to commit. Raises `LedgerError`."""
        await self._load()
        self._writer = asyncio.create_task(self._write_batches(), name="hub-writer")
        self._flusher = asyncio.create_task(self._flush_floors(), name="hub-floors")

    async def close(self) -> None:
        """Say ``draining`` to everyone, commit what is pending, close sessions with 4503 and the ledger cleanly."""
        if self._is_draining:
            return
        self._is_draining = True
        everyone = [session for session in self.switchboard.sessions.values() if session.state is SessionState.LIVE]
        self.switchboard.notice(everyone, "draining", None, {"reason": "The hub is stopping; reconnect in a moment."})
        self._pending.append(self._floors())
        self._work.set()
        if self._writer is not None:
            await self._writer
        for task in [self._flusher, *self._tasks]:
            if task is not None:
                task.cancel()
        await asyncio.gather(
            *[task for task in (self._flusher, *self._tasks) if task is not None], return_exceptions=True
        )
        self._close_sessions("The hub is stopping; reconnect in a moment.")
        await self.switchboard.close()
        await self.ledger.close()

    async def _load(self) -> None:
        meta, puts = await self.ledger.open()
        self._adopt(meta, puts)
        await self.ledger.expire_calls(self._clock() - 24 * 3600 * 1000)
        self.is_ready = True

    def _adopt(self, meta: Meta, puts: list[Put]) -> None:
        self.name, self.epoch, self._first_seq = meta.name, meta.epoch, meta.first_seq
        self._state = State(head=meta.head, stamp=meta.stamp)
        self._state.change(puts)
        self.switchboard.state = self._state
        self.switchboard.published = meta.head

    def _close_sessions(self, reason: str) -> None:
        for session in list(self.switchboard.sessions.values()):
            self.switchboard.flush_session(session)
            self._end(session, 4503, reason)

    # --- the seam to transports

    def connect(self, connection: Connection) -> Session:
        """A connection is open; its first frame must be ``hello``."""
        self.counts["connections"] += 1
        return self.switchboard.open(self._new_id(), connection)

    def receive(self, session: Session, data: bytes) -> None:
        """One text message, valid UTF-8, has arrived."""
        if session.state is SessionState.JOINING:
            session.held.append(data)
        elif session.state is not SessionState.CLOSED and not session.said_bye:
            self.accept(session, data)

    def refuse(self, session: Session, error: RoundelayError) -> None:
        """A frame was refused by the transport (a binary one, say): answered in its order; before ``welcome`` it ends the session."""
        if session.state is SessionState.LIVE:
            self._enter(Refused(session.session_id, error, {}), 0)
        elif session.state is not SessionState.CLOSED:
            self._refuse_session(session, 4400, error)

    def resume(self, session: Session) -> None:
        """The connection takes bytes again."""
        self.switchboard.touch(session)

    def disconnect(self, session: Session) -> None:
        """The connection is gone. Idempotent."""
        was_live = session.state is SessionState.LIVE
        self.switchboard.leave(session)
        origin = session.origin
        if (
            was_live
            and origin is not None
            and origin.fence is not None
            and not session.said_bye
            and not self._is_draining
        ):
            self._enter(Lost(origin), 0)

    def _end(self, session: Session, code: int, reason: str) -> None:
        self.switchboard.flush_session(session)
        session.connection.end(code, reason)
        session.said_bye = True
        self.disconnect(session)

    def _refuse_session(self, session: Session, code: int, error: RoundelayError | None) -> None:
        if error is not None:
            session.outgoing.append(error_bytes(error))
        silent = "bye" if code == 1000 else "A newer reactor has taken over."
        self._end(session, code, str(error) if error is not None else silent)

    # --- steps 1 to 4, per frame

    def accept(self, session: Session, data: bytes) -> None:
        """Take one frame in: its place and shape are checked, then it waits for the next batch, or is done here if nothing is stored."""
        try:
            frame = session.read(data)  # 1 auth, 2 shape
        except FrameError as error:
            self._enter(Refused(session.session_id, error.error, error.keys), 0)
            return
        except ProtocolBreach as breach:
            self._refuse_session(session, breach.code, breach.error)
            return
        match frame:
            case SendFrame():
                self._accept_send(session, frame, len(data))
            case AckFrame():
                self._accept_ack(session, frame)
            case RecordFrame():
                self._accept_record(session, frame, len(data))
            case CallFrame():
                self._accept_call(session, frame, len(data))
            case NackFrame():
                self._accept_nack(session, frame)
            case SignalFrame():
                self._accept_signal(session, frame)
            case HelloFrame():
                self._accept_hello(session, frame)
            case ByeFrame():
                session.said_bye = True
                self._enter(Leave(session.session_id), 0)
            case _:
                assert_never(frame)

    def _accept_send(self, session: Session, frame: SendFrame, size: int) -> None:
        origin = session.live_origin()
        refusal: RoundelayError | None = None
        try:
            parse_address(frame.to)
        except RoundelayError as error:
            self._enter(Refused(session.session_id, error, {"message_id": frame.message_id}), 0)
            return
        for mod in self._before:  # 3 mods.before
            try:
                mod.before(Incoming(origin, frame))
            except RoundelayError as error:
                refusal = error
                break
        if self._is_overloaded(session, {"message_id": frame.message_id}):
            return
        self._enter(Send(origin, frame, send_digest(frame), refusal), size)  # 4 into the batch

    def _accept_record(self, session: Session, frame: RecordFrame, size: int) -> None:
        keys = {"record_id": frame.record_id}
        body = bytes(frame.body)
        if len(body) > self._limits.max_record_bytes:
            error = TooLarge(
                f"body has {len(body)} bytes, more than max_record_bytes ({self._limits.max_record_bytes}); keep less of it."
            )
            self._enter(Refused(session.session_id, error, keys), 0)
            return
        if self._is_overloaded(session, keys):
            return
        digest = body_digest(frame.reaction.encode(), frame.kind.encode(), body)
        trigger = _read_trigger(frame) if frame.kind == "started" else None
        self._enter(Record(session.live_origin(), frame, digest, trigger), size)

    def _accept_call(self, session: Session, frame: CallFrame, size: int) -> None:
        keys = {"call_id": frame.call_id}
        try:
            operation = self._operations.get(frame.op)
            if operation is None:
                raise UnknownOperation(f"There is no operation {frame.op[:80]!r}; welcome lists the mods' operations.")
            args = operation.decode(frame.args)
        except RoundelayError as error:
            self._enter(Refused(session.session_id, error, keys), 0)
            return
        if self._is_overloaded(session, keys):
            return
        if operation.is_change:
            digest = body_digest(frame.op.encode(), bytes(frame.args))
            self._enter(Operate(session.live_origin(), frame.call_id, frame.op, args, digest), size)
        elif session.reads_under_way >= MAX_READS_PER_SESSION:
            busy = Overloaded(
                f"{MAX_READS_PER_SESSION} reads of this session are under way; send the same again later.", 100
            )
            self._enter(Refused(session.session_id, busy, keys), 0)
        else:
            session.reads_under_way += 1
            self._spawn(self._read(session, operation, frame.call_id, args))

    def _accept_hello(self, session: Session, hello: HelloFrame) -> None:
        if hello.card is not UNSET and len(bytes(hello.card)) > MAX_CARD_BYTES:
            error = TooLarge(f"card has more than {MAX_CARD_BYTES} bytes; describe the participant more shortly.")
            self._refuse_session(session, 4400, error)
            return
        session.connection.pause_reading()  # what follows hello waits for its welcome
        token_hash = hash_token(hello.token) if hello.token is not UNSET else None
        is_owner = token_hash is not None and token_hash == self._owner_hash
        self._enter(Join(session.session_id, hello, token_hash, session.connection.peer, is_owner), 0)

    def _accept_ack(self, session: Session, frame: AckFrame) -> None:
        outbox = session.outbox
        mailbox = self.switchboard.mailbox(session.live_origin().agent_id)
        if frame.seq > outbox.delivered or mailbox is None:
            error = InvalidArguments(
                f"ack {frame.seq} is above {outbox.delivered}, the highest delivered on this session."
            )
            self._enter(Refused(session.session_id, error, {}), 0)
            return
        if frame.only:
            outbox.settle(frame.seq)
            mailbox.settle(frame.seq)
        else:
            outbox.settle_up_to(frame.seq)
            mailbox.settle_up_to(frame.seq)
        if session.starts_at_floor:
            mailbox.compact(outbox)
        if outbox.has_work() or outbox.is_behind:
            self.switchboard.touch(session)

    def _accept_nack(self, session: Session, frame: NackFrame) -> None:
        origin, outbox = session.live_origin(), session.outbox
        mailbox = self.switchboard.mailbox(origin.agent_id)
        if not outbox.holds(frame.seq) or mailbox is None:
            error = InvalidArguments(
                f"nack {frame.seq} names no delivery of this session that is open; nack what was delivered and not acked."
            )
            self._enter(Refused(session.session_id, error, {}), 0)
            return
        outbox.settle(frame.seq)
        mailbox.retrying.add(frame.seq)
        retry_after_ms = frame.retry_after_ms if frame.retry_after_ms is not UNSET else None
        self._enter(Nack(origin, frame.seq, frame.reason[:MAX_REASON_CHARS], retry_after_ms), 0)
        self.switchboard.touch(session)

    def _accept_signal(self, session: Session, frame: SignalFrame) -> None:
        origin = session.live_origin()
        if frame.to is UNSET:
            self._spawn(self._signal_thread(session, frame))
            return
        try:
            kind, name = parse_address(frame.to)
            thread_id, readers = self._signal_readers(origin.agent_id, kind, name)
        except RoundelayError as error:
            self._enter(Refused(session.session_id, error, {}), 0)
            return
        self._pass_signal(session, frame, thread_id, readers)

    def _signal_readers(self, sender: str, kind: str, name: str) -> tuple[str, list[str]]:
        state = self._state
        if kind == "agent" and state.present(name) is not None:
            return direct_thread(sender, name), [name, sender]
        if kind == "broadcast":
            return "broadcast", [participant.agent_id for participant in state.participants()]
        if kind == "channel" and state.member(name, sender).is_in:
            return f"channel:{name}", [agent_id for agent_id, member in state.members(name).items() if member.is_in]
        if kind == "mod" and name in self._mods:
            return mod_thread(name, sender), [sender]
        raise UnknownRecipient(f"{kind}:{name} is no place where {sender} may signal.")

    async def _signal_thread(self, session: Session, frame: SignalFrame) -> None:
        assert frame.thread_id is not UNSET
        rows = await self.ledger.thread(frame.thread_id, limit=1)
        head = rows[0].head if rows else None
        if head is None or not may_read(self._state, session.live_origin().agent_id, head):
            error = UnknownMessage(
                f"There is no thread {frame.thread_id[:80]!r} that {session.live_origin().agent_id} may read."
            )
            self._enter(Refused(session.session_id, error, {}), 0)
            return
        self._pass_signal(session, frame, frame.thread_id, sorted(thread_readers(self._state, head)))

    def _pass_signal(self, session: Session, frame: SignalFrame, thread_id: str, readers: list[str]) -> None:
        sender = session.live_origin().agent_id
        data = encode(SignalOutFrame(sender_id=sender, thread_id=thread_id, kind=frame.kind, body=frame.body))
        self.switchboard.signal(readers, session.session_id, data)

    def _is_overloaded(self, session: Session, keys: dict[str, str]) -> bool:
        if self._pending_bytes < self._limits.max_pending_bytes:
            return False
        self.counts["overloaded"] += 1
        self._enter(
            Refused(session.session_id, Overloaded("The hub's writer is behind; send the same again.", 200), keys), 0
        )
        return True

    def _enter(self, entry: Entry, size: int) -> None:
        self._pending.append(entry)
        self._pending_bytes += size
        if not self._work.is_set():
            self._work.set()

    # --- steps 5 to 8, per batch

    async def _write_batches(self) -> None:
        """Commit everything pending whenever the writer is free."""
        while True:
            await self._work.wait()
            self._work.clear()
            batch, self._pending, self._pending_bytes = self._pending, [], 0
            if batch:
                try:
                    await self._commit(batch)
                except LedgerError:
                    log.exception("the ledger failed; reopening it")
                    await self._recover()
            if self._is_draining and not self._pending:
                return

    async def _commit(self, batch: list[Entry]) -> None:
        facts = await self.ledger.lookup(wanted(batch))  # 5
        draft = self._state.draft()
        draft.stamp = max(self._clock(), self._state.stamp)
        outcomes = [(entry, self._apply(draft, facts, entry)) for entry in batch]  # 6
        rows = [row for _, outcome in outcomes for row in outcome.rows]
        puts = draft.changes()
        if rows or puts:
            started = time.perf_counter()
            await self.ledger.append(rows, puts)  # 7
            self.commit_s += time.perf_counter() - started
            self.counts["commits"] += 1
            self.counts["rows"] += len(rows)
        self._state.merge(draft)  # 8
        self.switchboard.published = self._state.head
        for entry, outcome in outcomes:
            self._publish(entry, outcome)

    def _apply(self, draft: State, facts: Facts, entry: Entry) -> Outcome:
        """Apply one entry and let the next ones of the batch see it. An entry that raises is a defect: it alone is refused."""
        try:
            outcome = apply(self._rules, draft, facts, entry)
        except Exception:
            quote = self._new_id()
            log.exception("apply failed", extra={"quote": quote, "entry": type(entry).__name__})
            return _internal_error(entry, quote)
        draft.change(outcome.puts)
        for row in outcome.rows:
            draft.head = row.seq
            if row.key:
                facts.known[row.actor, row.key] = Known(row.seq, row.stream, row.digest)
            if row.head is not None:
                facts.heads[row.seq] = row.head
        return outcome

    def _publish(self, entry: Entry, outcome: Outcome) -> None:
        origin = getattr(entry, "origin", None)
        sender_session = origin.session_id if origin is not None else ""
        for row in outcome.rows:
            if row.type == "message":
                self.counts["messages"] += 1
                # a message that an operation sent is delivered to the caller's session too: it gets no `stored`
                self.switchboard.publish(
                    row, sender_session if isinstance(entry, Send) and row.actor == entry.origin.agent_id else ""
                )
                for mod in self._after:
                    self._run_after(mod, row)
        for effect in outcome.effects:
            self._perform(effect)

    def _run_after(self, mod: Mod, row: Row) -> None:
        def submit(payload: object) -> None:
            self._enter(ModEntry(mod.id, payload), 0)

        work = mod.after(AfterContext(self._state, submit), row)
        if work is not None:
            self._spawn(_finish(work))

    def _perform(self, effect: Effect) -> None:
        board = self.switchboard
        match effect:
            case Answer():
                session = board.sessions.get(effect.session_id)
                if session is not None:
                    session.outgoing.append(effect.data)
                    board.touch(session)
            case Welcome():
                self._welcome(effect)
            case Refuse():
                session = board.sessions.get(effect.session_id)
                if session is not None:
                    self._refuse_session(session, effect.code, effect.error)
            case Notify():
                sessions = {
                    session.session_id: session
                    for agent_id in effect.agent_ids
                    for session in board.sessions_of(agent_id)
                }
                if effect.operators:
                    sessions |= {session.session_id: session for session in board.operators()}
                board.notice(sessions.values(), effect.kind, effect.thread_id, effect.body)
            case Settle():
                self._settle(effect)
            case Retry():
                board.retry(effect.agent_id, effect.seq, effect.attempt, effect.due_at)
            case Disconnect():
                for session in board.sessions_of(effect.agent_id):
                    self._refuse_session(session, 4403, Forbidden(effect.reason))
            case AskToStop():
                self._ask_to_stop(effect)
            case _:
                assert_never(effect)

    def _settle(self, effect: Settle) -> None:
        mailbox = self.switchboard.mailbox(effect.agent_id)
        if mailbox is None:
            return
        mailbox.settle(effect.seq)
        for session in self.switchboard.sessions_of(effect.agent_id):
            session.outbox.settle(effect.seq)
            if session.starts_at_floor:
                mailbox.compact(session.outbox)
            self.switchboard.touch(session)

    def _ask_to_stop(self, effect: AskToStop) -> None:
        body = Raw(encode({"reaction": effect.reaction}))
        frame = SignalOutFrame(sender_id=effect.sender_id, thread_id=effect.thread_id, kind="cancel", body=body)
        for session in self.switchboard.sessions_of(effect.agent_id):
            if session.origin is not None and session.origin.fence is not None:
                self.switchboard.write(session, encode(frame))

    # --- welcome

    def _welcome(self, effect: Welcome) -> None:
        session = self.switchboard.sessions.get(effect.origin.session_id)
        if session is None or session.state is not SessionState.JOINING:
            return
        hello, participant, origin = effect.hello, effect.participant, effect.origin
        if origin.fence is not None:
            self._supersede(participant.agent_id)
        cursor, resume, missing_before = self._where_to_start(effect)
        reactions = [
            OpenReactionInfo(key, reaction.trigger, reaction.seq)
            for key, reaction in self._state.items("reaction")
            if reaction.agent_id == participant.agent_id
        ]
        frame = WelcomeFrame(
            protocol=PROTOCOL_VERSION,
            server=self.server,
            network=NetworkInfo(self.name, self.epoch),
            agent_id=participant.agent_id,
            kind=participant.kind,
            role=hello.role,
            session_id=session.session_id,
            fence=UNSET if origin.fence is None else origin.fence,
            cursor=cursor,
            head=self._state.head,
            resume=resume,
            missing_before=UNSET if missing_before is None else missing_before,
            open_reactions=UNSET if origin.fence is None else sorted(reactions, key=lambda info: info.seq),
            mods=[mod.describe() for mod in self._mods.values()],
            limits={name: getattr(self._limits, name) for name in WELCOME_LIMITS},
        )
        self.switchboard.write(session, encode(frame))
        at_floor = hello.resume is UNSET
        self.switchboard.join(session, origin, participant, cursor, at_floor=at_floor)
        for reaction in effect.cancelled:
            found = self._state.get("reaction", reaction)
            if found is not None:
                self._ask_to_stop(
                    AskToStop(participant.agent_id, reaction, found.trigger_head.thread_id, participant.agent_id)
                )
        session.connection.resume_reading()
        held, session.held = session.held, []
        for data in held:
            self.receive(session, data)

    def _where_to_start(self, effect: Welcome) -> tuple[int, Any, int | None]:
        """The cursor, how the session resumes, and, if the history was cut, where it begins."""
        resume = effect.hello.resume
        if resume is UNSET:
            cursor = self.switchboard.floor_of(effect.participant)
            return cursor, "new" if effect.is_new else "full", None
        if resume.epoch == self.epoch and self._first_seq - 1 <= resume.cursor <= self._state.head:
            return resume.cursor, "full", None
        return self._first_seq - 1, "limited", self._first_seq

    def _supersede(self, agent_id: str) -> None:
        for other in self.switchboard.sessions_of(agent_id):
            if other.origin is not None and other.origin.fence is not None:
                self.switchboard.notice([other], "superseded", None, {"agent_id": agent_id})
                self._end(other, 4409, "A newer reactor has taken over.")

    # --- reads

    async def _read(self, session: Session, operation: Operation, call_id: str, args: msgspec.Struct) -> None:
        try:
            reading = Reading(session.live_origin(), self)
            arguments = {name: getattr(args, name) for name in args.__struct_fields__}
            value = Raw(encode(await operation.function(reading, **arguments)))
            data = encode(ResultFrame(call_id=call_id, value=value))
        except RoundelayError as error:
            data = error_bytes(error, {"call_id": call_id})
        except Exception:  # a defect of one operation must not end the hub
            quote = self._new_id()
            log.exception("an operation failed", extra={"quote": quote, "op": operation.op})
            data = error_bytes(
                InternalError(f"The hub failed on this call; quote {quote} to its operator."), {"call_id": call_id}
            )
        finally:
            session.reads_under_way -= 1
        if session.state is SessionState.LIVE:
            self.switchboard.write(session, data)

    @property
    def state(self) -> State:
        """The committed state."""
        return self._state

    @property
    def mod_ids(self) -> list[str]:
        return list(self._mods)

    @property
    def network_visibility(self) -> Visibility:
        return self._visibility

    @property
    def pending(self) -> int:
        """Entries that wait for the writer."""
        return len(self._pending)

    def is_online(self, agent_id: str) -> bool:
        return bool(self.switchboard.sessions_of(agent_id))

    def delivered_up_to(self, agent_id: str) -> int:
        mailbox = self.switchboard.mailbox(agent_id)
        known = [session.outbox.delivered for session in self.switchboard.sessions_of(agent_id)]
        return max([mailbox.delivered if mailbox is not None else 0, *known])

    def is_handled(self, agent_id: str, seq: int) -> bool:
        mailbox = self.switchboard.mailbox(agent_id)
        return mailbox is not None and mailbox.is_handled(seq)

    def figures(self) -> dict[str, float]:
        return read_metrics(self)

    def watch(self, session_id: str, presence: bool | None, signals: bool | None) -> None:
        session = self.switchboard.sessions.get(session_id)
        if session is not None:
            session.watches_presence = session.watches_presence if presence is None else presence
            session.watches_signals = session.watches_signals if signals is None else signals

    # --- floors and failures

    def _floors(self) -> Handled:
        dirty = self.switchboard.dirty_mailboxes()
        return Handled(tuple(Put("floor", agent_id, mailbox.snapshot()) for agent_id, mailbox in dirty))

    async def _flush_floors(self) -> None:
        """Keep acknowledgements, soon but not at once: a crash may deliver again what was just handled, never lose anything."""
        while True:
            await asyncio.sleep(FLOOR_FLUSH_S)
            floors = self._floors()
            if floors.puts:
                self._enter(floors, 0)

    async def _recover(self) -> None:
        """The outcome of a commit is unknown: answer nothing, close every session, reopen the ledger and start from what it holds."""
        self.is_ready = False
        self.counts["recoveries"] += 1
        self._pending, self._pending_bytes = [], 0
        self._close_sessions("The hub's ledger failed; reconnect and repeat what was not answered.")
        self._pending = []
        self.switchboard.forget()
        delay_s = 0.1
        while not self.is_ready and not self._is_draining:
            try:
                await self.ledger.close()
                await self._load()
            except LedgerError:
                log.exception("the ledger cannot be reopened yet")
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, 5.0)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _gather_operations(mods: Sequence[Mod]) -> dict[str, Operation]:
    return {operation.op: operation for mod in mods for operation in mod.operations()}


def _read_trigger(frame: RecordFrame) -> int | None:
    try:
        body = msgspec.json.decode(frame.body)
    except msgspec.DecodeError:
        return None
    trigger = body.get("trigger") if isinstance(body, dict) else None
    return trigger if isinstance(trigger, int) and not isinstance(trigger, bool) else None


def _internal_error(entry: Entry, quote: str) -> Outcome:
    error = InternalError(f"The hub failed on this frame and changed nothing; quote {quote} to its operator.")
    match entry:
        case Send():
            return Outcome(
                effects=(Answer(entry.origin.session_id, error_bytes(error, {"message_id": entry.frame.message_id})),)
            )
        case Record():
            return Outcome(
                effects=(Answer(entry.origin.session_id, error_bytes(error, {"record_id": entry.frame.record_id})),)
            )
        case Operate():
            return Outcome(effects=(Answer(entry.origin.session_id, error_bytes(error, {"call_id": entry.call_id})),))
        case Join():
            return Outcome(effects=(Refuse(entry.session_id, 1011, error),))
        case _:
            return Outcome()


async def _finish(work: Any) -> None:
    try:
        await work
    except Exception:  # one mod's IO must not end the hub
        log.exception("a mod's after hook failed")
