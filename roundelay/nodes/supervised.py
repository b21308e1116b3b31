"""The supervised processes of a node: one for each agent of the node's file, and one for the gateway.

A supervised process that fails starts again, after a delay that doubles each time. `NodeAgents` gives operators the
state of the agents' processes, and lets them start, stop, restart or reload one. A changed agent file is reported, but
only a reload applies it: a process that crashes before comes back with the file as it was loaded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from roundelay.display.text import sanitize
from roundelay.network.backoff import Backoff
from roundelay.network.config import NodeConfig, list_web_hosts
from roundelay.network.errors import ConfigError, InvalidArguments, UnknownRecipient
from roundelay.network.hub import Hub
from roundelay.network.operations.reading import AgentAction
from roundelay.network.yaml import MAX_FILE_BYTES
from roundelay.nodes.logs import ProcessLog
from roundelay.nodes.processes import Process
from roundelay.nodes.reports import Report

if TYPE_CHECKING:
    from roundelay.agents.team import AgentSpec

_logger = logging.getLogger(__name__)

RESTART_BACKOFF = Backoff(0.5, 60.0)
STEADY_S = 60.0
"""Uptime after which a process counts as healthy, in seconds: its delay starts over and its fault is cleared."""
RETURN_GRACE_S = 5.0
"""Time for a runner that lost its connection to come back before the node's own process replaces it, in seconds."""
WATCH_S = 2.0
"""Interval between checks of the agents' files, in seconds."""
CONTROL_TIMEOUT_S = 20.0
"""Maximum time that an operator's call waits for a process to be ready, in seconds."""
WRONG_FILE = 2
"""Exit code of an agent whose file is wrong; starting it again would not help."""


