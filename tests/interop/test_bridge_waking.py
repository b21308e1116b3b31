"""Tests of waking idle coding agents: a scripted MCP host that speaks the protocol itself, and Codex's own app
server.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import unix_connect

from roundelay.interop.bridge import wakeups
from roundelay.interop.bridge.hosts import HOSTS, WAKE
from roundelay.interop.bridge.installer import install, is_waking, plan_install, plan_remove, remove
from roundelay.interop.bridge.session import BridgeSession
from tests.interop.test_bridge_hosts import NODE, NOWHERE, codex
from tests.suites.environment import node_modules_of
from tests.support.command import run
from tests.support.forks import start_roundelay
from tests.support.hosts_model import Says, hosts_model
from tests.support.node import Node, running_node
from tests.support.wire import WireSession


class ScriptedHost:
    """A minimal MCP host that starts a server and reads its messages."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.capabilities: dict[str, Any] = {}

    async def begin(self) -> None:
        client = {"name": "scripted", "version": "1"}
        await self._say(
            id=1,
            method="initialize",
            params={"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client},
        )
        self.capabilities = (await self._read())["result"]["capabilities"]
        await self._say(method="notifications/initialized")

    async def listen(self) -> None:
        while True:
            self.events.put_nowait(await self._read())

    async def _say(self, **message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        await self._process.stdin.drain()

    async def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        value: dict[str, Any] = json.loads(await self._process.stdout.readline())
        return value


@asynccontextmanager
async def hosting(node: Node, project: Path, *, wakes: bool) -> AsyncIterator[ScriptedHost]:
    environment = os.environ | {"ROUNDELAY_URL": node.url, **({WAKE: "1"} if wakes else {})}
    process = await start_roundelay(
        *("bridge", "mcp", "claude"),
        cwd=project, env=environment, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    host = ScriptedHost(process)
    await host.begin()
    listening = asyncio.create_task(host.listen())
    try:
        yield host
    finally:
        listening.cancel()
        process.kill()
        await process.wait()


async def run_hook(node: Node, project: Path) -> str:
    """Run the host's hook at a prompt, and return its output for the model."""
    process = await start_roundelay(
        *("bridge", "deliver", "claude"), cwd=project,
        env=os.environ | {"ROUNDELAY_URL": node.url, WAKE: "1"}, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    told = {"hook_event_name": "UserPromptSubmit", "session_id": "one", "cwd": str(project)}
    return (await process.communicate(json.dumps(told).encode()))[0].decode()


async def wait_for_agent(node: Node, mia: WireSession, agent_id: str) -> None:
    async with asyncio.timeout(20):
        while not any(
            it["agent_id"] == agent_id for it in (await mia.call("network.list_agents", {"online": True}))["agents"]
        ):
            pass


async def test_an_idle_claude_is_woken_and_its_hook_tells_once_what_had_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDELAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ROUNDELAY_HOOK_TIMEOUT_S", "60")  # processes start slowly under load
    project = tmp_path / "shop"
    project.mkdir()
    async with asyncio.timeout(60), running_node(registration="local") as node:
        mia = await node.person("mia")
        async with hosting(node, project, wakes=True) as host:
            assert host.capabilities["experimental"] == {"claude/channel": {}}
            await wait_for_agent(node, mia, "claude-shop")
            seqs = [
                (await mia.send("agent:claude-shop", it))["seq"] for it in ("<b>dig</b> wake everybody", "and plant")
            ]
            event = await host.events.get()
            assert event["method"] == "notifications/claude/channel"
            assert "2 messages have arrived" in event["params"]["content"]
            assert "dig" not in json.dumps(event), "nobody's words come by it"
            states = [(await mia.call("network.message_status", {"seq": it}))["recipients"][0]["state"] for it in seqs]
            assert states == ["queued", "queued"], "a wake is no receipt"
            told = await run_hook(node, project)
            assert (told.count("wake everybody"), told.count("and plant")) == (1, 1)
            assert "wake everybody" not in await run_hook(node, project)
            assert host.events.empty()
            [card] = [
                it["card"]
                for it in (await mia.call("network.list_agents"))["agents"]
                if it["agent_id"] == "claude-shop"
            ]
            assert card["reads"] == "when it is woken"
        async with hosting(node, project, wakes=False) as host:
            assert not host.capabilities.get("experimental")


async def test_what_comes_fast_is_few_wakes_and_what_hooks_have_told_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDELAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ROUNDELAY_HOOK_TIMEOUT_S", "60")  # processes start slowly under load
    monkeypatch.setattr(wakeups, "GRACE_S", 0.2)
    monkeypatch.setattr(wakeups, "GAP_S", 0.2)
    monkeypatch.setattr(wakeups, "MAX_AN_HOUR", 3)
    monkeypatch.setattr(wakeups, "BUSY_S", 0.01)
    project = tmp_path / "shop"
    project.mkdir()
    woken = asyncio.Queue[str]()
    busy = 2

    async def wake(sentence: str) -> bool:
        nonlocal busy
        busy -= 1
        if busy < 0:
            woken.put_nowait(sentence)
        return busy < 0

    async with asyncio.timeout(60), running_node(registration="local") as node:
        mia = await node.person("mia")
        async with BridgeSession(HOSTS["claude"], node.url) as session:
            monkeypatch.setattr(session, "project", project)
            async with session.lend(None) as client:
                agent_id = client.agent_id
            working = asyncio.create_task(wakeups.keep_waking(session, wake))
            seqs = [(await mia.send(f"agent:{agent_id}", f"{number}"))["seq"] for number in range(40)]
            while "40 messages" not in await woken.get():  # a busy host is asked again
                pass
            async with session.lend(None) as client:
                await client.call("network.acknowledge", {"seqs": seqs})
            for number in range(4):
                seq = (await mia.send(f"agent:{agent_id}", f"{number}"))["seq"]
                async with session.lend(None) as client:
                    await client.call("network.acknowledge", {"seqs": [seq]})
            await asyncio.sleep(0.5)
            seen = woken.qsize()
            assert seen <= 2
            for _ in range(4):
                await mia.send(f"agent:{agent_id}", "more")
                await asyncio.sleep(0.3)
            assert woken.qsize() <= 3, "no more in an hour"
            working.cancel()


async def test_a_wake_that_could_not_be_asked_for_is_tried_again_and_one_that_may_have_worked_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDELAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ROUNDELAY_HOOK_TIMEOUT_S", "60")  # processes start slowly under load
    for name in ("GRACE_S", "GAP_S", "BUSY_S", "AGAIN_S"):
        monkeypatch.setattr(wakeups, name, 0.05)
    faults: list[Exception] = [FileNotFoundError(), KeyError("of another release"), TimeoutError()]
    tried = asyncio.Queue[str]()

    async def wake(sentence: str) -> bool:
        tried.put_nowait(sentence)
        if faults:
            raise faults.pop(0)
        return True

    async with asyncio.timeout(60), running_node(registration="local") as node:
        mia = await node.person("mia")
        async with BridgeSession(HOSTS["claude"], node.url) as session:
            async with session.lend(None) as client:
                agent_id = client.agent_id
            working = asyncio.create_task(wakeups.keep_waking(session, wake))
            await mia.send(f"agent:{agent_id}", "one")
            for _ in range(3):
                assert "A message has arrived" in await tried.get()
            await asyncio.sleep(0.5)
            assert tried.empty(), "the third try may have begun a turn"
            await mia.send(f"agent:{agent_id}", "two")  # waking still works
            assert "A message has arrived" in await tried.get()
            working.cancel()


@pytest.mark.usefixtures("real_processes")
async def test_the_flag_is_written_shown_and_taken_out_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDELAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ROUNDELAY_HOOK_TIMEOUT_S", "60")  # processes start slowly under load
    for name in ("claude", "codex"):
        host, project = HOSTS[name], tmp_path / name
        project.mkdir()
        install(host, project, plan_install(host, project, wakes=True))
        assert is_waking(host, project)
        shown = await run("bridge", "status", name, "--project", str(project))
        assert "installed, wakes" in shown.out
        install(host, project, plan_install(host, project))  # this install omits the flag
        assert not is_waking(host, project)
        install(host, project, plan_install(host, project, wakes=True))
        remove(host, project, plan_remove(host, project))
        assert [*project.iterdir()] == []
    told = await run("bridge", "install", "gemini", "--wake", "--project", str(tmp_path), code=2)
    assert "Gemini CLI cannot be woken" in told.err
    told = await run("bridge", "install", "claude", "--wake", "--project", str(tmp_path))
    assert "claude --dangerously-load-development-channels server:roundelay" in told.out


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_a_real_codex_that_is_idle_is_woken_by_its_app_server(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = await asyncio.to_thread(node_modules_of, "coding-hosts")
    project = tmp_path / "shop"
    project.mkdir()
    user = tmp_path_factory.mktemp("cx")  # a socket's path may have at most 107 bytes
    (user / ".codex").mkdir()
    monkeypatch.setenv("ROUNDELAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ROUNDELAY_HOOK_TIMEOUT_S", "60")  # processes start slowly under load
    done = asyncio.Queue[int]()

    async def think(_: str) -> Says:
        done.put_nowait(len(requests))
        return Says(tool="check") if len(requests) == 2 else Says("Done.")

    async with asyncio.timeout(120), running_node(registration="local") as node, hosts_model(think) as (url, requests):
        host = HOSTS["codex"]
        install(host, project, plan_install(host, project, url=node.url, wakes=True))
        mia = await node.person("mia")
        words = codex(modules, project, url).words
        options = [it for at, it in enumerate(words) if words[at - 1] == "-c" or it == "-c"]
        (user / ".codex" / "config.toml").write_text(f'[projects."{project}"]\ntrust_level = "trusted"\n')
        environment = {
            "PATH": f"{NODE}:{os.environ['PATH']}", "HOME": str(user), "ROUNDELAY_HOME": str(tmp_path / "home"), "ROUNDELAY_HOOK_TIMEOUT_S": "60", "TERM": "dumb",
            "HTTPS_PROXY": NOWHERE, "HTTP_PROXY": NOWHERE, "NO_PROXY": "127.0.0.1,localhost",
        }  # fmt: skip
        server = await asyncio.create_subprocess_exec(
            words[0], "app-server", "--listen", "unix://", *options,
            cwd=project, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            socket = user / ".codex" / "app-server-control" / "app-server-control.sock"
            assert server.stderr is not None
            while not socket.exists():  # the server prints text at its start
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.1):
                        await server.stderr.readline()
            async with unix_connect(str(socket), uri="ws://localhost/", max_size=2**26) as editor:
                numbers = iter(range(1, 100))

                async def ask(method: str, params: dict[str, Any]) -> Any:
                    return await wakeups._ask_codex(editor, next(numbers), method, params)

                await ask("initialize", {"clientInfo": {"name": "editor", "version": "1"}})
                await editor.send(json.dumps({"method": "initialized"}))
                made = await ask(
                    "thread/start",
                    {
                        "cwd": str(project),
                        "model": "gpt-5.2",
                        "approvalPolicy": "never",
                        "sandbox": "danger-full-access",
                    },
                )
                thread = made["thread"]["id"]
                await ask("turn/start", {"threadId": thread, "input": [{"type": "text", "text": "Go on."}]})
                await done.get()
                await wait_for_agent(node, mia, "codex-shop")
                seq = (await mia.send("agent:codex-shop", "plant-a-tree"))["seq"]
                await done.get()
                await done.get()
                [recipient] = (await mia.call("network.message_status", {"seq": seq}))["recipients"]
        finally:
            server.kill()
            await server.wait()
        assert ["not a person. A message has arrived" in it for it in requests] == [False, True, True]
        assert [it.count("plant-a-tree") for it in requests] == [0, 0, 1], "this Codex has not let our hooks run"
        assert recipient["state"] == "delivered"
