"""Tools: typed functions that a model may call.

`@tool` makes a `Tool` from a function: its docstring becomes the description, and its annotations become the JSON
Schema. `planner` finds the tool of a call, and the tool parses the arguments (`tool_arguments`). `tool_call` runs the
tool within time and size limits. `network_tools` contains the tools of every agent and the tools of the hub's mods.
This module does not depend on a model and keeps no state.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, overload

from pydantic import JsonValue, TypeAdapter
from pydantic_core import PydanticSerializationError, to_json

from roundelay.network.errors import ConfigError
from roundelay.network.frames import to_plain

from .approval_rule import DEFAULT_RULE, ApprovalRule
from .import_path import import_named
from .isolation import describe_error, redact_error, run_in_thread
from .models.model import MAX_TOKENS, JsonSchema, ToolCall, ToolSpec, Usage
from .replies import Waiter
from .text import MAX_NAME_CHARS, replace_surrogates
from .tool_arguments import read_arguments, read_signature, tidy_schema
from .values import Effect, ToolArgumentsError, ToolError, ToolResult

if TYPE_CHECKING:
    from roundelay.network.messages import BaseMessage

    from .tool_client import ToolClient
    from .values import Finish

    RunAgent = Callable[[Any, str], Awaitable[Finish]]  # not typed as `Agent`, because that module imports this one

__all__ = [
    "FINISH",
    "Effect",
    "Output",
    "Tool",
    "ToolArgumentsError",
    "ToolContext",
    "ToolError",
    "ToolResult",
    "as_tool",
    "index_tools",
    "load_tool",
    "tool",
]

FINISH = "finish"
"""Name of the tool with which a model ends its work."""

MAX_STREAMED_CHARS = 10_000_000
"""Maximum characters of a streamed result."""

MAX_ITEMS = 100_000
"""Maximum items of a result that a generator yields."""

MAX_DATA_DEPTH = 48
"""Maximum nesting depth of a result's data. A frame may have 64 levels (docs/protocol.md)."""

_logger = logging.getLogger(__name__)
_DATA = TypeAdapter(dict[str, JsonValue])
_NAME = re.compile(rf"[a-zA-Z0-9_-]{{1,{MAX_NAME_CHARS}}}")  # names that OpenAI-compatible servers accept

ReadAnswers = Callable[
    [Sequence[tuple[str, Mapping[str, JsonValue]]]], Awaitable[tuple[Sequence[str], Mapping[str, JsonValue]]]
]


async def read_texts(
    answers: Sequence[tuple[str, Mapping[str, JsonValue]]],
) -> tuple[Sequence[str], Mapping[str, JsonValue]]:
    """Return the texts of answers unchanged, and no data."""
    return [text for text, _ in answers], {}


@dataclass(frozen=True, slots=True)
class ToolContext:
    """Context of a call, for the tool. A parameter with this type receives the context and is hidden from the model.

    ``call_id`` stays the same when the call is repeated after a restart. Use ``call_id`` as the key of an effect that
    must happen only once. The ids of messages that ``client`` sends are derived from ``call_id``. ``run_agent`` runs
    another agent on a text, as part of this call (`agent_tools.agent_tool`). ``waiter`` waits for replies (`ask`).
    ``run_agent`` and ``waiter`` exist only inside a reaction. ``state`` is the runner's ``state`` for its tools. In a
    scenario, ``state`` is the ``state`` of the scenario. ``form`` is the form of the reaction's prompt.
    """

    agent_id: str
    reaction: str
    turn: int
    call_id: str
    trigger: BaseMessage
    client: ToolClient
    run_agent: RunAgent | None = None
    waiter: Waiter | None = None

    tell: Callable[[Literal["progress", "piece"], str], None] | None = None
    state: Any = None
    form: str = "full"
    take_usage: Callable[[str, Usage], None] | None = None

    def report_usage(self, model: str, usage: Usage) -> None:
        """Report the usage of a model that the tool called. The usage counts in the reaction, in budgets and in
        ``roundelay cost``. Raises `ValueError` for values that are not token counts.
        """
        for name, count in asdict(usage).items():
            if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MAX_TOKENS:
                raise ValueError(f"The usage of {model}: {name} is {count!r} and must be a number of tokens.")
        if self.take_usage is not None:
            self.take_usage(replace_surrogates(str(model)), usage)

    read_answers: ReadAnswers = read_texts
    """Processes other agents' answers to the call with the agent's middleware (`Middleware.read_answers`)."""

    def report(self, text: str) -> None:
        """Show ``text`` to people as progress of the call, until the next report or the end of the call. The model does
        not read the text.
        """
        if self.tell is not None:
            self.tell("progress", str(text))

    def stream(self, text: str) -> None:
        """Show people a piece of the result. The model reads the complete result that the tool returns."""
        if self.tell is not None:
            self.tell("piece", str(text))


