"""Choices of an agent's author: limits, the messages that enter the prompt, and functions that the loop calls.

Plain data and small callables, no IO. The bounds of each limit stand once, in its annotation: `AgentPolicy` checks what
a program gives, `AgentLimits` what a file gives. A `MessageFilter` applies to the window of the conversation that the
hub returned (`prompt`); the incoming message is always shown.
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
"""Result of a hook, returned directly or awaited."""

MAX_PER_THREAD = 499
"""Maximum messages of a thread in a prompt. The hub returns at most 500, and one may be the incoming message."""

Kind = Literal["direct", "broadcast", "channel", "mod"]

SPARE = 4
"""A filter that leaves messages out gets this many times more messages to choose from."""


_Shown = Annotated[int, Field(ge=1, le=MAX_PER_THREAD)]


@dataclass(frozen=True, slots=True)
class GrowingWindow:
    """Shows the last messages of a thread, at least ``least``. The window grows to ``most`` messages; the next message
    cuts it back to ``least``.

    Between two cuts each prompt begins like the one before, so that a provider's cache applies. With a window of a
    fixed size, each prompt begins with another message.
    """

    least: _Shown
    most: _Shown

    def __post_init__(self) -> None:
        check_fields(self)
        if self.least >= self.most:
            raise ValueError(f"must have a least below its most, not {self.least} and {self.most}")

    def count_shown(self, total: int) -> int:
        """Return how many of this number of messages are shown. Depends on the number alone."""
        if total <= self.most:
            return total
        # A function of the number alone: a resumed reaction, and every machine, cuts at the same messages.
        return self.least + (total - self.least) % (self.most - self.least + 1)


def _tell_apart(value: object) -> str:
    return "growing" if isinstance(value, dict | GrowingWindow) else "fixed"


_Growing = Annotated[GrowingWindow, Tag("growing")]
PerThread = Annotated[Annotated[_Shown, Tag("fixed")] | _Growing, Discriminator(_tell_apart)]
"""Number of messages shown of a thread: fixed, or a window that grows."""

_OrNone = Annotated[Annotated[int, Field(ge=0, le=MAX_PER_THREAD), Tag("fixed")] | _Growing, Discriminator(_tell_apart)]


def count_most(per_thread: PerThread) -> int:
    """Return the maximum number of messages of a thread that are shown."""
    return per_thread.most if isinstance(per_thread, GrowingWindow) else per_thread


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """Selects the messages of the conversation that a prompt shows. Empty ``kinds`` and ``senders`` mean all; a sender
    is an id or a pattern (``build-*``). ``exclude_senders`` goes first.

    ``per_thread`` sets the number of messages for threads whose id fits a pattern (``channel:*``), 0 for none. The
    first matching pattern counts; without one, the agent's own ``per_thread``.
    """

    kinds: Annotated[Collection[str], InFile(tuple[Kind, ...])] = ()
    senders: Annotated[Collection[str], InFile(tuple[Text, ...])] = ()
    exclude_senders: Annotated[Collection[str], InFile(tuple[Text, ...])] = ()
    per_thread: Annotated[Mapping[str, PerThread], InFile(dict[Text, _OrNone])] = field(default_factory=dict)
    failures: bool = True
    """Whether messages are shown that say that an agent has no answer (``failure`` in their metadata)."""

    def __post_init__(self) -> None:
        check_fields(self)

    def admits(self, message: BaseMessage, reader: str) -> bool:
        """Return whether an agent may be shown a message. Its own messages may be shown unless they are excluded."""
        if self.kinds and message.kind not in self.kinds:
            return False
        if not self.failures and isinstance((message.metadata or {}).get(FAILURE), str):
            return False
        if _fits(message.sender_id, self.exclude_senders):
            return False
        return not self.senders or message.sender_id == reader or _fits(message.sender_id, self.senders)

    def find_for(self, thread_id: str, usual: PerThread) -> PerThread:
        """Return how many messages of a thread are shown."""
        return next((count for pattern, count in self.per_thread.items() if fnmatchcase(thread_id, pattern)), usual)

    def count_to_ask(self, usual: PerThread) -> int:
        """Return how many messages of each thread to ask the hub for."""
        max_shown = max(map(count_most, (usual, *self.per_thread.values())))
        is_choosing = self.kinds or self.senders or self.exclude_senders or not self.failures
        return min(max_shown * SPARE if is_choosing else max_shown, MAX_PER_THREAD)


ALL = MessageFilter()


def _fits(sender_id: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(sender_id, pattern) for pattern in patterns)


OnText = Literal["auto", "reply", "nudge", "record"]
"""Use of text without a tool call.

