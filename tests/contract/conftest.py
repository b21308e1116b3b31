"""Fixtures of the contract tests: each test gets its own node in its event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.node import Node, running_node


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    """Run a node with a ledger in memory, for agents that exceed the default rate."""
    async with running_node(limits={"root_messages_per_s": 100_000}) as running:
        yield running
