"""Tests of a gateway behind nginx: every protocol answers under the proxy's name and path prefix."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from a2a.client import A2ACardResolver
from click.testing import CliRunner
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from roundelay.cli import cli
from roundelay.interop.gateway import serve_gateway
from roundelay.network.config import Interop
from roundelay.network.errors import ConfigError
from roundelay.nodes.supervised import GatewayProcess
from tests.contract.test_proxies import NGINX, free_port, started
from tests.interop.test_mcp_server import TOOLS, make_agent
from tests.support.certificates import make_certificate
from tests.support.node import running_node
from tests.support.pages import read_pages

NAME = "hub.example.org"
SERVER = """
    server {{
        listen 127.0.0.1:{port};
        server_name {name};
        location {prefix}/ {{
            proxy_pass {gateway}/;
            proxy_set_header Host {host};
            {more}
        }}
    }}
"""
INITIALIZE = {
    "jsonrpc": "2.0", "id": 1, "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}},
}  # fmt: skip
ACCEPT = {"Accept": "application/json, text/event-stream"}


@asynccontextmanager
async def nginx(
    folder: Path, gateway: str, *, prefix: str = "", host: str = "$http_host", more: str = ""
) -> AsyncIterator[str]:
    """Run nginx and yield its URL. The name in this URL exists only in the Host header."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    if program is None:
        pytest.skip("no nginx here")
    port = free_port()
    block = SERVER.format(port=port, name=NAME, prefix=prefix, gateway=gateway, host=host, more=more)
    file = folder / "nginx.conf"
    file.write_text(NGINX.format(folder=folder, block=block))
    async with started([program, "-e", "stderr", "-p", str(folder), "-c", str(file)], port, folder):
        yield f"http://127.0.0.1:{port}{prefix}"


def caller(token: str, **headers: str) -> dict[str, str]:
    return {"Host": NAME, "Authorization": f"Bearer coder:{token}", **headers}


async def ask_all(url: str, headers: dict[str, str]) -> dict[str, int]:
    """Return the HTTP status of one request of each protocol."""
    async with httpx2.AsyncClient(headers=headers, timeout=30) as http:
        answers = {
            "http": await http.get(f"{url}/v1/agents"),
            "openai": await http.get(f"{url}/v1/models"),
            "a2a": await http.get(f"{url}/a2a/bob/.well-known/agent-card.json"),
            "mcp": await http.post(f"{url}/mcp", json=INITIALIZE, headers=ACCEPT),
        }
    return {name: it.status_code for name, it in answers.items()}


@pytest.mark.parametrize(
    "known", [{"public_url": f"https://{NAME}"}, {"web_hosts": [NAME]}, {"public_url": f"http://{NAME}:80/"}]
)
async def test_every_protocol_answers_by_the_names_of_the_proxy(known: dict[str, Any], tmp_path: Path) -> None:
    async with running_node() as node:
        token = await make_agent(node, "coder")
        await node.agent("bob")
        async with serve_gateway(node.url, **known) as gateway, nginx(tmp_path, gateway) as url:
            assert set((await ask_all(url, caller(token))).values()) == {200}
            assert set((await ask_all(url, caller(token, Host=f"{NAME.upper()}:80"))).values()) == {200}
            assert set(
                (await ask_all(gateway, {**caller(token), "Host": gateway.removeprefix("http://")})).values()
            ) == {200}
            async with (
                httpx2.AsyncClient(headers=caller(token), timeout=40) as http,
                Client(streamable_http_client(f"{url}/mcp", http_client=http)) as client,
            ):
                assert [it.name for it in (await client.list_tools()).tools] == TOOLS


@pytest.mark.parametrize(
    "asked",
    ["evil.example.com", "evil.example.com:80", f"{NAME}.evil.example.com", "localhost.evil.com", "10.0.0.1", ""],
)
async def test_under_another_name_mcp_says_what_its_operator_has_to_do(asked: str) -> None:
    async with running_node() as node:
        token = await make_agent(node, "coder")
        async with serve_gateway(node.url, public_url=f"https://{NAME}") as gateway, httpx2.AsyncClient() as http:
            answer = await http.post(f"{gateway}/mcp", json=INITIALIZE, headers={**ACCEPT, **caller(token, Host=asked)})
            assert answer.status_code == 421
            told = answer.json()["error"]["message"]
            assert ("web_hosts" in told and asked.partition(":")[0] in told) if asked else "Host" in told


