"""Hooks around the loop: `Middleware` has one method for each, `Chain` asks those of an agent, the outermost first.

The pure hooks are asked by `reaction`, and again when a reaction is resumed, so they depend on their arguments and
`state.values` alone. One that is a coroutine is awaited, within the policy's ``hook_timeout_s``. The hooks around a reaction, a turn, a model call and a tool call, and the review of an answer,
are asked by `driver` and `calls`; what they give is recorded, so they are asked only for what is not recorded yet. A
policy's functions are hooks as well: `middleware_of` makes middleware of plain functions. A hook that nobody overrides
costs nothing.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pydantic import BaseModel, JsonValue, ValidationError

from roundelay.network.frames import encode

from .events import Progress
from .history import add_to_prompt, append_user_text, repair
from .isolation import check_hook, run_hook
from .models.model import (
    ChatMessage,
    Model,
    ModelError,
    ModelReply,
    ModelRequest,
    NamedTool,
    SystemMessage,
    ToolCall,
    ToolChoice,
    ToolSpec,
    Usage,
    UserMessage,
)
from .policy import AgentPolicy, Given
from .text import replace_surrogates, strip_code_fence
from .tools import PlannedCall, Tool, ToolContext, tidy_schema
from .values import AfterTool, End, Finish, NoCallsReason, PromptPart, Reviewed, ToolResult, TurnState

if TYPE_CHECKING:
    from roundelay.network.messages import BaseMessage, MessageThread

    from .events import OnEvent

_logger = logging.getLogger(__name__)
T = TypeVar("T")
ResultT = TypeVar("ResultT")
FormT = TypeVar("FormT", bound=BaseModel)

Instruction = str | Callable[[TurnState], str]
"""What an agent is told: a text, or a callable that gives it for each turn (`template_instruction` makes one of a jinja
template)."""

FAILED_CHECKS = "failed_checks"
"""In the metadata of an answer that goes out although reviewers found something wrong: their names."""

PASSED_CHECKS = "passed_checks"
"""In the metadata of an answer: the names of the checks that were made and found nothing wrong."""

ASK_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class Correction:
    """What a reviewer gives for an answer that must not go out: what the model is told. ``name`` says which check it
    was; ``notes`` are what else the record of the review keeps. ``blocks``: the answer does not go out either when the
    model has no further try; otherwise it does then, with the name in its metadata. ``passed``: the checks that found
    nothing wrong."""

    instruction: str
    name: str = ""
    notes: Sequence[str] = ()
    blocks: bool = False
    passed: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as it goes out, when it is more than a text: ``metadata`` of its message, and ``notes`` that the record
    of the review keeps."""

    text: str
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class AgentView:
    """What hooks may see of an agent: all of `agent.Agent` but to whom it hands over, and what may change the loop."""

    id: str
    instruction: Instruction
    model: Model
    tools: Sequence[Tool | Callable[..., object]] = ()
    policy: AgentPolicy = field(default_factory=AgentPolicy)
    description: str = ""
    specs: tuple[ToolSpec, ...] = field(init=False, repr=False, compare=False)
    """What the model may call, handoffs included."""

    _tools: dict[str, Tool] = field(init=False, repr=False, compare=False)
    chain: Chain = field(init=False, repr=False, compare=False)
    """The hooks of its policy and middleware."""

    def instruct(self, state: TurnState) -> str:
        """Give the instruction for a turn."""
        return self.instruction if isinstance(self.instruction, str) else self.instruction(state)

    def find_tool(self, name: str) -> Tool | None:
        return self._tools.get(name)

    @property
    def all_tools(self) -> tuple[Tool, ...]:
        """Its own tools and those that its middleware brought when it was last refreshed."""
        return tuple(self._tools.values())


