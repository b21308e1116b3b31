"""Python processes that are forked after the imports. `start_python` has the signature of
`asyncio.create_subprocess_exec`.

The tests start about 600 processes, and half of a node's lifetime was spent on imports. Therefore, each test worker
keeps one server process that has imported the most common modules and then only forks. Each child gets its own
arguments, environment, working directory and streams, runs its program and exits like any Python process. A test can
kill a child without an effect on the others. `start_roundelay` runs ``python -m roundelay``.

Forks do not test the start of the interpreter. `test_start_up.py` tests it, and so do tests that use the fixture
``real_processes`` or start ``sys.executable`` themselves. With ``--full``, nothing is forked.

The server process runs the source of this file with ``python -c``, so this file must not import other test modules.
"""

from __future__ import annotations

import array
import asyncio
import atexit
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

PRELOADED = (
    "roundelay.agents.models.openai_model",
    "roundelay.agents.runner",
    "roundelay.agents.team",
    "roundelay.app",
    "roundelay.cli",
    "roundelay.nodes.run_agents",
    "roundelay.nodes.up",
    "roundelay.runs.lists",
    "roundelay.runs.source",
    "roundelay.terminal.converse",
    "roundelay.terminal.prompt",
    "roundelay.testing.run",
    "stringprep",
    "uvloop",
    "yaml",
)
PRELOADED_FOR = {
    "gateway": "roundelay.interop.gateway",
    "mcp": "roundelay.interop.mcp.server",
    "bridge": "roundelay.interop.bridge.hooks",
    "pytest": "pytest",
    "tests.support.webhook_receiver": "tests.support.webhook_receiver",
}
"""Modules that the server imports when an argument first has this name: the gateway's take 2 seconds of CPU."""
OF_THE_START = ("PYTHON", "LC_", "LANG", "TZ", "LD_", "MALLOC_", "OPENSSL_")
"""Prefixes of variables that affect the start of the interpreter. A process is not forked if its values differ from
those of the tests.
"""

is_forking = True
"""Whether processes are forked. `conftest.py` sets it to False with ``--full``."""


async def start_roundelay(
    *arguments: str | Path,
    stdin: int | IO[Any] | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
) -> asyncio.subprocess.Process | Forked:
    """Start ``python -m roundelay`` with these arguments."""
    roundelay = ("-m", "roundelay", *arguments)
    return await start_python(*roundelay, stdin=stdin, stdout=stdout, stderr=stderr, cwd=cwd, env=env)


async def start_python(
    *arguments: str | Path,
    stdin: int | IO[Any] | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
) -> asyncio.subprocess.Process | Forked:
    """Start ``python -m MODULE``, ``python -c CODE`` or ``python FILE`` with arguments.

    The process is not forked if the arguments contain another option of the interpreter.
    """
    environment = dict(os.environ if env is None else env)
    has_options = str(arguments[0]).startswith("-") and arguments[0] not in ("-m", "-c")
    if not is_forking or has_options or _of_the_start(environment) != _of_the_start(os.environ):
        return await asyncio.create_subprocess_exec(
            *(sys.executable, *arguments),
            stdin=stdin, stdout=stdout, stderr=stderr, cwd=cwd, env=environment,
        )  # fmt: skip
    return await Forked.start(list(map(str, arguments)), (stdin, stdout, stderr), str(cwd or Path.cwd()), environment)


def run_roundelay(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run ``python -m roundelay`` to its end, for tests without an event loop."""
    return run_python("-m", "roundelay", *arguments, cwd=cwd)


def run_python(
    *arguments: str | Path, cwd: Path | None = None, told: bytes = b"", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a Python process to its end with ``told`` as standard input. The arguments are those of `start_python`."""

    async def run() -> subprocess.CompletedProcess[str]:
        pipe = subprocess.PIPE
        process = await start_python(*arguments, stdin=pipe, stdout=pipe, stderr=pipe, cwd=cwd, env=env)
        try:
            async with asyncio.timeout(100):
                out, err = await process.communicate(told)
        finally:
            if process.returncode is None:
                process.kill()
        return subprocess.CompletedProcess(arguments, process.returncode or 0, out.decode(), err.decode())

    return asyncio.run(run())


def _of_the_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(OF_THE_START)}


