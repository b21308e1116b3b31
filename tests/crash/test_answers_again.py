"""Tests of answers that a hub delivers again after a crash: an answer that a wait has used starts no reaction,
whatever was killed. Seeded, in simulated time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roundelay.testing import ScenarioResult, make_scenario, run_scenario
from tests.support.counts import Note

SEEDS = 6
DESK = [
    {"when": {"from": "mia"}, "do": [{"tool": "ask", "args": {"agent_ids": ["finance"], "text": "refund?", "timeout_s": 60}}]},
    {"when": {"after": "ask"}, "do": [{"say": "{{ result }}"}]},
    {"when": {"from": "finance"}, "do": [{"send": {"to": "mia", "text": "woken by: {{ text }}"}}, {"finish": "x"}]},
]  # fmt: skip
ASKED = {"as": "mia", "to": "desk", "send": "Refund order 12 please"}
RESTARTS: list[Any] = [{"kill": "hub"}, {"kill": "desk"}, {"restart": "hub"}, {"restart": "desk"}]


def _run(seed: int, *steps: Any, finance: list[Any]) -> ScenarioResult:
    plain = {
        "scenario": "answers again",
        "agents": {"desk": {"script": DESK}, "finance": {"script": finance}},
        "people": ["mia"],
        "steps": [*steps, {"wait": {"until": "idle", "at_most": "120s"}}],
        "expect": [{"no_dead_letters": True}],
    }
    result = run_scenario(make_scenario(plain, Path("it.yaml")), seed=seed)
    assert result.failure is None, result.failure
    return result


def _said(result: ScenarioResult) -> list[str]:
    return [it.text for it in result.record.messages if it.sender_id == "desk" and it.to == "agent:mia"]


def _count_reactions(result: ScenarioResult) -> int:
    return sum(it.agent_id == "desk" for it in result.record.reactions)


@pytest.mark.parametrize("after", ["0ms", "20ms", "60ms", "200ms"])
def test_an_answer_that_was_taken_wakes_nobody_when_hub_and_agent_are_killed(after: str, note: Note) -> None:
    again = 0
    for seed in range(SEEDS):
        answered: dict[str, Any] = {"wait": {"message": {"from": "finance", "to": "desk"}, "at_most": "60s"}}
        result = _run(
            seed, ASKED, answered, {"wait": after}, *RESTARTS, finance=[{"do": [{"say": "Approved, 40 EUR"}]}]
        )
        [said] = _said(result)
        assert "Approved, 40 EUR" in said
        assert _count_reactions(result) == 1
        again += len(result.record.messages)
    note(seeds=SEEDS, messages=again)


def test_an_answer_after_the_time_to_wait_wakes_also_when_hub_and_agent_are_killed() -> None:
    """Here nobody has used the late answer, so it starts a reaction."""
    away = [{"kill": "finance"}, ASKED, {"wait": "70s"}, {"kill": "desk"}, {"restart": "finance"}, {"wait": "10s"}]
    result = _run(1, *away, *RESTARTS[:1], *RESTARTS[2:], finance=[{"do": [{"say": "Approved, 40 EUR"}]}])
    assert _said(result)[1:] == ["woken by: Approved, 40 EUR"]
    assert _count_reactions(result) == 2
