"""What `apply` asks before it stores anything, and what it says when it does not: rights, errors, a conversation that has to stop.

Shared by everything that an entry may be (`apply`, `calls`, `records`). Pure: a refusal leaves nothing under its id.
"""

from __future__ import annotations

import msgspec

from .change import RootStopped, Rules, count_rates, find_budget
from .entries import Answer, Entry, Join, Notify, Operate, Origin, Outcome, Record, Refuse, Send, error_bytes
from .errors import Forbidden, InternalError, RateLimited, RetryLater, RoundelayError
from .state import State
from .tables import MAX_STOPPED_IN, Facts, Put
from .visibility import thread_readers


def check_rights(state: State, origin: Origin) -> None:
    """The sender is still here, and, for a reactor, no newer one has taken over. Raises `Forbidden`."""
    participant = state.present(origin.agent_id)
    if participant is None:
        raise Forbidden(f"{origin.agent_id} was removed from this network.")
    if origin.fence is not None and participant.fence != origin.fence:
        raise Forbidden(
            f"A newer reactor of {origin.agent_id} holds fence {participant.fence}; this session's is {origin.fence}."
        )


def damaged_repeat(what: str, seq: int | None) -> InternalError:
    """For a repeat that cannot be compared with the first, nor answered as it was: that is damaged in the ledger's file."""
    place = f"under seq {seq}, " if seq is not None else ""
    return InternalError(
        f"{what} was stored, {place}but is damaged in the hub's ledger: whether this is the same, and what came of it, is unknown. "
        "Tell the hub's operator; what has to arrive is to be sent under a new id."
    )


def answer_error(rules: Rules, state: State, origin: Origin, error: RoundelayError, keys: dict[str, str]) -> Outcome:
    """Tell the sender. A refusal changes nothing but its sender's rate: what is wrong costs the hub as much as what is right.

    Beyond the rate the answer is `RateLimited`, whatever else is wrong.
    """
    puts: list[Put] = []
    if not isinstance(error, RetryLater):
        try:
            bucket = count_rates(rules.limits, state, origin, state.stamp, is_root=False)
            puts = [Put("bucket", origin.agent_id, bucket)]
        except RateLimited as limited:
            error = limited
    return Outcome(puts=puts, effects=(Answer(origin.session_id, error_bytes(error, keys)),))


def stop_loop(
    rules: Rules, state: State, facts: Facts, origin: Origin, error: RootStopped, keys: dict[str, str]
) -> Outcome:
    """The sender gets the error, which is counted; the first time in a thread, its readers get one notice."""
    refused = answer_error(rules, state, origin, error, keys)
    head = error.head
    budget = find_budget(state, facts, head.root)  # as it was: what this change counted is thrown away with it
    if head.thread_id in budget.stopped_in or head.root > state.head:  # a root of its own, thrown away too
        return refused
    if (
        len(budget.stopped_in) >= MAX_STOPPED_IN
    ):  # its members are in the conversation's own threads, and those came first
        return refused
    body = {"root": head.root, "seq": budget.last_seq, "reason": str(error)}
    notice = Notify(frozenset(thread_readers(state, head)), "loop_stopped", head.thread_id, body)
    stopped = Put(
        "root", str(head.root), msgspec.structs.replace(budget, stopped_in=(*budget.stopped_in, head.thread_id))
    )
    return Outcome(puts=(*refused.puts, stopped), effects=(*refused.effects, notice))


def answer_defect(entry: Entry, quote: str) -> Outcome:
    """What becomes of an entry that a defect of the hub met: nothing, and its sender is told what to quote."""
    error = InternalError(f"The hub failed on this frame and changed nothing; quote {quote} to its operator.")
    match entry:
        case Send():
            return Outcome(
                effects=(Answer(entry.origin.session_id, error_bytes(error, {"message_id": entry.frame.message_id})),)
            )
        case Record():
            return Outcome(
                effects=(Answer(entry.origin.session_id, error_bytes(error, {"record_id": entry.frame.record_id})),)
            )
        case Operate():
            return Outcome(effects=(Answer(entry.origin.session_id, error_bytes(error, {"call_id": entry.call_id})),))
        case Join():
            return Outcome(effects=(Refuse(entry.session_id, 1011, error),))
        case _:
            return Outcome()
