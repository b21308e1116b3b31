"""Performs the steps of a reaction, turn by turn: models and tools are asked, each outcome is recorded and told.

Stands between `reaction` (what to do next) and the world: `model_calls`, `tool_calls`, `journal`. It never decides how
a reaction goes on. What was recorded is taken from there: no reply is asked again, no result made again. Cancelling the
driver's task ends whatever is under way, at any await. Events go to a callback rather than out of an async generator:
tasks and timeouts do not survive a generator that its consumer leaves alone (PEP 789).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol, assert_never

from roundelay.network.errors import RoundelayError

from .agent import Agent
from .events import AnswerReviewed, Event, Finished, HandedOver, OnEvent, Resumed, TurnEnd, TurnStart
from .journal import Journal, Store, drop_largest
from .model_calls import ModelCalls
from .models.model import ModelReply, Usage
from .models.request_print import print_request
from .reaction import Reaction
from .records import Recorded
from .replies import Replies
from .run import MakeContext, Run
from .stand_in import STAND_IN
from .steps import (
    TOO_LARGE,
    Begin,
    CallModel,
    CallTools,
    Cancel,
    Finish,
    ModelFailed,
    NewMessages,
    Outcome,
    Replayed,
    Review,
    Reviewed,
    State,
    Step,
    ToolsDone,
    Trigger,
)
from .tool_calls import ToolCalls
from .tools import ToolError

REVIEW = "review"
_ENVELOPE_BYTES = 2048  # of a record, or a message, around the answer and its metadata


def _store(reaction: Reaction, outer: Store | None, kind: str, body: Mapping[str, object]) -> Mapping[str, object]:
    """Give a record as it is kept: as the agent at work wants it, and those around it."""
    chain = reaction.agent.chain
    kept = chain.store(kind, body) if chain.stores else body
    return outer(kind, kept) if outer is not None else kept


def _fit(reviewed: Reviewed, max_bytes: int) -> Reviewed:
    """Leave out what makes the metadata too large for a record, and a message, beside the answer, the largest first, and
    note it."""
    left = dict(reviewed.metadata)
    dropped = drop_largest(left, max_bytes - len(json.dumps([reviewed.answer, reviewed.correction, *reviewed.notes])))
    if not dropped:
        return reviewed
    note = f"too large for the message's metadata: {', '.join(dropped)}"
    return replace(reviewed, metadata=left, notes=(*reviewed.notes, note))


class Arrivals(Protocol):
    """Messages that arrive in the thread of a reaction and are read in it."""

    def take(self) -> NewMessages | None:
        """Take what has arrived; None for nothing."""
        ...

    async def settle(self, new: NewMessages) -> None:
        """What was taken is recorded: it needs no reaction of its own."""
        ...


class Driver:
    """Drives one run, a reaction or an agent inside of one, from its beginning, or from what it has recorded, to its
    end."""

    def __init__(
        self,
        reaction: Reaction,
        *,
        journal: Journal,
        make_context: MakeContext,
        replies: Replies | None = None,
        arrivals: Arrivals | None = None,
        on_event: OnEvent = lambda event: None,
        pieces: Iterator[int] | None = None,
    ) -> None:
        self._reaction = reaction
        self._journal = journal
        self._arrivals = arrivals
        self._emit = on_event
        self._run = Run(reaction, journal, make_context, on_event, replies)
        if pieces is not None:
            self._run.pieces = pieces
        self._models = ModelCalls(self._run)
        self._tools = ToolCalls(self._run, self._models, self._run_agent)
        self._agent = reaction.agent  # of the last turn
        self._id, self._path = journal.reaction, journal.path  # of every event
        journal.store = partial(_store, reaction, journal.store)

    async def run(
        self, recorded: Recorded | None = None, *, config_hash: str = "", prompt_hash: str | None = None
    ) -> Finish:
        """Drive to the end. Raises `ConnectError` and `Superseded` when the reaction has to stay open."""
        if recorded is not None:
            self._run.recorded = recorded
            if recorded.started is not None:
                changed = recorded.started.config_hash != config_hash
                other = prompt_hash is not None and recorded.started.prompt_hash not in ("", prompt_hash)
                self._emit(Resumed(self._id, len(recorded.replies), changed, other, self._path))
        chain = self._reaction.agent.chain
        return await chain.around_reaction(lambda: self._models.describe(0, "reaction", []), self._perform)

    def cancel(self, reason: str) -> Finish:
        """End the reaction after `run` was cancelled in the middle of a step, or in what middleware does after the last
        one."""
        if self._reaction.state is State.FINISHED:  # and told: middleware was still at it
            done = self._reaction
            return Finish("cancelled", reason, None, done.turn, done.usage, done.tool_calls)
        finish = self._reaction.advance(Cancel(reason))
        assert isinstance(finish, Finish)
        self._emit(self._describe_end(finish))
        return finish

    async def _perform(self) -> Finish:
        step = self._reaction.advance(Begin())
        while not isinstance(step, Finish):
            step = await self._turn(step)
        self._emit(self._describe_end(step))
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
                    case CallTools():
                        outcome = ToolsDone(await self._tools.call(step))
                    case Review():
                        outcome = await self._review(step)
                    case _:
                        assert_never(step)
                step = self._reaction.advance(outcome)
                if isinstance(outcome, ModelFailed) and isinstance(step, Finish) and not outcome.is_recorded:
                    # Before the answer, so that it stays the end.
                    await self._journal.record_model_failed(turn, outcome)
            is_done = True

        if turn in self._run.recorded.replies:
            await perform()
        else:
            around = self._reaction.agent.chain.around_turn
            await around(lambda: self._models.describe(turn, "turn", []), perform)
            if not is_done:
                raise RoundelayError(
                    f"Middleware around turn {turn} of {self._id} did not let it go on to its end: it has to await proceed() once."
                )
        if turn == self._run.live_turn:
            self._emit(TurnEnd(self._id, turn, text, self._reaction.usage, self._path))
        return step

    async def _ask(self, step: CallModel) -> ModelReply | Replayed | ModelFailed:
        recorded, run = self._run.recorded, self._run
        self._reaction.note(recorded.notes.get(step.turn, {}))
        new = recorded.new_messages.get(step.turn)
        if new is not None:
            step = self._tell(new)
        known = recorded.replay(step.turn)
        if known is not None:
            return known
        if step.turn != run.live_turn:
            if self._arrivals is not None and new is None and (new := self._take_arrivals(self._arrivals)) is not None:
                await self._journal.record_new_messages(step.turn, new)
                step = self._tell(new)
                await self._arrivals.settle(new)
            if step.agent.id != self._agent.id:
                self._emit(HandedOver(self._id, step.turn, step.agent.id, self._agent.id, self._path))
            run.live_turn = step.turn
            self._emit(TurnStart(self._id, step.turn, self._reaction.max_turns, self._path))
        self._agent = step.agent
        reply = await self._models.ask(step)
        if isinstance(reply, ModelFailed):
            return reply
        asked = print_request(*self._models.asked) if self._models.asked is not None else None
        if self._journal.is_too_large(reply, asked):
            reply = ModelReply(text=None, usage=reply.usage, finish_reason=TOO_LARGE, model=reply.model)
        await self._journal.record_reply(step.turn, reply, agent_id=step.agent.id, is_last=step.is_last, request=asked)
        return reply

    def _take_arrivals(self, arrivals: Arrivals) -> NewMessages | None:
        stand_in = STAND_IN.get()
        return arrivals.take() if stand_in is None or stand_in.reads_arrivals(self._id) else None

    def _tell(self, new: NewMessages) -> CallModel:
        step = self._reaction.advance(new)
        assert isinstance(step, CallModel)
        return step

    async def _review(self, step: Review) -> Reviewed:
        known = self._run.recorded.reviews.get(step.turn)
        if known is not None and (known.correction is not None or not known.is_altered):
            return known
        stand_in = STAND_IN.get()
        reviewed = stand_in.review(self._id, self._path, step.turn) if stand_in is not None else None
        if reviewed is None:
            spent: list[Usage] = []
            around = self._models.describe(step.turn, REVIEW, spent)
            # One that was found good once, and was not kept as it was, needs no other answer.
            can_correct = step.can_correct and known is None
            reviewed = await self._reaction.agent.chain.review(around, step.answer, can_correct=can_correct)
            reviewed = replace(reviewed, usage=sum(spent, Usage() if known is None else known.usage))
            reviewed = _fit(reviewed, self._journal.max_body_bytes - _ENVELOPE_BYTES)
        if known is None:
            await self._journal.record_review(step.turn, reviewed)
        told = AnswerReviewed(
            self._id, step.turn, reviewed.is_accepted, reviewed.correction, reviewed.notes, self._path
        )
        self._emit(told)
        return reviewed

    async def _run_agent(self, turn: int, call: int, ends: list[Finish], agent: Agent, text: str) -> Finish:
        """Run an agent inside of a call, on a text and nothing else: its turns are its own, its records stand under the
        call's path."""
        run = self._run
        journal = self._journal.descend(turn, call, len(ends))
        if journal.depth > self._reaction.agent.policy.max_depth:
            raise ToolError(f"Not run: agents call each other {journal.depth} deep already.")
        policy = replace(agent.policy, on_text="reply")  # its text is this call's result
        outer = self._reaction
        trigger = outer.trigger
        if trigger is not None:
            trigger = Trigger(trigger.seq, outer.agent.id, "agent", text)
        reaction = Reaction(
            replace(agent, policy=policy), prompt=text, answers=True, path=journal.path, sent_at=outer.sent_at, trigger=trigger
        )  # fmt: skip
        driver = Driver(
            reaction, journal=journal, make_context=run.make_context, replies=run.replies, on_event=self._emit, pieces=run.pieces
        )  # fmt: skip
        driver._run.is_inside_held = run.is_held
        ends.append(Finish("cancelled", "", None, 0, reaction.usage))
        place = len(ends) - 1
        try:
            end = await driver.run(run.recorded.children.get(journal.path))
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
