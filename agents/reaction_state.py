"""State of the loop: where a run comes from, which agent has the conversation, and the current turn.

`reaction` owns and changes these values; nobody else writes them. Plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .agent import Agent
from .middleware import Guard
from .models.model import ModelReply
from .planner import Plan
from .policy import AgentPolicy
from .values import Replayed, Review, Trigger

if TYPE_CHECKING:
    from roundelay.network.messages import BaseMessage


@dataclass(frozen=True, slots=True)
class ReactionSetup:
    """Origin of a run, and how its prompt is written. The defaults are those of a run inside a tool call."""

    threads: Collection[str] = ()
    """Ids of the threads in which the answer would stand."""

    frame: Callable[[str], str] = str.strip
    """Returns the system message for an agent's instruction."""

    shorten: Callable[[], str] | None = None
    """Returns a shorter prompt for a model that finds the first one too long."""

    keeper: str | None = None
    """Id of the agent that the thread already stays with."""

    earlier: Sequence[Agent] = ()
    """Agents that had the conversation before."""

    path: str = ""
    """Path of the run in its reaction; empty for the reaction's own run."""

    sent_at: int = 0
    """Time of the incoming message, in milliseconds since the Unix epoch."""

    trigger: Trigger | None = None
    conversation: Sequence[BaseMessage] = ()
    """Messages that the prompt shows, the incoming one last."""

    is_explained: bool = False
    """Whether the prompt's own template says how to answer."""


@dataclass(frozen=True, slots=True)
class Control:
    """The agent that has the conversation, and the agents that had it before, in their order."""

    agent: Agent
    earlier: tuple[Agent, ...] = ()
    first_turn: int = 1
    """Turn in which the agent got the conversation."""

    @property
    def guards(self) -> list[Guard]:
        """Reviews of the earlier agents, which still apply; of the last one first."""
        return [guard for agent in self.earlier for guard in agent.chain.guards]

    @property
    def policies(self) -> list[AgentPolicy]:
        """Policies of the agent and of the earlier ones, the last one first."""
        return [self.agent.policy, *(agent.policy for agent in reversed(self.earlier))]

    @property
    def withholds(self) -> bool:
        """Whether a reviewer has to see the model's text before people do."""
        return any(agent.chain.withholds for agent in (self.agent, *self.earlier))


@dataclass(slots=True)
class TurnInProgress:
    """The current turn, as far as it has come."""

    number: int = 0
    is_last: bool = False
    forced_tool: str | None = None
    """Tool that the model must call, as hooks of the turn before demand."""

    follows_withheld: bool = False
    """Whether the provider withheld the reply of the turn before."""

    replay: Replayed | None = None
    """Records of the turn, if it ran before a restart."""

    reply: ModelReply = field(default_factory=lambda: ModelReply(text=None))
    """The reply, with unique call ids."""

    is_withheld: bool = False
    plan: Plan = field(default_factory=Plan)
    next_tool: str | None = None
    proposed: Review | None = None

    @property
    def goes_on(self) -> bool:
        """Whether the records say that the loop went on to another turn, and not because of a review."""
        return self.replay is not None and self.replay.goes_on and not self.replay.is_corrected

    @property
    def is_text_altered(self) -> bool:
        """Whether the record does not hold the text as the model wrote it."""
        return self.replay is not None and self.replay.altered.text
