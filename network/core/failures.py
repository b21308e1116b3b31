"""Step 6 for deliveries that failed: attempts, retries and dead letters. Pure."""

from __future__ import annotations

import msgspec

from roundelay.network.errors import Forbidden
from roundelay.network.frames import encode

from .call_progress import (
    is_at_work,
)
from .change import ChangeSet
from .entries import NOTHING, MarkHandled, Nack, Outcome, ScheduleRetry, SendNotice, SessionLost
from .faults import record_failure
from .sending import Rules, check_session
from .state import State
from .tables import (
    AbandonedReaction,
    Attempt,
    AttemptCount,
    DeadLetter,
    Facts,
    OpenReaction,
    Participant,
    TableWrite,
    UndeliveredMessage,
    descending_key,
)

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
