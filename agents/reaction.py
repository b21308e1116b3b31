"""The loop of a reaction, without IO: what to do next, given what came of the last step.

`driver` performs each step and hands its outcome to `Reaction.proceed`, until that gives `Finish`. A *turn* is one
model call, the tool calls it asked for and their results; a reply without tool calls is a turn too. Whatever a model
writes is answered here: an unknown tool, broken arguments, too many calls, the same call again and again, an empty
reply. `Planner` decides which calls of a reply are run. Before every model call the history is one that a provider
accepts (`history.repair`).

No IO, no clock, no randomness of its own: all that is awaited here are the agent's hooks, which are coroutines if their
author made them so. The same outcomes lead through the same steps, which is how a reaction is resumed. What
was recorded (`Replayed`) is taken as it was, whatever the agent's tools and limits are now.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

from pydantic import JsonValue

from roundelay.network.errors import REFUSAL_CODES, RoundelayError

from .agent import KEEPER, Agent, Handoff
from .history import append_user_text, compact, drop_turn, read_argument, repair, replace_trailing_text, sanitize_call
from .middleware import FAILED_CHECKS, CallModel, Guard
from .models.model import (
    FAILURE_SENTENCES,
    AssistantMessage,
    ChatMessage,
    ModelFailure,
    ModelReply,
    NamedTool,
    SystemMessage,
    ToolCall,
    ToolMessage,
    ToolSpec,
    Usage,
    UserMessage,
    derive_nine,
)
from .policy import AgentPolicy
from .text import cut, replace_surrogates
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
    ToolArgumentsError,
    ToolResult,
    ToolsDone,
    Trigger,
    TurnState,
)

if TYPE_CHECKING:
    from roundelay.network.messages import BaseMessage

NO_TEXT = "(no reply)"
EMPTY_REPLY = "Your reply was empty."
REPLY_TOO_LARGE = "Your reply was too large to be kept and was dropped. Say it shorter, or in several steps."
NOT_KEPT = "You were interrupted, and what you wrote last was not kept and not sent. Write it again."
WITHHELD = "The provider's filter withheld your reply. Say it in other words."
CUT = "Your reply was cut off at its limit of length and was not sent. Give all of it again, shorter."
CUT_EMPTY = "Your reply was cut off at its limit of length before it said anything. Think less, and answer at once."
CUT_HERE = "[cut off here: the reply reached its limit of length]"
NUDGE = "Nobody has read this: your text reaches nobody by itself."


ANSWER = (
    "Your answer is the text that you write without calling a tool: it is sent to {to} and ends your work. "
    "Call the tools that you need before it, and do not send the answer by a tool as well."
)
ANSWERED = (
    "You have written to the incoming thread by a tool. Text that you write without calling one is sent there, too."
)
ANSWER_BY_TOOL = "Text without a tool call reaches nobody. Send your answer by a tool that sends messages."
NOBODY_WAITS = "Nobody waits for an answer, and text without a tool call reaches nobody. Act by calling tools."
OR_FINISH = "If nothing is left to do or to say, call finish."
CLOSING = "Write your answer now, as plain text: it is sent as it is."
CLOSING_UNSENT = "Write in plain text how far you have come: that is recorded and sent to nobody."
"""Behind the facts of each turn: which text is the answer, and how it is given."""

BLOCKED = "I could not answer: what I had to say did not pass a check that it has to pass."

REPORTED = "{agent_id} cannot answer right now; the operator has been notified."
"""What people are told of a fault that waits in the operators' inbox."""

MAX_REFUSAL_CHARS = 2000

UNKNOWN_OUTCOME = (
    "The agent was interrupted while this call was running. Whether it took effect is unknown, and it was not "
    "repeated. "
    "Find out before you call it again."
)


_NOT_KEPT = "Not run: the agent was interrupted, and the arguments of this call were not kept. Call it again."


