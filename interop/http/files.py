"""Uploads and downloads of files over HTTP. Bodies contain the raw content, and downloads support ranges.

The gateway stores no files. The gateway passes chunks between the HTTP connection and the caller's session.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from typing import Annotated, Any
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from roundelay.interop.session_pool import Credentials, SessionPool, read_authorization
from roundelay.network.client.files import CHUNK_BYTES
from roundelay.network.clock import ordered_id
from roundelay.network.errors import InvalidArguments, InvalidFrame, RoundelayError
from roundelay.network.extras import needs
from roundelay.network.file_references import FILE_ID_PATTERN

from .requests import BODY_TIMEOUT_S, make_error_response, read_query

with needs("gateway"):
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

_RANGE = re.compile(r"bytes=(\d{0,15})-(\d{0,15})")
_FileId = Annotated[str, Field(pattern=f"^{FILE_ID_PATTERN}$")]


class NewFile(BaseModel):
    """Query parameters of an upload."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=200, description="Name of the file")
    media_type: str | None = Field(None, description="Default: derived from the suffix of the name")
    file: _FileId | None = Field(None, description="Id of one of your files, which gets a new version")


class FileQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: int | None = Field(None, ge=1, description="Default: the newest version that you may read")


def make_file_routes(pool: SessionPool) -> list[Route]:
    """Return the routes for uploading, downloading and deleting files."""

    async def upload(request: Request) -> Response:
        query = NewFile.model_validate(read_query(request))
        credentials = read_authorization(request.headers.get("authorization"))
        # Derive the upload id from the key. A retry with the same key then continues the same upload instead of storing
        # a second one.
        key = request.headers.get("idempotency-key")
        upload_id = ordered_id().lower() if key is None else hashlib.sha256(key.encode()).hexdigest()[:40]
        return JSONResponse(await _receive(pool, credentials, request, upload_id, query), 201)

    async def download(request: Request) -> Response:
        query = FileQuery.model_validate(read_query(request))
        credentials = read_authorization(request.headers.get("authorization"))
        return await _send(pool, credentials, request, query)

    async def delete(request: Request) -> Response:
        FileQuery.model_validate(read_query(request))
        async with pool.session(read_authorization(request.headers.get("authorization"))) as client:
            return JSONResponse(await client.call("files.delete", {"file": request.path_params["file"]}))

    async def answer(request: Request) -> Response:
        try:
            match request.method:
                case "POST":
                    return await upload(request)
                case "DELETE":
                    return await delete(request)
                case _:
                    return await download(request)
        except ClientDisconnect:
            return Response(status_code=400)  # the client has disconnected and reads no response
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            return make_error_response(InvalidFrame(f"{place}: {first['msg']}; see /openapi.json."))
        except InvalidArguments as error:
            response = make_error_response(error)
            response.status_code = 400 if request.method == "POST" else 404
            return response
        except RoundelayError as error:
            return make_error_response(error)

    routes = [
        Route("/v1/files", answer, methods=["POST"]),
        Route("/v1/files/{file}", answer, methods=["GET", "DELETE"]),
    ]
    for route in routes:
        assert route.methods is not None
        route.methods.discard("HEAD")
    return routes


async def _receive(
    pool: SessionPool, credentials: Credentials, request: Request, upload_id: str, query: NewFile
) -> dict[str, Any]:
    """Upload the body of a request in chunks, and create a file from the chunks."""
    digest, end, buffer = hashlib.sha256(), 0, bytearray()

    async def pass_on(data: bytes) -> None:
        # Use a session only for one chunk. Otherwise a slow sender would occupy a session of the pool.
        async with pool.session(credentials) as client:
            args = {"upload_id": upload_id, "offset": end, "data": b64encode(data).decode()}
            stored = int((await client.call("files.upload", args))["size"])
            if stored < end + len(data):
                raise InvalidFrame("The node has lost the beginning of this upload. Upload the file again.")

    stream = aiter(request.stream())
    is_over = False
    while not is_over:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                part = await anext(stream, None)
        except TimeoutError:
            raise InvalidFrame(f"The next part of the body did not arrive within {BODY_TIMEOUT_S:g} s.") from None
        is_over = part is None
        buffer += part or b""
        while len(buffer) >= CHUNK_BYTES or (is_over and (buffer or end == 0)):
            data = bytes(buffer[:CHUNK_BYTES])
            del buffer[:CHUNK_BYTES]
            await pass_on(data)
            digest.update(data)
            end += len(data)
            if not data:
                break
    args = {"upload_id": upload_id, "sha256": digest.hexdigest(), **query.model_dump(exclude_none=True)}
    async with pool.session(credentials) as client:
        file: dict[str, Any] = await client.call("files.create", args, call_id=f"create:{upload_id}")
    return file


