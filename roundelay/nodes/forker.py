"""Fork the processes of a node's agents from one process that has already imported their code (Linux).

Importing all agent code takes a second of CPU time and 60 MB. A forked process starts in milliseconds and shares the
memory of the imports. The forking process, the *forker*, is itself forked from ``roundelay up`` before that command has
an event loop, threads or open files. The forker starts no threads and imports no code of users. Each new process
therefore imports the current code of an agent's tools.

`Forker` is the node's side. A request contains the arguments of a command and the descriptors of its streams. The
forker answers with the process id, and later with the exit code. If the forker fails, the node starts new interpreters
instead.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, NoReturn

from roundelay.agents.recorded import build_adapters
from roundelay.network.platforms import (
    can_fork,
    end_with_parent,
    fork_process,
    kill_process,
    lead_session,
    list_stop_signals,
    name_process,
    signal_process,
)
from roundelay.nodes.processes import STOP_TIMEOUT_S, Child, Process
from roundelay.nodes.reports import SUPERVISED

MAX_REQUEST_BYTES = 64 * 1024
PRELOADED = ("roundelay.nodes.agent_host", "roundelay.nodes.run_agents", "roundelay.commands.agent")
END_CHECK_S = 0.02
LOST = -signal.SIGTERM
"""Exit code for a process whose end the forker could not report."""


class ForkerLost(Exception):
    """Raised when the forking process has ended."""


class ForkedProcess:
    """Process that the forker started. Implements `processes.Child`."""

    def __init__(self, forker: Forker) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.stdin: asyncio.StreamWriter | None = None
        self.stdout: asyncio.StreamReader | None = None
        self._forker = forker
        self._output: asyncio.BaseTransport | None = None
        self._changed = asyncio.Event()  # set when the process has started or ended, or could not be created
        self._errno = 0

    async def connect(self, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        """Connect to the process's standard input and output."""
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.connect_write_pipe(
            lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), stdin
        )
        self.stdin = asyncio.StreamWriter(transport, protocol, None, loop)
        reader = self.stdout = asyncio.StreamReader()
        self._output, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), stdout)

    def close(self) -> None:
        """Close this node's ends of the streams. A child of the ended process may still hold the other ends open."""
        if self._output is not None:
            self._output.close()
        if self.stdin is not None:
            self.stdin.close()

    async def wait_for_start(self) -> None:
        """Wait for the process id. Raises `ForkerLost`, and `OSError` if the process cannot be created."""
        await self._changed.wait()
        self._changed.clear()
        if self._errno:
            raise OSError(self._errno, os.strerror(self._errno))
        if not self.pid:
            raise ForkerLost
        if self.returncode is not None:
            self._changed.set()

    async def wait(self) -> int:
        while self.returncode is None:
            await self._changed.wait()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            self._forker.send_signal(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def record(self, *, pid: int = 0, code: int | None = None, errno: int = 0) -> None:
        self.pid = pid or self.pid
        self._errno = errno
        if code is not None:
            self.returncode = code
        self._changed.set()


class Forker:
    """Node's side of the forker. Call `start` first, then `watch` in the event loop."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.pid = pid
        self.is_lost = False
        self._sock = sock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: list[ForkedProcess] = []  # in the order of the requests
        self._running: dict[int, ForkedProcess] = {}

    @classmethod
    def start(cls, preloaded: Sequence[str] = ()) -> Forker | None:
        """Fork the forker from this process. Return None on systems that cannot fork processes.

        Call this before the process has an event loop or threads. ``preloaded`` names additional modules to import.
        """
        # A forked process contains only the thread that forked it, so a lock that another thread held would stay
        # locked.
        if not can_fork() or threading.active_count() > 1:
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = fork_process()
        if pid == 0:
            ours.close()
            _serve_and_exit(theirs, [*PRELOADED, *preloaded])
        theirs.close()
        ours.setblocking(False)
        return cls(ours, pid)

    def watch(self) -> None:
        """Read the forker's answers in the running event loop until `close`."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._sock.fileno(), self._read)

    def close(self) -> None:
        """End the forker. Its processes end because their input ends. Idempotent."""
        if self._loop is not None and self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
        self._sock.close()

    def join(self) -> None:
        """Wait until the forker has ended, which is after its processes have ended."""
        self.close()
        with suppress(ProcessLookupError, ChildProcessError):
            signal_process(self.pid, signal.SIGTERM)  # the forker may still be importing modules
            os.waitpid(self.pid, 0)

    async def spawn(self, arguments: Sequence[str], name: str) -> ForkedProcess:
        """Run the command with these arguments in a forked process. Raises `ForkerLost` and `OSError`."""
        if self.is_lost:
            raise ForkerLost
        process = ForkedProcess(self)
        try:
            await self._request(process, {"arguments": list(arguments), "name": name})
            await process.wait_for_start()
        except BaseException:
            process.close()  # closing the input of the process ends the process
            raise
        return process

    async def _request(self, process: ForkedProcess, request: dict[str, object]) -> None:
        stdin, our_stdin = os.pipe()
        our_stdout, stdout = os.pipe()
        try:
            await process.connect(os.fdopen(our_stdin, "wb", 0), os.fdopen(our_stdout, "rb", 0))
            data = json.dumps(request).encode()
            while True:
                try:
                    socket.send_fds(self._sock, [data], [stdin, stdout])
                    break
                except BlockingIOError:  # many processes start at once, and the forker is still busy
                    await asyncio.sleep(0.01)
            self._starting.append(process)
        except OSError as error:
            raise ForkerLost from error
        finally:
            os.close(stdin)
            os.close(stdout)

    def send_signal(self, pid: int, number: int) -> None:
        """Ask the forker to send a signal. As the parent, only the forker knows that the id still belongs to the
        process."""
        try:
            self._sock.send(json.dumps({"signal": number, "pid": pid}).encode())
        except BlockingIOError:  # many signals are sent at once, and the forker is still busy
            assert self._loop is not None
            self._loop.call_later(END_CHECK_S, self._send_signal_again, pid, number)
        except OSError:
            self._lose()

    def _send_signal_again(self, pid: int, number: int) -> None:
        if pid in self._running:  # after the process has ended, the system may give its id to another process
            self.send_signal(pid, number)

    def _read(self) -> None:
        while True:
            try:
                data = self._sock.recv(MAX_REQUEST_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lose()
                return
            answer = json.loads(data)
            if "errno" in answer:
                self._starting.pop(0).record(errno=answer["errno"])
            elif "code" not in answer:
                process = self._starting.pop(0)
                self._running[answer["pid"]] = process
                process.record(pid=answer["pid"])
            else:
                self._running.pop(answer["pid"]).record(code=answer["code"])

    def _lose(self) -> None:
        """Stop all processes and treat them as ended, because their end can no longer be reported."""
        self.is_lost = True
        self.close()
        for process in (*self._starting, *self._running.values()):
            if process.pid:
                with suppress(ProcessLookupError):
                    signal_process(process.pid, signal.SIGTERM)
            if process.stdin is not None:
                process.stdin.close()
            process.record(code=LOST)
        self._starting.clear()
        self._running.clear()


class ForkingProcess(Process):
    """Process that the node's forker starts. Without a forker, the process is a new interpreter."""

    _forker: Forker | None = None

    async def _launch(self) -> Child:
        if self._forker is not None and not self._forker.is_lost:
            with suppress(ForkerLost):
                # the forker needs only the arguments after `python -m roundelay`
                return await self._forker.spawn(self._command[3:], self.name)
        return await super()._launch()

    def _release(self, process: Child) -> None:
        if isinstance(process, ForkedProcess):
            process.close()


# --- the forker's side


def _serve_and_exit(sock: socket.socket, modules: Sequence[str]) -> NoReturn:
    """Import the modules and fork a process for each request, until the node closes the socket. Never returns."""
    code = 1
    try:
        lead_session()
        name_process("forker")
        _replace_streams()
        for name in ("ROUNDELAY_TOKEN", "ROUNDELAY_URL", SUPERVISED):
            # The token in the environment belongs to the user. Each agent has its own token in the user's folder.
            os.environ.pop(name, None)
        for module in modules:
            __import__(module)
        with suppress(ImportError):  # preload ctypes for `end_with_parent`, which every process calls
            __import__("ctypes")
        build_adapters()
        # The garbage collector skips frozen objects, so their memory remains shared.
        gc.collect()
        gc.freeze()
        request = _serve(sock)
        code = 0 if request is None else _run_command(request["arguments"], request["name"])
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        # The calling frames belong to the command that forked this process. Only that command may run their cleanup.
        os._exit(code)


def _replace_streams() -> None:
    """Redirect standard input and output to the null device, because the terminal belongs to the node."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nothing, number)
    os.close(nothing)


def _serve(sock: socket.socket) -> dict[str, object] | None:
    """Fork a process for each request, and report the end of each process. Return the request in the child process, and
    None when the node closes the socket."""
    running: set[int] = set()
    waking, woken = socket.socketpair()
    for end in (waking, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # A service manager signals the whole process group. Ignore these signals: if the forker ended, agents that are
    # still stopping would be killed.
    stop_handlers = {number: signal.signal(number, signal.SIG_IGN) for number in list_stop_signals()}
    forker = os.getpid()
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is woken:
                    woken.recv(4096)
                    _report_ended(sock, running)
                    continue
                try:
                    data, descriptors, _, _ = socket.recv_fds(sock, MAX_REQUEST_BYTES, 2)
                except ConnectionResetError:  # the node was killed before it read all answers
                    data, descriptors = b"", []
                if not data:
                    _end_children(running, sock)
                    return None
                request = json.loads(data)
                if "signal" in request:
                    if request["pid"] in running:
                        signal_process(request["pid"], request["signal"])
                    continue
                # Block the signals instead of ignoring them: an ignored signal that arrives right after the fork would
                # be lost.
                signal.pthread_sigmask(signal.SIG_BLOCK, stop_handlers)
                try:
                    pid = fork_process()
                # the system has no more processes or memory, but the running agents must continue
                except OSError as error:
                    pid, answer = -1, {"errno": error.errno or 0}
                if pid == 0:
                    end_with_parent(forker)
                    signal.set_wakeup_fd(-1)
                    for number, handler in (stop_handlers | {signal.SIGCHLD: signal.SIG_DFL}).items():
                        signal.signal(number, handler)
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_handlers)
                    os.dup2(descriptors[0], 0)
                    os.dup2(descriptors[1], 1)
                    os.dup2(descriptors[1], 2)  # one stream keeps the order of reports and log lines
                    for end in (sock, waking, woken):
                        end.close()
                    for descriptor in descriptors:
                        os.close(descriptor)
                    return dict(request)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_handlers)
                for descriptor in descriptors:
                    os.close(descriptor)
                if pid > 0:
                    running.add(pid)
                    answer = {"pid": pid}
                _report(sock, answer)


def _report_ended(sock: socket.socket, running: set[int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        running.discard(pid)
        _report(sock, {"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _end_children(running: set[int], sock: socket.socket) -> None:
    """Wait for the children, which stop when their input ends. Kill children that do not stop in time."""
    until = time.monotonic() + STOP_TIMEOUT_S
    while running and time.monotonic() < until:
        _report_ended(sock, running)
        time.sleep(END_CHECK_S)
    for pid in running:
        kill_process(pid)
        os.waitpid(pid, 0)


def _report(sock: socket.socket, answer: dict[str, int]) -> None:
    with suppress(OSError):  # the node was killed, and the caller reads the end of the socket next
        sock.send(json.dumps(answer).encode())


def _run_command(arguments: object, name: object) -> int:
    """Run the command in this forked process, as a new interpreter would. Return the exit code."""
    from roundelay.nodes.reports import get_reporter

    assert isinstance(arguments, list)
    lead_session()
    name_process(str(name))
    sys.argv[:] = ["roundelay", *arguments]
    for number, attribute in enumerate(("stdin", "stdout", "stderr")):
        stream = open(number, "w" if number else "r", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        if number:
            stream.reconfigure(line_buffering=True, write_through=True)
        setattr(sys, attribute, stream)
        setattr(sys, f"__{attribute}__", stream)
    get_reporter.cache_clear()
    os.environ[SUPERVISED] = "0"
    get_reporter()
    code = 1
    try:
        runpy.run_module("roundelay", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        atexit._run_exitfuncs()
    return code
