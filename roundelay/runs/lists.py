"""Lists of the hub, all of their pages: who is registered (without the commands' own reader), threads, tokens, dead
letters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from roundelay.network.client import NetworkClient
from roundelay.terminal.connection import READER_ID

Entry = dict[str, Any]


async def list_participants(client: NetworkClient, *, online: bool | None = None) -> list[Entry]:
    """The participants by id; only those who are connected, or are not, if asked. Raises `RoundelayError`."""
    args: dict[str, object] = {} if online is None else {"online": online}
    found = await _read_pages(client, "network.list_agents", "agents", args, lambda last: {"after": last["agent_id"]})
    return [agent for agent in found if agent["agent_id"] != READER_ID]


async def list_channels(client: NetworkClient) -> list[Entry]:
    """The channels that the client may see, by name. Raises `RoundelayError`: a hub may be without channels."""
    return await _read_pages(client, "channels.list", "channels", {}, lambda last: {"after": last["name"]})


async def list_threads(client: NetworkClient, *, most: int | None = None, above: int = 0) -> list[Entry]:
    """Threads that the client may read, the newest first: at most so many, and all that go on above a seq. Raises
    `RoundelayError`."""
    return await _read_pages(
        client,
        "network.list_threads",
        "threads",
        {"limit": min(most or PAGE, PAGE)},
        lambda last: {"before": last["last_seq"]} if last["last_seq"] > above else None,
        most,
    )


async def list_dead_letters(client: NetworkClient, *, of: str | None = None, most: int | None = None) -> list[Entry]:
    """Dead letters by recipient and seq, at most so many. Raises `RoundelayError`."""
    args: dict[str, object] = {"limit": min(most or LETTERS, LETTERS)}
    if of is not None:
        args["agent_id"] = of
    return await _read_pages(
        client,
        "network.dead_letters",
        "dead_letters",
        args,
        lambda last: {"after": f"{last['agent_id']}/{last['seq']}"},
        most,
    )


async def list_approvals(client: NetworkClient) -> list[Entry]:
    """Calls that wait for a person's decision, by the seq of the request. Raises `RoundelayError`."""
    return await _read_pages(client, "network.approvals", "approvals", {}, lambda last: {"after": last["seq"]})


async def list_inbox(client: NetworkClient, *, most: int) -> list[Entry]:
    """What waits for the client, the newest first, at most so many. Raises `RoundelayError`."""
    page = await client.call("network.inbox", {"limit": min(most, PAGE)})
    found: list[Entry] = list(page["items"])
    while page["has_more"] and len(found) < most:
        page = await client.call("network.inbox", {"limit": min(most - len(found), PAGE), "before": page["next"]})
        found += page["items"]
    return found


async def list_tokens(client: NetworkClient) -> list[Entry]:
    """Who has tokens, for operators. Raises `RoundelayError`."""
    return await _read_pages(client, "network.list_tokens", "tokens", {}, lambda last: {"after": last["hash"]})


PAGE, LETTERS = 500, 1000
"""What a hub gives at once."""


async def _read_pages(
    client: NetworkClient,
    op: str,
    name: str,
    args: dict[str, object],
    go_on: Callable[[Entry], dict[str, object] | None],
    most: int | None = None,
) -> list[Entry]:
    """All entries of a list, or the first of them. ``go_on`` gives what asks for those behind the last one; None for
    enough."""
    page = await client.call(op, args)
    found: list[Entry] = list(page[name])
    while page.get("has_more") and found and (most is None or len(found) < most):  # an older hub says nothing of it
        further = go_on(found[-1])
        if further is None:
            break
        page = await client.call(op, {**args, **further})
        found += page[name]
    return found[:most]


async def list_node_agents(client: NetworkClient) -> list[dict[str, Any]]:
    """The agents that the node runs, by id. Raises `RoundelayError`."""
    agents: list[dict[str, Any]] = (await client.call("network.node_agents"))["agents"]
    return agents
