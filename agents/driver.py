"""Runs a reaction turn by turn: performs each step of the loop and returns the outcome to the loop.

`reaction` decides the next step, and `Driver` performs it. It asks the model (`model_call`), runs the tools of a turn
in parallel (`tool_call`) and has answers reviewed (`review`). `Driver` never decides how a reaction continues. Every
outcome is recorded in the journal before the loop reads it. After a restart, recorded outcomes are read from the
journal instead of being produced a second time.

Events are passed to a callback. An async generator would be unsafe, because tasks and timeouts inside it break if the
consumer abandons the generator (PEP 789). Cancelling the driver's task also cancels the model call or tool call that
the driver awaits.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Protocol

from roundelay.network.errors import RoundelayError

from .agent import Agent
from .events import Finished, HandedOver, OnEvent, Resumed, ToolRequests, TurnEnd, TurnStart
from .isolation import CallCrashed, first_error
from .journal import Journal, find_reporter
from .middleware import AgentView, CallModel
from .model_call import ModelCaller
from .models.model import OF_ONE_CONVERSATION, ModelReply, ModelUse
from .models.tape import fingerprint_request
from .reaction import CallTools, LoopState, Reaction, Step
from .reaction_state import ReactionSetup
from .recorded import Recorded
from .replies import Replies
from .review import Reviewer
from .run_context import MakeContext, Playback, RunContext, add_usage
from .tool_call import ToolCaller
from .values import (
    Begin,
    Cancel,
    Finish,
    ModelFailed,
    NewMessages,
    Outcome,
    Replayed,
    Review,
    StopTrace,
    ToolError,
    ToolResult,
    ToolsDone,
    Trigger,
)


class NewMessagesSource(Protocol):
    """Source of new messages in a reaction's thread that arrive while the reaction runs. The reaction reads these
    messages too.
    """

    async def take(self) -> NewMessages | None:
        """Return the messages that have arrived, or None if there are none."""
        ...

    async def settle(self, new: NewMessages) -> None:
        """Mark messages as handled after they are recorded, so that they start no reaction of their own."""
        ...


class Driver:
    """Drives one run from its start, or from its records, to its end. The run is a whole reaction, or the work of an
    agent that the run ``outer`` calls as a tool.
    """

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
        outer: RunContext | None = None,
    ) -> None:
        self._run = RunContext(
            reaction, journal, make_context, replies=replies, emit=on_event, playback=playback, outer=outer
        )
        self._models = ModelCaller(self._run)
        self._reviewer = Reviewer(self._run, self._models)
        self._tools = ToolCaller(self._run, self._models, self._reviewer, self._make_inner)
        self._new_messages = new_messages
        self._reaction = reaction
        self._journal = journal
        self._step: Step | None = None  # the next step, or None before the first step
        self._turn_text: str | None = None  # text of the current turn's reply
        self._agent: AgentView = reaction.agent  # agent of the last turn that ran
        self._outer_store = journal.store  # store hook of the runs that called this run
        self._select_store_hook()

    # --- driving a run from its first turn to its end

    async def run(
        self, recorded: Recorded | None = None, *, config_hash: str = "", prompt_hash: str | None = None
    ) -> Finish:
        """Drive the run to its end. If this method raises `ConnectError` or `Superseded`, the reaction stays open."""
        if recorded is not None:
            self._resume(recorded, config_hash, prompt_hash)
        run = self._run
        try:
            await self._reaction.start()
            around = partial(self._models.make_around, 0, "reaction", run.unrecorded_use)
            finish = await self._reaction.agent.chain.around_reaction(around, self._take_turns)
        except SystemExit as error:  # middleware raised it; outside of a separate task it would end the event loop
            raise CallCrashed(error) from error
        used = tuple(run.unrecorded_use)
        return replace(finish, usage=add_usage(used, finish.usage), used=used) if used else finish

    def _resume(self, recorded: Recorded, config_hash: str, prompt_hash: str | None) -> None:
        run = self._run
        run.recorded = recorded
        # Count the messages that recorded calls have sent. Otherwise a restart would reset the limit per recipient.
        for result in recorded.results.values():
            for address, count in result.sent.items():
                run.sent_counts[address] = run.sent_counts.get(address, 0) + count
        started = recorded.started
        if started is not None:
            config_changed = started.config_hash != config_hash
            prompt_changed = prompt_hash is not None and started.prompt_hash not in ("", prompt_hash)
            # Only report that the configuration has changed. Recorded turns stay unchanged, and the new configuration
            # applies to the remaining turns.
            run.emit(Resumed(run.id, len(recorded.replies), config_changed, prompt_changed, path=run.path))

    async def _take_turns(self) -> Finish:
        self._step = await self._advance(Begin())
        while not isinstance(self._step, Finish):
            turn, perform = self._reaction.turn, partial(self._perform_turn, self._reaction.turn)
            self._turn_text = None
            if turn in self._run.recorded.replies:
                await perform()  # the hooks of this turn ran before the restart
            else:
                around = partial(self._models.make_around, turn, "turn", self._run.unrecorded_use)
                await self._reaction.agent.chain.around_turn(around, perform)
                # If middleware did not perform the turn, fail. Otherwise the loop would try the same step forever.
                if self._is_in_turn(turn):
                    raise RoundelayError(
                        f"Middleware around turn {turn} of {self._run.id} did not let it go on to its end: "
                        "it has to await proceed() once."
                    )
            if turn == self._run.last_live_turn:
                usage = self._reaction.usage
                self._run.emit(TurnEnd(self._run.id, turn, self._turn_text, usage, path=self._run.path))
        self._emit_finished(self._step)
        return self._step

    def _is_in_turn(self, turn: int) -> bool:
        """Return whether the next step belongs to this turn."""
        return isinstance(self._step, CallTools | Review) or (
            isinstance(self._step, CallModel) and self._step.turn == turn
        )

    async def _perform_turn(self, turn: int) -> None:
        """Perform the steps of a turn, until the next turn or the end of the run."""
        while self._is_in_turn(turn):
            outcome: Outcome
            step = self._step
            match step:
                case CallModel():
                    outcome = await self._ask_model(step)
                    self._turn_text = outcome.text if isinstance(outcome, ModelReply) else None
                case CallTools():
                    outcome = ToolsDone(await self._call_tools(step))
                case Review():
                    outcome = await self._reviewer.review_answer(step)
                case _:
                    raise AssertionError("a step of this turn is one of the three")
            next_step = await self._advance(outcome)
            if isinstance(outcome, ModelFailed) and isinstance(next_step, Finish) and not outcome.is_recorded:
                # Record the failure before the answer is sent. A resumed run must then end with the same failure
                # instead of asking the model again.
                await self._journal.record_model_failed(turn, outcome)
            self._step = next_step

    async def _advance(self, outcome: Outcome) -> Step:
        step = await self._reaction.proceed(outcome)
        self._select_store_hook()
        return step

    def _select_store_hook(self) -> None:
        """Set the store hooks for records: first the hooks of the current agent, followed by the hooks of the outer
        runs.
        """
        chain, outer_store = self._reaction.agent.chain, self._outer_store
        if not chain.stores:
            self._journal.store = outer_store
        elif outer_store is None:
            self._journal.store = chain.store
        else:
            # Call the outer hooks last, so that they see the final body. Otherwise an inner agent could store data that
            # an outer hook removes.
            self._journal.store = lambda kind, body: outer_store(kind, chain.store(kind, body))

    # --- the model

    async def _ask_model(self, step: CallModel) -> ModelReply | Replayed | ModelFailed:
        """Return the recorded reply of a turn, or ask the model and record its reply."""
        recorded, run = self._run.recorded, self._run
        # Restore the values before any code reads the state. Middleware then skips the work that it finished in this
        # turn before the restart.
        if step.turn in recorded.notes:
            self._reaction.update_values(recorded.notes[step.turn])
        new = recorded.new_messages.get(step.turn)
        if new is not None:
            step = await self._read_in(new)
        replayed = recorded.replay(step.turn)
        if replayed is not None:
            return replayed  # never ask the model again: the calls of the recorded reply may have had effects
        # false if the model is asked again in the same turn because the prompt was too long
        if step.turn != run.last_live_turn:
            if new is None:
                step = await self._read_new_messages(step)
            if step.agent.id != self._agent.id:
                run.emit(HandedOver(run.id, step.turn, step.agent.id, self._agent.id, path=run.path))
            run.last_live_turn = step.turn
            run.emit(TurnStart(run.id, step.turn, self._reaction.max_turns, path=run.path))
        self._agent = step.agent
        try:
            outcome = await self._models.request_reply(step)
            if self._models.sent is not None and step.agent.policy.keep.prompt:
                await self._journal.record_prompt(step.turn, self._models.sent[1])
            if isinstance(outcome, ModelFailed):
                return await self._add_reporter(outcome)
            return await self._record_reply(step, outcome)
        finally:
            self._models.release()

    async def _record_reply(self, step: CallModel, reply: ModelReply) -> ModelReply:
        """Record a reply of the model. Return the reply in the form in which a resumed run would read it."""
        if reply.reasoning and step.agent.policy.keep.thinking:
            await self._journal.record_thinking(step.turn, reply.reasoning)
        request = fingerprint_request(*self._models.sent) if self._models.sent is not None else None
        kept = reply if reply.origin is None else replace(reply, origin=reply.origin.keep_demanded())
        stored = await self._journal.record_reply(
            step.turn,
            kept,
            agent_id=step.agent.id,
            is_last=step.is_last,
            request=request,
            used=self._models.middleware_use,
        )
        # If the stored reply is shorter, continue with the stored reply. Otherwise this run and a resumed run would
        # differ.
        return reply if stored is kept else stored

    async def _add_reporter(self, failed: ModelFailed) -> ModelFailed:
        """Set whether the hub notifies operators of a failure. Failures that concern only one conversation are not
        reported to operators. A replay keeps the recorded value.
        """
        if self._run.playback is not None or self._run.path or failed.failure in OF_ONE_CONVERSATION:
            return failed
        return replace(failed, reported_by=await find_reporter(self._journal.client))

    async def _read_new_messages(self, step: CallModel) -> CallModel:
        source, playback = self._new_messages, self._run.playback
        if source is None or (playback is not None and not playback.reads_new_messages(self._run.id)):
            return step
        new = await source.take()
        if new is None:
            return step
        # Record the new messages, read them, and mark them as handled, in this order. If the process is killed between
        # two of these steps, messages are neither lost nor read twice.
        await self._journal.record_new_messages(step.turn, new)
        step = await self._read_in(new)
        await source.settle(new)
        return step

    async def _read_in(self, new: NewMessages) -> CallModel:
        step = await self._advance(new)
        assert isinstance(step, CallModel)
        return step

    # --- tools

    async def _call_tools(self, step: CallTools) -> dict[int, ToolResult]:
        """Run the planned calls in parallel, and record the calls that may not run. Return the results of the planned
        calls by index.
        """
        if step.turn not in self._run.recorded.replies:
            self._run.emit(ToolRequests(self._run.id, step.turn, step.text, step.calls, path=self._run.path))
        try:
            async with asyncio.TaskGroup() as group:
                for index, result in step.refused.items():
                    group.create_task(self._tools.record_result(step.turn, index, step.calls[index], result))
                tasks = {
                    planned.index: group.create_task(self._tools.call(step.turn, planned, step.text or ""))
                    for planned in step.planned
                }
        except BaseExceptionGroup as failures:
            # Raise a single error. An exception group would not match ``except ConnectError`` in the callers, and the
            # reaction would be closed instead of left open.
            raise first_error(failures) from failures
        return {index: task.result() for index, task in tasks.items()}

    def _make_inner(self, turn: int, call: int, number: int, agent: Agent, text: str) -> Driver:
        """Create the driver for an agent that is called as a tool. The inner agent reads only ``text`` and counts its
        own turns. Raises `ToolError` if the nesting of agent calls is too deep.
        """
        outer = self._reaction
        journal = self._journal.descend(turn, call, number)
        # Without this limit, two agents that call each other would recurse until the budget is exceeded.
        if journal.depth > outer.agent.policy.max_depth:
            raise ToolError(f"Not run: agents call each other {journal.depth} deep already.")
        trigger = outer.setup.trigger
        setup = ReactionSetup(
            path=journal.path,
            sent_at=outer.setup.sent_at,
            trigger=Trigger(trigger.seq, outer.agent.id, "agent", text) if trigger is not None else None,
            form=outer.setup.form,
        )
        # the text of the inner agent is the result of the call
        inner_agent = replace(agent, policy=replace(agent.policy, on_text="reply"))
        return Driver(
            Reaction(inner_agent, prompt=text, answers=True, setup=setup),
            journal=journal,
            make_context=self._run.make_context,
            replies=self._run.replies,
            on_event=self._run.emit,
            playback=self._run.playback,
            outer=self._run,
        )

    # --- the end

    def describe_interrupted(self) -> Finish:
        """Return the end of a cancelled or failed run, with the usage so far."""
        return Finish("cancelled", "", usage=self._reaction.usage, tool_calls=self._reaction.tool_calls)

    def find_stopped(self, by: str) -> StopTrace | None:
        """Return the trace of a run that the participant ``by`` has stopped. Return None in a replay if the recorded
        run has no trace.
        """
        run = self._run
        if run.playback is not None:
            return run.playback.find_stopped(run.id)
        # Text that waits for a review must not be shown, even if the run is stopped before the review.
        is_shown = self._reaction.sends_text() and not run.is_text_withheld()
        text = self._models.streamed_text if is_shown else ""
        return StopTrace(by, self._reaction.turn, text, tuple(run.interrupted_use))

    def cancel(self, reason: str, interrupted_use: tuple[ModelUse, ...] = ()) -> Finish:
        """End the reaction after the task of `run` was cancelled. ``interrupted_use`` is the usage of the model calls
        that the cancellation interrupted.
        """
        used = (*self._run.unrecorded_use, *interrupted_use)
        # the end was already reported, and only middleware was still running
        if self._reaction.state is LoopState.FINISHED:
            done = self._reaction
            usage = add_usage(used, done.usage)
            return Finish("cancelled", reason, None, done.turn, usage, done.tool_calls, used=used)
        finish = self._reaction.advance(Cancel(reason))  # this step calls no hook
        self._select_store_hook()
        assert isinstance(finish, Finish)
        finish = replace(finish, usage=add_usage(used, finish.usage), used=used)
        self._emit_finished(finish)
        return finish

    def _emit_finished(self, end: Finish) -> None:
        details = (end.status, end.reason, end.answer, end.turns, end.usage, end.tool_calls)
        self._run.emit(Finished(self._run.id, *details, path=self._run.path))
