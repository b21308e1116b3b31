"""Structured answers: the agent's answer is a value of a type, or the model is told what does not fit and asked again.

Middleware. The model gives its answer by a tool whose parameter has that type, so what does not fit is answered like
any wrong argument. In the last turn, which has no tools, it writes JSON. Text is held against the type when it is
reviewed, so it is asked for again as often as the policy's ``max_corrections`` says. What goes out is the value as
compact JSON, and as ``structured`` in the message's metadata.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from roundelay.agents.import_path import import_named
from roundelay.agents.isolation import describe_error
from roundelay.agents.middleware import AgentView, Answer, Around, CallModel, Correction, Middleware
from roundelay.agents.text import strip_code_fence
from roundelay.agents.tools import PlannedCall, Tool, tool
from roundelay.agents.values import ToolResult, TurnState
from roundelay.network.errors import ConfigError
from roundelay.network.messages import BaseMessage

T = TypeVar("T")

STRUCTURED = "structured"
MAX_PROBLEMS = 10

# Of fields with an alias: a model writes that, as the schema has it, and what goes out has the name.
_BOTH: Any = {"by_alias": True, "by_name": True}


class StructuredAnswer(Middleware, Generic[T]):
    """The answer is a ``kind``: a pydantic model, a dataclass, or anything else that pydantic reads. An agent that
    takes over answers in its own form."""

    guards = False

    def __init__(self, kind: type[T], *, tool_name: str = "give_answer") -> None:
        self._adapter: TypeAdapter[T] = TypeAdapter(kind)
        self._name = tool_name
        adapter = self._adapter

        def give(answer: Any) -> str:
            """Give the answer. It ends your work."""
            return adapter.dump_json(answer).decode()

        give.__annotations__["answer"] = kind
        self._tool = tool(name=tool_name, idempotent=True, answers=True)(give)

    @staticmethod
    def from_file(type: str) -> StructuredAnswer[Any]:  # noqa: A002  # the option's name
        """Make that of an agent's file; ``type`` is ``module:Type``. Raises `ConfigError`."""
        found = import_named(type, "type")
        try:
            return StructuredAnswer(found)
        except Exception as error:  # what it names may be anything, and raise anything
            said = error.message if isinstance(error, PydanticUserError) else describe_error(error)
            raise ConfigError(f"the type {type!r} is none that pydantic reads: {said}") from error

    def describe(self) -> object:
        return self._name, self._adapter.json_schema()

    def read(self, message: BaseMessage) -> T:
        """Give the value of an answer. Raises `ValueError` for a message that has none that fits."""
        return self._adapter.validate_python((message.metadata or {}).get(STRUCTURED), **_BOTH)

    def _parse(self, text: str) -> T:
        return self._adapter.validate_json(text, **_BOTH)

    def list_tools(self, state: TurnState) -> Sequence[Tool]:
        return (self._tool,)

    def prepare(self, state: TurnState, step: CallModel) -> CallModel:
        """Say how the answer is given: by the tool; in a turn without tools, as what it has to look like."""
        if any(spec.name == self._name for spec in step.tools):
            return step.tell(f"Your answer has a form: give it by calling {self._name}, not as a text.")
        if step.tools:
            return step
        schema = json.dumps(self._adapter.json_schema(), ensure_ascii=False)
        return step.tell(f"Your answer must be JSON, and nothing else, that fits this JSON Schema: {schema}")

    async def around_tool(
        self, around: Around, call: PlannedCall, proceed: Callable[[PlannedCall], Awaitable[ToolResult]]
    ) -> ToolResult:
        """Give the whole answer: cut off, as a long result is, it would be none. It goes into a record, and into a
        message beside itself as a value."""
        result = await proceed(call)
        if call.tool is not self._tool or result.whole is None:
            return result
        size, most = len(json.dumps(result.whole)), 5 * around.max_kept_chars
        if size > most:
            told = f"Not given: your answer has {size} characters as JSON, and may have {most}. Give a shorter one."
            return ToolResult(told, ok=False)
        return replace(result, content=result.whole, whole=None)

    async def review(self, around: Around, answer: str) -> str | Correction:
        try:
            value = self._parse(strip_code_fence(answer))
        except ValidationError as error:
            problems = [
                f"{'.'.join(map(str, problem['loc'])) or 'the answer'}: {problem['msg']}"
                for problem in error.errors()[:MAX_PROBLEMS]
            ]
            told = f"It does not fit: {'; '.join(problems)}. Give one that does."
            return Correction(told, name=STRUCTURED)
        return self._adapter.dump_json(value).decode()

    async def finish_answer(self, around: Around, answer: str, is_accepted: bool) -> str | Answer:
        """Give the value as those that reviewed after it left the answer."""
        try:
            value = self._parse(answer)
        except ValidationError:
            return answer
        return Answer(answer, {STRUCTURED: self._adapter.dump_python(value, mode="json")})


def is_structured(agent: AgentView) -> bool:
    """Whether the agent's answer is a value, to whose text nothing may be added."""
    return any(isinstance(hook, StructuredAnswer) for hook in agent.chain.middleware)
