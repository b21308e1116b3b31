"""Strict parser that reads users' YAML files into pydantic models.

`load_yaml` parses a file to a tree whose nodes have line numbers. `bind` converts the tree to a model. Errors name the
file, the line, the wrong key or value, and what the user probably meant. `bind_values` and the base class `Settings`
apply the same rules and error texts to values from a program.

This module opens only the given file, and YAML tags never create Python objects. PyYAML is imported when the first file
is read.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    JsonValue,
    ValidationError,
)
from pydantic_core import ErrorDetails, to_jsonable_python

from .errors import ConfigError
from .text import truncate

if TYPE_CHECKING:
    import yaml

__all__ = ["Settings", "YamlNode", "bind", "bind_values", "describe_problem", "load_yaml", "show_value"]

ModelT = TypeVar("ModelT", bound=BaseModel)

MAX_FILE_BYTES = 1024 * 1024
MAX_NODES = 50_000  # counted after aliases are expanded, to stop an alias bomb ("billion laughs")
MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A value of a YAML file. ``line`` is the line of the value's key, or of the ``-`` of a list item. Lines are
    counted from 1."""

    value: bool | int | float | str | list[YamlNode] | dict[str, YamlNode] | None
    path: Path
    line: int

    def plain(self) -> JsonValue:
        """Return the value as plain JSON, without line numbers."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def error(self, message: str) -> ConfigError:
        """Return a `ConfigError` that names this node's file and line."""
        return ConfigError(message, path=self.path, line=self.line)


def bind(cls: type[ModelT], node: YamlNode) -> ModelT:
    """Build a model from a mapping. Raises `ConfigError` for the first line with an error.

    Types are strict (``"1"`` is not a number). Unknown keys are refused at every depth, even if the model's own
    settings allow them.
    """
    if not isinstance(node.value, dict):
        raise node.error(f"must be a mapping (`key: value` lines), not {show_value(node.plain())}")
    try:
        return _validate(cls, node)
    except ValidationError as error:
        problems = _list_problems(cls, node, error)
    place, sentence = problems[0]
    if len(problems) > 1:
        lines = ", ".join(str(other.line) for other, _ in problems[1:6])
        sentence += f" ({len(problems) - 1} more, on line {lines})"
    raise place.error(sentence)


def bind_values(cls: type[ModelT], whose: str, given: Mapping[str, object]) -> ModelT:
    """Build a model from a program's values, with the rules and error texts of `bind`.

    Models and dataclasses are accepted as mappings. Instead of a line, the `ConfigError` names ``whose``, the owner of
    the options.
    """
    node = _tree_of(given)
    try:
        return _validate(cls, node)
    except ValidationError as error:
        raise ConfigError(f"{whose}: {_list_problems(cls, node, error)[0][1]}") from error


def _validate(cls: type[ModelT], node: YamlNode) -> ModelT:
    # Convert to JSON first: in strict mode, pydantic converts text to a path and a list to a tuple only in JSON input.
    return cls.model_validate_json(json.dumps(node.plain()), strict=True, extra="forbid")


class Settings(BaseModel):
    """Base class of frozen models. Values from a program are checked by the same rules as values from a file, and raise
    `ConfigError` with the same text. Fields that can be set only by a program have ``exclude``."""

    # Hide the input in errors: a value may contain a password, and a traceback would show it.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    if not TYPE_CHECKING:  # type checkers see an ordinary model

        def __init__(self, /, **given: Any) -> None:
            whose = type(self)
            in_files = {name: value for name, value in given.items() if not _is_in_code(whose, name)}
            bind_values(whose, whose.__name__, in_files)
            super().__init__(**given)

        # Lets pydantic skip this `__init__` when it validates values from a file. `bind` checks these values itself.
        __init__.__pydantic_base_init__ = True


def _is_in_code(cls: type[BaseModel], name: str) -> bool:
    return name in cls.model_fields and cls.model_fields[name].exclude is True


