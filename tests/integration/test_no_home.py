"""Tests of users without a home folder, as in containers, and of node files of dead nodes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from roundelay.network.home import announce_node, find_process_start, home, running_nodes
from tests.support.command import command, run

NOBODY = 54321
"""User ID that has no name on this machine."""
as_another_user = pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")


@pytest.fixture
async def place() -> AsyncIterator[Path]:
    with tempfile.TemporaryDirectory() as folder:  # pytest's folders are accessible only to root
        await run("init", cwd=Path(folder))
        os.chown(folder, NOBODY, NOBODY)
        yield Path(folder)


async def start_nameless(*arguments: str, cwd: Path) -> asyncio.subprocess.Process:
    as_nobody = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    environment = {it: value for it, value in os.environ.items() if it in ("PATH", "PYTHONPATH")}
    return await asyncio.create_subprocess_exec(
        *as_nobody, sys.executable, "-m", "roundelay", *arguments, cwd=cwd, env=environment,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip


async def call_nameless(*arguments: str, cwd: Path) -> tuple[int | None, str]:
    process = await start_nameless(*arguments, cwd=cwd)
    out, _ = await process.communicate()
    return process.returncode, out.decode()


@as_another_user
@pytest.mark.parametrize("words", [
    "chat", "doctor",
    *(pytest.param(it, marks=pytest.mark.full) for it in ("agents", "status", "send echo hi", "web", "config show")),
    pytest.param("agent try agents/echo.yaml hi", marks=pytest.mark.full),
])  # fmt: skip
async def test_a_user_id_without_a_name_and_a_home_meets_no_unexpected_error(place: Path, words: str) -> None:
    code, out = await call_nameless(*words.split(), cwd=place)
    assert "Unexpected" not in out
    assert "RuntimeError" not in out
    if "No hub answers" in out:
        assert code == 3
    else:
        assert code == 0, out


@as_another_user
async def test_up_without_a_place_for_its_agents_tokens_says_what_to_set(place: Path) -> None:
    code, out = await call_nameless("up", "--port", "0", cwd=place)
    assert code == 2
    assert "no home folder" in out
    assert "ROUNDELAY_HOME" in out


@as_another_user
async def test_up_without_agents_serves_and_says_that_commands_need_its_address(place: Path) -> None:
    process = await start_nameless("up", "--port", "0", "--no-agents", cwd=place)
    try:
        assert process.stdout is not None
        lines = []
        async for line in process.stdout:
            lines.append(line.decode())
            if "is ready at" in lines[-1]:
                break
        assert "commands need --url ws://127.0.0.1:" in "".join(lines)
    finally:
        process.terminate()
        await process.communicate()


def test_a_note_of_a_dead_node_whose_pid_is_somebody_elses_is_passed_over(tmp_path: Path) -> None:
    live = announce_node("ws://127.0.0.1:4711/", tmp_path / "live.db.owner")
    note = json.loads(live.read_text())
    assert note["started"] == find_process_start(os.getpid())
    for port, told in (
        (4712, {"started": f"{note['started']}0"}),  # a process with this ID started at another time
        (4713, {"started": "another-boot/1"}),
        (4714, {"pid": 2**22 - 1}),
    ):
        dead = {**note, "url": f"ws://127.0.0.1:{port}/", **told}
        (home() / "nodes" / f"{port}.json").write_text(json.dumps(dead))
    assert [it.url for it in running_nodes()] == ["ws://127.0.0.1:4711/"]


def test_a_note_of_an_older_release_stands_behind_those_that_are_sure(tmp_path: Path) -> None:
    live = announce_node("ws://127.0.0.1:4711/", tmp_path / "live.db.owner")
    note = json.loads(live.read_text())
    del note["started"]
    (home() / "nodes" / "4712.json").write_text(json.dumps({**note, "url": "ws://127.0.0.1:4712/"}))
    assert [it.url for it in running_nodes()] == ["ws://127.0.0.1:4711/", "ws://127.0.0.1:4712/"]


@pytest.mark.usefixtures("real_processes")
async def test_commands_find_the_live_node_beside_the_note_of_a_killed_one(tmp_path: Path) -> None:
    own = {"ROUNDELAY_HOME": str(tmp_path / "home")}
    async with command("up", "--port", "0", "--db", "a.db", "--no-agents", cwd=tmp_path, **own) as first:
        await first.line("^Roundelay is ready")
        await first.kill()
    [note] = (tmp_path / "home" / "nodes").iterdir()
    told = json.loads(note.read_text())
    async with command("up", "--port", "0", "--db", "b.db", "--no-agents", cwd=tmp_path, **own) as second:
        ready = await second.line(r"^Roundelay is ready at (ws://\S+) ")
        note.write_text(json.dumps({**told, "pid": os.getpid()}))  # newer than the file of the live node
        done = await run("agents", cwd=tmp_path, **own)
        assert "Several nodes" not in done.err
        status = await run("status", "--json", cwd=tmp_path, **own)
        assert json.loads(status.out)["url"] == ready[1]
        await second.stop()
