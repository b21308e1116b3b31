"""Files that survive a power cut, and explanations of file errors. When a function returns, its file is complete and
synced under its final name.

Syncing a file is not enough: without a sync of its folder, a power cut can still lose the file's name. Everything in
this module is synchronous.
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
    """Save a new file that only its owner may read. Missing folders are created. Raises `FileExistsError` if the file
    exists, or `OSError`.

    The file is complete before it gets its name, so other processes see the whole file or no file.
    """
    make_folder(path.parent)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    # The process id in the name keeps two writers of the same file apart.
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

    Without this, an error could leave a truncated log that looks complete. The new file is synced, because callers may
    delete the data that they exported to the file. From the first byte on, only the owner may read the new file,
    whatever the permissions of the old file. Anything but a regular file, such as a pipe, is written directly.
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
    """Opener for `open`: only the owner may read a new file, from its first byte on."""
    return os.open(path, flags | CLOSE_ON_EXEC, 0o600)


def publish_file(draft: Path, path: Path, *, replaces: bool = False) -> None:
    """Sync a written draft and give it its final name in the same folder. With ``replaces``, the name may be that of an
    existing file.

    Without ``replaces`` the draft also keeps its own name. Raises `FileExistsError` or `OSError`.
    """
    # First the content, then the name: after a power cut a synced name could lead to an empty file.
    sync(draft)
    # A link fails if the name exists, where a rename would silently replace another process's file.
    (os.replace if replaces else os.link)(draft, path)
    sync(path.parent)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents. Only their owner may enter them."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    # From the outermost on, each with its name synced: a folder is lost with any of its parents.
    for folder in reversed(missing):
        folder.mkdir(0o700, exist_ok=True)
        sync(folder.parent)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the list of names in a folder, is on the disk."""
    if path.is_dir():
        sync_folder(path)
        return
    # Opened for writing, because Windows refuses to sync a descriptor that only reads.
    descriptor = os.open(path, os.O_RDWR | CLOSE_ON_EXEC)
    try:
        sync_descriptor(descriptor)
    finally:
        os.close(descriptor)


FileAction = Literal["read", "write"]


ERRNO_ADVICE = {
    errno.ENOTDIR: ("part of its path is no folder", "name another place for it"),
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
    errno.ENFILE: ("the system can open no more files", "end what holds so many, or raise fs.file-max"),
    errno.ENOMEM: ("there is no memory left", "end what uses so much"),
    errno.EIO: (
        "its disk reports an error",
        "see the system's log (dmesg); if it stays, go on from a backup on another disk",
    ),
}


ERRNO_ALIASES = {errno.EAGAIN: errno.EBUSY, errno.ETXTBSY: errno.EBUSY, errno.EPERM: errno.EACCES}


def describe_os_error(error: OSError, path: Path, doing: FileAction = "write") -> str:
    """Return the problem with a node's file and what to do, as the rest of a sentence."""
    return "; ".join(explain_errno(ERRNO_ALIASES.get(error.errno or 0, error.errno or 0), error, path, doing))


def explain_errno(number: int, error: Exception, path: Path, doing: FileAction) -> tuple[str, str]:
    """Return the problem and what to do about it."""
    if number == errno.ENOENT and doing == "read":
        return "there is no such file", "check its path"
    if number == errno.ENOENT:
        return f"there is no folder {path.resolve().parent}", "make it, or choose another place for it"
    if number == errno.EACCES:
        return _describe_rights(path, doing), "give its user that right, or choose another place for it"
    if number in ERRNO_ADVICE:
        return ERRNO_ADVICE[number]
    reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
    return reason, "`roundelay doctor` checks it"


def _describe_rights(path: Path, doing: FileAction) -> str:
    """Return which permission is missing, if this process can find out."""
    with suppress(OSError):
        file = path.resolve()
        if file.exists() and not os.access(file, os.R_OK if doing == "read" else os.R_OK | os.W_OK):
            verb = "write" if os.access(file, os.R_OK) else "read"
            return f"permission denied: this user may not {verb} the file (mode {file.stat().st_mode & 0o777:o})"
        folder = next(parent for parent in file.parents if parent.exists())
        if doing == "write" and not os.access(folder, os.W_OK | os.X_OK):
            return f"permission denied: this user may not write in the folder {folder}"
    return "permission denied"
