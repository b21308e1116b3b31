"""The loop of a reaction, without IO: returns the next step for the outcome of the last step.

`driver` performs each step and passes its outcome to `Reaction.proceed`, until that method returns `Finish`. A *turn*
is one model call, the tool calls in its reply, and their results. A reply without tool calls is also a turn. `planner`
decides which calls run. Before every model call the history is repaired, so that a provider accepts it.

The loop has no IO, clock or randomness. The loop awaits only the agent's hooks, which may be coroutines. The same
outcomes lead to the same steps, and a reaction resumes on this basis. Recorded outcomes (`Replayed`) are used
unchanged, even if the agent's tools and limits have changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType

from pydantic import JsonValue

from roundelay.network.errors import RoundelayError

from . import loop_texts
from .agent import KEEPER, Agent, Handoff
from .history import (
    append_user_text,
    compact,
    drop_turn,
    read_argument,
    repair,
    replace_trailing_text,
    sanitize_call,
)
from .middleware import FAILED_CHECKS, CallModel
from .models.model import (
    FAILURE_SENTENCES,
    AssistantMessage,
    ChatMessage,
    ModelReply,
    NamedTool,
    SystemMessage,
    ToolCall,
    ToolSpec,
    Usage,
    UserMessage,
)
from .offered_tools import LOADED, order_specs
from .planner import Plan, Planner, answer_calls, has_effect, is_unknown, refuse
from .policy import describe_place
from .reaction_state import Control, ReactionSetup, TurnInProgress
from .text import replace_surrogates
from .tools import FINISH, PlannedCall
from .values import (
    ALTERED,
    CORRECTED,
    DISABLED,
    FAILURE,
    NOT_RUN,
    TOO_LARGE,
    Begin,
    Cancel,
    End,
    Finish,
    ModelFailed,
    NewMessages,
    Outcome,
    Replayed,
    Review,
    Reviewed,
    Status,
    ToolResult,
    ToolsDone,
    TurnState,
)


class Reaction:
    """The turns of an agent's work on one message, from the trigger to `Finish`.

    ``answers``: somebody waits for an answer, because a person wrote the message or it requires this agent's response.
    """

    def __init__(self, agent: Agent, *, prompt: str, answers: bool, setup: ReactionSetup | None = None) -> None:
        self.setup = setup = setup or ReactionSetup()
        self.state = LoopState.NEW
        self.control = Control(agent, tuple(setup.earlier))
        self.max_turns = agent.policy.max_turns  # limit for all agents that take part
        self.usage = Usage()
        self.tool_calls = 0
        self.history: list[ChatMessage] = [SystemMessage(""), UserMessage(prompt)]
        self.keeper = setup.keeper
        self.has_spoken = False
        """Whether a tool has sent a message to the thread of the trigger."""

        self.read_meanwhile: tuple[int, ...] = ()
        """Seqs of the messages that arrived and were read while the reaction ran."""

        self._answers = answers
        self._turn = TurnInProgress()
        # Agents that get control back, each with its history at the time of its handoff.
        self._callers: list[tuple[Control, list[ChatMessage]]] = []
        self._planner = Planner()
        self._calls: dict[str, int] = {}  # number of calls that ran, by the tool's name
        self._values: dict[str, object] = {}
        self._has_values = False
        self._is_compacted = False
        self._corrections = 0
        # Consecutive turns without effect. Counted only from recorded outcomes, so that a resumed run has the same
        # count.
        self._idle_turns = 0

    @property
    def agent(self) -> Agent:
        """The agent that controls the conversation."""
        return self.control.agent

    @property
    def turn(self) -> int:
        """Number of the current turn, from 1."""
        return self._turn.number

    def advance(self, outcome: Outcome) -> Step:
        """Return the next step like `proceed`, without an event loop. Raises `RuntimeError` if a hook awaits."""
        coroutine = self.proceed(outcome)
        try:
            coroutine.send(None)
        except StopIteration as done:
            step: Step = done.value
            return step
        # Run the hook's cleanup now instead of when the coroutine is garbage-collected.
        coroutine.close()
        raise RuntimeError(f"A hook of {self.agent.id} awaits something: use `await proceed()` instead of `advance()`.")

    async def start(self) -> None:
        """Ask the hooks for their initial state. Idempotent. The first step also calls this method."""
        if not self._has_values:
            self._has_values = True
            # Existing values have priority. The initial state of a hook must not reset notes that were read back from
            # the records.
            self._values.update({**await self.agent.chain.start(), **self._values})

    async def proceed(self, outcome: Outcome) -> Step:
        """Return the next step for the outcome of the last step. Awaits only the agent's hooks. Raises `IllegalStep`
        if the outcome does not fit the state.
        """
        step: Step
        match outcome, self.state:
            case Begin(), LoopState.NEW:
                await self.start()
                step = await self._ask()
            case NewMessages(), LoopState.ASKING:
                self.read_meanwhile += outcome.seqs
                # Never reset this flag to False. A requester who waited for an answer at the start still waits after
                # later messages arrive.
                self._answers |= outcome.answers
                append_user_text(self.history, outcome.text)
                step = await self._ask(again=True)
            case ModelReply(), LoopState.ASKING:
                step = await self._handle_reply(outcome)
            case Replayed(), LoopState.ASKING:
                # Limits may have changed since the recording. Use the recorded value of ``is_last``, which shows
                # whether the turn had tools.
                self._turn.replay, self._turn.is_last = outcome, outcome.is_last
                step = await self._handle_reply(outcome.reply)
            case ModelFailed(), LoopState.ASKING:
                step = await self._handle_failure(outcome)
            case ToolsDone(), LoopState.CALLING:
                step = await self._handle_results(outcome.results)
            case Reviewed(), LoopState.REVIEWING:
                step = await self._handle_review(outcome)
            case Cancel(), LoopState.NEW | LoopState.ASKING | LoopState.CALLING | LoopState.REVIEWING:
                if self.state is LoopState.CALLING:  # every call in the history needs an answer
                    self._answer_calls(
                        {call.index: ToolResult("Cancelled.", ok=False) for call in self._turn.plan.planned}
                    )
                step = self._finish("cancelled", outcome.reason, None)
            case _:
                raise IllegalStep(self.state, outcome)
        return step

    def describe(self) -> TurnState:
        """Return the state of the turn for hooks and instructions."""
        return TurnState(
            self.agent.id,
            self.turn,
            self.max_turns,
            self.setup.path,
            self.usage,
            self._calls,
            self._values,
            self.history,
            self.setup.sent_at,
            self.setup.trigger,
            self.turn - self.control.first_turn + 1,
            self.setup.conversation,
        )

    def update_values(self, values: Mapping[str, object]) -> None:
        """Update ``state.values`` with values that middleware stored."""
        self._values.update(values)

    @property
    def can_correct(self) -> bool:
        """Whether the model may write another answer if a review rejects this answer."""
        return self.turn < self.max_turns and self._corrections < self.agent.policy.max_corrections

    @property
    def is_reviewed(self) -> bool:
        """Whether reviewers check or extend an answer before it is sent."""
        return self.agent.chain.reviews or bool(self.control.guards)

    def sends_text(self) -> bool:
        """Return whether text that the model writes without a tool is sent to the thread of the trigger."""
        on_text = self.agent.policy.on_text
        return on_text == "reply" or (on_text != "record" and self._answers)

    # --- asking the model

    async def _ask(self, *, again: bool = False) -> Step:
        """Start the next turn. With ``again``, ask the model once more in the current turn."""
        self.state = LoopState.ASKING
        if not again:
            before = self._turn
            self._turn = TurnInProgress(
                before.number + 1,
                forced_tool=before.next_tool,
                follows_withheld=before.is_withheld,
                loaded=before.loaded,
            )
            # Refresh the tools of middleware once per turn, not per request. If the model is asked again in the same
            # turn, its tools must not change.
            if self.agent.chain.brings_tools:
                self.control = replace(self.control, agent=self.agent.refresh(self.describe()))
        turn, agent, chain = self._turn, self.agent, self.agent.chain
        state = self.describe()
        is_stuck = self._idle_turns >= agent.policy.max_idle_turns
        turn.is_last = turn.number >= self.max_turns or is_stuck or not await chain.should_continue(state)
        # Call the hook only once per turn. If the model is asked again, the hook's text would appear twice.
        if turn.is_last and not again:
            match await chain.on_no_tool_calls(state, "limit_reached"):
                case str(text):
                    append_user_text(self.history, text)
                case End() as end:
                    return await self._end_by(end)
        # The text that states the turn comes last and is not kept in the history. With this order, each prompt begins
        # like the previous prompt, and providers cache the common beginning.
        self.history[0] = SystemMessage(self.setup.frame(agent.instruct(state)))
        # After a tool has sent a message to the thread, text would be a second answer. Offer `finish` as another way to
        # end the work.
        further = (turn.forced_tool, FINISH if self.has_spoken else None)
        turn.loaded |= dict.fromkeys(name for name in further if name is not None)
        offered = order_specs(agent.specs, self.setup.deferred, turn.loaded)
        specs = () if turn.is_last else offered
        facts = describe_place(agent.policy, self.setup.form, turn.number, self.max_turns, turn.is_last, bool(offered))
        trailing = f"{facts}\n{self._explain_answering(specs, offered)}".strip()
        system, *others = repair(self.history, trailing or None)
        messages = (system, *(() if self._is_compacted else self.setup.chat), *others)
        step = CallModel(turn.number, agent, messages, specs, state, turn.is_last)
        # Providers refuse a request that forces a tool without offering this tool. The last turn, for example, offers
        # no tools.
        if turn.forced_tool is not None and any(spec.name == turn.forced_tool for spec in specs):
            step = replace(step, tool_choice=NamedTool(turn.forced_tool))
        step = await chain.prepare(state, step)
        if step.tools is not specs:  # hooks changed the tools, so the model may have to answer in another way
            other = f"{facts}\n{self._explain_answering(step.tools, offered)}".strip()
            step = replace(step, messages=replace_trailing_text(step.messages, trailing, other))
        return step

    def _explain_answering(self, specs: Collection[ToolSpec], offered: Collection[ToolSpec]) -> str:
        """Return the rule that says which text is the answer in this turn, and how to give the answer with these
        tools. Return an empty string if the author's template contains such a rule.
        """
        policy, is_inside = self.agent.policy, bool(self.setup.path or self._callers)
        is_over = self._turn.is_last or (not specs and policy.on_text != "nudge")
        if self.setup.is_explained and policy.on_text == "auto" and not is_inside and not is_over:
            return ""  # the template has its own rule, which could contradict this one
        return loop_texts.explain_answering(
            policy.on_text,
            is_lean=self.setup.form != "full",
            is_sent=self.sends_text() or bool(self._callers),
            is_over=is_over,
            is_inside=is_inside,
            has_spoken=self.has_spoken,
            has_tools=bool(offered),
            can_finish=any(spec.name == FINISH for spec in specs),
        )

    # --- outcomes of the model call

    async def _handle_failure(self, failed: ModelFailed) -> Step:
        if failed.failure == "context_too_long" and not self._is_compacted and not failed.is_recorded:
            self._is_compacted = True  # compact only once: if the short history is too long as well, the reaction fails
            self.history = compact(self.history, self.setup.shorten() if self.setup.shorten is not None else None)
            return await self._ask(again=True)
        return self._fail(failed)

    async def _handle_reply(self, reply: ModelReply) -> Step:
        turn, chain = self._turn, self.agent.chain
        self.usage += await chain.calculate_usage(self.describe(), reply)
        if not reply.tool_calls:
            return await self._handle_text(reply)
        # The plan and the journal use the calls in the form that the model wrote. The history needs well-formed calls.
        turn.reply = replace(reply, tool_calls=self._planner.make_ids_unique(turn.number, reply.tool_calls))
        calls = tuple(map(sanitize_call, turn.reply.tool_calls))
        self.history.append(AssistantMessage(reply.text, calls, reply.origin))
        self.state = LoopState.CALLING
        state = self.describe()
        end = await chain.process_tool_calls(state, turn.reply)
        if end is not None:
            # Answer every call, although none runs. A reviewer may reject the end and ask the model again, and
            # providers refuse a history with an unanswered call.
            turn.plan = Plan((), dict.fromkeys(range(len(reply.tool_calls)), refuse("Not run: the work has ended.")))
            self._answer_calls({})
            return await self._end_by(end)
        turn.plan = await self._planner.plan(
            self.agent,
            turn.reply,
            is_last=turn.is_last,
            replay=turn.replay,
            preprocess=lambda call: chain.preprocess_arguments(state, call),
        )
        return CallTools(turn.number, turn.plan.planned, dict(turn.plan.refused), reply.text, turn.reply.tool_calls)

    async def _handle_text(self, reply: ModelReply) -> Step:
        """Handle a reply without tool calls: the answer, or text that the model must write again."""
        turn, text = self._turn, (reply.text or "").strip()
        turn.is_withheld = reply.is_withheld
        # Ask the model only twice, because a filter that refuses the same history twice will refuse it again.
        # ``goes_on`` overrides this rule, because the records prove that the run continued.
        if turn.is_withheld and (turn.follows_withheld or turn.is_last) and not turn.goes_on:
            return self._fail(ModelFailed("the provider withheld the reply twice", "content_filter"))
        if text and self._is_text_lost:
            self.history.append(AssistantMessage(text))
            feedback = loop_texts.NOT_KEPT
        elif turn.is_last and not turn.goes_on:
            text = "" if turn.is_text_altered else text
            self.history.append(AssistantMessage(text or loop_texts.NO_TEXT))  # a reviewer may want another answer
            return self._close(f"{text}\n{loop_texts.CUT_HERE}" if reply.is_cut and text else text)
        elif turn.is_withheld or not text:
            self._idle_turns += 1
            self.history.append(AssistantMessage(loop_texts.NO_TEXT))  # each turn needs a message in the history
            is_too_large = reply.finish_reason == TOO_LARGE
            feedback = loop_texts.explain_empty(turn.is_withheld, is_too_large, reply.is_cut)
        else:
            self.history.append(AssistantMessage(text))
            # A text that was cut off is incomplete. A text after which the recorded run continued was not the answer
            # then, so it is not the answer now.
            is_unsent = reply.is_cut or (turn.goes_on and not self._callers) or self.agent.policy.on_text == "nudge"
            match await self.agent.chain.on_no_tool_calls(self.describe(), "no_calls"):
                case str(hook_text):
                    feedback = hook_text
                case End() as end:
                    return await self._end_by(end)
                case _ if is_unsent:
                    self._idle_turns += 1
                    feedback = loop_texts.CUT if reply.is_cut else loop_texts.NUDGE
                case _:
                    return await self._end("answered in plain text", text)
        append_user_text(self.history, feedback)
        return await self._ask()

    @property
    def _is_text_lost(self) -> bool:
        """Whether the turn's text was not recorded, but a later turn can write the text again."""
        return self._turn.is_text_altered and not self._turn.goes_on and self.turn < self.max_turns

    # --- outcomes of the tool calls

    async def _handle_results(self, results: Mapping[int, ToolResult]) -> Step:
        turn = self._turn
        turn.plan.check_results(results)
        answers = turn.plan.refused | dict(results)
        run = turn.plan.list_run(turn.replay)
        # An unknown outcome may be an effect. A refusal has no effect, and neither has a call that did not run.
        is_idle = not any(
            is_unknown(result) or (index in run and has_effect(result)) for index, result in answers.items()
        )
        self._idle_turns = self._idle_turns + 1 if is_idle else 0
        # Count idle turns before calling the hooks below: the hooks change the results, and a resumed run must count
        # the same turns.
        answers = turn.plan.refused | await self._count_calls(results)
        ending = self._answer_calls(answers)
        text = (turn.reply.text or "").strip()
        handoff = self.agent.find_handoff(ending.name) if ending is not None else None
        if ending is not None and handoff is not None:
            return await self._hand_over(handoff, ending)
        # Use the answer with the lowest index instead of the first to arrive: in a resumed run, parallel calls may end
        # in another order.
        answer = next((it for _, it in sorted(answers.items()) if it.is_answer and ALTERED not in it.data), None)
        if answer is not None and not turn.goes_on:
            keeper = answer.data.get(KEEPER)
            self.keeper = keeper if isinstance(keeper, str) else self.keeper
            return await self._end("a tool gave the answer", answer.content, is_new=True)
        # If the records contain a next turn, the limits were higher in the recorded run. Ending the run now would leave
        # the effects of the next turn without a cause.
        is_over = turn.is_last and not turn.goes_on
        if ending is not None and self._is_text_lost and not self.has_spoken:
            append_user_text(self.history, loop_texts.NOT_KEPT)
            is_over = False
        elif ending is not None and not (turn.goes_on and not self._callers):
            # Text that comes with a `finish` call that takes effect is the answer, unless a tool has already sent a
            # message to the thread.
            return await self._end(replace_surrogates(read_argument(ending, "reason")), text or None)
        elif any(DISABLED in result.data for result in answers.values()):
            match await self.agent.chain.on_no_tool_calls(self.describe(), "tools_disabled"):
                case str(hook_text):
                    append_user_text(self.history, hook_text)
                case End() as end:
                    return await self._end_by(end)
        return self._close(text) if is_over else await self._ask()

    async def _count_calls(self, results: Mapping[int, ToolResult]) -> dict[int, ToolResult]:
        """Add the calls that ran to the totals: usage, tool counts and threads. Return the results as the hooks leave
        them.

        A call with an unknown outcome is never counted, not even in a later resume.
        """
        turn, final = self._turn, dict(results)
        turn_start = len(self.history) - 1
        is_corrected = False
        for index in turn.plan.list_run(turn.replay):
            call, result = turn.reply.tool_calls[index], final.get(index) or turn.plan.refused[index]
            is_corrected |= CORRECTED in result.data
            if NOT_RUN in result.data or is_unknown(result):
                continue
            if DISABLED not in result.data:
                self._calls[call.name] = self._calls.get(call.name, 0) + 1
                self.tool_calls += 1 + result.tool_calls
            self.usage += result.usage
            self.has_spoken |= not set(self.setup.threads).isdisjoint(result.threads)
            if isinstance(loaded := result.data.get(LOADED), list):
                turn.loaded |= dict.fromkeys(map(str, loaded))
            if ALTERED not in result.data:
                self._planner.add_result(call, result.content)
            final[index], changes = await self.agent.chain.after_tool(self.describe(), call, result)
            turn.next_tool = changes.next_tool or turn.next_tool
            if changes.messages is not None:
                # A hook may return the current turn too. Drop the current turn from the hook's result, because it is
                # already at the end of the history, and no call may occur twice.
                self.history[1:turn_start] = drop_turn(changes.messages, turn.reply.tool_calls)
                turn_start = len(self.history) - 1
        self._corrections += is_corrected
        return final

    def _answer_calls(self, results: Mapping[int, ToolResult]) -> ToolCall | None:
        """Append the answer to each call of the turn. Return the `finish` or the handoff that takes effect."""
        turn = self._turn
        messages, ending = answer_calls(turn.reply.tool_calls, turn.plan.refused | dict(results), is_last=turn.is_last)
        self.history += messages
        return ending

    # --- handing over

    async def _hand_over(self, handoff: Handoff, call: ToolCall) -> Step:
        caller, note = self.control, read_argument(call, "note").strip()
        # Save a copy of the history. When control returns, the history must not contain the turns of the new agent.
        if handoff.returns == "to_caller":
            self._callers.append((caller, list(self.history)))
        else:
            self._callers.clear()
        if handoff.returns == "never":
            self.keeper = handoff.agent.id
        # Keep the earlier agents in control.earlier, because their guards and approvers still apply.
        self.control = Control(handoff.agent, (caller.agent, *caller.earlier), self.turn + 1)
        self.history = handoff.take_over(caller.agent.id, self.history, note)
        # Values of earlier agents have priority, so that middleware that the agents share keeps its state.
        self._values = {**await handoff.agent.chain.start(), **self._values}
        self._idle_turns = 0
        return await self._ask()

    async def _return_control(self, reason: str, text: str | None) -> Step:
        """Return control of the conversation to the agent that handed it over."""
        returning, (caller, self.history) = self.agent, self._callers.pop()
        self.control = replace(caller, first_turn=0)  # the caller's first turn was before its handoff
        self._idle_turns = 0
        outcome = f"It said: {text}" if text else f"It finished: {reason}"
        append_user_text(self.history, f"{returning.id} has handed the conversation back to you. {outcome}")
        return await self._ask()

    # --- the end

    async def _end(self, reason: str, text: str | None, *, is_new: bool = False) -> Step:
        """End the agent's work with a text. ``is_new``: no tool can have sent this text to the thread already."""
        if self._callers:
            return await self._return_control(reason, text)
        # Text that comes with `finish` usually repeats a message that a tool has just sent. Sending the text and the
        # message would post the answer twice.
        is_said = self.has_spoken and self.state is LoopState.CALLING and not is_new
        return self._propose("finished", reason, text if self.sends_text() and not is_said else None)

    async def _end_by(self, end: End) -> Step:
        """End the agent's work because a hook requested it."""
        return await self._end(end.reason, end.answer, is_new=True)

    def _close(self, text: str) -> Step:
        """End at a limit, with the model's last text."""
        max_idle = self.agent.policy.max_idle_turns
        if self.turn >= self.max_turns:
            reason = f"reached the limit of {self.max_turns} turns"
        elif self._idle_turns >= max_idle:
            reason = f"stopped after {max_idle} turns in a row without effect (max_idle_turns)"
        else:
            reason = "reached a limit of its policy"
        answer = text or f"I {reason.partition(' (')[0].replace('its', 'my')} without an answer."
        metadata: dict[str, JsonValue] = {} if text else {FAILURE: "limit"}
        return self._propose("stopped", reason, answer if self.sends_text() else None, metadata)

    def _fail(self, failed: ModelFailed) -> Finish:
        # The reason may quote the provider. Write it only to records and logs, and never to the thread.
        answer = f"I could not answer: {FAILURE_SENTENCES[failed.failure]}."
        if failed.reported_by:
            answer = loop_texts.REPORTED.format(agent_id=failed.reported_by)
        status: Status = "stopped" if failed.failure == "budget" else "failed"
        finish = self._finish(status, failed.reason, answer if self.sends_text() else None)
        return replace(finish, failure=failed.failure)

    def _propose(
        self, status: Status, reason: str, answer: str | None, metadata: Mapping[str, JsonValue] = MappingProxyType({})
    ) -> Step:
        """End with an answer after the reviewers have checked it."""
        # Read ``can_correct`` before `_finish` changes the state. The limits at this time apply, even if the review
        # comes much later.
        can_correct = self.can_correct
        end = self._finish(status, reason, answer)
        end = replace(end, metadata=metadata) if metadata and answer is not None else end
        if answer is None or not self.is_reviewed:
            return end
        self.state = LoopState.REVIEWING
        self._turn.proposed = Review(self.turn, end, answer, self.describe(), can_correct)
        return self._turn.proposed

    async def _handle_review(self, reviewed: Reviewed) -> Step:
        proposed, self._turn.proposed = self._turn.proposed, None
        assert proposed is not None
        self.usage += reviewed.usage
        # If no turn is left, the model cannot use the correction. In this case, the review decides whether the answer
        # is sent unchanged or blocked.
        if reviewed.correction is not None and proposed.can_correct:
            self._corrections += 1
            append_user_text(self.history, f"Your answer was not given. {reviewed.correction}")
            return await self._ask()
        self.state = LoopState.FINISHED
        metadata = {**proposed.proposed.metadata, **reviewed.metadata}
        end = replace(proposed.proposed, usage=self.usage, metadata=metadata, answer=reviewed.answer)
        if not reviewed.is_blocked:
            return end
        checks = reviewed.metadata.get(FAILED_CHECKS)
        by = f" by {', '.join(map(str, checks))}" if isinstance(checks, list) and checks else ""
        reason = f"the answer was blocked{by}"
        return replace(
            end, status="stopped", reason=reason, answer=loop_texts.BLOCKED, metadata={**metadata, FAILURE: "blocked"}
        )

    def _finish(self, status: Status, reason: str, answer: str | None) -> Finish:
        self.state = LoopState.FINISHED
        return Finish(status, reason, answer, self.turn, self.usage, self.tool_calls, self.keeper, self.read_meanwhile)


@dataclass(frozen=True, slots=True)
class CallTools:
    """Step that runs the planned calls in parallel. The outcome of the step is `ToolsDone`. ``planned`` and ``refused``
    may both be empty, if the model called only `finish`.
    """

    turn: int
    planned: tuple[PlannedCall, ...]
    refused: Mapping[int, ToolResult]
    """Answers to calls that do not run, by index."""

    text: str | None = None
    """Text of the reply, in addition to its calls."""

    calls: tuple[ToolCall, ...] = ()
    """All calls of the reply, with unique ids."""


Step = CallModel | CallTools | Review | Finish


class LoopState(Enum):
    """State of a reaction: whether it is new, which outcome it waits for, or that it has finished."""

    NEW = "new"
    ASKING = "waiting for its model"
    CALLING = "waiting for its tools"
    REVIEWING = "waiting for its reviewers"
    FINISHED = "finished"


class IllegalStep(RoundelayError):
    """The outcome passed to a reaction does not fit its state. The driver of the reaction has a bug."""

    def __init__(self, state: LoopState, outcome: Outcome) -> None:
        super().__init__(f"A reaction that is {state.value} cannot take {type(outcome).__name__}.")
        self.state = state
        self.outcome = outcome
