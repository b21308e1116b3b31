"""Middleware: one concern around the loop, in a class of its own.

Stands between `agent`, which lists it, and those that ask it through `chain`: `reaction` (the pure hooks), and
`driver`, `model_calls` and `tool_calls` (the ones around a reaction, a turn, a model call, a tool call, and the review
of an answer). The pure hooks are asked again when a reaction is resumed, so they must depend on their arguments and
`state.values` alone; what the others give is recorded, so they are asked only for what is not recorded yet.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from pydantic import JsonValue

from .events import Progress
from .models.model import ChatMessage, Model, ModelReply, ModelRequest, ToolCall, Usage
from .steps import CallModel, Finish, PlannedCall, PromptPart, TurnState
from .text import replace_surrogates
from .tools import Tool, ToolContext, ToolResult

if TYPE_CHECKING:
    from roundelay.network.messages import BaseMessage, MessageThread

    from .agent import Agent
    from .events import OnEvent

NoCallsReason = Literal["no_calls", "limit_reached", "tools_disabled"]
"""Why no tools are called: the model called none; a limit makes the next turn the last one; a call was to a disabled
tool."""


FAILED_CHECKS = "failed_checks"
"""In the metadata of an answer that goes out although reviewers found something wrong: their names."""


@dataclass(frozen=True, slots=True)
class End:
    """What a hook gives to end the reaction, with this answer; None for none."""

    answer: str | None
    reason: str = "ended by a hook"


@dataclass(frozen=True, slots=True)
class AfterTool:
    """What becomes of a result: the ``content`` that the model reads instead, ``messages`` in place of the history
    before this turn, the tool that the next turn must call."""

    content: str | None = None
    messages: Sequence[ChatMessage] | None = None
    next_tool: str | None = None


@dataclass(frozen=True, slots=True)
class Correction:
    """What a reviewer gives for an answer that must not go out: what the model is told. ``name`` says which check it
    was; ``notes`` are what else the record of the review keeps."""

    instruction: str
    name: str = ""
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as it goes out, when it is more than a text: ``metadata`` of its message, and ``notes`` that the record
    of the review keeps."""

    text: str
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    notes: Sequence[str] = ()


class Keep(Protocol):
    """Puts a value into ``state.values`` and into the ledger, under a name of this turn's: it is there again from this
    turn on when the reaction is resumed, so that what it took to make it is not done twice. ``of`` are the tools whose
    results it holds, for a policy that does not keep those."""

    async def __call__(self, name: str, value: JsonValue, *, of: Collection[str] = ()) -> None: ...


@dataclass(frozen=True, slots=True)
class Around:
    """What middleware may know of the run that it is around.

    ``complete`` asks a model, with the agent's retries; what that costs counts in the reaction. ``context`` is that of
    a call of this run: its client sends and reads under ids derived for it.
    """

    reaction: str
    path: str
    agent: Agent
    model: Model
    """The one that is asked, around a model call; the agent's own elsewhere."""

    state: TurnState
    context: ToolContext
    emit: OnEvent
    complete: Callable[[Model, ModelRequest], Awaitable[ModelReply]]
    keep: Keep
    max_kept_chars: int
    """Of text in one kept value, whatever its characters are."""

    @contextmanager
    def report(self, text: str) -> Iterator[None]:
        """Tell people what the work is at, as long as the block runs. Not for the model."""
        self.emit(Progress(self.reaction, self.state.turn, replace_surrogates(text), path=self.path))
        try:
            yield
        finally:
            self.emit(Progress(self.reaction, self.state.turn, "", is_done=True, path=self.path))


