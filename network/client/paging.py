"""Paging through the lists of a hub. This module defines, for each operation, the arguments that request the next page.

`read_pages` calls a function that the caller supplies, so clients, restricted clients of agents, and tests can use it.
This module does no IO.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple

Call = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
"""Function that calls an operation of the hub and returns the operation's value."""
Page = dict[str, Any]


class _Paging(NamedTuple):
    """Paging of one operation: the name of its list, and the arguments for the next page."""

    entries: str
    make_next: Callable[[Page, Mapping[str, Any]], dict[str, Any]]
    """Function that returns the changed arguments for the next page. It receives a page and the arguments that
    requested this page."""
    may_be_empty: bool = False
    """Whether more pages may follow an empty page, because the hub searches only a part of its log in one call."""


def _after(entries: str, field: str) -> _Paging:
    return _Paging(entries, lambda page, _: {"after": page[entries][-1][field]})


def _after_told(entries: str, field: str) -> _Paging:
    return _Paging(entries, lambda page, _: {"after": page[field]})


def _before(entries: str, field: str) -> _Paging:
    return _Paging(entries, lambda page, _: {"before": page[entries][-1][field]})


def _name_letter(page: Page, _: Mapping[str, Any]) -> dict[str, Any]:
    # Dead letters are ordered by agent and seq, so the position contains both.
    last = page["dead_letters"][-1]
    return {"after": f"{last['agent_id']}/{last['seq']}"}


def _receive_next(page: Page, args: Mapping[str, Any]) -> dict[str, Any]:
    # Without `after`, the first page has only unhandled messages. The next pages must not include handled messages
    # either.
    return {"after": page["next"], "unhandled": args.get("unhandled", "after" not in args)}


_PAGINGS = {
    "channels.list": _after("channels", "name"),
    "channels.members": _Paging("members", lambda page, _: {"after": page["members"][-1]}),
    "files.list": _after_told("files", "next"),
    "network.approvals": _after("approvals", "seq"),
    "network.dead_letters": _Paging("dead_letters", _name_letter),
    # A thread is read backwards, but the messages of a page are in forward order. So the next page ends before the
    # first message of the current page.
    "network.history": _Paging("messages", lambda page, _: {"before": page["messages"][0]["seq"]}),
    "network.impact": _after_told("messages", "next")._replace(may_be_empty=True),
    "network.inbox": _Paging("items", lambda page, _: {"before": page["next"]}),
    "network.list_agents": _after("agents", "agent_id"),
    "network.list_threads": _before("threads", "last_seq"),
    "network.list_tokens": _after("tokens", "hash"),
    "network.message_status": _after("recipients", "agent_id"),
    "network.open_reactions": _after("reactions", "seq"),
    "network.receive": _Paging("messages", _receive_next, may_be_empty=True),
    "network.records": _after("records", "seq"),
    "network.search": _Paging("messages", lambda page, _: {"before": page["next"]}, may_be_empty=True),
    "network.stopped": _before("conversations", "root"),
    "network.usage": _after("calls", "seq"),
    "notes.list": _after("notes", "note"),
    "notes.search": _after_told("notes", "next"),
    "polls.list": _after("polls", "poll"),
    "tasks.list": _after_told("tasks", "after"),
    "timers.list": _after_told("timers", "after"),
}


async def read_pages(call: Call, op: str, args: Mapping[str, Any] | None = None) -> AsyncIterator[Page]:
    """Yield the values of ``op``, page after page, until the hub has no more entries.

    Each page is requested only when the caller's loop continues. Raises `ValueError` for an operation without pages,
    and the errors of ``call``.
    """
    paging = _PAGINGS.get(op)
    if paging is None:
        raise ValueError(f"{op!r} has no pages. Operations with pages: {', '.join(_PAGINGS)}.")
    asked = dict(args or {})
    while True:
        page: Page = await call(op, asked)
        yield page
        # A hub of an earlier version returns the whole list at once, without `has_more`.
        if not page.get("has_more") or not (page[paging.entries] or paging.may_be_empty):
            return
        asked |= paging.make_next(page, asked)
