"""Read a run from a node. `NodeSource` calls the node's read operations; `LiveSource` also follows new messages.

`NodeSource` needs only a function that calls an operation. The node itself also uses `NodeSource` to answer
``network.explain`` and similar operations (`node_answers`), with the caller's rights. Nothing is cached: each method
reads the data that the caller may see at that moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeVar

from roundelay.agents.recorded import fetch_fates, fetch_records
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.client.paging import Call, read_pages
from roundelay.network.core.rows import Row
from roundelay.network.errors import Forbidden, UnknownMessage, UnknownOperation
from roundelay.network.frames import SEQ_LIMIT
from roundelay.network.ledger.log_file import LogHead, decode_row
from roundelay.network.messages import BaseMessage, message_from_wire
from roundelay.runs.lists import list_dead_letters, list_participants, list_threads
from roundelay.runs.reading import Record, RecordedReaction

A = TypeVar("A")
B = TypeVar("B")

POLL_INTERVAL_S = 0.5
"""Polling interval in seconds, for a caller who may not read the log."""
WAIT_MS = 30_000
"""Maximum time that the hub waits for new rows before it answers a read of the log, in milliseconds."""
MAX_PAGE = 500
"""Maximum page size of the hub's read operations. If more threads than this have new messages at once, some messages
are missed."""
MAX_CONCURRENT_READS = 16
"""Maximum number of concurrent reads. The number is well below the hub's `max_reads`, because other calls of the
session count toward that limit too."""


class HubLog:
    """Reads the messages of a hub's log above ``position``, page by page. The hub raises `Forbidden` for non-operators."""

    def __init__(self, client: NetworkClient, position: int = 0) -> None:
        self.position = position
        self._client = client

    async def read(self, wait_ms: int = 0) -> list[AnyMessage]:
        """Return the next page and advance the position. Wait up to ``wait_ms`` milliseconds for new rows.

        Rows that are not messages are skipped, so an empty page does not always mean the end of the log.
        """
        args = {"after": self.position, "limit": MAX_PAGE, "wait_ms": wait_ms}
        page = await self._client.call("network.log", args)
        # If the ledger was replaced during an interruption of the connection, the head can be below the position.
        # Without the minimum, the reader would wait for sequence numbers that the new ledger reaches much later.
        self.position = min(int(page["next"]), int(page["head"]))
        return [message_from_wire(message) for message in page["messages"]]

    async def read_to_end(self) -> AsyncIterator[AnyMessage]:
        """Yield all messages up to the current end of the log, including messages that arrive meanwhile."""
        # A page may contain no messages, so only an unchanged position means the end.
        previous = -1
        while self.position > previous:
            previous = self.position
            for message in await self.read():
                yield message


