"""Tests of tools/prose.py: the sentences and commit messages that ./dev lint reports."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from prose import Sentence, check_message, main, read_markdown, read_python, read_script, split_sentences


@pytest.mark.parametrize(
    ("sentence", "pattern"),
    [
        ("Who knows of one makes none in its place.", "starts with a relative clause"),
        ("So long a log may end before what was read of it.", "starts with 'so long', 'as many'"),
        ("Of a conversation that has stopped it is a part.", "starts with 'Of'"),
        ("The server is told of each message.", "says 'told'"),
        ("The file is written anew.", "has a private idiom"),
        ("They are not counted.", "has a pronoun without its noun"),
        ("word " * 40, "is long"),
    ],
)
def test_obscure_sentence_is_reported(sentence: str, pattern: str) -> None:
    assert pattern in Sentence(Path("a.py"), 1, sentence).find_patterns()


@pytest.mark.parametrize(
    "sentence",
    ["Return the threads, newest first.", "Which agents are online?", "Retry after the hub closes the connection."],
)
def test_plain_sentence_is_not_reported(sentence: str) -> None:
    assert Sentence(Path("a.py"), 1, sentence).find_patterns() == []


def test_python_gives_docstrings_and_joined_comments() -> None:
    source = (
        '"""Module text."""\nLIMIT = 1\n"""Largest batch."""\n# One comment\n# on two lines.\nx = 1  # Beside code.\n'
    )
    texts = [text for _, text in read_python(source)]
    assert texts == ["Module text.", "Largest batch.", "One comment on two lines.", "Beside code."]


def test_markdown_gives_paragraphs_items_and_long_cells_but_no_code() -> None:
    source = "# Title\n\nOne paragraph\nof two lines.\n\n- An item here.\n\n```\ncode is skipped\n```\n\n| short | a cell of at least six words |\n"
    assert [text.strip() for _, text in read_markdown(source)] == [
        "One paragraph of two lines.",
        "- An item here.",
        "a cell of at least six words",
    ]


def test_script_gives_its_comments() -> None:
    assert [text for _, text in read_script("// First.\nlet a = 1;\n/* Second. */\n")] == ["First.", "Second. "]


def test_sentences_split_at_ends_before_capitals() -> None:
    assert list(split_sentences("Close the file. Then open a new one: see e.g. the log.")) == [
        "Close the file.",
        "Then open a new one: see e.g. the log.",
    ]


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ("Reject forged snapshots in the shared log", "the body is missing"),
        ("What commands do now\n\nBecause.", "imperative"),
        ("Rejects forged snapshots\n\nBecause.", "imperative"),
        ("Rejected forged snapshots\n\nBecause.", "imperative"),
        ("reject forged snapshots\n\nBecause.", "capital"),
        ("Reject forged snapshots.\n\nBecause.", "period"),
        ("Reject forged snapshots\nBecause.", "blank line"),
        ("Reject " + "very " * 20 + "long subjects\n\nBecause.", "at most 72"),
    ],
)
def test_commit_message_that_breaks_a_rule_is_reported(message: str, fault: str) -> None:
    assert any(fault in found for found in check_message(message))


@pytest.mark.parametrize(
    "subject", ["Reject forged snapshots", "Embed the table", "Process one batch", "Pass the cursor"]
)
def test_good_commit_message_passes(subject: str) -> None:
    assert check_message(f"{subject}\n\nA forged one was applied.\n") == []


def test_rate_above_the_limit_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("Whoever reads this is told of it.\n\nThe hub stores the message.\n", encoding="utf-8")
    assert main([str(page), "--max", "50"]) == 0
    assert main([str(page), "--max", "49"]) == 1
    assert "1 of 2 sentences" in capsys.readouterr().out
