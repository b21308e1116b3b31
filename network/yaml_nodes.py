"""YAML files that users write: read with line numbers, bound strictly to pydantic models.

Node and agent files pass through here before anything starts. `load_yaml` gives a tree whose nodes know their line; `bind`
turns a tree into a model or says, with file and line, which key or value is wrong and what was probably meant. It opens the one
file it is given and nothing else; it never builds a Python object that a tag names.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, JsonValue, ValidationError
from pydantic_core import ErrorDetails

from .errors import ConfigError

__all__ = ["YamlNode", "bind", "describe_problem", "load_yaml"]

MAX_FILE_BYTES = 1024 * 1024
MAX_NODES = 50_000  # counted after aliases are expanded, which is what bounds a bomb of them
MAX_DEPTH = 64

ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A value of a YAML file that knows where it stands: the line of its key, or of its ``-`` in a list; the first is 1."""

    value: bool | int | float | str | list[YamlNode] | dict[str, YamlNode] | None
    path: Path
    line: int

    def plain(self) -> JsonValue:
        """The value without places, as JSON would hold it."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def error(self, message: str) -> ConfigError:
        """A `ConfigError` that names this place."""
        return ConfigError(message, path=self.path, line=self.line)


def load_yaml(path: Path) -> YamlNode:
    """Read one YAML document; an empty file gives a node whose value is None.

    Scalars are those of YAML 1.2's core schema (https://yaml.org/spec/1.2.2/#103-core-schema), so ``no`` and ``12:30`` are text.
    Anchors work. Duplicate keys, ``<<`` merges, tags that name types and anything beyond the bounds above are a `ConfigError`.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot be read ({reason}); check the path and its permissions", path=path) from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"is larger than {MAX_FILE_BYTES} bytes; split it into several files", path=path)
    try:
        root = yaml.compose(data.decode("utf-8-sig"), _CoreLoader)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError("is not UTF-8 text; save it in that encoding", path=path, line=line) from error
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(path, error) from error
    except yaml.YAMLError as error:  # a character that YAML forbids; it has a position, but no line
        raise ConfigError(f"is not valid YAML: {error}".replace("\n", " "), path=path) from error
    except RecursionError as error:  # PyYAML composes recursively; nothing of ours is half done here
        raise ConfigError(f"is nested deeper than {MAX_DEPTH} levels", path=path) from error
    if root is None:
        return YamlNode(None, path, 1)
    return _Conversion(path).convert(root, root.start_mark.line + 1, depth=1)


def bind(cls: type[ModelT], node: YamlNode) -> ModelT:
    """Build a model from a mapping; raise a `ConfigError` at the first line that does not fit.

    Types are strict (``"1"`` is no number) and unknown keys are refused at every depth, whatever the model's own settings say.
    """
    if not isinstance(node.value, dict):
        raise node.error(f"must be a mapping (`key: value` lines), not {_show(node.plain())}")
    try:
        # By way of JSON, because only there strict mode still takes what a file can hold for a path, a tuple or an enum.
        return cls.model_validate_json(json.dumps(node.plain()), strict=True, extra="forbid")
    except ValidationError as error:
        problems = [_place_problem(cls, node, details) for details in error.errors(include_url=False)]
    # a misspelled key is unknown and its right name missing: the first says more ("did you mean")
    problems.sort(key=lambda problem: (" is missing" in problem[1], problem[0].line))
    place, sentence = problems[0]
    if len(problems) > 1:
        lines = ", ".join(str(other.line) for other, _ in problems[1:6])
        sentence += f" ({len(problems) - 1} more, on line {lines})"
    raise place.error(sentence)


def describe_problem(details: ErrorDetails) -> str:
    """What a value must be, as the end of a sentence: ``must be a whole number, not "abc"``."""
    shown = _show(details["input"])
    kind = details["type"]
    if kind in _MUST_BE:
        advice = (
            "; put it in quotes" if kind == "string_type" and isinstance(details["input"], bool | int | float) else ""
        )
        return f"must be {_MUST_BE[kind]}, not {shown}{advice}"
    if kind == "missing":
        return "is missing"
    if kind in ("value_error", "assertion_error"):
        return str(details["ctx"]["error"])
    message = details["msg"].removeprefix("Input should be ")
    return f"must be {message}, not {shown}" if message != details["msg"] else f"{message[:1].lower()}{message[1:]}"


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's parser with the scalars of YAML 1.2; YAML 1.1 would read ``no`` as false and ``12:30`` as 750."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own registry)


