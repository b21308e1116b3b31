"""Processes of ours on this machine: the agents of a node, those of the demo, and a network of processes in a test.

From outside, `Process`: started, killed, stopped; its printed lines handed on, one of which says that it is ready. From
inside, for a command that stays: it is to end at a signal (`stop_signals`), or at the end of its input
(`wait_for_input_end`), whose other end whoever started it holds. So no process outlives the one that started it,
however that ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from roundelay.network.errors import RoundelayError
from roundelay.network.platforms import handle_signals, list_stop_signals

START_TIMEOUT_S, STOP_TIMEOUT_S = 30.0, 5.0
LAST_WORDS_S = 1.0
MAX_LINE_BYTES = 64 * 1024
KEPT_LINES = 20


class NotReady(RoundelayError):
    """A process has ended, or has not said in time that it is ready; the sentence has its last words."""

    code = "not_ready"


class Process:
    """A process of this Python: a module with its arguments. It may be run again and again, one at a time.

    ``ready`` is how the line begins that says it is ready; every other one that it prints goes to ``take_line``.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        ready: str,
        take_line: Callable[[str], None],
        folder: Path | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.name = name
        self.is_ready = False
        self.settled = asyncio.Event()
        """It has been ready, so that nobody need wait for it any more."""
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._command = [sys.executable, *arguments]
        self._ready = ready
        self._take_line = take_line
        self._folder = folder
        self._environment = environment
        self._place = ""  # where it says that it is ready
        self._process: asyncio.subprocess.Process | None = None
        self._running: asyncio.Task[int] | None = None

    @property
    def pid(self) -> int:
        """Of the process that runs, or ran last; 0 before the first."""
        return self._process.pid if self._process is not None else 0

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def run(self) -> int:
        """Run it to its end; gives the exit code, that of a signal negative. Cancelled, it is asked to end, and then
        killed."""
        # A token in the environment is its user's, and no agent's: that one is in the user's folder.
        own = ("ROUNDELAY_TOKEN", "ROUNDELAY_URL")
        environment = {name: value for name, value in self._environment.items() if name not in own}
        self.last_lines.clear()
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment | {"PYTHONUNBUFFERED": "1"},
            cwd=self._folder,
            start_new_session=True,  # Ctrl-C is for the process that started it, which then stops it
        )
        assert process.stdout is not None
        hearing = asyncio.create_task(self._hear(process.stdout))
        try:
            await asyncio.shield(hearing)
            return await process.wait()
        finally:
            self.is_ready = False
            await _stop(process)
            # Also what it says at its end; but a process that it has left behind may hold its output open.
            await asyncio.wait([hearing], timeout=LAST_WORDS_S)
            hearing.cancel()

    async def start(self) -> str:
        """Run it beside, until `kill` or `stop`; gives what stands behind the beginning of its ready line. Raises
        `NotReady`."""
        self.settled.clear()
        self._running = asyncio.create_task(self.run())
        settled = asyncio.create_task(self.settled.wait())
        try:
            await asyncio.wait([self._running, settled], timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            settled.cancel()
        if not self.settled.is_set():
            if self._running.done():
                self._running.result()  # raises what kept it from being run at all
            await self.stop()
            words = "\n".join(self.last_lines).strip()
            raise NotReady(f"The process of {self.name} did not get ready: {words or 'it said nothing'}")
        return self._place

    def kill(self) -> None:
        """End it as a crash would (SIGKILL)."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """End what `start` began: asked first, then killed; after `kill` there is nothing left to ask. Idempotent."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.wait([running])

    def on_ready(self) -> None:
        """Called when the process says that it is ready."""

    async def _hear(self, output: asyncio.StreamReader) -> None:
        async for line in _read_lines(output):
            self.last_lines.append(line)
            if line.startswith(self._ready):
                self._place = line.removeprefix(self._ready)
                self.is_ready = True
                self.settled.set()
                self.on_ready()
            else:
                self._take_line(line)


async def _read_lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines without their ends; one that is too long comes in pieces."""
    rest = b""
    while data := await stream.read(MAX_LINE_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End a process: asked at first, then killed. Nothing is left of it."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


# --- from inside


def ready_line(agent_id: str, url: str) -> str:
    """What an agent's process prints when the agent has joined; how its beginning is recognised, if no ``url`` is
    given."""
    return f"Agent {agent_id} is ready at {url}"


@contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """An event that is set by the first signal to stop; a second one ends the process at once, whatever hinders its
    end."""
    stopping = asyncio.Event()
    numbers = list_stop_signals()

    def stop() -> None:
        stopping.set()
        remove()
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)

    with handle_signals(numbers, stop) as remove:
        yield stopping


async def wait_for_input_end() -> None:
    """Wait until nobody holds the other end of standard input any more."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    try:
        while await reader.read(4096):
            pass
    finally:
        transport.close()


async def wait_for_first(*waits: Coroutine[object, object, object]) -> None:
    """Wait until the first of these has ended; the others are cancelled. Raises what it raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