def _list_problems(cls: type[BaseModel], node: YamlNode, error: ValidationError) -> list[tuple[YamlNode, str]]:
    """Return the position and error text of each problem, the most helpful problem first."""
    errors = error.errors(include_url=False)
    # If a list contains a wrong item, pydantic also reports the list as too short. Drop that second error.
    wrong = [
        problem
        for problem in errors
        if problem["type"] != "too_short" or not any(_is_inside(other, problem) for other in errors)
    ]
    problems = [_place_problem(cls, node, details) for details in wrong]
    # A misspelled key causes two errors: the key is unknown, and the right key is missing. Put the unknown key first,
    # because its error suggests the right key.
    return sorted(problems, key=lambda problem: (" is missing" in problem[1], problem[0].line))


def _tree_of(given: object) -> YamlNode:
    """Convert a program's value to a tree, as if it had been read from a file."""

    def convert(value: Any) -> YamlNode:
        if isinstance(value, dict):
            value = {key: convert(inner) for key, inner in value.items()}
        elif isinstance(value, list):
            value = [convert(inner) for inner in value]
        return YamlNode(value, Path(), 1)

    return convert(to_jsonable_python(given, fallback=repr))


def describe_problem(details: ErrorDetails) -> str:
    """Describe a validation error without the field's name, as the rest of a sentence: ``must be a whole number, not
    "abc"``."""
    shown = show_value(details["input"])
    kind = details["type"]
    if kind in _MUST_BE:
        advice = (
            "; put it in quotes" if kind == "string_type" and isinstance(details["input"], bool | int | float) else ""
        )
        return f"must be {_MUST_BE[kind]}, not {shown}{advice}"
    if kind == "missing":
        return "is missing"
    if kind == "too_short":
        least: int = details["ctx"]["min_length"]
        return f"must have at least {least} {'item' if least == 1 else 'items'}"
    if kind in ("value_error", "assertion_error"):
        return str(details["ctx"]["error"])
    message = details["msg"].removeprefix("Input should be ")
    return f"must be {message}, not {shown}" if message != details["msg"] else f"{message[:1].lower()}{message[1:]}"


_MUST_BE = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list (`- item` lines)",
    "tuple_type": "a list (`- item` lines)",
    "set_type": "a list (`- item` lines)",
    "dict_type": "a mapping (`key: value` lines)",
    "model_type": "a mapping (`key: value` lines)",
    "dataclass_type": "a mapping (`key: value` lines)",
    "model_attributes_type": "a mapping (`key: value` lines)",
}


def _is_inside(details: ErrorDetails, outer: ErrorDetails) -> bool:
    """Return whether an error is about a part of the value that another error is about."""
    return len(details["loc"]) > len(outer["loc"]) and details["loc"][: len(outer["loc"])] == outer["loc"]


def _place_problem(cls: type[BaseModel], root: YamlNode, details: ErrorDetails) -> tuple[YamlNode, str]:
    """Return the node that a validation error is about, and the error text."""
    place, trail = _follow(root, details["loc"])
    if details["type"] in ("extra_forbidden", "unexpected_keyword_argument"):  # of a model, of a dataclass
        unknown = str(details["loc"][-1])
        return place, f"unknown key {show_value(unknown)}{_suggest(unknown, _models_at(cls, details['loc'][:-1]))}"
    if details["type"] == "missing":
        trail += [str(details["loc"][-1])]
    return place, f"{show_value('.'.join(trail))} {describe_problem(details)}" if trail else describe_problem(details)


def _follow(node: YamlNode, loc: Sequence[int | str]) -> tuple[YamlNode, list[str]]:
    """Return the deepest node on the path ``loc``, and the keys that lead to this node. Parts of ``loc`` that are not
    keys, such as a union's tag, are skipped."""
    trail: list[str] = []
    for part in loc:
        if isinstance(node.value, dict) and part in node.value:
            node = node.value[str(part)]
            trail.append(str(part))
        elif isinstance(node.value, list) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            trail.append(str(part + 1))  # people count the items of a list from 1
    return node, trail


