"""Faults of agents: problems that prevent an agent from working.

A fault has one of these causes: a model that does not reply, an error in the agent's own code, deliveries that became
dead letters, or a process that ended. Each agent has at most one `AgentFault`. It is stored with the participant and
counts repeats. The fault ends when the agent finishes a reaction, or when the node reports that the process runs again.
Operators see faults in their inbox and in every list of agents. Pure.
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
"""Kinds of failures that concern only one conversation and therefore do not count as a fault of the agent."""

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
    """Return a description of the problem. The text does not contain the provider's own error message, because only
    operators may see it."""
    times = f" ({fault.count} times)" if fault.count > 1 else ""
    return f"cannot answer: {_WHAT.get(fault.failure or fault.cause, 'its model fails')}{times}"


def describe_remedy(agent_id: str, fault: AgentFault) -> str:
    """Return a text that tells an operator how to fix a fault."""
    return _TO_DO.get(fault.failure or fault.cause, _TO_DO["server"]).format(agent_id=agent_id)


class FinishedBody(Struct):
    """Body of a ``finished`` record."""

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
    """Record one failure of an agent. If the last failure was of the same kind, the fault keeps its start time and its
    count increases."""
    participant = change.state.participant(agent_id)
    if participant is None or participant.kind != "agent":
        return
    failure = failure if failure in _WHAT else ""  # agents can send any text here, of any length
    previous = participant.fault
    is_same = previous is not UNSET and (previous.cause, previous.failure) == (cause, failure)
    if previous is not UNSET and reaction and previous.reaction == reaction:
        return  # the end of a reaction repeats the failure of its model call: do not count it twice
    since, count = (previous.since, previous.count + 1) if is_same and previous is not UNSET else (change.stamp, 1)
    fault = AgentFault(cause, since, change.stamp, count, failure, reason[:MAX_REASON_CHARS], seq, reaction)
    change.set_value("participant", agent_id, msgspec.structs.replace(participant, fault=fault))


def record_finished(change: ChangeSet, agent_id: str, seq: int, reaction: str, body: FinishedBody) -> None:
    """Record or clear an agent's fault, depending on how a reaction ended."""
    # A failure of one conversation is not a fault of the agent. The agent can still answer everyone else.
    if body.status == "failed" and body.failure not in CONVERSATION_FAILURES:
        cause: FaultCause = "model" if body.failure not in ("", "error") else "error"
        failure = body.failure if cause == "model" else ""
        record_failure(change, agent_id, cause, body.reason, failure=failure, seq=seq, reaction=reaction)
        return
    participant = change.state.participant(agent_id)
    if participant is None or participant.fault is UNSET or body.status != "finished":
        return
    fault = participant.fault
    # A message may be read in another reaction. Its own reaction then ends without a model call, so this end does not
    # show whether the model works.
    if fault.reaction != reaction and (body.turns or fault.cause != "model"):
        clear_fault(change, participant)


def clear_fault(change: ChangeSet, participant: Participant) -> None:
    """Clear the fault of an agent that works again."""
    if participant.fault is not UNSET:
        change.set_value("participant", participant.agent_id, msgspec.structs.replace(participant, fault=UNSET))


def apply_ended(rules: Rules, state: State, entry: ProcessEnded) -> Outcome:
    """Apply the node's report about the process of one of its agents. An agent that has never joined is registered, so
    that lists of agents include it."""
    change = ChangeSet(rules, state, Facts(), Origin("", entry.agent_id, "agent"))
    participant = state.participant(entry.agent_id)
    if participant is not None and (participant.kind != "agent" or participant.removed_seq is not None):
        return NOTHING
    # A restart clears only a fault of the process. Other faults remain: a wrong key, for example, is still wrong.
    if entry.reason is None:
        if participant is not None and participant.fault is not UNSET and participant.fault.cause == "ended":
            clear_fault(change, participant)
        return change.outcome()
    if participant is None:
        row = change.write_row("registered", data=encode({"agent_id": entry.agent_id, "kind": "agent"}))
        change.set_value("participant", entry.agent_id, Participant(entry.agent_id, "agent", row.seq))
    # Use the newest seq, so that the fault sorts first in the inbox.
    record_failure(change, entry.agent_id, "ended", entry.reason, seq=change.state.head)
    return change.outcome()
