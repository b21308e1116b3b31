"""The turn journal of a reaction: what it wrote into the ledger, and what it reads back to go on after a restart.

Stands between `driver` and the client's ``record`` frames. Every id is derived, so that a reaction resumed on any machine repeats itself
under the same ids and the hub recognises the repeats. Order is the contract: a reply before its tools run, a call's intent before it
starts, its result after. A busy hub is waited for without bound: a reaction that has begun never fails of it. An agent that runs as a
tool of another one keeps its records in the same reaction, under its ``path``.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel, JsonValue, TypeAdapter

from roundelay.network.errors import IdConflict

from .models.model import ModelFailure, ModelReply, Usage
from .replies import Wait
from .retry import retry_later
from .steps import Altered, AnsweredCall, Finish, ModelFailed, NewMessages, PlannedCall, Replayed, Reviewed, Status
from .text import replace_surrogates
from .tools import ToolResult

_logger = logging.getLogger(__name__)


def reaction_id(agent_id: str, trigger: int, epoch: str) -> str:
    """Give the id of an agent's reaction to a message, the same on every machine."""
    return _digest("reaction", agent_id, trigger, epoch)


def derived_id(reaction: str, path: str, turn: int, call: int | str) -> str:
    """Give the id of what a call of a reaction sends: its ``message_id`` and ``call_id``."""
    return _digest("call", reaction, path, turn, call)


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


Store = Callable[[str, Mapping[str, object]], Mapping[str, object]]


class Started(BaseModel):
    """The body of ``started``: the prompt is a function of it and of the ledger up to ``as_of``."""

    trigger: int
    thread_id: str
    as_of: int
    manifest: list[int]
    """The seqs of the messages in the prompt, ascending."""
    config_hash: str
    prompt_hash: str = ""


class Approval(BaseModel):
    """What a person decided on a call, who and when: the body of ``approval``, beside ``turn`` and ``call``."""

    is_approved: bool
    by: str
    seq: int
    at: int
    arguments: str | None = None
    """What the call is made with instead, if that was changed."""
    reason: str = ""


