"""The processes of the agents that a node runs, for its operators: which there are, and their start, stop and reload.

What starts and stops them is the node's (`reading.AgentSupervisor`); a hub without a node behind it runs none.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from roundelay.network.errors import InvalidArguments
from roundelay.network.frames import ID_PATTERN

from .reading import AgentAction, Reading


async def node_agents(reading: Reading) -> dict[str, Any]:
    """The agents that this node runs: what the process of each does, and whether its file has changed."""
    supervisor = reading.hub.supervisor
    return {"agents": [] if supervisor is None else supervisor.list_agents()}


async def control_agent(
    reading: Reading, *, agent_id: Annotated[str, Meta(pattern=ID_PATTERN)], action: AgentAction
) -> dict[str, Any]:
    """Start, stop, restart or reload the process of an agent that this node runs. `reload` takes its changed file, and
    refuses a wrong one."""
    supervisor = reading.hub.supervisor
    if supervisor is None:
        raise InvalidArguments("This node runs no agents. Who started the agent can stop and start it.")
    if reading.place is None:
        return await supervisor.control(agent_id, action)
    reading.place.release()  # a process takes seconds to start
    try:
        return await supervisor.control(agent_id, action)
    finally:
        await reading.place.acquire()
