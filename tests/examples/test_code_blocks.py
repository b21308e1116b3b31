"""Every code block of every page runs: programs print what the page says, files load, and command lines exist.

A block that cannot run has a comment above it: ``<!-- not run: REASON -->``. It must still be valid in its language.
Console blocks are run by test_console_blocks.py, the tutorial's pages by test_tutorial.py, and the skill by test_skill.py.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from roundelay.agents.models.scripted import load_rules
from roundelay.agents.team import build_runner, load_agents
from roundelay.cli import cli
from roundelay.network.config import load_yaml, resolve_config
from roundelay.terminal.chat_commands import COMMANDS
from roundelay.testing import load_scenario
from tests.support.programs import run_program

ROOT = Path(__file__).parents[2]
GENERATED = {"docs/api.md"}
PACKAGES = ("adapters", "agents", "interop", "mods", "network", "roundelay", "web")
LANGUAGES = {"", "caddyfile", "console", "json", "mermaid", "nginx", "python", "sh", "text", "toml", "xml", "yaml"}
TOOLS = 'def add(a: int, b: int) -> int:\n    """Add."""\n    return a + b\n'


def find_pages() -> list[Path]:
    documents = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(documents)]
    return [page for page in pages if str(page.relative_to(ROOT)) not in GENERATED]


def find_played_pages() -> set[str]:
    tutorial = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    pages = re.findall(r"^\d+\. \[.*\]\((start/.*\.md)\)$", tutorial, re.MULTILINE)
    return {"docs/skill/SKILL.md", *(f"docs/{page}" for page in pages)}


@dataclass(frozen=True)
class Block:
    """A code block of a page, with the reason why it does not run, and the outputs that the text below it states."""

    page: str
    line: int
    language: str
    text: str
    reason: str | None
    outputs: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read_blocks(page: str, source: str) -> list[Block]:
    blocks = []
    pattern = (
        r"(?:^<!-- not run: (?P<reason>.*?) -->\n)?^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$"
    )
    for match in re.finditer(pattern, source, re.DOTALL | re.MULTILINE):
        below = re.split(r"^#|^```\w", source[match.end() :], maxsplit=1, flags=re.MULTILINE)[0]
        outputs = re.findall(r"It prints `([^`]+)`", below)
        if shown := re.match(r"\s*It prints:\s+```(?:text)?\n(.*?)```", source[match.end() :], re.DOTALL):
            outputs += shown[1].splitlines()
        text = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
        line = source.count("\n", 0, match.start()) + 1
        blocks.append(Block(page, line, match["language"], text, match["reason"], tuple(outputs)))
    return blocks


def read_docstring_blocks(path: Path) -> list[Block]:
    """Return the literal blocks in a module's docstrings that are YAML or Python. Drawings are skipped."""
    blocks = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for match in re.finditer(r"::\n\n((?: {4}.*\n|\n)+)", f"{ast.get_docstring(node)}\n"):
            text = re.sub(r"^ {4}", "", match[1], flags=re.MULTILINE)
            language = "python" if re.match(r"(from|import|async|def|class|@)\b", text) else "yaml"
            if language == "python" or re.match(r"(- )?\w+: ", text):
                blocks.append(Block(str(path.relative_to(ROOT)), getattr(node, "lineno", 1), language, text, None))
    return blocks


