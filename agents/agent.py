"""The definition of an agent: its id, instruction, model, tools, policy, middleware and handoffs.

`Agent` describes the agent of a runner, and also every agent that takes over from this agent or that this agent calls
as a tool (`agent_tools`). An `Agent` is plain data and holds no state of a run. `limit_run` applies the limits in a
message's metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from .options import MAX_COUNT
from .policy import AgentPolicy

if TYPE_CHECKING:
    from roundelay.network.messages import BaseMessage

import logging
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Literal

from roundelay.network.errors import ConfigError

from .history import HistoryFilter, append_user_text, filter_history
from .hook_chain import HookChain
from .isolation import check_plain
from .middleware import AgentView, Middleware
from .models.model import ChatMessage, ToolSpec
from .text import handoff_name
from .tools import FINISH, Tool, index_tools
from .values import ToolError, TurnState

_logger = logging.getLogger(__name__)

Returns = Literal["to_caller", "to_person", "never"]
"""Owner of a thread after the agent that took over has finished.

``to_caller``: the agent that handed over reads the outcome and continues. ``to_person``: the first agent answers the
person's next message. ``never``: the thread stays with the new agent.
"""


KEEPER = "agent"
"""Metadata key of an answer: the id of the agent that owns the thread from now on. The data of a tool result uses the
same key.
"""


@dataclass(frozen=True, slots=True)
class Agent(AgentView):
    """Definition of one agent. ``tools`` may contain plain functions. The first ``middleware`` is the outermost layer.
    Raises `ToolError` if two tools have the same name.
    """

    handoffs: Sequence[Handoff | Agent] = ()
    middleware: Sequence[Middleware] = ()
    chain: HookChain = field(init=False, repr=False, compare=False)
    _handoffs: dict[str, Handoff] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_kinds(self)
        # Copy the lists. If a caller changed its list later, only some parts of the loop would see the change.
        for name in ("tools", "handoffs", "middleware"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        handoffs = [handoff if isinstance(handoff, Handoff) else Handoff(handoff) for handoff in self.handoffs]
        by_name = {handoff.name: handoff for handoff in handoffs}
        tools = index_tools(self.tools)
        taken = {*tools, FINISH}
        twice = sorted(
            {handoff.name for handoff in handoffs if handoff.name in taken or by_name[handoff.name] is not handoff}
        )
        if twice:
            raise ToolError(
                f"Agent {self.id} has two tools, or handoffs, named {', '.join(twice)}: give the tool another name "
                "with @tool(name=...), and hand over to one agent of an id."
            )
        object.__setattr__(self, "_handoffs", by_name)
        object.__setattr__(self, "chain", HookChain(self.policy, self.middleware))
        self._set_tools(self._collect_tools() if self.chain.brings_tools else tools)

    def refresh(self, state: TurnState | None = None) -> Agent:
        """Return the agent with the tools that its middleware adds for the next turn, or the same object if nothing
        changed. Called once before each turn.
        """
        if not self.chain.brings_tools:
            return self
        tools = self._collect_tools(state)
        # Compare identities instead of values. Two different tools may contain equal-looking functions, and middleware
        # returns the same objects while nothing changes.
        if [*map(id, tools.values())] == [*map(id, self._tools.values())]:
            return self
        # Use a copy: a running turn must keep the tools that its model was offered.
        fresh = copy(self)
        fresh._set_tools(tools)
        return fresh

    def _set_tools(self, tools: dict[str, Tool]) -> None:
        object.__setattr__(self, "_tools", tools)
        specs = (*(tool.spec for tool in tools.values()), *(handoff.spec for handoff in self._handoffs.values()))
        object.__setattr__(self, "specs", specs)

    def _collect_tools(self, state: TurnState | None = None) -> dict[str, Tool]:
        """Return the agent's own tools, followed by the tools that its middleware adds."""
        tools = index_tools(self.tools)
        taken = {*tools, *self._handoffs, FINISH}
        for brought in self.chain.list_tools(state or TurnState(self.id, 0, self.policy.max_turns)):
            if tools.get(brought.name) is brought:
                continue
            if brought.name in taken:
                _logger.warning("tool left out: its name is taken", extra={"agent_id": self.id, "tool": brought.name})
                continue
            taken.add(brought.name)
            tools[brought.name] = brought
        return tools

    def find_handoff(self, name: str) -> Handoff | None:
        """Return the handoff whose tool has this name."""
        return self._handoffs.get(name)

    @property
    def all_handoffs(self) -> tuple[Handoff, ...]:
        """All handoffs of this agent. An agent that was listed without a `Handoff` gets a handoff with default
        settings.
        """
        return tuple(self._handoffs.values())


@dataclass(frozen=True, slots=True)
class Handoff:
    """The tool ``hand_over_to_ID``: ``agent`` takes over the conversation with its own instruction and tools.

    ``history`` selects the earlier turns that ``agent`` sees in addition to the conversation. By default, ``agent``
    does not see tool calls and their results.
    """

    agent: Agent
    history: HistoryFilter = "texts"
    returns: Returns = "to_person"

    @property
    def name(self) -> str:
        return handoff_name(self.agent.id)

    def take_over(self, caller: str, history: Sequence[ChatMessage], note: str) -> list[ChatMessage]:
        """Return the history with which the new agent continues. ``caller`` is the id of the agent that handed over."""
        # Always keep the system message and the prompt. The filter selects only turns.
        kept = [*history[:2], *filter_history(history[2:], self.history)]
        append_user_text(kept, f"{caller} handed this conversation over to you{f': {note}' if note else '.'}")
        return kept

    @property
    def spec(self) -> ToolSpec:
        about = f" {self.agent.description}" if self.agent.description else ""
        note = {"type": "string", "description": "What the other agent must know in addition to the conversation"}
        properties = {"note": note}
        schema = {"type": "object", "properties": properties, "required": ["note"], "additionalProperties": False}
        return ToolSpec(
            self.name, f"Hand the conversation over to {self.agent.id}, who continues with it.{about}", schema
        )


