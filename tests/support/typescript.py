"""The TypeScript client as users get it: built, and installed as a package next to the programs that use it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.once import make_once
from tests.support.page_modules import MAX_LINE, NODE

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "clients" / "typescript"
PROGRAMS = ROOT / "tests" / "clients" / "typescript"
BUILD_TIMEOUT_S = 60
LINE_TIMEOUT_S = 60.0


def use_client(factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the test programs and the client's examples, in which ``roundelay-client`` is installed."""
    return make_once(factory, "typescript", _install)


def _install(folder: Path) -> None:
    package = folder / "node_modules" / "roundelay-client"
    package.mkdir(parents=True)
    shutil.copy(CLIENT / "package.json", package)
    command = [NODE, "--disable-warning=ExperimentalWarning", CLIENT / "build.js", package / "dist"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    copy_programs(folder)


def copy_programs(folder: Path) -> None:
    """Copy the programs next to the installed package. The programs are TypeScript modules, which node can run
    directly.
    """
    (folder / "package.json").write_text('{"type": "module", "private": true}')
    for path in [*PROGRAMS.glob("*.ts"), *(CLIENT / "examples").glob("*.ts")]:
        shutil.copy(path, folder)


class Program:
    """A running program that exchanges lines of JSON or text."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self.errors = ""
        self._heard = asyncio.Event()
        self._reading = asyncio.gather(self._read(), self._read_errors())
        self._reading.add_done_callback(lambda _: self._heard.set())

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")

    def named(self, name: str) -> list[Any]:
        """Return the values that the program printed under this name, in order."""
        return [line[name] for line in self.lines if name in line]

    async def heard(self, name: str, count: int = 1) -> list[Any]:
        """Wait until the program has printed ``count`` values under this name."""
        async with asyncio.timeout(LINE_TIMEOUT_S):
            while len(found := self.named(name)) < count:
                assert not self._reading.done(), f"the program has ended: {self.errors}"
                self._heard.clear()
                await self._heard.wait()
        return found

    async def kill9(self) -> None:
        self.process.kill()
        await self.wait()

    async def wait(self) -> int:
        """Wait for the end of the program and of its output. Return the program's exit code."""
        async with asyncio.timeout(LINE_TIMEOUT_S):
            await self._reading
            return await self.process.wait()

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(json.loads(line) if line.startswith(b"{") else {"text": line.decode().rstrip()})
            self._heard.set()
        self._heard.set()

    async def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors = (await self.process.stderr.read()).decode()


async def start_program(folder: Path, name: str, *args: str, **environment: str) -> Program:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        NODE, name, *args, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe, limit=MAX_LINE, env=os.environ | environment
    )  # fmt: skip
    return Program(process)


@asynccontextmanager
async def running_program(folder: Path, name: str, *args: str, **environment: str) -> AsyncIterator[Program]:
    program = await start_program(folder, name, *args, **environment)
    try:
        yield program
    finally:
        if program.process.returncode is None:
            await program.kill9()
