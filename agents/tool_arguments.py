"""Arguments of tool calls: converts a function's parameters to a JSON Schema, and validates the arguments that a model
writes.

`tools` uses this module for Python functions. `network_tools` and MCP servers use this module for tools that have only
a schema. A model reads the texts of `ToolArgumentsError` to correct its call, so the texts name the position of each
problem and all parameters. Pure.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic.fields import FieldInfo

from .models.json_schema import describe_type, read_properties
from .models.model import JsonSchema
from .values import ToolArgumentsError, ToolError

MAX_SHOWN_INPUT_CHARS = 80
"""Maximum length of a wrong value that an error quotes, in characters."""

# Pydantic refuses some field names that are valid parameter names (`_x`, `schema`, `model_id`), so each field gets this
# prefix.
_FIELD_PREFIX = "arg_"


def read_signature(function: Callable[..., object], name: str, context_type: type) -> tuple[type[BaseModel], list[str]]:
    """Return a pydantic model of the function's parameters, and the names of the parameters with the type
    ``context_type``. Raises `ToolError`.
    """
    try:
        # `get_type_hints` resolves annotations that are strings (`from __future__ import annotations`). `signature`
        # does not resolve such annotations.
        hints = typing.get_type_hints(function, include_extras=True)
        signature = inspect.signature(function)
    except (NameError, TypeError, ValueError) as error:
        raise ToolError(f"The annotations of the tool {name} cannot be read ({error}).") from error
    fields: dict[str, tuple[object, object]] = {}
    contexts = []
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ToolError(
                f"The tool {name} has the parameter {parameter}. A model passes arguments by name, so this parameter "
                "cannot be used."
            )
        annotation = hints.get(parameter.name)
        if annotation is context_type:
            contexts.append(parameter.name)
            continue
        if annotation is None and parameter.name not in hints:
            raise ToolError(f"The parameter {parameter.name} of the tool {name} has no type: annotate it.")
        default = ... if parameter.default is parameter.empty else parameter.default
        field = default if isinstance(default, FieldInfo) else Field(default)
        fields[_FIELD_PREFIX + parameter.name] = (annotation, field)
    config = ConfigDict(extra="forbid", alias_generator=lambda field: field.removeprefix(_FIELD_PREFIX))
    try:
        model: type[BaseModel] = create_model(name, __config__=config, **fields)  # type: ignore[call-overload]
        # Some types have a validator but no schema. Report a type without a schema now instead of at the first model
        # call.
        model.model_json_schema()
    except PydanticUserError as error:
        raise ToolError(
            f"The tool {name} has a parameter that no JSON Schema can describe ({error.message})."
        ) from error
    return model, contexts


def read_arguments(name: str, model: type[BaseModel], parameters: JsonSchema, text: str) -> dict[str, object]:
    """Validate the text of a call's arguments with the model of a function. Raises `ToolArgumentsError`."""
    try:
        value = model.model_validate_json(text.strip() or "{}")  # some models send an empty text for no arguments
    except ValidationError as error:
        raise ToolArgumentsError(_explain(name, parameters, error)) from error
    return {field.removeprefix(_FIELD_PREFIX): getattr(value, field) for field in model.model_fields}


def read_object(name: str, parameters: JsonSchema, text: str) -> dict[str, object]:
    """Validate the names in the arguments of a tool that has only a schema: all required names and no unknown names.
    The tool's provider, such as the hub, checks the values. Raises `ToolArgumentsError`.
    """
    properties = read_properties(parameters)
    try:
        value: object = json.loads(text.strip() or "{}")
    except (ValueError, RecursionError) as error:
        raise ToolArgumentsError(_format_error(name, parameters, [f"they are not valid JSON: {error}"])) from error
    if not isinstance(value, dict):
        raise ToolArgumentsError(_format_error(name, parameters, ["they must be one JSON object"]))
    problems = [f"{key}: Field required" for key in read_required(parameters) if key not in value]
    if parameters.get("additionalProperties") is False:
        problems += [f"{key}: Extra inputs are not permitted" for key in value if key not in properties]
    if problems:
        raise ToolArgumentsError(_format_error(name, parameters, problems))
    return value


def read_required(parameters: JsonSchema) -> Sequence[object]:
    """Return the names that an object schema requires."""
    required = parameters.get("required")
    return required if isinstance(required, list) else ()


def tidy_schema(schema: Mapping[str, object]) -> dict[str, object]:
    """Return an object schema that strict servers accept. The returned schema contains ``type``, ``properties``,
    ``required`` and ``additionalProperties``, and each array has ``items``. Pydantic's titles are removed, because they
    only cost tokens.
    """
    tidy = _tidy(schema)
    return {
        **tidy,
        "type": "object",
        "properties": tidy.get("properties", {}),
        "required": tidy.get("required", []),
        "additionalProperties": tidy.get("additionalProperties", False),
    }


def _tidy(schema: Mapping[str, object]) -> dict[str, object]:
    tidy: dict[str, object] = {}
    for key, value in schema.items():
        match key, value:
            case "title", str():
                continue
            case (("properties" | "$defs" | "definitions" | "patternProperties" | "dependentSchemas"), dict()):
                tidy[key] = {name: _tidy_any(inner) for name, inner in value.items()}
            case (("default" | "const" | "enum" | "examples"), _):
                tidy[key] = value  # these values are data, not schemas
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
            problems.append(f"{where}: {details['msg']}" + _quote_input(details["type"], details["input"]))
    return _format_error(name, parameters, problems)


def _quote_input(kind: str, value: object) -> str:
    if kind in ("missing", "extra_forbidden"):
        return ""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return f" (not {text if len(text) <= MAX_SHOWN_INPUT_CHARS else text[: MAX_SHOWN_INPUT_CHARS - 3] + '...'})"


def _format_error(name: str, parameters: JsonSchema, problems: Iterable[str]) -> str:
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
