"""Where the commands that explain a run read it from: a live node, under the caller's rights, or a ledger's file, which holds all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Protocol

from roundelay.agents.records import fetch_records
from roundelay.network.client import NetworkClient
from roundelay.network.errors import Forbidden, UnknownMessage, UnknownOperation
from roundelay.network.ledger import Row
from roundelay.network.log_lines import LogHead, decode_row
from roundelay.network.messages import BaseMessage, message_from_wire
from roundelay.recording import Recording

LOG_PAGE = 100
MAX_PAGE = 500


class Source(Protocol):
    """A run that can be looked into."""

    async def chain(self, seq: int) -> list[dict[str, Any]]:
        """A message and what it follows from, as ``network.why`` gives it. Raises `UnknownMessage`."""
        ...

    async def following(self, seq: int) -> list[BaseMessage]:
        """What followed from a message, ascending. Raises `UnknownMessage`."""
        ...

    async def reactions_to(self, message: BaseMessage) -> list[tuple[str, str]]:
        """The reactions that a message began: their agents and ids."""
        ...

    async def records(self, reaction: str) -> list[Mapping[str, Any]]:
        """What a reaction recorded, as far as it may be seen."""
        ...

    async def messages(self, seqs: Iterable[int]) -> dict[int, BaseMessage]:
        """Messages by their seqs, those that may be seen."""
        ...

    def all_messages(self, after: int, thread_id: str | None = None) -> AsyncIterator[BaseMessage]:
        """Every message above a seq, ascending, or those of one thread."""
        ...


class LiveSource:
    """A node that runs."""

    def __init__(self, client: NetworkClient) -> None:
        self._client = client

    async def chain(self, seq: int) -> list[dict[str, Any]]:
        chain: list[dict[str, Any]] = []
        at: int | None = seq
        while at is not None:
            try:
                page = await self._client.call("network.why", {"seq": at})
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
        found: list[BaseMessage] = []
        args: dict[str, Any] = {"seq": seq, "limit": MAX_PAGE}
        while True:
            page = await self._client.call("network.impact", args)
            found += [message_from_wire(message) for message in page["messages"]]
            if not page["has_more"]:
                return found
            args["after"] = page["next"]

    async def reactions_to(self, message: BaseMessage) -> list[tuple[str, str]]:
        status = await self._client.call("network.message_status", {"seq": message.seq})
        named = [(str(it["agent_id"]), str(it["reaction"])) for it in status["recipients"] if "reaction" in it]
        begun = []
        for agent_id, reaction in named:  # a prompt may hold it without being made for it
            started = next(iter(await self.records(reaction)), None)
            if started is None or started["body"].get("trigger") == message.seq:
                begun.append((agent_id, reaction))
        return begun

    async def records(self, reaction: str) -> list[Mapping[str, Any]]:
        return await fetch_records(self._client.call, reaction)

    async def messages(self, seqs: Iterable[int]) -> dict[int, BaseMessage]:
        found: dict[int, BaseMessage] = {}
        for seq in seqs:
            try:
                found[seq] = message_from_wire((await self._client.call("network.why", {"seq": seq}))["chain"][0])
            except UnknownMessage:
                continue
        return found

    async def all_messages(self, after: int, thread_id: str | None = None) -> AsyncIterator[BaseMessage]:
        if thread_id is not None:
            for message in await self._read_thread(thread_id, after):
                yield message
            return
        try:
            async for message in self._read_log(after):
                yield message
        except (Forbidden, UnknownOperation):  # no operator, who reads what its threads hold
            listed = (await self._client.call("network.list_threads", {"limit": MAX_PAGE}))["threads"]
            threads = [await self._read_thread(str(it["thread_id"]), after) for it in listed]
            for message in sorted((it for thread in threads for it in thread), key=lambda it: it.seq):
                yield message

    async def rows(self) -> tuple[LogHead, AsyncIterator[Row]]:
        """The log itself, for operators."""
        first = await self._client.call("network.rows", {"limit": 1})
        first_seq = decode_row(first["rows"][0]).seq if first["rows"] else 1

        async def read() -> AsyncIterator[Row]:
            after = 0
            while True:
                page = await self._client.call("network.rows", {"after": after, "limit": LOG_PAGE})
                for line in page["rows"]:
                    yield decode_row(line)
                if not page["rows"]:
                    return
                after = page["next"]

        return LogHead(epoch=first["epoch"], name=first["name"], first_seq=first_seq), read()

    async def _read_log(self, after: int) -> AsyncIterator[BaseMessage]:
        while True:
            page = await self._client.call("network.log", {"after": after, "limit": LOG_PAGE})
            for message in page["messages"]:
                yield message_from_wire(message)
            if page["next"] == after:
                return
            after = page["next"]

    async def _read_thread(self, thread_id: str, after: int) -> list[BaseMessage]:
        found: list[BaseMessage] = []
        before: int | None = None
        while True:
            page = await self._client.history(thread_id, before=before, limit=MAX_PAGE)
            found[:0] = [message for message in page.messages if message.seq > after]
            if not page.has_more or not page.messages or page.messages[0].seq <= after:
                return found
            before = page.messages[0].seq


class FileSource:
    """A ledger's file."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    async def chain(self, seq: int) -> list[dict[str, Any]]:
        chain: list[dict[str, Any]] = []
        message: BaseMessage | None = self._find(seq)
        while message is not None:
            chain.append(self.recording.bodies[message.seq])
            reaction = self.recording.find_sender(message)
            if reaction is not None:
                chain.append(
                    {
                        "reaction": reaction.reaction,
                        "agent_id": reaction.agent_id,
                        "trigger": reaction.trigger,
                        "seq": reaction.rows[0].seq,
                    }
                )
            message = self.recording.message(message.cause) if message.cause is not None else None
        return chain

    async def following(self, seq: int) -> list[BaseMessage]:
        self._find(seq)
        follows = {seq}
        found: list[BaseMessage] = []
        for message in self.recording.messages():
            if message.cause in follows:
                follows.add(message.seq)
                found.append(message)
        return found

    async def reactions_to(self, message: BaseMessage) -> list[tuple[str, str]]:
        reactions = self.recording.reactions.values()
        return sorted((it.agent_id, it.reaction) for it in reactions if it.trigger == message.seq)

    async def records(self, reaction: str) -> list[Mapping[str, Any]]:
        found = self.recording.reactions.get(reaction)
        bodies = self.recording.bodies
        rows = found.rows if found is not None else ()
        return [
            {"seq": row.seq, "record_id": row.key[2:], "kind": row.label, "body": bodies[row.seq], "at": row.at}
            for row in rows
        ]

    async def messages(self, seqs: Iterable[int]) -> dict[int, BaseMessage]:
        found = {seq: self.recording.message(seq) for seq in seqs}
        return {seq: message for seq, message in found.items() if message is not None}

    async def all_messages(self, after: int, thread_id: str | None = None) -> AsyncIterator[BaseMessage]:
        for message in self.recording.messages():
            if message.seq > after and thread_id in (None, message.thread_id):
                yield message

    def _find(self, seq: int) -> BaseMessage:
        message = self.recording.message(seq)
        if message is None:
            raise UnknownMessage(f"There is no message {seq} in this ledger; roundelay export lists them.")
        return message
