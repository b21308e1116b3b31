"""Which calls of a reply are run: the limit of a turn, unknown tools, arguments that do not fit, the same call again
and again.

Part of `reaction`, which asks it once for each reply with tool calls. What the records say of a call holds, whatever
the agent's tools and limits are now. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .agent import Agent
from .models.model import ModelReply, ToolCall, ToolMessage
from .steps import PlannedCall, Replayed
from .text import cut, replace_surrogates
from .tools import FINISH, ToolArgumentsError, ToolResult

MAX_REFUSAL_CHARS = 2000

UNKNOWN_OUTCOME = (
    "The agent was interrupted while this call was running. Whether it took effect is unknown, and it was not repeated. "
    "Find out before you call it again."
)


_NOT_KEPT = "Not run: the agent was interrupted, and the arguments of this call were not kept. Call it again."


@dataclass(slots=True)
class Plan:
    """What to do with the calls of one reply, by their place. `finish` and handoffs are neither planned nor refused."""

    planned: tuple[PlannedCall, ...] = ()
    refused: dict[int, ToolResult] = field(default_factory=dict)

    def check(self, results: Mapping[int, ToolResult]) -> None:
        """Raises `ValueError` if a planned call has no result."""
        missing = [planned.call.name for planned in self.planned if planned.index not in results]
        if missing:
            raise ValueError(f"no result for {', '.join(missing)}")

    def list_run(self, replay: Replayed | None) -> list[int]:
        """Give the calls that are run, or were, by what the records say."""
        run = {it.index for it in self.planned}
        return sorted(run if replay is None else run | (replay.begun & replay.results.keys()))


class Planner:
    """Plans the calls of one run, and remembers what came of them."""

    def __init__(self) -> None:
        self._call_ids: set[str] = set()
        self._results: dict[tuple[str, str], list[str]] = {}  # of each call that was made, by name and arguments

    def name_uniquely(self, turn: int, calls: Sequence[ToolCall]) -> list[ToolCall]:
        """Replace an id that is empty or was used in this run: a provider refuses a history that holds it twice."""
        named = []
        for index, call in enumerate(calls):
            call_id = call.id
            if not call_id:
                call_id = f"call_{turn}_{index}"
            while call_id in self._call_ids:
                call_id += f"_{turn}_{index}"
            self._call_ids.add(call_id)
            named.append(replace(call, id=call_id))
        return named

    def plan(
        self,
        agent: Agent,
        reply: ModelReply,
        *,
        is_last: bool,
        replay: Replayed | None,
        preprocess: Callable[[ToolCall], ToolCall],
    ) -> Plan:
        """Decide for each call of a reply whether it is run; ``preprocess`` gives it as it is to be read."""
        planned: list[PlannedCall] = []
        plan = Plan()
        for index, call in enumerate(reply.tool_calls):
            decided = _recall(agent, index, call, replay, preprocess)
            match decided or self._decide(agent, reply, index, call, is_last, preprocess):
                case PlannedCall() as it:
                    planned.append(it)
                case ToolResult() as it:
                    plan.refused[index] = it
        plan.planned = tuple(planned)
        return plan

    def note(self, call: ToolCall, content: str) -> None:
        """Remember what came of a call that was run."""
        self._results.setdefault(_key(call), []).append(content)

    def _decide(
        self,
        agent: Agent,
        reply: ModelReply,
        index: int,
        call: ToolCall,
        is_last: bool,
        preprocess: Callable[[ToolCall], ToolCall],
    ) -> PlannedCall | ToolResult | None:
        limit, most = agent.policy.max_tool_calls_per_turn, agent.policy.max_same_calls
        if index >= limit:
            return refuse(f"Not run: at most {limit} calls are run in one turn. Call it again in the next one.")
        if call.name == FINISH:
            return None
        if is_last:
            return refuse("Not run: no tools in the last turn.")
        if agent.find_handoff(call.name) is not None:
            return None
        tool = agent.find_tool(call.name)
        if tool is None:
            names = ", ".join(spec.name for spec in agent.specs)
            return refuse(f'There is no tool "{call.name[:64]}". The tools are: {names}.')
        written = call
        try:
            call = preprocess(call)
            arguments = tool.parse(call.arguments)
        except ToolArgumentsError as error:
            note = " (The reply was cut off at its limit of length.)" if reply.finish_reason == "length" else ""
            return refuse(f"Not run: {error}{note}")
        before = self._results.get(_key(written), [])[-most:]
        if len(before) == most and len(set(before)) == 1:
            return refuse(
                f"Not run: you made this very call {most} times, and its result was the same each time. "
                "Do something else, or call finish."
            )
        return PlannedCall(index, call, tool, arguments)


def _recall(
    agent: Agent, index: int, call: ToolCall, replay: Replayed | None, preprocess: Callable[[ToolCall], ToolCall]
) -> PlannedCall | ToolResult | None:
    """What the records say of a call: its result; that it was begun; None for nothing."""
    if replay is None:
        return None
    if index in replay.results:
        return replay.results[index]
    if index not in replay.begun:
        is_run = call.name != FINISH and agent.find_handoff(call.name) is None
        return refuse(_NOT_KEPT) if is_run and index in replay.altered.calls else None
    if index in replay.altered.calls:
        return ToolResult(UNKNOWN_OUTCOME, ok=False)
    tool = agent.find_tool(call.name)
    try:
        if tool is not None and tool.effect == "idempotent" and index not in replay.once:
            call = preprocess(call)
            return PlannedCall(index, call, tool, tool.parse(call.arguments))
    except ToolArgumentsError:
        pass  # its parameters are others now
    return ToolResult(UNKNOWN_OUTCOME, ok=False)


def answer_calls(
    calls: Sequence[ToolCall], answers: Mapping[int, ToolResult], *, is_last: bool
) -> tuple[list[ToolMessage], ToolCall | None]:
    """Give the answer to each call of a turn, in their order, and the `finish` or handoff that holds, if one does."""
    all_ok = all(result.ok for result in answers.values())
    messages: list[ToolMessage] = []
    ending: ToolCall | None = None
    for index, call in enumerate(calls):
        is_finish = call.name == FINISH
        if index in answers:
            content = answers[index].content
        elif ending is not None:
            done = "Finished already." if ending.name == FINISH else f"{ending.name} came first."
            content = done if is_finish and ending.name == FINISH else f"Not done: {done}"
        elif is_finish and not all_ok and not is_last:
            content = "Not finished: another call of this turn failed. See its answer, then finish again."
        else:
            ending, content = call, "Finished." if is_finish else "The conversation is handed over."
        messages.append(ToolMessage(call.id, content))
    return messages, ending


def is_unknown(result: ToolResult) -> bool:
    """Whether a call was interrupted, and this says so: nothing is known that could be the same again."""
    return not result.ok and result.content == UNKNOWN_OUTCOME


def refuse(text: str) -> ToolResult:
    """Give the answer to a call that is not run; the text may quote what the model wrote, at any length."""
    return ToolResult(replace_surrogates(cut(text, MAX_REFUSAL_CHARS)), ok=False)


def _key(call: ToolCall) -> tuple[str, str]:
    """What makes two calls the same: the tool and the arguments, however they are spaced and ordered."""
    try:
        return call.name, json.dumps(json.loads(call.arguments or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return call.name, call.arguments
