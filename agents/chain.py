"""The hooks of an agent, its policy's callables and its middleware together, as the loop asks them.

Made by `agent`. The pure ones are asked by `reaction`, the ones around what is done by `driver`, `model_calls` and
`tool_calls`. Hooks that nobody overrides are not called.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import JsonValue

from .history import repair
from .hook_time import run_hook
from .middleware import FAILED_CHECKS, AfterTool, Answer, Around, Correction, End, Middleware, NoCallsReason
from .models.model import ModelReply, ModelRequest, NamedTool, ToolCall, Usage
from .policy import AgentPolicy
from .steps import CallModel, Finish, PlannedCall, Reviewed, TurnState
from .tools import Tool, ToolResult

if TYPE_CHECKING:
    from roundelay.network.messages import BaseMessage, MessageThread

_logger = logging.getLogger(__name__)
T = TypeVar("T")


class Chain:
    """The hooks of an agent: its policy's callables first, then those that its middleware overrides, in order."""

    def __init__(self, policy: AgentPolicy, middleware: Sequence[Middleware]) -> None:
        def collect(name: str, given: object = None) -> tuple[Any, ...]:
            plain = getattr(Middleware, name)
            own = [getattr(it, name) for it in middleware if getattr(type(it), name) is not plain]
            return (*([given] if given is not None else []), *own)

        self._policy = policy
        self._time_s = policy.hook_timeout_s
        self._list_tools = collect("list_tools")
        self._list_parts = collect("list_parts")
        self._select = collect("select_messages")
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
        self._finish_answer = collect("finish_answer")
        self.brings_tools = bool(self._list_tools)
        self.stores = bool(self._store)
        self.reviews = bool(self._review or self._finish_answer)
        self.withholds = any(hook.__self__.withholds for hook in self._review)
        """Whether nobody may read an answer before it was reviewed."""

    # --- pure

    def list_tools(self, state: TurnState) -> list[Tool]:
        return [it for hook in self._list_tools for it in hook(state)]

    def select_messages(
        self, threads: Mapping[str, MessageThread], trigger: BaseMessage
    ) -> tuple[Mapping[str, MessageThread], BaseMessage]:
        for hook in self._select:
            threads, trigger = hook(threads, trigger)
        return threads, trigger

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
        made = step
        if self._list_parts:
            made = replace(step, parts=tuple(it for hook in self._list_parts for it in hook(state)))
        for hook in self._prepare:
            made = hook(state, made)
        if made.parts:
            made = made.place_parts()
        if made.messages is not step.messages:
            made = replace(made, messages=tuple(repair(made.messages)))
        choice = made.tool_choice
        if choice != "auto" and not made.tools:
            made = replace(made, tool_choice="auto")
        elif isinstance(choice, NamedTool) and all(spec.name != choice.name for spec in made.tools):
            _logger.warning(
                "a tool is chosen that is not there", extra={"agent_id": state.agent_id, "tool": choice.name}
            )
            made = replace(made, tool_choice="auto")  # a provider refuses the other
        return made

    def calculate_usage(self, state: TurnState, reply: ModelReply) -> Usage:
        for hook in self._calculate_usage:
            reply = replace(reply, usage=hook(state, reply))
        return reply.usage

    def process_tool_calls(self, state: TurnState, reply: ModelReply) -> End | None:
        for hook in self._process:
            given: End | bool | None = hook(state, reply.tool_calls)
            if given is True:
                return End(reply.text)  # what stands beside the calls
            if isinstance(given, End):
                return given
        if self._policy.on_tools_selected is not None:
            self._policy.on_tools_selected(state, reply.tool_calls)
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

    async def around_reaction(self, around: Callable[[], Around], proceed: Callable[[], Awaitable[Finish]]) -> Finish:
        return await self._pass(self._around_reaction, around, proceed)

    async def around_turn(self, around: Callable[[], Around], proceed: Callable[[], Awaitable[None]]) -> None:
        await self._pass(self._around_turn, around, proceed)

    async def around_model(
        self,
        around: Callable[[], Around],
        request: ModelRequest,
        proceed: Callable[[ModelRequest], Awaitable[ModelReply]],
    ) -> ModelReply:
        return await self._pass(self._around_model, around, proceed, request)

    async def around_tool(
        self, around: Callable[[], Around], call: PlannedCall, proceed: Callable[[PlannedCall], Awaitable[ToolResult]]
    ) -> ToolResult:
        return await self._pass(self._around_tool, around, proceed, call)

    async def _pass(
        self, hooks: Sequence[Any], around: Callable[[], Around], proceed: Callable[..., Awaitable[T]], *given: object
    ) -> T:
        """Await ``proceed(*given)`` inside of the hooks, the first outermost; ``around`` is asked only if there are
        any."""
        if hooks:
            it = around()
            for hook in reversed(hooks):
                proceed = partial(run_hook, self._time_s, hook, it, proceed=proceed)
        return await proceed(*given)

    async def review(self, around: Around, answer: str, *, can_correct: bool) -> Reviewed:
        """Give the answer as the reviewers leave it, or what they find wrong; each looks at what the one before it
        left. An answer that goes out is then finished."""
        found: list[Correction] = []
        metadata: dict[str, JsonValue] = {}
        notes: list[str] = []

        def take(given: str | Answer) -> str:
            if isinstance(given, str):
                return given
            if not isinstance(given, Answer):  # of a hook that forgot to return, say
                raise TypeError(
                    f"a reviewer gave a {type(given).__name__} and must give the answer, as text or as Answer(...)"
                )
            metadata.update(given.metadata)
            notes.extend(given.notes)
            return given.text

        for hook in self._review:
            given: str | Answer | Correction = await run_hook(self._time_s, hook, around, answer)
            if isinstance(given, Correction):
                found.append(given)
                notes += [f"{given.name}: {given.instruction}" if given.name else given.instruction, *given.notes]
            else:
                answer = take(given)
        if found and can_correct:
            return Reviewed(answer, "\n".join(it.instruction for it in found), notes=tuple(notes))
        for hook in self._finish_answer:
            answer = take(await run_hook(self._time_s, hook, around, answer, not found))
        if failed := [it.name for it in found if it.name]:
            metadata[FAILED_CHECKS] = list(failed)
        return Reviewed(answer, notes=tuple(notes), is_accepted=not found, metadata=metadata)


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
