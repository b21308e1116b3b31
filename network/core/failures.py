"""Step 6 for failed deliveries: attempts, retries and dead letters.

A delivery fails when the agent sends a ``nack``, or when the process that worked on its reaction is lost. A process
counts as lost only when another process of the agent joins, because the same process may reconnect. The fifth failure
makes the message a dead letter. `redelivery` delivers messages again, on the event loop. Pure.
"""

from __future__ import annotations

import msgspec

from roundelay.network.errors import Forbidden
from roundelay.network.frames import encode

from .call_progress import (
    is_at_work,
)
from .change import ChangeSet
from .entries import (
    NOTHING,
    MarkHandled,
    Nack,
    Outcome,
    SaveAckCursors,
    ScheduleRetry,
    SendNotice,
    SessionLost,
)
from .faults import record_failure
from .mod import Undelivered
from .quiet import close_delivery, close_handled
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
"""Number of failures after which a message becomes a dead letter (docs/protocol.md)."""


FIRST_RETRY_MS = 1000
"""Delay in ms before the first retry of a failed delivery. The delay doubles with each further failure."""


def apply_nack(rules: Rules, state: State, facts: Facts, entry: Nack) -> Outcome:
    """Return the outcome of a ``nack`` frame."""
    agent_id = entry.origin.agent_id
    try:
        check_session(state, entry.origin)
    except Forbidden:  # count no failure for a superseded session, and deliver the message again as the same attempt
        attempt: Attempt | None = state.get("attempt", f"{agent_id}/{entry.seq}")
        attempt_now = 1 + (attempt.failures if attempt is not None else 0)
        return Outcome(effects=(ScheduleRetry(agent_id, entry.seq, attempt_now, state.stamp),))
    change = ChangeSet(rules, state, facts, entry.origin)
    head = facts.heads.get(entry.seq)
    sender_id = head.sender_id if head is not None else None
    record_delivery_failure(change, entry.seq, sender_id, entry.reason, entry.retry_after_ms)
    return change.outcome()


def record_delivery_failure(
    change: ChangeSet, seq: int, sender_id: str | None, reason: str, retry_after_ms: int | None
) -> int:
    """Count a failed delivery. Schedule the next attempt, unless the message has become a dead letter. Return the
    number of failures."""
    agent_id = change.origin.agent_id
    failures = count_failure(change, agent_id, seq, sender_id, reason, retry_after_ms)
    if failures < MAX_FAILURES:
        attempt: Attempt = change.state.get("attempt", f"{agent_id}/{seq}")
        change.effects.append(ScheduleRetry(agent_id, seq, failures + 1, attempt.due_at))
    return failures


def apply_lost(rules: Rules, state: State, entry: SessionLost) -> Outcome:
    """Mark an agent's process as lost if it has left open reactions."""
    agent_id = entry.origin.agent_id
    participant = state.participant(agent_id)
    # If a newer session holds the fencing token now, the agent is not lost.
    if participant is None or participant.fence != entry.origin.fencing_token or not state.reactions_of(agent_id):
        return NOTHING
    change = ChangeSet(rules, state, Facts(), entry.origin)
    change.set_value("participant", agent_id, msgspec.structs.replace(participant, is_lost=True))
    return change.outcome()


def count_lost_reactions(change: ChangeSet, lost: Participant) -> None:
    """Count one failure for each message that a lost process was working on. Called when another process replaces the
    lost process.

    If the process did not send an ``instance`` name, the hub cannot distinguish waiting from working. Then all of its
    reactions count as failed.
    """
    agent_id = lost.agent_id
    at_work: dict[int, OpenReaction] = {}
    for reaction in change.state.reactions_of(agent_id).values():
        # A waiting reaction did not run when the process was lost. Counting it could turn a message into a dead letter
        # although its answer is still to come.
        if not lost.instance or is_at_work(reaction, lost.life):
            # Group by trigger: several reactions to one message count as one failed delivery.
            at_work.setdefault(reaction.trigger, reaction)
    for trigger, reaction in at_work.items():
        reason = f"The agent's process was lost during the reaction {reaction.reaction}."
        change.facts.heads[trigger] = reaction.trigger_head  # for the hooks of a dead letter
        count_failure(change, agent_id, trigger, reaction.trigger_head.sender_id, reason, None)


def reset_failures(change: ChangeSet, opened: OpenReaction) -> None:
    """Reset the failure count of a trigger. Its reaction has made progress since the last failure."""
    key = f"{opened.agent_id}/{opened.trigger}"
    attempt: Attempt | None = change.state.get("attempt", key)
    if attempt is not None and attempt.failures:
        # Keep the attempt of a restored dead letter. Without this attempt, the ack cursor would report the message as
        # handled.
        change.set_value("attempt", key, msgspec.structs.replace(attempt, failures=0) if attempt.is_revived else None)


