"""Typed events of a reaction: the same objects for the terminal, traces and tests.

`driver` and its helper modules create most events. `live_activity` creates the events of remote agents. A callback
receives the events in order. Events are immutable, and `event_to_json` converts them to plain JSON. This module has no
IO and reads no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Literal

from .models.model import ToolCall, Usage
from .values import Status


@dataclass(frozen=True, slots=True)
class Event:
    """Event of a reaction. If the event belongs to an agent that is called as a tool, ``path`` lists the calls around
    that agent (``turn.call``, outermost first). For the reaction's own agent, ``path`` is empty.
    """

    type: ClassVar[str]
    """Name of the event in JSON."""

    reaction: str
    path: str = field(default="", kw_only=True)


OnEvent = Callable[[Event], None]
"""Callback for events, called when each event happens. The callback must return quickly, because the reaction waits for
it.
"""


def event_to_json(event: Event) -> dict[str, object]:
    """Return the event as plain JSON values, with its name in ``type``."""
    return {"type": event.type, **asdict(event)}


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """Event: a reaction continues after a restart. ``turns`` is the number of turns that were read from records."""

    type = "resumed"
    turns: int
    config_changed: bool
    prompt_changed: bool = False


@dataclass(frozen=True, slots=True)
class TurnEvent(Event):
    """Event that belongs to a turn."""

    turn: int


@dataclass(frozen=True, slots=True)
class TurnStart(TurnEvent):
    """Event: the model is about to be called."""

    type = "turn_start"
    max_turns: int


@dataclass(frozen=True, slots=True)
class ModelOutput(TurnEvent):
    """Event: a part of a reply has arrived from the model. ``index`` counts the parts of a reaction, including the
    parts from agents called as tools. ``is_held`` is true if a reviewer must read the answer before people do.
    """

    type = "model_delta"
    text: str
    reasoning: str
    index: int = 0
    is_held: bool = False


@dataclass(frozen=True, slots=True)
class ModelRetry(TurnEvent):
    """Event: an attempt of the model call failed with a temporary error. The next attempt starts after ``delay_s``
    seconds.
    """

    type = "model_retry"
    error: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class ToolRequests(TurnEvent):
    """Event: the model replied with tool calls. ``text`` is the text in the same reply."""

    type = "tool_requests"
    text: str | None
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class CallEvent(TurnEvent):
    """Event that belongs to a call of ``tool``. ``call`` is the position of the call in its turn."""

    call: int
    tool: str


@dataclass(frozen=True, slots=True)
class ToolCallStart(CallEvent):
    """Event: a tool starts."""

    type = "tool_call_start"
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolOutput(CallEvent):
    """Event: a part of a call's result has arrived while the tool still runs. ``index`` and ``is_held`` have the same
    meaning as in `ModelOutput`, because the result of some tools is the answer.
    """

    type = "tool_delta"
    text: str
    index: int = 0
    is_held: bool = False


@dataclass(frozen=True, slots=True)
class ToolCallEnd(CallEvent):
    """Event: a call has its result. A call that was refused has no start event."""

    type = "tool_call_end"
    ok: bool
    content: str
    duration_s: float = 0.0
    """Seconds from start to end, including waits. 0 for a call that did not run."""


@dataclass(frozen=True, slots=True)
class Waiting(CallEvent):
    """Event: a call waits for replies of these agents, or for a person's approval. The deadline is in milliseconds
    since the Unix epoch.
    """

    type = "waiting"
    agent_ids: tuple[str, ...]
    until: int
    is_approval: bool = False


@dataclass(frozen=True, slots=True)
class Progress(TurnEvent):
    """Event: the current step of the work, shown to people. A step ends when the same call starts its next step, or
    with ``is_done``, which is sent before the call ends. ``call`` is None outside of calls.
    """

    type = "progress"
    text: str
    call: int | None = None
    is_done: bool = False
    index: int = 0


PieceKind = Literal["text", "reasoning", "tool", "progress"]


@dataclass(frozen=True, slots=True)
class RemoteOutput(TurnEvent):
    """Event: a part of a remote agent's stream has arrived while a call waits for that agent's answer and a person
    watches. ``path`` is the path that the remote agent would have if it were called as a tool in this process.
    ``turn``, ``call`` and ``tool`` belong to the remote agent. ``at`` is the offset of the text in the remote stream,
    because parts may be lost.
    """

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
    """Event: a remote agent (see `RemoteOutput`) starts or ends a call. ``asked`` names the agents whose answers this
    call waits for.
    """

    type = "remote_tool"
    agent_id: str
    is_active: bool
    ok: bool = False
    asked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnEnd(TurnEvent):
    """Event: the model call and the tool calls of the turn have ended. ``text`` is the model's text in this turn.
    ``usage`` is the usage of the reaction so far.
    """

    type = "turn_end"
    text: str | None
    usage: Usage


@dataclass(frozen=True, slots=True)
class AnswerReviewed(TurnEvent):
    """Event: the reviewers have checked an answer, or a message that a ``call`` sends to the requester. If the model
    must write another answer, ``correction`` is the instruction to the model.
    """

    type = "review"
    is_accepted: bool
    correction: str | None
    notes: tuple[str, ...] = ()
    is_blocked: bool = False
    call: int | None = None


@dataclass(frozen=True, slots=True)
class HandedOver(TurnEvent):
    """Event: another agent continues the conversation from this turn on."""

    type = "handoff"
    agent_id: str
    from_agent_id: str


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """Event: the reaction has ended. ``answer`` is the text sent to the thread of the trigger."""

    type = "finished"
    status: Status
    reason: str
    answer: str | None
    turns: int
    usage: Usage
    tool_calls: int = 0
