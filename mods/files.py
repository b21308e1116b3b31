"""`files`: contents that participants save and attach to messages.

The state holds only metadata. The node's blob store (`roundelay.network.blobs`) holds the bytes. It stores them before
the change that names them is decided, so an accepted reference implies a durable content.

Readers of a message may read the versions that it attaches. Other versions are private to the owner.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from roundelay.network.addresses import agent_address, write_address
from roundelay.network.blobs import Blob, BlobMissing
from roundelay.network.core.entries import Origin
from roundelay.network.core.rows import MessageHead, Row
from roundelay.network.core.state import State
from roundelay.network.core.visibility import may_read
from roundelay.network.errors import Forbidden, InternalError, InvalidArguments, TooLarge
from roundelay.network.file_references import FILE_ID_PATTERN, guess_media_type, normalize_name, read_references
from roundelay.network.frames import ID_PATTERN, Seq
from roundelay.network.mod import Change, Mod, Reading, Upkeep, operation
from roundelay.network.operations.paging import ListPage
from roundelay.network.operations.views import View, open_view
from roundelay.network.units import DAY_MS

MIB = 2**20
MAX_CHUNK = 128 * 1024
"""Maximum size of one chunk, in bytes. As base64 it fits into a frame."""
MAX_FILES = 20_000
MAX_VERSIONS = 50
MAX_GRANTS = 200
"""Maximum number of messages to which one file is attached."""
MAX_ATTACHED = 20
"""Maximum number of files in one message."""
EXAMINED = 1000
"""Maximum number of files that one call of ``list`` examines. The hub is blocked while it examines them."""
EXPIRED_AT_ONCE = 100
BEYOND_TIME = 2**44

FileId = Annotated[str, Meta(pattern=f"^{FILE_ID_PATTERN}$", description="The file's id.")]
Name = Annotated[str, Meta(min_length=1, max_length=200, description="The name to show, such as plan.md.")]
MediaType = Annotated[str, Meta(pattern="^([a-z0-9.+-]{1,60}/[a-z0-9.+-]{1,60})?$")]
VersionNumber = Annotated[int, Meta(ge=1, le=10**9, description="The newest one that you may read by default.")]
UploadId = Annotated[str, Meta(pattern=ID_PATTERN)]
Offset = Annotated[int, Meta(ge=0, le=2**40)]


class Version(Struct, frozen=True, omit_defaults=True):
    """One content of a file. ``cause`` is the message in whose reaction an agent saved it. ``free_since`` is the time at
    which it was saved, or at which the last message with it was dropped (ms)."""

    number: int
    sha256: str
    size: int
    at: int
    free_since: int
    cause: MessageHead | None = None


class Grant(Struct, frozen=True):
    """A message that attaches a version. Its readers may read that version."""

    version: int
    head: MessageHead


class StoredFile(Struct, frozen=True):
    """A file in the mod's state."""

    id: str
    name: str
    media_type: str
    owner: str
    versions: tuple[Version, ...]
    grants: tuple[Grant, ...] = ()


