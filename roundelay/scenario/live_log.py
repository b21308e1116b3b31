"""What an operator sees of a network that is up: every message since the beginning, and how far each has come.

Follows the hub's log (`network.log` waits for what comes). Whether everything is settled is asked of the hub anew whenever something was stored, and
a few times a second, since acknowledgements stand in no log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from roundelay.agents.records import fetch_fates, fetch_records
from roundelay.lists import list_dead_letters, list_threads
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.clock import system_clock
from roundelay.network.errors import Forbidden
from roundelay.network.messages import message_from_wire
from roundelay.scenario.record import ReactionRecord, RunRecord

READER_ID = "scenario-reader"
WAIT_MS = 250
"""How long the hub holds a look at its log back when there is nothing new."""
_DONE = ("handled", "in_prompt", "dead")


class LiveLog:
    """The log of the network at ``url``, from where it stands now. Use as ``async with``; ``client`` is an operator's connection."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self.client = NetworkClient(READER_ID, url, kind="service", token=token)
        self.messages: list[AnyMessage] = []
        self._position = 0
        self._settled: set[int] = set()
        self._moved = asyncio.Condition()
        self._following: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LiveLog:
        await self.client.connect()
        try:
            self._position = (await self.client.call("network.info"))["head"]
            await self._follow_once(0)
        except BaseException as error:
            await self.client.close()
            if isinstance(error, Forbidden):
                raise Forbidden(f"To follow the log is an operator's: give an operator's token. ({error})") from error
            raise
        self._following = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self.client.close()

    async def idle(self, who: Collection[str], at_most_s: float) -> None:
        """Wait until everything that was said since the beginning is handled by those of these participants that it is for.

        Raises `TimeoutError`.
        """
        async with asyncio.timeout(at_most_s):
            while not await self._is_idle(who):
                async with self._moved:
                    await self._moved.wait()

    async def wait_for(self, wanted: Callable[[AnyMessage], bool], at_most_s: float) -> AnyMessage:
        """Wait for the first message since the beginning that is ``wanted``. Raises `TimeoutError`."""
        async with asyncio.timeout(at_most_s), self._moved:
            while True:
                for message in self.messages:
                    if wanted(message):
                        return message
                await self._moved.wait()

    async def describe(self, began_at: int, values: Sequence[Any] = ()) -> RunRecord:
        """What has happened since the beginning."""
        reactions: dict[str, ReactionRecord] = {}
        for message in self.messages:
            for recipient in await self._recipients(message.seq):
                reaction = recipient.get("reaction")
                if reaction is not None and reaction not in reactions:
                    reactions[reaction] = await self._read_reaction(reaction, recipient["agent_id"])
        first = self.messages[0].seq if self.messages else 0
        letters = await list_dead_letters(self.client)
        threads = await list_threads(self.client)
        return RunRecord(
            list(self.messages),
            list(reactions.values()),
            (),
            [letter for letter in letters if letter["seq"] >= first > 0],
            {thread["thread_id"]: thread["readers"] for thread in threads},
            values,
            began_at,
            system_clock(),
        )

    async def _follow(self) -> None:
        while True:
            await self._follow_once(WAIT_MS)

    async def _follow_once(self, wait_ms: int) -> None:
        page = await self.client.call("network.log", {"after": self._position, "wait_ms": wait_ms, "limit": 500})
        self._position = page["next"]
        async with self._moved:
            self.messages += [message_from_wire(message) for message in page["messages"]]
            self._moved.notify_all()  # also without anything new: acknowledgements stand in no log

    async def _is_idle(self, who: Collection[str]) -> bool:
        head = await self._read_head()
        if self._position < head:
            return False
        for message in list(self.messages):
            if message.seq in self._settled:
                continue
            for recipient in await self._recipients(message.seq):
                if recipient["agent_id"] in who and not await self._is_done(recipient):
                    return False
            self._settled.add(message.seq)
        return await self._read_head() == head  # else something was stored while it looked

    async def _read_head(self) -> int:
        head: int = (await self.client.call("network.info"))["head"]
        return head

    async def _is_done(self, recipient: Mapping[str, Any]) -> bool:
        if recipient["state"] not in _DONE:
            return False
        reaction = recipient.get("reaction")
        if reaction is None:
            return True
        record = await self._read_reaction(reaction, recipient["agent_id"])
        return record.status is not None or record.is_waiting

    async def _recipients(self, seq: int) -> list[Mapping[str, Any]]:
        return await fetch_fates(self.client.call, seq)

    async def _read_reaction(self, reaction: str, agent_id: str) -> ReactionRecord:
        record = ReactionRecord(reaction, agent_id)
        for it in await fetch_records(self.client.call, reaction, agent_id):
            record.take(it["seq"], it["kind"], it["body"])
        return record
