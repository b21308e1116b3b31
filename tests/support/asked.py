"""Agents on a real node, and external callers with their own tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from roundelay.agents.runner import AgentRunner
from roundelay.network.client import NetworkClient
from tests.support.node import Node


@asynccontextmanager
async def working(node: Node, *runners: AgentRunner) -> AsyncIterator[None]:
    """Run the runners on this node. Each runner has its own connection."""
    clients = [
        NetworkClient(it.agent_id, node.url, token=node.token_of(it.agent_id), role="reactor", card=it.describe_card())
        for it in runners
    ]
    await asyncio.gather(*(it.connect() for it in clients))
    tasks = [asyncio.create_task(it.run(client)) for it, client in zip(runners, clients, strict=True)]
    await asyncio.gather(*(it.ready() for it in runners))
    try:
        yield
    finally:
        for runner in runners:
            await runner.stop()
        await asyncio.gather(*tasks)
        await asyncio.gather(*(it.close() for it in clients))


async def invite(node: Node, agent_id: str, kind: str = "service") -> str:
    """Register a participant that is not an operator, and return its credentials as ``ID:TOKEN``."""
    operator = await node.service("roundelay-test")
    session = await node.invite(operator, agent_id, kind=kind)
    await session.drop()
    await operator.drop()
    return f"{agent_id}:{node.tokens[agent_id]}"
