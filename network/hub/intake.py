"""Steps 1 to 4 of a frame: turn the frame into an entry of the next batch, or answer the frame at once.

Entries that are stored wait for the batch. Acknowledgements, signals and reads do not wait. Refusals also go through
the batch, so that a session gets its answers in the order of its frames. No step awaits: a frame is handled within the
transport's callback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import assert_never
from weakref import WeakValueDictionary

import msgspec
from msgspec import UNSET, Raw

from roundelay.network.addresses import parse_address
from roundelay.network.clock import Clock
from roundelay.network.core.access import check_right
from roundelay.network.core.call_progress import CALL_KINDS, parse_call_place, parse_wait
from roundelay.network.core.entries import (
    Entry,
    Group,
    Join,
    Leave,
    Nack,
    Operate,
    Origin,
    Record,
    RefusedFrame,
    Send,
    body_digest,
)
from roundelay.network.core.joining import hash_token
from roundelay.network.core.limits import SENDS, rate_limited_error
from roundelay.network.core.mod import Incoming, run_before_hooks
from roundelay.network.core.sending import Rules
from roundelay.network.core.tables import OpenReaction
from roundelay.network.core.usage import USAGE_KINDS, parse_usage
from roundelay.network.errors import (
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
    BatchFrame,
    ByeFrame,
    CallFrame,
    ClientFrame,
    HelloFrame,
    NackFrame,
    RecordFrame,
    SendFrame,
    SignalFrame,
)
from roundelay.network.ledger import Ledger

from .pending import ENTRY_BYTES, PendingEntries
from .reads import ReadService
from .session import LIVE, MAX_EXCESS_FRAMES, PAUSE_S, PauseReason, SendRate, Session, SessionState
from .sessions import SessionRegistry
from .shape import FrameError, read_frame
from .signals import Signals

DELIVERY_COST = 32
"""Cost of delivering a broadcast to one session, in bytes (`PendingEntries.add`)."""
OPERATION_COST = 8192
"""Cost of an operation in addition to its size, in bytes. Most operations write a row, a table value and a result."""
MAX_RETRY_AFTER_MS = 24 * 3600 * 1000
"""Maximum delay that a ``nack`` may request, in ms (docs/protocol.md)."""


class Intake:
    """Handles the frames of sessions. The batch writer takes the resulting entries with `take_batch`."""

    def __init__(
        self,
        registry: SessionRegistry,
        rules: Rules,
        ledger: Ledger,
        pending: PendingEntries,
        reads: ReadService,
        *,
        owner_hash: str | None,
        clock: Clock,
    ) -> None:
        self.pending = pending
        self.is_closed = False
        """Whether the hub drains and accepts no more frames from sessions. Clients send unanswered frames again after
        they have reconnected."""
        self._registry = registry
        self._rules = rules
        self._limits = rules.limits
        self._max_pending_bytes = rules.limits.max_pending_bytes
        self._max_depth = rules.limits.max_depth
        self._before_hooks = rules.before_hooks
        self._reads = reads
        self._owner_hash = owner_hash
        self._clock = clock
        self._signals = Signals(registry, rules, ledger, pending, clock)
        self._overloading: list[Session] = []
        """Sessions whose frames are not read until the batch writer has caught up."""
        self._send_rates: WeakValueDictionary[str, SendRate] = WeakValueDictionary()
        """Frame rates of the participants that have a session, by agent id."""
        self._loop = asyncio.get_running_loop()

    # --- used by the batch writer

    def take_batch(self) -> list[Entry]:
        """Remove and return the next batch. Resume reading from sessions that were paused because of overload."""
        batch = self.pending.take_batch()
        if self._overloading and self.pending.bytes < self._max_pending_bytes:
            overloading, self._overloading = self._overloading, []
            # Resuming may handle held frames at once and pause the session again, which appends to the new list.
            for session in overloading:
                session.resume_reading(PauseReason.OVERLOAD)
        return batch

    def drop_pending(self) -> None:
        """Drop all pending entries without answers. The caller has closed the sessions of these entries."""
        self.pending.clear()
        self._overloading.clear()

    # --- received frames

    def receive(self, session: Session, data: bytes) -> None:
        """Handle one text message, which is valid UTF-8."""
        if self.is_closed or session.said_bye:  # the session could not receive an answer
            return
        origin = session.origin
        if origin is None:
            self._receive_first(session, data)
            return
        if session.state is not LIVE:
            return
        send_rate = session.send_rate
        # Read the clock only when the credit is used up. Reading it for every frame would cost as much as decoding the
        # frame.
        if not send_rate.credit:
            send_rate.refill(self._clock())
        try:
            # Step 2. Beyond the rate, do not explain what is wrong with a frame: the explanation costs more than
            # decoding the frame.
            frame = read_frame(data, self._max_depth, is_brief=not send_rate.credit)
        except FrameError as error:
            self._refuse_frame(session, origin, error)
        else:
            # Test this before the match, whose class patterns are slow: nearly every frame is a SendFrame.
            if isinstance(frame, SendFrame):
                self._accept_send(session, origin, frame, len(data))
            else:
                self._accept(session, origin, frame, len(data))
        # Check the limit after the frame was accepted, because a refusal needs memory too. Exceeding the limit by one
        # frame does no harm.
        if self.pending.bytes >= 2 * self._max_pending_bytes:
            self._pause_overloading(session)

    def _receive_first(self, session: Session, data: bytes) -> None:
        """Handle a frame of a session that has not been welcomed (step 1). The first frame must be ``hello``. Later
        frames wait for the welcome. `apply` decides which participant the session belongs to."""
        # Reading is paused while the session joins, but frames from the same read still arrive. They must be handled
        # after the welcome, so store them.
        if session.state is SessionState.JOINING:
            session.early_frames.append(data)
        if session.state is not SessionState.OPENING:
            return
        try:
            hello = read_frame(data, self._max_depth)
        except FrameError as error:
            self._registry.refuse(session, 4400, error.error)
            return
        if isinstance(hello, HelloFrame):
            session.state = SessionState.JOINING
            self._accept_hello(session, hello)
        else:
            self._registry.refuse(session, 4400, InvalidFrame("The first frame must be hello."))

    def release(self, session: Session) -> None:
        """Handle the frames that a session sent before its welcome, and resume reading."""
        agent_id = session.live_origin().agent_id
        # All sessions of a participant share one rate. Otherwise each additional connection would raise its limit.
        send_rate = self._send_rates.get(agent_id)
        if send_rate is None:
            send_rate = self._send_rates[agent_id] = SendRate(self._limits.sends_per_s)
        session.send_rate = send_rate
        # A participant must not escape a pause by reconnecting.
        if send_rate.is_paused:
            session.pause_reading(PauseReason.RATE)
        # Handle these frames before reading more, so that all frames are handled in order.
        early_frames, session.early_frames = session.early_frames, []
        for data in early_frames:
            self.receive(session, data)
        session.resume_reading(PauseReason.JOINING)

    def refuse(self, session: Session, error: RoundelayError) -> None:
        """Answer a frame that the transport refused. The answer keeps its place in the order of the session's frames.
        Before the welcome, the refusal ends the session."""
        if self.is_closed:
            return
        if session.state is SessionState.LIVE:
            self._count_frame(session)
            # Do not write the answer at once: earlier frames still wait for their batch, and answers must keep the
            # order of the frames.
            self.pending.add(RefusedFrame(session.live_origin(), error, {}))
            if self.pending.bytes >= 2 * self._max_pending_bytes:
                self._pause_overloading(session)
        elif session.state is not SessionState.CLOSED:
            self._registry.refuse(session, 4400, error)

    def _accept(self, session: Session, origin: Origin, frame: ClientFrame, size: int) -> None:
        """Handle a frame of a session that has been welcomed. `receive` handles most ``send`` frames itself."""
        keys: dict[str, str] = {}
        try:
            match frame:
                case AckFrame():
                    self._accept_ack(session, origin, frame)
                case RecordFrame():
                    keys = {"record_id": frame.record_id}
                    self._accept_record(session, origin, frame, size)
                case BatchFrame():
                    keys = {"batch_id": frame.batch_id}
                    self._accept_batch(session, origin, frame, size)
                case CallFrame():
                    keys = {"call_id": frame.call_id}
                    self._accept_call(session, origin, frame, size)
                case NackFrame():
                    self._accept_nack(session, origin, frame)
                case SignalFrame():
                    self._accept_signal(session, origin, frame)
                case HelloFrame():
                    self._count_frame(session)
                    raise InvalidFrame("hello is sent once, as the first frame; this session has joined already.")
                case ByeFrame():
                    # Set this now, not at the commit. If the connection ends before the commit, the reactor must not
                    # count as lost.
                    session.said_bye = True
                    self.pending.add(Leave(origin))
                case SendFrame():
                    self._accept_send(session, origin, frame, size)
                case _:
                    assert_never(frame)
        except RoundelayError as error:
            self.pending.add(RefusedFrame(origin, error, keys))

    def _refuse_frame(self, session: Session, origin: Origin, error: FrameError) -> None:
        answer: RoundelayError = error.error
        if not session.send_rate.credit:
            answer = rate_limited_error(self._limits.sends_per_s, SENDS, session.send_rate.wait_ms)
        self._count_frame(session)
        self.pending.add(RefusedFrame(origin, answer, error.keys))

    # --- rate and load

    def _count_frame(self, session: Session) -> None:
        """Count a frame against its participant's rate. Stop reading from a participant that is far beyond its rate."""
        send_rate = session.send_rate
        if send_rate.credit:
            send_rate.credit -= 1
            return
        send_rate.excess += 1
        if send_rate.excess >= MAX_EXCESS_FRAMES and not send_rate.is_paused:
            self._pause_participant(session.live_origin().agent_id, send_rate)

    def _pause_participant(self, agent_id: str, send_rate: SendRate) -> None:
        send_rate.is_paused = True
        for session in self._registry.participants.sessions_of(agent_id):
            session.pause_reading(PauseReason.RATE)
        # The pause has a fixed length, so a client that ignores refusals causes at most `MAX_EXCESS_FRAMES` refusals
        # per pause.
        self._loop.call_later(PAUSE_S, self._resume_participant, agent_id, send_rate)

    def _resume_participant(self, agent_id: str, send_rate: SendRate) -> None:
        send_rate.is_paused = False
        send_rate.excess = 0
        for session in self._registry.participants.sessions_of(agent_id):
            session.resume_reading(PauseReason.RATE)

    def _check_load(self, origin: Origin) -> None:
        """Raise `Overloaded` if too many bytes are pending and this participant has more than its share of the pending
        bytes."""
        max_bytes = self._max_pending_bytes
        if self.pending.bytes >= max_bytes and self.pending.is_beyond_share(origin.agent_id, max_bytes):
            self._registry.counts["overloaded"] += 1
            raise Overloaded("The hub is too busy to store this frame; send the same frame again.", 200)

    def _pause_overloading(self, session: Session) -> None:
        """Stop reading from a session whose participant has more than its share of the pending bytes.

        This happens only at twice the limit. Refusals are pending entries too, so refusing frames alone would not limit
        the memory.
        """
        if PauseReason.OVERLOAD in session.pauses or session.origin is None:
            return
        if self.pending.is_beyond_share(session.origin.agent_id, self._max_pending_bytes):
            self._overloading.append(session)
            session.pause_reading(PauseReason.OVERLOAD)

    # --- each kind of frame

    def _accept_send(self, session: Session, origin: Origin, frame: SendFrame, size: int) -> None:
        send_rate = session.send_rate
        if send_rate.credit:  # true for almost every frame; `_count_frame` handles the rest
            send_rate.credit -= 1
        else:
            self._count_frame(session)
        try:
            kind, _ = parse_address(frame.to)
            # Step 3. Store the refusal in the entry instead of answering now. If the message repeats a stored message,
            # step 6 answers it as a repeat, even if a hook refuses it now.
            refusal = run_before_hooks(self._before_hooks, Incoming(origin, frame)) if self._before_hooks else None
            if self.pending.bytes >= self._max_pending_bytes:
                self._check_load(origin)
        except RoundelayError as error:
            self.pending.add(RefusedFrame(origin, error, {"message_id": frame.message_id}))
            return
        entry = Send(origin, (origin.agent_id, "m:" + frame.message_id), frame, refusal)
        # Compare two strings instead of looking up a set. Every message passes here, and the comparison is faster.
        if kind == "agent" or kind == "mod":
            self.pending.add(entry, size)  # step 4
        else:
            self.pending.add(entry, size, DELIVERY_COST * self._registry.joined)

    def _accept_record(self, session: Session, origin: Origin, frame: RecordFrame, size: int) -> None:
        self._count_frame(session)
        self._check_load(origin)
        self.pending.add(self._read_record(origin, frame), size)

    def _read_record(
        self, origin: Origin, frame: RecordFrame, started: Mapping[str, int] = MappingProxyType({})
    ) -> Record:
        """Return the entry of a ``record`` frame. ``started`` holds the triggers of the reactions that the same batch
        starts, by reaction id."""
        body = bytes(frame.body)
        if len(body) > self._limits.max_record_bytes:
            raise TooLarge(
                f"body has {len(body)} bytes, more than max_record_bytes ({self._limits.max_record_bytes}); store "
                "less data."
            )
        # The digest covers the reaction and the kind too. A frame that uses a record id again for another record must
        # be refused, not answered as a repeat.
        digest = body_digest(frame.reaction.encode(), frame.kind.encode(), body)
        entry = Record(origin, frame, digest)
        if frame.kind == "started":
            try:
                trigger, oldest = _parse_started(frame)
                entry = Record(origin, frame, digest, trigger, oldest)
            except RoundelayError as error:
                # Store the refusal in the entry, as `_accept_send` does. If the record repeats a stored record, step 6
                # answers it as a repeat.
                entry = Record(origin, frame, digest, refusal=error)
        elif frame.kind in CALL_KINDS:
            wait = parse_wait(body) if frame.kind == "waiting" else None
            entry = Record(origin, frame, digest, call=parse_call_place(body), wait=wait)
        elif frame.kind == "model_failed":
            entry = Record(origin, frame, digest, self._find_trigger(origin, frame, started))
        elif frame.kind in USAGE_KINDS:
            of = self._find_trigger(origin, frame, started)
            if of is None:  # if `started` is not stored yet, `finished` will report the tokens
                entry = Record(origin, frame, digest, may_withdraw=frame.kind == "finished")
            # With ``ended`` hooks, the end of a reaction needs the trigger too: the hooks may send messages that name
            # the trigger as their cause.
            elif (usage := parse_usage(frame.kind, body)) is not None or self._rules.ended_hooks:
                entry = Record(origin, frame, digest, of, usage=usage)
        return entry

    def _find_trigger(self, origin: Origin, frame: RecordFrame, started: Mapping[str, int]) -> int | None:
        """Return the trigger of the open reaction to which a record belongs. Return None if the reaction is not
        open."""
        opened: OpenReaction | None = self._registry.state.get("reaction", f"{origin.agent_id}/{frame.reaction}")
        return started.get(frame.reaction) if opened is None else opened.trigger

    def _accept_batch(self, session: Session, origin: Origin, batch: BatchFrame, size: int) -> None:
        for _ in batch.frames:  # a frame in a batch costs the hub as much as a single frame
            self._count_frame(session)
        if len(batch.frames) > self._limits.max_batch:
            raise TooLarge(
                f"The batch has {len(batch.frames)} frames, more than max_batch ({self._limits.max_batch}). Split it."
            )
        self._check_load(origin)
        entries: list[Send | Record | RefusedFrame] = []
        started: dict[str, int] = {}
        extra_cost = 0
        for frame in batch.frames:
            try:
                if isinstance(frame, SendFrame):
                    kind, _ = parse_address(frame.to)
                    refusal = run_before_hooks(self._before_hooks, Incoming(origin, frame))
                    entries.append(Send(origin, (origin.agent_id, "m:" + frame.message_id), frame, refusal))
                    extra_cost += 0 if kind in ("agent", "mod") else DELIVERY_COST * self._registry.joined
                else:
                    record = self._read_record(origin, frame, started)
                    entries.append(record)
                    if frame.kind == "started" and record.trigger is not None:
                        started[frame.reaction] = record.trigger
            # The entries before the refused frame are stored. The refusal ends the batch.
            except RoundelayError as error:
                keys = (
                    {"message_id": frame.message_id} if isinstance(frame, SendFrame) else {"record_id": frame.record_id}
                )
                entries.append(RefusedFrame(origin, error, keys))
                break
        self.pending.add(Group(origin, batch.batch_id, tuple(entries)), size, extra_cost + ENTRY_BYTES * len(entries))

    def _accept_call(self, session: Session, origin: Origin, frame: CallFrame, size: int) -> None:
        try:
            operation = self._rules.operations.get(frame.op)
            if operation is None:
                raise UnknownOperation(f"There is no operation {frame.op[:80]!r}; welcome lists the mods' operations.")
            args = operation.decode(frame.args)
            if not operation.is_change:  # a change may be a repeat, so `core.calls` checks the right later
                check_right(self._registry.state, origin, "call", operation.op)
        except RoundelayError:
            self._count_frame(session)
            raise
        # Reads do not count against the rate: the read budget and ``max_reads`` limit them.
        if operation.is_change:
            self._count_frame(session)
        self._check_load(origin)
        entry: Operate | None = None
        if operation.is_change:
            digest = body_digest(frame.op.encode(), bytes(frame.args))
            entry = Operate(origin, frame.call_id, frame.op, args, digest, needs=operation.list_needs(args))
            # A read-only hub will refuse the entry, so do not run the operation's IO.
            if operation.prepare is None or self._rules.is_read_only:
                self.pending.add(entry, size, OPERATION_COST)
                return
        reads, max_bytes = self._registry.open_reads(session), self._limits.session_queue_bytes
        if reads.in_progress >= self._limits.max_reads:
            raise Overloaded(
                f"This session has {self._limits.max_reads} calls in progress, the maximum (max_reads); send the "
                "same call again later.",
                100,
            )
        # Always accept the first read, however large its frame is. Otherwise a large frame could never succeed.
        if reads.request_bytes and reads.request_bytes + size > max_bytes:
            raise Overloaded(
                f"The results of this session's calls in progress have reached session_queue_bytes ({max_bytes}); "
                "send the same call again later.",
                100,
            )
        if entry is None:
            self._reads.start(session, operation, frame.call_id, args, size)
        else:
            self._reads.start_prepare(session, operation, args, size, partial(self._add_prepared, entry, size))

    def _add_prepared(self, entry: Operate, size: int, prepared: object, refusal: RoundelayError | None) -> None:
        """Queue a changing operation after its IO has ended."""
        if not self.is_closed:
            entry = msgspec.structs.replace(entry, prepared=prepared, refusal=refusal)
            self.pending.add(entry, size, OPERATION_COST)

    def _accept_hello(self, session: Session, hello: HelloFrame) -> None:
        peer = session.connection.peer
        # Count the session now, not at the welcome. Otherwise all hellos of one batch could pass the connection limit
        # together.
        self._registry.joining += 1
        if self._registry.admitted > self._limits.max_connections and not peer.is_trusted:
            self._registry.end(session, 4503, "max_connections is reached; try again later.")
            return
        max_bytes = self._limits.max_card_bytes
        if hello.card is not UNSET and len(bytes(hello.card)) > max_bytes:
            error = InvalidFrame(
                f"card has more than max_card_bytes ({max_bytes}); describe the participant in fewer words."
            )
            self._registry.refuse(session, 4400, error)
            return
        # Read no more frames until the welcome. Otherwise `early_frames` could grow without limit.
        session.pause_reading(PauseReason.JOINING)
        token_hash = hash_token(hello.token) if hello.token is not UNSET else None
        new_hash = hash_token(hello.new_token) if hello.new_token is not UNSET else None
        is_owner = token_hash is not None and token_hash == self._owner_hash
        if is_owner or peer.is_trusted or self._has_valid_token(hello.agent_id, token_hash, new_hash):
            # The peer is authenticated, so no new connection may evict this one while its hello waits for the batch.
            session.connection.admit()
        # `apply` has no access to sessions, so add the facts about sessions that `apply` needs to the entry.
        has_reactor = self._registry.has_reactor(hello.agent_id)
        self.pending.add(Join(session.session_id, hello, token_hash, peer, is_owner, has_reactor, new_hash))

    def _has_valid_token(self, agent_id: str, *hashes: str | None) -> bool:
        """Return whether one of the hashes belongs to a valid token or login code of a participant.
        `core.joining.identify` makes all other decisions about the identity."""
        state = self._registry.state
        tokens, logins = state.tokens(agent_id), state.logins(agent_id)
        return any(
            token_hash in logins or (token_hash in tokens and not tokens[token_hash].revoked)
            for token_hash in hashes
            if token_hash is not None
        )

    def _accept_ack(self, session: Session, origin: Origin, frame: AckFrame) -> None:
        outbox = session.outbox
        mailbox = self._registry.participants.find_mailbox(origin.agent_id)
        if frame.seq > outbox.delivered or mailbox is None:
            self._count_frame(session)
            raise InvalidArguments(
                f"ack {frame.seq} is above {outbox.delivered}, the highest seq that was delivered on this session."
            )
        if mailbox.is_handled(frame.seq) and not outbox.is_unacked(frame.seq):
            # Count only an ack that acknowledges nothing new. Otherwise a fast reader would use up its rate.
            self._count_frame(session)
        # An acknowledgement changes only memory, and `Maintenance` stores the change later. If the hub crashes in
        # between, some deliveries are repeated, but none is lost.
        if frame.only:
            outbox.release(frame.seq)
            mailbox.mark_handled(frame.seq)
        else:
            # Call this first, because `release_up_to` forgets which messages were redelivered.
            mailbox.mark_handled_up_to(frame.seq, outbox)
            outbox.release_up_to(frame.seq)
        # A session that chose its own cursor may have skipped unhandled messages, so its acknowledgements cannot
        # advance the ack cursor.
        if session.starts_at_ack_cursor:
            mailbox.compact(outbox)
        if outbox.has_work() or outbox.is_behind:
            self._registry.schedule_flush(session)

    def _accept_nack(self, session: Session, origin: Origin, frame: NackFrame) -> None:
        outbox = session.outbox
        self._count_frame(session)
        mailbox = self._registry.participants.find_mailbox(origin.agent_id)
        if not outbox.is_unacked(frame.seq) or mailbox is None:
            raise InvalidArguments(
                f"nack {frame.seq} names no open delivery of this session. Only a message that was delivered and not "
                "acknowledged can be refused."
            )
        # Each failed message needs a timer and a stored attempt. Without this limit, a client could nack every message
        # and exhaust memory.
        if len(mailbox.failed) >= self._limits.max_put_off and frame.seq not in mailbox.failed:
            raise RateLimited(
                f"{len(mailbox.failed)} failed messages of {origin.agent_id} are not handled yet, the maximum "
                f"(max_put_off); {frame.seq} stays open in this session. Acknowledge it, or refuse it again later."
            )
        # Free the window now, not at the commit. Otherwise a window full of nacked messages would stop deliveries until
        # then.
        outbox.release(frame.seq)
        self._registry.schedule_flush(session)
        if mailbox.is_handled(frame.seq):  # another session has acknowledged the message
            return
        # Schedule the retry before the commit. An ack of a later message may arrive before the commit, and must not
        # cover this message.
        mailbox.schedule_retry(frame.seq)
        retry_after_ms = min(frame.retry_after_ms, MAX_RETRY_AFTER_MS) if frame.retry_after_ms is not UNSET else None
        self.pending.add(Nack(origin, frame.seq, frame.reason[: self._limits.max_reason_chars], retry_after_ms))

    def _accept_signal(self, session: Session, origin: Origin, frame: SignalFrame) -> None:
        is_beyond_rate = not session.send_rate.credit
        self._count_frame(session)
        self._signals.accept(session, origin, frame, is_beyond_rate=is_beyond_rate)