``auto``: it is sent to the incoming thread if a person wrote the trigger or a response is required of this agent;
otherwise it is only recorded. ``reply``: it is always sent. ``nudge``: the model reads that it must use a tool, and its
closing answer is treated as by ``auto``. ``record``: it is only recorded.
"""

OnNewMessage = Literal["queue", "inject"]


@dataclass(frozen=True, slots=True)
class KeptRecords:
    """Records that the journal keeps beside those that resuming needs: the ``thinking`` of models, if their provider
    returns it; the ``progress`` that calls report; the exact ``prompt`` of each turn."""

    thinking: bool = False
    progress: bool = False
    prompt: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


MAX_THREADS = 100
"""Maximum number of threads beside the incoming one that the hub looks for (`network.window`)."""


def describe_turn(turn: int, max_turns: int) -> str:
    """Return the facts of a turn, the end of each model call. They change every turn, so they never come before the
    history. The rule for answering follows them."""
    if turn < max_turns:
        return f"Turn {turn} of {max_turns}."
    return f"Turn {turn} of {max_turns}, the last one: no tools any more."


@dataclass(frozen=True, slots=True)
class AgentPolicy:
    """Limits and choices of an agent; the defaults suit a conversation. Counts are at least 1, times are in seconds.

    The callables are pure: a resumed reaction calls them again. The method of the same name in `Middleware` documents
    what each returns. All but ``describe_turn`` may be coroutines.
    """

    max_turns: Count = 30
    """Maximum model calls of one reaction. The last has no tools, so that a reaction ends with an answer."""

    max_tool_calls_per_turn: Count = 16
    """Maximum calls of a turn that run. Further ones are answered with this limit."""

    max_tool_calls: Count | None = None
    """Maximum calls of a reaction. After the turn that reaches it, the next turn is the last."""

    uncounted_tools: Annotated[Collection[str], InFile(tuple[Text, ...])] = ()
    """Tools whose calls do not count in ``max_tool_calls``."""

    max_corrections: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 2
    """Maximum number of times that the model writes another answer because a review found a problem."""

    tool_timeout_s: Seconds = 60.0
    """Time limit of tools that name none, in seconds."""

    approval_timeout_s: Seconds = 604_800.0
    """Time that a call waits for a person's approval, in seconds. Then ``escalate_to`` is asked, or the call does not
    run."""

    approvers: Approvers = ()
    """People who may approve calls of tools that need approval: ids, and ``role:NAME``. Only they decide, and none
    whose message led to the call. Empty: readers of the thread, and operators."""

    approvals_needed: ApprovalsNeeded = 1
    """Number of different people who have to approve a call."""

    escalate_to: Approvers = ()
    """People who may decide too after ``approval_timeout_s``. The call then waits for the same time again."""

    requester_may_approve: bool = False
    """Whether an approver may approve a call that the approver's own message led to."""

    model_timeout_s: Seconds = 300.0
    """Time limit of one attempt of a model call, streamed or not, in seconds."""

    model_attempts: Count = 3
    """Maximum attempts of one model call while it fails in a way that may pass."""

    hook_timeout_s: Seconds = 600.0
    """Time limit of one hook of middleware, in seconds. What the hook awaits of the run (``proceed``,
    ``around.complete``, the hub) has limits of its own and does not count (`isolation.run_hook`)."""

    hub_attempts: Count = 4
    """Maximum attempts of a tool's request to the hub while the hub answers ``rate_limited`` or ``overloaded``."""

    max_same_calls: Count = 3
    """Maximum number of times that a call with the same arguments runs while its result stays the same. Then it is
    refused."""

    max_idle_turns: Count = 3
    """Maximum turns in a row without effect. The next turn is the last, without tools. A turn has no effect if its
    reply was empty, cut or sent to nobody, or if none of its calls ran: refused, unknown, or with unreadable arguments.
    """

    max_messages_per_recipient: Count = 5
    """Maximum messages that the calls of one reaction send to one participant or channel. More are refused. The answer
    and questions of ``ask`` do not count."""

    max_result_chars: Count = 16_000
    """Maximum characters of a tool's result. A longer one is cut there, with a note."""

    max_depth: Count = 3
    """Maximum depth to which agents call each other as tools."""

    on_new_message: OnNewMessage = "queue"
    """Use of messages that arrive in a thread during a reaction. ``queue``: each gets its own reaction afterwards.
    ``inject``: the model reads them before its next turn, and they get none."""

    on_text: OnText = "auto"
    """Use of text without a tool call."""

    max_threads: Annotated[int, Field(ge=1, le=MAX_THREADS)] = 50
    """Maximum number of threads that the prompt shows, the incoming one included."""

    per_thread: PerThread = GrowingWindow(10, 30)
    """Number of messages of each thread that the prompt shows: a fixed number of the last, or a window that grows."""

    max_parallel_reactions: Count = 8
    """Maximum number of reactions that run at once, each in its own thread. Reactions that only wait for others do not
    count."""
    message_filter: MessageFilter = ALL
    """Which messages of the conversation the prompt shows, and how many of each thread."""

    keep: KeptRecords = KeptRecords()
    """Records that the journal keeps beside those that resuming needs."""

    describe_turn: Annotated[Callable[[int, int], str], IN_CODE] = describe_turn

    initial_state: Annotated[Callable[[], Given[Mapping[str, object]]] | None, IN_CODE] = None
    should_continue: Annotated[Callable[[TurnState], Given[bool]] | None, IN_CODE] = None
    should_send_tools: Annotated[Callable[[TurnState], Given[bool]] | None, IN_CODE] = None
    """Returns whether a turn has tools. Without them a reply in text still ends the reaction."""

    choose_model: Annotated[Callable[[TurnState], Given[Model | str | None]] | None, IN_CODE] = None
    """Returns the model of a turn, or its name on the server of the agent's own model, or None for that one."""

    choose_tool: Annotated[Callable[[TurnState], Given[str | None]] | None, IN_CODE] = None
    """Returns the tool that a turn must call, or None for the model's choice."""

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
        """Refuse values that would fail, or be misread, only once a reaction uses them."""
        check_fields(self)
        check_enough(self.approvers, self.approvals_needed, self.escalate_to)
        for name in list_in_code(AgentPolicy):
            value = getattr(self, name)
            if not callable(value) and (value is not None or name == "describe_turn"):
                shown = truncate(repr(value), MAX_SHOWN_CHARS)
                problem = "must be a function; docs/middleware.md says of what and what it gives"
                raise ValueError(f"AgentPolicy: {name} is {shown} and {problem}")
            try:
                check_hook(name, value)
            except TypeError as error:
                raise ValueError(f"AgentPolicy: {error}") from None


def find_rule(own: ApprovalRule, policies: Iterable[AgentPolicy]) -> EffectiveRule:
    """Return the approval rule for a call. Parts that the tool's ``own`` rule leaves out come from the first of the
    ``policies`` that names approvers, or from the first one."""
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
_CHOICES = ("on_text", "on_new_message", "message_filter", "keep", *APPROVALS)  # beside the limits in a file


class AgentLimits(optional_form(AgentPolicy, without=_CHOICES)):  # type: ignore[misc]  # a base made here
    """The limits of `AgentPolicy` in a file; None keeps the default."""
