"""Decides which tool calls of a model's reply run. Refuses unknown tools, wrong arguments, too many calls, and the same
call repeated too often.

Part of the loop (`reaction`). Pure, except for the agent's ``preprocess_arguments`` hooks, which may be coroutines.
Records are final: a call with a recorded result is never planned again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from roundelay.network.errors import REFUSAL_CODES
from roundelay.network.text import cut

from .agent import Agent
from .loop_texts import ARGUMENTS_LOST, UNKNOWN_OUTCOME
from .models.model import ModelReply, ToolCall, ToolMessage, derive_short_id
from .text import replace_surrogates
from .tools import FINISH, PlannedCall
from .values import DISABLED, NOT_RUN, Replayed, ToolArgumentsError, ToolResult

MAX_REFUSAL_CHARS = 2000

Preprocess = Callable[[ToolCall], Awaitable[ToolCall]]
"""Function that returns a call with the arguments to use. Raises `ToolArgumentsError`."""


@dataclass(slots=True)
class Plan:
    """Decisions on the calls of one reply, keyed by the index of the call. `finish` and handoffs are neither planned
    nor refused.
    """

    planned: tuple[PlannedCall, ...] = ()
    refused: dict[int, ToolResult] = field(default_factory=dict)
    """Calls that do not run, with the answer to each: a refusal, or the recorded result."""

    def check_results(self, results: Mapping[int, ToolResult]) -> None:
        """Raise `ValueError` if a planned call has no result."""
        missing = [planned.call.name for planned in self.planned if planned.index not in results]
        if missing:
            raise ValueError(f"no result for {', '.join(missing)}")

    def list_run(self, replay: Replayed | None) -> list[int]:
        """Return the indexes of the calls that ran, now or before a restart."""
        run = {planned.index for planned in self.planned}
        # A call that began but has no result may have run. The answer to such a call states that its outcome is
        # unknown, and the call is never counted.
        return sorted(run if replay is None else run | (replay.begun & replay.results.keys()))


class Planner:
    """Plans the calls of one run and remembers their results."""

    def __init__(self) -> None:
        self._call_ids: set[str] = set()
        self._results: dict[tuple[str, str], list[str]] = {}  # results of calls that ran, by name and arguments

    def make_ids_unique(self, turn: int, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        """Replace ids that are empty or were used before. Providers refuse a history that contains an id twice."""
        unique = []
        for index, call in enumerate(calls):
            call_id, salt = call.id, 0
            while not call_id or call_id in self._call_ids:
                # Derive the id instead of drawing it at random: a resumed run must send the provider the same ids.
                call_id, salt = derive_short_id(call.id, turn, index, salt), salt + 1
            self._call_ids.add(call_id)
            unique.append(replace(call, id=call_id))
        return tuple(unique)

    async def plan(
        self, agent: Agent, reply: ModelReply, *, is_last: bool, replay: Replayed | None, preprocess: Preprocess
    ) -> Plan:
        """Decide for each call of a reply whether it runs. ``is_last``: the turn has no tools."""
        planned: list[PlannedCall] = []
        plan = Plan()
        for index, call in enumerate(reply.tool_calls):
            decision = await _recall(agent, index, call, replay, preprocess)
            match decision or await self._decide(agent, reply, index, call, is_last, preprocess):
                case PlannedCall() as planned_call:
                    planned.append(planned_call)
                case ToolResult() as result:
                    plan.refused[index] = result
        plan.planned = tuple(planned)
        return plan

    def add_result(self, call: ToolCall, content: str) -> None:
        """Remember the result of a call that ran."""
        self._results.setdefault(_make_key(call), []).append(content)

    async def _decide(
        self, agent: Agent, reply: ModelReply, index: int, call: ToolCall, is_last: bool, preprocess: Preprocess
    ) -> PlannedCall | ToolResult | None:
        """Return the call to run, or the refusal. Return None for `finish` and handoffs, which the loop handles."""
        limit, max_same = agent.policy.max_tool_calls_per_turn, agent.policy.max_same_calls
        if index >= limit:
            return refuse(f"Not run: at most {limit} calls are run in one turn. Call it again in the next one.")
        if call.name == FINISH:
            return None
        if is_last:
            return refuse("Not run: no tools in the last turn.")
        tool = agent.find_tool(call.name)
        if tool is None and agent.find_handoff(call.name) is not None:
            return None
        if tool is None:
            names = ", ".join(spec.name for spec in agent.specs)
            return refuse(f'There is no tool "{call.name[:64]}". The tools are: {names}.')
        try:
            processed = await preprocess(call)
            arguments = tool.parse(processed.arguments)
        except ToolArgumentsError as error:
            note = " (The reply was cut off at its limit of length.)" if reply.is_cut else ""
            return refuse(f"Not run: {error}{note}")
        # The model repeats its own text, so compare calls as the model wrote them, before hooks changed them.
        before = self._results.get(_make_key(call), [])[-max_same:]
        if len(before) == max_same and len(set(before)) == 1:
            return refuse(
                f"Not run: you made this very call {max_same} times, and its result was the same each time. "
                "Do something else, or call finish."
            )
        return PlannedCall(index, processed, tool, arguments)


async def _recall(
    agent: Agent, index: int, call: ToolCall, replay: Replayed | None, preprocess: Preprocess
) -> PlannedCall | ToolResult | None:
    """Return the recorded result of a call. For a call that was interrupted, return the call if it can be repeated, and
    otherwise the answer that its outcome is unknown. Return None for a call without a record.
    """
    if replay is None:
        return None
    if index in replay.results:
        return replay.results[index]
    if index not in replay.begun:
        is_tool_call = call.name != FINISH and agent.find_handoff(call.name) is None
        return refuse(ARGUMENTS_LOST) if is_tool_call and index in replay.altered.calls else None
    if index in replay.altered.calls:
        return ToolResult(UNKNOWN_OUTCOME, ok=False)
    tool = agent.find_tool(call.name)
    try:
        # Repeat a call only if its tool was repeatable in the records and still is. A call of any other tool could have
        # its effect twice.
        if tool is not None and tool.effect != "once" and index not in replay.once:
            call = await preprocess(call)
            return PlannedCall(index, call, tool, tool.parse(call.arguments))
    except ToolArgumentsError:
        pass  # the tool's parameters have changed in the meantime
    return ToolResult(UNKNOWN_OUTCOME, ok=False)


def answer_calls(
    calls: Sequence[ToolCall], answers: Mapping[int, ToolResult], *, is_last: bool
) -> tuple[list[ToolMessage], ToolCall | None]:
    """Return the answer to each call of a turn, in order, and the `finish` or handoff that takes effect."""
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
        # The model wrote `finish` before it saw the failure. In the last turn, the model cannot react to the failure,
        # so `finish` takes effect.
        elif is_finish and not all_ok and not is_last:
            content = "Not finished: another call of this turn failed. See its answer, then finish again."
        else:
            ending, content = call, "Finished." if is_finish else "The conversation is handed over."
        messages.append(ToolMessage(call.id, content))
    return messages, ending


_REFUSED = re.compile(rf"(tool: )?(Not run|Not sent|{'|'.join(sorted(REFUSAL_CODES))}): ")


def has_effect(result: ToolResult) -> bool:
    """Return whether a planned call did anything. A call has no effect if the loop or the hub refused it."""
    if DISABLED in result.data or NOT_RUN in result.data:
        return False
    return result.ok or not _REFUSED.match(result.content)


def is_unknown(result: ToolResult) -> bool:
    """Return whether this is the answer to an interrupted call, whose real result is unknown."""
    return not result.ok and result.content == UNKNOWN_OUTCOME


def refuse(text: str) -> ToolResult:
    """Return the answer to a call that does not run. The text is cut, because it may quote model text of any length."""
    return ToolResult(replace_surrogates(cut(text, MAX_REFUSAL_CHARS)), ok=False)


def _make_key(call: ToolCall) -> tuple[str, str]:
    """Return a key that is equal for equal calls: the tool and its arguments, regardless of their order and spacing."""
    try:
        return call.name, json.dumps(json.loads(call.arguments or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return call.name, call.arguments
