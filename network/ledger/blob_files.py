"""Copies and checks of the blobs that a ledger refers to. A node may be using the ledger and the blobs at the same
time.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

from msgspec import Struct

from roundelay.network.blobs import blob_folder, blob_path, hash_file
from roundelay.network.durable_files import make_folder, sync
from roundelay.network.errors import LedgerError

from .schema import open_to_read
from .storage_errors import explain


class BlobCheck(Struct, frozen=True):
    """Result of a check or a copy: the number of intact blobs, their total size in bytes, and the names of the blobs
    that are damaged or missing."""

    count: int
    size: int
    damaged: tuple[str, ...]


def list_blobs_in_use(db: sqlite3.Connection) -> list[str]:
    """Return the SHA-256 of every blob to which mods refer. The keys of these references are ``MOD/blob/SHA256``."""
    rows = db.execute("SELECT key FROM state WHERE tbl = 'mod' AND key GLOB '*/blob/*'")
    names = {str(key).rpartition("/")[2] for (key,) in rows}
    return sorted(name for name in names if len(name) == 64 and name.isalnum())


def check_blobs(path: Path) -> BlobCheck:
    """Compare every blob of a ledger with its checksum. Raises `LedgerError`."""
    try:
        with open_to_read(path) as db:
            names = list_blobs_in_use(db)
    except sqlite3.Error as error:
        raise explain(error, path, "read") from error
    folder = blob_folder(path)
    damaged = tuple(name for name in names if not _is_intact(blob_path(folder, name), name))
    intact = [name for name in names if name not in set(damaged)]
    return BlobCheck(len(intact), sum(blob_path(folder, name).stat().st_size for name in intact), damaged)


def copy_blobs(source: Path, target: Path, names: list[str]) -> BlobCheck:
    """Copy blobs into a folder next to the copied ledger. The folder gets its name when the copy is complete. Raises
    `OSError`, and `LedgerError` if the folder exists.

    Missing and damaged blobs are left out and reported. Otherwise one bad blob would prevent all further backups.
    """
    folder, draft = blob_folder(target), blob_folder(target).with_name(f".{target.name}.files.{os.getpid()}")
    if folder.exists():
        raise LedgerError(f"{folder} exists. A backup never overwrites: choose another name.")
    size, damaged = 0, []
    try:
        for name in names:
            copied = blob_path(draft, name)
            make_folder(copied.parent)
            try:
                shutil.copyfile(blob_path(blob_folder(source), name), copied)
            except FileNotFoundError:
                damaged.append(name)
                continue
            # Check the copy, not the source, because the copy is what someone will restore.
            if hash_file(copied) != name:
                copied.unlink()
                damaged.append(name)
                continue
            copied.chmod(0o600)
            sync(copied)
            sync(copied.parent)
            size += copied.stat().st_size
        if draft.exists():
            os.rename(draft, folder)
            sync(folder.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return BlobCheck(len(names) - len(damaged), size, tuple(damaged))


def _is_intact(path: Path, name: str) -> bool:
    try:
        return hash_file(path) == name
    except OSError:
        return False
