"""The activity of agents, derived from their sessions, their open reactions, and the waits in their records.

`list_agents` shows this activity to people and operators, but only for reactions to messages that they may read. Agents
do not see activity, because their answers could reveal the work of other agents.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from typing import Any, Literal, TypeAlias

from msgspec import UNSET

from roundelay.network.core.call_progress import innermost_calls, is_at_work
from roundelay.network.core.faults import describe_fault as describe_fault_text
from roundelay.network.core.faults import describe_remedy
from roundelay.network.core.state import State
from roundelay.network.core.tables import AgentFault, OpenReaction, Participant
from roundelay.network.core.takeovers import is_blocked_by_takeover, is_taken_over
from roundelay.network.core.uncaused_answers import has_person_written

from .reading import Reading, reads

Activity: TypeAlias = Literal["works", "waits", "queued", "held", "stopping", "interrupted"]
"""States of a reaction. ``works``: a model or a tool is running. ``waits``: the reaction waits for a participant.
``queued``: the reaction has not continued yet after a restart or a takeover. ``held``: its thread is taken over.
``stopping``: a person has stopped it. ``interrupted``: its agent is not connected."""
ORDER: tuple[Activity, ...] = ("works", "stopping", "waits", "queued", "held")
"""States of a reaction, highest priority first. An agent with several reactions is shown with the first of these states
that any of its reactions has."""
MAX_EXAMINED = 1000
"""Maximum number of open reactions that are examined per agent, oldest first. Without this limit, an agent with many
open reactions would slow down every list."""
MAX_SHOWN = 16
"""Maximum number of reactions that are listed per agent, oldest first."""


def may_see_activity(reading: Reading) -> bool:
    """Return whether the caller may see what agents do."""
    return reading.origin.kind == "human" or reading.origin.is_operator


def describe_activity(reading: Reading, participant: Participant, *, is_online: bool) -> dict[str, Any]:
    """Return the activity fields of one agent's entry in `list_agents`."""
    state = reading.hub.state
    # Limit the number of examined reactions. Otherwise an agent that opens reactions without end would slow down every
    # list.
    oldest = nsmallest(
        MAX_EXAMINED, state.reactions_of(participant.agent_id).values(), key=lambda reaction: reaction.seq
    )
    # Skip reactions to messages that the caller may not read. Otherwise the caller could learn that someone else writes
    # to the agent.
    opened = [reaction for reaction in oldest if reads(reading, reaction.trigger_head)]
    work = [(reaction, _find_activity(state, participant, reaction, is_online=is_online)) for reaction in opened]
    # An agent that was stopped because its answers named no cause stays stopped until a person writes to it.
    answers = state.bucket(participant.agent_id).answer_count
    if not is_online:
        activity = "gone"
    elif answers.is_reported and not has_person_written(state, participant.agent_id, answers.since):
        activity = "stopped"
    else:
        # Show an agent as working if it works on one reaction and waits in another. If it were shown as waiting, it
        # would look stuck.
        activity = next((reaction for reaction in ORDER if reaction in {at for _, at in work}), "idle")
    entry: dict[str, Any] = {"activity": activity}
    if (fault := describe_fault(reading, participant)) is not None:
        entry["fault"] = fault
    if work:
        entry |= {"open_reactions": len(work), "work": [_describe(reaction, at) for reaction, at in work[:MAX_SHOWN]]}
    return entry


def describe_fault(reading: Reading, participant: Participant) -> dict[str, Any] | None:
    """Return the fault that prevents an agent from working, or None. Only operators get the reason and the remedy."""
    state, agent_id = reading.hub.state, participant.agent_id
    fault = participant.fault
    if fault is UNSET:
        # There is no fault if the agent is connected again, or if its session ended without open work.
        if not participant.is_lost or reading.hub.is_online(agent_id):
            return None
        opened = state.reactions_of(agent_id).values()
        if not opened:
            return None
        # No fault was recorded, so assume that the failure occurred when the newest open reaction began.
        at = max(reaction.at for reaction in opened)
        fault = AgentFault("ended", at, at)
    entry: dict[str, Any] = {"cause": fault.cause, "text": describe_fault_text(fault), "count": fault.count}
    entry |= {"since": fault.since, "last_at": fault.at}
    entry |= {"failure": fault.failure} if fault.failure else {}
    if reading.origin.is_operator:
        entry |= {"reason": fault.reason} if fault.reason else {}
        entry |= {"seq": fault.seq} if fault.seq else {}
        entry |= {"reaction": fault.reaction} if fault.reaction else {}
        entry["to_do"] = describe_remedy(agent_id, fault)
    return entry


def _find_activity(state: State, participant: Participant, opened: OpenReaction, *, is_online: bool) -> Activity:
    if is_blocked_by_takeover(state, opened):
        # After the takeover has ended, the reaction is queued until its agent continues it.
        return "held" if is_taken_over(state, opened.trigger_head) else "queued"
    if not is_online:
        return "interrupted"
    if opened.is_cancelled:
        return "stopping"
    if is_at_work(opened, participant.life):
        return "works"
    # Count the wait only if the agent's current process started it. A reaction of an earlier process is queued, because
    # the current process has not continued it.
    return "waits" if opened.life == participant.life else "queued"


def _describe(opened: OpenReaction, activity: Activity) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "reaction": opened.reaction,
        "thread_id": opened.trigger_head.thread_id,
        "trigger": opened.trigger,
        "seq": opened.seq,
        "activity": activity,
        **({"at": opened.at} if opened.at else {}),
    }
    # Name the awaited participants only while the call waits for them.
    if activity == "waits":
        waits = [opened.awaits[call] for call in innermost_calls(opened) if call in opened.awaits]
        entry |= _list("waits_for", (name for wait in waits for name in wait.to))
        entry |= _list("decisions", (wait.request for wait in waits if wait.request is not None))
    return entry


def _list(name: str, values: Iterable[object]) -> dict[str, list[object]]:
    unique = list(dict.fromkeys(values))
    return {name: unique} if unique else {}
