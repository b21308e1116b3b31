"""The operation ``network.open_items``: lists the open items of a conversation, or waits until the conversation is
quiet.

The module `core.quiet` decides which items are open, and this module lists them for one caller. Every item is about a
message and is listed only for callers who may read this message. Other items are only counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Annotated, Any

from msgspec import Meta, Struct

from roundelay.network.core.open_items import OpenDelivery, OpenItem
from roundelay.network.core.state import State
from roundelay.network.core.tables import OpenReaction, Question
from roundelay.network.frames import Seq

from .activity import may_see_activity
from .paging import take_page
from .reading import Reading
from .views import Limit, find_message, open_view


class _Open(Struct):
    """An open item, with the participant who has to act next and the message that the item is about."""

    kind: str
    agent_id: str
    seq: int
    since: int
    thread_id: str = ""
    details: dict[str, Any] = {}
    is_reaction: bool = False


async def open_items(
    reading: Reading,
    *,
    root: Seq,
    others: bool = False,
    trigger: Seq | None = None,
    wait_ms: Annotated[int, Meta(ge=0, le=30_000)] = 0,
    limit: Limit = 100,
) -> dict[str, Any]:
    """List what is open in the conversation of the message `root`, oldest first: unhandled messages, running reactions,
    unanswered questions, open tasks and timers. `is_quiet`: nothing is open. `hidden`: number of items that the caller
    may not see.

    Any message of the conversation may be passed. The answer has the first one as `root`.

    With `wait_ms`, the answer waits until the conversation is quiet, for at most this time. With `others`, items of the
    caller do not count, and neither do reactions that wait for the caller. With `trigger`, only items about messages
    that may enter the prompt of this message are listed.
    """
    view = await open_view(reading, trigger, until=reading.hub.state.head)
    # Accept any message of the conversation, because the caller may not be allowed to read the first one.
    root = (await find_message(reading, root, "root")).root
    loop = asyncio.get_running_loop()
    until = loop.time() + wait_ms / 1000
    caller = reading.origin.agent_id if others else ""
    items = _list_items(reading.hub.state, root, caller)
    while items and (left_s := until - loop.time()) > 0:
        await reading.wait_for_change(root, left_s)
        items = _list_items(reading.hub.state, root, caller)
    if trigger is not None:  # open the view again, because rights may have changed during the wait
        view = await open_view(reading, trigger, until=reading.hub.state.head)
    heads = await reading.hub.ledger.heads({item.seq for item in items})
    await view.load(heads.values())
    shown = [item for item in items if await view.shows(heads.get(item.seq))]
    shown.sort(key=lambda item: (item.since, item.seq, item.agent_id))
    entries = (_describe(item, shows_waits=may_see_activity(reading)) for item in shown)
    page, has_more = take_page(entries, limit, reading.hub.limits.max_result_bytes)
    hidden = len(items) - len(shown)
    return {"root": root, "is_quiet": not items, "items": page, "hidden": hidden, "has_more": has_more}


def _describe(item: _Open, *, shows_waits: bool) -> dict[str, Any]:
    who = {"agent_id": item.agent_id} if item.agent_id else {}
    # Hide the awaited agent unless the caller may see activity. The caller may not be allowed to read the message to
    # this agent.
    details = {name: value for name, value in item.details.items() if shows_waits or name != "waits_for"}
    return {"kind": item.kind, **who, "seq": item.seq, "since": item.since, **details}


def _list_items(state: State, root: int, caller: str) -> list[_Open]:
    """Return the open items of a conversation. If ``caller`` is not empty, items that wait for this participant are
    left out."""
    items = [item for key, value in state.open_in(root).items() for item in _read_value(key, value)]
    if not caller:
        return items
    # Leave out reactions that wait for the caller. Otherwise an agent that waits inside its own reaction would wait for
    # itself, and two agents could wait for each other forever.
    waiting = _find_waiting(items, caller)
    return [item for item in items if item.agent_id != caller and (item.agent_id, item.thread_id) not in waiting]


def _find_waiting(items: list[_Open], caller: str) -> set[tuple[str, str]]:
    """Return the agent and thread of each reaction that waits for the caller, directly or through other agents."""
    waiting: set[tuple[str, str]] = set()
    named = {caller}
    reactions = [item for item in items if item.is_reaction]
    while added := [
        item
        for item in reactions
        if (item.agent_id, item.thread_id) not in waiting and named.intersection(item.details.get("waits_for", ()))
    ]:
        waiting |= {(item.agent_id, item.thread_id) for item in added}
        named |= {item.agent_id for item in added}
    return waiting


def _read_value(key: str, value: object) -> Iterator[_Open]:
    """Yield the open items of one stored value. ``key`` is the name of the table and the key within this table."""
    match value:
        case OpenDelivery():
            seq = int(key.partition(" ")[2])
            for name in value.waiting:
                yield _Open("delivery", name, seq, value.at, value.thread_id)
            for name in value.answers:
                yield _Open("question", name, seq, value.at, value.thread_id)
        case OpenReaction():
            details: dict[str, Any] = {"reaction": value.reaction}
            if value.awaits:
                waits = value.awaits.values()
                details["waits_for"] = sorted({name for wait in waits for name in (*wait.to, *(wait.deciders or ()))})
                requests = [wait.request for wait in waits if wait.request is not None]
                details |= {"request": requests[0]} if requests else {}
            thread_id = value.trigger_head.thread_id
            kind = "approval" if "request" in details else "reaction"
            yield _Open(kind, value.agent_id, value.trigger, value.at, thread_id, details, is_reaction=True)
        case Question():
            agent_id, _, seq_text = key.partition(" ")[2].partition("/")
            yield _Open("question", agent_id, int(seq_text), value.at, value.thread_id)
        case OpenItem():
            mod, _, name = key.partition(" ")[2].split("/", 2)
            details = {"mod": mod, "key": name, **({"note": value.note} if value.note else {})}
            yield _Open(value.kind, value.agent_id, value.seq, value.at, "", details)
