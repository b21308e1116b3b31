"""The garbage collector of a process that is a command's: it is not to look through what is loaded, in which there is
nothing."""

from __future__ import annotations

import atexit
import gc

OBJECTS_UNTIL_COLLECTED = 20_000
"""Python's own hundreds took a tenth of the time until a command ran."""


def collect_seldom() -> None:
    """To be called first of all. At its end the process frees what it has without having looked for garbage in it: that
    took another tenth."""
    gc.set_threshold(OBJECTS_UNTIL_COLLECTED)
    atexit.register(gc.freeze)
