"""Hooks around the loop: `Middleware` has one method for each, `Around` is what they may know and do.

`hook_chain` asks the hooks of an agent, the outermost first. The pure hooks are asked again when a reaction resumes, so
they may depend only on their arguments and on `state.values`. The hooks around a reaction, a turn, a model call and a
tool call, and the reviews, may do anything: their results are recorded, so they are asked only for what is not recorded
yet. Each hook has the policy's ``hook_timeout_s``. `middleware_of` makes middleware of plain functions.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from pydantic import BaseModel, JsonValue, ValidationError

from .events import Progress
from .history import add_to_prompt, append_user_text
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
from .policy import AgentPolicy
from .text import replace_surrogates, strip_code_fence
from .tool_arguments import tidy_schema
from .tools import PlannedCall, Tool, ToolContext
from .values import AfterTool, End, Finish, NoCallsReason, PromptPart, ToolResult, TurnState

if TYPE_CHECKING:
    from roundelay.network.messages import BaseMessage, MessageThread

    from .events import OnEvent

_logger = logging.getLogger(__name__)
T = TypeVar("T")
ResultT = TypeVar("ResultT")
FormT = TypeVar("FormT", bound=BaseModel)

Instruction = str | Callable[[TurnState], str]
"""An agent's instruction: a text, or a callable that returns one for each turn (`template_instruction` makes one of a
jinja template)."""

FAILED_CHECKS = "failed_checks"
"""Metadata of an answer that goes out although reviewers found a problem: the names of the failed checks."""

PASSED_CHECKS = "passed_checks"
"""Metadata of an answer: the names of the checks that found no problem."""

ASK_ATTEMPTS = 2
"""Attempts of `Around.ask_for` to get a reply in the form that it asked for."""


@dataclass(frozen=True, slots=True)
class Correction:
    """A reviewer's result for an answer that must not go out. The model reads ``instruction``.

    ``name``: the check; ``notes``: further text for the record of the review; ``passed``: checks that found no problem.
    If the model has no further try, an answer that ``blocks`` stays back; otherwise it goes out with the name in its
    metadata.
    """

    instruction: str
    name: str = ""
    notes: Sequence[str] = ()
    blocks: bool = False
    passed: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as it goes out, with ``metadata`` for its message and ``notes`` for the record of the review."""

    text: str
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    notes: Sequence[str] = ()


class AgentHooks(Protocol):
    """The part of an agent's hook chain that middleware may use (`hook_chain.HookChain`)."""

    @property
    def middleware(self) -> tuple[Middleware, ...]: ...

    def store(self, kind: str, body: Mapping[str, object]) -> Mapping[str, object]: ...


@dataclass(frozen=True, slots=True)
class AgentView:
    """View of an agent for hooks: everything of `agent.Agent` but its handoffs, and nothing that could change the loop."""

    id: str
    instruction: Instruction
    model: Model
    tools: Sequence[Tool | Callable[..., object]] = ()
    policy: AgentPolicy = field(default_factory=AgentPolicy)
    description: str = ""
    specs: tuple[ToolSpec, ...] = field(init=False, repr=False, compare=False)
    """Tools that the model may call, handoffs included."""

    _tools: dict[str, Tool] = field(init=False, repr=False, compare=False)
    chain: AgentHooks = field(init=False, repr=False, compare=False)
    """The hooks of its policy and middleware."""

    def instruct(self, state: TurnState) -> str:
        """Return the instruction for a turn."""
        return self.instruction if isinstance(self.instruction, str) else self.instruction(state)

    def find_tool(self, name: str) -> Tool | None:
        return self._tools.get(name)

    @property
    def all_tools(self) -> tuple[Tool, ...]:
        """The agent's own tools, and those that its middleware brought when it was last refreshed."""
        return tuple(self._tools.values())


