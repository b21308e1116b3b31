"""Middleware that makes the agent's answer a value of a given type. If a value does not match the type, the model is
asked again.

The model answers by calling a tool whose parameter has the type, so an invalid value is handled like any invalid
argument. In the last turn, which has no tools, the model writes JSON. The JSON is validated in the review of the
answer, and the model is asked again up to the policy's ``max_corrections`` times. The message contains the value as
compact JSON, and as ``structured`` in its metadata.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from roundelay.agents.import_path import import_named
from roundelay.agents.isolation import describe_error
from roundelay.agents.middleware import AgentView, Answer, Around, CallModel, Correction, Middleware, RunTool
from roundelay.agents.text import strip_code_fence
from roundelay.agents.tools import PlannedCall, Tool, tool
from roundelay.agents.values import ToolResult, TurnState
from roundelay.network.errors import ConfigError
from roundelay.network.messages import BaseMessage

T = TypeVar("T")

STRUCTURED = "structured"
MAX_PROBLEMS = 10

# Accept both the alias and the name of a field: a model writes the alias, because the schema shows the alias, and the
# message contains the name.
_BOTH: Any = {"by_alias": True, "by_name": True}


class StructuredAnswer(Middleware, Generic[T]):
    """Makes the answer a value of type ``kind``: a pydantic model, a dataclass, or any other type that pydantic
    validates.

    After a handoff, the form of the answer depends on the configuration of the new agent.
    """

    guards = False

    def __init__(self, kind: type[T], *, tool_name: str = "give_answer") -> None:
        self._adapter: TypeAdapter[T] = TypeAdapter(kind)
        self._name = tool_name
        adapter = self._adapter

        def give(answer: Any) -> str:
            """Give your answer. This ends your work."""
            return adapter.dump_json(answer).decode()

        give.__annotations__["answer"] = kind
        self._tool = tool(name=tool_name, idempotent=True, answers=True)(give)

    @staticmethod
    def from_file(type: str) -> StructuredAnswer[Any]:  # noqa: A002  # the option's name
        """Return the middleware for the option of an agent's file. ``type`` is written as ``module:Type``. Raises
        `ConfigError`.
        """
        imported = import_named(type, "type")
        try:
            return StructuredAnswer(imported)
        except Exception as error:  # the name may refer to any object, and its code may raise any exception
            reason = error.message if isinstance(error, PydanticUserError) else describe_error(error)
            raise ConfigError(f"pydantic cannot validate the type {type!r}: {reason}") from error

    def describe(self) -> object:
        return self._name, self._adapter.json_schema()

    def read(self, message: BaseMessage) -> T:
        """Return the value in the message of an answer. Raises `ValueError` if the message has no valid value."""
        return self._adapter.validate_python((message.metadata or {}).get(STRUCTURED), **_BOTH)

    def _parse(self, text: str) -> T:
        return self._adapter.validate_json(text, **_BOTH)

    def list_tools(self, state: TurnState) -> Sequence[Tool]:
        return (self._tool,)

    def prepare(self, state: TurnState, step: CallModel) -> CallModel:
        """Tell the model to answer by calling the tool. In a turn without tools, show the schema to the model."""
        if any(spec.name == self._name for spec in step.tools):
            return step.tell(f"Give your answer by calling {self._name}, not as text.")
        if step.tools:
            return step
        schema = json.dumps(self._adapter.json_schema(), ensure_ascii=False)
        return step.tell(f"Your answer must be only JSON that matches this JSON Schema: {schema}")

    async def around_tool(self, around: Around, call: PlannedCall, proceed: RunTool) -> ToolResult:
        """Return the answer without shortening it, because a shortened value is invalid. The answer must fit once into
        a record, and twice into a message.
        """
        result = await proceed(call)
        if call.tool is not self._tool or result.whole is None:
            return result
        size, max_chars = len(json.dumps(result.whole)), 5 * around.max_kept_chars
        if size > max_chars:
            sentence = f"Not sent: your answer has {size} characters as JSON; the maximum is {max_chars}. Shorten it."
            return ToolResult(sentence, ok=False)
        return replace(result, content=result.whole, whole=None)

    async def review(self, around: Around, answer: str) -> str | Correction:
        try:
            value = self._parse(strip_code_fence(answer))  # models often wrap JSON in a code fence
        except ValidationError as error:
            problems = [
                f"{'.'.join(map(str, problem['loc'])) or 'the answer'}: {problem['msg']}"
                for problem in error.errors()[:MAX_PROBLEMS]
            ]
            instruction = f"Your answer does not match the schema: {'; '.join(problems)}. Correct it."
            return Correction(instruction, name=STRUCTURED)
        return self._adapter.dump_json(value).decode()

    async def finish_answer(self, around: Around, answer: str, is_accepted: bool) -> str | Answer:
        """Add the value to the message's metadata. The value is parsed from the answer after all reviews."""
        try:
            value = self._parse(answer)
        except ValidationError:
            return answer
        return Answer(answer, {STRUCTURED: self._adapter.dump_python(value, mode="json")})


def is_structured(agent: AgentView) -> bool:
    """Return whether the agent's answer is a structured value. No text may be added to a structured answer."""
    return any(isinstance(hook, StructuredAnswer) for hook in agent.chain.middleware)
