"""The set of databases that ledgers of this process have locked. `DatabaseLock` updates the set. Other code must check
it before opening a database file.
"""

from __future__ import annotations

import os
from pathlib import Path

FileId = tuple[int, int]
"""Device and inode of a file."""

locked: set[FileId] = set()


def is_locked_here(path: Path) -> bool:
    """Return whether a ledger of this process has locked the file. If so, other code in this process must not open the
    file: closing it again would drop the ledger's locks (`database_lock`)."""
    try:
        return identify(os.stat(path)) in locked
    except OSError:
        return False


def identify(status: os.stat_result) -> FileId:
    return status.st_dev, status.st_ino
