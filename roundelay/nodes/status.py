"""Read the state of a hub and describe it for ``roundelay status``. The figures have the same names as in
``/metrics``."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from roundelay.display.activity import summarize_agents
from roundelay.display.text import sanitize
from roundelay.network.client import NetworkClient
from roundelay.network.errors import ConnectError, Forbidden, UnknownOperation
from roundelay.network.home import node_at
from roundelay.network.text import count
from roundelay.network.units import format_memory
from roundelay.nodes.hub_http import fetch_readiness, get_from_hub
from roundelay.runs.lists import list_participants

Figures = Mapping[str, float]

SHOWN_FROM, MAX_SHOWN = 0.5, 5
"""Minimum used share of a quota to show, and the maximum number of participants to show."""
_COUNTED = ("messages", "deliveries", "commits")


async def read_status(client: NetworkClient, urls: str, over_s: float) -> dict[str, Any]:
    """Return the state, the figures and the rates that the hub shows to this caller. Rates are measured over ``over_s``
    seconds.

    ``urls`` lists the client's nodes, separated by commas.
    """
    # The hub counts only totals, so a rate needs two measurements.
    before = await _read_figures(client)
    began = time.perf_counter()
    await asyncio.sleep(over_s)
    info = await client.call("network.info")
    figures = await _read_figures(client)
    rates = compute_rates(before, figures, time.perf_counter() - began)
    quotas = await _ask(client, "network.quotas", {"quotas": []})
    agents = await list_participants(client)
    gateway, told = await asyncio.gather(
        asyncio.to_thread(describe_gateway, client.url), asyncio.to_thread(read_shared_log, urls)
    )
    # The client is connected to the leader, but the first node that answered is a follower. Show which node the figures
    # belong to.
    if told and urlsplit(told["url"]).netloc != urlsplit(client.url).netloc:
        told["shared_log"]["rest_told_by"] = client.url
    return {
        "url": client.url,
        **told,
        **({"gateway": gateway} if gateway else {}),
        **info,
        "participants": len(agents),  # the hub's own count includes this caller
        "agents": agents,
        "figures": figures,
        "rates": rates,
        "quotas": quotas["quotas"],
        "isolated": [
            it for it in (await _ask(client, "network.node_agents", {"agents": []}))["agents"] if "isolated" in it
        ],
        "stopped": await _ask(client, "network.stopped", {"conversations": [], "has_more": False, "agents": []}),
    }


def read_alone(urls: str) -> dict[str, Any] | None:
    """Return the state of the first reachable node that uses a shared log, even if that node accepts no sessions."""
    told = read_shared_log(urls)
    try:
        return told | {"figures": _fetch_metrics(told["url"])} if told else None
    except ConnectError:
        return None


def read_shared_log(urls: str) -> dict[str, Any]:
    """Return the address of the first reachable node that uses a shared log, and the node's state in that log.

    Return an empty dictionary if there is no such node.
    """
    for url in urls.split(","):
        with suppress(ConnectError):
            readiness = fetch_readiness(url)
            # A starting node does not know its position in the log yet.
            if readiness is not None and readiness.shared_log is not None and readiness.state != "starting":
                shared = msgspec.structs.asdict(readiness.shared_log)
                return {"url": url, "shared_log": shared | {"answered_s": _fetch_metrics(url).get("log_age_seconds")}}
    return {}


def describe_status(status: Mapping[str, Any]) -> list[str]:
    """Describe the state in lines for a terminal."""
    parts = dict(status)
    if (shared := parts.pop("shared_log", None)) is not None:
        told = describe_shared_log(shared)
        if other := shared.get("rest_told_by"):
            told += f"; the lines below come from the leading node, {other}"
        parts = {"url": parts.pop("url"), "shared log": told, **parts}
    figures = parts.pop("figures")
    parts.pop("has_operators", None)
    parts.pop("has_human_operators", None)
    if "rates" in parts:
        rates, quotas, stopped, isolated = (parts.pop(name) for name in ("rates", "quotas", "stopped", "isolated"))
        agents = summarize_agents(parts.pop("agents"))
        parts |= {"agents": agents} if agents else {}
        if isolated:
            parts["own process"] = [f"{it['agent_id']} ({it['isolated']})" for it in isolated]
        parts |= {**describe_figures(figures, rates), **describe_quotas(quotas), **describe_stopped(stopped)}
    return [
        f"{name:<14} {sanitize(', '.join(value) if isinstance(value, list) else str(value))}"
        for name, value in parts.items()
    ]


def describe_shared_log(shared: Mapping[str, Any]) -> str:
    if shared["waits"]:
        return f"{shared['log']}; this node waits: {shared['waits']}"
    log = f"{shared['log']}, durability {shared['durability']}"
    if shared["leads"]:
        return f"{log}; this node leads"
    whom = shared["leader"] or "the leading node"
    return f"{log}; this node follows {whom}, {shared['behind']} records behind"


def describe_gateway(url: str) -> str:
    """Describe the gateway of a node on this machine: its address, whether it answers, and its stopped webhooks.

    Return an empty text for a node on another machine.
    """
    node = node_at(url)
    if node is None or not node.gateway:
        return ""
    try:
        is_up = get_from_hub(node.gateway, "/healthz").status == 200
    except ConnectError:
        is_up = False
    try:
        saved = json.loads(Path(node.owner_file.removesuffix(".owner") + ".webhooks").read_text(encoding="utf-8"))
        still = [f"{hook['participant']} {hook['state']} ({hook['why']})" for hook in saved if hook["state"] != "on"]
        waiting = [
            f"{hook['participant']} waits ({hook['why']})" for hook in saved if hook["failing_since"] is not None
        ]
        hooks = f"; {count(len(saved), 'webhook')}" + "".join(f", {hook}" for hook in dict.fromkeys(still or waiting))
    except (OSError, ValueError, KeyError, TypeError):
        # Another process writes the file, perhaps in another format. Show the rest of the status anyway.
        hooks = ""
    return f"{node.gateway}{'' if is_up else ', which does not answer'}{hooks}"


async def _ask(client: NetworkClient, op: str, otherwise: dict[str, Any]) -> dict[str, Any]:
    """Call an operation. Return ``otherwise`` if the hub is too old or refuses the call."""
    try:
        answer: dict[str, Any] = await client.call(op)
    except (UnknownOperation, Forbidden):
        return otherwise
    return answer


async def _read_figures(client: NetworkClient) -> dict[str, float]:
    """Return the hub's figures from `network.status`, or else from ``/metrics``."""
    return await _ask(client, "network.status", {}) or await asyncio.to_thread(_fetch_metrics, client.url)


