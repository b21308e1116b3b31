"""Journal of a reaction: writes the records of its turns to the ledger, in an order on which a restart can rely.

`driver` calls `Journal`, and `Journal` sends ``record`` frames through the client. `recorded` reads the records back.
Every record id is derived from the id of the reaction. A resumed reaction therefore repeats its requests under the same
ids, and the hub recognizes the repeats. An agent that is called as a tool stores its records in the same reaction,
under its ``path``. The journal waits for a busy hub without limit, so a busy hub never makes a started reaction fail. A
record on which no effect depends may be delayed and stored in one commit with later records, in the same order
(`record_queue`).

The process may be killed between any two records, so a restart depends on their order::

    started                           the trigger counts as handled; manifest and as_of determine the prompt *
      [new_messages]                  turn n: new messages, before the model reads them
      [thinking]                      before the reply, if the policy keeps it
      model_reply | model_failed      before any of its calls runs; never asked for again *
        [asking, waiting, approval]   call c, if a person has to approve it
        tool_started                  before the tool runs (* read_only): after a kill here, a `once` call has an unknown outcome
          [asking]                    in one commit with the first question: a resumed run looks questions up *
          [waiting]                   recipients and deadline: a restarted agent continues to wait
          [review]                    review of a message to the requester, before it is sent
          [used, progress]            model usage of the call that no other record reports; its progress
        tool_result                   after the tool: from here on the record is the result (* idempotent)
      [note, review]                  values stored by middleware; the review of the answer
      ...                             turn n + 1
    [stopped]                         a person's stop, at any point: text and usage so far
    (the answer's message)            under a separate id: a repeat stores nothing
    finished                          nothing is left to resume; in the commit of the answer

A star marks records that may be delayed. They are stored before anything that depends on them happens: a tool call, a
message, a person's approval. If the process is killed earlier, only a model call or an idempotent tool is repeated.

A resumed run reads outcomes from these records up to the first missing record. From there on it runs normally.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

from pydantic import JsonValue

from roundelay.network.client import NetworkClient
from roundelay.network.client.stored_frames import make_record
from roundelay.network.errors import ConnectError, RequestError, RoundelayError, Superseded
from roundelay.network.text import cut

from .isolation import redact_error, retry_later
from .models.model import (
    AssistantMessage,
    ModelReply,
    ModelRequest,
    ModelUse,
    SystemMessage,
    ToolMessage,
    Usage,
)
from .reaction_ids import derived_id, digest, path_of_call
from .record_queue import RecordQueue, Write
from .recorded import RECORD_TYPES, Approval, LazyAdapter, Recorded, Started, fetch_records, read_records
from .text import replace_surrogates
from .values import (
    TOO_LARGE,
    Finish,
    KeptMessage,
    KeptPrompt,
    ModelFailed,
    NewMessages,
    Reviewed,
    StopTrace,
    ToolResult,
    Wait,
)

_logger = logging.getLogger(__name__)

MAX_REASON_CHARS = 2000
MAX_STEPS = 100
"""Maximum number of progress reports that are stored for one call. If there are more, the newest are stored."""
_USAGE = LazyAdapter(Usage)
_USES = LazyAdapter(tuple[ModelUse, ...])
_FINISH_FIELDS = {"status", "reason", "turns", "usage", "tool_calls", "read_meanwhile", "used", "failure"}
_ENVELOPE_BYTES = 1024
"""Bytes reserved in a record's frame for everything except the reply."""


def _dump_started(started: Started) -> dict[str, Any]:
    # Leave out newer fields that have no value. A repeated record must equal a record that an older release stored.
    new = {name for name in ("standing", "form", "is_alone") if not getattr(started, name)}
    return started.model_dump(exclude=new)


def drop_largest(data: dict[str, JsonValue], max_chars: int) -> list[str]:
    """Remove the largest values from ``data`` until its JSON has at most ``max_chars`` characters. Return the names of
    the removed values.
    """
    sizes = {name: len(json.dumps({name: value})) for name, value in data.items()}
    left = sum(sizes.values())
    dropped: list[str] = []
    # Remove the largest values first, so that as few values as possible are lost.
    for name in sorted(sizes, key=lambda name: sizes[name], reverse=True):
        if left <= max_chars:
            break
        left -= sizes[name]
        del data[name]
        dropped.append(name)
    return dropped


