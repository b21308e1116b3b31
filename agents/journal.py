"""The turn journal of a reaction: what it writes into the ledger, and what it reads back to go on after a restart.

`Journal` stands between `driver` and the client's ``record`` frames; `Recorded` is what a run has done by its records,
for the loop that goes on from them and for whoever explains or replays it. Each kind of record has one class, written
and read back. Every id is derived, so that a reaction resumed on any machine repeats itself under the same ids
and the hub recognises the repeats. An agent that runs as a tool of another one keeps its records in the same reaction,
under its ``path``. A busy hub is waited for without bound: a reaction that has begun never fails of it.

The order of the records is the contract, since a process may be killed between any two of them::

    started                           the trigger counts as handled; the prompt follows from manifest and as_of
      [new_messages]                  turn n: what arrived meanwhile, before the model reads it
      [thinking]                      before the reply, where that is kept
      model_reply | model_failed      before anything of it is run; never asked for again
        [asking, waiting, approval]   call c, if a person has to approve it
        tool_started                  before the tool runs: killed behind it, a `once` call has an unknown outcome
          [asking]                    before questions are sent: killed behind it, they are looked up, not sent twice
          [waiting]                   for whom, until when: a restarted agent goes on waiting
          [review]                    what reviewers made of a message to who asked, before it is sent
          [used, progress]            what models used in it of which no other record tells
        tool_result                   after it: the result is taken from here
      [note, review]                  what middleware kept; what reviewers made of the answer
      ...                             turn n + 1
    [stopped]                         a person's stop, wherever it comes: what was written and used by then
    (the answer's message)            under an id of its own: a repeat stores nothing
    finished                          nothing is resumed any more

Resuming feeds the loop with these instead of models and tools, up to the first one that is missing, and does from there
on what was not done.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, JsonValue, TypeAdapter

from roundelay.network.client import NetworkClient
from roundelay.network.client.paging import Call, read_pages
from roundelay.network.errors import IdConflict, RequestError, RetryLater
from roundelay.network.text import cut

from .isolation import redact_error, retry_later, wait_retry_delay
from .models.model import (
    AssistantMessage,
    ModelReply,
    ModelRequest,
    ModelUse,
    SystemMessage,
    ToolMessage,
    Usage,
)
from .text import replace_surrogates
from .values import (
    TOO_LARGE,
    Altered,
    Finish,
    KeptMessage,
    KeptPrompt,
    ModelFailed,
    NewMessages,
    Replayed,
    Reviewed,
    Scope,
    StopTrace,
    ToolResult,
    Vote,
    Wait,
)

_logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_REASON_CHARS = 2000
MAX_STEPS = 100
"""Of what one call reported of its progress."""
_ENVELOPE_BYTES = 1024  # of a record's frame, around the reply


class Started(BaseModel):
    """The prompt is a function of this and of the ledger up to ``as_of``."""

    trigger: int
    thread_id: str
    as_of: int
    manifest: list[int]
    """The seqs of the messages in the prompt, ascending."""
    config_hash: str
    prompt_hash: str = ""


class Approval(BaseModel):
    """What a person decided on a call, who and when."""

    is_approved: bool
    by: str
    seq: int
    at: int
    arguments: str | None = None
    """What the call is made with instead, if that was changed."""
    reason: str = ""
    scope: Scope = "once"

    said: str = ""
    """The words of the decision."""

    votes: list[Vote] = []
    """What each person said, where more than one had to approve; the last one is ``by``."""

    @property
    def people(self) -> list[str]:
        """Who decided."""
        return [it.by for it in self.votes if self.is_approved] or [self.by]


@dataclass(frozen=True, slots=True)
class _Replied:
    turn: int
    reply: ModelReply
    is_last: bool = False
    altered: Altered = field(default_factory=Altered)


@dataclass(frozen=True, slots=True)
class _ToolStarted:
    once: bool = False


@dataclass(frozen=True, slots=True)
class _Asking:
    messages: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Note:
    name: str
    value: JsonValue


@dataclass(frozen=True, slots=True)
class _Used:
    used: tuple[ModelUse, ...]


@dataclass(frozen=True, slots=True)
class _Thinking:
    text: str


@dataclass(frozen=True, slots=True)
class _Progress:
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _RecordPlace:
    """Where a record stands: its turn, and its call's place in that. ``send``: that of a message among those of the
    call that are reviewed, from 1. ``replies`` are those that the call had."""

    turn: int = 0
    call: int = 0
    send: int = 0
    replies: tuple[int, ...] = ()


_READERS: Mapping[str, TypeAdapter[Any]] = {
    "started": TypeAdapter(Started),
    "new_messages": TypeAdapter(NewMessages),
    "model_reply": TypeAdapter(_Replied),
    "model_failed": TypeAdapter(ModelFailed),
    "asking": TypeAdapter(_Asking),
    "waiting": TypeAdapter(Wait),
    "approval": TypeAdapter(Approval),
    "tool_started": TypeAdapter(_ToolStarted),
    "tool_result": TypeAdapter(ToolResult),
    "note": TypeAdapter(_Note),
    "review": TypeAdapter(Reviewed),
    "used": TypeAdapter(_Used),
    "thinking": TypeAdapter(_Thinking),
    "prompt": TypeAdapter(KeptPrompt),
    "progress": TypeAdapter(_Progress),
    "stopped": TypeAdapter(StopTrace),
    "finished": TypeAdapter(Finish),
}
_PLACE = TypeAdapter(_RecordPlace)
_OF_CALLS = frozenset({"asking", "waiting", "approval", "tool_started", "tool_result", "used", "progress"})
_USAGE = TypeAdapter(Usage)
_USES = TypeAdapter(tuple[ModelUse, ...])
_FINISH_FIELDS = {"status", "reason", "turns", "usage", "tool_calls", "read_meanwhile", "used", "failure"}

_CallAt = tuple[int, int]  # a call: its turn, its place in that


@dataclass(slots=True)
class Recorded:
    """What a run has recorded so far; turns count from 1, calls by their place in the turn. ``children`` are runs
    inside of it, by path. To be read only."""

    started: Started | None = None
    replies: dict[int, ModelReply] = field(default_factory=dict)
    last_turns: set[int] = field(default_factory=set)
    failures: dict[int, ModelFailed] = field(default_factory=dict)
    prompts: dict[int, KeptPrompt] = field(default_factory=dict)
    """The exact prompts, where the agent's file has them kept."""

    begun_calls: set[_CallAt] = field(default_factory=set)
    once_calls: set[_CallAt] = field(default_factory=set)
    """Of those that were begun, the ones whose tool was ``once`` then."""

    results: dict[_CallAt, ToolResult] = field(default_factory=dict)
    used: dict[_CallAt, tuple[ModelUse, ...]] = field(default_factory=dict)
    """What models used in calls, beside agents inside of them."""

    thinking: dict[int, str] = field(default_factory=dict)
    progress: dict[_CallAt, tuple[str, ...]] = field(default_factory=dict)

    askings: dict[_CallAt, Mapping[str, str]] = field(default_factory=dict)
    waits: dict[_CallAt, Wait] = field(default_factory=dict)
    """Of the calls themselves."""

    approval_waits: dict[_CallAt, Wait] = field(default_factory=dict)
    """Before the calls were begun."""

    taken: set[int] = field(default_factory=set)
    """The replies that its calls waited for and had."""

    approvals: dict[_CallAt, Approval] = field(default_factory=dict)
    new_messages: dict[int, NewMessages] = field(default_factory=dict)
    reviews: dict[int, Reviewed] = field(default_factory=dict)
    """Of answers, by their turn."""

    sent_reviews: dict[tuple[int, int, int], Reviewed] = field(default_factory=dict)
    """Of messages: turn, call, and the message's place among those of the call, from 1."""

    notes: dict[int, dict[str, JsonValue]] = field(default_factory=dict)
    """What middleware kept in a turn, by name."""

    altered: dict[int, Altered] = field(default_factory=dict)
    stopped: StopTrace | None = None
    """A person has stopped it: it only has to say so."""

    finished: Finish | None = None
    children: Mapping[str, Recorded] = field(default_factory=dict)

    def read_meanwhile(self) -> list[int]:
        """Give the messages that were read while it ran."""
        return [seq for new in self.new_messages.values() for seq in new.seqs]

    def open_askings(self) -> list[Mapping[str, str]]:
        """Give the questions that may have been sent before a wait for them was recorded: message ids, by whom they are
        to."""
        runs = (self, *self.children.values())
        return [it for run in runs for place, it in run.askings.items() if place not in {*run.waits, *run.results}]

    def open_waits(self) -> list[Wait]:
        """Give what this run, or one inside of it, still waits for."""
        runs = (self, *self.children.values())
        waits = [it for run in runs for place, it in run.waits.items() if place not in run.results]
        undecided = (
            it
            for run in runs
            for place, it in run.approval_waits.items()
            if place not in {*run.approvals, *run.results}
        )
        return [*waits, *undecided]

    def has_taken(self, seq: int) -> bool:
        """Tell whether a message was the reply that a call waited for, here or in a run inside of it."""
        return any(seq in run.taken for run in (self, *self.children.values()))

    def was_waiting_for(self, question: int) -> bool:
        """Tell whether it ended while it waited for the reply to a message."""
        return any(question in it.questions.values() for it in self.open_waits())

    def replay(self, turn: int) -> Replayed | ModelFailed | None:
        """Give what is known of a turn, None if nothing is."""
        if turn not in self.replies:
            return self.failures.get(turn)
        return Replayed(
            self.replies[turn],
            {call: result for (other, call), result in self.results.items() if other == turn},
            frozenset(call for other, call in self.begun_calls if other == turn),
            frozenset(call for other, call in self.once_calls if other == turn),
            is_last=turn in self.last_turns,
            goes_on=turn + 1 in self.replies or turn + 1 in self.failures,
            is_corrected=turn in self.reviews and self.reviews[turn].correction is not None,
            altered=self.altered.get(turn, Altered()),
        )

    def take(self, kind: str, body: Mapping[str, Any]) -> None:
        """Take note of a record of this run. Kinds of a newer version are passed over. Raises `ValueError` for what is
        no such record."""
        reader = _READERS.get(kind)
        if reader is None:
            return
        value, place = reader.validate_python(body), _PLACE.validate_python(body)
        if kind not in ("started", "finished") and ("turn" not in body or (kind in _OF_CALLS and "call" not in body)):
            raise ValueError(f"a record of kind {kind} does not say where it stands")
        turn, at = place.turn, (place.turn, place.call)
        match value:
            case Started():
                self.started = value
            case NewMessages():
                self.new_messages[turn] = value
            case _Replied():
                self.replies[turn], self.altered[turn] = value.reply, value.altered
                if value.is_last:
                    self.last_turns.add(turn)
            case ModelFailed():
                self.failures[turn] = replace(value, is_recorded=True)
            case _Asking():
                self.askings[at] = value.messages
            case Wait():
                (self.approval_waits if value.is_approval else self.waits)[at] = value
            case Approval():
                self.approvals[at] = value
            case _ToolStarted():
                self.begun_calls.add(at)
                if value.once:
                    self.once_calls.add(at)
            case ToolResult():
                self.results[at] = value
                self.taken.update(place.replies)
            case _Used():
                self.used[at] = value.used
            case _Thinking():
                self.thinking[turn] = value.text
            case KeptPrompt():
                self.prompts[turn] = value
            case _Progress():
                self.progress[at] = value.steps
            case StopTrace():
                self.stopped = value
            case _Note():
                self.notes.setdefault(turn, {})[value.name] = value.value
            case Reviewed() if place.send:
                self.sent_reviews[(*at, place.send)] = value
            case Reviewed():
                self.reviews[turn] = value
            case Finish():
                self.finished = value


