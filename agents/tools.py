"""Tools: typed functions that a model may call, with a JSON Schema for the model and precise answers to wrong
arguments.

`@tool` makes a `Tool` of a function; those that every agent has, and those of the hub's mods, are made in
`network_tools`. `reaction` looks a call up by name and lets the tool parse the model's arguments, `calls` awaits it;
timeouts, size limits and the answer to an unknown name are theirs. The file has three parts: the tool as others have
it, what its function takes, what it gives. The texts of `ToolArgumentsError` are read by a model, which then corrects
itself: they name the place and the parameters that there are. Nothing here knows a model or keeps state.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import typing
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, overload

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
    create_model,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError, to_json

from roundelay.network.errors import ConfigError
from roundelay.network.frames import to_plain

from .approval_rule import ApprovalRule
from .import_path import import_named
from .isolation import describe_error, redact_error, run_in_thread
from .models.json_schema import describe_type, read_properties
from .models.model import MAX_TOKENS, JsonSchema, ToolCall, ToolSpec, Usage
from .replies import Waiter
from .text import MAX_NAME_CHARS, replace_surrogates
from .values import ToolArgumentsError, ToolError, ToolResult

if TYPE_CHECKING:
    from roundelay.network.messages import BaseMessage

    from .tool_client import ToolClient
    from .values import Finish

    RunAgent = Callable[[Any, str], Awaitable[Finish]]  # an agent has tools, so no tool's type can name one

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
MAX_STREAMED_CHARS = 10_000_000
MAX_ITEMS = 100_000
MAX_DATA_DEPTH = 48
"""A frame may be 64 deep (docs/protocol.md)."""

_logger = logging.getLogger(__name__)
_DATA = TypeAdapter(dict[str, JsonValue])
_NAME = re.compile(rf"[a-zA-Z0-9_-]{{1,{MAX_NAME_CHARS}}}")  # what OpenAI-compatible servers take


ReadAnswers = Callable[
    [Sequence[tuple[str, Mapping[str, JsonValue]]]], Awaitable[tuple[Sequence[str], Mapping[str, JsonValue]]]
]


async def read_texts(
    answers: Sequence[tuple[str, Mapping[str, JsonValue]]],
) -> tuple[Sequence[str], Mapping[str, JsonValue]]:
    """Read answers as they are: their texts alone."""
    return [text for text, _ in answers], {}


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What a tool may know about the call; a parameter annotated with it is filled in and hidden from the model.

    ``call_id`` is the same when the call is repeated after a restart: use it as the key of an effect that must happen
    once. What is sent by ``client`` has ids derived from it. ``run_agent`` runs another agent on a text, as part of
    this call (`agent_tools.agent_tool`), ``waiter`` waits for replies (`ask`); both are there inside of a reaction only.
    ``state`` is what the runner was made with for its tools, in a scenario its ``state``.
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
    take_usage: Callable[[str, Usage], None] | None = None

    def report_usage(self, model: str, usage: Usage) -> None:
        """Tell what a model used that the tool asked: it counts in the reaction, in budgets and in ``roundelay cost``.
        Raises `ValueError` for what is no count of tokens."""
        for name, count in asdict(usage).items():
            if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MAX_TOKENS:
                raise ValueError(f"The usage of {model}: {name} is {count!r} and must be a number of tokens.")
        if self.take_usage is not None:
            self.take_usage(replace_surrogates(str(model)), usage)

    read_answers: ReadAnswers = read_texts
    """Reads what other agents answered the call, as the agent's middleware has it (`Middleware.read_answers`)."""

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

    approval: ApprovalRule = field(default_factory=ApprovalRule)
    """Who that is."""

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

        A sync function runs in a thread of its own (`run_in_thread`). Cancelling stops the waiting, and an async
        function; a thread goes on to its end unheard, and does not keep the process from ending.
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
            data = _DATA.validate_json(to_json(given, inf_nan_mode="strings", fallback=to_plain))
        except (PydanticSerializationError, ValueError, RecursionError) as error:
            raise ToolError(f"The tool {self.name} returned data that does not go into JSON: {error}") from error
        if is_deeper(data, MAX_DATA_DEPTH):
            raise ToolError(f"The tool {self.name} returned data that is nested deeper than {MAX_DATA_DEPTH}.")
        return _write_result(self.name, value.content), data


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A call to run, its arguments validated. ``index`` is its place among the calls of its turn."""

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
    """Make a `Tool` of a typed function: its docstring is the description, its annotations (with pydantic's ``Field``)
    the parameters.

    A tool is ``once`` unless it says ``idempotent``: repeating an effect that nobody vouched for is the worse mistake.
    With ``answers`` the result of a call that went well is the reaction's answer, and ends it; with ``needs_approval``
    a person must approve each call: one of the ``approvers`` (ids of people, ``role:NAME``) where some are named, which
    implies it. What the tool leaves out of that is as the agent's `AgentPolicy` says. ``should_use`` may disable it for a call. An async generator streams: what it
    yields is shown as it comes, the result is all of it, or the `Output` that it yields at last. Raises `ToolError` for
    a function that cannot be one.
    """
    if once and idempotent:
        raise ToolError("A tool is either once or idempotent.")
    if timeout_s is not None and not timeout_s > 0:
        raise ToolError(f"The time of a tool, timeout_s, is {timeout_s} and must be more than 0.")
    if isinstance(approvers, str) or isinstance(escalate_to, str):
        raise ToolError("approvers and escalate_to of a tool are lists: write approvers=['mia'].")
    try:
        approval = ApprovalRule(
            tuple(approvers), approvals_needed, tuple(escalate_to), requester_may_approve, approval_timeout_s
        )
    except ValueError as error:
        raise ToolError(f"Who approves the calls of a tool cannot be read: {error}.") from error

    def decorate(decorated: Callable[..., object]) -> Tool:
        known = name or str(getattr(decorated, "__name__", type(decorated).__name__))
        if not _NAME.fullmatch(known):
            raise ToolError(
                f"{known!r} is no name for a tool: letters, digits, _ and -, at most {MAX_NAME_CHARS}; "
                "give one with @tool(name=...)."
            )
        model, contexts = read_signature(decorated, known, ToolContext)
        parameters = tidy_schema(model.model_json_schema())
        return Tool(
            known,
            inspect.cleandoc(description or decorated.__doc__ or ""),
            parameters,
            "idempotent" if idempotent else "once",
            timeout_s,
            partial(read_arguments, known, model, parameters),
            partial(_run_function, decorated, known, contexts),
            decorated,
            answers=answers,
            needs_approval=needs_approval or approval != ApprovalRule(),
            approval=approval,
            should_use=should_use,
            selection_rule=selection_rule,
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


# --- what its function takes

# Before each field's name, since pydantic refuses some that are fine as parameters (`_x`, `schema`, `model_id`).
_FIELD = "arg_"


def read_signature(function: Callable[..., object], name: str, context_type: type) -> tuple[type[BaseModel], list[str]]:
    """Give the model of the parameters, and the names of those that are annotated with the context type. Raises
    `ToolError`."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        signature = inspect.signature(function)
    except (NameError, TypeError, ValueError) as error:
        raise ToolError(f"The annotations of the tool {name} cannot be read ({error}).") from error
    fields: dict[str, tuple[object, object]] = {}
    contexts = []
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ToolError(f"The tool {name} takes {parameter}: a model calls by name, so each parameter needs one.")
        annotation = hints.get(parameter.name)
        if annotation is context_type:
            contexts.append(parameter.name)
            continue
        if annotation is None and parameter.name not in hints:
            raise ToolError(f"The parameter {parameter.name} of the tool {name} has no type: annotate it.")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[_FIELD + parameter.name] = (annotation, default if isinstance(default, FieldInfo) else Field(default))
    config = ConfigDict(extra="forbid", alias_generator=_strip_prefix)
    try:
        model: type[BaseModel] = create_model(name, __config__=config, **fields)  # type: ignore[call-overload]
        model.model_json_schema()
    except PydanticUserError as error:
        raise ToolError(
            f"The tool {name} has a parameter that no JSON Schema can describe ({error.message})."
        ) from error
    return model, contexts


def _strip_prefix(field: str) -> str:
    return field.removeprefix(_FIELD)


def read_arguments(name: str, model: type[BaseModel], parameters: JsonSchema, text: str) -> dict[str, object]:
    """Validate the text of a call's arguments. Raises `ToolArgumentsError`."""
    try:
        value = model.model_validate_json(text.strip() or "{}")  # some models write nothing for no arguments
    except ValidationError as error:
        raise ToolArgumentsError(_explain(name, parameters, error)) from error
    return {field.removeprefix(_FIELD): getattr(value, field) for field in model.model_fields}


def read_object(name: str, parameters: JsonSchema, text: str) -> dict[str, object]:
    """Read arguments of which only the schema is known: an object, with all that is required and no stranger. Raises
    `ToolArgumentsError`."""
    properties = read_properties(parameters)
    try:
        value: object = json.loads(text.strip() or "{}")
    except (ValueError, RecursionError) as error:
        raise ToolArgumentsError(_compose(name, parameters, [f"they are not valid JSON: {error}"])) from error
    if not isinstance(value, dict):
        raise ToolArgumentsError(_compose(name, parameters, ["they must be one JSON object"]))
    problems = [f"{key}: Field required" for key in read_required(parameters) if key not in value]
    if parameters.get("additionalProperties") is False:
        problems += [f"{key}: Extra inputs are not permitted" for key in value if key not in properties]
    if problems:
        raise ToolArgumentsError(_compose(name, parameters, problems))
    return value


def tidy_schema(schema: Mapping[str, object]) -> dict[str, object]:
    """Give an object schema as strict servers want it: all four keys, arrays with items, without pydantic's titles
    (tokens for nothing)."""
    tidy = _tidy(schema)
    return {
        **tidy,
        "type": "object",
        "properties": tidy.get("properties", {}),
        "required": tidy.get("required", []),
        "additionalProperties": tidy.get("additionalProperties", False),
    }


def read_required(parameters: JsonSchema) -> Sequence[object]:
    """Give the names that an object schema requires."""
    required = parameters.get("required")
    return required if isinstance(required, list) else ()


def _tidy(schema: Mapping[str, object]) -> dict[str, object]:
    tidy: dict[str, object] = {}
    for key, value in schema.items():
        match key, value:
            case "title", str():
                continue
            case (("properties" | "$defs" | "definitions" | "patternProperties" | "dependentSchemas"), dict()):
                tidy[key] = {name: _tidy_any(inner) for name, inner in value.items()}
            case (("default" | "const" | "enum" | "examples"), _):
                tidy[key] = value  # data, not schemas
            case _:
                tidy[key] = _tidy_any(value)
    kinds = tidy.get("type")
    if kinds == "array" or (isinstance(kinds, list) and "array" in kinds):
        tidy.setdefault("items", {})
    return tidy


def _tidy_any(value: object) -> object:
    if isinstance(value, dict):
        return _tidy(value)
    return [_tidy_any(item) for item in value] if isinstance(value, list) else value


def _explain(name: str, parameters: JsonSchema, error: ValidationError) -> str:
    problems = []
    for details in error.errors(include_url=False):
        where = ".".join(str(part) for part in details["loc"])
        if details["type"] == "json_invalid":
            problems.append(f"they are not valid JSON: {details['ctx']['error']}")
        elif not where:
            problems.append("they must be one JSON object")
        else:
            problems.append(f"{where}: {details['msg']}" + _show_input(details["type"], details["input"]))
    return _compose(name, parameters, problems)


def _show_input(kind: str, value: object) -> str:
    if kind in ("missing", "extra_forbidden"):
        return ""
    try:
        shown = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        shown = repr(value)
    return f" (not {shown if len(shown) <= 80 else shown[:77] + '...'})"


def _compose(name: str, parameters: JsonSchema, problems: Iterable[str]) -> str:
    return f"Wrong arguments for {name}: {'; '.join(problems)}. {_list_parameters(parameters)}"


def _list_parameters(parameters: JsonSchema) -> str:
    properties, required = read_properties(parameters), read_required(parameters)
    if not properties:
        return "It takes no parameters: {}."
    listed = [
        f"{name} ({describe_type(schema)}{', required' if name in required else ''})"
        for name, schema in properties.items()
    ]
    return f"Its parameters: {', '.join(listed)}."


# --- what it gives


async def _run_function(
    function: Callable[..., object],
    name: str,
    contexts: Sequence[str],
    context: ToolContext,
    kwargs: Mapping[str, object],
) -> object:
    given = {**kwargs, **dict.fromkeys(contexts, context)}
    result: object
    if inspect.isasyncgenfunction(function):
        return await _collect(context, function(**given))
    if inspect.iscoroutinefunction(function):
        result = function(**given)
    else:
        result = await run_in_thread(lambda: _draw(function(**given)), name)
    return await result if inspect.isawaitable(result) else result


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
                texts.append(
                    piece
                    if isinstance(piece, str)
                    else to_json(piece, inf_nan_mode="strings", fallback=to_plain).decode()
                )
                context.stream(texts[-1])
                if (chars := chars + len(texts[-1])) > MAX_STREAMED_CHARS:
                    raise ToolError(f"The tool streamed more than {MAX_STREAMED_CHARS} characters and was stopped.")
                await asyncio.sleep(0)  # a generator need not wait for anything, and would hold up all others
    except Exception as error:  # of the tool's code; one that comes while it is closed does not undo the result
        if result is None:
            raise
        told = {"reaction": context.reaction}
        _logger.warning("a tool failed after its result", extra=told, exc_info=redact_error(error))
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
        return to_json(value, inf_nan_mode="strings", fallback=to_plain).decode("utf-8")
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        raise ToolError(
            f"The tool {name} returned a {type(value).__name__}, which does not go into JSON: {error}"
        ) from error
