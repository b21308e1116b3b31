"""``roundelay agent run``: the agents of some files, in this process, until it is stopped."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from roundelay.agents.channels import join_channel
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.team import AgentSpec, build_runner, load_agents
from roundelay.network.client import NetworkClient
from roundelay.network.config import load_yaml, resolve_config
from roundelay.network.errors import ConfigError, Superseded
from roundelay.nodes.up import ready_line

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def read_agents(files: Sequence[Path], only: Sequence[str] = ()) -> list[AgentSpec]:
    """The agents of agent files and of nodes' files, all or those named. Raises `ConfigError`."""
    found: dict[str, AgentSpec] = {}
    for file in files:
        for spec in _read_file(file):
            first = found.setdefault(spec.id, spec)
            if first is not spec:
                raise ConfigError(
                    f'the agent "{spec.id}" stands in {first.path}:{first.line} already', path=spec.path, line=spec.line
                )
    missing = sorted(set(only) - found.keys())
    places = ", ".join(map(str, files))
    if missing:
        raise ConfigError(f"{places} has no agent {missing[0]}; known are: {', '.join(sorted(found)) or 'none'}")
    if not found:
        raise ConfigError(f"{places} declares no agents; see docs/agents.md, or: roundelay init")
    return [spec for agent_id, spec in found.items() if not only or agent_id in only]


def _read_file(file: Path) -> list[AgentSpec]:
    root = load_yaml(file)
    if isinstance(root.value, dict) and "agents" in root.value and "id" not in root.value:
        return load_agents(resolve_config(file, {}, {})[0].agents)  # a node's file: its other keys must be right too
    return load_agents(file)


async def run_agents(
    specs: Sequence[AgentSpec],
    *,
    url: str | None,
    token: str | None,
    until_input_ends: bool,
    say: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    """Run agents until SIGTERM, SIGINT or, if asked, the end of the input. ``say`` gets a line for each that has joined.

    Raises what ends an agent for good, and then ends the others; an agent that another runner took over just ends.
    """
    runners = [build_runner(spec) for spec in specs]
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        stopping.set()
        for number in _SIGNALS:  # a second one ends the process, even if a tool hinders the end
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)
    async with asyncio.TaskGroup() as group:
        agents = [group.create_task(_run(runner, url, token, say, note)) for runner in runners]
        enders = [group.create_task(_wait_for_all(agents)), group.create_task(_wait_for(stopping))]
        if until_input_ends:
            enders.append(group.create_task(_wait_for_input_end()))
        await asyncio.wait(enders, return_when=asyncio.FIRST_COMPLETED)
        for task in (*agents, *enders):
            task.cancel()


async def _wait_for_all(agents: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.wait(agents)


async def _wait_for(event: asyncio.Event) -> None:
    await event.wait()


async def _run(
    runner: SimpleAgentRunner,
    url: str | None,
    token: str | None,
    say: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    client = NetworkClient(runner.agent_id, url, kind="agent", token=token, role="reactor", card=runner.describe_card())
    async with client:
        for name in runner.channels:
            await join_channel(client, name)  # before it says ready, so that it misses nothing that is said after
        say(ready_line(runner.agent_id, client.url))
        try:
            await runner.run(client)
        except Superseded as error:
            note(str(error))


async def _wait_for_input_end() -> None:
    """Wait until whoever holds the other end of the input is gone: the node that started this process."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    try:
        while await reader.read(4096):
            continue
    finally:
        transport.close()
