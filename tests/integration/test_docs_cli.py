"""Tests of `roundelay docs`, which shows the documents to users without a clone."""

from __future__ import annotations

import asyncio
import os
import pty
import sys
from pathlib import Path

import pytest

from tests.support.command import invoke

ROOT = Path(__file__).parents[2]
PAGER = f"""#!{sys.executable}
import sys
print("paged", len(sys.stdin.read()))
"""


async def test_the_pages_are_listed_with_what_they_are_about() -> None:
    done = await invoke("docs")
    names = {line.split()[0] for line in done.lines}
    pages = {it.relative_to(ROOT / "docs").with_suffix("").as_posix() for it in (ROOT / "docs").rglob("*.md")}
    assert names == {*pages, "asyncapi"}
    assert any(line.split(maxsplit=1) == ["operations", "Run a node"] for line in done.lines)
    assert all(len(line.split()) > 1 for line in done.lines), "a page without a title"


@pytest.mark.parametrize("page", ["agents", "agents.md", "docs/agents.md", "docs/agents.md#tools"])
async def test_in_a_pipe_a_page_is_given_as_it_is(page: str) -> None:
    assert (await invoke("docs", page)).out == (ROOT / "docs/agents.md").read_text(encoding="utf-8")


async def test_path_says_where_the_pages_are() -> None:
    assert Path((await invoke("docs", "--path")).out.strip()) == ROOT / "docs"
    assert Path((await invoke("docs", "decisions/loops", "--path")).out.strip()) == ROOT / "docs/decisions/loops.md"


@pytest.mark.parametrize(
    ("page", "told"),
    [("operation", "did you mean operations?"), ("zzz", "there are a2a, adapters,"), ("../README", "no page")],
)
async def test_a_page_that_is_not_there_is_refused_with_those_that_are(page: str, told: str) -> None:
    done = await invoke("docs", page, code=2)
    assert told in done.err
    assert done.out == ""


async def test_at_a_terminal_a_page_goes_through_the_pager(tmp_path: Path) -> None:
    pager = tmp_path / "pager"
    pager.write_text(PAGER, encoding="utf-8")
    pager.chmod(0o755)
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "roundelay", "docs", "mods",
        stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"PAGER": str(pager), "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    assert await process.wait() == 0
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert shown.split() == ["paged", str(len((ROOT / "docs/mods.md").read_text(encoding="utf-8")))]
