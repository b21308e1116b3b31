"""What a tool's function takes: its parameters as a JSON Schema, and precise words for arguments that do not fit.

`tools` builds on this: `read_signature` makes a pydantic model of a signature, `read_arguments` validates a model's
text with it, `read_object` does what can be done with a schema alone. The texts of `ToolArgumentsError` are read by a
model, which then corrects itself: they name the place and the parameters that there are. Pure.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic.fields import FieldInfo

from roundelay.network.errors import RoundelayError

from .models.json_schema import describe_type, read_properties
from .models.model import JsonSchema

# Before each field's name, since pydantic refuses some that are fine as parameters (`_x`, `schema`, `model_id`).
_FIELD = "arg_"


class ToolError(RoundelayError):
    """A tool cannot be made, or failed in a way that the model should read."""

    code = "tool"


class ToolArgumentsError(ToolError):
    """The model's arguments do not fit; the sentence says where, and which parameters there are."""


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
            case (("properties" | "$defs" | "patternProperties"), dict()):
                tidy[key] = {name: _tidy_any(inner) for name, inner in value.items()}
            case (("default" | "const" | "enum" | "examples"), _):
                tidy[key] = value  # data, not schemas
            case _:
                tidy[key] = _tidy_any(value)
    if tidy.get("type") == "array":
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
