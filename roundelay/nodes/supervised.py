"""The processes beside a node: one for each agent that the node's file declares, and one for the gateway.

Such a process is started again when it ends with an error, later each time. `NodeAgents` is what operators have of the
agents' processes: which there are, and whether to start, stop, restart or reload one. A changed agent file is noticed
and offered, and applied by a reload alone: until then the process that crashes comes back with the file as loaded.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from roundelay.network.backoff import Backoff
from roundelay.network.config import NodeConfig, list_web_hosts
from roundelay.network.errors import ConfigError, InvalidArguments, UnknownRecipient
from roundelay.network.hub import Hub
from roundelay.network.operations.reading import AgentAction
from roundelay.network.yaml import MAX_FILE_BYTES
from roundelay.nodes.logs import Voice
from roundelay.nodes.processes import Process, ready_line
from roundelay.terminal.text import clean

if TYPE_CHECKING:
    from roundelay.agents.team import AgentSpec

_logger = logging.getLogger(__name__)

RESTART_BACKOFF = Backoff(0.5, 60.0)
STEADY_S = 60.0
"""A process that lived for this long begins again with the first delay, and its fault is over."""
RETURN_GRACE_S = 5.0
"""Time for a runner that lost its connection to come back before the node's own process replaces it, in seconds."""
WATCH_S = 2.0
"""Interval between checks of the agents' files, in seconds."""
CONTROL_TIMEOUT_S = 20.0
"""Maximum time that an operator's call waits for a process to be ready, in seconds."""
WRONG_FILE = 2
"""Exit code of an agent whose file is wrong; starting it again would not help."""
GATEWAY_READY = "Roundelay's gateway to "
"""Beginning of the line that a gateway prints when it is ready."""


