"""Tests of MCP over stdio: the first answers come without the SDK, and equal the SDK's answers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

from roundelay.interop.mcp.recording import ask_sdk, make_handshake, make_modern, record
from roundelay.interop.mcp.stdio import ANSWERS, QuickAnswers
from tests.interop.test_mcp_server import TOOLS, make_agent
from tests.support.node import running_node

SDK = {"mcp", "mcp_types", "anyio", "starlette", "uvicorn", "httpx", "httpx2", "sse_starlette", "jsonschema"}
"""Modules that the SDK imports, which cost at least half a second of CPU time."""
MAX_MODULES = 500
"""Maximum number of modules at the end of such a process, including those of Python. The process of this test has
about 400 modules, and with the SDK it would have 700.
"""


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDELAY_HOME", str(tmp_path / "home"))


async def test_the_recording_is_what_the_sdk_answers() -> None:
    written = json.loads(ANSWERS.read_text(encoding="utf-8"))
    assert written == await record(), (
        "run: python -m roundelay.interop.mcp.recording > interop/mcp/recorded_answers.json"
    )


@pytest.mark.parametrize("asked", [*HANDSHAKE_PROTOCOL_VERSIONS, "2026-07-28", "2030-01-01", "1", ""])
async def test_every_quick_answer_is_the_one_of_the_sdk(asked: str) -> None:
    messages = make_modern() if asked == "2026-07-28" else make_handshake(asked)
    answers = QuickAnswers(lambda: version("roundelay"))
    quick = [answers.answer(json.dumps(it)) for it in messages]
    assert [json.loads(it) for it in quick if it] == await ask_sdk(messages)
    assert None not in quick


MESSAGES = make_handshake("2025-11-25")
OPENING, INITIALIZED, PING, LIST = MESSAGES[:4]
MODERN = make_modern()[1]


@pytest.mark.parametrize(
    ("earlier", "line"),
    [
        ([], "{"),
        ([], "[]"),
        ([], "[" * 100_000),
        ([], json.dumps([OPENING])),
        ([], json.dumps(OPENING | {"jsonrpc": "1.0"})),
        ([], json.dumps(OPENING | {"id": None})),
        ([], json.dumps(OPENING | {"id": True})),
        ([], json.dumps(OPENING | {"id": 1.5})),
        ([], json.dumps(OPENING | {"more": 1})),
        ([], json.dumps(OPENING | {"params": None})),
        ([], json.dumps(OPENING | {"params": {"protocolVersion": "2025-11-25"}})),
        ([], json.dumps(OPENING | {"params": {**OPENING["params"], "protocolVersion": 7}})),
        ([], json.dumps(OPENING | {"params": {**OPENING["params"], "clientInfo": {"name": "x"}}})),
        ([], json.dumps(INITIALIZED)),
        ([], json.dumps(PING)),
        ([], json.dumps(LIST)),
        ([OPENING], json.dumps(LIST)),  # this request arrives before the end of the handshake
        ([OPENING], json.dumps(OPENING)),
        ([OPENING, INITIALIZED], json.dumps(MODERN)),
        ([OPENING, INITIALIZED], json.dumps(LIST | {"params": {"cursor": "x"}})),
        ([OPENING, INITIALIZED], json.dumps(LIST | {"params": {"_meta": 1}})),
        ([OPENING, INITIALIZED], json.dumps(LIST | {"method": "tools/call"})),
        ([OPENING, INITIALIZED], json.dumps(LIST | {"method": 1})),
        ([OPENING, INITIALIZED], json.dumps({"jsonrpc": "2.0", "method": "notifications/cancelled"})),
        ([OPENING, INITIALIZED], json.dumps({"jsonrpc": "2.0", "id": 1, "result": {}})),
        ([MODERN], json.dumps(OPENING)),
        ([MODERN], json.dumps(LIST)),
        ([MODERN], json.dumps(MODERN | {"params": {**MODERN["params"], "cursor": "x"}})),
        ([], json.dumps(MODERN | {"params": {"_meta": {**MODERN["params"]["_meta"], "io.modelcontextprotocol/protocolVersion": "2"}}})),
    ],
)  # fmt: skip
def test_whatever_is_not_certain_is_left_to_the_sdk(earlier: list[dict[str, Any]], line: str) -> None:
    answers = QuickAnswers(lambda: "1")
    for it in earlier:
        assert answers.answer(json.dumps(it)) is not None
    assert answers.answer(line) is None


def talk(words: list[str], messages: list[dict[str, Any]], folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Send messages to a server. Return the server's answers, and the modules that the server has imported."""
    command = [sys.executable, "-X", "importtime", "-m", "roundelay", *words]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        answers = []
        for message in messages:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            if "id" in message:
                answers.append(json.loads(process.stdout.readline()))
        rest, err = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, ""), err[-2_000:]
    return answers, re.findall(r"^import time:.*\| +(\S+)$", err, flags=re.M)


