"""Read a run from a ledger file, which contains everything. `node_source` reads a run from a node.

Rows are read from the file on demand. Only the positions of records stay in memory, so a large log needs little memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

from roundelay.network.core.rows import Row
from roundelay.network.core.tables import ReactionStart
from roundelay.network.core.usage import USAGE_KINDS
from roundelay.network.errors import UnknownMessage
from roundelay.network.ledger.log_file import Log, LogHead
from roundelay.network.messages import BaseMessage
from roundelay.network.operations.reactions import describe_call
from roundelay.network.operations.views import find_open
from roundelay.network.titles import is_about_something, name_place, write_title
from roundelay.runs.reading import Record, RecordedReaction, read_body, read_message, read_record, read_trigger


@dataclass(slots=True)
class _RecordSeqs:
    """Sequence numbers of a reaction's records."""

    seqs: list[int] = field(default_factory=list)
    started: int = 0
    """Sequence number of the newest ``started`` record."""
    finished: list[int] = field(default_factory=list)


class FileSource:
    """Source that reads a run from a ledger file. The caller may see everything."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._places: dict[tuple[str, str], _RecordSeqs] | None = None  # by (agent, id)
        self._started: dict[int, dict[str, list[ReactionStart]]] = {}  # by trigger and agent, ascending

    @property
    def epoch(self) -> str:
        return self._log.head.epoch

    async def records(self, reaction: str, agent_id: str | None) -> list[Record]:
        # Several agents may have used this id. The records of each agent are a separate reaction.
        names = [name for name in self._read_places() if name[1] == reaction and agent_id in (None, name[0])]
        records = [record for name in names for record in (await self.reaction(*name)).records]
        return sorted(records, key=lambda record: int(record["seq"]))

    async def threads(self, limit: int) -> list[dict[str, Any]]:
        """Return the newest threads in the format of a node's answer.

        A log does not contain the readers of a thread, so the result has ``senders`` instead.
        """
        threads: dict[str, dict[str, Any]] = {}
        first: dict[str, Row] = {}
        for row in self._log.rows():
            if row.type == "message":
                first.setdefault(row.stream, row)
                thread = threads.setdefault(
                    row.stream, {"thread_id": row.stream, "last_seq": 0, "messages": 0, "senders": set()}
                )
                thread |= {"last_seq": row.seq, "messages": thread["messages"] + 1}
                thread["senders"].add(row.actor)
        newest = sorted(threads.values(), key=lambda thread: int(thread["last_seq"]), reverse=True)[:limit]
        return [
            {**it, "title": _write_title(first[it["thread_id"]]), "senders": sorted(it["senders"])} for it in newest
        ]

    async def history(self, thread_id: str, limit: int, before: int | None = None) -> dict[str, Any]:
        rows = (it for it in self._log.rows() if it.type == "message" and it.stream == thread_id)
        # Store only the last sequence numbers, so that a long thread needs no more memory than one page.
        last = deque((it.seq for it in rows if before is None or it.seq < before), maxlen=limit + 1)
        if not last:
            earlier = f" before #{before}" if before is not None else ""
            raise UnknownMessage(
                f"This ledger has no messages of the thread {thread_id!r}{earlier}. List its threads: "
                "roundelay threads --db FILE"
            )
        shown = [row for seq in list(last)[-limit:] if (row := self._log.row(seq)) is not None]
        return {"messages": list(map(read_body, shown)), "has_more": len(last) > limit}

    async def dead_letters(self, recipient: str | None, limit: int) -> list[dict[str, Any]]:
        letters: dict[tuple[str, int], dict[str, Any]] = {}
        for row in self._log.rows():
            if row.type != "dead":
                continue
            body = read_body(row)
            name = (str(body["agent_id"]), int(body["seq"]))
            if "event" in body:  # an operator retried or dropped the letter, or its reaction finished later
                letters.pop(name, None)
            # Retention has deleted older messages. Like a node, list no letter without its message.
            elif name[1] >= self._log.head.first_seq and recipient in (None, name[0]):
                letters[name] = {**body, "at": row.at}
        return [letters[name] for name in sorted(letters)[:limit]]

    async def knows(self, agent_id: str) -> bool:
        """Return whether a participant has this id. If the beginning of the log was deleted, return True for every id.

        A deleted row may have registered the participant.
        """
        joined = (row for row in self._log.rows() if row.type == "registered")
        return self._log.head.first_seq > 1 or any(read_body(row)["agent_id"] == agent_id for row in joined)

    async def usage(self, agent_id: str | None, after: int) -> AsyncIterator[dict[str, Any]]:
        """Yield pages of usage in a node's format, with one call per page."""
        places: dict[tuple[str, str], dict[str, Any]] = {}
        for row in self._log.rows():
            name = (row.actor, row.stream)
            if row.type != "record" or agent_id not in (None, row.actor):
                continue
            if name not in places:  # the first record of a reaction names its trigger
                places[name] = self._place_reaction(read_trigger(row.label, read_body(row)))
            if row.label in USAGE_KINDS and row.seq > after:
                call = describe_call(row, read_body(row))
                yield {"agent_id": row.actor, "calls": [call], "reactions": {row.stream: places[name]}}

    def _place_reaction(self, trigger: int | None) -> dict[str, Any]:
        """Return the thread, root and asking reaction of a trigger, if the log contains the trigger."""
        head = row.head if trigger is not None and (row := self._log.row(trigger)) is not None else None
        if head is None:
            return {}
        sent_in = self._find_reaction(head.sender_id, head.cause, head.seq) if head.cause is not None else None
        place = {"thread_id": head.thread_id, "root": head.root}
        return {**place, "sent_in": sent_in["reaction"]} if sent_in is not None else place

    async def read_last(self, count: int) -> list[BaseMessage]:
        seqs = deque((row.seq for row in self._log.rows() if row.type == "message"), maxlen=count)
        return [message for seq in seqs if (message := self._message(seq)) is not None]

    async def reactions_with(self, seqs: Iterable[int]) -> set[tuple[str, str]]:
        wanted, names = set(seqs), set()
        for row in self._log.rows():
            if row.type == "record" and row.label == "started" and (row.actor, row.stream) not in names:
                body = read_body(row)
                manifest = body.get("manifest") if isinstance(body, dict) else None
                if isinstance(manifest, list) and not wanted.isdisjoint(it for it in manifest if isinstance(it, int)):
                    names.add((row.actor, row.stream))
        return names

    def list_names(self) -> list[tuple[str, str]]:
        """Return all reactions as (agent, id), ordered by their first records."""
        return list(self._read_places())

    async def open_reactions(self) -> set[tuple[str, str]]:
        # An agent that restarts writes a `started` record after the last end. This record opens the reaction again.
        return {name for name, it in self._read_places().items() if it.started > max(it.finished, default=0)}

    async def read_reactions(self, names: Iterable[tuple[str, str]]) -> list[RecordedReaction]:
        return [await self.reaction(*name) for name in names]

    async def rows(self) -> tuple[LogHead, AsyncIterator[Row]]:
        async def read() -> AsyncIterator[Row]:
            for row in self._log.rows():
                yield row

        return self._log.head, read()

    async def chain(self, seq: int) -> list[dict[str, Any]]:
        chain: list[dict[str, Any]] = []
        message: BaseMessage | None = self._find(seq)
        while message is not None:
            row = self._log.row(message.seq)
            if row is None:
                break
            chain.append(read_body(row))
            if message.cause is None:
                break
            sent_in = self._find_reaction(message.sender_id, message.cause, message.seq)
            if sent_in is not None:
                chain.append(sent_in)
            message = self._message(message.cause)
        return chain

    def _find_reaction(self, agent_id: str, trigger: int, seq: int) -> dict[str, Any] | None:
        """Return the reaction in which a message was sent, as ``network.why`` names it."""
        places = self._read_places()
        started = self._started.get(trigger, {}).get(agent_id, [])
        finished = [(it.reaction, at) for it in started for at in places[agent_id, it.reaction].finished]
        reaction = find_open(started, finished, seq)
        if reaction is None:
            return None
        return {"reaction": reaction.reaction, "agent_id": agent_id, "trigger": trigger, "seq": reaction.seq}

    async def following(self, seq: int, limit: int | None = None) -> tuple[list[BaseMessage], bool]:
        self._find(seq)
        # One pass is enough, because a cause always precedes its effects.
        follows = {seq}
        messages: list[BaseMessage] = []
        async for message in self.all_messages(seq):
            if message.cause in follows:
                # This message exceeds the limit, so tell the caller that the list is incomplete.
                if len(messages) == limit:
                    return messages, True
                follows.add(message.seq)
                messages.append(message)
        return messages, False

    async def reaction(self, agent_id: str, reaction: str) -> RecordedReaction:
        place = self._read_places().get((agent_id, reaction))
        rows = [row for seq in (place.seqs if place is not None else ()) if (row := self._log.row(seq)) is not None]
        return RecordedReaction(reaction, agent_id, list(map(read_record, rows)))

    async def reactions_to(self, message: BaseMessage) -> list[RecordedReaction]:
        self._read_places()
        started = sorted(self._started.get(message.seq, {}).items())
        # Return the first reaction and the newest, because a takeover may have caused a second reaction.
        names = [(agent_id, dict.fromkeys((its[0].reaction, its[-1].reaction))) for agent_id, its in started]
        return [await self.reaction(agent_id, reaction) for agent_id, its in names for reaction in its]

    async def messages(self, seqs: Iterable[int]) -> dict[int, BaseMessage]:
        messages = {seq: self._message(seq) for seq in seqs}
        return {seq: message for seq, message in messages.items() if message is not None}

    async def all_messages(self, after: int, thread_id: str | None = None) -> AsyncIterator[BaseMessage]:
        for row in self._log.rows():
            if row.type == "message" and row.seq > after:
                message = read_message(row)
                if thread_id in (None, message.thread_id):
                    yield message

    def _read_places(self) -> dict[tuple[str, str], _RecordSeqs]:
        """Return the positions of all records by (agent, id). Scans the log once."""
        if self._places is None:
            self._places = {}
            for row in self._log.rows():
                if row.type != "record":
                    continue
                place = self._places.setdefault((row.actor, row.stream), _RecordSeqs())
                place.seqs.append(row.seq)
                if row.label == "started":
                    place.started = row.seq
                    if (trigger := read_trigger(row.label, read_body(row))) is not None:
                        by_agent = self._started.setdefault(trigger, {})
                        by_agent.setdefault(row.actor, []).append(ReactionStart(row.stream, row.seq))
                elif row.label == "finished":
                    place.finished.append(row.seq)
        return self._places

    def _message(self, seq: int) -> BaseMessage | None:
        row = self._log.row(seq)
        return read_message(row) if row is not None and row.type == "message" else None

    def _find(self, seq: int) -> BaseMessage:
        message = self._message(seq)
        if message is None:
            raise UnknownMessage(f"There is no message {seq} in this ledger; roundelay export lists them.")
        return message


def _write_title(first: Row) -> str:
    """Return the title of a thread from its first row, as shown to people who do not take part in the thread."""
    is_reply = first.stream.startswith("thread:")
    # A log does not contain the recipient's kind. Assume an agent, so that the thread gets a subject as its title.
    is_told = not first.is_damaged and is_about_something(first.stream, has_agent=True)
    place = name_place(first.target if is_reply else first.stream, "")
    return write_title(place, read_message(first).text if is_told else "")
