"""Tests of the proxy configurations in docs/operations.md, "Behind a proxy". The real programs run them in front of a
real node.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import socket as sockets
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from roundelay.web.site import PageSite
from tests.support.certificates import make_certificate
from tests.support.node import Node, running_node
from tests.support.pages import read_pages
from tests.support.wire import WireSession, expect_error, hello_frame, make_token

NAME = "hub.example.org"
TIMEOUT_S = 30.0
NGINX = """\
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log stderr;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
{block}
}}
"""


@dataclass
class Front:
    """A running proxy: its port and its certificate."""

    port: int
    certificate: Path

    async def open(self, *, address: str = "127.0.0.1", headers: Mapping[str, str] | None = None) -> WireSession:
        """Open a WebSocket through the proxy, from a given loopback address."""
        context = ssl.create_default_context(cafile=str(self.certificate))
        sock = sockets.create_connection(("127.0.0.1", self.port), source_address=(address, 0))
        return WireSession(
            await connect(
                f"wss://{NAME}/", sock=sock, ssl=context, subprotocols=[Subprotocol("roundelay.v1")], compression=None, proxy=None,
                additional_headers=dict(headers or {}), ping_interval=None, close_timeout=1, max_size=None,
            )
        )  # fmt: skip

    async def get(self, path: str) -> bytes:
        """Return the status line of a plain request."""
        context = ssl.create_default_context(cafile=str(self.certificate))
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=context, server_hostname=NAME)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {NAME}\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        return answer.partition(b"\r\n")[0]


def documented(language: str, changes: Mapping[str, str]) -> str:
    """Return the only code block of the page in this language, with some texts replaced."""
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", read_pages("operations"), re.DOTALL | re.MULTILINE)
    for old, new in changes.items():
        assert block.count(old) == 1, old
        block = block.replace(old, new)
    return str(block)


def free_port() -> int:
    with sockets.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def started(command: list[str], port: int, folder: Path) -> AsyncIterator[None]:
    """Run a program. On entry, the program accepts connections."""
    environment = {
        "HOME": str(folder),
        "XDG_DATA_HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder),
        "PATH": "/usr/bin:/usr/sbin",
    }
    output = folder / "output"
    with output.open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, env=environment)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    break
                except OSError:
                    assert process.returncode is None, output.read_text()
                    await asyncio.sleep(0.01)  # the program does not report when it listens
        writer.close()
        yield
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def nginx(node: Node, folder: Path, changes: Mapping[str, str] | None = None) -> AsyncIterator[Front]:
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    if program is None:
        pytest.skip("no nginx here")
    certificate, key = make_certificate(folder, name=f"DNS:{NAME}")
    port = free_port()
    block = documented("nginx", {
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl", "/etc/ssl/hub/cert.pem": str(certificate), "/etc/ssl/hub/key.pem": str(key),
        "127.0.0.1:8700": node.url.removeprefix("ws://").rstrip("/"), **(changes or {}),
    })  # fmt: skip
    file = folder / "nginx.conf"
    file.write_text(NGINX.format(folder=folder, block=block))
    async with started([program, "-e", "stderr", "-p", str(folder), "-c", str(file)], port, folder):
        yield Front(port, certificate)


@asynccontextmanager
async def caddy(node: Node, folder: Path) -> AsyncIterator[Front]:
    program = shutil.which("caddy")
    if program is None:
        pytest.skip("no caddy here")
    certificate, key = make_certificate(folder, name=f"DNS:{NAME}")
    port = free_port()
    own = f"{NAME}:{port} {{\n\tbind 127.0.0.1\n\ttls {certificate} {key}"
    block = documented("caddyfile", {f"{NAME} {{": own, "127.0.0.1:8700": node.url.removeprefix("ws://").rstrip("/")})
    file = folder / "Caddyfile"
    file.write_text(f"{{\n\tadmin off\n\tauto_https disable_redirects\n}}\n{block}")
    async with started([program, "run", "--config", str(file), "--adapter", "caddyfile"], port, folder):
        yield Front(port, certificate)


PROXIES = {"nginx": nginx, "caddy": caddy}


@pytest.mark.parametrize("proxy", PROXIES)
async def test_a_client_joins_through_the_documented_proxy_and_a_first_use_does_not(proxy: str, tmp_path: Path) -> None:
    async with running_node(behind_proxy=True) as node, PROXIES[proxy](node, tmp_path) as front:
        mia, other = await front.open(), await front.open()
        for session in (mia, other):
            await session.hello("mia", kind="human", token=node.owner_token)
        large = "x" * 200_000
        await mia.send("agent:mia", large)
        assert (await other.message(large))["content"] == large
        newcomer = await front.open()
        await newcomer.send_frame(hello_frame("ann", token=make_token()))
        expect_error(await newcomer.next_frame(), "not_authenticated")
        assert await newcomer.closed() == 4401
        for path in ("/metrics", "/healthz", "/readyz", "/other"):
            assert b" 404 " in await front.get(path) + b" "
        for session in (mia, other):
            await session.close()


@pytest.mark.parametrize("proxy", PROXIES)
async def test_the_page_is_shown_through_the_documented_proxy_by_the_name_in_web_hosts(
    proxy: str, tmp_path: Path
) -> None:
    async with running_node(behind_proxy=True, web_hosts=[NAME]) as node, PROXIES[proxy](node, tmp_path) as front:
        assert b" 200 " in await front.get("/")
        index = PageSite().find("/", takes_gzip=False)
        assert index is not None
        [entry] = re.findall(r'type="module" src="([^"]+)"', index.body.decode())
        assert b" 200 " in await front.get(entry)
        page = await front.open(headers={"Origin": f"https://{NAME}"})
        await page.hello("mia", kind="human", token=node.owner_token)
        await page.close()
        with pytest.raises(InvalidStatus):
            await front.open(headers={"Origin": "https://evil.example.org"})


@pytest.mark.parametrize("proxy", PROXIES)
async def test_the_documented_proxy_is_noticed_where_nobody_told_the_node_of_it(proxy: str, tmp_path: Path) -> None:
    async with running_node() as node, PROXIES[proxy](node, tmp_path) as front:
        newcomer = await front.open()
        await newcomer.send_frame(hello_frame("ann", token=make_token()))
        expect_error(await newcomer.next_frame(), "not_authenticated")


@pytest.mark.parametrize("proxy", PROXIES)
async def test_visitors_of_the_documented_proxy_count_for_their_own_addresses(proxy: str, tmp_path: Path) -> None:
    """Connections of one address replace only each other, even if their headers claim other addresses."""
    places = 4
    limits = {"max_unauthenticated": places, "hello_timeout_ms": 60_000}
    async with running_node(behind_proxy=True, limits=limits) as node, PROXIES[proxy](node, tmp_path) as front:
        quiet = await front.open(address="127.0.0.2", headers={"X-Forwarded-For": "127.0.0.3"})
        loud = [
            await front.open(address="127.0.0.3", headers={"X-Forwarded-For": f"10.0.0.{number}"})
            for number in range(2 * places)
        ]
        assert await loud[0].closed() == 4408
        await quiet.hello("mia", kind="human", token=node.owner_token)
        for session in (quiet, *loud):
            await session.close()


async def test_a_quiet_connection_outlives_the_timeouts_of_the_documented_nginx(tmp_path: Path) -> None:
    """The hub's pings keep the connection alive. nginx closes a connection to a hub that does not ping."""
    short = {"proxy_read_timeout 75s": "proxy_read_timeout 1s", "proxy_send_timeout 75s": "proxy_send_timeout 1s"}
    (tmp_path / "mute").mkdir()
    async with (
        running_node(behind_proxy=True, limits={"ping_interval_ms": 200}) as node,
        running_node(behind_proxy=True, limits={"ping_interval_ms": 600_000}) as silent,
        nginx(node, tmp_path, short) as front,
        nginx(silent, tmp_path / "mute", short) as mute,
    ):
        held, cut = await front.open(), await mute.open()
        await held.hello("mia", kind="human", token=node.owner_token)
        await cut.hello("mia", kind="human", token=silent.owner_token)
        await cut.closed()
        await held.send("agent:mia", "still here")
        await held.close()


async def test_the_documented_nginx_bounds_the_connections_of_each_address(tmp_path: Path) -> None:
    most = 3
    async with (
        running_node(behind_proxy=True) as node,
        nginx(node, tmp_path, {"limit_conn roundelay 100": f"limit_conn roundelay {most}"}) as front,
    ):
        sessions = [await front.open(address="127.0.0.3") for _ in range(most)]
        with pytest.raises(InvalidStatus):
            await front.open(address="127.0.0.3")
        sessions.append(await front.open(address="127.0.0.2"))
        for session in sessions:
            await session.close()
