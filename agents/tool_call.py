"""Tool calls of one run: approval, middleware, the tool itself, and the recorded result.

`driver` uses `ToolCaller` to run the calls of a turn. A call passes three layers: a person's approval, the agent's
middleware, and a `ToolRun`. The `ToolRun` runs the tool in isolation and collects its effects. A failure becomes a
result that the model can read. A call ends without a result only if the hub is lost or the call is cancelled, and the
reaction stays open in both cases.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol

from pydantic import JsonValue

from roundelay.network.errors import RoundelayError
from roundelay.network.text import cut

from .agent import Agent
from .call_approval import CallApproval, NotApproved
from .events import Progress, ToolCallEnd, ToolCallStart, ToolOutput
from .isolation import (
    CallTimedOut,
    describe_error,
    is_cancelled_by_caller,
    redact_error,
    retry_later,
    run_isolated,
)
from .journal import drop_largest
from .live_activity import WaitingCall
from .model_call import ModelCaller
from .models.model import ModelUse, ToolCall, Usage
from .policy import find_rule
from .reaction_ids import path_of_call
from .recorded import Recorded
from .replies import Waiter
from .review import Reviewer
from .run_context import RunContext, add_usage
from .text import replace_surrogates
from .tools import PlannedCall, ToolContext
from .values import CORRECTED, DISABLED, NOT_RUN, SAVE, Finish, Reviewed, ToolError, ToolResult, Wait

_logger = logging.getLogger(__name__)

READ_ONCE = (
    "The result may be read only once (save: False). It is omitted, because this agent lacks the middleware `context`."
)

MAX_KEY_CHARS, MAX_NAMED = 200, 20
"""Maximum length and maximum number of the keys that a result lists because their data was dropped."""


class InnerRun(Protocol):
    """Run of another agent inside a call (`driver.Driver`)."""

    async def run(self, recorded: Recorded | None) -> Finish: ...

    def describe_interrupted(self) -> Finish:
        """Return a `Finish` with the usage so far, for a run that was cancelled or has failed."""
        ...


MakeInnerRun = Callable[[int, int, int, Agent, str], InnerRun]
"""Creates the run of an agent inside a call. The arguments are the turn, the call, the number of the run in the call
(from 0), the agent and the text.
"""


class ToolCaller:
    """Runs the tool calls of one run and records their results."""

    def __init__(self, run: RunContext, models: ModelCaller, reviewer: Reviewer, make_inner: MakeInnerRun) -> None:
        self._run = run
        self._models = models
        self._reviewer = reviewer
        self._make_inner = make_inner

    async def call(self, turn: int, planned: PlannedCall, reply_text: str) -> ToolResult:
        """Run a planned call through its layers and record the result. ``reply_text`` is the text that the model wrote
        together with its calls. A request for approval shows ``reply_text`` to people.
        """
        run, index = self._run, planned.index
        replies: list[int] = []  # seqs of the replies that the call waited for
        # A recorded decision is final, even if the tool no longer needs approval.
        if planned.tool.needs_approval or (turn, index) in run.recorded.waiting.approvals:
            try:
                planned = await self._make_approval(turn, planned, reply_text, replies).obtain()
            except NotApproved as error:
                result = ToolResult(f"Not run: {error}", ok=False, data={NOT_RUN: True})
                return await self.record_result(turn, index, planned.call, result, replies)
        if (turn, index) not in run.recorded.begun_calls:
            # Record the start before the tool runs. If the process is killed, this record is the only sign that the
            # tool may have taken effect.
            await run.journal.record_tool_started(
                turn,
                index,
                planned.tool.name,
                planned.call.arguments,
                is_once=planned.tool.effect == "once",
                may_wait=planned.tool.effect == "read_only" or planned.tool.acts_through_client,
            )
        run.emit(ToolCallStart(run.id, turn, index, planned.tool.name, planned.call.arguments, path=run.path))
        started_at = asyncio.get_running_loop().time()
        # A replay returns the recorded result here, so a real tool with real effects never runs.
        known = await run.playback.perform(run.id, run.path, turn, planned) if run.playback is not None else None
        result = known or self._bound_data(planned, await self._run_in_middleware(turn, planned, replies))
        is_once = planned.tool.effect == "once"
        return await self.record_result(turn, index, planned.call, result, replies, started_at, is_once=is_once)

    async def record_result(
        self,
        turn: int,
        index: int,
        call: ToolCall,
        result: ToolResult,
        replies: Collection[int] = (),
        started_at: float | None = None,
        *,
        is_once: bool = False,
    ) -> ToolResult:
        """Record the result of a call unless it is already recorded. Calls that do not run also have a result.
        ``started_at`` is in seconds of the event loop's clock.
        """
        run = self._run
        if (turn, index) in run.recorded.results:
            return result
        run.last_live_turn = turn
        # Record the result last: after this record, a resumed run never handles the call again.
        if result.used:  # the record of the result contains only the sum
            await run.journal.record_used(turn, index, result.used)
        if result.steps:
            await run.journal.record_progress(turn, index, call.name, result.steps)
        await run.journal.record_tool_result(turn, index, call.name, result, tuple(replies), is_once=is_once)
        duration_s = asyncio.get_running_loop().time() - started_at if started_at is not None else 0.0
        run.emit(ToolCallEnd(run.id, turn, index, call.name, result.ok, result.content, duration_s, path=run.path))
        return result

    async def _run_in_middleware(self, turn: int, planned: PlannedCall, replies: list[int]) -> ToolResult:
        """Run a call inside the middleware's ``around_tool`` hooks. If a hook fails, its error becomes the result of
        the call.
        """
        run, used = self._run, list[ModelUse]()
        around = partial(self._models.make_around, turn, planned.index, used)
        try:
            proceed = partial(self._run_tool, turn, replies)
            result = await run.reaction.agent.chain.around_tool(around, planned, proceed)
            if not isinstance(result, ToolResult):
                raise TypeError(f"it returned a {type(result).__name__} and must return a ToolResult")
        except BaseException as error:  # middleware is user code and may raise anything
            # Pass on the cancellation by a stop or by the end of the runner. A recorded result would hide that the call
            # was interrupted.
            if is_cancelled_by_caller(error):
                raise
            place = {"tool": planned.tool.name, "reaction": run.id, "turn": turn}
            _logger.error("middleware around a tool failed", extra=place, exc_info=redact_error(error))
            text = (
                f"Something around {planned.tool.name} failed ({describe_error(error)}). "
                "Whether it took effect is unknown."
            )
            result = ToolResult(replace_surrogates(cut(text, run.reaction.agent.policy.max_result_chars)), ok=False)
        if used:
            result = replace(result, usage=add_usage(used, result.usage), used=(*result.used, *used))
        return result

    async def _run_tool(self, turn: int, replies: list[int], planned: PlannedCall) -> ToolResult:
        make_waiter = partial(self._make_waiter, turn, planned, self._run.recorded.waiting.waits, replies)
        return await ToolRun(self._run, self._reviewer, turn, planned, make_waiter, self._make_inner).run()

    def _bound_data(self, planned: PlannedCall, result: ToolResult) -> ToolResult:
        """Drop the largest values of a result's data until the rest fits into its record. Add a list of the dropped
        keys.
        """
        data = dict(result.data)
        dropped = drop_largest(data, self._run.journal.max_body_bytes // 4)
        if not dropped:
            return result
        names: list[JsonValue] = [cut(key, MAX_KEY_CHARS) for key in dropped[:MAX_NAMED]]
        _logger.warning("tool data dropped", extra={"tool": planned.tool.name, "keys": names})
        return replace(result, data={**data, "dropped": names})

    def _make_approval(self, turn: int, planned: PlannedCall, reply_text: str, replies: list[int]) -> CallApproval:
        run = self._run
        return CallApproval(
            turn,
            planned,
            find_rule(planned.tool.approval, run.list_policies()),
            # Show the arguments even if reviewers must check the model's text first, because people decide on the
            # arguments. Do not show the unreviewed text.
            "" if run.is_text_withheld() else reply_text,
            run.journal,
            run.recorded,
            run.make_call_context(turn, planned.index, "-approval"),
            run.list_causes(turn),
            self._make_waiter(turn, planned, run.recorded.waiting.approval_waits, replies),
            partial(run.find_replayed_note, turn),
        )

    def _make_waiter(
        self, turn: int, planned: PlannedCall, recorded: Mapping[tuple[int, int], Wait], replies: list[int]
    ) -> Waiter | None:
        """Return the waiter of a call, or None if the run has no connection. ``recorded`` contains the waits that were
        recorded before a restart. ``replies`` collects the seqs of the replies.
        """
        run, place = self._run, (turn, planned.index)
        if run.replies is None:
            return None
        call = WaitingCall(
            run.id, run.path, *place, planned.tool.name, run.is_text_withheld, run.stream_numbers, run.emit
        )
        is_begun = place in run.recorded.begun_calls
        return Waiter(run.replies, run.journal, call, recorded.get(place), is_begun, replies)


class ToolRun:
    """One execution of a tool and its effects: messages, model usage, progress, data, and agents that it called.

    Middleware may run a call several times. Each repetition is a separate execution.
    """

    def __init__(
        self,
        run: RunContext,
        reviewer: Reviewer,
        turn: int,
        planned: PlannedCall,
        make_waiter: Callable[[], Waiter | None],
        make_inner: MakeInnerRun,
    ) -> None:
        self._run = run
        self._reviewer = reviewer
        self._turn = turn
        self._planned = planned
        self._make_waiter = make_waiter
        self._make_inner = make_inner
        self._inner_ends: list[Finish] = []  # ends of the agents that ran inside the call
        self._reported_use: list[ModelUse] = []  # model usage that the tool itself reported
        self._steps: list[str] = []  # progress to record
        self._threads: dict[str, None] = {}  # threads to which messages were sent
        self._data: dict[str, JsonValue] = {}
        self._sent: dict[str, int] = {}  # number of messages by address
        self._reviews: dict[int, Reviewed] = {}  # reviews of messages, by the message's number
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._is_open = True
        self._has_progress = False

    async def run(self) -> ToolResult:
        """Run the tool and return a result that the model can read, even if the tool fails."""
        tool, run = self._planned.tool, self._run
        policy = run.reaction.agent.policy
        timeout_s = tool.timeout_s if tool.timeout_s is not None else policy.tool_timeout_s
        # While the hub is busy, repeat the call without asking the model, but only if the call may be repeated.
        attempts = policy.hub_attempts if tool.effect != "once" else 1
        ok = False
        try:
            content = await run_isolated(
                partial(retry_later, self._attempt, attempts=attempts), name=f"tool-{tool.name}", timeout_s=timeout_s
            )
            ok = DISABLED not in self._data
            if ok and self._data.get(SAVE) is False and not run.reaction.agent.chain.reduces_results:
                # Refuse the result instead of recording it: the tool's author does not want this content to be saved,
                # and the agent has no middleware that removes it.
                ok, content = False, f"{READ_ONCE} (It was {tool.name}'s.)"
                _logger.error(
                    "a result may be read only once: add context to the middleware", extra={"tool": tool.name}
                )
        except CallTimedOut:
            content = (
                f"{tool.name} took longer than {timeout_s:g} s and was stopped. Whether it took effect is unknown."
            )
        # Errors of the hub and the tool are expected. The model reads the code and can react, so log no traceback.
        except RoundelayError as error:
            content = f"{error.code}: {error}"
        except Exception as error:  # the tool is user code, and its error becomes the result of the call
            place = {"tool": tool.name, "reaction": run.id, "turn": self._turn}
            _logger.error("tool failed", extra=place, exc_info=redact_error(error))
            content = describe_error(error)
        finally:
            self._is_open = False  # ignore later reports, because the thread of an abandoned call may still run
            if self._has_progress:
                self._emit_progress("", is_done=True)
        return self._make_result(ok, replace_surrogates(content))

    def _make_result(self, ok: bool, content: str) -> ToolResult:
        # An escaped character takes at most 6 bytes of a record. The content gets half of the record, and the data and
        # the other fields get the rest.
        limit = min(self._run.reaction.agent.policy.max_result_chars, self._run.journal.max_body_bytes // 12)
        if any(review.correction is not None for review in self._reviews.values()):
            self._data[CORRECTED] = True
        usages = [end.usage for end in self._inner_ends] + [review.usage for review in self._reviews.values()]
        return ToolResult(
            cut(content, limit) if len(content) > limit else content,
            ok,
            tuple(self._threads),
            usage=add_usage(self._reported_use, sum(usages, Usage())),
            tool_calls=sum(end.tool_calls for end in self._inner_ends),
            is_answer=ok and self._planned.tool.answers,
            data=self._data,
            sent=self._sent,
            whole=content if len(content) > limit else None,
            used=(*self._reported_use, *(use for end in self._inner_ends for use in end.used)),
            steps=tuple(self._steps),
        )

    async def _attempt(self) -> str:
        tool = self._planned.tool
        # A repeated attempt runs agents and sends messages under the same ids, so count each of them only once.
        self._inner_ends.clear()
        for address, count in self._sent.items():
            self._run.sent_counts[address] -= count
        self._sent.clear()
        # Make a new context, which numbers message ids from the start again. The ids of a repeated attempt must match
        # the ids of the first attempt.
        context = self._make_context()
        if tool.should_use is not None:
            is_enabled = tool.should_use(context)
            if not (await is_enabled if inspect.isawaitable(is_enabled) else is_enabled):
                self._data[DISABLED] = True
                return f"Not run: {tool.name} is not enabled here."
        try:
            content, data = await tool.run(context, self._planned.arguments)
            self._data.update(data)
            return content
        finally:
            # Collect the threads after an error too: the tool may have sent a message before it failed, and the loop
            # must know about this message.
            self._threads.update(dict.fromkeys(getattr(context.client, "threads", ())))

    def _make_context(self) -> ToolContext:
        context = replace(
            self._run.make_call_context(self._turn, self._planned.index),
            run_agent=self._run_agent,
            waiter=self._make_waiter(),  # each attempt gets a new waiter with the full waiting time
            tell=self._show,
            take_usage=lambda model, usage: self._reported_use.append(ModelUse(model, usage)),
            read_answers=self._run.reaction.agent.chain.read_answers,
        )
        context.client.admit = self._count_message
        if self._run.reviews_messages:
            context.client.review = partial(self._review_message, itertools.count(1))
        return context

    async def _review_message(self, places: Iterator[int], text: str) -> tuple[str, Mapping[str, JsonValue]]:
        """Review a message to the requester. Return the text to send and the metadata of the message. Raises
        `ToolError`, which the model reads, for a message that must not be sent.
        """
        # Identify the message by its number in the call: a repeated attempt sends the same messages in the same order.
        place = next(places)
        earlier = self._reviews.get(place)
        reviewed = await self._reviewer.review_message(self._turn, self._planned.index, place, text, earlier)
        self._reviews[place] = reviewed
        if reviewed.correction is not None:
            raise ToolError(f"Not sent. {reviewed.correction}")
        if reviewed.is_blocked:
            raise ToolError(f"Not sent, and there are no further tries: {' '.join(reviewed.notes)}")
        return reviewed.answer, reviewed.metadata

    def _count_message(self, address: str) -> None:
        """Count a message before it is sent. Raises `ToolError` if the limit is exceeded."""
        counts, limit = self._run.sent_counts, self._run.reaction.agent.policy.max_messages_per_recipient
        # Count before sending, without an await between check and count, because parallel calls share the limit.
        if counts.get(address, 0) >= limit:
            raise ToolError(
                f"Not sent: {address.removeprefix('agent:')} has got {limit} messages in this work already, and gets no "
                "more (max_messages_per_recipient). Say the rest in your answer, or finish."
            )
        counts[address] = counts.get(address, 0) + 1
        self._sent[address] = self._sent.get(address, 0) + 1

    def _show(self, kind: Literal["progress", "piece"], text: str) -> None:
        """Show progress, or a piece of the result, to people. May be called from the tool's own thread."""
        if threading.get_ident() != self._loop_thread:
            # Change events and counters only in the event loop's thread, because changes from other threads could be
            # lost.
            self._loop.call_soon_threadsafe(self._show, kind, text)
            return
        if not self._is_open:
            return
        run, planned = self._run, self._planned
        if kind == "progress":
            self._has_progress = True
            if run.reaction.agent.policy.keep.progress:
                self._steps.append(replace_surrogates(text))
            self._emit_progress(replace_surrogates(text))
        else:
            text, index = replace_surrogates(text), next(run.stream_numbers)
            is_held = planned.tool.answers and run.is_text_withheld()
            place = (self._turn, planned.index, planned.tool.name)
            run.emit(ToolOutput(run.id, *place, text, index, is_held, path=run.path))

    def _emit_progress(self, text: str, *, is_done: bool = False) -> None:
        run, index = self._run, next(self._run.stream_numbers)
        run.emit(Progress(run.id, self._turn, text, self._planned.index, is_done=is_done, index=index, path=run.path))

    async def _run_agent(self, agent: Agent, text: str) -> Finish:
        """Run an agent inside the call. The agent sees only ``text``. The records of this run are stored under the
        call's path.
        """
        number = len(self._inner_ends)
        path = path_of_call(self._run.path, self._turn, self._planned.index, number)
        inner = self._make_inner(self._turn, self._planned.index, number, agent, text)
        # Add a placeholder, so that the usage of a cancelled run still counts.
        self._inner_ends.append(inner.describe_interrupted())
        try:
            self._inner_ends[number] = await inner.run(self._run.recorded.children.get(path))
            return self._inner_ends[number]
        finally:
            # The placeholder was created before the run used anything, so read the usage again at the end.
            if self._inner_ends[number].status == "cancelled":
                self._inner_ends[number] = inner.describe_interrupted()
