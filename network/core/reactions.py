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

from collections.abc import Callable, Mapping
from functools import reduce
from operator import add, sub
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from roundelay.network.errors import BudgetExhausted, Forbidden, UnknownMessage
from roundelay.network.frames import SEQ_LIMIT, Seq, StoredFrame, encode, is_id

from .change import ChangeSet, refuse_entry
from .entries import NOTHING, MarkHandled, Nack, Outcome, Record, ScheduleRetry, SendNotice, SessionLost, SessionReply
from .faults import CONVERSATION_FAILURES, FinishedBody, record_failure, record_finished
from .limits import MINUTE_MS, next_arrival_or_none
from .sending import Rules, check_session, find_budget, repeat_error
from .state import State
from .tables import (
    DAY_MS,
    AbandonedReaction,
    Attempt,
    AttemptCount,
    Bucket,
    BudgetStop,
    CallWait,
    DayUsage,
    DeadLetter,
    Facts,
    MessageHead,
    OpenReaction,
    Participant,
    Row,
    StoredKey,
    TableWrite,
    TokenUsage,
    TriggeredReactions,
    UndeliveredMessage,
    descending_key,
)
from .takeovers import check_may_start
from .visibility import is_recipient, thread_readers

T = TypeVar("T")

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

MAX_FAILURES = 5
"""At this many failures a message becomes a dead letter (docs/protocol.md)."""
FIRST_RETRY_MS = 1000


def apply_nack(rules: Rules, state: State, facts: Facts, entry: Nack) -> Outcome:
    agent_id = entry.origin.agent_id
    try:
        check_session(state, entry.origin)
    except Forbidden:  # as if it had not been said: the message comes again, as the same attempt
        known: Attempt | None = state.get("attempt", f"{agent_id}/{entry.seq}")
        attempt_now = 1 + (known.failures if known is not None else 0)
        return Outcome(effects=(ScheduleRetry(agent_id, entry.seq, attempt_now, state.stamp),))
    change = ChangeSet(rules, state, facts, entry.origin)
    head = facts.heads.get(entry.seq)
    sender_id = head.sender_id if head is not None else None
    record_delivery_failure(change, entry.seq, sender_id, entry.reason, entry.retry_after_ms)
    return change.outcome()


def record_delivery_failure(
    change: ChangeSet, seq: int, sender_id: str | None, reason: str, retry_after_ms: int | None
) -> int:
    """Count what the caller says has failed, and have it delivered again unless it is a dead letter now. Gives the
    failures so far."""
    agent_id = change.origin.agent_id
    failures = count_failure(change, agent_id, seq, sender_id, reason, retry_after_ms)
    if failures < MAX_FAILURES:
        attempt: Attempt = change.state.get("attempt", f"{agent_id}/{seq}")
        change.effects.append(ScheduleRetry(agent_id, seq, failures + 1, attempt.due_at))
    return failures


def apply_lost(rules: Rules, state: State, entry: SessionLost) -> Outcome:
    agent_id = entry.origin.agent_id
    participant = state.participant(agent_id)
    if participant is None or participant.fence != entry.origin.fencing_token or not state.reactions_of(agent_id):
        return NOTHING
    change = ChangeSet(rules, state, Facts(), entry.origin)
    change.set_value("participant", agent_id, msgspec.structs.replace(participant, is_lost=True))
    return change.outcome()


def count_lost_reactions(change: ChangeSet, lost: Participant) -> None:
    """A process is gone, and another one is in its place: what it was at work on has failed once. Of a process
    that does not name itself nobody knows what it only waited for."""
    agent_id = lost.agent_id
    at_work: dict[int, OpenReaction] = {}
    for reaction in change.state.reactions_of(agent_id).values():
        if not lost.instance or is_at_work(reaction, lost.life):
            at_work.setdefault(reaction.trigger, reaction)
    for trigger, reaction in at_work.items():
        reason = f"The agent's process was lost during the reaction {reaction.reaction}."
        count_failure(change, agent_id, trigger, reaction.trigger_head.sender_id, reason, None)


