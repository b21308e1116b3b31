"""Reduce garbage collection in a command's process: most of its objects live until the process ends."""

from __future__ import annotations

import atexit
import gc

OBJECTS_UNTIL_COLLECTED = 20_000
"""Number of new objects that triggers a garbage collection. With Python's default of some hundreds, collections took a
tenth of the start-up time of a command."""


def collect_seldom() -> None:
    """Make garbage collection rare and skip the last one at exit, which took another tenth of the run time. Call this
    function before any other work."""
    gc.set_threshold(OBJECTS_UNTIL_COLLECTED)
    atexit.register(gc.freeze)
