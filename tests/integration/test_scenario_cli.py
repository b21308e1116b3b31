"""Tests of `roundelay scenario run`: its output, its files, its exit codes, and the same scenario on a running
network.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from roundelay.agents.models.scripted import ScriptedModel, say
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.app import serve
from roundelay.network.client import NetworkClient
from roundelay.network.config import NodeConfig
from roundelay.testing import load_scenario, run_live_scenario
from roundelay.testing.report import describe_result
from tests.support.forks import run_roundelay

SCENARIO = """\
scenario: A desk answers
agents:
  desk:
    script:
      - when: {from: mia}
        do: [{tool: ask, args: {agent_ids: [finance], text: '{{ text }}', timeout_s: 60}}]
      - when: {after: ask}
        do: [{send: {to: mia, text: '{{ result }}'}}, {finish: answered}]
  finance:
    script:
      - when: {from: desk}
        do: [{say: '40 EUR'}]
people: [mia]
threads:
  pay: {members: [mia, finance]}
steps:
  - {as: mia, to: desk, send: refund}
  - wait: {message: {from: desk, to: mia}}
  - wait: idle
expect:
  - message: {from: desk, to: mia, contains: 40 EUR, count: 1}
  - order: [mia -> desk, desk -> finance, finance -> desk, desk -> mia]
  - tool: {agent: desk, name: ask, ok: true}
  - caused_by: {message: {from: finance}, root: mia}
  - reaction: {agent: finance, status: finished}
  - mod: {op: channels.members, args: {name: pay}, contains: {members: [finance, mia]}}
  - never_in_prompt: {agent: finance, text: nobody said this}
  - no_dead_letters: true
