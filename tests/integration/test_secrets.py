"""Tests that no secret reaches any output. Each secret is a canary, and servers repeat everything that they receive."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.integration.test_up import ask, node_up
from tests.support.command import invoke, run
from tests.support.fake_openai import FakeOpenAI, Reply
from tests.support.fake_openai import error as refusal
from tests.support.openai_rules import Body

CANARIES = {
    "MODEL_KEY": "sk-canary-model-0123456789",
    "OPENAI_ORG_ID": "org-canary-0123456789",
    "MCP_HEADER": "canary-mcp-header-0123456789",
    "MCP_ENV": "canary-mcp-env-0123456789",
    "REMOTE_TOKEN": "canary-remote-token-0123456789",
}
PASSWORD = "canary-url-password-0123456789"
IN_FILE = "canary-in-file-0123456789"


@asynccontextmanager
async def echo_server(status: int) -> AsyncIterator[str]:
    """Run a server that answers each request with an error that contains the whole request. Yield the server's
    address.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.IncompleteReadError:
            writer.close()
            return
        body = json.dumps({"error": {"message": f"Refused. You sent: {head}"}, "detail": head}).encode()
        writer.write(b"HTTP/1.1 %d Refused\r\nContent-Type: application/json\r\nConnection: close\r\n" % status)
        writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}"


def write_team(folder: Path, models: str, echo: str) -> None:
    """Write one agent for each kind of secret, with a server that repeats its input."""
    host = echo.removeprefix("http://")
    noisy = "import os, sys; sys.stderr.write('no: ' + os.environ['MCP_ENV'] + os.environ['IN_FILE']); sys.exit(3)"
    (folder / "noisy.py").write_text(noisy)
    agent = "id: {}\ninstruction: You are at the desk.\nlimits: {{model_attempts: 2}}\n"
    openai = "model: {{openai: {{name: m, base_url: '{}', api_key_env: MODEL_KEY}}}}\n"
    (folder / "desk.yaml").write_text(
        agent.format("desk") + openai.format(models) + "middleware:\n- tracing: {content: true}\n"
    )
    (folder / "echo.yaml").write_text(
        agent.format("echo") + openai.format(f"http://tom:{PASSWORD}@{host}/v1?key={IN_FILE}")
    )
    (folder / "tools.yaml").write_text(
        agent.format("tools")
        + "model: {rules: [{do: [{say: 'heard {{ text }}'}]}]}\n"
        + "middleware:\n- mcp:\n    servers:\n"
        + f"      far: {{url: 'http://tom:{PASSWORD}@{host}/mcp?api_key={IN_FILE}', headers_from: {{X-Key: MCP_HEADER}}}}\n"
        + f"      near: {{command: '{sys.executable}', args: [noisy.py], cwd: '{folder}', env_from: [MCP_ENV], env: {{IN_FILE: {IN_FILE}}}}}\n"
    )
    (folder / "remote.yaml").write_text(
        f"id: remote\ndescription: Elsewhere.\na2a: {{url: '{echo}/a2a', token_env: REMOTE_TOKEN}}\n"
    )
    (folder / "roundelay.yaml").write_text("port: 0\nagents: [desk.yaml, echo.yaml, tools.yaml, remote.yaml]\n")


def find_leaks(texts: dict[str, str], *more: str) -> dict[str, list[str]]:
    """Return the secrets in each output, by the output's name."""
    secrets = [*CANARIES.values(), PASSWORD, IN_FILE, *more]
    return {name: held for name, text in texts.items() if (held := [it for it in secrets if it in text])}


def read_files(folder: Path) -> dict[str, str]:
    """Return the contents of the files that the commands have written, especially the database."""
    files = [it for it in folder.rglob("*") if it.is_file() and it.suffix != ".yaml"]
    assert [it for it in files if it.name == "roundelay.db"]
    return {f"file {it.name}": it.read_bytes().decode("utf-8", "replace") for it in files}


