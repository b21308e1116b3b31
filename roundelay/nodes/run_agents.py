"""``roundelay agent run``: the agents of some files, in this process, until it is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.team import AgentSpec, load_agents
from roundelay.network.client import NetworkClient
from roundelay.network.config import YamlNode, load_yaml, resolve_config
from roundelay.network.errors import ConfigError, Superseded
from roundelay.nodes.processes import ready_line, stop_signals, wait_for_first, wait_for_input_end


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
    if is_node_file(load_yaml(file)):
        return load_agents(resolve_config(file, {}, {})[0].agents)  # its other keys must be right too
    return load_agents(file)


def is_node_file(root: YamlNode) -> bool:
    """Whether a file is a node's, and not of one agent or several."""
    return isinstance(root.value, dict) and "agents" in root.value and "id" not in root.value


async def run_agents(
    runners: Sequence[SimpleAgentRunner],
    *,
    url: str | None,
    token: str | None,
    until_input_ends: bool,
    say: Callable[[str], None],
    note: Callable[[str], None],
    make_client: type[NetworkClient] = NetworkClient,
) -> None:
    """Run agents until SIGTERM, SIGINT or, if asked, the end of the input, which a node holds open: its agents stay at
    it. ``say`` gets a line for each that has joined.

    Raises what ends an agent for good, and then ends the others; an agent that another runner took over just ends, and
    ``note`` is told. A node's agent that was overtaken while the node was away raises `Superseded`: the node starts it
    again.
    """

    async def run_one(runner: SimpleAgentRunner) -> None:
        await runner.prepare()
        card = runner.describe_card()
        # beside a node that waits for its turn to lead, the agents of the one that leads work
        joining = make_client(
            runner.agent_id,
            url,
            kind="agent",
            token=token,
            role="reactor",
            card=card,
            goes_to_leader=not until_input_ends,
        )
        async with joining as client:
            await runner.join_channels(client)  # before it says ready, so that it misses nothing that is said after
            say(ready_line(runner.agent_id, client.url))
            try:
                await runner.run(client)
            except Superseded as error:
                if until_input_ends and isinstance(client.failure, Superseded) and client.failure.was_away:
                    raise Superseded(
                        f"Another process of agent {runner.agent_id} worked while the node was away; this one begins "
                        "anew."
                    ) from error
                note(str(error))

    with stop_signals() as stopping:
        async with asyncio.TaskGroup() as group:
            agents = [group.create_task(run_one(runner)) for runner in runners]
            input_end = [wait_for_input_end()] if until_input_ends else []
            await wait_for_first(asyncio.wait(agents), stopping.wait(), *input_end)
            for task in agents:
                task.cancel()
