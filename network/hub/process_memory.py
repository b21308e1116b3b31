"""Memory of a process that runs a node: returns large blocks to the system, and keeps start-up objects from collection.

Each function is called once, by the command that starts a node.
"""

from __future__ import annotations

import ctypes
import gc

LARGE_BYTES = 1 << 20
TRIM_BYTES = 8 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def return_large_blocks() -> None:
    """Let every block of a megabyte or more return to the system when it is freed. Does nothing without glibc.

    A result has up to ``max_result_bytes``. glibc maps the first block of that size separately. Once that block is
    freed, glibc takes such blocks from the heap (mallopt(3): the threshold is dynamic, up to 32 MB), where any small
    block that was allocated later keeps them all. Measured: a hub that had held 190 MB of results kept 200 MB afterwards,
    and 6 MB with this fixed threshold. Smaller blocks, nearly all of them, are allocated as before. The end of the heap
    is trimmed at the size that glibc would have reached by itself.
    """
    try:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl and macOS have none
    except (OSError, TypeError):  # Windows
        return
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES)


def freeze_startup_objects() -> None:
    """Let the garbage collector skip everything that exists now. Call it when the node has started, before anybody joins.

    A full collection stops the node. Each one walks through modules and the ledger's tables and finds nothing: 20 ms for
    the 50,000 objects of the modules alone. Frozen objects are still freed when nothing refers to them.
    """
    gc.freeze()