"""


def write(tmp_path: Path, text: str = SCENARIO) -> Path:
    path = tmp_path / "desk.scenario.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_roundelay("scenario", "run", *arguments, cwd=tmp_path)


@pytest.mark.usefixtures("real_processes")
def test_what_passes_is_a_line_and_exits_with_0(tmp_path: Path) -> None:
    write(tmp_path)
    done = run(tmp_path, "desk.scenario.yaml", "--junit", "report.xml", "--ledger", "ledger.jsonl")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"PASS  A desk answers  \(seed 0, 4 messages in .* s, took .* s\)\n", done.stdout)
    suites = ElementTree.parse(tmp_path / "report.xml").getroot()
    assert [suite.attrib["failures"] for suite in suites] == ["0"]
    assert json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[1])["type"] == "registered"


def test_what_fails_shows_where_and_why_and_how_to_run_it_again(tmp_path: Path) -> None:
    write(tmp_path, SCENARIO.replace("contains: 40 EUR", "contains: 45 EUR"))
    done = run(tmp_path, "desk.scenario.yaml", "--seed", "5", "--junit", "report.xml")
    assert done.returncode == 1
    for told in (
        "FAIL  A desk answers  (seed 5",
        'desk.scenario.yaml:21: expect message: {from: "desk", to: "mia", contains: "45 EUR", count: 1}',
        "nearest: #",
        "came about:\n",
        "What was said:\n",
        "mia -> desk: refund",
        "Again: roundelay scenario run desk.scenario.yaml --seed 5\n",
    ):
        assert told in done.stdout
    [suite] = ElementTree.parse(tmp_path / "report.xml").getroot()
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert failure.attrib["message"].startswith("desk.scenario.yaml:21: expect message")
    again = re.findall(r"Again: roundelay scenario run (.*)", done.stdout)[0]
    assert run(tmp_path, *again.split()).returncode == 1


MANY = f"  - repeat: {{times: 1, until: 1 == 2, steps: [{'wait: idle, ' * 50}]}}"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "people: [mia]",
            "    tools: ['nowhere:add']\npeople: [mia]",
            ":1: the network could not begin\n      config: desk.",
        ),
        ("  - wait: idle", MANY, ":19: step repeat: {times: 1, until"),
    ],
)
def test_what_ends_a_run_is_told_without_all_that_it_holds(tmp_path: Path, old: str, new: str, told: str) -> None:
    write(tmp_path, SCENARIO.replace(old, new))
    done = run(tmp_path, "desk.scenario.yaml")
    assert done.returncode == 1, done.stderr
    assert f"desk.scenario.yaml{told}" in done.stdout
    assert max(map(len, done.stdout.replace(str(tmp_path), "").splitlines())) < 250


def test_what_xml_cannot_hold_stands_in_no_report(tmp_path: Path) -> None:
    text = SCENARIO.replace("scenario: A desk answers", r'scenario: "A \e \uFFFE desk"')
    write(tmp_path, text.replace("contains: 40 EUR", r'contains: "\e \uFFFF"'))
    assert run(tmp_path, "desk.scenario.yaml", "--junit", "report.xml").returncode == 1
    [case] = ElementTree.parse(tmp_path / "report.xml").getroot().iter("testcase")
    assert case.get("name") == "A \ufffd \ufffd desk"


def test_many_seeds_are_one_answer_and_json_tells_each(tmp_path: Path) -> None:
    write(tmp_path)
    done = run(tmp_path, "desk.scenario.yaml", "--seeds", "5", "--seed", "10")
    assert done.returncode == 0
    assert "5 of 5 seeds passed" in done.stdout
    told: dict[str, Any] = json.loads(run(tmp_path, "desk.scenario.yaml", "--seeds", "3", "--json").stdout)
    assert told["passed"]
    assert [it["seed"] for it in told["runs"]] == [0, 1, 2]
    write(tmp_path, SCENARIO.replace("contains: 40 EUR", "contains: 45 EUR"))
    failed: dict[str, Any] = json.loads(run(tmp_path, "desk.scenario.yaml", "--json").stdout)
    [only] = failed["runs"]
    assert (failed["passed"], only["failures"][0]["line"], len(only["transcript"])) == (False, 21, 4)


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        (SCENARIO.replace("people:", "poeple:"), (), 'desk.scenario.yaml:13: unknown key "poeple"; did you mean "people"?'),
        (SCENARIO, ("--live", "ws://127.0.0.1:1/", "--seed", "1"), "without a seed"),
        (SCENARIO, ("--live", "ws://127.0.0.1:1/", "--update-tapes"), "cannot be combined with --live"),
        (SCENARIO.replace("scenario: A", "agents: {}\nscenario: A"), (), "the key"),
    ],
)  # fmt: skip
def test_what_is_wrong_exits_with_2(tmp_path: Path, text: str, arguments: tuple[str, ...], said: str) -> None:
    write(tmp_path, text)
    done = run(tmp_path, "desk.scenario.yaml", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_no_network_there_exits_with_3(tmp_path: Path) -> None:
    write(tmp_path)
    done = run(tmp_path, "desk.scenario.yaml", "--live", "ws://127.0.0.1:1/")
    assert done.returncode == 3
    assert "127.0.0.1:1" in done.stderr


async def test_the_same_scenario_runs_against_a_network_that_is_up(tmp_path: Path) -> None:
    scenario = load_scenario(write(tmp_path))
    async with serve(NodeConfig(port=0, db=tmp_path / "live.db", durability="normal")) as node:
        first = await run_live_scenario(scenario, node.url, token=node.owner_token)
        assert first.passed, describe_result(first)
        assert f"--live {node.url}" in describe_result(first) or first.passed
        second = await run_live_scenario(scenario, node.url, token=node.owner_token)  # only new messages are judged
        assert second.passed, describe_result(second)
        assert len(second.record.messages) == 4
        broken = load_scenario(write(tmp_path, SCENARIO.replace("contains: 40 EUR", "contains: 45 EUR")))
        failed = await run_live_scenario(broken, node.url, token=node.owner_token)
        assert not failed.passed
        assert f"Again: roundelay scenario run {scenario.path} --live {node.url}" in describe_result(failed)


READ_LATER = """\
scenario: Whoever comes late reads what was said
people: [mia]
threads:
  pay: {members: [mia], history: members}
services: [crm]
programs: [bot]
operators: [crm]
steps:
  - {as: mia, in: pay, send: hello}
  - {as: mia, call: network.log, args: {after: 0}, refused: forbidden}
  - {as: bot, call: network.log, args: {after: 0}, refused: forbidden}
  - {as: crm, call: network.log, args: {after: 0}}
expect:
  - mod: {op: channels.list, contains: {channels: [{name: pay, history: members}]}}