class FinishedBody(BaseModel):
    """The body of ``finished``, the last record of a reaction."""

    status: Status
    reason: str
    turns: int
    usage: Usage
    tool_calls: int = 0
    read_meanwhile: list[int] = []
    """Messages that arrived while it ran, and were read in it."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a run has recorded so far; turns count from 1, calls by their place in the turn. ``children`` are runs inside of it, by path."""

    started: Started | None = None
    replies: Mapping[int, ModelReply] = field(default_factory=dict)
    last_turns: frozenset[int] = frozenset()
    failures: Mapping[int, ModelFailed] = field(default_factory=dict)
    begun_calls: frozenset[tuple[int, int]] = frozenset()
    results: Mapping[tuple[int, int], ToolResult] = field(default_factory=dict)
    askings: Mapping[tuple[int, int], Mapping[str, str]] = field(default_factory=dict)
    waits: Mapping[tuple[int, int], Wait] = field(default_factory=dict)
    approvals: Mapping[tuple[int, int], Approval] = field(default_factory=dict)
    new_messages: Mapping[int, NewMessages] = field(default_factory=dict)
    finished: FinishedBody | None = None
    children: Mapping[str, Recorded] = field(default_factory=dict)
    reviews: Mapping[int, Reviewed] = field(default_factory=dict)
    notes: Mapping[int, Mapping[str, JsonValue]] = field(default_factory=dict)
    """What middleware kept in a turn, by name."""

    altered: Mapping[int, Altered] = field(default_factory=dict)

    def read_meanwhile(self) -> list[int]:
        """Give the messages that were read while it ran."""
        return [seq for new in self.new_messages.values() for seq in new.seqs]

    def open_askings(self) -> list[Mapping[str, str]]:
        """Give the questions that may have been sent before a wait for them was recorded: message ids, by whom they are to."""
        runs = (self, *self.children.values())
        return [it for run in runs for place, it in run.askings.items() if place not in {*run.waits, *run.results}]

    def open_waits(self) -> list[Wait]:
        """Give what this run, or one inside of it, still waits for."""
        runs = (self, *self.children.values())
        return [wait for run in runs for place, wait in run.waits.items() if place not in run.results]

    def replay(self, turn: int) -> Replayed | ModelFailed | None:
        """Give what is known of a turn, None if nothing is."""
        if turn not in self.replies:
            return self.failures.get(turn)
        return Replayed(
            self.replies[turn],
            {call: result for (other, call), result in self.results.items() if other == turn},
            frozenset(call for other, call in self.begun_calls if other == turn),
            is_last=turn in self.last_turns,
            goes_on=turn + 1 in self.replies or turn + 1 in self.failures,
            is_corrected=turn in self.reviews and self.reviews[turn].correction is not None,
            altered=self.altered.get(turn, Altered()),
        )


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

    def descend(self, turn: int, call: int, run: int) -> Journal:
        """Give the journal of a run inside a call of this one, the first (0) or a further one."""
        path = f"{self.path}/{turn}.{call}{f'.{run}' if run else ''}".lstrip("/")
        inner = Journal(self._client, self.reaction, max_body_bytes=self.max_body_bytes, path=path)
        inner.store = self.store
        return inner

    @property
    def depth(self) -> int:
        """How many runs this one is inside of."""
        return self.path.count("/") + 1 if self.path else 0

    def derive_id(self, turn: int, call: int | str) -> str:
        return derived_id(self.reaction, self.path, turn, call)

    async def record_started(self, started: Started) -> bool:
        """Begin the reaction; its trigger counts as handled from here on. False when it was begun earlier, by whomever."""
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
        """Keep a reply, with the print of the request that it answers (`request_print`), by which a replay notices another one."""
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
        body = {"turn": turn, "call": planned.index, "tool": planned.tool.name, "args": planned.call.arguments}
        await self._record("tool_started", turn, planned.index, body)

    async def record_tool_result(self, turn: int, call: PlannedCall | AnsweredCall, result: ToolResult) -> None:
        body: dict[str, object] = {
            "turn": turn, "call": call.index, "tool": call.call.name[:64], "content": result.content, "ok": result.ok,
        }  # fmt: skip
        if result.threads:
            body["threads"] = list(result.threads)
        if result.is_answer:
            body["is_answer"] = True
        if result.data:
            body["data"] = dict(result.data)
        if result.tool_calls or result.usage != Usage():
            body |= {"usage": _USAGE.dump_python(result.usage), "tool_calls": result.tool_calls}
        await self._record("tool_result", turn, call.index, body)

    async def record_note(self, turn: int, name: str, value: JsonValue, of: Collection[str] = ()) -> None:
        """Keep what middleware made in a turn, ``of`` the results of these tools. An earlier one of this name holds."""
        made_of = {"of": sorted(of)} if of else {}
        with suppress(IdConflict):
            await self._record("note", turn, name, {"turn": turn, "name": name, "value": value, **made_of})

    async def record_waiting(self, turn: int, call: int, wait: Wait) -> None:
        await self._record("waiting", turn, call, {"turn": turn, "call": call, **wait.model_dump()})

    async def record_asking(self, turn: int, call: int, messages: Mapping[str, str]) -> None:
        await self._record("asking", turn, call, {"turn": turn, "call": call, "messages": dict(messages)})

    async def record_approval(self, turn: int, call: int, approval: Approval) -> None:
        await self._record("approval", turn, call, {"turn": turn, "call": call, **approval.model_dump()})

    async def record_review(self, turn: int, reviewed: Reviewed) -> None:
        body = _Review(
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

        return read_records(await fetch_records(call, self.reaction))

    def is_too_large(self, reply: ModelReply, request: Mapping[str, object] | None = None) -> bool:
        """Tell whether a reply, with the print of its request, would not fit into a record."""
        size = len(json.dumps(reply.to_json())) + (len(json.dumps(request)) if request is not None else 0)
        return size > self.max_body_bytes - _ENVELOPE_BYTES

    async def _record(self, kind: str, turn: int, call: int | str, body: Mapping[str, object]) -> bool:
        """Write one record; True when it was there already."""
        record_id = _digest(kind, self.reaction, self.path, turn, call)
        if self.store is not None:
            try:
                body = self.store(kind, body)
            except Exception:
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


class _Reply(BaseModel):
    turn: int
    reply: dict[str, object]
    is_last: bool = False
    altered: Altered = Altered()


class _NewMessages(BaseModel):
    turn: int
    seqs: tuple[int, ...]
    text: str
    answers: bool


class _Asking(BaseModel):
    turn: int
    call: int
    messages: dict[str, str]


class _ModelFailed(BaseModel):
    turn: int
    failure: ModelFailure
    reason: str


class _ToolStarted(BaseModel):
    turn: int
    call: int


class _ToolResult(BaseModel):
    turn: int
    call: int
    content: str
    ok: bool
    threads: tuple[str, ...] = ()
    usage: Usage = Usage()
    tool_calls: int = 0
    is_answer: bool = False
    data: dict[str, JsonValue] = {}


class _Note(BaseModel):
    turn: int
    name: str
    value: JsonValue


class _Review(BaseModel):
    turn: int
    answer: str
    correction: str | None = None
    usage: Usage = Usage()
    notes: tuple[str, ...] = ()
    is_accepted: bool = False
    metadata: dict[str, JsonValue] = {}


async def fetch_records(
    call: Callable[[str, Mapping[str, object]], Awaitable[Any]], reaction: str
) -> list[Mapping[str, Any]]:
    """All records of a reaction that the caller may see, oldest first, page by page."""
    records: list[Mapping[str, Any]] = []
    while True:
        after = records[-1]["seq"] if records else 0
        page = await call("network.records", {"reaction": reaction, "after": after})
        records += page["records"]
        if not page.get("has_more"):
            return records


def read_records(records: Sequence[Mapping[str, Any]]) -> Recorded:
    """Build what a reaction has done from its records, as ``network.records`` gives them. Kinds of a newer version are passed over."""
    by_path: dict[str, list[Mapping[str, Any]]] = {"": []}
    for record in records:
        path = record["body"].get("path", "") if isinstance(record["body"], Mapping) else ""
        by_path.setdefault(path, []).append(record)
    children: dict[str, Recorded] = {}  # of all depths: each finds its own by the whole path
    for path, own in by_path.items():
        if path:
            children[path] = _read_run(own, children)
    return _read_run(by_path[""], children)


def _read_run(records: Sequence[Mapping[str, Any]], children: Mapping[str, Recorded]) -> Recorded:
    started: Started | None = None
    replies: dict[int, ModelReply] = {}
    last_turns: set[int] = set()
    failures: dict[int, ModelFailed] = {}
    begun: set[tuple[int, int]] = set()
    results: dict[tuple[int, int], ToolResult] = {}
    askings: dict[tuple[int, int], Mapping[str, str]] = {}
    waits: dict[tuple[int, int], Wait] = {}
    approvals: dict[tuple[int, int], Approval] = {}
    new_messages: dict[int, NewMessages] = {}
    finished: FinishedBody | None = None
    reviews: dict[int, Reviewed] = {}
    altered: dict[int, Altered] = {}
    notes: dict[int, dict[str, JsonValue]] = {}
    for record in records:
        body = record["body"]
        match record["kind"]:
            case "started":
                started = Started.model_validate(body)
            case "model_reply":
                reply = _Reply.model_validate(body)
                replies[reply.turn] = ModelReply.from_json(reply.reply)
                altered[reply.turn] = reply.altered
                if reply.is_last:
                    last_turns.add(reply.turn)
            case "model_failed":
                failed = _ModelFailed.model_validate(body)
                failures[failed.turn] = ModelFailed(failed.reason, failed.failure, is_recorded=True)
            case "tool_started":
                begin = _ToolStarted.model_validate(body)
                begun.add((begin.turn, begin.call))
            case "tool_result":
                it = _ToolResult.model_validate(body)
                results[it.turn, it.call] = ToolResult(
                    it.content, it.ok, it.threads, it.usage, it.tool_calls, it.is_answer, it.data
                )
            case "new_messages":
                new = _NewMessages.model_validate(body)
                new_messages[new.turn] = NewMessages(new.text, new.seqs, new.answers)
            case "asking":
                asking = _Asking.model_validate(body)
                askings[asking.turn, asking.call] = asking.messages
            case "approval":
                place = _ToolStarted.model_validate(body)
                approvals[place.turn, place.call] = Approval.model_validate(body)
            case "note":
                note = _Note.model_validate(body)
                notes.setdefault(note.turn, {})[note.name] = note.value
            case "review":
                review = _Review.model_validate(body)
                reviews[review.turn] = Reviewed(
                    review.answer, review.correction, review.usage, review.notes, review.is_accepted, review.metadata
                )
            case "waiting":
                place = _ToolStarted.model_validate(body)
                waits[place.turn, place.call] = Wait.model_validate(body)
            case "finished":
                finished = FinishedBody.model_validate(body)
            case _:
                continue
    return Recorded(
        started, replies, frozenset(last_turns), failures, frozenset(begun), results, askings, waits, approvals, new_messages,
        finished, children, reviews, notes, altered,
    )  # fmt: skip
