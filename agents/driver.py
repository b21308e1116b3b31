"""Performs the steps of a reaction: asks the model, runs tools, writes the journal, tells what happens.

Stands between `reaction` (what to do next) and the world: `models`, `tools`, `journal`. It never decides how a reaction goes on. A model
call is retried while its failure may pass; a tool has its time and its share of the prompt; neither can do more than end its own call
(`foreign`); cancelling the driver's task ends whatever is under way, at any await. Events go to a callback rather than out of an async
generator: tasks and timeouts do not survive a generator that its consumer leaves alone (PEP 789).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol, assert_never

from roundelay.network.errors import RoundelayError

from .agent import Agent
from .approval import apply_approval, read_approval, request_approval
from .events import (
    Event,
    Finished,
    HandedOver,
    ModelOutput,
    ModelRetry,
    OnEvent,
    Resumed,
    ToolCallEnd,
    ToolCallStart,
    ToolRequests,
    TurnEnd,
    TurnStart,
    Waiting,
)
from .foreign import Broken, Overdue, describe_error, run_foreign
from .journal import Approval, Journal, Recorded
from .models.model import Model, ModelDelta, ModelError, ModelReply, ModelRequest, Usage
from .reaction import TOO_LARGE, Reaction
from .replies import Replies, Wait, Waiter
from .retry import retry, retry_later
from .steps import (
    AnsweredCall,
    Begin,
    CallModel,
    CallTools,
    Cancel,
    Finish,
    ModelFailed,
    NewMessages,
    Outcome,
    PlannedCall,
    Replayed,
    ToolsDone,
)
from .text import cut, replace_surrogates
from .tools import ToolContext, ToolError, ToolResult

_logger = logging.getLogger(__name__)

MakeContext = Callable[[str, int], ToolContext]
"""Gives the context of a call, by its derived id and its turn: who calls, for which message."""


class Arrivals(Protocol):
    """Messages that arrive in the thread of a reaction and are read in it."""

    def take(self) -> NewMessages | None:
        """Take what has arrived; None for nothing."""
        ...

    async def settle(self, new: NewMessages) -> None:
        """What was taken is recorded: it needs no reaction of its own."""
        ...


class Driver:
    """Drives one run, a reaction or an agent inside of one, from its beginning, or from what it has recorded, to its end."""

    def __init__(
        self,
        reaction: Reaction,
        *,
        journal: Journal,
        make_context: MakeContext,
        replies: Replies | None = None,
        arrivals: Arrivals | None = None,
        on_event: OnEvent = lambda event: None,
    ) -> None:
        self._reaction = reaction
        self._journal = journal
        self._make_context = make_context
        self._replies = replies
        self._arrivals = arrivals
        self._emit = on_event
        self._recorded = Recorded()
        self._live_turn = 0  # the last turn in which anything was done rather than replayed
        self._id, self._path = journal.reaction, journal.path  # of every event

    async def run(
        self, recorded: Recorded | None = None, *, config_hash: str = "", prompt_hash: str | None = None
    ) -> Finish:
        """Drive to the end. What was recorded is taken from there: no reply is asked again, no result made again.

        Raises `ConnectError` and `Superseded` when the reaction has to stay open.
        """
        if recorded is not None:
            self._recorded = recorded
            if recorded.started is not None:
                changed = recorded.started.config_hash != config_hash
                other = prompt_hash is not None and recorded.started.prompt_hash not in ("", prompt_hash)
                self._emit(
                    Resumed(
                        reaction=self._id,
                        path=self._path,
                        turns=len(recorded.replies),
                        config_changed=changed,
                        prompt_changed=other,
                    )
                )
        step = self._reaction.advance(Begin())
        agent, text = self._reaction.agent, None
        outcome: Outcome
        while True:
            turn = self._reaction.turn
            match step:
                case CallModel():
                    if step.agent is not agent and turn == self._live_turn + 1:
                        self._emit(
                            HandedOver(
                                reaction=self._id,
                                path=self._path,
                                turn=turn,
                                agent_id=step.agent.id,
                                from_agent_id=agent.id,
                            )
                        )
                    agent = step.agent
                    outcome = await self._ask(step)
                    text = outcome.text if isinstance(outcome, ModelReply) else None
                case CallTools():
                    outcome = ToolsDone(await self._call_tools(step))
                case Finish():
                    self._emit(self._describe_end(step))
                    return step
                case _:
                    assert_never(step)
            step = self._reaction.advance(outcome)
            if isinstance(outcome, ModelFailed) and isinstance(step, Finish) and not outcome.is_recorded:
                await self._journal.record_model_failed(turn, outcome)  # before the answer, so that it stays the end
            is_over = isinstance(step, Finish) or (isinstance(step, CallModel) and step.turn > turn)
            if is_over and turn == self._live_turn:
                self._emit(
                    TurnEnd(reaction=self._id, path=self._path, turn=turn, text=text, usage=self._reaction.usage)
                )

    def cancel(self, reason: str) -> Finish:
        """End the reaction after `run` was cancelled in the middle of a step."""
        finish = self._reaction.advance(Cancel(reason))
        assert isinstance(finish, Finish)
        self._emit(self._describe_end(finish))
        return finish

    # --- the model

    async def _ask(self, step: CallModel) -> ModelReply | Replayed | ModelFailed:
        new = self._recorded.new_messages.get(step.turn)
        if new is not None:
            step = self._tell(new)
        known = self._recorded.replay(step.turn)
        if known is not None:
            return known
        if step.turn != self._live_turn:
            if self._arrivals is not None and new is None and (new := self._arrivals.take()) is not None:
                await self._journal.record_new_messages(step.turn, new)
                step = self._tell(new)
                await self._arrivals.settle(new)
            self._live_turn = step.turn
            self._emit(
                TurnStart(reaction=self._id, path=self._path, turn=step.turn, max_turns=self._reaction.max_turns)
            )
        reply = await self._complete(step)
        if isinstance(reply, ModelFailed):
            return reply
        reply = _without_surrogates(reply)
        if self._journal.is_too_large(reply):
            reply = ModelReply(text=None, usage=reply.usage, finish_reason=TOO_LARGE, model=reply.model)
        await self._journal.record_reply(step.turn, reply, agent_id=step.agent.id, is_last=not step.tools)
        return reply

    def _tell(self, new: NewMessages) -> CallModel:
        step = self._reaction.advance(new)
        assert isinstance(step, CallModel)
        return step

    async def _complete(self, step: CallModel) -> ModelReply | ModelFailed:
        """Ask until there is a reply or nothing more to try."""
        model, policy, reaction = step.agent.model, step.agent.policy, self._journal.reaction
        request = ModelRequest(step.messages, step.tools, agent_id=step.agent.id, reaction=reaction, turn=step.turn)
        made = 0

        def judge(error: Exception) -> bool | float:
            nonlocal made
            made += 1
            if not isinstance(error, ModelError) or not error.retryable or made >= policy.model_attempts:
                return False
            # Not all at once: many agents may wait for one provider.
            delay_s: float = FIRST_DELAY_S * 2 ** (made - 1) * random.uniform(0.75, 1.25)
            if error.retry_after_ms is not None:
                delay_s = error.retry_after_ms / 1000
            if delay_s > policy.model_timeout_s:
                return False  # a provider that wants longer than a model call may take will not be waited for
            self._emit(ModelRetry(self._id, step.turn, str(error), delay_s, path=self._path))
            return delay_s

        try:
            return await retry(
                lambda: self._attempt(model, request, policy.model_timeout_s),
                judge=judge,
                attempts=policy.model_attempts,
            )
        except ModelError as error:
            told = {"reaction": reaction, "reason": error.reason, "error": str(error)}
            _logger.warning("model failed", extra=told)
            return ModelFailed(replace_surrogates(str(error)), error.reason)
        except (Exception, Broken) as error:
            _logger.exception("model failed", extra={"reaction": reaction, "agent_id": step.agent.id})
            return ModelFailed(replace_surrogates(describe_error(error)))

    async def _attempt(self, model: Model, request: ModelRequest, timeout_s: float) -> ModelReply:
        is_heard = True

        def tell(delta: ModelDelta) -> None:
            if is_heard:  # an attempt that was given up may go on for a while
                event = ModelOutput(self._id, request.turn, delta.text, delta.reasoning, path=self._path)
                self._emit(event)

        try:
            return await run_foreign(
                lambda: model.complete(request, tell), name=f"model-{model.name}", timeout_s=timeout_s
            )
        except Overdue:
            text = f"The model {model.name} gave no reply within {timeout_s:g} s."
            raise ModelError(text, reason="timeout") from None
        finally:
            is_heard = False

    # --- the tools

    async def _call_tools(self, step: CallTools) -> dict[int, ToolResult]:
        if step.turn not in self._recorded.replies:
            self._emit(
                ToolRequests(reaction=self._id, path=self._path, turn=step.turn, text=step.text, calls=step.calls)
            )
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
        if planned.tool.needs_approval:
            approval = self._recorded.approvals.get(place) or await self._seek_approval(turn, planned)
            decided = apply_approval(planned, approval)
            if isinstance(decided, ToolResult):
                return await self._conclude(turn, planned, decided)
            planned = decided
        if place not in self._recorded.begun_calls:
            await self._journal.record_tool_started(turn, planned)
        name, written = planned.tool.name, planned.call.arguments
        self._emit(
            ToolCallStart(
                reaction=self._id, path=self._path, turn=turn, call=planned.index, tool=name, arguments=written
            )
        )
        return await self._conclude(turn, planned, await self._perform(turn, planned))

    async def _conclude(self, turn: int, call: PlannedCall | AnsweredCall, result: ToolResult) -> ToolResult:
        if (turn, call.index) not in self._recorded.results:
            self._live_turn = turn
            await self._journal.record_tool_result(turn, call, result)
            name, content = call.call.name, result.content
            self._emit(
                ToolCallEnd(
                    reaction=self._id,
                    path=self._path,
                    turn=turn,
                    call=call.index,
                    tool=name,
                    ok=result.ok,
                    content=content,
                )
            )
        return result

    async def _perform(self, turn: int, planned: PlannedCall) -> ToolResult:
        """Run a tool to a result that the model can read, whatever the tool does.

        A hub that is lost for good is told as a result too: to record that fails, and the reaction stays open.
        """
        tool, policy = planned.tool, self._reaction.agent.policy
        timeout_s = tool.timeout_s if tool.timeout_s is not None else policy.tool_timeout_s
        ends: list[Finish] = []  # of agents that ran inside of the call
        threads: dict[str, None] = {}  # that its messages went to

        async def attempt() -> str:
            ends.clear()  # a repeat runs and sends under the same ids
            context = self._make_context(self._journal.derive_id(turn, planned.index), turn)
            run_agent = partial(self._run_agent, turn, planned.index, ends)
            context = replace(context, run_agent=run_agent, waiter=self._make_waiter(turn, planned.index))
            try:
                return await tool.call(context, planned.arguments)
            finally:
                threads.update(dict.fromkeys(getattr(context.client, "threads", ())))

        # `rate_limited` is settled here, out of the model's sight; only a call that may be repeated is.
        attempts = policy.hub_attempts if tool.effect == "idempotent" else 1
        ok = False
        try:
            content = await run_foreign(
                lambda: retry_later(attempt, attempts=attempts), name=f"tool-{tool.name}", timeout_s=timeout_s
            )
            ok = True
        except Overdue:
            content = (
                f"{tool.name} took longer than {timeout_s:g} s and was stopped. Whether it took effect is unknown."
            )
        except RoundelayError as error:
            content = f"{error.code}: {error}"
        except (Exception, Broken) as error:
            _logger.exception(
                "tool failed", extra={"tool": tool.name, "reaction": self._journal.reaction, "turn": turn}
            )
            content = describe_error(error)
        # A character takes at most 8 bytes of a record here: 6 as an escape, and room for the rest of the frame.
        limit = min(policy.max_result_chars, self._journal.max_body_bytes // 8)
        usage = sum((end.usage for end in ends), Usage())
        calls = sum(end.tool_calls for end in ends)
        is_answer = ok and tool.answers
        return ToolResult(replace_surrogates(cut(content, limit)), ok, tuple(threads), usage, calls, is_answer)

    async def _seek_approval(self, turn: int, planned: PlannedCall) -> Approval | None:
        """Ask the people in the thread, and wait; None if nobody decided in time."""
        waiter = self._make_waiter(turn, planned.index)
        if waiter is None:
            return None
        context = self._make_context(f"{self._journal.derive_id(turn, planned.index)}-approval", turn)
        reply = await request_approval(context, planned, waiter, self._reaction.agent.policy.approval_timeout_s)
        if reply is None:
            return None
        approval = read_approval(reply)
        await self._journal.record_approval(turn, planned.index, approval)
        return approval

    def _make_waiter(self, turn: int, call: int) -> Waiter | None:
        if self._replies is None:
            return None

        async def record(wait: Wait) -> None:
            await self._journal.record_waiting(turn, call, wait)
            to = tuple(wait.questions)
            self._emit(Waiting(self._id, turn, call, to, wait.until, wait.is_approval, path=self._path))

        known = self._recorded.waits.get((turn, call))
        is_resumed = (turn, call) in self._recorded.begun_calls
        prepare = partial(self._journal.record_asking, turn, call)
        return Waiter(self._replies, known=known, is_resumed=is_resumed, prepare=prepare, record=record)

    async def _run_agent(self, turn: int, call: int, ends: list[Finish], agent: Agent, text: str) -> Finish:
        """Run an agent inside of a call, on a text and nothing else: its turns are its own, its records stand under the call's path."""
        journal = self._journal.descend(turn, call, len(ends))
        if journal.depth > self._reaction.agent.policy.max_depth:
            raise ToolError(f"Not run: agents call each other {journal.depth} deep already.")
        policy = replace(agent.policy, on_text="reply")  # its text is this call's result
        reaction = Reaction(replace(agent, policy=policy), prompt=text, answers=True, path=journal.path)
        driver = Driver(
            reaction, journal=journal, make_context=self._make_context, replies=self._replies, on_event=self._emit
        )
        ends.append(Finish("cancelled", "", None, 0, reaction.usage))
        place = len(ends) - 1
        try:
            end = await driver.run(self._recorded.children.get(journal.path))
            ends[place] = end
            return end
        finally:
            if ends[place].status == "cancelled":
                ends[place] = replace(ends[place], usage=reaction.usage, tool_calls=reaction.tool_calls)

    def _describe_end(self, finish: Finish) -> Event:
        return Finished(
            reaction=self._id, path=self._path, status=finish.status, reason=finish.reason, answer=finish.answer, turns=finish.turns,
            usage=finish.usage, tool_calls=finish.tool_calls,
        )  # fmt: skip


FIRST_DELAY_S = 0.5
"""Before the second attempt of a model call that named no delay, about; doubled for each further one."""


def first_error(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Give the first single error of a group: the tasks beside it were cancelled because of it."""
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _without_surrogates(reply: ModelReply) -> ModelReply:
    calls = tuple(
        replace(call, name=replace_surrogates(call.name), arguments=replace_surrogates(call.arguments))
        for call in reply.tool_calls
    )
    return replace(reply, text=None if reply.text is None else replace_surrogates(reply.text), tool_calls=calls)
