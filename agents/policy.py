"""Settings that an agent's author chooses: limits, the messages in the prompt, and functions that the loop calls.

Plain data and small callables, no IO. The bounds of each limit are stated once, in its annotation. `AgentPolicy` checks
the values of a program, and `AgentLimits` checks the values of a file. A `MessageFilter` applies to the part of the
conversation that the hub returned (`prompt`). The trigger is always shown.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, Discriminator, Field, Tag

from roundelay.network.messages import BaseMessage
from roundelay.network.text import truncate

from .approval_rule import ApprovalRule, ApprovalsNeeded, Approvers, EffectiveRule, check_enough
from .isolation import check_hook
from .models.model import Model, ModelReply, ToolCall, Usage
from .options import IN_CODE, MAX_COUNT, Count, InFile, Seconds, Text, check_fields, list_in_code, optional_form
from .values import FAILURE, AfterTool, End, NoCallsReason, ToolResult, TurnState

T = TypeVar("T")
Given: TypeAlias = T | Awaitable[T]
"""Result of a hook, returned directly or through an awaitable."""

MAX_PER_THREAD = 499
"""Maximum messages of a thread in a prompt. The hub returns at most 500, and one may be the trigger."""

Kind = Literal["direct", "broadcast", "channel", "mod"]

SPARE = 4
"""Factor by which an agent requests more messages from the hub if its filter may drop some of them."""


_Shown = Annotated[int, Field(ge=1, le=MAX_PER_THREAD)]


@dataclass(frozen=True, slots=True)
class GrowingWindow:
    """Shows the last messages of a thread. The window grows from ``least`` to ``most`` messages, and the next message
    shrinks it to ``least`` again.

    Until the window shrinks, each prompt begins like the previous prompt, so the provider's prompt cache applies. With
    a fixed number of messages, each prompt would begin with a different message.
    """

    least: _Shown
    most: _Shown

    def __post_init__(self) -> None:
        check_fields(self)
        if self.least >= self.most:
            raise ValueError(f"must have least below most, not {self.least} and {self.most}")

    def count_shown(self, total: int) -> int:
        """Return how many of ``total`` messages are shown. The result depends only on ``total``."""
        if total <= self.most:
            return total
        # Depend on nothing but ``total``, so that a reaction that resumes on any machine shows the same messages.
        return self.least + (total - self.least) % (self.most - self.least + 1)


def _tell_apart(value: object) -> str:
    return "growing" if isinstance(value, dict | GrowingWindow) else "fixed"


_Growing = Annotated[GrowingWindow, Tag("growing")]
PerThread = Annotated[Annotated[_Shown, Tag("fixed")] | _Growing, Discriminator(_tell_apart)]
"""Number of messages shown per thread: a fixed number, or a window that grows."""

_OrNone = Annotated[Annotated[int, Field(ge=0, le=MAX_PER_THREAD), Tag("fixed")] | _Growing, Discriminator(_tell_apart)]


def count_most(per_thread: PerThread) -> int:
    """Return the maximum number of messages shown per thread."""
    return per_thread.most if isinstance(per_thread, GrowingWindow) else per_thread


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """Selects the messages of the conversation that a prompt shows. Empty ``kinds`` and ``senders`` select all. A
    sender is an id or a pattern (``build-*``). ``exclude_senders`` has priority over ``senders``.

    ``per_thread`` sets the number of messages for threads whose id matches a pattern (``channel:*``); 0 hides the
    thread. The first matching pattern applies. Threads without a match use the agent's own ``per_thread``.
    """

    kinds: Annotated[Collection[str], InFile(tuple[Kind, ...])] = ()
    senders: Annotated[Collection[str], InFile(tuple[Text, ...])] = ()
    exclude_senders: Annotated[Collection[str], InFile(tuple[Text, ...])] = ()
    per_thread: Annotated[Mapping[str, PerThread], InFile(dict[Text, _OrNone])] = field(default_factory=dict)
    failures: bool = True
    """Whether to show messages that report that an agent has no answer (``failure`` in their metadata)."""

    def __post_init__(self) -> None:
        check_fields(self)

    def admits(self, message: BaseMessage, reader: str) -> bool:
        """Return whether the prompt of agent ``reader`` may show a message. Messages of ``reader`` itself are shown
        unless they are excluded.
        """
        if self.kinds and message.kind not in self.kinds:
            return False
        if not self.failures and isinstance((message.metadata or {}).get(FAILURE), str):
            return False
        if _fits(message.sender_id, self.exclude_senders):
            return False
        return not self.senders or message.sender_id == reader or _fits(message.sender_id, self.senders)

    def find_for(self, thread_id: str, usual: PerThread) -> PerThread:
        """Return the number of messages to show for a thread."""
        return next((count for pattern, count in self.per_thread.items() if fnmatchcase(thread_id, pattern)), usual)

    def count_to_ask(self, usual: PerThread) -> int:
        """Return the number of messages to request from the hub for each thread."""
        max_shown = max(map(count_most, (usual, *self.per_thread.values())))
        is_choosing = self.kinds or self.senders or self.exclude_senders or not self.failures
        return min(max_shown * SPARE if is_choosing else max_shown, MAX_PER_THREAD)


ALL = MessageFilter()


def _fits(sender_id: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(sender_id, pattern) for pattern in patterns)


OnText = Literal["auto", "reply", "nudge", "record"]
"""Use of text without a tool call.

