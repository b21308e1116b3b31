"""Where a run is read from: a node that runs, under the caller's rights, or a ledger's file, which holds all.

Both give the same: the way up from a message and what followed from it, reactions with their records, messages, the log
itself. A node also tells what is said from now on. What is read is never held: a part of a log is looked at in the
space of that part.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from roundelay.agents.journal import fetch_fates, fetch_records
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.core.rows import Row
from roundelay.network.core.tables import ReactionStart
from roundelay.network.core.usage import USAGE_KINDS
from roundelay.network.errors import Forbidden, UnknownMessage, UnknownOperation
from roundelay.network.ledger.log_file import Log, LogHead, decode_row
from roundelay.network.messages import BaseMessage, message_from_wire
from roundelay.network.operations.reactions import describe_call
from roundelay.network.operations.views import find_open
from roundelay.network.titles import is_about_something, name_place, write_title
from roundelay.runs.lists import list_dead_letters, list_participants, list_threads
from roundelay.runs.reading import Record, RecordedReaction, read_body, read_message, read_record, read_trigger

A = TypeVar("A")
B = TypeVar("B")

EVERY_S = 0.5
WAIT_MS = 30_000
MAX_PAGE = 500
"""What the hub's reading operations give at most. More threads than that with news at once are not all seen."""
READS_AT_ONCE = 16
"""Well below `max_reads`, which other calls of the session count in too."""


class HubLog:
    """The messages that a hub's log holds above ``position``, page by page. For operators; to others the hub raises
    `Forbidden`."""

    def __init__(self, client: NetworkClient, position: int = 0) -> None:
        self.position = position
        self._client = client

    async def read(self, wait_ms: int = 0) -> list[AnyMessage]:
        """Give the next page, and go on behind it. Rows that are no messages lie between: a page may be empty, and not
        the last one. If nothing is above the position, the hub waits so long for something to come."""
        args = {"after": self.position, "limit": MAX_PAGE, "wait_ms": wait_ms}
        page = await self._client.call("network.log", args)
        # Behind the position: while the connection was lost the ledger was replaced, and this one's end is the present.
        self.position = min(int(page["next"]), int(page["head"]))
        return [message_from_wire(message) for message in page["messages"]]

    async def read_to_end(self) -> AsyncIterator[AnyMessage]:
        """Give everything up to the end that the log has by then."""
        before = -1
        while self.position > before:
            before = self.position
            for message in await self.read():
                yield message


