"""Middleware: one concern around the loop, in a class of its own; and `Chain`, the hooks of an agent's policy and middleware together.

Stands between `agent`, which lists it, and the two that ask it: `reaction` (the pure hooks) and `driver` (the ones around a reaction, a turn, a
model call, a tool call, and the review of an answer). The pure hooks are asked again when a reaction is resumed, so they must depend on
their arguments alone; what the others give is recorded, so they are asked only for what is not recorded yet.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from .models.model import ChatMessage, Model, ModelReply, ModelRequest, NamedTool, ToolCall, Usage
from .policy import AgentPolicy
from .steps import CallModel, Finish, PlannedCall, TurnState
from .tools import ToolContext, ToolResult

if TYPE_CHECKING:
    from .agent import Agent
    from .events import OnEvent

T = TypeVar("T")

NoCallsReason = Literal["no_calls", "limit_reached", "tools_disabled"]
"""Why no tools are called: the model called none; a limit makes the next turn the last one; every call was to a disabled tool."""


@dataclass(frozen=True, slots=True)
class End:
    """What a hook gives to end the reaction, with this answer; None for none."""

    answer: str | None
    reason: str = "ended by a hook"


@dataclass(frozen=True, slots=True)
class AfterTool:
    """What becomes of a result: the ``content`` that the model reads instead, ``messages`` in place of the history before this turn, the
    tool that the next turn must call."""

    content: str | None = None
    messages: Sequence[ChatMessage] | None = None
    next_tool: str | None = None


@dataclass(frozen=True, slots=True)
class Correction:
    """What a reviewer gives for an answer that must not go out: what the model is told. ``name`` says which check it was."""

    instruction: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Around:
    """What middleware may know of the run that it is around.

    ``complete`` asks a model, with the agent's retries; what that costs counts in the reaction. ``context`` is that of a call of this run: its
    client sends and reads under ids derived for it.
    """

    reaction: str
    path: str
    agent: Agent
    state: TurnState
    context: ToolContext
    emit: OnEvent
    complete: Callable[[Model, ModelRequest], Awaitable[ModelReply]]


class Middleware:
    """One concern around the loop. Override what it needs: a hook that is left alone costs nothing. The first in the list is outermost."""

    # --- pure: asked again when a reaction is resumed

    def initial_state(self) -> Mapping[str, object]:
        """Give what to put into ``state.values`` at the beginning."""
        return {}

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
        """Look at the calls of a reply before any is run; `End` runs none of them."""
        return None

    def preprocess_arguments(self, state: TurnState, call: ToolCall) -> str:
        """Give the arguments to use, as the text of a JSON object."""
        return call.arguments

    def after_tool(self, state: TurnState, call: ToolCall, result: ToolResult) -> AfterTool | None:
        """Change what a result does; in the order of the calls, when all of the turn are done."""
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

    async def review(self, around: Around, answer: str) -> str | Correction:
        """Give the answer as it goes out, or what is wrong with it."""
        return answer

    def store(self, kind: str, body: Mapping[str, object]) -> Mapping[str, object]:
        """Give a record as it is kept. What is left out of it, a resumed reaction does not know."""
        return body


class Chain:
    """The hooks of an agent: its policy's callables first, then those that its middleware overrides, in order."""

    def __init__(self, policy: AgentPolicy, middleware: Sequence[Middleware]) -> None:
        def collect(name: str, given: object = None) -> tuple[Any, ...]:
            plain = getattr(Middleware, name)
            own = [getattr(it, name) for it in middleware if getattr(type(it), name) is not plain]
            return (*([given] if given is not None else []), *own)

        self._policy = policy
        self._initial_states = collect("initial_state", policy.initial_state)
        self._should_continue = collect("should_continue", policy.should_continue)
        self._prepare = collect("prepare", partial(_choose, policy) if _chooses(policy) else None)
        self._calculate_usage = collect("calculate_usage", policy.calculate_usage)
        self._process = collect("process_tool_calls", policy.process_tool_calls)
        self._preprocess = collect("preprocess_arguments", policy.preprocess_arguments)
        self._after_tool = collect("after_tool", policy.after_tool)
        self._on_no_calls = collect("on_no_tool_calls", policy.on_no_tool_calls)
        self._store = collect("store")
        self._around_reaction = collect("around_reaction")
        self._around_turn = collect("around_turn")
        self._around_model = collect("around_model")
        self._around_tool = collect("around_tool")
        self._review = collect("review")

    # --- pure

    def start(self) -> dict[str, object]:
        return {name: value for make in self._initial_states for name, value in make().items()}

    def should_continue(self, state: TurnState) -> bool:
        policy = self._policy
        if policy.max_tool_calls is not None:
            counted = sum(times for name, times in state.calls.items() if name not in policy.uncounted_tools)
            if counted >= policy.max_tool_calls:
                return False
        return all(hook(state) for hook in self._should_continue)

    def prepare(self, state: TurnState, step: CallModel) -> CallModel:
        for hook in self._prepare:
            step = hook(state, step)
        return step

    def calculate_usage(self, state: TurnState, reply: ModelReply) -> Usage:
        for hook in self._calculate_usage:
            reply = replace(reply, usage=hook(state, reply))
        return reply.usage

    def process_tool_calls(self, state: TurnState, calls: Sequence[ToolCall]) -> End | None:
        for hook in self._process:
            if (end := hook(state, calls)) is not None:
                return _as_end(end)
        if self._policy.on_tools_selected is not None:
            self._policy.on_tools_selected(state, calls)
        return None

    def preprocess_arguments(self, state: TurnState, call: ToolCall) -> ToolCall:
        for hook in self._preprocess:
            call = replace(call, arguments=hook(state, call))
        return call

    def after_tool(self, state: TurnState, call: ToolCall, result: ToolResult) -> tuple[ToolResult, AfterTool]:
        """Give the result as the model reads it, and what else the hooks want, the last word holding."""
        wanted = AfterTool()
        for hook in self._after_tool:
            given: AfterTool | None = hook(state, call, result)
            if given is None:
                continue
            if given.content is not None:
                result = replace(result, content=given.content)
            messages = given.messages if given.messages is not None else wanted.messages
            wanted = AfterTool(None, messages, given.next_tool or wanted.next_tool)
        return result, wanted

    def on_no_tool_calls(self, state: TurnState, reason: NoCallsReason) -> str | End | None:
        for hook in self._on_no_calls:
            given: str | End | None = hook(state, reason)
            if given is not None:
                return given
        return None

    def store(self, kind: str, body: Mapping[str, object]) -> Mapping[str, object]:
        for hook in self._store:
            body = hook(kind, body)
        return body

    # --- around what is done

    @property
    def reviews(self) -> bool:
        return bool(self._review)

    @property
    def stores(self) -> bool:
        return bool(self._store)

    async def around_reaction(self, around: Callable[[], Around], proceed: Callable[[], Awaitable[Finish]]) -> Finish:
        if self._around_reaction:
            it = around()
            for hook in reversed(self._around_reaction):
                proceed = partial(hook, it, proceed)
        return await proceed()

    async def around_turn(self, around: Callable[[], Around], proceed: Callable[[], Awaitable[None]]) -> None:
        if self._around_turn:
            it = around()
            for hook in reversed(self._around_turn):
                proceed = partial(hook, it, proceed)
        await proceed()

    async def around_model(
        self,
        around: Callable[[], Around],
        request: ModelRequest,
        proceed: Callable[[ModelRequest], Awaitable[ModelReply]],
    ) -> ModelReply:
        return await _pass(self._around_model, around, request, proceed)

    async def around_tool(
        self, around: Callable[[], Around], call: PlannedCall, proceed: Callable[[PlannedCall], Awaitable[ToolResult]]
    ) -> ToolResult:
        return await _pass(self._around_tool, around, call, proceed)

    async def review(self, around: Around, answer: str) -> tuple[str, list[Correction]]:
        """Give the answer as the reviewers leave it, and what they find wrong; each looks at what the one before it left."""
        found: list[Correction] = []
        for hook in self._review:
            given: str | Correction = await hook(around, answer)
            if isinstance(given, Correction):
                found.append(given)
            else:
                answer = given
        return answer, found


