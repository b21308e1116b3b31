"""How much work something is, counted and not timed: the instructions that Python executes, and the memory that it takes meanwhile.

Both are the same in every run, on every machine. A copy of a whole table is one instruction, so it shows in the memory alone.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_steps(work: Callable[[], object]) -> int:
    """The instructions of this thread until ``work`` returns.

    The garbage collector rests meanwhile: the finalizers and callbacks of a collection would be counted with the work.
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
    """The most memory that ``work`` takes beyond what is there before."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        work()
        _, peak = tracemalloc.get_traced_memory()
        return peak - before
    finally:
        tracemalloc.stop()
