"""Describe what is open in a conversation, for `roundelay open` and the terminal screens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from roundelay.display.text import sanitize
from roundelay.network.client import OpenEntry, OpenItems
from roundelay.network.units import format_elapsed


def describe_open(found: OpenItems, now_ms: int) -> Iterator[str]:
    """Yield one line for each open item, or one line that says that the conversation is quiet."""
    if found.is_quiet:
        yield f"Nothing is open in the conversation of #{found.root}."
        return
    for item in found.items:
        since = f", {format_elapsed(now_ms - item.since)}" if item.since else ""
        yield f"{sanitize(_describe_item(item))} (#{item.seq}{since})"
    if found.hidden:
        yield f"{found.hidden} more that you may not see"
    if found.has_more:
        yield "There is more."


MAX_SUMMARIZED = 3
"""Maximum number of items that a summary names."""


def summarize_open(items: Sequence[OpenEntry], hidden: int, now_ms: int) -> str:
    """Return one line about what a conversation waits for, oldest first. The page does the same (open_items.js)."""
    named = [
        f"{_name_awaited(it)} ({format_elapsed(now_ms - it.since)})" if it.since else _name_awaited(it)
        for it in items[:MAX_SUMMARIZED]
    ]
    more = len(items) - len(named) + hidden
    return sanitize(f"Waiting for {', '.join(named)}{f' and {more} more' if more else ''}")


def _name_awaited(item: OpenEntry) -> str:
    match item.kind:
        case "delivery" | "reaction" | "question":
            return item.agent_id
        case "approval":
            return f"a decision for {item.agent_id}"
        case kind:
            return f"{kind}{f' “{item.note}”' if item.note else ''}{f' of {item.agent_id}' if item.agent_id else ''}"


def _describe_item(item: OpenEntry) -> str:
    who = item.agent_id or "nobody yet"
    waits = f", waiting for {', '.join(item.waits_for)}" if item.waits_for else ""
    match item.kind:
        case "delivery":
            return f"waiting for {who}: message not handled yet"
        case "reaction":
            return f"{who} works on it{waits}"
        case "approval":
            return f"{who} needs a decision{waits}"
        case "question":
            return f"waiting for {who}: answer required"
        case kind:
            note = f": {item.note}" if item.note else ""
            return f"{kind} of {who}{note}"
