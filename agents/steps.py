"""What a reaction asks for next (steps) and what came of it (outcomes): the words that `reaction` and `driver` share.
Plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Literal

from pydantic import JsonValue

from roundelay.network.errors import RoundelayError

from .history import add_to_prompt, say
from .models.model import (
    ChatMessage,
    Model,
    ModelFailure,
    ModelReply,
    NamedTool,
    SystemMessage,
    ToolCall,
    ToolChoice,
    ToolSpec,
    Usage,
)
from .tools import Tool, ToolResult

if TYPE_CHECKING:
    from .agent import Agent

Status = Literal["finished", "stopped", "cancelled", "failed"]
"""How a reaction ended: by the model, at a limit, by a person, or by an error."""


@dataclass(frozen=True, slots=True)
class Trigger:
    """What a run is to react to: the incoming message or, of an agent inside of a call, what the caller gave it to do.

    ``seq`` is that of the incoming message in both cases; ``sender_id`` is whoever wrote it, or the caller.
    """

    seq: int
    sender_id: str
    sender_kind: str
    text: str
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TurnState:
    """What a reaction knows at a turn: for instructions and hooks. ``path`` is empty but for an agent that another one
    calls as a tool.

    ``calls`` counts the tool calls that were run so far, by the tool's name. ``values`` is for the hooks: one
    dictionary for the whole reaction, made anew when that is resumed. ``history`` is the run's own, system message and
    prompt first: to be read only. ``sent_at`` is the time of the incoming message, in milliseconds since the Unix
    epoch: the only one that a resumed reaction finds again. ``trigger`` is what is reacted to; None outside of a run.
    """

    agent_id: str
    turn: int
    max_turns: int
    path: str = ""
    usage: Usage = field(default_factory=Usage)
    calls: Mapping[str, int] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)
    history: Sequence[ChatMessage] = ()
    sent_at: int = 0
    trigger: Trigger | None = None
    own_turn: int = 1
    """The turn, counted from where this agent came to have the conversation."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """What a source of tools, a server for example, has to say in the prompt: ``system`` in the system message, ``user``
    after the conversation. The names of its ``tools`` begin with ``name``."""

    name: str
    tools: tuple[str, ...] = ()
    system: str = ""
    user: str = ""

    @property
    def headed(self) -> str:
        """What it says in the system message, below what that is about; empty if nothing."""
        return f"About the tools {self.name}_*:\n{self.system}" if self.system else ""


@dataclass(frozen=True, slots=True)
class CallModel:
    """Ask a model for ``agent``: its own, or ``model``. The last message holds the facts of the turn and is not kept.

    ``is_last``: no turn follows. ``tool_choice`` may name the tool that has to be called. ``parts`` are still to be
    placed: middleware that puts one into the messages takes it out.
    """

    turn: int
    agent: Agent
    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...]
    state: TurnState
    is_last: bool = False
    model: Model | None = None
    tool_choice: ToolChoice | NamedTool = "auto"
    parts: tuple[PromptPart, ...] = ()

    def tell(self, text: str) -> CallModel:
        """Give it with a text at its very end, which is not kept."""
        messages = list(self.messages)
        say(messages, text)
        return replace(self, messages=tuple(messages))

    def instruct(self, text: str) -> CallModel:
        """Give it with a text at the end of the system message."""
        match self.messages:
            case (SystemMessage(content), *others):
                return replace(self, messages=(SystemMessage(f"{content}\n\n{text}"), *others))
            case _:  # a hook left that out
                return self

    def add_to_prompt(self, text: str) -> CallModel:
        """Give it with a text behind the conversation, where it stands in every turn."""
        return replace(self, messages=add_to_prompt(self.messages, self.state.history, text))

    def place_parts(self) -> CallModel:
        """Give it with the parts where they stand unless a template has another place for them."""
        step = replace(self, parts=())
        if system := [it.headed for it in self.parts if it.system]:
            step = step.instruct("\n\n".join(system))
        if user := [it.user for it in self.parts if it.user]:
            step = step.add_to_prompt("\n\n".join(user))
        return step


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A call to run, its arguments validated. ``index`` is its place among the calls of its turn."""

    index: int
    call: ToolCall
    tool: Tool
    arguments: dict[str, object]


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A call that is not run, with what the model is told."""

    index: int
    call: ToolCall
    result: ToolResult


@dataclass(frozen=True, slots=True)
class CallTools:
    """Run the planned calls, in parallel, and give `ToolsDone`; both may be empty (the model only finished).

    ``text`` and ``calls`` are what the model replied, the calls under the ids of the history.
    """

    turn: int
    planned: tuple[PlannedCall, ...]
    answered: tuple[AnsweredCall, ...]
    text: str | None = None
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """The reaction has ended. ``answer`` is the text to send to the incoming thread, None when there is nothing to
    send.

    ``reason`` is for records and logs and may hold a provider's own words; ``answer`` never does. ``keeper``: the agent
    that the thread stays with; ``read_meanwhile`` the messages that arrived while it ran and were read in it.
    """

    status: Status
    reason: str
    answer: str | None
    turns: int
    usage: Usage
    tool_calls: int = 0
    keeper: str | None = None
    read_meanwhile: tuple[int, ...] = ()
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    """Of the answer's message."""


