"""Step 6 for reactions: the records of turns, what they cost, and deliveries that failed. Pure.

A record is kept under its ``record_id``; ``started`` opens a reaction, ``finished`` ends it, and the others tell what
it is at and what models cost it. The tokens that records tell of are added up as they come; a runner writes them
(docs/reactions.md), so the sums are as honest as it is, and bound nothing here: a runner asks for them
(``network.spent``) and stops its next turn.

A delivery fails by a ``nack``, or by the loss of the process that was at work on its reaction: known when another
process takes its place, for the same one may come back. The fifth failure makes a dead letter. To deliver again is
`redelivery`'s, on the loop.
"""

from __future__ import annotations

from msgspec import Struct

from roundelay.network.errors import BudgetExhausted, Forbidden, UnknownMessage
from roundelay.network.frames import StoredFrame, encode
from roundelay.network.units import MINUTE_MS

from .buckets import Bucket
from .call_progress import (
    PROGRESS_KINDS,
    REPEATED_KINDS,
    _reads,
    track_calls,
)
from .change import ChangeSet, refuse_entry
from .entries import MarkHandled, Outcome, Record, SendNotice, SessionReply
from .failures import clear_attempts, reset_failures, withdraw_dead_letter
from .faults import CONVERSATION_FAILURES, FinishedBody, record_failure, record_finished
from .limits import next_arrival_or_none
from .rows import MessageHead, Row, StoredKey
from .sending import Rules, check_session, find_budget, repeat_error
from .state import State
from .tables import (
    BudgetStop,
    Facts,
    OpenReaction,
    TableWrite,
    TriggeredReactions,
    descending_key,
)
from .takeovers import check_may_start
from .usage import charge
from .visibility import is_recipient, thread_readers

# --- records

REFUSAL_NOTICES_PER_MINUTE = 60
"""How often readers are told of an agent that may not begin any more: what is refused uses up no quota, and each of
them is written to."""
MAX_END_BYTES = 16 * 1024
"""Of the record that ends a reaction beyond its agent's quota: an honest one has its reason, its sums and what was read
meanwhile."""


def apply_record(rules: Rules, state: State, facts: Facts, entry: Record) -> Outcome:
    """What a record comes to. Raises the `RoundelayError` that refuses it."""
    known = facts.stored.get((entry.origin.agent_id, "r:" + entry.frame.record_id))
    if known is not None:
        return _repeat(rules, state, facts, entry, known)
    try:
        return _keep_record(rules, state, facts, entry)
    except BudgetExhausted as error:
        refused = refuse_entry(rules, state, entry, error)
        return refused if entry.frame.kind != "started" else _tell_refused(state, facts, entry, refused, str(error))


def _keep_record(rules: Rules, state: State, facts: Facts, entry: Record) -> Outcome:
    """Beyond its agent's quota the last record of an open reaction is kept yet, and says so to the readers: it has to
    end."""
    origin, frame = entry.origin, entry.frame
    if entry.refusal is not None:
        raise entry.refusal
    check_session(state, origin)
    change = ChangeSet(rules, state, facts, origin)
    change.count_send()
    body = bytes(frame.body)
    row = change.write_row(
        "record", key="r:" + frame.record_id, stream=frame.reaction, label=frame.kind, digest=entry.digest, data=body
    )
    opened: OpenReaction | None = state.get("reaction", f"{origin.agent_id}/{frame.reaction}")
    try:
        change.count_stored()
    except BudgetExhausted as error:
        if frame.kind != "finished" or opened is None or len(body) > MAX_END_BYTES:
            raise
        change.count_stored(is_bounded=False)
        change.effects.append(_tell_budget(state, entry, opened.trigger_head, str(error)))
    if frame.kind == "started" and entry.trigger is not None:
        _begin_reaction(change, facts, entry, entry.trigger, row)
    if entry.usage is not None:
        charge(change, origin.agent_id, frame.reaction, entry.usage, is_total=frame.kind == "finished")
    failed = parse_failure(body) if frame.kind == "model_failed" and opened is not None else None
    if failed is not None and opened is not None and failed.failure == "budget":
        reason = failed.reason[: rules.limits.max_reason_chars]
        change.effects.append(_tell_budget(state, entry, opened.trigger_head, reason))
        _keep_spent_out(change, opened, reason)
    if failed is not None and opened is not None and failed.failure not in CONVERSATION_FAILURES:
        record_failure(
            change,
            opened.agent_id,
            "model",
            failed.reason,
            failure=failed.failure,
            seq=opened.trigger,
            reaction=opened.reaction,
        )
    if opened is not None and frame.kind != "finished":
        _go_on(change, entry)
        if frame.kind in PROGRESS_KINDS:
            reset_failures(change, opened)
    elif opened is not None:
        change.set_value("reaction", f"{opened.agent_id}/{opened.reaction}", None)
        finished = _read_finished(body) or FinishedBody()
        record_finished(change, opened.agent_id, opened.trigger, opened.reaction, finished)
        change.add_writes(clear_attempts(state, opened.agent_id, opened.trigger))
        change.run_ended_hooks(opened)
    elif entry.may_withdraw:
        withdraw_dead_letter(change, origin.agent_id, frame.reaction)
    return change.outcome(_stored_reply(entry, row.seq, duplicate=False))