@dataclass(slots=True)
class Plan:
    """What to do with the calls of one reply, by their place. `finish` and handoffs are neither planned nor refused."""

    planned: tuple[PlannedCall, ...] = ()
    refused: dict[int, ToolResult] = field(default_factory=dict)

    def check(self, results: Mapping[int, ToolResult]) -> None:
        """Raises `ValueError` if a planned call has no result."""
        missing = [planned.call.name for planned in self.planned if planned.index not in results]
        if missing:
            raise ValueError(f"no result for {', '.join(missing)}")

    def list_run(self, replay: Replayed | None) -> list[int]:
        """Give the calls that are run, or were, by what the records say."""
        run = {it.index for it in self.planned}
        return sorted(run if replay is None else run | (replay.begun & replay.results.keys()))


class Planner:
    """Plans the calls of one run, and remembers what came of them."""

    def __init__(self) -> None:
        self._call_ids: set[str] = set()
        self._results: dict[tuple[str, str], list[str]] = {}  # of each call that was made, by name and arguments

    def name_uniquely(self, turn: int, calls: Sequence[ToolCall]) -> list[ToolCall]:
        """Replace an id that is empty or was used in this run: a provider refuses a history that holds it twice."""
        named = []
        for index, call in enumerate(calls):
            call_id, salt = call.id, 0
            while not call_id or call_id in self._call_ids:
                call_id, salt = derive_nine(call.id, turn, index, salt), salt + 1
            self._call_ids.add(call_id)
            named.append(replace(call, id=call_id))
        return named

    async def plan(
        self,
        agent: Agent,
        reply: ModelReply,
        *,
        is_last: bool,
        replay: Replayed | None,
        preprocess: Callable[[ToolCall], Awaitable[ToolCall]],
    ) -> Plan:
        """Decide for each call of a reply whether it is run; ``preprocess`` gives it as it is to be read."""
        planned: list[PlannedCall] = []
        plan = Plan()
        for index, call in enumerate(reply.tool_calls):
            decided = await _recall(agent, index, call, replay, preprocess)
            match decided or await self._decide(agent, reply, index, call, is_last, preprocess):
                case PlannedCall() as it:
                    planned.append(it)
                case ToolResult() as it:
                    plan.refused[index] = it
        plan.planned = tuple(planned)
        return plan

    def note(self, call: ToolCall, content: str) -> None:
        """Remember what came of a call that was run."""
        self._results.setdefault(_key(call), []).append(content)

    async def _decide(
        self,
        agent: Agent,
        reply: ModelReply,
        index: int,
        call: ToolCall,
        is_last: bool,
        preprocess: Callable[[ToolCall], Awaitable[ToolCall]],
    ) -> PlannedCall | ToolResult | None:
        limit, most = agent.policy.max_tool_calls_per_turn, agent.policy.max_same_calls
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
        written = call
        try:
            call = await preprocess(call)
            arguments = tool.parse(call.arguments)
        except ToolArgumentsError as error:
            note = " (The reply was cut off at its limit of length.)" if reply.is_cut else ""
            return refuse(f"Not run: {error}{note}")
        before = self._results.get(_key(written), [])[-most:]
        if len(before) == most and len(set(before)) == 1:
            return refuse(
                f"Not run: you made this very call {most} times, and its result was the same each time. "
                "Do something else, or call finish."
            )
        return PlannedCall(index, call, tool, arguments)


async def _recall(
    agent: Agent,
    index: int,
    call: ToolCall,
    replay: Replayed | None,
    preprocess: Callable[[ToolCall], Awaitable[ToolCall]],
) -> PlannedCall | ToolResult | None:
    """What the records say of a call: its result; that it was begun; None for nothing."""
    if replay is None:
        return None
    if index in replay.results:
        return replay.results[index]
    if index not in replay.begun:
        is_run = call.name != FINISH and agent.find_handoff(call.name) is None
        return refuse(_NOT_KEPT) if is_run and index in replay.altered.calls else None
    if index in replay.altered.calls:
        return ToolResult(UNKNOWN_OUTCOME, ok=False)
    tool = agent.find_tool(call.name)
    try:
        if tool is not None and tool.effect == "idempotent" and index not in replay.once:
            call = await preprocess(call)
            return PlannedCall(index, call, tool, tool.parse(call.arguments))
    except ToolArgumentsError:
        pass  # its parameters are others now
    return ToolResult(UNKNOWN_OUTCOME, ok=False)


