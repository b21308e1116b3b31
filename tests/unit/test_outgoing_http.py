"""Tests of invalid proxies, certificates and addresses: one clear error names the variable, and no second request is
sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from roundelay.agents.features.mcp_servers import McpServers, ServerOptions
from roundelay.agents.models.model import ModelError
from roundelay.agents.models.openai_model import OpenAIModel
from roundelay.agents.outgoing_http import find_proxy
from tests.support import fake_openai as fake
from tests.support.fake_openai import FakeOpenAI
from tests.unit.test_models_openai import ASK, model_for

VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, *map(str.lower, VARIABLES), "SSL_CERT_FILE", "SSL_CERT_DIR", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


def refused(url: str = "https://models.example/v1") -> str:
    """Return the error for a model with this address."""
    with pytest.raises(ModelError) as caught:
        OpenAIModel("m", base_url=url, api_key="sk-test")
    assert (caught.value.reason, caught.value.retryable) == ("misconfigured", False)
    return str(caught.value)


@asynccontextmanager
async def proxy_that_answers(
    status: int, kind: str = "text/html", body: str = "<h1>no</h1>"
) -> AsyncIterator[tuple[str, list[str]]]:
    """Run a proxy that forwards nothing. Yield the proxy's address, and the first lines of the requests."""
    asked: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readline()).decode())
        while (await reader.readline()).strip():
            pass
        head = (
            f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write((head + body).encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()[:2]
        yield f"{host}:{port}", asked


@pytest.mark.parametrize("variable", ["ALL_PROXY", "all_proxy", "HTTPS_PROXY", "http_proxy"])
@pytest.mark.parametrize("kind", ["socks", "socks4", "ftp"])
def test_a_proxy_of_an_unknown_kind_is_refused_at_the_start(
    variable: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, f"{kind}://tom:hidden-password@127.0.0.1:1080/")
    told = refused()
    assert f"{variable} names a proxy of the kind {kind}://, which is not supported" in told
    assert "hidden-password" not in told
    assert f"Change or unset {variable}." in told


@pytest.mark.parametrize("url", ["http://", "http://:80", "http://a b:1", "http://proxy:no-port"])
def test_what_is_no_address_of_a_proxy_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", url)
    assert "HTTPS_PROXY is not the address of a proxy" in refused()


def test_white_space_around_a_proxy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://tom:hidden-password@proxy:3128\n")
    told = refused()
    assert "HTTPS_PROXY has white space around" in told
    assert "hidden-password" not in told


@pytest.mark.parametrize("status", [403, 404, 407, 502, 503, 200])
async def test_a_proxy_in_the_way_of_a_model_on_this_machine_is_named_and_not_asked_again(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeOpenAI([fake.text("unreached")]) as server, proxy_that_answers(status) as (proxy, asked):
        monkeypatch.setenv("HTTP_PROXY", f"http://tom:hidden-password@{proxy}")
        async with model_for(server) as model:
            with pytest.raises(ModelError) as caught:
                await model.complete(ASK)
        assert len(asked) == 1
        assert server.received == []
    told = str(caught.value)
    assert f"The request went through the proxy http://{proxy} (HTTP_PROXY)" in told
    assert "Set NO_PROXY=127.0.0.1" in told
    assert "hidden-password" not in told
    assert (caught.value.reason, caught.value.retryable) == ("misconfigured", False)


async def test_a_proxy_that_is_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeOpenAI([]) as gone:
        away = gone.base_url.removesuffix("/v1")
    async with FakeOpenAI([fake.text("unreached")]) as server, model_for(server) as model:
        monkeypatch.setenv("ALL_PROXY", away)
        with pytest.raises(ModelError, match=r"went through the proxy http://127.0.0.1:\d+ \(ALL_PROXY\)") as caught:
            await model.complete(ASK)
    assert not caught.value.retryable


async def test_a_model_elsewhere_says_that_a_proxy_was_used_and_may_be_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with proxy_that_answers(503) as (proxy, _):
        monkeypatch.setenv("HTTP_PROXY", f"http://{proxy}")
        async with OpenAIModel("m", base_url="http://models.example/v1", api_key="sk-test") as model:
            with pytest.raises(ModelError, match="went through the proxy") as caught:
                await model.complete(ASK)
    assert caught.value.retryable


async def test_no_proxy_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "localhost,127.0.0.1")
    async with FakeOpenAI([fake.text("ok")]) as server, model_for(server) as model:
        assert (await model.complete(ASK)).text == "ok"


@pytest.mark.parametrize(
    ("exempt", "url", "is_used"),
    [
        ("", "http://127.0.0.1:1", True),
        ("*", "http://127.0.0.1:1", False),
        ("127.0.0.1", "http://127.0.0.1:1", False),
        ("127.0.0.0/8", "http://127.8.0.1", False),
        ("localhost", "http://127.0.0.1", True),
        ("example.com", "http://a.example.com", False),
        (".example.com", "http://example.com", True),
        ("example.com", "http://badexample.com", True),
        ("::1", "http://[::1]:80/", False),
        ("all://host", "http://host", False),
    ],
)
def test_which_requests_go_through_a_proxy(
    exempt: str, url: str, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result equals the decision of `httpx2`."""
    import httpx2

    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", exempt)
    client = httpx2.AsyncClient()
    direct = client._transport_for_url(httpx2.URL(url)) is client._transport
    assert (find_proxy(url) is not None) is is_used
    assert direct is not is_used


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
async def test_a_missing_certificate_file_is_named_with_its_variable(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = tmp_path / "company.pem"
    monkeypatch.setenv(variable, str(missing))
    async with FakeOpenAI([fake.text("unreached")]) as server, model_for(server) as model:
        with pytest.raises(ModelError) as caught:
            await model.complete(ASK)
        assert server.received == []
    assert f"{variable} names {missing}, which does not exist" in str(caught.value)
    assert (caught.value.reason, caught.value.retryable) == ("misconfigured", False)


async def test_a_certificate_file_that_holds_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "company.pem"
    file.write_text("no certificate")
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    async with FakeOpenAI([]) as server, model_for(server) as model:
        with pytest.raises(ModelError, match=f"SSL_CERT_FILE names {file}, and no certificates can be loaded"):
            await model.complete(ASK)


@pytest.mark.parametrize(
    "url", ["localhost:11434/v1", "models.example/v1", "ftp://models.example", "http://", "http://a b"]
)
def test_what_is_no_address_of_a_server_is_refused_at_the_start(url: str) -> None:
    assert f"Its base_url is '{url}'" in refused(url)


async def test_line_breaks_around_an_address_are_removed() -> None:
    async with FakeOpenAI([fake.text("ok")]) as server, OpenAIModel("m", base_url=f" {server.base_url}\r\n") as model:
        assert (await model.complete(ASK)).text == "ok"


async def test_a_server_that_speaks_no_tls_is_said_so_and_not_asked_again() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with OpenAIModel("m", base_url=f"https://127.0.0.1:{port}/v1") as model:
            with pytest.raises(ModelError, match="does not speak TLS on this port: use http://") as caught:
                await model.complete(ASK)
    assert not caught.value.retryable


async def test_an_mcp_server_is_refused_by_the_same_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks://127.0.0.1:1080")
    servers = McpServers({"far": ServerOptions(url="http://127.0.0.1:9/mcp")})
    session = servers._sessions["far"]
    await session.open()
    await servers.close()
    assert "ALL_PROXY names a proxy of the kind socks://" in str(session.failure)
