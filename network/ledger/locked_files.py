"""The databases that ledgers of this process have locked. Kept by `DatabaseLock`, asked by whoever opens files."""

from __future__ import annotations

import os
from pathlib import Path

FileId = tuple[int, int]
"""A file's device and inode."""

locked: set[FileId] = set()


def is_locked_here(path: Path) -> bool:
    """Return whether a ledger of this process has locked the file. Then nobody else in the process may open it: closing
    the file would drop the locks (`database_lock`)."""
    try:
        return identify(os.stat(path)) in locked
    except OSError:
        return False


def identify(status: os.stat_result) -> FileId:
    return status.st_dev, status.st_ino
