"""Limits that a message carries for the reaction to it: ``metadata: {"limits": {"max_turns": 4, "max_tool_calls":
2}}``.

Asked by `simple` before a reaction begins, and again when it is resumed, with the same message. A message may only
lower what the agent's author allows: it cannot buy its sender more. Agents that are called as tools have their own
limits (`compose.agent_tool`). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from roundelay.agents.agent import Agent
from roundelay.agents.policy import MAX_COUNT, AgentPolicy

if TYPE_CHECKING:
    from roundelay.network.messages import BaseMessage

LIMITS = "limits"


def limit_run(agent: Agent, message: BaseMessage) -> Agent:
    """Give the agent, and those that it may hand over to, within the limits that the message carries; what is no limit
    is passed over."""
    given = (message.metadata or {}).get(LIMITS)
    if not isinstance(given, Mapping):
        return agent
    turns, calls = _read(given, "max_turns"), _read(given, "max_tool_calls")
    return agent if turns is None and calls is None else _limit(agent, turns, calls)


def _limit(agent: Agent, turns: int | None, calls: int | None) -> Agent:
    policy = agent.policy
    lowered: AgentPolicy = replace(
        policy,
        max_turns=min(policy.max_turns, turns or policy.max_turns),
        max_tool_calls=min((it for it in (policy.max_tool_calls, calls) if it is not None), default=None),
    )
    limited = tuple(replace(it, agent=_limit(it.agent, turns, calls)) for it in agent.all_handoffs)
    return replace(agent, policy=lowered, handoffs=limited)


def _read(limits: Mapping[str, object], name: str) -> int | None:
    match limits.get(name):
        case int(value) if value >= 1 and value is not True:
            return min(value, MAX_COUNT)
        case _:
            return None
