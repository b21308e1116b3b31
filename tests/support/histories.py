"""Histories of calls by many clients at once, and a check that some order of single steps explains them.

The check is that of Wing and Gong, with the memory of Lowe: an operation may take effect at any moment between its call
and its return. An operation without a return may have taken effect at any later moment, or never.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """One operation of a history. If the client never received the result, ``returned`` is infinite and ``result`` is
    None.
    """

    client: str
    op: str
    called: float
    returned: float
    result: Any
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        return not math.isinf(self.returned)


Step = Callable[[Any, Call], tuple[Any, Any]]
"""Function that applies an operation to a state, and returns the new state and the operation's result."""


def is_linearizable(calls: Sequence[Call], start: Any, step: Step) -> bool:
    """Return whether some order of the operations, one at a time, gives each known result."""
    ordered = sorted(calls, key=lambda call: call.called)
    seen: set[tuple[int, Any]] = set()
    known = sum(1 << number for number, call in enumerate(ordered) if call.is_known)
    paths = [(0, start)]
    while paths:
        done, state = paths.pop()
        if done & known == known:
            return True
        # Only operations that were called before every open one returned may be next.
        first_return = min(call.returned for number, call in enumerate(ordered) if not done >> number & 1)
        for number, call in enumerate(ordered):
            if call.called > first_return:
                break
            if done >> number & 1:
                continue
            after, result = step(state, call)
            # Drop an unknown operation without an effect, because it may never take place. Without this line, the
            # number of paths doubles with each of them.
            if result != call.result if call.is_known else after == state:
                continue
            path = (done | 1 << number, after)
            if path not in seen:
                seen.add(path)
                paths.append(path)
    return False