def _fetch_metrics(url: str) -> dict[str, float]:
    text = get_from_hub(url, "/metrics").body
    lines = [line.removeprefix("roundelay_").split(" ") for line in text.splitlines() if line and line[0] != "#"]
    return {line[0]: float(line[1]) for line in lines if len(line) == 2}


def compute_rates(before: Figures, after: Figures, passed_s: float) -> dict[str, float]:
    """Return the rates per second between two measurements. If the hub was restarted in between, its totals start at
    zero."""
    rates = {"over_s": round(passed_s, 3)}
    for name in _COUNTED:
        key = f"{name}_total"
        count = after[key] - before[key]
        rates[f"{name}_per_s"] = round((count if count >= 0 else after[key]) / passed_s, 3)
    return rates


def describe_figures(figures: Figures, rates: Figures) -> dict[str, str]:
    """Return the lines of the hub's status, keyed by their names. Lines about problems appear only if problems
    exist.
    """
    commits = figures["commits_total"]
    # A new node has no commits, so it has no mean.
    mean = f"{figures['rows_total'] / commits:.1f}" if commits else "no"
    lines = {
        "sessions": f"{figures['sessions']:.0f}, {figures['sessions_behind']:.0f} of them behind; "
        f"{figures['sessions_opening']:.0f} not joined yet",
        "backlog": f"{figures['backlog_deliveries']:.0f} deliveries queued "
        f"({format_memory(figures['backlog_bytes'])}), "
        f"{figures['unacked_deliveries']:.0f} not acknowledged; {figures['pending_entries']:.0f} entries before the "
        "writer",
        "reactions": f"{figures['open_reactions']:.0f} open",
        "commits": f"{commits:.0f} since the start, of {mean} rows; lately of {figures['commit_rows_p50']:.0f} rows, "
        "at most "
        f"{figures['commit_rows_max']:.0f}, in {figures['commit_ms_p50']:.1f} ms, the slowest of a hundred in "
        f"{figures['commit_ms_p99']:.1f} ms",
        "rates": f"{rates['messages_per_s']:.1f} messages, {rates['deliveries_per_s']:.1f} deliveries, "
        f"{rates['commits_per_s']:.1f} commits a second, counted for {rates['over_s']:.1f} s",
        "totals": f"{figures['messages_total']:.0f} messages, {figures['deliveries_total']:.0f} deliveries, "
        f"{figures['connections_total']:.0f} connections since the start",
    }
    if figures["overloaded_total"] or figures["recoveries_total"]:
        lines["trouble"] = (
            f"{figures['overloaded_total']:.0f} frames refused because the disk was behind; "
            f"the ledger failed and was reopened {figures['recoveries_total']:.0f} times"
        )
    return lines


def describe_quotas(quotas: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Describe participants that have nearly used up a quota, from the result of ``network.quotas``. Return an empty
    dictionary if there are none.
    """
    near = [quota for quota in quotas if quota["used"] >= SHOWN_FROM]
    shown = ", ".join(f"{quota['agent_id']} {quota['used']:.0%} ({_describe_use(quota)})" for quota in near[:MAX_SHOWN])
    more = f" and {len(near) - MAX_SHOWN} more" if len(near) > MAX_SHOWN else ""
    return {"quotas": shown + more} if near else {}


def describe_stopped(stopped: Mapping[str, Any]) -> dict[str, str]:
    """Describe conversations and agents that a limit has stopped, from the result of ``network.stopped``. Return an
    empty dictionary if there are none.
    """
    shown = [
        f"#{entry['root']} of {entry['began_by'] or 'somebody'} ({entry['limit']}; {entry['used_by'] or 'nobody'} sent most, "
        f"{entry['used']}): /resume {entry['root']}"
        for entry in stopped["conversations"]
    ]
    lines = {}
    if shown:
        more = " and more" if stopped["has_more"] or len(shown) > MAX_SHOWN else ""
        lines["stopped"] = "; ".join(shown[:MAX_SHOWN]) + more
    agents = [f"{entry['agent_id']} ({entry['limit']}): /resume {entry['agent_id']}" for entry in stopped["agents"]]
    if agents:
        lines["stopped agents"] = "; ".join(agents[:MAX_SHOWN]) + (" and more" if len(agents) > MAX_SHOWN else "")
    return lines


def _describe_use(use: Mapping[str, Any]) -> str:
    parts = [f"{use['messages']} of {_or_any(use['messages_per_day'])} messages"]
    most = use["bytes_per_day"]
    parts.append(f"{format_memory(use['bytes'])} of {format_memory(most) if most is not None else 'any'} today")
    if use["channels"]:
        parts.append(f"{use['channels']} of {_or_any(use['max_created_channels'])} channels")
    return "; ".join(parts)


def _or_any(most: int | None) -> str:
    return "any" if most is None else str(most)
