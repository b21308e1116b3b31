"""Tests of files over the gateway's HTTP: bodies, ranges, and the rights of the caller."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx2
import pytest

from roundelay.network.client.files import CHUNK_BYTES
from tests.interop.test_http_api import Caller, gateway_to, join
from tests.support.node import Node, running_node

DATA = os.urandom(CHUNK_BYTES * 2 + 5)


class Scene(NamedTuple):
    node: Node
    http: httpx2.AsyncClient
    form: Caller
    eve: Caller

    async def put(self, data: bytes, status: int = 201, **options: Any) -> dict[str, Any]:
        file: dict[str, Any] = await self.form.ask("POST", "/v1/files", status, content=data, **options)
        return file

    async def fetch(self, file: str, caller: Caller, **headers: str) -> httpx2.Response:
        return await self.http.get(f"/v1/files/{file}", headers={**caller.headers, **headers})


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with running_node(mods=["channels", "files"]) as node, gateway_to(node) as http:
        yield Scene(node, http, await join(node, http, "form"), await join(node, http, "eve"))


async def test_body_is_uploaded_and_downloaded_unchanged(scene: Scene) -> None:
    file = await scene.put(DATA, params={"name": "a.png"})
    answer = await scene.fetch(file["file"], scene.form)
    assert (answer.status_code, answer.content) == (200, DATA)
    assert answer.headers["content-type"] == "image/png"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-disposition"].startswith("attachment")
    assert (await scene.fetch(file["file"], scene.form, **{"If-None-Match": answer.headers["etag"]})).status_code == 304
    assert [it["file"] for it in (await scene.form.get("/v1/files"))["files"]] == [file["file"]]
    empty = await scene.put(b"", params={"name": "empty"})
    assert (await scene.fetch(empty["file"], scene.form)).content == b""


@pytest.mark.parametrize(
    ("path", "allowed"), [("/v1/files", "GET, POST"), ("/v1/files/f1", "DELETE, GET"), ("/v1/messages", "GET, POST")]
)
async def test_unknown_method_is_refused_with_all_methods_of_the_path(scene: Scene, path: str, allowed: str) -> None:
    answer = await scene.http.request("PATCH", path, headers=scene.form.headers)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize(
    ("header", "status", "part"),
    [
        ("bytes=0-0", 206, slice(0, 1)),
        (f"bytes=5-{CHUNK_BYTES + 5}", 206, slice(5, CHUNK_BYTES + 6)),
        ("bytes=5-", 206, slice(5, None)),
        ("bytes=-5", 206, slice(-5, None)),
        (f"bytes=-{10**9}", 206, slice(0, None)),
        (f"bytes=0-{10**14}", 206, slice(0, None)),
        (f"bytes={len(DATA)}-", 416, slice(0, 0)),
        ("bytes=-0", 416, slice(0, 0)),
        ("bytes=5-2", 200, slice(0, None)),
        ("bytes=0-1,3-4", 200, slice(0, None)),
        ("bytes=-", 200, slice(0, None)),
        ("bytes=" + "9" * 400 + "-", 200, slice(0, None)),
        ("lines=0-1", 200, slice(0, None)),
    ],
)
async def test_range_returns_that_part(scene: Scene, header: str, status: int, part: slice) -> None:
    file = await scene.put(DATA, params={"name": "a"})
    answer = await scene.fetch(file["file"], scene.form, Range=header)
    assert answer.status_code == status
    if status == 416:
        assert answer.headers["content-range"] == f"bytes */{len(DATA)}"
    else:
        assert answer.content == DATA[part]
    stale = await scene.fetch(file["file"], scene.form, Range=header, **{"If-Range": '"old"'})
    assert (stale.status_code, stale.content) == (200, DATA)


async def test_outsider_gets_the_same_404_as_for_a_missing_file(scene: Scene) -> None:
    file = (await scene.put(b"secret", params={"name": "a"}))["file"]
    for name in (file, "f-00000000000-00000000", "..%2f..%2fetc%2fpasswd", "x"):
        answer = await scene.fetch(name, scene.eve)
        assert answer.status_code == 404
        assert "secret" not in answer.text
    assert (await scene.http.get(f"/v1/files/{file}")).status_code == 401
    assert (await scene.http.delete(f"/v1/files/{file}", headers=scene.eve.headers)).status_code == 404
    await scene.form.post("/v1/messages", {"to": "agent:eve", "content": {"files": [{"file": file}]}}, 201)
    assert (await scene.fetch(file, scene.eve)).content == b"secret"
    assert (await scene.http.delete(f"/v1/files/{file}", headers=scene.form.headers)).status_code == 200
    assert (await scene.fetch(file, scene.eve)).status_code == 404


async def test_repeated_upload_with_a_key_stores_one_file(scene: Scene) -> None:
    options: dict[str, Any] = {"params": {"name": "a"}, "headers": {"Idempotency-Key": "k"}}
    first = await scene.put(DATA, **options)
    assert (await scene.put(DATA, **options))["file"] == first["file"]
    changed = await scene.put(first["file"].encode(), params={"name": "a", "file": first["file"]})
    assert (changed["file"], changed["version"]) == (first["file"], 2)


async def test_wrong_queries_of_files_are_refused(scene: Scene) -> None:
    for params in ({}, {"name": ""}, {"name": "a", "color": "red"}, {"name": "a", "file": "../x"}):
        await scene.put(b"x", 400, params=params)
    answer = await scene.http.post("/v1/files?name=a&name=b", content=b"x", headers=scene.form.headers)
    assert answer.status_code == 400


async def test_program_calls_operations_of_mods(scene: Scene) -> None:
    mods = (await scene.form.get("/v1/operations"))["mods"]
    assert [mod["id"] for mod in mods] == ["channels", "files"]
    saving = {"operation": "files.save", "arguments": {"name": "a", "content": "a"}, "call_id": "c-1"}
    saved = await scene.form.post("/v1/call", saving)
    assert await scene.form.post("/v1/call", saving) == saved
    wrong = await scene.form.post("/v1/call", {"operation": "network.log"}, 501)
    assert "GET /v1/operations" in wrong["error"]["message"]
    await scene.form.post("/v1/call", {"operation": "files.read", "arguments": {"path": "x"}}, 400)