def _tell_refused(state: State, facts: Facts, entry: Record, refused: Outcome, reason: str) -> Outcome:
    """A reaction cannot begin, for want of quota: the readers of its trigger are told, not more often than they can
    bear."""
    agent_id = entry.origin.agent_id
    trigger = facts.heads.get(entry.trigger) if entry.trigger is not None else None
    if trigger is None or not is_recipient(state, agent_id, trigger):
        return refused
    key = f"{agent_id}/told"  # no id, so nobody's bucket
    bucket: Bucket = state.get("bucket", key) or Bucket()
    due_at = next_arrival_or_none(bucket.sends, state.stamp, REFUSAL_NOTICES_PER_MINUTE, MINUTE_MS)
    if due_at is None:
        return refused
    notice = _tell_budget(state, entry, trigger, reason)
    return Outcome(
        writes=(*refused.writes, TableWrite("bucket", key, Bucket(due_at))), effects=(*refused.effects, notice)
    )


def _stored_reply(entry: Record, seq: int, *, duplicate: bool) -> SessionReply:
    stored = StoredFrame(record_id=entry.frame.record_id, seq=seq, duplicate=duplicate)
    return SessionReply(entry.origin.session_id, encode(stored))


def _repeat(rules: Rules, state: State, facts: Facts, entry: Record, known: StoredKey) -> Outcome:
    """What a repeat comes to: its answer, and that the process is at the reaction. It stores nothing new."""
    error = repeat_error("record", entry.frame.record_id, known.seq, is_damaged=known.is_damaged)
    if known.is_damaged:
        raise error
    if known.digest == entry.digest:
        answered = Outcome(effects=(_stored_reply(entry, known.seq, duplicate=True),))
    else:
        answered = refuse_entry(rules, state, entry, error)
    if entry.frame.kind not in REPEATED_KINDS:
        return answered
    try:
        check_session(state, entry.origin)
    except Forbidden:  # the repeat is answered all the same, and says nothing
        return answered
    change = ChangeSet(rules, state, facts, entry.origin)
    _go_on(change, entry)
    return Outcome((), (*answered.writes, *change.outcome().writes), answered.effects)


def _go_on(change: ChangeSet, entry: Record) -> None:
    """Keep what an open reaction is at."""
    agent_id, frame = entry.origin.agent_id, entry.frame
    key = f"{agent_id}/{frame.reaction}"
    opened: OpenReaction | None = change.state.get("reaction", key)
    participant = change.state.participant(agent_id)
    if opened is None or participant is None:
        return
    now = track_calls(opened, frame.kind, entry.call, participant.life, entry.wait)
    if now is not opened:
        change.set_value("reaction", key, now)


def _begin_reaction(change: ChangeSet, facts: Facts, entry: Record, trigger: int, row: Row) -> None:
    agent_id, reaction, state = entry.origin.agent_id, entry.frame.reaction, change.state
    head = facts.heads.get(trigger)
    if head is None or not is_recipient(state, agent_id, head):
        raise UnknownMessage(
            f"There is no message {trigger} for {agent_id}; body.trigger of a started record is the seq of one."
        )
    check_may_start(state, head)
    most = change.rules.limits.max_reactions_per_message
    key = f"{agent_id}/{reaction}"
    if state.get("reaction", key) is None and len(state.reactions_to(agent_id, trigger)) >= most:
        raise Forbidden(
            f"{agent_id} has {most} open reactions to message {trigger}, the most that one message may have "
            f"(max_reactions_per_message); finish one of them, or go on with it."
        )
    participant = state.participant(agent_id)
    life = participant.life if participant is not None else 0
    opened = OpenReaction(
        reaction, agent_id, trigger, row.seq, head, entry.oldest or trigger, life=life, at=state.stamp
    )
    change.set_value("reaction", key, opened)
    key = f"{agent_id}/{trigger}"
    earlier: TriggeredReactions | None = change.lookup_cold("triggered", key)
    begun = TriggeredReactions(reaction, row.seq) if earlier is None else earlier.with_started(reaction, row.seq)
    change.set_value("triggered", key, begun)
    change.effects.append(MarkHandled(agent_id, trigger))


def _tell_budget(state: State, entry: Record, trigger: MessageHead, reason: str) -> SendNotice:
    """A reaction stops because what may be spent is spent: the readers of its trigger's thread, and operators, are
    told."""
    agent_id, reaction = entry.origin.agent_id, entry.frame.reaction
    body = {"root": trigger.root, "seq": trigger.seq, "agent_id": agent_id, "reaction": reaction, "reason": reason}
    readers = frozenset(thread_readers(state, trigger))
    return SendNotice(readers, "budget_exhausted", trigger.thread_id, body, to_operators=True)


def _keep_spent_out(change: ChangeSet, opened: OpenReaction, reason: str) -> None:
    """That its agent's budget ended a reaction waits for who may let the conversation go on (`needs`)."""
    head = opened.trigger_head
    resumed = find_budget(change.state, change.facts, head.root, head).resumed
    found = BudgetStop(opened.agent_id, opened.reaction, head.seq, head.root, resumed, change.stamp, reason)
    change.set_value("spent_out", f"{descending_key(head.seq)}/{opened.agent_id}", found)


# --- deliveries that failed


# --- what models cost


class ModelFailedBody(Struct):
    """Of a ``model_failed`` record."""

    failure: str = ""
    reason: str = ""


_read_finished = _reads(FinishedBody)
parse_failure = _reads(ModelFailedBody)
"""Why a model gave no reply; None for a body of another shape."""


# --- what a reaction is at

# `OpenReaction.calls`: the calls that were begun and have no result, and whether each waits for somebody else.
#
#   record              makes of calls
#   started, again      none waits: the process that goes on with it works, until it has come to its waits again
#   tool_started 1.0    1.0: False
#   waiting 1.0         1.0: True
#   approval 1.0        1.0: False     somebody has decided: the call goes on
#   tool_result 1.0     1.0 is out, and all inside of it (1.0/2.1)
#
# `OpenReaction.life` is the process that wrote the newest record, `Participant.life` the one that holds the fence. A
# process was at work on a reaction if both are its own and one of the innermost calls does not wait, or there is
# none: then a model's call was running.
