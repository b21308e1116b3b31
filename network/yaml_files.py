"""Reads a YAML file into `YamlNode`s, within bounds. Used by `yaml_nodes.load_yaml` alone, which loads it with the first file.

It opens the one file it is given and nothing else; it never builds a Python object that a tag names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from .errors import ConfigError
from .yaml_nodes import YamlNode, show_value

MAX_FILE_BYTES = 1024 * 1024
MAX_NODES = 50_000  # counted after aliases are expanded, which is what bounds a bomb of them
MAX_DEPTH = 64


def read_yaml(path: Path) -> YamlNode:
    """See `yaml_nodes.load_yaml`."""
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
                    key, f"the key {show_value(name)} stands on line {lines[name]} already; keep one of the two"
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
            raise self._error(node, f"{show_value(text)} is no number that can be read") from error
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
        problem = "a second document (`---`) begins; write one document to a file"
    return ConfigError(f"is not valid YAML: {problem}", path=path, line=mark.line + 1 if mark else None)
