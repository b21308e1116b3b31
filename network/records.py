"""Step 6 for turn records: they are kept under their ``record_id``; ``started`` opens a reaction, ``finished`` ends it. Pure."""

from __future__ import annotations

from .attempts import forget_failures
from .change import ChangeSet, Rules
from .entries import Answer, Notify, Origin, Outcome, Record, Settle
from .errors import IdConflict, RoundelayError, UnknownMessage
from .frames import RecordFrame, StoredFrame, encode
from .ledger import Row
from .refusals import answer_error, check_rights
from .spending import charge, read_failure
from .state import State
from .tables import Facts, OpenReaction, Triggered
from .visibility import is_recipient, thread_readers


def apply_record(rules: Rules, state: State, facts: Facts, entry: Record) -> Outcome:
    origin, frame = entry.origin, entry.frame
    keys = {"record_id": frame.record_id}
    known = facts.known.get((origin.agent_id, "r:" + frame.record_id))
    if known is not None:
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
        if frame.kind == "started" and entry.trigger is not None:
            _begin_reaction(change, facts, origin, entry, row)
        if entry.spent is not None:
            charge(change, origin.agent_id, frame.reaction, entry.spent, is_total=frame.kind == "finished")
        if frame.kind == "model_failed":
            _tell_budget(change, state, frame, origin.agent_id)
        if frame.kind == "finished":
            _end_reaction(change, state, frame.reaction, origin.agent_id)
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
    change.put_row(
        "reaction",
        f"{origin.agent_id}/{reaction}",
        OpenReaction(reaction, origin.agent_id, trigger, row.seq, head, entry.oldest or trigger),
    )
    key = f"{origin.agent_id}/{trigger}"
    earlier: Triggered | None = change.find_cold("triggered", key)
    begun = Triggered(reaction, row.seq) if earlier is None else earlier.then(reaction, row.seq)
    change.put_row("triggered", key, begun)
    change.effects.append(Settle(origin.agent_id, trigger))


def _tell_budget(change: ChangeSet, state: State, frame: RecordFrame, agent_id: str) -> None:
    """A reaction stops because what may be spent is spent: the readers of its trigger's thread, and operators, are told."""
    opened: OpenReaction | None = state.get("reaction", f"{agent_id}/{frame.reaction}")
    failed = read_failure(bytes(frame.body))
    if opened is None or failed is None or failed.failure != "budget":
        return
    head = opened.trigger_head
    reason = failed.reason[: change.rules.limits.max_reason_chars]
    body = {"root": head.root, "seq": head.seq, "agent_id": agent_id, "reaction": opened.reaction, "reason": reason}
    readers = frozenset(thread_readers(state, head))
    change.effects.append(Notify(readers, "budget_exhausted", head.thread_id, body, operators=True))


def _end_reaction(change: ChangeSet, state: State, reaction: str, agent_id: str) -> None:
    found: OpenReaction | None = state.get("reaction", f"{agent_id}/{reaction}")
    if found is not None:
        change.put_row("reaction", f"{agent_id}/{reaction}", None)
        for put in forget_failures(state, agent_id, found.trigger):
            change.put_row(put.table, put.key, put.value)
