"""Tools: typed functions that a model may call, with a JSON Schema for the model and precise answers to wrong
arguments.

`@tool` makes a `Tool` of a function; those that every agent has, and those of the hub's mods, are made in
`network_tools`. `planning` looks a call up by name and lets the tool parse the model's arguments, `tool_calls` awaits
it; timeouts, size limits and the answer to an unknown name are theirs. Nothing here knows a model or keeps state.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Literal, overload

from pydantic import JsonValue, TypeAdapter
from pydantic_core import PydanticSerializationError, to_json

from roundelay.network.errors import ConfigError

from .arguments import ToolArgumentsError, ToolError, read_arguments, read_signature, tidy_schema
from .citations import fit_sources
from .foreign import describe_error
from .import_path import import_named
from .models.model import JsonSchema, ToolSpec, Usage
from .replies import Waiter
from .text import replace_surrogates
from .threads import run_in_thread

if TYPE_CHECKING:
    from roundelay.network.messages import BaseMessage

    from .agent import Agent
    from .steps import Finish
    from .tool_client import ToolClient

    RunAgent = Callable[[Agent, str], Awaitable[Finish]]

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

Effect = Literal["once", "idempotent"]
"""``once``: an interrupted call is never repeated; ``idempotent``: it may be, with the same ``call_id``."""

FINISH = "finish"
MAX_NAME_CHARS = 64
MAX_STREAMED_CHARS = 10_000_000
MAX_ITEMS = 100_000
CITABLE = ("references", "fragments")
"""In the data of a result: what may be cited. Too long for a record it is shortened rather than left out, or the result
would cite somebody else's."""

MAX_DATA_DEPTH = 48
"""A frame may be 64 deep (docs/protocol.md)."""

_logger = logging.getLogger(__name__)
_DATA = TypeAdapter(dict[str, JsonValue])
_NAME = re.compile(rf"[a-zA-Z0-9_-]{{1,{MAX_NAME_CHARS}}}")  # what OpenAI-compatible servers take


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What a tool may know about the call; a parameter annotated with it is filled in and hidden from the model.

    ``call_id`` is the same when the call is repeated after a restart: use it as the key of an effect that must happen
    once. What is sent by ``client`` has ids derived from it. ``run_agent`` runs another agent on a text, as part of
    this call (`compose.agent_tool`), ``waiter`` waits for replies (`ask`); both are there inside of a reaction only.
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

    def report(self, text: str) -> None:
        """Tell people what the call is at, until the next report or its end. Not for the model."""
        if self.tell is not None:
            self.tell("progress", str(text))

    def stream(self, text: str) -> None:
        """Show people a piece of the result as it comes. The model reads the result as a whole, when the tool has
        returned it."""
        if self.tell is not None:
            self.tell("piece", str(text))


