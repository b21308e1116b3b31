"""Hooks around the loop: `Middleware` has one method per hook, and `Around` is a hook's view of the run.

`hook_chain` calls the hooks of an agent, the outermost first. The pure hooks are called again when a reaction resumes,
so they may depend only on their arguments and on `state.values`. The hooks around a reaction, a turn, a model call and
a tool call, and the reviews, may do anything. Their results are recorded, so these hooks are called only for steps
without a record. The policy's ``hook_timeout_s`` limits each hook. `middleware_of` makes middleware from plain
functions.
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
"""An agent's instruction: a text, or a callable that returns a text for each turn (`template_instruction` makes such
a callable from a jinja template).
"""

FAILED_CHECKS = "failed_checks"
"""Metadata key of an answer that is sent although reviewers found a problem: the names of the failed checks."""

PASSED_CHECKS = "passed_checks"
"""Metadata key of an answer: the names of the checks that found no problem."""

ASK_ATTEMPTS = 2
"""Attempts of `Around.ask_for` to get a reply in the requested form."""


@dataclass(frozen=True, slots=True)
class Correction:
    """A reviewer's result for an answer that must not be sent. The model reads ``instruction``.

    ``name``: the check. ``notes``: further text for the record of the review. ``passed``: checks that found no problem.
    If the model has no further attempt, an answer that ``blocks`` is withheld. Any other answer is sent with ``name``
    in its metadata.
    """

    instruction: str
    name: str = ""
    notes: Sequence[str] = ()
    blocks: bool = False
    passed: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to send, with ``metadata`` for its message and ``notes`` for the record of the review."""

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
    """View of an agent for hooks: all fields of `agent.Agent` except its handoffs and the methods that could change
    the loop.
    """

    id: str
    instruction: Instruction
    model: Model
    tools: Sequence[Tool | Callable[..., object]] = ()
    policy: AgentPolicy = field(default_factory=AgentPolicy)
    description: str = ""
    specs: tuple[ToolSpec, ...] = field(init=False, repr=False, compare=False)
    """Tools that the model may call, including handoffs."""

    _tools: dict[str, Tool] = field(init=False, repr=False, compare=False)
    chain: AgentHooks = field(init=False, repr=False, compare=False)
    """The hooks of the agent's policy and middleware."""

    def instruct(self, state: TurnState) -> str:
        """Return the instruction for a turn."""
        return self.instruction if isinstance(self.instruction, str) else self.instruction(state)

    def find_tool(self, name: str) -> Tool | None:
        return self._tools.get(name)

    @property
    def all_tools(self) -> tuple[Tool, ...]:
        """The agent's own tools, and the tools that its middleware provided at the last refresh."""
        return tuple(self._tools.values())


