"""The turn journal of a reaction: what it wrote into the ledger, and what it reads back to go on after a restart.

Stands between `driver` and the client's ``record`` frames. Every id is derived, so that a reaction resumed on any machine repeats itself
under the same ids and the hub recognises the repeats. Order is the contract: a reply before its tools run, a call's intent before it
starts, its result after. It decides nothing; what a record means for the next step is the driver's affair.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel

from roundelay.network.errors import IdConflict

from .models.model import ModelReply, Usage
from .reaction import AnsweredCall, Finish, PlannedCall, Status
from .retry import retry_later
from .text import replace_surrogates
from .tools import ToolResult


def reaction_id(agent_id: str, trigger: int, epoch: str) -> str:
    """Give the id of an agent's reaction to a message, the same on every machine."""
    return _digest("reaction", agent_id, trigger, epoch)


def derived_id(reaction: str, turn: int, call: int | str) -> str:
    """Give the id of what a call of a reaction sends: its ``message_id`` and ``call_id``."""
    return _digest("call", reaction, turn, call)


def _digest(*parts: str | int) -> str:
    return hashlib.sha256("\x1f".join(map(str, parts)).encode()).hexdigest()[:32]


class StoredRecord(Protocol):
    """What the hub answers to a record."""

    @property
    def duplicate(self) -> bool: ...


class RecordClient(Protocol):
    """The part of `NetworkClient` that the journal uses."""

    async def record(self, reaction: str, kind: str, body: Mapping[str, object], *, record_id: str) -> StoredRecord: ...

    async def call(self, op: str, args: Mapping[str, object] | None = None, *, call_id: str | None = None) -> Any: ...


class Started(BaseModel):
    """The body of ``started``: the prompt is a function of it and of the ledger up to ``as_of``."""

    trigger: int
    thread_id: str
    as_of: int
    manifest: list[int]
    """The seqs of the messages in the prompt, ascending."""
    config_hash: str


class FinishedBody(BaseModel):
    """The body of ``finished``, the last record of a reaction."""

    status: Status
    reason: str
    turns: int
    usage: Usage


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a reaction has recorded so far; turns count from 1, calls by their place in the turn."""

    started: Started | None = None
    replies: Mapping[int, ModelReply] = field(default_factory=dict)
    begun_calls: frozenset[tuple[int, int]] = frozenset()
    results: Mapping[tuple[int, int], ToolResult] = field(default_factory=dict)
    finished: FinishedBody | None = None


class Journal:
    """Writes and reads the records of one reaction. ``max_body_bytes`` is the hub's limit for one record."""

    def __init__(
        self, client: RecordClient, reaction: str, *, max_body_bytes: int = 262_144, attempts: int = 4
    ) -> None:
        self.reaction = reaction
        self.max_body_bytes = max_body_bytes
        self.is_started = False
        self._client = client
        self._attempts = attempts

    async def record_started(self, started: Started) -> bool:
        """Begin the reaction; its trigger counts as handled from here on. False when it was begun earlier, by whomever."""
        try:
            fresh = not await self._record("started", 0, 0, started.model_dump())
        except IdConflict:  # begun under another configuration
            fresh = False
        self.is_started = True
        return fresh

    async def record_reply(self, turn: int, reply: ModelReply) -> None:
        await self._record("model_reply", turn, 0, {"turn": turn, "reply": reply.to_json()})

    async def record_tool_started(self, turn: int, planned: PlannedCall) -> None:
        body = {"turn": turn, "call": planned.index, "tool": planned.tool.name, "args": planned.call.arguments}
        await self._record("tool_started", turn, planned.index, body)

    async def record_tool_result(self, turn: int, call: PlannedCall | AnsweredCall, result: ToolResult) -> None:
        body = {
            "turn": turn, "call": call.index, "tool": call.call.name[:64], "content": result.content, "ok": result.ok,
        }  # fmt: skip
        await self._record("tool_result", turn, call.index, body)

    async def record_finished(self, finish: Finish) -> None:
        """End the reaction; it will not be resumed."""
        body = FinishedBody(
            status=finish.status,
            reason=replace_surrogates(finish.reason[:MAX_REASON_CHARS]),
            turns=finish.turns,
            usage=finish.usage,
        )
        await self._record("finished", 0, 0, body.model_dump())

    async def load(self) -> Recorded:
        """Read back what was recorded."""
        value = await retry_later(
            lambda: self._client.call("network.records", {"reaction": self.reaction}), attempts=self._attempts
        )
        return read_records(value["records"])

    def is_too_large(self, reply: ModelReply) -> bool:
        """Tell whether a reply would not fit into a record."""
        return len(json.dumps(reply.to_json())) > self.max_body_bytes - _ENVELOPE_BYTES

    async def _record(self, kind: str, turn: int, call: int, body: Mapping[str, object]) -> bool:
        """Write one record; True when it was there already."""
        record_id = _digest(kind, self.reaction, turn, call)
        stored = await retry_later(
            lambda: self._client.record(self.reaction, kind, body, record_id=record_id), attempts=self._attempts
        )
        return stored.duplicate


MAX_REASON_CHARS = 2000
_ENVELOPE_BYTES = 1024  # of a record's frame, around the reply


class _Reply(BaseModel):
    turn: int
    reply: dict[str, object]


class _ToolStarted(BaseModel):
    turn: int
    call: int


class _ToolResult(BaseModel):
    turn: int
    call: int
    content: str
    ok: bool


def read_records(records: Sequence[Mapping[str, object]]) -> Recorded:
    """Build what a reaction has done from its records, as ``network.records`` gives them. Kinds of a newer version are passed over."""
    started: Started | None = None
    replies: dict[int, ModelReply] = {}
    begun: set[tuple[int, int]] = set()
    results: dict[tuple[int, int], ToolResult] = {}
    finished: FinishedBody | None = None
    for record in records:
        body = record["body"]
        match record["kind"]:
            case "started":
                started = Started.model_validate(body)
            case "model_reply":
                reply = _Reply.model_validate(body)
                replies[reply.turn] = ModelReply.from_json(reply.reply)
            case "tool_started":
                begin = _ToolStarted.model_validate(body)
                begun.add((begin.turn, begin.call))
            case "tool_result":
                result = _ToolResult.model_validate(body)
                results[result.turn, result.call] = ToolResult(result.content, ok=result.ok)
            case "finished":
                finished = FinishedBody.model_validate(body)
            case _:
                continue
    return Recorded(started, replies, frozenset(begun), results, finished)
