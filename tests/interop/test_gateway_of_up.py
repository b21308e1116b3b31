"""Tests of the gateway of `roundelay up`: it starts and stops with the node, and local commands find it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import get_args

import httpx2
import pytest
from click.testing import CliRunner

from roundelay.cli import cli
from roundelay.commands.gateway import SERVED
from roundelay.network.config import Served
from tests.support.forks import Process, start_roundelay
from tests.support.webhook_receiver import Receiver

FILE = {"port": 0, "db": "node.db", "interop": {"port": 0, "webhook_hosts": ["127.0.0.1"]}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "node.yaml").write_text(json.dumps(FILE))
    return tmp_path


async def start(folder: Path, *more: str) -> Process:
    return await start_roundelay(
        "up", "node.yaml", *more, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"ROUNDELAY_HOME": str(folder / "home")},
    )  # fmt: skip


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


async def read_until(process: Process, pattern: str) -> re.Match[str]:
    assert process.stdout is not None
    async with asyncio.timeout(60):
        while line := (await process.stdout.readline()).decode():
            if found := re.search(pattern, line):
                return found
    raise AssertionError(f"it ended without saying {pattern}")


async def run(folder: Path, *command: str, status: int = 0, told: str = "") -> str:
    process = await start_roundelay(
        *command, cwd=folder, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={name: it for name, it in os.environ.items() if name != "TERM"} | {"ROUNDELAY_HOME": str(folder / "home")},
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(told.encode()), 60)
    assert process.returncode == status, output.decode()
    return output.decode()


async def test_up_runs_the_gateway_posts_to_webhooks_starts_it_again_and_stops_it(folder: Path) -> None:
    receiver, node = Receiver(), await start(folder)
    try:
        url = (await read_until(node, r"gateway to \S+ is ready on (\S+) \(a2a http mcp openai webhooks\)"))[1]
        async with receiver.listening(), httpx2.AsyncClient(base_url=url) as http:
            assert (await http.get("/healthz")).text == "ok\n"
            (folder / "secret").write_text("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n")
            added = await run(folder, "webhook", "add", receiver.url, "--as", "form", "--secret-file", "secret")
            assert added.startswith("whsec_")
            no_webhook = await run(folder, "webhook", "test", "--of", "other", status=1)
            assert "other has no webhook here. Register one with roundelay webhook add" in no_webhook
            assert "Name the owner of the webhook with --of ID." in await run(folder, "webhook", "resume", status=2)
            assert "taken: it answered 204" in await run(folder, "webhook", "test", "--of", "form")
            sent = json.loads(await run(folder, "send", "form", "from cron", "--message-id", "c-1", "--json"))
            again = json.loads(await run(folder, "send", "form", "from cron", "--message-id", "c-1", "--json"))
            assert (again["seq"], again["duplicate"]) == (sent["seq"], True)
            await receiver.wait_for(2)
            assert receiver.contents() == ["from cron"]
            assert f"{url}; 1 webhook\n" in await run(folder, "status", "--over", "0.1")
            assert "answers (a2a http mcp openai webhooks)" in await run(folder, "doctor", "node.yaml")
            listed = json.loads(await run(folder, "webhook", "list", "--json"))["webhooks"]
            assert [(it["participant"], it["state"]) for it in listed] == [("form", "on")]
            [gateway] = children_of(node.pid)
            os.kill(int(gateway), signal.SIGKILL)
            await read_until(node, "The gateway has ended with signal 9; it starts again")
            await run(folder, "send", "form", "after the kill")
            await receiver.wait_for(3)
            assert receiver.contents()[-1] == "after the kill"
            [gateway] = children_of(node.pid)
            assert "Removed." in await run(folder, "webhook", "remove", "--of", "form")
        node.terminate()
        assert await asyncio.wait_for(node.wait(), 30) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(int(gateway), 0)
    finally:
        if node.returncode is None:
            node.kill()
        await node.wait()


async def test_a_gateway_whose_port_is_taken_ends_up_with_what_to_do_next(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = await run(folder, "up", "node.yaml", "--interop-port", str(port), status=2)
    assert f"The gateway cannot listen on 127.0.0.1:{port}: Address already in use." in told
    assert "--interop-port" in told
    node = await start(folder, "--no-interop")
    try:
        await read_until(node, "Roundelay is ready")
        assert children_of(node.pid) == []
        assert "No gateway is known here." in await run(folder, "webhook", "list", status=2)
    finally:
        node.terminate()
        await node.wait()


async def list_ids(folder: Path) -> tuple[set[str], list[tuple[str, bool]]]:
    """Return the registered participants, and the owner of each token with whether it is revoked."""
    participants = json.loads(await run(folder, "agents", "--json"))["agents"]
    tokens = json.loads(await run(folder, "token", "list", "--json"))["tokens"]
    return {it["agent_id"] for it in participants}, [(it["agent_id"], it["revoked"]) for it in tokens]


@pytest.mark.full
async def test_a_webhook_that_is_refused_leaves_no_token_and_nobody_behind(folder: Path) -> None:
    node = await start(folder, "--no-interop")
    try:
        await read_until(node, "Roundelay is ready")
        add = "webhook", "add", "https://hook.invalid/", "--as", "form"
        assert "No gateway is known here." in await run(folder, *add, status=2)
        assert "No gateway answers at http://127.0.0.1:1" in await run(
            folder, *add, "--gateway", "http://127.0.0.1:1", status=3
        )
        known, tokens = await list_ids(folder)
        assert (known & {"form"}, tokens) == (set(), [])
    finally:
        node.terminate()
        await node.wait()
    node = await start(folder)
    try:
        await read_until(node, "gateway to")
        assert "hook.invalid is unknown, or has an address that is not public" in await run(folder, *add, status=1)
        assert "has an address that is not public" in await run(
            folder, "webhook", "add", "https://127.0.0.2/", "--as", "form", status=1
        )
        known, tokens = await list_ids(folder)
        assert (known & {"form"}, tokens) == (set(), [])
    finally:
        node.terminate()
        await node.wait()


@pytest.mark.full
async def test_a_token_whose_webhook_did_not_come_about_is_taken_back_or_told(folder: Path) -> None:
    node = await start(folder)
    try:
        await read_until(node, "gateway to")
        kept = folder / "node.db.webhooks"
        kept.mkdir()  # prevents storing a registration, as a full disk does
        add = "webhook", "add", "http://127.0.0.1:9/", "--as"
        assert "Warning: nobody " in await run(folder, *add, "nobody", status=1)
        await run(folder, *add, "nobody", status=1)
        assert (await list_ids(folder))[1] == [("nobody", True), ("nobody", True)]
        await run(folder, "token", "create", "form", "--kind", "service")
        told = await run(folder, *add, "form", status=1)
        assert (
            "An unused token of form remains valid. To revoke it with all other tokens of form, run: roundelay token revoke form"
            in told
        )
        assert [it for it in (await list_ids(folder))[1] if it[0] == "form"] == [("form", False), ("form", False)]
    finally:
        node.terminate()
        await node.wait()


def test_without_the_extra_it_is_said_how_to_get_it_and_how_to_do_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.chdir(folder)
    error = CliRunner().invoke(cli, ["up", "node.yaml"]).exception
    assert str(error) == (
        "This needs the extra gateway (uvicorn is not installed). Run: pip install 'roundelay[gateway]'. Or start without the gateway: roundelay up --no-interop."
    )
    assert get_args(Served) == SERVED
