"""The node's side of a process that several agents share (`agent_host`). Starts the process, and decides which agent
caused a crash.

The process starts with its first agent and ends with its last agent. After a crash, the agents that were at work are
suspects. The node isolates an agent that was a suspect in two crashes, or that blocks the event loop: the agent then
gets its own process. All other agents start again at once, because they did nothing wrong.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from roundelay.network.platforms import HANG_SIGNAL
from roundelay.nodes.forker import Forker, ForkingProcess
from roundelay.nodes.logs import ProcessLog
from roundelay.nodes.processes import STOP_TIMEOUT_S, Child
from roundelay.nodes.reports import Report
from roundelay.nodes.work_board import Work, WorkBoard

if TYPE_CHECKING:
    from roundelay.agents.team import AgentSpec

_logger = logging.getLogger(__name__)

MAX_CRASHES = 2
"""Number of crashes of the shared process during an agent's work after which the agent gets its own process."""
UNEXPLAINED_S = 60.0
"""Period in seconds. Two crashes without a suspect within this period isolate every agent."""
HANG_CHECK_S, MAX_MISSED_CHECKS = 2.0, 5
"""Interval between heartbeat checks in seconds, and the number of checks without a heartbeat after which the process
counts as hanging."""
MAX_LOAD_CHECKS = 30
"""Number of checks without a heartbeat after which the process counts as hanging while it imports an agent's code."""
HANG_ANSWER_S = 2.0
"""Maximum time for a hanging process to name the blocking agent before the process is killed, in seconds."""
HANG_S = HANG_CHECK_S * MAX_MISSED_CHECKS


class HostedAgent(Protocol):
    """Agent that runs in a shared process."""

    name: str

    def handle_report(self, report: Report) -> None: ...
    def isolate(self, reason: str) -> None: ...


class _Run:
    """One run of an agent in the shared process. The result of ``ended`` is the agent's exit code, or None if the agent
    did not cause the end."""

    def __init__(self, agent: HostedAgent, slot: int) -> None:
        self.agent = agent
        self.slot = slot
        self.ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    def end(self, code: int | None) -> None:
        if not self.ended.done():
            self.ended.set_result(code)


