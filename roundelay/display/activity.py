"""Describe the activity of agents from the result of ``network.list_agents``, for all screens and commands. This module
performs no IO.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from roundelay.network.units import format_elapsed

Agent = Mapping[str, Any]
MAX_NAMED = 5


def describe_activity(agent: Agent) -> str:
    """Return a participant's activity, such as ``works on #12``, ``waits for ann`` or ``idle``.

    For people, services and agents of an older hub, return whether the participant is online.
    """
    activity = agent.get("activity")
    work: Sequence[Agent] = agent.get("work", ())
    if activity is None:
        return str(agent["state"])
    if shows_fault(agent):
        return str(agent["fault"]["text"])
    if activity == "gone":
        count = agent.get("open_reactions", 0)
        return f"gone, with {count} open reaction{'s' if count != 1 else ''}" if count else "gone"
    if activity in ("idle", "stopped"):
        return str(activity)
    # The hub chooses the most important activity. Only reactions with that activity explain it.
    return describe_work([it for it in work if it["activity"] == activity] or work)


def shows_fault(agent: Agent) -> bool:
    """Return whether to show an agent's fault instead of its activity: the agent is idle or disconnected and has a
    fault.
    """
    is_silent = agent.get("activity") == "idle" or (agent.get("activity") == "gone" and not agent.get("open_reactions"))
    return is_silent and "fault" in agent


def describe_agent(agent: Agent) -> str:
    """Describe the activity of an agent together with its id: ``bob waits for ann``, ``bob is gone``."""
    is_still = agent.get("activity") in ("idle", "gone", "stopped", None)
    verb = "is " if is_still and not shows_fault(agent) else ""
    return f"{agent['agent_id']} {verb}{describe_activity(agent)}"


def describe_work(work: Sequence[Agent]) -> str:
    """Describe the reactions of one agent that have the same state."""
    triggers = _name(f"#{it['trigger']}" for it in work)
    match work[0]["activity"]:
        case "works":
            return f"works on {triggers}"
        case "waits":
            return f"waits for {_name_awaited(work) or f'others, on {triggers}'}"
        case "queued":
            return f"has not started on {triggers}"
        case "held":
            return f"is silent on {triggers}: a person has taken over"
        case "stopping":
            return f"was asked to stop {triggers}"
        case _:
            return f"was interrupted on {triggers}"


def list_work(agents: Iterable[Agent], now_ms: int) -> list[tuple[str, str, str, str]]:
    """Return rows of (agent, activity, thread, duration): one for each reaction, and one for each agent without
    reactions."""
    rows = []
    for agent in agents:
        if "activity" not in agent:
            continue
        work = agent.get("work", ())
        if not work or agent["activity"] == "stopped":
            rows.append((str(agent["agent_id"]), describe_activity(agent), "", ""))
        for it in work:
            since = format_elapsed(now_ms - it["at"], min_count=2) if "at" in it else ""
            rows.append((str(agent["agent_id"]), describe_work([it]), str(it["thread_id"]), since))
    return rows


def summarize_agents(agents: Iterable[Agent]) -> str:
    """Summarize the activity of all agents on one line, with the number of idle agents. The line is empty without
    agents."""
    told, idle = [], 0
    for agent in agents:
        if agent.get("activity") in ("idle", None) and not shows_fault(agent):
            idle += "activity" in agent
        else:
            told.append(describe_agent(agent))
    shown = [*told[:MAX_NAMED], *([f"{len(told) - MAX_NAMED} more are not idle"] if len(told) > MAX_NAMED else [])]
    return "; ".join([*shown, *([f"{idle} idle"] if idle else [])])


def _name_awaited(work: Sequence[Agent]) -> str:
    names = dict.fromkeys(name for it in work for name in it.get("waits_for", ()))
    requests = dict.fromkeys(seq for it in work for seq in it.get("decisions", ()))
    decisions = [f"a person's decision on {_name(f'#{seq}' for seq in requests)}"] if requests else []
    return " and ".join([*([_name(names)] if names else []), *decisions])


def _name(names: Iterable[object]) -> str:
    listed = [str(it) for it in names]
    return ", ".join(listed[:MAX_NAMED]) + (f" and {len(listed) - MAX_NAMED} more" if len(listed) > MAX_NAMED else "")
