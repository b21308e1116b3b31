"""Garbage collection of a command's process: rarely, because most of its objects live until the end."""

from __future__ import annotations

import atexit
import gc

OBJECTS_UNTIL_COLLECTED = 20_000
"""Objects before a collection. Python's default of some hundreds took a tenth of the time until a command ran."""


def collect_seldom() -> None:
    """Collect rarely. Call this first. At exit the process skips a last collection, which took another tenth."""
    gc.set_threshold(OBJECTS_UNTIL_COLLECTED)
    atexit.register(gc.freeze)
