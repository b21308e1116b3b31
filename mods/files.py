"""`files`: contents that participants save and attach to messages.

The state holds only metadata. The node's blob store (`roundelay.network.blobs`) holds the bytes. The
blob store writes the bytes to disk before the hub accepts a change that refers to them. Every accepted reference
therefore has its content on disk.

Readers of a message may read the versions that it attaches. Other versions are private to the owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from roundelay.network.addresses import agent_address, write_address
from roundelay.network.blobs import Blob
from roundelay.network.core.rows import MessageHead, Row
from roundelay.network.errors import Forbidden, InvalidArguments, TooLarge
from roundelay.network.file_references import FILE_ID_PATTERN, guess_media_type, normalize_name, read_references
from roundelay.network.frames import ID_PATTERN, Seq
from roundelay.network.mod import Change, Mod, Reading, Upkeep, operation
from roundelay.network.operations.paging import ListPage
from roundelay.network.operations.views import open_view
from roundelay.network.units import DAY_MS

from .file_records import (
    Grant,
    StoredFile,
    Version,
    count_cut_bytes,
    decode_file,
    describe_file,
    describe_reference,
    find_shown,
    find_version,
    free_versions,
    is_expired,
    keep_versions,
    list_readable,
    list_shown,
    list_stored,
    make_file_id,
    read_blob,
    read_stored,
    unknown_file,
)
from .screens import FILES

MIB = 2**20
MAX_CHUNK = 128 * 1024
"""Maximum size of an upload chunk, in bytes. A chunk of this size, encoded as base64, fits into one frame."""
MAX_FILES = 20_000
MAX_VERSIONS = 50
MAX_GRANTS = 200
"""Maximum number of messages to which one file can be attached."""
MAX_ATTACHED = 20
"""Maximum number of files that one message can attach."""
EXAMINED = 1000
"""Maximum number of files that one call examines. The limit exists because the call blocks the hub."""
EXPIRED_AT_ONCE = 100

FileId = Annotated[str, Meta(pattern=f"^{FILE_ID_PATTERN}$", description="The file's id.")]
Name = Annotated[str, Meta(min_length=1, max_length=200, description="The name to show, such as plan.md.")]
MediaType = Annotated[str, Meta(pattern="^([a-z0-9.+-]{1,60}/[a-z0-9.+-]{1,60})?$")]
VersionNumber = Annotated[int, Meta(ge=1, le=10**9, description="The newest one that you may read by default.")]
UploadId = Annotated[str, Meta(pattern=ID_PATTERN)]
Offset = Annotated[int, Meta(ge=0, le=2**40)]


class Files(Mod):
    """Save, read, list and attach files."""

    id = "files"
    screens = (FILES,)
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
        """Refuse files that the agent may not use while it reacts to the message ``cause``."""
        if reading.origin.kind == "agent" and cause is not None:
            view = await open_view(reading, cause)
            for file_id in files:
                await find_shown(reading, view, file_id, None)

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
            file, version = find_version(change.get(f"file/{file_id}"), change.state, change.origin, file_id, None)
            attached.append(describe_reference(file, version))
        content: dict[str, Any] = {"text": text, "files": attached} if text else {"files": attached}
        address, head = write_address(to), None if cause is None else change.head(cause)
        # If the cause is a direct message, a message to its sender is the answer and ends the sender's wait.
        is_answer = head is not None and head.kind == "direct" and agent_address(head.sender_id) == address
        row = change.post(address, content, reply_to=cause if is_answer else None, cause=cause)
        return {"seq": row.seq, "thread_id": row.stream}

    @operation("change")
    def delete(self, change: Change, *, file: FileId) -> dict[str, Any]:
        """Delete a file that you own, with all versions. Messages keep its name."""
        stored = decode_file(change.get(f"file/{file}"))
        if stored is None or (stored.owner != change.origin.agent_id and not change.origin.is_operator):
            if stored is not None and list_readable(change.state, change.origin, stored):
                raise Forbidden(f"Only {stored.owner}, its owner, may delete the file {file!r}.")
            raise unknown_file(file)
        keep_versions(change, stored, (), ())
        for grant in stored.grants:
            key = f"in/{grant.head.seq}"
            # The message may attach other files. Deleting the message must also detach those files.
            change.put(key, [it for it in change.get(key) or [] if it != file] or None)
        change.log({"file": file})
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
        """Add a version to a file, or create the file. The blob with the content is already on disk."""
        caller, name = change.origin.agent_id, normalize_name(name)
        file = None if file_id is None else decode_file(change.get(f"file/{file_id}"))
        if file_id is not None and (file is None or file.owner != caller):
            raise InvalidArguments(f"You own no file {file_id!r}. Leave `file` out to save a new one.")
        if file is None:
            file = StoredFile(make_file_id(change, upload_id), name, "", caller, ())
            is_new = 1
        elif file.versions[-1].sha256 == blob.sha256:
            return describe_file(file, file.versions[-1])
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
        # Identical content is stored only once, so only the first reference adds to the total size.
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
            keep_versions(change, changed, tuple(it for it in versions if it is not oldest), file.grants)
        else:
            change.put(f"file/{file.id}", changed)
        # Do not log the arguments: they may contain the text of a private file.
        change.log({"file": file.id, "version": number, "sha256": blob.sha256, "size": blob.size}, hides_args=True)
        return describe_file(changed, version)

    # --- references in messages

    def apply(self, change: Change, message: Row) -> None:
        # Search the raw bytes before decoding the message, because most messages attach no files.
        if b'"file"' not in message.data or message.head is None:
            return
        references = read_references(msgspec.json.decode(message.data).get("content"))
        if len(references) > MAX_ATTACHED:
            raise InvalidArguments(f"A message may have at most {MAX_ATTACHED} files; this one has {len(references)}.")
        for file_id, number in references:
            file, version = find_version(change.get(f"file/{file_id}"), change.state, change.origin, file_id, number)
            grant = Grant(version.number, message.head)
            if len(file.grants) >= MAX_GRANTS:
                raise InvalidArguments(f"{file_id} is attached to {MAX_GRANTS} messages. Save it again to attach it.")
            change.put(f"file/{file_id}", msgspec.structs.replace(file, grants=(*file.grants, grant)))
        if references:
            change.put(f"in/{message.seq}", [file_id for file_id, _ in references])

    def deleted(self, change: Change, message: MessageHead) -> None:
        # Deleting the text also detaches the files: readers of the message lose access, and the owner keeps the files
        # for a limited time.
        for file_id in change.get(f"in/{message.seq}") or ():
            file = decode_file(change.get(f"file/{file_id}"))
            if file is not None:
                grants = tuple(grant for grant in file.grants if grant.head.seq != message.seq)
                keep_versions(change, file, free_versions(file, grants, change.stamp), grants)
        change.put(f"in/{message.seq}", None)

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
        stored, wanted = await find_shown(reading, await open_view(reading, trigger), file, version)
        data = await read_blob(reading, wanted, start, length)
        if b"\0" in data:
            raise InvalidArguments(f"{stored.name} ({stored.media_type}, {wanted.size} bytes) is not a text.")
        end = start + len(data)
        if end < wanted.size:
            # Do not split a character: the next part begins with the whole character.
            data = data[: len(data) - count_cut_bytes(data)]
            end = start + len(data)
        text = {"text": data.decode(errors="replace"), "start": start, "size": wanted.size}
        return {**describe_file(stored, wanted), **text, **({"next": end} if end < wanted.size else {})}

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
        stored, wanted = await find_shown(reading, await open_view(reading, trigger), file, version)
        return {**describe_file(stored, wanted), "data": await read_blob(reading, wanted, offset, length)}

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
        # Copy into a list, because the state may change while the loop waits for the ledger.
        while candidates := [*islice(list_stored(reading.hub.state, after), EXAMINED)]:
            for after, raw in candidates:
                file = read_stored(raw)
                if thread_id and not any(grant.head.thread_id == thread_id for grant in file.grants):
                    continue
                if shown := await list_shown(reading, view, file):
                    if not page.add({**describe_file(file, shown[-1]), "versions": [it.number for it in shown]}):
                        break
                    # never use the id of a hidden file as the cursor, because an id reveals when its file was saved
                    last = after
            if page.has_more or len(candidates) < EXAMINED:
                break
            await reading.take_turns()
        return {"files": page.entries, "has_more": page.has_more, **({"next": last} if page.has_more else {})}

    # --- retention

    async def maintain(self, context: Upkeep) -> None:
        until, expired = context.now - self.keep_ms, []
        # Copy into a list, because the state may change when the loop yields to other tasks.
        for number, (file_id, raw) in enumerate([*list_stored(context.state, "")]):
            if number % EXAMINED == EXAMINED - 1:
                await asyncio.sleep(0)
            if is_expired(read_stored(raw), context.first_seq, until):
                expired.append(file_id)
        for index in range(0, len(expired), EXPIRED_AT_ONCE):
            context.submit(
                {"files": expired[index : index + EXPIRED_AT_ONCE], "first_seq": context.first_seq, "now": context.now}
            )

    def apply_entry(self, change: Change, payload: Any) -> None:
        first_seq, now = payload["first_seq"], payload["now"]
        for file_id in payload["files"]:
            file = decode_file(change.get(f"file/{file_id}"))
            if file is None:
                continue
            # Check again: a message may have attached the file since `maintain` examined it.
            grants = tuple(grant for grant in file.grants if grant.head.seq >= first_seq)
            for grant in file.grants:
                if grant.head.seq < first_seq:
                    change.put(f"in/{grant.head.seq}", None)
            granted = {grant.version for grant in grants}
            versions = tuple(
                version
                for version in free_versions(file, grants, now)
                if version.number in granted or version.free_since > now - self.keep_ms
            )
            keep_versions(change, file, versions, grants)
