"""Supervised processes of a node: the processes of its agents, and the process of the gateway.

The agents of a folder share a process (`shared_process`). An agent has its own process if its file requires it, if no
other agent is in the folder, if the agent crashed the shared process, or after an operator has started it again. A new
process imports the agent's current code.

A supervised process that fails is started again, after a delay that doubles each time. `NodeAgents` shows operators the
state of the agents' processes, and lets them start, stop, restart or reload a process. A changed agent file is
reported, but only a reload applies the change. After a crash, an agent starts with the version of its file that was
loaded before.
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
from roundelay.network.extras import name_command
from roundelay.network.hub import Hub
from roundelay.network.operations.reading import AgentAction
from roundelay.network.yaml import MAX_FILE_BYTES
from roundelay.nodes.forker import Forker, ForkingProcess
from roundelay.nodes.logs import ProcessLog
from roundelay.nodes.reports import Report
from roundelay.nodes.shared_process import SharedProcess, describe_code

if TYPE_CHECKING:
    from roundelay.agents.team import AgentSpec

_logger = logging.getLogger(__name__)

RESTART_BACKOFF = Backoff(0.5, 60.0)
STEADY_S = 60.0
"""Uptime after which a process counts as healthy, in seconds. The restart delay of a healthy process is reset, and its
fault is cleared.
"""
RETURN_GRACE_S = 5.0
"""Time for a disconnected runner to come back before the node's own process replaces it, in seconds."""
WATCH_S = 2.0
"""Interval between checks of the agents' files, in seconds."""
CONTROL_TIMEOUT_S = 20.0
"""Maximum time that an operator's call waits until a process is ready, in seconds."""
WRONG_FILE = 2
"""Exit code of an agent whose file is wrong. Such an agent is not started again, because it would fail again."""


