"""Performs the steps of a reaction: models and tools are asked, each outcome is recorded and told.

Stands between `reaction` (what to do next) and the world. `Driver` goes from turn to turn, makes a model call, and the
tool calls of a turn: with middleware, approval, attempts and time around each. It never decides how a reaction goes on.
What was recorded is taken from there (`journal`): no reply is asked again, no result made again.

A model's failure that may pass is tried again here; what is left over is a `ModelFailed` for the reaction to end with.
Whatever a tool does ends as a result that the model can read. A hub that is lost for good is told as a result too: to
record that fails, and the reaction stays open. Cancelling the driver's task ends whatever is under way, at any await.
Events go to a callback rather than out of an async generator: tasks and timeouts do not survive a generator that its
consumer leaves alone (PEP 789).
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import itertools
import json
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal, Protocol

from pydantic import JsonValue

from roundelay.network.backoff import Backoff
from roundelay.network.client import AnyMessage
from roundelay.network.errors import RoundelayError

from .agent import Agent
from .call_approval import CallApproval, NotApproved
from .events import (
    AnswerReviewed,
    Finished,
    HandedOver,
    ModelOutput,
    ModelRetry,
    OnEvent,
    Progress,
    Resumed,
    ToolCallEnd,
    ToolCallStart,
    ToolOutput,
    ToolRequests,
    TurnEnd,
    TurnStart,
)
from .isolation import (
    CallCrashed,
    CallTimedOut,
    describe_error,
    first_error,
    is_cancelled_by_caller,
    pause_hook_timer,
    redact_error,
    retry_later,
    run_isolated,
)
from .journal import Journal, Recorded, drop_largest, find_reporter
from .live_activity import WaitingCall
from .middleware import AgentView, Around, CallModel, Guard
from .models.model import (
    OF_ONE_CONVERSATION,
    Model,
    ModelDelta,
    ModelError,
    ModelReply,
    ModelRequest,
    ModelUse,
    ReplyOrigin,
    ToolCall,
    Usage,
)
from .models.tape import print_request
from .models.tokens import count_request, estimate_tokens
from .policy import AgentPolicy, find_rule
from .reaction import AnsweredCall, CallTools, LoopState, Reaction, Step
from .replies import Replies, Waiter
from .text import cut, replace_all_surrogates, replace_surrogates
from .tools import PlannedCall, Tool, ToolContext
from .values import (
    CORRECTED,
    DISABLED,
    NOT_RUN,
    SAVE,
    Begin,
    Cancel,
    Finish,
    ModelFailed,
    NewMessages,
    Outcome,
    Replayed,
    Review,
    Reviewed,
    StopTrace,
    ToolError,
    ToolResult,
    ToolsDone,
    Trigger,
    Wait,
)

_logger = logging.getLogger(__name__)

READ_ONCE = (
    "The result is to be read once (save: False), and is left out: nothing here sees to that, as `context` does."
)
REVIEW = "review"
_ENVELOPE_BYTES = 2048  # of a record, or a message, around the answer and its metadata

FIRST_DELAY_S = 0.5
"""Delay before the second attempt of a model call, if the provider named none. Doubles up to ``model_timeout_s``."""


MAX_KEY_CHARS, MAX_NAMED = 200, 20
"""Of the keys of dropped data that are named in its place."""

MakeContext = Callable[[str, int], ToolContext]
"""Gives the context of a call, by its derived id and its turn: who calls, for which message."""


class Playback(Protocol):
    """Answers in place of models, tools and reviewers, while a recorded run is replayed. ``path`` tells runs inside of
    a reaction apart, as in the journal.

    It is no middleware: it has to reach what middleware itself asks of a model (`Around.complete`), and to take the
    place of reviewers.
    """

    async def complete(self, model: Model, request: ModelRequest, path: str, *, is_own: bool) -> ModelReply:
        """Answer a request that would go to ``model``; not the turn's own one but one of middleware's, if not
        ``is_own``. Raises `ModelError`."""
        ...

    def settle(
        self, reaction: str, path: str, turn: int, outcome: ModelReply | ModelFailed
    ) -> ModelReply | ModelFailed:
        """Give what came of a turn's request then, whatever models and middleware make of it now."""
        ...

    async def perform(self, reaction: str, path: str, turn: int, planned: PlannedCall) -> ToolResult | None:
        """Give the result of a call; None if it is to be made."""
        ...

    def review(self, reaction: str, path: str, turn: int, message: tuple[int, int] | None = None) -> Reviewed | None:
        """Give what reviewers made of an answer, or of a ``message`` (its call, its place there); None if they are to
        be asked."""
        ...

    def find_note(self, reaction: str, path: str, turn: int, name: str) -> JsonValue:
        """Give what middleware kept in a turn; None if nothing."""
        ...

    def find_stopped(self, reaction: str) -> StopTrace | None:
        """Give what a person's stop had left of a reaction; None for one that left nothing."""
        ...

    def reads_new_messages(self, reaction: str) -> bool:
        """Tell whether a reaction reads now what has arrived in its thread meanwhile."""
        ...