class Files(Mod):
    """Save, read, list and attach files."""

    id = "files"
    stores_blobs = True

    def __init__(
        self,
        *,
        max_file_bytes: int = 32 * MIB,
        max_bytes_by_one: int = 256 * MIB,
        max_bytes: int = 4096 * MIB,
        max_files_by_one: int = 1000,
        keep_days: float = 30,
    ) -> None:
        self.max_file_bytes = max_file_bytes
        self.max_bytes_by_one = max_bytes_by_one
        self.max_bytes = max_bytes
        self.max_files_by_one = max_files_by_one
        self.keep_ms = int(keep_days * DAY_MS)

    # --- writing

    @operation("read", is_tool=False)
    async def upload(
        self,
        reading: Reading,
        *,
        upload_id: UploadId,
        offset: Offset,
        data: Annotated[bytes, Meta(max_length=MAX_CHUNK)],
    ) -> dict[str, Any]:
        """Append a chunk, in base64, to an upload of yours. `size` is the number of bytes that the hub has. Continue
        from there, and end with files.create."""
        used = reading.get(f"used/{reading.origin.agent_id}") or [0, 0]
        self._check_size(offset + len(data), used[1])
        size = await reading.blobs.write_draft(reading.origin.agent_id, upload_id, offset, data)
        return {"size": size}

    async def _finish(self, reading: Reading, *, upload_id: str, sha256: str, **_: object) -> Blob:
        return await reading.blobs.finish_draft(reading.origin.agent_id, upload_id, sha256)

    @operation("change", prepare=_finish, is_tool=False)
    def create(
        self,
        change: Change,
        *,
        upload_id: UploadId,
        sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")],
        name: Name,
        media_type: MediaType = "",
        file: FileId | None = None,
        cause: Seq | None = None,
    ) -> dict[str, Any]:
        """Make a file of an upload, or a new version of a `file` that you own. The content must have this SHA-256."""
        return self._add(change, change.prepared, name, media_type, file, cause, upload_id)

    async def _store(self, reading: Reading, *, content: str, **_: object) -> Blob:
        data = content.encode()
        used = reading.get(f"used/{reading.origin.agent_id}") or [0, 0]
        self._check_size(len(data), used[1])
        return await reading.blobs.store(data)

    @operation("change", prepare=_store)
    def save(
        self,
        change: Change,
        *,
        name: Name,
        content: Annotated[str, Meta(description="The whole text.")],
        media_type: MediaType = "",
        file: FileId | None = None,
        cause: Seq | None = None,
    ) -> dict[str, Any]:
        """Save a text as a file, or as a new version of a `file` that you own. Nobody else can read it until you attach
        it to a message."""
        return self._add(change, change.prepared, name, media_type, file, cause, "")

    async def _check_shown(self, reading: Reading, *, files: Sequence[str], cause: int | None, **_: object) -> None:
        """Refuse files that an agent may not use in the reaction to ``cause``."""
        if reading.origin.kind == "agent" and cause is not None:
            view = await open_view(reading, cause)
            for file_id in files:
                await _find_shown(reading, view, file_id, None)

    @operation("change", prepare=_check_shown)
    def attach(
        self,
        change: Change,
        *,
        to: Annotated[str, Meta(max_length=100, description="agent:ID, channel:NAME or broadcast.")],
        files: Annotated[list[FileId], Meta(min_length=1, max_length=MAX_ATTACHED)],
        text: str = "",
        cause: Seq | None = None,
    ) -> dict[str, Any]:
        """Send a message with files. The readers of the message may read the files."""
        attached = []
        for file_id in files:
            file, version = _find(change.get(f"file/{file_id}"), change.state, change.origin, file_id, None)
            attached.append(describe_reference(file, version))
        content: dict[str, Any] = {"text": text, "files": attached} if text else {"files": attached}
        address, head = write_address(to), None if cause is None else change.head(cause)
        # A message to the sender of a direct cause answers it, which ends the sender's wait.
        is_answer = head is not None and head.kind == "direct" and agent_address(head.sender_id) == address
        row = change.post(address, content, reply_to=cause if is_answer else None, cause=cause)
        return {"seq": row.seq, "thread_id": row.stream}

    @operation("change")
    def delete(self, change: Change, *, file: FileId) -> dict[str, Any]:
        """Delete a file that you own, with all versions. Messages keep its name."""
        stored = _decode(change.get(f"file/{file}"))
        if stored is None or (stored.owner != change.origin.agent_id and not change.origin.is_operator):
            if stored is not None and _readable(change.state, change.origin, stored):
                raise Forbidden(f"Only {stored.owner}, its owner, may delete the file {file!r}.")
            raise _unknown(file)
        _keep_versions(change, stored, (), ())
        return {"file": file}

    def _check_size(self, size: int, used: int) -> None:
        if size > self.max_file_bytes:
            raise TooLarge(f"A file may have at most {self.max_file_bytes} bytes in this network.")
        if used + size > self.max_bytes_by_one:
            raise TooLarge(
                f"Your files have {used} bytes, and you may have {self.max_bytes_by_one}. Delete some with files.delete."
            )

    def _add(
        self,
        change: Change,
        blob: Blob,
        name: str,
        media_type: str,
        file_id: str | None,
        cause: int | None,
        upload_id: str,
    ) -> dict[str, Any]:
        """Add a version to a file, or add a file. The blob is already durable."""
        caller, name = change.origin.agent_id, normalize_name(name)
        file = None if file_id is None else _decode(change.get(f"file/{file_id}"))
        if file_id is not None and (file is None or file.owner != caller):
            raise InvalidArguments(f"You own no file {file_id!r}. Leave `file` out to save a new one.")
        if file is None:
            file = StoredFile(_new_id(change, upload_id), name, "", caller, ())
            is_new = 1
        elif file.versions[-1].sha256 == blob.sha256:
            return describe(file, file.versions[-1])
        else:
            is_new = 0
        used, total = change.get(f"used/{caller}") or [0, 0], change.get("total") or [0, 0]
        stored = change.get(f"blob/{blob.sha256}") or [blob.size, 0]
        self._check_size(blob.size, used[1])
        if used[0] + is_new > self.max_files_by_one or total[0] + is_new > MAX_FILES:
            raise InvalidArguments(
                f"Too many files: at most {self.max_files_by_one} per participant and {MAX_FILES} in the network. Delete some "
                "with files.delete."
            )
        # The same content is stored once, so only its first reference adds to the total.
        added = blob.size if stored[1] == 0 else 0
        if total[1] + added > self.max_bytes:
            raise TooLarge(f"The files of this network may have at most {self.max_bytes} bytes together.")
        number = file.versions[-1].number + 1 if file.versions else 1
        head = None if cause is None else change.head(cause)
        version = Version(number, blob.sha256, blob.size, change.stamp, change.stamp, head)
        versions = (*file.versions, version)
        changed = msgspec.structs.replace(
            file, name=name, media_type=media_type or guess_media_type(name), versions=versions
        )
        change.put(f"blob/{blob.sha256}", [blob.size, stored[1] + 1])
        change.put("total", [total[0] + is_new, total[1] + added])
        change.put(f"used/{caller}", [used[0] + is_new, used[1] + blob.size])
        if len(versions) > MAX_VERSIONS:
            granted = {grant.version for grant in file.grants}
            oldest = next((old for old in versions[:-1] if old.number not in granted), None)
            if oldest is None:
                raise InvalidArguments(f"{file.id} has {MAX_VERSIONS} versions in messages. Save a new file instead.")
            _keep_versions(change, changed, tuple(it for it in versions if it is not oldest), file.grants)
        else:
            change.put(f"file/{file.id}", changed)
        return describe(changed, version)

    # --- references in messages

    def apply(self, change: Change, message: Row) -> None:
        # Nearly all messages have no files, so look at the bytes before decoding them.
        if b'"file"' not in message.data or message.head is None:
            return
        references = read_references(msgspec.json.decode(message.data).get("content"))
        if len(references) > MAX_ATTACHED:
            raise InvalidArguments(f"A message may have at most {MAX_ATTACHED} files; this one has {len(references)}.")
        for file_id, number in references:
            file, version = _find(change.get(f"file/{file_id}"), change.state, change.origin, file_id, number)
            grant = Grant(version.number, message.head)
            # A newer message between the same two participants has the same readers and is dropped later.
            grants = [old for old in file.grants if not _has_same_readers(old, grant)]
            if len(grants) >= MAX_GRANTS:
                raise InvalidArguments(f"{file_id} is attached to {MAX_GRANTS} messages. Save it again to attach it.")
            change.put(f"file/{file_id}", msgspec.structs.replace(file, grants=(*grants, grant)))

    # --- reading

    @operation("read")
    async def read(
        self,
        reading: Reading,
        *,
        file: FileId,
        version: VersionNumber | None = None,
        start: Annotated[int, Meta(ge=0, le=2**40, description="First byte. Continue with `next`.")] = 0,
        length: Annotated[int, Meta(ge=4, le=100_000, description="Maximum number of bytes.")] = 20_000,
        trigger: Seq | None = None,
    ) -> dict[str, Any]:
        """Read a text file, or a part of it. `next` is the start of the next part."""
        stored, wanted = await _find_shown(reading, await open_view(reading, trigger), file, version)
        data = await _read_blob(reading, wanted, start, length)
        if b"\0" in data:
            raise InvalidArguments(f"{stored.name} ({stored.media_type}, {wanted.size} bytes) is not a text.")
        end = start + len(data)
        if end < wanted.size:
            # Do not split a character: leave its first bytes to the next part.
            data = data[: len(data) - _count_cut_bytes(data)]
            end = start + len(data)
        text = {"text": data.decode(errors="replace"), "start": start, "size": wanted.size}
        return {**describe(stored, wanted), **text, **({"next": end} if end < wanted.size else {})}

    @operation("read", is_tool=False)
    async def download(
        self,
        reading: Reading,
        *,
        file: FileId,
        version: VersionNumber | None = None,
        offset: Offset = 0,
        length: Annotated[int, Meta(ge=0, le=MAX_CHUNK)] = MAX_CHUNK,
        trigger: Seq | None = None,
    ) -> dict[str, Any]:
        """Return a part of a file's bytes as base64 in `data`, with the size and the SHA-256 of the whole file."""
        stored, wanted = await _find_shown(reading, await open_view(reading, trigger), file, version)
        return {**describe(stored, wanted), "data": await _read_blob(reading, wanted, offset, length)}

    @operation("read")
    async def list(
        self,
        reading: Reading,
        *,
        thread_id: Annotated[str, Meta(max_length=200, description="Only files in messages of this thread.")] = "",
        after: Annotated[str, Meta(max_length=40)] = "",
        limit: Annotated[int, Meta(ge=1, le=200)] = 50,
        trigger: Seq | None = None,
    ) -> dict[str, Any]:
        """List the files that you own or that are attached to messages that you may read, newest first. Continue with
        `next` as `after`."""
        view = await open_view(reading, trigger)
        page, last = ListPage(limit, reading.hub.limits.max_result_bytes), after
        # A list, because the state may change while the loop waits for the ledger.
        candidates = [*islice(_stored_files(reading.hub.state, after), EXAMINED + 1)]
        page.has_more = len(candidates) > EXAMINED
        for file_id, raw in candidates[:EXAMINED]:
            file = _decode_raw(raw)
            if not thread_id or any(grant.head.thread_id == thread_id for grant in file.grants):
                shown = await _list_shown(reading, view, file)
                if shown and not page.add({**describe(file, shown[-1]), "versions": [it.number for it in shown]}):
                    break
            last = file_id
        return {"files": page.entries, "has_more": page.has_more, **({"next": last} if page.has_more else {})}

    # --- retention

    async def maintain(self, context: Upkeep) -> None:
        state, until = context.state, context.now - self.keep_ms
        expired = [
            file_id
            for file_id, raw in _stored_files(state, "")
            if _is_expired(_decode_raw(raw), context.first_seq, until)
        ]
        for index in range(0, len(expired), EXPIRED_AT_ONCE):
            context.submit(
                {"files": expired[index : index + EXPIRED_AT_ONCE], "first_seq": context.first_seq, "now": context.now}
            )

    def apply_entry(self, change: Change, payload: Any) -> None:
        first_seq, now = payload["first_seq"], payload["now"]
        for file_id in payload["files"]:
            file = _decode(change.get(f"file/{file_id}"))
            if file is None:
                continue
            # Check again: a message may have attached the file since the hub looked.
            grants = tuple(grant for grant in file.grants if grant.head.seq >= first_seq)
            granted, before = {grant.version for grant in grants}, {grant.version for grant in file.grants}
            versions = []
            for version in file.versions:
                if version.number in before - granted:
                    version = msgspec.structs.replace(version, free_since=now)
                if version.number in granted or version.free_since > now - self.keep_ms:
                    versions.append(version)
            _keep_versions(change, file, tuple(versions), grants)


