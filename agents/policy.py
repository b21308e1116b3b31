"""What shapes a reaction: limits, and the choices that an agent's author makes. Plain data and small callables, no
IO."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from .message_filter import ALL, MessageFilter

if TYPE_CHECKING:
    from .middleware import AfterTool, End, NoCallsReason
    from .models.model import Model, ModelReply, ToolCall, Usage
    from .steps import TurnState
    from .tools import ToolResult

OnText = Literal["auto", "reply", "nudge", "record"]
"""What happens to text without a tool call: it is sent to the incoming thread when a person wrote the trigger or a
response is required of this agent, else only recorded (``auto``); always sent (``reply``); the model is told to use a
tool, and the closing answer is treated as by ``auto`` (``nudge``); only recorded (``record``)."""

OnNewMessage = Literal["queue", "inject"]


def describe_turn(turn: int, max_turns: int) -> str:
    """Give the facts of a turn that trail the history of a model call. They change every turn, so they never stand
    before it."""
    if turn < max_turns:
        return f"Turn {turn} of {max_turns}."
    return f"Turn {turn} of {max_turns}, the last one: no tools any more. Write your closing answer as plain text now."


@dataclass(frozen=True, slots=True)
class AgentPolicy:
    """Limits and choices of an agent; the defaults suit a conversation. Counts are at least 1, times are in seconds.

    The callables are pure: a resumed reaction asks them again. What each may give stands at the method of that name in
    `Middleware`.
    """

    max_turns: int = 10
    """Model calls of one reaction. The last has no tools, so that a reaction ends with an answer."""

    max_tool_calls_per_turn: int = 16
    """Further calls of a turn are answered with this limit, not run."""

    max_tool_calls: int | None = None
    """Once so many calls were run in a reaction, its next turn is the last."""

    uncounted_tools: Collection[str] = ()
    """Tools whose calls do not count in ``max_tool_calls``."""

    max_corrections: int = 2
    """How often the model is asked for another answer when a review finds one wrong."""

    tool_timeout_s: float = 60.0
    """For tools that name no time of their own."""

    approval_timeout_s: float = 604_800.0
    """How long a call waits for a person's approval; then it is not made."""

    model_timeout_s: float = 300.0
    """For one attempt of a model call, streamed or not."""

    model_attempts: int = 3
    """How often one model call is tried while it fails in a way that may pass."""

    hub_attempts: int = 4
    """How often a tool's request to the hub is tried while it answers ``rate_limited`` or ``overloaded``."""

    max_same_calls: int = 3
    """How often one call with the same arguments is run while its result stays the same; then it is answered so."""

    max_result_chars: int = 16_000
    """A tool's longer result is cut there, and says so."""

    max_depth: int = 3
    """How deep agents may call each other as tools."""

    on_new_message: OnNewMessage = "queue"
    """What becomes of messages that arrive in a thread while a reaction to an earlier one runs: each gets its own after
    it (``queue``), or the model reads them before its next turn, and they get none (``inject``)."""

    on_text: OnText = "auto"
    max_threads: int = 20
    per_thread: int = 10
    max_parallel_reactions: int = 8
    message_filter: MessageFilter = ALL
    """Which messages of the conversation the prompt shows, and how many of each thread."""

    describe_turn: Callable[[int, int], str] = describe_turn

    initial_state: Callable[[], Mapping[str, object]] | None = None
    should_continue: Callable[[TurnState], bool] | None = None
    should_send_tools: Callable[[TurnState], bool] | None = None
    """Whether a turn has tools; without them a reply in text still ends the reaction."""

    choose_model: Callable[[TurnState], Model | None] | None = None
    """The model of a turn, None for the agent's own."""

    choose_tool: Callable[[TurnState], str | None] | None = None
    """The tool that a turn must call, None for the model's choice."""

    calculate_usage: Callable[[TurnState, ModelReply], Usage] | None = None
    process_tool_calls: Callable[[TurnState, Sequence[ToolCall]], End | bool | None] | None = None
    on_tools_selected: Callable[[TurnState, Sequence[ToolCall]], None] | None = None
    """Told of the calls of a reply before they are run."""

    preprocess_arguments: Callable[[TurnState, ToolCall], str] | None = None
    after_tool: Callable[[TurnState, ToolCall, ToolResult], AfterTool | None] | None = None
    on_no_tool_calls: Callable[[TurnState, NoCallsReason], str | End | None] | None = None

    def __post_init__(self) -> None:
        for name, choices in (("on_text", get_args(OnText)), ("on_new_message", get_args(OnNewMessage))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r} and must be one of {', '.join(choices)}")
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)} and must be at least 1")
        if self.max_tool_calls is not None and self.max_tool_calls < 1:
            raise ValueError(f"max_tool_calls is {self.max_tool_calls} and must be at least 1")
        if isinstance(self.uncounted_tools, str):
            raise ValueError(f'uncounted_tools is a text: write ["{self.uncounted_tools}"]')
        if self.max_corrections < 0:
            raise ValueError(f"max_corrections is {self.max_corrections} and must be at least 0")
        for name in ("tool_timeout_s", "approval_timeout_s", "model_timeout_s"):
            if not getattr(self, name) > 0:  # nor what is no number
                raise ValueError(f"{name} is {getattr(self, name)} and must be more than 0")


_COUNTS = (
    "max_turns", "max_tool_calls_per_turn", "model_attempts", "hub_attempts", "max_same_calls", "max_result_chars", "max_depth",
    "max_threads", "per_thread", "max_parallel_reactions",
)  # fmt: skip