async def fetch_records(call: Call, reaction: str, agent_id: str | None) -> list[Mapping[str, Any]]:
    """Return all records of an agent's reaction that the caller may see, oldest first. None: those of every agent under
    this id, which several may have used."""
    args = {"reaction": reaction, **({"agent_id": agent_id} if agent_id is not None else {})}
    return [record async for page in read_pages(call, "network.records", args) for record in page["records"]]


async def fetch_fates(call: Call, seq: int) -> list[Mapping[str, Any]]:
    """Return the state of a message at each of its recipients, as ``network.message_status`` has it."""
    pages = read_pages(call, "network.message_status", {"seq": seq})
    return [recipient async for page in pages for recipient in page["recipients"]]


def read_records(records: Iterable[Mapping[str, Any]]) -> Recorded:
    """Build what a reaction has done from its records, as ``network.records`` gives them. Raises `ValueError` for what
    is no such record."""
    runs: dict[str, Recorded] = {"": Recorded()}
    for record in records:
        body = record["body"]
        path = body.get("path", "") if isinstance(body, Mapping) else ""
        if not isinstance(path, str):
            raise ValueError("a record's path is no text")
        runs.setdefault(path, Recorded()).take(record["kind"], body)
    inner = {path: run for path, run in runs.items() if path}
    for run in runs.values():
        run.children = inner  # of all depths: each finds its own by the whole path
    return runs[""]


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