def answer_calls(
    calls: Sequence[ToolCall], answers: Mapping[int, ToolResult], *, is_last: bool
) -> tuple[list[ToolMessage], ToolCall | None]:
    """Give the answer to each call of a turn, in their order, and the `finish` or handoff that holds, if one does."""
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
        elif is_finish and not all_ok and not is_last:
            content = "Not finished: another call of this turn failed. See its answer, then finish again."
        else:
            ending, content = call, "Finished." if is_finish else "The conversation is handed over."
        messages.append(ToolMessage(call.id, content))
    return messages, ending


_REFUSED = re.compile(rf"(tool: )?(Not run|Not sent|{'|'.join(sorted(REFUSAL_CODES))}): ")


def has_effect(result: ToolResult) -> bool:
    """Whether a call that was planned did anything: not if it was refused, here or by the hub."""
    if DISABLED in result.data or NOT_RUN in result.data:
        return False
    return result.ok or not _REFUSED.match(result.content)


def is_unknown(result: ToolResult) -> bool:
    """Whether a call was interrupted, and this says so: nothing is known that could be the same again."""
    return not result.ok and result.content == UNKNOWN_OUTCOME


def refuse(text: str) -> ToolResult:
    """Give the answer to a call that is not run; the text may quote what the model wrote, at any length."""
    return ToolResult(replace_surrogates(cut(text, MAX_REFUSAL_CHARS)), ok=False)


