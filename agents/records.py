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


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a run has recorded so far; turns count from 1, calls by their place in the turn. ``children`` are runs
    inside of it, by path."""

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
    once_calls: frozenset[tuple[int, int]] = frozenset()
    """Of those that were begun, the ones whose tool was ``once`` then."""

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
        return [wait for run in runs for place, wait in run.waits.items() if place not in run.results]

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
    once: bool = False


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
    started: Started | None = None
    replies: dict[int, ModelReply] = {}
    last_turns: set[int] = set()
    failures: dict[int, ModelFailed] = {}
    begun: set[tuple[int, int]] = set()
    once: set[tuple[int, int]] = set()
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
                if begin.once:
                    once.add((begin.turn, begin.call))
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
                    review.answer,
                    review.correction,
                    review.usage,
                    review.notes,
                    review.is_accepted,
                    review.metadata,
                    review.altered,
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
        finished, children, reviews, notes, altered, frozenset(once),
    )  # fmt: skip
