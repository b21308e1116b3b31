"""Which database files the ledgers of this process hold: to open one of them again, and close it, would drop SQLite's locks on it
(sqlite.org/howtocorrupt.html, 2.2). Asked by whatever looks at a database's file beside a ledger. No IO but `stat`."""

from __future__ import annotations

import os
from pathlib import Path

Inode = tuple[int, int]
"""A file's device and number."""

held: set[Inode] = set()
"""Kept by `ledger_files`."""


def is_held(path: Path) -> bool:
    """Whether a ledger of this process holds the file."""
    try:
        return identify(os.stat(path)) in held
    except OSError:
        return False


def identify(found: os.stat_result) -> Inode:
    return found.st_dev, found.st_ino
