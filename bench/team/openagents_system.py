"""OpenAgents with a network process, one process per agent (`AgentRunner`), and a client for the person.

The clients poll once per second, so most of the wall time is waiting. A lead asks the workers with events, and answers
when five answers have arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from openagents.agents.runner import AgentRunner
from openagents.core.client import AgentClient
from openagents.models.agent_config import AgentConfig
from openagents.models.event import Event
from openagents.models.tool_config import AgentToolConfig
from peer import Ask, Job, read_job, run
from workloads import WORKERS, has_adder, instruction, model_name, target

NETWORK = """\
network:
  name: team
  mode: centralized
  node_id: team-1
  transports:
  - {type: http, config: {host: 127.0.0.1, port: %d, serve_mcp: false, serve_studio: false, serve_a2a: false}}
  - {type: grpc, config: {host: 127.0.0.1, port: %d}}
  manifest_transport: http
  recommended_transport: grpc
  encryption_enabled: false
  discovery_enabled: false
  max_connections: 400
  default_agent_group: guest
  requires_password: false
  mods: [{name: openagents.mods.communication.simple_messaging, enabled: true, config: {}}]
  initialized: true
  created_by_version: 0.9.3.post20
network_profile: {discoverable: false, name: team, description: bench}
log_level: WARNING
"""
ADD = AgentToolConfig(name="add", description="Add two whole numbers.", implementation="workloads.add")


def make_event(sender: str, to: str, text: str) -> Event:
    return Event(
        event_name="agent.message",
        source_id=sender,
        destination_id=f"agent:{to}",
        payload={"text": text},
        text_representation=text,
    )


class Desk(AgentRunner):
    """An agent that answers each sender. A lead asks all workers before it answers."""

    name = work = ""
    _asked: dict[str, tuple[str, str, list[str]]]

    async def react(self, context: Any) -> None:
        event = context.incoming_event
        text = str((event.payload or {}).get("text", ""))
        if not (self.work == "w2" and self.name == "ann"):
            await self._answer(context, event.source_id)
            return
        number = re.findall(r"[QR](\d+)", text)[0]
        if question := re.search(r"Q\d+: .*", text):
            self._asked[number] = (event.source_id, question[0], [])
            sent = (self.send_event(make_event(self.name, worker, question[0])) for worker in WORKERS)
            await asyncio.gather(*sent)
        elif number in self._asked:
            person, asked, answers = self._asked[number]
            answers.append(text)
            if len(answers) == len(WORKERS):
                del self._asked[number]
                await self._answer(context, person, f"{asked} They answered: {' '.join(answers)}")

    async def _answer(self, context: Any, to: str, text: str | None = None) -> None:
        done = await self.run_agent(context, instruction=text, disable_mods=True)
        said = next((str(it.payload["response"]) for it in reversed(done.actions) if it.payload.get("response")), "")
        await self.send_event(make_event(self.name, to, said))


async def serve(job: Job, name: str, port: int) -> None:
    config = AgentConfig(
        instruction=instruction(name),
        model_name=model_name(job.work, name),
        provider="openai",
        api_base=job.base_url,
        api_key="none",
        tools=[ADD] if has_adder(job.work, name) else [],
    )
    desk = Desk(agent_id=name, agent_config=config)
    desk.name, desk.work, desk._asked = name, job.work, {}
    await desk.async_start(network_host="127.0.0.1", network_port=port)
    os.write(ready, b"ready\n")
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def open_system(job: Job) -> AsyncIterator[Ask]:
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
        ports = (first.getsockname()[1], second.getsockname()[1])
    (job.folder / "net").mkdir()
    (job.folder / "net" / "network.yaml").write_text(NETWORK % ports)
    processes: list[asyncio.subprocess.Process] = []

    async def start(*command: str) -> asyncio.subprocess.Process:
        environment = {**os.environ, "BROWSER": "true"}
        processes.append(
            await asyncio.create_subprocess_exec(
                *command,
                cwd=job.folder,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
            )
        )
        return processes[-1]

    async def start_agent(name: str) -> None:
        process = await start(sys.executable, __file__, sys.argv[1], name, str(ports[0]))
        assert process.stdout is not None
        await process.stdout.readline()

    try:
        program = str(Path(sys.executable).parent / "openagents")
        await start(program, "--log-level", "WARNING", "network", "start", "./net")
        for _ in range(600):
            try:
                (await asyncio.open_connection("127.0.0.1", ports[0]))[1].close()
                break
            except OSError:
                await asyncio.sleep(0.1)
        await asyncio.gather(*map(start_agent, job.workload.agents))
        person, waiting = AgentClient("zoe"), dict[int, asyncio.Future[str]]()
        await person.connect("127.0.0.1", ports[0])

        async def on_event(event: Event) -> None:
            found = re.search(r"A(\d+): .*", str((event.payload or {}).get("text", "")))
            future = waiting.pop(int(found[1]), None) if found else None
            if found and future and not future.done():
                future.set_result(found[0])

        person.register_event_handler(on_event, ["*"])

        async def ask(number: int, text: str) -> str:
            future = waiting[number] = asyncio.get_running_loop().create_future()
            await person.send_event(make_event("zoe", target(job.work, number), text))
            return await future

        yield ask
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


if len(sys.argv) > 2:
    ready = os.dup(1)
    os.dup2(2, 1)  # OpenAgents prints to stdout, but only "ready" may reach the parent
    asyncio.run(serve(read_job(), sys.argv[2], int(sys.argv[3])))
else:
    run(open_system)
