"""Steps 1 to 4: one frame comes in, and becomes an entry of the pending batch, or is done with.

What is stored waits for the batch; acknowledgements, signals and reads do not. Whatever is refused is answered in its order, by way
of the batch too. No await: a frame is taken in within the transport's callback.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, assert_never
from weakref import WeakValueDictionary

import msgspec
from msgspec import UNSET, Raw

from .auth import hash_token
from .clock import Clock
from .config import Limits
from .entries import Entry, Join, Leave, Nack, Operate, Record, Refused, Send, body_digest
from .errors import (
    InvalidArguments,
    InvalidFrame,
    LedgerError,
    Overloaded,
    RateLimited,
    RoundelayError,
    TooLarge,
    UnknownMessage,
    UnknownOperation,
    UnknownRecipient,
)
from .frames import (
    SEQ_LIMIT,
    AckFrame,
    ByeFrame,
    CallFrame,
    HelloFrame,
    NackFrame,
    RecordFrame,
    SendFrame,
    SignalFrame,
    SignalOutFrame,
    encode,
)
from .guard import SENDS, beyond_rate, due_next, parse_address
from .ledger import Ledger, find_newest
from .mod import Incoming, Mod, Operation, ask_before
from .pace import OVERDRAFT, PAUSE_S, Pace
from .pending import Pending
from .session import LIVE, Pause, ProtocolBreach, Session, SessionState
from .shape import FrameError
from .spending import CHARGED, read_spent
from .switchboard import Switchboard
from .tables import MessageHead, OpenReaction, Token
from .visibility import direct_thread, follows_live, may_read, mod_thread, parties

DELIVERY_WORK = 32
"""What each session costs that a broadcast goes to, in the bytes of `Pending`."""
OPERATION_WORK = 8192
"""What an operation costs beyond a message: most write a row, a table's value, and their result."""
MAX_JUDGES = 64
"""So many open reactions are looked through for one signal that does not name its trigger (docs/protocol.md)."""
MAX_LOOKED_BACK = 64
"""So many messages of a thread are, for one that its sender may read (docs/protocol.md)."""
MAX_RETRY_AFTER_MS = 24 * 3600 * 1000
"""The longest that a `nack` may put its message off (docs/protocol.md)."""

StartRead = Callable[[Session, Operation, str, msgspec.Struct, int], Coroutine[Any, Any, None]]