``auto``: the text is sent to the thread of the trigger if a person wrote the trigger, or if a response is required of
this agent. In all other cases, the text is only recorded. ``reply``: the text is always sent. ``nudge``: the model is
asked to use a tool, and its closing answer is treated as in ``auto``. ``record``: the text is only recorded.
"""

OnNewMessage = Literal["queue", "inject"]

PromptForm = Literal["lean", "full", "chat"]
"""Form of the prompt.

``lean``: the trigger's thread, other threads as one line each, and only the network tools that the agent can use. The
agent loads other tools on demand. ``full``: every thread with its messages, and every network tool. ``chat``: like
``lean``, but a direct thread is shown as plain chat messages instead of XML.
"""

WARNED_TURNS = 2
"""Number of turns before the last one in which a lean prompt states the number of the turn."""


@dataclass(frozen=True, slots=True)
class KeptRecords:
    """Records that the journal stores in addition to the records for resuming.

    ``thinking``: the models' thinking, if the provider returns it. ``progress``: progress that tool calls report.
    ``prompt``: the exact prompt of each turn.
    """

    thinking: bool = False
    progress: bool = False
    prompt: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


MAX_LISTED = 8
"""Maximum number of threads that a lean prompt lists in addition to the threads near the trigger."""

MAX_THREADS = 100
"""Maximum number of threads, in addition to the trigger's thread, that the hub searches for the prompt
(`network.window`).
"""


def describe_turn(turn: int, max_turns: int) -> str:
    """Return the text at the end of each model request that states the turn. The text changes in every turn, so it
    comes after the history, which providers cache. The rule for answering follows the text.
    """
    if turn < max_turns:
        return f"Turn {turn} of {max_turns}."
    return f"Turn {turn} of {max_turns}, the last one: no tools any more."


def describe_place(
    policy: AgentPolicy, form: PromptForm, turn: int, max_turns: int, is_last: bool, has_tools: bool
) -> str:
    """Return the text that states the turn, or an empty string. A lean prompt states the turn only near the last turn,
    unless the policy has its own ``describe_turn``.
    """
    is_early = turn < max(2, max_turns - WARNED_TURNS) and not is_last
    if form != "full" and policy.describe_turn is describe_turn and (is_early or not has_tools):
        return ""
    return policy.describe_turn(turn, turn if is_last else max_turns)


@dataclass(frozen=True, slots=True)
class AgentPolicy:
    """Limits and choices of an agent. The defaults suit a conversation. Counts are at least 1, and times are in
    seconds.

    The callables must be pure, because a resumed reaction calls them again. `Middleware` documents the return value of
    each callable at the method with the same name. All callables except ``describe_turn`` may be coroutines.
    """

    max_turns: Count = 30
    """Maximum model calls of one reaction. The last call has no tools, so that a reaction ends with an answer."""

    max_tool_calls_per_turn: Count = 16
    """Maximum number of calls of a turn that run. Each further call is answered with a refusal."""

    max_tool_calls: Count | None = None
    """Maximum calls of a reaction. The turn after the limit is reached is the last turn."""

    uncounted_tools: Annotated[Collection[str], InFile(tuple[Text, ...])] = ()
    """Tools whose calls do not count toward ``max_tool_calls``."""

    max_corrections: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 2
    """Maximum number of times that the model writes another answer because a review found a problem."""

    tool_timeout_s: Seconds = 60.0
    """Time limit of tools without a time limit of their own, in seconds."""

    approval_timeout_s: Seconds = 604_800.0
    """Time that a call waits for a person's approval, in seconds. After this time, the people in ``escalate_to`` are
    asked. If ``escalate_to`` is empty, the call does not run.
    """

    approvers: Approvers = ()
    """People who may approve calls of tools that need approval: ids, and ``role:NAME``. A person whose message led to
    the call may not approve it. If the list is empty, readers of the thread and operators may approve.
    """

    approvals_needed: ApprovalsNeeded = 1
    """Number of different people who must approve a call."""

    escalate_to: Approvers = ()
    """Additional people who may decide after ``approval_timeout_s``. The call waits for the same time again after these
    people are asked.
    """

    requester_may_approve: bool = False
    """Whether approvers may approve a call that their own message led to."""

    model_timeout_s: Seconds = 300.0
    """Time limit of one attempt of a model call, in seconds. The limit includes the time of streaming."""

    model_attempts: Count = 3
    """Maximum attempts of one model call that fails with temporary errors."""

    hook_timeout_s: Seconds = 600.0
    """Time limit of one hook of middleware, in seconds. Time that the hook spends waiting for the run (``proceed``,
    ``around.complete``, the hub) does not count (`isolation.run_hook`).
    """

    hub_attempts: Count = 4
    """Maximum attempts of a tool's request to the hub while the hub answers ``rate_limited`` or ``overloaded``."""

    max_same_calls: Count = 3
    """Maximum number of times that a call with the same arguments runs while its result stays the same. Further
    calls are refused.
    """

    max_idle_turns: Count = 3
    """Maximum consecutive turns without effect. The turn after this number of turns is the last and has no tools. A
    turn has no effect if its reply was empty, cut off or sent to nobody. A turn also has no effect if no call ran,
    because each call was refused, unknown or unreadable.
    """

    max_messages_per_recipient: Count = 5
    """Maximum messages that the calls of one reaction send to one participant or channel. Messages beyond this maximum
    are refused. The answer and questions of ``ask`` do not count.
    """

    max_result_chars: Count = 16_000
    """Maximum characters of a tool's result. A longer result is cut off at this length, with a note."""

    max_depth: Count = 3
    """Maximum depth to which agents call each other as tools."""

    on_new_message: OnNewMessage = "queue"
    """Handling of messages that arrive in a thread during a reaction. ``queue``: each message gets its own reaction
    afterwards. ``inject``: the model reads them before its next turn, and they get no reaction.
    """

    on_text: OnText = "auto"
    """Use of text without a tool call."""

    prompt: PromptForm = "lean"
    """Form of the prompt."""

    max_threads: Annotated[int, Field(ge=1, le=MAX_THREADS)] = 50
    """Maximum number of threads that the prompt shows, including the thread of the trigger."""

    per_thread: PerThread = GrowingWindow(10, 30)
    """Number of messages that the prompt shows per thread: a fixed number of the last messages, or a window that
    grows.
    """

    max_parallel_reactions: Count = 8
    """Maximum number of reactions that run in parallel, each in its own thread. Reactions that only wait for other
    participants do not count.
    """
    message_filter: MessageFilter = ALL
    """Selects the messages of the conversation that the prompt shows, and their number per thread."""

    keep: KeptRecords = KeptRecords()
    """Records that the journal stores in addition to the records for resuming."""

    shows_standing: bool = True
    """Whether the prompt ends with the answers that the agent owes, the participants it waits for, and the rest of the
    conversation's budget. Nothing is added if none of these exist.
    """

    describe_turn: Annotated[Callable[[int, int], str], IN_CODE] = describe_turn

    initial_state: Annotated[Callable[[], Given[Mapping[str, object]]] | None, IN_CODE] = None
    should_continue: Annotated[Callable[[TurnState], Given[bool]] | None, IN_CODE] = None
    should_send_tools: Annotated[Callable[[TurnState], Given[bool]] | None, IN_CODE] = None
    """Returns whether a turn has tools. Without tools, a text reply still ends the reaction."""

    choose_model: Annotated[Callable[[TurnState], Given[Model | str | None]] | None, IN_CODE] = None
    """Returns the model of a turn, or a model's name on the server of the agent's own model. None selects the
    agent's own model.
    """

    choose_tool: Annotated[Callable[[TurnState], Given[str | None]] | None, IN_CODE] = None
    """Returns the name of the tool that a turn must call. None lets the model choose."""

    calculate_usage: Annotated[Callable[[TurnState, ModelReply], Given[Usage]] | None, IN_CODE] = None
    process_tool_calls: Annotated[
        Callable[[TurnState, Sequence[ToolCall]], Given[End | bool | None]] | None, IN_CODE
    ] = None
    on_tools_selected: Annotated[Callable[[TurnState, Sequence[ToolCall]], Given[None]] | None, IN_CODE] = None
    """Called with the calls of a reply before they run."""

    preprocess_arguments: Annotated[
        Callable[[TurnState, ToolCall], Given[str | Mapping[str, object] | BaseModel | None]] | None, IN_CODE
    ] = None
    after_tool: Annotated[Callable[[TurnState, ToolCall, ToolResult], Given[AfterTool | None]] | None, IN_CODE] = None
    on_no_tool_calls: Annotated[Callable[[TurnState, NoCallsReason], Given[str | End | None]] | None, IN_CODE] = None

    def __post_init__(self) -> None:
        """Refuse values that would fail, or be misread, only when a reaction uses them."""
        check_fields(self)
        check_enough(self.approvers, self.approvals_needed, self.escalate_to)
        for name in list_in_code(AgentPolicy):
            value = getattr(self, name)
            if not callable(value) and (value is not None or name == "describe_turn"):
                shown = truncate(repr(value), MAX_SHOWN_CHARS)
                problem = "must be a function. docs/middleware.md documents its arguments and result"
                raise ValueError(f"AgentPolicy: {name} is {shown} and {problem}")
            try:
                check_hook(name, value)
            except TypeError as error:
                raise ValueError(f"AgentPolicy: {error}") from None


