"""Steps 1 to 4: one frame comes in, and becomes an entry of the pending batch, or is done with.

What is stored waits for the batch; acknowledgements, signals and reads do not. Whatever is refused is answered in its
order, by way of the batch too. No await: a frame is taken in within the transport's callback.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, assert_never
from weakref import WeakValueDictionary

import msgspec
from msgspec import UNSET, Raw

from roundelay.network.addresses import mod_address, parse_address
from roundelay.network.clock import Clock
from roundelay.network.core.access import check_right
from roundelay.network.core.apply import describe_follower
from roundelay.network.core.call_progress import CALL_KINDS, parse_call_place, parse_wait
from roundelay.network.core.entries import (
    BindCredentials,
    EndTakeover,
    Entry,
    Join,
    Leave,
    ModEntry,
    Nack,
    Operate,
    Origin,
    ProcessEnded,
    Record,
    RefusedFrame,
    SaveAckCursors,
    Send,
    body_digest,
)
from roundelay.network.core.joining import hash_token
from roundelay.network.core.limits import SENDS, rate_limited_error
from roundelay.network.core.mod import Incoming, Operation, run_before_hooks
from roundelay.network.core.sending import Rules
from roundelay.network.core.tables import OpenReaction
from roundelay.network.core.usage import USAGE_KINDS, parse_usage
from roundelay.network.errors import (
    Forbidden,
    InvalidArguments,
    InvalidFrame,
    Overloaded,
    RateLimited,
    RoundelayError,
    TooLarge,
    UnknownMessage,
    UnknownOperation,
)
from roundelay.network.frames import (
    SEQ_LIMIT,
    AckFrame,
    ByeFrame,
    CallFrame,
    ClientFrame,
    HelloFrame,
    NackFrame,
    RecordFrame,
    SendFrame,
    SignalFrame,
)

from .publisher import SessionRegistry
from .session import LIVE, MAX_EXCESS_FRAMES, PAUSE_S, PauseReason, SendRate, Session, SessionState
from .shape import FrameError, read_frame
from .signals import Signals

DELIVERY_WORK = 32
"""What each session costs that a broadcast goes to, in the bytes of `Pending`."""
OPERATION_WORK = 8192
"""What an operation costs beyond a message: most write a row, a table's value, and their result."""
MAX_RETRY_AFTER_MS = 24 * 3600 * 1000
"""The longest that a `nack` may put its message off (docs/protocol.md)."""

ENTRY_BYTES = 1024
"""What a pending entry counts beside its frame: about what it takes in memory, whatever its frame's size."""
BATCH_COST = 1 << 19
"""What a batch takes: some 400 small messages. Everybody waits while it is applied and written; a larger one saves
hardly any more fsyncs."""
TURN_COST = 1 << 14
"""What one owner may have of a batch before the next one's turn."""


StartRead = Callable[[Session, Operation, str, msgspec.Struct, int], Coroutine[Any, Any, None]]