def describe(file: StoredFile, version: Version) -> dict[str, Any]:
    """Return a version of a file as operations return it."""
    return {
        **describe_reference(file, version),
        "sha256": version.sha256,
        "owner": file.owner,
        "at": version.at,
    }


def describe_reference(file: StoredFile, version: Version) -> dict[str, Any]:
    """Return the part of a message that attaches a version."""
    return {
        "file": file.id,
        "version": version.number,
        "name": file.name,
        "media_type": file.media_type,
        "size": version.size,
    }


def _new_id(change: Change, upload_id: str) -> str:
    """Return a free id. Ids of newer files sort first."""
    for attempt in range(1000):
        salt = hashlib.sha256(f"{change.origin.agent_id}\0{upload_id}\0{attempt}".encode()).hexdigest()[:8]
        file_id = f"f-{BEYOND_TIME - 1 - change.stamp % BEYOND_TIME:011x}-{salt}"
        if change.get(f"file/{file_id}") is None:
            return file_id
    raise InternalError("The hub found no free file id. Try again.")


def _keep_versions(change: Change, file: StoredFile, versions: tuple[Version, ...], grants: tuple[Grant, ...]) -> None:
    """Store a file with only these versions, and count the others off. Without versions the file is deleted."""
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


def _has_same_readers(one: Grant, other: Grant) -> bool:
    return (
        one.head.kind in ("direct", "mod")
        and (one.version, one.head.kind) == (other.version, other.head.kind)
        and (one.head.sender_id, one.head.to, one.head.thread_id)
        == (other.head.sender_id, other.head.to, other.head.thread_id)
    )