def withdraw_dead_letter(change: ChangeSet, agent_id: str, reaction: str) -> None:
    """Withdraw a dead letter because a reaction to its message has ended after all. Everyone who was notified of the
    dead letter gets a second notice."""
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
    recipients = frozenset((agent_id,))
    change.effects.append(
        SendNotice(recipients, "dead_letter_withdrawn", None, body, to_operators=True, sender_id=given_up.sender_id)
    )


def undelivered_key(sender_id: str, seq: int, agent_id: str) -> str:
    """Return the key of a dead letter in the table of undelivered messages, which is ordered by sender."""
    return f"{sender_id}/{descending_key(seq)}/{agent_id}"


def merge_ack_cursor(state: State, write: TableWrite) -> TableWrite:
    """Add the seqs that were handled after an ack cursor was read to this cursor. Without this merge, storing the
    cursor would undo dead letters of other commits."""
    if write.table != "floor":
        return write
    current, cursor = state.ack_cursor(write.key), write.value
    newer = {seq for seq in current.above if seq > cursor.seq}.union(
        seq for seq in cursor.open if current.is_handled(seq)
    )
    return TableWrite("floor", write.key, cursor.with_handled(newer)) if newer else write


def save_ack_cursors(state: State, entry: SaveAckCursors) -> Outcome:
    """Return the outcome of storing ack cursors. It also closes the deliveries that the cursors mark as handled."""
    writes = [merge_ack_cursor(state, write) for write in entry.writes]
    return Outcome(writes=(*writes, *close_handled(state, writes)))


def clear_attempts(state: State, agent_id: str, seq: int) -> list[TableWrite]:
    """Return the writes that delete the failures of a handled message. If there was more than one attempt, the number
    of attempts is stored."""
    attempt: Attempt | None = state.get("attempt", f"{agent_id}/{seq}")
    if attempt is None:
        return []
    writes = [TableWrite("attempt", f"{agent_id}/{seq}", None)]
    if attempt.failures or attempt.is_revived:  # a restored dead letter already had attempts
        writes.append(TableWrite("tried", f"{agent_id}/{seq:016d}", AttemptCount(attempt.failures + 1)))
    return writes


def count_failure(
    change: ChangeSet, agent_id: str, seq: int, sender_id: str | None, reason: str, retry_after_ms: int | None
) -> int:
    """Count one failed attempt and return the number of failures. The fifth failure makes the message a dead letter and
    closes its open reactions."""
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
    # Close the open reactions, so that no restarted process resumes them. If such a reaction finishes anyway, its end
    # withdraws the dead letter (`withdraw_dead_letter`).
    open_reactions = {it.reaction: key for key, it in change.state.reactions_to(agent_id, seq).items()}
    for reaction, reaction_key in open_reactions.items():
        change.set_value("reaction", reaction_key, None)
        # Index the dead letter by reaction: the agent may still run and may still send ``finished``.
        change.set_value("given_up", f"{agent_id}/{reaction}", AbandonedReaction(seq, sender_id or "", failures))
    letter = DeadLetter(agent_id, seq, reason, failures, stamp, tuple(open_reactions), sender_id or "")
    cursor = change.state.ack_cursor(agent_id)
    # Advance the cursor in the same commit. Otherwise the dead letter could be delivered again after a crash.
    if not cursor.is_handled(seq):
        change.set_value("floor", agent_id, cursor.with_handled([seq]))
    change.set_value("attempt", key, None)
    change.add_writes(close_delivery(change.state, agent_id, seq))
    change.set_value("dead", f"{agent_id}/{seq:016d}", letter)
    record_failure(change, agent_id, "dead_letter", reason, seq=seq)
    if sender_id is not None:
        change.set_value(
            "undelivered", undelivered_key(sender_id, seq, agent_id), UndeliveredMessage(agent_id, seq, failures, stamp)
        )
    body = {"seq": seq, "agent_id": agent_id, "reason": reason, "attempts": failures}
    change.write_row("dead", data=encode(body))
    change.effects.append(MarkHandled(agent_id, seq))
    recipients = frozenset((agent_id,))
    change.effects.append(SendNotice(recipients, "dead_letter", None, body, to_operators=True, sender_id=sender_id))
    failed = Undelivered(agent_id, seq, tuple(open_reactions), change.facts.heads.get(seq))
    change.run_hooks("undelivered", failed, as_mod=True)
    return failures