class Middleware:
    """One concern around the loop. Override what it needs: a hook that is left alone costs nothing. The first in the
    list is outermost."""

    withholds = True
    """Of one with a `review`: what the model writes is shown to nobody before that has seen it. False where it only
    edits."""

    # --- pure: asked again when a reaction is resumed

    def initial_state(self) -> Mapping[str, object]:
        """Give what to put into ``state.values`` at the beginning."""
        return {}

    def list_tools(self, state: TurnState) -> Sequence[Tool]:
        """Give the tools that it brings, beside the agent's own. Asked once before each turn, without IO: a change
        holds from the next turn on. The same objects while nothing changes. Of two with one name the agent's own, or
        the one of earlier middleware, holds."""
        return ()

    def list_parts(self, state: TurnState) -> Sequence[PromptPart]:
        """Give what the sources of the tools that it brings have to say in the prompt, as it is known now, without IO.
        Templates place it (`features.prompts`); what none places is added to the system message and behind the
        conversation."""
        return ()

    def select_messages(
        self, threads: Mapping[str, MessageThread], trigger: BaseMessage
    ) -> tuple[Mapping[str, MessageThread], BaseMessage]:
        """Choose what of the conversation enters the prompt: leave out, or shorten visibly; the trigger stays."""
        return threads, trigger

    def should_continue(self, state: TurnState) -> bool:
        """Tell whether turns with tools may follow; else this one is the last, and has none."""
        return True

    def prepare(self, state: TurnState, step: CallModel) -> CallModel:
        """Change what is asked: messages, tools, the model, the choice of tool. The history stays as it is."""
        return step

    def calculate_usage(self, state: TurnState, reply: ModelReply) -> Usage:
        """Give what a reply counts."""
        return reply.usage

    def process_tool_calls(self, state: TurnState, calls: Sequence[ToolCall]) -> End | None:
        """Look at the calls of a reply before any is run; `End` runs none of them. (A policy's callable may give True:
        the text beside them is the answer.)"""
        return None

    def preprocess_arguments(self, state: TurnState, call: ToolCall) -> str:
        """Give the arguments to use, as the text of a JSON object."""
        return call.arguments

    def after_tool(self, state: TurnState, call: ToolCall, result: ToolResult) -> AfterTool | None:
        """Change what a result does; in the order of the calls, when all of the turn are done. Not asked for calls that
        were not run."""
        return None

    def on_no_tool_calls(self, state: TurnState, reason: NoCallsReason) -> str | End | None:
        """Give what to tell the model, which is asked once more; `End`; or None for what happens anyway."""
        return None

    # --- around what is done; only for what is not recorded yet

    async def around_reaction(self, around: Around, proceed: Callable[[], Awaitable[Finish]]) -> Finish:
        return await proceed()

    async def around_turn(self, around: Around, proceed: Callable[[], Awaitable[None]]) -> None:
        return await proceed()

    async def around_model(
        self, around: Around, request: ModelRequest, proceed: Callable[[ModelRequest], Awaitable[ModelReply]]
    ) -> ModelReply:
        """Ask, or not; the reply is what is recorded. Raises `ModelError`."""
        return await proceed(request)

    async def around_tool(
        self, around: Around, call: PlannedCall, proceed: Callable[[PlannedCall], Awaitable[ToolResult]]
    ) -> ToolResult:
        """Run a tool, or not; the result is what is recorded."""
        return await proceed(call)

    async def review(self, around: Around, answer: str) -> str | Answer | Correction:
        """Give the answer as it goes out, or what is wrong with it."""
        return answer

    async def finish_answer(self, around: Around, answer: str, is_accepted: bool) -> str | Answer:
        """Add to an answer that goes out now. ``is_accepted``: no reviewer found anything wrong with it; else it goes
        out for want of a better one."""
        return answer

    def store(self, kind: str, body: Mapping[str, object]) -> Mapping[str, object]:
        """Give a record as it is kept. What is left out of it, a resumed reaction does not know."""
        return body

    # --- beside the reactions

    def describe(self) -> object:
        """Give what it is set to: a reaction that is resumed while that is something else says so. By default all that
        it holds when its runner is made, of which data counts and code by its name."""
        return vars(self)

    async def close(self) -> None:
        """Let go of what it holds; at the end of each `run` of the runner. It may be needed again."""
