"""Fixtures of the contract tests: each test gets its own node in its event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from tests.support.node import Node, running_node
from tests.support.random_network import RandomNetwork


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    """Run a node with a ledger in memory, for agents that exceed the default rate."""
    async with running_node(limits={"root_messages_per_s": 100_000}) as running:
        yield running


@pytest.fixture
def make_network() -> Iterator[Callable[..., RandomNetwork]]:
    """Make random networks, and close them after the test."""
    made: list[RandomNetwork] = []

    def make(*args: Any) -> RandomNetwork:
        made.append(RandomNetwork(*args))
        return made[-1]

    yield make
    for network in made:
        network.close()
