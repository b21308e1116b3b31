"""A network of real processes, for tests that ask for them: `roundelay up` and each agent as a process of its own, in a folder.

Reads the first line that each prints when it is ready; what it writes to its standard error is kept in a file beside it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path

from roundelay.network.config import load_yaml
from roundelay.nodes.up import ready_line
from roundelay.scenario.spec import AgentChoice
from roundelay.simulation.setting import SimulationError

START_TIMEOUT_S = 30.0


class Process:
    """One command of ours that runs until it is ended."""

    def __init__(self, name: str, folder: Path, home: Path) -> None:
        self.name = name
        self._errors = folder / f"{name}.log"
        self._folder = folder
        self._home = home
        self._process: asyncio.subprocess.Process | None = None
        self._draining: asyncio.Task[None] | None = None

    async def start(self, *arguments: str, ready: str, python_path: Path | None = None) -> re.Match[str]:
        """Start it, and wait for the line that says that it is ready. Raises `SimulationError` with what it said instead."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ROUNDELAY_")}
        environment["ROUNDELAY_HOME"] = str(self._home)
        if python_path is not None:
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(python_path), environment.get("PYTHONPATH"))))
        with self._errors.open("ab") as errors:
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "roundelay", *arguments,
                cwd=self._folder, env=environment, stdout=asyncio.subprocess.PIPE, stderr=errors, start_new_session=True,
            )  # fmt: skip
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                async for line in process.stdout:
                    if found := re.match(ready, line.decode(errors="replace")):
                        self._draining = asyncio.create_task(_drain(process.stdout))
                        return found
        except TimeoutError:
            await self.kill()
        words = self._errors.read_text(encoding="utf-8", errors="replace").strip()
        raise SimulationError(f"The process of {self.name} did not get ready: {words or 'it said nothing'}")

    async def kill(self) -> None:
        """End it as ``kill -9`` does. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            if self._draining is not None:
                self._draining.cancel()
            await process.wait()

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.returncode is None


async def _drain(stream: asyncio.StreamReader) -> None:
    """Read what is printed after the ready line: a process whose output nobody takes would stand still."""
    while await stream.read(64 * 1024):
        pass


class ProcessNetwork:
    """A hub and agents in processes of their own. ``url`` and ``token`` let an operator join."""

    def __init__(self, folder: Path) -> None:
        self.url = ""
        self._folder = folder
        self._home = folder / "home"
        self._hub = Process("hub", folder, self._home)
        self._agents: dict[str, tuple[Process, tuple[str, ...], Path | None]] = {}

    @property
    def token(self) -> str:
        return (self._folder / "network.db.owner").read_text(encoding="ascii").strip()

    @property
    def agent_ids(self) -> list[str]:
        return list(self._agents)

    async def start_hub(self) -> None:
        """Start the hub, on the port that it had."""
        port = self.url.rpartition(":")[2].strip("/") or "0"
        flags = ("--port", port, "--db", "network.db", "--no-agents")
        found = await self._hub.start("up", *flags, ready=r"Roundelay is ready at (ws://\S+)")
        self.url = found[1]

    async def kill_hub(self) -> None:
        await self._hub.kill()

    async def start_agent(self, agent_id: str, choice: AgentChoice, beside: Path) -> None:
        """Write the agent's file, and start a process that runs it; files that it names are beside ``beside``."""
        if agent_id in self._agents and self._agents[agent_id][0].is_up:
            raise SimulationError(f"The agent {agent_id} is up already.")
        value, folder = _write_agent(agent_id, choice, beside)
        file = self._folder / f"{agent_id}.yaml"
        file.write_text(json.dumps(value, indent=1), encoding="utf-8")
        arguments = ("agent", "run", str(file), "--url", self.url)
        process = Process(agent_id, self._folder, self._home)
        self._agents[agent_id] = (process, arguments, folder)
        await process.start(*arguments, ready=re.escape(ready_line(agent_id, "")), python_path=folder)

    async def kill_agent(self, agent_id: str) -> None:
        if agent_id not in self._agents or not self._agents[agent_id][0].is_up:
            raise SimulationError(f"No agent {agent_id} is up.")
        await self._agents[agent_id][0].kill()

    async def restart_agent(self, agent_id: str) -> None:
        if agent_id not in self._agents:
            raise SimulationError(f"No agent {agent_id} has been started.")
        process, arguments, folder = self._agents[agent_id]
        await process.kill()
        await process.start(*arguments, ready=re.escape(ready_line(agent_id, "")), python_path=folder)

    async def close(self) -> None:
        """End every process. Idempotent."""
        await asyncio.gather(*(process.kill() for process, _, _ in self._agents.values()))
        await self._hub.kill()


def _write_agent(agent_id: str, choice: AgentChoice, beside: Path) -> tuple[dict[str, object], Path]:
    """The agent as its file would say it, and the folder that its tools are beside."""
    if choice.model is not None and choice.model.replay is not None:
        raise SimulationError(f"{agent_id}: tapes are played in-process; leave out the mark roundelay_processes.")
    if choice.file is not None:
        path = beside.parent / choice.file
        value = load_yaml(path).plain()
        if not isinstance(value, dict) or value.get("id") != agent_id:
            raise SimulationError(f"{path} is not the file of one agent {agent_id}.")
        made: dict[str, object] = dict(value)
        if choice.model is not None:
            made["model"] = choice.model.model_dump(mode="json", exclude_none=True, by_alias=True)
        if choice.visibility is not None:
            made["visibility"] = choice.visibility
        return made, path.parent
    said = choice.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    script = said.pop("script")
    said.pop("starts", None)
    model = {"script": script} if isinstance(script, str) else {"rules": script}
    return {"id": agent_id, "instruction": choice.instruction, **said, "model": model}, beside.parent
