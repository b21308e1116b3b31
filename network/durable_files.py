"""Functions that write files so that they survive a power cut, and explanations of file errors. When a function
returns, its file is complete and synced under its final name.

Syncing only the file is not enough: a power cut can still lose the file's name unless its folder is synced too. All
functions of this module are synchronous.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TextIO

from .platforms import CLOSE_ON_EXEC, sync_descriptor, sync_folder


def save_new(path: Path, data: bytes) -> None:
    """Save a new file that only its owner may read, and create missing folders. Raises `FileExistsError` if the file
    exists, and `OSError` if it cannot be written.

    The file is complete before it gets its name, so other processes see the whole file or no file.
    """
    make_folder(path.parent)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    # The draft's name contains the process id, so that two processes that save the same file use different drafts.
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | CLOSE_ON_EXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        publish_file(draft, path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def replace_file(path: Path) -> Iterator[TextIO]:
    """Open a file to replace its whole content. An existing file stays unchanged until everything is written, even if
    writing fails.

    Writing in place could leave a truncated file that looks complete after an error. The new file is synced, because
    callers may delete the data that they exported to it. Only the owner may ever read the new file, even if the old
    file had other permissions. If ``path`` is not a regular file but, for example, a pipe, it is written directly.
    """
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8", newline="\n") as file:
            yield file
        return
    target = path.resolve()  # keep a symbolic link
    draft = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with open(draft, "x", encoding="utf-8", newline="\n", opener=open_private) as file:
            yield file
        publish_file(draft, target, replaces=True)
    except BaseException as error:
        with suppress(OSError):
            draft.unlink()
        if isinstance(error, OSError) and error.filename == str(draft):
            error.filename = str(path)  # report the caller's path, not the path of the draft
        raise


def open_private(path: str, flags: int) -> int:
    """Opener for `open` that creates files with mode 0600, so that only the owner can ever read them."""
    return os.open(path, flags | CLOSE_ON_EXEC, 0o600)


def publish_file(draft: Path, path: Path, *, replaces: bool = False) -> None:
    """Sync a written draft and give it its final name in the same folder. With ``replaces``, the draft may replace an
    existing file.

    Without ``replaces`` the draft keeps its old name as well. Raises `FileExistsError` or `OSError`.
    """
    # Sync the content before the name. Otherwise, the name could refer to an empty file after a power cut.
    sync(draft)
    # Link instead of renaming: a link fails if the name exists, but a rename would replace another process's file.
    (os.replace if replaces else os.link)(draft, path)
    sync(path.parent)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents. Only the owner may enter these folders."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    # Create the outermost folder first and sync each name, because losing a folder loses everything inside.
    for folder in reversed(missing):
        folder.mkdir(0o700, exist_ok=True)
        sync(folder.parent)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the list of names in a folder, is on the disk."""
    if path.is_dir():
        sync_folder(path)
        return
    # Open the file for writing, because Windows refuses to sync a read-only descriptor.
    descriptor = os.open(path, os.O_RDWR | CLOSE_ON_EXEC)
    try:
        sync_descriptor(descriptor)
    finally:
        os.close(descriptor)


FileAction = Literal["read", "write"]


ERRNO_ADVICE = {
    errno.ENOTDIR: ("part of its path is no folder", "choose another path"),
    errno.EISDIR: ("it is a folder", "name a file in it"),
    errno.ELOOP: ("its link leads back to itself", "name the file itself"),
    errno.ENAMETOOLONG: ("its name is too long", "choose a shorter one"),
    errno.EROFS: ("its file system is read-only", "have it mounted for writing, or choose another place for it"),
    errno.ENOLCK: ("its file system refuses locks", "choose a place for it on a local disk"),
    errno.EOPNOTSUPP: ("its file system has no locks", "choose a place for it on a local disk"),
    errno.EBUSY: ("another program holds a lock on it", "end that program, which `fuser` names"),
    errno.ENOSPC: ("no space is left on its disk", "make room; nothing acknowledged is lost"),
    errno.EDQUOT: ("the user's quota on its disk is used up", "make room; nothing acknowledged is lost"),
    errno.EFBIG: ("the file may not grow further", "raise the limit of file sizes (ulimit -f)"),
    errno.EMFILE: ("this process may open no more files", "raise its limit (ulimit -n), or lower max_connections"),
    errno.ENFILE: (
        "the system can open no more files",
        "end programs that hold many open files, or raise fs.file-max",
    ),
    errno.ENOMEM: ("there is no memory left", "end programs that use much memory"),
    errno.EIO: (
        "its disk reports an error",
        "see the system's log (dmesg); if the error continues, restore a backup on another disk",
    ),
}


ERRNO_ALIASES = {errno.EAGAIN: errno.EBUSY, errno.ETXTBSY: errno.EBUSY, errno.EPERM: errno.EACCES}


def describe_os_error(error: OSError, path: Path, doing: FileAction = "write") -> str:
    """Return the problem with a node's file and the advice, as the second half of a sentence after a colon."""
    return "; ".join(explain_errno(ERRNO_ALIASES.get(error.errno or 0, error.errno or 0), error, path, doing))


def explain_errno(number: int, error: Exception, path: Path, doing: FileAction) -> tuple[str, str]:
    """Return the problem behind a file error, and advice for the user."""
    if number == errno.ENOENT and doing == "read":
        return "there is no such file", "check its path"
    if number == errno.ENOENT:
        return f"there is no folder {path.resolve().parent}", "create the folder, or choose another path"
    if number == errno.EACCES:
        return _describe_rights(path, doing), "give the user this permission, or choose another path"
    if number in ERRNO_ADVICE:
        return ERRNO_ADVICE[number]
    reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
    return reason, "`roundelay doctor` checks it"


def _describe_rights(path: Path, doing: FileAction) -> str:
    """Describe the missing permission for a file, as exactly as this process can determine it."""
    with suppress(OSError):
        file = path.resolve()
        if file.exists() and not os.access(file, os.R_OK if doing == "read" else os.R_OK | os.W_OK):
            verb = "write" if os.access(file, os.R_OK) else "read"
            return f"permission denied: this user may not {verb} the file (mode {file.stat().st_mode & 0o777:o})"
        folder = next(parent for parent in file.parents if parent.exists())
        if doing == "write" and not os.access(folder, os.W_OK | os.X_OK):
            return f"permission denied: this user may not write in the folder {folder}"
    return "permission denied"
