"""Objects that belong to one event loop, such as connections. A program may use several loops: for example a second
`asyncio.run`, the loops of a test suite, or one loop per thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class LoopLocal(Generic[T]):
    """Holds one object for each event loop and creates it at its first use. The object of a closed loop is dropped,
    because it can no longer be used or closed.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: WeakKeyDictionary[asyncio.AbstractEventLoop, T] = WeakKeyDictionary()

    def get(self) -> T:
        """Return the object of the running loop."""
        loop = asyncio.get_running_loop()
        value = self._made.get(loop)
        if value is None:
            for other in [it for it in self._made if it.is_closed()]:
                self._made.pop(other, None)
            value = self._made[loop] = self._make()
        return value

    def find(self) -> T | None:
        """Return the object of the running loop, or None before its first use."""
        return self._made.get(asyncio.get_running_loop())

    def pop(self) -> T | None:
        """Remove and return the object of the running loop, or None if there is none."""
        return self._made.pop(asyncio.get_running_loop(), None)
