"""Processes of an agent, by the hundred: a script that has imported what an agent needs forks one for each order that it reads.

A child builds the runner of an agent file and runs it, on a connection of its own, until it is killed or superseded; its events and
its errors go to its log. The script tells who began, stopped and ended; its children end with it, however it ends. `AgentProcesses` is the
side of the test.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))  # where `tests` is imported from: agents name their tools there

from roundelay.agents import record_queue
from roundelay.agents.events import event_to_json
from roundelay.agents.models.model import ModelRequest, UserMessage
from roundelay.agents.models.openai_model import OpenAIModel
from roundelay.agents.team import build_runner, load_agents
from roundelay.network.errors import Superseded
from roundelay.nodes.logs import log_to_stderr
from tests.support.fake_openai import FakeOpenAI, text

SUPERSEDED = 3
"""The exit code of an agent that another process has taken over."""


# -- in the test


class AgentProcess:
    """One life of an agent. ``ended`` gives its exit code, negative for a signal."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.has_stopped = asyncio.Event()

    async def kill(self) -> None:
        """SIGKILL, and the process is gone."""
        os.kill(self.pid, signal.SIGKILL)
        assert await asyncio.shield(self.ended) == -signal.SIGKILL, self.told()

    async def stop(self) -> None:
        """SIGSTOP, and the process stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        await self.has_stopped.wait()

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def told(self) -> str:
        return self.log.read_text(encoding="utf-8") if self.log.exists() else ""

    def events(self) -> list[dict[str, Any]]:
        """What it said of its reactions; a kill may have cut the last line."""
        return [json.loads(line) for line in self.told().splitlines() if line.startswith("{") and line.endswith("}")]


class AgentProcesses:
    """The script, and all that it has forked."""

    def __init__(self, script: asyncio.subprocess.Process, folder: Path) -> None:
        self.lives: list[AgentProcess] = []
        self._script = script
        self._folder = folder
        self._begun: asyncio.Queue[AgentProcess] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())

    async def launch(self, file: Path, url: str) -> AgentProcess:
        """A new process of the agent in this file, on its way to the hub at ``url``."""
        assert self._script.stdin is not None
        log = self._folder / f"life{len(self.lives)}.log"
        self._script.stdin.write(json.dumps([str(file), url, str(log)]).encode() + b"\n")
        return await self._begun.get()

    async def close(self) -> None:
        """End the script, and with it everyone; who was stopped ends too."""
        assert self._script.stdin is not None
        self._script.stdin.close()
        await self._script.wait()
        await self._reader

    async def _read(self) -> None:
        assert self._script.stdout is not None
        by_pid: dict[int, AgentProcess] = {}
        async for line in self._script.stdout:
            match json.loads(line):
                case ["began", int(pid), str(log)]:
                    process = by_pid[pid] = AgentProcess(pid, Path(log))
                    self.lives.append(process)
                    self._begun.put_nowait(process)
                case ["stopped", int(pid)]:
                    by_pid[pid].has_stopped.set()
                case ["ended", int(pid), int(code)]:
                    by_pid.pop(pid).ended.set_result(code)


@asynccontextmanager
async def agent_processes(folder: Path, **environment: str) -> AsyncIterator[AgentProcesses]:
    script = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )
    processes = AgentProcesses(script, folder)
    try:
        yield processes
    finally:
        await processes.close()


# -- in the script


def main() -> None:
    asyncio.run(_rehearse())
    alive, held = os.pipe()  # only the script holds the end that is written to: when that is gone, so is the script
    wakeup, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    children: set[int] = set()
    rest = b""
    while True:
        ready, _, _ = select.select([0, wakeup], [], [])
        if wakeup in ready:
            os.read(wakeup, 4096)
            for line in _reap(children):
                _tell(line)
        if 0 not in ready:
            continue
        data = os.read(0, 65536)
        if not data:
            break
        *orders, rest = (rest + data).split(b"\n")
        for order in orders:
            file, url, log = json.loads(order)
            pid = os.fork()
            if pid == 0:
                os.close(held)
                _live(Path(file), url, log, alive)
            children.add(pid)
            _tell(["began", pid, log])
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    while children:
        for line in _reap(children, options=0):
            _tell(line)


async def _rehearse() -> None:
    """Have a model answer once, so that what the SDK imports and reads at its first call is there in every child."""
    async with FakeOpenAI([text("Ready.")]) as server, OpenAIModel("fake", base_url=server.base_url) as model:
        request = ModelRequest((UserMessage("Ready?"),), (), agent_id="ann", reaction="rehearsal", turn=1)
        await model.complete(request)


def _tell(line: object) -> None:
    os.write(1, json.dumps(line).encode() + b"\n")


def _reap(children: set[int], options: int = os.WNOHANG | os.WUNTRACED) -> Iterator[list[object]]:
    while children:
        pid, status = os.waitpid(-1, options)
        if pid == 0:
            return
        if os.WIFSTOPPED(status):
            yield ["stopped", pid]
        else:
            children.discard(pid)
            yield ["ended", pid, os.waitstatus_to_exitcode(status)]


def _live(file: Path, url: str, log: str, alive: int) -> NoReturn:
    """The whole life of a child."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log_to_stderr("warning")
    code = 1
    try:
        code = asyncio.run(_run(file, url, alive))
    except BaseException:  # the boundary of this process
        import logging

        logging.getLogger(__name__).exception("the agent has ended")
    finally:
        os._exit(code)


async def _run(file: Path, url: str, alive: int) -> int:
    asyncio.get_running_loop().add_reader(alive, os._exit, 1)
    [spec] = load_agents(file)
    runner = build_runner(spec, url=url, on_event=lambda event: _tell(event_to_json(event)))
    try:
        await runner.run()
    except Superseded:
        return SUPERSEDED
    return 0


if __name__ == "__main__":
    record_queue.MAX_DELAY_S = 60.0  # no record goes out by itself, so that every life has the same frames
    main()
