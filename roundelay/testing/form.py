"""Strict data models for the format of a scenario: participants, steps (`Step`) and expectations (`Expectation`).

docs/scenarios.md shows every key. This module contains only data. `file` reads the models from YAML, `steps` performs
the steps, and `judge` evaluates the expectations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from jinja2 import StrictUndefined, TemplateError
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    model_validator,
)

from roundelay.agents.bounded_templates import BoundedEnvironment
from roundelay.agents.inbox import ReactTo, Visibility
from roundelay.agents.models.scripted import Pattern, ScriptRule
from roundelay.agents.options import Strict, Text
from roundelay.agents.policy import AgentLimits, OnNewMessage, OnText
from roundelay.agents.team import ModelChoice

ENVIRONMENT = BoundedEnvironment(undefined=StrictUndefined, autoescape=False)
"""Jinja environment for a scenario's texts and expressions."""

MAX_SECONDS = 366 * 86_400
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?")
_UNITS_S = {"ms": 0.001, "s": 1.0, None: 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def read_duration(value: object) -> object:
    """Convert a number, or a text like ``5m``, to seconds. Return any other value unchanged."""
    seconds = value
    if isinstance(value, str):
        match = _DURATION.fullmatch(value.strip())
        if match is None:
            raise ValueError(f'must be a time like "500ms", "60s" or "5m", not "{value}"')
        seconds = float(match[1]) * _UNITS_S[match[2]]
    # Exclude Booleans: True is an integer in Python, so YAML's `yes` would become one second.
    elif isinstance(value, int) and not isinstance(value, bool):
        seconds = float(value)
    if isinstance(seconds, int | float) and not 0 <= seconds <= MAX_SECONDS:
        raise ValueError(f"must be a time from 0 to {MAX_SECONDS // 86_400} days, not {value}")
    return seconds


Seconds = Annotated[float, BeforeValidator(read_duration), Field(ge=0, le=MAX_SECONDS)]
Id = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Count = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


def _which_form(value: object) -> str:
    return "short" if isinstance(value, str | int | float) else "long"


Short = TypeVar("Short")
Long = TypeVar("Long")
Either = Annotated[Annotated[Short, Tag("short")] | Annotated[Long, Tag("long")], Discriminator(_which_form)]
"""Value in a short form (a text or a number) or in a long form. An error mentions only the form that was used."""

Agents = Either[Id, list[Id]]
"""One agent or several agents. An expectation with several agents applies to each of them."""

HUB = "hub"
"""Name of the hub in the steps `kill` and `restart`."""


def need_one(value: BaseModel, names: Iterable[str]) -> None:
    """Raise `ValueError` unless exactly one of these fields is set."""
    keys = [name for name in names if getattr(value, name) is not None]
    if len(keys) != 1:
        shown = ", ".join(type(value).model_fields[name].alias or name for name in names)
        raise ValueError(f"must have exactly one of {shown}" + (f", not {len(keys)}" if keys else ""))


class MessagePattern(Strict):
    """Filter for messages. A message must match all keys that are set.

    ``to`` and ``in`` accept a participant, a thread of the scenario, or an address.
    """

    sender: Text | None = Field(None, alias="from")
    to: Text | None = None
    place: Text | None = Field(None, alias="in")
    contains: str | None = None
    regex: Pattern | None = None


class Bound(Strict):
    """Range of allowed values for a count. `str` describes the range in words."""

    exactly: Count | None = None
    at_least: Count | None = None
    at_most: Count | None = None

    def holds(self, count: int) -> bool:
        return (
            self.exactly in (None, count)
            and (self.at_least is None or count >= self.at_least)
            and (self.at_most is None or count <= self.at_most)
        )

    def __str__(self) -> str:
        names = ((self.exactly, ""), (self.at_least, "at least "), (self.at_most, "at most "))
        return " and ".join(f"{name}{count}" for count, name in names if count is not None)


Counted = Either[Count, Bound]


class MessageExpectation(MessagePattern):
    """Expectation that messages exist. Without a count, one message is enough."""

    count: Counted | None = None


class CountExpectation(MessagePattern, Bound):
    of: Literal["messages", "reactions", "turns", "tool_calls"] = "messages"
    agent: Agents | None = None


class WithinExpectation(Strict):
    """Maximum time until the first matching message. The time starts at the first message that matches ``after``, or at
    the start of the run.
    """

    at_most: Seconds
    message: MessagePattern
    after: MessagePattern | None = None


class ThreadExpectation(Strict):
    id: Text
    members: list[Id]


class ToolExpectation(Strict):
    name: Text
    agent: Agents | None = None
    arguments: dict[str, JsonValue] | None = Field(None, alias="with")
    result: Text | None = None
    ok: bool | None = None
    count: Counted | None = None


class InPrompts(Strict):
    """Selection of prompts. ``when`` selects the prompts of reactions to matching messages."""

    agent: Agents | None = None
    when: MessagePattern | None = None


class PromptsExpectation(Strict):
    """Expectation about the texts in ``marks``. For each agent, ``hold`` lists the texts that the agent's prompts must
    contain. The prompts must not contain the other texts.

    ``when`` selects prompts as in `InPrompts`.
    """

    marks: list[Text] = Field(min_length=1)
    hold: dict[Id, list[Text]] = Field(min_length=1)
    when: MessagePattern | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for agent_id, marks in self.hold.items():
            for mark in marks:
                if mark not in self.marks:
                    raise ValueError(f'lets {agent_id} hold "{mark}", which is none of the marks')
        return self


class PromptExpectation(InPrompts):
    contains: Text


class NeverInPrompt(InPrompts):
    text: Text


class CausedBy(Strict):
    """Expectation about the root of every matching message. ``root`` is the root's sender, or a filter for the root
    message."""

    message: MessagePattern
    root: Either[Text, MessagePattern]


class CostExpectation(Strict):
    agent: Agents | None = None
    tokens: Bound | None = None
    model_calls: Bound | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tokens is None and self.model_calls is None:
            raise ValueError("must have tokens or model_calls")
        return self


class ReactionExpectation(Strict):
    agent: Agents
    status: Literal["finished", "stopped", "cancelled", "failed"] | None = None
    reason: Text | None = None
    count: Counted | None = None


class ModExpectation(Strict):
    """Expectation about the result of a read operation at the end of the run. ``as`` is the caller, by default an
    operator."""

    op: Text
    asker: Id | None = Field(None, alias="as")
    args: dict[str, JsonValue] = Field({})
    equals: JsonValue = None
    contains: JsonValue = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len({"equals", "contains"} & self.model_fields_set) != 1:
            raise ValueError("must have exactly one of equals, contains")
        return self


class StateExpectation(Strict):
    """Expectation about the state of the tools at the end of the run: the whole state, one value, or the changed paths.

    ``path`` names one value, such as ``orders.12.status``. ``changed`` lists all paths that changed, and no others.
    """

    path: Text | None = None
    equals: JsonValue = None
    contains: JsonValue = None
    changed: list[Text] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        keys = {"equals", "contains", "changed"} & self.model_fields_set
        if len(keys) != 1:
            raise ValueError("must have exactly one of equals, contains, changed")
        if self.path is not None and "changed" in keys:
            raise ValueError("has path and changed, but the paths in changed already begin at the state")
        return self


class Expectation(Strict):
    """One expectation. Exactly one key must be set."""

    message: MessageExpectation | None = None
    never: MessagePattern | None = None
    count: CountExpectation | None = None
    order: list[Text] | None = None
    within: WithinExpectation | None = None
    thread: ThreadExpectation | None = None
    tool: ToolExpectation | None = None
    prompt: PromptExpectation | None = None
    prompts: PromptsExpectation | None = None
    never_in_prompt: NeverInPrompt | None = None
    caused_by: CausedBy | None = None
    cost: CostExpectation | None = None
    hops: Bound | None = None
    reaction: ReactionExpectation | None = None
    mod: ModExpectation | None = None
    state: StateExpectation | None = None
    no_dead_letters: Literal[True] | None = None
    quiet: Either[Literal[True], MessagePattern] | None = None
    """Expectation that nothing is open in any conversation, or in the conversations of matching messages."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        need_one(self, type(self).model_fields)
        for hop in self.order or ():
            if not re.fullmatch(r"\S+ -> \S+(: .+)?", hop):
                raise ValueError(f'has "{hop}"; write "sender -> receiver", and ": text" behind it if that is meant')
        return self


# --- who takes part


class AgentChoice(Strict):
    """Definition of one agent: an agent `file`, a `script` of rules, or by default the agent in the scenario's node
    file.

    `model` replaces the model in the file. A `script` is a list of rules, the path of a file of rules, or
    ``module:function``.
    """

    SCRIPTED: ClassVar = (
        "instruction",
        "description",
        "tools",
        "network_tools",
        "react_to",
        "on_text",
        "on_new_message",
        "limits",
    )
    """Keys that an agent file also has, in the same format."""

    file: Path | None = None
    script: Either[Text, list[ScriptRule]] | None = None
    model: ModelChoice | None = None
    starts: bool = True
    """Whether the agent starts with the scenario. If false, a step `join` starts the agent."""
    instruction: Text = "You act by a script."
    description: str = ""
    tools: tuple[Text, ...] = ()
    network_tools: tuple[Text, ...] | None = None
    react_to: ReactTo = "mentions"
    visibility: Visibility | None = None
    """Visibility of the agent's work. This value takes precedence over the value in the agent's `file`."""

    on_text: OnText = "auto"
    on_new_message: OnNewMessage = "queue"
    limits: AgentLimits = AgentLimits()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.file is not None:
            need_one(self, ("file", "script"))
        # Allow each setting in one place only: a test that overrides its agent file would test a different agent.
        if self.script is None and (wrong := sorted(self.model_fields_set.intersection(self.SCRIPTED))):
            raise ValueError(f"has {wrong[0]}, which belongs in the agent file")
        if self.script is not None and self.model is not None:
            raise ValueError("has both model and script; the script replaces the model")
        return self


class ThreadChoice(Strict):
    """Thread with a list of members. The thread is a channel of the same name."""

    members: list[Id] = Field(min_length=1)
    history: Literal["since_join", "members"] = "since_join"


class ScenarioLimits(Strict):
    """Limits of a run. The hub limits ``hops`` and ``messages`` per conversation. ``tokens`` limits the total of all
    models.
    """

    hops: Annotated[int, Field(ge=1)] | None = None
    messages: Annotated[int, Field(ge=1)] | None = None
    tokens: Annotated[int, Field(ge=1)] | None = None


class FaultChoice(Strict):
    """Random faults, derived from the seed, in the first ``within`` seconds. ``model_failures`` is the fraction of
    model calls that fail.
    """

    drops: Count = 0
    agent_kills: Count = 0
    hub_restarts: Count = 0
    model_failures: Annotated[float, Field(ge=0, le=0.9)] = 0.0
    within: Seconds = 10.0
    away: Seconds = 2.0


_Span = Either[Seconds, tuple[Seconds, Seconds]]


class DelayChoice(Strict):
    """Random delays of links and model calls, in seconds. One value is the maximum. Two values are the minimum and the
    maximum."""

    link: _Span | None = None
    model: _Span | None = None


# --- what is done


def _check_expression(text: str) -> str:
    # With braces, the expression would be a text, and a text is always true.
    if "{{" in text or "{%" in text:
        raise ValueError(f"is an expression already; write it without braces, not {text!r}")
    try:
        # Compile the expression now, so that an error is reported with its line before anything runs.
        ENVIRONMENT.compile_expression(text)
    except TemplateError as error:
        raise ValueError(
            f"is not a valid expression ({error}); write an expression, such as n == 1, or an expectation, "
            "such as {message: {from: ann}}"
        ) from error
    return text


Condition = Either[Annotated[Text, AfterValidator(_check_expression)], Expectation]
"""Condition of a step: an expression over the variables, or an expectation."""


class WaitStep(Strict):
    """Wait until nothing is in progress (``until: idle``), until no conversation has open items (``until: quiet``),
    until a message arrives, or for a duration (``for``)."""

    until: Literal["idle", "quiet"] | None = None
    message: MessagePattern | None = None
    duration: Seconds | None = Field(None, alias="for")
    at_most: Seconds = 60.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        need_one(self, ("until", "message", "duration"))
        return self


class RepeatStep(Strict):
    """Repeat steps ``times`` times, or once for ``each`` value. ``var`` names the variable for the number or the value.

    The repetition ends when the condition ``until`` is true. If the condition is still false after ``times``
    repetitions, the run fails.
    """

    times: Annotated[int, Field(ge=0, le=100_000)] | None = None
    each: list[JsonValue] | None = None
    var: Name | None = None
    until: Condition | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        # Without a maximum, a condition that never becomes true would repeat the steps forever.
        if self.until is not None and self.times is None:
            raise ValueError("has until, and so needs times: the number of repetitions after which the run fails")
        need_one(self, ("times", "each"))
        return self


class DecideStep(Strict):
    """Wait for the first open request for approval from this agent and for this tool, and decide it."""

    approve: Literal[True, "once", "thread", "always"] | None = None
    deny: Text | None = None
    edit: dict[str, JsonValue] | None = None
    agent: Id | None = None
    tool: Text | None = None
    at_most: Seconds = 60.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        need_one(self, ("approve", "deny", "edit"))
        return self


class MembershipStep(Strict):
    who: Id
    thread: Text


Moved = Either[Id, MembershipStep]

_Moment = Annotated[Literal["idle"] | float, BeforeValidator(lambda it: it if it == "idle" else read_duration(it))]

ACTIONS = (
    "send",
    "wait",
    "decide",
    "take",
    "give",
    "kill",
    "restart",
    "disconnect",
    "join",
    "leave",
    "parallel",
    "repeat",
    "if",
    "set",
    "call",
)
_FIELDS = {"if": "condition", "set": "variables"}
_BELONGS = {
    "send": {"sender", "to", "place", "reply_to", "conversation", "requires_response", "exclude", "save", "refused"},
    "call": {"sender", "args", "save", "refused"},
    "decide": {"sender", "refused"},
    "take": {"sender", "refused"},
    "give": {"sender", "refused"},
    "wait": {"save"},
}


class Step(Strict):
    """One step. Exactly one key of `ACTIONS` must be set. The other keys belong to that action."""

    sender: Text | None = Field(None, alias="as")
    to: Either[Text, list[Text]] | None = None
    place: Text | None = Field(None, alias="in")
    send: JsonValue = None
    reply_to: Name | None = None
    conversation: Text | None = None
    requires_response: Literal[True] | list[Text] | None = None
    exclude: list[Text] | None = None
    save: Name | None = None
    refused: Text | None = None
    wait: Either[_Moment, WaitStep] | None = None
    decide: Either[Literal["approve"], DecideStep] | None = None
    take: Text | None = None
    give: Text | None = None
    kill: Id | None = None
    restart: Id | None = None
    disconnect: Id | None = None
    join: Moved | None = None
    leave: Moved | None = None
    parallel: Literal[True] | None = None
    repeat: RepeatStep | None = None
    condition: Condition | None = Field(None, alias="if")
    variables: dict[Name, JsonValue] | None = Field(None, alias="set")
    call: Text | None = None
    args: dict[str, JsonValue] | None = None

    @property
    def action(self) -> str:
        keys = [name for name in ACTIONS if getattr(self, _FIELDS.get(name, name)) is not None]
        return keys[0] if len(keys) == 1 else ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        action = self.action
        if not action:
            raise ValueError(f"must be exactly one of {', '.join(ACTIONS)}")
        # A key of another action would be ignored, but its author would believe that it works.
        foreign = self.model_fields_set - {_FIELDS.get(action, action)} - _BELONGS.get(action, set())
        if foreign:
            wrong = min(type(self).model_fields[name].alias or name for name in foreign)
            raise ValueError(f"has {wrong}, which does not belong to {action}")
        if action in ("send", "call", "decide", "take", "give") and self.sender is None:
            raise ValueError(f'has no "as": who {action}s it?')
        if action == "wait" and self.save is not None and not (isinstance(self.wait, WaitStep) and self.wait.message):
            raise ValueError("has save, and waits for no message that could be saved")
        if action == "send" and (self.to is None) == (self.place is None) and self.reply_to is None:
            raise ValueError('must have exactly one of "to", "in"')
        return self


class ScenarioHead(Strict):
    """Fields of a scenario except the steps and the expectations.

    ``people``, ``services`` and ``programs`` join at the start and act through steps. ``programs`` are agents without a
    runner. ``operators`` lists the participants with an operator's rights. ``node`` is a node's file, which supplies
    limits, mods, visibility, rights and agents. All tools share ``state``.
    """

    OF_NODE: ClassVar = ("visibility", "mods")
    """Keys that a node's file also has, in the same format."""

    scenario: Text
    description: str = ""
    seed: int = 0
    clock: Literal["virtual", "real"] = "virtual"
    visibility: Visibility = "people"
    mods: tuple[Text, ...] = ("channels", "discovery")
    agents: dict[Id, AgentChoice] = Field({})
    node: Path | None = None
    people: tuple[Id, ...] = ()
    services: tuple[Id, ...] = ()
    programs: tuple[Id, ...] = ()
    operators: tuple[Id, ...] = ()
    threads: dict[Id, ThreadChoice] = Field({})
    limits: ScenarioLimits = ScenarioLimits()
    delays: DelayChoice = DelayChoice()
    faults: FaultChoice | None = None
    vars: dict[Name, JsonValue] = Field({})
    state: dict[str, JsonValue] | None = None
    steps: None = None
    """The module `file` reads the fields `steps` and `expect`, because each item must keep its line for error
    messages.
    """

    expect: None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.node is not None and (wrong := sorted(self.model_fields_set.intersection(self.OF_NODE))):
            raise ValueError(f"has {wrong[0]}, which belongs in the node's file")
        if self.state is not None and "state" in self.vars:
            raise ValueError("has a variable named state, but texts use this name for the state")
        return self
