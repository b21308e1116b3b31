"""Tests of the shipped scenarios: each passes, each fails when its subject is broken, and a seed gives the same
ledger in every process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from roundelay.testing import ScenarioResult, load_scenario, make_scenario, run_scenario
from roundelay.testing.report import describe_result, list_failures
from tests.support.counts import Note
from tests.support.scenarios import FOLDER, SHIPPED, read_plain

ROOT = Path(__file__).parents[2]


def change(plain: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    """Return the scenario with changed values. A key like ``agents__desk__visibility`` names a nested value."""
    made: dict[str, Any] = dict(plain)
    for place, value in changed.items():
        *above, last = place.split("__")
        inside = made
        for key in above:
            inside[key] = dict(inside[key])
            inside = inside[key]
        inside[last] = value
    return made


def failed(result: ScenarioResult) -> list[str]:
    """Return the keys of the failed expectations."""
    return [failure.what.removeprefix("expect ").partition(":")[0] for failure in list_failures(result)]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name.partition(".")[0])
def test_shipped_scenario_passes_whatever_the_seed(path: Path) -> None:
    scenario = load_scenario(path)
    for seed in (scenario.head.seed, 101, 102, 103, 104):
        result = run_scenario(scenario, seed=seed)
        assert result.passed, describe_result(result)


def test_a_support_desk_whose_threads_are_open_to_its_agents_fails() -> None:
    path = FOLDER / "support_desk.scenario.yaml"
    result = run_scenario(
        make_scenario(change(read_plain(path), visibility="all", agents__finance__visibility="all"), path)
    )
    assert set(failed(result)) == {"never_in_prompt"}
    assert "CANARY-91" in describe_result(result)


def test_a_support_desk_whose_finance_never_comes_back_fails() -> None:
    path = FOLDER / "support_desk.scenario.yaml"
    plain = read_plain(path)
    steps = [step for step in plain["steps"] if step.get("restart") != "finance"]
    result = run_scenario(make_scenario(change(plain, steps=steps), path))
    assert {"message", "tool"} <= set(failed(result))


def test_a_village_that_wolves_may_tell_of_the_night_fails() -> None:
    path = FOLDER / "werewolf.scenario.yaml"
    result = run_scenario(
        make_scenario(change(read_plain(path), visibility="all", agents__ash__visibility="all"), path)
    )
    assert {"never", "never_in_prompt"} == set(failed(result))
    assert "read by fern" in describe_result(result)


def test_a_village_with_a_villager_among_the_wolves_fails() -> None:
    path = FOLDER / "werewolf.scenario.yaml"
    members = ["narrator", "ash", "birch", "fern"]
    result = run_scenario(make_scenario(change(read_plain(path), threads__night__members=members), path))
    assert {"never_in_prompt", "thread", "reaction"} <= set(failed(result))


def test_a_research_team_that_is_polite_for_ever_fails() -> None:
    path = FOLDER / "research_team.scenario.yaml"
    plain = read_plain(path)
    polite = [
        {"when": {"from": "critic", "contains": "thank"}, "do": [{"send": {"to": "critic", "text": "Thanks!"}}, {"finish": "x"}]},
    ]  # fmt: skip
    critic = [
        {"when": {"from": "lead", "contains": "nectar"}, "do": [{"say": "It holds."}]},
        {"when": {"from": "lead"}, "do": [{"send": {"to": "lead", "text": "No, thank you!"}}, {"finish": "x"}]},
    ]
    after = plain["agents"]["lead"]["script"]
    after = [*after[:-1], {**after[-1], "do": [{"send": {"to": "critic", "text": "Thanks!"}}, *after[-1]["do"]]}]
    changed = change(plain, agents__lead__script=[*polite, *after], agents__critic__script=critic)
    result = run_scenario(make_scenario(changed, path))
    assert {"cost", "count"} <= set(failed(result))
    assert len(result.record.messages) <= 14  # the loop was stopped


def test_a_research_team_that_spends_too_much_is_stopped() -> None:
    path = FOLDER / "research_team.scenario.yaml"
    result = run_scenario(make_scenario(change(read_plain(path), limits__tokens=500), path))
    told = describe_result(result)
    assert not result.passed
    assert "limits.tokens: the models used" in told


def test_a_bargain_whose_host_talks_in_front_of_both_fails() -> None:
    path = FOLDER / "bargain.scenario.yaml"
    plain = read_plain(path)
    telling, *rest = plain["steps"]
    aloud = {"repeat": {**telling["repeat"], "steps": [{"as": "host", "in": "market", "send": "{{ limits[who] }}"}]}}
    result = run_scenario(make_scenario(change(plain, steps=[aloud, *rest]), path))
    assert {"prompts", "never"} <= set(failed(result))
    assert "buyer must not hold 60 EUR at least: read by buyer at" in describe_result(result)


def test_a_bargain_in_which_everybody_is_asked_each_time_fails() -> None:
    path = FOLDER / "bargain.scenario.yaml"
    plain = read_plain(path)
    [turns] = [step for step in plain["steps"] if "until" in step.get("repeat", {})]
    for step in turns["repeat"]["steps"]:
        step.pop("requires_response", None)
    assert {"count", "reaction"} <= set(failed(run_scenario(make_scenario(plain, path))))


def test_a_shop_whose_customer_confirms_another_order_fails() -> None:
    path = FOLDER / "returns.scenario.yaml"
    plain = read_plain(path)
    steps = [{**it, "decide": "approve"} if "deny" in str(it.get("decide")) else it for it in plain["steps"]]
    result = run_scenario(make_scenario(change(plain, steps=steps), path))
    assert {"state", "tool"} == set(failed(result))
    assert "orders.w2.status changed too" in describe_result(result)


def test_a_line_with_a_way_around_fails(tmp_path: Path) -> None:
    path = FOLDER / "line.scenario.yaml"
    open_line = (FOLDER / "line.yaml").read_text(encoding="utf-8").replace("send: [sander]", "send: [sander, painter]")
    (tmp_path / "line.yaml").write_text(open_line, encoding="utf-8")
    result = run_scenario(make_scenario(change(read_plain(path), node=str(tmp_path / "line.yaml")), path))
    assert {"tool", "never", "prompts"} <= set(failed(result))


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(1, id="1", marks=pytest.mark.full),
        pytest.param(100, id="100", marks=[pytest.mark.full, pytest.mark.timeout(900)]),
    ],
)
def test_a_seed_gives_one_ledger_in_two_processes_with_faults_too(seeds: int, note: Note) -> None:
    command = [sys.executable, "-m", "tests.support.scenarios", "1", str(seeds)]
    running = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for hash_seed in ("1", "2")
    ]
    outcomes = [process.communicate() for process in running]
    assert [(process.returncode, errors) for process, (_, errors) in zip(running, outcomes, strict=True)] == [
        (0, "")
    ] * 2
    first, second = (printed.splitlines() for printed, _ in outcomes)
    assert len(first) == seeds * len(SHIPPED) * 2
    assert first == second
    calm, faulty = ([line.split()[3] for line in first if line.split()[2] == kind] for kind in ("calm", "faults"))
    assert len(set(calm)) == len(calm)  # each seed gives a different run
    hit = len(set(faulty) - set(calm))
    assert hit >= 0.9 * len(faulty)  # sometimes all faults come too late to matter
    broken = [line for line in first if len(line.split()) > 5]
    assert broken == []
    equal = sum(map(str.__eq__, first, second))
    note(scenarios=len(SHIPPED), seeds=seeds, ledgers=len(first), changed_by_faults=hit, equal_in_two_processes=equal)
