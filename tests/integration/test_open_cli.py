"""Tests of `roundelay open`, which shows the open items of a conversation, for people and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roundelay.network.client import OpenEntry, OpenItems
from roundelay.runs.open_items import describe_open
from tests.support.announced import announced_node
from tests.support.command import invoke


async def test_open_shows_what_waits_and_whether_it_is_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with announced_node(tmp_path) as node:
        monkeypatch.setenv("ROUNDELAY_HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        ann = await node.person("ann")
        bob = await node.agent("bob", role="reactor")
        seq = (await ann.send("agent:bob", "hello"))["seq"]
        options = ["--url", node.url, "--token", node.owner_token]
        shown = await invoke("open", str(seq), "--wait", "0", *options, code=1)
        assert f"waiting for bob: message not handled yet (#{seq}, " in shown.out
        found = json.loads((await invoke("open", str(seq), "--json", *options)).out)
        assert (found["is_quiet"], found["items"][0]["agent_id"]) == (False, "bob")
        await bob.record("r", "started", {"trigger": seq})
        await bob.record("r", "finished", {"status": "completed"})
        assert "Nothing is open" in (await invoke("open", str(seq), "--wait", "5", *options)).out


def test_lines_name_who_is_waited_for() -> None:
    items = [
        OpenEntry(kind="reaction", seq=1, since=0, agent_id="bob", waits_for=["cat"]),
        OpenEntry(kind="approval", seq=1, since=60_000, agent_id="bob", waits_for=["mia"]),
        OpenEntry(kind="question", seq=2, since=60_000, agent_id="mia"),
        OpenEntry(kind="task", seq=3, since=0, note="tea\x1b"),
    ]
    lines = list(describe_open(OpenItems(1, is_quiet=False, items=items, hidden=2), 180_000))
    assert lines[0] == "bob works on it, waiting for cat (#1)"
    assert lines[1].startswith("bob needs a decision, waiting for mia (#1, 2 min")
    assert lines[2].startswith("waiting for mia: answer required (#2, 2 min")
    assert lines[3] == "task of nobody yet: tea\\x1b (#3)"
    assert lines[4] == "2 more that you may not see"