def reset_failures(change: ChangeSet, opened: OpenReaction) -> None:
    """A reaction has got on since the last failure: the next one is the first."""
    key = f"{opened.agent_id}/{opened.trigger}"
    attempt: Attempt | None = change.state.get("attempt", key)
    if attempt is not None and attempt.failures:
        change.set_value("attempt", key, msgspec.structs.replace(attempt, failures=0) if attempt.is_revived else None)


def withdraw_dead_letter(change: ChangeSet, agent_id: str, reaction: str) -> None:
    """A reaction that was given up has ended after all: what it was for is no dead letter, and who was told is
    told so."""
    given_up: AbandonedReaction | None = change.lookup_cold("given_up", f"{agent_id}/{reaction}")
    if given_up is None:
        return
    seq = given_up.trigger
    change.set_value("given_up", f"{agent_id}/{reaction}", None)
    change.set_value("dead", f"{agent_id}/{seq:016d}", None)
    if given_up.sender_id:
        change.set_value("undelivered", undelivered_key(given_up.sender_id, seq, agent_id), None)
    change.set_value("tried", f"{agent_id}/{seq:016d}", AttemptCount(given_up.attempts))
    change.write_row("dead", data=encode({"seq": seq, "agent_id": agent_id, "event": "withdrawn"}))
    body = {"seq": seq, "agent_id": agent_id, "reaction": reaction}
    told = frozenset((agent_id,))
    change.effects.append(
        SendNotice(told, "dead_letter_withdrawn", None, body, to_operators=True, sender_id=given_up.sender_id)
    )


def undelivered_key(sender_id: str, seq: int, agent_id: str) -> str:
    """Where a dead letter stands among those of what its sender sent."""
    return f"{sender_id}/{descending_key(seq)}/{agent_id}"


def merge_ack_cursor(state: State, put: TableWrite) -> TableWrite:
    """A floor with what was handled since it was taken: by a dead letter, whose commit it would undo."""
    if put.table != "floor":
        return put
    floor, taken = state.ack_cursor(put.key), put.value
    since = {seq for seq in floor.above if seq > taken.seq}.union(seq for seq in taken.open if floor.is_handled(seq))
    return TableWrite("floor", put.key, taken.with_handled(since)) if since else put


def clear_attempts(state: State, agent_id: str, seq: int) -> list[TableWrite]:
    """What is kept of a message's failures once it is handled: how many attempts it took, if it took more than one."""
    attempt: Attempt | None = state.get("attempt", f"{agent_id}/{seq}")
    if attempt is None:
        return []
    puts = [TableWrite("attempt", f"{agent_id}/{seq}", None)]
    if attempt.failures or attempt.is_revived:  # of an earlier life there may be more
        puts.append(TableWrite("tried", f"{agent_id}/{seq:016d}", AttemptCount(attempt.failures + 1)))
    return puts