@dataclass(frozen=True, slots=True)
class CallModel:
    """Ask a model for ``agent``: its own, or ``model``. The last message holds the facts of the turn and is not kept.

    ``is_last``: no turn follows. ``tool_choice`` may name the tool that has to be called. ``parts`` are still to be
    placed: middleware that puts one into the messages takes it out.
    """

    turn: int
    agent: AgentView
    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...]
    state: TurnState
    is_last: bool = False
    model: Model | None = None
    tool_choice: ToolChoice | NamedTool = "auto"
    parts: tuple[PromptPart, ...] = ()

    def tell(self, text: str) -> CallModel:
        """Give it with a text at its very end, which is not kept."""
        messages = list(self.messages)
        append_user_text(messages, text)
        return replace(self, messages=tuple(messages))

    def instruct(self, text: str) -> CallModel:
        """Give it with a text at the end of the system message."""
        match self.messages:
            case (SystemMessage(content), *others):
                return replace(self, messages=(SystemMessage(f"{content}\n\n{text}"), *others))
            case _:  # a hook left that out
                return self

    def add_to_prompt(self, text: str) -> CallModel:
        """Give it with a text behind the conversation, where it stands in every turn."""
        return replace(self, messages=add_to_prompt(self.messages, self.state.history, text))

    def place_parts(self) -> CallModel:
        """Give it with the parts where they stand unless a template has another place for them."""
        step = replace(self, parts=())
        said = [it for part in self.parts for it in (part.fenced, part.user) if it]
        return step.add_to_prompt("\n\n".join(said)) if said else step


class Keep(Protocol):
    """Puts a value into ``state.values`` and into the ledger, under a name of this turn's: it is there again from this
    turn on when the reaction is resumed, so that what it took to make it is not done twice. ``of`` are the tools whose
    results it holds, for a policy that does not keep those."""

    async def __call__(self, name: str, value: JsonValue, *, of: Collection[str] = ()) -> None: ...


@dataclass(frozen=True, slots=True)
class Around:
    """What middleware may know of the run that it is around.

    ``complete`` asks a model, with the agent's retries; what that costs counts in the reaction. ``context`` is that of
    a call of this run: its client sends and reads under ids derived for it.
    """

    reaction: str
    path: str
    agent: AgentView
    model: Model
    """The one that is asked, around a model call; the agent's own elsewhere."""

    state: TurnState
    context: ToolContext
    emit: OnEvent
    complete: Callable[[Model, ModelRequest], Awaitable[ModelReply]]
    keep: Keep
    replayed: Callable[[str], JsonValue]
    """Gives what was kept in this turn under a name, in the run that is replayed now; None where there is none, and in
    every other run."""
    max_kept_chars: int
    """Of text in one kept value, whatever its characters are."""

    @contextmanager
    def report(self, text: str) -> Iterator[None]:
        """Tell people what the work is at, as long as the block runs. Not for the model."""
        self.emit(Progress(self.reaction, self.state.turn, replace_surrogates(text), path=self.path))
        try:
            yield
        finally:
            self.emit(Progress(self.reaction, self.state.turn, "", is_done=True, path=self.path))

    async def ask_for(
        self,
        kind: type[FormT],
        instruction: str,
        facts: Mapping[str, object],
        *,
        tool: str,
        model: Model | None = None,
    ) -> FormT:
        """Ask ``model``, or the agent's own, to call ``tool`` with what ``kind`` describes; a second time if it gives
        something else.

        ``facts`` go to it as JSON, so that no text in them passes for another. Raises `ModelError`.
        """
        schema = tidy_schema(kind.model_json_schema())
        request = ModelRequest(
            (SystemMessage(instruction), UserMessage(json.dumps(facts, ensure_ascii=False, indent=1))),
            (ToolSpec(tool, (kind.__doc__ or "").strip(), schema),),
            NamedTool(tool),
            agent_id=self.agent.id,
            reaction=self.reaction,
            turn=self.state.turn,
        )
        asked = model or self.agent.model
        for _ in range(ASK_ATTEMPTS):
            reply = await self.complete(asked, request)
            calls = sorted(reply.tool_calls, key=lambda call: call.name != tool)  # it may have made another one up
            try:
                return kind.model_validate_json(calls[0].arguments if calls else strip_code_fence(reply.text or ""))
            except ValidationError:
                continue
        raise ModelError(f"The model {asked.name} did not call {tool} as it was asked to.", reason="broken_reply")


Guard = Callable[["Around", str], Awaitable["str | Answer | Correction"]]
"""A `Middleware.review`."""


