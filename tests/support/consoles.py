"""Console that types the command lines of a page, as a reader does, and compares their output with the page.

Commands run in the test's process. Commands that last (`LASTING`) run as forks. They run until the page ends, or until another
`roundelay up` starts. Numbers, ids and tokens differ between runs: if a page shows one as output, the console replaces it in later
lines of the page. A line `...` matches any number of output lines.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.command import TIMEOUT_S, Command, Done, invoke, run
from tests.support.nats import free_port

LASTING = ("agent run", "cluster start", "gateway", "up", "view")
SEPARATE = ("bridge deliver", "bridge mcp", "chat", "mcp")
"""Commands that need the streams of a process, or end their process themselves."""
LISTENING = ("cluster status",)
"""Commands that listen for a while. A node of a busy machine may be late, so they are repeated until all lines are there."""
ANSWERS = re.compile(r"^rights check |^replay .*--lenient")
"""Commands whose exit code is an answer."""
HUB = "wss://hub.example.org:8700/"
PORTS = ("4222", "8222", "8700", "8701")
TOKEN = r"(?<![\w-])[\w-]{43}(?![\w-])"
ID = rf"whsec_\S+|f-[0-9a-f]+-[0-9a-f]+|\b[0-9a-f]{{32}}\b|{TOKEN}"
VARIES = re.compile(rf"{ID}|\b\d\d:\d\d:\d\d\b|\d{{4}}-\d\d-\d\d[T ][\d:+]+|\d+(?:,\d{{3}})*")
NAME = re.compile(rf"{ID}|\b[0-9a-f]{{12}}\b|\b\d+\b|(?<==)\.\.\.")


class Step(NamedTuple):
    """A command line of a page, with the lines to type into it and the output on the page."""

    place: str
    line: str
    typed: list[str]
    shown: list[str]


def read_console(place: str, text: str) -> list[Step]:
    """Return the command lines of a console block; a block without ``$`` is a script, run as a whole. Below a chat, a line that begins with ``/`` is typed into it."""
    if not text.startswith("$ "):
        return [Step(place, text.rstrip("\n"), [], [])]
    steps: list[Step] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            steps.append(Step(place, line.removeprefix("$ "), [], []))
        elif line.startswith("/") and "roundelay chat" in steps[-1].line:
            steps[-1].typed.append(line)
        else:
            steps[-1].shown.append(line)
    return steps


class Console:
    """A shell in a folder."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.environment = environment
        self.names = {port: str(free_port()) for port in PORTS}
        """Numbers, ids and tokens of this run, by those of the page."""
        self.replaced: dict[str, str] = {}
        """Addresses of this run, by those of the page."""
        self._running: list[tuple[str, Command]] = []

    async def close(self) -> None:
        for _, running in reversed(self._running):
            if running.process.returncode is None:
                running.process.send_signal(signal.SIGTERM)
                await running.process.wait()
            await running.kill()

    async def follow(self, step: Step) -> None:
        line = re.sub(r"(^|[ (])(?:\.\.?/dev roundelay|\.\./dev(?= up)|uvx roundelay)(?= )", r"\1roundelay", step.line)
        variables, words = ({}, []) if "\n" in line else self._split(line)
        if "$(" in line or words[:1] != ["roundelay"]:
            await self._run_shell(line, step)
            return
        if is_one_of(words[1:], LASTING):
            await self._open(words[1:], variables, step, is_beside=line.endswith(" &"))
            return
        typed = re.match(r"echo (.+?) \|", line)
        stdin = [*shlex.split(typed[1])] if typed else step.typed
        done = await self._invoke(words[1:], variables, "".join(f"{it}\n" for it in stdin))
        if token := re.search(TOKEN, done.out):
            self.names["..."] = token[0]
        while step.shown and is_one_of(words[1:], LISTENING) and len(done.lines) < len(step.shown):
            done = await self._invoke(words[1:], variables)
        self._compare(step, done.lines, done)

    def _split(self, line: str) -> tuple[dict[str, str], list[str]]:
        """Return the variables and the words of our command in a line, with the names of this run."""
        _, bar, piped = line.partition("| roundelay ")
        line = f"roundelay {piped}" if bar else line
        words = [self._rename(it) for it in shlex.split(line.removesuffix(" &"), comments="  #" in line)]
        variables = {}
        while words and (found := re.fullmatch(r"([A-Z_]+)=(.*)", words[0])):
            variables[found[1]] = found[2]
            del words[0]
        return variables, words

    def _rename(self, text: str) -> str:
        for address, own in self.replaced.items():
            text = text.replace(address, own)
        return NAME.sub(lambda found: self.names.get(found[0], found[0]), text)

    async def _invoke(self, words: Sequence[str], variables: dict[str, str], stdin: str = "") -> Done:
        execute = run if is_one_of(words, SEPARATE) else invoke
        done = await execute(*words, code=None, stdin=stdin, cwd=self.folder, **{**self.environment, **variables})
        allowed = (0, 1) if ANSWERS.search(" ".join(words)) else (0,)
        assert done.code in allowed, f"{words} gave {done.code}: {done.out}{done.err}"
        return done

    async def _run_shell(self, line: str, step: Step) -> None:
        if folder := re.fullmatch(r"cd (\S+)", line):
            self.folder /= folder[1]
            return
        line = self._rename(line)
        for inner in re.findall(r"\$\(roundelay ([^)]+)\)", line):
            done = await self._invoke(shlex.split(inner), {})
            (self.folder / ".printed").write_text(done.out, encoding="utf-8")
            line = line.replace(f"$(roundelay {inner})", "$(cat .printed)")
        shell = await asyncio.create_subprocess_exec(
            *("bash", "-c", f"set -eu\n{line}"),
            cwd=self.folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, errors = await asyncio.wait_for(shell.communicate(), TIMEOUT_S)
        assert shell.returncode == 0, f"{step.place} {line}: {errors.decode()}"
        assert not re.search(r'"error"|"messages":\[\]', out.decode()), f"{step.place} {line}: {out.decode()}"
        self._compare(step, out.decode().splitlines(), errors.decode())

    async def _open(self, words: list[str], variables: dict[str, str], step: Step, *, is_beside: bool) -> None:
        name = " ".join(words)
        if not step.shown and name in (it for it, _ in self._running):
            return  # the command still runs in another terminal
        if words[0] == "up" and not is_beside:
            for other, running in self._running:
                if other.startswith("up") and running.process.returncode is None:
                    await running.stop()
        if words[0] == "gateway":
            words += ["--port", "0"]
        elif words[0] == "cluster":
            words += ["--port", self.names["4222"]]
        ports = {"ROUNDELAY_PORT": "0", "ROUNDELAY_INTEROP_PORT": "0"}
        command = await Command.start(*words, cwd=self.folder, **{**self.environment, **ports, **variables})
        self._running.append(("" if is_beside else name, command))
        if not step.shown:
            await command.line(".")
        if url := re.search(r"ready at (wss?://\S+)", "\n".join(command.lines)):
            self.replaced[HUB] = url[1]
        printed = [await self._wait_for(command, shown) for shown in step.shown]
        self._compare(step, printed, command.errors)

    async def _wait_for(self, command: Command, shown: str) -> str:
        """Return the line of a command that lasts which equals a line of the page."""
        pattern = f"^{f'(?:{VARIES.pattern})'.join(map(re.escape, VARIES.split(shown)))}$"
        reading = [asyncio.create_task(it(pattern)) for it in (command.line, command.error)]
        done, rest = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        return done.pop().result().string

    def _compare(self, step: Step, printed: list[str], context: object) -> None:
        """Check that a command printed the lines that the page shows, and take over their numbers, ids and tokens."""
        rest = iter(printed)
        is_cut = False
        for shown in step.shown:
            if shown.strip() == "...":
                is_cut = True
                continue
            line = next(rest, None)
            while is_cut and line is not None and normalize(line) != normalize(shown):
                line = next(rest, None)
            is_cut = False
            message = f"{step.place} $ {step.line}\nshows {shown!r}, but printed {line!r}: {context}"
            assert line is not None, message
            assert normalize(line) == normalize(shown), message
            self.names.update(zip(NAME.findall(shown), NAME.findall(line), strict=True))
        if step.shown and not is_cut:
            assert list(rest) == [], f"{step.place} $ {step.line} prints more lines: {context}"


def normalize(line: str) -> str:
    return VARIES.sub("N", line)


def is_one_of(words: Sequence[str], commands: Sequence[str]) -> bool:
    return any(words[: len(it.split())] == it.split() for it in commands)
