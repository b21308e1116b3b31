"""Reading the lists of a hub page by page: which argument asks for the next page of each operation.

No IO: `read_pages` gets a function to call, so that a client, an agent's restricted client and a test share it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple

Call = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
"""Calls an operation of the hub and returns its value."""
Page = dict[str, Any]


class _Paging(NamedTuple):
    """Paging of one operation: the list in its value, and the arguments that ask for the next page."""

    entries: str
    make_next: Callable[[Page, Mapping[str, Any]], dict[str, Any]]
    """Returns the changed arguments, from a page and the arguments that asked for it."""
    may_be_empty: bool = False
    """A page without entries need not be the last: the hub looks through a part of its log in one call."""


def _after(entries: str, field: str) -> _Paging:
    return _Paging(entries, lambda page, _: {"after": page[entries][-1][field]})


def _before(entries: str, field: str) -> _Paging:
    return _Paging(entries, lambda page, _: {"before": page[entries][-1][field]})


def _name_letter(page: Page, _: Mapping[str, Any]) -> dict[str, Any]:
    # Dead letters are ordered by agent and seq, so the position needs both.
    last = page["dead_letters"][-1]
    return {"after": f"{last['agent_id']}/{last['seq']}"}


def _receive_next(page: Page, args: Mapping[str, Any]) -> dict[str, Any]:
    # Without `after` the first page holds unhandled messages alone; the next ones must not add handled ones.
    return {"after": page["next"], "unhandled": args.get("unhandled", "after" not in args)}


_PAGINGS = {
    "channels.list": _after("channels", "name"),
    "channels.members": _Paging("members", lambda page, _: {"after": page["members"][-1]}),
    "network.approvals": _after("approvals", "seq"),
    "network.dead_letters": _Paging("dead_letters", _name_letter),
    # A thread is read backwards: each page is oldest first, and the next one ends before it.
    "network.history": _Paging("messages", lambda page, _: {"before": page["messages"][0]["seq"]}),
    "network.impact": _Paging("messages", lambda page, _: {"after": page["next"]}, may_be_empty=True),
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
}


async def read_pages(call: Call, op: str, args: Mapping[str, Any] | None = None) -> AsyncIterator[Page]:
    """Yield the values of ``op``, page after page, until the hub has no more.

    Each page is asked for when the caller wants it, so leaving the loop asks for nothing further. Raises `ValueError`
    for an operation that has no pages, and what ``call`` raises.
    """
    paging = _PAGINGS.get(op)
    if paging is None:
        raise ValueError(f"{op!r} has no pages. Operations with pages: {', '.join(_PAGINGS)}.")
    asked = dict(args or {})
    while True:
        page: Page = await call(op, asked)
        yield page
        # A hub of an earlier version does not say whether there is more, and gives everything at once.
        if not page.get("has_more") or not (page[paging.entries] or paging.may_be_empty):
            return
        asked |= paging.make_next(page, asked)
