"""Tests of the page on the hub's port: the files that GET returns, and the browsers that may open a session.
docs/web.md.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import re
import ssl
from pathlib import Path

import pytest
from websockets.exceptions import InvalidStatus

from roundelay.app import serve
from roundelay.network.config import NodeConfig
from roundelay.network.tls import server_context
from roundelay.web.site import FOLDER, PageSite
from tests.contract.test_bounds import HANDSHAKE
from tests.support.certificates import make_certificate
from tests.support.node import Node, running_node
from tests.support.wire import HttpAnswer, WireSession, ask_http, hello_frame, make_token

TIMEOUT_S = 20.0


async def say(url: str, request: bytes, tls: ssl.SSLContext | None = None) -> tuple[int, bytes]:
    """Send a raw request. Return the status and the bytes after the head."""
    host, _, port = url.partition("://")[2].rstrip("/").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=tls, server_hostname=host if tls else None)
    try:
        writer.write(request)
        async with asyncio.timeout(TIMEOUT_S):
            answer = await reader.read()
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 0, body


def read_policy(answer: HttpAnswer) -> dict[str, list[str]]:
    written = dict(answer.headers)["Content-Security-Policy"]
    return {name: sources for name, *sources in (part.split() for part in written.split(";"))}


def find_import_map(page: str) -> str:
    [found] = re.findall(r'<script type="importmap">(.*?)</script>', page, re.DOTALL)
    return str(found)


async def test_the_page_names_files_that_are_there_and_stay_what_they_are(node: Node) -> None:
    page = await ask_http(node.url, "GET", "/?any=query")
    assert (page.status, dict(page.headers)["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert dict(page.headers)["Cache-Control"] == "no-cache"
    imports = json.loads(find_import_map(page.body))["imports"]
    named = {*imports.values(), *re.findall(r'(?:href|src)="(/[^"]*)"', page.body)}
    assert len(named) > 10
    for path in named:
        file = await ask_http(node.url, "GET", path)
        assert file.status == 200, path
        headers = dict(file.headers)
        assert headers["Cache-Control"] == "public, max-age=31536000, immutable"
        assert headers["Content-Type"] in ("text/javascript; charset=utf-8", "text/css; charset=utf-8")
        assert headers["X-Content-Type-Options"] == "nosniff"
        stem, digits, suffix = path.removeprefix("/web/").rsplit(".", 2)
        body = (FOLDER / f"{stem}.{suffix}").read_bytes()
        assert hashlib.sha256(body).hexdigest().startswith(digits)
        assert file.body.encode() == body
    modules = {f"#{it.relative_to(FOLDER).as_posix()}" for it in FOLDER.rglob("*.js")}
    assert modules <= imports.keys()


async def test_the_page_may_run_its_own_files_alone_and_stand_in_no_frame(node: Node) -> None:
    page = await ask_http(node.url, "GET", "/")
    digest = base64.b64encode(hashlib.sha256(find_import_map(page.body).encode()).digest()).decode()
    policy = read_policy(page)
    assert policy["script-src"] == ["'self'", f"'sha256-{digest}'"]
    assert (policy["default-src"], policy["connect-src"], policy["style-src"]) == (["'self'"],) * 3
    for name in ("object-src", "base-uri", "form-action", "frame-ancestors"):
        assert policy[name] == ["'none'"]
    assert "unsafe" not in str(policy)
    assert len(re.findall(r"<script(?! type=\"(?:importmap|module)\")", page.body)) == 0
    headers = dict(page.headers)
    assert len(headers) == len(page.headers), "no header twice"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cross-Origin-Opener-Policy"] == "same-origin"
    assert "camera=()" in headers["Permissions-Policy"]


async def test_what_a_browser_unpacks_is_the_file(node: Node) -> None:
    page = await ask_http(node.url, "GET", "/")
    host = node.url.removeprefix("ws://").rstrip("/")
    for path in ("/", *json.loads(find_import_map(page.body))["imports"].values()):
        plain = await ask_http(node.url, "GET", path, headers={"Accept-Encoding": "br, gzip;q=0"})
        assert "Content-Encoding" not in dict(plain.headers)
        request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nAccept-Encoding: br, gzip\r\n\r\n"
        _, packed = await say(node.url, request.encode())
        body = plain.body.encode()
        assert packed == body or (gzip.decompress(packed) == body and dict(plain.headers)["Vary"] == "Accept-Encoding")


async def test_head_gives_the_headers_of_the_page_alone(node: Node) -> None:
    got, head = await ask_http(node.url, "GET", "/"), await ask_http(node.url, "HEAD", "/")
    assert (head.status, head.body) == (200, "")
    assert {name for name, _ in head.headers} == {name for name, _ in got.headers}


@pytest.mark.parametrize(
    "path",
    [
        "/index.html", "/web", "/web/", "/web/index.html", "/web/package.json", "/web/ui/main.js", "/web/site.py", "/web/../site.py",
        "/web/..%2fsite.py", "/web/%2e%2e/site.py", "/web//etc/passwd", "//", "//evil.example/", "/%2e%2e/", "/web/vendor/vendored.json",
        "/web/ui\\main.js", "/web/\x7f", "/WEB/", "/favicon.ico", "http://127.0.0.1/", "/web/" + "a" * 4000,
    ],
)  # fmt: skip
async def test_nothing_else_is_there(node: Node, path: str) -> None:
    answer = await ask_http(node.url, "GET", path)
    assert answer.status == 404
    assert "root:" not in answer.body
    assert dict(answer.headers)["Content-Type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 421),
        (b"GET / HTTP/1.0\r\n\r\n", 421),
        (b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1.\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nRange: bytes=0-10\r\nIf-None-Match: *\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n\r\n", 403),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nCookie: " + b"a" * 20_000 + b"\r\n\r\n", 431),
        (b"GET /web/ui/main.js HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
        (b"GET / HTTP/2\r\nHost: localhost\r\n\r\n", 0),
    ],
    ids=repr,
)
async def test_a_page_is_given_by_its_node_s_own_name(node: Node, request_bytes: bytes, status: int) -> None:
    assert (await say(node.url, request_bytes))[0] == status


@pytest.mark.parametrize(
    "origin", ["null", "http://evil.example", "http://127.0.0.1:1", "https://{host}", "http://localhost"]
)
async def test_a_page_of_another_place_opens_no_session(node: Node, origin: str) -> None:
    host = node.url.removeprefix("ws://").rstrip("/")
    with pytest.raises(InvalidStatus) as refusal:
        await node.connect(origin=origin.format(host=host))
    assert refusal.value.response.status_code == 403
    assert "page" in (refusal.value.response.body or b"").decode()


async def test_a_page_whose_name_is_pointed_here_opens_no_session(node: Node) -> None:
    """In DNS rebinding, the attacker's name resolves to the node's address, so that Origin and Host agree."""
    port = node.url.rstrip("/").rpartition(":")[2]
    request = HANDSHAKE.replace(
        b"Host: ", f"Origin: http://evil.example:{port}\r\nHost: evil.example:{port}\r\nX-Was: ".encode()
    )
    assert request != HANDSHAKE
    assert (await say(node.url, request))[0] == 403


async def test_the_page_is_reached_by_the_names_in_web_hosts_behind_a_proxy() -> None:
    async with running_node(behind_proxy=True, web_hosts=["hub.example.org"]) as node:
        page = await ask_http(node.url, "GET", "/", headers={"Host": "hub.example.org", "X-Forwarded-For": "192.0.2.1"})
        assert page.status == 200
        request = HANDSHAKE.replace(b"Host: ", b"Origin: https://hub.example.org\r\nHost: hub.example.org\r\nX-Was: ")
        _, port = node.url.rstrip("/").rsplit(":", 1)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        writer.write(request)
        async with asyncio.timeout(TIMEOUT_S):
            assert (await reader.readline()).split()[1] == b"101"
        writer.close()


async def test_a_node_without_the_page_has_sessions_alone() -> None:
    async with running_node(web=False) as node:
        assert (await ask_http(node.url, "GET", "/")).status == 426
        assert (await ask_http(node.url, "GET", "/web/ui/main.js")).status == 404
        await node.agent("alice")
        with pytest.raises(InvalidStatus):
            await node.connect(origin="http://evil.example")


async def test_the_page_comes_whole_over_tls(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    config = NodeConfig(port=0, db=tmp_path / "node.db", durability="memory")
    context = ssl.create_default_context(cafile=str(certificate))
    async with serve(config, tls=server_context(certificate, key)) as served:
        status, page = await say(served.url, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", context)
        assert status == 200
        for path in json.loads(find_import_map(page.decode()))["imports"].values():
            request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
            _, body = await say(served.url, request, context)
            digits = path.rsplit(".", 2)[1]
            assert hashlib.sha256(body).hexdigest().startswith(digits)


def test_a_page_under_work_is_read_anew_when_it_is_opened(tmp_path: Path) -> None:
    (tmp_path / "ui").mkdir()
    (tmp_path / "index.html").write_text("<html><!-- files --></html>")
    main = tmp_path / "ui" / "main.js"
    main.write_text("one")
    fixed, fresh = PageSite(tmp_path), PageSite(tmp_path, is_reloaded=True)
    main.write_text("two")

    def find_entry(site: PageSite) -> bytes:
        page = site.find("/", takes_gzip=False)
        assert page is not None
        [path] = re.findall(r'src="([^"]+)"', page.body.decode())
        file = site.find(path, takes_gzip=False)
        assert file is not None
        return file.body

    assert (find_entry(fixed), find_entry(fresh)) == (b"one", b"two")


async def test_what_leads_out_of_the_page_s_folder_is_not_served(tmp_path: Path) -> None:
    secret = tmp_path / "secret.js"
    secret.write_text("secret")
    folder = tmp_path / "page"
    (folder / "ui").mkdir(parents=True)
    (folder / "index.html").write_text("<!-- files -->")
    (folder / "ui" / "main.js").write_text("")
    (folder / "ui" / "notes.txt").write_text("for those who build it")
    site = PageSite(folder)
    for path in ("/web/../secret.js", "/web/ui/notes.txt", "/web/ui/main.js"):
        assert site.find(path, takes_gzip=True) is None


async def test_a_page_s_session_is_a_session(node: Node) -> None:
    mia = await WireSession.open(node.url, origin=node.origin)
    await mia.send_frame(hello_frame("mia", kind="human", token=make_token()))
    assert (await mia.next_frame())["code"] == "not_authenticated"
    again = await node.connect(origin=node.origin)
    await again.hello("mia", kind="human", token=node.owner_token)
