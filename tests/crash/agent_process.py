"""Starts hundreds of processes of an agent: a script imports the agent's dependencies, and then forks once for each
order that it reads.

A child builds the runner of an agent file, and runs it on its own connection until it is killed or superseded. The
child's events and errors go to its log. The script reports which children have started, stopped and ended. When the
script ends, its children end too. `AgentProcesses` is the side of the test.
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
    sys.path.insert(0, str(Path(__file__).parents[2]))  # agents name their tools in `tests`

from roundelay.agents import record_queue
from roundelay.agents.events import event_to_json
from roundelay.agents.models.model import ModelRequest, UserMessage
from roundelay.agents.models.openai_model import OpenAIModel
from roundelay.agents.team import build_runner, load_agents
from roundelay.network.errors import Superseded
from roundelay.nodes.logs import log_to_stderr
from tests.support.fake_openai import FakeOpenAI, text

SUPERSEDED = 3
"""Exit code of an agent that another process has superseded."""


# -- side of the test


class AgentProcess:
    """One process of an agent. ``ended`` resolves to its exit code, which is negative for a signal."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.has_stopped = asyncio.Event()

    async def kill(self) -> None:
        """Kill the process (SIGKILL), and wait for its end."""
        os.kill(self.pid, signal.SIGKILL)
        assert await asyncio.shield(self.ended) == -signal.SIGKILL, self.told()

    async def stop(self) -> None:
        """Stop the process (SIGSTOP), and wait until it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        await self.has_stopped.wait()

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def told(self) -> str:
        return self.log.read_text(encoding="utf-8") if self.log.exists() else ""

    def events(self) -> list[dict[str, Any]]:
        """Return the events of its reactions. A kill may have cut the last line."""
        return [json.loads(line) for line in self.told().splitlines() if line.startswith("{") and line.endswith("}")]


class AgentProcesses:
    """The script and all its children."""

    def __init__(self, script: asyncio.subprocess.Process, folder: Path) -> None:
        self.lives: list[AgentProcess] = []
        self._script = script
        self._folder = folder
        self._begun: asyncio.Queue[AgentProcess] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())

    async def launch(self, file: Path, url: str) -> AgentProcess:
        """Start a new process of the agent in this file, which connects to the hub at ``url``."""
        assert self._script.stdin is not None
        log = self._folder / f"life{len(self.lives)}.log"
        self._script.stdin.write(json.dumps([str(file), url, str(log)]).encode() + b"\n")
        return await self._begun.get()

    async def close(self) -> None:
        """End the script and all its children, including stopped ones."""
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


# -- side of the script


def main() -> None:
    asyncio.run(_rehearse())
    alive, held = os.pipe()  # only the script holds the writing end, so that the children notice its end
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
    """Call a model once, so that the modules which the SDK loads at its first call are already loaded in every child."""
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
    """Run a child from its start to its end."""
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
    except BaseException:  # the outermost handler of this process
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
    # No record is sent because of a timeout, so that every process sends the same frames.
    record_queue.MAX_DELAY_S = 60.0
    main()
