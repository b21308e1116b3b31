"""Everyone who is registered, as the hub lists them: all pages of `network.list_agents`, without the commands' own reader."""

from __future__ import annotations

from typing import Any

from roundelay.identity import READER_ID
from roundelay.network.client import NetworkClient


async def list_participants(client: NetworkClient, *, online: bool | None = None) -> list[dict[str, Any]]:
    """The participants by id; only those who are connected, or are not, if asked. Raises `RoundelayError`."""
    args: dict[str, object] = {} if online is None else {"online": online}
    found: list[dict[str, Any]] = []
    has_more = True
    while has_more:
        page = await client.call("network.list_agents", {**args, "after": found[-1]["agent_id"] if found else ""})
        found += page["agents"]
        has_more = page["has_more"]
    return [agent for agent in found if agent["agent_id"] != READER_ID]
