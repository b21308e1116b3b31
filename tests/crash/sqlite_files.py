"""Watches SQLite's file operations and makes them fail, with a custom VFS under the standard library's `sqlite3`.

The VFS wraps SQLite's own "unix" VFS in this process and needs no compiler. `ctypes` copies the library's C
structures and replaces open, read, write, truncate, sync and delete. The code under test opens its database as usual.
Only files in the watched folder are affected.

A `Watcher` is called before each operation, and returns `OK` or the result code that SQLite gets instead.
"""

from __future__ import annotations

import _sqlite3
import ctypes
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, PYFUNCTYPE, Structure, c_char_p, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any, Protocol

import pytest

log = logging.getLogger(__name__)

OK = 0
# Codes that SQLite's own VFS returns for EIO and ENOSPC: https://sqlite.org/rescode.html
IOERR_READ, IOERR_WRITE, IOERR_FSYNC, IOERR_TRUNCATE, IOERR_DELETE, FULL = 266, 778, 1034, 1546, 2570, 13


class Watcher(Protocol):
    """Interface of a test that watches files. ``name`` is a file's name without its folder. SQLite's threads call it,
    one operation at a time, because the interpreter's lock is held until the operation ends.
    """

    syncs_for_real: bool
    """Whether a sync reaches the disk. A model of a disk does not need it."""

    def read(self, name: str) -> int: ...
    def write(self, name: str, offset: int, data: bytes) -> int: ...
    def truncate(self, name: str, size: int) -> int: ...
    def sync(self, name: str) -> int: ...
    def delete(self, name: str, *, is_durable: bool) -> int: ...


class NoSuchLibraryError(Exception):
    """`ctypes` cannot reach the SQLite of this Python."""


class _IoMethods(Structure):
    _fields_ = (
        ("version", c_int),
        *(
            (name, c_void_p)
            for name in (
                "close", "read", "write", "truncate", "sync", "file_size", "lock", "unlock", "check_reserved_lock",
                "file_control", "sector_size", "device_characteristics", "shm_map", "shm_lock", "shm_barrier", "shm_unmap",
                "fetch", "unfetch",
            )
        ),
    )  # fmt: skip


class _File(Structure):
    _fields_ = (("methods", POINTER(_IoMethods)),)


class _Vfs(Structure):
    _fields_ = (
        ("version", c_int),
        ("file_size", c_int),
        ("max_pathname", c_int),
        ("next", c_void_p),
        ("name", c_char_p),
        ("app_data", c_void_p),
        *(
            (name, c_void_p)
            for name in (
                "open", "delete", "access", "full_pathname", "dl_open", "dl_error", "dl_sym", "dl_close", "randomness", "sleep",
                "current_time", "get_last_error", "current_time_int64", "set_system_call", "get_system_call", "next_system_call",
            )
        ),
    )  # fmt: skip


_CLOSE = (c_int, c_void_p)
_READ = _WRITE = (c_int, c_void_p, c_void_p, c_int, c_int64)
_TRUNCATE = (c_int, c_void_p, c_int64)
_SYNC = (c_int, c_void_p, c_int)
_OPEN = (c_int, c_void_p, c_void_p, c_void_p, c_int, c_void_p)
_DELETE = (c_int, c_void_p, c_void_p, c_int)


