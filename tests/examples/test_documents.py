"""The documents agree with the code: the first program, the prompt, the names of files, and the links."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from roundelay.agents.prompt import ConversationPrompt
from roundelay.network.messages import DirectMessage, MessageThread
from tests.support.forks import run_python

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "examples/README.md",
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))),
)


def test_readme_program_has_at_most_ten_lines_of_its_own() -> None:
    lines = [line for line in read_readme_program().splitlines() if line.strip() and not re.match(r"import|from", line)]
    assert len(lines) <= 10


def test_readme_program_run_again_with_another_text_prints_the_other_text(tmp_path: Path) -> None:
    for text in ("Shall we sing?", "Shall we dance?"):
        program = read_readme_program().replace("Shall we sing?", text)
        done = run_python("-c", program, cwd=tmp_path)
        assert (done.stdout, done.stderr) == (f"ann said: {text}\n", "")


def read_readme_program() -> str:
    [program] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return str(program)


@pytest.mark.full
def test_the_tests_that_contributing_names_run() -> None:
    """The quick lines run as `./dev test` runs them after installation. Mutants run only with `--full`, so here they
    are only collected.
    """
    source = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    lines = [shlex.split(it) for it in re.findall(r"^\$ \./dev test (.+)$", source, re.MULTILINE)]
    full = [[*words, "--collect-only"] for words in lines if "--full" in words]
    quick = [[word for words in lines if "--full" not in words for word in words]]
    assert full
    for words in (*full, *quick):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
            cwd=ROOT, capture_output=True, text=True, timeout=150,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout


def test_the_files_that_contributing_names_are_there() -> None:
    source = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:agents|docs|examples|mods|network|roundelay|tests)/[^` *]+)`", source)
    assert len(named) > 20
    assert [it for it in named if not (ROOT / it).exists()] == []


def test_prompt_of_the_guide_is_the_one_that_agents_get() -> None:
    source = (ROOT / "docs/prompts.md").read_text(encoding="utf-8")
    shown, *_ = re.findall(r"```xml\n(.*?)\n```", source, re.DOTALL)

    def say(seq: int, text: str, sender: str = "zoe", thread_id: str = "direct:ann~zoe") -> DirectMessage:
        return DirectMessage(
            seq=seq, message_id=str(seq), sender_id=sender, sender_kind="human", to="agent:ann", thread_id=thread_id,
            root=seq, hops=0, sent_at=0, content=text,
        )  # fmt: skip

    thread = MessageThread(thread_id="direct:ann~zoe", messages=[say(1, "Good morning")])
    trip = "direct:ann~zoe:trip"
    threads = {
        thread.thread_id: thread,
        trip: MessageThread(thread_id=trip, messages=[say(2, "The hotel is booked.", "ann", trip)]),
    }
    prompt = ConversationPrompt(form="lean").render(threads, thread.thread_id, say(3, "17 and 23"))
    assert prompt == shown


def find_anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_a_file_and_a_heading(page: str) -> None:
    source = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", source):
        name, _, anchor = target.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        assert file.exists(), f"{page} links to {target}"
        assert not anchor or file.suffix != ".md" or anchor in find_anchors(file), f"{page} links to {target}"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "examples/README.md"])
def test_pages_outside_of_docs_have_short_lines(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert [line for line in text.splitlines() if len(line) > 160 and not line.startswith("|")] == []


def test_no_page_is_an_orphan() -> None:
    source = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md", "design.md", "glossary.md"}
    assert [page for page in sorted(pages) if f"({page})" not in source] == []