class LiveSource:
    """A node that runs, as the client may read it: an operator everything, an agent what it may see."""

    def __init__(self, client: NetworkClient) -> None:
        self.client = client
        self._log = HubLog(client)
        self.has_thread = True
        """Whether the thread that `begin` was asked for is there, and the client may read it."""

    async def chain(self, seq: int) -> list[dict[str, Any]]:
        """Give a message and what it follows from, as ``network.why`` does. Raises `UnknownMessage`."""
        chain: list[dict[str, Any]] = []
        at: int | None = seq
        while at is not None:
            try:
                page = await self.client.call("network.why", {"seq": at})
            except UnknownMessage:
                if not chain:
                    raise
                break  # the next one may not be seen
            chain += page["chain"]
            last = next(it for it in reversed(page["chain"]) if "message_id" in it or "reaction" in it)
            at = None
            if page["has_more"]:  # it was cut after a message, or after the reaction that comes of the next one
                at = last["trigger"] if "reaction" in last else last.get("cause")
        return chain

    async def following(self, seq: int) -> list[BaseMessage]:
        """Give what followed from a message, ascending. Raises `UnknownMessage`."""
        pages = self.client.pages("network.impact", {"seq": seq, "limit": MAX_PAGE})
        return [message_from_wire(message) async for page in pages for message in page["messages"]]

    async def reaction(self, agent_id: str, reaction: str) -> RecordedReaction:
        """Give a reaction, with those of its records that may be seen."""
        return RecordedReaction(reaction, agent_id, await fetch_records(self.client.call, reaction, agent_id))

    @property
    def epoch(self) -> str:
        return self.client.welcome.network.epoch

    async def records(self, reaction: str, agent_id: str | None) -> list[Record]:
        """Give the records under the id of a reaction, of this agent or of everybody, that may be seen."""
        return await fetch_records(self.client.call, reaction, agent_id)

    async def threads(self, most: int) -> list[dict[str, Any]]:
        """Give the newest threads, the newest first, as ``network.list_threads`` does."""
        return await list_threads(self.client, most=most)

    async def history(self, thread_id: str, limit: int, before: int | None = None) -> dict[str, Any]:
        """Give the end of a thread, or of what was said before, as ``network.history`` does. Raises
        `UnknownMessage`."""
        args = {"thread_id": thread_id, "limit": limit, **({"before": before} if before is not None else {})}
        page: dict[str, Any] = await self.client.call("network.history", args)
        return page

    async def dead_letters(self, of: str | None, most: int) -> list[dict[str, Any]]:
        """Give dead letters by recipient and seq, as ``network.dead_letters`` does, of one recipient or of all."""
        return await list_dead_letters(self.client, of=of, most=most)

    async def knows(self, agent_id: str) -> bool:
        """Whether somebody has this id."""
        return any(it["agent_id"] == agent_id for it in await list_participants(self.client))

    async def usage(self, agent_id: str | None, after: int) -> AsyncIterator[dict[str, Any]]:
        """Give what records above ``after`` say of model calls, of this agent or of all, in pages as ``network.usage``
        gives them; each is one agent's."""
        asked: str | None = agent_id
        while True:
            args = {"after": after, "limit": MAX_PAGE, **({"agent_id": asked} if asked is not None else {})}
            next_agent: str | None = None
            async for page in self.client.pages("network.usage", args):
                yield page
                next_agent = page["next_agent"]
            if agent_id is not None or next_agent is None:
                return
            asked = next_agent

    async def reactions_to(self, message: BaseMessage) -> list[RecordedReaction]:
        """Give the first reaction of each agent that a message began, by agent, and behind it the one that has taken
        its place since a person took the thread over."""
        found = [await self.reaction(*named) for named in await self._list_reactions_with(message.seq)]
        # a prompt may hold it without being made for it
        return [it for it in found if not it.records or message.seq in it.triggers]

    async def reactions_with(self, seqs: Iterable[int]) -> set[tuple[str, str]]:
        """Give the reactions whose prompt holds one of these messages, which the caller must be able to read, as agent
        and id."""
        return {named for found in await read_few_at_once(self._list_reactions_with, seqs) for named in found}

    async def open_reactions(self) -> set[tuple[str, str]]:
        """Give the reactions that are open, as far as the caller may see, however old they are, as agent and id."""
        pages = self.client.pages("network.open_reactions", {"limit": MAX_PAGE})
        return {(it["agent_id"], it["reaction"]) async for page in pages for it in page["reactions"]}

    async def read_reactions(self, named: Iterable[tuple[str, str]]) -> list[RecordedReaction]:
        """Give these reactions, each of an agent and by its id."""
        return await read_few_at_once(lambda it: self.reaction(*it), named)

    async def messages(self, seqs: Iterable[int]) -> dict[int, BaseMessage]:
        """Give messages by their seqs, those that may be seen."""
        found: dict[int, BaseMessage] = {}
        for seq in seqs:
            try:
                found[seq] = message_from_wire((await self.client.call("network.why", {"seq": seq}))["chain"][0])
            except UnknownMessage:
                continue
        return found

    async def all_messages(self, after: int, thread_id: str | None = None) -> AsyncIterator[BaseMessage]:
        """Give every message above a seq, ascending, or those of one thread."""
        if thread_id is not None:
            for said in await self._read_thread(thread_id, after):
                yield said
            return
        try:
            async for message in HubLog(self.client, after).read_to_end():
                yield message
        except (Forbidden, UnknownOperation):  # no operator, who reads what its threads hold
            for message in await self._read_threads(
                [str(it["thread_id"]) for it in await list_threads(self.client)], after
            ):
                yield message

    async def rows(self) -> tuple[LogHead, AsyncIterator[Row]]:
        """Give the log itself. Raises `Forbidden` for who is no operator."""
        first = await self.client.call("network.rows", {"limit": 1})
        first_seq = decode_row(first["rows"][0]).seq if first["rows"] else 1

        async def read() -> AsyncIterator[Row]:
            after = 0
            while True:
                page = await self.client.call("network.rows", {"after": after, "limit": MAX_PAGE})
                for line in page["rows"]:
                    yield decode_row(line)
                if page["next"] == after:
                    return
                after = page["next"]

        return LogHead(epoch=first["epoch"], name=first["name"], first_seq=first_seq), read()

    # --- what is said from now on

    async def begin(self, last: int = 0, thread_id: str | None = None) -> list[AnyMessage]:
        """Take the present as where `follow` begins; gives the last messages before it, of one thread if named."""
        if last and thread_id is None:
            try:
                return await self._read_last(last)
            except (Forbidden, UnknownOperation):  # no operator, or an older hub
                pass
        newest_first, self._log.position = await self._list_threads()
        chosen = [thread_id] if thread_id is not None else [name for name, _ in newest_first[:last]]
        found: list[AnyMessage] = []
        for name in chosen:
            try:
                found += (await self.client.history(name, limit=last or 1)).messages
            except UnknownMessage:  # it may begin later
                self.has_thread = name != thread_id
        found.sort(key=lambda message: message.seq)
        return found[len(found) - min(last, len(found)) :]

    async def follow(self) -> AsyncIterator[AnyMessage]:
        """Give what is said from then on, in the order of the log, for ever.

        An operator reads the log, which answers when there is news. Who may not asks the threads again and again.
        Deliveries would come by themselves, but they are for their recipient's inbox: taken here they would count as
        handled, and left unacknowledged they end after `max_unacked`.
        """
        try:
            while True:
                for message in await self._log.read(WAIT_MS):
                    yield message
        except (Forbidden, UnknownOperation):  # no operator, or an older hub
            pass
        while True:
            await asyncio.sleep(EVERY_S)
            seen = self._log.position
            threads, head = await self._list_threads()
            news = await self._read_threads([it for it, last_seq in threads if last_seq > seen], seen)
            self._log.position = max(seen, head)
            for message in news:
                # What came after the list was made waits for the next one: the order holds across threads.
                if message.seq <= head:
                    yield message

    async def _read_last(self, last: int) -> list[AnyMessage]:
        """Give the end of the log. What it holds beside messages makes the look back longer; whatever lies before is
        never read."""
        head = self._log.position = int((await self.client.call("network.info"))["head"])
        looked_back = last
        while True:
            start = max(0, head - looked_back)
            found = [it async for it in HubLog(self.client, start).read_to_end() if it.seq <= head]
            if len(found) >= last or start == 0:
                return found[-last:]
            looked_back *= 4

    async def _list_reactions_with(self, seq: int) -> list[tuple[str, str]]:
        fates = await fetch_fates(self.client.call, seq)
        begun = [(it["agent_id"], told) for it in fates for told in (it, it.get("again", {}))]
        return [(str(agent_id), str(told["reaction"])) for agent_id, told in begun if "reaction" in told]

    async def _list_threads(self) -> tuple[list[tuple[str, int]], int]:
        """Give each thread that went on since, and its last seq, the newest first; and the last seq of all."""
        seen = self._log.position
        listed = await list_threads(self.client, most=None if seen else MAX_PAGE, above=seen)
        threads = [(str(it["thread_id"]), int(it["last_seq"])) for it in listed]
        return threads, max((last_seq for _, last_seq in threads), default=0)

    async def _read_threads(self, thread_ids: Iterable[str], after: int) -> list[AnyMessage]:
        found = [message for thread_id in thread_ids for message in await self._read_thread(thread_id, after)]
        return sorted(found, key=lambda message: message.seq)

    async def _read_thread(self, thread_id: str, after: int) -> list[AnyMessage]:
        """Give the messages of a thread above a seq, ascending. Raises `UnknownMessage`."""
        newer: list[AnyMessage] = []
        async for page in self.client.pages("network.history", {"thread_id": thread_id, "limit": MAX_PAGE}):
            messages = list(map(message_from_wire, page["messages"]))
            newer[:0] = [message for message in messages if message.seq > after]
            if not messages or messages[0].seq <= after:
                break
        return newer


