"""What shapes a reaction: limits, and the choices that an agent's author makes. Plain data and small callables, no
IO."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, assert_never, get_args

from .message_filter import ALL, MAX_PER_THREAD, MessageFilter

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

MAX_THREADS = 100
"""Beside the incoming one, that the hub looks for (`network.window`)."""


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

    hook_timeout_s: float = 600.0
    """For one hook of middleware, by itself: what it awaits of the run (``proceed``, ``around.complete``, the hub) has
    limits of its own and is not counted (`hook_time`)."""

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
        """Refuse what would fail, or be taken for something else, only when a reaction comes to it."""
        for name, choices in (("on_text", get_args(OnText)), ("on_new_message", get_args(OnNewMessage))):
            if getattr(self, name) not in choices:
                raise self._wrong(name, f"must be one of {', '.join(choices)}")
        for name, (least, most) in COUNTS.items():
            value = getattr(self, name)
            if name == "max_tool_calls" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise self._wrong(name, f"must be a whole number, at least {least}")
            if not least <= value <= most:
                raise self._wrong(name, f"must be at least {least}" if value < least else f"must be at most {most}")
        for name in TIMES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise self._wrong(name, "must be a number of seconds; math.inf is no limit")
            if not value > 0:  # nor what is no number
                raise self._wrong(name, "must be more than 0")
        if isinstance(self.uncounted_tools, str):
            raise self._wrong("uncounted_tools", f'must be a list: write ["{self.uncounted_tools}"]')
        for name in _CALLABLES:
            value = getattr(self, name)
            if not callable(value) and (value is not None or name == "describe_turn"):
                raise self._wrong(name, "must be a function; docs/agents.md says of what and what it gives")

    def sends_text(self, *, is_awaited: bool) -> bool:
        """Whether text without a tool call goes to the incoming thread; ``is_awaited``: somebody waits for an answer
        there."""
        match self.on_text:
            case "reply":
                return True
            case "auto" | "nudge":
                return is_awaited
            case "record":
                return False
            case other:
                assert_never(other)

    def _wrong(self, name: str, problem: str) -> ValueError:
        shown = repr(getattr(self, name))
        shown = shown if len(shown) <= MAX_SHOWN_CHARS else f"{shown[:MAX_SHOWN_CHARS]}..."
        return ValueError(f"AgentPolicy: {name} is {shown} and {problem}")


MAX_SHOWN_CHARS = 100
MAX_COUNT = 1_000_000

COUNTS = {
    **dict.fromkeys(
        ("max_turns", "max_tool_calls_per_turn", "max_tool_calls", "model_attempts", "hub_attempts", "max_same_calls",
         "max_result_chars", "max_depth", "max_parallel_reactions"),
        (1, MAX_COUNT),
    ),
    "max_corrections": (0, MAX_COUNT),
    "max_threads": (1, MAX_THREADS),
    "per_thread": (1, MAX_PER_THREAD),
}  # fmt: skip
"""What a count may be, from and to."""

TIMES = ("tool_timeout_s", "approval_timeout_s", "model_timeout_s", "hook_timeout_s")
_CALLABLES = (
    "describe_turn", "initial_state", "should_continue", "should_send_tools", "choose_model", "choose_tool", "calculate_usage",
    "process_tool_calls", "on_tools_selected", "preprocess_arguments", "after_tool", "on_no_tool_calls",
)  # fmt: skip
