"""Records of a reaction, read from the ledger: everything that a run has done so far.

`journal` writes the records and documents their order. `driver` resumes a run from `Recorded`. ``roundelay.runs``
explains and replays a run. Each kind of record has one type in this module. The module only reads records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pydantic import BaseModel, JsonValue, TypeAdapter

from roundelay.network.client.paging import Call, read_pages

from .models.model import ModelReply, ModelUse
from .values import (
    Altered,
    Finish,
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


class Started(BaseModel):
    """Start of a reaction. The prompt depends only on the fields of this record and on the ledger up to ``as_of``."""

    trigger: int
    thread_id: str
    as_of: int
    manifest: list[int]
    """Seqs of the messages in the prompt, ascending."""
    config_hash: str
    prompt_hash: str = ""
    standing: str = ""
    """End of the prompt: the answers that the agent owed and waited for at the start. No other record contains this
    text.
    """

    form: str = ""
    """Form of the prompt. Empty for ``full``, which was the only form in earlier versions."""

    is_alone: bool = False
    """Whether the network had no participants other than the agent and the trigger's sender."""


class Approval(BaseModel):
    """A person's decision on a tool call that needed approval, with the person and the time."""

    is_approved: bool
    by: str
    seq: int
    at: int
    arguments: str | None = None
    """Arguments that replace the call's own, if the person changed them."""
    reason: str = ""
    scope: Scope = "once"

    said: str = ""
    """Text of the message with the decision."""

    votes: list[Vote] = []
    """All votes, if more than one person had to approve. The last vote is from ``by``."""

    @property
    def people(self) -> list[str]:
        """The people who decided."""
        return [vote.by for vote in self.votes if self.is_approved] or [self.by]


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
    """Position of a record: its turn, and its call in this turn. ``send`` counts the reviewed messages of the call from
    1. ``replies`` contains the seqs of the replies that the call received.
    """

    turn: int = 0
    call: int = 0
    send: int = 0
    replies: tuple[int, ...] = ()


class LazyAdapter:
    """A `TypeAdapter` that is built when it is first used. Building all adapters takes 0.03 s, which is 7 % of the
    import time of this package.
    """

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    @cached_property
    def adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self._kind)

    def validate_python(self, value: object) -> Any:
        return self.adapter.validate_python(value)

    def dump_python(self, value: object, **options: Any) -> Any:
        return self.adapter.dump_python(value, **options)


def build_adapters() -> None:
    """Build all adapters now, so that processes that are forked later do not have to build them."""
    for adapter in (*RECORD_TYPES.values(), _PLACE):
        _ = adapter.adapter


RECORD_TYPES: Mapping[str, LazyAdapter] = {
    "started": LazyAdapter(Started),
    "new_messages": LazyAdapter(NewMessages),
    "model_reply": LazyAdapter(_Replied),
    "model_failed": LazyAdapter(ModelFailed),
    "asking": LazyAdapter(_Asking),
    "waiting": LazyAdapter(Wait),
    "approval": LazyAdapter(Approval),
    "tool_started": LazyAdapter(_ToolStarted),
    "tool_result": LazyAdapter(ToolResult),
    "note": LazyAdapter(_Note),
    "review": LazyAdapter(Reviewed),
    "used": LazyAdapter(_Used),
    "thinking": LazyAdapter(_Thinking),
    "prompt": LazyAdapter(KeptPrompt),
    "progress": LazyAdapter(_Progress),
    "stopped": LazyAdapter(StopTrace),
    "finished": LazyAdapter(Finish),
}
_PLACE = LazyAdapter(_RecordPlace)
_KINDS_OF_CALLS = frozenset({"asking", "waiting", "approval", "tool_started", "tool_result", "used", "progress"})

_CallAt = tuple[int, int]  # a call: its turn, and its index in that turn


@dataclass(slots=True)
class RecordedWaits:
    """Questions, waits and approvals of a run's calls. Read-only."""

    questions: dict[_CallAt, Mapping[str, str]] = field(default_factory=dict)
    """Questions that a call is about to send: message ids by recipient."""

    waits: dict[_CallAt, Wait] = field(default_factory=dict)
    """Waits for the replies to the questions of calls."""

    approval_waits: dict[_CallAt, Wait] = field(default_factory=dict)
    """Waits for approval, before the calls started."""

    approvals: dict[_CallAt, Approval] = field(default_factory=dict)
    reply_seqs: set[int] = field(default_factory=set)
    """Seqs of the replies that calls waited for and received."""