def count_failure(
    change: ChangeSet, agent_id: str, seq: int, sender_id: str | None, reason: str, retry_after_ms: int | None
) -> int:
    """Count one failed attempt; at the fifth the message is handled as a dead letter, and no reaction to it is
    open any more. Gives the failures so far."""
    key = f"{agent_id}/{seq}"
    before: Attempt | None = change.state.get("attempt", key)
    failures = (before.failures if before is not None else 0) + 1
    stamp = change.stamp
    if failures < MAX_FAILURES:
        delay_ms = retry_after_ms if retry_after_ms is not None else FIRST_RETRY_MS * 2 ** (failures - 1)
        change.set_value(
            "attempt", key, Attempt(failures, stamp + delay_ms, reason, before is not None and before.is_revived)
        )
        return failures
    opened = {it.reaction: key for key, it in change.state.reactions_to(agent_id, seq).items()}
    for reaction, its_key in opened.items():
        change.set_value("reaction", its_key, None)
        change.set_value("given_up", f"{agent_id}/{reaction}", AbandonedReaction(seq, sender_id or "", failures))
    letter = DeadLetter(agent_id, seq, reason, failures, stamp, tuple(opened), sender_id or "")
    floor = change.state.ack_cursor(agent_id)
    if not floor.is_handled(seq):  # in this same commit: after a crash a dead letter is not delivered again
        change.set_value("floor", agent_id, floor.with_handled([seq]))
    change.set_value("attempt", key, None)
    change.set_value("dead", f"{agent_id}/{seq:016d}", letter)
    record_failure(change, agent_id, "dead_letter", reason, seq=seq)
    if sender_id is not None:
        change.set_value(
            "undelivered", undelivered_key(sender_id, seq, agent_id), UndeliveredMessage(agent_id, seq, failures, stamp)
        )
    body = {"seq": seq, "agent_id": agent_id, "reason": reason, "attempts": failures}
    change.write_row("dead", data=encode(body))
    change.effects.append(MarkHandled(agent_id, seq))
    told = frozenset((agent_id,))
    change.effects.append(SendNotice(told, "dead_letter", None, body, to_operators=True, sender_id=sender_id))
    return failures


# --- what models cost


def _reads(shape: type[T]) -> Callable[[bytes], T | None]:
    """What reads a record's body as of one shape, unknown fields left out; None for a body of another."""
    decoder = msgspec.json.Decoder(shape)

    def read(body: bytes) -> T | None:
        try:
            return decoder.decode(body)
        except msgspec.DecodeError:
            return None

    return read


USAGE_KINDS = frozenset({"model_reply", "review", "used", "finished"})
MAX_MODELS = 16
"""Of one sum; further ones count under no name."""
MAX_MODEL_CHARS = 128
MAX_CLAIMANTS, MAX_MODELS_EACH = 64, 4
"""So many agents' sums are kept apart in one conversation, of so many models each; what others used counts in that
of all."""

_Tokens = Annotated[int, Meta(ge=0, le=10**12)]


class _Usage(Struct):
    prompt_tokens: _Tokens = 0
    completion_tokens: _Tokens = 0
    cached_tokens: _Tokens = 0
    reasoning_tokens: _Tokens = 0


class _Reply(Struct):
    usage: _Usage = msgspec.field(default_factory=_Usage)
    model: str = ""


class _Use(Struct):
    """What one model was asked beside the turn's own request."""

    usage: _Usage
    model: str = ""


class _Told(Struct):
    """Of a record's body what is charged: ``reply`` of a ``model_reply``, ``usage`` of the other kinds. ``used`` is
    what of that is told by model."""

    reply: _Reply | None = None
    usage: _Usage | None = None
    used: list[_Use] = []


class ModelFailedBody(Struct):
    """Of a ``model_failed`` record."""

    failure: str = ""
    reason: str = ""


_read_told = _reads(_Told)
_read_finished = _reads(FinishedBody)
parse_failure = _reads(ModelFailedBody)
"""Why a model gave no reply; None for a body of another shape."""


def parse_usage(kind: str, body: bytes) -> Mapping[str, TokenUsage] | None:
    """The tokens that a record tells of, by model, "" for what none is named for; None for nothing, or a body of
    another shape."""
    told = _read_told(body)
    if told is None:
        return None
    reply = told.reply if kind == "model_reply" else None
    used = [(it.model, TokenUsage(1, *msgspec.structs.astuple(it.usage))) for it in told.used]
    usage = reply.usage if reply is not None else told.usage
    if usage is not None:
        rest = _rest(
            TokenUsage(0, *msgspec.structs.astuple(usage)), reduce(_plus, (it for _, it in used), TokenUsage())
        )
        of_reply = msgspec.structs.replace(rest, calls=int(reply is not None))
        used.append((reply.model if reply is not None else "", of_reply))
    spent: dict[str, TokenUsage] = {}
    for model, it in used:
        if it != TokenUsage():
            spent = _add(spent, model[:MAX_MODEL_CHARS], it)
    return spent or None


