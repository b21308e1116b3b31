"""Tests of requests to models as the server sees them: connections, headers, and resources that remain open."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import ssl
import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from roundelay.agents.models.model import ModelError, ModelRequest, SystemMessage, UserMessage
from roundelay.agents.models.model_http import MAX_HEADER_BYTES
from roundelay.agents.models.openai_model import OpenAIModel
from tests.support.certificates import make_certificate

ASK = ModelRequest([SystemMessage("You are a."), UserMessage("Hello?")])
REPLY = json.dumps({"choices": [{"message": {"content": "ok"}, "finish_reason": "stop"}]}).encode()


@dataclass
class RawServer:
    """Server that answers each request with `REPLY`. ``headers`` holds the headers of each request in lower case, and
    the size of its body.
    """

    headers: list[dict[str, str]] = field(default_factory=list)
    connections: int = 0
    ended: int = 0
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    closes: bool = False
    """Whether the server closes a connection after its first reply without announcing it in a header."""

    extra_header: str = ""
    base_url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while (await reader.readline()).strip():
            headers = {}
            while line := (await reader.readline()).decode().strip():
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            await reader.readexactly(int(headers["content-length"]))
            self.headers.append(headers)
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(REPLY)}\r\n"
            writer.write(f"{head}{self.extra_header}\r\n".encode() + REPLY)
            if self.closes:
                break
        writer.close()
        await writer.wait_closed()
        self.ended += 1
        self.has_ended.set()

    def model(self, name: str = "m", **options: str) -> OpenAIModel:
        return OpenAIModel(name, base_url=options.pop("base_url", self.base_url), stream=False, **options)  # type: ignore[arg-type]


@asynccontextmanager
async def raw_server() -> AsyncIterator[RawServer]:
    raw = RawServer()
    server = await asyncio.start_server(raw.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    raw.base_url = f"http://{host}:{port}/v1"
    try:
        yield raw
    finally:
        server.close()


class Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(REPLY)))
        self.end_headers()
        self.wfile.write(REPLY)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serve_in_a_thread() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()
        thread.join()


async def test_models_of_a_process_share_connections() -> None:
    async with raw_server() as server, server.model("a") as first, server.model("b") as second:
        for model in (first, second, first.named("c")):
            assert (await model.complete(ASK)).text == "ok"
        assert server.connections == 1


async def test_only_the_last_model_closes_a_shared_connection() -> None:
    async with raw_server() as server, server.model() as second:
        async with server.model() as first:
            await first.complete(ASK)
            await second.complete(ASK)
        await second.complete(ASK)
        assert (server.connections, server.ended) == (1, 0)
        await second.close()
        await server.has_ended.wait()
        await second.complete(ASK)  # a later call opens a new connection
        assert server.connections == 2


async def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    async with raw_server() as server, server.model() as model:
        server.closes = True
        for count in (1, 2, 3):
            server.has_ended.clear()
            assert (await model.complete(ASK)).text == "ok"
            await server.has_ended.wait()
            for _ in range(3):
                await asyncio.sleep(0)  # the client's event loop reads the end of the connection
            assert server.connections == count


def test_a_forgotten_model_leaves_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with serve_in_a_thread() as base_url, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = OpenAIModel("m", base_url=base_url, stream=False)
        with caplog.at_level(logging.WARNING):
            assert asyncio.run(model.complete(ASK)).text == "ok"
        del model
        gc.collect()
    assert [str(it.message) for it in caught if "nclosed" in str(it.message)] == []
    assert [it.getMessage() for it in caplog.records if it.name == "asyncio"] == []


async def test_a_request_has_the_headers_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-1")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "x-team: blue\nuser-agent: mine")
    async with raw_server() as server, server.model(api_key="sk-1") as model:
        await model.complete(ASK)
        [headers] = server.headers
    named = ("authorization", "openai-organization", "openai-project", "x-team", "user-agent", "content-type")
    assert [headers[name] for name in named] == ["Bearer sk-1", "org-1", "proj-1", "blue", "mine", "application/json"]


async def test_credentials_of_the_url_replace_the_key() -> None:
    async with raw_server() as server:
        url = server.base_url.replace("http://", "http://tom:p%40ss@")
        async with server.model(api_key="sk-1", base_url=url) as model:
            await model.complete(ASK)
        [headers] = server.headers
    assert headers["authorization"] == "Basic dG9tOnBAc3M="  # tom:p@ss
    assert "tom" not in headers["host"]


async def test_long_header_of_a_response_is_accepted() -> None:
    async with raw_server() as server, server.model() as model:
        server.extra_header = f"X-Policy: {'x' * (MAX_HEADER_BYTES // 2)}\r\n"
        assert (await model.complete(ASK)).text == "ok"


async def test_header_above_the_limit_fails_with_a_model_error() -> None:
    async with raw_server() as server, server.model() as model:
        server.extra_header = f"X-Policy: {'x' * (2 * MAX_HEADER_BYTES)}\r\n"
        with pytest.raises(ModelError, match="cannot be reached") as caught:
            await model.complete(ASK)
    assert len(str(caught.value)) < 1000


async def test_large_request_is_sent_whole_without_a_warning() -> None:
    text = "é" * 2_000_000
    async with raw_server() as server, server.model() as model:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            await model.complete(ModelRequest([UserMessage(text)]))
        assert int(server.headers[0]["content-length"]) > 4_000_000


async def test_a_body_that_is_no_json_is_refused_before_it_is_sent() -> None:
    async with raw_server() as server:
        model = OpenAIModel("m", base_url=server.base_url, settings={"temperature": float("nan")})
        with pytest.raises(ModelError):
            await model.complete(ASK)
        assert server.connections == 0


@asynccontextmanager
async def forward_proxy() -> AsyncIterator[tuple[str, list[str]]]:
    """Run a proxy that opens tunnels. Yield the proxy's address, and the first lines of the requests with their
    credentials.
    """
    lines: list[str] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = (await reader.readline()).decode().strip()
        headers = [it async for it in _read_headers(reader)]
        lines.extend([line, *(it for it in headers if it.lower().startswith("proxy-authorization"))])
        host, port = line.split()[1].rsplit(":", 1)
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer), return_exceptions=True)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()[:2]
        yield f"tom:p%40ss@{host}:{port}", lines


async def _read_headers(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    while line := (await reader.readline()).decode().strip():
        yield line


async def test_tls_needs_a_trusted_certificate_and_passes_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    raw = RawServer()
    server = await asyncio.start_server(raw.serve, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    url = f"https://127.0.0.1:{port}/v1"
    async with server, forward_proxy() as (proxy, lines):
        async with raw.model(base_url=url) as model:
            with pytest.raises(ModelError, match="not trusted: set SSL_CERT_FILE"):
                await model.complete(ASK)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        async with raw.model(base_url=url) as model:
            assert (await model.complete(ASK)).text == "ok"
        assert lines == []
        monkeypatch.setenv("HTTPS_PROXY", f"http://{proxy}")
        async with raw.model(base_url=url) as model:
            assert (await model.complete(ASK)).text == "ok"
        assert lines == [f"CONNECT 127.0.0.1:{port} HTTP/1.1", "Proxy-Authorization: Basic dG9tOnBAc3M="]


async def test_socks_proxy_without_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
    with pytest.raises(ModelError, match="pip install aiohttp_socks"):
        OpenAIModel("m", base_url="http://127.0.0.1:1/v1")
