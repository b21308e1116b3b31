"""Child processes of this package: the agents and the gateway of a node, the node of the demo, and a network of
processes in a test.

`Process` is the parent's side: start, stop and kill a child, and read its output lines and reports (`reports`). The other
functions are the child's side. A command that stays ends at a signal (`stop_signals`) or at the end of its input
(`wait_for_input_end`). The parent holds the other end of that input, so no child outlives its parent.
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

from roundelay.display.text import sanitize
from roundelay.network.errors import RoundelayError
from roundelay.network.platforms import handle_signals, list_stop_signals
from roundelay.nodes.reports import SUPERVISED, Report, read_report

START_TIMEOUT_S, STOP_TIMEOUT_S = 30.0, 5.0
DRAIN_TIMEOUT_S = 1.0
"""Time to read the remaining output of a process that has ended, in seconds."""
MAX_LINE_BYTES = 64 * 1024
MAX_LAST_LINES = 20


class NotReady(RoundelayError):
    """A process ended, or did not become ready in time. The sentence quotes its last output."""

    code = "not_ready"


class Process:
    """A child process of this Python, which can run several times, one run after the other.

    ``arguments`` follow the interpreter. Output lines that are no reports go to ``on_line``.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        on_line: Callable[[str], None] = lambda _: None,
        folder: Path | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.name = name
        self.url = ""
        """Address at which the process last reported that it is ready; empty before."""
        self.error = ""
        """Why the current run failed, as the process reported it; empty otherwise."""
        self.is_ready = False
        self.settled = asyncio.Event()
        """Set once the process was ready, or once nobody needs to wait for that any more."""
        self.last_lines: deque[str] = deque(maxlen=MAX_LAST_LINES)
        self._command = [sys.executable, *arguments]
        self._on_line = on_line
        self._folder = folder
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._run_task: asyncio.Task[int] | None = None

    @property
    def pid(self) -> int:
        """Id of the current process, or of the last one; 0 before the first run."""
        return self._process.pid if self._process is not None else 0

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def run(self) -> int:
        """Run the process to its end and return the exit code; the code of a signal is negative.

        On cancellation the process is asked to end, and killed after `STOP_TIMEOUT_S`.
        """
        # The token in the environment is the user's. An agent has its own, in the user's folder.
        user_variables = ("ROUNDELAY_TOKEN", "ROUNDELAY_URL")
        environment = {name: value for name, value in self._environment.items() if name not in user_variables}
        self.last_lines.clear()
        self.error = ""
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command,
            # The child waits for the end of this pipe. The system closes it even if this process is killed.
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # One stream keeps the order of reports and log lines.
            stderr=asyncio.subprocess.STDOUT,
            env=environment | {"PYTHONUNBUFFERED": "1", SUPERVISED: "1"},
            cwd=self._folder,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which then stops the child in order
        )
        assert process.stdout is not None
        reader = asyncio.create_task(self._read_output(process.stdout))
        try:
            # Cancelling this run must not cancel the reader: the lines of the shutdown are still to come.
            await asyncio.shield(reader)
            return await process.wait()
        finally:
            self.is_ready = False
            await _stop(process)
            # Read the output of the shutdown too. A grandchild may hold the pipe open for ever, so this wait is bounded.
            await asyncio.wait([reader], timeout=DRAIN_TIMEOUT_S)
            reader.cancel()

    async def start(self) -> str:
        """Run the process in the background until `stop` or `kill`; return the address at which it is ready.

        Raises `NotReady`.
        """
        # A second start must not count as ready by what the first one reported.
        self.settled.clear()
        self._run_task = asyncio.create_task(self.run())
        settled = asyncio.create_task(self.settled.wait())
        try:
            await asyncio.wait([self._run_task, settled], timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            settled.cancel()
        if not self.settled.is_set():
            if self._run_task.done():
                self._run_task.result()  # raises why the process could not be created
            # A process that hangs at its start would otherwise stay behind without an owner.
            await self.stop()
            output = "\n".join(self.last_lines).strip()
            raise NotReady(f"The process of {self.name} did not get ready: {output or 'it printed nothing'}")
        return self.url

    def kill(self) -> None:
        """End the process as a crash does (SIGKILL)."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """End what `start` began: ask the process first, then kill it. Idempotent."""
        task, self._run_task = self._run_task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def wait(self) -> int:
        """Wait for the end of the process that `start` began, and return its exit code."""
        assert self._run_task is not None
        # Whoever waits may give up without ending the process.
        return await asyncio.shield(self._run_task)

    def handle_report(self, report: Report) -> None:
        """Record a report of the process. Subclasses extend this."""
        if report["report"] == "error":
            self.error = sanitize(report["message"])
        else:
            self.url = report["url"]
            self.is_ready = True
            self.settled.set()

    async def _read_output(self, output: asyncio.StreamReader) -> None:
        async for line in _read_lines(output):
            report = read_report(line)
            # The sentence of a report, because people read these lines, not JSON.
            self.last_lines.append(line if report is None else report["message"])
            if report is None:
                self._on_line(line)
            else:
                self.handle_report(report)


async def _read_lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield lines without their ends. A line over `MAX_LINE_BYTES` comes in pieces."""
    rest = b""
    while data := await stream.read(MAX_LINE_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        # A process that never ends its line would fill the memory of the node.
        if len(rest) > MAX_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End a process: terminate first, kill after `STOP_TIMEOUT_S`."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


# --- the child's side


@contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """Yield an event that the first stop signal sets.

    A second signal ends the process at once, even while its shutdown hangs.
    """
    stopping = asyncio.Event()
    numbers = list_stop_signals()

    def stop() -> None:
        stopping.set()
        # After the first signal the default holds again, so the second one needs no code of this program to work.
        remove()
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)

    with handle_signals(numbers, stop) as remove:
        yield stopping


async def wait_for_input_end() -> None:
    """Wait until the parent has closed, or lost, the other end of standard input."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    try:
        # The parent writes nothing, but a person who started the command by hand may type.
        while await reader.read(4096):
            pass
    finally:
        transport.close()


async def wait_for_first(*waits: Coroutine[object, object, object]) -> None:
    """Wait until the first of these coroutines ends, and cancel the others. Raises what it raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            # The end of one of them is the reason for the stop, so its exception must not be lost.
            task.result()
    finally:
        for task in tasks:
            task.cancel()