@dataclass(slots=True, eq=False)
class Journal:
    """Writes and reads the records of one run in a reaction. ``max_body_bytes`` is the hub's limit for one record."""

    _client: RecordClient
    reaction: str
    _: KW_ONLY
    max_body_bytes: int = 262_144
    path: str = ""
    is_started: bool = False
    store: Store | None = None
    """Gives a record's body as it is kept; None keeps all of it."""

    _closed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def client(self) -> RecordClient:
        """By which it writes."""
        return self._client

    def descend(self, turn: int, call: int, run: int) -> Journal:
        """Give the journal of a run inside a call of this one, the first (0) or a further one."""
        path = path_of_call(self.path, turn, call, run)
        return replace(self, path=path)

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
        used: tuple[ModelUse, ...] = (),
    ) -> ModelReply:
        """Keep a reply, with the print of the request that it answers (`fingerprint_request`), by which a replay notices
        another one. ``used`` is what middleware's own requests used of its usage. Give it as it is kept: an empty one
        in place of one that is too large for a record; what the server wants back goes first."""
        printed = {} if request is None else {"request": dict(request)}
        told = reply.to_json()
        most = self.max_body_bytes - _ENVELOPE_BYTES
        if reply.origin is not None and reply.origin.has_fields and len(json.dumps([told, printed])) > most:
            reply = replace(reply, origin=replace(reply.origin, message={}, calls=()))
            told = reply.to_json()
        if len(json.dumps([told, printed])) > most:
            reply = ModelReply(text=None, usage=reply.usage, finish_reason=TOO_LARGE, model=reply.model)
            told = reply.to_json()
        body = {"turn": turn, "agent": agent_id, "is_last": is_last, "reply": told, **printed}
        if used:
            body["used"] = _USES.dump_python(used)
        await self._record("model_reply", turn, 0, body)
        return reply

    async def record_new_messages(self, turn: int, new: NewMessages) -> None:
        body = {"turn": turn, "seqs": list(new.seqs), "text": new.text, "answers": new.answers}
        await self._record("new_messages", turn, 0, body)

    async def record_model_failed(self, turn: int, failed: ModelFailed) -> None:
        reason = replace_surrogates(failed.reason[:MAX_REASON_CHARS])
        body = {"turn": turn, "failure": failed.failure, "reason": reason}
        if failed.reported_by:
            body["reported_by"] = failed.reported_by
        await self._record("model_failed", turn, 0, body)

    async def record_tool_started(self, turn: int, index: int, tool: str, arguments: str, *, is_once: bool) -> None:
        body: dict[str, object] = {"turn": turn, "call": index, "tool": tool, "args": arguments}
        await self._record("tool_started", turn, index, {**body, "once": True} if is_once else body)

    async def record_tool_result(
        self, turn: int, index: int, tool: str, result: ToolResult, replies: Sequence[int] = ()
    ) -> None:
        """``replies``: the seqs of those that the call waited for and had."""
        body: dict[str, object] = {"turn": turn, "call": index, "tool": tool[:64]}
        body |= {"content": result.content, "ok": result.ok}
        optional = {"threads": list(result.threads), "is_answer": result.is_answer, "data": dict(result.data)}
        optional["sent"] = dict(result.sent)
        body |= {name: value for name, value in (optional | {"replies": list(replies)}).items() if value}
        if result.tool_calls or result.usage != Usage():
            body |= {"usage": _USAGE.dump_python(result.usage), "tool_calls": result.tool_calls}
        await self._record("tool_result", turn, index, body)

    async def record_used(self, turn: int, call: int, used: tuple[ModelUse, ...]) -> None:
        """Keep what models used in a call, beside agents inside of it. What an interrupted one had used holds."""
        with suppress(IdConflict):
            await self._record("used", turn, call, {"turn": turn, "call": call, "used": _USES.dump_python(used)})

    async def record_thinking(self, turn: int, text: str) -> None:
        """Keep what the model thought before its reply, cut to what a record holds. What an interrupted turn thought
        holds."""
        with suppress(IdConflict):
            kept = cut(replace_surrogates(text), self.max_body_bytes // 12)  # an escaped character takes six bytes
            await self._record("thinking", turn, 0, {"turn": turn, "text": kept})

    async def record_prompt(self, turn: int, request: ModelRequest) -> None:
        """Keep what the model is asked, its longest parts cut to what a record holds. What an interrupted turn asked
        holds."""
        kept = fit_prompt(describe_prompt(request), self.max_body_bytes - _ENVELOPE_BYTES)
        with suppress(IdConflict):
            await self._record("prompt", turn, 0, {"turn": turn, **_READERS["prompt"].dump_python(kept, mode="json")})

    async def record_progress(self, turn: int, call: int, tool: str, steps: Sequence[str]) -> None:
        """Keep what a call reported of its progress, the newest `MAX_STEPS` of it."""
        most = self.max_body_bytes // 12 // MAX_STEPS
        kept = [cut(step, most) for step in steps[-MAX_STEPS:]]
        with suppress(IdConflict):
            await self._record("progress", turn, call, {"turn": turn, "call": call, "tool": tool[:64], "steps": kept})

    async def record_note(self, turn: int, name: str, value: JsonValue, of: Collection[str] = ()) -> None:
        """Keep what middleware made in a turn, ``of`` the results of these tools. An earlier one of this name holds."""
        made_of = {"of": sorted(of)} if of else {}
        with suppress(IdConflict):
            await self._record("note", turn, name, {"turn": turn, "name": name, "value": value, **made_of})

    async def record_waiting(self, turn: int, call: int, wait: Wait) -> None:
        # A call that was approved may wait for others itself.
        key: int | str = call
        if wait.is_approval:
            is_first = wait.deciders is None and not wait.stage and not wait.votes
            changes = "" if is_first else f"-{wait.stage}-{len(wait.votes)}"
            key = f"{call}-approval{changes}"
        with suppress(IdConflict):  # known, and written by another version: the hub hears that it waits all the same
            await self._record("waiting", turn, key, {"turn": turn, "call": call, **wait.to_record()})

    async def record_asking(self, turn: int, call: int, messages: Mapping[str, str]) -> None:
        await self._record("asking", turn, call, {"turn": turn, "call": call, "messages": dict(messages)})

    async def record_approval(self, turn: int, call: int, approval: Approval) -> None:
        await self._record("approval", turn, call, {"turn": turn, "call": call, **_leave_out_empty(approval)})

    async def record_review(self, turn: int, reviewed: Reviewed, message: tuple[int, int] | None = None) -> None:
        """Keep what reviewers made of the answer of a turn; or of a ``message``: its call, and its place there."""
        body = _READERS["review"].dump_python(reviewed, mode="json", exclude={"altered"})
        if not reviewed.is_blocked:
            del body["is_blocked"]
        if not reviewed.used:
            del body["used"]
        key: int | str = 0
        if message is not None:
            call, send = message
            key, body = f"{call}-{send}", {"call": call, "send": send, **body}
        await self._record("review", turn, key, {"turn": turn, **body})

    async def record_stopped(self, stopped: StopTrace) -> StopTrace:
        """Keep what a person's stop left, before anybody is told of it. Give it as it is kept: cut to what a record
        holds."""
        room = self.max_body_bytes // 12  # an escaped character takes six bytes
        kept = replace(stopped, text=cut(replace_surrogates(stopped.text), room))
        await self._record("stopped", 0, 0, _READERS["stopped"].dump_python(kept, mode="json"))
        return kept

    async def record_finished(self, finish: Finish) -> None:
        """End the reaction; it will not be resumed."""
        told = replace(finish, reason=replace_surrogates(finish.reason[:MAX_REASON_CHARS]))
        body = _READERS["finished"].dump_python(told, mode="json", include=_FINISH_FIELDS)
        for name in ("used", "failure"):
            if not body[name]:
                del body[name]
        await self._record("finished", 0, 0, body)

    async def load(self) -> Recorded:
        """Read back what was recorded."""

        def call(op: str, args: Mapping[str, object]) -> Awaitable[Any]:
            return retry_later(lambda: self._client.call(op, args))

        records = await fetch_records(call, self.reaction, None)  # a hub of before may not know of agents there
        own = self._client.agent_id
        return read_records([it for it in records if it.get("agent_id", own) == own])

    async def _record(self, kind: str, turn: int, call: int | str, body: Mapping[str, object]) -> bool:
        """Write one record; True when it was there already."""
        if self._closed.is_set():
            raise asyncio.CancelledError
        record_id = digest(kind, self.reaction, self.path, turn, call)
        if self.store is not None:
            try:
                body = {**self.store(kind, body)}
            except (
                Exception
            ) as error:  # of the hook's code: a reaction that it keeps from ending would never leave its thread
                if kind != "finished":
                    raise
                told = {"reaction": self.reaction}
                _logger.error(
                    "the end of a reaction is recorded without its reason", extra=told, exc_info=redact_error(error)
                )
                body = {**body, "reason": "not kept: what decides on it failed"}  # a reaction must be able to end
        placed = {**body, "path": self.path} if self.path else body
        while True:
            try:
                stored = await self._client.record(self.reaction, kind, placed, record_id=record_id)
                return stored.duplicate
            except RetryLater as error:
                busy = error
            await wait_retry_delay(busy)


def _leave_out_empty(approval: Approval) -> dict[str, Any]:
    body = approval.model_dump()
    return {name: value for name, value in body.items() if name not in ("said", "votes") or value}


def reaction_id(agent_id: str, trigger: int, epoch: str) -> str:
    """Give the id of an agent's reaction to a message, the same on every machine."""
    return digest("reaction", agent_id, trigger, epoch)


def derived_id(reaction: str, path: str, turn: int, call: int | str) -> str:
    """Give the id of what a call of a reaction sends: its ``message_id`` and ``call_id``."""
    return digest("call", reaction, path, turn, call)


def digest(*parts: str | int) -> str:
    """Give 128 bits of SHA-256 of these, in hexadecimal digits."""
    return hashlib.sha256("\x1f".join(map(str, parts)).encode()).hexdigest()[:32]


MAX_PATH_CHARS = 80
"""Of one that somebody else claims."""


_PART = r"\d{1,9}\.\d{1,9}(\.\d{1,9})?"


_PATH = re.compile(rf"{_PART}(/{_PART})*", re.ASCII)


def path_of_call(outer: str, turn: int, call: int, run: int = 0) -> str:
    """Give the path of a call of the run at ``outer``, which is that of the first run in it (0), or of a further
    one."""
    return f"{outer}/{turn}.{call}{f'.{run}' if run else ''}".lstrip("/")


def is_path(text: str) -> bool:
    """Whether this, which somebody else wrote, is the path of something inside of a reaction."""
    return len(text) <= MAX_PATH_CHARS and _PATH.fullmatch(text) is not None


def is_inside(path: str, call: str) -> bool:
    """Whether what runs at ``path`` runs inside of the call of this path: the first run in it, or a further one."""
    return f"{path}/".startswith((f"{call}/", f"{call}."))


def outer_paths(path: str) -> list[str]:
    """A path and those around it, the outermost first: ``1.0/2.1`` gives ``1.0`` and ``1.0/2.1``."""
    parts = path.split("/") if path else []
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]