@dataclass(frozen=True, slots=True)
class CallModel:
    """Ask a model for ``agent``: the agent's own, or ``model``. The last message holds the facts of the turn and is not
    kept.

    ``is_last``: no turn follows. ``tool_choice`` may name a tool that the model has to call. ``parts`` have no place in
    the messages yet; middleware that places a part removes it from here.
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
        """Return the step with a text at its very end, which is not kept."""
        messages = list(self.messages)
        append_user_text(messages, text)
        return replace(self, messages=tuple(messages))

    def instruct(self, text: str) -> CallModel:
        """Return the step with a text at the end of the system message."""
        match self.messages:
            case (SystemMessage(content), *others):
                return replace(self, messages=(SystemMessage(f"{content}\n\n{text}"), *others))
            case _:  # a hook removed the system message
                return self

    def add_to_prompt(self, text: str) -> CallModel:
        """Return the step with a text behind the conversation, at the same position in every turn."""
        return replace(self, messages=add_to_prompt(self.messages, self.state.history, text))

    def place_parts(self) -> CallModel:
        """Return the step with the parts in their default place, for templates that have no other."""
        step = replace(self, parts=())
        texts = [text for part in self.parts for text in (part.fenced, part.user) if text]
        return step.add_to_prompt("\n\n".join(texts)) if texts else step


class Keep(Protocol):
    """Puts a value into ``state.values`` and into the ledger, under a name of this turn. A resumed reaction has it
    again from this turn on, so the work to make it is not repeated. ``of`` names the tools whose results the value
    holds, for a policy that does not keep those."""

    async def __call__(self, name: str, value: JsonValue, *, of: Collection[str] = ()) -> None: ...


@dataclass(frozen=True, slots=True)
class Around:
    """The run around which middleware is called: what middleware may know of it and do in it.

    ``complete`` asks a model, with the agent's retries; its cost counts in the reaction. ``context`` is the context of
    a call of this run: its client sends and reads under ids derived for it.
    """

    reaction: str
    path: str
    agent: AgentView
    model: Model
    """The model that is asked, around a model call; the agent's own elsewhere."""

    state: TurnState
    context: ToolContext
    emit: OnEvent
    complete: Callable[[Model, ModelRequest], Awaitable[ModelReply]]
    keep: Keep
    replayed: Callable[[str], JsonValue]
    """Returns what was kept in this turn under a name, in the run that is replayed, or None if nothing was, and in every
    other run."""
    max_kept_chars: int
    """Maximum characters of text in one kept value."""

    @contextmanager
    def report(self, text: str) -> Iterator[None]:
        """Show people the progress of the work while the block runs. The model does not read it."""
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
        """Ask ``model``, or the agent's own, to call ``tool`` with what ``kind`` describes; once more if the reply has
        another form.

        ``facts`` are sent as JSON, so that no text in them passes for an instruction. Raises `ModelError`.
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
        asked_model = model or self.agent.model
        for _ in range(ASK_ATTEMPTS):
            reply = await self.complete(asked_model, request)
            calls = sorted(reply.tool_calls, key=lambda call: call.name != tool)  # models invent tools too
            try:
                return kind.model_validate_json(calls[0].arguments if calls else strip_code_fence(reply.text or ""))
            except ValidationError:
                continue
        raise ModelError(f"The model {asked_model.name} did not call {tool} as it was asked to.", reason="broken_reply")


AskModel = Callable[[ModelRequest], Awaitable[ModelReply]]
RunTool = Callable[["PlannedCall"], Awaitable[ToolResult]]
RunReaction = Callable[[], Awaitable[Finish]]
"""What `Middleware.around_model`, `around_tool` and `around_reaction` wrap. Each may call it, or return a result itself."""

Guard = Callable[["Around", str], Awaitable["str | Answer | Correction"]]
"""The type of `Middleware.review`."""


class Middleware:
    """One concern around the loop. Override the hooks it needs; a hook that is not overridden costs nothing. The first
    middleware of an agent is outermost."""

    withholds = True
    """For middleware with a `review`: nobody sees the model's text before the review. False for reviews that only edit.
    """

    min_turns = 1
    """Minimum ``max_turns`` of an agent for this middleware to work. An agent with fewer is refused, and no message
    lowers its limit further."""

    needs: tuple[type[Middleware], ...] = ()
    """Middleware that this one requires in the same agent; an agent without it is refused."""

    reduces_results = False
    """Whether it handles results that are to be read once (``save: False``). Without any such middleware, a result of
    that kind is an error."""

    guards = True
    """For middleware with a `review`: it also reviews what an agent says that this one has handed over to. False for
    reviews that only format answers."""

    # --- pure hooks: asked again when a reaction resumes. They may be coroutines, except `list_tools`, `list_parts` and
    # `store`.

    def initial_state(self) -> Mapping[str, object]:
        """Return the initial values of ``state.values``."""
        return {}

    def list_tools(self, state: TurnState) -> Sequence[Tool]:
        """Return the tools that it brings, beside the agent's own.

        Called once before each turn, without IO: a change takes effect in the next turn. Return the same objects while
        nothing changes. If two tools have one name, the agent's own wins, then the one of earlier middleware.
        """
        return ()

    def list_parts(self, state: TurnState) -> Sequence[PromptPart]:
        """Return what the sources of its tools say in the prompt, as far as it is known now, without IO. Templates
        place the parts (`features.prompts`). Other parts are added to the system message and behind the conversation.
        """
        return ()

    def select_messages(
        self, threads: Mapping[str, MessageThread], trigger: BaseMessage
    ) -> tuple[Mapping[str, MessageThread], BaseMessage]:
        """Choose which messages of the conversation enter the prompt. It may leave messages out, shorten them visibly,
        or rewrite what only the agent's middleware has written. The trigger stays."""
        return threads, trigger

    def should_continue(self, state: TurnState) -> bool:
        """Return whether turns with tools may follow. If not, this turn is the last, and has none."""
        return True

    def prepare(self, state: TurnState, step: CallModel) -> CallModel:
        """Change what is asked: messages, tools, the model, the choice of tool. The history stays as it is."""
        return step

    def calculate_usage(self, state: TurnState, reply: ModelReply) -> Usage:
        """Return the usage that a reply counts for."""
        return reply.usage

    def process_tool_calls(self, state: TurnState, calls: Sequence[ToolCall]) -> End | bool | None:
        """Check the calls of a reply before any runs. With `End` or True none runs; True makes the text beside them the
        answer."""
        return None

    def preprocess_arguments(self, state: TurnState, call: ToolCall) -> str | Mapping[str, object] | BaseModel | None:
        """Return the arguments to use, as an object or its text, or None to leave them. Raises `ToolArgumentsError`, whose
        text the model reads instead of a result."""
        return None

    def after_tool(self, state: TurnState, call: ToolCall, result: ToolResult) -> AfterTool | None:
        """Change the effect of a result. Called in the order of the calls, after all calls of the turn, and not for
        calls that did not run."""
        return None

    def read_answers(
        self, answers: Sequence[tuple[str, Mapping[str, JsonValue]]]
    ) -> tuple[Sequence[str], Mapping[str, JsonValue]]:
        """Read other agents' answers to a call, each a text and the metadata of its message. Return the texts for the
        model, in that order, and the data for the call's result."""
        return [text for text, _ in answers], {}

    def on_no_tool_calls(self, state: TurnState, reason: NoCallsReason) -> str | End | None:
        """Return a text, with which the model is asked again, or `End`, or None for the default."""
        return None

    # --- hooks around what is done: called only for what is not recorded yet

    async def around_reaction(self, around: Around, proceed: RunReaction) -> Finish:
        """Run the reaction, or what is left of a resumed one. Return how it ended."""
        return await proceed()

    async def around_turn(self, around: Around, proceed: Callable[[], Awaitable[None]]) -> None:
        """Run one turn: the model call and the tool calls that it asks for."""
        return await proceed()

    async def around_model(self, around: Around, request: ModelRequest, proceed: AskModel) -> ModelReply:
        """Send the request, or not. The returned reply is recorded. Raises `ModelError`."""
        return await proceed(request)

    async def around_tool(self, around: Around, call: PlannedCall, proceed: RunTool) -> ToolResult:
        """Run the tool, or not. The returned result is recorded."""
        return await proceed(call)

    async def review(self, around: Around, answer: str) -> str | Answer | Correction:
        """Return the answer as it goes out, or what is wrong with it. A message that a tool sends to the requester is
        an answer too."""
        return answer

    async def finish_answer(self, around: Around, answer: str, is_accepted: bool) -> str | Answer:
        """Add to an answer that goes out now. ``is_accepted``: no reviewer found a problem. Otherwise it goes out
        because there is no better one."""
        return answer

    def store(self, kind: str, body: Mapping[str, object]) -> Mapping[str, object]:
        """Return a record as it is kept. A resumed reaction does not know what is left out."""
        return body

    # --- beside the reactions

    def describe(self) -> object:
        """Return the settings. If they differ when a reaction resumes, the reaction reports that. The default is
        everything that it holds when its runner is created: data by value, code by name."""
        return vars(self)

    async def close(self) -> None:
        """Release all resources, at the end of each `run` of the runner. The middleware may be used again."""


def middleware_of(**hooks: Callable[..., object]) -> Middleware:
    """Make middleware of plain functions, each under the name of its hook, without ``self``."""
    for name in hooks:
        if name.startswith("_") or not callable(getattr(Middleware, name, None)):
            raise TypeError(f"Middleware has no hook named {name}.")
    methods: dict[str, object] = {name: staticmethod(hook) for name, hook in hooks.items()}
    middleware: Middleware = type("Functions", (Middleware,), {"describe": lambda self: hooks, **methods})()
    return middleware