class KeptProcess(Process):
    """A process beside the node, started again when it fails. ``what`` names it in sentences, ``path`` the file that
    may be wrong."""

    starting = "the gateway's process starts"

    def __init__(self, name: str, what: str, command: Sequence[str], *, ready: str, path: str, voice: Voice) -> None:
        super().__init__(name, command, ready=ready, take_line=self._hear_line)
        self.state = "starting"
        """State of the process: starting, running, stopped, taken_over, restarting or ended."""
        self._what = what
        self._path = clean(path)
        self._voice = voice
        self._error = ""
        self._wanted: AgentAction = "start"
        self._asked = asyncio.Event()
        self._changed = asyncio.Event()

    async def keep(self) -> None:
        """Run it until it ends by itself, or until cancelled, which stops it. Raises `ConfigError` when it cannot
        begin.

        Once it has joined, or has failed at it, it counts as `settled`.
        """
        failures = 0
        while True:
            await self._wait_to_start()
            started_at = time.monotonic()
            self._error = ""
            self._enter("starting")
            _logger.info(self.starting, extra={"agent_id": self.name})
            code = await self._run_until_asked()
            if code is None:
                failures = 0
            elif code == WRONG_FILE and not self.settled.is_set():
                raise ConfigError(self._error or f"{self._what} cannot start.")
            elif code == WRONG_FILE:  # as only its run finds, or since it was changed
                why = f"{self._path}: {self._error or 'it cannot start'}"
                _logger.error("%s has ended with exit code %d and is not started again: %s", self._what, code, why)
                self._enter("ended")
                self._report(why)
                if not await self._wait_until_asked():
                    return
            elif code == 0:
                self.settled.set()
                _logger.warning("%s has ended.", self._what)
                self._enter("taken_over")
                if not await self._wait_for_turn():
                    return
            elif not self._can_run():
                _logger.info("a process has ended where it has nothing to do", extra={"agent_id": self.name})
                self._enter("restarting")
            else:
                self.settled.set()
                failures = 1 if time.monotonic() - started_at > STEADY_S else failures + 1
                delay_s = RESTART_BACKOFF.delay_s(failures)
                if self._error:
                    self._voice.pass_on(self.name, f"Error: {self._error}")
                ending = f"exit code {code}" if code > 0 else f"signal {-code}"
                _logger.error("%s has ended with %s; it starts again in %g s.", self._what, ending, delay_s)
                self._enter("restarting")
                self._report(": ".join([ending, *([self._error] if self._error else [])]))
                await self._wait(self._asked.wait(), delay_s)
            if self._wanted == "stop":
                self._enter("stopped")
                _logger.info("an operator stopped it", extra={"agent_id": self.name})
                await self._wait_until_asked()
            self._asked.clear()

    async def _run_until_asked(self) -> int | None:
        """Run it once; gives the exit code, or None where an operator ended it."""
        running, asked = asyncio.create_task(self.run()), asyncio.create_task(self._asked.wait())
        try:
            await asyncio.wait({running, asked}, return_when=asyncio.FIRST_COMPLETED)
            return running.result() if running.done() else None
        finally:
            asked.cancel()
            running.cancel()
            await asyncio.wait({running})

    def _can_run(self) -> bool:
        """Whether the process could do anything now."""
        return True

    async def _wait_to_start(self) -> None:
        """Wait until the process could do anything."""

    async def _wait_until_asked(self) -> bool:
        """Wait until it is to run again; False: it never will."""
        return False

    async def _wait_for_turn(self) -> bool:
        """Wait until the runner that took its place has ended; False: it ends too."""
        return False

    def _report(self, reason: str | None) -> None:
        """Tell that it has ended, or (None) that it works."""

    async def _wait(self, waiting: Awaitable[object], timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await waiting
        except TimeoutError:
            return False
        return True

    def _enter(self, state: str) -> None:
        self.state = state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _hear_line(self, line: str) -> None:
        if line.startswith("Error: "):
            self._error = clean(line.removeprefix("Error: "))
        else:
            self._voice.pass_on(self.name, line)

    def on_ready(self) -> None:
        self._enter("running")


class AgentProcess(KeptProcess):
    """The process of one agent."""

    starting = "an agent's process starts"

    def __init__(self, spec: AgentSpec, hub: Hub, url: str, *, log_level: str, voice: Voice, snapshots: Path) -> None:
        command = ["-m", "roundelay", "agent", "run", str(spec.path), "--only", spec.id, "--url", url]
        command += ["--log-level", log_level, "--log-format", voice.format, "--until-input-ends"]
        ready = ready_line(spec.id, "")
        super().__init__(spec.id, f"Agent {spec.id}", command, ready=ready, path=str(spec.path), voice=voice)
        self._hub = hub
        self.file = spec.path
        self._as_loaded, self._loaded = _read(spec.path), spec.find_node().plain()
        self._snapshot = snapshots / f"{spec.id}.yaml"
        self._plain_command = list(self._command)
        self._has_fault = False

    async def run(self) -> int:
        """As `Process.run`, with the file as it was loaded."""
        self._command = list(self._plain_command)
        if self.has_changed():
            self._snapshot.write_bytes(self._as_loaded)
            self._command += ["--as-loaded", str(self._snapshot)]
        steady = asyncio.create_task(self._end_fault_later()) if self._has_fault else None
        try:
            return await super().run()
        finally:
            if steady is not None:
                steady.cancel()

    def has_changed(self) -> bool:
        """Whether what the file says of the agent is not what its process was started with."""
        if _read(self.file) == self._as_loaded:
            return False
        try:
            return self._read_spec().find_node().plain() != self._loaded
        except ConfigError:
            return True

    def describe(self) -> dict[str, Any]:
        told: dict[str, Any] = {"agent_id": self.name, "state": self.state, "file": str(self.file)}
        told |= {"pid": self.pid} if self.is_up else {}
        told |= {"error": self._error} if self._error and self.state in ("ended", "restarting") else {}
        return told | {"has_changed": self.has_changed()}

    async def control(self, action: AgentAction) -> dict[str, Any]:
        """Do what an operator asks, and wait until the process is ready, or stopped. Raises `InvalidArguments` for a
        file that is wrong: the process goes on as it was."""
        if action == "start" and self.state in ("starting", "running"):
            return self.describe()
        if action == "reload":
            self._reload()
        self._wanted = action
        self._asked.set()
        wanted = ("stopped",) if action == "stop" else ("running", "ended", "taken_over")
        await self._wait(self._until(*wanted), CONTROL_TIMEOUT_S)
        return self.describe()

    def _reload(self) -> None:
        """Take the file as it is now."""
        data = _read(self.file)
        try:
            loaded = self._read_spec().find_node().plain()
        except ConfigError as error:
            raise InvalidArguments(f"{self.name} goes on with its file as loaded: {error}") from error
        self._as_loaded, self._loaded = data, loaded

    def _read_spec(self) -> AgentSpec:
        from roundelay.nodes.run_agents import read_agents  # only where a file has changed: it loads what runs agents

        [found] = read_agents([self.file], [self.name])
        return found

    def read_file(self) -> bytes:
        return _read(self.file)

    async def _until(self, *states: str) -> None:
        """Wait for one of these states, after a change."""
        while True:
            await self._changed.wait()
            if self.state in states:
                return

    async def _wait_until_asked(self) -> bool:
        self._asked.clear()
        while True:
            await self._asked.wait()
            if self._wanted != "stop":
                return True
            self._asked.clear()
            self._enter("stopped")

    async def _wait_for_turn(self) -> bool:
        """Serve again once the runner that took over has ended, unless an operator wants it before."""
        turn = asyncio.create_task(self._hub.wait_until_away(self.name, RETURN_GRACE_S))
        asked = asyncio.create_task(self._asked.wait())
        try:
            await asyncio.wait({turn, asked}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            turn.cancel()
            asked.cancel()
        return True

    def _can_run(self) -> bool:
        # a node that follows serves no agents: one that came to it would be refused, again and again
        return self._hub.opened.is_set()

    async def _wait_to_start(self) -> None:
        await self._hub.opened.wait()

    def _report(self, reason: str | None) -> None:
        self._has_fault = reason is not None
        self._hub.note_ended(self.name, reason)

    async def _end_fault_later(self) -> None:
        await asyncio.sleep(STEADY_S)
        if self.is_ready:
            self._report(None)


class GatewayProcess(KeptProcess):
    """The process by which programs of other protocols come in. Webhooks are kept beside the database."""

    def __init__(self, config: NodeConfig, url: str, *, log_level: str, voice: Voice) -> None:
        interop = config.interop
        command = ["-m", "roundelay", "gateway", "--node", url, "--host", interop.host, "--port", str(interop.port)]
        command += [part for name in interop.serve for part in ("--serve", name)]
        command += [part for host in interop.webhook_hosts for part in ("--webhook-host", host)]
        command += [part for host in list_web_hosts(config) for part in ("--web-host", host)]
        command += ["--public-url", interop.public_url] if interop.public_url is not None else []
        command += ["--webhooks", str(webhooks_file(config))] if "webhooks" in interop.serve else []
        command += ["--log-level", log_level, "--log-format", voice.format, "--insecure", "--until-input-ends"]
        super().__init__("gateway", "The gateway", command, ready=f"{GATEWAY_READY}{url} ", path="interop", voice=voice)

    async def run(self) -> int:
        """As `Process.run`; where it took any free port it comes back on the same one."""
        if self.url:
            self._command[self._command.index("--port") + 1] = str(urlsplit(self.url).port)
        return await super().run()

    @property
    def url(self) -> str:
        """Where it is; nothing before it is ready."""
        found = re.search(r"https?://\S+", self._place)
        return found[0] if found else ""


def webhooks_file(config: NodeConfig) -> Path:
    """Return the file in which a node's gateway keeps the registrations of webhooks."""
    return Path(f"{config.db}.webhooks")


class NodeAgents:
    """The agents' processes of a node, for its operators. Implements `AgentSupervisor`."""

    def __init__(self, processes: Sequence[AgentProcess]) -> None:
        self._processes = {it.name: it for it in processes}

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

    async def watch_files(self, say: Callable[[str], None]) -> None:
        """Say of each agent file that has changed how it is applied, once for each change; until cancelled."""
        told: dict[str, bytes] = {}
        while self._processes:
            await asyncio.sleep(WATCH_S)
            for agent_id, process in self._processes.items():
                data = process.read_file()
                if data != told.get(agent_id) and process.has_changed():
                    say(f"{process.file} has changed; apply it: roundelay agent reload {agent_id}")
                told[agent_id] = data


def _read(path: Path) -> bytes:
    """Return the bytes of a file, or nothing if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES)
    except OSError:
        return b""
