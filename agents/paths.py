"""Where in a reaction something runs: ``1.0/2.1`` is inside of the second call of turn 2 of the agent that runs inside
of the first call of turn 1. A further run in one call has a third number: ``1.0.1``. The reaction itself is at the
empty path. Plain text.
"""

from __future__ import annotations

import re

MAX_PATH_CHARS = 80
"""Of one that somebody else claims."""

_PART = r"\d{1,9}\.\d{1,9}(\.\d{1,9})?"
_PATH = re.compile(rf"{_PART}(/{_PART})*", re.ASCII)


def path_of_call(outer: str, turn: int, call: int, run: int = 0) -> str:
    """Give the path of a call of the run at ``outer``, which is that of the first run in it (0), or of a further one."""
    return f"{outer}/{turn}.{call}{f'.{run}' if run else ''}".lstrip("/")


def is_path(text: str) -> bool:
    """Whether this, which somebody else wrote, is the path of something inside of a reaction."""
    return len(text) <= MAX_PATH_CHARS and _PATH.fullmatch(text) is not None


def is_inside(path: str, call: str) -> bool:
    """Whether what runs at ``path`` runs inside of the call of this path: the first run in it, or a further one."""
    return f"{path}/".startswith((f"{call}/", f"{call}."))


def outer_paths(path: str) -> list[str]:
    """A path and those around it, the outermost first: ``1.0/2.1`` gives ``1.0`` and ``1.0/2.1``."""
    parts = path.split("/") if path else []
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]
