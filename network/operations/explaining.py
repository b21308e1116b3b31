"""Operations that return explanations. Clients can show these explanations unchanged.

``explain`` shows why a message was sent, and ``effects`` shows what followed from it. ``work`` shows what a reaction
did, and ``cost_report`` shows what models cost.

Agents write records, and a `RunReader` interprets them. The node passes the `RunReader` to its hub. This module checks
arguments and rights. The `RunReader` calls other reading operations with the caller's rights, so it sees only what the
caller may see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from roundelay.network.core.access import check_right
from roundelay.network.core.mod import Operation, make_operation
from roundelay.network.errors import TooLarge, UnknownOperation
from roundelay.network.frames import Seq, encode

from . import conversation, reactions, views
from .paging import ListPage
from .reading import Call, CallSelection, CostGroup, Reading, RunReader

EffectLimit = Annotated[int, Meta(ge=1, le=500)]
MAX_RESULTS_READ = 16
"""Maximum amount of data that one explanation may hold in memory, as a multiple of ``max_result_bytes``."""


async def messages(reading: Reading, *, seqs: list[Seq]) -> dict[str, Any]:
    """The messages with these seqs that the caller may read, as many as fit into a result."""
    view, ledger = views.View(reading), reading.hub.ledger
    page = ListPage(len(seqs), reading.hub.limits.max_result_bytes)
    for start in range(0, len(seqs), views.ROWS_AT_ONCE):
        heads = await ledger.heads(set(seqs[start : start + views.ROWS_AT_ONCE]))
        shown = [seq for seq, head in sorted(heads.items()) if await view.shows(head)]
        for row in (await ledger.messages(shown)).values():
            if not row.is_damaged and row.data and not page.add(Raw(row.data)):
                return {"messages": page.entries}
    return {"messages": page.entries}


_SOURCES: tuple[Callable[..., Any], ...] = (
    conversation.message_status,
    messages,
    reactions.records,
    reactions.usage,
    views.impact,
    views.why,
)
"""The operations that a `RunReader` may call: operations of the protocol, and `messages`."""
_RIGHTS = {"network.messages": "network.why"}
"""Maps each operation that is not in the protocol to the protocol operation whose right is checked instead."""
_TOO_LARGE = "The explanation does not fit into one answer. Read it on the node's machine: roundelay why --db FILE."


async def explain(reading: Reading, *, seq: Seq) -> dict[str, Any]:
    """Why a message was sent: all messages up to its root, and for each message the reaction that sent it, the work
    before it and the messages of its prompt. If the answer would be too large, `next` says where to continue."""
    reader, call, max_bytes = _open(reading)
    return _fit(await reader.explain(call, seq, max_bytes), max_bytes)


async def effects(reading: Reading, *, seq: Seq, limit: EffectLimit = 200) -> dict[str, Any]:
    """The effects of a message, as a tree: the reactions to it and the messages that they sent, then the reactions to
    those messages, and so on."""
    reader, call, max_bytes = _open(reading)
    return _fit(await reader.list_effects(call, seq, limit, max_bytes), max_bytes)


async def work(reading: Reading, *, reaction: str, agent_id: str) -> dict[str, Any]:
    """What an agent did in a reaction: the reaction's state, its work, and the work as steps with times."""
    reader, call, max_bytes = _open(reading)
    return _fit(await reader.read_work(call, agent_id, reaction, max_bytes), max_bytes)


async def cost_report(
    reading: Reading,
    *,
    by: CostGroup = "agent",
    agent_id: str | None = None,
    thread_id: str | None = None,
    root: Seq | None = None,
    since: Annotated[int, Meta(ge=0)] = 0,
) -> dict[str, Any]:
    """What models used and cost, in groups, the most expensive group first. Select the calls of an agent, in a thread,
    in a conversation, or since a time."""
    reader, call, max_bytes = _open(reading)
    return _fit(await reader.add_up_cost(call, by, CallSelection(agent_id, thread_id, root, since)), max_bytes)


def _open(reading: Reading) -> tuple[RunReader, Call, int]:
    """Return the hub's `RunReader`, a function that calls operations for it, and the maximum size of the answer in
    bytes. Raises `UnknownOperation` if the hub has no `RunReader`."""
    reader = reading.hub.run_reader
    if reader is None:
        raise UnknownOperation("This hub cannot explain runs. Read network.why, network.records and network.usage.")

    max_bytes = reading.hub.limits.max_result_bytes
    size = 0

    async def call(op: str, args: Mapping[str, object]) -> Any:
        nonlocal size
        operation = _list_sources()[op]
        # Check the right for each call. An explanation must not reveal data of an operation that the caller may not
        # use.
        check_right(reading.hub.state, reading.origin, "call", _RIGHTS.get(op, op))
        await reading.take_turns()
        data = encode(await operation.call(reading, operation.decode(Raw(encode(args)))))
        # Do not count usage, because the reader adds it up page by page. All other results stay in memory until the
        # answer is complete.
        size += len(data) if op != "network.usage" else 0
        if size > MAX_RESULTS_READ * max_bytes:
            raise TooLarge(_TOO_LARGE)
        # Return the value in the form that clients receive. The reader works on JSON, so the same code can explain a
        # recording without a hub.
        return msgspec.json.decode(data)

    return reader, call, max_bytes


@cache
def _list_sources() -> dict[str, Operation]:
    operations = (make_operation("network", function, is_change=False) for function in _SOURCES)
    return {operation.op: operation for operation in operations}


def _fit(value: dict[str, Any], max_bytes: int) -> dict[str, Any]:
    """Return a value whose long texts are cut if the value is larger than ``max_bytes``."""
    # Cut texts only as much as needed. Keep the structure, because clients use the ids in it.
    for max_chars in (None, 20_000, 2000, 200):
        fitted = value if max_chars is None else _cut_texts(value, max_chars)
        if len(encode(fitted)) <= max_bytes:
            return fitted
    raise TooLarge(_TOO_LARGE)


def _cut_texts(value: Any, max_chars: int) -> Any:
    match value:
        case str():
            return value if len(value) <= max_chars else f"{value[:max_chars]}…"
        case dict():
            return {key: _cut_texts(item, max_chars) for key, item in value.items()}
        case list():
            return [_cut_texts(item, max_chars) for item in value]
        case _:
            return value