async def read_few_at_once(read: Callable[[A], Awaitable[B]], items: Iterable[A]) -> list[B]:
    """Read all of these from the hub, as many at a time as it takes from one session."""
    room = asyncio.Semaphore(READS_AT_ONCE)

    async def read_one(item: A) -> B:
        async with room:
            return await read(item)

    return await asyncio.gather(*map(read_one, items))


@dataclass(slots=True)
class _RecordSeqs:
    """Where the records of a reaction are in the log."""

    seqs: list[int] = field(default_factory=list)
    begun: int = 0
    """The newest beginning."""
    finished: list[int] = field(default_factory=list)


class FileSource:
    """The log of a ledger's file. It holds which records are of which reaction; all else is read when asked for."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._known: dict[tuple[str, str], _RecordSeqs] | None = None  # by agent and id
        self._begun: dict[int, dict[str, list[ReactionStart]]] = {}  # by trigger and agent, ascending

    @property
    def epoch(self) -> str:
        return self._log.head.epoch

    async def records(self, reaction: str, agent_id: str | None) -> list[Record]:
        names = [it for it in self._read_places() if it[1] == reaction and agent_id in (None, it[0])]
        found = [record for name in names for record in (await self.reaction(*name)).records]
        return sorted(found, key=lambda it: int(it["seq"]))

    async def threads(self, most: int) -> list[dict[str, Any]]:
        """As a node does, but with ``senders``, who has written there, in place of the readers, whom a log does not
        tell."""
        found: dict[str, dict[str, Any]] = {}
        first: dict[str, Row] = {}
        for row in self._log.rows():
            if row.type == "message":
                first.setdefault(row.stream, row)
                it = found.setdefault(
                    row.stream, {"thread_id": row.stream, "last_seq": 0, "messages": 0, "senders": set()}
                )
                it |= {"last_seq": row.seq, "messages": it["messages"] + 1}
                it["senders"].add(row.actor)
        newest = sorted(found.values(), key=lambda it: int(it["last_seq"]), reverse=True)[:most]
        return [
            {**it, "title": _write_title(first[it["thread_id"]]), "senders": sorted(it["senders"])} for it in newest
        ]

    async def history(self, thread_id: str, limit: int, before: int | None = None) -> dict[str, Any]:
        rows = (it for it in self._log.rows() if it.type == "message" and it.stream == thread_id)
        last = deque((it.seq for it in rows if before is None or it.seq < before), maxlen=limit + 1)
        if not last:
            earlier = f" before #{before}" if before is not None else ""
            raise UnknownMessage(
                f"This ledger holds nothing of a thread {thread_id!r}{earlier}; see: roundelay threads --db FILE"
            )
        shown = [row for seq in list(last)[-limit:] if (row := self._log.row(seq)) is not None]
        return {"messages": list(map(read_body, shown)), "has_more": len(last) > limit}

    async def dead_letters(self, of: str | None, most: int) -> list[dict[str, Any]]:
        found: dict[tuple[str, int], dict[str, Any]] = {}
        for row in self._log.rows():
            if row.type != "dead":
                continue
            body = read_body(row)
            letter = (str(body["agent_id"]), int(body["seq"]))
            if "event" in body:  # it was taken back, or its reaction has ended after all
                found.pop(letter, None)
            elif letter[1] >= self._log.head.first_seq and of in (None, letter[0]):
                found[letter] = {**body, "at": row.at}
        return [found[letter] for letter in sorted(found)[:most]]

    async def knows(self, agent_id: str) -> bool:
        """Whether somebody has this id, or may: of those who came before the log begins it says nothing."""
        joined = (row for row in self._log.rows() if row.type == "registered")
        return self._log.head.first_seq > 1 or any(read_body(row)["agent_id"] == agent_id for row in joined)

    async def usage(self, agent_id: str | None, after: int) -> AsyncIterator[dict[str, Any]]:
        """As a node does, in pages of one call each."""
        places: dict[tuple[str, str], dict[str, Any]] = {}
        for row in self._log.rows():
            name = (row.actor, row.stream)
            if row.type != "record" or agent_id not in (None, row.actor):
                continue
            if name not in places:  # its first record, which says what it is a reaction to
                places[name] = self._place_reaction(read_trigger(row.label, read_body(row)))
            if row.label in USAGE_KINDS and row.seq > after:
                call = describe_call(row, read_body(row))
                yield {"agent_id": row.actor, "calls": [call], "reactions": {row.stream: places[name]}}

    def _place_reaction(self, trigger: int | None) -> dict[str, Any]:
        head = row.head if trigger is not None and (row := self._log.row(trigger)) is not None else None
        if head is None:
            return {}
        sent_in = self._find_reaction(head.sender_id, head.cause, head.seq) if head.cause is not None else None
        place = {"thread_id": head.thread_id, "root": head.root}
        return {**place, "sent_in": sent_in["reaction"]} if sent_in is not None else place

    async def begin(self, last: int) -> list[BaseMessage]:
        """Give the last messages."""
        seqs = deque((row.seq for row in self._log.rows() if row.type == "message"), maxlen=last)
        return [message for seq in seqs if (message := self._message(seq)) is not None]

    async def reactions_with(self, seqs: Iterable[int]) -> set[tuple[str, str]]:
        wanted, found = set(seqs), set()
        for row in self._log.rows():
            if row.type == "record" and row.label == "started" and (row.actor, row.stream) not in found:
                body = read_body(row)
                manifest = body.get("manifest") if isinstance(body, dict) else None
                if isinstance(manifest, list) and not wanted.isdisjoint(it for it in manifest if isinstance(it, int)):
                    found.add((row.actor, row.stream))
        return found

    async def open_reactions(self) -> set[tuple[str, str]]:
        return {name for name, it in self._read_places().items() if it.begun > max(it.finished, default=0)}

    async def read_reactions(self, named: Iterable[tuple[str, str]]) -> list[RecordedReaction]:
        return [await self.reaction(*it) for it in named]

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
        """What `network.why` says of the reaction that a message was sent in."""
        places = self._read_places()
        begun = self._begun.get(trigger, {}).get(agent_id, [])
        finished = [(it.reaction, at) for it in begun for at in places[agent_id, it.reaction].finished]
        found = find_open(begun, finished, seq)
        if found is None:
            return None
        return {"reaction": found.reaction, "agent_id": agent_id, "trigger": trigger, "seq": found.seq}

    async def following(self, seq: int) -> list[BaseMessage]:
        self._find(seq)
        follows = {seq}
        found: list[BaseMessage] = []
        async for message in self.all_messages(seq):
            if message.cause in follows:
                follows.add(message.seq)
                found.append(message)
        return found

    async def reaction(self, agent_id: str, reaction: str) -> RecordedReaction:
        found = self._read_places().get((agent_id, reaction))
        rows = [row for seq in (found.seqs if found is not None else ()) if (row := self._log.row(seq)) is not None]
        return RecordedReaction(reaction, agent_id, list(map(read_record, rows)))

    async def reactions_to(self, message: BaseMessage) -> list[RecordedReaction]:
        self._read_places()
        begun = sorted(self._begun.get(message.seq, {}).items())
        named = [(agent_id, dict.fromkeys((its[0].reaction, its[-1].reaction))) for agent_id, its in begun]
        return [await self.reaction(agent_id, reaction) for agent_id, its in named for reaction in its]

    async def messages(self, seqs: Iterable[int]) -> dict[int, BaseMessage]:
        found = {seq: self._message(seq) for seq in seqs}
        return {seq: message for seq, message in found.items() if message is not None}

    async def all_messages(self, after: int, thread_id: str | None = None) -> AsyncIterator[BaseMessage]:
        for row in self._log.rows():
            if row.type == "message" and row.seq > after:
                message = read_message(row)
                if thread_id in (None, message.thread_id):
                    yield message

    def _read_places(self) -> dict[tuple[str, str], _RecordSeqs]:
        if self._known is None:
            self._known = {}
            for row in self._log.rows():
                if row.type != "record":
                    continue
                it = self._known.setdefault((row.actor, row.stream), _RecordSeqs())
                it.seqs.append(row.seq)
                it.begun = row.seq if row.label == "started" else it.begun
                if row.label == "started" and (trigger := read_trigger(row.label, read_body(row))) is not None:
                    by_agent = self._begun.setdefault(trigger, {})
                    by_agent.setdefault(row.actor, []).append(ReactionStart(row.stream, row.seq))
                elif row.label == "finished":
                    it.finished.append(row.seq)
        return self._known

    def _message(self, seq: int) -> BaseMessage | None:
        row = self._log.row(seq)
        return read_message(row) if row is not None and row.type == "message" else None

    def _find(self, seq: int) -> BaseMessage:
        message = self._message(seq)
        if message is None:
            raise UnknownMessage(f"There is no message {seq} in this ledger; roundelay export lists them.")
        return message


Source = LiveSource | FileSource
"""A run that can be looked into."""


def _write_title(first: Row) -> str:
    """What a thread that begins with this row is called for somebody who has no part in it."""
    is_reply = first.stream.startswith("thread:")
    # a log does not tell of which kind a recipient is
    is_told = not first.is_damaged and is_about_something(first.stream, has_agent=True)
    place = name_place(first.target if is_reply else first.stream, "")
    return write_title(place, read_message(first).text if is_told else "")
