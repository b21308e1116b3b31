"""What happens in a reaction, as typed events: the same objects for the terminal, traces and tests.

The loop makes them (`driver`, and `watching` of agents elsewhere) and hands them to a callback, in order; they
are frozen and go to plain JSON (`event_to_json`). No IO, no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Literal

from .models.model import ToolCall, Usage
from .values import Status


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a reaction. ``path`` is empty but for an agent that runs as a tool of another one:
    then it names the call (``turn.call``, one after the other for deeper ones)."""

    type: ClassVar[str]
    """What the event is called in JSON."""

    reaction: str
    path: str = field(default="", kw_only=True)


OnEvent = Callable[[Event], None]
"""Takes each event as it happens; it must return at once, the reaction waits for it."""


def event_to_json(event: Event) -> dict[str, object]:
    """Give the event as plain JSON values; ``type`` names it."""
    return {"type": event.type, **asdict(event)}


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """A reaction goes on that was begun earlier; ``turns`` are replayed from its records, without events of their
    own."""

    type = "resumed"
    turns: int
    config_changed: bool
    prompt_changed: bool = False


@dataclass(frozen=True, slots=True)
class TurnEvent(Event):
    """Something that happened in a turn."""

    turn: int


@dataclass(frozen=True, slots=True)
class TurnStart(TurnEvent):
    """The model is about to be asked."""

    type = "turn_start"
    max_turns: int


@dataclass(frozen=True, slots=True)
class ModelOutput(TurnEvent):
    """A piece of the reply, while it streams. ``index`` counts the pieces of a reaction, those of agents inside of it
    included. ``is_held``: somebody reviews the answer before it goes out, so that it is not for people's eyes yet."""

    type = "model_delta"
    text: str
    reasoning: str
    index: int = 0
    is_held: bool = False


@dataclass(frozen=True, slots=True)
class ModelRetry(TurnEvent):
    """An attempt of the model call failed in a way that may pass; the next one comes after ``delay_s``."""

    type = "model_retry"
    error: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class ToolRequests(TurnEvent):
    """The model replied with these calls, beside ``text``."""

    type = "tool_requests"
    text: str | None
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class CallEvent(TurnEvent):
    """Something that happened in a call of ``tool``. ``call`` is its place in its turn."""

    call: int
    tool: str


@dataclass(frozen=True, slots=True)
class ToolCallStart(CallEvent):
    """A tool is run."""

    type = "tool_call_start"
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolOutput(CallEvent):
    """A piece of a call's result, while it streams; ``index`` and ``is_held`` as in `ModelOutput`: the result of some
    tools is the answer."""

    type = "tool_delta"
    text: str
    index: int = 0
    is_held: bool = False


@dataclass(frozen=True, slots=True)
class ToolCallEnd(CallEvent):
    """A call has its answer; one that was not run had no start."""

    type = "tool_call_end"
    ok: bool
    content: str
    duration_s: float = 0.0
    """From its start to its end, waiting included; 0 for one that was not run."""


@dataclass(frozen=True, slots=True)
class Waiting(CallEvent):
    """A call waits for replies of these agents, or for a person's approval, until a time in milliseconds since the Unix
    epoch."""

    type = "waiting"
    agent_ids: tuple[str, ...]
    until: int
    is_approval: bool = False


@dataclass(frozen=True, slots=True)
class Progress(TurnEvent):
    """What the work is at, for people. A step ends with the next one of its call, or with ``is_done``, which comes
    before the call's end at the latest; ``call`` is None outside of calls."""

    type = "progress"
    text: str
    call: int | None = None
    is_done: bool = False
    index: int = 0


PieceKind = Literal["text", "reasoning", "tool", "progress"]


@dataclass(frozen=True, slots=True)
class RemoteOutput(TurnEvent):
    """A piece of what an agent elsewhere streams while a call waits for its answer and a person watches. ``path`` is
    where it would run inside of the call, ``turn``, ``call`` and ``tool`` its own; ``at`` is where in its stream the
    text begins: pieces may be lost."""

    type = "remote_delta"
    agent_id: str
    kind: PieceKind
    at: int
    text: str
    call: int | None = None
    tool: str = ""
    is_done: bool = False
    index: int = 0
    is_held: bool = False


@dataclass(frozen=True, slots=True)
class RemoteCall(CallEvent):
    """An agent elsewhere, as in `RemoteOutput`, begins a call, or is done with it; ``asked`` are those whose answer
    that call waits for."""

    type = "remote_tool"
    agent_id: str
    is_active: bool
    ok: bool = False
    asked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnEnd(TurnEvent):
    """Model call and tool calls of the turn are done. ``text`` is the model's own, ``usage`` that of the reaction so
    far."""

    type = "turn_end"
    text: str | None
    usage: Usage


@dataclass(frozen=True, slots=True)
class AnswerReviewed(TurnEvent):
    """The reviewers have seen an answer, or the message of a ``call`` to who asked; ``correction`` is what the model is
    told when it has to write another."""

    type = "review"
    is_accepted: bool
    correction: str | None
    notes: tuple[str, ...] = ()
    is_blocked: bool = False
    call: int | None = None


@dataclass(frozen=True, slots=True)
class HandedOver(TurnEvent):
    """Another agent goes on with the conversation, from this turn on."""

    type = "handoff"
    agent_id: str
    from_agent_id: str


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """The reaction has ended; ``answer`` is the text that goes to the incoming thread."""

    type = "finished"
    status: Status
    reason: str
    answer: str | None
    turns: int
    usage: Usage
    tool_calls: int = 0