def _models_at(cls: type[Any], loc: Sequence[int | str]) -> list[type[Any]]:
    models = [cls]
    for part in loc:
        annotations = [kinds[str(part)] for model in models if part in (kinds := _key_types(model))]
        models = [inner for annotation in annotations for inner in _models_in(annotation)] or models
    return models


def _key_types(model: type[Any]) -> dict[str, Any]:
    """Return the keys that a model or a dataclass accepts, with their types."""
    if is_dataclass(model):
        hints = get_type_hints(model)
        return {field.name: hints[field.name] for field in fields(model)}
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _models_in(annotation: Any) -> Iterable[type[Any]]:
    """Return every model or dataclass in an annotation, such as `X | None`, `list[X]` or `Annotated[X, ...]`."""
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_dataclass(annotation)):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models_in(inner)]


def _suggest(unknown: str, models: Sequence[type[Any]]) -> str:
    """Return a suggestion for an unknown key: the section that the key belongs to, or a key with a similar name."""
    types = {key: annotation for model in models for key, annotation in _key_types(model).items()}
    outer = [
        key
        for key, annotation in types.items()
        if any(unknown in _key_types(model) for model in _models_in(annotation))
    ]
    if len(outer) == 1:
        return f"; it belongs under {show_value(outer[0])}"
    names = list(types)
    near = difflib.get_close_matches(unknown, names, n=1, cutoff=0.6)
    listed = ", ".join(sorted(set(names))) or "none, write {}"
    return f"; did you mean {show_value(near[0])}?" if near else f"; known here: {listed}"


