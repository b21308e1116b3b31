"""The command ``roundelay``: run to its end, as a process or in this one, or kept and read line by line as a person would."""

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
"""For one line, or one short command; a machine under load starts Python slowly."""


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


async def run(
    *arguments: str | Path, code: int | None = 0, stdin: str | bytes = b"", cwd: Path | None = None, **environment: str
) -> Done:
    """Run a command to its end; it must give this exit code, if one is named."""
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
    """The same as `run` in this process, which saves the start of another: for commands that load no code of the test's."""
    call = partial(_call, list(map(str, arguments)), stdin, cwd or Path.cwd(), environment)
    done = await asyncio.get_running_loop().run_in_executor(_ONE_AT_A_TIME, call)
    assert code in (None, done.code), f"{arguments} gave {done.code}: {done.out}{done.err}"
    return done


_ONE_AT_A_TIME = ThreadPoolExecutor(1)  # for the streams, the folder and the environment are the whole process's


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
    """A command under way. ``lines`` and ``errors`` is what it has printed; waiting for a line looks there first, from the last one on."""

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
        """Write lines to its input."""
        assert self.process.stdin is not None
        self.process.stdin.write("".join(f"{line}\n" for line in lines).encode())
        await self.process.stdin.drain()

    def close_input(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    async def line(self, pattern: str) -> re.Match[str]:
        """The next line of its output in which the pattern is found; those before it are passed over."""
        return await self._find(pattern, "lines")

    async def error(self, pattern: str) -> re.Match[str]:
        """Likewise of its errors."""
        return await self._find(pattern, "errors")

    async def end(self, code: int = 0) -> None:
        """Wait until it has ended by itself, with this exit code."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                found = await self.process.wait()
                await asyncio.gather(*self._readers)
        except TimeoutError:
            raise AssertionError(f"the command did not end: {self.lines} {self.errors}") from None
        assert found == code, f"exit code {found}: {self.lines} {self.errors}"

    async def stop(self, number: int = signal.SIGTERM, code: int = 0) -> None:
        """Send a signal and wait for the end."""
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
    """A `Command` that is killed at the end if it is still there."""
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
