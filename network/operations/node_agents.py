"""Operations for the processes of a node's agents: list, start, stop, restart and reload them. Only for operators.

The node's `reading.AgentSupervisor` controls the processes. A hub that runs without a node has no agent processes.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from roundelay.network.errors import InvalidArguments
from roundelay.network.frames import ID_PATTERN

from .reading import AgentAction, Reading


async def node_agents(reading: Reading) -> dict[str, Any]:
    """The agents that this node runs: the state of each process, and whether its file has changed."""
    supervisor = reading.hub.supervisor
    return {"agents": [] if supervisor is None else supervisor.list_agents()}


async def control_agent(
    reading: Reading, *, agent_id: Annotated[str, Meta(pattern=ID_PATTERN)], action: AgentAction
) -> dict[str, Any]:
    """Start, stop, restart or reload the process of an agent that this node runs. `reload` applies the agent's changed
    file. A file with errors is refused."""
    supervisor = reading.hub.supervisor
    if supervisor is None:
        raise InvalidArguments("This node runs no agents. Stop or start the agent where it was started.")
    if reading.place is None:
        return await supervisor.control(agent_id, action)
    # Release this read's share of the read budget, because starting a process takes seconds.
    reading.place.release()
    try:
        return await supervisor.control(agent_id, action)
    finally:
        await reading.place.acquire()