def charge(change: ChangeSet, agent_id: str, reaction: str, spent: Mapping[str, TokenUsage], *, is_total: bool) -> None:
    """Add what a record tells of to its reaction's sum, its root's (of all, and of this agent) and its agent's of the
    day.

    A record that claims more than ``max_record_tokens`` of a model counts that.
    ``is_total``: what no model is named for is that of the whole reaction; what the sum has already is not added again.
    """
    key = f"{agent_id}/{reaction}"
    opened: OpenReaction | None = change.state.get("reaction", key)
    if opened is None:
        return
    if is_total:
        told = {model: it for model, it in spent.items() if model}
        # `parse_usage` has taken these out of the total, which holds what the sum has already as well.
        spent = {**told, "": _rest(spent.get("", TokenUsage()), total_usage(opened.spent))}
    most = change.rules.limits.max_record_tokens
    by_model = {model: _limit(it, most) for model, it in spent.items() if it != TokenUsage()}
    if not by_model:
        return
    root = opened.trigger_head.root
    budget = find_budget(change.state, change.facts, root, opened.trigger_head)
    claims = budget.claims
    if agent_id in claims or len(claims) < MAX_CLAIMANTS:
        claims = {**claims, agent_id: _add_all(claims.get(agent_id, {}), by_model, MAX_MODELS_EACH)}
    changed = msgspec.structs.replace(budget, spent=_add_all(budget.spent, by_model), claims=claims)
    change.set_value("root", str(root), changed)
    change.set_value("reaction", key, msgspec.structs.replace(opened, spent=_add_all(opened.spent, by_model)))
    day = change.stamp // DAY_MS
    of_day = usage_on(day, change.state.get("day", agent_id))
    change.set_value("day", agent_id, DayUsage(day, _add_all(of_day, by_model)))


def _limit(used: TokenUsage, most: int) -> TokenUsage:
    calls, *tokens = msgspec.structs.astuple(used)
    return TokenUsage(calls, *(min(count, most) for count in tokens))


def usage_on(day: int, newest: DayUsage | None) -> Mapping[str, TokenUsage]:
    """What was spent on a day, given what is kept of the newest one."""
    return newest.spent if newest is not None and newest.day == day else {}


def total_usage(spent: Mapping[str, TokenUsage]) -> TokenUsage:
    """All models together."""
    return reduce(_plus, spent.values(), TokenUsage())


def _add(
    spent: Mapping[str, TokenUsage], model: str, used: TokenUsage, most: int = MAX_MODELS
) -> dict[str, TokenUsage]:
    if model not in spent and len(spent) >= most:
        model = ""
    return {**spent, model: _plus(spent.get(model, TokenUsage()), used)}


def _add_all(
    spent: Mapping[str, TokenUsage], used: Mapping[str, TokenUsage], most: int = MAX_MODELS
) -> dict[str, TokenUsage]:
    summed = dict(spent)
    for model, it in used.items():
        summed = _add(summed, model, it, most)
    return summed


def _plus(one: TokenUsage, other: TokenUsage) -> TokenUsage:
    return TokenUsage(*map(add, msgspec.structs.astuple(one), msgspec.structs.astuple(other)))


def _rest(total: TokenUsage, known: TokenUsage) -> TokenUsage:
    """What a total holds beyond what is known: never less than nothing, as middleware may count a reply for less than
    it was."""
    _calls, *tokens = (max(0, it) for it in map(sub, msgspec.structs.astuple(total), msgspec.structs.astuple(known)))
    return TokenUsage(0, *tokens)


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

