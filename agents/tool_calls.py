"""Runs the tool calls of a turn, all at once: approval, middleware, the tool itself in its time, and the record of
each.

Part of `driver`. Whatever a tool does ends as a result that the model can read. A hub that is lost for good is told as
a result too: to record that fails, and the reaction stays open.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

from pydantic import JsonValue

from roundelay.network.errors import BudgetExhausted, LoopStopped, RequestError, RoundelayError

from .agent import Agent
from .approval import apply_approval, read_approval, request_approval
from .events import (
    Progress,
    RemoteCall,
    RemoteOutput,
    ToolCallEnd,
    ToolCallStart,
    ToolOutput,
    ToolRequests,
    Waiting,
)
from .foreign import Overdue, describe_error, first_error, is_told_to_end, run_foreign
from .journal import drop_largest
from .model_calls import ModelCalls
from .models.model import Usage
from .records import Approval
from .relays import Listener
from .replies import Wait, Waiter
from .retry import retry_later
from .run import Run
from .stand_in import STAND_IN
from .steps import DISABLED, NOT_RUN, AnsweredCall, CallTools, Finish, PlannedCall
from .text import cut, replace_surrogates
from .tools import ToolContext, ToolResult

_logger = logging.getLogger(__name__)

MAX_KEY_CHARS, MAX_NAMED = 200, 20
"""Of the keys of dropped data that are named in its place."""

RunInside = Callable[[int, int, list[Finish], Agent, str], Awaitable[Finish]]
"""Runs an agent inside of a call: the call's turn and place, the ends of those that ran in it, the agent and its
text."""


class ToolCalls:
    """The tool calls of one run."""

    def __init__(self, run: Run, models: ModelCalls, run_inside: RunInside) -> None:
        self._run = run
        self._models = models
        self._taken: dict[tuple[int, int], list[int]] = {}  # by call: the replies that it waited for and had
        self._run_inside = run_inside

    async def call(self, step: CallTools) -> dict[int, ToolResult]:
        """Run what is planned and record what is answered already; give the result of each planned call."""
        run = self._run
        if step.turn not in run.recorded.replies:
            run.emit(ToolRequests(run.id, step.turn, step.text, step.calls, run.path))
        try:
            async with asyncio.TaskGroup() as group:
                for answered in step.answered:
                    group.create_task(self._conclude(step.turn, answered, answered.result))
                tasks = {it.index: group.create_task(self._call(step.turn, it)) for it in step.planned}
        except BaseExceptionGroup as failures:
            raise first_error(failures) from failures
        return {index: task.result() for index, task in tasks.items()}

    async def _call(self, turn: int, planned: PlannedCall) -> ToolResult:
        run, place = self._run, (turn, planned.index)
        # What a person decided holds, whatever the tool says now.
        if planned.tool.needs_approval or place in run.recorded.approvals:
            try:
                approval = run.recorded.approvals.get(place) or await self._seek_approval(turn, planned)
                decided = apply_approval(planned, approval)
            except (RequestError, LoopStopped, BudgetExhausted) as error:
                text = f"Not run: nobody could be asked to approve it ({error.code}: {error})"
                decided = ToolResult(text, ok=False, data={NOT_RUN: True})
            if isinstance(decided, ToolResult):
                return await self._conclude(turn, planned, decided)
            planned = decided
        if place not in run.recorded.begun_calls:
            await run.journal.record_tool_started(turn, planned)
        name, written = planned.tool.name, planned.call.arguments
        run.emit(ToolCallStart(run.id, turn, planned.index, name, written, run.path))
        if (stand_in := STAND_IN.get()) is not None:
            recorded = await stand_in.perform(run.id, run.path, turn, planned)
            if recorded is not None:
                return await self._conclude(turn, planned, recorded)
        spent: list[Usage] = []
        chain = run.reaction.agent.chain
        try:
            result = await chain.around_tool(
                lambda: self._models.describe(turn, planned.index, spent), planned, partial(self._perform, turn)
            )
            if not isinstance(result, ToolResult):
                raise TypeError(f"it gave a {type(result).__name__} for the result")
        except BaseException as error:  # of middleware: this call's result, as a tool's own error is
            if is_told_to_end(error):
                raise
            _logger.exception("middleware around a tool failed", extra={"tool": name, "reaction": run.id, "turn": turn})
            text = f"Something around {name} failed ({describe_error(error)}). Whether it took effect is unknown."
            result = ToolResult(replace_surrogates(cut(text, run.reaction.agent.policy.max_result_chars)), ok=False)
        if spent:
            result = replace(result, usage=sum(spent, result.usage))
        return await self._conclude(turn, planned, result)

    async def _conclude(self, turn: int, call: PlannedCall | AnsweredCall, result: ToolResult) -> ToolResult:
        run = self._run
        if (turn, call.index) not in run.recorded.results:
            run.live_turn = turn
            await run.journal.record_tool_result(turn, call, result, self._taken.pop((turn, call.index), ()))
            name, content = call.call.name, result.content
            run.emit(ToolCallEnd(run.id, turn, call.index, name, result.ok, content, run.path))
        return result

    async def _perform(self, turn: int, planned: PlannedCall) -> ToolResult:
        """Run a tool to a result that the model can read, whatever the tool does."""
        run, tool = self._run, planned.tool
        policy = run.reaction.agent.policy
        timeout_s = tool.timeout_s if tool.timeout_s is not None else policy.tool_timeout_s
        ends: list[Finish] = []  # of agents that ran inside of the call
        threads: dict[str, None] = {}  # that its messages went to
        data: dict[str, JsonValue] = {}
        loop, loop_thread, is_heard = asyncio.get_running_loop(), threading.get_ident(), True

        has_step = False

        def tell(kind: Literal["progress", "piece"], text: str) -> None:
            nonlocal has_step
            if threading.get_ident() != loop_thread:  # a sync tool runs in a thread of its own
                loop.call_soon_threadsafe(tell, kind, text)
            elif is_heard:
                has_step |= kind == "progress"
                self._tell(turn, planned, kind, text)

        async def attempt() -> str:
            ends.clear()  # a repeat runs and sends under the same ids
            context = replace(
                run.make_context(run.journal.derive_id(turn, planned.index), turn),
                run_agent=partial(self._run_inside, turn, planned.index, ends),
                waiter=self._make_waiter(turn, planned, run.recorded.waits),
                tell=tell,
            )
            if tool.should_use is not None and not await _ask(tool.should_use, context):
                data[DISABLED] = True
                return f"Not run: {tool.name} is not enabled here."
            try:
                content, given = await tool.run(context, planned.arguments)
                data.update(given)
                return content
            finally:
                threads.update(dict.fromkeys(getattr(context.client, "threads", ())))

        # `rate_limited` is settled here, out of the model's sight; only a call that may be repeated is.
        attempts = policy.hub_attempts if tool.effect == "idempotent" else 1
        ok = False
        try:
            content = await run_foreign(
                lambda: retry_later(attempt, attempts=attempts), name=f"tool-{tool.name}", timeout_s=timeout_s
            )
            ok = DISABLED not in data
        except Overdue:
            content = (
                f"{tool.name} took longer than {timeout_s:g} s and was stopped. Whether it took effect is unknown."
            )
        except RoundelayError as error:
            content = f"{error.code}: {error}"
        except Exception as error:  # whatever the tool's code raises is its call's result
            _logger.exception("tool failed", extra={"tool": tool.name, "reaction": run.id, "turn": turn})
            content = describe_error(error)
        finally:
            is_heard = False  # a call that was given up may go on for a while
            if has_step:
                run.emit(Progress(run.id, turn, "", planned.index, is_done=True, path=run.path, index=next(run.pieces)))
        # A character takes at most 6 bytes of a record, as an escape; the other half is for the data and the rest of
        # the frame.
        limit = min(policy.max_result_chars, run.journal.max_body_bytes // 12)
        usage = sum((end.usage for end in ends), Usage())
        calls = sum(end.tool_calls for end in ends)
        is_answer = ok and tool.answers
        content = replace_surrogates(content)
        whole = content if len(content) > limit else None
        if dropped := drop_largest(data, run.journal.max_body_bytes // 4):
            named: list[JsonValue] = [cut(key, MAX_KEY_CHARS) for key in dropped[:MAX_NAMED]]
            _logger.warning("tool data dropped", extra={"tool": tool.name, "keys": named})
            data["dropped"] = named
        return ToolResult(cut(content, limit), ok, tuple(threads), usage, calls, is_answer, data, whole)

    def _tell(self, turn: int, planned: PlannedCall, kind: Literal["progress", "piece"], text: str) -> None:
        run, name, text = self._run, planned.tool.name, replace_surrogates(text)
        index = next(run.pieces)
        if kind == "piece":
            is_held = run.is_held and planned.tool.answers
            run.emit(ToolOutput(run.id, turn, planned.index, name, text, run.path, index, is_held=is_held))
        else:
            run.emit(Progress(run.id, turn, text, planned.index, path=run.path, index=index))

    async def _seek_approval(self, turn: int, planned: PlannedCall) -> Approval | None:
        """Ask the people in the thread, and wait; None if nobody decided in time."""
        run = self._run
        waiter = self._make_waiter(turn, planned, run.recorded.approval_waits)
        if waiter is None:
            return None
        context = run.make_context(f"{run.journal.derive_id(turn, planned.index)}-approval", turn)
        reply = await request_approval(context, planned, waiter, run.reaction.agent.policy.approval_timeout_s)
        if reply is None:
            return None
        approval = read_approval(reply)
        await run.journal.record_approval(turn, planned.index, approval)
        return approval

    def _make_waiter(self, turn: int, planned: PlannedCall, waits: Mapping[tuple[int, int], Wait]) -> Waiter | None:
        """``waits``: those that are known."""
        run, call = self._run, planned.index
        if run.replies is None:
            return None

        async def record(wait: Wait) -> None:
            await run.journal.record_waiting(turn, call, wait)

        def tell(wait: Wait) -> None:
            to = tuple(wait.questions)
            run.emit(Waiting(run.id, turn, call, to, wait.until, wait.is_approval, run.path, planned.tool.name))

        def tell_remote(event: RemoteOutput | RemoteCall) -> None:
            if isinstance(event, RemoteOutput) and event.kind != "progress":  # a tool's output may be the answer too
                event = replace(event, is_held=run.is_held)
            run.emit(event)

        def take(replies: Iterable[int]) -> None:
            self._taken.setdefault((turn, call), []).extend(replies)

        known = waits.get((turn, call))
        is_resumed = (turn, call) in run.recorded.begun_calls
        prepare = partial(run.journal.record_asking, turn, call)
        listener = Listener(run.id, run.path, turn, call, run.pieces, tell_remote)
        return Waiter(
            run.replies, known=known, reaction=run.id, is_resumed=is_resumed, prepare=prepare, record=record, tell=tell,
            take=take, listener=listener,
        )  # fmt: skip


async def _ask(should_use: Callable[[ToolContext], bool | Awaitable[bool]], context: ToolContext) -> bool:
    answer = should_use(context)
    return bool(await answer if inspect.isawaitable(answer) else answer)
