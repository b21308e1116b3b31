"""Measure work without a clock: executed bytecode instructions and peak memory.

Both counts are the same in every run on every machine. A copy of a whole table is one instruction, so only the memory
shows it.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_steps(work: Callable[[], object]) -> int:
    """Count the bytecode instructions that this thread executes in ``work``.

    Garbage collection is disabled meanwhile. Otherwise, the finalizers and callbacks of a collection would count too.
    """
    steps = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        steps += event == "opcode"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return steps


def count_bytes(work: Callable[[], object]) -> int:
    """Return the peak memory that ``work`` allocates, in bytes."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        work()
        _, peak = tracemalloc.get_traced_memory()
        return peak - before
    finally:
        tracemalloc.stop()