async def test_a_page_of_the_public_url_may_ask_also_where_the_proxy_changes_the_host() -> None:
    async with running_node() as node:
        token = await make_agent(node, "coder")
        async with serve_gateway(node.url, public_url=f"https://{NAME}/hub") as gateway, httpx2.AsyncClient() as http:
            for origin, status in (
                (f"https://{NAME}", 200),
                (f"http://{NAME}", 403),
                ("https://evil.example.com", 403),
            ):
                headers = {"Authorization": f"Bearer coder:{token}", "Origin": origin}
                assert (await http.get(f"{gateway}/v1/agents", headers=headers)).status_code == status


@pytest.mark.parametrize(
    ("known", "more", "host", "base"),
    [
        ({"public_url": f"https://{NAME}/hub/"}, "", "$http_host", f"https://{NAME}/hub"),
        ({"public_url": f"https://{NAME}/hub"}, "", "$proxy_host", f"https://{NAME}/hub"),
        ({}, "proxy_set_header X-Forwarded-Prefix /hub;", "$http_host", f"http://{NAME}/hub"),
        ({}, "proxy_set_header X-Forwarded-Prefix /hub/; proxy_set_header X-Forwarded-Proto https;", "$http_host", f"https://{NAME}/hub"),
        ({}, "proxy_set_header X-Forwarded-Prefix //evil.example.com;", "$http_host", f"http://{NAME}"),
        ({}, "", "$http_host", f"http://{NAME}"),
    ],
)  # fmt: skip
async def test_cards_and_the_api_document_have_the_path_of_the_proxy(
    known: dict[str, Any], more: str, host: str, base: str, tmp_path: Path
) -> None:
    async with running_node() as node:
        token = await make_agent(node, "coder")
        await node.agent("bob")
        async with (
            serve_gateway(node.url, **known) as gateway,
            nginx(tmp_path, gateway, prefix="/hub", host=host, more=more) as url,
            httpx2.AsyncClient(headers=caller(token), timeout=30) as http,
        ):
            card = (await http.get(f"{url}/a2a/bob/.well-known/agent-card.json")).json()
            assert {it["url"].rstrip("/") for it in card["supportedInterfaces"]} == {f"{base}/a2a/bob"}
            assert (await http.get(f"{url}/openapi.json")).json()["servers"] == [{"url": base}]


