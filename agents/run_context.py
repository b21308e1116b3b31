"""State that the parts of one run share: the loop, its journal, and the listener for its events.

A run is a reaction, or an agent called as a tool inside a reaction. `driver` creates the context. `model_call`,
`review` and `tool_call` use the context. The context of an inner run refers to the run around it (``outer``), because
the reviewers, approvers and stream numbers of the outer run also apply to the inner run. The context itself makes no
decisions and awaits nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from pydantic import JsonValue

from .events import OnEvent
from .journal import Journal
from .middleware import Guard
from .models.model import Model, ModelReply, ModelRequest, ModelUse, Usage
from .policy import AgentPolicy
from .reaction import Reaction
from .recorded import Recorded
from .replies import Replies
from .tools import PlannedCall, ToolContext
from .values import ModelFailed, Reviewed, StopTrace, ToolResult

MakeContext = Callable[[str, int], ToolContext]
"""Creates the context of a tool call from the call's derived id and its turn."""


class Playback(Protocol):
    """Recorded outcomes that replace models, tools and reviewers during a replay. ``path`` distinguishes the runs of
    one reaction, as in the journal.

    Playback is not middleware, because it must also answer the models that middleware asks (`Around.complete`) and
    replace reviewers.
    """

    async def complete(self, model: Model, request: ModelRequest, path: str, *, is_own: bool) -> ModelReply:
        """Answer a request to ``model``. ``is_own`` is False for a request that middleware makes. Raises
        `ModelError`.
        """
        ...

    def settle(
        self, reaction: str, path: str, turn: int, outcome: ModelReply | ModelFailed
    ) -> ModelReply | ModelFailed:
        """Return the recorded outcome of a turn's request, even if models and middleware return something else now."""
        ...

    async def perform(self, reaction: str, path: str, turn: int, planned: PlannedCall) -> ToolResult | None:
        """Return the recorded result of a call, or None if the tool must run."""
        ...

    def review(self, reaction: str, path: str, turn: int, message: tuple[int, int] | None = None) -> Reviewed | None:
        """Return the recorded review of an answer or of a ``message``, which is identified by its call and its number
        in the call. Return None if the reviewers must be called.
        """
        ...

    def find_note(self, reaction: str, path: str, turn: int, name: str) -> JsonValue:
        """Return the value that middleware stored in a turn, or None."""
        ...

    def find_form(self, reaction: str) -> str | None:
        """Return the recorded form of a reaction's prompt, or None if the reaction is not recorded."""
        ...

    def find_stopped(self, reaction: str) -> StopTrace | None:
        """Return the trace of a reaction that a person stopped. Return None if there is no trace."""
        ...

    def find_standing(self, reaction: str) -> str:
        """Return the recorded text about owed and expected answers at the end of the reaction's prompt."""
        ...

    def reads_new_messages(self, reaction: str) -> bool:
        """Return whether the recorded reaction read new messages of its thread at this point."""
        ...


class RunContext:
    """One run: its loop and journal, its earlier records, and the listener for its events."""

    def __init__(
        self,
        reaction: Reaction,
        journal: Journal,
        make_context: MakeContext,
        *,
        replies: Replies | None = None,
        emit: OnEvent = lambda event: None,
        playback: Playback | None = None,
        outer: RunContext | None = None,
    ) -> None:
        self.reaction = reaction
        self.journal = journal
        self.make_context = make_context
        self.replies = replies
        self.emit = emit
        self.playback = playback
        self.outer = outer
        self.recorded = Recorded()
        """Records that the run wrote before a restart. Empty for a new run."""

        self.sent_counts: dict[str, int] = {}
        """Number of messages that tool calls sent, by address, for the limit ``max_messages_per_recipient``."""

        self.last_live_turn = 0
        """Last turn in which a step actually ran instead of being read from the records."""

        self.unrecorded_use: list[ModelUse] = []
        """Model usage that only the final record contains: the usage of middleware around turns and around the run, and
        of failed calls.
        """

        # Share these values with the outer run: a stop reports the usage of all interrupted calls, and screens order
        # the streamed pieces of all runs by one sequence of numbers.
        self.interrupted_use: list[ModelUse] = outer.interrupted_use if outer is not None else []
        self.stream_numbers: Iterator[int] = outer.stream_numbers if outer is not None else itertools.count(1)

    @property
    def id(self) -> str:
        """Id of the reaction."""
        return self.journal.reaction

    @property
    def path(self) -> str:
        """Path of the run in its reaction. Empty for the reaction's own run."""
        return self.journal.path

    def make_call_context(self, turn: int, call: int | str, suffix: str = "") -> ToolContext:
        """Create the context of a tool call. A ``suffix`` makes the ids of messages about the call differ from the ids
        of the call's own messages.
        """
        return self.make_context(self.journal.derive_id(turn, call) + suffix, turn)

    def is_text_withheld(self) -> bool:
        """Return whether reviewers of this run, or of an outer run, must see the model's text before people do."""
        return self.reaction.control.withholds or (self.outer is not None and self.outer.is_text_withheld())

    @property
    def reviews_messages(self) -> bool:
        """Whether reviewers see the messages that tools send to the requester."""
        return self.reaction.is_reviewed or (self.outer is not None and bool(self.list_guards()))

    def list_guards(self) -> list[Guard]:
        """Return the reviews that apply to messages in addition to those of the current agent: the reviews of
        earlier agents and of outer runs.
        """
        guards = self.reaction.control.guards
        if self.outer is None:
            return guards
        return [*guards, *self.outer.reaction.agent.chain.guards, *self.outer.list_guards()]

    def list_policies(self) -> list[AgentPolicy]:
        """Return the policies whose approvers apply: of the current agent, of earlier agents, and of outer runs."""
        return [*self.reaction.control.policies, *(self.outer.list_policies() if self.outer else ())]

    def list_causes(self, turn: int) -> tuple[int, ...]:
        """Return the seqs of the messages that led to a call: the trigger first, followed by messages read later."""
        trigger = self.make_call_context(turn, 0).trigger.seq
        read_later = self.reaction.read_meanwhile + (self.outer.list_causes(turn) if self.outer else ())
        return tuple(dict.fromkeys((trigger, *read_later)))

    def find_replayed_note(self, turn: int, name: str) -> JsonValue:
        """Return a note of the replayed run, or None outside of a replay."""
        return self.playback.find_note(self.id, self.path, turn, name) if self.playback is not None else None


def add_usage(used: Iterable[ModelUse], total: Usage) -> Usage:
    """Return ``total`` plus the usage of these requests."""
    return sum((use.usage for use in used), total)
