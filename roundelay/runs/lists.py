"""Read complete lists from the hub: participants (except the commands' own reader), threads, dead letters and
tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundelay.connection import READER_ID
from roundelay.network.client import NetworkClient
from roundelay.network.errors import RequestError

Entry = dict[str, Any]
MAX_ID_CHARS = 64


async def list_participants(client: NetworkClient, *, online: bool | None = None) -> list[Entry]:
    """Return the participants, ordered by id. ``online`` selects connected or disconnected participants. Raises
    `RoundelayError`.
    """
    args: dict[str, object] = {} if online is None else {"online": online}
    agents = await _read_entries(client, "network.list_agents", "agents", args)
    # Exclude the reader, which is the command itself and would be in every list.
    return [agent for agent in agents if agent["agent_id"] != READER_ID]


async def is_offline(client: NetworkClient, agent_id: str) -> bool:
    """Return whether a participant is registered and has no session. Return False if the caller may not see this."""
    # The hub lists ids that sort after ``after``. Pass a text that sorts directly before the id.
    before = agent_id[:-1] + chr(max(ord(agent_id[-1:] or "a") - 1, 0)) + "~" * MAX_ID_CHARS
    try:
        found = await client.call("network.list_agents", {"online": False, "after": before, "limit": 1})
    except RequestError:
        return False
    return any(agent["agent_id"] == agent_id for agent in found["agents"])


async def list_channels(client: NetworkClient) -> list[Entry]:
    """Return the channels that the client may see, ordered by name. Raises `RoundelayError`, also if the hub has no
    channels."""
    return await _read_entries(client, "channels.list", "channels")


async def list_threads(client: NetworkClient, *, limit: int | None = None, above: int = 0) -> list[Entry]:
    """Return at most ``limit`` threads that the client may read, newest first. Raises `RoundelayError`.

    ``above`` stops the reading after the threads with a message above this sequence number. The result may contain some
    older threads.
    """
    threads: list[Entry] = []
    async for page in client.pages("network.list_threads", {"limit": min(limit or PAGE, PAGE)}):
        threads += page["threads"]
        if (limit is not None and len(threads) >= limit) or (threads and threads[-1]["last_seq"] <= above):
            break
    # The last page may exceed the limit.
    return threads[:limit]


async def list_dead_letters(
    client: NetworkClient, *, recipient: str | None = None, limit: int | None = None
) -> list[Entry]:
    """Return at most ``limit`` dead letters, ordered by recipient and seq. Raises `RoundelayError`."""
    args: dict[str, object] = {"limit": min(limit or LETTERS, LETTERS)}
    if recipient is not None:
        args["agent_id"] = recipient
    return await _read_entries(client, "network.dead_letters", "dead_letters", args, limit)


async def list_approvals(client: NetworkClient) -> list[Entry]:
    """Return the calls that wait for a person's decision, ordered by the seq of the request. Raises `RoundelayError`."""
    return await _read_entries(client, "network.approvals", "approvals")


async def list_inbox(client: NetworkClient, *, limit: int) -> list[Entry]:
    """Return at most ``limit`` entries of the client's inbox, newest first. Raises `RoundelayError`."""
    return await _read_entries(client, "network.inbox", "items", {"limit": min(limit, PAGE)}, limit)


async def list_tokens(client: NetworkClient) -> list[Entry]:
    """Return all tokens. Only operators may list them. Raises `RoundelayError`."""
    return await _read_entries(client, "network.list_tokens", "tokens")


PAGE, LETTERS = 500, 1000
"""Maximum number of entries in one answer of the hub: threads and other lists, dead letters."""


async def _read_entries(
    client: NetworkClient, op: str, name: str, args: Mapping[str, object] | None = None, limit: int | None = None
) -> list[Entry]:
    """Return all entries of a list, or the first ``limit`` entries."""
    entries: list[Entry] = []
    async for page in client.pages(op, args):
        entries += page[name]
        if limit is not None and len(entries) >= limit:
            break
    return entries[:limit]


async def list_node_agents(client: NetworkClient) -> list[dict[str, Any]]:
    """Return the agents that the node runs, ordered by id. Raises `RoundelayError`."""
    agents: list[dict[str, Any]] = (await client.call("network.node_agents"))["agents"]
    return agents
