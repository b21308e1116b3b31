"""Compute the answers that an exported page needs: explanations, costs and reactions of its rows.

A page in a file cannot query a hub. Therefore this module explains every message when the page is written. The page
looks up these answers, follows causes, and sums the model calls. Only the rows of the page are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from roundelay.agents.models.tokens import Prices
from roundelay.network.core.rows import MessageHead, Row
from roundelay.network.ledger.log_file import LogHead
from roundelay.network.messages import BaseMessage
from roundelay.runs.cost import list_costs
from roundelay.runs.file_source import FileSource
from roundelay.runs.node_answers import reaction_to_json
from roundelay.runs.reading import Record
from roundelay.runs.why import describe_reaction, explain_step, pair_with_reactions
from roundelay.runs.work import list_messages, work_to_json


class MemoryLog:
    """Log in memory that contains the rows of a page. Implements `Log`."""

    def __init__(self, head: LogHead, rows: Sequence[Row]) -> None:
        self.head = head
        self.damaged: list[int] = []
        self._rows = {row.seq: row for row in sorted(rows, key=lambda row: row.seq)}

    def rows(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def row(self, seq: int) -> Row | None:
        return self._rows.get(seq)


def make_message_row(message: BaseMessage, data: bytes) -> Row:
    """Return the log row for a message that the hub returned without its row."""
    head = MessageHead(
        seq=message.seq,
        sender_id=message.sender_id,
        sender_kind=message.sender_kind,
        kind=message.kind,
        to=message.to,
        thread_id=message.thread_id,
        root=message.root,
        hops=message.hops,
        label=message.seq,
        cause=message.cause,
    )
    return Row(
        seq=message.seq,
        at=message.sent_at,
        type="message",
        actor=message.sender_id,
        stream=message.thread_id,
        data=data,
        head=head,
    )


def make_record_row(reaction: str, record: Record, data: bytes) -> Row:
    """Return the log row for a record that the hub returned without its row."""
    return Row(
        seq=int(record["seq"]),
        at=int(record["at"]),
        type="record",
        actor=str(record["agent_id"]),
        key=f"r:{record['record_id']}",
        stream=reaction,
        label=str(record["kind"]),
        data=data,
    )


async def describe_run(log: MemoryLog, prices: Prices) -> dict[str, Any]:
    """Return the precomputed answers as a JSON object with these fields:

    ``explained``: by seq, the ``reaction`` of ``network.explain`` without its ``work``, ``prompt`` and ``steps``
    ``effects``: by seq, the ``reactions`` of ``network.effects`` without their ``work``
    ``reactions``: the answers of ``network.work``, with ``agent_id``, ``reaction`` and the ``seq`` of the first record
    ``calls``: the entries that ``network.cost_report`` sums, one per model call
    """
    source = FileSource(log)
    explained: dict[str, Any] = {}
    effects: dict[str, Any] = {}
    async for message in source.all_messages(0):
        # Explain only the message and its reaction. The page follows causes by looking up the other messages.
        [(_, sent_in), *_] = pair_with_reactions((await source.chain(message.seq))[:2])
        if sent_in is not None:
            reaction = (await explain_step(source, message, sent_in)).to_json()["reaction"]
            explained[str(message.seq)] = _without(reaction, "work", "prompt")
        reactions = await source.reactions_to(message)
        if reactions:
            described = [(await describe_reaction(source, it, ())).to_json() for it in reactions]
            effects[str(message.seq)] = [_without(it, "work") for it in described]
    calls = [call async for call in list_costs(source, prices)]
    return {"explained": explained, "effects": effects, "reactions": await _list_work(source, prices), "calls": calls}


async def _list_work(source: FileSource, prices: Prices) -> list[dict[str, Any]]:
    entries = []
    for agent_id, name in source.list_names():
        reaction = await source.reaction(agent_id, name)
        messages = await source.messages(sorted(list_messages(reaction.work)))
        work = [work_to_json(it, messages) for it in reaction.work]
        place = {"agent_id": agent_id, "reaction": name, "seq": int(reaction.records[0]["seq"])}
        entries.append({**place, **reaction_to_json(reaction, prices), "work": work})
    return entries


def _without(value: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: it for name, it in value.items() if name not in names}