Store = Callable[[str, Mapping[str, object]], Mapping[str, object]]


@dataclass(slots=True, eq=False)
class Journal:
    """Writes the records of one run. ``max_body_bytes`` is the hub's limit for one record."""

    _client: NetworkClient
    reaction: str
    _: KW_ONLY
    max_body_bytes: int = 262_144
    path: str = ""
    was_started: bool = False
    """Whether an earlier process has started the reaction."""

    max_batch: int = 1
    """Maximum number of records in one batch, set by the hub. With 1, every record is stored at once and by itself."""

    max_root_tokens: int | None = None
    """Maximum number of tokens of a conversation, set by the hub. With None, the number is not limited."""

    store: Store | None = None
    """Middleware hook that returns the body of a record as it will be stored. With None, bodies are stored unchanged.
    """

    _start: Write | None = None
    queue: RecordQueue = field(init=False)

    def __post_init__(self) -> None:
        self.queue = RecordQueue(self._client, self.max_batch, self.max_body_bytes)

    @property
    def client(self) -> NetworkClient:
        """Connection to the hub through which the journal writes."""
        return self._client

    def descend(self, turn: int, call: int, run: int) -> Journal:
        """Return the journal of an agent that this run calls as a tool. ``run`` numbers such agents within one call,
        from 0.
        """
        path = path_of_call(self.path, turn, call, run)
        inner = replace(self, path=path)
        inner.queue = self.queue  # all runs of the reaction share one queue, so their records stay in one order
        return inner

    def close(self) -> None:
        """Stop all writes of this run and its inner runs, because another process may resume the reaction. A task that
        still tries to write gets `CancelledError`.
        """
        self.queue.hold()

    def reopen(self) -> None:
        """Allow writing again, after all tasks of the cancelled run have ended."""
        self.queue.is_held = False

    @property
    def depth(self) -> int:
        """Number of runs around this run: 0 for the run of the reaction itself."""
        return self.path.count("/") + 1 if self.path else 0

    def derive_id(self, turn: int, call: int | str) -> str:
        return derived_id(self.reaction, self.path, turn, call)

    async def record_started(self, started: Started) -> bool:
        """Record the start of the reaction. From then on, its trigger counts as handled. Return False if the reaction
        had already started, in this process or in another.
        """
        # A conflict means that the reaction was already started with another configuration.
        self._start = await self._record("started", 0, 0, _dump_started(started), may_conflict=True)
        return not self._start.is_duplicate

    @property
    def is_started(self) -> bool:
        """Whether the hub has stored the start of the reaction."""
        return self.was_started or (self._start is not None and self._start.is_stored)

    @property
    def is_new(self) -> bool:
        """Whether this process has stored the start of the reaction."""
        return self._start is not None and self._start.is_stored and not self._start.is_duplicate

    async def settle_start(self) -> None:
        """Store a delayed start record after the run has ended. Afterwards, `is_started` is True if the hub accepted
        the record.
        """
        self.queue.forget_failure()
        if self._start is not None and not self._start.is_stored:
            try:
                await self.queue.flush()
            except (ConnectError, Superseded):
                raise
            except RoundelayError as error:
                self.queue.forget_failure()
                details = {"reaction": self.reaction, "code": error.code}
                _logger.info("records were refused", extra=details)

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
        """Record a reply and the fingerprint of its request (`print_request`). With the fingerprint, a replay can
        detect a request that differs. ``used`` is the part of the usage that the middleware's own requests caused.

        Return the reply as it was stored. If a reply is too large, the fields that only the server reads are removed.
        If the reply is still too large, an empty reply is stored instead.
        """
        fingerprint = {} if request is None else {"request": dict(request)}
        encoded = reply.to_json()
        max_bytes = self.max_body_bytes - _ENVELOPE_BYTES
        has_fields = reply.origin is not None and reply.origin.has_fields
        # Remove these fields first, because only the server reads them. Removing the text instead would lose the
        # model's work.
        if reply.origin is not None and has_fields and len(json.dumps([encoded, fingerprint])) > max_bytes:
            reply = replace(reply, origin=replace(reply.origin, message={}, calls=()))
            encoded = reply.to_json()
        if len(json.dumps([encoded, fingerprint])) > max_bytes:
            reply = ModelReply(text=None, usage=reply.usage, finish_reason=TOO_LARGE, model=reply.model)
            encoded = reply.to_json()
        body = {"turn": turn, "agent": agent_id, "is_last": is_last, "reply": encoded, **fingerprint}
        if used:
            body["used"] = _USES.dump_python(used)
        # This record may be delayed. It is stored together with the records of the tools, before the tools run. A budget
        # of the conversation counts only stored records, so with a budget this record must not wait.
        await self._record("model_reply", turn, 0, body, may_wait=self.max_root_tokens is None)
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

    async def record_tool_started(
        self, turn: int, index: int, tool: str, arguments: str, *, is_once: bool, may_wait: bool
    ) -> None:
        """Record that a call begins. ``may_wait``: the tool changes nothing, or nothing before waiting records are
        stored. Any other tool waits for the record: if the reply were lost, the model could make another call after
        this one took effect.
        """
        body: dict[str, object] = {"turn": turn, "call": index, "tool": tool, "args": arguments}
        body |= {"once": True} if is_once else {}
        await self._record("tool_started", turn, index, body, may_wait=may_wait)

    async def record_tool_result(
        self, turn: int, index: int, tool: str, result: ToolResult, replies: Sequence[int] = (), *, is_once: bool = True
    ) -> None:
        """Record the result of a call. ``replies`` lists the seqs of the replies that the call waited for. If a resumed
        run may repeat the call (``is_once`` False), the result is stored together with the next record.
        """
        body: dict[str, object] = {"turn": turn, "call": index, "tool": tool[:64]}
        body |= {"content": result.content, "ok": result.ok}
        optional = {"threads": list(result.threads), "is_answer": result.is_answer, "data": dict(result.data)}
        optional["sent"] = dict(result.sent)
        body |= {name: value for name, value in (optional | {"replies": list(replies)}).items() if value}
        if result.tool_calls or result.usage != Usage():
            body |= {"usage": _USAGE.dump_python(result.usage), "tool_calls": result.tool_calls}
        await self._record("tool_result", turn, index, body, may_wait=not is_once and not replies)

    async def record_used(self, turn: int, call: int, used: tuple[ModelUse, ...]) -> None:
        """Record the model usage of a call, without the usage of agents called as tools. If the call was interrupted
        and recorded before, the earlier record stays.
        """
        body = {"turn": turn, "call": call, "used": _USES.dump_python(used)}
        await self._record("used", turn, call, body, may_wait=True, may_conflict=True)

    async def record_thinking(self, turn: int, text: str) -> None:
        """Record the model's reasoning before its reply, shortened to the size limit of a record. If the turn was
        interrupted and recorded before, the earlier record stays.
        """
        kept = cut(replace_surrogates(text), self.max_body_bytes // 12)  # an escaped character takes six bytes
        await self._record("thinking", turn, 0, {"turn": turn, "text": kept}, may_wait=True, may_conflict=True)

    async def record_prompt(self, turn: int, request: ModelRequest) -> None:
        """Record the request to the model, with its longest parts shortened to the size limit of a record. If the turn
        was interrupted and recorded before, the earlier record stays.
        """
        kept = fit_prompt(describe_prompt(request), self.max_body_bytes - _ENVELOPE_BYTES)
        body = {"turn": turn, **RECORD_TYPES["prompt"].dump_python(kept, mode="json")}
        await self._record("prompt", turn, 0, body, may_wait=True, may_conflict=True)

    async def record_progress(self, turn: int, call: int, tool: str, steps: Sequence[str]) -> None:
        """Record the newest `MAX_STEPS` progress reports of a call."""
        max_chars = self.max_body_bytes // 12 // MAX_STEPS
        kept = [cut(step, max_chars) for step in steps[-MAX_STEPS:]]
        body = {"turn": turn, "call": call, "tool": tool[:64], "steps": kept}
        await self._record("progress", turn, call, body, may_wait=True, may_conflict=True)

    async def record_note(self, turn: int, name: str, value: JsonValue, of: Collection[str] = ()) -> None:
        """Record a value that middleware computed in a turn from the results of the tools ``of``. If the turn already
        has a value under this name, the earlier value stays.
        """
        made_of = {"of": sorted(of)} if of else {}
        await self._record(
            "note", turn, name, {"turn": turn, "name": name, "value": value, **made_of}, may_conflict=True
        )

    async def record_waiting(self, turn: int, call: int, wait: Wait) -> None:
        # After approval, the same call may wait for replies too. The wait for its approval therefore needs a different
        # id.
        key: int | str = call
        if wait.is_approval:
            is_first = wait.deciders is None and not wait.stage and not wait.votes
            # Each change of the wait needs a new id. Under the same id, the hub would keep the older record.
            changes = "" if is_first else f"-{wait.stage}-{len(wait.votes)}"
            key = f"{call}-approval{changes}"
        # A conflict means that another version of the agent has already recorded this wait, so the hub knows that the
        # call waits.
        await self._record("waiting", turn, key, {"turn": turn, "call": call, **wait.to_record()}, may_conflict=True)

    async def record_asking(self, turn: int, call: int, messages: Mapping[str, str]) -> None:
        body = {"turn": turn, "call": call, "messages": dict(messages)}
        await self._record("asking", turn, call, body, may_wait=True)  # in one commit with the questions

    async def record_approval(self, turn: int, call: int, approval: Approval) -> None:
        await self._record("approval", turn, call, {"turn": turn, "call": call, **_leave_out_empty(approval)})

    async def record_review(self, turn: int, reviewed: Reviewed, message: tuple[int, int] | None = None) -> None:
        """Record the review of a turn's answer, or of a message that a tool sends. ``message`` is the index of the call
        and the position of the message in that call.
        """
        body = RECORD_TYPES["review"].dump_python(reviewed, mode="json", exclude={"altered"})
        if not reviewed.is_blocked:
            del body["is_blocked"]
        if not reviewed.used:
            del body["used"]
        key: int | str = 0
        # A turn has one answer but may send many messages. The id of a message's review therefore contains the position
        # of the message.
        if message is not None:
            call, send = message
            key, body = f"{call}-{send}", {"call": call, "send": send, **body}
        await self._record("review", turn, key, {"turn": turn, **body})

    async def record_stopped(self, stopped: StopTrace) -> StopTrace:
        """Record the trace of a stopped run before anybody is notified. Return the trace as it was stored, shortened to
        the size limit of a record.
        """
        max_chars = self.max_body_bytes // 12  # an escaped character takes six bytes
        kept = replace(stopped, text=cut(replace_surrogates(stopped.text), max_chars))
        await self._record("stopped", 0, 0, RECORD_TYPES["stopped"].dump_python(kept, mode="json"))
        return kept

    async def record_finished(self, finish: Finish, answer: Write | None = None, *, may_conflict: bool = False) -> None:
        """Record the end of the reaction in the commit of its ``answer``, after the answer. The reaction will not be
        resumed.
        """
        kept = replace(finish, reason=replace_surrogates(finish.reason[:MAX_REASON_CHARS]))
        body = RECORD_TYPES["finished"].dump_python(kept, mode="json", include=_FINISH_FIELDS)
        for name in ("used", "failure"):
            if not body[name]:
                del body[name]
        end = self._make_write("finished", 0, 0, body, may_conflict=may_conflict)
        await self.queue.write(*(() if answer is None else (answer,)), end)

    async def load(self) -> Recorded:
        """Read the records of the run."""

        def call(op: str, args: Mapping[str, object]) -> Awaitable[Any]:
            return retry_later(lambda: self._client.call(op, args))

        records = await fetch_records(call, self.reaction, None)  # an older hub cannot filter by agent
        own = self._client.agent_id
        # Ignore records of other agents under this reaction's id. They must not influence this reaction.
        return read_records([record for record in records if record.get("agent_id", own) == own])

    async def _record(
        self,
        kind: str,
        turn: int,
        call: int | str,
        body: Mapping[str, object],
        *,
        may_wait: bool = False,
        may_conflict: bool = False,
    ) -> Write:
        """Write one record. Raises `CancelledError` if the journal is closed. Set ``may_wait`` if no effect depends on
        the record: the record is then stored with the next one, or after a moment. Set ``may_conflict`` if an earlier
        record under the same id may stay.
        """
        write = self._make_write(kind, turn, call, body, may_conflict=may_conflict)
        await self.queue.write(write, may_wait=may_wait)
        return write

    def _make_write(
        self, kind: str, turn: int, call: int | str, body: Mapping[str, object], *, may_conflict: bool
    ) -> Write:
        self.queue.check_open()
        record_id = digest(kind, self.reaction, self.path, turn, call)
        if self.store is not None:
            try:
                body = {**self.store(kind, body)}
            except Exception as error:  # the hook is user code
                if kind != "finished":
                    raise
                # Record the end without its reason, because every reaction must be able to end. Otherwise the reaction
                # would block its thread forever.
                _logger.error(
                    "the end of a reaction is recorded without its reason",
                    extra={"reaction": self.reaction},
                    exc_info=redact_error(error),
                )
                body = {**body, "reason": "not kept: what decides on it failed"}
        body = {**body, "path": self.path} if self.path else body
        return Write(
            partial(self._client.record, self.reaction, kind, body, record_id=record_id),
            partial(make_record, self.reaction, kind, body, record_id=record_id),
            may_conflict,
        )


def _leave_out_empty(approval: Approval) -> dict[str, Any]:
    body = approval.model_dump()
    return {name: value for name, value in body.items() if name not in ("said", "votes") or value}


def describe_prompt(request: ModelRequest) -> KeptPrompt:
    """Return a request in the form in which it is recorded. Images and files are omitted, because the messages contain
    their addresses.
    """
    names: dict[str, str] = {}
    parts = []
    for message in request.messages:
        text = replace_surrogates(message.content or "")
        match message:
            case AssistantMessage():
                names |= {call.id: call.name for call in message.tool_calls}
                calls = tuple((call.name, replace_surrogates(call.arguments)) for call in message.tool_calls)
                parts.append(KeptMessage("assistant", text, calls=calls))
            case ToolMessage():
                parts.append(KeptMessage("tool", text, tool=names.get(message.tool_call_id, "")))
            case SystemMessage():
                parts.append(KeptMessage("system", text))
            case _:
                parts.append(KeptMessage("user", text))
    return KeptPrompt(tuple(parts), tuple(tool.name for tool in request.tools))


def fit_prompt(prompt: KeptPrompt, max_bytes: int) -> KeptPrompt:
    """Return a prompt that fits into a record, with its longest texts shortened."""
    adapter = RECORD_TYPES["prompt"].adapter
    max_chars = max((len(part.text) for part in prompt.parts), default=0)
    fitting = prompt
    # non-ASCII characters may take more bytes in a frame
    while len(adapter.dump_json(fitting)) * 2 > max_bytes and max_chars > 64:
        # Lower one limit for all texts. The longest texts then shrink first, and short messages stay complete.
        max_chars = max_chars * 3 // 4
        parts = (
            replace(part, text=cut(part.text, max_chars)) if len(part.text) > max_chars else part
            for part in prompt.parts
        )
        fitting = replace(prompt, parts=tuple(parts), is_cut=True)
    if len(adapter.dump_json(fitting)) * 2 > max_bytes:  # there are too many parts, so keep the newest
        fitting = replace(fitting, parts=fitting.parts[-64:], tools=fitting.tools[:256])
    return fitting


async def find_reporter(client: NetworkClient) -> str:
    """Return the agent's id if the hub notifies operators of the agent's faults, else an empty string.

    An older hub, or a hub without operators, notifies nobody. With such a hub, an answer must not claim that operators
    were notified.
    """
    try:
        info = await retry_later(lambda: client.call("network.info", {}))
    except RequestError:  # the node's rights forbid this operation
        return ""
    return client.agent_id if info.get("has_operators") else ""


def open_journal(client: NetworkClient, reaction: str) -> Journal:
    """Return the journal of a reaction, with the hub's size limits."""
    limits = client.welcome.limits
    limit = min(limits["max_record_bytes"], limits["max_frame_bytes"])  # a record is sent inside a frame
    # Use defaults: a hub of an earlier version sends neither a limit nor accepts batches.
    return Journal(
        client,
        reaction,
        max_body_bytes=limit,
        max_batch=limits.get("max_batch", 1),
        max_root_tokens=limits.get("max_root_tokens"),
    )