CALL_KINDS = frozenset({"tool_started", "tool_result", "waiting", "approval"})
PROGRESS_KINDS = frozenset({"model_reply", "tool_result"})
REPEATED_KINDS = frozenset({"started", "waiting"})
"""Of which a repeat says something: a process goes on with the reaction, and waits again."""
MAX_CALLS = 64
"""So many are told apart; with more of them a reaction is taken to be at work."""
MAX_PLACE_CHARS = 128
MAX_AWAITED = 16
"""Of one call, so many that it waits for are named."""
MAX_REQUESTS = 128
"""Maximum number of messages that ask for one decision, and of people who may give it."""


class _Call(Struct):
    turn: int = 0
    call: int = 0
    path: str = ""


_read_call = _reads(_Call)


def parse_call_place(body: bytes) -> str:
    """The place of the call that a record is about; empty for a body of another shape."""
    it = _read_call(body)
    if it is None:
        return ""
    place = f"{it.path}/{it.turn}.{it.call}" if it.path else f"{it.turn}.{it.call}"
    return place if len(place) <= MAX_PLACE_CHARS else ""


class _Vote(Struct):
    by: str = ""


class _Waiting(Struct):
    questions: dict[str, Seq] = {}
    until: int = 0
    is_approval: bool = False
    deciders: list[str] | None = None
    with_operators: bool = False
    votes: list[_Vote] = []


_read_waiting = _reads(_Waiting)


def parse_wait(body: bytes) -> CallWait | None:
    """What a ``waiting`` record says that its call waits for; None for a body of another shape."""
    it = _read_waiting(body)
    if it is None or not it.questions:
        return None
    if it.is_approval:
        copies = tuple((name, seq) for name, seq in it.questions.items() if is_id(name))
        return CallWait(
            request=next(iter(it.questions.values())),
            until=max(0, min(it.until, SEQ_LIMIT - 1)),
            copies=copies[:MAX_REQUESTS],
            with_operators=it.with_operators,
            deciders=None if it.deciders is None else tuple(filter(is_id, it.deciders[:MAX_REQUESTS])),
            voters=tuple(vote.by for vote in it.votes[:MAX_REQUESTS] if is_id(vote.by)),
        )
    return CallWait(tuple(name for name in it.questions if is_id(name))[:MAX_AWAITED])


def track_calls(opened: OpenReaction, kind: str, call: str, life: int, awaited: CallWait | None = None) -> OpenReaction:
    """The reaction after one more record, written in a process's ``life``; the same object if that changes nothing."""
    calls = opened.calls
    if kind == "started":  # a process goes on with it: until it has come to its waits again, it works
        calls = dict.fromkeys(calls, False)
    elif kind == "tool_result":
        calls = {it: waits for it, waits in calls.items() if it != call and not _is_inside(it, call)}
    elif kind in CALL_KINDS:
        if call not in calls and len(calls) >= MAX_CALLS:
            calls = {**calls, "": False}
        else:
            calls = {**calls, call: kind == "waiting"}
    awaits = opened.awaits if awaited is None else {**opened.awaits, call: awaited}
    awaits = {it: awaits[it] for it, waits in calls.items() if waits and it in awaits}
    if life == opened.life and calls == opened.calls and awaits == opened.awaits:
        return opened
    return msgspec.structs.replace(opened, life=life, calls=calls, awaits=awaits)


def is_at_work(opened: OpenReaction, life: int) -> bool:
    """Whether the process of this life was at it and did more than to wait: a model's or a tool's call was running."""
    if opened.life != life:
        return False  # it waits in the inbox for its turn
    innermost = innermost_calls(opened)
    return not innermost or not all(innermost.values())


def innermost_calls(opened: OpenReaction) -> dict[str, bool]:
    """The calls under way that have no other one inside of them, and whether each waits for somebody else."""
    return {it: waits for it, waits in opened.calls.items() if not any(_is_inside(other, it) for other in opened.calls)}


def _is_inside(place: str, outer: str) -> bool:
    """Whether a call is one of a run inside of another call."""
    return place.startswith((f"{outer}/", f"{outer}.")) if outer else False
