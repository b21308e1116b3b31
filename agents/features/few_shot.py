"""Middleware that shows examples to models that need them: short conversations with calls and answers, placed before
the real conversation.

The examples depend on the model of the turn. The examples follow the system message and stay the same from turn to
turn, so that providers can cache them. Neither the records nor the history contain the examples.
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
    """A call that the model should make, and its result."""

    tool: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    arguments: Mapping[str, JsonValue] = field(default_factory=dict)
    result: str = ""


@dataclass(frozen=True, slots=True)
class Example:
    """Example conversation: a user's text, the calls that the model makes in one turn, and the model's answer."""

    user: Text
    answer: Text
    calls: Annotated[Sequence[ExampleCall], InFile(tuple[ExampleCall, ...])] = ()


class FewShot(Middleware):
    """Shows ``examples`` to the models whose names match one of ``models`` (``*`` matches anything).

    An example is omitted if it calls a tool that the agent does not have.
    """

    @checked()
    def __init__(
        self,
        examples: Annotated[Sequence[Example], InFile(tuple[Example, ...]), Field(min_length=1)],
        *,
        models: Annotated[Sequence[Text], InFile(tuple[Text, ...]), Field(min_length=1)] = ("*",),
    ) -> None:
        self._models = tuple(models)
        self._examples = [
            (frozenset(call.tool for call in example.calls), _write_example(at, example))
            for at, example in enumerate(examples)
        ]

    def prepare(self, state: TurnState, step: CallModel) -> CallModel:
        name = (step.model or step.agent.model).name
        if not any(fnmatchcase(name, pattern) for pattern in self._models):
            return step
        # Omit examples with unknown tools, because they would teach the model to invent tools.
        available = {tool.name for tool in step.agent.all_tools}
        examples = [message for tools, messages in self._examples if tools <= available for message in messages]
        # Check for a system message, because another hook may have removed it.
        index = 1 if step.messages and isinstance(step.messages[0], SystemMessage) else 0
        return replace(step, messages=(*step.messages[:index], *examples, *step.messages[index:]))


def _write_example(at: int, example: Example) -> list[ChatMessage]:
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
