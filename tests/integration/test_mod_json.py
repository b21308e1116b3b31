"""Tests that every command of an included mod prints one JSON object with `--json`, without terminal codes even in a
pipe.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cronsim")
from roundelay.app import serve
from roundelay.cli import cli
from roundelay.network.client import NetworkClient
from roundelay.network.config import NodeConfig
from tests.integration.test_json_output import OF_MODS, json_commands
from tests.support.command import invoke

NOTE = "broadcast/plan"
COMMANDS: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("files put", ("plan.md",), {"name": "plan.md", "version": 1}),
    ("files get", ("{file}", "copy.md"), {}),
    ("files list", (), {"files": 1}),
    ("notes create", (NOTE, "plan.md"), {"note": NOTE, "version": 1}),
    ("notes append", (NOTE, "More\x1b."), {"note": NOTE, "version": 2}),
    ("notes write", (NOTE, "plan.md", "--expected", "2"), {"version": 3}),
    ("notes show", (NOTE,), {"note": NOTE, "version": 3}),
    ("notes history", (NOTE,), {"versions": 3}),
    ("notes diff", (NOTE, "1", "2"), {}),
    ("notes search", ("plan",), {"notes": 1}),
    ("notes list", (), {"notes": 1}),
    ("polls create", ("broadcast", "Launch\x1b?", "yes", "no"), {}),
    ("polls vote", ("{poll}", "yes"), {"voted": True}),
    ("polls show", ("{poll}",), {"is_open": True, "voters": 1}),
    ("polls close", ("{poll}",), {"is_open": False, "choices": 2}),
    ("polls list", (), {"polls": 1}),
    ("tasks create", ("Write\x1b",), {"task": 1, "state": "open"}),
    ("tasks claim", ("1",), {"task": 1, "state": "claimed", "holder": "mia"}),
    ("tasks progress", ("1", "Half."), {"task": 1}),
    ("tasks release", ("1",), {"state": "open"}),
    ("tasks complete", ("1", "All."), {"state": "done"}),
    ("tasks reopen", ("1",), {"state": "open"}),
    ("tasks fail", ("1", "No."), {"state": "failed"}),
    ("tasks show", ("1",), {"title": "Write\x1b"}),
    ("tasks list", ("--state", "failed"), {"tasks": 1}),
    ("tasks reopen", ("1",), {"state": "open"}),
    ("tasks cancel", ("1",), {"state": "cancelled"}),
    ("timers create", ("Tea\x1b", "--in", "30"), {"timer": 1, "to": "mia"}),
    ("timers list", (), {"timers": 1}),
    ("timers cancel", ("1",), {"is_cancelled": True}),
    ("open", ("{message}",), {"is_quiet": True}),
]
"""Commands, their arguments, and fields of their JSON. A number means the length of a list. ``{file}`` and similar
names are fields of earlier answers.
"""


def test_table_has_every_json_command_of_the_mods() -> None:
    assert {command for command, _, _ in COMMANDS} == {it for it in json_commands(cli) if it.startswith(OF_MODS)}


async def test_commands_of_mods_print_one_json_object(tmp_path: Path) -> None:
    (tmp_path / "plan.md").write_text("# Plan\n", encoding="utf-8")
    mods = ["channels", "discovery", "files", "notes", "polls", "tasks", "timers"]
    config = NodeConfig(port=0, db=tmp_path / "node.db", durability="normal", mods=mods)
    async with serve(config) as node:
        environment = {"ROUNDELAY_URL": node.url, "ROUNDELAY_TOKEN": node.owner_token, "ROUNDELAY_AS": "mia"}
        async with NetworkClient("mia", node.url, kind="human", token=node.owner_token) as mia:
            found = {"message": str((await mia.broadcast("Good morning")).seq)}
        for command, arguments, fields in COMMANDS:
            filled = [it.format(**found) for it in arguments]
            done = await invoke(*command.split(), *filled, "--json", cwd=tmp_path, **environment)
            assert "\x1b" not in done.out, command
            value = json.loads(done.out)
            shown = {name: value[name] for name in fields}
            for name, expected in fields.items():
                is_count = isinstance(shown[name], list) and isinstance(expected, int)
                assert (len(shown[name]) if is_count else shown[name]) == expected, (command, name)
            found |= {name: str(value[name]) for name in ("file", "poll") if name in value}
