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

from pydantic import Field, JsonValue

from roundelay.agents.middleware import CallModel, Middleware
from roundelay.agents.models.model import (
    AssistantMessage,
    ChatMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from roundelay.agents.models.prompt_view import EXAMPLE_MARK
from roundelay.agents.options import InFile, Text, checked
from roundelay.agents.values import TurnState


@dataclass(frozen=True, slots=True)
class ExampleCall:
    """A call as the model should make it, and what comes of it."""

    tool: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    arguments: Mapping[str, JsonValue] = field(default_factory=dict)
    result: str = ""


@dataclass(frozen=True, slots=True)
class Example:
    """What somebody writes, the calls that the model makes, all in one turn, and its answer."""

    user: Text
    answer: Text
    calls: Annotated[Sequence[ExampleCall], InFile(tuple[ExampleCall, ...])] = ()


class FewShot(Middleware):
    """Gives ``examples`` to the models whose names match one of ``models`` (``*`` stands for anything); without calls
    to tools that the agent does not have."""

    @checked()
    def __init__(
        self,
        examples: Annotated[Sequence[Example], InFile(tuple[Example, ...]), Field(min_length=1)],
        *,
        models: Annotated[Sequence[Text], InFile(tuple[Text, ...]), Field(min_length=1)] = ("*",),
    ) -> None:
        self._models = tuple(models)
        self._examples = [
            (frozenset(call.tool for call in example.calls), _write(at, example)) for at, example in enumerate(examples)
        ]

    def prepare(self, state: TurnState, step: CallModel) -> CallModel:
        name = (step.model or step.agent.model).name
        if not any(fnmatchcase(name, pattern) for pattern in self._models):
            return step
        known = {tool.name for tool in step.agent.all_tools}
        given = [message for tools, messages in self._examples if tools <= known for message in messages]
        place = 1 if step.messages and isinstance(step.messages[0], SystemMessage) else 0  # a hook may have left it out
        return replace(step, messages=(*step.messages[:place], *given, *step.messages[place:]))


def _write(at: int, example: Example) -> list[ChatMessage]:
    messages: list[ChatMessage] = [UserMessage(f"{EXAMPLE_MARK}\n{example.user}")]
    calls = tuple(
        ToolCall(f"example_{at}_{place}", call.tool, json.dumps(dict(call.arguments)))
        for place, call in enumerate(example.calls)
    )
    if calls:
        messages.append(AssistantMessage(None, calls))
        messages += [
            ToolMessage(call.id, example_call.result) for call, example_call in zip(calls, example.calls, strict=True)
        ]
    return [*messages, AssistantMessage(example.answer)]
