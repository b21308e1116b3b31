"""Step 6 for records. Records are log entries that an agent writes about a reaction.

A record is stored under its ``record_id``. A ``started`` record opens a reaction, and a ``finished`` record ends it.
The other kinds report progress (`call_progress`) and tokens (`usage`). Runners write the records (docs/reactions.md),
so the token sums are only as honest as the runner. The hub enforces no token budget: a runner reads the sums
(``network.spent``) and stops itself. Pure.
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
    parser_of,
    track_calls,
)
from .change import ChangeSet, refuse_entry
from .entries import MarkHandled, Outcome, Record, SendNotice, SessionReply
from .failures import clear_attempts, reset_failures, withdraw_dead_letter
from .faults import CONVERSATION_FAILURES, FinishedBody, record_failure, record_finished
from .limits import next_arrival_or_none
from .quiet import close_delivery
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
"""Maximum number of notices per minute about one agent whose reactions are refused. A refused record uses no quota, but
each notice goes to every reader."""
MAX_END_BYTES = 16 * 1024
"""Maximum size in bytes of a record that ends a reaction beyond its agent's quota. An honest record contains only a
reason, sums, and the seqs of messages that the agent read during the reaction."""


def apply_record(rules: Rules, state: State, facts: Facts, entry: Record) -> Outcome:
    """Return the outcome of a record. If the record is refused, raise the `RoundelayError` of the refusal."""
    stored = facts.stored.get((entry.origin.agent_id, "r:" + entry.frame.record_id))
    # Check for repeats first, as for messages. A runner that resumes a reaction writes its journal again with the same
    # ids.
    if stored is not None:
        return _repeat(rules, state, facts, entry, stored)
    try:
        return _store_record(rules, state, facts, entry)
    except BudgetExhausted as error:
        refused = refuse_entry(rules, state, entry, error)
        return (
            refused
            if entry.frame.kind != "started"
            else _notify_refused_start(state, facts, entry, refused, str(error))
        )


def _store_record(rules: Rules, state: State, facts: Facts, entry: Record) -> Outcome:
    """Store a record. The final record of an open reaction is stored even beyond the agent's quota, because a reaction
    must be able to end. In this case, the readers of the thread are notified."""
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
    # Use the state before this record: below, a ``started`` record must not find the reaction that it opens itself.
    opened: OpenReaction | None = state.get("reaction", f"{origin.agent_id}/{frame.reaction}")
    try:
        change.count_stored()
    except BudgetExhausted as error:
        # Beyond the quota, accept only the end. A runner that could not end its reaction would repeat the record
        # forever.
        if frame.kind != "finished" or opened is None or len(body) > MAX_END_BYTES:
            raise
        change.count_stored(is_bounded=False)
        change.effects.append(_budget_notice(state, entry, opened.trigger_head, str(error)))
    if frame.kind == "started" and entry.trigger is not None:
        _start_reaction(change, facts, entry, entry.trigger, row)
    if entry.usage is not None:
        charge(change, origin.agent_id, frame.reaction, entry.usage, is_total=frame.kind == "finished")
    failed = parse_failure(body) if frame.kind == "model_failed" and opened is not None else None
    if failed is not None and opened is not None and failed.failure == "budget":
        reason = failed.reason[: rules.limits.max_reason_chars]
        change.effects.append(_budget_notice(state, entry, opened.trigger_head, reason))
        _store_budget_stop(change, opened, reason)
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
        _track_progress(change, entry)
        if frame.kind in PROGRESS_KINDS:
            reset_failures(change, opened)
    elif opened is not None:
        # Remove the reaction before the hooks run, so that they see the reaction as ended.
        change.set_value("reaction", f"{opened.agent_id}/{opened.reaction}", None)
        finished = _read_finished(body) or FinishedBody()
        record_finished(change, opened.agent_id, opened.trigger, opened.reaction, finished)
        change.add_writes(clear_attempts(state, opened.agent_id, opened.trigger))
        change.run_hooks("ended", opened)
        change.count_stored(is_bounded=False)  # never refuse here, because the reaction must be able to end
    elif entry.may_withdraw:
        withdraw_dead_letter(change, origin.agent_id, frame.reaction)
    return change.outcome(_stored_reply(entry, row.seq, duplicate=False))


def _notify_refused_start(state: State, facts: Facts, entry: Record, refused: Outcome, reason: str) -> Outcome:
    """Notify the readers of the trigger that a reaction cannot start because the agent's quota is used up. The number
    of notices is limited."""
    agent_id = entry.origin.agent_id
    trigger = facts.heads.get(entry.trigger) if entry.trigger is not None else None
    if trigger is None or not is_recipient(state, agent_id, trigger):
        return refused
    key = f"{agent_id}/told"  # not a valid id, so no participant has this bucket
    bucket: Bucket = state.get("bucket", key) or Bucket()
    # A refused start uses no quota, so a broken agent could cause a notice to every reader for each message.
    due_at = next_arrival_or_none(bucket.sends, state.stamp, REFUSAL_NOTICES_PER_MINUTE, MINUTE_MS)
    if due_at is None:
        return refused
    notice = _budget_notice(state, entry, trigger, reason)
    return Outcome(
        writes=(*refused.writes, TableWrite("bucket", key, Bucket(due_at))), effects=(*refused.effects, notice)
    )


def _stored_reply(entry: Record, seq: int, *, duplicate: bool) -> SessionReply:
    stored = StoredFrame(record_id=entry.frame.record_id, seq=seq, duplicate=duplicate)
    return SessionReply(entry.origin.session_id, encode(stored))


def _repeat(rules: Rules, state: State, facts: Facts, entry: Record, stored: StoredKey) -> Outcome:
    """Return the outcome of a record whose id is already stored. The answer is the same as before, or an error if the
    bodies differ. A repeated start or wait also updates the state of the reaction's calls. No new record is stored."""
    error = repeat_error("record", entry.frame.record_id, stored.seq, is_damaged=stored.is_damaged)
    if stored.is_damaged:
        raise error
    if stored.digest == entry.digest:
        reply = Outcome(effects=(_stored_reply(entry, stored.seq, duplicate=True),))
    else:
        reply = refuse_entry(rules, state, entry, error)
    # A repeated result or reply contains nothing new. A repeated start shows that another process now works on the
    # reaction.
    if entry.frame.kind not in REPEATED_KINDS:
        return reply
    try:
        check_session(state, entry.origin)
    except Forbidden:  # a superseded session still gets its answer, but changes nothing
        return reply
    change = ChangeSet(rules, state, facts, entry.origin)
    _track_progress(change, entry)
    return Outcome((), (*reply.writes, *change.outcome().writes), reply.effects)


