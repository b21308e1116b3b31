"""The blob store: contents of files, named by their SHA-256, in a folder next to the ledger's file.

A blob gets its name only after its bytes are complete, verified and synced. Readers therefore see a whole blob or no
blob, even if the process is killed. An upload arrives in chunks, which are collected in a draft. Each draft belongs to
one participant. The ids that clients choose are hashed before they become file names, so a client cannot choose a path.
The store never decompresses a blob.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

from msgspec import Struct

from .durable_files import make_folder, open_private, publish_file
from .errors import Forbidden, InternalError, InvalidArguments, Overloaded, RoundelayError
from .units import DAY_MS, MINUTE_MS

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_DRAFTS_BY_ONE = 8
"""Maximum number of unfinished uploads of one participant."""
MAX_DRAFT_BYTES = 2**30
"""Maximum size of all unfinished uploads together, in bytes."""
DRAFT_TTL_MS = DAY_MS
"""Time after which an unfinished upload is deleted if no chunk arrives, in ms."""
ORPHAN_TTL_MS = 60 * MINUTE_MS
"""Time between the last reference to a blob and the deletion of the blob, in ms. During this time, a backup that has
already copied the database can still copy the blob, and an upload of the same content can finish."""
_HASH_BYTES = 2**20


class Blob(Struct, frozen=True):
    """A stored blob: the SHA-256 of its content in hexadecimal digits, and its size in bytes."""

    sha256: str
    size: int


class BlobMissing(Exception):
    """The store has no blob with this SHA-256."""


class BlobStore(Protocol):
    """Interface of a blob store. All methods may wait for the disk."""

    async def write_draft(self, owner: str, upload_id: str, offset: int, data: bytes) -> int:
        """Append a chunk to an upload if ``offset`` is the end of the upload. Return the upload's new size, which is
        the offset of the next chunk."""

    async def finish_draft(self, owner: str, upload_id: str, sha256: str) -> Blob:
        """Convert an upload to a blob, which is durable when this method returns. A repeated call returns the same
        blob.

        Raises `InvalidArguments` if the upload is unknown or its content has another checksum.
        """

    async def store(self, data: bytes) -> Blob:
        """Store a complete content as a blob, which is durable when this method returns."""

    async def read(self, sha256: str, offset: int, length: int) -> bytes:
        """Return a part of a blob. Raises `BlobMissing`."""

    async def collect_garbage(self, list_kept: Callable[[], Container[str]], now: int) -> int:
        """Delete expired drafts, and the blobs that have been absent from ``list_kept()`` for `ORPHAN_TTL_MS`. Return
        the number of deleted blobs."""


def blob_folder(database: Path) -> Path:
    """Return the folder of a ledger's blobs, which is next to the database file."""
    return database.with_name(f"{database.name}.files")


def _check_draft(owned: int, is_new: bool, total: int, added: int) -> None:
    if is_new and owned >= MAX_DRAFTS_BY_ONE:
        raise InvalidArguments(
            f"You have reached the maximum of {owned} unfinished uploads. Finish an upload, or wait a day until one expires."
        )
    if total + added > MAX_DRAFT_BYTES:
        raise Overloaded(
            "The unfinished uploads of this network have reached their maximum size. Try again later.", 60_000
        )


def _unknown_upload() -> InvalidArguments:
    return InvalidArguments("There is no such upload. Upload the content again from offset 0.")


def _wrong_checksum(sha256: str) -> InvalidArguments:
    return InvalidArguments(
        f"The uploaded content has the SHA-256 {sha256}, but another SHA-256 was announced. The upload was deleted. Upload "
        "the content again from offset 0."
    )


class _Orphans:
    """Record of the time at which each blob without a reference was first seen."""

    def __init__(self) -> None:
        self._since: dict[str, int] = {}
        self._protected: Counter[str] = Counter()

    @contextmanager
    def protect(self, sha256: str) -> Iterator[None]:
        """Protect a blob from deletion while it is being written. The reference to the blob is committed soon
        afterwards, long before the blob could expire."""
        self._protected[sha256] += 1
        try:
            yield
        finally:
            self._protected -= Counter([sha256])
            self.forget(sha256)

    def find_expired(self, stored: Iterator[str], kept: Container[str], now: int) -> list[str]:
        orphans = {sha256 for sha256 in stored if sha256 not in kept and sha256 not in self._protected}
        self._since = {sha256: self._since.get(sha256, now) for sha256 in orphans}
        return [sha256 for sha256, since in self._since.items() if now - since >= ORPHAN_TTL_MS]

    def forget(self, sha256: str) -> None:
        self._since.pop(sha256, None)


