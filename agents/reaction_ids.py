"""Ids derived from a reaction. Every machine derives the same ids, so that the hub recognizes repeated requests. Pure.

A reaction's id is derived from its agent, its trigger and the ledger's epoch. Ids of messages and calls are derived
from the reaction's id. A *path* names a run inside a tool call: ``1.0/2.1`` means call 0 of turn 1, then call 1 of turn
2 of the run inside that call.
"""

from __future__ import annotations

import hashlib
import re


def reaction_id(agent_id: str, trigger: int, epoch: str) -> str:
    """Return the id of an agent's reaction to a message."""
    return digest("reaction", agent_id, trigger, epoch)


def derived_id(reaction: str, path: str, turn: int, call: int | str) -> str:
    """Return the ``message_id`` or ``call_id`` for a request that a tool call sends to the hub."""
    return digest("call", reaction, path, turn, call)


def digest(*parts: str | int) -> str:
    """Return 128 bits of the SHA-256 of these parts, as hexadecimal digits."""
    return hashlib.sha256("\x1f".join(map(str, parts)).encode()).hexdigest()[:32]


MAX_PATH_CHARS = 80
"""Maximum length of a path that another participant sends."""


_PART = r"\d{1,9}\.\d{1,9}(\.\d{1,9})?"


_PATH = re.compile(rf"{_PART}(/{_PART})*", re.ASCII)


def path_of_call(outer: str, turn: int, call: int, run: int = 0) -> str:
    """Return the path of a call in the run at ``outer``. The first run inside the call (0) has the same path. The path
    of any further run ends with the number of the run.
    """
    return f"{outer}/{turn}.{call}{f'.{run}' if run else ''}".lstrip("/")


def is_path(text: str) -> bool:
    """Return whether a text from another participant is a valid path."""
    return len(text) <= MAX_PATH_CHARS and _PATH.fullmatch(text) is not None


def is_inside(path: str, call: str) -> bool:
    """Return whether the run at ``path`` is inside the call with the path ``call``."""
    return f"{path}/".startswith((f"{call}/", f"{call}."))


def outer_paths(path: str) -> list[str]:
    """Return the enclosing paths and the path itself, outermost first: for ``1.0/2.1``, ``1.0`` and ``1.0/2.1``."""
    parts = path.split("/") if path else []
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]
