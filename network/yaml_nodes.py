"""YAML files that users write: trees whose nodes know their line, bound strictly to pydantic models.

Node and agent files pass through here before anything starts. `load_yaml` gives a tree whose nodes know their line; `bind`
turns a tree into a model or says, with file and line, which key or value is wrong and what was probably meant.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, JsonValue, ValidationError
from pydantic_core import ErrorDetails

from .errors import ConfigError

__all__ = ["YamlNode", "bind", "describe_problem", "load_yaml"]

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
    Anchors work. Duplicate keys, ``<<`` merges, tags that name types and anything beyond the bounds of `yaml_files` are a `ConfigError`.
    """
    from .yaml_files import read_yaml

    return read_yaml(path)


def bind(cls: type[ModelT], node: YamlNode) -> ModelT:
    """Build a model from a mapping; raise a `ConfigError` at the first line that does not fit.

    Types are strict (``"1"`` is no number) and unknown keys are refused at every depth, whatever the model's own settings say.
    """
    if not isinstance(node.value, dict):
        raise node.error(f"must be a mapping (`key: value` lines), not {show_value(node.plain())}")
    try:
        # By way of JSON, because only there strict mode still takes what a file can hold for a path, a tuple or an enum.
        return cls.model_validate_json(json.dumps(node.plain()), strict=True, extra="forbid")
    except ValidationError as error:
        errors = error.errors(include_url=False)
        # A list whose items do not fit is called too short as well.
        wrong = [it for it in errors if it["type"] != "too_short" or not any(_is_inside(other, it) for other in errors)]
        problems = [_place_problem(cls, node, details) for details in wrong]
    # a misspelled key is unknown and its right name missing: the first says more ("did you mean")
    problems.sort(key=lambda problem: (" is missing" in problem[1], problem[0].line))
    place, sentence = problems[0]
    if len(problems) > 1:
        lines = ", ".join(str(other.line) for other, _ in problems[1:6])
        sentence += f" ({len(problems) - 1} more, on line {lines})"
    raise place.error(sentence)


def describe_problem(details: ErrorDetails) -> str:
    """What a value must be, as the end of a sentence: ``must be a whole number, not "abc"``."""
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
    "model_attributes_type": "a mapping (`key: value` lines)",
}


def _is_inside(details: ErrorDetails, outer: ErrorDetails) -> bool:
    """Whether an error is of something inside of what another one is of."""
    return len(details["loc"]) > len(outer["loc"]) and details["loc"][: len(outer["loc"])] == outer["loc"]


def _place_problem(cls: type[BaseModel], root: YamlNode, details: ErrorDetails) -> tuple[YamlNode, str]:
    """Where a validation error stands and the sentence for it."""
    place, trail = _follow(root, details["loc"])
    if details["type"] == "extra_forbidden":
        unknown = str(details["loc"][-1])
        return place, f"unknown key {show_value(unknown)}{_suggest(unknown, _known_keys(cls, details['loc'][:-1]))}"
    if details["type"] == "missing":
        trail += [str(details["loc"][-1])]
    return place, f"{show_value('.'.join(trail))} {describe_problem(details)}" if trail else describe_problem(details)


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
    listed = ", ".join(sorted(set(known))) or "none, write {}"
    return f"; did you mean {show_value(near[0])}?" if near else f"; known here: {listed}"


def show_value(value: object) -> str:
    """A value as a sentence names it."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
