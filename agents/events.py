"""Typed events of a reaction: the same objects for the terminal, traces and tests.

`driver` and its parts create them, `live_activity` those of agents elsewhere. A callback gets them in order. Events are
frozen and convert to plain JSON (`event_to_json`). No IO, no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Literal

from .models.model import ToolCall, Usage
from .values import Status


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a reaction. ``path`` is empty, except for an agent inside a tool call: it names the
    calls around it (``turn.call``, the outermost first)."""

    type: ClassVar[str]
    """Name of the event in JSON."""

    reaction: str
    path: str = field(default="", kw_only=True)


OnEvent = Callable[[Event], None]
"""Handles each event as it happens. It must return at once, because the reaction waits for it."""


def event_to_json(event: Event) -> dict[str, object]:
    """Return the event as plain JSON values; ``type`` names it."""
    return {"type": event.type, **asdict(event)}


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """A reaction from before a restart continues. ``turns`` of it are read from its records."""

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
    """A piece of the reply while it streams. ``index`` counts the pieces of a reaction, with those of agents inside it.
    ``is_held``: a reviewer has to see the answer before people do."""

    type = "model_delta"
    text: str
    reasoning: str
    index: int = 0
    is_held: bool = False


@dataclass(frozen=True, slots=True)
class ModelRetry(TurnEvent):
    """An attempt of the model call failed in a way that may pass. The next one starts after ``delay_s``."""

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
    """A tool starts."""

    type = "tool_call_start"
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolOutput(CallEvent):
    """A piece of a call's result while it streams. ``index`` and ``is_held`` are as in `ModelOutput`: the result of
    some tools is the answer."""

    type = "tool_delta"
    text: str
    index: int = 0
    is_held: bool = False


@dataclass(frozen=True, slots=True)
class ToolCallEnd(CallEvent):
    """A call has its result. A call that did not run had no start."""

    type = "tool_call_end"
    ok: bool
    content: str
    duration_s: float = 0.0
    """Seconds from start to end, waiting included; 0 for a call that did not run."""


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
    """The current step of the work, for people. A step ends with the next step of its call, or with ``is_done``, which
    comes before the end of the call. ``call`` is None outside calls."""

    type = "progress"
    text: str
    call: int | None = None
    is_done: bool = False
    index: int = 0


PieceKind = Literal["text", "reasoning", "tool", "progress"]


@dataclass(frozen=True, slots=True)
class RemoteOutput(TurnEvent):
    """A piece of an agent's stream elsewhere, while a call waits for its answer and a person watches. ``path`` is where
    it would run inside the call; ``turn``, ``call`` and ``tool`` are its own. ``at`` is where in its stream the text
    begins: pieces may be lost."""

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
    """An agent elsewhere, as in `RemoteOutput`, starts or ends a call. ``asked`` are the agents whose answers that call
    waits for."""

    type = "remote_tool"
    agent_id: str
    is_active: bool
    ok: bool = False
    asked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnEnd(TurnEvent):
    """Model call and tool calls of the turn have ended. ``text`` is the model's own, ``usage`` that of the reaction so
    far."""

    type = "turn_end"
    text: str | None
    usage: Usage


@dataclass(frozen=True, slots=True)
class AnswerReviewed(TurnEvent):
    """The reviewers have seen an answer, or the message of a ``call`` to the requester. ``correction``: what the model
    is told if it has to write another one."""

    type = "review"
    is_accepted: bool
    correction: str | None
    notes: tuple[str, ...] = ()
    is_blocked: bool = False
    call: int | None = None


@dataclass(frozen=True, slots=True)
class HandedOver(TurnEvent):
    """Another agent has the conversation from this turn on."""

    type = "handoff"
    agent_id: str
    from_agent_id: str


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """The reaction has ended. ``answer`` is the text that goes to the incoming thread."""

    type = "finished"
    status: Status
    reason: str
    answer: str | None
    turns: int
    usage: Usage
    tool_calls: int = 0