class Middleware:
    """One concern around the loop. Override what it needs: a hook that is left alone costs nothing. The first in the
    list is outermost."""

    withholds = True
    """Of one with a `review`: what the model writes is shown to nobody before that has seen it. False where it only
    edits."""

    min_turns = 1
    """How many turns an agent must be allowed for it to work: one with fewer is refused, and no message lowers them
    further."""

    needs: tuple[type[Middleware], ...] = ()
    """What has to stand beside it: an agent without is refused."""

    reduces_results = False
    """Of one that sees to results that are to be read once (``save: False``): without any such a result is an error."""

    guards = True
    """Of one with a `review`: that also looks at what an agent says that this one has handed over to. False where it
    only gives its own agent's answers their form."""

    # --- pure: asked again when a reaction is resumed. Those that are coroutines are awaited; `list_tools`, `list_parts`
    # and `store` have to be plain functions.

    def initial_state(self) -> Mapping[str, object]:
        """Give what to put into ``state.values`` at the beginning."""
        return {}

    def list_tools(self, state: TurnState) -> Sequence[Tool]:
        """Give the tools that it brings, beside the agent's own. Asked once before each turn, without IO: a change
        holds from the next turn on. The same objects while nothing changes. Of two with one name the agent's own, or
        the one of earlier middleware, holds."""
        return ()

    def list_parts(self, state: TurnState) -> Sequence[PromptPart]:
        """Give what the sources of the tools that it brings have to say in the prompt, as it is known now, without IO.
        Templates place it (`features.prompts`); what none places is added to the system message and behind the
        conversation."""
        return ()

    def select_messages(
        self, threads: Mapping[str, MessageThread], trigger: BaseMessage
    ) -> tuple[Mapping[str, MessageThread], BaseMessage]:
        """Choose what of the conversation enters the prompt: leave out, or shorten visibly, or write otherwise what
        only the agent's middleware has written; the trigger stays."""
        return threads, trigger

    def should_continue(self, state: TurnState) -> bool:
        """Tell whether turns with tools may follow; else this one is the last, and has none."""
        return True

    def prepare(self, state: TurnState, step: CallModel) -> CallModel:
        """Change what is asked: messages, tools, the model, the choice of tool. The history stays as it is."""
        return step

    def calculate_usage(self, state: TurnState, reply: ModelReply) -> Usage:
        """Give what a reply counts."""
        return reply.usage

    def process_tool_calls(self, state: TurnState, calls: Sequence[ToolCall]) -> End | bool | None:
        """Look at the calls of a reply before any is run; `End` runs none of them, and neither does True: the text
        beside them is the answer."""
        return None

    def preprocess_arguments(self, state: TurnState, call: ToolCall) -> str | Mapping[str, object] | BaseModel | None:
        """Give the arguments to use, as an object or as the text of one; None to leave them. Raises
        `ToolArgumentsError` with what the model is told in place of a result."""
        return None

    def after_tool(self, state: TurnState, call: ToolCall, result: ToolResult) -> AfterTool | None:
        """Change what a result does; in the order of the calls, when all of the turn are done. Not asked for calls that
        were not run."""
        return None

    def read_answers(
        self, answers: Sequence[tuple[str, Mapping[str, JsonValue]]]
    ) -> tuple[Sequence[str], Mapping[str, JsonValue]]:
        """Read what other agents answered a call, each a text and the metadata of its message: give the texts for the
        model, in that order, and what goes into the data of the call's result."""
        return [text for text, _ in answers], {}

    def on_no_tool_calls(self, state: TurnState, reason: NoCallsReason) -> str | End | None:
        """Give what to tell the model, which is asked once more; `End`; or None for what happens anyway."""
        return None

    # --- around what is done; only for what is not recorded yet

    async def around_reaction(self, around: Around, proceed: Callable[[], Awaitable[Finish]]) -> Finish:
        """Run the reaction, or what is left of one that is resumed; gives how it ended."""
        return await proceed()

    async def around_turn(self, around: Around, proceed: Callable[[], Awaitable[None]]) -> None:
        """Run one turn: the model call, and the tool calls that it asked for."""
        return await proceed()

    async def around_model(
        self, around: Around, request: ModelRequest, proceed: Callable[[ModelRequest], Awaitable[ModelReply]]
    ) -> ModelReply:
        """Ask, or not; the reply is what is recorded. Raises `ModelError`."""
        return await proceed(request)

    async def around_tool(
        self, around: Around, call: PlannedCall, proceed: Callable[[PlannedCall], Awaitable[ToolResult]]
    ) -> ToolResult:
        """Run a tool, or not; the result is what is recorded."""
        return await proceed(call)

    async def review(self, around: Around, answer: str) -> str | Answer | Correction:
        """Give the answer as it goes out, or what is wrong with it. A message that a tool sends to who asked is an
        answer, too."""
        return answer

    async def finish_answer(self, around: Around, answer: str, is_accepted: bool) -> str | Answer:
        """Add to an answer that goes out now. ``is_accepted``: no reviewer found anything wrong with it; else it goes
        out for want of a better one."""
        return answer

    def store(self, kind: str, body: Mapping[str, object]) -> Mapping[str, object]:
        """Give a record as it is kept. What is left out of it, a resumed reaction does not know."""
        return body

    # --- beside the reactions

    def describe(self) -> object:
        """Give what it is set to: a reaction that is resumed while that is something else says so. By default all that
        it holds when its runner is made, of which data counts and code by its name."""
        return vars(self)

    async def close(self) -> None:
        """Let go of what it holds; at the end of each `run` of the runner. It may be needed again."""