@pytest.mark.parametrize("messages", [MESSAGES, make_modern()], ids=["handshake", "modern"])
async def test_a_host_that_lists_the_tools_does_not_wait_for_the_sdk(
    messages: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    async with running_node(registration="local") as node:
        monkeypatch.setenv("ROUNDELAY_URL", node.url)
        await make_agent(node, "coder")
        monkeypatch.setenv("ROUNDELAY_TOKEN", node.tokens["coder"])
        for words in (["mcp", "--as", "coder"], ["bridge", "mcp", "codex"]):
            with monkeypatch.context() as patched:
                if words[0] == "bridge":
                    patched.delenv("ROUNDELAY_TOKEN")
                answers, modules = await asyncio.to_thread(talk, words, messages, tmp_path)
            [tools] = [it["result"]["tools"] for it in answers if "tools" in it["result"]]
            assert [it["name"] for it in tools] == TOOLS
            loaded = {it.partition(".")[0] for it in modules}
            assert not loaded & SDK
            assert len(modules) <= MAX_MODULES


@pytest.mark.parametrize(
    "asked", ["2026-07-28", *(pytest.param(it, marks=pytest.mark.full) for it in ("2025-06-18", "2030-01-01"))]
)
async def test_the_sdk_takes_over_where_the_first_answers_ended(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    opening = make_modern()[:2] if asked == "2026-07-28" else make_handshake(asked)[:4]
    params = {"name": "whoami", "arguments": {}, **(opening[0]["params"] if asked == "2026-07-28" else {})}
    calls = [{"jsonrpc": "2.0", "id": f"call {it}", "method": "tools/call", "params": params} for it in range(2)]
    again = {**opening[-1], "id": "again"}
    async with running_node(registration="local") as node:
        monkeypatch.setenv("ROUNDELAY_URL", node.url)
        answers, modules = await asyncio.to_thread(
            talk, ["bridge", "mcp", "codex"], [*opening, *calls, again], tmp_path
        )
    assert [it["id"] for it in answers] == [it["id"] for it in [*opening, *calls, again] if "id" in it]
    for answer in answers[-3:-1]:
        assert "You are codex-" in answer["result"]["content"][0]["text"]
    assert answers[-1]["result"] == answers[-4]["result"]
    assert "mcp" in modules


def test_a_host_that_leaves_at_once_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDELAY_URL", "ws://127.0.0.1:9/")
    command = [sys.executable, "-m", "roundelay", "bridge", "mcp", "codex"]
    for text in (b"", json.dumps(OPENING).encode(), b"{\n", b"\xff\n"):
        ran = subprocess.run(command, input=text, capture_output=True, cwd=tmp_path, timeout=60, check=False)
        assert ran.returncode == 0, ran.stderr
    read, write = os.pipe()
    os.close(read)  # nobody reads the answers
    ran = subprocess.run(command, input=json.dumps(OPENING).encode() + b"\n", stdout=write, stderr=subprocess.PIPE, cwd=tmp_path, timeout=60, check=False)  # fmt: skip
    os.close(write)
    assert b"Traceback" not in ran.stderr