@dataclass(frozen=True, slots=True)
class Review:
    """Look at the answer before it is given: `Reviewed` says what becomes of it. ``can_correct``: the model can be
    asked once more."""

    turn: int
    proposed: Finish
    answer: str
    state: TurnState
    can_correct: bool


Step = CallModel | CallTools | Review | Finish


@dataclass(frozen=True, slots=True)
class Begin:
    """The first thing that a reaction is given."""


ALTERED = "altered"
"""In a record, or in the data of a result: it was not kept as it was."""


@dataclass(frozen=True, slots=True)
class Altered:
    """What of a recorded reply is not as the model wrote it: its text; the arguments of these calls."""

    text: bool = False
    calls: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Replayed:
    """A reply that was recorded, with what the records hold of its turn; they are trusted, whatever the configuration
    is now.

    ``begun`` are the calls that were begun, with a result or without, ``once`` those of them that must not be made
    again; ``is_last`` that the turn had no tools,
    ``goes_on`` that another one followed, ``is_corrected`` that it did because of a review; ``altered`` what of the
    reply was not kept as it was.
    """

    reply: ModelReply
    results: Mapping[int, ToolResult] = field(default_factory=dict)
    begun: frozenset[int] = frozenset()
    once: frozenset[int] = frozenset()
    is_last: bool = False
    goes_on: bool = False
    is_corrected: bool = False
    altered: Altered = field(default_factory=Altered)


@dataclass(frozen=True, slots=True)
class NewMessages:
    """Messages that arrived in the thread while it waits to ask its model, as the text in which that reads them.

    ``answers``: somebody who wrote one waits for an answer.
    """

    text: str
    seqs: tuple[int, ...]
    answers: bool


@dataclass(frozen=True, slots=True)
class ModelFailed:
    """The model gave no reply. ``reason`` is a sentence for the record; ``is_recorded`` that it was the end once and is
    so again."""

    reason: str
    kind: ModelFailure = "server"
    is_recorded: bool = False


@dataclass(frozen=True, slots=True)
class ToolsDone:
    """A result for each planned call, by its index."""

    results: Mapping[int, ToolResult]


@dataclass(frozen=True, slots=True)
class Reviewed:
    """What the reviewers made of an answer: the one to give, or a correction for the model to write another. ``usage``
    is their own.

    ``is_accepted``: nothing was found wrong; without it, and without a correction, the answer is given for want of a
    better one.
    """

    answer: str
    correction: str | None = None
    usage: Usage = field(default_factory=Usage)
    notes: tuple[str, ...] = ()
    is_accepted: bool = False
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    is_altered: bool = False
    """The record does not hold the answer, or its metadata, as it was."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Somebody stopped the reaction, before it began or while a step was under way."""

    reason: str


Outcome = Begin | NewMessages | ModelReply | Replayed | ModelFailed | ToolsDone | Reviewed | Cancel


class State(Enum):
    """What a reaction waits for."""

    NEW = "new"
    ASKING = "waiting for its model"
    CALLING = "waiting for its tools"
    REVIEWING = "waiting for its reviewers"
    FINISHED = "finished"


class IllegalStep(RoundelayError):
    """A reaction was given an outcome that it does not wait for: a fault of its driver."""

    def __init__(self, state: State, outcome: Outcome) -> None:
        super().__init__(f"A reaction that is {state.value} cannot take {type(outcome).__name__}.")
        self.state = state
        self.outcome = outcome


DISABLED = "disabled"
"""In a result's data: the tool may not be used here and now."""

NOT_RUN = "not_run"
"""In a result's data: the call was planned, and then not begun."""

TOO_LARGE = "too_large"
"""The ``finish_reason`` of the empty reply that stands for one too large to be recorded."""