@dataclass(frozen=True, slots=True)
class Output:
    """A tool's result with additional data. ``content`` is the text for the model.

    ``data`` is stored as JSON in the record of the result, keyed by purpose: ``references``, ``fragments``, ``debug``,
    and others. The middleware with the name of the key documents the form of the value. ``summary`` replaces a long
    result in later turns if the prompt has no room for the whole result.
    """

    content: object
    data: Mapping[str, JsonValue] = field(default_factory=dict)
    summary: str | None = None


_Parse = Callable[[str], dict[str, object]]
_Run = Callable[[ToolContext, Mapping[str, object]], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool, made from a function (`tool`), from a mod's operation (`network_tools`), or from an MCP server's offer.

    If ``timeout_s`` is None, the time limit of the agent's policy applies. Tools that only send requests to the hub
    have no limit: waiting for the hub is safe, even if the hub restarts, because it answers a repeated request with the
    first result.
    """

    name: str
    description: str
    parameters: JsonSchema
    effect: Effect
    timeout_s: float | None
    _parse: _Parse
    _run: _Run
    function: Callable[..., object] | None = None
    """The decorated function, for direct calls."""

    answers: bool = False
    """Whether the result of a successful call is the reaction's answer and ends the reaction."""

    needs_approval: bool = False
    """Whether a person must approve each call."""

    approval: ApprovalRule = DEFAULT_RULE
    """Rule that defines who may approve calls."""

    should_use: Callable[[ToolContext], bool | Awaitable[bool]] | None = None
    """Called before each call. If the result is False, the model reads that the tool is disabled here."""

    selection_rule: str = ""
    """Sentence about when to choose the tool. `features.registry` adds the sentence to the system message."""

    acts_through_client: bool = False
    """Whether the tool has effects only through ``context.client``. This client stores the reaction's waiting records
    before each effect or together with it.
    """

    @property
    def spec(self) -> ToolSpec:
        """The tool in the form that a model sees."""
        return ToolSpec(self.name, self.description, self.parameters)

    def parse(self, arguments: str) -> dict[str, object]:
        """Validate the arguments that the model wrote. Raises `ToolArgumentsError` with a text for the model, even if a
        validator of the tool raises another exception.
        """
        try:
            return self._parse(arguments)
        except ToolArgumentsError:
            raise
        except Exception as error:  # a validator is user code and may raise any exception
            raise ToolArgumentsError(
                f"Wrong arguments for {self.name}: their check failed ({describe_error(error)})."
            ) from error

    async def call(self, context: ToolContext, kwargs: Mapping[str, object]) -> str:
        """Run the tool with parsed arguments. Return the tool's text, or any other value as compact JSON. Errors of the
        function are raised unchanged.

        A sync function runs in a separate thread (`run_in_thread`). A cancellation ends the call and an async function.
        The thread of a sync function continues to its end, but does not keep the process alive.
        """
        return (await self.run(context, kwargs))[0]

    async def run(self, context: ToolContext, kwargs: Mapping[str, object]) -> tuple[str, dict[str, JsonValue]]:
        """Run the tool like `call`. Return the tool's text and data."""
        value = await self._run(context, kwargs)
        if not isinstance(value, Output):
            return _encode_result(self.name, value), {}
        if not isinstance(value.data, Mapping):
            kind = type(value.data).__name__
            raise ToolError(
                f"The tool {self.name} returned data that is a {kind}: write Output(content, {{name: value}})."
            )
        raw = dict(value.data) if value.summary is None else {**value.data, "summary": value.summary}
        try:
            # Convert to JSON and back, so that this run sees the same data as a resumed run.
            data = _DATA.validate_json(to_json(raw, inf_nan_mode="strings", fallback=to_plain))
        except (PydanticSerializationError, ValueError, RecursionError) as error:
            raise ToolError(f"The tool {self.name} returned data that cannot be converted to JSON: {error}") from error
        if is_deeper(data, MAX_DATA_DEPTH):
            raise ToolError(f"The tool {self.name} returned data that is nested deeper than {MAX_DATA_DEPTH}.")
        return _encode_result(self.name, value.content), data


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A tool call that will run, with validated arguments. ``index`` is the position of the call in its turn."""

    index: int
    call: ToolCall
    tool: Tool
    arguments: dict[str, object]


@overload
def tool(function: Callable[..., object], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    once: bool = False,
    idempotent: bool = False,
    read_only: bool = False,
    timeout_s: float | None = None,
    answers: bool = False,
    needs_approval: bool = False,
    approvers: Sequence[str] = (),
    approvals_needed: int | None = None,
    escalate_to: Sequence[str] = (),
    requester_may_approve: bool | None = None,
    approval_timeout_s: float | None = None,
    should_use: Callable[[ToolContext], bool | Awaitable[bool]] | None = None,
    selection_rule: str = "",
) -> Callable[[Callable[..., object]], Tool]: ...
def tool(
    function: Callable[..., object] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    once: bool = False,
    idempotent: bool = False,
    read_only: bool = False,
    timeout_s: float | None = None,
    answers: bool = False,
    needs_approval: bool = False,
    approvers: Sequence[str] = (),
    approvals_needed: int | None = None,
    escalate_to: Sequence[str] = (),
    requester_may_approve: bool | None = None,
    approval_timeout_s: float | None = None,
    should_use: Callable[[ToolContext], bool | Awaitable[bool]] | None = None,
    selection_rule: str = "",
) -> Tool | Callable[[Callable[..., object]], Tool]:
    """Make a `Tool` from a typed function. The function's docstring is the description, and its annotations (with
    pydantic's ``Field``) are the parameters. Raises `ToolError` for a function that cannot be a tool.

    A tool is ``once`` unless it is ``idempotent`` or ``read_only``, because repeating an effect by mistake is worse
    than not repeating it. A ``read_only`` tool only computes or looks up values, so its calls need no additional
    commit. With ``answers``, the result of a successful call is the reaction's answer and ends the reaction.
    ``should_use`` may disable the tool for a call.

    With ``needs_approval``, a person must approve each call. ``approvers`` (ids of people, or ``role:NAME``) names the
    people who may approve, and implies ``needs_approval``. Parts of the rule that the tool omits come from the agent's
    `AgentPolicy`.

    If the function is an async generator, people see each yielded text at once. The result consists of all yielded
    texts, or is the `Output` that the generator yields last.
    """
    if once + idempotent + read_only > 1:
        raise ToolError("A tool is either once, idempotent or read_only.")
    effect: Effect = "read_only" if read_only else "idempotent" if idempotent else "once"
    if timeout_s is not None and not timeout_s > 0:
        raise ToolError(f"timeout_s of a tool is {timeout_s} and must be more than 0.")
    # Refuse a string, because it is also a sequence: 'mia' would name the people m, i and a.
    if isinstance(approvers, str) or isinstance(escalate_to, str):
        raise ToolError("approvers and escalate_to of a tool are lists: write approvers=['mia'].")
    try:
        approval = ApprovalRule(
            tuple(approvers), approvals_needed, tuple(escalate_to), requester_may_approve, approval_timeout_s
        )
    except ValueError as error:
        raise ToolError(f"The approval rule of a tool is invalid: {error}.") from error

    def decorate(decorated: Callable[..., object]) -> Tool:
        tool_name = name or str(getattr(decorated, "__name__", type(decorated).__name__))
        if not _NAME.fullmatch(tool_name):
            raise ToolError(
                f"{tool_name!r} is not a valid name of a tool: use letters, digits, _ and -, at most {MAX_NAME_CHARS}; "
                "set the name with @tool(name=...)."
            )
        model, contexts = read_signature(decorated, tool_name, ToolContext)
        parameters = tidy_schema(model.model_json_schema())
        return Tool(
            tool_name,
            inspect.cleandoc(description or decorated.__doc__ or ""),
            parameters,
            effect,
            timeout_s,
            partial(read_arguments, tool_name, model, parameters),
            partial(_run_function, decorated, tool_name, contexts),
            decorated,
            answers=answers,
            needs_approval=needs_approval or approval != DEFAULT_RULE,
            approval=approval,
            should_use=should_use,
            selection_rule=selection_rule,
        )

    return decorate if function is None else decorate(function)


def as_tool(value: Tool | Callable[..., object]) -> Tool:
    """Return a tool unchanged, or make a tool from a plain function."""
    return value if isinstance(value, Tool) else tool(value)


def index_tools(tools: Iterable[Tool | Callable[..., object]]) -> dict[str, Tool]:
    """Return the tools by name, in order. Raises `ToolError` if two tools have the same name, which providers
    refuse.
    """
    index: dict[str, Tool] = {}
    for item in map(as_tool, tools):
        if item.name in index:
            raise ToolError(f"Two tools are named {item.name}: give one of them another name with @tool(name=...).")
        index[item.name] = item
    return index


def load_tool(spec: str) -> Tool:
    """Import the tool that ``package.module:function`` names. The function need not be decorated. Raises
    `ToolError`.
    """
    try:
        imported = import_named(spec, "tool", "function")
    except ConfigError as error:
        raise ToolError(str(error)) from error
    if not callable(imported) and not isinstance(imported, Tool):
        raise ToolError(f"the tool {spec!r} is a {type(imported).__name__}, not a function")
    return as_tool(imported)


# --- running a function


async def _run_function(
    function: Callable[..., object],
    name: str,
    contexts: Sequence[str],
    context: ToolContext,
    kwargs: Mapping[str, object],
) -> object:
    arguments = {**kwargs, **dict.fromkeys(contexts, context)}
    result: object
    if inspect.isasyncgenfunction(function):
        return await _collect_pieces(context, function(**arguments))
    if inspect.iscoroutinefunction(function):
        result = function(**arguments)
    else:
        result = await run_in_thread(lambda: _collect_items(function(**arguments)), name)
    # A plain function may return a coroutine, as a partial or a decorated async function does.
    return await result if inspect.isawaitable(result) else result


async def _collect_pieces(context: ToolContext, pieces: AsyncGenerator[object, None]) -> object:
    """Show the pieces of an async generator to people as they are yielded. Return all pieces as one text, or the
    `Output` that the generator yields last.
    """
    texts: list[str] = []
    chars = 0
    result: Output | None = None
    try:
        async with aclosing(pieces) as running:
            async for piece in running:
                if isinstance(piece, Output):
                    result = piece
                    break
                texts.append(piece if isinstance(piece, str) else _encode_json(piece))
                context.stream(texts[-1])
                if (chars := chars + len(texts[-1])) > MAX_STREAMED_CHARS:
                    raise ToolError(f"The tool streamed more than {MAX_STREAMED_CHARS} characters and was stopped.")
                # Yield to the event loop, because a generator that never awaits would block all other agents.
                await asyncio.sleep(0)
    except Exception as error:  # an error while the generator closes does not invalidate its result
        if result is None:
            raise
        place = {"reaction": context.reaction}
        _logger.warning("a tool failed after its result", extra=place, exc_info=redact_error(error))
    return "".join(texts) if result is None else result


def _collect_items(value: object) -> object:
    """Return the items of a generator as a list, or the `Output` that it yields last. Return other values unchanged.
    Runs in the tool's thread, because an endless generator must not block the event loop.
    """
    if not inspect.isgenerator(value):
        return value
    items: list[object] = []
    for item in islice(value, MAX_ITEMS + 1):
        if isinstance(item, Output):
            value.close()
            return item
        items.append(item)
    if len(items) > MAX_ITEMS:
        raise ToolError(f"The tool yielded more than {MAX_ITEMS} items and was stopped.")
    return items


def is_deeper(value: JsonValue, levels: int) -> bool:
    """Return whether a value is nested deeper than this number of levels."""
    match value:
        case dict() | list():
            children = value.values() if isinstance(value, dict) else value
            return levels == 0 or any(is_deeper(child, levels - 1) for child in children)
        case _:
            return False


def _encode_result(name: str, value: object) -> str:
    if isinstance(value, str):
        return replace_surrogates(value)
    try:
        return _encode_json(value)
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        raise ToolError(
            f"The tool {name} returned a {type(value).__name__}, which cannot be converted to JSON: {error}"
        ) from error


def _encode_json(value: object) -> str:
    return to_json(value, inf_nan_mode="strings", fallback=to_plain).decode()