@dataclass(frozen=True, slots=True)
class Output:
    """What a tool may return instead of a plain value: ``content`` for the model, and what is for others.

    ``data`` goes into the record of the result, by the name of what it is for, as JSON: ``references``, ``fragments``,
    ``debug``, ... (the middleware of that name says what it takes). ``summary`` is what later turns keep of a long
    result, once there is no room for it.
    """

    content: object
    data: Mapping[str, JsonValue] = field(default_factory=dict)
    summary: str | None = None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model reads as the result of a call.

    ``threads`` are those that its messages went to, ``usage`` and ``tool_calls`` what agents used that ran inside of
    it. ``is_answer``: it is the reaction's own answer, which ends with it.
    """

    content: str
    ok: bool
    threads: tuple[str, ...] = ()
    usage: Usage = field(default_factory=Usage)
    tool_calls: int = 0
    is_answer: bool = False
    data: Mapping[str, JsonValue] = field(default_factory=dict)
    """What is for hooks and readers of the records rather than for the model, by the name of what it is for."""

    whole: str | None = None
    """All of it, where ``content`` is cut; not recorded."""


_Parse = Callable[[str], dict[str, object]]
_Run = Callable[[ToolContext, Mapping[str, object]], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool; made by `tool`, or of an operation (`network_tools`) or what an MCP server offers. ``timeout_s`` None
    leaves the time to the agent's policy.

    Those that only ask the hub have no limit of time: it answers a repeat with the first result, so the answer is
    waited for, even over a restart of the hub, rather than called unknown.
    """

    name: str
    description: str
    parameters: JsonSchema
    effect: Effect
    timeout_s: float | None
    _parse: _Parse
    _run: _Run
    function: Callable[..., object] | None = None
    """The decorated function, for calling it directly."""

    answers: bool = False
    """Whether the result of a call that went well is the reaction's answer, as it is, and ends it."""

    needs_approval: bool = False
    """Whether a person must approve each call before it is made."""

    should_use: Callable[[ToolContext], bool | Awaitable[bool]] | None = None
    """Asked before each call; False answers it as one to a tool that is disabled here and now."""

    selection_rule: str = ""
    """When a model should choose it, in a sentence: `features.registry` puts those of a turn's tools into the system
    message."""

    @property
    def spec(self) -> ToolSpec:
        """The tool as a model sees it."""
        return ToolSpec(self.name, self.description, self.parameters)

    def parse(self, arguments: str) -> dict[str, object]:
        """Validate what the model wrote. Raises `ToolArgumentsError` with a text for the model, whatever a validator of
        the tool's raises."""
        try:
            return self._parse(arguments)
        except ToolArgumentsError:
            raise
        except Exception as error:  # of a validator of the tool's
            raise ToolArgumentsError(
                f"Wrong arguments for {self.name}: their check failed ({describe_error(error)})."
            ) from error

    async def call(self, context: ToolContext, kwargs: Mapping[str, object]) -> str:
        """Run the tool on parsed arguments: text as it is, anything else as compact JSON. Lets the function's own
        errors through.

        A sync function runs in a thread of its own (`threads`). Cancelling stops the waiting, and an async function; a
        thread goes on to its end unheard, and does not keep the process from ending.
        """
        return (await self.run(context, kwargs))[0]

    async def run(self, context: ToolContext, kwargs: Mapping[str, object]) -> tuple[str, dict[str, JsonValue]]:
        """As `call`; gives the data for others, too."""
        value = await self._run(context, kwargs)
        if not isinstance(value, Output):
            return _write_result(self.name, value), {}
        if not isinstance(value.data, Mapping):
            kind = type(value.data).__name__
            raise ToolError(
                f"The tool {self.name} returned data that is a {kind}: write Output(content, {{name: value}})."
            )
        given = dict(value.data) if value.summary is None else {**value.data, "summary": value.summary}
        try:
            data = _DATA.validate_json(to_json(given, inf_nan_mode="strings"))
        except (PydanticSerializationError, ValueError, RecursionError) as error:
            raise ToolError(f"The tool {self.name} returned data that does not go into JSON: {error}") from error
        if is_deeper(data, MAX_DATA_DEPTH):
            raise ToolError(f"The tool {self.name} returned data that is nested deeper than {MAX_DATA_DEPTH}.")
        for name, listed in data.items():
            if name in CITABLE and isinstance(listed, list):
                data[name] = fit_sources(listed)
        return _write_result(self.name, value.content), data


@overload
def tool(function: Callable[..., object], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    once: bool = False,
    idempotent: bool = False,
    timeout_s: float | None = None,
    answers: bool = False,
    needs_approval: bool = False,
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
    timeout_s: float | None = None,
    answers: bool = False,
    needs_approval: bool = False,
    should_use: Callable[[ToolContext], bool | Awaitable[bool]] | None = None,
    selection_rule: str = "",
) -> Tool | Callable[[Callable[..., object]], Tool]:
    """Make a `Tool` of a typed function: its docstring is the description, its annotations (with pydantic's ``Field``)
    the parameters.

    A tool is ``once`` unless it says ``idempotent``: repeating an effect that nobody vouched for is the worse mistake.
    With ``answers`` the result of a call that went well is the reaction's answer, and ends it; with ``needs_approval``
    a person must approve each call; ``should_use`` may disable it for a call. An async generator streams: what it
    yields is shown as it comes, the result is all of it, or the `Output` that it yields at last. Raises `ToolError` for
    a function that cannot be one.
    """
    if once and idempotent:
        raise ToolError("A tool is either once or idempotent.")
    if timeout_s is not None and not timeout_s > 0:
        raise ToolError(f"The time of a tool, timeout_s, is {timeout_s} and must be more than 0.")
    effect: Effect = "idempotent" if idempotent else "once"

    def decorate(decorated: Callable[..., object]) -> Tool:
        made = _make_tool(decorated, name, description, effect, timeout_s)
        return replace(
            made, answers=answers, needs_approval=needs_approval, should_use=should_use, selection_rule=selection_rule
        )

    return decorate if function is None else decorate(function)


def as_tool(value: Tool | Callable[..., object]) -> Tool:
    """Give a tool as it is, and make one of a plain function."""
    return value if isinstance(value, Tool) else tool(value)


