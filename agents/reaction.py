"""The loop of a reaction, without IO: what to do next, given what came of the last step.

`driver` performs each step and hands its outcome to `Reaction.advance`, until that gives `Finish`. A *turn* is one model call, the tool
calls it asked for and their results; a reply without tool calls is a turn too. Whatever a model writes is answered here: an unknown
tool, broken arguments, too many calls, an empty reply. After every step the history is one that a provider accepts: each call of an
assistant message is answered before anything else follows, ids are unique, names and arguments are well formed.

No IO, no clock, no randomness: the same outcomes lead through the same steps, which is how a reaction is resumed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, assert_never

from roundelay.network.errors import RoundelayError

from .arguments import ToolArgumentsError
from .models.model import (
    AssistantMessage,
    ChatMessage,
    ModelReply,
    SystemMessage,
    ToolCall,
    ToolMessage,
    ToolSpec,
    Usage,
    UserMessage,
)
from .policy import AgentPolicy
from .text import cut, replace_surrogates
from .tools import FINISH, Tool, ToolResult

Status = Literal["finished", "stopped", "cancelled", "failed"]
"""How a reaction ended: by the model, at a limit, by a person, or by an error."""


@dataclass(frozen=True, slots=True)
class CallModel:
    """Ask the model. ``tools`` is empty on the last turn; the last message holds the facts of the turn and is not kept."""

    turn: int
    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...]


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
    """Run the planned calls, in parallel, and give `ToolsDone`; both may be empty (the model only finished)."""

    turn: int
    planned: tuple[PlannedCall, ...]
    answered: tuple[AnsweredCall, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """The reaction has ended. ``answer`` is the text to send to the incoming thread, None when there is nothing to send."""

    status: Status
    reason: str
    answer: str | None
    turns: int
    usage: Usage


Step = CallModel | CallTools | Finish


@dataclass(frozen=True, slots=True)
class Begin:
    """The first thing that a reaction is given."""


@dataclass(frozen=True, slots=True)
class ModelFailed:
    """The model gave no reply, for good; ``reason`` is a sentence."""

    reason: str


@dataclass(frozen=True, slots=True)
class ToolsDone:
    """A result for each planned call, by its index."""

    results: Mapping[int, ToolResult]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Somebody stopped the reaction, before it began or while a step was under way."""

    reason: str


Outcome = Begin | ModelReply | ModelFailed | ToolsDone | Cancel


class State(Enum):
    """What a reaction waits for."""

    NEW = "new"
    ASKING = "waiting for its model"
    CALLING = "waiting for its tools"
    FINISHED = "finished"


class IllegalStep(RoundelayError):
    """A reaction was given an outcome that it does not wait for: a fault of its driver."""

    def __init__(self, state: State, outcome: Outcome) -> None:
        super().__init__(f"A reaction that is {state.value} cannot take {type(outcome).__name__}.")
        self.state = state
        self.outcome = outcome