def _is_expired(file: StoredFile, first_seq: int, until: int) -> bool:
    """Return whether something of a file may have to go."""
    granted = {grant.version for grant in file.grants}
    return any(grant.head.seq < first_seq for grant in file.grants) or any(
        version.number not in granted and version.free_since <= until for version in file.versions
    )


def _readable(state: State, origin: Origin, file: StoredFile) -> list[Version]:
    """Return the versions that a participant may read, oldest first."""
    if origin.is_operator or origin.agent_id == file.owner:
        return [*file.versions]
    granted = {grant.version for grant in file.grants if may_read(state, origin.agent_id, grant.head)}
    return [version for version in file.versions if version.number in granted]


def _choose(file: StoredFile | None, versions: Sequence[Version], file_id: str, number: int | None) -> Version:
    for version in reversed(versions):
        if number in (None, version.number):
            return version
    raise _unknown(file_id)


def _find(value: object, state: State, origin: Origin, file_id: str, number: int | None) -> tuple[StoredFile, Version]:
    """Return a version that the caller may read. Raises the same error if it is missing and if it is hidden."""
    file = _decode(value)
    if file is None:
        raise _unknown(file_id)
    return file, _choose(file, _readable(state, origin, file), file_id, number)


async def _list_shown(reading: Reading, view: View, file: StoredFile) -> list[Version]:
    """Return the versions that the caller may read, or, with a trigger, that may enter the prompt of its reaction."""
    if view.trigger is None:
        return _readable(reading.hub.state, reading.origin, file)
    granted = {grant.version for grant in file.grants if await view.shows(grant.head)}
    is_own = file.owner == reading.origin.agent_id
    return [
        version
        for version in file.versions
        if version.number in granted or (is_own and (version.cause is None or await view.shows(version.cause)))
    ]


