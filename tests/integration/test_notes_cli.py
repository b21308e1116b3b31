"""Test of `roundelay notes` with a running node, as shown in docs/cli/state.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.test_up import node_up
from tests.support.command import invoke


@pytest.mark.usefixtures("real_processes")
async def test_notes_are_created_read_and_changed_from_the_command_line(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (tmp_path / "roundelay.yaml").write_text("port: 0\nmods: [channels, discovery, notes]\n")
    plan = tmp_path / "plan.md"
    plan.write_text("# Plan\nMonday.\n\n## Risks\nNone.\n")
    note = "broadcast/plan"
    async with node_up(tmp_path_factory.mktemp("elsewhere"), tmp_path / "roundelay.yaml") as (_, url):
        by = ("--url", url, "--as", "mia", "--as-kind", "human")
        assert "There are no notes" in (await invoke("notes", "list", *by)).out
        assert (await invoke("notes", "create", note, str(plan), *by)).out == f"{note} has version 1.\n"
        await invoke("notes", "append", note, "The pump leaks.", "--heading", "Risks", *by)
        shown = await invoke("notes", "show", note, "--sources", "--heading", "Risks", *by)
        assert shown.out == "[mia, version 1]\n## Risks\nNone.\n[mia, version 2]\nThe pump leaks.\n"
        plan.write_text("# Plan\nTuesday.\n")
        refused = await invoke("notes", "write", note, str(plan), "--expected", "1", *by, code=1)
        assert "+Tuesday." in refused.out
        assert "has version 2 by now, so nothing was stored" in refused.err
        await invoke("notes", "write", note, str(plan), "--expected", "2", *by)
        assert (await invoke("notes", "diff", note, "1", "3", *by)).lines[3:6] == [" # Plan", "-Monday.", "-"]
        versions = json.loads((await invoke("notes", "history", note, "--json", *by)).out)["versions"]
        assert [it["version"] for it in versions] == [3, 2, 1]
        assert (await invoke("notes", "show", note, "--version", "1", *by)).lines[1] == "Monday."
        assert note in (await invoke("notes", "search", "tuesday", *by)).out
        listed = json.loads((await invoke("notes", "--json", *by)).out)["notes"]
        assert [(it["note"], it["version"]) for it in listed] == [(note, 3)]
        wrong = await invoke("notes", "create", "plan", str(plan), *by, code=2)
        assert "Write THREAD/NAME" in wrong.err
