"""Hooks around the loop: `Middleware` has one method per hook, and `Around` is a hook's view of the run.

`hook_chain` calls the hooks of an agent, the outermost first. The pure hooks are called again when a reaction resumes,
so they may depend only on their arguments and on `state.values`. The hooks around a reaction, a turn, a model call or a
tool call, and the reviews, may have side effects. The results of these hooks are recorded, so the hooks are called only
for steps without a record. The policy's ``hook_timeout_s`` limits each hook. `middleware_of` makes middleware from
plain functions.
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
"""Metadata key of an answer that was sent although checks failed. The value is the list of the failed checks' names."""

PASSED_CHECKS = "passed_checks"
"""Metadata key of an answer. The value is the list of the names of the checks that found no problem."""

ASK_ATTEMPTS = 2
"""Maximum number of requests that `Around.ask_for` sends to get a reply in the requested form."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Result of a review that found a problem in an answer. The model reads ``instruction`` and writes another answer.

    ``name``: name of the failed check. ``notes``: additional text for the record of the review. ``passed``: names of
    the checks that found no problem. If the model may not write another answer, ``blocks`` decides: an answer that is
    blocked is withheld, and any other answer is sent with ``name`` in its metadata.
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
    """Step of the loop that requests a model call for ``agent``. ``model`` replaces the agent's own model. The last
    message states the current turn and the rule for answering, and is not added to the history.

    ``is_last``: no turn follows. ``tool_choice`` may name a tool that the model must call. ``parts``: texts that the
    messages do not contain yet. Middleware that adds a part to a message removes the part from ``parts``.
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
        """Return a copy of the step with ``text`` at the end of the messages. The text is not added to the history."""
        messages = list(self.messages)
        append_user_text(messages, text)
        return replace(self, messages=tuple(messages))

    def instruct(self, text: str) -> CallModel:
        """Return a copy of the step with ``text`` at the end of the system message."""
        match self.messages:
            case (SystemMessage(content), *others):
                return replace(self, messages=(SystemMessage(f"{content}\n\n{text}"), *others))
            case _:  # a hook removed the system message
                return self

    def add_to_prompt(self, text: str) -> CallModel:
        """Return a copy of the step with ``text`` after the conversation. The position is the same in every turn."""
        return replace(self, messages=add_to_prompt(self.messages, self.state.history, text))

    def place_parts(self) -> CallModel:
        """Return a copy of the step in which all remaining ``parts`` are in the prompt, at their default positions."""
        # Empty `parts`: otherwise middleware that runs later would add the same texts a second time.
        step = replace(self, parts=())
        texts = [text for part in self.parts for text in (part.fenced, part.user) if text]
        return step.add_to_prompt("\n\n".join(texts)) if texts else step


class Keep(Protocol):
    """Stores a value in ``state.values`` and, for the current turn, in the ledger. A resumed reaction reads the value
    from the ledger in the same turn, so the work is not repeated. ``of`` names the tools whose results the value
    contains. A data policy that excludes the results of a named tool from the ledger also excludes the value.
    """

    async def __call__(self, name: str, value: JsonValue, *, of: Collection[str] = ()) -> None: ...


