"""Tests of note texts: paragraphs keep their sources, versions can be undone, and diffs apply and finish in bounded
time.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.mods.note_text import (
    Paragraph,
    attribute,
    find_delta,
    find_section,
    go_back,
    join,
    list_links,
    split,
    write_diff,
)

LINES = st.lists(st.sampled_from(["", " ", "a", "b", "# A", "## B", "```", "~~~", "text"]), max_size=14)
TEXTS = LINES.map("\n".join)


def source(version: int) -> Paragraph:
    return Paragraph("", f"by-{version}", version, 0, version)


@given(TEXTS)
def test_paragraphs_joined_are_the_text(text: str) -> None:
    assert "".join(split(text)) == text


@given(st.lists(TEXTS, min_size=1, max_size=6))
def test_undone_steps_give_each_earlier_version(texts: list[str]) -> None:
    versions: list[list[Paragraph]] = [[]]
    for number, text in enumerate(texts, 1):
        versions.append(attribute(text, versions[-1], source(number)))
        assert join(versions[-1]) == text
    paragraphs = versions[-1]
    for before, after in zip(versions[-2::-1], versions[:0:-1], strict=True):
        paragraphs = go_back(paragraphs, find_delta(before, after))
        assert paragraphs == before


def test_moved_paragraph_keeps_its_author() -> None:
    first = attribute("one\n\ntwo", [], source(1))
    second = attribute("new\n\ntwo\n\none", first, source(2))
    assert [(it.text.strip(), it.by) for it in second] == [("new", "by-2"), ("two", "by-1"), ("one", "by-1")]


def test_repeated_paragraph_is_new_beyond_its_first_number() -> None:
    second = attribute("one\n\none", attribute("one", [], source(1)), source(2))
    assert [it.by for it in second] == ["by-1", "by-2"]


@pytest.mark.parametrize(
    ("heading", "section"),
    [
        ("goal", "# Goal\nShip.\n\n## Risks\nNone.\n\n"),
        ("## Risks", "## Risks\nNone.\n\n"),
        ("end", "# End"),
        ("x", None),
    ],
)
def test_section_ends_at_the_next_heading_of_its_level(heading: str, section: str | None) -> None:
    paragraphs = attribute("# Goal\nShip.\n\n## Risks\nNone.\n\n# End", [], source(1))
    found = find_section(paragraphs, heading)
    assert (join(paragraphs[found[0] : found[1]]) if found else None) == section


def test_heading_in_code_is_no_heading() -> None:
    paragraphs = attribute("```\n# Not\n\nx\n```\n\n# Yes\n", [], source(1))
    assert (len(paragraphs), find_section(paragraphs, "Not")) == (2, None)


def test_links_name_notes_of_this_and_other_threads() -> None:
    text = "[[plan]] [[channel:ops/plan|the plan]] [[plan]] [[a/b/c]] [[]] [plain](x)"
    assert list_links(text, "channel:dev", 10) == ["channel:dev/plan", "channel:ops/plan"]


@given(TEXTS, TEXTS)
def test_diff_of_equal_lines_is_empty(one: str, other: str) -> None:
    assert (write_diff(one, other, "a", "b") == "") == (one.splitlines() == other.splitlines())


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs patch")
@pytest.mark.parametrize("changed", [3, 290, 2000])
def test_diff_is_a_patch_of_any_size(changed: int, tmp_path: Path) -> None:
    kept = [f"line {number}" for number in range(40)]
    before = "\n".join([*kept, *(f"old {number}" for number in range(changed)), *kept, ""])
    after = "\n".join([*kept, *(f"new {number}" for number in range(changed + 2)), *kept, ""])
    (tmp_path / "note").write_text(before)
    (tmp_path / "diff").write_text(write_diff(before, after, "note", "note") + "\n")
    subprocess.run(["patch", "-s", "note", "diff"], cwd=tmp_path, check=True)
    assert (tmp_path / "note").read_text() == after


def test_hostile_texts_are_compared_in_bounded_time() -> None:
    one = "\n".join("ab"[(number * number) % 7 % 2] for number in range(32_000))
    other = "\n".join("ab"[(number * 3) % 5 % 2] for number in range(32_000))
    started = time.process_time()
    for before, after in ((one, other), ("x\n" + one[:596], "y\n" + other[:596] + "\nz")):
        write_diff(before, after, "a", "b")
        attribute(after, attribute(before.replace("\n", "\n\n"), [], source(1)), source(2))
    assert time.process_time() - started < 2