def middleware_of(**hooks: Callable[..., object]) -> Middleware:
    """Make middleware of plain functions, each by the name of the hook that it is, without ``self``."""
    for name in hooks:
        if name.startswith("_") or not callable(getattr(Middleware, name, None)):
            raise TypeError(f"Middleware has no hook named {name}.")
    methods: dict[str, object] = {name: staticmethod(it) for name, it in hooks.items()}
    kind = type("Functions", (Middleware,), {"describe": lambda self: hooks, **methods})
    made: Middleware = kind()
    return made


_HOOKS = [name for name, it in vars(Middleware).items() if callable(it) and name not in ("describe", "close")]
_HOOKS_OF_POLICIES = (
    "initial_state",
    "calculate_usage",
    "process_tool_calls",
    "preprocess_arguments",
    "after_tool",
    "on_no_tool_calls",
)


def _list_layers(policy: AgentPolicy, middleware: Sequence[Middleware]) -> list[Middleware]:
    """Give a policy's functions as middleware around that of the agent; who is told of calls is told last."""
    outer = {name: given for name in _HOOKS_OF_POLICIES if (given := getattr(policy, name)) is not None}
    if policy.max_tool_calls is not None or policy.should_continue is not None:
        outer["should_continue"] = partial(_may_go_on, policy)
    layers = [middleware_of(**outer)] if outer else []
    choices = (
        (policy.should_send_tools, _send_tools),
        (policy.choose_model, _take_model),
        (policy.choose_tool, _take_tool),
    )
    layers += [middleware_of(prepare=partial(_choose, hook, take)) for hook, take in choices if hook is not None]
    layers += middleware
    if policy.on_tools_selected is not None:
        layers.append(middleware_of(process_tool_calls=partial(_tell_calls, policy.on_tools_selected)))
    return layers


def _tell_calls(
    listener: Callable[[TurnState, Sequence[ToolCall]], object], state: TurnState, calls: Sequence[ToolCall]
) -> Given[None]:
    """Tell somebody of the calls of a reply, who ends nothing by what it gives."""
    return _then(listener(state, calls), lambda _: None)


def _may_go_on(policy: AgentPolicy, state: TurnState) -> Given[bool]:
    if policy.max_tool_calls is not None:
        counted = sum(times for name, times in state.calls.items() if name not in policy.uncounted_tools)
        if counted >= policy.max_tool_calls:
            return False
    return policy.should_continue is None or policy.should_continue(state)


def _choose(
    hook: Callable[[TurnState], Given[Any]],
    take: Callable[[CallModel, Any], CallModel],
    state: TurnState,
    step: CallModel,
) -> Given[CallModel]:
    return _then(hook(state), partial(take, step))


