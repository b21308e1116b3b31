"""The loop of a reaction, without IO: what to do next, given what came of the last step.

`driver` performs each step and hands its outcome to `Reaction.advance`, until that gives `Finish`. A *turn* is one model call, the tool
calls it asked for and their results; a reply without tool calls is a turn too. Whatever a model writes is answered here: an unknown
tool, broken arguments, too many calls, the same call again and again, an empty reply. Before every model call the history is one that
a provider accepts (`history.repair`).

No IO, no clock, no randomness: the same outcomes lead through the same steps, which is how a reaction is resumed. What was recorded
(`Replayed`) is taken as it was, whatever the agent's tools and limits are now.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import assert_never

from roundelay.network.errors import RoundelayError

from .agent import Agent, Handoff, TurnState
from .history import compact, filter_history, read_argument, repair, say, well_formed
from .models.model import (
    FAILURE_SENTENCES,
    AssistantMessage,
    ChatMessage,
    ModelFailure,
    ModelReply,
    SystemMessage,
    ToolCall,
    ToolMessage,
    Usage,
    UserMessage,
)
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
    Status,
    Step,
    ToolsDone,
)
from .text import cut, replace_surrogates
from .tools import FINISH, ToolArgumentsError, ToolResult


class State(Enum):
    """What a reaction waits for."""

    NEW = "new"
    ASKING = "waiting for its model"
    CALLING = "waiting for its tools"
    FINISHED = "finished"


class IllegalStep(RoundelayError):
    """A reaction was given an outcome that it does not wait for: a fault of its driver."""

    def __init__(self, state: State, outcome: Outcome) -> None:
        super().__init__(f"A reaction that is {state.value} cannot take {type(outcome).__name__}.")
        self.state = state
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class _Caller:
    """Who handed over and gets control back, with the history it had."""

    agent: Agent
    history: list[ChatMessage]


class Reaction:
    """The turns from one incoming message to `finish`.

    ``answers`` says that somebody waits for an answer: a person wrote the trigger, or it requires this agent's response; ``threads`` are
    the ids under which the answer would appear, ``keeper`` the agent that the thread stays with already. ``frame`` puts the system message around an agent's instruction, ``shorten`` gives a
    shorter prompt for a model that finds this one too long.
    """

    def __init__(
        self,
        agent: Agent,
        *,
        prompt: str,
        answers: bool,
        threads: Collection[str] = (),
        frame: Callable[[str], str] = str.strip,
        shorten: Callable[[], str] | None = None,
        keeper: str | None = None,
        path: str = "",
    ) -> None:
        self.state = State.NEW
        self.agent = agent
        self.turn = 0
        self.max_turns = agent.policy.max_turns  # of all agents that take part
        self.usage = Usage()
        self.tool_calls = 0
        self.history: list[ChatMessage] = [SystemMessage(""), UserMessage(prompt)]
        self._answers = answers
        self._threads = frozenset(threads)
        self._frame = frame
        self._shorten = shorten
        self._path = path
        self._callers: list[_Caller] = []
        self._keeper = keeper
        self._read_meanwhile: tuple[int, ...] = ()
        self.has_spoken = False
        self._is_last = False
        self._is_compacted = False
        self._is_withheld = False  # the provider withheld the last reply
        self._call_ids: set[str] = set()
        self._results: dict[tuple[str, str], list[str]] = {}  # of each call that was made, by name and arguments
        self._replay: Replayed | None = None  # what is known of the turn under way
        self._reply = ModelReply(text=None)  # of that turn, its call ids made unique
        self._refused: dict[int, ToolResult] = {}
        self._planned: tuple[PlannedCall, ...] = ()

    def advance(self, outcome: Outcome) -> Step:
        """Take the outcome of the last step and give the next one. Raises `IllegalStep` for one that is not awaited."""
        match outcome, self.state:
            case Begin(), State.NEW:
                return self._ask()
            case NewMessages(), State.ASKING:
                self._read_meanwhile += outcome.seqs
                self._answers |= outcome.answers
                say(self.history, outcome.text)
                return self._ask(again=True)
            case ModelReply(), State.ASKING:
                self._replay = None
                return self._take_reply(outcome)
            case Replayed(), State.ASKING:
                self._replay, self._is_last = outcome, outcome.is_last
                return self._take_reply(outcome.reply)
            case ModelFailed(), State.ASKING:
                return self._take_failure(outcome)
            case ToolsDone(), State.CALLING:
                return self._take_results(outcome.results)
            case Cancel(), State.NEW | State.ASKING | State.CALLING:
                if self.state is State.CALLING:
                    self._answer_calls({call.index: ToolResult("Cancelled.", ok=False) for call in self._planned})
                return self._finish("cancelled", outcome.reason, None)
            case _:
                raise IllegalStep(self.state, outcome)

    # --- asking the model

    def _ask(self, *, again: bool = False) -> CallModel:
        self.state = State.ASKING
        if not again:
            self.turn += 1
        self._is_last = self.turn >= self.max_turns
        state = TurnState(self.agent.id, self.turn, self.max_turns, self._path)
        self.history[0] = SystemMessage(self._frame(self.agent.instruct(state)))
        messages = repair(self.history)
        say(messages, self.agent.policy.describe_turn(self.turn, max(self.turn, self.max_turns)))
        return CallModel(self.turn, self.agent, tuple(messages), () if self._is_last else self.agent.specs)

    def _take_failure(self, failed: ModelFailed) -> Step:
        if failed.kind == "context_too_long" and not self._is_compacted and not failed.is_recorded:
            self._is_compacted = True
            self.history = compact(self.history)
            if self._shorten is not None:
                self.history[1] = UserMessage(self._shorten())
            return self._ask(again=True)
        return self._fail(failed.reason, failed.kind)

    def _take_reply(self, reply: ModelReply) -> Step:
        self.usage += reply.usage
        if not reply.tool_calls:
            return self._take_text(reply)
        self._is_withheld = False
        self._reply = replace(reply, tool_calls=tuple(self._name_uniquely(reply.tool_calls)))
        self.history.append(AssistantMessage(reply.text, tuple(map(well_formed, self._reply.tool_calls))))
        self._plan()
        self.state = State.CALLING
        answered = (AnsweredCall(i, self._reply.tool_calls[i], result) for i, result in self._refused.items())
        return CallTools(self.turn, self._planned, tuple(answered), reply.text, self._reply.tool_calls)

    def _take_text(self, reply: ModelReply) -> Step:
        text = (reply.text or "").strip()
        is_cut, was_withheld = reply.finish_reason == "length", self._is_withheld
        self._is_withheld = reply.finish_reason == "content_filter"
        goes_on = self._replay is not None and self._replay.goes_on
        if self._is_withheld and (was_withheld or self._is_last) and not goes_on:
            return self._fail("the provider withheld the reply twice", "content_filter")
        if self._is_last and not goes_on:
            return self._close(f"{text}\n{_CUT_HERE}" if is_cut and text else text)
        if self._is_withheld or not text:
            self.history.append(AssistantMessage(_NO_TEXT))  # so that each turn stands in the history
            empty = _TOO_LARGE if reply.finish_reason == TOO_LARGE else _EMPTY
            say(self.history, _WITHHELD if self._is_withheld else empty)
            return self._ask()
        self.history.append(AssistantMessage(text))
        if is_cut or (goes_on and not self._callers) or self.agent.policy.on_text == "nudge":
            say(self.history, _CUT if is_cut else _NUDGE)
            return self._ask()
        return self._end("answered in plain text", text)

    # --- calls

    def _plan(self) -> None:
        """Decide for each call of the reply whether it is run. `finish` and handoffs are neither planned nor refused."""
        planned: list[PlannedCall] = []
        self._refused = {}
        for index, call in enumerate(self._reply.tool_calls):
            decided = self._recall(index, call) or self._decide(index, call)
            match decided:
                case PlannedCall():
                    planned.append(decided)
                case ToolResult():
                    self._refused[index] = decided
        self._planned = tuple(planned)

    def _recall(self, index: int, call: ToolCall) -> PlannedCall | ToolResult | None:
        """What the records say of a call: its result; that it was begun; None for nothing."""
        if self._replay is None:
            return None
        if index in self._replay.results:
            return self._replay.results[index]
        if index not in self._replay.begun:
            return None
        tool = self.agent.find_tool(call.name)
        try:
            if tool is not None and tool.effect == "idempotent":
                return PlannedCall(index, call, tool, tool.parse(call.arguments))
        except ToolArgumentsError:
            pass  # its parameters are others now
        return ToolResult(UNKNOWN_OUTCOME, ok=False)

    def _decide(self, index: int, call: ToolCall) -> PlannedCall | ToolResult | None:
        limit, most = self.agent.policy.max_tool_calls_per_turn, self.agent.policy.max_same_calls
        if index >= limit:
            return _refuse(f"Not run: at most {limit} calls are run in one turn. Call it again in the next one.")
        if call.name == FINISH:
            return None
        if self._is_last:
            return _refuse("Not run: no tools in the last turn.")
        if self.agent.find_handoff(call.name) is not None:
            return None
        tool = self.agent.find_tool(call.name)
        if tool is None:
            names = ", ".join(spec.name for spec in self.agent.specs)
            return _refuse(f'There is no tool "{call.name[:64]}". The tools are: {names}.')
        try:
            arguments = tool.parse(call.arguments)
        except ToolArgumentsError as error:
            note = " (The reply was cut off at its limit of length.)" if self._reply.finish_reason == "length" else ""
            return _refuse(f"Not run: {error}{note}")
        before = self._results.get(_key(call), [])[-most:]
        if len(before) == most and len(set(before)) == 1:
            return _refuse(
                f"Not run: you made this very call {most} times, and its result was the same each time. "
                "Do something else, or call finish."
            )
        return PlannedCall(index, call, tool, arguments)

    def _take_results(self, results: Mapping[int, ToolResult]) -> Step:
        missing = [planned.call.name for planned in self._planned if planned.index not in results]
        if missing:
            raise ValueError(f"no result for {', '.join(missing)}")
        answers = self._refused | dict(results)
        self._count(answers)
        ending = self._answer_calls(results)
        text = (self._reply.text or "").strip()
        handoff = self.agent.find_handoff(ending.name) if ending is not None else None
        if ending is not None and handoff is not None:
            return self._hand_over(handoff, ending)
        goes_on = self._replay is not None and self._replay.goes_on
        given = next((answers[index].content for index in sorted(answers) if answers[index].is_answer), None)
        if given is not None and not goes_on:
            return self._end("a tool gave the answer", given, is_new=True)
        if ending is not None and not (goes_on and not self._callers):
            # Text beside the `finish` that holds is what the model wants to say, unless it has said it here by a tool.
            return self._end(replace_surrogates(read_argument(ending, "reason")), text or None)
        return self._close(text) if self._is_last and not goes_on else self._ask()

    def _count(self, answers: Mapping[int, ToolResult]) -> None:
        """Take note of the calls that were run: what they cost, where they spoke, what came of them."""
        run = {it.index for it in self._planned}
        if self._replay is not None:
            run |= self._replay.begun & self._replay.results.keys()
        for index in sorted(run):
            answer = answers[index]
            self.tool_calls += 1 + answer.tool_calls
            self.usage += answer.usage
            self.has_spoken |= not self._threads.isdisjoint(answer.threads)
            self._results.setdefault(_key(self._reply.tool_calls[index]), []).append(answer.content)

    def _answer_calls(self, results: Mapping[int, ToolResult]) -> ToolCall | None:
        """Append the answer to each call of the turn, in their order; give the `finish` or handoff that holds, if one does."""
        answers = self._refused | dict(results)
        all_ok = all(result.ok for result in answers.values())
        ending: ToolCall | None = None
        for index, call in enumerate(self._reply.tool_calls):
            is_finish = call.name == FINISH
            if index in answers:
                content = answers[index].content
            elif ending is not None:
                done = "Finished already." if ending.name == FINISH else f"{ending.name} came first."
                content = done if is_finish and ending.name == FINISH else f"Not done: {done}"
            elif is_finish and not all_ok and not self._is_last:
                content = "Not finished: another call of this turn failed. See its answer, then finish again."
            else:
                ending, content = call, "Finished." if is_finish else "The conversation is handed over."
            self.history.append(ToolMessage(call.id, content))
        return ending

    def _name_uniquely(self, calls: tuple[ToolCall, ...]) -> list[ToolCall]:
        """Replace an id that is empty or was used in this reaction: a provider refuses a history that holds it twice."""
        named = []
        for index, call in enumerate(calls):
            call_id = call.id
            if not call_id:
                call_id = f"call_{self.turn}_{index}"
            while call_id in self._call_ids:
                call_id += f"_{self.turn}_{index}"
            self._call_ids.add(call_id)
            named.append(replace(call, id=call_id))
        return named

    # --- handing over, and the end

    def _hand_over(self, handoff: Handoff, call: ToolCall) -> CallModel:
        caller, note = self.agent, read_argument(call, "note").strip()
        if handoff.returns == "to_caller":
            self._callers.append(_Caller(caller, list(self.history)))
        else:
            self._callers.clear()
        if handoff.returns == "never":
            self._keeper = handoff.agent.id
        self.history = [*self.history[:2], *filter_history(self.history[2:], handoff.history)]
        say(self.history, f"{caller.id} handed this conversation over to you{f': {note}' if note else '.'}")
        self.agent = handoff.agent
        return self._ask()

    def _return(self, reason: str, text: str | None) -> CallModel:
        """Give control back to the agent that handed over."""
        returning, caller = self.agent, self._callers.pop()
        self.agent, self.history = caller.agent, caller.history
        said = f"It said: {text}" if text else f"It finished: {reason}"
        say(self.history, f"{returning.id} has handed the conversation back to you. {said}")
        return self._ask()

    def _end(self, reason: str, text: str | None, *, is_new: bool = False) -> Step:
        """The agent has finished, with a text. ``is_new``: no tool can have said it in the thread already."""
        if self._callers:
            return self._return(reason, text)
        is_said = self.has_spoken and self.state is State.CALLING and not is_new
        return self._finish("finished", reason, text if self._is_sent() and not is_said else None)

    def _close(self, text: str) -> Finish:
        """End at the limit of turns, with whatever the model said last."""
        reason = f"reached the limit of {self.max_turns} turns"
        answer = text or f"I {reason} without an answer."
        return self._finish("stopped", reason, answer if self._is_sent() else None)

    def _fail(self, reason: str, kind: ModelFailure) -> Finish:
        answer = f"I could not answer: {FAILURE_SENTENCES[kind]}."
        return self._finish("failed", reason, answer if self._is_sent() else None)

    def _is_sent(self) -> bool:
        match self.agent.policy.on_text:
            case "reply":
                return True
            case "auto" | "nudge":
                return self._answers
            case "record":
                return False
            case other:
                assert_never(other)

    def _finish(self, status: Status, reason: str, answer: str | None) -> Finish:
        self.state = State.FINISHED
        read = self._read_meanwhile
        return Finish(status, reason, answer, self.turn, self.usage, self.tool_calls, self._keeper, read)


MAX_REFUSAL_CHARS = 2000

TOO_LARGE = "too_large"
"""The ``finish_reason`` of the empty reply that stands for one too large to be recorded."""

UNKNOWN_OUTCOME = (
    "The agent was interrupted while this call was running. Whether it took effect is unknown, and it was not repeated. "
    "Find out before you call it again."
)

_NO_TEXT = "(no reply)"
_EMPTY = "Your reply was empty. Call a tool, or call finish if there is nothing left to do."
_TOO_LARGE = "Your reply was too large to be kept and was dropped. Say it shorter, or in several steps."
_WITHHELD = "The provider's filter withheld your reply. Say it in other words, or call finish."
_CUT = "Your reply was cut off at its limit of length and was not sent. Give all of it again, shorter."
_CUT_HERE = "[cut off here: the reply reached its limit of length]"
_NUDGE = "Text alone reaches nobody. Call a tool to act or to send it, or call finish if there is nothing left to do."


def _refuse(text: str) -> ToolResult:
    # The text may quote what the model wrote, at any length.
    return ToolResult(replace_surrogates(cut(text, MAX_REFUSAL_CHARS)), ok=False)


def _key(call: ToolCall) -> tuple[str, str]:
    """What makes two calls the same: the tool and the arguments, however they are spaced and ordered."""
    try:
        return call.name, json.dumps(json.loads(call.arguments or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return call.name, call.arguments