def _track_progress(change: ChangeSet, entry: Record) -> None:
    """Update the running calls of an open reaction."""
    agent_id, frame = entry.origin.agent_id, entry.frame
    key = f"{agent_id}/{frame.reaction}"
    opened: OpenReaction | None = change.state.get("reaction", key)
    participant = change.state.participant(agent_id)
    if opened is None or participant is None:
        return
    updated = track_calls(opened, frame.kind, entry.call, participant.life, entry.wait)
    if updated is not opened:
        change.set_value("reaction", key, updated)


def _start_reaction(change: ChangeSet, facts: Facts, entry: Record, trigger: int, row: Row) -> None:
    agent_id, reaction, state = entry.origin.agent_id, entry.frame.reaction, change.state
    head = facts.heads.get(trigger)
    if head is None or not is_recipient(state, agent_id, head):
        raise UnknownMessage(
            f"There is no message {trigger} for {agent_id}. body.trigger of a started record must be the seq of a "
            "message that the agent received."
        )
    check_may_start(state, head)
    most = change.rules.limits.max_reactions_per_message
    key = f"{agent_id}/{reaction}"
    # A runner that resumes a reaction starts it again while it is open. Counting it twice would refuse this runner.
    if state.get("reaction", key) is None and len(state.reactions_to(agent_id, trigger)) >= most:
        raise Forbidden(
            f"{agent_id} has {most} open reactions to message {trigger}, the maximum (max_reactions_per_message). "
            "Finish or continue one of them."
        )
    participant = state.participant(agent_id)
    life = participant.life if participant is not None else 0
    opened = OpenReaction(
        reaction, agent_id, trigger, row.seq, head, entry.oldest or trigger, life=life, at=state.stamp
    )
    # Store both in one commit. Between two commits, the conversation would seem to be quiet.
    change.set_value("reaction", key, opened)
    change.add_writes(close_delivery(state, agent_id, trigger))
    key = f"{agent_id}/{trigger}"
    earlier: TriggeredReactions | None = change.lookup_cold("triggered", key)
    started = TriggeredReactions(reaction, row.seq) if earlier is None else earlier.with_started(reaction, row.seq)
    change.set_value("triggered", key, started)
    # The stored reaction completes the delivery. From now on, a new process resumes the reaction instead of receiving
    # the message again.
    change.effects.append(MarkHandled(agent_id, trigger))


def _budget_notice(state: State, entry: Record, trigger: MessageHead, reason: str) -> SendNotice:
    """Return the notice that a reaction stopped because a budget is used up. The notice goes to operators and to the
    readers of the trigger's thread."""
    agent_id, reaction = entry.origin.agent_id, entry.frame.reaction
    body = {"root": trigger.root, "seq": trigger.seq, "agent_id": agent_id, "reaction": reaction, "reason": reason}
    readers = frozenset(thread_readers(state, trigger))
    return SendNotice(readers, "budget_exhausted", trigger.thread_id, body, to_operators=True)


def _store_budget_stop(change: ChangeSet, opened: OpenReaction, reason: str) -> None:
    """Store that a reaction ended because its agent's budget is used up. The inbox shows this stop to the people who
    may resume the conversation."""
    head = opened.trigger_head
    resumed = find_budget(change.state, change.facts, head.root, head).resumed
    stop = BudgetStop(opened.agent_id, opened.reaction, head.seq, head.root, resumed, change.stamp, reason)
    change.set_value("spent_out", f"{descending_key(head.seq)}/{opened.agent_id}", stop)


# --- bodies of records


class ModelFailedBody(Struct):
    """Body of a ``model_failed`` record."""

    failure: str = ""
    reason: str = ""


_read_finished = parser_of(FinishedBody)
parse_failure = parser_of(ModelFailedBody)
"""Parse the reason why a model did not reply. The result is None if the body does not match."""