class SupervisedProcess(Process):
    """A process of the node that starts again when it fails.

    ``description`` names it in sentences, and ``path`` names the file to correct if it cannot start.
    """

    start_message = "the gateway's process starts"

    def __init__(self, name: str, description: str, command: Sequence[str], *, path: str, log: ProcessLog) -> None:
        super().__init__(name, command, on_line=lambda line: log.forward(name, line))
        self.state = "starting"
        """State of the process: starting, running, stopped, taken_over, restarting or ended."""
        self._description = description
        # The path goes into log lines, where a control character in a file's name could forge one.
        self._path = sanitize(path)
        self._log = log
        self._wanted: AgentAction = "start"
        self._requested = asyncio.Event()  # an operator wants another action
        self._state_changed = asyncio.Event()  # replaced at each change, so that every waiter sees each change

    async def supervise(self) -> None:
        """Run the process until it ends for good, or until cancelled, which stops it.

        `settled` is set once the process has joined or has failed to. Raises `ConfigError` if it cannot start at all.
        """
        failures = 0
        while True:
            await self._wait_to_start()
            started_at = time.monotonic()
            self._set_state("starting")
            _logger.info(self.start_message, extra={"agent_id": self.name})
            code = await self._run_until_requested()
            # An operator's restart is no failure, so it must not lengthen the next delay.
            if code is None:
                failures = 0
            # At the start the person who wrote the file is still there, so the whole node refuses to start.
            elif code == WRONG_FILE and not self.settled.is_set():
                raise ConfigError(self.error or f"{self._description} cannot start.")
            elif code == WRONG_FILE:
                # The file was right when the node started. It was changed since, or only a run finds the mistake.
                reason = f"{self._path}: {self.error or 'it cannot start'}"
                _logger.error(
                    "%s has ended with exit code %d and is not started again: %s", self._description, code, reason
                )
                self._set_state("ended")
                self._record_fault(reason)
                if not await self._wait_until_requested():
                    return
            elif code == 0:
                self.settled.set()
                _logger.warning("%s has ended.", self._description)
                self._set_state("taken_over")
                if not await self._wait_until_free():
                    return
            # The node lost its place as leader, so its agents were refused. That is not their fault, and no delay may
            # grow from it.
            elif not self._can_run():
                _logger.info("a process has ended where it has nothing to do", extra={"agent_id": self.name})
                self._set_state("restarting")
            else:
                self.settled.set()
                # A process that ran well for a while begins again at the shortest delay; only crashes in a row mean a
                # lasting fault.
                failures = 1 if time.monotonic() - started_at > STEADY_S else failures + 1
                delay_s = RESTART_BACKOFF.delay_s(failures)
                if self.error:
                    # The reason came as a report, not as a line, so it has not been printed yet.
                    self._log.forward(self.name, f"Error: {self.error}")
                ending = f"exit code {code}" if code > 0 else f"signal {-code}"
                _logger.error("%s has ended with %s; it starts again in %g s.", self._description, ending, delay_s)
                self._set_state("restarting")
                self._record_fault(": ".join([ending, *([self.error] if self.error else [])]))
                # An operator who has corrected the cause need not wait for the end of the delay.
                await self._wait(self._requested.wait(), delay_s)
            if self._wanted == "stop":
                self._set_state("stopped")
                _logger.info("an operator stopped it", extra={"agent_id": self.name})
                await self._wait_until_requested()
            self._requested.clear()

    def handle_report(self, report: Report) -> None:
        super().handle_report(report)
        if report["report"] == "ready":
            self._set_state("running")

    async def _run_until_requested(self) -> int | None:
        """Run the process once; return its exit code, or None if an operator ended it."""
        run, requested = asyncio.create_task(self.run()), asyncio.create_task(self._requested.wait())
        try:
            await asyncio.wait({run, requested}, return_when=asyncio.FIRST_COMPLETED)
            return run.result() if run.done() else None
        finally:
            requested.cancel()
            run.cancel()
            # The old process must be gone before the next one starts: the hub would let one take over from the other.
            await asyncio.wait({run})

    def _can_run(self) -> bool:
        """Whether the process has anything to do now."""
        return True

    async def _wait_to_start(self) -> None:
        """Wait until the process has something to do."""

    async def _wait_until_requested(self) -> bool:
        """Wait until an operator wants it to run again; False means never."""
        return False

    async def _wait_until_free(self) -> bool:
        """Wait until the runner that took its place has ended; False means never."""
        return False

    def _record_fault(self, reason: str | None) -> None:
        """Record why the process ended, or None once it works again."""

    async def _wait(self, wait: Awaitable[object], timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await wait
        except TimeoutError:
            return False
        return True

    def _set_state(self, state: str) -> None:
        self.state = state
        # An event that is cleared again could be missed by a task that has not run in between.
        changed, self._state_changed = self._state_changed, asyncio.Event()
        changed.set()


class AgentProcess(SupervisedProcess):
    """The process of one agent."""

    start_message = "an agent's process starts"

    def __init__(
        self, spec: AgentSpec, hub: Hub, url: str, *, log_level: str, log: ProcessLog, snapshots: Path
    ) -> None:
        command = ["-m", "roundelay", "agent", "run", str(spec.path), "--only", spec.id, "--url", url]
        command += ["--log-level", log_level, "--log-format", log.format, "--until-input-ends"]
        super().__init__(spec.id, f"Agent {spec.id}", command, path=str(spec.path), log=log)
        self._hub = hub
        self.file = spec.path
        self._loaded_bytes, self._loaded_spec = _read(spec.path), spec.find_node().plain()
        # In a folder of the node, not beside the file: users would find a second, old version there.
        self._snapshot = snapshots / f"{spec.id}.yaml"
        # Kept apart, because a run with the loaded file adds to the command, and the next run may not need that.
        self._plain_command = list(self._command)
        self._has_fault = False

    async def run(self) -> int:
        """Run as `Process.run` does, with the agent file as it was loaded."""
        self._command = list(self._plain_command)
        if self.has_changed():
            # Someone edited the file since. Until a reload, a crash must not apply the edit.
            self._snapshot.write_bytes(self._loaded_bytes)
            self._command += ["--as-loaded", str(self._snapshot)]
        # An agent that crashes after each start looks fine in between. Its fault stays until it has run for a while.
        steady = asyncio.create_task(self._clear_fault_later()) if self._has_fault else None
        try:
            return await super().run()
        finally:
            if steady is not None:
                steady.cancel()

    def has_changed(self) -> bool:
        """Whether the file describes the agent otherwise than when its process was loaded."""
        # Equal bytes need no parsing, and this is asked every few seconds.
        if _read(self.file) == self._loaded_bytes:
            return False
        try:
            return self._read_spec().find_node().plain() != self._loaded_spec
        except ConfigError:
            return True

    def describe(self) -> dict[str, Any]:
        """Return the fields of `network.node_agents`."""
        fields: dict[str, Any] = {"agent_id": self.name, "state": self.state, "file": str(self.file)}
        fields |= {"pid": self.pid} if self.is_up else {}
        fields |= {"error": self.error} if self.error and self.state in ("ended", "restarting") else {}
        return fields | {"has_changed": self.has_changed()}

    async def control(self, action: AgentAction) -> dict[str, Any]:
        """Carry out an operator's action, and wait until the process is ready or stopped.

        Raises `InvalidArguments` for a wrong file; the process then goes on as before.
        """
        # To start again would end a running agent in the middle of its work.
        if action == "start" and self.state in ("starting", "running"):
            return self.describe()
        if action == "reload":
            self._reload()
        # Set before the event: the task that wakes up reads it at once.
        self._wanted = action
        self._requested.set()
        final_states = ("stopped",) if action == "stop" else ("running", "ended", "taken_over")
        await self._wait(self._wait_for_state(*final_states), CONTROL_TIMEOUT_S)
        return self.describe()

    def _reload(self) -> None:
        """Load the current file."""
        data = _read(self.file)
        try:
            spec = self._read_spec().find_node().plain()
        except ConfigError as error:
            raise InvalidArguments(f"{self.name} goes on with its file as loaded: {error}") from error
        # Only after the file has proved right. A wrong one would otherwise end the agent at its next crash.
        self._loaded_bytes, self._loaded_spec = data, spec

    def _read_spec(self) -> AgentSpec:
        from roundelay.agent_files import read_agents  # loads all agent code, so only for a changed file

        [spec] = read_agents([self.file], [self.name])
        return spec

    def read_file(self) -> bytes:
        return _read(self.file)

    async def _wait_for_state(self, *states: str) -> None:
        """Wait until a change leads to one of these states."""
        while True:
            await self._state_changed.wait()
            if self.state in states:
                return

    async def _wait_until_requested(self) -> bool:
        self._requested.clear()
        while True:
            await self._requested.wait()
            if self._wanted != "stop":
                return True
            self._requested.clear()
            self._set_state("stopped")

    async def _wait_until_free(self) -> bool:
        """Serve again once the runner that took over has ended, or earlier if an operator wants that."""
        free = asyncio.create_task(self._hub.wait_until_unserved(self.name, RETURN_GRACE_S))
        requested = asyncio.create_task(self._requested.wait())
        try:
            await asyncio.wait({free, requested}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            free.cancel()
            requested.cancel()
        return True

    def _can_run(self) -> bool:
        # A read replica serves no agents: it would refuse them again and again.
        return self._hub.status.opened.is_set()

    async def _wait_to_start(self) -> None:
        await self._hub.status.opened.wait()

    def _record_fault(self, reason: str | None) -> None:
        self._has_fault = reason is not None
        self._hub.record_process_end(self.name, reason)

    async def _clear_fault_later(self) -> None:
        await asyncio.sleep(STEADY_S)
        if self.is_ready:
            self._record_fault(None)


class GatewayProcess(SupervisedProcess):
    """The gateway for programs of other protocols. Registrations of webhooks are stored beside the database."""

    def __init__(self, config: NodeConfig, url: str, *, log_level: str, log: ProcessLog) -> None:
        interop = config.interop
        command = ["-m", "roundelay", "gateway", "--node", url, "--host", interop.host, "--port", str(interop.port)]
        command += [part for name in interop.serve for part in ("--serve", name)]
        command += [part for host in interop.webhook_hosts for part in ("--webhook-host", host)]
        command += [part for host in list_web_hosts(config) for part in ("--web-host", host)]
        command += ["--public-url", interop.public_url] if interop.public_url is not None else []
        command += ["--webhooks", str(webhooks_file(config))] if "webhooks" in interop.serve else []
        # The command that starts the node has already refused an open address, or the user has allowed it.
        command += ["--log-level", log_level, "--log-format", log.format, "--insecure", "--until-input-ends"]
        super().__init__("gateway", "The gateway", command, path="interop", log=log)

    async def run(self) -> int:
        """Run as `Process.run` does. A gateway that chose a free port keeps that port after a restart."""
        if self.url:
            # Programs hold its address, and webhooks of others point there.
            self._command[self._command.index("--port") + 1] = str(urlsplit(self.url).port)
        return await super().run()


def webhooks_file(config: NodeConfig) -> Path:
    """Return the file with the webhook registrations of a node's gateway."""
    return Path(f"{config.db}.webhooks")


class NodeAgents:
    """The agents' processes of a node, for its operators. Implements `AgentSupervisor`."""

    def __init__(self, processes: Sequence[AgentProcess]) -> None:
        self._processes = {process.name: process for process in processes}

    def list_agents(self) -> list[dict[str, Any]]:
        """Return the state of each process, by id."""
        return [self._processes[agent_id].describe() for agent_id in sorted(self._processes)]

    async def control(self, agent_id: str, action: AgentAction) -> dict[str, Any]:
        """Start, stop, restart or reload one. Raises `UnknownRecipient`, `InvalidArguments`."""
        process = self._processes.get(agent_id)
        if process is None:
            known = ", ".join(sorted(self._processes)) or "none"
            raise UnknownRecipient(f"This node runs no agent {agent_id!r}. The agents that it runs: {known}.")
        return await process.control(action)

    async def watch_files(self, write: Callable[[str], None]) -> None:
        """Write how to apply each change of an agent file, once for each change, until cancelled."""
        reported: dict[str, bytes] = {}
        while self._processes:
            await asyncio.sleep(WATCH_S)
            for agent_id, process in self._processes.items():
                data = process.read_file()
                if data != reported.get(agent_id) and process.has_changed():
                    write(f"{process.file} has changed; apply it: roundelay agent reload {agent_id}")
                # By bytes: each further edit is reported again, and one that changes nothing is not.
                reported[agent_id] = data


def _read(path: Path) -> bytes:
    """Return the bytes of a file, or nothing if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES)
    except OSError:
        return b""