class SharedProcess(ForkingProcess):
    """Process that the agents of one folder share."""

    def __init__(
        self,
        name: str,
        agent_ids: Sequence[str],
        url: str,
        *,
        log_level: str,
        log: ProcessLog,
        folder: Path,
        forker: Forker | None,
    ) -> None:
        arguments = ["-m", "roundelay", "agent", "host", "--url", url, "--board", ""]
        arguments += ["--log-level", log_level, "--log-format", log.format]
        super().__init__(name, arguments, on_line=lambda line: log.forward(name, line))
        self._forker = forker
        self.is_closing = False
        self._slots = {agent_id: slot for slot, agent_id in enumerate(agent_ids)}
        self._log = log
        self._board_folder = folder
        self._launches = 0
        self._board: WorkBoard | None = None
        self._runs: dict[str, _Run] = {}
        self._main: asyncio.Task[None] | None = None
        self._launched = asyncio.Event()
        self._launch_error: OSError | None = None
        self._is_ending = False
        self._ended_on_purpose = False
        self._crashes: dict[str, int] = {}
        self._unexplained_at = float("-inf")
        self._hang_s = HANG_S

    async def run_agent(self, agent: HostedAgent, file: Path, as_loaded: Path | None) -> int | None:
        """Run an agent until it ends. Return its exit code, or None if the agent did not cause its end.

        Cancelling this method stops the agent. If the agent does not stop, the process is killed.
        """
        await self._ensure_up()
        run = self._runs[agent.name] = _Run(agent, self._slots[agent.name])
        self._order("start", run, file, as_loaded)
        try:
            return await asyncio.shield(run.ended)
        finally:
            if not run.ended.done():
                self._order("stop", run)
                await asyncio.wait({run.ended}, timeout=STOP_TIMEOUT_S)
            if not run.ended.done():
                self._end_for(run, "its code did not end when it was stopped")
                await asyncio.wait({run.ended})
            self._runs.pop(agent.name, None)
            if not self._runs and self._main is not None:
                self._is_ending = self._ended_on_purpose = True
                self._close_input()

    async def close(self) -> None:
        """End the process and wait until it has ended."""
        self._ended_on_purpose = True
        if self._main is not None:
            self._close_input()
            await asyncio.wait({self._main}, timeout=STOP_TIMEOUT_S)
        if self._main is not None:
            self.kill()
            await asyncio.wait({self._main})

    def handle_report(self, report: Report) -> None:
        run = self._runs.get(report.get("agent", ""))
        if run is None:
            return
        match report["report"]:
            case "output":
                self._log.forward(run.agent.name, report["message"])
            case "ended":
                if report["message"]:
                    run.agent.handle_report({"report": "error", "message": report["message"], "url": ""})
                run.end(report.get("code", 1))
                if report.get("leftovers") and not self.is_closing:
                    # A thread cannot be stopped from outside. Kill the process, because the tool of a stopped agent
                    # could still do harm.
                    self._end_for(run, "a tool of it still ran when it was stopped")
            case _:
                run.agent.handle_report(report)

    # --- the process

    async def _ensure_up(self) -> None:
        """Start the process if it is not running. Raises `OSError` if the process cannot be created."""
        while self._main is not None and (self._is_ending or (self._launched.is_set() and not self._accepts_orders)):
            await asyncio.wait({self._main})
        if self._main is None:
            self._launched = asyncio.Event()
            self._launch_error, self._is_ending, self._ended_on_purpose = None, False, False
            self._main = asyncio.create_task(self._run_once())
        await self._launched.wait()
        if self._launch_error is not None:
            raise self._launch_error

    async def _run_once(self) -> None:
        self._launches += 1
        path = self._board_folder / f"{self.name.replace('/', '-')}-{self._launches}.board"
        watch, code = None, None
        try:
            self._board = WorkBoard.create(path, len(self._slots))
            self._command[self._command.index("--board") + 1] = str(path)
            watch = asyncio.create_task(self._watch_heartbeat(self._board))
            code = await self.run()
        except OSError as error:
            self._launch_error = error
        finally:
            if watch is not None:
                watch.cancel()
            self._main = None
            self._launched.set()
            self._handle_end(code)
            path.unlink(missing_ok=True)

    async def _launch(self) -> Child:
        process = await super()._launch()
        if self._ended_on_purpose and process.stdin is not None:
            process.stdin.close()  # the node has been stopped meanwhile
        self._launched.set()
        return process

    def _order(self, order: str, run: _Run, file: Path | None = None, as_loaded: Path | None = None) -> None:
        if self._main is None or not self._accepts_orders:
            run.end(None)  # the process has just ended or is about to end
            return
        line = {
            "order": order,
            "agent_id": run.agent.name,
            "slot": run.slot,
            "file": "" if file is None else str(file),
            "as_loaded": "" if as_loaded is None else str(as_loaded),
        }
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")

    @property
    def _accepts_orders(self) -> bool:
        """Whether the input of the current or last process is open. After the forker was lost, the input is closed
        while the agents are still ending. Writing to a closed input would raise `RuntimeError` in uvloop."""
        return self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing()

    def _close_input(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def _watch_heartbeat(self, board: WorkBoard) -> None:
        """Kill the process if its event loop hangs."""
        last, missed, missed_in_load = 0, 0, 0
        while True:
            await asyncio.sleep(HANG_CHECK_S)
            is_loading = any(board.get_work(run.slot) is Work.LOADS for run in self._runs.values())
            stands_still = board.heartbeat == last and last > 0
            # Importing a large library may block the loop for longer than other work may. But an endless import would
            # stop all agents. Use two counters, so that the first check after a long import does not kill the process.
            missed = missed + 1 if stands_still and not is_loading else 0
            missed_in_load = missed_in_load + 1 if stands_still and is_loading else 0
            last = board.heartbeat
            is_hanging = missed >= MAX_MISSED_CHECKS or missed_in_load >= MAX_LOAD_CHECKS
            if is_hanging and self._process is not None:
                self._hang_s = (missed or missed_in_load) * HANG_CHECK_S
                if HANG_SIGNAL is not None:
                    self._process.send_signal(HANG_SIGNAL)
                    await asyncio.sleep(HANG_ANSWER_S)
                self.kill()

    # --- blame

    def _end_for(self, run: _Run, reason: str) -> None:
        """Kill the process because of one agent, and isolate that agent."""
        run.agent.isolate(reason)
        if not run.ended.done() or self._main is not None:
            others = sorted(name for name, other in self._runs.items() if other is not run)
            _logger.warning(
                "the shared process starts again because of one agent",
                extra={"agent_id": run.agent.name, "reason": reason, "others": ", ".join(others)},
            )
            self._ended_on_purpose = True
            self.kill()

    def _handle_end(self, code: int | None) -> None:
        """Decide which agents caused the end of the process, and end all runs."""
        runs = [run for run in self._runs.values() if not run.ended.done()]
        blamed = [] if self._ended_on_purpose or not runs else self._find_blamed(runs, code)
        for run in runs:
            run.end((code or 1) if run in blamed else None)

    def _find_blamed(self, runs: Sequence[_Run], code: int | None) -> list[_Run]:
        board = self._board
        assert board is not None
        ending = "could not start" if code is None else f"ended with {describe_code(code)}"
        # No run uses the blamed slot if its agent has just ended, or if the crash has overwritten the board.
        if culprits := [run for run in runs if run.slot == board.blamed]:
            for run in culprits:
                reason = f"it blocked the event loop of a shared process for {self._hang_s:g} s"
                run.agent.isolate(reason)
                run.agent.handle_report({"report": "error", "message": f"{reason}. {HANG_ADVICE}", "url": ""})
            return culprits
        suspects = _pick(runs, lambda run: board.get_work(run.slot))
        names = ", ".join(sorted(run.agent.name for run in suspects)) or "no agent"
        _logger.error("The shared process of %d agents %s. At work: %s.", len(runs), ending, names)
        for run in suspects:
            crashes = self._crashes[run.agent.name] = self._crashes.get(run.agent.name, 0) + 1
            if crashes >= MAX_CRASHES:
                run.agent.isolate(f"a shared process {ending} while it worked, {crashes} times in all")
        if not suspects:
            if time.monotonic() - self._unexplained_at < UNEXPLAINED_S:
                for run in runs:
                    run.agent.isolate(f"the shared process {ending} twice, and nobody was at work")
            self._unexplained_at = time.monotonic()
        return suspects


def group_agents(specs: Sequence[AgentSpec]) -> dict[str, list[str]]:
    """Return the ids of agents that share a process, by the name of the process.

    Agents of the same folder share a process. Their folder is in the import path, so agents of two folders could import
    each other's modules with the same name. A single agent needs no shared process.
    """
    folders: dict[Path, list[str]] = {}
    for spec in specs:
        if spec.process == "shared":
            folders.setdefault(spec.path.resolve().parent, []).append(spec.id)
    groups = [agent_ids for agent_ids in folders.values() if len(agent_ids) > 1]
    return {"agents" if place == 0 else f"agents-{place + 1}": agent_ids for place, agent_ids in enumerate(groups)}


@asynccontextmanager
async def closing_processes(processes: Collection[SharedProcess]) -> AsyncIterator[None]:
    """Close the shared processes at the end of the block, after the tasks of their agents have ended."""
    try:
        yield
    finally:
        for process in processes:
            await process.close()


HANG_ADVICE = "A function that blocks belongs in a plain `def` tool, which runs in a thread."


def describe_code(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def _pick(runs: Sequence[_Run], get_work: Callable[[_Run], Work]) -> list[_Run]:
    """Return the runs that most probably ended the process: runs that loaded code, or else ran tools, or else
    reacted."""
    for work in (Work.LOADS, Work.CALLS, Work.REACTS):
        if picked := [run for run in runs if get_work(run) is work]:
            return picked
    return []