_A = TypeVar("_A")


async def _pass(
    hooks: Sequence[Any], around: Callable[[], Around], given: _A, proceed: Callable[[_A], Awaitable[T]]
) -> T:
    if hooks:
        it = around()
        for hook in reversed(hooks):
            proceed = partial(_step, hook, it, proceed)
    return await proceed(given)


async def _step(hook: Any, around: Around, proceed: Callable[[_A], Awaitable[T]], given: _A) -> T:
    result: T = await hook(around, given, proceed)
    return result


def _as_end(given: End | bool) -> End | None:
    """A callable may say True for an end without an answer."""
    if isinstance(given, End):
        return given
    return End(None) if given else None


def _chooses(policy: AgentPolicy) -> bool:
    return policy.should_send_tools is not None or policy.choose_model is not None or policy.choose_tool is not None


def _choose(policy: AgentPolicy, state: TurnState, step: CallModel) -> CallModel:
    if policy.should_send_tools is not None and not policy.should_send_tools(state):
        step = replace(step, tools=())
    if policy.choose_model is not None and (model := policy.choose_model(state)) is not None:
        step = replace(step, model=model)
    if policy.choose_tool is not None and (name := policy.choose_tool(state)) is not None:
        step = replace(step, tool_choice=NamedTool(name))
    return step
