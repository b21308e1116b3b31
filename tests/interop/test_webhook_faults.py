"""Tests of webhooks with malicious and broken participants: concurrent requests, names that do not resolve, receivers
that never finish, and certificates.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from roundelay.interop import json_store
from roundelay.interop.gateway import serve_gateway
from roundelay.interop.webhooks import delivery, posts
from tests.interop.test_http_api import Caller, join
from tests.interop.test_webhooks import QUICK, gateway_to, receiver, register, wait_for_state, wait_for_status
from tests.support.certificates import make_certificate
from tests.support.node import running_node
from tests.support.webhook_receiver import SECRET, Receiver

__all__ = ["receiver"]  # a fixture


async def test_whatever_is_asked_at_once_one_address_is_posted_to(tmp_path: Path, receiver: Receiver) -> None:
    old = Receiver()
    async with old.listening(), running_node() as node, gateway_to(node, tmp_path / "hooks") as http:
        hook, mia = await join(node, http, "hook"), await node.person("mia")
        await register(hook, old.url)
        asked = [hook.post("/v1/webhook/resume", {}) for _ in range(4)]
        asked += [hook.post("/v1/webhook", {"url": old.url, "secret": SECRET}, 201) for _ in range(4)]
        await asyncio.gather(*asked)
        await register(hook, receiver.url)
        seqs = [(await mia.send("agent:hook", number))["seq"] for number in range(3)]
        await wait_for_state(mia, seqs[-1], "handled")
        assert (old.contents(), receiver.contents()) == ([], [0, 1, 2])
        asked = [hook.ask("DELETE", "/v1/webhook", 200)]
        asked += [http.request("DELETE", "/v1/webhook", headers=hook.headers) for _ in range(3)]
        asked += [http.post("/v1/webhook/resume", json={}, headers=hook.headers) for _ in range(3)]
        _, *others = await asyncio.gather(*asked)
        assert {it.status_code for it in others} <= {200, 404}
        await hook.get("/v1/webhook", 404)
        assert not [it for it in asyncio.all_tasks() if it.get_name() == "webhook-hook"]


async def test_there_are_no_more_webhooks_than_there_may_be_however_they_are_asked_for(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "MAX_WEBHOOKS", 2)
    async with running_node() as node, gateway_to(node, tmp_path / "hooks") as http:
        callers = [await join(node, http, f"hook-{number}") for number in range(5)]
        body = {"url": receiver.url, "secret": SECRET}
        asked = [http.post("/v1/webhook", json=body, headers=it.headers) for it in callers]
        assert sorted([it.status_code for it in await asyncio.gather(*asked)]) == [201, 201, 413, 413, 413]


async def test_a_name_server_that_does_not_answer_holds_up_nobody_else(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, answered, asked = socket.getaddrinfo, threading.Event(), set[str]()

    def look_up(host: str, *rest: Any, **options: Any) -> Any:
        if not str(host).endswith(".example"):
            return real(host, *rest, **options)
        if host in asked:  # the name server was fast during the registration
            answered.wait(60)
        asked.add(host)
        return real("127.0.0.1", *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))  # as on a small machine
    names = [f"silent-{number}.example" for number in range(4)]
    async with (
        running_node() as node,
        serve_gateway(
            node.url, webhooks_file=tmp_path / "hooks", webhook_hosts=["127.0.0.1", *names], pace=QUICK
        ) as url,
        httpx2.AsyncClient(base_url=url, timeout=40) as http,
    ):
        mia, quick = await node.person("mia"), await join(node, http, "quick")
        try:
            for name in names:
                await register(await join(node, http, name.partition(".")[0]), f"http://{name}:{receiver.port}/hook")
                await mia.send(f"agent:{name.partition('.')[0]}", "x")
            async with asyncio.timeout(5):
                await register(quick, receiver.url)
                await wait_for_state(mia, (await mia.send("agent:quick", "y"))["seq"], "handled")
            assert receiver.contents() == ["y"]
        finally:
            answered.set()


async def test_what_cannot_be_kept_is_not_registered(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_node() as node, gateway_to(node, tmp_path / "hooks") as http:
        hook = await join(node, http, "hook")
        with monkeypatch.context() as full:

            def fail(_: Path) -> Any:
                raise OSError(errno.ENOSPC, "No space left on device")

            full.setattr(json_store, "replace_file", fail)
            told = (await hook.post("/v1/webhook", {"url": receiver.url}, 500))["error"]["message"]
            assert "no space is left on its disk" in told
            await hook.get("/v1/webhook", 404)
        await register(hook, receiver.url)


async def test_a_webhook_of_who_is_removed_is_paused_and_not_the_next_ones(tmp_path: Path, receiver: Receiver) -> None:
    async with running_node() as node, gateway_to(node, tmp_path / "hooks") as http:
        hook, mia = await join(node, http, "hook"), await node.person("mia")
        await register(hook, receiver.url)
        await mia.call("network.remove", {"agent_id": "hook"})
        operator = Caller(http, "mia", node.owner_token)
        async with asyncio.timeout(30):
            while (status := await operator.get("/v1/webhook", participant="hook"))["state"] != "paused":
                pass
        assert status["why"]
        await operator.post("/v1/webhook/resume", {"participant": "hook"})
        async with asyncio.timeout(30):
            while (await operator.get("/v1/webhook", participant="hook"))["state"] != "paused":
                pass
        await hook.get("/v1/webhook", 403)
        await operator.ask("DELETE", "/v1/webhook", 200, params={"participant": "hook"})
        assert receiver.got == []


HEAD = b"HTTP/1.1 %s X\r\n"
ENDLESS: dict[str, tuple[bytes, bytes, str, str]] = {
    "a body that does not come": (HEAD % b"200" + b"content-length: 9\r\n\r\n", b"", "taken", "it answered 200"),
    "a body without an end": (HEAD % b"200" + b"\r\n", b"0" * 65_536, "taken", "it answered 200"),
    "a body that is broken": (HEAD % b"202" + b"transfer-encoding: chunked\r\n\r\nzz\r\n", b"", "taken", "it answered 202"),
    "a refusal that goes on": (HEAD % b"500" + b"\r\n", b"0" * 65_536, "refused", "it answered 500"),
    "an answer before the answer": (b"", HEAD % b"100" + b"\r\n", "away", "no answer"),
    "a head without an end": (HEAD % b"200", b"x: y\r\n" * 1000, "away", "no answer"),
    "no HTTP": (b"ok\r\n\r\n", b"", "away", "no answer"),
    "a move to itself": (HEAD % b"301" + b"location: /hook\r\ncontent-length: 0\r\n\r\n", b"", "away", "it answered 301"),
    "a wait without an end": (HEAD % b"429" + b"retry-after: 999999999\r\ncontent-length: 0\r\n\r\n", b"", "away", "it answered 429"),
}  # fmt: skip


async def test_a_receiver_without_an_end_is_judged_by_its_head_and_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posts, "TIMEOUT_S", 0.6)
    monkeypatch.setattr(posts, "BODY_TIMEOUT_S", 0.2)
    first, more, sent = b"", b"", 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        with suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(first)
            while more:
                writer.write(more)
                await writer.drain()
                sent += len(more)
            await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with running_node() as node, gateway_to(node, tmp_path / "hooks") as http:
        hook = await join(node, http, "hook")
        await register(hook, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook")
        for name, (*written, means, told) in ENDLESS.items():
            first, more, sent = *written, 0
            tried = await hook.post("/v1/webhook/test", {})
            assert (tried["answer"], told in tried["told"]) == (means, True), (name, tried)
            assert sent < 64 << 20, name
    server.close()
    print(f"{len(ENDLESS)} receivers")


@asynccontextmanager
async def encrypted(folder: Path, name: str) -> AsyncIterator[tuple[Receiver, Path]]:
    """Run a receiver with a self-signed certificate for a name. Yield it and the certificate."""
    certificate, key = make_certificate(folder, name=name, stem=name.replace(":", "-"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    made = Receiver()
    async with made.listening(tls=context):
        yield made, certificate


async def test_over_tls_the_certificate_has_to_be_trusted_and_the_names_own(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posts, "CONNECT_TIMEOUT_S", 2.0)  # for a receiver that never speaks TLS
    async with (
        encrypted(tmp_path, "DNS:localhost") as (own, own_certificate),
        encrypted(tmp_path, "DNS:other.example") as (other, other_certificate),
        running_node() as node,
        serve_gateway(node.url, webhooks_file=tmp_path / "h", webhook_hosts=["localhost"], pace=QUICK) as url,
        httpx2.AsyncClient(base_url=url, timeout=40) as http,
    ):
        hook, mia = await join(node, http, "hook"), await node.person("mia")

        async def tried(port: int) -> str:
            await register(hook, f"https://localhost:{port}/hook")
            return str((await hook.post("/v1/webhook/test", {}))["told"])

        assert "certificate is not trusted" in await tried(own.port)
        both = tmp_path / "both.pem"
        both.write_bytes(own_certificate.read_bytes() + other_certificate.read_bytes())
        monkeypatch.setenv("SSL_CERT_FILE", str(both))
        # This store is as in a gateway that was started with this setting.
        monkeypatch.setattr(posts, "_trust", posts._TrustStore())
        assert "certificate is not trusted" in (refused := await tried(other.port))
        assert "other.example" not in refused  # the error contains no text of the receiver
        assert "no answer" in await tried(receiver.port)  # this receiver does not speak TLS
        assert (own.got, other.got, receiver.got) == ([], [], [])
        assert await tried(own.port) == "it answered 204"
        await wait_for_state(mia, (await mia.send("agent:hook", "by TLS"))["seq"], "handled")
        assert own.contents() == ["by TLS"]
        assert own.heads[-1]["host"] == f"localhost:{own.port}"
        assert (await wait_for_status(hook, why=""))["state"] == "on"
