"""Tests of hooks that their host cancels, at each of their steps: no message is lost, and no receipt comes too early.

Claude Code cancels a hook at the timeout in its settings and drops the hook's output
(https://code.claude.com/docs/en/hooks, "timeout").
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roundelay.interop.bridge.hosts import HOSTS
from roundelay.interop.bridge.participants import HostProcess, claim_name
from tests.interop.test_bridge_faults import mcp_server
from tests.support.forks import run_python
from tests.support.node import running_node

ME = HostProcess(os.getpid(), Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])

HOOK = """
import os, signal, sys, time
from roundelay.cli import main
from roundelay.interop.bridge import hooks

moment, write, deliver = sys.argv[1], hooks.write_private, hooks.run_hook

def end():
    os.kill(os.getpid(), signal.SIGKILL)

def write_private(path, notes):
    is_printed = isinstance(notes, hooks.SessionNotes) and bool(notes.outputs and notes.outputs[-1].printed_at)
    if is_printed and moment == "disk full":
        raise OSError(28, "No space left on device")
    if moment == ("before the second note" if is_printed else "before the first note"):
        end()
    write(path, notes)
    if moment == ("after the second note" if is_printed else "after the first note"):
        end()
    if moment == "late":
        time.sleep(600)

class Output:
    def write(self, text):
        self.text = text
        if moment == "within its output":
            os.write(1, text[:len(text) // 2].encode())
            end()

    def flush(self):
        os.write(1, self.text.encode())

    def fileno(self):
        return 1

async def ask(*_):
    time.sleep(600)

def deliver_to_output(*args):
    if moment != "never":
        sys.stdout = Output()
    deliver(*args)

hooks.write_private = write_private
hooks.run_hook = deliver_to_output
if moment == "asking":
    hooks._ask_node = ask
sys.argv[1:] = ["bridge", "deliver", sys.argv[2]]
main()
"""


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDELAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ROUNDELAY_HOOK_TIMEOUT_S", "60")


def run_hook(moment: str, folder: Path, event: str, host: str = "codex") -> str:
    """Return the output of a hook that is killed at a given moment."""
    told = {"session_id": "s", "hook_event_name": event, "cwd": str(folder), "transcript_path": str(folder / "t.jsonl")}
    ran = run_python("-c", HOOK, moment, host, cwd=folder, told=json.dumps(told).encode())
    assert ran.stderr == ""
    return ran.stdout


async def hook(moment: str, folder: Path, event: str, host: str = "codex") -> str:
    return await asyncio.to_thread(run_hook, moment, folder, event, host)


async def state(sender: Any, seq: int) -> str:
    [recipient] = (await sender.call("network.message_status", {"seq": seq}))["recipients"]
    return str(recipient["state"])


BOUNDARIES = ("before the first note", "after the first note", "within its output", "before the second note")


@pytest.mark.parametrize(
    "host", ["claude", *(pytest.param(host, marks=pytest.mark.full) for host in ("codex", "gemini"))]
)
async def test_a_hook_that_ends_before_its_output_is_complete_hides_nothing(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, _, tool, _ = HOSTS[host].moments
    (tmp_path / "t.jsonl").touch()
    async with running_node(registration="local") as node:
        monkeypatch.setenv("ROUNDELAY_URL", node.url)
        mia, agent_id = await node.person("mia"), claim_name(HOSTS[host], tmp_path, ME)
        await hook("never", tmp_path, start, host)
        async with mcp_server(tmp_path, host) as use:
            for moment in BOUNDARIES:
                seq = (await mia.send(f"agent:{agent_id}", f"Killed {moment}."))["seq"]
                await hook(moment, tmp_path, tool, host)
                assert await state(mia, seq) == "queued", moment
                assert "1 message waits" in (await use("whoami"))[1], moment
                assert f"Killed {moment}.</message>" in (await use("check"))[1], moment
                assert await state(mia, seq) == "delivered", moment
                # The host saw nothing of this hook, so the next hook shows the message in the middle of the turn.
                assert f"Killed {moment}.</message>" in await hook("never", tmp_path, tool, host), moment
                await use("ack", seqs=[seq])
            seq = (await mia.send(f"agent:{agent_id}", "Noted."))["seq"]
            assert "Noted.</message>" in await hook("after the second note", tmp_path, tool, host)
            # The message was printed and noted, so no tool shows it again or marks it as delivered.
            assert "Noted." not in (await use("check"))[1]
            assert await state(mia, seq) == "queued"


async def test_what_a_killed_hook_has_printed_and_its_host_has_taken_is_not_shown_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_node(registration="local") as node:
        monkeypatch.setenv("ROUNDELAY_URL", node.url)
        mia, agent_id = await node.person("mia"), claim_name(HOSTS["claude"], tmp_path, ME)
        await hook("never", tmp_path, "SessionStart", "claude")
        seq = (await mia.send(f"agent:{agent_id}", "Taken."))["seq"]
        said = await hook("before the second note", tmp_path, "PostToolUse", "claude")
        (tmp_path / "t.jsonl").write_text(said)
        async with mcp_server(tmp_path, "claude") as use:
            assert "Taken." not in (await use("check"))[1]
            assert await state(mia, seq) == "queued"
            assert "Taken." not in await hook("never", tmp_path, "PostToolUse", "claude")
            assert await state(mia, seq) == "handled"


@pytest.mark.parametrize("moment", ["asking", "late"])
@pytest.mark.parametrize(("host", "quiet"), [("codex", ""), ("gemini", "{}")])
async def test_a_hook_prints_nothing_after_its_deadline_and_ends(
    moment: str, host: str, quiet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = list(HOSTS[host].moments)[2]
    async with running_node(registration="local") as node:
        monkeypatch.setenv("ROUNDELAY_URL", node.url)
        mia, agent_id = await node.person("mia"), claim_name(HOSTS[host], tmp_path, ME)
        await hook("never", tmp_path, next(iter(HOSTS[host].moments)), host)
        seq = (await mia.send(f"agent:{agent_id}", "In time?"))["seq"]
        with monkeypatch.context() as patched:
            patched.setenv("ROUNDELAY_HOOK_TIMEOUT_S", "3")
            assert await hook(moment, tmp_path, tool, host) == quiet
        assert await state(mia, seq) == "queued"
        assert "In time?</message>" in await hook("never", tmp_path, tool, host)


def test_a_host_that_never_ends_what_it_tells_a_hook_keeps_no_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDELAY_HOOK_TIMEOUT_S", "0.5")
    command = [sys.executable, "-m", "roundelay", "bridge", "deliver", "gemini"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.read() == b"{}"
        assert process.wait(60) == 0


@pytest.mark.parametrize("chosen", ["", "nan", "-1", "soon", "inf", "1e99"])
def test_a_timeout_that_is_none_is_the_usual_one(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from roundelay.interop.bridge import hooks

    monkeypatch.setenv("ROUNDELAY_HOOK_TIMEOUT_S", chosen)
    assert hooks._read_timeout_s() == 2.0


async def test_a_hook_that_cannot_note_what_it_has_printed_prints_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_node(registration="local") as node:
        monkeypatch.setenv("ROUNDELAY_URL", node.url)
        mia, agent_id = await node.person("mia"), claim_name(HOSTS["gemini"], tmp_path, ME)
        await hook("never", tmp_path, "SessionStart", "gemini")
        await mia.send(f"agent:{agent_id}", "One.")
        printed = json.loads(await hook("disk full", tmp_path, "BeforeAgent", "gemini"))
        assert "One.</message>" in printed["hookSpecificOutput"]["additionalContext"]
