"""The team of six that writes a document: its lead is killed twice, and nothing is lost or done twice."""

from __future__ import annotations

import asyncio
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.scripted import Answer, ScriptedModel
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.simulation import Simulation, simulate

FOLDER = Path(__file__).parents[2] / "examples" / "team_document"
RULES = runpy.run_path(str(FOLDER / "rules.py"))
MODS = ["channels", "discovery", "tasks", "notes", "files"]
SECTIONS: dict[str, str] = RULES["SECTIONS"]
TURNS = 12
"""Model requests of a lead that is never killed."""
OUTPUT = """\
The lead was killed.
The lead was killed.
Tools: done by ann
Soil: done by bob
Seeds: done by cat
Water: done by dan
Harvest: done by eve
Publish: done by lead
guide.md: Harvest, Seeds, Soil, Tools, Water
"""


class KilledLead:
    """A lead whose model hangs at some of its requests, until its agent is killed."""

    def __init__(self, hangs_at: tuple[int, ...]) -> None:
        self.hangs_at = hangs_at
        self.requests = 0
        self.hanging = asyncio.Event()

    def make(self) -> SimpleAgentRunner:
        async def think(request: ModelRequest) -> Answer:
            self.requests += 1
            if self.requests in self.hangs_at:
                self.hanging.set()
                await asyncio.Event().wait()
            answer: Answer = RULES["lead"](request)
            return answer

        return SimpleAgentRunner("lead", instruction="x", model=ScriptedModel(think))


def write_guide(*hangs_at: int) -> tuple[dict[str, Any], list[dict[str, Any]], list[Any], str, int]:
    """Let the team write the guide. Return the note, the tasks, the files for zoe, the content of the file, and the
    number of the lead's model requests.
    """

    async def main(simulation: Simulation) -> tuple[dict[str, Any], list[dict[str, Any]], list[Any], str, int]:
        lead = KilledLead(hangs_at)
        await simulation.start_agent(lead.make)
        for name in SECTIONS:
            await simulation.start_agent(lambda name=name: SimpleAgentRunner(  # type: ignore[misc]
                name, instruction="x", model=ScriptedModel(RULES["write"])
            ))  # fmt: skip
        zoe = await simulation.join_person("zoe")
        root = (await zoe.client.send_text("lead", "Write the guide.")).seq
        for _ in hangs_at:
            await lead.hanging.wait()
            lead.hanging.clear()
            await simulation.kill("lead")
            await simulation.restart("lead")
        assert (await zoe.client.wait_until_quiet(root, 600)).is_quiet
        note = await zoe.client.call("notes.read", {"note": "broadcast/guide"})
        tasks = (await zoe.client.call("tasks.list", {"state": ""}))["tasks"]
        received = [it for it in simulation.messages if it.sender_id == "lead" and isinstance(it.content, dict)]
        files = [file for it in received for file in it.content["files"]]
        [saved] = (await zoe.client.call("files.list"))["files"]
        text = (await zoe.client.call("files.read", {"file": saved["file"]}))["text"]
        return note, tasks, files, text, lead.requests

    return simulate(main, mods=MODS)


def check(hangs_at: tuple[int, ...]) -> int:
    note, tasks, files, text, requests = write_guide(*hangs_at)
    assert sorted(it for it in note["text"].splitlines() if it.startswith("##")) == sorted(
        f"## {title}" for title in SECTIONS.values()
    )
    assert text == note["text"]
    assert [(it["title"], it["state"]) for it in tasks] == [
        (title, "done") for title in (*SECTIONS.values(), "Publish")
    ]
    assert len(files) == 1
    return requests


def test_team_writes_its_guide_once_without_kills() -> None:
    assert check(()) == TURNS


@pytest.mark.parametrize(
    "first", [pytest.param(it, marks=() if it % 4 == 1 else pytest.mark.full) for it in range(1, TURNS + 1)]
)
def test_team_writes_its_guide_once_if_its_lead_is_killed_twice(first: int) -> None:
    # The second process repeats the request of the first kill, so the next hang may follow at once.
    for second in (first + 1, first + 3):
        if second <= TURNS:
            assert check((first, second)) > TURNS // 2


@pytest.mark.full
def test_team_of_processes_writes_its_guide_although_its_lead_is_killed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, FOLDER / "team.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", OUTPUT)