def _parse_started(frame: RecordFrame) -> tuple[int, int]:
    """Return the trigger of a ``started`` record, and the lowest seq in its trigger and its manifest.

    Raises `InvalidArguments` if the trigger is missing, and `UnknownMessage` if the trigger cannot be a seq.
    """
    try:
        raw = msgspec.json.decode(frame.body, type=dict[str, Raw]).get("trigger", Raw(b"missing"))
        body = msgspec.json.decode(frame.body)
    except msgspec.DecodeError:
        raw, body = Raw(b"missing"), {}
    trigger, text = body.get("trigger"), bytes(raw)[:40].decode(errors="replace")
    if type(trigger) is not int:
        raise InvalidArguments(
            f"body.trigger of a started record must be the seq of the message that the reaction is for, not {text}."
        )
    if not 0 < trigger < SEQ_LIMIT:  # SQLite cannot store a larger number
        raise UnknownMessage(
            f"There is no message {text}; body.trigger of a started record must be the seq of a message."
        )
    manifest = body.get("manifest")
    # Ignore wrong items of a manifest. The manifest only decides which messages retention keeps for the reaction.
    seqs = [seq for seq in manifest if type(seq) is int and 0 < seq < SEQ_LIMIT] if isinstance(manifest, list) else []
    return trigger, min([trigger, *seqs])