async def test_a_client_of_a2a_finds_the_agent_behind_a_path_by_its_card(tmp_path: Path) -> None:
    async with running_node() as node:
        token = await make_agent(node, "coder")
        await node.agent("bob")
        port_known = "proxy_set_header X-Forwarded-Prefix /hub;"
        headers = {"Authorization": f"Bearer coder:{token}"}
        async with (
            serve_gateway(node.url) as gateway,
            nginx(tmp_path, gateway, prefix="/hub", more=port_known) as url,
            httpx2.AsyncClient(headers=headers, timeout=30) as http,
        ):
            import httpx

            async with httpx.AsyncClient(headers=headers) as old:
                card = await A2ACardResolver(old, f"{url}/a2a/bob").get_agent_card()
            [rpc] = [it.url for it in card.supported_interfaces if it.protocol_binding == "JSONRPC"]
            asked = {"jsonrpc": "2.0", "id": 1, "method": "GetTask", "params": {"id": "none"}}
            answer = await http.post(rpc, json=asked, headers={"A2A-Version": "1.0"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (200, -32001)


async def test_the_documented_nginx_serves_every_protocol_below_its_path(tmp_path: Path) -> None:
    page = read_pages("interop")
    [block] = re.findall(r"^```nginx\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    if program is None:
        pytest.skip("no nginx here")
    certificate, key = make_certificate(tmp_path, name=f"DNS:{NAME}")
    port = free_port()
    async with running_node() as node, serve_gateway(node.url, public_url=f"https://{NAME}/hub") as gateway:
        token = await make_agent(node, "coder")
        await node.agent("bob")
        for old, new in {
            "listen 443 ssl": f"listen 127.0.0.1:{port} ssl", "/etc/ssl/hub/cert.pem": str(certificate),
            "/etc/ssl/hub/key.pem": str(key), "http://127.0.0.1:8701": gateway,
        }.items():  # fmt: skip
            assert block.count(old) == 1, old
            block = block.replace(old, new)
        file = tmp_path / "nginx.conf"
        file.write_text(NGINX.format(folder=tmp_path, block=block))
        command = [program, "-e", "stderr", "-p", str(tmp_path), "-c", str(file)]
        async with started(command, port, tmp_path), httpx2.AsyncClient(verify=False, headers=caller(token)) as http:
            url = f"https://127.0.0.1:{port}/hub"
            card = (await http.get(f"{url}/a2a/bob/.well-known/agent-card.json")).json()
            assert {it["url"].rstrip("/") for it in card["supportedInterfaces"]} == {f"https://{NAME}/hub/a2a/bob"}
            assert (await http.post(f"{url}/mcp", json=INITIALIZE, headers=ACCEPT)).status_code == 200
            assert (await http.get(f"{url}/v1/models")).status_code == 200


def test_the_node_s_file_and_the_command_line_say_where_others_reach_it(tmp_path: Path) -> None:
    from roundelay.network.config import resolve_config
    from roundelay.nodes.logs import ProcessLog

    file = tmp_path / "node.yaml"
    own = {"public_url": f"https://{NAME}/hub/"}
    file.write_text(json.dumps({"web_hosts": ["hub:8443"], "public_url": f"https://{NAME}", "interop": own}))
    config, _ = resolve_config(file, {}, {})
    process = GatewayProcess(config, "ws://127.0.0.1:1/", log_level="info", log=ProcessLog("text"))
    command = process._command
    assert command[command.index("--public-url") + 1] == f"https://{NAME}/hub"
    assert [command[place + 1] for place, it in enumerate(command) if it == "--web-host"] == ["hub:8443", NAME]


WRONG = ["hub.example.org", "ftp://hub.example.org", "https://", "https://me:x@hub.example.org", "https://h?x=1", "https://h#x", "https://h/a b", "https://h:99999", "https://[::1", "javascript:1"]  # fmt: skip


@pytest.mark.parametrize("url", WRONG)
def test_an_address_that_others_cannot_reach_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"https://hub\.example\.org"):
        Interop(public_url=url)
    ran = CliRunner().invoke(cli, ["gateway", "--public-url", url])
    assert (ran.exit_code, "https://hub.example.org" in ran.output) == (2, True)
    ran = CliRunner().invoke(cli, ["gateway", "--web-host", "https://hub.example.org"])
    assert (ran.exit_code, "hub.example.org:8443" in ran.output) == (2, True)


# --- without a token


CHALLENGE = 'Bearer realm="roundelay", error="invalid_token", error_description="Bearer token needed'


@pytest.mark.parametrize(
    "authorization", [None, "Bearer coder:wrong", "Bearer x", "Basic Y29kZXI6d3Jvbmc=", "Digest x"]
)
async def test_a_host_of_mcp_without_a_good_token_reads_that_one_is_needed(authorization: str | None) -> None:
    """Hosts show `error` and `error_description` in WWW-Authenticate (RFC 6750, section 3)."""
    async with running_node() as node:
        await make_agent(node, "coder")
        headers = {**ACCEPT, **({"Authorization": authorization} if authorization is not None else {})}
        async with serve_gateway(node.url) as gateway, httpx2.AsyncClient() as http:
            for answer in (
                await http.post(f"{gateway}/mcp", json=INITIALIZE, headers=headers),
                await http.get(f"{gateway}/mcp", headers=headers),
                await http.post(
                    f"{gateway}/mcp", json={**INITIALIZE, "method": "tools/list", "params": {}}, headers=headers
                ),
            ):
                assert answer.status_code == 401
                [challenge] = answer.headers.get_list("www-authenticate")
                assert challenge.startswith(CHALLENGE)
                assert "Basic" not in challenge  # a browser would ask the person for a name and a password
                assert "resource_metadata" not in challenge
                assert "Bearer ID:TOKEN" in answer.json()["error"]["message"]
                assert "bearer token" in answer.json()["error"]["message"].lower()


async def test_a_host_that_looks_for_oauth_is_told_that_there_is_none() -> None:
    """After a 401, hosts look for OAuth at these paths (MCP, "Authorization Server Discovery"). Hosts register at
    another path (RFC 7591), and show its `error_description`.
    """
    async with running_node() as node, serve_gateway(node.url) as gateway, httpx2.AsyncClient() as http:
        for name in ("oauth-protected-resource", "oauth-authorization-server", "openid-configuration"):
            for path in (f"/.well-known/{name}", f"/.well-known/{name}/mcp", f"/.well-known/{name}/hub/mcp"):
                answer = await http.get(f"{gateway}{path}")
                assert answer.status_code == 404
                assert "Bearer token needed" in answer.json()["error"]["message"]
        answer = await http.post(
            f"{gateway}/register", json={"client_name": "x", "redirect_uris": ["http://127.0.0.1/"]}
        )
        assert (answer.status_code, answer.json()["error"]) == (403, "access_denied")
        assert answer.json()["error_description"].startswith("Bearer token needed")
    async with (
        running_node() as node,
        serve_gateway(node.url, served=("http",)) as gateway,
        httpx2.AsyncClient() as http,
    ):
        assert (await http.post(f"{gateway}/register", json={})).json()["error"]["code"] == "unknown_operation"
