"""A reader who follows the pages listed in docs/tutorial.md from the first line to the last, in an empty folder.

A block whose first line names a file is written to that file. In a console block, `$` starts a command, which must
succeed and print the lines below it. `...` marks omitted lines. `PLACE>` is typed into the open chat, and the
lines below it must appear there. `roundelay up` and a chat without a pipe stay open. Another `roundelay up` stops the
previous one.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import forks
from tests.support.command import Command
from tests.support.fake_openai import FakeOpenAI, Reply, calls, text

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs/tutorial.md"
PACKAGE = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "MANIFEST.in",
    "adapters",
    "agents",
    "docs",
    "interop",
    "mods",
    "network",
    "roundelay",
    "templates",
    "web",
)
OFFLINE = {  # pip reads 0 as the value of `build_isolation`; one of the test plugins warns about a missing setting
    "PIP_NO_INDEX": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_BUILD_ISOLATION": "0",
    "PIP_NO_COMPILE": "1",  # a command compiles only the modules that it loads
    "PYTEST_ADDOPTS": "-p no:asyncio -p no:langsmith_plugin",
}
SIMPLE = re.compile(r"roundelay [^|&;()$<>]*")
INSTALLING = re.compile(r"python3 -m venv|\. \.venv/bin/activate|pip install")
VARIES = [
    (re.compile(r"\b\d\d:\d\d:\d\d\b"), "<time>"),
    (re.compile(r"\b\d+\.\d+ ?s\b"), "<seconds>"),
    (re.compile(r"\b[0-9a-f]{32}\b|\b[0-9a-f]{12}\b"), "<id>"),
    (re.compile(r"\(\d+ \+ \d+ tokens\)|\d+ prompt \+ \d+ completion tokens(, about \$[\d.]+)?"), "<tokens>"),
    (re.compile(r"\d+\.\d+ MiB"), "<size>"),
    (re.compile(r"Wrote (\S+): \S+roundelay\.db"), r"Wrote \1: roundelay.db"),
]


class Step(NamedTuple):
    """A command, a line typed into the chat, or (if neither) output that appears without input. The shown lines
    follow.
    """

    line: str
    """Page and line number."""
    kind: str
    words: str
    shown: list[str]


def list_pages() -> list[Path]:
    names = re.findall(r"^\d+\. \[.*\]\((start/.*\.md)\)$", TUTORIAL.read_text(encoding="utf-8"), re.MULTILINE)
    pages = [TUTORIAL.parent / name for name in names]
    assert {*pages} == {*(TUTORIAL.parent / "start").glob("*.md")}
    return pages


def read_steps(page: Path) -> Iterator[Step]:
    """Yield the steps of a reader on one page, in order."""
    source = page.read_text(encoding="utf-8")
    for block in re.finditer(r"^```(\w+)\n(.*?)^```$", source, re.DOTALL | re.MULTILINE):
        line = source.count("\n", 0, block.start()) + 2
        if block[1] != "console":
            named = re.match(r"# (\S+)\n", block[2])
            assert named, f"{page.name}:{line} is a file without a name in its first line"
            yield Step(f"{page.name}:{line}", "file", named[1], [block[2]])
            continue
        step = None
        for number, written in enumerate(block[2].splitlines(), line):
            begins = re.match(r"(\$|[\w:]+>) (.*)", written)
            if begins is not None or step is None:
                if step is not None:
                    yield step
                kind = "chat" if begins is None or begins[1] != "$" else "command"
                words, shown = (begins[2], []) if begins else ("", [written])
                step = Step(f"{page.name}:{number}", kind, words, shown)
            else:
                step.shown.append(written)
        assert step is not None
        yield step


class Reader:
    """Reader who follows a page and compares the output with what the page shows. With ``installs=False``, the reader
    uses the installation that runs the tests, and forks simple commands."""

    def __init__(self, folder: Path, *, installs: bool) -> None:
        self._installs = installs
        self._state = folder / "state"
        self._state.write_text("", encoding="utf-8")
        self._start = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = str(free.getsockname()[1])
        self._numbers: dict[str, str] = {}
        self._node: Command | None = None
        self._chat: Command | None = None

    async def follow(self, step: Step) -> None:
        words = re.sub(r"(?<=roundelay why )\d+", lambda found: self._numbers[found[0]], step.words)
        words = words.replace(":8700", f":{self._port}")
        if step.kind == "file":
            (self._folder / step.words).write_text(step.shown[0], encoding="utf-8")
        elif step.kind == "chat":
            assert self._chat is not None
            if step.words:
                await self._chat.type(step.words)
            await self._read_chat(step)
        elif words.startswith("roundelay up"):
            if self._node is not None:
                await self._leave_chat()
                await self._node.stop()
            self._node = await self._open(words)
            for shown in step.shown:
                found = await self._node.line("Roundelay is ready")
                self._compare(step, [shown], [found.string])
        elif words.startswith("roundelay chat"):
            self._chat = await self._open(words)
            await self._read_chat(step)
        else:
            if words.startswith("roundelay agent try"):
                self._numbers.clear()  # the numbers of the previous network
            self._compare(step, step.shown, await self._run(step, words))
            if words.startswith("roundelay agent try"):
                self._numbers.clear()

    async def end(self) -> None:
        for running in (self._chat, self._node):
            if running is not None:
                await running.kill()

    @property
    def _folder(self) -> Path:
        """Return the reader's current folder, which the last `cd` has set."""
        return Path(self._state.with_suffix(".cwd").read_text().strip()) if self._state.stat().st_size else self._start

    def _environment(self) -> dict[str, str]:
        path = os.environ["PATH"] if self._installs else f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**os.environ, "ROUNDELAY_PORT": self._port, "PATH": path, **OFFLINE}

    async def _launch(self, words: str, stdin: int, stderr: int) -> forks.Process:
        """Start a command in a shell with the state of the one before, or as a fork."""
        exported = f". {shlex.quote(str(self._state))}; "
        pipe = asyncio.subprocess.PIPE
        if self._installs or not SIMPLE.fullmatch(words):
            return await asyncio.create_subprocess_exec(
                *("bash", "-c", exported + words),
                cwd=self._folder, env=self._environment(), stdin=stdin, stdout=pipe, stderr=stderr,
            )  # fmt: skip
        shell = await asyncio.create_subprocess_exec(
            *("bash", "-c", f"{exported} env -0"), env=self._environment(), stdout=pipe
        )
        named = (await shell.communicate())[0].decode().split("\0")
        environment = dict(it.split("=", 1) for it in named if it)
        _, *arguments = shlex.split(words)
        return await forks.start_roundelay(
            *arguments, cwd=self._folder, env=environment, stdin=stdin, stdout=pipe, stderr=stderr
        )

    async def _run(self, step: Step, words: str) -> list[str]:
        """Run a line in a shell that continues with the folder and variables of the previous one."""
        if not self._installs and INSTALLING.match(words):
            return step.shown
        state, where = shlex.quote(str(self._state)), shlex.quote(str(self._state.with_suffix(".cwd")))
        script = f"{{ {words}\n}}; code=$?; export -p > {state}; pwd > {where}; exit $code"
        is_forked = not self._installs and SIMPLE.fullmatch(words)
        process = await self._launch(
            words if is_forked else script, asyncio.subprocess.DEVNULL, asyncio.subprocess.STDOUT
        )
        out, _ = await process.communicate()
        assert process.returncode == 0, f"{step.line}: $ {words}\n{out.decode()}"
        if words.startswith("python3 -m venv"):
            lend_dependencies(self._folder / ".venv")
        return out.decode().splitlines()

    async def _open(self, words: str) -> Command:
        is_forked = not self._installs and SIMPLE.fullmatch(words)
        pipe = asyncio.subprocess.PIPE
        process = await self._launch(words if is_forked else f"exec {words}", pipe, pipe)
        return Command(process)

    async def _read_chat(self, step: Step) -> None:
        """Check that the lines appear in the chat in this order. Skip lines about working agents, which a terminal
        shows elsewhere.
        """
        assert self._chat is not None
        for shown in step.shown:
            while True:
                came = (await self._chat.line("")).string
                if not came.startswith("* ") or shown.startswith("* "):
                    break
            self._compare(step, [shown], [came])

    async def _leave_chat(self) -> None:
        if self._chat is not None:
            self._chat.close_input()
            await self._chat.end()
            self._chat = None

    def _compare(self, step: Step, shown: list[str], came: list[str]) -> None:
        told = f"{step.line}: $ {step.words}\nshown:\n" + "\n".join(shown) + "\ncame:\n" + "\n".join(came)
        rest, is_open = list(came), False
        for line in shown:
            if line == "...":
                is_open = True
                continue
            while is_open and rest and not self._is_same(line, rest[0]):
                del rest[0]
            assert rest, told
            assert self._is_same(line, rest[0]), told
            self._learn(line, rest.pop(0))
            is_open = False
        assert is_open or not rest, told

    def _is_same(self, shown: str, came: str) -> bool:
        """Compare two lines but ignore times, sizes and IDs. A message number on the page must always map to the same
        number.
        """
        numbers = zip(re.findall(r"[#:](\d+)\b", mask(shown)), re.findall(r"[#:](\d+)\b", mask(came)), strict=False)
        if any(self._numbers.get(one, other) != other for one, other in numbers):
            return False
        return re.sub(r"([#:])\d+", r"\1N", mask(shown)) == re.sub(r"([#:])\d+", r"\1N", mask(came))

    def _learn(self, shown: str, came: str) -> None:
        for one, other in zip(re.findall(r"#(\d+)", shown), re.findall(r"#(\d+)", came), strict=True):
            self._numbers[one] = other


