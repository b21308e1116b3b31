"""Performs the steps of a reaction: asks the model, runs tools, writes the journal, tells what happens.

Stands between `reaction` (what to do next) and the world: `models`, `tools`, `journal`. It never decides how a reaction goes on. A model
call is retried while its failure may pass; a tool has its time and its share of the prompt; cancelling the driver's task ends whatever
is under way, at any await. Events go to a callback rather than out of an async generator: tasks and timeouts do not survive a
generator that its consumer leaves alone (PEP 789).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

from roundelay.network.errors import ConnectError, RoundelayError, Superseded

from .events import (
    Event,
    Finished,
    ModelOutput,
    ModelRetry,
    OnEvent,
    Resumed,
    ToolCallEnd,
    ToolCallStart,
    ToolRequests,
    TurnEnd,
    TurnStart,
)
from .journal import Journal, Recorded
from .models.model import Model, ModelDelta, ModelError, ModelReply, ModelRequest
from .policy import AgentPolicy
from .reaction import (
    TOO_LARGE,
    AnsweredCall,
    Begin,
    CallModel,
    CallTools,
    Cancel,
    Finish,
    ModelFailed,
    Outcome,
    PlannedCall,
    Reaction,
    ToolsDone,
)
from .retry import retry_later
from .text import cut, replace_surrogates
from .tools import ToolContext, ToolResult

_logger = logging.getLogger(__name__)

MakeContext = Callable[[int, PlannedCall], ToolContext]
"""Gives the context of a call in a turn: who calls, for which message, under which derived id."""


class Driver:
    """Drives one reaction from its beginning, or from what it has recorded, to its end."""

    def __init__(
        self,
        reaction: Reaction,
        *,
        agent_id: str,
        model: Model,
        policy: AgentPolicy,
        journal: Journal,
        make_context: MakeContext,
        on_event: OnEvent = lambda event: None,
    ) -> None:
        self._reaction = reaction
        self._agent_id = agent_id
        self._model = model
        self._policy = policy
        self._journal = journal
        self._make_context = make_context
        self._emit = on_event
        self._recorded = Recorded()
        self._live_turn = 0  # the last turn in which anything was done rather than replayed

    async def run(self, recorded: Recorded | None = None, *, config_hash: str = "") -> Finish:
        """Drive to the end. What was recorded is taken from there: no reply is asked again, no result made again.

        Raises `ConnectError` and `Superseded` when the reaction has to stay open, and whatever a faulty model raises beside `ModelError`.
        """
        if recorded is not None:
            self._recorded = recorded
            changed = recorded.started is not None and recorded.started.config_hash != config_hash
            self._emit(Resumed(self._journal.reaction, len(recorded.replies), changed))
        step = self._reaction.advance(Begin())
        reply = ModelReply(text=None)
        outcome: Outcome
        while True:
            turn = self._reaction.turn
            match step:
                case CallModel():
                    outcome = await self._ask(step)
                    reply = outcome if isinstance(outcome, ModelReply) else reply
                case CallTools():
                    outcome = ToolsDone(await self._call_tools(step, reply))
                case Finish():
                    self._emit(_finished(self._journal.reaction, step))
                    return step
                case _:
                    assert_never(step)
            step = self._reaction.advance(outcome)
            if not isinstance(step, CallTools) and turn == self._live_turn:
                self._emit(TurnEnd(self._journal.reaction, turn, reply.text, self._reaction.usage))

    def cancel(self, reason: str) -> Finish:
        """End the reaction after `run` was cancelled in the middle of a step."""
        finish = self._reaction.advance(Cancel(reason))
        assert isinstance(finish, Finish)
        self._emit(_finished(self._journal.reaction, finish))
        return finish

    # --- the model

    async def _ask(self, step: CallModel) -> ModelReply | ModelFailed:
        recorded = self._recorded.replies.get(step.turn)
        if recorded is not None:
            return recorded
        self._live_turn = step.turn
        self._emit(TurnStart(self._journal.reaction, step.turn, self._policy.max_turns))
        reply = await self._complete(step)
        if isinstance(reply, ModelFailed):
            return reply
        reply = _without_surrogates(reply)
        if self._journal.is_too_large(reply):
            reply = ModelReply(text=None, usage=reply.usage, finish_reason=TOO_LARGE, model=reply.model)
        await self._journal.record_reply(step.turn, reply)
        return reply

    async def _complete(self, step: CallModel) -> ModelReply | ModelFailed:
        request = ModelRequest(
            step.messages, step.tools, agent_id=self._agent_id, reaction=self._journal.reaction, turn=step.turn
        )

        def tell(delta: ModelDelta) -> None:
            self._emit(ModelOutput(self._journal.reaction, step.turn, delta.text, delta.reasoning))

        attempt = 1
        while True:
            try:
                async with asyncio.timeout(self._policy.model_timeout_s):
                    return await self._model.complete(request, tell)
            except TimeoutError:
                text = f"The model {self._model.name} gave no reply within {self._policy.model_timeout_s:g} s."
                error = ModelError(text, reason="timeout")
            except ModelError as failure:
                error = failure
            delay_s = (
                FIRST_DELAY_S * 2 ** (attempt - 1) if error.retry_after_ms is None else error.retry_after_ms / 1000
            )
            # A provider that wants longer than a model call may take will not be waited for.
            if not error.retryable or attempt >= self._policy.model_attempts or delay_s > self._policy.model_timeout_s:
                _logger.warning("model failed", extra={"reaction": self._journal.reaction, "reason": error.reason})
                return ModelFailed(replace_surrogates(str(error)))
            self._emit(ModelRetry(self._journal.reaction, step.turn, str(error), delay_s))
            await asyncio.sleep(delay_s)
            attempt += 1

    # --- the tools

    async def _call_tools(self, step: CallTools, reply: ModelReply) -> dict[int, ToolResult]:
        if step.turn not in self._recorded.replies:
            self._emit(ToolRequests(self._journal.reaction, step.turn, reply.text, reply.tool_calls))
        try:
            async with asyncio.TaskGroup() as group:
                for answered in step.answered:
                    group.create_task(self._conclude(step.turn, answered, answered.result))
                tasks = {it.index: group.create_task(self._call(step.turn, it)) for it in step.planned}
        except BaseExceptionGroup as failures:
            raise first_error(failures) from failures
        return {index: task.result() for index, task in tasks.items()}

    async def _call(self, turn: int, planned: PlannedCall) -> ToolResult:
        place = (turn, planned.index)
        recorded = self._recorded.results.get(place)
        if recorded is not None:
            return recorded
        if place in self._recorded.begun_calls and planned.tool.effect == "once":
            return await self._conclude(turn, planned, ToolResult(_UNKNOWN_OUTCOME, ok=False))
        if place not in self._recorded.begun_calls:
            await self._journal.record_tool_started(turn, planned)
        self._emit(
            ToolCallStart(self._journal.reaction, turn, planned.index, planned.tool.name, planned.call.arguments)
        )
        return await self._conclude(turn, planned, await self._perform(turn, planned))

    async def _conclude(self, turn: int, call: PlannedCall | AnsweredCall, result: ToolResult) -> ToolResult:
        if (turn, call.index) not in self._recorded.results:
            self._live_turn = turn
            await self._journal.record_tool_result(turn, call, result)
            self._emit(ToolCallEnd(self._journal.reaction, turn, call.index, call.call.name, result.ok, result.content))
        return result

    async def _perform(self, turn: int, planned: PlannedCall) -> ToolResult:
        """Run a tool to a result that the model can read, whatever the tool does."""
        tool = planned.tool
        timeout_s = tool.timeout_s if tool.timeout_s is not None else self._policy.tool_timeout_s
        context = self._make_context(turn, planned)
        # `rate_limited` is settled here, out of the model's sight; only a call that may be repeated is.
        attempts = self._policy.hub_attempts if tool.effect == "idempotent" else 1
        try:
            async with asyncio.timeout(timeout_s) as scope:
                content = await retry_later(lambda: tool.call(context, planned.arguments), attempts=attempts)
        except (ConnectError, Superseded):
            raise  # not the tool's failure: the reaction stays open and is resumed
        except RoundelayError as error:
            return self._bound(f"{error.code}: {error}", ok=False)
        except TimeoutError as error:
            if not scope.expired():
                return self._bound(_describe(error), ok=False)
            unknown = " Whether it took effect is unknown." if tool.effect == "once" else ""
            return ToolResult(f"{tool.name} took longer than {timeout_s:g} s and was stopped.{unknown}", ok=False)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # the reaction is being ended
            return self._bound(_describe(error), ok=False)  # what the tool waited for was given up
        except (
            Exception,
            SystemExit,
        ) as error:  # a tool that wraps a command may exit: that ends the call, not the agent
            _logger.exception(
                "tool failed", extra={"tool": tool.name, "reaction": self._journal.reaction, "turn": turn}
            )
            return self._bound(_describe(error), ok=False)
        return self._bound(content, ok=True)

    def _bound(self, content: str, *, ok: bool) -> ToolResult:
        # A character takes at most 8 bytes of a record here: 6 as an escape, and room for the rest of the frame.
        limit = min(self._policy.max_result_chars, self._journal.max_body_bytes // 8)
        return ToolResult(replace_surrogates(cut(content, limit)), ok=ok)


FIRST_DELAY_S = 0.5
"""Before the second attempt of a model call that named no delay; doubled for each further one."""

_UNKNOWN_OUTCOME = (
    "The agent was interrupted while this call was running. Whether it took effect is unknown, and it was not repeated. "
    "Find out before you call it again."
)


def first_error(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Give the first single error of a group: the tasks beside it were cancelled because of it."""
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _finished(reaction: str, finish: Finish) -> Event:
    return Finished(reaction, finish.status, finish.reason, finish.answer, finish.turns, finish.usage)


def _describe(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _without_surrogates(reply: ModelReply) -> ModelReply:
    calls = tuple(
        replace(call, name=replace_surrogates(call.name), arguments=replace_surrogates(call.arguments))
        for call in reply.tool_calls
    )
    return replace(reply, text=None if reply.text is None else replace_surrogates(reply.text), tool_calls=calls)