def find_all_blocks() -> list[Block]:
    played = find_played_pages()
    pages = [(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")) for page in find_pages()]
    blocks = [block for name, source in pages if name not in played for block in read_blocks(name, source)]
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "::\n\n" in path.read_text(encoding="utf-8"):
                blocks += read_docstring_blocks(path)
    return blocks


BLOCKS = find_all_blocks()


def in_language(language: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", [it for it in BLOCKS if it.language == language], ids=str)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change to an empty folder with the modules that blocks import. Each block imports its own copies."""
    (tmp_path / "mytools.py").write_text(TOOLS, encoding="utf-8")
    known = set(sys.modules)
    for variable in ("OPENAI_API_KEY", "MISTRAL_API_KEY", "FAR_TOKEN", "SHOP_TOKEN"):
        monkeypatch.setenv(variable, "unused")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def test_pages_have_blocks_in_known_languages_only() -> None:
    assert len([it for it in BLOCKS if it.language == "python"]) > 15
    assert len([it for it in BLOCKS if it.language == "yaml"]) > 25
    assert [str(it) for it in BLOCKS if it.language not in LANGUAGES] == []


def test_docstrings_have_code_in_literal_blocks_only() -> None:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    code = re.compile(r"^ *(?:>>> |```\w*$)", re.MULTILINE)
    assert [str(path) for path in paths if code.search(path.read_text(encoding="utf-8"))] == []


def test_block_that_does_not_run_says_why() -> None:
    reasons = [(str(it), it.reason) for it in BLOCKS if it.reason is not None]
    assert reasons
    assert [place for place, reason in reasons if len(reason.split()) < 3] == []


@in_language("python")
def test_program_of_page_prints_what_the_page_says(block: Block, folder: Path) -> None:
    code = compile(block.text, str(block), "exec")
    if block.reason is not None:
        return
    defines_tests = re.search(r"^def test_", block.text, re.MULTILINE) is not None
    if defines_tests:  # the block is a file for pytest, and test_scenario_documents.py runs it
        return
    printed = run_program(block.text, str(block)).splitlines()
    assert bool(printed) == ("print" in code.co_names or "print(" in block.text)
    source = (ROOT / block.page).read_text(encoding="utf-8")
    assert [line for line in printed if block.page != "README.md" and line not in source] == []
    assert [line for line in block.outputs if line not in printed] == []


def load_node_file(path: Path) -> None:
    config, _ = resolve_config(path, {}, {})
    load_agents(config.agents)


def load_agents_file(path: Path) -> None:
    for spec in load_agents(path):
        assert build_runner(spec).agent_id == spec.id


def choose_loader(block: Block) -> Callable[[Path], object]:
    keys = load_yaml_keys(block.text)
    if "scenario" in keys:
        return load_scenario
    if keys == {"rules"}:
        return load_rules
    return load_agents_file if "id" in keys or keys == {"agents"} else load_node_file


def load_yaml_keys(text: str) -> set[str]:
    return set(re.findall(r"^(?:- )?(\w+):", text, re.MULTILINE))


@in_language("yaml")
def test_file_of_page_loads(block: Block, folder: Path) -> None:
    path = folder / "block.yaml"
    path.write_text(block.text, encoding="utf-8")
    load_yaml(path)
    if block.reason is not None:
        return
    for module in re.findall(r"adapter: '(\w+):", block.text):  # the program above on the page
        shown = [it.text for it in BLOCKS if it.page == block.page and it.language == "python"]
        (folder / f"{module}.py").write_text(
            next(it for it in shown if re.search(rf"^{module} = ", it, re.MULTILINE)), encoding="utf-8"
        )
    choose_loader(block)(path)


@in_language("json")
def test_json_of_page_is_valid(block: Block) -> None:
    for line in block.text.splitlines() if block.text.count("\n{") else [block.text]:
        json.loads(line)


@in_language("toml")
def test_toml_of_page_is_valid(block: Block) -> None:
    tomllib.loads(block.text)


@dataclass(frozen=True)
class Line:
    """A command line of a page, from a console block or from the text. The text may leave arguments out."""

    page: str
    text: str
    is_complete: bool

    def __str__(self) -> str:
        return f"{self.page} {self.text}"


def find_lines() -> list[Line]:
    """Return all lines of console blocks that a reader types, and the command lines in the text."""
    found = []
    for path in find_pages():
        page, source = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        for block in read_blocks(page, source):
            if block.language == "console":
                found += [Line(page, text, True) for text in re.findall(r"^\$ (.+)$", block.text, re.MULTILINE)]
        inline = re.findall(r"`((?:\./dev|roundelay) [^`]+)`", source)
        found += [Line(page, " ".join(it.split()), False) for it in inline]
    return found


LINES = find_lines()


def find_commands(text: str) -> list[list[str]]:
    """Return the words of each of the project's commands in a shell line."""
    found = []
    if re.match(r"echo '", text) and "|" not in text:
        return []
    for match in re.finditer(r"(?:^|[|;(&] ?|\$\(|\w=\S+ )((?:(?:\.\.?/)?dev|uvx roundelay|roundelay) [^|;)&]+)", text):
        words = shlex.split(match[1].replace("uvx ", ""), comments="  #" in text)
        end = words.index(">") if ">" in words else len(words)
        found.append([it for it in words[:end] if it != "&"])
    return found


OURS = [(line, words) for line in LINES for words in find_commands(line.text)]


def test_lines_of_consoles_are_valid_for_a_shell() -> None:
    script = "\n".join(line.text for line in LINES if not line.text.startswith(("./dev", "roundelay")))
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_lines_name_extras_and_files_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    texts = [line.text for line in LINES]
    named = {name for text in texts for it in re.findall(r"pip install '\.\[(.*?)\]'", text) for name in it.split(",")}
    assert named
    assert named <= extras.keys()
    files = [it for text in texts for it in re.findall(r"^python (examples/\S+)", text)]
    assert [it for it in files if not (ROOT / it).is_file()] == []


def test_chat_commands_of_pages_exist() -> None:
    typed = [
        (str(block), word)
        for path in find_pages()
        for block in read_blocks(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
        if block.language == "console"
        for word in re.findall(r"^(?:[\w:]+> )?/([a-z]+)\b(?!/)", block.text, re.MULTILINE)
    ]
    assert len(typed) > 3
    assert [it for it in typed if it[1] not in COMMANDS] == []


def test_command_lines_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    developer_commands = subprocess.run([ROOT / "dev", "help"], capture_output=True, text=True, timeout=60).stdout
    for number, (line, words) in enumerate(OURS):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        try:
            check_command(line, words, developer_commands)
        except (AssertionError, click.ClickException) as error:
            error.add_note(f"{line.page}: {' '.join(words)}")
            raise


def check_command(line: Line, words: list[str], developer_commands: str) -> None:
    program, *words = words
    if program.endswith("dev"):
        assert re.search(rf"^  {words[0]}\b", developer_commands, re.MULTILINE)
        if words[0] == "roundelay":
            del words[0]
        elif words[0] != "demo":
            return  # the line runs a foreign command
    command: click.Command = cli
    # Use the settings of the group: click stores its computed settings on the command, for every later test too.
    context = click.Context(cli, info_name="roundelay", **cli.context_settings)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, found, words = command.resolve_command(context, words)  # raises for an unknown command
        assert found is not None
        command = found
        context = click.Context(command, info_name=name, parent=context)
    if not line.is_complete or isinstance(command, click.Group):
        command.make_parser(context).parse_args(list(words))  # raises for an unknown option
        return
    for word in words:
        if re.fullmatch(r"[\w./-]+\.(db|jsonl|md|yaml)", word):
            Path(word).parent.mkdir(parents=True, exist_ok=True)
            Path(word).touch()
    with command.make_context(context.info_name, list(words), parent=context.parent):  # raises for a wrong argument too
        pass