def _send_tools(step: CallModel, is_sent: bool) -> CallModel:
    return step if is_sent else replace(step, tools=())


def _take_model(step: CallModel, chosen: Model | str | None) -> CallModel:
    return step if chosen is None else replace(step, model=find_model(step.agent.model, chosen))


def _take_tool(step: CallModel, name: str | None) -> CallModel:
    return step if name is None else replace(step, tool_choice=NamedTool(name))


def _then(given: Given[T], take: Callable[[T], ResultT]) -> Given[ResultT]:
    """Go on with what a hook gave, at once where that is not to be awaited."""
    return _await_then(given, take) if inspect.isawaitable(given) else take(given)


async def _await_then(given: Awaitable[T], take: Callable[[T], ResultT]) -> ResultT:
    return take(await given)


async def _give(given: Awaitable[T]) -> T:
    return await given


def _name(hook: Callable[..., object]) -> str:
    inner = hook
    while isinstance(inner, partial):
        inner = inner.func
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))


def _check_kind(hook: Callable[..., object], given: T, kinds: tuple[type, ...], wanted: str) -> T:
    """Return what a hook gave. Raise `TypeError` for anything of another kind: it would be passed over."""
    if not isinstance(given, kinds):
        raise TypeError(f"The hook {_name(hook)} gave a {type(given).__name__} and must give {wanted}.")
    return given


def _write_arguments(hook: Callable[..., object], given: object) -> str:
    """Return the arguments that a hook gave, as the text of a JSON object. Raise `TypeError` for none."""
    if isinstance(given, str):
        return given
    if isinstance(given, BaseModel):
        return given.model_dump_json()
    _check_kind(hook, given, (Mapping,), "the arguments (an object, or the text of one) or None")
    return encode(given).decode()


def find_model(own: Model, chosen: Model | str) -> Model:
    """Return the model that a hook chose: itself, or by its name one of those of a `FallbackModel`, or another one on
    the server of the agent's own. Raise `ModelError` for a name under which nothing can be asked."""
    if not isinstance(chosen, str):
        if not callable(getattr(chosen, "complete", None)):
            told = f"A {type(chosen).__name__} was chosen as the model, and must be a Model, its name or None."
            raise ModelError(told, reason="misconfigured")
        return chosen
    known: list[Any] = [own, *getattr(own, "models", ())]
    for model in known:
        if model.name == chosen:
            named: Model = model
            return named
    for model in known:
        if callable(rename := getattr(model, "named", None)):
            renamed: Model = rename(chosen)
            return renamed
    names = ", ".join(repr(it.name) for it in known)
    raise ModelError(
        f"The model {chosen!r} was chosen by its name, and only {names} can be asked: give the Model itself.",
        reason="misconfigured",
    )