def _key(call: ToolCall) -> tuple[str, str]:
    """What makes two calls the same: the tool and the arguments, however they are spaced and ordered."""
    try:
        return call.name, json.dumps(json.loads(call.arguments or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return call.name, call.arguments


class Reaction:
    """The turns from one incoming message to `finish`.

    ``answers`` says that somebody waits for an answer: a person wrote the trigger, or it requires this agent's
    response; ``threads`` are the ids under which the answer would appear, ``keeper`` the agent that the thread stays
    with already, ``conversation`` what the prompt shows, ``earlier`` those from whom the agent has it. ``frame`` puts
    the system message around an agent's instruction, ``is_explained`` says that the prompt tells how to answer, ``shorten`` gives a shorter prompt for a model that finds this one
    too long.
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
        earlier: Sequence[Agent] = (),
        path: str = "",
        sent_at: int = 0,
        trigger: Trigger | None = None,
        conversation: Sequence[BaseMessage] = (),
        is_explained: bool = False,
    ) -> None:
        self.state = LoopState.NEW
        self.agent = agent
        self.turn, self._began = 0, 1  # the latter: in which the agent came to have the conversation
        self.max_turns = agent.policy.max_turns  # of all agents that take part
        self.usage = Usage()
        self.tool_calls = 0
        self.history: list[ChatMessage] = [SystemMessage(""), UserMessage(prompt)]
        self._answers = answers
        self._threads = frozenset(threads)
        self._frame = frame
        self._shorten = shorten
        self._path = path
        self.sent_at = sent_at
        self.trigger = trigger
        self._conversation = conversation
        self._is_explained = is_explained
        # Who handed over and gets control back, as they were, and who had the conversation before them.
        self._callers: list[tuple[Agent, list[ChatMessage], tuple[Agent, ...]]] = []
        self._earlier = tuple(earlier)  # who had the conversation before the agent: their guards hold
        self.keeper = keeper
        self._read_meanwhile: tuple[int, ...] = ()
        self.has_spoken = False
        self._instructed: Agent | None = None  # the agent whose instruction the system message holds
        self._is_last = False
        self._is_compacted = False
        self._is_withheld = False  # the provider withheld the last reply
        self._planner = Planner()
        self._calls: dict[str, int] = {}  # that were run, by the tool's name
        self._values: dict[str, object] = {}
        self._has_values = False  # of the hooks that give the initial state
        self._next_tool: str | None = None  # that the next turn must call
        self._corrections = 0
        self._idle_turns = (
            0  # in a row, the last one included; from what is recorded, so that a resumed run has the same
        )
        self._proposed: Review | None = None
        self._replay: Replayed | None = None  # what is known of the turn under way
        self._reply = ModelReply(text=None)  # of that turn, its call ids made unique
        self._plan = Plan()

    def advance(self, outcome: Outcome) -> Step:
        """As `proceed`, without an event loop: for an agent whose hooks are plain functions. Raises `RuntimeError` for
        one with a hook that waits for something."""
        work = self.proceed(outcome)
        try:
            work.send(None)
        except StopIteration as done:
            step: Step = done.value
            return step
        work.close()
        raise RuntimeError(f"A hook of {self.agent.id} waits for something: await proceed().")

    async def start(self) -> None:
        """Ask for the initial state that hooks share. Idempotent; the first step does it, too."""
        if not self._has_values:
            self._has_values = True
            self._values.update({**await self.agent.chain.start(), **self._values})

    async def proceed(self, outcome: Outcome) -> Step:
        """Take the outcome of the last step and give the next one; awaits the agent's hooks alone. Raises `IllegalStep`
        for one that is not awaited."""
        match outcome, self.state:
            case Begin(), LoopState.NEW:
                await self.start()
                return await self._ask()
            case NewMessages(), LoopState.ASKING:
                self._read_meanwhile += outcome.seqs
                self._answers |= outcome.answers
                append_user_text(self.history, outcome.text)
                return await self._ask(again=True)
            case ModelReply(), LoopState.ASKING:
                self._replay = None
                return await self._take_reply(outcome)
            case Replayed(), LoopState.ASKING:
                self._replay, self._is_last = outcome, outcome.is_last
                return await self._take_reply(outcome.reply)
            case ModelFailed(), LoopState.ASKING:
                return await self._take_failure(outcome)
            case ToolsDone(), LoopState.CALLING:
                return await self._take_results(outcome.results)
            case Reviewed(), LoopState.REVIEWING:
                return await self._take_review(outcome)
            case Cancel(), LoopState.NEW | LoopState.ASKING | LoopState.CALLING | LoopState.REVIEWING:
                if self.state is LoopState.CALLING:
                    self._answer_calls({call.index: ToolResult("Cancelled.", ok=False) for call in self._plan.planned})
                return self._finish("cancelled", outcome.reason, None)
            case _:
                raise IllegalStep(self.state, outcome)

    def describe(self) -> TurnState:
        """Give what the reaction knows now."""
        return TurnState(
            self.agent.id, self.turn, self.max_turns, self._path, self.usage, self._calls, self._values, self.history,
            self.sent_at, self.trigger, self.turn - self._began + 1,
            self._conversation,
        )  # fmt: skip

    def note(self, values: Mapping[str, object]) -> None:
        """Take what middleware kept into what hooks find in ``state.values``."""
        self._values.update(values)

    @property
    def can_correct(self) -> bool:
        """Whether the model can be asked for another answer when reviewers find one wrong."""
        return self.turn < self.max_turns and self._corrections < self.agent.policy.max_corrections

    # --- asking the model

    async def _ask(self, *, again: bool = False) -> Step:
        self.state = LoopState.ASKING
        if not again:
            self.turn += 1
            if self.agent.chain.brings_tools:
                self.agent = self.agent.refresh(self.describe())
        agent, chain = self.agent, self.agent.chain
        state = self.describe()
        self._is_last = self.turn >= self.max_turns or self._is_stuck or not await chain.should_continue(state)
        if self._is_last and not again:
            match await chain.on_no_tool_calls(state, "limit_reached"):
                case str(text):
                    append_user_text(self.history, text)
                case End() as end:
                    return await self._end_by(end)
        if agent is not self._instructed or callable(agent.instruction):
            self._instructed = agent
            self.history[0] = SystemMessage(self._frame(agent.instruct(state)))
        about = agent.policy.describe_turn(self.turn, self.turn if self._is_last else self.max_turns)
        specs = () if self._is_last else agent.specs
        trailing = f"{about}\n{self._say_how_to_answer(specs)}".rstrip()
        messages = repair(self.history, trailing)
        step = CallModel(self.turn, agent, tuple(messages), specs, state, self._is_last)
        if self._next_tool is not None and any(spec.name == self._next_tool for spec in specs):
            step = replace(step, tool_choice=NamedTool(self._next_tool))
        step = await chain.prepare(state, step)
        if step.tools is specs:
            return step
        other = f"{about}\n{self._say_how_to_answer(step.tools)}".rstrip()
        return replace(step, messages=replace_trailing_text(step.messages, trailing, other))

    def _say_how_to_answer(self, specs: Collection[ToolSpec]) -> str:
        """Say which text is the answer in this turn, and how it is given, with the tools that there are; nothing where
        the author's own template says it."""
        policy, is_inside = self.agent.policy, bool(self._path or self._callers)
        is_sent = self.sends_text() or bool(self._callers)
        if self._is_last or (not specs and policy.on_text != "nudge"):
            return CLOSING if is_sent else CLOSING_UNSENT
        if self._is_explained and policy.on_text == "auto" and not is_inside:
            return ""  # it may want a tool call in each turn: two rules in one prompt contradict each other
        finish = any(spec.name == FINISH for spec in specs)
        if not is_sent:
            said = NOBODY_WAITS
        elif policy.on_text == "nudge":
            said = ANSWER_BY_TOOL
        elif self.has_spoken and not is_inside:
            said = ANSWERED
        else:
            said = ANSWER.format(to="whoever gave you this task" if is_inside else "the incoming thread")
        return f"{said} {OR_FINISH}" if finish else said

    async def _take_failure(self, failed: ModelFailed) -> Step:
        if failed.failure == "context_too_long" and not self._is_compacted and not failed.is_recorded:
            self._is_compacted = True
            self.history = compact(self.history, self._shorten() if self._shorten is not None else None)
            return await self._ask(again=True)
        return self._fail(failed.reason, failed.failure, reported_by=failed.reported_by)

    async def _take_reply(self, reply: ModelReply) -> Step:
        chain, self._next_tool = self.agent.chain, None
        self.usage += await chain.calculate_usage(self.describe(), reply)
        if not reply.tool_calls:
            return await self._take_text(reply)
        self._is_withheld = False
        self._reply = replace(reply, tool_calls=tuple(self._planner.name_uniquely(self.turn, reply.tool_calls)))
        calls = tuple(map(sanitize_call, self._reply.tool_calls))
        self.history.append(AssistantMessage(reply.text, calls, reply.origin))
        self.state = LoopState.CALLING
        state = self.describe()
        end = await chain.process_tool_calls(state, self._reply)
        if end is not None:
            self._plan = Plan((), dict.fromkeys(range(len(reply.tool_calls)), refuse("Not run: the work has ended.")))
            self._answer_calls({})
            return await self._end_by(end)
        self._plan = await self._planner.plan(
            self.agent, self._reply, is_last=self._is_last, replay=self._replay,
            preprocess=lambda call: chain.preprocess_arguments(state, call),
        )  # fmt: skip
        answered = (AnsweredCall(i, self._reply.tool_calls[i], result) for i, result in self._plan.refused.items())
        return CallTools(self.turn, self._plan.planned, tuple(answered), reply.text, self._reply.tool_calls)

    async def _take_text(self, reply: ModelReply) -> Step:
        text = (reply.text or "").strip()
        is_cut, was_withheld = reply.is_cut, self._is_withheld
        self._is_withheld = reply.is_withheld
        goes_on = self._goes_on
        if self._is_withheld and (was_withheld or self._is_last) and not goes_on:
            return self._fail("the provider withheld the reply twice", "content_filter")
        if text and self._is_text_lost:
            self.history.append(AssistantMessage(text))
            append_user_text(self.history, NOT_KEPT)
            return await self._ask()
        if self._is_last and not goes_on:
            text = "" if self._is_text_altered else text
            self.history.append(AssistantMessage(text or NO_TEXT))  # a reviewer may want another one
            return self._close(f"{text}\n{CUT_HERE}" if is_cut and text else text)
        if self._is_withheld or not text:
            self._idle_turns += 1
            self.history.append(AssistantMessage(NO_TEXT))  # so that each turn stands in the history
            empty = REPLY_TOO_LARGE if reply.finish_reason == TOO_LARGE else CUT_EMPTY if is_cut else EMPTY_REPLY
            append_user_text(self.history, WITHHELD if self._is_withheld else empty)
            return await self._ask()
        self.history.append(AssistantMessage(text))
        match await self.agent.chain.on_no_tool_calls(self.describe(), "no_calls"):
            case str(told):
                append_user_text(self.history, told)
                return await self._ask()
            case End() as end:
                return await self._end_by(end)
        if is_cut or (goes_on and not self._callers) or self.agent.policy.on_text == "nudge":
            self._idle_turns += 1
            append_user_text(self.history, CUT if is_cut else NUDGE)
            return await self._ask()
        return await self._end("answered in plain text", text)

    # --- calls

    @property
    def _is_stuck(self) -> bool:
        """Whether the model has done nothing for so long that its next turn is the last."""
        return self._idle_turns >= self.agent.policy.max_idle_turns

    @property
    def _goes_on(self) -> bool:
        """Whether the records say that another turn followed this one, by itself."""
        return self._replay is not None and self._replay.goes_on and not self._replay.is_corrected

    @property
    def _is_text_altered(self) -> bool:
        """Whether the text of this turn is not as the model wrote it."""
        return self._replay is not None and self._replay.altered.text

    @property
    def _is_text_lost(self) -> bool:
        """Whether it is so, and another turn, which did not follow yet, can give it."""
        return self._is_text_altered and not self._goes_on and self.turn < self.max_turns

    async def _take_results(self, results: Mapping[int, ToolResult]) -> Step:
        self._plan.check(results)
        known = self._plan.refused | dict(results)
        run = self._plan.list_run(self._replay)
        is_idle = not any(is_unknown(it) or (index in run and has_effect(it)) for index, it in known.items())
        self._idle_turns = self._idle_turns + 1 if is_idle else 0
        results = await self._count(results)
        ending = self._answer_calls(results)
        answers = self._plan.refused | results
        text = (self._reply.text or "").strip()
        handoff = self.agent.find_handoff(ending.name) if ending is not None else None
        if ending is not None and handoff is not None:
            return await self._hand_over(handoff, ending)
        goes_on = self._goes_on
        given = next((it for _, it in sorted(answers.items()) if it.is_answer and ALTERED not in it.data), None)
        if given is not None and not goes_on:
            keeper = given.data.get(KEEPER)
            self.keeper = keeper if isinstance(keeper, str) else self.keeper
            return await self._end("a tool gave the answer", given.content, is_new=True)
        if ending is not None and self._is_text_lost and not self.has_spoken:
            append_user_text(self.history, NOT_KEPT)
            return await self._ask()
        if ending is not None and not (goes_on and not self._callers):
            # Text beside the `finish` that holds is what the model wants to say, unless it has said it here by a tool.
            return await self._end(replace_surrogates(read_argument(ending, "reason")), text or None)
        if any(DISABLED in it.data for it in answers.values()):
            match await self.agent.chain.on_no_tool_calls(self.describe(), "tools_disabled"):
                case str(told):
                    append_user_text(self.history, told)
                case End() as end:
                    return await self._end_by(end)
        return self._close(text) if self._is_last and not goes_on else await self._ask()

    async def _count(self, results: Mapping[int, ToolResult]) -> dict[int, ToolResult]:
        """Take note of the calls that were run: what they cost, where they spoke, what came of them. Give the results
        as the hooks leave them. A call whose outcome is unknown counts for nothing, when it is told so and in every
        later reading of that."""
        left = dict(results)
        before = len(self.history) - 1  # where this turn begins
        is_corrected = False
        for index in self._plan.list_run(self._replay):
            call, answer = self._reply.tool_calls[index], left.get(index) or self._plan.refused[index]
            is_corrected |= CORRECTED in answer.data
            if NOT_RUN in answer.data or is_unknown(answer):
                continue
            if DISABLED not in answer.data:
                self._calls[call.name] = self._calls.get(call.name, 0) + 1
                self.tool_calls += 1 + answer.tool_calls
            self.usage += answer.usage
            self.has_spoken |= not self._threads.isdisjoint(answer.threads)
            if ALTERED not in answer.data:
                self._planner.note(call, answer.content)
            left[index], wanted = await self.agent.chain.after_tool(self.describe(), call, answer)
            self._next_tool = wanted.next_tool or self._next_tool
            if wanted.messages is not None:
                # What a hook gives may hold the turn itself, which stands behind it: no call may be there twice.
                self.history[1:before] = drop_turn(wanted.messages, self._reply.tool_calls)
                before = len(self.history) - 1
        self._corrections += is_corrected
        return left

    def _answer_calls(self, results: Mapping[int, ToolResult]) -> ToolCall | None:
        """Append the answer to each call of the turn; give the `finish` or handoff that holds, if one does."""
        answers = self._plan.refused | dict(results)
        messages, ending = answer_calls(self._reply.tool_calls, answers, is_last=self._is_last)
        self.history += messages
        return ending

    # --- handing over, and the end

    async def _hand_over(self, handoff: Handoff, call: ToolCall) -> Step:
        caller, note = self.agent, read_argument(call, "note").strip()
        if handoff.returns == "to_caller":
            self._callers.append((caller, list(self.history), self._earlier))
        else:
            self._callers.clear()
        if handoff.returns == "never":
            self.keeper = handoff.agent.id
        self._earlier = (caller, *self._earlier)
        self.agent, self.history = handoff.agent, handoff.take_over(caller.id, self.history, note)
        self._values = {**await handoff.agent.chain.start(), **self._values}
        self._began = self.turn + 1
        self._idle_turns = 0
        return await self._ask()

    async def _return(self, reason: str, text: str | None) -> Step:
        """Give control back to the agent that handed over."""
        returning, (self.agent, self.history, self._earlier) = self.agent, self._callers.pop()
        self._began = 0  # its first turn was before it handed over
        self._idle_turns = 0
        said = f"It said: {text}" if text else f"It finished: {reason}"
        append_user_text(self.history, f"{returning.id} has handed the conversation back to you. {said}")
        return await self._ask()

    async def _end(self, reason: str, text: str | None, *, is_new: bool = False) -> Step:
        """The agent has finished, with a text. ``is_new``: no tool can have said it in the thread already."""
        if self._callers:
            return await self._return(reason, text)
        is_said = self.has_spoken and self.state is LoopState.CALLING and not is_new
        return self._propose("finished", reason, text if self.sends_text() and not is_said else None)

    async def _end_by(self, end: End) -> Step:
        """A hook ends the work."""
        return await self._end(end.reason, end.answer, is_new=True)

    def _close(self, text: str) -> Step:
        """End at a limit, with whatever the model said last."""
        if self.turn >= self.max_turns:
            reason = f"reached the limit of {self.max_turns} turns"
        elif self._is_stuck:
            reason = f"stopped after {self.agent.policy.max_idle_turns} turns in a row without effect (max_idle_turns)"
        else:
            reason = "reached a limit of its policy"
        answer = text or f"I {reason.partition(' (')[0].replace('its', 'my')} without an answer."
        marked: dict[str, JsonValue] = {} if text else {FAILURE: "limit"}
        return self._propose("stopped", reason, answer if self.sends_text() else None, marked)

    def _fail(self, reason: str, kind: ModelFailure, *, reported_by: str = "") -> Finish:
        answer = f"I could not answer: {FAILURE_SENTENCES[kind]}."
        if reported_by:
            answer = REPORTED.format(agent_id=reported_by)
        status: Status = "stopped" if kind == "budget" else "failed"
        return replace(self._finish(status, reason, answer if self.sends_text() else None), failure=kind)

    def _propose(
        self, status: Status, reason: str, answer: str | None, metadata: Mapping[str, JsonValue] = MappingProxyType({})
    ) -> Step:
        """End with an answer, once the reviewers have seen it."""
        end = self._finish(status, reason, answer)
        end = replace(end, metadata=metadata) if metadata and answer is not None else end
        if answer is None or not self.is_reviewed:
            return end
        can_correct, proposed = self.can_correct, end
        self.state = LoopState.REVIEWING
        self._proposed = Review(self.turn, proposed, answer, self.describe(), can_correct)
        return self._proposed

    async def _take_review(self, reviewed: Reviewed) -> Step:
        assert self._proposed is not None
        proposed, self._proposed = self._proposed, None
        self.usage += reviewed.usage
        if reviewed.correction is None or not proposed.can_correct:
            self.state = LoopState.FINISHED
            metadata = {**proposed.proposed.metadata, **reviewed.metadata}
            done = replace(proposed.proposed, usage=self.usage, metadata=metadata)
            if not reviewed.is_blocked:
                return replace(done, answer=reviewed.answer)
            failed = reviewed.metadata.get(FAILED_CHECKS)
            by = f" by {', '.join(map(str, failed))}" if isinstance(failed, list) and failed else ""
            reason = f"the answer was blocked{by}"
            marked = {**metadata, FAILURE: "blocked"}
            return replace(done, status="stopped", reason=reason, answer=BLOCKED, metadata=marked)
        self._corrections += 1
        append_user_text(self.history, f"Your answer was not given. {reviewed.correction}")
        return await self._ask()

    def sends_text(self) -> bool:
        """Whether what its model says without a tool goes to the incoming thread."""
        on_text = self.agent.policy.on_text
        return on_text == "reply" or (on_text != "record" and self._answers)

    @property
    def guards(self) -> list[Guard]:
        """Give the reviews of those that had the conversation before, who left it last first: they hold as well."""
        return [guard for it in self._earlier for guard in it.chain.guards]

    @property
    def is_reviewed(self) -> bool:
        """Whether anybody looks at an answer before it goes out, or adds to it."""
        return self.agent.chain.reviews or bool(self.guards)

    @property
    def policies(self) -> list[AgentPolicy]:
        """Give the policy of the agent at work, and of those that had the conversation before, the last one first."""
        return [self.agent.policy, *(it.policy for it in reversed(self._earlier))]

    @property
    def read_meanwhile(self) -> tuple[int, ...]:
        """Give the messages that arrived and were read while it ran."""
        return self._read_meanwhile

    @property
    def withholds(self) -> bool:
        """Whether what its model writes is reviewed before anybody reads it: by the agent itself, or for one that had
        the conversation before."""
        return any(it.chain.withholds for it in (self.agent, *self._earlier))

    def _finish(self, status: Status, reason: str, answer: str | None) -> Finish:
        self.state = LoopState.FINISHED
        return Finish(status, reason, answer, self.turn, self.usage, self.tool_calls, self.keeper, self._read_meanwhile)


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A call that is not run, with what the model is told."""

    index: int
    call: ToolCall
    result: ToolResult


@dataclass(frozen=True, slots=True)
class CallTools:
    """Run the planned calls, in parallel, and give `ToolsDone`; both may be empty (the model only finished).

    ``text`` and ``calls`` are what the model replied, the calls under the ids of the history.
    """

    turn: int
    planned: tuple[PlannedCall, ...]
    answered: tuple[AnsweredCall, ...]
    text: str | None = None
    calls: tuple[ToolCall, ...] = ()


Step = CallModel | CallTools | Review | Finish


class LoopState(Enum):
    """What a reaction waits for."""

    NEW = "new"
    ASKING = "waiting for its model"
    CALLING = "waiting for its tools"
    REVIEWING = "waiting for its reviewers"
    FINISHED = "finished"


class IllegalStep(RoundelayError):
    """A reaction was given an outcome that it does not wait for: a fault of its driver."""

    def __init__(self, state: LoopState, outcome: Outcome) -> None:
        super().__init__(f"A reaction that is {state.value} cannot take {type(outcome).__name__}.")
        self.state = state
        self.outcome = outcome
