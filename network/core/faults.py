"""What keeps agents from their work: a model that gives no reply, an error of the agent's own code, deliveries that
were given up, a process that ended. One `AgentFault` of each agent is kept with its participant, and counts repeats. Pure.

A fault ends when the agent finishes a reaction again, or when the node says that the process is up. Operators read it
in their inbox and on every screen that shows what agents do.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import UNSET, Struct

from roundelay.network.frames import encode

from .change import ChangeSet
from .entries import NOTHING, Origin, Outcome, ProcessEnded
from .sending import Rules
from .state import State
from .tables import AgentFault, Facts, FaultCause, Participant

MAX_REASON_CHARS = 500
CONVERSATION_FAILURES = frozenset({"answer_refused", "budget", "content_filter", "context_too_long"})
"""Failures that say nothing about the next message: no fault of the agent."""

_TO_DO: Mapping[str, str] = {
    "unauthorized": "Check the model's key and its rights at the provider. Restart the node to read a new key from the environment.",
    "quota": "Add credit or raise the quota at the model's provider.",
    "rate_limited": "Lower the agent's load, or raise the rate limit at the model's provider.",
    "not_found": "Check the model's name and base_url in the agent's file, then reload the agent.",
    "misconfigured": "Correct the agent's file or its packages, then reload the agent.",
    "rejected": "Check what the agent's file sends to the model; `roundelay doctor` asks the model.",
    "unreachable": "Check the model's base_url and the network; `roundelay doctor` asks the model.",
    "timeout": "Check the model's server, or raise model_timeout_s in the agent's file.",
    "server": "Check the status page of the model's provider.",
    "broken_reply": "Check the model's server; `roundelay doctor` asks the model.",
    "error": "Read the agent's log, and correct the agent's code.",
    "dead_letter": "Read the agent's log, then deliver the messages again: roundelay dead-letters retry.",
    "ended": "Read the agent's log, then start it: roundelay agent reload {agent_id}",
}


_WHAT: Mapping[str, str] = {
    "unauthorized": "its model refuses the key",
    "quota": "the credit for its model is used up",
    "rate_limited": "its model has too much to do",
    "not_found": "its model does not exist",
    "misconfigured": "its model is not set up right",
    "rejected": "its model refuses the request",
    "unreachable": "its model cannot be reached",
    "timeout": "its model does not answer in time",
    "server": "its model fails",
    "broken_reply": "its model sends broken replies",
    "error": "its code raises an error",
    "dead_letter": "it fails at messages until they are given up",
    "ended": "its process has ended",
}


def describe_fault(fault: AgentFault) -> str:
    """What is wrong, without the words of a provider: those are for operators."""
    times = f" ({fault.count} times)" if fault.count > 1 else ""
    return f"cannot answer: {_WHAT.get(fault.failure or fault.cause, 'its model fails')}{times}"


def describe_remedy(agent_id: str, fault: AgentFault) -> str:
    """What an operator can do about a fault."""
    return _TO_DO.get(fault.failure or fault.cause, _TO_DO["server"]).format(agent_id=agent_id)


class FinishedBody(Struct):
    """Of a ``finished`` record."""

    status: str = ""
    reason: str = ""
    turns: int = 0
    failure: str = ""


def record_failure(
    change: ChangeSet,
    agent_id: str,
    cause: FaultCause,
    reason: str,
    *,
    failure: str = "",
    seq: int = 0,
    reaction: str = "",
) -> None:
    """Count one failure of an agent. A further one of the same kind keeps the beginning of the first."""
    participant = change.state.participant(agent_id)
    if participant is None or participant.kind != "agent":
        return
    failure = failure if failure in _WHAT else ""  # an agent may write anything there, of any length
    known = participant.fault
    is_same = known is not UNSET and (known.cause, known.failure) == (cause, failure)
    if known is not UNSET and reaction and known.reaction == reaction:
        return  # the end of a reaction repeats why its model gave no reply
    since, count = (known.since, known.count + 1) if is_same and known is not UNSET else (change.stamp, 1)
    fault = AgentFault(cause, since, change.stamp, count, failure, reason[:MAX_REASON_CHARS], seq, reaction)
    change.set_value("participant", agent_id, msgspec.structs.replace(participant, fault=fault))


def record_finished(change: ChangeSet, agent_id: str, seq: int, reaction: str, body: FinishedBody) -> None:
    """Keep or end an agent's fault by how a reaction ended."""
    if body.status == "failed" and body.failure not in CONVERSATION_FAILURES:
        cause: FaultCause = "model" if body.failure not in ("", "error") else "error"
        failure = body.failure if cause == "model" else ""
        record_failure(change, agent_id, cause, body.reason, failure=failure, seq=seq, reaction=reaction)
        return
    participant = change.state.participant(agent_id)
    if participant is None or participant.fault is UNSET or body.status != "finished":
        return
    fault = participant.fault
    # A message that was read in another reaction ends without a turn of its own: that says nothing about the model.
    if fault.reaction != reaction and (body.turns or fault.cause != "model"):
        clear_fault(change, participant)


def clear_fault(change: ChangeSet, participant: Participant) -> None:
    """The agent works again."""
    if participant.fault is not UNSET:
        change.set_value("participant", participant.agent_id, msgspec.structs.replace(participant, fault=UNSET))


def apply_ended(rules: Rules, state: State, entry: ProcessEnded) -> Outcome:
    """What the node says of the process of one of its agents. One that never joined is registered, so that it is
    listed."""
    change = ChangeSet(rules, state, Facts(), Origin("", entry.agent_id, "agent"))
    participant = state.participant(entry.agent_id)
    if participant is not None and (participant.kind != "agent" or participant.removed_seq is not None):
        return NOTHING
    if entry.reason is None:
        if participant is not None and participant.fault is not UNSET and participant.fault.cause == "ended":
            clear_fault(change, participant)
        return change.outcome()
    if participant is None:
        row = change.write_row("registered", data=encode({"agent_id": entry.agent_id, "kind": "agent"}))
        change.set_value("participant", entry.agent_id, Participant(entry.agent_id, "agent", row.seq))
    record_failure(change, entry.agent_id, "ended", entry.reason, seq=change.state.head)  # newest in the inbox
    return change.outcome()
