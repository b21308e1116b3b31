"""Step 6 for deliveries that failed: attempts are counted, and the fifth failure makes a dead letter. Pure.

A failure is a `nack`, or a reactor session that was lost during a reaction. Redelivering is `redelivery`'s, on the loop.
"""

from __future__ import annotations

from .change import ChangeSet, Rules
from .entries import NOTHING, Lost, Nack, Notify, Outcome, Retry, Settle
from .frames import encode
from .state import State
from .tables import Attempt, DeadLetter, Facts, Put, Tried

MAX_FAILURES = 5
"""At this many failures a message becomes a dead letter (docs/protocol.md)."""
FIRST_RETRY_MS = 1000


def apply_nack(rules: Rules, state: State, entry: Nack) -> Outcome:
    agent_id = entry.origin.agent_id
    change = ChangeSet(rules, state, Facts(), entry.origin)
    failures = _count_failure(change, agent_id, entry.seq, entry.reason, entry.retry_after_ms)
    if failures < MAX_FAILURES:
        attempt: Attempt = change.state.get("attempt", f"{agent_id}/{entry.seq}")
        change.effects.append(Retry(agent_id, entry.seq, failures + 1, attempt.due_at))
    return change.outcome()


def apply_lost(rules: Rules, state: State, entry: Lost) -> Outcome:
    agent_id = entry.origin.agent_id
    participant = state.participant(agent_id)
    if participant is None or participant.fence != entry.origin.fence:
        return NOTHING
    change = ChangeSet(rules, state, Facts(), entry.origin)
    for key, reaction in state.reactions_of(agent_id).items():
        reason = f"The agent's process was lost during the reaction {reaction.reaction}."
        if _count_failure(change, agent_id, reaction.trigger, reason, None) >= MAX_FAILURES:
            change.put_row("reaction", key, None)
    return change.outcome()


def keep_handled(state: State, put: Put) -> Put:
    """A floor with what was handled since it was taken: by a dead letter, whose commit it would undo."""
    if put.table != "floor":
        return put
    floor, taken = state.floor(put.key), put.value
    since = {seq for seq in floor.above if seq > taken.seq}.union(seq for seq in taken.open if floor.is_handled(seq))
    return Put("floor", put.key, taken.with_handled(since)) if since else put


def forget_failures(state: State, agent_id: str, seq: int) -> list[Put]:
    """What is kept of a message's failures once it is handled: how many attempts it took, if it took more than one."""
    attempt: Attempt | None = state.get("attempt", f"{agent_id}/{seq}")
    if attempt is None:
        return []
    puts = [Put("attempt", f"{agent_id}/{seq}", None)]
    if attempt.failures or attempt.is_revived:  # of an earlier life there may be more
        puts.append(Put("tried", f"{agent_id}/{seq:016d}", Tried(attempt.failures + 1)))
    return puts


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