class Intake:
    """The pending batch and the way into it. The writer takes the batch by `take_batch`; ``on_work`` tells it that there is one."""

    def __init__(
        self,
        board: Switchboard,
        ledger: Ledger,
        *,
        limits: Limits,
        operations: Mapping[str, Operation],
        mods: Sequence[Mod],
        mod_ids: frozenset[str],
        owner_hash: str | None,
        clock: Clock,
        counts: Counter[str],
        on_work: Callable[[], None],
        read: StartRead,
    ) -> None:
        self.pending = Pending()
        self.is_closed = False
        """Set when the hub drains: nothing more is taken from sessions; what was not answered is settled by its repeat."""
        self._max_pending_bytes = limits.max_pending_bytes
        self._held_back: list[Session] = []
        self._paces: WeakValueDictionary[str, Pace] = WeakValueDictionary()
        """Of the participants that have a session."""
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._board = board
        self._ledger = ledger
        self._limits = limits
        self._operations = operations
        self._before = mods
        self._mods = mod_ids
        self._owner_hash = owner_hash
        self._counts = counts
        self._on_work = on_work
        self._read = read

    def take_batch(self) -> list[Entry]:
        """What the writer commits next: what is pending, as far as a batch takes it."""
        batch = self.pending.take()
        if self._held_back and self.pending.bytes < self._max_pending_bytes:
            held_back, self._held_back = self._held_back, []
            for session in held_back:
                session.resume_reading(Pause.OVERLOAD)
        return batch

    def drop_batches(self) -> None:
        """Forget what is pending: its sessions are closed, and nobody will be answered."""
        self.pending.clear()
        self._held_back.clear()

    def enter(self, entry: Entry, size: int = 0, work: int = 0) -> None:
        """Step 4: one more entry for the next batch. ``size`` is its frame's, ``work`` what it costs beyond that (`Pending.add`)."""
        pending = self.pending
        if not pending.bytes:
            self._on_work()
        pending.add(entry, size, work)

    def _hold_back(self, session: Session) -> None:
        """The last resort: refusals are entries too, so beyond twice the bound, who has more than its share of it is not read for a while."""
        if Pause.OVERLOAD in session.pauses or session.origin is None:
            return
        if self.pending.is_beyond_share(session.origin.agent_id, self._max_pending_bytes):
            self._held_back.append(session)
            session.pause_reading(Pause.OVERLOAD)

    def receive(self, session: Session, data: bytes) -> None:
        """One text message, valid UTF-8, has arrived."""
        if self.is_closed:
            return
        if session.state is LIVE or session.state is SessionState.OPENING:
            if not session.said_bye:
                self.accept(session, data)
                if self.pending.bytes >= 2 * self._max_pending_bytes:
                    self._hold_back(session)
        elif session.state is SessionState.JOINING:
            session.held.append(data)

    def release(self, session: Session) -> None:
        """The session is welcomed: what it sent meanwhile comes in."""
        agent_id = session.live_origin().agent_id
        pace = self._paces.get(agent_id)
        if pace is None:
            pace = self._paces[agent_id] = Pace(self._limits.sends_per_s)
        session.pace = pace
        if pace.is_paused:
            session.pause_reading(Pause.RATE)
        held, session.held = session.held, []
        for data in held:
            self.receive(session, data)
        session.resume_reading(Pause.JOINING)

    def refuse(self, session: Session, error: RoundelayError) -> None:
        """A frame was refused by the transport (a binary one, say): answered in its order; before ``welcome`` it ends the session."""
        if self.is_closed:
            return
        if session.state is SessionState.LIVE:
            self._count(session)
            self.enter(Refused(session.live_origin(), error, {}))
            if self.pending.bytes >= 2 * self._max_pending_bytes:
                self._hold_back(session)
        elif session.state is not SessionState.CLOSED:
            self._board.refuse(session, 4400, error)

    def accept(self, session: Session, data: bytes) -> None:
        """Take one frame in: its place and shape are checked, then it waits for the next batch, or is done here if nothing is stored."""
        pace = session.pace
        if not pace.credit:
            pace.look(self._clock())
        try:
            frame = session.read(data)  # 1 auth, 2 shape
        except FrameError as error:
            self._refuse_frame(session, error)
            return
        except ProtocolBreach as breach:
            self._board.refuse(session, breach.code, breach.error)
            return
        if isinstance(frame, SendFrame):  # before the match, whose class patterns cost: nearly every frame is one
            self._accept_send(session, frame, len(data))
            return
        match frame:
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
                self.enter(Leave(session.live_origin()))
            case _:
                assert_never(frame)

    def _refuse_frame(self, session: Session, error: FrameError) -> None:
        """Beyond the rate a wrong frame is not looked into, and its answer is that (`read_frame`, ``is_brief``)."""
        answer: RoundelayError = error.error
        if not session.pace.credit:
            answer = beyond_rate(self._limits.sends_per_s, SENDS, session.pace.wait_ms)
        self._count(session)
        self.enter(Refused(session.live_origin(), answer, error.keys))

    def _count(self, session: Session) -> None:
        """One frame counts against its participant's rate; who is far beyond it is not read for a while."""
        pace = session.pace
        if pace.credit:
            pace.credit -= 1
            return
        pace.beyond += 1
        if pace.beyond >= OVERDRAFT and not pace.is_paused:
            self._pause(session.live_origin().agent_id, pace)

    def _pause(self, agent_id: str, pace: Pace) -> None:
        pace.is_paused = True
        for session in self._board.mailboxes.sessions_of(agent_id):
            session.pause_reading(Pause.RATE)
        self._loop.call_later(PAUSE_S, self._go_on, agent_id, pace)

    def _go_on(self, agent_id: str, pace: Pace) -> None:
        pace.is_paused = False
        pace.beyond = 0
        for session in self._board.mailboxes.sessions_of(agent_id):
            session.resume_reading(Pause.RATE)

    def _accept_send(self, session: Session, frame: SendFrame, size: int) -> None:
        origin = session.live_origin()
        self._count(session)
        try:
            kind, _ = parse_address(frame.to)
        except RoundelayError as error:
            self.enter(Refused(origin, error, {"message_id": frame.message_id}))
            return
        refusal = ask_before(self._before, Incoming(origin, frame)) if self._before else None  # 3 mods.before
        if self.pending.bytes >= self._max_pending_bytes and self._is_overloaded(
            session, {"message_id": frame.message_id}
        ):
            return
        key = (origin.agent_id, "m:" + frame.message_id)
        work = DELIVERY_WORK * self._board.joined if kind in ("broadcast", "channel") else 0
        self.enter(Send(origin, key, frame, refusal), size, work)  # 4 into the batch

    def _accept_record(self, session: Session, frame: RecordFrame, size: int) -> None:
        keys = {"record_id": frame.record_id}
        self._count(session)
        body = bytes(frame.body)
        if len(body) > self._limits.max_record_bytes:
            error = TooLarge(
                f"body has {len(body)} bytes, more than max_record_bytes ({self._limits.max_record_bytes}); keep less of it."
            )
            self.enter(Refused(session.live_origin(), error, keys))
            return
        if self._is_overloaded(session, keys):
            return
        digest = body_digest(frame.reaction.encode(), frame.kind.encode(), body)
        entry = Record(session.live_origin(), frame, digest)
        if frame.kind == "started":
            try:
                trigger, oldest = _read_started(frame)
                entry = Record(entry.origin, frame, digest, trigger, oldest)
            except RoundelayError as error:
                entry = Record(entry.origin, frame, digest, refusal=error)
        elif frame.kind in CHARGED and (spent := read_spent(frame.kind, body)) is not None:
            opened: OpenReaction | None = self._board.state.get("reaction", f"{entry.origin.agent_id}/{frame.reaction}")
            if opened is not None:  # else its `started` is not stored yet, and its `finished` will tell
                entry = Record(entry.origin, frame, digest, opened.trigger, spent=spent)
        self.enter(entry, size)

    def _accept_call(self, session: Session, frame: CallFrame, size: int) -> None:
        keys = {"call_id": frame.call_id}
        try:
            operation = self._operations.get(frame.op)
            if operation is None:
                raise UnknownOperation(f"There is no operation {frame.op[:80]!r}; welcome lists the mods' operations.")
            args = operation.decode(frame.args)
        except RoundelayError as error:
            self._count(session)
            self.enter(Refused(session.live_origin(), error, keys))
            return
        if operation.is_change:
            self._count(session)
        if self._is_overloaded(session, keys):
            return
        if operation.is_change:
            digest = body_digest(frame.op.encode(), bytes(frame.args))
            self.enter(Operate(session.live_origin(), frame.call_id, frame.op, args, digest), size, OPERATION_WORK)
        elif (busy := self._too_many_reads(session, size)) is not None:
            self.enter(Refused(session.live_origin(), busy, keys))
        else:
            session.reads_under_way += 1
            session.asked_bytes += size
            self._board.spawn(self._read(session, operation, frame.call_id, args, size))

    def _too_many_reads(self, session: Session, size: int) -> Overloaded | None:
        """Why one more call of this session cannot wait for its turn to read."""
        most, most_bytes = self._limits.max_reads, self._limits.session_queue_bytes
        if session.reads_under_way >= most:
            return Overloaded(f"max_reads ({most}) of this session are under way; send the same again later.", 100)
        if session.asked_bytes and session.asked_bytes + size > most_bytes:
            return Overloaded(
                f"The reads of this session that are under way have session_queue_bytes ({most_bytes}); send the same again later.",
                100,
            )
        return None

    def _accept_hello(self, session: Session, hello: HelloFrame) -> None:
        peer = session.connection.peer
        self._board.joining += 1
        if self._board.taken > self._limits.max_connections and not peer.is_trusted:
            self._board.end(session, 4503, "max_connections is reached; try again later.")
            return
        most = self._limits.max_card_bytes
        if hello.card is not UNSET and len(bytes(hello.card)) > most:
            error = InvalidFrame(f"card has more than max_card_bytes ({most}); describe the participant more shortly.")
            self._board.refuse(session, 4400, error)
            return
        session.pause_reading(Pause.JOINING)  # what follows hello waits for its welcome
        token_hash = hash_token(hello.token) if hello.token is not UNSET else None
        is_owner = token_hash is not None and token_hash == self._owner_hash
        if is_owner or peer.is_trusted or self._is_known(hello.agent_id, token_hash):
            session.connection.admit()
        others = self._board.mailboxes.sessions_of(hello.agent_id)
        is_held = any(other.origin is not None and other.origin.fence is not None for other in others)
        self.enter(Join(session.session_id, hello, token_hash, peer, is_owner, is_held))

    def _is_known(self, agent_id: str, token_hash: str | None) -> bool:
        """Whether this is a token of this participant that counts; `auth.identify` decides on all else."""
        token: Token | None = self._board.state.get("token", token_hash) if token_hash is not None else None
        return token is not None and token.agent_id == agent_id and not token.revoked

    def _accept_ack(self, session: Session, frame: AckFrame) -> None:
        outbox = session.outbox
        mailbox = self._board.mailboxes.mailbox(session.live_origin().agent_id)
        if frame.seq > outbox.delivered or mailbox is None:
            error = InvalidArguments(
                f"ack {frame.seq} is above {outbox.delivered}, the highest delivered on this session."
            )
            self._count(session)
            self.enter(Refused(session.live_origin(), error, {}))
            return
        if mailbox.is_handled(frame.seq) and not outbox.holds(frame.seq):
            self._count(session)  # it says nothing new
        if frame.only:
            outbox.settle(frame.seq)
            mailbox.settle(frame.seq)
        else:
            mailbox.settle_up_to(frame.seq, outbox)
            outbox.settle_up_to(frame.seq)
        if session.starts_at_floor:
            mailbox.compact(outbox)
        if outbox.has_work() or outbox.is_behind:
            self._board.touch(session)

    def _accept_nack(self, session: Session, frame: NackFrame) -> None:
        origin, outbox = session.live_origin(), session.outbox
        self._count(session)
        mailbox = self._board.mailboxes.mailbox(origin.agent_id)
        if not outbox.holds(frame.seq) or mailbox is None:
            error = InvalidArguments(
                f"nack {frame.seq} names no delivery of this session that is open; nack what was delivered and not acked."
            )
            self.enter(Refused(origin, error, {}))
            return
        if len(mailbox.tried) >= self._limits.max_put_off and frame.seq not in mailbox.tried:
            busy = RateLimited(
                f"{len(mailbox.tried)} messages of {origin.agent_id} that failed are not handled yet, the most that may be (max_put_off); {frame.seq} "
                f"stays with this session: ack it, or nack it again later."
            )
            self.enter(Refused(origin, busy, {}))
            return
        outbox.settle(frame.seq)
        self._board.touch(session)
        if mailbox.is_handled(frame.seq):  # another session has acknowledged it
            return
        mailbox.wait(frame.seq)
        retry_after_ms = min(frame.retry_after_ms, MAX_RETRY_AFTER_MS) if frame.retry_after_ms is not UNSET else None
        self.enter(Nack(origin, frame.seq, frame.reason[: self._limits.max_reason_chars], retry_after_ms))

    def _accept_signal(self, session: Session, frame: SignalFrame) -> None:
        origin = session.live_origin()
        pace = session.pace
        is_beyond = not pace.credit
        self._count(session)
        due = due_next(pace.signals, self._clock(), self._limits.signals_per_s) if not is_beyond else None
        if due is None:  # it is dropped, as signals may be
            self._counts["signals_dropped"] += 1
            return
        pace.signals = due
        if frame.to is UNSET:
            if session.reads_under_way < self._limits.max_reads:  # else it is dropped, as signals may be
                session.reads_under_way += 1
                self._board.spawn(self._signal_thread(session, frame))
            return
        try:
            kind, name = parse_address(frame.to)
            thread_id, readers = self._signal_readers(origin.agent_id, kind, name)
        except RoundelayError as error:
            self.enter(Refused(session.live_origin(), error, {}))
            return
        self._pass_signal(session, frame, thread_id, readers)

    def _signal_readers(self, sender: str, kind: str, name: str) -> tuple[str, list[str]]:
        state = self._board.state
        if kind == "agent" and state.present(name) is not None:
            return direct_thread(sender, name), list(dict.fromkeys((name, sender)))
        if kind == "broadcast":
            return "broadcast", list(self._board.around("broadcast"))
        if kind == "channel" and state.member(name, sender).is_in:
            to = f"channel:{name}"
            return to, [agent_id for agent_id in self._board.around(to) if state.member(name, agent_id).is_in]
        if kind == "mod" and name in self._mods:
            return mod_thread(name, sender), [sender]
        raise UnknownRecipient(f"{kind}:{name} is no place where {sender} may signal.")

    async def _signal_thread(self, session: Session, frame: SignalFrame) -> None:
        """Pass a signal on to those who may know of what is worked on: of its ``trigger``, or of all that it may be about."""
        assert frame.thread_id is not UNSET
        sender = session.live_origin().agent_id
        outage, who = self._board.read_outage, f"a signal of {sender}"
        try:
            if frame.trigger is not UNSET:
                judges = await self._find_trigger(sender, frame.thread_id, frame.trigger)
            else:
                judges = await self._find_judges(sender, frame.thread_id)
            if outage.is_on:
                outage.end(who)
        except LedgerError as error:
            outage.fail(error, who)
            return
        except RoundelayError as error:
            self.enter(Refused(session.live_origin(), error, {}))
            return
        finally:
            session.reads_under_way -= 1
        state, head = self._board.state, judges[0]
        near = parties(head) if head.kind in ("direct", "mod") else self._board.around(head.to)
        readers = [agent_id for agent_id in dict.fromkeys(near) if follows_live(state, agent_id, judges)]
        self._pass_signal(session, frame, frame.thread_id, readers)

    async def _find_trigger(self, sender: str, thread_id: str, trigger: int) -> list[MessageHead]:
        """The message that a signal says it is about. Raises `UnknownMessage` unless it is one of the thread that the sender may read."""
        opened = next(iter(self._board.state.reactions_to(sender, trigger).values()), None)
        head = opened.trigger_head if opened is not None else (await self._ledger.heads([trigger])).get(trigger)
        if head is None or head.thread_id != thread_id or not may_read(self._board.state, sender, head):
            raise UnknownMessage(
                f"There is no message {trigger} in {thread_id[:80]!r} that {sender} may read; trigger is the seq of one."
            )
        return [head]

    async def _find_judges(self, sender: str, thread_id: str) -> list[MessageHead]:
        """What a signal may be about that does not say it: the newest message of the thread, the newest one that the sender may read, and
        whatever it has an open reaction to there. Raises `UnknownMessage` if it may read none, `InvalidArguments` if there is too much."""
        row = await find_newest(self._ledger, thread_id)
        newest = row.head if row is not None else None
        page = None
        if newest is not None and not may_read(self._board.state, sender, newest):
            page = await self._ledger.thread(thread_id, before=newest.seq, limit=MAX_LOOKED_BACK)
        state = self._board.state
        begun = min(state.reactions_of(sender), state.reactions_in(thread_id), key=len)
        if len(begun) > MAX_JUDGES:
            raise InvalidArguments(
                f"{sender} has more than {MAX_JUDGES} reactions open; a signal names the message that it is about as its trigger."
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
        data = encode(SignalOutFrame(sender_id=sender, thread_id=thread_id, kind=frame.kind, body=frame.body))
        self._board.signal(readers, session.session_id, data)

    def _is_overloaded(self, session: Session, keys: dict[str, str]) -> bool:
        """Whether too much waits, and of this participant more than its share: then it is told so."""
        origin, most = session.live_origin(), self._max_pending_bytes
        if self.pending.bytes < most or not self.pending.is_beyond_share(origin.agent_id, most):
            return False
        self._counts["overloaded"] += 1
        self.enter(Refused(origin, Overloaded("The hub's writer is behind; send the same again.", 200), keys))
        return True


def _read_started(frame: RecordFrame) -> tuple[int, int]:
    """The trigger that a ``started`` record names, and the oldest message of its manifest, as far as those are seqs.

    Raises `InvalidArguments` without a trigger, `UnknownMessage` for one that is beyond every seq.
    """
    try:
        shown = msgspec.json.decode(frame.body, type=dict[str, Raw]).get("trigger", Raw(b"missing"))
        body = msgspec.json.decode(frame.body)
    except msgspec.DecodeError:
        shown, body = Raw(b"missing"), {}
    trigger, text = body.get("trigger"), bytes(shown)[:40].decode(errors="replace")
    if type(trigger) is not int:
        raise InvalidArguments(
            f"body.trigger of a started record is the seq of the message that the reaction is for; here it is {text}."
        )
    if not 0 < trigger < SEQ_LIMIT:  # beyond is more than SQLite takes
        raise UnknownMessage(f"There is no message {text}; body.trigger of a started record is the seq of one.")
    manifest = body.get("manifest")
    seqs = [seq for seq in manifest if type(seq) is int and 0 < seq < SEQ_LIMIT] if isinstance(manifest, list) else []
    return trigger, min([trigger, *seqs])
