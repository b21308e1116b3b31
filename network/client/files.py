"""Functions for programs that upload files to a network in chunks, attach files to messages, and download files.

The functions use the operations of the mod ``files``. An interrupted upload continues at its last chunk, also after a
reconnect.
"""

from __future__ import annotations

import hashlib
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from typing import Any

from roundelay.network.clock import ordered_id
from roundelay.network.errors import InternalError

from .client import NetworkClient

CHUNK_BYTES = 128 * 1024
"""Size of one chunk, in bytes. A chunk encoded as base64 fits into a frame."""


async def upload_file(
    client: NetworkClient,
    data: bytes,
    *,
    name: str = "file",
    media_type: str = "",
    file: str | None = None,
    cause: int | None = None,
    upload_id: str | None = None,
) -> dict[str, Any]:
    """Store data as a new file, or as a new version of ``file``. Return the file's description, which contains its id
    as ``file``.

    The file is durable when this function returns. Attach the description to a message with
    ``client.send(to, {"text": "…", "files": [described]})``. A repeated call with the same ``upload_id`` continues
    the upload.
    """
    upload_id = upload_id or ordered_id().lower()
    offset, is_first = 0, True
    while is_first or offset < len(data):
        chunk = b64encode(data[offset : offset + CHUNK_BYTES]).decode()
        answer = await client.call("files.upload", {"upload_id": upload_id, "offset": offset, "data": chunk})
        # The hub may already have more data from an earlier attempt, or less data if its draft has expired.
        offset, is_first = min(int(answer["size"]), len(data)), False
    args: dict[str, Any] = {
        "upload_id": upload_id,
        "sha256": hashlib.sha256(data).hexdigest(),
        "name": name,
        "media_type": media_type,
    }
    args |= {key: value for key, value in (("file", file), ("cause", cause)) if value is not None}
    described: dict[str, Any] = await client.call("files.create", args, call_id=f"create:{upload_id}")
    return described


async def download_file(client: NetworkClient, file: str, version: int | None = None) -> bytes:
    """Return the content of a file that this participant may read. Raises `InternalError` if its checksum is wrong."""
    parts = [part async for part in read_chunks(client, file, version)]
    return b"".join(parts)


async def read_chunks(client: NetworkClient, file: str, version: int | None = None) -> AsyncIterator[bytes]:
    """Yield the content of a file in chunks. Raises `InternalError` after the last chunk if the checksum is wrong."""
    digest, offset = hashlib.sha256(), 0
    args: dict[str, Any] = {"file": file} | ({"version": version} if version is not None else {})
    while True:
        answer = await client.call("files.download", {**args, "offset": offset, "length": CHUNK_BYTES})
        args["version"] = answer["version"]  # read all chunks from one version, even if a newer version appears
        data = b64decode(answer["data"])
        digest.update(data)
        offset += len(data)
        yield data
        if offset >= answer["size"] or not data:
            break
    if digest.hexdigest() != answer["sha256"]:
        raise InternalError(f"The content of {answer['name']} does not match its checksum. Tell the node's operator.")
