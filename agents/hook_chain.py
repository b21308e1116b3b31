"""Runs all hooks of one agent in order: the policy's functions and the middleware.

`reaction` and `driver` call only the chain and import neither the policy's functions nor the middleware. The chain
treats the policy's functions as middleware around the agent's own middleware. The first layer is outermost. A hook that
no layer overrides costs nothing. Every hook is user code, so its return value is checked and its time is limited
(`isolation.run_hook`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, JsonValue

from roundelay.network.frames import encode

from .history import repair
from .isolation import check_hook, run_hook
from .middleware import (
    FAILED_CHECKS,
    PASSED_CHECKS,
    Answer,
    Around,
    AskModel,
    CallModel,
    Correction,
    Guard,
    Middleware,
    RunReaction,
    RunTool,
    middleware_of,
)
from .models.model import Model, ModelError, ModelReply, ModelRequest, NamedTool, ToolCall, Usage
from .policy import AgentPolicy, Given
from .tools import PlannedCall, Tool
from .values import AfterTool, End, Finish, NoCallsReason, Reviewed, ToolResult, TurnState

if TYPE_CHECKING:
    from roundelay.network.messages import BaseMessage, MessageThread

_logger = logging.getLogger(__name__)
T = TypeVar("T")
ResultT = TypeVar("ResultT")

_HOOKS = [name for name, hook in vars(Middleware).items() if callable(hook) and name not in ("describe", "close")]
_POLICY_HOOKS = (
    "initial_state",
    "calculate_usage",
    "process_tool_calls",
    "preprocess_arguments",
    "after_tool",
    "on_no_tool_calls",
)
"""Hooks that have the same name in policies and in middleware."""


class HookChain:
    """Hooks of an agent in order: the policy's functions, followed by the hooks that the agent's middleware overrides."""

    def __init__(self, policy: AgentPolicy, middleware: Sequence[Middleware]) -> None:
        self.middleware = tuple(middleware)
        layers = _list_layers(policy, middleware)
        self._timeout_s = policy.hook_timeout_s
        self._hooks = {name: _collect_hooks(layers, name) for name in _HOOKS}
        self.brings_tools = bool(self._hooks["list_tools"])
        self.reduces_results = any(layer.reduces_results for layer in layers)
        self.stores = bool(self._hooks["store"])
        self.reviews = bool(self._hooks["review"] or self._hooks["finish_answer"])
        reviewers = [layer for layer in layers if type(layer).review is not Middleware.review]
        self.withholds = any(layer.withholds for layer in reviewers)
        """Whether an answer must not be shown before its review."""

        self.guards: tuple[Guard, ...] = tuple(layer.review for layer in reviewers if layer.guards)
        """Reviews that also apply to agents that take over from this agent."""

    # --- pure hooks: called again when a reaction resumes

    async def _ask(self, hook: Callable[..., object], *args: object) -> Any:
        """Call a hook. If the hook returns a coroutine, await it: without the await, a guard that returns a coroutine
        would always count as true.
        """
        result = hook(*args)
        if inspect.isawaitable(result):
            return await run_hook(self._timeout_s, partial(_await, result), named=hook)
        return result

    def list_tools(self, state: TurnState) -> list[Tool]:
        return [tool for hook in self._hooks["list_tools"] for tool in hook(state)]

    async def select_messages(
        self, threads: Mapping[str, MessageThread], trigger: BaseMessage
    ) -> tuple[Mapping[str, MessageThread], BaseMessage]:
        for hook in self._hooks["select_messages"]:
            threads, trigger = await self._ask(hook, threads, trigger)
        return threads, trigger

    async def start(self) -> dict[str, object]:
        """Return the initial ``state.values``."""
        values: dict[str, object] = {}
        for hook in self._hooks["initial_state"]:
            values.update(await self._ask(hook))
        return values

    async def should_continue(self, state: TurnState) -> bool:
        for hook in self._hooks["should_continue"]:
            if not await self._ask(hook, state):
                return False
        return True

    async def prepare(self, state: TurnState, step: CallModel) -> CallModel:
        """Return the request of a turn after all hooks have changed it, in a form that providers accept."""
        prepared = step
        if self._hooks["list_parts"]:
            prepared = replace(step, parts=tuple(part for hook in self._hooks["list_parts"] for part in hook(state)))
        for hook in self._hooks["prepare"]:
            prepared = await self._ask(hook, state, prepared)
        if prepared.parts:
            prepared = prepared.place_parts()
        if prepared.messages is not step.messages:
            prepared = replace(prepared, messages=tuple(repair(prepared.messages)))
        # Providers refuse a request that demands a tool but does not offer this tool.
        choice = prepared.tool_choice
        if choice != "auto" and not prepared.tools:
            prepared = replace(prepared, tool_choice="auto")
        elif isinstance(choice, NamedTool) and all(spec.name != choice.name for spec in prepared.tools):
            details = {"agent_id": state.agent_id, "tool": choice.name}
            _logger.warning("a hook demands a tool that does not exist", extra=details)
            prepared = replace(prepared, tool_choice="auto")
        return prepared

    async def calculate_usage(self, state: TurnState, reply: ModelReply) -> Usage:
        for hook in self._hooks["calculate_usage"]:
            usage = await self._ask(hook, state, reply)
            reply = replace(reply, usage=_check_type(hook, usage, (Usage,), "a Usage"))
        return reply.usage

    async def process_tool_calls(self, state: TurnState, reply: ModelReply) -> End | None:
        for hook in self._hooks["process_tool_calls"]:
            result = await self._ask(hook, state, reply.tool_calls)
            # Check the type instead of the truth value. Otherwise a guard that returns another value by mistake would
            # let calls run.
            _check_type(hook, result, (End, bool, type(None)), "an End, True, False or None")
            if result is True:
                return End(reply.text)  # the text of the reply that requested the calls
            if isinstance(result, End):
                return result
        return None

    async def preprocess_arguments(self, state: TurnState, call: ToolCall) -> ToolCall:
        for hook in self._hooks["preprocess_arguments"]:
            arguments = await self._ask(hook, state, call)
            if arguments is not None:
                call = replace(call, arguments=_encode_arguments(hook, arguments))
        return call

    async def after_tool(self, state: TurnState, call: ToolCall, result: ToolResult) -> tuple[ToolResult, AfterTool]:
        """Return the result that the model reads, and the other changes that hooks requested. If hooks contradict each
        other, the last hook has priority.
        """
        changes = AfterTool()
        for hook in self._hooks["after_tool"]:
            change = await self._ask(hook, state, call, result)
            if change is None:
                continue
            _check_type(hook, change, (AfterTool,), "an AfterTool or None")
            if change.content is not None:
                result = replace(result, content=change.content)
            messages = change.messages if change.messages is not None else changes.messages
            changes = AfterTool(None, messages, change.next_tool or changes.next_tool)
        return result, changes

    async def on_no_tool_calls(self, state: TurnState, reason: NoCallsReason) -> str | End | None:
        for hook in self._hooks["on_no_tool_calls"]:
            result: str | End | None = await self._ask(hook, state, reason)
            if result is not None:
                return _check_type(hook, result, (str, End), "a text, an End or None")
        return None

    async def read_answers(
        self, answers: Sequence[tuple[str, Mapping[str, JsonValue]]]
    ) -> tuple[list[str], dict[str, JsonValue]]:
        texts: list[str] = [text for text, _ in answers]
        data: dict[str, JsonValue] = {}
        for hook in self._hooks["read_answers"]:
            current = [(text, metadata) for text, (_, metadata) in zip(texts, answers, strict=True)]
            read, added = await self._ask(hook, current)
            texts, data = list(read), {**data, **added}
        return texts, data

    def store(self, kind: str, body: Mapping[str, object]) -> Mapping[str, object]:
        """Return the body of a record as it will be stored."""
        for hook in self._hooks["store"]:
            body = hook(kind, body)
        return body

    # --- hooks around an action: called only if its outcome is not recorded

    def around_reaction(self, around: Callable[[], Around], proceed: RunReaction) -> Awaitable[Finish]:
        return self._wrap("around_reaction", around, proceed)

    def around_turn(self, around: Callable[[], Around], proceed: Callable[[], Awaitable[None]]) -> Awaitable[None]:
        return self._wrap("around_turn", around, proceed)

    def around_model(
        self,
        around: Callable[[], Around],
        request: ModelRequest,
        proceed: AskModel,
    ) -> Awaitable[ModelReply]:
        return self._wrap("around_model", around, proceed, request)

    def around_tool(self, around: Callable[[], Around], call: PlannedCall, proceed: RunTool) -> Awaitable[ToolResult]:
        return self._wrap("around_tool", around, proceed, call)

    def _wrap(
        self, name: str, around: Callable[[], Around], proceed: Callable[..., Awaitable[T]], *args: object
    ) -> Awaitable[T]:
        """Call ``proceed(*args)`` inside the hooks; the first hook is outermost. Call ``around`` only if there are
        hooks, because building its value takes longer than a direct call of ``proceed``.
        """
        if hooks := self._hooks[name]:
            run = around()
            for hook in reversed(hooks):
                proceed = partial(run_hook, self._timeout_s, hook, run, proceed=proceed)
        return proceed(*args)

    async def review(self, around: Around, answer: str, *, can_correct: bool, guards: Sequence[Guard] = ()) -> Reviewed:
        """Return the answer after all reviews, or the corrections that the reviewers request. Each reviewer reads the
        text that the previous reviewer returned. ``guards`` are the reviewers of earlier agents and run last. An answer
        that passes is also finished (`finish_answer`).
        """
        corrections: list[Correction] = []
        metadata: dict[str, JsonValue] = {}
        notes: list[str] = []
        passed: list[str] = []

        def read_answer(result: str | Answer) -> str:
            if isinstance(result, str):
                return result
            if not isinstance(result, Answer):  # for example a hook without a return statement
                raise TypeError(
                    f"a reviewer gave a {type(result).__name__} and must give the answer, as text or as Answer(...)"
                )
            # Collect the names of passed checks from all reviewers. `update` alone would keep only the names from the
            # last reviewer.
            metadata.update({name: value for name, value in result.metadata.items() if name != PASSED_CHECKS})
            if isinstance(names := result.metadata.get(PASSED_CHECKS), list):
                passed.extend(map(str, names))
            notes.extend(result.notes)
            return result.text

        # Call each reviewer only once, because several agents of a reaction may share middleware.
        for hook in dict.fromkeys((*self._hooks["review"], *guards)):
            result: str | Answer | Correction = await run_hook(self._timeout_s, hook, around, answer)
            if isinstance(result, Correction):
                corrections.append(result)
                passed += result.passed
                note = f"{result.name}: {result.instruction}" if result.name else result.instruction
                notes += [note, *result.notes]
            else:
                answer = read_answer(result)
        # Send all corrections together. Sending them one by one would cost a turn each and reach the limit of
        # corrections sooner.
        if corrections and can_correct:
            return Reviewed(answer, "\n".join(correction.instruction for correction in corrections), notes=tuple(notes))
        if failed := [correction.name for correction in corrections if correction.name]:
            metadata[FAILED_CHECKS] = list(failed)
        if any(correction.blocks for correction in corrections):
            return Reviewed(answer, notes=tuple(notes), metadata={FAILED_CHECKS: [*failed]}, is_blocked=True)
        if passed:
            metadata[PASSED_CHECKS] = list(passed)
        is_accepted = not corrections
        for hook in self._hooks["finish_answer"]:
            answer = read_answer(await run_hook(self._timeout_s, hook, around, answer, is_accepted))
        return Reviewed(answer, notes=tuple(notes), is_accepted=is_accepted, metadata=metadata)


def _collect_hooks(layers: Sequence[Middleware], name: str) -> tuple[Any, ...]:
    default = getattr(Middleware, name)
    # Compare the attribute of the class. An instance attribute of the same name is not a hook.
    hooks = tuple(getattr(layer, name) for layer in layers if getattr(type(layer), name) is not default)
    for hook in hooks:
        check_hook(name, hook)
    return hooks


# --- a policy's functions as middleware


def _list_layers(policy: AgentPolicy, middleware: Sequence[Middleware]) -> list[Middleware]:
    """Return the policy's functions as layers around the agent's own middleware. ``on_tools_selected`` is the last
    layer, so it sees only calls that no other hook refused.
    """
    outer = {name: hook for name in _POLICY_HOOKS if (hook := getattr(policy, name)) is not None}
    if policy.max_tool_calls is not None or policy.should_continue is not None:
        outer["should_continue"] = partial(_should_continue, policy)
    layers = [middleware_of(**outer)] if outer else []
    choices = (
        (policy.should_send_tools, _apply_sent_tools),
        (policy.choose_model, _apply_model),
        (policy.choose_tool, _apply_tool),
    )
    layers += [middleware_of(prepare=partial(_choose, hook, apply)) for hook, apply in choices if hook is not None]
    layers += middleware
    if policy.on_tools_selected is not None:
        layers.append(middleware_of(process_tool_calls=partial(_notify_of_calls, policy.on_tools_selected)))
    return layers


def _notify_of_calls(
    listener: Callable[[TurnState, Sequence[ToolCall]], object], state: TurnState, calls: Sequence[ToolCall]
) -> Given[None]:
    """Call a listener and ignore its return value, so that the listener cannot end the reaction."""
    return _then(listener(state, calls), lambda _: None)


def _should_continue(policy: AgentPolicy, state: TurnState) -> Given[bool]:
    if policy.max_tool_calls is not None:
        counted = sum(times for name, times in state.calls.items() if name not in policy.uncounted_tools)
        if counted >= policy.max_tool_calls:
            return False
    return policy.should_continue is None or policy.should_continue(state)


def _choose(
    hook: Callable[[TurnState], Given[Any]],
    apply: Callable[[CallModel, Any], CallModel],
    state: TurnState,
    step: CallModel,
) -> Given[CallModel]:
    return _then(hook(state), partial(apply, step))


def _apply_sent_tools(step: CallModel, is_sent: bool) -> CallModel:
    return step if is_sent else replace(step, tools=())


def _apply_model(step: CallModel, chosen: Model | str | None) -> CallModel:
    return step if chosen is None else replace(step, model=_find_model(step.agent.model, chosen))


def _apply_tool(step: CallModel, name: str | None) -> CallModel:
    return step if name is None else replace(step, tool_choice=NamedTool(name))


def _find_model(own: Model, chosen: Model | str) -> Model:
    """Return the model that a hook chose. A name selects a model of a `FallbackModel`, or another model on the server
    of the agent's own model. Raises `ModelError` for an unknown name.
    """
    if not isinstance(chosen, str):
        if not callable(getattr(chosen, "complete", None)):
            text = f"A {type(chosen).__name__} was chosen as the model, and must be a Model, its name or None."
            raise ModelError(text, reason="misconfigured")
        return chosen
    models: list[Any] = [own, *getattr(own, "models", ())]
    for model in models:
        if model.name == chosen:
            named: Model = model
            return named
    for model in models:
        if callable(rename := getattr(model, "named", None)):
            renamed: Model = rename(chosen)
            return renamed
    names = ", ".join(repr(model.name) for model in models)
    raise ModelError(
        f"The model {chosen!r} was chosen by its name, and only {names} can be asked: give the Model itself.",
        reason="misconfigured",
    )


def _then(result: Given[T], apply: Callable[[T], ResultT]) -> Given[ResultT]:
    """Apply a function to the result of a hook. If the hook returned a coroutine, the coroutine is awaited first."""
    return _await_then(result, apply) if inspect.isawaitable(result) else apply(result)


async def _await_then(result: Awaitable[T], apply: Callable[[T], ResultT]) -> ResultT:
    return apply(await result)


async def _await(result: Awaitable[T]) -> T:
    return await result


# --- checks on what hooks return


def _check_type(hook: Callable[..., object], result: T, types: tuple[type, ...], wanted: str) -> T:
    """Return the result of a hook. Raises `TypeError` if the result has another type, which the loop would otherwise
    silently ignore.
    """
    if not isinstance(result, types):
        raise TypeError(f"The hook {_find_name(hook)} gave a {type(result).__name__} and must give {wanted}.")
    return result


def _find_name(hook: Callable[..., object]) -> str:
    function = hook
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _encode_arguments(hook: Callable[..., object], arguments: object) -> str:
    """Return the arguments that a hook chose as JSON text. Raises `TypeError` for anything except an object or the JSON
    text of an object.
    """
    if isinstance(arguments, str):
        return arguments
    if isinstance(arguments, BaseModel):
        return arguments.model_dump_json()
    _check_type(hook, arguments, (Mapping,), "the arguments (an object, or the text of one) or None")
    return encode(arguments).decode()