def check_list(agent_id: str, name: str, value: object) -> None:
    """Raise `TypeError` if an argument of an agent is not a list."""
    if not isinstance(value, Collection) or isinstance(value, str):
        raise TypeError(f"Agent {agent_id}: {name} is {_describe(value)} and must be a list.")


def check_needs(agent_id: str, middleware: Sequence[Middleware]) -> None:
    """Raise `ConfigError` if the middleware of an agent requires other middleware that the agent does not have."""
    for layer in middleware:
        for kind in layer.needs:
            if not any(isinstance(it, kind) for it in middleware):
                names = f"{type(layer).__name__} needs {kind.__name__}"
                raise ConfigError(f"agent {agent_id}: {names}. Add {kind.__name__} to the agent's middleware")


def _check_kinds(agent: Agent) -> None:
    """Reject invalid settings now: otherwise they would be ignored, or fail only when a reaction uses them. Raises
    `TypeError` for a wrong type, and `ConfigError` if middleware requires something that is missing.
    """
    where = f"Agent {agent.id}"
    for name, kinds in (("tools", ()), ("handoffs", (Handoff, Agent)), ("middleware", (Middleware,))):
        items = getattr(agent, name)
        check_list(agent.id, name, items)
        for place, item in enumerate(items):
            if kinds and not isinstance(item, kinds):
                wanted = " or ".join(kind.__name__ for kind in kinds)
                raise TypeError(f"{where}: {name}.{place} is {_describe(item)} and must be a {wanted}.")
    check_needs(agent.id, agent.middleware)
    for layer in agent.middleware:
        if layer.min_turns > agent.policy.max_turns:
            text = f"{type(layer).__name__} needs {layer.min_turns} turns, and max_turns is {agent.policy.max_turns}"
            raise ConfigError(f"agent {agent.id}: {text}: the last turn has no tools; allow more, or take it out")
    if isinstance(agent.model, type) or not callable(getattr(agent.model, "complete", None)):
        raise TypeError(
            f"{where}: its model is {_describe(agent.model)} and must be a Model, such as OpenAIModel(...)."
        )
    if not isinstance(agent.instruction, str) and not callable(agent.instruction):
        raise TypeError(f"{where}: its instruction is {_describe(agent.instruction)} and must be a text or a function.")
    check_plain(f"{where}: its instruction", agent.instruction)
    for handoff in agent.handoffs:
        if isinstance(handoff, Handoff):
            check_plain(f"{where}: the history of a handoff", handoff.history)
    if not isinstance(agent.policy, AgentPolicy):
        raise TypeError(f"{where}: its policy is {_describe(agent.policy)} and must be an AgentPolicy.")


def _describe(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"of the type {type(value).__name__}"


def list_agents(start: Agent) -> list[Agent]:
    """Return ``start`` and all agents that handoffs can reach from it."""
    seen: list[Agent] = [start]
    # The loop appends to the list that it iterates over. Each agent is appended only once, so handoffs in a circle end.
    for agent in seen:
        targets = (handoff.agent for handoff in agent.all_handoffs)
        seen += [target for target in targets if all(target is not known for known in seen)]
    return seen


def find_agent(start: Agent, agent_id: str) -> Agent | None:
    """Return the agent with this id if handoffs can reach it from ``start``, else None."""
    return next((agent for agent in list_agents(start) if agent.id == agent_id), None)


LIMITS = "limits"


def limit_run(agent: Agent, message: BaseMessage) -> Agent:
    """Return the agent with the limits that a message's metadata sets: ``{"limits": {"max_turns": 4, "max_tool_calls":
    2}}``. The limits also apply to the agents that can take over from this agent.

    A message can only lower the limits that the agent's author set; higher values are ignored. Agents that are called
    as tools have their own limits (`agent_tools.agent_tool`). This function is pure: a resumed reaction gets the same
    limits from the same message.
    """
    limits = (message.metadata or {}).get(LIMITS)
    if not isinstance(limits, Mapping):
        return agent
    turns, calls = _read_limit(limits, "max_turns"), _read_limit(limits, "max_tool_calls")
    return agent if turns is None and calls is None else _limit(agent, turns, calls)


def _limit(agent: Agent, turns: int | None, calls: int | None) -> Agent:
    policy = agent.policy
    lowered: AgentPolicy = replace(
        policy,
        # Never go below the minimum that middleware needs. Otherwise a stranger's message could disable a reviewer.
        max_turns=max(
            min(policy.max_turns, turns or policy.max_turns), *(layer.min_turns for layer in agent.middleware), 1
        ),
        max_tool_calls=min((it for it in (policy.max_tool_calls, calls) if it is not None), default=None),
    )
    limited = tuple(replace(handoff, agent=_limit(handoff.agent, turns, calls)) for handoff in agent.all_handoffs)
    return replace(agent, policy=lowered, handoffs=limited)


def _read_limit(limits: Mapping[str, object], name: str) -> int | None:
    match limits.get(name):
        # In Python, JSON's true is an int and would count as 1.
        case int(value) if value >= 1 and value is not True:
            return min(value, MAX_COUNT)
        case _:
            return None
