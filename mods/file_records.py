"""Records of the mod `files`: a file, its versions and the messages that attach them, and the rules about their readers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from roundelay.network.blobs import BlobMissing
from roundelay.network.core.entries import Origin
from roundelay.network.core.rows import MessageHead
from roundelay.network.core.state import State
from roundelay.network.core.visibility import may_read
from roundelay.network.errors import InternalError, InvalidArguments
from roundelay.network.mod import Change, Reading
from roundelay.network.operations.views import View

BEYOND_TIME = 2**44
"""Upper bound of all times, in ms. File ids contain this bound minus the creation time, so newer files sort first."""


class Version(Struct, frozen=True, omit_defaults=True):
    """One version of a file. ``cause`` is the message that the agent was reacting to when it saved the version.

    ``free_since`` is the time in ms since which no message attaches the version, or the time at which it was saved.
    """

    number: int
    sha256: str
    size: int
    at: int
    free_since: int
    cause: MessageHead | None = None


class Grant(Struct, frozen=True):
    """Message that attaches a version of a file. Readers of the message may read the version."""

    version: int
    head: MessageHead


class StoredFile(Struct, frozen=True):
    """Stored record of a file: its owner, versions and grants, without the bytes."""

    id: str
    name: str
    media_type: str
    owner: str
    versions: tuple[Version, ...]
    grants: tuple[Grant, ...] = ()


def describe_file(file: StoredFile, version: Version) -> dict[str, Any]:
    """Return the JSON that operations return for a version of a file."""
    return {
        **describe_reference(file, version),
        "sha256": version.sha256,
        "owner": file.owner,
        "at": version.at,
    }


def describe_reference(file: StoredFile, version: Version) -> dict[str, Any]:
    """Return the JSON part of a message that attaches a version of a file."""
    return {
        "file": file.id,
        "version": version.number,
        "name": file.name,
        "media_type": file.media_type,
        "size": version.size,
    }


def make_file_id(change: Change, upload_id: str) -> str:
    """Return an unused file id. Ids of newer files sort before ids of older files."""
    for attempt in range(1000):
        salt = hashlib.sha256(f"{change.origin.agent_id}\0{upload_id}\0{attempt}".encode()).hexdigest()[:8]
        file_id = f"f-{BEYOND_TIME - 1 - change.stamp % BEYOND_TIME:011x}-{salt}"
        if change.get(f"file/{file_id}") is None:
            return file_id
    raise InternalError("The hub found no free file id. Try again.")


def keep_versions(change: Change, file: StoredFile, versions: tuple[Version, ...], grants: tuple[Grant, ...]) -> None:
    """Store a file with only these versions, and subtract the removed versions from the totals.

    If no version remains, delete the file.
    """
    kept = {version.number for version in versions}
    removed = [version for version in file.versions if version.number not in kept]
    used, total = change.get(f"used/{file.owner}") or [0, 0], change.get("total") or [0, 0]
    for version in removed:
        size, count = change.get(f"blob/{version.sha256}") or [version.size, 1]
        change.put(f"blob/{version.sha256}", [size, count - 1] if count > 1 else None)
        used[1] -= version.size
        total[1] -= size if count <= 1 else 0
    if not versions:
        used[0] -= 1
        total[0] -= 1
    change.put(f"used/{file.owner}", used if any(used) else None)
    change.put("total", total)
    remaining = msgspec.structs.replace(file, versions=versions, grants=grants)
    change.put(f"file/{file.id}", remaining if versions else None)


def free_versions(file: StoredFile, grants: tuple[Grant, ...], now: int) -> tuple[Version, ...]:
    """Return the versions of a file. For each version that no grant names any more, start its grace period."""
    freed = {grant.version for grant in file.grants} - {grant.version for grant in grants}
    return tuple(
        msgspec.structs.replace(version, free_since=now) if version.number in freed else version
        for version in file.versions
    )


def is_expired(file: StoredFile, first_seq: int, until: int) -> bool:
    """Return whether retention may have to delete a version or a grant of a file."""
    granted = {grant.version for grant in file.grants}
    return any(grant.head.seq < first_seq for grant in file.grants) or any(
        version.number not in granted and version.free_since <= until for version in file.versions
    )


def list_readable(state: State, origin: Origin, file: StoredFile) -> list[Version]:
    """Return the versions that a participant may read, oldest first."""
    if origin.is_operator or origin.agent_id == file.owner:
        return [*file.versions]
    granted = {grant.version for grant in file.grants if may_read(state, origin.agent_id, grant.head)}
    return [version for version in file.versions if version.number in granted]


def _choose(file: StoredFile | None, versions: Sequence[Version], file_id: str, number: int | None) -> Version:
    for version in reversed(versions):
        if number in (None, version.number):
            return version
    raise unknown_file(file_id)


def find_version(
    value: object, state: State, origin: Origin, file_id: str, number: int | None
) -> tuple[StoredFile, Version]:
    """Return a file version that the caller may read.

    Missing and unreadable versions raise the same error, so that the error does not reveal which versions exist.
    """
    file = decode_file(value)
    if file is None:
        raise unknown_file(file_id)
    return file, _choose(file, list_readable(state, origin, file), file_id, number)


async def list_shown(reading: Reading, view: View, file: StoredFile) -> list[Version]:
    """Return the versions that the caller may read, or, with a trigger, that may enter the prompt of its reaction."""
    if view.trigger is None:
        return list_readable(reading.hub.state, reading.origin, file)
    granted = {grant.version for grant in file.grants if await view.shows(grant.head)}
    is_own = file.owner == reading.origin.agent_id
    return [
        version
        for version in file.versions
        if version.number in granted or (is_own and (version.cause is None or await view.shows(version.cause)))
    ]


async def find_shown(reading: Reading, view: View, file_id: str, number: int | None) -> tuple[StoredFile, Version]:
    file = decode_file(reading.get(f"file/{file_id}"))
    if file is None:
        raise unknown_file(file_id)
    return file, _choose(file, await list_shown(reading, view, file), file_id, number)


async def read_blob(reading: Reading, version: Version, offset: int, length: int) -> bytes:
    try:
        return await reading.blobs.read(version.sha256, offset, min(length, max(0, version.size - offset)))
    except BlobMissing:
        raise InternalError(
            f"The node has lost the content {version.sha256[:12]}… of this file. Its operator can look for it in a backup."
        ) from None


def unknown_file(file_id: str) -> InvalidArguments:
    return InvalidArguments(f"There is no file {file_id!r} that you may read, or not this version of it.")


def decode_file(value: object) -> StoredFile | None:
    return None if value is None else msgspec.convert(value, StoredFile)


def read_stored(raw: Raw) -> StoredFile:
    return msgspec.json.decode(raw, type=StoredFile)


def list_stored(state: State, after: str) -> Iterator[tuple[str, Any]]:
    """Yield the ids of the files above ``after`` with their values, newest first."""
    prefix = "files/file/"
    for key, raw in state.ascending("mod", prefix + after):
        if not key.startswith(prefix):
            return
        yield key.removeprefix(prefix), raw


def count_cut_bytes(data: bytes) -> int:
    """Return how many bytes at the end of ``data`` belong to an incomplete UTF-8 character."""
    for count in range(1, min(4, len(data)) + 1):
        byte = data[-count]
        if byte & 0xC0 == 0x80:
            continue
        needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return count if needed > count else 0
    return 0
