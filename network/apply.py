"""Step 6: what one entry comes to.

`apply` is pure: from the state (the batch's draft), the ledger's facts and one entry it makes rows, puts and effects. It
decides in this order: a repeat, rights, rates, recipients, budgets. No IO, no clock: time is the stamp of the batch.
"""

from __future__ import annotations

import hashlib
from typing import Any, assert_never

import msgspec
from msgspec import UNSET, Raw, Struct

from .auth import Refusal, identify, presents_fence
from .change import ChangeSet, RootStopped, Rules, find_budget, write_message
from .entries import (
    NOTHING,
    Answer,
    AskToStop,
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
    Origin,
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
from .errors import Forbidden, IdConflict, RoundelayError, UnknownMessage
from .frames import ResultFrame, SendFrame, StoredFrame, WireMessage, encode
from .ledger import Row, Wanted
from .mod import named_seqs
from .state import (
    Attempt,
    CallResult,
    DeadLetter,
    Facts,
    Known,
    OpenReaction,
    Participant,
    Put,
    State,
    Token,
    Triggered,
)
from .visibility import may_read, thread_readers

CALL_KEPT_MS = 24 * 3600 * 1000
"""How long the result of a call that changed something is repeated for its ``call_id`` (docs/protocol.md)."""
MAX_FAILURES = 5
"""At this many failures a message becomes a dead letter (docs/protocol.md)."""
FIRST_RETRY_MS = 1000


def wanted(entries: list[Entry]) -> Wanted:
    """Step 5's question: what `apply` will need to know from the ledger."""
    want = Wanted(set(), set(), set())
    for entry in entries:
        match entry:
            case Send():
                frame = entry.frame
                want.keys.add(entry.key)
                if frame.reply_to is not UNSET:
                    want.seqs.add(frame.reply_to)
                if frame.cause is not UNSET:
                    want.seqs.add(frame.cause)
            case Record():
                want.keys.add((entry.origin.agent_id, "r:" + entry.frame.record_id))
                if entry.trigger is not None:
                    want.seqs.add(entry.trigger)
            case Operate():
                want.cold.add(("call", f"{entry.origin.agent_id}/{entry.call_id}"))
                want.keys.update(_call_keys(entry))
                if entry.op in ("network.retry_dead_letter", "network.drop_dead_letter"):
                    owner = entry.args.agent_id or entry.origin.agent_id
                    want.cold.add(("dead", f"{owner}/{entry.args.seq:016d}"))
                want.seqs.update(named_seqs(entry.args))
            case ModEntry():
                want.seqs.add(entry.cause)
            case _:
                pass
    return want


def apply(rules: Rules, state: State, facts: Facts, entry: Entry) -> Outcome:
    """Turn the next entry into rows, deltas and effects. Changes none of its arguments."""
    match entry:
        case Send():
            return _apply_send(rules, state, facts, entry)
        case Record():
            return _apply_record(rules, state, facts, entry)
        case Operate():
            return _apply_operate(rules, state, facts, entry)
        case Join():
            return _apply_join(rules, state, facts, entry)
        case Nack():
            return _apply_nack(rules, state, entry)
        case Lost():
            return _apply_lost(rules, state, entry)
        case Leave():
            return Outcome(effects=(Refuse(entry.session_id, 1000, None),))
        case Handled():
            return Outcome(puts=tuple(_keep_handled(state, put) for put in entry.puts))
        case ModEntry():
            return _apply_mod_entry(rules, state, facts, entry)
        case Refused():
            return Outcome(effects=(Answer(entry.session_id, error_bytes(entry.error, entry.keys)),))
        case _:
            assert_never(entry)


def is_same_send(known: Known, frame: SendFrame) -> bool:
    """Whether a stored message is this one: every field but ``message_id`` and ``metadata``, ``content`` byte by byte as sent."""
    stored = _stored_message.decode(known.data)
    return (
        stored.content == frame.content
        and stored.to == frame.to
        and (stored.text_representation, stored.reply_to, stored.cause, stored.requires_response)
        == (frame.text_representation, frame.reply_to, frame.cause, frame.requires_response)
        and known.digest == excluded_digest(frame)
    )


_stored_message = msgspec.json.Decoder(WireMessage)


def excluded_digest(frame: SendFrame) -> str:
    """What the stored message does not say of its ``send``: whom it left out itself."""
    return "" if frame.exclude_agent_ids is UNSET else body_digest(encode(frame.exclude_agent_ids))


def body_digest(*parts: bytes) -> str:
    """What makes two records, or two calls, the same."""
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()


def _check_rights(state: State, origin: Origin) -> None:
    """The sender is still here, and, for a reactor, no newer one has taken over. Raises `Forbidden`."""
    participant = state.present(origin.agent_id)
    if participant is None:
        raise Forbidden(f"{origin.agent_id} was removed from this network.")
    if origin.fence is not None and participant.fence != origin.fence:
        raise Forbidden(
            f"A newer reactor of {origin.agent_id} holds fence {participant.fence}; this session's is {origin.fence}."
        )


# --- messages ----------------------------------------------------------------------------------------------------------------


def _apply_send(rules: Rules, state: State, facts: Facts, entry: Send) -> Outcome:
    origin, frame = entry.origin, entry.frame
    known = facts.known.get(entry.key)
    if known is not None:
        if not is_same_send(known, frame):
            conflict = IdConflict(
                f"message_id {frame.message_id!r} was used for another message (seq {known.seq}); choose a new one."
            )
            return _refusal(origin.session_id, conflict, {"message_id": frame.message_id})
        return Outcome(effects=(_stored(origin, frame.message_id, known.seq, known.thread_id, duplicate=True),))
    try:
        if entry.refusal is not None:
            raise entry.refusal
        _check_rights(state, origin)
        row, puts = write_message(rules, state, facts, origin, frame, excluded_digest(frame), entry.key[1])
    except RootStopped as error:
        return _stop_loop(state, facts, origin, error, {"message_id": frame.message_id})
    except RoundelayError as error:
        return _refusal(origin.session_id, error, {"message_id": frame.message_id})
    answer = _stored(origin, frame.message_id, row.seq, row.stream, duplicate=False)
    if rules.apply_hooks:
        return _run_hooks(rules, state, facts, origin, row, puts, answer)
    return Outcome((row,), puts, (answer,))


def _stored(origin: Origin, message_id: str, seq: int, thread_id: str, *, duplicate: bool) -> Answer:
    return Answer(
        origin.session_id, encode(StoredFrame(message_id=message_id, seq=seq, thread_id=thread_id, duplicate=duplicate))
    )


def _refusal(session_id: str, error: RoundelayError, keys: dict[str, str]) -> Outcome:
    return Outcome(effects=(Answer(session_id, error_bytes(error, keys)),))


def _stop_loop(state: State, facts: Facts, origin: Origin, error: RootStopped, keys: dict[str, str]) -> Outcome:
    """The sender gets the error; the first time in a thread, its readers get one notice."""
    refusal = Answer(origin.session_id, error_bytes(error, keys))
    head = error.head
    budget = find_budget(state, facts, head.root)  # as it was: what this change counted is thrown away with it
    if head.thread_id in budget.stopped_in or head.root > state.head:  # a root of its own, thrown away too
        return Outcome(effects=(refusal,))
    body = {"root": head.root, "seq": budget.last_seq, "reason": str(error)}
    notice = Notify(frozenset(thread_readers(state, head)), "loop_stopped", head.thread_id, body)
    stopped = Put(
        "root", str(head.root), msgspec.structs.replace(budget, stopped_in=(*budget.stopped_in, head.thread_id))
    )
    return Outcome(puts=(stopped,), effects=(refusal, notice))


def _run_hooks(
    rules: Rules, state: State, facts: Facts, origin: Origin, row: Row, puts: list[Put], answer: Effect
) -> Outcome:
    change = ChangeSet(rules, state, facts, origin)
    change.take(row, puts)
    try:
        change.run_apply_hooks([row])
    except RootStopped as error:
        return _stop_loop(state, facts, origin, error, {"message_id": row.key[2:]})
    except RoundelayError as error:
        return _refusal(origin.session_id, error, {"message_id": row.key[2:]})
    return change.outcome(answer)


# --- records -----------------------------------------------------------------------------------------------------------------


def _apply_record(rules: Rules, state: State, facts: Facts, entry: Record) -> Outcome:
    origin, frame = entry.origin, entry.frame
    keys = {"record_id": frame.record_id}
    known = facts.known.get((origin.agent_id, "r:" + frame.record_id))
    if known is not None:
        if known.digest != entry.digest:
            conflict = IdConflict(
                f"record_id {frame.record_id!r} was used for another record (seq {known.seq}); choose a new one."
            )
            return _refusal(origin.session_id, conflict, keys)
        stored = StoredFrame(record_id=frame.record_id, seq=known.seq, duplicate=True)
        return Outcome(effects=(Answer(origin.session_id, encode(stored)),))
    change = ChangeSet(rules, state, facts, origin)
    try:
        _check_rights(state, origin)
        change.count_send()
        row = change.write_row(
            "record",
            key="r:" + frame.record_id,
            stream=frame.reaction,
            label=frame.kind,
            digest=entry.digest,
            data=bytes(frame.body),
        )
        if frame.kind == "started" and entry.trigger is not None:
            _begin_reaction(change, facts, origin, entry, row)
        elif frame.kind == "finished":
            _end_reaction(change, state, frame.reaction, origin.agent_id)
    except RoundelayError as error:
        return _refusal(origin.session_id, error, keys)
    stored = StoredFrame(record_id=frame.record_id, seq=row.seq, duplicate=False)
    return change.outcome(Answer(origin.session_id, encode(stored)))


def _begin_reaction(change: ChangeSet, facts: Facts, origin: Origin, entry: Record, row: Row) -> None:
    trigger, reaction = entry.trigger, entry.frame.reaction
    assert trigger is not None
    head = facts.heads.get(trigger)
    if head is None or not may_read(change.state, origin.agent_id, head):
        raise UnknownMessage(
            f"There is no message {trigger} that {origin.agent_id} may read; trigger is the seq of one."
        )
    change.put_row(
        "reaction",
        f"{origin.agent_id}/{reaction}",
        OpenReaction(reaction, origin.agent_id, trigger, row.seq, head, entry.oldest or trigger),
    )
    change.put_row("triggered", f"{origin.agent_id}/{trigger}", Triggered(reaction, row.seq))
    change.effects.append(Settle(origin.agent_id, trigger))


def _end_reaction(change: ChangeSet, state: State, reaction: str, agent_id: str) -> None:
    found: OpenReaction | None = state.get("reaction", f"{agent_id}/{reaction}")
    if found is not None:
        change.put_row("reaction", f"{agent_id}/{reaction}", None)
        change.put_row("attempt", f"{agent_id}/{found.trigger}", None)


# --- operations --------------------------------------------------------------------------------------------------------------


def _apply_operate(rules: Rules, state: State, facts: Facts, entry: Operate) -> Outcome:
    origin = entry.origin
    keys = {"call_id": entry.call_id}
    key = f"{origin.agent_id}/{entry.call_id}"
    known: CallResult | None = state.get("call", key) or facts.cold.get(("call", key))
    if known is not None and state.stamp - known.at < CALL_KEPT_MS:
        if known.digest != entry.digest:
            return _refusal(origin.session_id, _call_conflict(entry), keys)
        return Outcome(effects=(_result(entry, known.value),))
    signed = next((facts.known[it] for it in _call_keys(entry) if it in facts.known), None)
    if signed is not None:  # its result is forgotten, what it stored is not
        if signed.digest != entry.digest:
            return _refusal(origin.session_id, _call_conflict(entry), keys)
        value = {"seq": signed.seq, "duplicate": True, **({"thread_id": signed.thread_id} if signed.thread_id else {})}
        return Outcome(effects=(_result(entry, Raw(encode(value))),))
    operation = rules.operations[entry.op]
    change = ChangeSet(rules, state, facts, origin, mod_id=entry.op.partition(".")[0], call_id=entry.call_id)
    try:
        _check_rights(state, origin)
        change.count_send()
        result = Raw(encode(operation.function(change, **_arguments(entry.args))))
        change.run_apply_hooks(change.messages())
    except RootStopped as error:
        return _stop_loop(state, facts, origin, error, keys)
    except RoundelayError as error:
        return _refusal(origin.session_id, error, keys)
    change.sign(_call_keys(entry), entry.digest)
    change.put_row("call", key, CallResult(entry.digest, state.stamp, result))
    return change.outcome(_result(entry, result))


def _call_keys(entry: Operate) -> list[tuple[str, str]]:
    """Under what a call's first row is known when its result is forgotten: a row of the caller's, or of the mod that answered.

    No client's key is like these: theirs begin with ``m:`` and ``r:``.
    """
    agent_id = entry.origin.agent_id
    return [
        (agent_id, f"c:{entry.call_id}"),
        (f"mod:{entry.op.partition('.')[0]}", f"c:{agent_id}/{entry.call_id}"),
    ]


def _call_conflict(entry: Operate) -> IdConflict:
    return IdConflict(f"call_id {entry.call_id!r} was used for another call; choose a new one.")


def _result(entry: Operate, value: Raw) -> Answer:
    return Answer(entry.origin.session_id, encode(ResultFrame(call_id=entry.call_id, value=value)))


def _arguments(args: Struct) -> dict[str, Any]:
    return {name: getattr(args, name) for name in args.__struct_fields__}


def _apply_mod_entry(rules: Rules, state: State, facts: Facts, entry: ModEntry) -> Outcome:
    mod = rules.mods.get(entry.mod)
    if mod is None:
        return NOTHING
    origin = Origin("", entry.mod, "service")
    change = ChangeSet(rules, state, facts, origin, mod_id=entry.mod)
    try:
        mod.apply_entry(change, entry.payload)
    except RootStopped as error:
        return _stop_loop(state, facts, origin, error, {})
    return change.outcome()


# --- sessions ----------------------------------------------------------------------------------------------------------------


def _apply_join(rules: Rules, state: State, facts: Facts, entry: Join) -> Outcome:
    hello = entry.hello
    try:
        identity = identify(state, entry)
    except Refusal as refusal:
        return Outcome(effects=(Refuse(entry.session_id, refusal.code, refusal.error),))
    participant = state.participant(hello.agent_id)
    newest = participant.fence if participant is not None else 0
    fence = presents_fence(entry) if hello.role == "reactor" else None
    if fence is not None and fence < newest and not _lost_its_welcome(participant, fence, entry):
        return Outcome(effects=(Refuse(entry.session_id, 4409, None),))
    if fence is not None and fence > newest:
        error = Forbidden(f"The fence {fence} was never given out; the newest is {newest}. Join without one.")
        return Outcome(effects=(Refuse(entry.session_id, 4403, error),))
    new_fence = newest + 1 if hello.role == "reactor" else None
    origin = Origin(entry.session_id, hello.agent_id, hello.kind, identity.is_operator, new_fence)
    change = ChangeSet(rules, state, facts, origin)
    card = Raw(bytes(hello.card)) if hello.card is not UNSET else UNSET
    is_new = participant is None
    if participant is None:
        row = change.write_row("registered", data=encode({"agent_id": hello.agent_id, "kind": hello.kind}))
        participant = Participant(hello.agent_id, hello.kind, row.seq)
    kept_card = card if card is not UNSET else participant.card
    updated = msgspec.structs.replace(
        participant,
        card=kept_card,
        fence=participant.fence if new_fence is None else new_fence,
        fence_shown=participant.fence_shown if new_fence is None else fence,
    )
    if is_new or updated != participant:
        change.put_row("participant", hello.agent_id, updated)
    if identity.binds and entry.token_hash is not None:
        change.put_row("token", entry.token_hash, Token(hello.agent_id, hello.kind, state.stamp))
    cancelled = tuple(
        AskToStop(hello.agent_id, reaction.reaction, reaction.trigger_head.thread_id, hello.agent_id)
        for _, reaction in state.items("reaction")
        if reaction.agent_id == hello.agent_id and reaction.is_cancelled
    )
    return change.outcome(Welcome(origin, hello, updated, is_new, cancelled if new_fence is not None else ()))


def _lost_its_welcome(participant: Participant | None, fence: int, entry: Join) -> bool:
    """Whether the newest fence was given for this one, and nobody holds it: it came to no one, or its session is over."""
    return participant is not None and fence == participant.fence_shown and not entry.is_held


def _apply_nack(rules: Rules, state: State, entry: Nack) -> Outcome:
    agent_id = entry.origin.agent_id
    change = ChangeSet(rules, state, Facts(), entry.origin)
    failures = _count_failure(change, agent_id, entry.seq, entry.reason, entry.retry_after_ms)
    if failures < MAX_FAILURES:
        attempt: Attempt = change.state.get("attempt", f"{agent_id}/{entry.seq}")
        change.effects.append(Retry(agent_id, entry.seq, failures + 1, attempt.due_at))
    return change.outcome()


def _keep_handled(state: State, put: Put) -> Put:
    """A floor with what was handled since it was taken: by a dead letter, whose commit it would undo."""
    if put.table != "floor":
        return put
    floor, taken = state.floor(put.key), put.value
    since = {seq for seq in floor.above if seq > taken.seq}.union(seq for seq in taken.open if floor.is_handled(seq))
    return Put("floor", put.key, taken.with_handled(since)) if since else put


def _apply_lost(rules: Rules, state: State, entry: Lost) -> Outcome:
    agent_id = entry.origin.agent_id
    participant = state.participant(agent_id)
    if participant is None or participant.fence != entry.origin.fence:
        return NOTHING
    change = ChangeSet(rules, state, Facts(), entry.origin)
    for key, reaction in list(state.items("reaction")):
        if reaction.agent_id != agent_id:
            continue
        reason = f"The agent's process was lost during the reaction {reaction.reaction}."
        if _count_failure(change, agent_id, reaction.trigger, reason, None) >= MAX_FAILURES:
            change.put_row("reaction", key, None)
    return change.outcome()


def _count_failure(change: ChangeSet, agent_id: str, seq: int, reason: str, retry_after_ms: int | None) -> int:
    """Count one failed attempt; at the fifth the message is handled as a dead letter. Gives the failures so far."""
    key = f"{agent_id}/{seq}"
    before: Attempt | None = change.state.get("attempt", key)
    failures = (before.failures if before is not None else 0) + 1
    stamp = change.stamp
    if failures < MAX_FAILURES:
        delay_ms = retry_after_ms if retry_after_ms is not None else FIRST_RETRY_MS * 2 ** (failures - 1)
        change.put_row(
            "attempt", key, Attempt(failures, stamp + delay_ms, reason, before is not None and before.is_revived)
        )
        return failures
    letter = DeadLetter(agent_id, seq, reason, failures, stamp)
    floor = change.state.floor(agent_id)
    if not floor.is_handled(seq):  # in this same commit: after a crash a dead letter is not delivered again
        change.put_row("floor", agent_id, floor.with_handled([seq]))
    change.put_row("attempt", key, None)
    change.put_row("dead", f"{agent_id}/{seq:016d}", letter)
    body = {"seq": seq, "agent_id": agent_id, "reason": reason, "attempts": failures}
    change.write_row("dead", data=encode(body))
    change.effects.append(Settle(agent_id, seq))
    change.effects.append(Notify(frozenset((agent_id,)), "dead_letter", None, body, operators=True))
    return failures