def show_value(value: object) -> str:
    """Format a value as JSON for an error text, truncated to 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return truncate(text, 60)


# --- files


def _read_bounded(path: Path) -> bytes:
    """Return the content of a file. Read at most one byte more than the limit, because a device file may be endless."""
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES + 1)


_AS_LOADED: dict[Path, bytes] = {}


def override_file(path: Path, data: bytes) -> None:
    """Make `load_yaml` use ``data`` as the content of a file, even if the file has changed since a node loaded it."""
    _AS_LOADED[path] = data


def load_yaml(path: Path) -> YamlNode:
    """Read a file with one YAML document. For an empty file, the value of the returned node is None.

    Scalars follow the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema), so ``no`` and ``12:30``
    are text. Anchors are supported. Raises `ConfigError` for duplicate keys, ``<<`` merges, tags that name types, and
    files that exceed this module's limits of size, depth or nodes.
    """
    import yaml

    try:
        # Prefer the content that the node was started with, because the file may have been edited since.
        data = _AS_LOADED.get(path) or _read_bounded(path)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot be read ({reason}); check the path and its permissions", path=path) from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"is larger than {MAX_FILE_BYTES} bytes; split it into several files", path=path)
    try:
        root = yaml.compose(data.decode("utf-8-sig"), _core_loader())
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError("is not UTF-8 text; save it in that encoding", path=path, line=line) from error
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(path, error) from None  # PyYAML's error quotes the line, which may contain a password
    except yaml.YAMLError as error:  # for example, the error for a forbidden character has no line number
        raise ConfigError(f"is not valid YAML: {error}".replace("\n", " "), path=path) from error
    except RecursionError as error:  # PyYAML composes nested values recursively
        raise ConfigError(f"is nested deeper than {MAX_DEPTH} levels", path=path) from error
    if root is None:
        return YamlNode(None, path, 1)
    return _Conversion(path).convert(root, root.start_mark.line + 1, depth=1)


_TAG = "tag:yaml.org,2002:"
_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("merge", r"<<", ["<"]),
)
"""Scalar types of YAML 1.2, each with its tag, its pattern, and its possible first characters."""


@cache
def _core_loader() -> type[yaml.SafeLoader]:
    """Return a PyYAML loader with the scalars of YAML 1.2. PyYAML's own loader follows YAML 1.1, which reads ``no`` as
    false and ``12:30`` as 750."""
    import yaml

    class CoreLoader(yaml.SafeLoader):
        # Start with an empty registry of scalar types, instead of PyYAML's registry for YAML 1.1.
        yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    for name, pattern, first in _SCALARS:
        CoreLoader.add_implicit_resolver(_TAG + name, re.compile(rf"(?:{pattern})\Z"), first)
    return CoreLoader


class _Conversion:
    """Converter of one file's PyYAML nodes to `YamlNode`. A counter limits the expansion of aliases."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._nodes_left = MAX_NODES

    def convert(self, node: yaml.Node, line: int, depth: int) -> YamlNode:
        if depth > MAX_DEPTH:  # this also stops an anchor that contains itself
            raise self._error(node, f"nested deeper than {MAX_DEPTH} levels")
        # Count the values for each use of an alias, because a small file could expand to billions of values.
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise self._error(
                node, f"contains more than {MAX_NODES} values after its aliases are expanded; split the file"
            )
        import yaml

        match node:
            case yaml.MappingNode(tag="tag:yaml.org,2002:map"):
                return YamlNode(dict(self._entries(node, depth)), self._path, line)
            case yaml.SequenceNode(tag="tag:yaml.org,2002:seq"):
                items = [self.convert(item, item.start_mark.line + 1, depth + 1) for item in node.value]
                return YamlNode(items, self._path, line)
            case yaml.ScalarNode():
                return YamlNode(self._scalar(node), self._path, line)
        raise self._error(node, f"the tag {node.tag!r} is not allowed; write plain text, numbers, lists and mappings")

    def _entries(self, mapping: yaml.Node, depth: int) -> Iterator[tuple[str, YamlNode]]:
        lines: dict[str, int] = {}
        for key, value in mapping.value:
            if key.tag == _TAG + "merge":
                raise self._error(key, "merge keys (`<<`) are not supported; repeat the keys, or alias the whole value")
            if not isinstance(key.value, str):
                raise self._error(key, "a key must be text")
            name, line = key.value, key.start_mark.line + 1
            # Refuse duplicate keys. YAML libraries silently keep the last key, so the first setting would have no
            # effect.
            if name in lines:
                raise self._error(
                    key, f"the key {show_value(name)} is already on line {lines[name]}; keep one of the two"
                )
            lines[name] = line
            yield name, self.convert(value, line, depth + 1)

    def _scalar(self, node: yaml.Node) -> bool | int | float | str | None:
        text: str = node.value
        try:
            match node.tag.removeprefix(_TAG):
                case "null":
                    return None
                case "bool" if text.lower() in ("true", "false"):
                    return text.lower() == "true"
                case "int":
                    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
                case "float" if math.isfinite(number := float(text)):
                    return number
                case "str" | "merge":  # a `<<` that is not a key is text
                    return text
        except ValueError as error:
            raise self._error(node, f"{show_value(text)} is not a valid number") from error
        raise self._error(
            node, f"{show_value(text)} with the tag {node.tag!r} is not allowed; write plain text or a number"
        )

    def _error(self, node: yaml.Node, message: str) -> ConfigError:
        return ConfigError(message, path=self._path, line=node.start_mark.line + 1)


def _syntax_error(path: Path, error: yaml.MarkedYAMLError) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    problem = error.problem or error.context or "unknown problem"
    if r"'\t'" in problem:
        problem += "; indent with spaces"
    elif "mapping values are not allowed" in problem:
        problem += "; put text that contains `: ` in quotes"
    elif "single document" in (error.context or ""):
        problem = "a second document (`---`) begins; write one document per file"
    return ConfigError(f"is not valid YAML: {problem}", path=path, line=mark.line + 1 if mark else None)
