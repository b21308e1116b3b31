"""Tests of the vulnerability check in `./dev test --full`: a vulnerability fails it, an unreachable service does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.advisories import judge

SOUND: dict[str, Any] = {"name": "a", "version": "1", "vulns": []}
HOLED: dict[str, Any] = {"name": "b", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
UNKNOWN: dict[str, Any] = {"name": "c", "skip_reason": "Dependency not found"}


@pytest.mark.parametrize(
    ("packages", "is_well", "said"),
    [
        ([SOUND, UNKNOWN], True, "1 of 2 packages: nothing is known"),
        ([SOUND, HOLED, UNKNOWN], False, "2 of 3 packages: b 2: CVE-1"),
        ([UNKNOWN], True, "left out"),
    ],
)
def test_a_hole_fails_and_what_nobody_knows_does_not(packages: list[Any], is_well: bool, said: str) -> None:
    found, told = judge(json.dumps({"dependencies": packages, "fixes": []}))
    assert found is is_well
    assert said in told


@pytest.mark.parametrize("report", ["", "ERROR: no network", "[]"])
def test_a_service_that_cannot_be_reached_fails_nothing(report: str) -> None:
    found, told = judge(report)
    assert found
    assert "cannot be reached" in told