class Forked(asyncio.Protocol):
    """A forked process with the interface of `asyncio.subprocess.Process`. The server process, its parent, first
    sends its process ID and later its exit code.
    """

    def __init__(self) -> None:
        self.stdin: asyncio.StreamWriter | None = None
        self.stdout: asyncio.StreamReader | None = None
        self.stderr: asyncio.StreamReader | None = None
        self.returncode: int | None = None
        self._told = b""
        loop = asyncio.get_running_loop()
        self._started: asyncio.Future[int] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()

    @classmethod
    async def start(
        cls, arguments: list[str], streams: tuple[int | IO[Any] | None, ...], cwd: str, environment: dict[str, str]
    ) -> Forked:
        loop = asyncio.get_running_loop()
        forked = cls()
        ours, theirs, lent = {}, [], []
        for number, stream in enumerate(streams):
            if stream == subprocess.PIPE:
                reading, writing = os.pipe()
                ours[number], end = (writing, reading) if number == 0 else (reading, writing)
                lent.append(end)
            elif stream == subprocess.DEVNULL:
                end = os.open(os.devnull, os.O_RDWR)
                lent.append(end)
            elif stream == subprocess.STDOUT:
                end = theirs[1]
            elif stream is None:
                end = number
            else:
                end = stream if isinstance(stream, int) else stream.fileno()
            theirs.append(end)
        telling, told = os.pipe()
        lent.append(told)
        try:
            _find_server().sendmsg(
                [json.dumps({"arguments": arguments, "cwd": cwd, "environment": environment}).encode()],
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [*theirs, told]))],
            )
        finally:
            for end in lent:
                os.close(end)
        await loop.connect_read_pipe(lambda: forked, os.fdopen(telling, "rb", 0))
        if 0 in ours:
            transport, protocol = await loop.connect_write_pipe(
                lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), os.fdopen(ours[0], "wb", 0)
            )
            forked.stdin = asyncio.StreamWriter(transport, protocol, None, loop)
        if 1 in ours:
            forked.stdout = await _read_from(ours[1])
        if 2 in ours:
            forked.stderr = await _read_from(ours[2])
        await forked._started
        return forked

    @property
    def pid(self) -> int:
        return self._started.result()

    async def wait(self) -> int:
        await asyncio.shield(self._ended)
        assert self.returncode is not None
        return self.returncode

    async def communicate(self, input: bytes | None = None) -> tuple[bytes, bytes]:  # noqa: A002 - its name at Process
        out, err, _ = await asyncio.gather(_read_all(self.stdout), _read_all(self.stderr), self._feed(input))
        await self.wait()
        return out, err

    def send_signal(self, number: int) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def data_received(self, data: bytes) -> None:
        self._told += data
        pid, newline, code = self._told.partition(b"\n")
        if newline and not self._started.done():
            self._started.set_result(int(pid))
        if code.endswith(b"\n"):
            self.returncode = int(code)

    def connection_lost(self, error: Exception | None) -> None:
        gone = ConnectionError("the process that forks has ended")
        if not self._started.done():
            self._started.set_exception(gone)
        elif self.returncode is None:
            self._ended.set_exception(gone)
        else:
            self._ended.set_result(None)

    async def _feed(self, data: bytes | None) -> None:
        if self.stdin is None:
            return
        try:
            self.stdin.write(data or b"")
            await self.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the process has ended, or has closed its standard input
        self.stdin.close()


Process = asyncio.subprocess.Process | Forked


async def _read_from(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0)
    )
    return reader


async def _read_all(reader: asyncio.StreamReader | None) -> bytes:
    return b"" if reader is None else await reader.read()


_server: socket.socket | None = None
_starting = threading.Lock()


def _find_server() -> socket.socket:
    """Return the connection to this worker's server process. Start the server at the first call."""
    with _starting:
        return _server or _start_server()