@dataclass(frozen=True, slots=True)
class Around:
    """A hook's view of the current run: the run's data, and the actions that the hook may take.

    ``complete`` calls a model, retries temporary failures as the agent's policy allows, and adds the usage to the
    reaction. ``context`` is a tool context for this step. ``context.client`` derives the ids of its requests from the
    step, so a repeated step uses the same ids.
    """

    reaction: str
    path: str
    agent: AgentView
    model: Model
    """In a hook around a model call, the model that is called. In all other hooks, this is the agent's own model."""

    state: TurnState
    context: ToolContext
    emit: OnEvent
    complete: Callable[[Model, ModelRequest], Awaitable[ModelReply]]
    keep: Keep
    replayed: Callable[[str], JsonValue]
    """Returns the value that the replayed run stored in this turn under a name. Returns None if there is no value, or
    if the run is not a replay.
    """
    max_kept_chars: int
    """Maximum characters of text in one value that ``keep`` stores."""

    @contextmanager
    def report(self, text: str) -> Iterator[None]:
        """Show ``text`` to people as progress until the ``with`` block ends. The model does not read the text."""
        self.emit(Progress(self.reaction, self.state.turn, replace_surrogates(text), path=self.path))
        # End the report even after an error. Without this report, people would still see the work as running.
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
        """Ask ``model``, or the agent's own model, to call ``tool`` with arguments of the type ``kind``. If the reply
        does not have this form, ask again, with at most `ASK_ATTEMPTS` requests in total.

        ``facts`` are sent as JSON, so that the model does not read text in them as an instruction. Raises `ModelError`.
        """
        schema = tidy_schema(kind.model_json_schema())
        request = ModelRequest(
            # Facts may contain text of other participants. A JSON string encodes such text, so the text cannot end the
            # data and give instructions to the model.
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
            # Prefer the requested tool, because a model may also call tools that do not exist.
            calls = sorted(reply.tool_calls, key=lambda call: call.name != tool)
            try:
                # Some models write the arguments as text, often in a code fence, so parse the text of the reply too.
                return kind.model_validate_json(calls[0].arguments if calls else strip_code_fence(reply.text or ""))
            except ValidationError:
                # Send the same request again. Replies vary, so the next reply is often valid.
                continue
        raise ModelError(f"The model {asked_model.name} did not call {tool} as requested.", reason="broken_reply")


AskModel = Callable[[ModelRequest], Awaitable[ModelReply]]
RunTool = Callable[["PlannedCall"], Awaitable[ToolResult]]
RunReaction = Callable[[], Awaitable[Finish]]
"""Argument ``proceed`` of `Middleware.around_reaction`. The hook may call it, or return a result itself."""

Guard = Callable[["Around", str], Awaitable["str | Answer | Correction"]]
"""Type of `Middleware.review`."""


class Middleware:
    """Base class of extensions to an agent's loop. Override the hooks that you need. A hook that is not overridden
    costs nothing. The first middleware of an agent is the outermost.
    """

    withholds = True
    """Whether the model's text stays hidden from people until this middleware's `review` has checked it. Set
    ``withholds`` to False if the review only edits text. Middleware without a `review` ignores this setting.
    """

    min_turns = 1
    """Minimum ``max_turns`` that an agent needs for this middleware to work. An agent with fewer turns is refused. A
    message that sets its own limits cannot go below this minimum.
    """

    needs: tuple[type[Middleware], ...] = ()
    """Middleware classes that the same agent must also have. An agent without one of these classes is refused."""

    reduces_results = False
    """Whether this middleware handles results that the model reads only once (``save: False``). Without such
    middleware, a result with ``save: False`` is an error.
    """

    guards = True
    """Whether this middleware's `review` also checks texts of an agent to which this agent handed over. Set ``guards``
    to False if the review only formats answers.
    """

    tool_names: Collection[str] = ()
    """Tools that this middleware makes the model call. A lean prompt offers these tools from the first turn."""

    # --- pure hooks: called again when a reaction resumes. Pure hooks may be coroutines, except `list_tools`,
    # `list_parts` and `store`.

    def initial_state(self) -> Mapping[str, object]:
        """Return the initial values of ``state.values``."""
        return {}

    def list_tools(self, state: TurnState) -> Sequence[Tool]:
        """Return tools to add to the agent's own tools.

        The loop calls this hook once before each turn, so a change takes effect in the next turn. The hook must not do
        IO. Return the same objects while nothing changes. If several tools have the same name, the agent's own tool is
        used. If the agent has no tool with this name, the tool of the first middleware is used.
        """
        return ()

    def list_parts(self, state: TurnState) -> Sequence[PromptPart]:
        """Return texts for the prompt from the sources of this middleware's tools, such as MCP servers. The hook must
        not do IO, so it returns texts that are already loaded. Templates determine the positions of the parts
        (`features.prompts`). Parts that no template places go to the system message and after the conversation.
        """
        return ()

    def select_messages(
        self, threads: Mapping[str, MessageThread], trigger: BaseMessage
    ) -> tuple[Mapping[str, MessageThread], BaseMessage]:
        """Choose which messages of the conversation enter the prompt. The hook may omit messages, shorten them visibly,
        or rewrite text that only the agent's middleware has written. The hook cannot omit the trigger.
        """
        return threads, trigger

    def should_continue(self, state: TurnState) -> bool:
        """Return whether more turns with tools may follow. If the result is False, this turn is the last and has no
        tools.
        """
        return True

    def prepare(self, state: TurnState, step: CallModel) -> CallModel:
        """Change the request: messages, tools, the model or the tool choice. The history does not change."""
        return step

    def calculate_usage(self, state: TurnState, reply: ModelReply) -> Usage:
        """Return the usage to charge for a reply."""
        return reply.usage

    def process_tool_calls(self, state: TurnState, calls: Sequence[ToolCall]) -> End | bool | None:
        """Check the tool calls of a reply before any of them runs. Return `End` or True to prevent all calls. With
        True, the text of the reply becomes the answer.
        """
        return None

    def preprocess_arguments(self, state: TurnState, call: ToolCall) -> str | Mapping[str, object] | BaseModel | None:
        """Return the arguments to use, as an object or as JSON text, or None to leave them unchanged. If the hook
        raises `ToolArgumentsError`, the model reads the text of the error instead of a result.
        """
        return None

    def after_tool(self, state: TurnState, call: ToolCall, result: ToolResult) -> AfterTool | None:
        """Return changes to the loop because of a tool's result, or None for no changes. The loop calls this hook after
        all calls of the turn have ended, in the order of the calls, but not for calls that did not run.
        """
        return None

    def read_answers(
        self, answers: Sequence[tuple[str, Mapping[str, JsonValue]]]
    ) -> tuple[Sequence[str], Mapping[str, JsonValue]]:
        """Process the answers of other agents that a tool call waited for. Each answer is a text and the metadata of
        its message. Return the texts for the model, in the same order, and data for the result of the call.
        """
        return [text for text, _ in answers], {}

    def on_no_tool_calls(self, state: TurnState, reason: NoCallsReason) -> str | End | None:
        """Return a text to ask the model again, `End` to end the reaction, or None for the default."""
        return None

    # --- hooks around an action: called only if its outcome is not recorded yet

    async def around_reaction(self, around: Around, proceed: RunReaction) -> Finish:
        """Run the reaction, or the rest of a resumed reaction. Return the reaction's `Finish`."""
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
        """Extend an answer that is about to be sent. ``is_accepted`` is False if a reviewer found a problem, and the
        answer is sent only because the model may not write another one.
        """
        return answer

    def store(self, kind: str, body: Mapping[str, object]) -> Mapping[str, object]:
        """Return a record's body without data that must not be stored. A resumed reaction lacks the omitted data."""
        return body

    # --- outside of reactions

    def describe(self) -> object:
        """Return the settings of this middleware. If the settings differ when a reaction resumes, the reaction reports
        the change. By default, the settings are all attributes at the time the runner is created: data by value, code
        by name.
        """
        return vars(self)

    async def close(self) -> None:
        """Release all resources at the end of each `run` of the runner. A later `run` may use the middleware again."""


def middleware_of(**hooks: Callable[..., object]) -> Middleware:
    """Make middleware from plain functions, each passed under the name of its hook, without ``self``."""
    for name in hooks:
        if name.startswith("_") or not callable(getattr(Middleware, name, None)):
            raise TypeError(f"Middleware has no hook named {name}.")
    # Use static methods, because the functions take no `self`. `describe` returns the functions, so that a resumed
    # reaction detects changed functions.
    methods: dict[str, object] = {name: staticmethod(hook) for name, hook in hooks.items()}
    middleware: Middleware = type("Functions", (Middleware,), {"describe": lambda self: hooks, **methods})()
    return middleware
