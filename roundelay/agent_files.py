"""Read the agents that agent files and node files declare."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from roundelay.agents.team import AgentSpec, load_agents
from roundelay.network.config import YamlNode, load_yaml, resolve_config
from roundelay.network.errors import ConfigError


def read_agents(files: Sequence[Path], only: Sequence[str] = ()) -> list[AgentSpec]:
    """Return the agents that these files declare. If ``only`` is not empty, return only the agents with these ids.
    Raises `ConfigError`.
    """
    agents: dict[str, AgentSpec] = {}
    for file in files:
        for spec in _read_file(file):
            first = agents.setdefault(spec.id, spec)
            if first is not spec:
                raise ConfigError(
                    f'the agent "{spec.id}" is already declared in {first.path}:{first.line}',
                    path=spec.path,
                    line=spec.line,
                )
    missing = sorted(set(only) - agents.keys())
    places = ", ".join(map(str, files))
    if missing:
        raise ConfigError(f"{places} has no agent {missing[0]}; known are: {', '.join(sorted(agents)) or 'none'}")
    if not agents:
        raise ConfigError(f"{places} declares no agents; see docs/agents.md, or: roundelay init")
    return [spec for agent_id, spec in agents.items() if not only or agent_id in only]


def _read_file(file: Path) -> list[AgentSpec]:
    if is_node_file(load_yaml(file)):
        return load_agents(resolve_config(file, {}, {})[0].agents)  # validate the other keys of the node file too
    return load_agents(file)


def is_node_file(root: YamlNode) -> bool:
    """Whether a file configures a node. Other files declare one agent or several."""
    return isinstance(root.value, dict) and "agents" in root.value and "id" not in root.value
