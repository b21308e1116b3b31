"""A hub's figures in words: what ``roundelay status`` shows. Pure; the figures' names are those of ``/metrics``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Figures = Mapping[str, float]

SHOWN_FROM, MAX_SHOWN = 0.5, 5
"""From which share of a quota on its participant is shown, and how many at most."""
_COUNTED = ("messages", "deliveries", "commits")


def compute_rates(before: Figures, after: Figures, passed_s: float) -> dict[str, float]:
    """How many a second there were between two readings. A hub that was started again meanwhile counts from zero."""
    rates = {"over_s": round(passed_s, 3)}
    for name in _COUNTED:
        key = f"{name}_total"
        count = after[key] - before[key]
        rates[f"{name}_per_s"] = round((count if count >= 0 else after[key]) / passed_s, 3)
    return rates


def describe_figures(figures: Figures, rates: Figures) -> dict[str, str]:
    """Lines by their name. What is well when it is zero is told only when it is not."""
    commits = figures["commits_total"]
    mean = f"{figures['rows_total'] / commits:.1f}" if commits else "no"
    lines = {
        "sessions": f"{figures['sessions']:.0f}, {figures['sessions_behind']:.0f} of them behind; "
        f"{figures['sessions_opening']:.0f} not welcomed yet",
        "backlog": f"{figures['backlog_deliveries']:.0f} deliveries queued ({_describe_bytes(figures['backlog_bytes'])}), "
        f"{figures['unacked_deliveries']:.0f} not acknowledged; {figures['pending_entries']:.0f} entries before the writer",
        "reactions": f"{figures['open_reactions']:.0f} open",
        "commits": f"{commits:.0f} since the start, of {mean} rows; lately of {figures['commit_rows_p50']:.0f} rows, at most "
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
    """Who is near the end of a quota, as ``network.quotas`` tells it; nothing if nobody is."""
    near = [it for it in quotas if it["used"] >= SHOWN_FROM]
    shown = ", ".join(f"{it['agent_id']} {it['used']:.0%} ({_describe_use(it)})" for it in near[:MAX_SHOWN])
    more = f" and {len(near) - MAX_SHOWN} more" if len(near) > MAX_SHOWN else ""
    return {"quotas": shown + more} if near else {}


def _describe_use(use: Mapping[str, Any]) -> str:
    parts = [f"{use['messages']} of {_or_any(use['messages_per_day'])} messages"]
    most = use["bytes_per_day"]
    parts.append(f"{_describe_bytes(use['bytes'])} of {_describe_bytes(most) if most is not None else 'any'} today")
    if use["channels"]:
        parts.append(f"{use['channels']} of {_or_any(use['max_created_channels'])} channels")
    return "; ".join(parts)


def _or_any(most: int | None) -> str:
    return "any" if most is None else str(most)


def _describe_bytes(count: float) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 1024:.0f} KiB"
