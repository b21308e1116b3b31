"""Tests of docs/scenarios.md: its scenarios run unchanged, and the page names every key of a scenario."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel

from roundelay.testing import form as expectations
from roundelay.testing import form as spec
from roundelay.testing import load_scenario, run_scenario
from roundelay.testing.report import describe_result
from tests.support.pages import read_pages

ROOT = Path(__file__).parents[2]
PAGE = read_pages("scenarios")
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
FIRST, *_ = PYTHON


def test_the_first_test_has_ten_lines_and_passes(tmp_path: Path) -> None:
    (tmp_path / "test_first.py").write_text(FIRST, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:langsmith_plugin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout
    assert len(FIRST.splitlines()) <= 10


def test_the_scenario_passes_and_prints_what_the_page_says(tmp_path: Path) -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "refund.scenario.yaml"
    path.write_text(text, encoding="utf-8")
    result = run_scenario(load_scenario(path))
    assert result.passed, describe_result(result)
    [shown] = re.findall(r"^PASS  .*", PAGE, re.MULTILINE)
    assert shown.partition(", took")[0] == describe_result(result).partition(", took")[0]
    path.write_text(text.replace("contains: 40 EUR", "contains: 45 EUR"), encoding="utf-8")
    told = describe_result(run_scenario(load_scenario(path))).replace(f"{tmp_path}/", "")
    [failing] = re.findall(r"```\nFAIL(.*?)  \.\.\.", PAGE, re.DOTALL)
    for line in failing.strip().splitlines()[1:]:
        assert line in told


def test_every_key_is_named() -> None:
    values = [*vars(spec).values(), *vars(expectations).values()]
    models = {it for it in values if isinstance(it, type) and issubclass(it, BaseModel)}
    own = [it for it in models if it.__module__ in (spec.__name__, expectations.__name__)]
    keys = {field.alias or name for model in own for name, field in model.model_fields.items()}
    missing = [key for key in sorted(keys) if not re.search(rf"(?<![\w-]){key}(?![\w-])", PAGE)]
    assert len(keys) > 60
    assert missing == []