def find_rule(own: ApprovalRule, policies: Iterable[AgentPolicy]) -> EffectiveRule:
    """Return the approval rule for a call. Fields that the tool's ``own`` rule omits come from the first policy that
    names approvers. If no policy names approvers, these fields come from the first policy.
    """
    all_policies = list(policies)
    policy = next((it for it in all_policies if it.approvers), all_policies[0])
    needed, may_approve = own.approvals_needed, own.requester_may_approve
    return EffectiveRule(
        approvers=tuple(own.approvers or policy.approvers),
        needed=policy.approvals_needed if needed is None else needed,
        escalate_to=tuple(own.escalate_to or policy.escalate_to),
        requester_may_approve=policy.requester_may_approve if may_approve is None else may_approve,
        timeout_s=own.approval_timeout_s or policy.approval_timeout_s,
    )


MAX_SHOWN_CHARS = 100
"""Maximum characters of a wrong value that an error quotes."""


APPROVALS = ("approvers", "approvals_needed", "escalate_to", "requester_may_approve")
_CHOICES = (
    "on_text",
    "on_new_message",
    "prompt",
    "message_filter",
    "keep",
    "shows_standing",
    *APPROVALS,
)  # in addition to the limits in a file


class AgentLimits(optional_form(AgentPolicy, without=_CHOICES)):  # type: ignore[misc]  # a base made here
    """The limits of `AgentPolicy` in a file. None keeps the default."""