class Intake:
    """The pending batch and the way into it. The writer takes the batch by `take_batch`; ``on_work`` tells it that
    there is one."""

    def __init__(
        self,
        board: SessionRegistry,
        rules: Rules,
        *,
        owner_hash: str | None,
        clock: Clock,
        on_work: Callable[[], None],
        read: StartRead,
    ) -> None:
        self.pending = Pending(on_work)
        self.enter = self.pending.add
        """Step 4: one more entry for the next batch, with the size of its frame, and what it costs beyond that."""
        self.is_closed = False
        """Set when the hub drains: nothing more is taken from sessions; what was not answered is settled by its
        repeat."""
        self._board = board
        self._limits = rules.limits
        self._max_pending_bytes = rules.limits.max_pending_bytes
        self._max_depth = rules.limits.max_depth
        self._operations = rules.operations
        self._before = rules.before_hooks
        self._follows = rules.follows
        self._owner_hash = owner_hash
        self._clock = clock
        self._read = read
        self._signals = Signals(board, rules, clock, self.enter)
        self._held_back: list[Session] = []
        self._paces: WeakValueDictionary[str, SendRate] = WeakValueDictionary()
        """Of the participants that have a session."""
        self._loop = asyncio.get_running_loop()

    def take_batch(self) -> list[Entry]:
        """What the writer commits next: what is pending, as far as a batch takes it."""
        batch = self.pending.take()
        if self._held_back and self.pending.bytes < self._max_pending_bytes:
            held_back, self._held_back = self._held_back, []
            for session in held_back:
                session.resume_reading(PauseReason.OVERLOAD)
        return batch

    def drop_batches(self) -> None:
        """Forget what is pending: its sessions are closed, and nobody will be answered."""
        self.pending.clear()
        self._held_back.clear()

    def _hold_back(self, session: Session) -> None:
        """The last resort: refusals are entries too, so beyond twice the bound, who has more than its share of it is
        not read for a while."""
        if PauseReason.OVERLOAD in session.pauses or session.origin is None:
            return
        if self.pending.is_beyond_share(session.origin.agent_id, self._max_pending_bytes):
            self._held_back.append(session)
            session.pause_reading(PauseReason.OVERLOAD)

    def receive(self, session: Session, data: bytes) -> None:
        """One text message, valid UTF-8, has arrived."""
        if self.is_closed or session.said_bye:
            return
        origin = session.origin
        if origin is None:
            self._receive_first(session, data)
            return
        if session.state is not LIVE:
            return
        pace = session.send_rate
        if not pace.credit:
            pace.refill(self._clock())
        try:
            frame = read_frame(data, self._max_depth, is_brief=not pace.credit)  # 2 shape
        except FrameError as error:
            self._refuse_frame(session, origin, error)
        else:
            if isinstance(frame, SendFrame):  # before the match, whose class patterns cost: nearly every frame is one
                self._accept_send(session, origin, frame, len(data))
            else:
                self._accept(session, origin, frame, len(data))
        if self.pending.bytes >= 2 * self._max_pending_bytes:
            self._hold_back(session)

    def _receive_first(self, session: Session, data: bytes) -> None:
        """1 auth: before its welcome a session says ``hello`` once; what follows waits. Who it is, `apply` decides."""
        if session.state is SessionState.JOINING:
            session.early_frames.append(data)
        if session.state is not SessionState.OPENING:
            return
        try:
            hello = read_frame(data, self._max_depth)
        except FrameError as error:
            self._board.refuse(session, 4400, error.error)
            return
        if isinstance(hello, HelloFrame):
            session.state = SessionState.JOINING
            self._accept_hello(session, hello)
        else:
            self._board.refuse(session, 4400, InvalidFrame("The first frame must be hello."))

    def release(self, session: Session) -> None:
        """The session is welcomed: what it sent meanwhile comes in."""
        agent_id = session.live_origin().agent_id
        pace = self._paces.get(agent_id)
        if pace is None:
            pace = self._paces[agent_id] = SendRate(self._limits.sends_per_s)
        session.send_rate = pace
        if pace.is_paused:
            session.pause_reading(PauseReason.RATE)
        held, session.early_frames = session.early_frames, []
        for data in held:
            self.receive(session, data)
        session.resume_reading(PauseReason.JOINING)

    def refuse(self, session: Session, error: RoundelayError) -> None:
        """A frame was refused by the transport (a binary one, say): answered in its order; before ``welcome`` it ends
        the session."""
        if self.is_closed:
            return
        if session.state is SessionState.LIVE:
            self._count(session)
            self.enter(RefusedFrame(session.live_origin(), error, {}))
            if self.pending.bytes >= 2 * self._max_pending_bytes:
                self._hold_back(session)
        elif session.state is not SessionState.CLOSED:
            self._board.refuse(session, 4400, error)

    def _accept(self, session: Session, origin: Origin, frame: ClientFrame, size: int) -> None:
        """Any frame but a ``send``: it waits for the next batch, or is done here if nothing is stored."""
        keys: dict[str, str] = {}
        try:
            if self._follows is not None and isinstance(frame, NackFrame | SignalFrame):
                self._count(session)
                raise Forbidden(describe_follower(self._follows()))
            match frame:
                case AckFrame():
                    self._accept_ack(session, origin, frame)
                case RecordFrame():
                    keys = {"record_id": frame.record_id}
                    self._accept_record(session, origin, frame, size)
                case CallFrame():
                    keys = {"call_id": frame.call_id}
                    self._accept_call(session, origin, frame, size)
                case NackFrame():
                    self._accept_nack(session, origin, frame)
                case SignalFrame():
                    is_beyond = not session.send_rate.credit
                    self._count(session)
                    self._signals.accept(session, origin, frame, is_beyond=is_beyond)
                case HelloFrame():
                    self._count(session)
                    raise InvalidFrame("hello is sent once, as the first frame; this session has joined already.")
                case ByeFrame():
                    session.said_bye = True
                    self.enter(Leave(origin))
                case SendFrame():
                    self._accept_send(session, origin, frame, size)
                case _:
                    assert_never(frame)
        except RoundelayError as error:
            self.enter(RefusedFrame(origin, error, keys))

    def _refuse_frame(self, session: Session, origin: Origin, error: FrameError) -> None:
        """Beyond the rate a wrong frame is not looked into, and its answer is that (`read_frame`, ``is_brief``)."""
        answer: RoundelayError = error.error
        if not session.send_rate.credit:
            answer = rate_limited_error(self._limits.sends_per_s, SENDS, session.send_rate.wait_ms)
        self._count(session)
        self.enter(RefusedFrame(origin, answer, error.keys))

    def _count(self, session: Session) -> None:
        """One frame counts against its participant's rate; who is far beyond it is not read for a while."""
        pace = session.send_rate
        if pace.credit:
            pace.credit -= 1
            return
        pace.excess += 1
        if pace.excess >= MAX_EXCESS_FRAMES and not pace.is_paused:
            self._pause(session.live_origin().agent_id, pace)

    def _pause(self, agent_id: str, pace: SendRate) -> None:
        pace.is_paused = True
        for session in self._board.participants.sessions_of(agent_id):
            session.pause_reading(PauseReason.RATE)
        self._loop.call_later(PAUSE_S, self._go_on, agent_id, pace)

    def _go_on(self, agent_id: str, pace: SendRate) -> None:
        pace.is_paused = False
        pace.excess = 0
        for session in self._board.participants.sessions_of(agent_id):
            session.resume_reading(PauseReason.RATE)

    def _accept_send(self, session: Session, origin: Origin, frame: SendFrame, size: int) -> None:
        pace = session.send_rate
        if pace.credit:  # nearly always; the rest of `_count`
            pace.credit -= 1
        else:
            self._count(session)
        try:
            kind, _ = parse_address(frame.to)
            refusal = run_before_hooks(self._before, Incoming(origin, frame)) if self._before else None  # 3 mods.before
            if self.pending.bytes >= self._max_pending_bytes:
                self._check_load(origin)
        except RoundelayError as error:
            self.enter(RefusedFrame(origin, error, {"message_id": frame.message_id}))
            return
        entry = Send(origin, (origin.agent_id, "m:" + frame.message_id), frame, refusal)
        if kind == "agent" or kind == "mod":  # compared, not looked up: every message comes by
            self.enter(entry, size)  # 4 into the batch
        else:
            self.enter(entry, size, DELIVERY_WORK * self._board.joined)

    def _accept_record(self, session: Session, origin: Origin, frame: RecordFrame, size: int) -> None:
        self._count(session)
        body = bytes(frame.body)
        if len(body) > self._limits.max_record_bytes:
            raise TooLarge(
                f"body has {len(body)} bytes, more than max_record_bytes ({self._limits.max_record_bytes}); keep less "
                "of it."
            )
        self._check_load(origin)
        digest = body_digest(frame.reaction.encode(), frame.kind.encode(), body)
        entry = Record(origin, frame, digest)
        if frame.kind == "started":
            try:
                trigger, oldest = _read_started(frame)
                entry = Record(origin, frame, digest, trigger, oldest)
            except RoundelayError as error:
                entry = Record(origin, frame, digest, refusal=error)
        elif frame.kind in CALL_KINDS:
            awaited = parse_wait(body) if frame.kind == "waiting" else None
            entry = Record(origin, frame, digest, call=parse_call_place(body), wait=awaited)
        elif frame.kind == "model_failed":
            failing: OpenReaction | None = self._board.state.get("reaction", f"{origin.agent_id}/{frame.reaction}")
            entry = Record(origin, frame, digest, failing.trigger if failing is not None else None)
        elif frame.kind in USAGE_KINDS:
            opened: OpenReaction | None = self._board.state.get("reaction", f"{origin.agent_id}/{frame.reaction}")
            if opened is None:  # its `started` may not be stored yet: then its `finished` will tell what it has spent
                entry = Record(origin, frame, digest, may_withdraw=frame.kind == "finished")
            elif (spent := parse_usage(frame.kind, body)) is not None:
                entry = Record(origin, frame, digest, opened.trigger, usage=spent)
        self.enter(entry, size)

    def _accept_call(self, session: Session, origin: Origin, frame: CallFrame, size: int) -> None:
        try:
            operation = self._operations.get(frame.op)
            if operation is None:
                raise UnknownOperation(f"There is no operation {frame.op[:80]!r}; welcome lists the mods' operations.")
            args = operation.decode(frame.args)
            if not operation.is_change:  # else `calls` asks, which knows a repeat
                check_right(self._board.state, origin, "call", operation.op)
        except RoundelayError:
            self._count(session)
            raise
        if operation.is_change:
            self._count(session)
        self._check_load(origin)
        if operation.is_change:
            digest = body_digest(frame.op.encode(), bytes(frame.args))
            self.enter(Operate(origin, frame.call_id, frame.op, args, digest), size, OPERATION_WORK)
            return
        most, most_bytes = self._limits.max_reads, self._limits.session_queue_bytes
        if session.reads_under_way >= most:
            raise Overloaded(f"max_reads ({most}) of this session are under way; send the same again later.", 100)
        if session.asked_bytes and session.asked_bytes + size > most_bytes:
            raise Overloaded(
                f"The reads of this session that are under way have session_queue_bytes ({most_bytes}); send the same "
                "again later.",
                100,
            )
        session.reads_under_way += 1
        session.asked_bytes += size
        self._board.spawn(self._read(session, operation, frame.call_id, args, size))

    def _accept_hello(self, session: Session, hello: HelloFrame) -> None:
        peer = session.connection.peer
        self._board.joining += 1
        if self._board.admitted > self._limits.max_connections and not peer.is_trusted:
            self._board.end(session, 4503, "max_connections is reached; try again later.")
            return
        most = self._limits.max_card_bytes
        if hello.card is not UNSET and len(bytes(hello.card)) > most:
            error = InvalidFrame(
                f"card has more than max_card_bytes ({most}); describe the participant in fewer words."
            )
            self._board.refuse(session, 4400, error)
            return
        session.pause_reading(PauseReason.JOINING)  # what follows hello waits for its welcome
        token_hash = hash_token(hello.token) if hello.token is not UNSET else None
        new_hash = hash_token(hello.new_token) if hello.new_token is not UNSET else None
        is_owner = token_hash is not None and token_hash == self._owner_hash
        if is_owner or peer.is_trusted or self._is_known(hello.agent_id, token_hash, new_hash):
            session.connection.admit()
        others = self._board.participants.sessions_of(hello.agent_id)
        is_held = any(other.origin is not None and other.origin.fencing_token is not None for other in others)
        self.enter(Join(session.session_id, hello, token_hash, peer, is_owner, is_held, new_hash))

    def _is_known(self, agent_id: str, *hashes: str | None) -> bool:
        """Whether one of these is a token, or a login, of this participant that counts; `joining.identify` decides on
        all else."""
        state = self._board.state
        tokens, logins = state.tokens(agent_id), state.logins(agent_id)
        return any(it in logins or (it in tokens and not tokens[it].revoked) for it in hashes if it is not None)

    def _accept_ack(self, session: Session, origin: Origin, frame: AckFrame) -> None:
        outbox = session.outbox
        mailbox = self._board.participants.find_mailbox(origin.agent_id)
        if frame.seq > outbox.delivered or mailbox is None:
            self._count(session)
            raise InvalidArguments(
                f"ack {frame.seq} is above {outbox.delivered}, the highest delivered on this session."
            )
        if mailbox.is_handled(frame.seq) and not outbox.is_unacked(frame.seq):
            self._count(session)  # it says nothing new
        if frame.only:
            outbox.release(frame.seq)
            mailbox.mark_handled(frame.seq)
        else:
            mailbox.mark_handled_up_to(frame.seq, outbox)
            outbox.release_up_to(frame.seq)
        if session.starts_at_ack_cursor:
            mailbox.compact(outbox)
        if outbox.has_work() or outbox.is_behind:
            self._board.schedule_flush(session)

    def _accept_nack(self, session: Session, origin: Origin, frame: NackFrame) -> None:
        outbox = session.outbox
        self._count(session)
        mailbox = self._board.participants.find_mailbox(origin.agent_id)
        if not outbox.is_unacked(frame.seq) or mailbox is None:
            raise InvalidArguments(
                f"nack {frame.seq} names no delivery of this session that is open; nack what was delivered and not "
                "acked."
            )
        if len(mailbox.failed) >= self._limits.max_put_off and frame.seq not in mailbox.failed:
            raise RateLimited(
                f"{len(mailbox.failed)} messages of {origin.agent_id} that failed are not handled yet, the most that "
                f"may be (max_put_off); {frame.seq} stays with this session: ack it, or nack it again later."
            )
        outbox.release(frame.seq)
        self._board.schedule_flush(session)
        if mailbox.is_handled(frame.seq):  # another session has acknowledged it
            return
        mailbox.schedule_retry(frame.seq)
        retry_after_ms = min(frame.retry_after_ms, MAX_RETRY_AFTER_MS) if frame.retry_after_ms is not UNSET else None
        self.enter(Nack(origin, frame.seq, frame.reason[: self._limits.max_reason_chars], retry_after_ms))

    def _check_load(self, origin: Origin) -> None:
        """Raises `Overloaded` where too much waits, and of this participant more than its share."""
        most = self._max_pending_bytes
        if self.pending.bytes >= most and self.pending.is_beyond_share(origin.agent_id, most):
            self._board.counts["overloaded"] += 1
            raise Overloaded("The hub's writer is behind; send the same again.", 200)


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


