"""What an agent does, as the hub knows it: by who has a session, and by the open reactions and what their records say
that they wait for. Told to people and operators (`list_agents`), of the reactions to messages that they may read.

An agent is told nothing of it: what it knows of others' work could leave by its answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from typing import Any, Literal, TypeAlias

from msgspec import UNSET

from roundelay.network.core.call_progress import innermost_calls, is_at_work
from roundelay.network.core.faults import describe_fault as describe_what
from roundelay.network.core.faults import describe_remedy
from roundelay.network.core.state import State
from roundelay.network.core.tables import AgentFault, OpenReaction, Participant
from roundelay.network.core.takeovers import is_blocked_by_takeover, is_taken_over
from roundelay.network.core.uncaused_answers import has_person_written

from .reading import Reading, reads

Activity: TypeAlias = Literal["works", "waits", "queued", "held", "stopping", "interrupted"]
"""Of a reaction: a model or a tool of it runs; it waits for somebody; its turn has not come yet in a process that was
started again, or in a thread that was given back; a person holds its thread; it was asked to stop; its agent is
gone."""
ORDER: tuple[Activity, ...] = ("works", "stopping", "waits", "queued", "held")
"""Which of its reactions says what an agent does."""
MAX_LOOKED_AT = 1000
"""Open reactions of one agent, the oldest: it may have begun any number, and nobody else waits while they are told."""
MAX_SHOWN = 16
"""Reactions of one agent that are told one by one, the oldest."""


def tells_activity(reading: Reading) -> bool:
    """Whether the caller is told what agents do."""
    return reading.origin.kind == "human" or reading.origin.is_operator


def describe_activity(reading: Reading, participant: Participant, *, is_online: bool) -> dict[str, Any]:
    """What is told of one agent beside its id."""
    state = reading.hub.state
    oldest = nsmallest(MAX_LOOKED_AT, state.reactions_of(participant.agent_id).values(), key=lambda it: it.seq)
    opened = [it for it in oldest if reads(reading, it.trigger_head)]
    work = [(it, _find_activity(state, participant, it, is_online=is_online)) for it in opened]
    answers = state.bucket(participant.agent_id).answer_count
    if not is_online:
        activity = "gone"
    elif answers.is_reported and not has_person_written(state, participant.agent_id, answers.since):
        activity = "stopped"
    else:
        activity = next((it for it in ORDER if it in {at for _, at in work}), "idle")
    told: dict[str, Any] = {"activity": activity}
    if (fault := describe_fault(reading, participant)) is not None:
        told["fault"] = fault
    if work:
        told |= {"open_reactions": len(work), "work": [_describe(it, at) for it, at in work[:MAX_SHOWN]]}
    return told


def describe_fault(reading: Reading, participant: Participant) -> dict[str, Any] | None:
    """What keeps an agent from its work; None for nothing. The reason, and what to do, are for operators."""
    state, agent_id = reading.hub.state, participant.agent_id
    fault = participant.fault
    if fault is UNSET:
        if not participant.is_lost or reading.hub.is_online(agent_id):
            return None
        opened = state.reactions_of(agent_id).values()
        if not opened:
            return None
        at = max(it.at for it in opened)
        fault = AgentFault("ended", at, at)
    told: dict[str, Any] = {"cause": fault.cause, "text": describe_what(fault), "count": fault.count}
    told |= {"since": fault.since, "last_at": fault.at}
    told |= {"failure": fault.failure} if fault.failure else {}
    if reading.origin.is_operator:
        told |= {"reason": fault.reason} if fault.reason else {}
        told |= {"seq": fault.seq} if fault.seq else {}
        told |= {"reaction": fault.reaction} if fault.reaction else {}
        told["to_do"] = describe_remedy(agent_id, fault)
    return told


def _find_activity(state: State, participant: Participant, opened: OpenReaction, *, is_online: bool) -> Activity:
    if is_blocked_by_takeover(state, opened):
        return "held" if is_taken_over(state, opened.trigger_head) else "queued"
    if not is_online:
        return "interrupted"
    if opened.is_cancelled:
        return "stopping"
    if is_at_work(opened, participant.life):
        return "works"
    return "waits" if opened.life == participant.life else "queued"


def _describe(opened: OpenReaction, activity: Activity) -> dict[str, Any]:
    told: dict[str, Any] = {
        "reaction": opened.reaction,
        "thread_id": opened.trigger_head.thread_id,
        "trigger": opened.trigger,
        "seq": opened.seq,
        "activity": activity,
        **({"at": opened.at} if opened.at else {}),
    }
    if activity == "waits":
        awaited = [opened.awaits[it] for it in innermost_calls(opened) if it in opened.awaits]
        told |= _list("waits_for", (name for it in awaited for name in it.to))
        told |= _list("decisions", (it.request for it in awaited if it.request is not None))
    return told


def _list(name: str, values: Iterable[object]) -> dict[str, list[object]]:
    found = list(dict.fromkeys(values))
    return {name: found} if found else {}
