"""Implement ``roundelay agent run``: run the agents of some files until the process is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

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
    """Run agents until SIGTERM or SIGINT arrives.

    For the agents of a node, ``until_input_ends`` is true. The end of the input then also stops the agents, and the
    agents stay connected to that node. Each agent is reported as ready when it has joined. If another runner takes over
    an agent, the agent ends and the log says so. Any other failure ends all agents and is raised. `Superseded` is also
    raised for an agent that was replaced while its node was disconnected, because the node must start that agent again.
    """

    async def run_one(runner: SimpleAgentRunner) -> None:
        def report_ready(ready_url: str) -> None:
            reporter.report_ready(f"Agent {runner.agent_id} is ready at {ready_url}", ready_url)

        await run_agent(runner, url=url, token=token, follows_node=until_input_ends, report_ready=report_ready, log=log)

    with stop_signals() as stopping:
        async with asyncio.TaskGroup() as group:
            agents = [group.create_task(run_one(runner)) for runner in runners]
            input_end = [wait_for_input_end()] if until_input_ends else []
            # End the command when all agents have been taken over, because nothing is left to do.
            await wait_for_first(asyncio.wait(agents), stopping.wait(), *input_end)
            for task in agents:
                task.cancel()


async def run_agent(
    runner: SimpleAgentRunner,
    *,
    url: str | None,
    token: str | None,
    follows_node: bool,
    report_ready: Callable[[str], None],
    log: ProcessLog,
) -> None:
    """Run one agent until it is cancelled or another runner takes over.

    With ``follows_node``, the agent stays connected to the node at ``url``. ``report_ready`` is called with the address
    at which the agent has joined. Raises `Superseded` only for an agent that was replaced while its node was
    disconnected.
    """
    await runner.prepare()
    joining = NetworkClient(
        runner.agent_id,
        url,
        kind="agent",
        token=token,
        role="reactor",
        card=runner.describe_card(),
        # While this node waits for leadership, the leader's processes run the same agents.
        goes_to_leader=not follows_node,
    )
    async with joining as client:
        # Join the channels before reporting: the process that waits for the report may write there at once.
        await runner.join_channels(client)
        report_ready(client.url)
        try:
            await runner.run(client)
        except Superseded as error:
            # A normal end would leave the agent to the process that took over, but that process belongs to a node that
            # no longer exists.
            if follows_node and isinstance(client.failure, Superseded) and client.failure.was_away:
                raise Superseded(
                    f"Another process of agent {runner.agent_id} worked while the node was away; this one starts again."
                ) from error
            # Do not raise: this is no failure, and the other agents of this process continue.
            log.write(str(error))
