"""Start and stop child processes: a node's agents and gateway, the demo's node, and the processes of a test.

`Process` is the parent's side. It starts, stops and kills a child, and reads the child's output lines and reports
(`reports`). The other functions are for the child. A long-running child ends at a signal (`stop_signals`) or when its
input ends (`wait_for_input_end`). The parent holds the other end of that input, so no child outlives its parent.
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
from typing import Protocol

from roundelay.display.text import sanitize
from roundelay.network.errors import RoundelayError
from roundelay.network.platforms import end_after_parent, handle_signals, list_stop_signals
from roundelay.nodes.reports import SUPERVISED, Report, get_reporter, read_report

START_TIMEOUT_S, STOP_TIMEOUT_S = 30.0, 5.0
DRAIN_TIMEOUT_S = 1.0
"""Maximum time to read the remaining output of a process that has ended, in seconds."""
MAX_LINE_BYTES = 64 * 1024
MAX_LAST_LINES = 20


class Child(Protocol):
    """Running process: an `asyncio` process or a `forker.ForkedProcess`."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    @property
    def stdin(self) -> asyncio.StreamWriter | None: ...
    @property
    def stdout(self) -> asyncio.StreamReader | None: ...
    async def wait(self) -> int: ...
    def send_signal(self, signal: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class NotReady(RoundelayError):
    """Raised for a process that ended or did not become ready in time. The error message quotes the last output of the
    process."""

    code = "not_ready"


class Process:
    """Child process that runs this Python interpreter. The process can be started again after it has ended.

    ``arguments`` are the command-line arguments of the interpreter. ``on_line`` receives output lines that are not
    reports.
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
        """Address from the last report that the process is ready; empty before the first report."""
        self.error = ""
        """Reason that the process reported for the failure of the current run, or empty."""
        self.is_ready = False
        self.settled = asyncio.Event()
        """Event that is set when the process is ready, or when it has failed to become ready."""
        self.last_lines: deque[str] = deque(maxlen=MAX_LAST_LINES)
        self._command = [sys.executable, *arguments]
        self._on_line = on_line
        self._folder = folder
        self._environment = environment
        self._process: Child | None = None
        self._run_task: asyncio.Task[int] | None = None

    @property
    def pid(self) -> int:
        """Id of the current or last process, or 0 before the first run."""
        return self._process.pid if self._process is not None else 0

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def run(self) -> int:
        """Run the process until it ends and return the exit code, which is negative if a signal ended the process.

        Cancelling this method terminates the process, and kills it after `STOP_TIMEOUT_S`.
        """
        self.last_lines.clear()
        self.error = ""
        process = self._process = await self._launch()
        assert process.stdout is not None
        reader = asyncio.create_task(self._read_output(process.stdout))
        try:
            # Cancelling this run must not cancel the reader, because the child still prints lines while it shuts down.
            await asyncio.shield(reader)
            return await process.wait()
        finally:
            self.is_ready = False
            await _stop(process)
            # Read the output of the shutdown too. Limit this wait, because a grandchild may hold the pipe open forever.
            await asyncio.wait([reader], timeout=DRAIN_TIMEOUT_S)
            reader.cancel()
            self._release(process)

    async def _launch(self) -> Child:
        """Start the child process and return it."""
        # The token in the environment belongs to the user. Each agent has its own token in the user's folder.
        user_variables = ("ROUNDELAY_TOKEN", "ROUNDELAY_URL")
        environment = {name: value for name, value in self._environment.items() if name not in user_variables}
        return await asyncio.create_subprocess_exec(
            *self._command,
            # The child ends when this pipe is closed. The system closes the pipe even if this process is killed.
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Use one stream for both, to keep the order of reports and log lines.
            stderr=asyncio.subprocess.STDOUT,
            env=environment | {"PYTHONUNBUFFERED": "1", SUPERVISED: str(os.getpid())},
            cwd=self._folder,
            start_new_session=True,  # only the parent receives Ctrl-C and then stops the child cleanly
        )

    def _release(self, process: Child) -> None:
        """Release the resources of an ended process."""

    async def start(self) -> str:
        """Run the process in the background until `stop` or `kill`. Return the address from its ready report.

        Raises `NotReady`.
        """
        # Clear the event, so that a report of the previous run does not count for this run.
        self.settled.clear()
        self._run_task = asyncio.create_task(self.run())
        settled = asyncio.create_task(self.settled.wait())
        try:
            await asyncio.wait([self._run_task, settled], timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            settled.cancel()
        if not self.settled.is_set():
            if self._run_task.done():
                self._run_task.result()  # raises the reason why the process could not be created
            # Stop a process that hangs at its start: otherwise it would keep running without an owner.
            await self.stop()
            output = "\n".join(self.last_lines).strip()
            raise NotReady(f"The process of {self.name} did not get ready: {output or 'it printed nothing'}")
        return self.url

    def kill(self) -> None:
        """End the process abruptly with SIGKILL, like a crash."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """Stop the process that `start` started. Terminate it, and kill it if it does not end in time. Idempotent."""
        task, self._run_task = self._run_task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def wait(self) -> int:
        """Wait until the process that `start` started has ended, and return its exit code."""
        assert self._run_task is not None
        # Shield the task: cancelling this wait must not end the process.
        return await asyncio.shield(self._run_task)

    def handle_report(self, report: Report) -> None:
        """Record a report of the process. Subclasses extend this method."""
        if report["report"] == "error":
            self.error = sanitize(report["message"])
        else:
            self.url = report["url"]
            self.is_ready = True
            self.settled.set()

    async def _read_output(self, output: asyncio.StreamReader) -> None:
        async for line in _read_lines(output):
            report = read_report(line)
            # Store the sentence of a report instead of its JSON, because people read these lines.
            self.last_lines.append(line if report is None else report["message"])
            if report is None:
                self._on_line(line)
            else:
                self.handle_report(report)


async def _read_lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield lines without their line ends. A line longer than `MAX_LINE_BYTES` is yielded in pieces."""
    rest = b""
    while data := await stream.read(MAX_LINE_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        # Limit the buffer: a process that never ends its line would otherwise fill the node's memory.
        if len(rest) > MAX_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


async def _stop(process: Child) -> None:
    """Terminate a process, and kill it if it still runs after `STOP_TIMEOUT_S`."""
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
    """Yield an event that is set by the first stop signal.

    A second stop signal ends the process at once, even if its shutdown hangs.
    """
    stopping = asyncio.Event()
    numbers = list_stop_signals()

    def stop() -> None:
        stopping.set()
        # Restore the default handlers after the first signal, so that a second signal ends a program that hangs.
        remove()
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)

    with handle_signals(numbers, stop) as remove:
        yield stopping


def end_after_supervisor() -> None:
    """Let this process end soon after its supervisor, even if its code is stuck and does not see the end of the input."""
    if supervisor := get_reporter().supervisor_pid:
        end_after_parent(supervisor)


async def wait_for_input_end() -> None:
    """Wait until standard input ends, which means that the parent closed its end or died."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    try:
        # The parent writes nothing. Ignore any input, because a person who started the command by hand may type.
        while await reader.read(4096):
            pass
    finally:
        transport.close()


async def wait_for_first(*waits: Coroutine[object, object, object]) -> None:
    """Wait until the first of these coroutines ends, and cancel the others. Raises the exception of the first
    coroutine."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            # The first coroutine is the reason for the stop, so its exception must not be lost.
            task.result()
    finally:
        for task in tasks:
            task.cancel()