def answer_with_key(status: int) -> object:
    def answer(body: Body) -> Reply:
        key, organization = CANARIES["MODEL_KEY"], CANARIES["OPENAI_ORG_ID"]
        return refusal(status, f"Incorrect API key provided: {key} of {organization}. Header: Bearer {key}")

    return answer


@pytest.mark.parametrize(
    ("status", "levels"),
    [
        (401, ["text"]),
        (500, ["json"]),
        pytest.param(401, ["json"], marks=pytest.mark.full),
        pytest.param(500, ["text"], marks=pytest.mark.full),
    ],
)
async def test_no_output_holds_a_secret_that_servers_repeat(tmp_path: Path, status: int, levels: list[str]) -> None:
    outputs: dict[str, str] = {}
    line_breaks = {name: f"{value}\r\n" for name, value in CANARIES.items()}
    async with FakeOpenAI(answer_with_key(status)) as models, echo_server(status) as echo:  # type: ignore[arg-type]
        write_team(tmp_path, models.base_url, echo)
        for level in levels:
            async with node_up(
                tmp_path, "--log-level", "debug", "--log-format", level, ROUNDELAY_DEBUG="1", **line_breaks
            ) as (up, url):
                for agent in ("desk", "echo", "tools", "remote"):
                    outputs[f"answer of {agent} ({level})"] = await ask(url, agent, "hello")
                reactions = await invoke("reactions", "list", "--json", "--url", url)
                outputs[f"reactions ({level})"] = reactions.out + reactions.err
                for command in (
                    ["export"], ["export", "--format", "html"], ["agents", "--json"], ["status", "--json"],
                    ["inbox", "--json"], ["dead-letters", "list"],
                ):  # fmt: skip
                    done = await invoke(*command, "--url", url, code=None)
                    outputs[f"{command} ({level})"] = done.out + done.err
            outputs[f"log ({level})"] = "\n".join([*up.lines, *up.errors])
        assert all("model failed" in outputs[f"log ({level})"] for level in levels)
        assert models.requests
        assert {it.headers.get("authorization") for it in models.received} == {f"Bearer {CANARIES['MODEL_KEY']}"}
        assert {it.headers.get("openai-organization") for it in models.received} == {CANARIES["OPENAI_ORG_ID"]}
        for file in ("desk.yaml", "echo.yaml", "tools.yaml", "remote.yaml"):
            for extra in ((), ("--json",)):
                done = await invoke("agent", "try", file, "hello", *extra, cwd=tmp_path, code=None, **line_breaks)
                outputs[f"try {file} {extra}"] = done.out + done.err
            done = await invoke("doctor", file, cwd=tmp_path, code=None, **line_breaks)
            outputs[f"doctor {file}"] = done.out + done.err
        done = await invoke("config", "show", cwd=tmp_path, code=None, **line_breaks)
        outputs["config show"] = done.out + done.err
    outputs |= read_files(tmp_path)
    assert find_leaks(outputs) == {}


# The secret of an MCP server's environment is never sent in a header.
@pytest.mark.parametrize(
    "name",
    [pytest.param(it, marks=() if it == "MODEL_KEY" else pytest.mark.full) for it in CANARIES if it != "MCP_ENV"],
)
async def test_a_secret_that_no_header_can_carry_stops_the_start_unquoted(tmp_path: Path, name: str) -> None:
    write_team(tmp_path, "http://127.0.0.1:9/v1", "http://127.0.0.1:9")
    broken = {**CANARIES, name: CANARIES[name][:4] + "\u201d" + CANARIES[name][4:]}
    for call, command in (run, "up"), (invoke, "doctor"):
        done = await call(command, cwd=tmp_path, code=None, **broken, ROUNDELAY_DEBUG="1")
        assert done.code != 0
        assert name in done.out + done.err
        assert "typographic quotation mark in its middle" in done.out + done.err
        assert find_leaks({"output": done.out + done.err}, CANARIES[name][4:]) == {}
