"""Make a Python process use the fallbacks of `roundelay.network.platforms`, as on a system without Linux features.

With this folder first on PYTHONPATH, every Python process imports this module at its start. The module removes /proc,
the boot ID, descriptor locks, send queues, signal handlers of the event loop, uvloop and read-only file systems.
"""

from __future__ import annotations

import asyncio.unix_events
import errno
import os
import pathlib
import time
from typing import Any, NoReturn

_open = os.open


def refuse_signal_handlers(*_: object) -> NoReturn:
    raise NotImplementedError


asyncio.unix_events._UnixSelectorEventLoop.add_signal_handler = refuse_signal_handlers  # type: ignore[assignment,method-assign]

try:
    from roundelay.network import platforms
except ImportError:  # a Python without the project's dependencies, for example during pip's build
    pass
else:

    class PathWithoutProc(type(pathlib.Path())):  # type: ignore[misc]
        def read_text(self, *arguments: Any, **options: Any) -> str:
            if str(self).startswith("/proc/"):
                raise FileNotFoundError(errno.ENOENT, "this system has no /proc")
            return super().read_text(*arguments, **options)  # type: ignore[no-any-return]

        def exists(self, **options: Any) -> bool:
            return not str(self).startswith("/proc/") and super().exists(**options)

    platforms.Path = PathWithoutProc  # type: ignore[misc,assignment,attr-defined]
    platforms.boot_id = lambda: ""
    platforms.find_process_age_s = time.process_time
    platforms.is_reader_gone = lambda descriptor: False
    platforms.has_open_file_locks = lambda: False
    platforms.share_range = lambda descriptor, first, size: None
    platforms.is_range_locked = lambda descriptor, first, size: True
    platforms.is_read_only = lambda path: False
    platforms.find_loop_factory = lambda: None
    platforms.count_unsent = lambda sock: 0
    platforms.seconds_since_boot = time.monotonic