"""


async def test_a_thread_of_a_live_run_has_the_history_that_the_file_gives_it(tmp_path: Path) -> None:
    scenario = load_scenario(write(tmp_path, READ_LATER))
    async with serve(NodeConfig(port=0, db=tmp_path / "live.db", durability="normal")) as node:
        for _ in range(2):  # in the second run, the thread already exists
            result = await run_live_scenario(scenario, node.url, token=node.owner_token)
            assert result.passed, describe_result(result)


async def test_an_agent_that_runs_elsewhere_is_not_taken_over_live(tmp_path: Path) -> None:
    scenario = load_scenario(write(tmp_path, SCENARIO.replace("  - wait: idle", "  - restart: finance")))
    async with serve(NodeConfig(port=0, db=tmp_path / "live.db", durability="normal")) as node:
        runner = SimpleAgentRunner("finance", instruction="x", model=ScriptedModel(lambda _: say("40 EUR")))
        async with (
            NetworkClient("finance", node.url, role="reactor", card=runner.describe_card()) as client,
            asyncio.TaskGroup() as group,
        ):
            running = group.create_task(runner.run(client))
            await runner.ready()
            result = await run_live_scenario(scenario, node.url, token=node.owner_token)
            assert result.failure is not None
            assert "finance runs elsewhere" in result.failure.reason
            assert not running.done()
            await runner.stop()


HELD = """\
scenario: A person holds the thread for a while
agents:
  desk: {script: [{do: [{say: I am back}]}]}
people: [mia]
steps:
  - {as: mia, take: desk}
  - {as: mia, to: desk, send: hello}
  - wait: {until: idle, at_most: 20s}
  - {if: {never: {from: desk}}, then: [{as: mia, give: desk}]}
  - wait: {until: idle, at_most: 20s}
expect:
  - message: {from: desk, contains: I am back, count: 1}
"""


async def test_what_waits_in_a_held_thread_is_idle_live(tmp_path: Path) -> None:
    scenario = load_scenario(write(tmp_path, HELD))
    async with serve(NodeConfig(port=0, db=tmp_path / "live.db", durability="normal")) as node:
        result = await run_live_scenario(scenario, node.url, token=node.owner_token)
    assert result.passed, describe_result(result)


BESIDE = """\
scenario: A desk beside another program
agents:
  desk: {script: [{when: {from: mia}, do: [{say: here}]}]}
people: [mia]
steps:
  - {as: mia, to: broadcast, send: hello}
  - wait: {message: {contains: noted}}
  - wait: idle
expect:
  - message: {from: desk, contains: here}
"""


async def test_records_of_another_program_are_passed_over_live(tmp_path: Path) -> None:
    """Live runs also ignore records of a known kind with another content."""
    scenario = load_scenario(write(tmp_path, BESIDE))
    async with (
        serve(NodeConfig(port=0, db=tmp_path / "live.db", durability="normal")) as node,
        NetworkClient("program", node.url, role="reactor") as program,
    ):

        async def react() -> None:
            message = await anext(aiter(program))
            await program.record("r1", "note", {"trigger": "soon"}, record_id="r1-0")
            await program.record("r1", "started", {"trigger": message.seq, "manifest": "all"}, record_id="r1-1")
            for number, kind in enumerate(("model_reply", "tool_started", "waiting", "tool_result", "finished"), 2):
                await program.record("r1", kind, {"turn": "x", "path": []}, record_id=f"r1-{number}")
            await program.send_text("mia", "noted")

        async with asyncio.TaskGroup() as group:
            group.create_task(react())
            result = await run_live_scenario(scenario, node.url, token=node.owner_token)
    assert result.passed, describe_result(result)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  - wait: idle", "  - join: mia", "mia has joined already"),
        ("  - wait: idle", "  - kill: hub", "This scenario did not start hub"),
        ("  - wait: idle", "  - disconnect: mia", "in a simulation only"),
        ("people: [mia]", "people: [mia]\nfaults: {drops: 1}", "faults need a simulation"),
    ],
)
async def test_what_needs_a_simulation_is_refused_live(tmp_path: Path, old: str, new: str, said: str) -> None:
    scenario = load_scenario(write(tmp_path, SCENARIO.replace(old, new)))
    async with serve(NodeConfig(port=0, db=tmp_path / "live.db", durability="normal")) as node:
        result = await run_live_scenario(scenario, node.url, token=node.owner_token)
    assert result.failure is not None
    assert said in result.failure.reason
