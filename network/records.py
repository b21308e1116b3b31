"""Step 6 for turn records: they are kept under their ``record_id``; ``started`` opens a reaction, ``finished`` ends it. Pure."""

from __future__ import annotations

from .attempts import forget_failures
from .change import ChangeSet, Rules
from .entries import Answer, Notify, Origin, Outcome, Record, Settle
from .errors import BudgetExhausted, Forbidden, IdConflict, RoundelayError, UnknownMessage
from .frames import StoredFrame, encode
from .ledger import Row
from .refusals import answer_error, check_rights, damaged_repeat
from .spending import charge, read_failure
from .state import State
from .tables import Facts, MessageHead, OpenReaction, Triggered
from .visibility import is_recipient, thread_readers

MAX_END_BYTES = 16 * 1024
"""Of the record that ends a reaction beyond its agent's quota: an honest one has its reason, its sums and what was read meanwhile."""


def apply_record(rules: Rules, state: State, facts: Facts, entry: Record) -> Outcome:
    """Keep a record. Beyond its agent's quota the last one of an open reaction is kept yet, and says so to the readers: it has to end."""
    origin, frame = entry.origin, entry.frame
    keys = {"record_id": frame.record_id}
    known = facts.known.get((origin.agent_id, "r:" + frame.record_id))
    if known is not None:
        if known.is_damaged:
            return answer_error(rules, state, origin, damaged_repeat(f"record_id {frame.record_id!r}", known.seq), keys)
        if known.digest != entry.digest:
            conflict = IdConflict(
                f"record_id {frame.record_id!r} was used for another record (seq {known.seq}); choose a new one."
            )
            return answer_error(rules, state, origin, conflict, keys)
        stored = StoredFrame(record_id=frame.record_id, seq=known.seq, duplicate=True)
        return Outcome(effects=(Answer(origin.session_id, encode(stored)),))
    change = ChangeSet(rules, state, facts, origin)
    try:
        if entry.refusal is not None:
            raise entry.refusal
        check_rights(state, origin)
        change.count_send()
        row = change.write_row(
            "record",
            key="r:" + frame.record_id,
            stream=frame.reaction,
            label=frame.kind,
            digest=entry.digest,
            data=bytes(frame.body),
        )
        opened: OpenReaction | None = state.get("reaction", f"{origin.agent_id}/{frame.reaction}")
        try:
            change.count_stored()
        except BudgetExhausted as error:
            if frame.kind != "finished" or opened is None or len(row.data) > MAX_END_BYTES:
                raise
            change.count_stored(is_bounded=False)
            change.effects.append(_tell_budget(state, opened.trigger_head, origin.agent_id, frame.reaction, str(error)))
        if frame.kind == "started" and entry.trigger is not None:
            _begin_reaction(change, facts, origin, entry, row)
        if entry.spent is not None:
            charge(change, origin.agent_id, frame.reaction, entry.spent, is_total=frame.kind == "finished")
        if frame.kind == "model_failed" and opened is not None:
            failed = read_failure(bytes(frame.body))
            if failed is not None and failed.failure == "budget":
                reason = failed.reason[: rules.limits.max_reason_chars]
                change.effects.append(_tell_budget(state, opened.trigger_head, origin.agent_id, frame.reaction, reason))
        if frame.kind == "finished" and opened is not None:
            _end_reaction(change, state, opened)
    except BudgetExhausted as error:
        refused = answer_error(rules, state, origin, error, keys)
        trigger = facts.heads.get(entry.trigger) if frame.kind == "started" and entry.trigger is not None else None
        if trigger is None or not is_recipient(state, origin.agent_id, trigger):
            return refused
        notice = _tell_budget(state, trigger, origin.agent_id, frame.reaction, str(error))
        return Outcome(puts=refused.puts, effects=(*refused.effects, notice))
    except RoundelayError as error:
        return answer_error(rules, state, origin, error, keys)
    stored = StoredFrame(record_id=frame.record_id, seq=row.seq, duplicate=False)
    return change.outcome(Answer(origin.session_id, encode(stored)))


def _begin_reaction(change: ChangeSet, facts: Facts, origin: Origin, entry: Record, row: Row) -> None:
    trigger, reaction = entry.trigger, entry.frame.reaction
    assert trigger is not None
    head = facts.heads.get(trigger)
    if head is None or not is_recipient(change.state, origin.agent_id, head):
        raise UnknownMessage(
            f"There is no message {trigger} for {origin.agent_id}; body.trigger of a started record is the seq of one."
        )
    most = change.rules.limits.max_reactions_per_message
    key = f"{origin.agent_id}/{reaction}"
    if change.state.get("reaction", key) is None and len(change.state.reactions_to(origin.agent_id, trigger)) >= most:
        raise Forbidden(
            f"{origin.agent_id} has {most} open reactions to message {trigger}, the most that one message may have (max_reactions_per_message); "
            f"finish one of them, or go on with it."
        )
    change.put_row(
        "reaction",
        key,
        OpenReaction(reaction, origin.agent_id, trigger, row.seq, head, entry.oldest or trigger),
    )
    key = f"{origin.agent_id}/{trigger}"
    earlier: Triggered | None = change.find_cold("triggered", key)
    begun = Triggered(reaction, row.seq) if earlier is None else earlier.then(reaction, row.seq)
    change.put_row("triggered", key, begun)
    change.effects.append(Settle(origin.agent_id, trigger))


def _tell_budget(state: State, trigger: MessageHead, agent_id: str, reaction: str, reason: str) -> Notify:
    """A reaction stops because what may be spent is spent: the readers of its trigger's thread, and operators, are told."""
    body = {"root": trigger.root, "seq": trigger.seq, "agent_id": agent_id, "reaction": reaction, "reason": reason}
    readers = frozenset(thread_readers(state, trigger))
    return Notify(readers, "budget_exhausted", trigger.thread_id, body, operators=True)


def _end_reaction(change: ChangeSet, state: State, opened: OpenReaction) -> None:
    change.put_row("reaction", f"{opened.agent_id}/{opened.reaction}", None)
    for put in forget_failures(state, opened.agent_id, opened.trigger):
        change.put_row(put.table, put.key, put.value)