class Reaction:
    """The turns from one incoming message to `finish`.

    ``answers`` says that somebody waits for an answer: a person wrote the trigger, or it requires this agent's response.
    """

    def __init__(
        self,
        *,
        system_prompt: str,
        prompt: str,
        tools: Collection[Tool],
        policy: AgentPolicy,
        answers: bool,
    ) -> None:
        self.state = State.NEW
        self.turn = 0
        self.usage = Usage()
        self.history: list[ChatMessage] = [SystemMessage(system_prompt), UserMessage(prompt)]
        self._tools = {tool.name: tool for tool in tools}
        self._specs = tuple(tool.spec for tool in tools)
        self._policy = policy
        self._answers = answers
        self._has_spoken = False
        self._call_ids: set[str] = set()
        self._reply = ModelReply(text=None)  # of the turn under way, its call ids made unique
        self._refused: dict[int, ToolResult] = {}
        self._planned: tuple[PlannedCall, ...] = ()

    def advance(self, outcome: Outcome) -> Step:
        """Take the outcome of the last step and give the next one. Raises `IllegalStep` for one that is not awaited."""
        match outcome, self.state:
            case Begin(), State.NEW:
                return self._ask()
            case ModelReply(), State.ASKING:
                return self._take_reply(outcome)
            case ModelFailed(), State.ASKING:
                answer = f"I could not answer: {outcome.reason}"
                return self._finish("failed", outcome.reason, answer if self._is_sent() else None)
            case ToolsDone(), State.CALLING:
                return self._take_results(outcome.results)
            case Cancel(), State.NEW | State.ASKING | State.CALLING:
                if self.state is State.CALLING:
                    self._answer_calls({call.index: ToolResult("Cancelled.", ok=False) for call in self._planned})
                return self._finish("cancelled", outcome.reason, None)
            case _:
                raise IllegalStep(self.state, outcome)

    @property
    def _is_last(self) -> bool:
        return self.turn >= self._policy.max_turns

    def _ask(self) -> CallModel:
        self.state = State.ASKING
        self.turn += 1
        messages = list(self.history)
        _say(messages, self._policy.describe_turn(self.turn, self._policy.max_turns))
        return CallModel(self.turn, tuple(messages), () if self._is_last else self._specs)

    def _take_reply(self, reply: ModelReply) -> Step:
        self.usage += reply.usage
        if not reply.tool_calls:
            return self._take_text(reply)
        self._reply = replace(reply, tool_calls=tuple(self._name_uniquely(reply.tool_calls)))
        self.history.append(AssistantMessage(reply.text, tuple(map(_well_formed, self._reply.tool_calls))))
        self._plan()
        self.state = State.CALLING
        return CallTools(
            self.turn,
            self._planned,
            tuple(AnsweredCall(i, self._reply.tool_calls[i], result) for i, result in self._refused.items()),
        )

    def _take_text(self, reply: ModelReply) -> Step:
        text = (reply.text or "").strip()
        if self._is_last:
            return self._close(text)
        if not text:
            _say(self.history, _TOO_LARGE if reply.finish_reason == TOO_LARGE else _EMPTY)
            return self._ask()
        self.history.append(AssistantMessage(text))
        if self._policy.on_text == "nudge":
            _say(self.history, _NUDGE)
            return self._ask()
        return self._finish("finished", "answered in plain text", text if self._is_sent() else None)

    def _close(self, text: str) -> Finish:
        """End at the limit of turns, with whatever the model said last."""
        reason = f"reached the limit of {self._policy.max_turns} turns"
        answer = text or f"I {reason} without an answer."
        return self._finish("stopped", reason, answer if self._is_sent() else None)

    def _is_sent(self) -> bool:
        match self._policy.on_text:
            case "reply":
                return True
            case "auto" | "nudge":
                return self._answers
            case "record":
                return False
            case other:
                assert_never(other)

    def _plan(self) -> None:
        """Decide for each call of the reply whether it is run; `finish` is neither planned nor refused."""
        planned: list[PlannedCall] = []
        self._refused = {}
        for index, call in enumerate(self._reply.tool_calls):
            tool = self._tools.get(call.name)
            if index >= self._policy.max_tool_calls_per_turn:
                limit = self._policy.max_tool_calls_per_turn
                self._refuse(
                    index, f"Not run: at most {limit} calls are run in one turn. Call it again in the next one."
                )
            elif call.name == FINISH:
                continue
            elif self._is_last:
                self._refuse(index, "Not run: no tools in the last turn.")
            elif tool is None:
                names = ", ".join(self._tools)
                self._refuse(index, f'There is no tool "{call.name[:64]}". The tools are: {names}.')
            else:
                try:
                    planned.append(PlannedCall(index, call, tool, tool.parse(call.arguments)))
                except ToolArgumentsError as error:
                    self._refuse(index, f"Not run: {error}")
        self._planned = tuple(planned)

    def _refuse(self, index: int, text: str) -> None:
        # The text may quote what the model wrote, at any length.
        self._refused[index] = ToolResult(replace_surrogates(cut(text, MAX_REFUSAL_CHARS)), ok=False)

    def _take_results(self, results: Mapping[int, ToolResult]) -> Step:
        missing = [planned.call.name for planned in self._planned if planned.index not in results]
        if missing:
            raise ValueError(f"no result for {', '.join(missing)}")
        self._has_spoken |= any(results[it.index].ok and it.tool.speaks for it in self._planned)
        finishing = self._answer_calls(results)
        text = (self._reply.text or "").strip()
        if finishing is not None:
            # Text beside nothing but `finish` is what the model wants to say, unless it has said it by a tool.
            is_answer = (
                (self._is_last or not (self._planned or self._refused)) and not self._has_spoken and self._is_sent()
            )
            return self._finish("finished", _read_reason(finishing), text if text and is_answer else None)
        return self._close(text) if self._is_last else self._ask()

    def _answer_calls(self, results: Mapping[int, ToolResult]) -> ToolCall | None:
        """Append the answer to each call of the turn, in their order; give the `finish` that holds, if one does."""
        answers = self._refused | dict(results)
        all_ok = all(result.ok for result in answers.values())
        finishing: ToolCall | None = None
        for index, call in enumerate(self._reply.tool_calls):
            if index in answers:
                content = answers[index].content
            elif not all_ok and not self._is_last:
                content = "Not finished: another call of this turn failed. See its answer, then finish again."
            elif finishing is None:
                finishing, content = call, "Finished."
            else:
                content = "Finished already."
            self.history.append(ToolMessage(call.id, content))
        return finishing

    def _name_uniquely(self, calls: tuple[ToolCall, ...]) -> list[ToolCall]:
        """Replace an id that is empty or was used in this reaction: a provider refuses a history that holds it twice."""
        named = []
        for index, call in enumerate(calls):
            call_id = call.id
            if not call_id:
                call_id = f"call_{self.turn}_{index}"
            while call_id in self._call_ids:
                call_id += f"_{self.turn}_{index}"
            self._call_ids.add(call_id)
            named.append(replace(call, id=call_id))
        return named

    def _finish(self, status: Status, reason: str, answer: str | None) -> Finish:
        self.state = State.FINISHED
        return Finish(status, reason, answer, self.turn, self.usage)