class NewMessagesSource(Protocol):
    """Messages that arrive in the thread of a reaction and are read in it."""

    async def take(self) -> NewMessages | None:
        """Take what has arrived; None for nothing."""
        ...

    async def settle(self, new: NewMessages) -> None:
        """What was taken is recorded: it needs no reaction of its own."""
        ...


class Driver:
    """Drives one run, a reaction or an agent inside of a call of ``outer``, from its beginning, or from what it has
    recorded, to its end."""

    def __init__(
        self,
        reaction: Reaction,
        *,
        journal: Journal,
        make_context: MakeContext,
        replies: Replies | None = None,
        new_messages: NewMessagesSource | None = None,
        on_event: OnEvent = lambda event: None,
        playback: Playback | None = None,
        outer: Driver | None = None,
    ) -> None:
        self._reaction = reaction
        self._journal = journal
        self._new_messages = new_messages
        self._emit = on_event
        self._playback = playback
        self._make_context = make_context
        self._replies = replies
        self._outer = outer
        self._recorded = Recorded()  # what the run had done before, when it is resumed
        self._sent: dict[str, int] = {}  # messages of the run's calls, by address (``max_messages_per_recipient``)
        self._live_turn = 0  # the last turn in which anything was done rather than taken from the records
        # What the turn's own request came to, middleware included, and which model got it; of several (as middleware
        # may ask) the first. None if none did.
        self._asked: tuple[Model, ModelRequest] | None = None
        # What middleware used in requests of its own: around the turn's own one; around turns and the whole reaction,
        # or where there was no reply, which no record but that of the end tells.
        self._used_around: tuple[ModelUse, ...] = ()
        self._used_beside: list[ModelUse] = []
        self._heard = ""  # what the turn's own request has brought of its text so far
        # What model calls had used that a stop broke off, here and in the runs inside of this one.
        self._broken_off: list[ModelUse] = outer._broken_off if outer is not None else []
        # Numbers what streams, in one order with the runs inside of it.
        self._pieces: Iterator[int] = outer._pieces if outer is not None else itertools.count(1)
        self._agent: AgentView = reaction.agent  # of the last turn
        self._id, self._path = journal.reaction, journal.path  # of every event
        self._store_around = journal.store  # what those around this run want of its records
        self._follow_agent()

    async def run(
        self, recorded: Recorded | None = None, *, config_hash: str = "", prompt_hash: str | None = None
    ) -> Finish:
        """Drive to the end. Raises `ConnectError` and `Superseded` when the reaction has to stay open."""
        if recorded is not None:
            self._recorded = recorded
            for result in recorded.results.values():
                for address, count in result.sent.items():
                    self._sent[address] = self._sent.get(address, 0) + count
            if (started := recorded.started) is not None:
                other_config = started.config_hash != config_hash
                other_prompt = prompt_hash is not None and started.prompt_hash not in ("", prompt_hash)
                self._emit(Resumed(self._id, len(recorded.replies), other_config, other_prompt, path=self._path))
        chain = self._reaction.agent.chain
        try:
            await self._reaction.start()
            around = partial(self._describe, 0, "reaction", self._used_beside)
            finish = await chain.around_reaction(around, self._take_turns)
            used = tuple(self._used_beside)
            return replace(finish, usage=_add_up(used, finish.usage), used=used) if used else finish
        except SystemExit as error:  # of middleware: out of a task it would end the event loop
            raise CallCrashed(error) from error

    def find_stopped(self, by: str) -> StopTrace | None:
        """Give what is left of a run that ``by`` has stopped; None where a replay knows that nothing was kept then."""
        if self._playback is not None:
            return self._playback.find_stopped(self._id)
        is_shown = self._reaction.sends_text() and not self._is_held()
        return StopTrace(by, self._reaction.turn, self._heard if is_shown else "", tuple(self._broken_off))

    def cancel(self, reason: str, broken_off: tuple[ModelUse, ...] = ()) -> Finish:
        """End the reaction after `run` was cancelled in the middle of a step, or in what middleware does after the last
        one. ``broken_off`` is what the model calls under way had used."""
        used = (*self._used_beside, *broken_off)
        if self._reaction.state is LoopState.FINISHED:  # and told: middleware was still at it
            done = self._reaction
            usage = _add_up(used, done.usage)
            return Finish("cancelled", reason, None, done.turn, usage, done.tool_calls, used=used)
        finish = self._reaction.advance(Cancel(reason))  # which asks no hook
        self._follow_agent()
        assert isinstance(finish, Finish)
        finish = replace(finish, usage=_add_up(used, finish.usage), used=used)
        self._tell_end(finish)
        return finish

    async def _advance(self, outcome: Outcome) -> Step:
        step = await self._reaction.proceed(outcome)
        self._follow_agent()
        return step

    def _follow_agent(self) -> None:
        """Keep records as the agent at work wants them, and then as those around this run do."""
        chain, around = self._reaction.agent.chain, self._store_around
        if not chain.stores:
            self._journal.store = around
        elif around is None:
            self._journal.store = chain.store
        else:
            self._journal.store = lambda kind, body: around(kind, chain.store(kind, body))

    async def _take_turns(self) -> Finish:
        step = await self._advance(Begin())
        while not isinstance(step, Finish):
            step = await self._turn(step)
        self._tell_end(step)
        return step

    async def _turn(self, step: Step) -> Step:
        """Perform a turn, to the first step of the next one or the end."""
        turn, text, is_done = self._reaction.turn, None, False

        async def perform() -> None:
            nonlocal step, text, is_done
            outcome: Outcome
            while not isinstance(step, Finish) and not (isinstance(step, CallModel) and step.turn > turn):
                match step:
                    case CallModel():
                        outcome = await self._ask(step)
                        text = outcome.text if isinstance(outcome, ModelReply) else None
                        if isinstance(outcome, ModelFailed) and not outcome.is_recorded:
                            outcome = await self._report(outcome)
                    case CallTools():
                        outcome = ToolsDone(await self._call_tools(step))
                    case Review():
                        outcome = await self._review(step)
                step = await self._advance(outcome)
                if isinstance(outcome, ModelFailed) and isinstance(step, Finish) and not outcome.is_recorded:
                    # Before the answer, so that it stays the end.
                    await self._journal.record_model_failed(turn, outcome)
            is_done = True

        if turn in self._recorded.replies:
            await perform()
        else:
            around = self._reaction.agent.chain.around_turn
            await around(partial(self._describe, turn, "turn", self._used_beside), perform)
            if not is_done:
                raise RoundelayError(
                    f"Middleware around turn {turn} of {self._id} did not let it go on to its end: "
                    "it has to await proceed() once."
                )
        if turn == self._live_turn:
            self._emit(TurnEnd(self._id, turn, text, self._reaction.usage, path=self._path))
        return step

    async def _report(self, failed: ModelFailed) -> ModelFailed:
        """Say whether operators are notified of a failure that is no matter of this conversation. A replay keeps what
        is recorded."""
        if self._playback is not None or self._path or failed.failure in OF_ONE_CONVERSATION:
            return failed
        return replace(failed, reported_by=await find_reporter(self._journal.client))

    async def _ask(self, step: CallModel) -> ModelReply | Replayed | ModelFailed:
        recorded = self._recorded
        if step.turn in recorded.notes:
            self._reaction.note(recorded.notes[step.turn])
        new = recorded.new_messages.get(step.turn)
        if new is not None:
            step = await self._read_in(new)
        known = recorded.replay(step.turn)
        if known is not None:
            return known
        if step.turn != self._live_turn:
            if new is None:
                step = await self._read_new_messages(step)
            if step.agent.id != self._agent.id:
                self._emit(HandedOver(self._id, step.turn, step.agent.id, self._agent.id, path=self._path))
            self._live_turn = step.turn
            self._emit(TurnStart(self._id, step.turn, self._reaction.max_turns, path=self._path))
        self._agent = step.agent
        reply = await self._ask_model(step)
        if self._asked is not None and step.agent.policy.keep.prompt:
            await self._journal.record_prompt(step.turn, self._asked[1])
        if isinstance(reply, ModelFailed):
            return reply
        if reply.reasoning and step.agent.policy.keep.thinking:
            await self._journal.record_thinking(step.turn, reply.reasoning)
        asked = print_request(*self._asked) if self._asked is not None else None
        kept = reply if reply.origin is None else replace(reply, origin=reply.origin.keep_demanded())
        stored = await self._journal.record_reply(
            step.turn, kept, agent_id=step.agent.id, is_last=step.is_last, request=asked, used=self._used_around
        )
        return reply if stored is kept else stored

    async def _read_new_messages(self, step: CallModel) -> CallModel:
        source = self._new_messages
        if source is None or (self._playback is not None and not self._playback.reads_new_messages(self._id)):
            return step
        new = await source.take()
        if new is None:
            return step
        await self._journal.record_new_messages(step.turn, new)
        step = await self._read_in(new)
        await source.settle(new)
        return step

    async def _read_in(self, new: NewMessages) -> CallModel:
        step = await self._advance(new)
        assert isinstance(step, CallModel)
        return step

    # --- reviews: of the answer, and of messages to who asked

    async def _review(self, step: Review) -> Reviewed:
        known = self._recorded.reviews.get(step.turn)
        return await self._look_at(step.answer, step.turn, known, can_correct=step.can_correct)

    async def _review_message(
        self, turn: int, index: int, seen: dict[int, Reviewed], places: Iterator[int], text: str
    ) -> tuple[str, Mapping[str, JsonValue]]:
        """Have what a call says to who asked reviewed like an answer. Raises `ToolError` for what is not sent: the
        model reads why. ``seen``: what became of the call's messages, by ``places``."""
        place = next(places)
        known = seen.get(place) or self._recorded.sent_reviews.get((turn, index, place))
        can_correct = self._reaction.can_correct
        seen[place] = it = await self._look_at(text, turn, known, can_correct=can_correct, message=(index, place))
        if it.correction is not None:
            raise ToolError(f"Not sent. {it.correction}")
        if it.is_blocked:
            raise ToolError(f"Not sent, and there are no further tries: {' '.join(it.notes)}")
        return it.answer, it.metadata

    async def _look_at(
        self,
        text: str,
        turn: int,
        known: Reviewed | None,
        *,
        can_correct: bool,
        message: tuple[int, int] | None = None,
    ) -> Reviewed:
        """Ask the reviewers of the agent, and of those around and before it, unless what they made of it is known."""
        if known is not None and (known.correction is not None or not known.altered):
            return known
        reviewed = None
        if self._playback is not None:
            reviewed = self._playback.review(self._id, self._path, turn, message)
        if reviewed is None:
            spent: list[ModelUse] = []
            around = self._describe(turn, REVIEW if message is None else "-".join(map(str, (REVIEW, *message))), spent)
            guards = self._list_guards() if message is not None else self._reaction.guards
            # One that was found good once, and was not kept as it was, needs no other answer.
            can_correct = can_correct and known is None
            reviewed = await self._reaction.agent.chain.review(around, text, can_correct=can_correct, guards=guards)
            usage = _add_up(spent, Usage() if known is None else known.usage)
            reviewed = replace(reviewed, usage=usage, used=tuple(spent))
            reviewed = _fit(reviewed, self._journal.max_body_bytes - _ENVELOPE_BYTES)
        if known is None:
            await self._journal.record_review(turn, reviewed, message)
        told = (reviewed.is_accepted, reviewed.correction, reviewed.notes, reviewed.is_blocked)
        self._emit(AnswerReviewed(self._id, turn, *told, None if message is None else message[0], path=self._path))
        return reviewed

    def _list_guards(self) -> list[Guard]:
        """Give the reviews that hold beside those of the agent at work for what it sends to who asked: of those that
        had the conversation before, and of the agents around this run."""
        outer = self._outer
        return [
            *self._reaction.guards,
            *((*outer._reaction.agent.chain.guards, *outer._list_guards()) if outer else ()),
        ]

    @property
    def _is_reviewed(self) -> bool:
        """Whether anybody looks at what its tools send to who asked."""
        return self._reaction.is_reviewed or (self._outer is not None and bool(self._list_guards()))

    def _tell_end(self, end: Finish) -> None:
        told = (end.status, end.reason, end.answer, end.turns, end.usage, end.tool_calls)
        self._emit(Finished(self._id, *told, path=self._path))

    def _is_held(self) -> bool:
        """Whether what its model writes is reviewed before anybody reads it, by its own reviewers or those around
        it."""
        return self._reaction.withholds or (self._outer is not None and self._outer._is_held())

    def _describe(self, turn: int, call: int | str, spent: list[ModelUse], asked: Model | None = None) -> Around:
        """Give what middleware may know; what it spends by ``complete`` is added to ``spent``. ``asked``: the model, if
        one is."""

        async def complete(model: Model, request: ModelRequest) -> ModelReply:
            reply = await pause_hook_timer(self._complete(model, request, is_own=False))
            spent.append(ModelUse(reply.model or model.name, reply.usage))
            return reply

        async def keep(name: str, value: JsonValue, *, of: Collection[str] = ()) -> None:
            await pause_hook_timer(self._journal.record_note(turn, name, value, of))
            self._reaction.note({name: value})

        def find_replayed(name: str) -> JsonValue:
            known = self._playback
            return known.find_note(self._id, self._path, turn, name) if known is not None else None

        agent = self._reaction.agent
        context = self._make_context(f"{self._journal.derive_id(turn, call)}-around", turn)
        most = self._journal.max_body_bytes // 12
        return Around(
            self._id,
            self._path,
            agent,
            asked or agent.model,
            self._reaction.describe(),
            context,
            self._emit,
            complete,
            keep,
            find_replayed,
            most,
        )

    # --- a model call

    async def _ask_model(self, step: CallModel) -> ModelReply | ModelFailed:
        """Ask until there is a reply or nothing more to try."""
        self._asked, self._used_around = None, ()
        outcome = await self._call_model(step)
        return outcome if self._playback is None else self._playback.settle(self._id, self._path, step.turn, outcome)

    async def _call_model(self, step: CallModel) -> ModelReply | ModelFailed:
        agent = step.agent
        model = step.model or agent.model
        prompt = step.state.history[1].content if len(step.state.history) > 1 else None
        request = ModelRequest(
            step.messages, step.tools, step.tool_choice, agent.id, self._id, step.turn, prompt=prompt or ""
        )
        spent: list[ModelUse] = []

        async def proceed(asked: ModelRequest) -> ModelReply:
            is_own = self._asked is None
            if is_own:
                self._asked = (model, asked)
            return await self._complete(model, asked, is_own=is_own, is_shown=True)

        try:
            around = partial(self._describe, step.turn, "model", spent, model)
            reply = _check(await agent.chain.around_model(around, request, proceed), model.name)
        except ModelError as error:
            told = {"reaction": self._id, "reason": error.reason, "error": str(error)}
            _logger.warning("model failed", extra=told)
            self._used_beside += spent
            return ModelFailed(replace_surrogates(str(error)), error.reason)
        except Exception as error:  # of a model or of middleware: this call's end, never the runner's
            told = {"reaction": self._id, "agent_id": agent.id}
            _logger.error("model failed", extra=told, exc_info=redact_error(error))
            self._used_beside += spent
            return ModelFailed(replace_surrogates(describe_error(error)))
        self._used_around = tuple(spent)
        return replace(reply, usage=_add_up(spent, reply.usage)) if spent else reply

    async def _complete(
        self, model: Model, request: ModelRequest, *, is_own: bool, is_shown: bool = False
    ) -> ModelReply:
        """Ask a model, with the agent's attempts. ``is_own``: it is the request that is recorded with the turn's reply.
        Raises `ModelError`."""
        policy, made = self._reaction.agent.policy, 0
        while True:
            made += 1
            try:
                return await self._attempt(model, request, policy.model_timeout_s, is_shown, is_own)
            except ModelError as error:
                if not error.retryable or made >= policy.model_attempts:
                    raise
                if error.retry_after_ms is not None:
                    delay_s = error.retry_after_ms / 1000
                    # A provider that wants longer than a model call may take will not be waited for.
                    if delay_s > policy.model_timeout_s:
                        raise
                else:
                    # Not all at once: many agents may wait for one provider. Our own delay costs no attempt, so it is
                    # never longer than a call may take.
                    delay_s = Backoff(FIRST_DELAY_S, policy.model_timeout_s).delay_s(made)
                    delay_s *= _spread(self._id, request.turn, made)
                if made == 1:
                    told = {
                        "reaction": self._id,
                        "model": model.name,
                        "reason": error.reason,
                        "attempts": policy.model_attempts,
                    }
                    _logger.warning("a model is asked again", extra=told)
                self._emit(ModelRetry(self._id, request.turn, str(error), delay_s, path=self._path))
            await asyncio.sleep(delay_s)

    async def _attempt(
        self, model: Model, request: ModelRequest, timeout_s: float, is_shown: bool, is_own: bool
    ) -> ModelReply:
        is_heard, heard, counted = True, [], Usage()
        if is_own:
            self._heard = ""

        def tell(delta: ModelDelta) -> None:
            nonlocal counted
            if not is_heard:  # an attempt that was given up may go on for a while
                return
            counted = delta.usage or counted
            is_text = isinstance(delta.text, str) and isinstance(delta.reasoning, str)  # a model of one's own may err
            heard.append(delta.text + delta.reasoning if is_text else "")
            if is_own:
                self._heard = ("" if delta.broken_off else self._heard) + (delta.text if is_text else "")
            if not is_shown or (delta.usage is not None and not (delta.text or delta.reasoning)):
                return
            if delta.broken_off:
                error = replace_surrogates(delta.broken_off)
                self._emit(ModelRetry(self._id, request.turn, error, 0.0, path=self._path))
            if not is_text:
                kinds = {"text": type(delta.text).__name__, "reasoning": type(delta.reasoning).__name__}
                _logger.error("a piece of a reply is no text and is not shown", extra={"model": model.name, **kinds})
            elif delta.text or delta.reasoning or not delta.broken_off:
                text, reasoning = replace_all_surrogates([delta.text, delta.reasoning])
                index, held = next(self._pieces), self._is_held()
                self._emit(ModelOutput(self._id, request.turn, text, reasoning, index, held, path=self._path))

        ask = partial(model.complete, request, tell)
        if self._playback is not None:
            ask = partial(self._playback.complete, model, request, self._path, is_own=is_own)
        try:
            return await run_isolated(ask, name=f"model-{model.name}", timeout_s=timeout_s)
        except CallTimedOut:
            text = f"The model {model.name} gave no reply within {timeout_s:g} s."
            raise ModelError(text, reason="timeout") from None
        except asyncio.CancelledError:
            if self._playback is None:  # nobody is asked in a replay
                self._broken_off.append(ModelUse(model.name, _estimate(request, "".join(heard), counted)))
            raise
        finally:
            is_heard = False

    # --- the tool calls of a turn, all at once

    async def _call_tools(self, step: CallTools) -> dict[int, ToolResult]:
        """Run what is planned and record what is answered already; give the result of each planned call."""
        if step.turn not in self._recorded.replies:
            self._emit(ToolRequests(self._id, step.turn, step.text, step.calls, path=self._path))
        try:
            async with asyncio.TaskGroup() as group:
                for answered in step.answered:
                    group.create_task(self._conclude(step.turn, answered, answered.result))
                tasks = {
                    it.index: group.create_task(self._call_tool(step.turn, it, step.text or "")) for it in step.planned
                }
        except BaseExceptionGroup as failures:
            raise first_error(failures) from failures
        return {index: task.result() for index, task in tasks.items()}

    async def _call_tool(self, turn: int, planned: PlannedCall, why: str) -> ToolResult:
        """``why``: what the model says beside its calls."""
        place, tool = (turn, planned.index), planned.tool
        replies: list[int] = []  # the seqs of those that the call waits for and has
        # What a person decided holds, whatever the tool says now.
        if tool.needs_approval or place in self._recorded.approvals:
            try:
                planned = await self._make_deciding(turn, planned, why, replies).run()
            except NotApproved as error:
                return await self._conclude(turn, planned, _not_run(str(error)), replies)
        written = planned.call.arguments
        if place not in self._recorded.begun_calls:
            is_once = tool.effect == "once"
            await self._journal.record_tool_started(turn, planned.index, tool.name, written, is_once=is_once)
        self._emit(ToolCallStart(self._id, turn, planned.index, tool.name, written, path=self._path))
        began_s = asyncio.get_running_loop().time()
        if self._playback is not None:
            known = await self._playback.perform(self._id, self._path, turn, planned)
            if known is not None:
                return await self._conclude(turn, planned, known, replies, began_s)
        spent: list[ModelUse] = []
        try:
            around = partial(self._describe, turn, planned.index, spent)
            proceed = partial(self._run_tool, turn, replies)
            result = await self._reaction.agent.chain.around_tool(around, planned, proceed)
            if not isinstance(result, ToolResult):
                raise TypeError(f"it gave a {type(result).__name__} for the result")
        except BaseException as error:  # of middleware: this call's result, as a tool's own error is
            if is_cancelled_by_caller(error):
                raise
            place_told = {"tool": tool.name, "reaction": self._id, "turn": turn}
            _logger.error("middleware around a tool failed", extra=place_told, exc_info=redact_error(error))
            text = f"Something around {tool.name} failed ({describe_error(error)}). Whether it took effect is unknown."
            result = ToolResult(replace_surrogates(cut(text, self._reaction.agent.policy.max_result_chars)), ok=False)
        if spent:
            result = replace(result, usage=_add_up(spent, result.usage), used=(*result.used, *spent))
        return await self._conclude(turn, planned, self._bound_data(tool, result), replies, began_s)

    def _bound_data(self, tool: Tool, result: ToolResult) -> ToolResult:
        """Give a result without what makes its data too large for its record, the largest first, which is named."""
        if not result.data:
            return result
        data = dict(result.data)
        dropped = drop_largest(data, self._journal.max_body_bytes // 4)
        if not dropped:
            return result
        named: list[JsonValue] = [cut(key, MAX_KEY_CHARS) for key in dropped[:MAX_NAMED]]
        _logger.warning("tool data dropped", extra={"tool": tool.name, "keys": named})
        return replace(result, data={**data, "dropped": named})

    async def _conclude(
        self,
        turn: int,
        call: PlannedCall | AnsweredCall,
        result: ToolResult,
        replies: Collection[int] = (),
        began_s: float | None = None,
    ) -> ToolResult:
        if (turn, call.index) not in self._recorded.results:
            self._live_turn = turn
            name = call.call.name
            if result.used:
                await self._journal.record_used(turn, call.index, result.used)
            if result.steps:
                await self._journal.record_progress(turn, call.index, name, result.steps)
            await self._journal.record_tool_result(turn, call.index, name, result, tuple(replies))
            took_s = asyncio.get_running_loop().time() - began_s if began_s is not None else 0.0
            self._emit(
                ToolCallEnd(self._id, turn, call.index, name, result.ok, result.content, took_s, path=self._path)
            )
        return result

    async def _run_tool(self, turn: int, replies: list[int], planned: PlannedCall) -> ToolResult:
        """Run a tool to a result that the model can read, whatever the tool does."""
        tool, policy = planned.tool, self._reaction.agent.policy
        timeout_s = tool.timeout_s if tool.timeout_s is not None else policy.tool_timeout_s
        ends: list[Finish] = []  # of agents that ran inside of the call
        reported: list[ModelUse] = []  # by the tool itself
        steps: list[str] = []  # likewise, where its progress is kept
        threads: dict[str, None] = {}  # that its messages went to
        data: dict[str, JsonValue] = {}
        sent: dict[str, int] = {}  # its messages by address
        reviews: dict[int, Reviewed] = {}  # of its messages to who asked
        loop, loop_thread, is_heard, has_step = asyncio.get_running_loop(), threading.get_ident(), True, False

        def tell(kind: Literal["progress", "piece"], text: str) -> None:
            nonlocal has_step
            if threading.get_ident() != loop_thread:  # a sync tool runs in a thread of its own
                loop.call_soon_threadsafe(tell, kind, text)
            elif is_heard:
                has_step |= kind == "progress"
                if kind == "progress" and policy.keep.progress:
                    steps.append(replace_surrogates(text))
                self._show(turn, planned, kind, text)

        async def attempt() -> str:
            ends.clear()  # a repeat runs and sends under the same ids
            for address, count in sent.items():
                self._sent[address] -= count
            sent.clear()
            context = replace(
                self._make_context(self._journal.derive_id(turn, planned.index), turn),
                run_agent=partial(self._run_inside, turn, planned.index, ends),
                waiter=self._make_waiter(turn, planned, self._recorded.waits, replies),
                tell=tell,
                take_usage=lambda model, usage: reported.append(ModelUse(model, usage)),
                read_answers=self._reaction.agent.chain.read_answers,
            )
            context.client.admit = partial(self._admit, sent)
            if self._is_reviewed:
                places = itertools.count(1)
                context.client.review = partial(self._review_message, turn, planned.index, reviews, places)
            if tool.should_use is not None:
                answer = tool.should_use(context)
                if not (await answer if inspect.isawaitable(answer) else answer):
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
            content = await run_isolated(
                partial(retry_later, attempt, attempts=attempts), name=f"tool-{tool.name}", timeout_s=timeout_s
            )
            ok = DISABLED not in data
            if ok and data.get(SAVE) is False and not self._reaction.agent.chain.reduces_results:
                ok, content = False, f"{READ_ONCE} (It was {tool.name}'s.)"
                _logger.error("a result is to be read once: add context to the middleware", extra={"tool": tool.name})
        except CallTimedOut:
            content = (
                f"{tool.name} took longer than {timeout_s:g} s and was stopped. Whether it took effect is unknown."
            )
        except RoundelayError as error:
            content = f"{error.code}: {error}"
        except Exception as error:  # whatever the tool's code raises is its call's result
            told = {"tool": tool.name, "reaction": self._id, "turn": turn}
            _logger.error("tool failed", extra=told, exc_info=redact_error(error))
            content = describe_error(error)
        finally:
            is_heard = False  # a call that was given up may go on for a while
            if has_step:
                index = next(self._pieces)
                self._emit(Progress(self._id, turn, "", planned.index, is_done=True, index=index, path=self._path))
        # A character takes at most 6 bytes of a record, as an escape; the other half is for the data and the rest of
        # the frame.
        limit = min(policy.max_result_chars, self._journal.max_body_bytes // 12)
        content = replace_surrogates(content)
        if any(it.correction is not None for it in reviews.values()):
            data[CORRECTED] = True
        used = (*reported, *(it for end in ends for it in end.used))
        return ToolResult(
            cut(content, limit) if len(content) > limit else content,
            ok,
            tuple(threads),
            usage=_add_up(reported, sum([*(it.usage for it in ends), *(it.usage for it in reviews.values())], Usage())),
            tool_calls=sum(end.tool_calls for end in ends),
            is_answer=ok and tool.answers,
            data=data,
            sent=sent,
            whole=content if len(content) > limit else None,
            used=used,
            steps=tuple(steps),
        )

    def _admit(self, sent: dict[str, int], address: str) -> None:
        """Count a message of a call before it is sent. Raises `ToolError` for one past the limit."""
        most = self._reaction.agent.policy.max_messages_per_recipient
        if self._sent.get(address, 0) >= most:
            raise ToolError(
                f"Not sent: {address.removeprefix('agent:')} has got {most} messages in this work already, and gets no "
                "more (max_messages_per_recipient). Say the rest in your answer, or finish."
            )
        self._sent[address] = self._sent.get(address, 0) + 1
        sent[address] = sent.get(address, 0) + 1

    def _show(self, turn: int, planned: PlannedCall, kind: Literal["progress", "piece"], text: str) -> None:
        tool, text, index = planned.tool, replace_surrogates(text), next(self._pieces)
        if kind == "piece":
            held = tool.answers and self._is_held()
            self._emit(ToolOutput(self._id, turn, planned.index, tool.name, text, index, held, path=self._path))
        else:
            self._emit(Progress(self._id, turn, text, planned.index, index=index, path=self._path))

    def _make_waiter(
        self, turn: int, planned: PlannedCall, known: Mapping[tuple[int, int], Wait], replies: list[int]
    ) -> Waiter | None:
        """``known``: the waits that are recorded. ``replies`` takes the seqs of those that the call has."""
        if self._replies is None:
            return None
        place = (turn, planned.index)
        call = WaitingCall(
            self._id, self._path, turn, planned.index, planned.tool.name, self._is_held, self._pieces, self._emit
        )
        is_begun = place in self._recorded.begun_calls
        return Waiter(self._replies, self._journal, call, known.get(place), is_begun, replies)

    # --- a person's approval of a call

    def _make_deciding(self, turn: int, planned: PlannedCall, why: str, replies: list[int]) -> CallApproval:
        """``why``: what the model says beside its calls, which is left out where its words are reviewed before anybody
        reads them. The arguments are what is decided on."""
        return CallApproval(
            turn,
            planned,
            find_rule(planned.tool.approval, self._list_policies()),
            "" if self._is_held() else why,
            self._journal,
            self._recorded,
            self._make_context(f"{self._journal.derive_id(turn, planned.index)}-approval", turn),
            self._list_causes(turn),
            self._make_waiter(turn, planned, self._recorded.approval_waits, replies),
            partial(self._find_replayed, turn),
        )

    def _find_replayed(self, turn: int, name: str) -> JsonValue:
        """Give a note of the run that is replayed; None outside of a replay."""
        return self._playback.find_note(self._id, self._path, turn, name) if self._playback is not None else None

    def _list_policies(self) -> list[AgentPolicy]:
        """Give the policies whose approvers hold: of the agent at work, those that had the conversation before, and
        those of the agents around this run."""
        return [*self._reaction.policies, *(self._outer._list_policies() if self._outer else ())]

    def _list_causes(self, turn: int) -> tuple[int, ...]:
        """Give the messages that led to what is done: the trigger, and those that were read while the reaction ran."""
        trigger = self._make_context(self._journal.derive_id(turn, 0), turn).trigger.seq
        read = self._reaction.read_meanwhile + (self._outer._list_causes(turn) if self._outer else ())
        return tuple(dict.fromkeys((trigger, *read)))

    # --- an agent inside of a call

    async def _run_inside(self, turn: int, call: int, ends: list[Finish], agent: Agent, text: str) -> Finish:
        """Run an agent inside of a call, on a text and nothing else: its turns are its own, its records stand under the
        call's path."""
        outer = self._reaction
        journal = self._journal.descend(turn, call, len(ends))
        if journal.depth > outer.agent.policy.max_depth:
            raise ToolError(f"Not run: agents call each other {journal.depth} deep already.")
        trigger = outer.trigger
        reaction = Reaction(
            replace(agent, policy=replace(agent.policy, on_text="reply")),  # its text is this call's result
            prompt=text,
            answers=True,
            path=journal.path,
            sent_at=outer.sent_at,
            trigger=Trigger(trigger.seq, outer.agent.id, "agent", text) if trigger is not None else None,
        )
        driver = Driver(
            reaction,
            journal=journal,
            make_context=self._make_context,
            replies=self._replies,
            on_event=self._emit,
            playback=self._playback,
            outer=self,
        )
        place = len(ends)
        ends.append(Finish("cancelled", "", usage=reaction.usage))
        try:
            ends[place] = await driver.run(self._recorded.children.get(journal.path))
            return ends[place]
        finally:
            if ends[place].status == "cancelled":
                ends[place] = replace(ends[place], usage=reaction.usage, tool_calls=reaction.tool_calls)


def _add_up(used: Iterable[ModelUse], total: Usage) -> Usage:
    return sum((it.usage for it in used), total)


def _find_trigger(context: ToolContext) -> AnyMessage:
    trigger = context.trigger
    assert isinstance(trigger, AnyMessage)
    return trigger


def _not_run(why: str) -> ToolResult:
    return ToolResult(f"Not run: {why}", ok=False, data={NOT_RUN: True})


def _spread(reaction: str, turn: int, made: int) -> float:
    """Give a factor from 0.75 to 1.25: another one for each reaction, and the same again when a run is repeated."""
    digest = hashlib.sha256(f"{reaction}/{turn}/{made}".encode()).digest()
    return 0.75 + int.from_bytes(digest[:4], "big") / 2**33


def _check(reply: ModelReply, name: str) -> ModelReply:
    """Give the reply of a model, or of middleware, as it can be recorded and sent. Raises `ModelError` for what
    cannot."""
    odd = _find_odd(reply)
    if odd:
        raise ModelError(f"The model {name} gave a reply that cannot be used: {odd}.", reason="broken_reply")
    written = [part for it in reply.tool_calls for part in (it.id, it.name, it.arguments)]
    text, used, *parts = replace_all_surrogates([reply.text or "", reply.model, *written])
    calls = tuple(itertools.starmap(ToolCall, zip(parts[::3], parts[1::3], parts[2::3], strict=True)))
    origin = reply.origin
    if origin is not None and origin.has_fields:
        origin = replace(origin, message=_clean(origin.message), calls=tuple(_clean(it) for it in origin.calls))
    return replace(reply, text=None if reply.text is None else text, tool_calls=calls, model=used, origin=origin)


def _clean(value: Any) -> Any:
    """The same in every text of a JSON value."""
    match value:
        case str():
            return replace_surrogates(value)
        case Mapping():
            return {name: _clean(it) for name, it in value.items()}
        case list() | tuple():
            return [_clean(it) for it in value]
        case _:
            return value


def _find_odd(reply: object) -> str:
    """Say what in a reply is of another kind than it should be: servers and models of one's own are not checked
    before."""
    if not isinstance(reply, ModelReply):
        return f"it is a {type(reply).__name__}"
    if not isinstance(reply.origin, ReplyOrigin | None):
        return f"origin is a {type(reply.origin).__name__}"
    texts = {"text": reply.text or "", "finish_reason": reply.finish_reason, "model": reply.model}
    texts["reasoning"] = reply.reasoning
    for index, call in enumerate(reply.tool_calls):
        where = f"tool_calls.{index}"
        texts |= {f"{where}.id": call.id, f"{where}.name": call.name, f"{where}.arguments": call.arguments}
    counts = {field.name: getattr(reply.usage, field.name) for field in fields(reply.usage)}
    for kind, values in ((str, texts), (int, counts)):
        for where, value in values.items():
            if not isinstance(value, kind):
                return f"{where} is a {type(value).__name__}"
    return ""


def _estimate(request: ModelRequest, heard: str, counted: Usage) -> Usage:
    """Give what a request had used when it was broken off: as the provider counted, or else as its texts say."""
    prompt = counted.prompt_tokens or count_request(request.messages, request.tools, estimate_tokens)
    completion = max(counted.completion_tokens, estimate_tokens(heard))
    return replace(counted, prompt_tokens=prompt, completion_tokens=completion)


def _fit(reviewed: Reviewed, max_bytes: int) -> Reviewed:
    """Leave out what makes the metadata too large for a record, and a message, beside the answer, the largest first,
    and note it."""
    left = dict(reviewed.metadata)
    dropped = drop_largest(left, max_bytes - len(json.dumps([reviewed.answer, reviewed.correction, *reviewed.notes])))
    if not dropped:
        return reviewed
    note = f"too large for the message's metadata: {', '.join(dropped)}"
    return replace(reviewed, metadata=left, notes=(*reviewed.notes, note))