@dataclass(slots=True)
class Recorded:
    """Everything that a run has recorded so far. Read-only. Turns are numbered from 1, and the calls of a turn from 0.
    ``children`` contains the runs inside this run, by path.
    """

    started: Started | None = None
    replies: dict[int, ModelReply] = field(default_factory=dict)
    last_turns: set[int] = field(default_factory=set)
    failures: dict[int, ModelFailed] = field(default_factory=dict)
    prompts: dict[int, KeptPrompt] = field(default_factory=dict)
    """Exact prompts, if the policy stores them."""

    begun_calls: set[_CallAt] = field(default_factory=set)
    once_calls: set[_CallAt] = field(default_factory=set)
    """Calls whose tool was ``once`` when they started."""

    results: dict[_CallAt, ToolResult] = field(default_factory=dict)
    used: dict[_CallAt, tuple[ModelUse, ...]] = field(default_factory=dict)
    """Model usage of calls, without the usage of agents called as tools."""

    thinking: dict[int, str] = field(default_factory=dict)
    progress: dict[_CallAt, tuple[str, ...]] = field(default_factory=dict)

    waiting: RecordedWaits = field(default_factory=RecordedWaits)
    new_messages: dict[int, NewMessages] = field(default_factory=dict)
    reviews: dict[int, Reviewed] = field(default_factory=dict)
    """Reviews of answers, by turn."""

    sent_reviews: dict[tuple[int, int, int], Reviewed] = field(default_factory=dict)
    """Reviews of messages that tools sent, by turn, call and the number of the message in the call, from 1."""

    notes: dict[int, dict[str, JsonValue]] = field(default_factory=dict)
    """Values that middleware stored in a turn, by name."""

    altered: dict[int, Altered] = field(default_factory=dict)
    stopped: StopTrace | None = None
    """Trace of a person's stop. A resumed reaction only has to report this stop."""

    finished: Finish | None = None
    children: Mapping[str, Recorded] = field(default_factory=dict)

    def read_meanwhile(self) -> list[int]:
        """Return the seqs of the messages that were read while the run was active."""
        return [seq for new in self.new_messages.values() for seq in new.seqs]

    def open_askings(self) -> list[Mapping[str, str]]:
        """Return questions that may have been sent although no wait for them is recorded: message ids by recipient."""
        runs = (self, *self.children.values())
        return [
            messages
            for run in runs
            for place, messages in run.waiting.questions.items()
            if place not in {*run.waiting.waits, *run.results}
        ]

    def open_waits(self) -> list[Wait]:
        """Return the open waits of this run and of the runs inside it."""
        runs = (self, *self.children.values())
        waits = [wait for run in runs for place, wait in run.waiting.waits.items() if place not in run.results]
        undecided = (
            wait
            for run in runs
            for place, wait in run.waiting.approval_waits.items()
            if place not in {*run.waiting.approvals, *run.results}
        )
        return [*waits, *undecided]

    def has_taken(self, seq: int) -> bool:
        """Return whether a message was the reply that a call of this run, or of a run inside it, waited for."""
        return any(seq in run.waiting.reply_seqs for run in (self, *self.children.values()))

    def was_waiting_for(self, question: int) -> bool:
        """Return whether the run ended while it waited for the reply to a message."""
        return any(question in wait.questions.values() for wait in self.open_waits())

    def replay(self, turn: int) -> Replayed | ModelFailed | None:
        """Return the records of a turn, or None if the turn has no records."""
        if turn not in self.replies:
            return self.failures.get(turn)
        return Replayed(
            self.replies[turn],
            {call: result for (other, call), result in self.results.items() if other == turn},
            frozenset(call for other, call in self.begun_calls if other == turn),
            frozenset(call for other, call in self.once_calls if other == turn),
            is_last=turn in self.last_turns,
            # A record of the next turn proves that this turn did not end the run, even if the limits have changed.
            goes_on=turn + 1 in self.replies or turn + 1 in self.failures,
            is_corrected=turn in self.reviews and self.reviews[turn].correction is not None,
            altered=self.altered.get(turn, Altered()),
        )

    def add(self, kind: str, body: Mapping[str, Any]) -> None:
        """Add a record of this run. Ignore records of unknown kinds, which a newer version wrote. Raises `ValueError`
        if the body does not fit the kind of the record.
        """
        reader = RECORD_TYPES.get(kind)
        if reader is None:
            return
        value, place = reader.validate_python(body), _PLACE.validate_python(body)
        if kind not in ("started", "finished") and (
            "turn" not in body or (kind in _KINDS_OF_CALLS and "call" not in body)
        ):
            raise ValueError(f"a record of kind {kind} does not state its turn or call")
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
                # Mark the failure as recorded, so that the loop ends with this failure and does not shorten the prompt
                # to ask the model again.
                self.failures[turn] = replace(value, is_recorded=True)
            case _Asking():
                self.waiting.questions[at] = value.messages
            case Wait():
                (self.waiting.approval_waits if value.is_approval else self.waiting.waits)[at] = value
            case Approval():
                self.waiting.approvals[at] = value
            case _ToolStarted():
                self.begun_calls.add(at)
                if value.once:
                    self.once_calls.add(at)
            case ToolResult():
                self.results[at] = value
                self.waiting.reply_seqs.update(place.replies)
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
            # Match this case before the general one: the review of a message is not the review of the turn's answer.
            case Reviewed() if place.send:
                self.sent_reviews[(*at, place.send)] = value
            case Reviewed():
                self.reviews[turn] = value
            case Finish():
                self.finished = value


async def fetch_records(call: Call, reaction: str, agent_id: str | None) -> list[Mapping[str, Any]]:
    """Return all records of an agent's reaction that the caller may see, oldest first. If ``agent_id`` is None, include
    the records of all agents with this reaction id, because programs may choose the same reaction id.
    """
    args = {"reaction": reaction, **({"agent_id": agent_id} if agent_id is not None else {})}
    return [record async for page in read_pages(call, "network.records", args) for record in page["records"]]


async def fetch_fates(call: Call, seq: int) -> list[Mapping[str, Any]]:
    """Return the state of a message for each of its recipients, in the form of ``network.message_status``."""
    pages = read_pages(call, "network.message_status", {"seq": seq})
    return [recipient async for page in pages for recipient in page["recipients"]]


def read_records(records: Iterable[Mapping[str, Any]]) -> Recorded:
    """Build the state of a reaction from its records, which have the form of ``network.records``. Raises `ValueError`
    if a body does not fit the kind of its record.
    """
    runs: dict[str, Recorded] = {"": Recorded()}
    for record in records:
        body = record["body"]
        path = body.get("path", "") if isinstance(body, Mapping) else ""
        if not isinstance(path, str):
            raise ValueError("a record's path is not text")
        runs.setdefault(path, Recorded()).add(record["kind"], body)
    inner = {path: run for path, run in runs.items() if path}
    for run in runs.values():
        run.children = inner  # all runs share one mapping with runs of all depths, because its keys are full paths
    return runs[""]
