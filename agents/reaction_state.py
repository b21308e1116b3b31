"""State of the loop: the origin of a run, the agent that controls the conversation, and the current turn.

Only the module `reaction` changes the state. Plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .agent import Agent
from .middleware import Guard
from .models.model import ChatMessage, ModelReply
from .planner import Plan
from .policy import AgentPolicy, PromptForm
from .values import Replayed, Review, Trigger

if TYPE_CHECKING:
    from roundelay.network.messages import BaseMessage


@dataclass(frozen=True, slots=True)
class ReactionSetup:
    """Origin of a run, and the form of its prompt. The defaults suit the run of an agent that is called as a tool."""

    threads: Collection[str] = ()
    """Ids of the threads to which an answer would go."""

    frame: Callable[[str], str] = str.strip
    """Returns the system message for an agent's instruction."""

    shorten: Callable[[], str] | None = None
    """Returns a shorter prompt for a model that rejects the first prompt as too long."""

    keeper: str | None = None
    """Id of the agent that owns the thread after a permanent handoff, or None."""

    earlier: Sequence[Agent] = ()
    """Agents that controlled the conversation earlier, the most recent agent first."""

    path: str = ""
    """Path of the run in its reaction. Empty for the reaction's own run."""

    sent_at: int = 0
    """Time of the trigger, in milliseconds since the Unix epoch."""

    trigger: Trigger | None = None
    conversation: Sequence[BaseMessage] = ()
    """Messages that the prompt shows, the trigger last."""

    is_explained: bool = False
    """Whether the prompt's own template explains how to answer."""

    form: PromptForm = "full"
    """Form of the prompt. A lean prompt states the rules and the turn only where the model needs them."""

    chat: Sequence[ChatMessage] = ()
    """Earlier messages of the thread, if the prompt shows them as plain chat."""

    deferred: Collection[str] = frozenset()
    """Names of the tools that are offered only after a call of `load_tools` has loaded them."""


@dataclass(frozen=True, slots=True)
class Control:
    """The agent that controls the conversation, and the agents that controlled it earlier, most recent first."""

    agent: Agent
    earlier: tuple[Agent, ...] = ()
    first_turn: int = 1
    """Turn in which the agent took over the conversation."""

    @property
    def guards(self) -> list[Guard]:
        """Reviews of the earlier agents, which still apply. The reviews of the most recent agent come first."""
        return [guard for agent in self.earlier for guard in agent.chain.guards]

    @property
    def policies(self) -> list[AgentPolicy]:
        """Policies of the current agent and of the earlier agents, beginning with the current agent."""
        return [self.agent.policy, *(agent.policy for agent in reversed(self.earlier))]

    @property
    def withholds(self) -> bool:
        """Whether a reviewer must see the model's text before people do."""
        return any(agent.chain.withholds for agent in (self.agent, *self.earlier))


@dataclass(slots=True)
class TurnInProgress:
    """State of the current turn."""

    number: int = 0
    is_last: bool = False
    forced_tool: str | None = None
    """Tool that the model must call because hooks in the previous turn demanded it."""

    follows_withheld: bool = False
    """Whether the provider withheld the reply of the previous turn."""

    replay: Replayed | None = None
    """Records of the turn, if the turn ran before a restart."""

    reply: ModelReply = field(default_factory=lambda: ModelReply(text=None))
    """The model's reply, with unique call ids."""

    is_withheld: bool = False
    plan: Plan = field(default_factory=Plan)
    next_tool: str | None = None
    loaded: dict[str, None] = field(default_factory=dict)
    """Deferred tools that calls of this turn and of earlier turns have loaded, in order."""

    proposed: Review | None = None

    @property
    def goes_on(self) -> bool:
        """Whether the records show that the loop continued with another turn, for a reason other than a review."""
        return self.replay is not None and self.replay.goes_on and not self.replay.is_corrected

    @property
    def is_text_altered(self) -> bool:
        """Whether the recorded text differs from the model's text."""
        return self.replay is not None and self.replay.altered.text