class _Shim:
    """The VFS, created once per process and never freed, because SQLite keeps pointers to it."""

    def __init__(self) -> None:
        self._library = _load_library()
        self._base = self._library.sqlite3_vfs_find(None)
        base = ctypes.cast(self._base, POINTER(_Vfs)).contents
        self._vfs = _Vfs.from_buffer_copy(base)
        self._vfs.name = b"watched"
        self._base_open = PYFUNCTYPE(*_OPEN)(base.open)
        self._base_delete = PYFUNCTYPE(*_DELETE)(base.delete)
        self._kept: list[Any] = []
        self._vfs.open = self._callback(_OPEN, self._open)
        self._vfs.delete = self._callback(_DELETE, self._delete)
        self._tables: dict[int, _IoMethods] = {}
        self._originals: dict[int, _IoMethods] = {}
        self._names: dict[int, tuple[str, _IoMethods]] = {}
        self.folder = ""
        self.watcher: Watcher | None = None
        self._register(self._vfs, is_default=False)

    def make_default(self, *, is_default: bool) -> None:
        self._register(self._vfs if is_default else ctypes.cast(self._base, POINTER(_Vfs)).contents, is_default=True)

    def _register(self, vfs: _Vfs, *, is_default: bool) -> None:
        code = self._library.sqlite3_vfs_register(ctypes.byref(vfs), int(is_default))
        assert code == OK, code

    def _callback(self, types: tuple[Any, ...], function: Callable[..., int]) -> Any:
        def call(*arguments: Any) -> int:
            try:
                return function(*arguments)
            except Exception:  # the caller is C code, so SQLite gets a code
                log.exception("a watcher failed")
                return IOERR_WRITE

        made = CFUNCTYPE(*types)(call)
        self._kept.append(made)
        return ctypes.cast(made, c_void_p)

    # --- the VFS's functions. PYFUNCTYPE keeps the interpreter's lock during the call, so that operations run in the
    # order in which the watcher sees them.

    def _watched_name(self, address: int | None) -> str | None:
        if self.watcher is None or address is None:
            return None
        folder, name = os.path.split(os.fsdecode(ctypes.string_at(address)))
        return name if folder == self.folder else None

    def _open(self, _: int, path: int | None, file: int, flags: int, out_flags: int | None) -> int:
        code: int = self._base_open(self._base, path, file, flags, out_flags)
        name = self._watched_name(path)
        if code == OK and name is not None:
            opened = ctypes.cast(file, POINTER(_File)).contents
            original = opened.methods.contents
            self._names[file] = (name, original)
            opened.methods = ctypes.pointer(self._table_for(original))
        return code

    def _delete(self, _: int, path: int, is_durable: int) -> int:
        name = self._watched_name(path)
        if name is not None and self.watcher is not None and os.path.exists(os.path.join(self.folder, name)):
            code = self.watcher.delete(name, is_durable=bool(is_durable))
            if code != OK:
                return code
        code = self._base_delete(self._base, path, is_durable)
        return code

    def _table_for(self, original: _IoMethods) -> _IoMethods:
        key = ctypes.addressof(original)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = _IoMethods.from_buffer_copy(original)
            close, read = PYFUNCTYPE(*_CLOSE)(original.close), PYFUNCTYPE(*_READ)(original.read)
            write, sync = PYFUNCTYPE(*_WRITE)(original.write), PYFUNCTYPE(*_SYNC)(original.sync)
            truncate = PYFUNCTYPE(*_TRUNCATE)(original.truncate)

            def on_close(file: int) -> int:
                self._names.pop(file, None)
                return close(file)

            def on_read(file: int, buffer: int, size: int, offset: int) -> int:
                return self._watcher.read(self._names[file][0]) or read(file, buffer, size, offset)

            def on_write(file: int, buffer: int, size: int, offset: int) -> int:
                data = ctypes.string_at(buffer, size)
                return self._watcher.write(self._names[file][0], offset, data) or write(file, buffer, size, offset)

            def on_truncate(file: int, size: int) -> int:
                return self._watcher.truncate(self._names[file][0], size) or truncate(file, size)

            def on_sync(file: int, flags: int) -> int:
                code = self._watcher.sync(self._names[file][0])
                return code or (sync(file, flags) if self._watcher.syncs_for_real else OK)

            table.close, table.read = self._callback(_CLOSE, on_close), self._callback(_READ, on_read)
            table.write, table.sync = self._callback(_WRITE, on_write), self._callback(_SYNC, on_sync)
            table.truncate = self._callback(_TRUNCATE, on_truncate)
        return table

    @property
    def _watcher(self) -> Watcher:
        assert self.watcher is not None, "a watched file outlives its watcher"
        return self.watcher


_shim: _Shim | None = None


@contextmanager
def watched_files(folder: Path, watcher: Watcher) -> Iterator[None]:
    """Show the file operations of databases in ``folder`` to a watcher. Connections that are opened inside the
    context must be closed inside it.
    """
    global _shim
    if _shim is None:
        try:
            _shim = _Shim()
        except NoSuchLibraryError as error:
            pytest.skip(f"SQLite's files cannot be watched with this Python: {error}")
    assert _shim.watcher is None, "one folder at a time"
    _shim.folder, _shim.watcher = os.path.realpath(folder), watcher
    _shim.make_default(is_default=True)
    try:
        yield
    finally:
        _shim.make_default(is_default=False)
        _shim.watcher = None


def _load_library() -> Any:
    """Return the SQLite library of the `sqlite3` module. Raise `NoSuchLibraryError` if it cannot be reached."""
    library = ctypes.CDLL(getattr(_sqlite3, "__file__", None))
    try:
        library.sqlite3_vfs_find.restype = c_void_p
        library.sqlite3_vfs_find.argtypes = (c_char_p,)
        library.sqlite3_vfs_register.argtypes = (POINTER(_Vfs), c_int)
        library.sqlite3_libversion.restype = c_char_p
        version = library.sqlite3_libversion().decode()
    except AttributeError as error:
        raise NoSuchLibraryError(f"this Python's SQLite does not show its functions: {error}") from error
    if version != sqlite3.sqlite_version:
        raise NoSuchLibraryError(f"the SQLite that was found is {version}, not {sqlite3.sqlite_version}")
    return library
