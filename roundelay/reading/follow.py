"""Following a whole conversation as it grows, without being anybody in it: what ``roundelay tail`` shows.

An operator reads the log, which answers when there is news. Who may not asks the threads again and again. Deliveries would come by
themselves, but they are for their recipient's inbox: taken here they would count as handled, and left unacknowledged they end after
`max_unacked`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from roundelay.lists import list_threads
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.errors import Forbidden, UnknownMessage, UnknownOperation
from roundelay.network.messages import message_from_wire

EVERY_S = 0.5
WAIT_MS = 30_000
MAX_PAGE = 500
"""What the hub's reading operations give at most. More threads than that with news at once are not all seen."""


async def read_thread(client: NetworkClient, thread_id: str, after: int) -> list[AnyMessage]:
    """The messages of a thread above a seq, ascending. Raises `UnknownMessage`."""
    found: list[AnyMessage] = []
    before: int | None = None
    while True:
        page = await client.history(thread_id, before=before, limit=MAX_PAGE)
        found[:0] = [message for message in page.messages if message.seq > after]
        if not page.has_more or not page.messages or page.messages[0].seq <= after:
            return found
        before = page.messages[0].seq


class Follower:
    """Every message that the client may read, in ledger order, from the moment of `begin` on."""

    def __init__(self, client: NetworkClient) -> None:
        self._client = client
        self._seen = 0
        self.has_thread = True
        """Whether the thread that `begin` was asked for is there, and the client may read it."""

    async def begin(self, last: int = 0, thread_id: str | None = None) -> list[AnyMessage]:
        """Take the present as the beginning; gives the last messages before it, of one thread if it is named."""
        if last and thread_id is None:
            try:
                return await self._read_last(last)
            except (Forbidden, UnknownOperation):  # no operator, or an older hub
                pass
        newest_first, self._seen = await self._list_threads()
        chosen = [thread_id] if thread_id is not None else [name for name, _ in newest_first[:last]]
        pages = []
        for name in chosen:
            try:
                pages.append(await self._client.history(name, limit=last or 1))
            except UnknownMessage:  # it may begin later
                self.has_thread = name != thread_id
        found = self._sort(message for page in pages for message in page.messages)
        return found[len(found) - min(last, len(found)) :]

    async def _read_last(self, last: int) -> list[AnyMessage]:
        """The end of the log: what it holds beside messages makes the look back longer, whatever lies before is never read."""
        head = self._seen = int((await self._client.call("network.info"))["head"])
        looked_back = last
        while True:
            after = start = max(0, head - looked_back)
            found: list[AnyMessage] = []
            while after < head:
                page = await self._client.call("network.log", {"after": after, "limit": MAX_PAGE})
                found += (message_from_wire(message) for message in page["messages"])
                after = max(after + 1, int(page["next"]))
            found = [message for message in found if message.seq <= head]
            if len(found) >= last or start == 0:
                return found[-last:]
            looked_back *= 4

    async def messages(self) -> AsyncIterator[AnyMessage]:
        """What is said from then on, for ever."""
        try:
            async for message in self._read_log():
                yield message
        except (Forbidden, UnknownOperation):  # no operator, or an older hub
            async for message in self._ask_threads():
                yield message

    async def _read_log(self) -> AsyncIterator[AnyMessage]:
        while True:
            args = {"after": self._seen, "limit": MAX_PAGE, "wait_ms": WAIT_MS}
            page = await self._client.call("network.log", args)
            # Behind what was seen: while the connection was lost the ledger was replaced, and this one's end is the present.
            self._seen = min(int(page["next"]), int(page["head"]))
            for message in page["messages"]:
                yield message_from_wire(message)

    async def _ask_threads(self) -> AsyncIterator[AnyMessage]:
        while True:
            await asyncio.sleep(EVERY_S)
            threads, head = await self._list_threads()
            changed = [thread_id for thread_id, last_seq in threads if last_seq > self._seen]
            news = [await read_thread(self._client, thread_id, self._seen) for thread_id in changed]
            # What came after the list was made waits for the next one, so that the order holds across threads.
            found = self._sort(message for part in news for message in part if message.seq <= head)
            self._seen = max(self._seen, head)
            for message in found:
                yield message

    async def _list_threads(self) -> tuple[list[tuple[str, int]], int]:
        """Each thread that went on since, and its last seq, the newest first; and the last seq of all."""
        listed = await list_threads(self._client, most=None if self._seen else MAX_PAGE, above=self._seen)
        threads = [(str(it["thread_id"]), int(it["last_seq"])) for it in listed]
        return threads, max((last_seq for _, last_seq in threads), default=0)

    @staticmethod
    def _sort(messages: Iterable[AnyMessage]) -> list[AnyMessage]:
        return sorted(messages, key=lambda message: message.seq)
