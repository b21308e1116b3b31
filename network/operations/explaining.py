"""Explanations that a node gives ready to draw: why a message was sent (``explain``), what followed from it
(``effects``), what a reaction did (``work``), and what models cost (``cost_report``).

Records are written by agents and read by `RunReader`, which the node hands to its hub. This module checks the arguments
and the rights: the reader calls other reading operations in the caller's name, so it sees what the caller may see.
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
from .reading import Call, CallSelection, CostGroup, Reading, RunReader

EffectLimit = Annotated[int, Meta(ge=1, le=500)]
_SOURCES: tuple[Callable[..., Any], ...] = (
    conversation.message_status,
    reactions.records,
    reactions.usage,
    views.impact,
    views.why,
)
"""The operations that explanations are made from."""


async def explain(reading: Reading, *, seq: Seq) -> dict[str, Any]:
    """Why a message was sent: the messages up to its root, each with the reaction that sent it, the work before it and
    the messages of its prompt. `next` is where to continue if the answer would be too large."""
    reader, call, max_bytes = _open(reading)
    return _fit(await reader.explain(call, seq, max_bytes), max_bytes)


async def effects(reading: Reading, *, seq: Seq, limit: EffectLimit = 200) -> dict[str, Any]:
    """What followed from a message, as a tree: the reactions to it, and the messages that these and others sent."""
    reader, call, max_bytes = _open(reading)
    return _fit(await reader.list_effects(call, seq, limit, max_bytes), max_bytes)


async def work(reading: Reading, *, reaction: str, agent_id: str) -> dict[str, Any]:
    """What an agent did in a reaction: its state, its work, and the same as steps with times."""
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
    """What models used and cost, in groups, the most expensive first: of the calls of an agent, in a thread, in a
    conversation, or since a time."""
    reader, call, max_bytes = _open(reading)
    return _fit(await reader.add_up_cost(call, by, CallSelection(agent_id, thread_id, root, since)), max_bytes)


def _open(reading: Reading) -> tuple[RunReader, Call, int]:
    """Return the reader, its way to call operations, and the room for an answer. Raises `UnknownOperation`."""
    reader = reading.hub.run_reader
    if reader is None:
        raise UnknownOperation("This hub cannot explain runs. Read network.why, network.records and network.usage.")

    async def call(op: str, args: Mapping[str, object]) -> Any:
        operation = _list_sources()[op]
        # A page of rights may deny an operation: its data must not come out by way of an explanation.
        check_right(reading.hub.state, reading.origin, "call", op)
        value = await operation.call(reading, operation.decode(Raw(encode(args))))
        return msgspec.json.decode(encode(value))

    return reader, call, reading.hub.limits.max_result_bytes


@cache
def _list_sources() -> dict[str, Operation]:
    operations = (make_operation("network", function, is_change=False) for function in _SOURCES)
    return {operation.op: operation for operation in operations}


def _fit(value: dict[str, Any], max_bytes: int) -> dict[str, Any]:
    """Return the value, with its long texts cut if it is larger than a result may be."""
    # Cut only as far as needed. The structure stays whole, because readers follow it by ids.
    for max_chars in (None, 20_000, 2000, 200):
        fitted = value if max_chars is None else _cut_texts(value, max_chars)
        if len(encode(fitted)) <= max_bytes:
            return fitted
    raise TooLarge(
        "The explanation does not fit into one answer. Read it on the node's machine: roundelay why --db FILE."
    )


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
