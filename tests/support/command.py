"""Run the command ``roundelay``: to its end as a process, to its end in this process, or interactively line by line."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, chdir
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

from click.testing import CliRunner

from roundelay.cli import main
from tests.support.forks import Forked, start_roundelay

TIMEOUT_S = 60.0
"""Timeout for one line or one short command, in seconds. Python starts slowly on a machine under load."""


@dataclass(frozen=True)
class Done:
    """Result of a command that has ended."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


async def run(
    *arguments: str | Path, code: int | None = 0, stdin: str | bytes = b"", cwd: Path | None = None, **environment: str
) -> Done:
    """Run a command to its end, and check its exit code unless ``code`` is None."""
    process = await _start(arguments, cwd, environment)
    data = stdin.encode() if isinstance(stdin, str) else stdin
    try:
        async with asyncio.timeout(TIMEOUT_S):
            out, err = await process.communicate(data)
    except TimeoutError:
        process.kill()
        out, err = await process.communicate()
        raise AssertionError(f"{arguments} did not end: {out.decode()} {err.decode()}") from None
    done = Done(process.returncode or 0, out.decode(), err.decode())
    assert code in (None, done.code), f"{arguments} gave {done.code}: {done.out}{done.err}"
    return done


async def invoke(
    *arguments: str | Path, code: int | None = 0, stdin: str | bytes = b"", cwd: Path | None = None, **environment: str
) -> Done:
    """Run a command like `run` but in this process, which is faster. Use `invoke` only for commands that load no code
    of the test.
    """
    call = partial(_call, list(map(str, arguments)), stdin, cwd or Path.cwd(), environment)
    done = await asyncio.get_running_loop().run_in_executor(_ONE_AT_A_TIME, call)
    assert code in (None, done.code), f"{arguments} gave {done.code}: {done.out}{done.err}"
    return done


# The streams, the working directory and the environment belong to the whole process.
_ONE_AT_A_TIME = ThreadPoolExecutor(1)


def _call(arguments: list[str], stdin: str | bytes, cwd: Path, environment: Mapping[str, str]) -> Done:
    with (
        patch.dict(os.environ, environment),
        patch.object(sys, "path", [*sys.path]),
        chdir(cwd),
        CliRunner().isolation(stdin) as (out, err, _),
    ):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
        sys.stderr.flush()
    assert isinstance(code, int)
    return Done(code, out.getvalue().decode(), err.getvalue().decode())


class Command:
    """A running command. ``lines`` and ``errors`` hold its output. A wait for a line first searches the lines after
    the last match.
    """

    def __init__(self, process: asyncio.subprocess.Process | Forked) -> None:
        self.process = process
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._seen = {"lines": 0, "errors": 0}
        self._news = asyncio.Condition()
        self._open_streams = 2
        self._readers = [
            asyncio.create_task(self._read(process.stdout, self.lines)),
            asyncio.create_task(self._read(process.stderr, self.errors)),
        ]

    @classmethod
    async def start(cls, *arguments: str | Path, cwd: Path | None = None, **environment: str) -> Self:
        return cls(await _start(arguments, cwd, environment))

    @property
    def pid(self) -> int:
        return self.process.pid

    async def type(self, *lines: str) -> None:
        """Write lines to the command's standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write("".join(f"{line}\n" for line in lines).encode())
        await self.process.stdin.drain()

    def close_input(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    async def line(self, pattern: str) -> re.Match[str]:
        """Return the next output line that matches the pattern, and skip the lines before."""
        return await self._find(pattern, "lines")

    async def error(self, pattern: str) -> re.Match[str]:
        """Return the next line of standard error that matches the pattern."""
        return await self._find(pattern, "errors")

    async def end(self, code: int = 0) -> None:
        """Wait until the command ends without a signal from the test, and check its exit code."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                found = await self.process.wait()
                await asyncio.gather(*self._readers)
        except TimeoutError:
            raise AssertionError(f"the command did not end: {self.lines} {self.errors}") from None
        assert found == code, f"exit code {found}: {self.lines} {self.errors}"

    async def stop(self, number: int = signal.SIGTERM, code: int = 0) -> None:
        """Send a signal, and wait until the command ends."""
        self.process.send_signal(number)
        await self.end(code)

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await asyncio.gather(*self._readers)
        if self.process.stdin is not None:
            self.process.stdin.close()

    async def _find(self, pattern: str, stream: str) -> re.Match[str]:
        lines: list[str] = getattr(self, stream)
        try:
            async with asyncio.timeout(TIMEOUT_S), self._news:
                while True:
                    while self._seen[stream] < len(lines):
                        self._seen[stream] += 1
                        found = re.search(pattern, lines[self._seen[stream] - 1])
                        if found is not None:
                            return found
                    if not self._open_streams:
                        raise AssertionError(f"ended without {pattern!r}: {self.lines} {self.errors}")
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"no line with {pattern!r}: {self.lines} {self.errors}") from None

    async def _read(self, stream: Any, lines: list[str]) -> None:
        async for line in stream:
            async with self._news:
                lines.append(line.decode().rstrip("\n"))
                self._news.notify_all()
        async with self._news:
            self._open_streams -= 1
            self._news.notify_all()


@asynccontextmanager
async def command(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> AsyncIterator[Command]:
    """Start a `Command`, and kill it at the end if it still runs."""
    running = await Command.start(*arguments, cwd=cwd, **environment)
    try:
        yield running
    finally:
        await running.kill()


async def _start(
    arguments: tuple[str | Path, ...], cwd: Path | None, environment: Mapping[str, str]
) -> asyncio.subprocess.Process | Forked:
    pipe = asyncio.subprocess.PIPE
    env = {**os.environ, **environment}
    return await start_roundelay(*arguments, stdin=pipe, stdout=pipe, stderr=pipe, cwd=cwd, env=env)
