"""The memory of a process that runs a node: large blocks go back to the system, and what is there at the start is not
collected.

Each is asked for once.
"""

from __future__ import annotations

import ctypes
import gc

LARGE_BYTES = 1 << 20
TRIM_BYTES = 8 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def return_large_blocks() -> None:
    """Let every block of a megabyte or more go back to the system when it is freed. Does nothing where there is no
    glibc.

    A result has up to `max_result_bytes`. glibc maps the first block of that size by itself, and from its release on
    takes such blocks from the heap (mallopt(3): the threshold is dynamic, up to 32 MB), where any small block that was
    allocated after them keeps them all: measured, a hub that had held 190 MB of results kept 200 MB when they were
    gone, and 6 MB with this threshold fixed. What is smaller, as nearly everything is, is allocated as before; the end
    of the heap is trimmed when it has what glibc would have come to."""
    try:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl and macOS have none
    except (OSError, TypeError):  # Windows
        return
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES)


def freeze_startup_objects() -> None:
    """Let the garbage collector pass over all that there is now; called when the node has started, before anybody
    comes.

    A full collection stops the node. It looks through modules and the ledger's tables each time and finds nothing:
    50,000 objects of the modules alone, in 20 ms. What is kept so is freed all the same when nothing refers to it.
    """
    gc.freeze()
