"""``roundelay agent run``: run the agents of some files in this process until it is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from roundelay.agents.simple import SimpleAgentRunner
from roundelay.network.client import NetworkClient
from roundelay.network.errors import Superseded
from roundelay.nodes.logs import ProcessLog
from roundelay.nodes.processes import stop_signals, wait_for_first, wait_for_input_end
from roundelay.nodes.reports import Reporter


async def run_agents(
    runners: Sequence[SimpleAgentRunner],
    *,
    url: str | None,
    token: str | None,
    until_input_ends: bool,
    reporter: Reporter,
    log: ProcessLog,
) -> None:
    """Run agents until SIGTERM or SIGINT. With ``until_input_ends``, which a node asks for, the end of the input stops
    them too, and they stay at that node.

    Each agent that has joined is reported as ready. An agent that another runner took over ends with a line in the log.
    Any other failure ends all agents and is raised. `Superseded` is raised too for a node's agent that lost its place
    while the node was away: the node then starts it again.
    """

    async def run_one(runner: SimpleAgentRunner) -> None:
        await runner.prepare()
        card = runner.describe_card()
        joining = NetworkClient(
            runner.agent_id,
            url,
            kind="agent",
            token=token,
            role="reactor",
            card=card,
            # While this node waits for leadership, the leader's own processes serve the same agents.
            goes_to_leader=not until_input_ends,
        )
        async with joining as client:
            # Join the channels before reporting: whoever waits for the report may write there at once.
            await runner.join_channels(client)
            reporter.report_ready(f"Agent {runner.agent_id} is ready at {client.url}", client.url)
            try:
                await runner.run(client)
            except Superseded as error:
                # To end well here would leave the agent to the process that took over, which works for a node that is
                # gone.
                if until_input_ends and isinstance(client.failure, Superseded) and client.failure.was_away:
                    raise Superseded(
                        f"Another process of agent {runner.agent_id} worked while the node was away; this one starts "
                        "again."
                    ) from error
                # No failure: the other agents of this process go on.
                log.write(str(error))

    with stop_signals() as stopping:
        async with asyncio.TaskGroup() as group:
            agents = [group.create_task(run_one(runner)) for runner in runners]
            input_end = [wait_for_input_end()] if until_input_ends else []
            # With every agent taken over, nothing is left to do, so that ends the command as well.
            await wait_for_first(asyncio.wait(agents), stopping.wait(), *input_end)
            for task in agents:
                task.cancel()
