"""Adds the entries of the bridge to the configuration files of a coding agent, and removes them.

This module performs no IO. Its functions get the text of a file and return the new text. Entries of other programs,
comments (if the format has them), indentation and line ends stay unchanged. `hosts` defines the entries of each coding
agent. `installer` reads and writes the files.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from roundelay.network.errors import ConfigError

NAME = "roundelay"
HOOK_MARK = " bridge deliver "
"""Text that appears in every hook command of the bridge, and in no other command."""
_ANY_ENTRY = re.compile(r"\bbridge\W+(deliver|mcp)\b")
"""Pattern that matches every file with an entry of the bridge, even if the words of the command are a list in JSON or
TOML.
"""


class HostFile(Protocol):
    """One configuration file of a host."""

    @property
    def path(self) -> str:
        """Path of the file relative to the project."""

    def add(self, before: str | None) -> str:
        """Return the text of the file with the entries of the bridge added. Raises `ConfigError` if the file cannot be
        changed without loss.
        """

    def take_out(self, text: str) -> str | None:
        """Return the text of the file without the entries of the bridge. Return the text unchanged if it has no
        entries, and None if the file would be empty. Raises `ConfigError` if the file cannot be changed without loss.
        """


@dataclass(frozen=True)
class JsonFile:
    """A JSON file in which the bridge sets members, and adds items to lists that other programs also use."""

    path: str
    members: Mapping[tuple[str, ...], object] = field(default_factory=dict)
    items: Mapping[tuple[str, ...], object] = field(default_factory=dict)
    frame: Mapping[str, object] = field(default_factory=dict)
    """Contents that a new file gets in addition to the entries of the bridge."""

    def add(self, before: str | None) -> str:
        root = self._read(before, "add") if before is not None and before.strip() else dict(self.frame)
        old = json.dumps(root)
        # Remove old hooks first. Otherwise a changed command would run in addition to the old one.
        self._drop(root, keeps=self.items)
        for path, value in self.members.items():
            place = self._reach(root, path[:-1], {})
            place[path[-1]] = self._renew(place.get(path[-1]), value, ".".join(path))
        for path, item in self.items.items():
            listed = self._reach(root, path, [])
            if item not in listed:
                listed.append(item)
        # Return unchanged content byte for byte, so that a second installation does not reformat a file of the project.
        return before if before is not None and json.dumps(root) == old else _write_json(root, before)

    def take_out(self, text: str) -> str | None:
        if not _ANY_ENTRY.search(text):
            return text
        root = self._read(text, "take out")
        old = json.dumps(root)
        for path, value in self.members.items():
            if _is_our_entry(_find(root, path), value):
                _prune(root, path, removes=True)
        for path in self._drop(root, keeps={}):
            _prune(root, path, removes=False)
        if json.dumps(root) == old:
            return text
        # Delete a file that contains nothing else.
        return None if not root or root == dict(self.frame) else _write_json(root, text)

    def _read(self, text: str, purpose: Literal["add", "take out"]) -> dict[str, Any]:
        try:
            root = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_refuse_duplicates)
        except ValueError as error:
            what_to_do = (
                "Add this to the file yourself:"
                if purpose == "add"
                else "Remove the entries with `bridge deliver` or `bridge mcp` yourself; the installation wrote:"
            )
            raise ConfigError(
                f"{self.path} is not plain JSON ({error}), so its comments would be lost. {what_to_do}",
                to_paste=self.add(None).rstrip(),
            ) from error
        if not isinstance(root, dict):
            raise ConfigError(f"{self.path} is not a JSON object. Correct it, or move it away.")
        return root

    def _renew(self, present: object, value: object, name: str) -> object:
        """Return the new value of a member. Keys that other programs added to an entry of the bridge are kept."""
        if not (isinstance(present, dict) and isinstance(value, dict)) or not _is_our_entry(present, value):
            if present is None:
                return value
            raise ConfigError(
                f"{self.path} has a {name} that {NAME} did not write. Rename or remove it, then install again."
            )
        return {
            **{key: present_value for key, present_value in present.items() if key in value or key not in _ENTRY_KEYS},
            **value,
        }

    def _reach(self, root: dict[str, Any], path: tuple[str, ...], last: Any) -> Any:
        """Return the value at a path. Create the value if it does not exist."""
        place: Any = root
        for number, key in enumerate(path):
            made: Any = last if number == len(path) - 1 else {}
            value = place.setdefault(key, made)
            if type(value) is not type(made):
                raise ConfigError(
                    f"{self.path}: {'.'.join(path[: number + 1])} has an unexpected type. Correct it, then try again."
                )
            place = value
        return place

    def _drop(self, root: dict[str, Any], keeps: Mapping[tuple[str, ...], object]) -> list[tuple[str, ...]]:
        """Remove outdated hooks of the bridge from their lists. Return the paths of the changed lists."""
        dropped = []
        for path in self.items:
            place = _find(root, path)
            if isinstance(place, list):
                rest = [
                    left
                    for item in place
                    if (left := item if item == keeps.get(path) else _without_ours(item)) is not None
                ]
                dropped += [path] if rest != place else []
                place[:] = rest
        return dropped


@dataclass(frozen=True)
class TomlFile:
    """A TOML file to which the bridge appends a table. The comments and the other tables stay unchanged."""

    path: str
    table: str
    values: Mapping[str, object]

    def add(self, before: str | None) -> str:
        rest = self._without(before or "")
        end = "\r\n" if "\r\n" in rest else "\n"
        block = end.join([self._begin, f"[{self.table}]", *_toml_lines(self.values), self._end, ""])
        gap = "" if not rest or rest.endswith(end * 2) else end if rest.endswith("\n") else end * 2
        text = f"{rest}{gap}{block}"
        try:
            # Parse the original text too. If the file was already invalid, the error must not blame the new table.
            tomllib.loads(rest)
            tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(
                f"{self.path}: {NAME} cannot add its table ({error}). If there is a [{self.table}] already, remove it, or "
                "add this yourself:",
                to_paste=block.rstrip(),
            ) from error
        return text

    def take_out(self, text: str) -> str | None:
        rest = self._without(text)
        return rest if rest.strip() else None

    @property
    def _begin(self) -> str:
        return f"# {NAME} bridge: begin"

    @property
    def _end(self) -> str:
        return f"# {NAME} bridge: end"

    def _without(self, text: str) -> str:
        """Return the text without the lines between the markers of the bridge. A table of another program between the
        markers stays, because programs that write TOML insert tables before the last comment.
        """
        block = rf"(?:\r?\n)?{re.escape(self._begin)}[ \t]*\r?\n(.*?){re.escape(self._end)}[ \t]*(?:\r?\n|\Z)"
        theirs = re.compile(rf"^\[(?!{re.escape(self.table)}[.\]])", flags=re.M)

        def find_theirs(match: re.Match[str]) -> str:
            first = theirs.search(match[1])
            return match[1][first.start() :] if first is not None else ""

        return re.sub(block, find_theirs, text, flags=re.S)


@dataclass(frozen=True)
class OwnFile:
    """A file that the bridge creates and owns completely."""

    path: str
    text: str

    def add(self, before: str | None) -> str:
        if before is not None and HOOK_MARK.strip() not in before:
            raise ConfigError(f"{self.path} was not written by {NAME}. Move it away, then install again.")
        return self.text

    def take_out(self, text: str) -> str | None:
        return None if HOOK_MARK.strip() in text else text


# --- JSON and TOML


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # JSON allows a duplicate key, but Python keeps only the last value. Writing the file would silently drop the first
    # value.
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a key appears twice in an object")
    return members


def _find(root: object, path: tuple[str, ...]) -> object:
    """Return the value at a path, or None if the path does not exist."""
    for key in path:
        root = root.get(key) if isinstance(root, dict) else None
    return root


_ENTRY_KEYS = frozenset({"type", "command", "args", "env", "environment", "enabled"})
"""Keys that the bridge writes in the entry of its MCP server."""


def _is_our_entry(entry: object, value: object) -> bool:
    """Return whether an entry was written by the bridge for the same host as the entry ``value``."""
    return _last_words(entry) is not None and _last_words(entry) == _last_words(value)


def _last_words(entry: object) -> list[str] | None:
    """Return the words `bridge mcp HOST` from the command of an entry, or None if the entry does not contain them."""
    for words in entry.values() if isinstance(entry, dict) else ():
        if isinstance(words, list) and "mcp" in words[1:]:
            at = words.index("mcp", 1) - 1
            return [str(word) for word in words[at : at + 3]] if words[at] == "bridge" else None
    return None


def _without_ours(item: object) -> object:
    """Return a hook or a group of hooks without the hooks of the bridge. Return None if nothing remains."""
    if isinstance(item, dict) and isinstance(item.get("hooks"), list):
        rest = [hook for hook in item["hooks"] if _without_ours(hook) is not None]
        return item if rest == item["hooks"] else {**item, "hooks": rest} if rest else None
    command = item.get("command") if isinstance(item, dict) else None
    return None if isinstance(command, str) and HOOK_MARK in f"{command} " else item


def _prune(root: dict[str, Any], path: tuple[str, ...], *, removes: bool) -> None:
    """Remove the value at a path if it is an empty list, and then all parents that have become empty. With ``removes``,
    remove the value in any case.
    """
    places: list[dict[str, Any]] = [root]
    for key in path[:-1]:
        inner = places[-1].get(key)
        if not isinstance(inner, dict):
            return
        places.append(inner)
    if path[-1] not in places[-1] or not (removes or places[-1][path[-1]] == []):
        return
    del places[-1][path[-1]]
    for place, key in zip(reversed(places[:-1]), reversed(path[:-1]), strict=True):
        if place.get(key) == {}:
            del place[key]


def _write_json(root: object, before: str | None) -> str:
    """Return JSON with the indentation and the line ends of the previous text."""
    indent = re.search(r'^[\[{]\r?\n([ \t]+)"', before or "")
    text = json.dumps(root, indent=indent[1] if indent else 2, ensure_ascii=False) + "\n"
    if before is not None:
        # Preserve the end of the file, so that a diff shows only the entries of the bridge.
        text = text if before.endswith("\n") or not before else text.rstrip("\n")
        text = text.replace("\n", "\r\n") if "\r\n" in before else text
    return text


def _toml_lines(values: Mapping[str, object]) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            inner = ", ".join(
                f"{json.dumps(name)} = {json.dumps(it, ensure_ascii=False)}" for name, it in value.items()
            )
            yield f"{key} = {{ {inner} }}"
        else:
            yield f"{key} = {json.dumps(value, ensure_ascii=False)}"
