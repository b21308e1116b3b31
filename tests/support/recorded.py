"""Recorded runs for tests: a network in this process that writes a ledger file, and a function that changes a
recording.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from roundelay.agents.runner import AgentRunner
from roundelay.app import Network
from roundelay.network.core.rows import Row
from roundelay.network.ledger.log_file import read_log
from roundelay.runs.recording import Recording
from tests.support.agents import Person, running

Talk = Callable[[Network, dict[str, Person]], Awaitable[None]]


async def record(
    path: Path, runners: Sequence[AgentRunner], talk: Talk, *, people: Sequence[str] = ("mia",), **options: Any
) -> Recording:
    """Run agents and people on a new network until ``talk`` returns, and return the recording."""
    async with Network.open(path, **options) as network:
        persons = {name: await Person.join(network, name) for name in people}
        async with running(network, *runners):
            await talk(network, persons)
    return Recording(*read_log(path))


async def written(network: Network, predicate: Callable[[Row], bool]) -> Row:
    """Return the first row of the log that satisfies the predicate, and wait for it if necessary."""
    seen = 0
    while True:
        for row in await network.hub.ledger.rows(seen, 500):
            if predicate(row):
                return row
            seen = row.seq
        await network.hub.wait_beyond(seen, 30)


def edit(recording: Recording, change: Callable[[Row, dict[str, Any]], dict[str, Any] | None]) -> Recording:
    """Return a recording with changed row bodies. ``change`` returns a row's new body, or None to keep the old one."""
    rows = []
    for row in recording.rows:
        body = change(row, json.loads(row.data))
        rows.append(row if body is None else msgspec.structs.replace(row, data=json.dumps(body).encode()))
    return Recording(recording.head, rows)