def describe_prompt(request: ModelRequest) -> KeptPrompt:
    """Give a request as it is kept: without images and files, whose addresses stand in the messages."""
    names: dict[str, str] = {}
    parts = []
    for message in request.messages:
        text = replace_surrogates(message.content or "")
        match message:
            case AssistantMessage():
                names |= {it.id: it.name for it in message.tool_calls}
                calls = tuple((it.name, replace_surrogates(it.arguments)) for it in message.tool_calls)
                parts.append(KeptMessage("assistant", text, calls=calls))
            case ToolMessage():
                parts.append(KeptMessage("tool", text, tool=names.get(message.tool_call_id, "")))
            case SystemMessage():
                parts.append(KeptMessage("system", text))
            case _:
                parts.append(KeptMessage("user", text))
    return KeptPrompt(tuple(parts), tuple(it.name for it in request.tools))


def fit_prompt(prompt: KeptPrompt, max_bytes: int) -> KeptPrompt:
    """Give a prompt that a record holds: its longest texts are cut until it fits."""
    adapter = _READERS["prompt"]
    most = max((len(it.text) for it in prompt.parts), default=0)
    fitting = prompt
    while len(adapter.dump_json(fitting)) * 2 > max_bytes and most > 64:  # non-ASCII text may grow in a frame
        most = most * 3 // 4
        parts = (replace(it, text=cut(it.text, most) if len(it.text) > most else it.text) for it in prompt.parts)
        fitting = replace(prompt, parts=tuple(parts), is_cut=True)
    if len(adapter.dump_json(fitting)) * 2 > max_bytes:  # so many parts that the newest alone fit
        fitting = replace(fitting, parts=fitting.parts[-64:], tools=fitting.tools[:256])
    return fitting


async def find_reporter(client: RecordClient) -> str:
    """Give the id of the agent if the hub notifies operators of its faults; empty otherwise.

    A hub of an older release, or one without operators, notifies nobody, and no answer may claim it.
    """
    try:
        told = await retry_later(lambda: client.call("network.info", {}))
    except RequestError:  # the rights of the node forbid the question
        return ""
    return client.agent_id if told.get("has_operators") else ""


def open_journal(client: NetworkClient, reaction: str) -> Journal:
    """Give the journal of a reaction, within the hub's limits."""
    limits = client.welcome.limits
    limit = min(limits["max_record_bytes"], limits["max_frame_bytes"])  # a record travels in a frame
    return Journal(client, reaction, max_body_bytes=limit)
