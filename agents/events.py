"""What happens in a reaction, as typed events: the same objects for the terminal, traces and tests.

`driver` and its parts make them and hand them to a callback, in order; they are frozen and go to plain JSON
(`event_to_json`). ``path`` is empty but for an agent that runs as a tool of another one: then it names the call
(``turn.call``, one after the other for deeper ones). No IO, no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from .models.model import ToolCall, Usage

if TYPE_CHECKING:
    from .steps import Status


@dataclass(frozen=True, slots=True)
class Resumed:
    """A reaction goes on that was begun earlier; ``turns`` are replayed from its records, without events of their
    own."""

    reaction: str
    turns: int
    config_changed: bool
    prompt_changed: bool = False
    path: str = ""


@dataclass(frozen=True, slots=True)
class TurnStart:
    """The model is about to be asked."""

    reaction: str
    turn: int
    max_turns: int
    path: str = ""


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """A piece of the reply, while it streams. ``index`` counts the pieces of a reaction, those of agents inside of it
    included. ``is_held``: somebody reviews the answer before it goes out, so that it is not for people's eyes yet."""

    reaction: str
    turn: int
    text: str
    reasoning: str
    path: str = ""
    index: int = 0
    is_held: bool = False


@dataclass(frozen=True, slots=True)
class ModelRetry:
    """An attempt of the model call failed in a way that may pass; the next one comes after ``delay_s``."""

    reaction: str
    turn: int
    error: str
    delay_s: float
    path: str = ""


@dataclass(frozen=True, slots=True)
class ToolRequests:
    """The model replied with these calls, beside ``text``."""

    reaction: str
    turn: int
    text: str | None
    calls: tuple[ToolCall, ...]
    path: str = ""


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool is run. ``call`` is the call's place in its turn."""

    reaction: str
    turn: int
    call: int
    tool: str
    arguments: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """A piece of a call's result, while it streams; ``index`` and ``is_held`` as in `ModelOutput`: the result of some
    tools is the answer."""

    reaction: str
    turn: int
    call: int
    tool: str
    text: str
    path: str = ""
    index: int = 0
    is_held: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """What the work is at, for people. A step ends with the next one of its call, or with ``is_done``, which comes
    before the call's end at the latest; ``call`` is None outside of calls."""

    reaction: str
    turn: int
    text: str
    call: int | None = None
    is_done: bool = False
    path: str = ""
    index: int = 0


PieceKind = Literal["text", "reasoning", "tool", "progress"]


@dataclass(frozen=True, slots=True)
class RemoteOutput:
    """A piece of what an agent elsewhere streams while a call waits for its answer and a person watches. ``path`` is
    where it would run inside of the call, ``turn``, ``call`` and ``tool`` its own; ``at`` is where in its stream the
    text begins: pieces may be lost."""

    reaction: str
    turn: int
    agent_id: str
    kind: PieceKind
    at: int
    text: str
    call: int | None = None
    tool: str = ""
    is_done: bool = False
    path: str = ""
    index: int = 0
    is_held: bool = False


@dataclass(frozen=True, slots=True)
class RemoteCall:
    """An agent elsewhere, as in `RemoteOutput`, begins a call, or is done with it; ``asked`` are those whose answer
    that call waits for."""

    reaction: str
    turn: int
    call: int
    agent_id: str
    tool: str
    is_active: bool
    ok: bool = False
    asked: tuple[str, ...] = ()
    path: str = ""


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A call has its answer; one that was not run had no start."""

    reaction: str
    turn: int
    call: int
    tool: str
    ok: bool
    content: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """Model call and tool calls of the turn are done. ``text`` is the model's own, ``usage`` that of the reaction so
    far."""

    reaction: str
    turn: int
    text: str | None
    usage: Usage
    path: str = ""


@dataclass(frozen=True, slots=True)
class AnswerReviewed:
    """The reviewers have seen an answer; ``correction`` is what the model is told when it has to write another."""

    reaction: str
    turn: int
    is_accepted: bool
    correction: str | None
    notes: tuple[str, ...] = ()
    path: str = ""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A call waits for replies of these agents, or for a person's approval, until a time in milliseconds since the Unix
    epoch."""

    reaction: str
    turn: int
    call: int
    agent_ids: tuple[str, ...]
    until: int
    is_approval: bool = False
    path: str = ""
    tool: str = ""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Another agent goes on with the conversation, from this turn on."""

    reaction: str
    turn: int
    agent_id: str
    from_agent_id: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """The reaction has ended; ``answer`` is the text that goes to the incoming thread."""

    reaction: str
    status: Status
    reason: str
    answer: str | None
    turns: int
    usage: Usage
    tool_calls: int = 0
    path: str = ""


Event = (
    Resumed | TurnStart | ModelOutput | ModelRetry | ToolRequests | ToolCallStart | ToolOutput | Progress | RemoteOutput | RemoteCall
    | ToolCallEnd | Waiting | AnswerReviewed | TurnEnd | HandedOver | Finished
)  # fmt: skip

OnEvent = Callable[[Event], None]
"""Takes each event as it happens; it must return at once, the reaction waits for it."""

_TYPES: dict[type[Event], str] = {
    Resumed: "resumed",
    TurnStart: "turn_start",
    ModelOutput: "model_delta",
    ModelRetry: "model_retry",
    ToolRequests: "tool_requests",
    ToolCallStart: "tool_call_start",
    ToolOutput: "tool_delta",
    Progress: "progress",
    RemoteOutput: "remote_delta",
    RemoteCall: "remote_tool",
    ToolCallEnd: "tool_call_end",
    AnswerReviewed: "review",
    TurnEnd: "turn_end",
    Waiting: "waiting",
    HandedOver: "handoff",
    Finished: "finished",
}


def event_to_json(event: Event) -> dict[str, object]:
    """Give the event as plain JSON values; ``type`` names it."""
    return {"type": _TYPES[type(event)], **asdict(event)}
