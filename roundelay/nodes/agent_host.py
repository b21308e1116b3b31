"""Run several agents of a node in one process. Each agent starts and stops independently.

The node sends orders to the standard input of this process, one JSON line per order: start or stop an agent. The end of
the input stops all agents. The process writes reports (`reports`) about its agents: an agent is ready, an agent has
ended with an exit code, or an agent's code printed or logged a line. The context variable `running_agent` identifies
the agent whose code runs, also in threads.

Agents share the interpreter, so a crash or a blocked event loop stops all of them. The process therefore records the
current work of each agent on a `WorkBoard`. The node reads the board to choose the agent to isolate (`shared_process`).
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import BinaryIO, Literal, TextIO, TypedDict, cast

from roundelay.agent_files import read_agents
from roundelay.agents.events import Event, Finished, ToolCallEnd, ToolCallStart, TurnStart, Waiting
from roundelay.agents.isolation import count_leftovers, running_agent
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.team import AgentSpec, build_runner
from roundelay.exit_codes import explain
from roundelay.network.errors import ConfigError
from roundelay.network.platforms import HANG_SIGNAL
from roundelay.network.yaml import override_file
from roundelay.nodes.logs import ProcessLog
from roundelay.nodes.processes import MAX_LINE_BYTES, stop_signals, wait_for_first
from roundelay.nodes.reports import Report
from roundelay.nodes.run_agents import run_agent
from roundelay.nodes.work_board import Work, WorkBoard

HEARTBEAT_S = 1.0
LEFTOVERS_S, LEFTOVER_CHECKS = 1.0, 20
"""Maximum time for the threads of a stopped agent to end, in seconds, and the number of checks during this time."""
STACK_LINES = 5
END_S = 0.05
"""Time after which a finished reaction no longer counts as work, in seconds."""


class AgentOrder(TypedDict):
    """Order from the node. ``as_loaded`` is empty, or the path of a copy of an older version of ``file``. The process
    loads this copy instead of ``file``.
    """

    order: Literal["start", "stop"]
    agent_id: str
    slot: int
    file: str
    as_loaded: str


async def host_agents(
    *,
    url: str | None,
    token: str | None,
    board: WorkBoard,
    log: ProcessLog,
    begin_log: Callable[[], None],
) -> None:
    """Run agents as the node orders until the input ends or SIGTERM arrives.

    ``begin_log`` starts logging to the standard error that this function has installed.
    """
    output = AgentOutput(sys.stdout)
    sys.stdout = sys.stderr = cast(TextIO, output)
    begin_log()
    host = _Host(url, token, board, log, output)
    with stop_signals() as stopping:
        async with asyncio.TaskGroup() as group:
            beating = group.create_task(host.beat())
            try:
                await wait_for_first(stopping.wait(), host.carry_out_orders())
            finally:
                beating.cancel()
                await host.stop_all()


class AgentOutput(io.TextIOBase):
    """Standard output of all agents in this process. Each line that an agent's code writes becomes a report with the
    agent's id."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begun: dict[str, str] = {}  # incomplete last line of each agent
        self._lock = threading.RLock()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def buffer(self) -> BinaryIO:
        return self._stream.buffer

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        agent_id = running_agent.get()
        with self._lock:
            *lines, rest = (self._begun.pop(agent_id, "") + text).split("\n")
            if len(rest) > MAX_LINE_BYTES:
                lines, rest = [*lines, rest], ""
            if rest:
                self._begun[agent_id] = rest
            for line in lines:
                if agent_id:
                    self.report({"report": "output", "message": line, "url": "", "agent": agent_id})
                else:
                    self._stream.write(f"{line}\n")
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def report(self, report: Report) -> None:
        with self._lock:
            self._stream.write(json.dumps(report) + "\n")
            self._stream.flush()


