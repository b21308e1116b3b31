"""Examples for models that need them: short conversations with calls and answers, put before the real one.

Middleware over `prepare`: which model a turn asks decides which examples it is given, so a turn on another model has
its own. They stand right after the system message and stay the same from turn to turn, where providers' caches want
them. They are in no record and no history.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from roundelay.agents.middleware import Middleware
from roundelay.agents.models.model import (
    AssistantMessage,
    ChatMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from roundelay.agents.models.prompt_view import EXAMPLE_MARK
from roundelay.agents.steps import CallModel, TurnState


@dataclass(frozen=True, slots=True)
class ExampleCall:
    """A call as the model should make it, and what comes of it."""

    tool: str
    arguments: Mapping[str, JsonValue] = field(default_factory=dict)
    result: str = ""


@dataclass(frozen=True, slots=True)
class Example:
    """What somebody writes, the calls that the model makes, all in one turn, and its answer."""

    user: str
    answer: str
    calls: Sequence[ExampleCall] = ()


class FewShot(Middleware):
    """Gives ``examples`` to the models whose names match one of ``models`` (``*`` stands for anything); without calls
    to tools that the agent does not have."""

    def __init__(self, examples: Sequence[Example], *, models: Sequence[str] = ("*",)) -> None:
        if isinstance(models, str):
            raise TypeError(f'FewShot: models is {models!r} and must be a list: write ["{models}"]')
        self._models = tuple(models)
        self._examples = [(frozenset(call.tool for call in it.calls), _write(at, it)) for at, it in enumerate(examples)]

    def prepare(self, state: TurnState, step: CallModel) -> CallModel:
        name = (step.model or step.agent.model).name
        if not any(fnmatchcase(name, pattern) for pattern in self._models):
            return step
        known = {it.name for it in step.agent.all_tools}
        given = [message for tools, messages in self._examples if tools <= known for message in messages]
        place = 1 if step.messages and isinstance(step.messages[0], SystemMessage) else 0  # a hook may have left it out
        return replace(step, messages=(*step.messages[:place], *given, *step.messages[place:]))


class ExampleCallOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    tool: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    arguments: dict[str, JsonValue] = {}
    result: str = ""


class ExampleOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    user: str = Field(min_length=1)
    answer: str = Field(min_length=1)
    calls: tuple[ExampleCallOptions, ...] = ()


class FewShotOptions(BaseModel):
    """Examples in an agent's file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: tuple[Annotated[str, Field(min_length=1)], ...] = Field(("*",), min_length=1)
    examples: tuple[ExampleOptions, ...] = Field(min_length=1)

    def build(self) -> FewShot:
        made = [
            Example(it.user, it.answer, [ExampleCall(call.tool, call.arguments, call.result) for call in it.calls])
            for it in self.examples
        ]
        return FewShot(made, models=self.models)


def _write(at: int, example: Example) -> list[ChatMessage]:
    messages: list[ChatMessage] = [UserMessage(f"{EXAMPLE_MARK}\n{example.user}")]
    calls = tuple(
        ToolCall(f"example_{at}_{place}", call.tool, json.dumps(dict(call.arguments)))
        for place, call in enumerate(example.calls)
    )
    if calls:
        messages.append(AssistantMessage(None, calls))
        messages += [ToolMessage(call.id, it.result) for call, it in zip(calls, example.calls, strict=True)]
    return [*messages, AssistantMessage(example.answer)]