def index_tools(tools: Iterable[Tool | Callable[..., object]]) -> dict[str, Tool]:
    """Give the tools by name, in their order. Raises `ToolError` when two have one name: no provider takes that."""
    index: dict[str, Tool] = {}
    for item in map(as_tool, tools):
        if item.name in index:
            raise ToolError(f"Two tools are named {item.name}: give one of them another with @tool(name=...).")
        index[item.name] = item
    return index


def tool_name(text: str) -> str:
    """Give a name that servers take for a tool."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", text)[:MAX_NAME_CHARS]


def load_tool(spec: str) -> Tool:
    """Import the tool that ``package.module:function`` names; the function need not be decorated. Raises
    `ToolError`."""
    try:
        found = import_named(spec, "tool", "function")
    except ConfigError as error:
        raise ToolError(str(error)) from error
    if not callable(found) and not isinstance(found, Tool):
        raise ToolError(f"the tool {spec!r} is a {type(found).__name__}, not a function")
    return as_tool(found)


def _make_tool(
    function: Callable[..., object], name: str | None, description: str | None, effect: Effect, timeout_s: float | None
) -> Tool:
    name = name or str(getattr(function, "__name__", type(function).__name__))
    if not _NAME.fullmatch(name):
        raise ToolError(
            f"{name!r} is no name for a tool: letters, digits, _ and -, at most {MAX_NAME_CHARS}; give one with @tool(name=...)."
        )
    model, contexts = read_signature(function, name, ToolContext)
    parameters = tidy_schema(model.model_json_schema())
    description = inspect.cleandoc(description or function.__doc__ or "")

    async def run(context: ToolContext, kwargs: Mapping[str, object]) -> object:
        given = {**kwargs, **dict.fromkeys(contexts, context)}
        result: object
        if inspect.isasyncgenfunction(function):
            return await _collect(context, function(**given))
        if inspect.iscoroutinefunction(function):
            result = function(**given)
        else:
            result = await run_in_thread(lambda: _draw(function(**given)), name)
        return await result if inspect.isawaitable(result) else result

    parse = partial(read_arguments, name, model, parameters)
    return Tool(name, description, parameters, effect, timeout_s, parse, run, function)


async def _collect(context: ToolContext, pieces: AsyncGenerator[object, None]) -> object:
    """Show what a tool yields as it comes, and give the whole."""
    texts: list[str] = []
    chars = 0
    result: Output | None = None
    try:
        async with aclosing(pieces) as running:
            async for piece in running:
                if isinstance(piece, Output):
                    result = piece
                    break
                texts.append(piece if isinstance(piece, str) else to_json(piece, inf_nan_mode="strings").decode())
                context.stream(texts[-1])
                if (chars := chars + len(texts[-1])) > MAX_STREAMED_CHARS:
                    raise ToolError(f"The tool streamed more than {MAX_STREAMED_CHARS} characters and was stopped.")
                await asyncio.sleep(0)  # a generator need not wait for anything, and would hold up all others
    except Exception:  # of the tool's code; one that comes while it is closed does not undo the result
        if result is None:
            raise
        _logger.warning("a tool failed after its result", extra={"reaction": context.reaction}, exc_info=True)
    return "".join(texts) if result is None else result


def _draw(value: object) -> object:
    """Give what a generator yields as a list, or the `Output` that it yields at last, in the thread of its tool: one
    without an end would hold up all others."""
    if not inspect.isgenerator(value):
        return value
    items: list[object] = []
    for item in islice(value, MAX_ITEMS + 1):
        if isinstance(item, Output):  # the result, as of an async one
            value.close()
            return item
        items.append(item)
    if len(items) > MAX_ITEMS:
        raise ToolError(f"The tool yielded more than {MAX_ITEMS} items and was stopped.")
    return items


def is_deeper(value: JsonValue, levels: int) -> bool:
    """Tell whether a value is nested deeper than so many levels."""
    match value:
        case dict() | list():
            inner = value.values() if isinstance(value, dict) else value
            return levels == 0 or any(is_deeper(it, levels - 1) for it in inner)
        case _:
            return False


def _write_result(name: str, value: object) -> str:
    if isinstance(value, str):
        return replace_surrogates(value)
    try:
        return to_json(value, inf_nan_mode="strings").decode("utf-8")
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        raise ToolError(
            f"The tool {name} returned a {type(value).__name__}, which does not go into JSON: {error}"
        ) from error