class SupervisedProcess(ForkingProcess):
    """Process that the node starts again after a failure.

    ``description`` names the process in messages. ``path`` names the file to correct if the process cannot start.
    """

    start_message = "the gateway's process starts"

    def __init__(self, name: str, description: str, command: Sequence[str], *, path: str, log: ProcessLog) -> None:
        super().__init__(name, command, on_line=lambda line: log.forward(name, line))
        self.state = "starting"
        """State of the process: starting, running, stopped, taken_over, restarting or ended."""
        self._description = description
        # The path appears in log lines, which a control character in a file name could forge.
        self._path = sanitize(path)
        self._log = log
        self._wanted: AgentAction = "start"
        self._requested = asyncio.Event()  # set when an operator requests another action
        # replaced at each change, so that every waiting task notices every change
        self._state_changed = asyncio.Event()

    async def supervise(self) -> None:
        """Run the process, and start it again after failures, until it ends permanently. Cancelling this method stops
        the process.

        `settled` is set when the process has joined or failed to join. Raises `ConfigError` if the process can never
        start.
        """
        failures = 0
        while True:
            await self._wait_to_start()
            started_at = time.monotonic()
            self._set_state("starting")
            _logger.info(self.start_message, extra={"agent_id": self.name})
            code = await self._run_until_requested()
            # An operator's restart and another agent's crash are not failures of this process, so reset the delay.
            if code is None:
                failures = 0
            # At the first start, the author of the file is still present, so refuse to start the whole node.
            elif code == WRONG_FILE and not self.settled.is_set():
                raise ConfigError(self.error or f"{self._description} cannot start.")
            elif self._is_removed():
                reason = "it was removed from this network"
                _logger.error("%s has ended and is not started again: %s.", self._description, reason)
                self.settled.set()
                self._set_state("ended")
                await self._wait_until_requested()
            elif code == WRONG_FILE:
                # The file was valid when the node started. The file was changed later, or its error appears only at run
                # time.
                reason = self.error or "it cannot start"
                if not reason.startswith(self._path):  # an error in a file already names the file
                    reason = f"{self._path}: {reason}"
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
            # The node lost leadership, so its agents were refused. This is not a failure, so do not increase the delay.
            elif not self._can_run():
                _logger.info("a process has ended where it has nothing to do", extra={"agent_id": self.name})
                self._set_state("restarting")
            else:
                self.settled.set()
                # Reset the delay after a longer run: only several crashes in a row indicate a permanent fault.
                failures = 1 if time.monotonic() - started_at > STEADY_S else failures + 1
                delay_s = RESTART_BACKOFF.delay_s(failures)
                if self.error:
                    # The reason arrived in a report instead of an output line, so print it now.
                    self._log.forward(self.name, f"Error: {self.error}")
                ending = describe_code(code)
                _logger.error("%s has ended with %s; it starts again in %g s.", self._description, ending, delay_s)
                self._set_state("restarting")
                self._record_fault(": ".join([ending, *([self.error] if self.error else [])]))
                # A request ends the delay, because an operator who has fixed the cause should not have to wait.
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

    async def run_once(self) -> int | None:
        """Run the process until it ends. Return the exit code, or None if this process did not cause its end."""
        return await self.run()

    async def _run_until_requested(self) -> int | None:
        """Run the process once. Return the exit code, or None if an operator or another agent's crash ended the
        process."""
        run, requested = asyncio.create_task(self.run_once()), asyncio.create_task(self._requested.wait())
        try:
            await asyncio.wait({run, requested}, return_when=asyncio.FIRST_COMPLETED)
            return run.result() if run.done() else None
        except OSError as error:  # the system has no more processes, memory or disk space, which must not end the node
            self.error = f"The process could not be created: {error.strerror or error}."
            return 1
        finally:
            requested.cancel()
            run.cancel()
            # Wait for the old process before the next one starts. Otherwise one would replace the other at the hub.
            await asyncio.wait({run})

    def _can_run(self) -> bool:
        """Return whether the process currently has anything to do."""
        return True

    def _is_removed(self) -> bool:
        """Return whether an operator has removed the participant of the process from the network."""
        return False

    async def _wait_to_start(self) -> None:
        """Wait until the process has something to do."""

    async def _wait_until_requested(self) -> bool:
        """Wait until an operator starts the process again. Return False if no operator can do this."""
        return False

    async def _wait_until_free(self) -> bool:
        """Wait until the runner that took over has ended. Return False if this cannot be observed."""
        return False

    def _record_fault(self, reason: str | None) -> None:
        """Record why the process ended. None means that the process works again."""

    async def _wait(self, wait: Awaitable[object], timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await wait
        except TimeoutError:
            return False
        return True

    def _set_state(self, state: str) -> None:
        self.state = state
        # Replace the event instead of clearing it: a task that has not run in between would miss the change.
        changed, self._state_changed = self._state_changed, asyncio.Event()
        changed.set()


class AgentProcess(SupervisedProcess):
    """One agent of the node, in its own process or in a shared process."""

    start_message = "an agent's process starts"

    def __init__(
        self,
        spec: AgentSpec,
        hub: Hub,
        url: str,
        *,
        log_level: str,
        log: ProcessLog,
        snapshots: Path,
        shared: SharedProcess | None = None,
        forker: Forker | None = None,
    ) -> None:
        command = ["-m", "roundelay", "agent", "run", str(spec.path), "--only", spec.id, "--url", url]
        command += ["--log-level", log_level, "--log-format", log.format, "--until-input-ends"]
        super().__init__(spec.id, f"Agent {spec.id}", command, path=str(spec.path), log=log)
        self._hub = hub
        self._forker = forker
        self._shared = shared  # shared process for the next start, or None if the agent gets its own process
        self._runs_in: SharedProcess | None = None
        self._isolation = ""
        self.file = spec.path
        self._loaded_bytes, self._loaded_spec = _read(spec.path), spec.find_node().plain()
        # Store the copy in a folder of the node. Next to the file, users would find a second, outdated version.
        self._snapshot = snapshots / f"{spec.id}.yaml"
        # A run with the loaded file adds arguments that the next run may not need, so keep the original command.
        self._plain_command = list(self._command)
        self._has_fault = False

    @property
    def pid(self) -> int:
        return super().pid if self._runs_in is None else self._runs_in.pid

    @property
    def is_up(self) -> bool:
        return super().is_up if self._runs_in is None else self._runs_in.is_up

    async def run_once(self) -> int | None:
        """Run the agent with the loaded version of its file."""
        self._command = list(self._plain_command)
        as_loaded = None
        if self.has_changed():
            # The file was edited after it was loaded. Only a reload may apply the edit, not a crash.
            as_loaded = self._snapshot
            as_loaded.write_bytes(self._loaded_bytes)
            self._command += ["--as-loaded", str(as_loaded)]
        # An agent that crashes after each start seems healthy in between, so keep its fault until it has run for a
        # while.
        steady = asyncio.create_task(self._clear_fault_later()) if self._has_fault else None
        try:
            if self._shared is None:
                return await self.run()
            self.last_lines.clear()
            self.error = ""
            self._runs_in = self._shared
            return await self._runs_in.run_agent(self, self.file, as_loaded)
        finally:
            self._runs_in, self.is_ready = None, False
            if steady is not None:
                steady.cancel()

    def isolate(self, reason: str) -> None:
        """Give the agent its own process from its next start."""
        if self._shared is not None:
            self._shared, self._isolation = None, reason
            _logger.warning("Agent %s is isolated in its own process: %s.", self.name, reason)

    def has_changed(self) -> bool:
        """Return whether the file now declares the agent differently from the loaded version."""
        # Compare the bytes first, because this method runs every few seconds and parsing is slow.
        if _read(self.file) == self._loaded_bytes:
            return False
        try:
            return self._read_spec().find_node().plain() != self._loaded_spec
        except ConfigError:
            return True

    def describe(self) -> dict[str, Any]:
        """Return this agent's entry in the result of `network.node_agents`."""
        fields: dict[str, Any] = {"agent_id": self.name, "state": self.state, "file": str(self.file)}
        fields |= {"pid": self.pid} if self.is_up else {}
        fields |= {"error": self.error} if self.error and self.state in ("ended", "restarting") else {}
        fields["process"] = "own" if self._shared is None and self._runs_in is None else "shared"
        fields |= {"isolated": self._isolation} if self._isolation else {}
        return fields | {"has_changed": self.has_changed()}

    async def control(self, action: AgentAction) -> dict[str, Any]:
        """Carry out an operator's action, and wait until the process is ready or stopped.

        Raises `InvalidArguments` for a wrong file. In that case the process continues unchanged.
        """
        # Do nothing: another start would end a running agent in the middle of its work.
        if action == "start" and self.state in ("starting", "running"):
            return self.describe()
        if action == "reload":
            self._reload()
        if action != "stop":
            self._shared = None  # a new process imports the current code of the agent's tools
        # Store the action before setting the event, because the woken task reads it at once.
        self._wanted = action
        self._requested.set()
        final_states = ("stopped",) if action == "stop" else ("running", "ended", "taken_over")
        await self._wait(self._wait_for_state(*final_states), CONTROL_TIMEOUT_S)
        return self.describe()

    def _reload(self) -> None:
        """Load the current version of the file. Raises `InvalidArguments` if it is wrong."""
        data = _read(self.file)
        try:
            spec = self._read_spec().find_node().plain()
        except ConfigError as error:
            raise InvalidArguments(f"{self.name} keeps running with the file that it loaded before: {error}") from error
        # Replace the loaded version only with a valid file: a wrong file would end the agent at its next crash.
        self._loaded_bytes, self._loaded_spec = data, spec

    def _read_spec(self) -> AgentSpec:
        from roundelay.agent_files import read_agents  # this loads all agent code, so do it only for a changed file

        [spec] = read_agents([self.file], [self.name])
        return spec

    def read_file(self) -> bytes:
        return _read(self.file)

    async def _wait_for_state(self, *states: str) -> None:
        """Wait until the process is in one of these states."""
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
        """Wait until the runner that took over has ended, or an operator starts the agent again."""
        free = asyncio.create_task(self._hub.wait_until_unserved(self.name, RETURN_GRACE_S))
        requested = asyncio.create_task(self._requested.wait())
        try:
            await asyncio.wait({free, requested}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            free.cancel()
            requested.cancel()
        return True

    def _can_run(self) -> bool:
        # A read replica serves no agents and would refuse them again and again.
        return self._hub.status.opened.is_set()

    def _is_removed(self) -> bool:
        state = self._hub.state
        return state.participant(self.name) is not None and state.present(self.name) is None

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
    """Process of the gateway for other protocols. Webhook registrations are stored next to the database."""

    def __init__(self, config: NodeConfig, url: str, *, log_level: str, log: ProcessLog) -> None:
        interop = config.interop
        command = ["-m", "roundelay", "gateway", "--node", url, "--host", interop.host, "--port", str(interop.port)]
        command += [part for name in interop.serve for part in ("--serve", name)]
        command += [part for host in interop.webhook_hosts for part in ("--webhook-host", host)]
        command += [part for host in list_web_hosts(config) for part in ("--web-host", host)]
        command += ["--public-url", interop.public_url] if interop.public_url is not None else []
        command += ["--webhooks", str(webhooks_file(config))] if "webhooks" in interop.serve else []
        # The command that started the node has checked that this address is private or that the user allowed it.
        command += ["--log-level", log_level, "--log-format", log.format, "--insecure", "--until-input-ends"]
        super().__init__("gateway", "The gateway", command, path="interop", log=log)

    async def run(self) -> int:
        """Run the gateway's process. If the gateway chose a free port, it uses the same port after a restart."""
        if self.url:
            # Keep the port, because other programs may have stored the gateway's address.
            self._command[self._command.index("--port") + 1] = str(urlsplit(self.url).port)
        return await super().run()


def webhooks_file(config: NodeConfig) -> Path:
    """Return the file with the webhook registrations of a node's gateway."""
    return Path(f"{config.db}.webhooks")


class NodeAgents:
    """Agent processes of a node, which operators control. Implements `AgentSupervisor`."""

    def __init__(self, processes: Sequence[AgentProcess]) -> None:
        self._processes = {process.name: process for process in processes}

    def list_agents(self) -> list[dict[str, Any]]:
        """Return the entries of all agents for `network.node_agents`, ordered by id."""
        return [self._processes[agent_id].describe() for agent_id in sorted(self._processes)]

    async def control(self, agent_id: str, action: AgentAction) -> dict[str, Any]:
        """Start, stop, restart or reload the process of an agent. Raises `UnknownRecipient` or `InvalidArguments`."""
        process = self._processes.get(agent_id)
        if process is None:
            known = ", ".join(sorted(self._processes)) or "none"
            raise UnknownRecipient(f"This node runs no agent {agent_id!r}. The agents that it runs: {known}.")
        return await process.control(action)

    async def watch_files(self, write: Callable[[str], None]) -> None:
        """Report each change of an agent file once, with the command that applies it. Runs until cancelled."""
        reported: dict[str, bytes] = {}
        while self._processes:
            await asyncio.sleep(WATCH_S)
            for agent_id, process in self._processes.items():
                data = process.read_file()
                if data != reported.get(agent_id) and process.has_changed():
                    reload = f"{name_command(Path.cwd())} agent reload {agent_id}"
                    write(f"{process.file} has changed; apply it: {reload}")
                # Compare bytes: each further edit is then reported, but not a save without changes.
                reported[agent_id] = data


def _read(path: Path) -> bytes:
    """Return the bytes of a file, or empty bytes if the file cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES)
    except OSError:
        return b""