MAX_REFUSAL_CHARS = 2000

TOO_LARGE = "too_large"
"""The ``finish_reason`` of the empty reply that stands for one too large to be recorded."""

_EMPTY = "Your reply was empty. Call a tool, or call finish if there is nothing left to do."
_TOO_LARGE = "Your reply was too large to be kept and was dropped. Say it shorter, or in several steps."
_NUDGE = "Text alone reaches nobody. Call a tool to act or to send it, or call finish if there is nothing left to do."


def _say(messages: list[ChatMessage], text: str) -> None:
    """Append a user message, or to it: many chat templates refuse two in a row."""
    last = messages[-1]
    if isinstance(last, UserMessage):
        messages[-1] = UserMessage(f"{last.content}\n\n{text}")
    else:
        messages.append(UserMessage(text))


def _well_formed(call: ToolCall) -> ToolCall:
    """Give the call as the history shows it: servers parse the arguments again, and check names, also in what was."""
    name = re.sub(r"[^a-zA-Z0-9_-]", "_", call.name)[:64] or "unnamed"
    arguments = call.arguments if call.arguments.strip() else "{}"
    try:
        if not isinstance(json.loads(arguments), dict):
            arguments = json.dumps({"invalid": arguments})
    except (ValueError, RecursionError):
        arguments = json.dumps({"invalid": arguments})
    return ToolCall(call.id, name, arguments)


def _read_reason(call: ToolCall) -> str:
    """Give the reason of a `finish`; that it finishes is clear whatever its arguments look like."""
    try:
        reason = json.loads(call.arguments or "{}")["reason"]
    except (ValueError, LookupError, TypeError, RecursionError):
        reason = ""
    return replace_surrogates(reason) if isinstance(reason, str) else ""
