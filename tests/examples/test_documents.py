"""What the README and the guides show runs as it stands there, and prints what they say it prints."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

from roundelay.agents.prompt import ConversationPrompt
from roundelay.agents.team import build_runner, load_agents
from roundelay.cli import cli
from roundelay.network.messages import DirectMessage, MessageThread

ROOT = Path(__file__).parents[2]
AGENT_PAGES = ("agents", "approvals", "budgets", "middleware", "models", "prompts", "teams", "tools")
PAGES = (
    "README.md",
    "docs/adapters.md",
    *(f"docs/{name}.md" for name in AGENT_PAGES),
    *(f"docs/middleware/{page.name}" for page in sorted((ROOT / "docs/middleware").glob("*.md"))),
    "docs/costs.md",
    "docs/mods.md",
    "examples/README.md",
)
COMMAND_PAGES = (
    *PAGES,
    "CONTRIBUTING.md",
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "api.md"),
)


@dataclass(frozen=True)
class Block:
    """A code block of a page; ``prints`` is what stands under it as its output."""

    page: str
    line: int
    language: str
    text: str
    is_run: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def find_blocks(language: str) -> list[Any]:
    found = []
    for page in PAGES:
        source = (ROOT / page).read_text(encoding="utf-8")
        for match in re.finditer(
            r"(?P<mark><!-- needs a model -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$",
            source,
            re.DOTALL | re.MULTILINE,
        ):
            if match["language"] == language:
                line = source.count("\n", 0, match.start()) + 1
                found.append(
                    pytest.param(Block(page, line, language, match["text"], match["mark"] is None), id=f"{page}:{line}")
                )
    return found


@pytest.mark.parametrize("block", find_blocks("python"))
def test_python_block_runs(block: Block, tmp_path: Path) -> None:
    if not block.is_run:
        compile(block.text, str(block), "exec")
        return
    done = subprocess.run([sys.executable, "-c", block.text], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
    for line in done.stdout.splitlines():
        source = (ROOT / block.page).read_text(encoding="utf-8")
        assert block.page == "README.md" or line in source, f"{block} prints a line that the page does not show: {line}"


def test_readme_program_has_at_most_ten_lines_of_its_own() -> None:
    [block] = [param.values[0] for param in find_blocks("python") if param.id.startswith("README.md")]
    lines = [line for line in block.text.splitlines() if line.strip() and not re.match(r"import|from", line)]
    assert len(lines) <= 10


def test_readme_program_run_again_with_another_text_prints_the_other_text(tmp_path: Path) -> None:
    [block] = [param.values[0] for param in find_blocks("python") if param.id.startswith("README.md")]
    for text in ("Shall we sing?", "Shall we dance?"):
        program = block.text.replace("Shall we sing?", text)
        done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert (done.stdout, done.stderr) == (f"ann said: {text}\n", "")


@pytest.mark.parametrize("block", find_blocks("yaml"))
def test_yaml_block_is_an_agent(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "not asked")
    monkeypatch.setenv("MISTRAL_API_KEY", "not asked")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mytools.py").write_text('def add(a: int, b: int) -> int:\n    """Add."""\n    return a + b\n')
    if "adapter:" in block.text:  # names what the page shows before it
        shown = [it.values[0].text for it in find_blocks("python") if it.values[0].page == block.page]
        (tmp_path / "bees.py").write_text(next(it for it in shown if "bees = " in it), encoding="utf-8")
    (tmp_path / "agent.yaml").write_text(block.text, encoding="utf-8")
    [spec] = load_agents(tmp_path / "agent.yaml")
    assert build_runner(spec).agent_id == spec.id
    for name in ("mytools", "bees"):
        sys.modules.pop(name, None)


def find_commands() -> list[tuple[str, list[str]]]:
    """Every command line of the pages: those in console blocks, and those that stand in the text."""
    found = []
    for page in COMMAND_PAGES:
        source = (ROOT / page).read_text(encoding="utf-8")
        lines = re.findall(r"^\$ (?:[A-Z_]+=\S+ |.+ \| )?((?:\./dev|roundelay) .+)$", source, re.MULTILINE)
        lines += [" ".join(it.split()) for it in re.findall(r"`((?:\./dev|roundelay) [^`]+)`", source)]
        found += [(page, shlex.split(line)) for line in lines]
    return found


@pytest.mark.parametrize(("page", "words"), find_commands(), ids=lambda it: it if isinstance(it, str) else " ".join(it))
def test_command_line_exists(page: str, words: list[str]) -> None:
    program, *words = words
    if program == "./dev":
        usage = subprocess.run([ROOT / "dev", "help"], capture_output=True, text=True, timeout=60).stdout
        assert re.search(rf"^  {words[0]}\b", usage, re.MULTILINE)
        if words[0] == "roundelay":
            del words[0]
        elif words[0] != "demo":
            return  # not a command of ours beneath
    command: click.Command = cli
    # With its settings: click keeps what it made of them on the command, for every test after this one too.
    context = click.Context(cli, info_name="roundelay", **cli.context_settings)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, found, words = command.resolve_command(context, words)  # raises for an unknown command
        assert found is not None
        command = found
        context = click.Context(command, info_name=name, parent=context)
    command.make_parser(context).parse_args(list(words))  # raises for an unknown option


@pytest.mark.full
def test_the_tests_that_contributing_names_run() -> None:
    """As `./dev test` runs them once it has installed what they need. Mutants run in `--full`; here they are only found."""
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


LINKED_PAGES = sorted(
    {*map(str, COMMAND_PAGES), *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))}
)


@pytest.mark.parametrize("page", LINKED_PAGES)
def test_links_lead_to_a_file_and_a_heading(page: str) -> None:
    source = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", source):
        name, _, anchor = target.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        assert file.exists(), f"{page} links to {target}"
        assert not anchor or file.suffix != ".md" or anchor in find_anchors(file), f"{page} links to {target}"


def test_no_page_is_an_orphan() -> None:
    source = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md", "design.md", "glossary.md"}
    assert [page for page in sorted(pages) if f"({page})" not in source] == []
