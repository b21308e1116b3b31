"""Test that a run with tasks, timers and a queue of reservations can be replayed exactly: people's calls, reminders,
and their effects.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("cronsim")
from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.scripted import Action, ScriptedModel, call, say, send
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.network.ledger.log_file import read_log
from roundelay.runs.recording import Recording
from roundelay.runs.replay import ReplayOptions, replay
from roundelay.simulation.network import Simulation, simulate

MODS = ["channels", "discovery", "reservations", "tasks", "timers"]


def script(request: ModelRequest) -> Action:
    if request.turn > 1:
        return say("")
    if "Reminder" in str(request.messages):
        return send("lead", "It is time.")
    return call("tasks_complete", task=1, result="42")


def make_worker() -> SimpleAgentRunner:
    return SimpleAgentRunner("bob", model=ScriptedModel(script), instruction="Work.")


async def play(simulation: Simulation) -> bytes:
    lead, ann = [(await simulation.join_person(name)).client for name in ("lead", "ann")]
    await simulation.start_agent(make_worker)
    await lead.call("timers.create", {"text": "Wake up", "in_minutes": 2, "to": "bob"})
    await lead.call("tasks.create", {"title": "T", "assignee": "bob"})
    await lead.call("tasks.create", {"title": "U", "pool": ["ann"], "depends_on": [1]})
    await lead.call("reservations.reserve_all", {"paths": ["a.py"]})
    await ann.call("reservations.reserve_all", {"paths": ["a.py"]})
    await lead.call("reservations.release", {})
    await asyncio.sleep(300)
    await ann.call("tasks.complete", {"task": 2})
    return simulation.export()


def test_run_with_tasks_timers_and_reservations_replays_exactly(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    file.write_bytes(simulate(play, mods=MODS))
    recording = Recording(*read_log(file))
    report = replay(recording, [make_worker()], ReplayOptions(mods=MODS))
    assert [str(difference) for difference in report.differences] == []
    assert report.rows == len(recording.rows)
    assert sum("It is time." in row.data.decode() for row in recording.rows if row.type == "message") == 1