class _Host:
    """Agents of this process, and the orders that control them."""

    def __init__(
        self,
        url: str | None,
        token: str | None,
        board: WorkBoard,
        log: ProcessLog,
        output: AgentOutput,
    ) -> None:
        self._url = url
        self._token = token
        self._board = board
        self._log = log
        self._output = output
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots: dict[str, int] = {}
        self._works: dict[str, _AgentWork] = {}
        # agents of each file, as the file was when this process first read it
        self._specs: dict[str, dict[str, AgentSpec]] = {}
        if HANG_SIGNAL is not None:
            signal.signal(HANG_SIGNAL, self._blame_running_agent)

    async def beat(self) -> None:
        """Show the node regularly that the event loop runs."""
        while True:
            self._board.beat()
            for work in self._works.values():
                work.show()
            await asyncio.sleep(HEARTBEAT_S)

    async def carry_out_orders(self) -> None:
        """Carry out the node's orders until the input ends."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        try:
            while line := await reader.readline():
                order: AgentOrder = json.loads(line)
                if order["order"] == "start":
                    self._start(order)
                elif (task := self._tasks.get(order["agent_id"])) is not None:
                    task.cancel()
        finally:
            transport.close()

    async def stop_all(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _start(self, order: AgentOrder) -> None:
        agent_id = order["agent_id"]
        self._slots[agent_id] = order["slot"]
        # Set the variable while the task is created: every task and thread of the agent inherits it.
        token = running_agent.set(agent_id)
        self._tasks[agent_id] = asyncio.create_task(self._run(order), name=f"agent-{agent_id}")
        running_agent.reset(token)

    async def _run(self, order: AgentOrder) -> None:
        agent_id, slot = order["agent_id"], order["slot"]
        report: Report = {"report": "ended", "message": "", "url": "", "agent": agent_id, "code": 0}
        try:
            self._board.set_work(slot, Work.LOADS)
            runner = build_runner(self._find_spec(order), on_event=lambda event: work.handle(event))
            work = self._works[agent_id] = _AgentWork(self._board, slot, runner)
            await run_agent(
                runner,
                url=self._url,
                token=self._token,
                follows_node=True,
                report_ready=lambda url: self._report_ready(work, agent_id, url),
                log=self._log,
            )
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 (the boundary of an agent: the others continue)
            if os.environ.get("ROUNDELAY_DEBUG", "") not in ("", "0"):
                traceback.print_exc()
            report["message"], report["code"] = explain(error)
        try:
            report["leftovers"] = await _wait_for_leftovers(agent_id)
        except asyncio.CancelledError:  # the node stops an agent that has just failed, and waits for its report
            report["leftovers"] = count_leftovers(agent_id)
        self._works.pop(agent_id, None)
        self._board.set_work(slot, Work.IDLE)
        del self._tasks[agent_id]
        self._output.report(report)

    def _report_ready(self, work: _AgentWork, agent_id: str, url: str) -> None:
        work.is_starting = False
        work.show()
        self._output.report({"report": "ready", "message": f"Agent {agent_id} is ready", "url": url, "agent": agent_id})

    def _find_spec(self, order: AgentOrder) -> AgentSpec:
        """Return the agent that an order names, as its file declares it. A file with many agents is parsed only
        once."""
        version = order["as_loaded"] or order["file"]
        if version not in self._specs:
            path = Path(order["file"])
            if order["as_loaded"]:
                override_file(path, Path(order["as_loaded"]).read_bytes())
            self._specs[version] = {spec.id: spec for spec in read_agents([path])}
        spec = self._specs[version].get(order["agent_id"])
        if spec is None:
            raise ConfigError(f"{order['file']} has no agent {order['agent_id']}.")
        return spec

    def _blame_running_agent(self, number: int, frame: FrameType | None) -> None:
        """Record which agent blocks the event loop, and end this process. Python runs this signal handler in the
        context of the blocking code."""
        agent_id = running_agent.get()
        if agent_id in self._slots:
            self._board.blame(self._slots[agent_id])
            print("".join(traceback.format_stack(frame)[-STACK_LINES:]).rstrip())
        os._exit(1)


class _AgentWork:
    """Current work of an agent, as shown on the board."""

    def __init__(self, board: WorkBoard, slot: int, runner: SimpleAgentRunner) -> None:
        self.is_starting = True
        self._board = board
        self._slot = slot
        self._runner = runner
        # running tool calls that do not wait for another agent or a person
        self._calls: set[tuple[str, str, int, int]] = set()
        self.show()

    def show(self) -> None:
        is_at_work = self.is_starting or self._runner.is_at_work
        self._board.set_work(self._slot, Work.CALLS if self._calls else Work.REACTS if is_at_work else Work.IDLE)

    def handle(self, event: Event) -> None:
        match event:
            case ToolCallStart():
                self._calls.add((event.reaction, event.path, event.turn, event.call))
            case ToolCallEnd() | Waiting():
                self._calls.discard((event.reaction, event.path, event.turn, event.call))
            case Finished():
                self._calls = {call for call in self._calls if call[0] != event.reaction}
                # The runner counts the reaction until after this event, so update the board a little later.
                asyncio.get_running_loop().call_later(END_S, self.show)
            case TurnStart():  # the reaction has started to work
                pass
            case _:
                return
        self.show()


async def _wait_for_leftovers(agent_id: str) -> int:
    """Return the number of threads and tasks of a stopped agent that still run after a short wait."""
    for _ in range(LEFTOVER_CHECKS):
        if not count_leftovers(agent_id):
            break
        await asyncio.sleep(LEFTOVERS_S / LEFTOVER_CHECKS)
    return count_leftovers(agent_id)