class MemoryBlobs:
    """A blob store in memory, for networks without a database file."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}
        self._drafts: dict[tuple[str, str], bytearray] = {}
        self._finished: dict[tuple[str, str], Blob] = {}
        self._orphans = _Orphans()

    async def write_draft(self, owner: str, upload_id: str, offset: int, data: bytes) -> int:
        key = owner, upload_id
        draft = self._drafts.get(key, bytearray())
        if offset == len(draft):
            owned = sum(other == owner for other, _ in self._drafts)
            _check_draft(owned, key not in self._drafts, sum(map(len, self._drafts.values())), len(data))
            draft += data
            self._drafts[key] = draft
        return len(draft)

    async def finish_draft(self, owner: str, upload_id: str, sha256: str) -> Blob:
        key = owner, upload_id
        draft = self._drafts.pop(key, None)
        if draft is None:
            finished = self._finished.get(key)
            if finished is None or finished.sha256 != sha256 or sha256 not in self._blobs:
                raise _unknown_upload()
            return finished
        actual = hashlib.sha256(draft).hexdigest()
        if actual != sha256:
            raise _wrong_checksum(actual)
        self._finished[key] = blob = await self.store(bytes(draft))
        return blob

    async def store(self, data: bytes) -> Blob:
        blob = Blob(hashlib.sha256(data).hexdigest(), len(data))
        self._orphans.forget(blob.sha256)
        self._blobs[blob.sha256] = data
        return blob

    async def read(self, sha256: str, offset: int, length: int) -> bytes:
        if sha256 not in self._blobs:
            raise BlobMissing(sha256)
        return self._blobs[sha256][offset : offset + length]

    async def collect_garbage(self, list_kept: Callable[[], Container[str]], now: int) -> int:
        expired = self._orphans.find_expired(iter(self._blobs), list_kept(), now)
        for sha256 in expired:
            del self._blobs[sha256]
            self._orphans.forget(sha256)
        return len(expired)


class FolderBlobs:
    """A blob store in a folder: ``blobs/`` with one file per content, and ``drafts/`` with one folder per
    participant."""

    def __init__(self, folder: Path, *, is_read_only: bool = False) -> None:
        self._folder = folder
        self._is_read_only = is_read_only
        self._locks: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()
        self._orphans = _Orphans()
        self._draft_bytes: int | None = None
        """Size of all drafts in bytes, or None before they are measured."""
        self._counting = threading.Lock()
        self._numbers = itertools.count()

    async def write_draft(self, owner: str, upload_id: str, offset: int, data: bytes) -> int:
        self._check_writable()
        draft = self._draft_path(owner, upload_id)
        async with self._lock(draft):
            return await _run(self._append, draft, offset, data)

    async def finish_draft(self, owner: str, upload_id: str, sha256: str) -> Blob:
        self._check_writable()
        draft = self._draft_path(owner, upload_id)
        async with self._lock(draft):
            with self._orphans.protect(sha256):
                return await _run(self._finish, draft, sha256)

    async def store(self, data: bytes) -> Blob:
        self._check_writable()
        blob = Blob(hashlib.sha256(data).hexdigest(), len(data))
        draft = self._folder / "drafts" / f"{os.getpid()}-{next(self._numbers)}.new"
        with self._orphans.protect(blob.sha256):
            await _run(self._write_blob, draft, blob, data)
        return blob

    async def read(self, sha256: str, offset: int, length: int) -> bytes:
        return await _run(self._read, sha256, offset, length)

    async def collect_garbage(self, list_kept: Callable[[], Container[str]], now: int) -> int:
        self._check_writable()
        stored = await _run(lambda: [*list_blobs(self._folder)])
        # Do not await between this check and the deletion. An upload of the same content could finish in between, and
        # its blob would be deleted.
        expired = self._orphans.find_expired(iter(stored), list_kept(), now)
        for sha256 in expired:
            blob_path(self._folder, sha256).unlink(missing_ok=True)
            self._orphans.forget(sha256)
        await _run(self._drop_old_drafts, now)
        return len(expired)

    def _check_writable(self) -> None:
        if self._is_read_only:
            raise Forbidden("This hub is read-only and accepts no files.")

    def _lock(self, draft: Path) -> asyncio.Lock:
        lock = self._locks.get(draft)
        if lock is None:
            lock = self._locks[draft] = asyncio.Lock()
        return lock

    def _draft_path(self, owner: str, upload_id: str) -> Path:
        return self._folder / "drafts" / _hash_name(owner) / f"{_hash_name(upload_id)}.part"

    # --- in a worker thread

    def _append(self, draft: Path, offset: int, data: bytes) -> int:
        is_new = not draft.exists()
        if is_new and offset:
            return 0
        make_folder(draft.parent)
        with open(draft, "ab", opener=open_private) as file:
            size = file.seek(0, os.SEEK_END)
            if size != offset:
                return size
            try:
                owned = len([*draft.parent.glob("*.part")]) - is_new
                _check_draft(owned, is_new, self._count_draft_bytes(0), len(data))
            except RoundelayError:
                if is_new:
                    draft.unlink()
                raise
            file.write(data)
        self._count_draft_bytes(len(data))
        return size + len(data)

    def _count_draft_bytes(self, added: int) -> int:
        """Add to the total size of all drafts, and return the new total. Safe to call from several threads."""
        with self._counting:
            if self._draft_bytes is None:
                self._draft_bytes = sum(_measure(path) for path in self._folder.glob("drafts/*/*.part"))
            else:
                self._draft_bytes += added  # the measurement above already includes the added bytes
            return self._draft_bytes

    def _finish(self, draft: Path, sha256: str) -> Blob:
        note = draft.with_suffix(".done")
        try:
            actual = hash_file(draft)
        except FileNotFoundError:
            # An earlier call may have finished this upload, but its answer may not have reached the client. The note
            # proves that this participant uploaded the bytes. Knowing a SHA-256 must not give access to the content of
            # another participant.
            if _read_text(note) != sha256 or not blob_path(self._folder, sha256).exists():
                raise _unknown_upload() from None
            return Blob(sha256, blob_path(self._folder, sha256).stat().st_size)
        size = draft.stat().st_size
        if actual != sha256:
            draft.unlink()
            self._count_draft_bytes(-size)
            raise _wrong_checksum(actual)
        # Write the note before publishing the blob. If the process is killed in between, the draft still exists and the
        # next call finishes the upload.
        with open(note, "w", encoding="ascii", opener=open_private) as file:
            file.write(sha256)
        self._publish(draft, sha256)
        self._count_draft_bytes(-size)
        return Blob(sha256, size)

    def _write_blob(self, draft: Path, blob: Blob, data: bytes) -> None:
        make_folder(draft.parent)
        try:
            with open(draft, "xb", opener=open_private) as file:
                file.write(data)
            self._publish(draft, blob.sha256)
        finally:
            draft.unlink(missing_ok=True)

    def _publish(self, draft: Path, sha256: str) -> None:
        """Sync a draft and rename it to the blob's path. An existing blob is replaced, because it may be damaged."""
        path = blob_path(self._folder, sha256)
        make_folder(path.parent)
        try:
            publish_file(draft, path, replaces=True)
        except PermissionError:  # Windows refuses to replace a file that is being read
            if not path.exists():
                raise
            draft.unlink()

    def _read(self, sha256: str, offset: int, length: int) -> bytes:
        try:
            with open(blob_path(self._folder, sha256), "rb") as file:
                file.seek(offset)
                return file.read(length)
        except FileNotFoundError:
            raise BlobMissing(sha256) from None

    def _drop_old_drafts(self, now: int) -> None:
        for path in self._folder.glob("drafts/**/*"):
            with suppress(OSError):  # Another call has just finished the upload.
                if path.is_file() and path.stat().st_mtime * 1000 < now - DRAFT_TTL_MS:
                    path.unlink()
        with self._counting:
            self._draft_bytes = None


async def _run(function: Callable[..., T], *args: object) -> T:
    """Run a function in a worker thread. The error for a disk failure includes the reason, because the caller cannot
    read the node's log."""
    try:
        return await asyncio.to_thread(function, *args)
    except OSError as error:
        log.error("The blob store failed: %s", error)
        raise InternalError(f"The node cannot access its files: {error.strerror or type(error).__name__}.") from error


def _hash_name(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def _measure(path: Path) -> int:
    """Return the size of a draft, or 0 if the draft no longer exists because the upload is finished."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (FileNotFoundError, UnicodeDecodeError):
        return ""


def blob_path(folder: Path, sha256: str) -> Path:
    """Return the path of a blob. To be safe as a path, ``sha256`` must be a checksum that this hub computed."""
    return folder / "blobs" / sha256[:2] / sha256


def list_blobs(folder: Path) -> Iterator[str]:
    """Yield the names (SHA-256) of all blobs in a folder, in no particular order."""
    return (path.name for path in folder.glob("blobs/??/*") if len(path.name) == 64)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits. Raises `OSError`."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(_HASH_BYTES):
            digest.update(data)
    return digest.hexdigest()
