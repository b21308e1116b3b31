"""Tests of `roundelay tasks`, `roundelay timers` and `roundelay polls` at a node, with output for people and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("cronsim")
from tests.support.announced import announced_node
from tests.support.command import invoke


async def test_tasks_and_timers_are_made_shown_and_ended_from_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with announced_node(tmp_path, mods=["channels", "discovery", "tasks", "timers"]) as node:
        monkeypatch.setenv("ROUNDELAY_HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        ann, bob = [await node.person(name) for name in ("ann", "bob")]
        at = ["--url", node.url, "--token", node.owner_token, "--as"]
        made = await invoke("tasks", "create", "Report\x1b", "--assignee", "bob", "--body", "Three\npages.", *at, "ann")
        assert made.out == "Task 1 is open (bob): Report\\x1b\n"
        await invoke("tasks", "create", "Mail", "--after", "1", *at, "ann")
        listed = json.loads((await invoke("tasks", "--json", *at, "ann")).out)
        assert [(it["task"], it["state"]) for it in listed["tasks"]] == [(1, "open"), (2, "waiting")]
        await invoke("tasks", "claim", "1", *at, "bob")
        assert "claimed (bob)" in (await invoke("tasks", "claim", "1", *at, "ann", code=1)).out
        await invoke("tasks", "progress", "1", "Half done.", *at, "bob")
        await invoke("tasks", "complete", "1", "See below.", *at, "bob")
        shown = (await invoke("tasks", "show", "1", *at, "ann")).out
        assert "Three\npages." in shown
        assert "bob: Half done." in shown
        assert "Result:\nSee below." in shown
        assert (await invoke("tasks", "list", "--all", *at, "ann")).out.count("\n") == 3
        await invoke("tasks", "cancel", "2", *at, "ann")
        assert "no such tasks" in (await invoke("tasks", *at, "ann")).out

        again = await invoke(
            "timers", "create", "Tea", "--cron", "0 8 * * *", "--timezone", "Europe/Berlin", *at, "ann"
        )
        assert again.out.startswith("Timer 1 sends to ann at 20")
        timers = json.loads((await invoke("timers", "list", "--json", *at, "ann")).out)["timers"]
        assert [(it["timer"], it["cron"]) for it in timers] == [(1, "0 8 * * *")]
        assert (
            "is not a cron expression"
            in (await invoke("timers", "create", "Tea", "--cron", "x", *at, "ann", code=1)).err
        )
        assert (await invoke("timers", "cancel", "1", *at, "ann")).out == "Timer 1 is cancelled.\n"
        await ann.close()
        await bob.close()


async def test_polls_are_made_voted_and_closed_from_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with announced_node(tmp_path, mods=["channels", "discovery", "polls"]) as node:
        monkeypatch.setenv("ROUNDELAY_HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        ann, bob = [await node.person(name) for name in ("ann", "bob")]
        at = ["--url", node.url, "--token", node.owner_token, "--as"]
        assert "There are no polls" in (await invoke("polls", *at, "ann")).out
        create = ("polls", "create", "broadcast", "Launch\x1b?", "yes", "no")
        poll = str(json.loads((await invoke(*create, "--json", *at, "ann")).out)["poll"])
        voted = json.loads((await invoke("polls", "vote", poll, "yes", "--json", *at, "bob")).out)
        assert voted == {"poll": int(poll), "voted": True}
        assert "has no choice" in (await invoke("polls", "vote", poll, "maybe", *at, "ann", code=1)).err
        shown = (await invoke("polls", "show", poll, *at, "ann")).out
        assert shown == f"Poll {poll} by ann in broadcast (open): Launch\\x1b?\n  yes: 1 (bob)\n  no: 0\n"
        secret = str(json.loads((await invoke(*create, "--secret", "--json", *at, "bob")).out)["poll"])
        await invoke("polls", "vote", secret, "no", *at, "ann")
        hidden = json.loads((await invoke("polls", "show", secret, "--json", *at, "bob")).out)
        assert (hidden["voters"], hidden["choices"]) == (1, [{"choice": "yes"}, {"choice": "no"}])
        assert "is final" in (await invoke("polls", "vote", secret, "yes", *at, "ann", code=1)).err
        closed = (await invoke("polls", "close", secret, *at, "bob")).out
        assert closed.endswith("(closed): Launch\\x1b?\n  yes: 0\n  no: 1\n  1 voted in secret.\n")
        left = json.loads((await invoke("polls", "list", "--open", "--thread", "broadcast", "--json", *at, "ann")).out)
        assert [it["poll"] for it in left["polls"]] == [int(poll)]
        assert (await invoke("polls", *at, "ann")).out.count("\n") == 3
        for client in (ann, bob):
            await client.close()
