"""What a scenario may say: its participants and steps as strict models (its expectations: `expectations`). docs/scenarios.md shows every key.

Plain data; `file` reads it from YAML, `steps` act on it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, JsonValue, Tag, model_validator

from roundelay.agents.inbox import ReactTo, Visibility
from roundelay.agents.models.script_rules import Rule
from roundelay.agents.policy import OnNewMessage, OnText
from roundelay.agents.team import AgentLimits, ModelChoice
from roundelay.scenario.expectations import MessageFilter
from roundelay.scenario.values import Count, Id, Name, Seconds, Strict, Text, need_one, read_duration, which_form

HUB = "hub"
"""In `kill` and `restart`: not a participant, the hub itself."""

# --- who takes part


class AgentChoice(Strict):
    """One agent: out of an agent `file`, perhaps with another `model`, or by a `script` of rules (inline, a file of rules, ``module:function``)."""

    file: Path | None = None
    script: (
        Annotated[Annotated[list[Rule], Tag("many")] | Annotated[Text, Tag("one")], Discriminator(which_form)] | None
    ) = None
    model: ModelChoice | None = None
    starts: bool = True
    """False: it is not there before a step `join`."""
    instruction: Text = "You act by a script."
    description: str = ""
    tools: tuple[Text, ...] = ()
    react_to: ReactTo = "mentions"
    visibility: Visibility | None = None
    """With a `file` too, in the place of what it says."""

    on_text: OnText = "auto"
    on_new_message: OnNewMessage = "queue"
    limits: AgentLimits = AgentLimits()

    @model_validator(mode="after")
    def _check(self) -> Self:
        need_one(self, ("file", "script"))
        own = {"instruction", "description", "tools", "react_to", "on_text", "on_new_message", "limits"}
        if self.file is not None and (wrong := sorted(own & self.model_fields_set)):
            raise ValueError(f"has {wrong[0]}, which the agent file says")
        if self.script is not None and self.model is not None:
            raise ValueError("has a model beside its script; the script is its model")
        return self


class ThreadChoice(Strict):
    """A thread with members of its own: a channel of that name."""

    members: list[Id] = Field(min_length=1)
    history: Literal["since_join", "members"] = "since_join"


class ScenarioLimits(Strict):
    """``hops`` and ``messages`` are the hub's, for each root; ``tokens`` are all that the models may use in the whole run."""

    hops: Annotated[int, Field(ge=1)] | None = None
    messages: Annotated[int, Field(ge=1)] | None = None
    tokens: Annotated[int, Field(ge=1)] | None = None


class FaultChoice(Strict):
    """Faults by seed, over the first ``within``; ``model_failures`` is the share of model calls that fail."""

    drops: Count = 0
    agent_kills: Count = 0
    hub_restarts: Count = 0
    model_failures: Annotated[float, Field(ge=0, le=0.9)] = 0.0
    within: Seconds = 10.0
    away: Seconds = 2.0


_Span = Annotated[
    Annotated[Seconds, Tag("one")] | Annotated[tuple[Seconds, Seconds], Tag("many")], Discriminator(which_form)
]


class DelayChoice(Strict):
    """How long messages on a link and model calls take: from 0, or from the first, to this much."""

    link: _Span | None = None
    model: _Span | None = None


# --- what is done


class WaitStep(Strict):
    """Until nothing is in flight (``until: idle``), until a message, or ``for`` a time."""

    until: Literal["idle"] | None = None
    message: MessageFilter | None = None
    duration: Seconds | None = Field(None, alias="for")
    at_most: Seconds = 60.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        need_one(self, ("until", "message", "duration"))
        return self


class RepeatStep(Strict):
    """``times``, or once for ``each`` of these; ``var`` names what counts them, or holds each one."""

    times: Annotated[int, Field(ge=0, le=100_000)] | None = None
    each: list[JsonValue] | None = None
    var: Name | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        need_one(self, ("times", "each"))
        return self


class MembershipStep(Strict):
    who: Id
    thread: Text


Moved = Annotated[Annotated[Id, Tag("one")] | Annotated[MembershipStep, Tag("many")], Discriminator(which_form)]

_Moment = Annotated[Literal["idle"] | float, BeforeValidator(lambda it: it if it == "idle" else read_duration(it))]

ACTIONS = ("send", "wait", "kill", "restart", "disconnect", "join", "leave", "parallel", "repeat", "set", "call")


class Step(Strict):
    """One step: exactly one of `ACTIONS`, and what belongs to it."""

    sender: Text | None = Field(None, alias="as")
    to: Text | None = None
    place: Text | None = Field(None, alias="in")
    send: JsonValue = None
    reply_to: Name | None = None
    requires_response: Literal[True] | list[Id] | None = None
    save: Name | None = None
    refused: Text | None = None
    wait: (
        Annotated[Annotated[_Moment, Tag("one")] | Annotated[WaitStep, Tag("many")], Discriminator(which_form)] | None
    ) = None
    kill: Id | None = None
    restart: Id | None = None
    disconnect: Id | None = None
    join: Moved | None = None
    leave: Moved | None = None
    parallel: Literal[True] | None = None
    repeat: RepeatStep | None = None
    variables: dict[Name, JsonValue] | None = Field(None, alias="set")
    call: Text | None = None
    args: dict[str, JsonValue] | None = None

    @property
    def action(self) -> str:
        given = [name for name in ACTIONS if getattr(self, "variables" if name == "set" else name) is not None]
        return given[0] if len(given) == 1 else ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        action = self.action
        if not action:
            raise ValueError(f"must be exactly one of {', '.join(ACTIONS)}")
        belongs = {
            "send": {"sender", "to", "place", "reply_to", "requires_response", "save", "refused"},
            "call": {"sender", "args", "save", "refused"},
        }.get(action, set())
        given = self.model_fields_set - {action, "variables"} - belongs
        if given:
            wrong = sorted(type(self).model_fields[name].alias or name for name in given)[0]
            raise ValueError(f"has {wrong}, which does not belong to {action}")
        if action == "send" and self.sender is None:
            raise ValueError('has no "as": who sends it?')
        if action == "send" and (self.to is None) == (self.place is None) and self.reply_to is None:
            raise ValueError('must have exactly one of "to", "in"')
        if action == "call" and self.sender is None:
            raise ValueError('has no "as": who calls it?')
        return self


class ScenarioHead(Strict):
    """Everything but the steps and the expectations."""

    scenario: Text
    description: str = ""
    seed: int = 0
    clock: Literal["virtual", "real"] = "virtual"
    visibility: Visibility = "people"
    mods: tuple[Text, ...] = ("channels", "discovery")
    agents: dict[Id, AgentChoice] = Field({})
    people: tuple[Id, ...] = ()
    threads: dict[Id, ThreadChoice] = Field({})
    limits: ScenarioLimits = ScenarioLimits()
    delays: DelayChoice = DelayChoice()
    faults: FaultChoice | None = None
    vars: dict[Name, JsonValue] = Field({})
    steps: None = None
    """Read apart (`file`), as is `expect`: each item has its line."""

    expect: None = None
