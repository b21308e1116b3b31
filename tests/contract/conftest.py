"""Fixtures of the contract tests: a node of its own for each test, in the test's event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.node import Node, running_node


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    """A node on a ledger in memory, for agents that talk faster than their default rate allows."""
    async with running_node(limits={"root_messages_per_s": 100_000}) as running:
        yield running
