"""Files that are saved before something depends on them: whole, and on the disk under their names, when these functions return.

A file that is written, or even synced, is not there after a power cut as long as the folder that names it is not synced too. Small
files, written synchronously.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path


def save_new(path: Path, data: bytes) -> None:
    """Save a file that its owner alone may read, with the folders that it needs. Raises `FileExistsError` if there is one, `OSError`.

    It is complete before it has its name: another process finds all of it or nothing.
    """
    make_folder(path.parent)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        give_name(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def give_name(draft: Path, path: Path, *, replaces: bool = False) -> None:
    """Let a file that is written get its name, in the same folder: a new one, or that of a file which it ``replaces``.

    The draft keeps its own name too unless it replaces. Raises `FileExistsError`, `OSError`.
    """
    sync(draft)
    (os.replace if replaces else os.link)(draft, path)
    sync(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder and those above it that are missing."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    is_folder = path.is_dir()
    descriptor = os.open(path, (os.O_RDONLY if is_folder else os.O_RDWR) | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not is_folder or error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that have no such thing
            raise
    finally:
        os.close(descriptor)