async def _find_shown(reading: Reading, view: View, file_id: str, number: int | None) -> tuple[StoredFile, Version]:
    file = _decode(reading.get(f"file/{file_id}"))
    if file is None:
        raise _unknown(file_id)
    return file, _choose(file, await _list_shown(reading, view, file), file_id, number)


async def _read_blob(reading: Reading, version: Version, offset: int, length: int) -> bytes:
    try:
        return await reading.blobs.read(version.sha256, offset, min(length, max(0, version.size - offset)))
    except BlobMissing:
        raise InternalError(
            f"The node has lost the content {version.sha256[:12]}… of this file. Its operator can look for it in a backup."
        ) from None


def _unknown(file_id: str) -> InvalidArguments:
    return InvalidArguments(f"There is no file {file_id!r} that you may read, or not this version of it.")


def _decode(value: object) -> StoredFile | None:
    return None if value is None else msgspec.convert(value, StoredFile)


def _decode_raw(raw: Raw) -> StoredFile:
    return msgspec.json.decode(raw, type=StoredFile)


def _stored_files(state: State, after: str) -> Iterator[tuple[str, Any]]:
    """Yield the ids of the files above ``after`` with their values, newest first."""
    prefix = "files/file/"
    for key, raw in state.ascending("mod", prefix + after):
        if not key.startswith(prefix):
            return
        yield key.removeprefix(prefix), raw


def _count_cut_bytes(data: bytes) -> int:
    """Return the number of bytes at the end that begin an incomplete UTF-8 character."""
    for count in range(1, min(4, len(data)) + 1):
        byte = data[-count]
        if byte & 0xC0 == 0x80:
            continue
        needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return count if needed > count else 0
    return 0
