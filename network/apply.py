"""Step 6: what one entry comes to.

`apply` is pure: from the state (the batch's draft), the ledger's facts and one entry it makes rows, puts and effects. It
decides in this order: a repeat, rights, rates, recipients, budgets. No IO, no clock: time is the stamp of the batch.
Messages are here; other kinds of entry have a module each: `records`, `calls`, `joins`, `attempts`.
"""

from __future__ import annotations

from typing import assert_never

import msgspec
from msgspec import UNSET

from .attempts import apply_lost, apply_nack, keep_handled
from .calls import apply_mod_entry, apply_operate, call_keys
from .change import ChangeSet, RootStopped, Rules, write_message
from .entries import (
    Answer,
    Effect,
    Entry,
    Handled,
    Join,
    Leave,
    Lost,
    ModEntry,
    Nack,
    Operate,
    Origin,
    Outcome,
    Record,
    Refuse,
    Refused,
    Send,
    body_digest,
)
from .errors import IdConflict, RoundelayError
from .frames import SendFrame, StoredFrame, WireMessage, encode
from .joins import apply_join
from .ledger import Row, Wanted
from .mod import named_seqs
from .records import apply_record
from .refusals import answer_error, check_rights, damaged_repeat, stop_loop
from .state import State
from .tables import Facts, Known, Put


def wanted(entries: list[Entry]) -> Wanted:
    """Step 5's question: what `apply` will need to know from the ledger."""
    want = Wanted(set(), set(), set())
    for entry in entries:
        if isinstance(entry, Send):  # before the match, whose class patterns cost: nearly every entry is one
            frame = entry.frame
            want.keys.add(entry.key)
            if frame.reply_to is not UNSET:
                want.seqs.add(frame.reply_to)
            if frame.cause is not UNSET:
                want.seqs.add(frame.cause)
            continue
        match entry:
            case Record():
                want.keys.add((entry.origin.agent_id, "r:" + entry.frame.record_id))
                if entry.trigger is not None:
                    want.seqs.add(entry.trigger)
                if entry.frame.kind == "started":
                    want.cold.add(("triggered", f"{entry.origin.agent_id}/{entry.trigger}"))
            case Operate():
                want.cold.add(("call", f"{entry.origin.agent_id}/{entry.call_id}"))
                want.keys.update(call_keys(entry))
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
    if isinstance(entry, Send):
        return _apply_send(rules, state, facts, entry)
    match entry:
        case Record():
            return apply_record(rules, state, facts, entry)
        case Operate():
            return apply_operate(rules, state, facts, entry)
        case Join():
            return apply_join(rules, state, facts, entry)
        case Nack():
            return apply_nack(rules, state, entry)
        case Lost():
            return apply_lost(rules, state, entry)
        case Leave():
            return Outcome(effects=(Refuse(entry.origin.session_id, 1000, None),))
        case Handled():
            return Outcome(puts=tuple(keep_handled(state, put) for put in entry.puts))
        case ModEntry():
            return apply_mod_entry(rules, state, facts, entry)
        case Refused():
            return answer_error(rules, state, entry.origin, entry.error, entry.keys)
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


def _apply_send(rules: Rules, state: State, facts: Facts, entry: Send) -> Outcome:
    origin, frame = entry.origin, entry.frame
    known = facts.known.get(entry.key)
    if known is not None:
        if known.is_damaged:
            error = damaged_repeat(f"message_id {frame.message_id!r}", known.seq)
            return answer_error(rules, state, origin, error, {"message_id": frame.message_id})
        if not is_same_send(known, frame):
            conflict = IdConflict(
                f"message_id {frame.message_id!r} was used for another message (seq {known.seq}); choose a new one."
            )
            return answer_error(rules, state, origin, conflict, {"message_id": frame.message_id})
        return Outcome(effects=(_stored(origin, frame.message_id, known.seq, known.stream, duplicate=True),))
    try:
        if entry.refusal is not None:
            raise entry.refusal
        check_rights(state, origin)
        digest = "" if frame.exclude_agent_ids is UNSET else excluded_digest(frame)
        row, puts = write_message(rules, state, facts, origin, frame, digest, entry.key[1])
    except RootStopped as error:
        return stop_loop(rules, state, facts, origin, error, {"message_id": frame.message_id})
    except RoundelayError as error:
        return answer_error(rules, state, origin, error, {"message_id": frame.message_id})
    answer = _stored(origin, frame.message_id, row.seq, row.stream, duplicate=False)
    if rules.apply_hooks:
        return _run_hooks(rules, state, facts, origin, row, puts, answer)
    return Outcome((row,), puts, (answer,))


def _stored(origin: Origin, message_id: str, seq: int, thread_id: str, *, duplicate: bool) -> Answer:
    return Answer(
        origin.session_id, encode(StoredFrame(message_id=message_id, seq=seq, thread_id=thread_id, duplicate=duplicate))
    )


def _run_hooks(
    rules: Rules, state: State, facts: Facts, origin: Origin, row: Row, puts: list[Put], answer: Effect
) -> Outcome:
    change = ChangeSet(rules, state, facts, origin)
    change.take(row, puts)
    try:
        change.run_apply_hooks([row])
        change.count_stored()
    except RootStopped as error:
        return stop_loop(rules, state, facts, origin, error, {"message_id": row.key[2:]})
    except RoundelayError as error:
        return answer_error(rules, state, origin, error, {"message_id": row.key[2:]})
    return change.outcome(answer)