class Chain:
    """The hooks of an agent: its policy's functions first, then those that its middleware overrides, in order."""

    def __init__(self, policy: AgentPolicy, middleware: Sequence[Middleware]) -> None:
        self.middleware = tuple(middleware)
        layers = _list_layers(policy, middleware)

        def collect(name: str) -> tuple[Any, ...]:
            plain = getattr(Middleware, name)
            hooks = tuple(getattr(it, name) for it in layers if getattr(type(it), name) is not plain)
            for hook in hooks:
                check_hook(name, hook)
            return hooks

        self._time_s = policy.hook_timeout_s
        self._hooks = {name: collect(name) for name in _HOOKS}
        self.brings_tools = bool(self._hooks["list_tools"])
        self.reduces_results = any(it.reduces_results for it in layers)
        self.stores = bool(self._hooks["store"])
        self.reviews = bool(self._hooks["review"] or self._hooks["finish_answer"])
        reviewers = [it for it in layers if type(it).review is not Middleware.review]
        self.withholds = any(it.withholds for it in reviewers)
        """Whether nobody may read an answer before it was reviewed."""

        self.guards: tuple[Guard, ...] = tuple(it.review for it in reviewers if it.guards)
        """The reviews that also hold for agents that take over."""

    # --- pure

    async def _ask(self, hook: Callable[..., object], *given: object) -> Any:
        """Ask a hook, and await what it gives where that is to be awaited: a guard may be a coroutine."""
        made = hook(*given)
        return await run_hook(self._time_s, partial(_give, made), named=hook) if inspect.isawaitable(made) else made

    def list_tools(self, state: TurnState) -> list[Tool]:
        return [it for hook in self._hooks["list_tools"] for it in hook(state)]

    async def select_messages(
        self, threads: Mapping[str, MessageThread], trigger: BaseMessage
    ) -> tuple[Mapping[str, MessageThread], BaseMessage]:
        for hook in self._hooks["select_messages"]:
            threads, trigger = await self._ask(hook, threads, trigger)
        return threads, trigger

    async def start(self) -> dict[str, object]:
        values: dict[str, object] = {}
        for hook in self._hooks["initial_state"]:
            values.update(await self._ask(hook))
        return values

    async def should_continue(self, state: TurnState) -> bool:
        for hook in self._hooks["should_continue"]:
            if not await self._ask(hook, state):
                return False
        return True

    async def prepare(self, state: TurnState, step: CallModel) -> CallModel:
        made = step
        if self._hooks["list_parts"]:
            made = replace(step, parts=tuple(it for hook in self._hooks["list_parts"] for it in hook(state)))
        for hook in self._hooks["prepare"]:
            made = await self._ask(hook, state, made)
        if made.parts:
            made = made.place_parts()
        if made.messages is not step.messages:
            made = replace(made, messages=tuple(repair(made.messages)))
        choice = made.tool_choice
        if choice != "auto" and not made.tools:
            made = replace(made, tool_choice="auto")
        elif isinstance(choice, NamedTool) and all(spec.name != choice.name for spec in made.tools):
            _logger.warning(
                "a tool is chosen that is not there", extra={"agent_id": state.agent_id, "tool": choice.name}
            )
            made = replace(made, tool_choice="auto")  # a provider refuses the other
        return made

    async def calculate_usage(self, state: TurnState, reply: ModelReply) -> Usage:
        for hook in self._hooks["calculate_usage"]:
            usage = await self._ask(hook, state, reply)
            reply = replace(reply, usage=_check_kind(hook, usage, (Usage,), "a Usage"))
        return reply.usage

    async def process_tool_calls(self, state: TurnState, reply: ModelReply) -> End | None:
        for hook in self._hooks["process_tool_calls"]:
            given = await self._ask(hook, state, reply.tool_calls)
            # Not by its truth: a guard that gives something else by mistake must not let the calls through.
            _check_kind(hook, given, (End, bool, type(None)), "an End, True, False or None")
            if given is True:
                return End(reply.text)  # what stands beside the calls
            if isinstance(given, End):
                return given
        return None

    async def preprocess_arguments(self, state: TurnState, call: ToolCall) -> ToolCall:
        for hook in self._hooks["preprocess_arguments"]:
            given = await self._ask(hook, state, call)
            if given is not None:
                call = replace(call, arguments=_write_arguments(hook, given))
        return call

    async def after_tool(self, state: TurnState, call: ToolCall, result: ToolResult) -> tuple[ToolResult, AfterTool]:
        """Give the result as the model reads it, and what else the hooks want, the last word holding."""
        wanted = AfterTool()
        for hook in self._hooks["after_tool"]:
            given = await self._ask(hook, state, call, result)
            if given is None:
                continue
            _check_kind(hook, given, (AfterTool,), "an AfterTool or None")
            if given.content is not None:
                result = replace(result, content=given.content)
            messages = given.messages if given.messages is not None else wanted.messages
            wanted = AfterTool(None, messages, given.next_tool or wanted.next_tool)
        return result, wanted

    async def on_no_tool_calls(self, state: TurnState, reason: NoCallsReason) -> str | End | None:
        for hook in self._hooks["on_no_tool_calls"]:
            given: str | End | None = await self._ask(hook, state, reason)
            if given is not None:
                return _check_kind(hook, given, (str, End), "a text, an End or None")
        return None

    async def read_answers(
        self, answers: Sequence[tuple[str, Mapping[str, JsonValue]]]
    ) -> tuple[list[str], dict[str, JsonValue]]:
        texts: list[str] = [text for text, _ in answers]
        data: dict[str, JsonValue] = {}
        for hook in self._hooks["read_answers"]:
            told = [(text, metadata) for text, (_, metadata) in zip(texts, answers, strict=True)]
            read, added = await self._ask(hook, told)
            texts, data = list(read), {**data, **added}
        return texts, data

    def store(self, kind: str, body: Mapping[str, object]) -> Mapping[str, object]:
        for hook in self._hooks["store"]:
            body = hook(kind, body)
        return body

    # --- around what is done

    def around_reaction(
        self, around: Callable[[], Around], proceed: Callable[[], Awaitable[Finish]]
    ) -> Awaitable[Finish]:
        return self._pass("around_reaction", around, proceed)

    def around_turn(self, around: Callable[[], Around], proceed: Callable[[], Awaitable[None]]) -> Awaitable[None]:
        return self._pass("around_turn", around, proceed)

    def around_model(
        self,
        around: Callable[[], Around],
        request: ModelRequest,
        proceed: Callable[[ModelRequest], Awaitable[ModelReply]],
    ) -> Awaitable[ModelReply]:
        return self._pass("around_model", around, proceed, request)

    def around_tool(
        self, around: Callable[[], Around], call: PlannedCall, proceed: Callable[[PlannedCall], Awaitable[ToolResult]]
    ) -> Awaitable[ToolResult]:
        return self._pass("around_tool", around, proceed, call)

    def _pass(
        self, name: str, around: Callable[[], Around], proceed: Callable[..., Awaitable[T]], *given: object
    ) -> Awaitable[T]:
        """Give ``proceed(*given)`` inside of the hooks, the first outermost, to be awaited; ``around`` is asked only if
        there are any."""
        if hooks := self._hooks[name]:
            it = around()
            for hook in reversed(hooks):
                proceed = partial(run_hook, self._time_s, hook, it, proceed=proceed)
        return proceed(*given)

    async def review(self, around: Around, answer: str, *, can_correct: bool, guards: Sequence[Guard] = ()) -> Reviewed:
        """Give the answer as the reviewers leave it, or what they find wrong; each looks at what the one before it
        left, those of the agents before (``guards``) last. An answer that goes out is then finished."""
        found: list[Correction] = []
        metadata: dict[str, JsonValue] = {}
        notes: list[str] = []
        passed: list[str] = []

        def take(given: str | Answer) -> str:
            if isinstance(given, str):
                return given
            if not isinstance(given, Answer):  # of a hook that forgot to return, say
                raise TypeError(
                    f"a reviewer gave a {type(given).__name__} and must give the answer, as text or as Answer(...)"
                )
            metadata.update({name: it for name, it in given.metadata.items() if name != PASSED_CHECKS})
            if isinstance(names := given.metadata.get(PASSED_CHECKS), list):
                passed.extend(map(str, names))
            notes.extend(given.notes)
            return given.text

        own = self._hooks["review"]
        for hook in dict.fromkeys((*own, *guards)):
            given: str | Answer | Correction = await run_hook(self._time_s, hook, around, answer)
            if isinstance(given, Correction):
                found.append(given)
                passed += given.passed
                notes += [f"{given.name}: {given.instruction}" if given.name else given.instruction, *given.notes]
            else:
                answer = take(given)
        if found and can_correct:
            return Reviewed(answer, "\n".join(it.instruction for it in found), notes=tuple(notes))
        if failed := [it.name for it in found if it.name]:
            metadata[FAILED_CHECKS] = list(failed)
        if any(it.blocks for it in found):
            return Reviewed(answer, notes=tuple(notes), metadata={FAILED_CHECKS: [*failed]}, is_blocked=True)
        if passed:
            metadata[PASSED_CHECKS] = list(passed)
        for hook in self._hooks["finish_answer"]:
            answer = take(await run_hook(self._time_s, hook, around, answer, not found))
        return Reviewed(answer, notes=tuple(notes), is_accepted=not found, metadata=metadata)