def mask(line: str) -> str:
    for pattern, name in VARIES:
        line = pattern.sub(name, line)
    return line


def lend_dependencies(environment: Path) -> None:
    """Let a new environment find Roundelay's dependencies and build tools in the environment of the tests, so that
    nothing is downloaded. Roundelay itself is installed.
    """
    [packages] = environment.glob("lib/python*/site-packages")
    for old in packages.glob("setuptools*"):  # an older Python brings a version that cannot build the project
        shutil.rmtree(old)
    (packages / "dependencies.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n", encoding="utf-8")


def play_model(body: dict[str, Any]) -> Reply:
    """Return the reply of the page's real model."""
    asked = re.search(r'Call the tool "confirm" with the word "(.*)"', str(body["messages"][-1]["content"]))
    if asked is not None:  # doctor's question
        return calls([("confirm", {"word": asked[1]})])
    if not any(it["role"] == "tool" for it in body["messages"]):
        return calls([("find_order", {"number": "12"})])
    return text("Order 12, a blue teapot, came back to us on Monday.")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("installs", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.skipif(shutil.which("openssl") is None, reason="the page makes a certificate by the openssl command")
async def test_a_reader_of_the_tutorial_gets_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installs: bool
) -> None:
    clone = tmp_path / "roundelay"
    clone.mkdir()
    for name in PACKAGE if installs else ():
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, clone / name)
    reader = Reader(tmp_path, installs=installs)
    async with FakeOpenAI(play_model) as model:
        monkeypatch.setenv("OPENAI_BASE_URL", model.base_url)
        try:
            for page in list_pages():
                for step in read_steps(page):
                    await reader.follow(step)
        finally:
            await reader.end()
        offered = [it["function"]["name"] for it in model.requests[-1]["tools"]]
    assert "search_history" in offered, "memory brings it"
    if installs:
        assert sys.executable not in (tmp_path / "shop/.venv/bin/roundelay").read_text(encoding="utf-8")
