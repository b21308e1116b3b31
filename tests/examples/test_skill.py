"""Tests of docs/skill/SKILL.md as a coding agent follows it: its files are written, its commands run, and the output
matches the page.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.examples.test_tutorial import Reader, read_steps

SKILL = Path(__file__).parents[2] / "docs/skill/SKILL.md"


async def test_an_agent_that_follows_the_skill_gets_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    (tmp_path / "shop").mkdir()
    reader = Reader(tmp_path / "shop", installs=False)
    try:
        for step in read_steps(SKILL):
            await reader.follow(step)
    finally:
        await reader.end()


def test_skill_is_short_and_its_header_says_when_to_use() -> None:
    source = SKILL.read_text(encoding="utf-8")
    assert len(source.encode()) <= 6 * 1024
    header = re.match(r"---\nname: ([a-z-]+)\ndescription: (.+)\n---\n", source)
    assert header is not None
    assert "Use it when" in header[2]
    assert len(header[2]) <= 1024