class NodeSource:
    """Source that reads a run through a node's read operations, with the rights of one caller."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def chain(self, seq: int) -> list[dict[str, Any]]:
        """Return a message and its causes up to the root, as ``network.why`` does. Raises `UnknownMessage`."""
        chain: list[dict[str, Any]] = []
        next_seq: int | None = seq
        while next_seq is not None:
            try:
                page = await self._call("network.why", {"seq": next_seq})
            except UnknownMessage:
                if not chain:
                    raise
                break  # the caller may not see the next message
            chain += page["chain"]
            last = next(entry for entry in reversed(page["chain"]) if "message_id" in entry or "reaction" in entry)
            next_seq = None
            if page["has_more"]:  # a page ends after a message, or after the reaction that sent it
                next_seq = last["trigger"] if "reaction" in last else last.get("cause")
        return chain

    async def following(self, seq: int, limit: int | None = None) -> tuple[list[BaseMessage], bool]:
        """Return the messages that followed from a message, ascending, and whether ``limit`` left some out.

        Raises `UnknownMessage`.
        """
        messages: list[BaseMessage] = []
        async for page in read_pages(self._call, "network.impact", {"seq": seq, "limit": MAX_PAGE}):
            messages += [message_from_wire(message) for message in page["messages"]]
            # Read one message more than the limit to find out whether some were left out.
            if limit is not None and len(messages) > limit:
                return messages[:limit], True
        return messages, False

    async def reaction(self, agent_id: str, reaction: str) -> RecordedReaction:
        """Return a reaction with the records that the caller may see."""
        return RecordedReaction(reaction, agent_id, await fetch_records(self._call, reaction, agent_id))

    async def records(self, reaction: str, agent_id: str | None) -> list[Record]:
        """Return the records under a reaction's id. ``agent_id`` selects one of the agents that used the id; None
        selects all."""
        return await fetch_records(self._call, reaction, agent_id)

    async def usage(self, agent_id: str | None, after: int) -> AsyncIterator[dict[str, Any]]:
        """Yield the pages of ``network.usage`` above ``after``, for one agent or for all. Each page belongs to one
        agent.
        """
        asked: str | None = agent_id
        while True:
            args = {"after": after, "limit": MAX_PAGE, **({"agent_id": asked} if asked is not None else {})}
            next_agent: str | None = None
            async for page in read_pages(self._call, "network.usage", args):
                yield page
                next_agent = page["next_agent"]
            # The hub pages through the records of one agent at a time. Each page names the next agent with records.
            if agent_id is not None or next_agent is None:
                return
            asked = next_agent

    async def reactions_to(self, message: BaseMessage) -> list[RecordedReaction]:
        """Return each agent's first reaction to a message, by agent.

        A reaction that replaced the first one after a takeover comes directly after it.
        """
        reactions = [await self.reaction(*name) for name in await self._list_reactions_with(message.seq)]
        # A prompt may contain a message that did not trigger the reaction. Keep only reactions to this message.
        return [it for it in reactions if not it.records or message.seq in it.triggers]

    async def reactions_with(self, seqs: Iterable[int]) -> set[tuple[str, str]]:
        """Return the reactions whose prompt contains one of these messages, as (agent, id).

        The caller must be able to read the messages.
        """
        return {name for names in await read_concurrently(self._list_reactions_with, seqs) for name in names}

    async def open_reactions(self) -> set[tuple[str, str]]:
        """Return all open reactions that the caller may see, as (agent, id)."""
        pages = read_pages(self._call, "network.open_reactions", {"limit": MAX_PAGE})
        return {(it["agent_id"], it["reaction"]) async for page in pages for it in page["reactions"]}

    async def read_reactions(self, names: Iterable[tuple[str, str]]) -> list[RecordedReaction]:
        """Return the reactions with these names (agent, id)."""
        return await read_concurrently(lambda name: self.reaction(*name), names)

    async def messages(self, seqs: Iterable[int]) -> dict[int, BaseMessage]:
        """Return the messages with these seqs that the caller may see, by seq."""
        messages: dict[int, BaseMessage] = {}
        for seq in filter(is_seq, seqs):
            try:
                messages[seq] = message_from_wire((await self._call("network.why", {"seq": seq}))["chain"][0])
            except UnknownMessage:
                continue
        return messages

    async def _list_reactions_with(self, seq: int) -> list[tuple[str, str]]:
        fates = await fetch_fates(self._call, seq)
        entries = [(fate["agent_id"], entry) for fate in fates for entry in (fate, fate.get("again", {}))]
        return [(str(agent_id), str(entry["reaction"])) for agent_id, entry in entries if "reaction" in entry]


class LiveSource(NodeSource):
    """Source that reads a run from a connected node. Operators see everything; other callers see only what they may
    read.
    """

    def __init__(self, client: NetworkClient) -> None:
        super().__init__(client.call)
        self.client = client
        self._log = HubLog(client)
        self.has_thread = True
        """Whether the thread passed to `read_last` exists and the client may read it."""

    @property
    def epoch(self) -> str:
        return self.client.welcome.network.epoch

    async def threads(self, limit: int) -> list[dict[str, Any]]:
        """Return the newest threads, newest first, as ``network.list_threads`` does."""
        return await list_threads(self.client, limit=limit)

    async def history(self, thread_id: str, limit: int, before: int | None = None) -> dict[str, Any]:
        """Return the newest messages of a thread below ``before``, as ``network.history`` does. Raises
        `UnknownMessage`."""
        args = {"thread_id": thread_id, "limit": limit, **({"before": before} if before is not None else {})}
        page: dict[str, Any] = await self.client.call("network.history", args)
        return page

    async def dead_letters(self, recipient: str | None, limit: int) -> list[dict[str, Any]]:
        """Return the dead letters of one recipient or of all recipients, ordered by recipient and sequence number."""
        return await list_dead_letters(self.client, recipient=recipient, limit=limit)

    async def knows(self, agent_id: str) -> bool:
        """Return whether a participant has this id."""
        return any(it["agent_id"] == agent_id for it in await list_participants(self.client))

    async def all_messages(self, after: int, thread_id: str | None = None) -> AsyncIterator[BaseMessage]:
        """Yield every message above a seq, ascending, of one thread or of all threads."""
        if thread_id is not None:
            for message in await self._read_thread(thread_id, after):
                yield message
            return
        try:
            async for message in HubLog(self.client, after).read_to_end():
                yield message
        except (Forbidden, UnknownOperation):  # the caller is not an operator, so read thread by thread
            thread_ids = [str(it["thread_id"]) for it in await list_threads(self.client)]
            for message in await self._read_threads(thread_ids, after):
                yield message

    async def rows(self) -> tuple[LogHead, AsyncIterator[Row]]:
        """Return the head of the log and an iterator over its rows. Raises `Forbidden` for non-operators."""
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

    # --- new messages

    async def read_last(self, count: int = 0, thread_id: str | None = None) -> list[AnyMessage]:
        """Return the last messages of one thread or of all threads. `follow` continues after these messages."""
        if count and thread_id is None:
            try:
                return await self._read_end_of_log(count)
            except (Forbidden, UnknownOperation):  # not an operator, or an older hub
                pass
        # Read the threads before the messages, so that `follow` yields messages that arrive in between.
        newest_first, self._log.position = await self._list_threads()
        thread_ids = [thread_id] if thread_id is not None else [name for name, _ in newest_first[:count]]
        messages: list[AnyMessage] = []
        for name in thread_ids:
            try:
                messages += (await self.client.history(name, limit=count or 1)).messages
            except UnknownMessage:  # the thread may not exist yet
                self.has_thread = name != thread_id
        messages.sort(key=lambda message: message.seq)
        return messages[len(messages) - min(count, len(messages)) :]

    async def follow(self) -> AsyncIterator[AnyMessage]:
        """Yield new messages in log order, without end.

        For operators, the hub answers a read of the log when a new row exists. Other callers poll their threads.
        Deliveries would need no polling, but they belong to the recipient's inbox. Acknowledging them here would mark
        them as handled. Without acknowledgments, delivery would stop after `max_unacked` messages.
        """
        try:
            while True:
                for message in await self._log.read(WAIT_MS):
                    yield message
        except (Forbidden, UnknownOperation):  # not an operator, or an older hub
            pass
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            seen = self._log.position
            threads, head = await self._list_threads()
            new = await self._read_threads([name for name, last_seq in threads if last_seq > seen], seen)
            # The head of an empty list is 0, which would repeat all messages.
            self._log.position = max(seen, head)
            for message in new:
                # Leave messages newer than the list for the next round. Otherwise an older message of another thread
                # could come later, which would break the order across threads.
                if message.seq <= head:
                    yield message

    async def _read_end_of_log(self, count: int) -> list[AnyMessage]:
        """Return the last messages of the log. Reads backward only as far as necessary."""
        head = self._log.position = int((await self.client.call("network.info"))["head"])
        distance = count
        while True:
            start = max(0, head - distance)
            # Skip messages above the head: `follow` starts at the head and would yield them again.
            messages = [it async for it in HubLog(self.client, start).read_to_end() if it.seq <= head]
            if len(messages) >= count or start == 0:
                return messages[-count:]
            distance *= 4  # most of the rows are records, not messages, so read a larger range

    async def _list_threads(self) -> tuple[list[tuple[str, int]], int]:
        """Return (id, last seq) of each thread with new messages, newest first, and the highest of these seqs."""
        seen = self._log.position
        entries = await list_threads(self.client, limit=None if seen else MAX_PAGE, above=seen)
        threads = [(str(it["thread_id"]), int(it["last_seq"])) for it in entries]
        return threads, max((last_seq for _, last_seq in threads), default=0)

    async def _read_threads(self, thread_ids: Iterable[str], after: int) -> list[AnyMessage]:
        messages = [message for thread_id in thread_ids for message in await self._read_thread(thread_id, after)]
        return sorted(messages, key=lambda message: message.seq)

    async def _read_thread(self, thread_id: str, after: int) -> list[AnyMessage]:
        """Return the messages of a thread above a seq, ascending. Raises `UnknownMessage`."""
        newer: list[AnyMessage] = []
        async for page in self.client.pages("network.history", {"thread_id": thread_id, "limit": MAX_PAGE}):
            messages = list(map(message_from_wire, page["messages"]))
            # Pages come newest first. Within a page, messages are ascending.
            newer[:0] = [message for message in messages if message.seq > after]
            if not messages or messages[0].seq <= after:
                break
        return newer


def is_seq(seq: int) -> bool:
    """Return whether a message can have this sequence number. Records of other programs may contain any number."""
    return 0 < seq < SEQ_LIMIT


async def read_concurrently(read: Callable[[A], Awaitable[B]], items: Iterable[A]) -> list[B]:
    """Read all items from the hub, at most `MAX_CONCURRENT_READS` at a time."""
    slots = asyncio.Semaphore(MAX_CONCURRENT_READS)

    async def read_one(item: A) -> B:
        async with slots:
            return await read(item)

    return await asyncio.gather(*map(read_one, items))
