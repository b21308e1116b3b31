"""Stage with real processes: `roundelay up`, and one process per agent. The log files of all processes are in one
folder."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from roundelay.network.config import load_yaml
from roundelay.network.frames import Kind
from roundelay.nodes.processes import NotReady, Process
from roundelay.simulation.network import SimulationError
from roundelay.testing.agents import AgentPlan
from roundelay.testing.form import HUB
from roundelay.testing.live_stage import LiveStage

NEEDS_SIMULATION = "The network runs in real processes; leave out the mark roundelay_processes for this."


class ProcessStage(LiveStage):
    """Stage with the hub and the agents in separate processes. ``folder`` contains their files and the database. The
    name of the hub's process is `HUB`."""

    def __init__(self, folder: Path) -> None:
        super().__init__("")
        self._folder = folder
        self._processes: dict[str, Process] = {}

    async def __aenter__(self) -> Self:
        try:
            await self._start_hub()
            self.token = (self._folder / "network.db.owner").read_text(encoding="ascii").strip()
            return await super().__aenter__()
        except BaseException:
            await self._kill_all()
            raise

    async def __aexit__(self, *_: object) -> None:
        try:
            await super().__aexit__()
        finally:
            await self._kill_all()

    async def join(self, participant: str, kind: Kind = "human") -> None:
        if participant not in self.plans:
            await super().join(participant, kind)
        elif participant in self._processes and self._processes[participant].is_up:
            raise SimulationError(f"The agent {participant} is running already.")
        else:
            await self._start(participant)

    async def kill(self, name: str) -> None:
        if name not in self._processes or not self._processes[name].is_up:
            raise SimulationError(f"The agent {name} is not running.")
        await _kill(self._processes[name])

    async def restart(self, name: str) -> None:
        if name not in self._processes:
            raise SimulationError(f"The agent {name} was never started.")
        await _kill(self._processes[name])
        await (self._start_hub() if name == HUB else self._start(name))

    async def disconnect(self, participant: str) -> None:
        raise SimulationError(NEEDS_SIMULATION)

    async def _start_hub(self) -> None:
        """Start the hub. A restarted hub uses its previous port, because clients reconnect to its first address."""
        port = self.url.rpartition(":")[2].strip("/") or "0"
        command = ("up", "--port", port, "--db", "network.db", "--no-agents")
        self.url = await self._run(HUB, command)

    async def _start(self, agent_id: str) -> None:
        """Write an agent's file and start the agent's process."""
        value, python_path = _write_agent(self.plans[agent_id])
        file = self._folder / f"{agent_id}.yaml"
        file.write_text(json.dumps(value, indent=1), encoding="utf-8")
        command = ("agent", "run", str(file), "--url", self.url)
        await self._run(agent_id, command, python_path=python_path)

    async def _run(self, name: str, command: Sequence[str], *, python_path: Path | None = None) -> str:
        """Start a process, and return the address from its ready report. Raises `SimulationError`."""
        # Settings for the developer's own node, such as its address, must not affect the test.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ROUNDELAY_")}
        # Store the test's tokens in the test's folder: otherwise they would stay in the developer's folder.
        environment["ROUNDELAY_HOME"] = str(self._folder / "home")
        if python_path is not None:
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(python_path), environment.get("PYTHONPATH"))))
        log = self._folder / f"{name}.log"

        def write_log(line: str) -> None:
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

        arguments = ("-m", "roundelay", *command, "--until-input-ends")
        process = self._processes[name] = Process(
            name, arguments, on_line=write_log, folder=self._folder, environment=environment
        )
        try:
            return await process.start()
        except NotReady as error:
            raise SimulationError(str(error)) from error

    async def _kill_all(self) -> None:
        await asyncio.gather(*map(_kill, self._processes.values()))


async def _kill(process: Process) -> None:
    process.kill()
    await process.stop()


def _write_agent(plan: AgentPlan) -> tuple[dict[str, object], Path]:
    """Return the agent in the format of an agent file, and the folder that contains the agent's tools."""
    agent_id, choice, node = plan.agent_id, plan.choice, plan.node
    if choice is None or node is None:
        raise SimulationError(NEEDS_SIMULATION)
    if choice.model is not None and choice.model.replay is not None:
        raise SimulationError(f"{agent_id}: tapes work in-process only; leave out the mark roundelay_processes.")
    if choice.file is not None:
        path = node.path.parent / choice.file
        value = load_yaml(path).plain()
        if not isinstance(value, dict) or value.get("id") != agent_id:
            raise SimulationError(f"{path} must be the file of one agent, {agent_id}.")
        settings: dict[str, object] = dict(value)
        if choice.model is not None:
            settings["model"] = choice.model.model_dump(mode="json", exclude_none=True, by_alias=True)
        if choice.visibility is not None:
            settings["visibility"] = choice.visibility
        return settings, path.parent
    said = choice.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True, exclude={"starts"})
    script = said.pop("script")
    model = {"script": script} if isinstance(script, str) else {"rules": script}
    return {"id": agent_id, "instruction": choice.instruction, **said, "model": model}, node.path.parent
