"""Functions that format durations and sizes as text. This module does no IO."""

from __future__ import annotations

SECOND_MS = 1000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS

_UNITS_MS = (("day", "d", DAY_MS), ("hour", "h", HOUR_MS), ("minute", "min", MINUTE_MS))


def format_duration(seconds: float) -> str:
    """Format a duration in the largest unit that gives a whole number: ``2 hours``, ``90 s``."""
    for name, _, size_ms in _UNITS_MS:
        number, rest = divmod(seconds * SECOND_MS, size_ms)
        if number and not rest:
            return f"{number:g} {name}{'s' if number != 1 else ''}"
    return f"{seconds:g} s"


def format_elapsed(elapsed_ms: int, *, min_count: int = 1) -> str:
    """Format an elapsed time in one unit, rounded down: ``3 h``. The unit is the largest one in which the number is at
    least ``min_count``."""
    elapsed_ms = max(elapsed_ms, 0)
    for _, unit, size_ms in _UNITS_MS:
        if elapsed_ms >= min_count * size_ms:
            return f"{elapsed_ms // size_ms} {unit}"
    return f"{elapsed_ms // SECOND_MS} s"


def format_file_size(size: int) -> str:
    """Format the size of a file in decimal units: ``1.2 kB``."""
    for unit, factor in (("MB", 1_000_000), ("kB", 1000)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"


def format_memory(size: float) -> str:
    """Format an amount of memory in binary units: ``1.5 MiB``."""
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.0f} KiB"