_TAG = "tag:yaml.org,2002:"
for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("merge", r"<<", ["<"]),
):
    _CoreLoader.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), _first)

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
    "model_attributes_type": "a mapping (`key: value` lines)",
}


class _Conversion:
    """One file's PyYAML nodes on their way to ours, with the count that bounds the expansion of aliases."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._nodes_left = MAX_NODES

    def convert(self, node: yaml.Node, line: int, depth: int) -> YamlNode:
        if depth > MAX_DEPTH:  # also where an anchor that contains itself ends
            raise self._error(node, f"nested deeper than {MAX_DEPTH} levels")
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise self._error(node, f"holds more than {MAX_NODES} values, its aliases expanded; split the file")
        match node:
            case yaml.MappingNode(tag="tag:yaml.org,2002:map"):
                return YamlNode(dict(self._entries(node, depth)), self._path, line)
            case yaml.SequenceNode(tag="tag:yaml.org,2002:seq"):
                items = [self.convert(item, item.start_mark.line + 1, depth + 1) for item in node.value]
                return YamlNode(items, self._path, line)
            case yaml.ScalarNode():
                return YamlNode(self._scalar(node), self._path, line)
        raise self._error(node, f"the tag {node.tag!r} is not allowed; write plain text, numbers, lists and mappings")

    def _entries(self, mapping: yaml.MappingNode, depth: int) -> Iterator[tuple[str, YamlNode]]:
        lines: dict[str, int] = {}
        for key, value in mapping.value:
            if key.tag == _TAG + "merge":
                raise self._error(key, "merge keys (`<<`) are not supported; repeat the keys, or alias the whole value")
            if not isinstance(key, yaml.ScalarNode):
                raise self._error(key, "a key must be text")
            name, line = key.value, key.start_mark.line + 1
            if name in lines:
                raise self._error(
                    key, f"the key {_show(name)} stands on line {lines[name]} already; keep one of the two"
                )
            lines[name] = line
            yield name, self.convert(value, line, depth + 1)

    def _scalar(self, node: yaml.ScalarNode) -> bool | int | float | str | None:
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
                case "str" | "merge":  # a `<<` that is no key is text
                    return text
        except ValueError as error:
            raise self._error(node, f"{_show(text)} is no number that can be read") from error
        raise self._error(node, f"{_show(text)} with the tag {node.tag!r} is not allowed; write plain text or a number")

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
        problem = "a second document (`---`) begins; write one document to a file"
    return ConfigError(f"is not valid YAML: {problem}", path=path, line=mark.line + 1 if mark else None)


def _place_problem(cls: type[BaseModel], root: YamlNode, details: ErrorDetails) -> tuple[YamlNode, str]:
    """Where a validation error stands and the sentence for it."""
    place, trail = _follow(root, details["loc"])
    if details["type"] == "extra_forbidden":
        unknown = str(details["loc"][-1])
        return place, f"unknown key {_show(unknown)}{_suggest(unknown, _known_keys(cls, details['loc'][:-1]))}"
    if details["type"] == "missing":
        trail += [str(details["loc"][-1])]
    return place, f"{_show('.'.join(trail))} {describe_problem(details)}" if trail else describe_problem(details)


def _follow(node: YamlNode, loc: Sequence[int | str]) -> tuple[YamlNode, list[str]]:
    """The deepest node on the way ``loc`` and the keys to it; a part that is no key here (a union's tag) is passed over."""
    trail: list[str] = []
    for part in loc:
        if isinstance(node.value, dict) and part in node.value:
            node = node.value[str(part)]
            trail.append(str(part))
        elif isinstance(node.value, list) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            trail.append(str(part + 1))  # people count a list's items from 1
    return node, trail


def _known_keys(cls: type[BaseModel], loc: Sequence[int | str]) -> list[str]:
    models = [cls]
    for part in loc:
        found = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        models = [inner for annotation in found for inner in _models_in(annotation)] or models
    return [field.alias or name for model in models for name, field in model.model_fields.items()]


def _models_in(annotation: Any) -> Iterable[type[BaseModel]]:
    """Every model that an annotation mentions: `X | None`, `list[X]`, `Annotated[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models_in(inner)]


def _suggest(unknown: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(unknown, known, n=1, cutoff=0.6)
    return f"; did you mean {_show(near[0])}?" if near else f"; known here: {', '.join(sorted(set(known)))}"


def _show(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
