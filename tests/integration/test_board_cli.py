"""`roundelay tasks` and `roundelay timers`, for people and as JSON, at a node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("cronsim")
from tests.support.announced import announced_node
from tests.support.command import run


async def test_tasks_and_timers_are_made_shown_and_ended_from_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with announced_node(tmp_path, mods=["channels", "discovery", "tasks", "timers"]) as node:
        monkeypatch.setenv("ROUNDELAY_HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        ann, bob = [await node.person(name) for name in ("ann", "bob")]
        at = ["--url", node.url, "--token", node.owner_token, "--as"]
        made = await run("tasks", "create", "Report\x1b", "--assignee", "bob", "--body", "Three\npages.", *at, "ann")
        assert made.out == "Task 1 is open (bob): Report\\x1b\n"
        await run("tasks", "create", "Mail", "--after", "1", *at, "ann")
        listed = json.loads((await run("tasks", "--json", *at, "ann")).out)
        assert [(it["task"], it["state"]) for it in listed["tasks"]] == [(1, "open"), (2, "waiting")]
        await run("tasks", "claim", "1", *at, "bob")
        assert "claimed (bob)" in (await run("tasks", "claim", "1", *at, "ann", code=1)).out
        await run("tasks", "progress", "1", "Half done.", *at, "bob")
        await run("tasks", "complete", "1", "See below.", *at, "bob")
        shown = (await run("tasks", "show", "1", *at, "ann")).out
        assert "Three\npages." in shown
        assert "bob: Half done." in shown
        assert "Result:\nSee below." in shown
        assert (await run("tasks", "list", "--all", *at, "ann")).out.count("\n") == 3
        await run("tasks", "cancel", "2", *at, "ann")
        assert "no such tasks" in (await run("tasks", *at, "ann")).out

        again = await run("timers", "create", "Tea", "--cron", "0 8 * * *", "--timezone", "Europe/Berlin", *at, "ann")
        assert again.out.startswith("Timer 1 sends to ann at 20")
        timers = json.loads((await run("timers", "list", "--json", *at, "ann")).out)["timers"]
        assert [(it["timer"], it["cron"]) for it in timers] == [(1, "0 8 * * *")]
        assert "no cron expression" in (await run("timers", "create", "Tea", "--cron", "x", *at, "ann", code=1)).err
        assert (await run("timers", "cancel", "1", *at, "ann")).out == "Timer 1 is cancelled.\n"
        await ann.close()
        await bob.close()