def _start_server() -> socket.socket:
    global _server
    _server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    program = Path(__file__).read_text(encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(theirs.fileno())], pass_fds=[theirs.fileno()], cwd="/",
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    theirs.close()

    def end(line: socket.socket = _server) -> None:
        line.close()
        process.wait()

    atexit.register(end)
    return _server


# -- the server process, which forks


def _serve(line: socket.socket) -> dict[str, Any] | None:
    """Fork for each request, and report the exit code of each child. Return the request in each child, and None in
    the server when the test worker has closed the connection.
    """
    running: dict[int, int] = {}
    waking, woken = socket.socketpair()
    waking.setblocking(False)
    woken.setblocking(False)
    signal.set_wakeup_fd(waking.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with selectors.DefaultSelector() as selector:
        selector.register(line, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is woken:
                    woken.recv(4096)
                    _tell_ended(running)
                    continue
                request, descriptors, _, _ = socket.recv_fds(line, 1 << 20, 4)
                if not request:
                    return None
                *streams, told = descriptors
                _preload_for(json.loads(request)["arguments"])
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    for number, stream in enumerate(streams):
                        os.dup2(stream, number)
                    return dict(json.loads(request))
                running[pid] = told
                os.write(told, b"%d\n" % pid)
                for stream in streams:
                    os.close(stream)


def _preload_for(arguments: list[str]) -> None:
    for name in set(arguments) & PRELOADED_FOR.keys():
        with suppress(ImportError):  # the process itself reports a missing extra
            __import__(PRELOADED_FOR.pop(name))
        assert len(os.listdir("/proc/self/task")) == 1, f"what {name} imports has started threads"
        gc.freeze()


def _tell_ended(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        told = running.pop(pid)
        try:
            os.write(told, b"%d\n" % os.waitstatus_to_exitcode(status))
        except BrokenPipeError:
            pass  # the test worker has closed its end
        os.close(told)


def _become(request: dict[str, Any]) -> None:
    """Turn a forked child into the requested process. Keep nothing of the server except its imports."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    Path("/proc/self/comm").write_text("python", encoding="ascii")
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.orig_argv[:] = [sys.executable, *request["arguments"]]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        was = getattr(sys, name)
        stream = open(  # noqa: SIM115 - for the whole life of the process
            number, "w" if number else "r", encoding=was.encoding, errors=was.errors, closefd=False,
            buffering=1 if number == 2 or os.isatty(number) else -1,
        )  # fmt: skip
        if number:
            stream.reconfigure(write_through=was.write_through)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    gc.enable()


def _run(first: str, *rest: str) -> None:
    """Run a program as the interpreter does with these arguments."""
    if first == "-m":
        sys.path[0] = os.getcwd()
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path[0] = ""
        sys.argv[:] = ["-c", *rest[1:]]
        _execute(rest[0], "<string>")
    else:
        sys.path[0] = str(Path(first).resolve().parent)
        sys.argv[:] = [first, *rest]
        _execute(Path(first).read_bytes(), first)


def _execute(source: str | bytes, name: str) -> None:
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = name
    exec(compile(source, name, "exec", dont_inherit=True), vars(main))


def _leave(code: int) -> None:
    """End the process without freeing its objects: that writes to all memory shared with the process that forks, and
    takes 80 ms of CPU, ten times as long as a short command."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return  # Python itself ends silently on this error
    os._exit(code & 0xFF)


def _main(descriptor: int) -> None:
    for module in PRELOADED:
        __import__(module)
    assert len(os.listdir("/proc/self/task")) == 1, "what was imported has started threads, which no child would have"
    # Name the process like a shell. A hook skips shells when it looks for the process that started it, so it finds
    # the test worker.
    Path("/proc/self/comm").write_text("sh", encoding="ascii")
    gc.collect()
    gc.freeze()
    gc.disable()
    request = _serve(socket.socket(fileno=descriptor))
    if request is not None:
        _become(request)
        try:
            _run(*request["arguments"])
        except SystemExit as end:
            if end.code is not None and not isinstance(end.code, int):
                raise
            _leave(end.code or 0)
            raise
        _leave(0)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