class Pending:
    """Entries, each with its size in bytes and its cost; what the writer takes next is `take`'s."""

    def __init__(self, on_work: Callable[[], None]) -> None:
        self.bytes = 0
        self._on_work = on_work
        """Called when the first entry comes to where nothing waited."""
        # What came since the last batch. Two lists: a tuple for each message would be one more object to make and to
        # collect.
        self._entries: list[Entry] = []
        self._sizes: list[int] = []
        self._works: dict[int, int] = {}
        """By place in the lists, of those that cost more than their size."""
        self._lines: dict[str, _Line] = {}
        """Those that a batch did not take, by owner."""
        self._turns: deque[_Line] = deque()
        self._waiting = 0
        """How many are in lines."""

    def __len__(self) -> int:
        return self._waiting + len(self._entries)

    def add(self, entry: Entry, size: int = 0, work: int = 0) -> None:
        """One more. ``size`` is its frame's, ``work`` what it costs the hub beyond that, in bytes that would cost as
        much."""
        if not self.bytes:
            self._on_work()
        size += ENTRY_BYTES
        self._entries.append(entry)
        self._sizes.append(size)
        self.bytes += size
        if work:
            self._works[len(self._sizes) - 1] = work

    def take(self) -> list[Entry]:
        """The next batch: everything, in the order in which it came, if that is no more than a batch takes; else each
        owner's next, in turns."""
        if not self._waiting and self.bytes + sum(self._works.values()) <= BATCH_COST:
            batch = self._entries
            self.clear()
            return batch
        self._line_up()
        batch = []
        cost = 0
        while self._turns and cost < BATCH_COST:
            line = self._turns.popleft()
            line.credit += TURN_COST
            while line.entries and line.entries[0][2] <= line.credit:
                entry, size, its_cost = line.entries.popleft()
                batch.append(entry)
                line.credit -= its_cost
                line.bytes -= size
                self.bytes -= size
                cost += its_cost
            if line.entries:
                self._turns.append(line)
            else:
                del self._lines[line.owner]
        self._waiting -= len(batch)
        return batch

    def clear(self) -> None:
        """Forget everything."""
        self._entries, self._sizes, self._works = [], [], {}
        self._lines.clear()
        self._turns.clear()
        self.bytes = self._waiting = 0

    def is_beyond_share(self, owner: str, most: int) -> bool:
        """Whether as much of this owner waits as would be its share of ``most`` bytes among those of whom anything
        waits."""
        self._line_up()
        line = self._lines.get(owner)
        return line is not None and line.bytes * len(self._lines) >= most

    def _line_up(self) -> None:
        """Put what has come into the lines."""
        works = self._works
        for place, (entry, size) in enumerate(zip(self._entries, self._sizes, strict=True)):
            owner = owner_of(entry)
            line = self._lines.get(owner)
            if line is None:
                line = self._lines[owner] = _Line(owner)
                self._turns.append(line)
            line.entries.append((entry, size, size + works.get(place, 0) if works else size))
            line.bytes += size
        self._waiting += len(self._entries)
        self._entries, self._sizes, self._works = [], [], {}


class _Line:
    """What waits of one owner, in the order in which it came; ``credit`` is what it may have of the batch at hand."""

    __slots__ = ("bytes", "credit", "entries", "owner")

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.entries: deque[tuple[Entry, int, int]] = deque()
        self.bytes = 0
        self.credit = 0


def owner_of(entry: Entry) -> str:
    """In whose line an entry waits. A `hello` waits in the line of whom it names, after what that one's sessions sent
    before."""
    if isinstance(entry, Send):  # before the match, whose class patterns cost: nearly every entry is one
        return entry.origin.agent_id
    match entry:
        case Join():
            return entry.hello.agent_id
        case SaveAckCursors() | BindCredentials() | ProcessEnded() | EndTakeover():
            return ""
        case ModEntry():
            return mod_address(entry.mod)
        case _:
            return entry.origin.agent_id