async def _send(pool: SessionPool, credentials: Credentials, request: Request, query: FileQuery) -> Response:
    args: dict[str, Any] = {"file": request.path_params["file"], **query.model_dump(exclude_none=True)}
    async with pool.session(credentials) as client:
        file = await client.call("files.download", {**args, "offset": 0, "length": 0})
    args["version"], size = file["version"], int(file["size"])
    tag = f'"{file["sha256"]}"'
    headers = {
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, no-cache",
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(file['name'])}",
        "Content-Type": file["media_type"],
        # Sandbox the content. Participants choose names and media types, and a browser must not run what they uploaded.
        "Content-Security-Policy": "sandbox; default-src 'none'",
        "ETag": tag,
        "X-Content-Type-Options": "nosniff",
    }
    if request.headers.get("if-none-match") in (tag, "*"):
        return Response(status_code=304, headers=headers)
    wanted = request.headers.get("range") if request.headers.get("if-range", tag) == tag else None
    start, end, status = _read_range(wanted, size)
    if status == 416:
        return Response(status_code=416, headers={"Content-Range": f"bytes */{size}"})
    if status == 206:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    headers["Content-Length"] = str(end - start)

    async def read() -> AsyncIterator[bytes]:
        offset = start
        while offset < end:
            async with pool.session(credentials) as client:
                length = min(CHUNK_BYTES, end - offset)
                part = await client.call("files.download", {**args, "offset": offset, "length": length})
            data = b64decode(part["data"])
            if not data:
                # End the response early. Fewer bytes than announced tell the client that the content is incomplete.
                raise InvalidFrame("The stored file is shorter than its recorded size.")
            offset += len(data)
            yield data

    return StreamingResponse(read(), status, headers)


def _read_range(header: str | None, size: int) -> tuple[int, int, int]:
    """Return the start, the end and the HTTP status for a Range header (RFC 9110, section 14.2). An invalid header, or
    one with several ranges, is ignored, as the RFC allows.
    """
    found = _RANGE.fullmatch((header or "").replace(" ", ""))
    if found is None or not (found[1] or found[2]):
        return 0, size, 200
    if not found[1]:  # a suffix: only the last bytes
        start, end = max(0, size - int(found[2])), size
    else:
        start, end = int(found[1]), min(size, int(found[2]) + 1 if found[2] else size)
        if found[2] and int(found[2]) < start:
            return 0, size, 200
    return (start, end, 206) if start < end else (0, 0, 416)


def describe_paths() -> dict[str, Any]:
    """Return the OpenAPI description of the file routes."""
    binary = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    json_object = {"application/json": {"schema": {"type": "object"}}}
    refusal = {
        "description": "Refused",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Refusal"}}},
    }
    in_path = {
        "name": "file",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "pattern": f"^{FILE_ID_PATTERN}$"},
    }

    def list_query(shape: type[BaseModel]) -> list[dict[str, Any]]:
        schema = shape.model_json_schema()
        required = schema.get("required", [])
        return [
            {"name": name, "in": "query", "required": name in required, "schema": field}
            for name, field in schema["properties"].items()
        ]

    return {
        "/v1/files": {
            "post": {
                "operationId": "upload_file",
                "summary": "Upload a file",
                "parameters": list_query(NewFile),
                "requestBody": {"required": True, "content": binary},
                "responses": {"201": {"description": "Stored", "content": json_object}, "default": refusal},
            }
        },
        "/v1/files/{file}": {
            "get": {
                "operationId": "download_file",
                "summary": "Download a file or a range of it",
                "parameters": [in_path, *list_query(FileQuery)],
                "responses": {
                    "200": {"description": "The content", "content": binary},
                    "206": {"description": "A range of the content", "content": binary},
                    "default": refusal,
                },
            },
            "delete": {
                "operationId": "delete_file",
                "summary": "Delete one of your files",
                "parameters": [in_path],
                "responses": {"200": {"description": "Deleted", "content": json_object}, "default": refusal},
            },
        },
    }
