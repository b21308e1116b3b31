"""The records of a reaction: their bodies, how they are fetched, and what a run has done by them (`Recorded`), from
which it goes on.

`journal` writes them; `driver`, `reopen` and whoever explains or replays a reaction read them here.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, JsonValue

from .models.model import ModelFailure, ModelReply, Usage
from .replies import Wait
from .steps import Altered, ModelFailed, NewMessages, Replayed, Reviewed, Status
from .tools import ToolResult

_logger = logging.getLogger(__name__)


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


_Place = tuple[int, int]  # of a call: its turn, its place in that


@dataclass(slots=True)
class Recorded:
    """What a run has recorded so far; turns count from 1, calls by their place in the turn. ``children`` are runs
    inside of it, by path. To be read only."""

    started: Started | None = None
    replies: dict[int, ModelReply] = field(default_factory=dict)
    last_turns: set[int] = field(default_factory=set)
    failures: dict[int, ModelFailed] = field(default_factory=dict)
    begun_calls: set[_Place] = field(default_factory=set)
    once_calls: set[_Place] = field(default_factory=set)
    """Of those that were begun, the ones whose tool was ``once`` then."""

    results: dict[_Place, ToolResult] = field(default_factory=dict)
    askings: dict[_Place, Mapping[str, str]] = field(default_factory=dict)
    waits: dict[_Place, Wait] = field(default_factory=dict)
    """Of the calls themselves."""

    approval_waits: dict[_Place, Wait] = field(default_factory=dict)
    """Before the calls were begun."""

    taken: set[int] = field(default_factory=set)
    """The replies that its calls waited for and had."""

    approvals: dict[_Place, Approval] = field(default_factory=dict)
    new_messages: dict[int, NewMessages] = field(default_factory=dict)
    reviews: dict[int, Reviewed] = field(default_factory=dict)
    notes: dict[int, dict[str, JsonValue]] = field(default_factory=dict)
    """What middleware kept in a turn, by name."""

    altered: dict[int, Altered] = field(default_factory=dict)
    finished: FinishedBody | None = None
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


class _At(BaseModel):
    turn: int
    call: int


class _Asking(_At):
    messages: dict[str, str]


class _ModelFailed(BaseModel):
    turn: int
    failure: ModelFailure
    reason: str


class _ToolStarted(_At):
    once: bool = False


class _ToolResult(_At):
    content: str
    ok: bool
    threads: tuple[str, ...] = ()
    usage: Usage = Usage()
    tool_calls: int = 0
    is_answer: bool = False
    data: dict[str, JsonValue] = {}
    replies: tuple[int, ...] = ()


class _Note(BaseModel):
    turn: int
    name: str
    value: JsonValue


class ReviewBody(BaseModel):
    """The body of ``review``."""

    turn: int
    answer: str
    correction: str | None = None
    usage: Usage = Usage()
    notes: tuple[str, ...] = ()
    is_accepted: bool = False
    metadata: dict[str, JsonValue] = {}


class _Review(ReviewBody):
    altered: bool = False


async def fetch_records(
    call: Callable[[str, Mapping[str, object]], Awaitable[Any]], reaction: str, agent_id: str | None
) -> list[Mapping[str, Any]]:
    """All records of an agent's reaction that the caller may see, oldest first, page by page. None: of everybody's
    under this id, which others may have used as well."""
    args = {"reaction": reaction, **({"agent_id": agent_id} if agent_id is not None else {})}
    records: list[Mapping[str, Any]] = []
    while True:
        after = records[-1]["seq"] if records else 0
        page = await call("network.records", {**args, "after": after})
        records += page["records"]
        if not page.get("has_more"):
            return records


async def fetch_fates(call: Callable[[str, Mapping[str, object]], Awaitable[Any]], seq: int) -> list[Mapping[str, Any]]:
    """How far a message has got with each of its recipients, page by page, as ``network.message_status`` tells it."""
    fates: list[Mapping[str, Any]] = []
    while True:
        args: dict[str, object] = {"after": fates[-1]["agent_id"]} if fates else {}
        page = await call("network.message_status", {"seq": seq, **args})
        fates += page["recipients"]
        if not page.get("has_more"):
            return fates


def read_records(records: Sequence[Mapping[str, Any]]) -> Recorded:
    """Build what a reaction has done from its records, as ``network.records`` gives them. Kinds of a newer version are
    passed over."""
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
    run = Recorded(children=children)
    for record in records:
        body = record["body"]
        match record["kind"]:
            case "started":
                run.started = Started.model_validate(body)
            case "model_reply":
                reply = _Reply.model_validate(body)
                run.replies[reply.turn] = ModelReply.from_json(reply.reply)
                run.altered[reply.turn] = reply.altered
                if reply.is_last:
                    run.last_turns.add(reply.turn)
            case "model_failed":
                failed = _ModelFailed.model_validate(body)
                run.failures[failed.turn] = ModelFailed(failed.reason, failed.failure, is_recorded=True)
            case "tool_started":
                begin = _ToolStarted.model_validate(body)
                run.begun_calls.add((begin.turn, begin.call))
                if begin.once:
                    run.once_calls.add((begin.turn, begin.call))
            case "tool_result":
                it = _ToolResult.model_validate(body)
                run.results[it.turn, it.call] = ToolResult(
                    it.content, it.ok, it.threads, it.usage, it.tool_calls, it.is_answer, it.data
                )
                run.taken.update(it.replies)
            case "new_messages":
                new = _NewMessages.model_validate(body)
                run.new_messages[new.turn] = NewMessages(new.text, new.seqs, new.answers)
            case "asking":
                asking = _Asking.model_validate(body)
                run.askings[asking.turn, asking.call] = asking.messages
            case "waiting":
                at, wait = _At.model_validate(body), Wait.model_validate(body)
                (run.approval_waits if wait.is_approval else run.waits)[at.turn, at.call] = wait
            case "approval":
                at = _At.model_validate(body)
                run.approvals[at.turn, at.call] = Approval.model_validate(body)
            case "note":
                note = _Note.model_validate(body)
                run.notes.setdefault(note.turn, {})[note.name] = note.value
            case "review":
                said = _Review.model_validate(body)
                run.reviews[said.turn] = Reviewed(
                    said.answer, said.correction, said.usage, said.notes, said.is_accepted, said.metadata, said.altered
                )
            case "finished":
                run.finished = FinishedBody.model_validate(body)
            case _:
                continue
    return run
