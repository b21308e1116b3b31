"""Where the commands that explain a run read it from: a live node, under the caller's rights, or a ledger's file, which holds all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from roundelay.agents.records import fetch_fates, fetch_records
from roundelay.lists import list_threads
from roundelay.network.client import NetworkClient
from roundelay.network.errors import Forbidden, UnknownMessage, UnknownOperation
from roundelay.network.explain import find_open
from roundelay.network.ledger import Row
from roundelay.network.ledger_file import Log
from roundelay.network.log_lines import LogHead, decode_row
from roundelay.network.messages import BaseMessage, message_from_wire
from roundelay.network.tables import Begun
from roundelay.reading.follow import MAX_PAGE, read_thread
from roundelay.reading.recording import read_body, read_message, read_trigger


class Source(Protocol):
    """A run that can be looked into."""

    async def chain(self, seq: int) -> list[dict[str, Any]]:
        """A message and what it follows from, as ``network.why`` gives it. Raises `UnknownMessage`."""
        ...

    async def following(self, seq: int) -> list[BaseMessage]:
        """What followed from a message, ascending. Raises `UnknownMessage`."""
        ...

    async def reactions_to(self, message: BaseMessage) -> list[tuple[str, str]]:
        """The first reaction of each agent that a message began: agents and ids, by agent."""
        ...

    async def records(self, agent_id: str, reaction: str) -> list[Mapping[str, Any]]:
        """What a reaction of an agent recorded, as far as it may be seen."""
        ...

    async def messages(self, seqs: Iterable[int]) -> dict[int, BaseMessage]:
        """Messages by their seqs, those that may be seen."""
        ...

    def all_messages(self, after: int, thread_id: str | None = None) -> AsyncIterator[BaseMessage]:
        """Every message above a seq, ascending, or those of one thread."""
        ...

    async def rows(self) -> tuple[LogHead, AsyncIterator[Row]]:
        """The log itself. Raises `Forbidden` for who is no operator."""
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
        fates = await fetch_fates(self._client.call, message.seq)
        named = [(str(it["agent_id"]), str(it["reaction"])) for it in fates if "reaction" in it]
        begun = []
        for agent_id, reaction in named:  # a prompt may hold it without being made for it
            records = await self.records(agent_id, reaction)
            if not records or message.seq in {read_trigger(it["kind"], it["body"]) for it in records}:
                begun.append((agent_id, reaction))
        return begun

    async def records(self, agent_id: str, reaction: str) -> list[Mapping[str, Any]]:
        return await fetch_records(self._client.call, reaction, agent_id)

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
            for said in await read_thread(self._client, thread_id, after):
                yield said
            return
        try:
            async for message in self._read_log(after):
                yield message
        except (Forbidden, UnknownOperation):  # no operator, who reads what its threads hold
            listed = await list_threads(self._client)
            threads = [await read_thread(self._client, str(it["thread_id"]), after) for it in listed]
            for message in sorted((it for thread in threads for it in thread), key=lambda it: it.seq):
                yield message

    async def rows(self) -> tuple[LogHead, AsyncIterator[Row]]:
        first = await self._client.call("network.rows", {"limit": 1})
        first_seq = decode_row(first["rows"][0]).seq if first["rows"] else 1

        async def read() -> AsyncIterator[Row]:
            after = 0
            while True:
                page = await self._client.call("network.rows", {"after": after, "limit": MAX_PAGE})
                for line in page["rows"]:
                    yield decode_row(line)
                if page["next"] == after:
                    return
                after = page["next"]

        return LogHead(epoch=first["epoch"], name=first["name"], first_seq=first_seq), read()

    async def _read_log(self, after: int) -> AsyncIterator[BaseMessage]:
        while True:
            page = await self._client.call("network.log", {"after": after, "limit": MAX_PAGE})
            for message in page["messages"]:
                yield message_from_wire(message)
            if page["next"] == after:
                return
            after = page["next"]


@dataclass(slots=True)
class _Reaction:
    seqs: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)


class FileSource:
    """The log of a ledger's file. Held are which records are of which reaction; all else is read when it is asked for."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._known: dict[tuple[str, str], _Reaction] | None = None  # by agent and id
        self._begun: dict[int, dict[str, list[Begun]]] = {}  # by trigger and agent, ascending

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
        reactions = self._read_reactions()
        begun = self._begun.get(trigger, {}).get(agent_id, [])
        finished = [(it.reaction, at) for it in begun for at in reactions[agent_id, it.reaction].finished]
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

    async def reactions_to(self, message: BaseMessage) -> list[tuple[str, str]]:
        self._read_reactions()
        return sorted((agent_id, begun[0].reaction) for agent_id, begun in self._begun.get(message.seq, {}).items())

    async def records(self, agent_id: str, reaction: str) -> list[Mapping[str, Any]]:
        found = self._read_reactions().get((agent_id, reaction))
        rows = [row for seq in (found.seqs if found is not None else ()) if (row := self._log.row(seq)) is not None]
        return [
            {
                "seq": row.seq, "agent_id": agent_id, "record_id": row.key[2:], "kind": row.label, "body": read_body(row),
                "at": row.at,
            }
            for row in rows
        ]  # fmt: skip

    async def messages(self, seqs: Iterable[int]) -> dict[int, BaseMessage]:
        found = {seq: self._message(seq) for seq in seqs}
        return {seq: message for seq, message in found.items() if message is not None}

    async def all_messages(self, after: int, thread_id: str | None = None) -> AsyncIterator[BaseMessage]:
        for row in self._log.rows():
            if row.type == "message" and row.seq > after:
                message = read_message(row)
                if thread_id in (None, message.thread_id):
                    yield message

    def _read_reactions(self) -> dict[tuple[str, str], _Reaction]:
        if self._known is None:
            self._known = {}
            for row in self._log.rows():
                if row.type != "record":
                    continue
                it = self._known.setdefault((row.actor, row.stream), _Reaction())
                it.seqs.append(row.seq)
                if row.label == "started" and (trigger := read_trigger(row.label, read_body(row))) is not None:
                    by_agent = self._begun.setdefault(trigger, {})
                    by_agent.setdefault(row.actor, []).append(Begun(row.stream, row.seq))
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
