"""The turn journal of a reaction: what it wrote into the ledger, and what it reads back to go on after a restart.

Stands between `driver` and the client's ``record`` frames. Every id is derived, so that a reaction resumed on any
machine repeats itself under the same ids and the hub recognises the repeats. Order is the contract: a reply before its
tools run, a call's intent before it starts, its result after. A busy hub is waited for without bound: a reaction that
has begun never fails of it. An agent that runs as a tool of another one keeps its records in the same reaction, under
its ``path``.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from pydantic import JsonValue, TypeAdapter

from roundelay.network.errors import IdConflict

from .ids import derived_id, digest
from .models.model import ModelReply, Usage
from .paths import path_of_call
from .records import Approval, FinishedBody, Recorded, ReviewBody, Started, fetch_records, read_records
from .replies import Wait
from .retry import retry_later
from .steps import AnsweredCall, Finish, ModelFailed, NewMessages, PlannedCall, Reviewed
from .text import replace_surrogates
from .tools import ToolResult

_logger = logging.getLogger(__name__)


def drop_largest(data: dict[str, JsonValue], max_chars: int) -> list[str]:
    """Take out of ``data`` what makes it longer than that as JSON, the largest first; gives the names."""
    sizes = {name: len(json.dumps({name: value})) for name, value in data.items()}
    left = sum(sizes.values())
    dropped: list[str] = []
    for name in sorted(sizes, key=lambda name: sizes[name], reverse=True):
        if left <= max_chars:
            break
        left -= sizes[name]
        del data[name]
        dropped.append(name)
    return dropped


class StoredRecord(Protocol):
    """What the hub answers to a record."""

    @property
    def duplicate(self) -> bool: ...


class RecordClient(Protocol):
    """The part of `NetworkClient` that the journal uses."""

    @property
    def agent_id(self) -> str: ...

    async def record(self, reaction: str, kind: str, body: Mapping[str, object], *, record_id: str) -> StoredRecord: ...

    async def call(self, op: str, args: Mapping[str, object] | None = None, *, call_id: str | None = None) -> Any: ...


Store = Callable[[str, Mapping[str, object]], Mapping[str, object]]


class Journal:
    """Writes and reads the records of one run in a reaction. ``max_body_bytes`` is the hub's limit for one record."""

    store: Store | None = None
    """Gives a record's body as it is kept; None keeps all of it."""

    def __init__(self, client: RecordClient, reaction: str, *, max_body_bytes: int = 262_144, path: str = "") -> None:
        self.reaction = reaction
        self.path = path
        self.max_body_bytes = max_body_bytes
        self.is_started = False
        self._client = client
        self._closed = asyncio.Event()

    def descend(self, turn: int, call: int, run: int) -> Journal:
        """Give the journal of a run inside a call of this one, the first (0) or a further one."""
        path = path_of_call(self.path, turn, call, run)
        inner = Journal(self._client, self.reaction, max_body_bytes=self.max_body_bytes, path=path)
        inner.store, inner._closed = self.store, self._closed
        return inner

    def close(self) -> None:
        """Write nothing more, in the runs inside neither: who goes on with the reaction does. To try ends the task that
        does it, as cancelling does."""
        self._closed.set()

    def reopen(self) -> None:
        """Let records through again: whatever was left of a run that was broken off has ended."""
        self._closed.clear()

    @property
    def depth(self) -> int:
        """How many runs this one is inside of."""
        return self.path.count("/") + 1 if self.path else 0

    def derive_id(self, turn: int, call: int | str) -> str:
        return derived_id(self.reaction, self.path, turn, call)

    async def record_started(self, started: Started) -> bool:
        """Begin the reaction; its trigger counts as handled from here on. False when it was begun earlier, by
        whomever."""
        try:
            fresh = not await self._record("started", 0, 0, started.model_dump())
        except IdConflict:  # begun under another configuration
            fresh = False
        self.is_started = True
        return fresh

    async def record_reply(
        self,
        turn: int,
        reply: ModelReply,
        *,
        agent_id: str,
        is_last: bool,
        request: Mapping[str, object] | None = None,
    ) -> None:
        """Keep a reply, with the print of the request that it answers (`request_print`), by which a replay notices
        another one."""
        body = {"turn": turn, "agent": agent_id, "is_last": is_last, "reply": reply.to_json()}
        if request is not None:
            body["request"] = dict(request)
        await self._record("model_reply", turn, 0, body)

    async def record_new_messages(self, turn: int, new: NewMessages) -> None:
        body = {"turn": turn, "seqs": list(new.seqs), "text": new.text, "answers": new.answers}
        await self._record("new_messages", turn, 0, body)

    async def record_model_failed(self, turn: int, failed: ModelFailed) -> None:
        reason = replace_surrogates(failed.reason[:MAX_REASON_CHARS])
        await self._record("model_failed", turn, 0, {"turn": turn, "failure": failed.kind, "reason": reason})

    async def record_tool_started(self, turn: int, planned: PlannedCall) -> None:
        body: dict[str, object] = {
            "turn": turn, "call": planned.index, "tool": planned.tool.name, "args": planned.call.arguments,
        }  # fmt: skip
        if planned.tool.effect == "once":
            body["once"] = True
        await self._record("tool_started", turn, planned.index, body)

    async def record_tool_result(
        self, turn: int, call: PlannedCall | AnsweredCall, result: ToolResult, replies: Sequence[int] = ()
    ) -> None:
        """``replies``: the seqs of those that the call waited for and had."""
        body: dict[str, object] = {
            "turn": turn, "call": call.index, "tool": call.call.name[:64], "content": result.content, "ok": result.ok,
        }  # fmt: skip
        if result.threads:
            body["threads"] = list(result.threads)
        if result.is_answer:
            body["is_answer"] = True
        if result.data:
            body["data"] = dict(result.data)
        if replies:
            body["replies"] = list(replies)
        if result.tool_calls or result.usage != Usage():
            body |= {"usage": _USAGE.dump_python(result.usage), "tool_calls": result.tool_calls}
        await self._record("tool_result", turn, call.index, body)

    async def record_note(self, turn: int, name: str, value: JsonValue, of: Collection[str] = ()) -> None:
        """Keep what middleware made in a turn, ``of`` the results of these tools. An earlier one of this name holds."""
        made_of = {"of": sorted(of)} if of else {}
        with suppress(IdConflict):
            await self._record("note", turn, name, {"turn": turn, "name": name, "value": value, **made_of})

    async def record_waiting(self, turn: int, call: int, wait: Wait) -> None:
        # A call that was approved may wait for others itself.
        key = f"{call}-approval" if wait.is_approval else call
        await self._record("waiting", turn, key, {"turn": turn, "call": call, **wait.model_dump()})

    async def record_asking(self, turn: int, call: int, messages: Mapping[str, str]) -> None:
        await self._record("asking", turn, call, {"turn": turn, "call": call, "messages": dict(messages)})

    async def record_approval(self, turn: int, call: int, approval: Approval) -> None:
        await self._record("approval", turn, call, {"turn": turn, "call": call, **approval.model_dump()})

    async def record_review(self, turn: int, reviewed: Reviewed) -> None:
        body = ReviewBody(
            turn=turn, answer=reviewed.answer, correction=reviewed.correction, usage=reviewed.usage, notes=reviewed.notes,
            is_accepted=reviewed.is_accepted, metadata=dict(reviewed.metadata),
        )  # fmt: skip
        await self._record("review", turn, 0, body.model_dump(mode="json"))

    async def record_finished(self, finish: Finish) -> None:
        """End the reaction; it will not be resumed."""
        body = FinishedBody(
            status=finish.status,
            reason=replace_surrogates(finish.reason[:MAX_REASON_CHARS]),
            turns=finish.turns,
            usage=finish.usage,
            tool_calls=finish.tool_calls,
            read_meanwhile=list(finish.read_meanwhile),
        )
        await self._record("finished", 0, 0, body.model_dump())

    async def load(self) -> Recorded:
        """Read back what was recorded."""

        def call(op: str, args: Mapping[str, object]) -> Awaitable[Any]:
            return retry_later(lambda: self._client.call(op, args))

        records = await fetch_records(call, self.reaction, None)  # a hub of before may not know of agents there
        own = self._client.agent_id
        return read_records([it for it in records if it.get("agent_id", own) == own])

    def is_too_large(self, reply: ModelReply, request: Mapping[str, object] | None = None) -> bool:
        """Tell whether a reply, with the print of its request, would not fit into a record."""
        size = len(json.dumps(reply.to_json())) + (len(json.dumps(request)) if request is not None else 0)
        return size > self.max_body_bytes - _ENVELOPE_BYTES

    async def _record(self, kind: str, turn: int, call: int | str, body: Mapping[str, object]) -> bool:
        """Write one record; True when it was there already."""
        if self._closed.is_set():
            raise asyncio.CancelledError
        record_id = digest(kind, self.reaction, self.path, turn, call)
        if self.store is not None:
            try:
                body = {**self.store(kind, body)}
            except Exception:  # of the hook's code: a reaction that it keeps from ending would never leave its thread
                if kind != "finished":
                    raise
                _logger.exception(
                    "the end of a reaction is recorded without its reason", extra={"reaction": self.reaction}
                )
                body = {**body, "reason": "not kept: what decides on it failed"}  # a reaction must be able to end
        placed = {**body, "path": self.path} if self.path else body
        stored = await retry_later(lambda: self._client.record(self.reaction, kind, placed, record_id=record_id))
        return stored.duplicate


MAX_REASON_CHARS = 2000
_USAGE = TypeAdapter(Usage)
_ENVELOPE_BYTES = 1024  # of a record's frame, around the reply