@dataclass(frozen=True, slots=True)
class CallModel:
    """Request to call a model for ``agent``: the agent's own model, or ``model``. The last message states the current
    turn and the rule for answering, and is not added to the history.

    ``is_last``: no turn follows. ``tool_choice`` may name a tool that the model must call. ``parts`` are not yet in the
    messages. Middleware that adds a part to a message removes it from ``parts``.
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
        """Return the step with a text at the very end of the messages. The text is not added to the history."""
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
        """Return the step with a text after the conversation, at the same position in every turn."""
        return replace(self, messages=add_to_prompt(self.messages, self.state.history, text))

    def place_parts(self) -> CallModel:
        """Return the step with the parts in their default positions, unless a template has already placed them."""
        # Placed parts leave `parts`. Middleware that runs later would otherwise place them a second time.
        step = replace(self, parts=())
        texts = [text for part in self.parts for text in (part.fenced, part.user) if text]
        return step.add_to_prompt("\n\n".join(texts)) if texts else step


class Keep(Protocol):
    """Stores a value in ``state.values`` and in the ledger, under a name in this turn. A resumed reaction has the
    value again from this turn on, so the work is not repeated. ``of`` names the tools whose results the value
    contains. A policy that excludes these results from the ledger then excludes the value too.
    """

    async def __call__(self, name: str, value: JsonValue, *, of: Collection[str] = ()) -> None: ...


@dataclass(frozen=True, slots=True)
class Around:
    """The run around which middleware is called: its data, and the actions that middleware may take.

    ``complete`` calls a model with the agent's retries, and its cost counts in the reaction. ``context`` is the context
    of a call in this run. Its client sends and reads under ids derived for that call.
    """

    reaction: str
    path: str
    agent: AgentView
    model: Model
    """The called model in a hook around a model call; the agent's own model in other hooks."""

    state: TurnState
    context: ToolContext
    emit: OnEvent
    complete: Callable[[Model, ModelRequest], Awaitable[ModelReply]]
    keep: Keep
    replayed: Callable[[str], JsonValue]
    """Returns the value that the replayed run stored in this turn under a name. None if there is no value, or if the
    run is not a replay.
    """
    max_kept_chars: int
    """Maximum characters of text in one stored value."""

    @contextmanager
    def report(self, text: str) -> Iterator[None]:
        """Show people the progress of the work until the block ends. The model does not read it."""
        self.emit(Progress(self.reaction, self.state.turn, replace_surrogates(text), path=self.path))
        # End the report in any case. Without that, people would see the work as going on after an error.
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
        """Ask ``model``, or the agent's own model, to call ``tool`` with arguments of the type ``kind``. Ask again if
        the reply has another form (`ASK_ATTEMPTS`).

        ``facts`` are sent as JSON, so that no text in them passes for an instruction. Raises `ModelError`.
        """
        schema = tidy_schema(kind.model_json_schema())
        request = ModelRequest(
            # Facts may contain text of other participants. Encoded as JSON strings, this text cannot end the data and
            # give orders.
            (SystemMessage(instruction), UserMessage(json.dumps(facts, ensure_ascii=False, indent=1))),
            (ToolSpec(tool, (kind.__doc__ or "").strip(), schema),),
            # Force the tool: its schema keeps the reply in the requested form.
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
                # Some models write the arguments as text, often in a code fence, so that text is read too.
                return kind.model_validate_json(calls[0].arguments if calls else strip_code_fence(reply.text or ""))
            except ValidationError:
                # Ask with the same request again: replies vary, and one that fits usually follows. The number of
                # attempts is bounded.
                continue
        raise ModelError(f"The model {asked_model.name} did not call {tool} as it was asked to.", reason="broken_reply")


AskModel = Callable[[ModelRequest], Awaitable[ModelReply]]
RunTool = Callable[["PlannedCall"], Awaitable[ToolResult]]
RunReaction = Callable[[], Awaitable[Finish]]
"""Argument ``proceed`` of `Middleware.around_reaction`. The hook may call it, or return a result itself."""

Guard = Callable[["Around", str], Awaitable["str | Answer | Correction"]]
"""Type of `Middleware.review`."""


class Middleware:
    """One concern around the loop. Override the hooks that you need. A hook that is not overridden costs nothing.
    The first middleware of an agent is outermost.
    """

    withholds = True
    """For middleware with a `review`: whether the model's text is hidden from people until the review. Set False for
    reviews that only edit.
    """

    min_turns = 1
    """Minimum ``max_turns`` of an agent for this middleware to work. An agent with fewer turns is refused, and the
    limits in a message cannot go below this minimum.
    """

    needs: tuple[type[Middleware], ...] = ()
    """Middleware that the same agent must also have. An agent without it is refused."""

    reduces_results = False
    """Whether this middleware handles results that the model reads only once (``save: False``). Without such
    middleware, a result of that kind is an error.
    """

    guards = True
    """For middleware with a `review`: whether it also reviews texts of an agent to which this agent handed over. Set
    False for reviews that only format answers.
    """

    tool_names: Collection[str] = ()
    """Tools that this middleware makes the model call. A lean prompt offers them from the first turn."""

    # --- pure hooks: called again when a reaction resumes. They may be coroutines, except `list_tools`, `list_parts`
    # and `store`.

    def initial_state(self) -> Mapping[str, object]:
        """Return the initial values of ``state.values``."""
        return {}

    def list_tools(self, state: TurnState) -> Sequence[Tool]:
        """Return tools to add to the agent's own tools.

        Called once before each turn, without IO, so a change takes effect in the next turn. Return the same objects
        while nothing changes. If two tools have the same name, the agent's own tool wins, followed by the tool of
        earlier middleware.
        """
        return ()

    def list_parts(self, state: TurnState) -> Sequence[PromptPart]:
        """Return texts that the sources of its tools add to the prompt, as currently known, without IO. Templates place
        the parts (`features.prompts`). Parts that no template places go to the system message and after the
        conversation.
        """
        return ()

    def select_messages(
        self, threads: Mapping[str, MessageThread], trigger: BaseMessage
    ) -> tuple[Mapping[str, MessageThread], BaseMessage]:
        """Choose which messages of the conversation enter the prompt. The hook may omit messages, shorten them
        visibly, or rewrite text that only the agent's middleware has written. It cannot omit the trigger.
        """
        return threads, trigger

    def should_continue(self, state: TurnState) -> bool:
        """Return whether more turns with tools may follow. If not, this turn is the last, and it has no tools."""
        return True

    def prepare(self, state: TurnState, step: CallModel) -> CallModel:
        """Change the request: messages, tools, the model or the tool choice. The history does not change."""
        return step

    def calculate_usage(self, state: TurnState, reply: ModelReply) -> Usage:
        """Return the usage to charge for a reply."""
        return reply.usage

    def process_tool_calls(self, state: TurnState, calls: Sequence[ToolCall]) -> End | bool | None:
        """Check the calls of a reply before any of them runs. `End` or True prevents all of them. True also makes
        the text of the reply the answer.
        """
        return None

    def preprocess_arguments(self, state: TurnState, call: ToolCall) -> str | Mapping[str, object] | BaseModel | None:
        """Return the arguments to use, as an object or as JSON text, or None to leave them unchanged. Raises
        `ToolArgumentsError`; the model reads its text instead of a result.
        """
        return None

    def after_tool(self, state: TurnState, call: ToolCall, result: ToolResult) -> AfterTool | None:
        """Change the effect of a result. Called after all calls of the turn, in the order of the calls. Not called
        for calls that did not run.
        """
        return None

    def read_answers(
        self, answers: Sequence[tuple[str, Mapping[str, JsonValue]]]
    ) -> tuple[Sequence[str], Mapping[str, JsonValue]]:
        """Process other agents' answers to a call: each is a text and the metadata of its message. Return the texts
        for the model, in the same order, and the data for the call's result.
        """
        return [text for text, _ in answers], {}

    def on_no_tool_calls(self, state: TurnState, reason: NoCallsReason) -> str | End | None:
        """Return a text to ask the model again, `End` to end the reaction, or None for the default."""
        return None

    # --- hooks around an action: called only if its outcome is not recorded yet

    async def around_reaction(self, around: Around, proceed: RunReaction) -> Finish:
        """Run the reaction, or the rest of a resumed reaction. Return its end."""
        return await proceed()

    async def around_turn(self, around: Around, proceed: Callable[[], Awaitable[None]]) -> None:
        """Run one turn: the model call and the tool calls in its reply."""
        return await proceed()

    async def around_model(self, around: Around, request: ModelRequest, proceed: AskModel) -> ModelReply:
        """Send the request, or return a reply without sending it. The returned reply is recorded. Raises
        `ModelError`.
        """
        return await proceed(request)

    async def around_tool(self, around: Around, call: PlannedCall, proceed: RunTool) -> ToolResult:
        """Run the tool, or return a result without running it. The returned result is recorded."""
        return await proceed(call)

    async def review(self, around: Around, answer: str) -> str | Answer | Correction:
        """Return the answer to send, or a correction. A message that a tool sends to the requester is also reviewed
        as an answer.
        """
        return answer

    async def finish_answer(self, around: Around, answer: str, is_accepted: bool) -> str | Answer:
        """Add to an answer that is about to be sent. ``is_accepted``: no reviewer found a problem. Otherwise it is
        sent because there is no better answer.
        """
        return answer

    def store(self, kind: str, body: Mapping[str, object]) -> Mapping[str, object]:
        """Return the record to store. A resumed reaction does not know the omitted data."""
        return body

    # --- outside of reactions

    def describe(self) -> object:
        """Return the settings. If they differ when a reaction resumes, the reaction reports the change. The default
        is all attributes at the time the runner is created: data by value, code by name.
        """
        return vars(self)

    async def close(self) -> None:
        """Release all resources, at the end of each `run` of the runner. The middleware may be used again."""


def middleware_of(**hooks: Callable[..., object]) -> Middleware:
    """Make middleware from plain functions, each passed under the name of its hook, without ``self``."""
    for name in hooks:
        if name.startswith("_") or not callable(getattr(Middleware, name, None)):
            raise TypeError(f"Middleware has no hook named {name}.")
    # Static: the functions take no `self`. `describe` lists them, so that a resumed reaction notices other functions.
    methods: dict[str, object] = {name: staticmethod(hook) for name, hook in hooks.items()}
    middleware: Middleware = type("Functions", (Middleware,), {"describe": lambda self: hooks, **methods})()
    return middleware
