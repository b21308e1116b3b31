"""How the demo looks: each message under its thread, what agents do between messages, and the summary.

Takes facts and writes lines; whatever a participant wrote goes through `clean`. It decides nothing and asks nothing.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from roundelay.clean_text import break_lines, clean, clean_lines
from roundelay.network.messages import BaseMessage
from roundelay.terminal import Screen

PLAIN_WIDTH = 96
"""Where lines are broken when the output is no terminal."""
MAX_WIDTH = 110
BAR = "  │ "
SHOWN_CHARS = 60
"""Of a tool's argument or result."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What a run came to, as its ledger has it."""

    messages_per_thread: Mapping[str, int]
    turns: int
    tool_calls: int
    deliveries: int
    """How many were measured: from the hub's stamp to the recipient's process."""
    median_ms: float
    slowest_ms: float
    duration_s: float


class DemoScreen(Screen):
    """A `Screen` with the demo's own layout, for few messages and a reader who sees them for the first time."""

    @property
    def columns(self) -> int:
        """Where lines are broken."""
        return min(self.width or PLAIN_WIDTH, MAX_WIDTH)

    def node(self, url: str) -> None:
        """The node is up."""
        name = "Roundelay"
        first, *others = self._break([f"{name}: a node at {url} and three agents on WebSockets"], 0)
        self.write("\n".join([self.paint.bold(name) + first.removeprefix(name), *others]))

    def member(self, agent_id: str, pid: int, description: str) -> None:
        """An agent is there."""
        padding = " " * (8 - len(agent_id))
        process = f"process {pid:<8}"
        indent = len(f"  {agent_id}{padding} {process} ")
        first, *others = self._break([description], indent)
        self.write(f"  {self.paint.name(agent_id)}{padding} {self.paint.dim(process)} {first}")
        for line in others:
            self.write(" " * indent + line)

    def message(self, message: BaseMessage) -> None:
        """A message with its thread, its text behind a bar so that no text can pass for another message."""
        head = f"{self.paint.bold(f'#{message.seq}')} {self.paint.name(message.sender_id)} {_describe_aim(message)}"
        self.write(f"{head}   {self.paint.dim('in')} {self.paint.name(message.thread_id)}")
        for line in self._break(clean_lines(message.text), len(BAR)):
            self.write(f"{self.paint.dim(BAR)}{line}")
        self.write("")

    def tool_call(self, agent_id: str, tool: str, arguments: str, result: str) -> None:
        """A tool that an agent called, with what came out."""
        call = f"{tool}({_describe_arguments(arguments)}) → {_shorten(result)}"
        for number, line in enumerate(self._break([clean(call)], 4 + len(agent_id))):
            lead = f"  {self.paint.name(agent_id)} " if number == 0 else " " * (4 + len(agent_id))
            self.write(lead + self.paint.dim(line))
        self.write("")

    def incident(self, text: str) -> None:
        """What happened to an agent's process."""
        for line in self._break([clean(text)], 2):
            self.write(self.paint.yellow(f"! {line}"))
        self.write("")

    def summary(self, totals: Totals) -> None:
        """What the run came to."""
        threads = totals.messages_per_thread
        head = (
            f"{sum(threads.values())} messages in {len(threads)} threads, {totals.turns} turns, {totals.tool_calls} tool calls, "
            f"{totals.duration_s:.1f} s"
        )
        self.write(self.paint.bold(head))
        facts = [
            f"threads   {', '.join(f'{clean(thread_id)} {number}' for thread_id, number in threads.items())}",
            f"delivery  p50 {_describe_delay(totals.median_ms)}, slowest {_describe_delay(totals.slowest_ms)}, from the hub's stamp to the "
            f"recipient's process, the commit to disk included; {totals.deliveries} measured",
        ]
        for line in self._break(facts, 2, " " * 10):
            self.write(self.paint.dim(f"  {line}"))
        self.write("")

    def suggest(self, title: str, commands: Sequence[tuple[str, str]]) -> None:
        """Commands to try: what each does, and the command."""
        self.write(self.paint.bold(title))
        width = max(len(purpose) for purpose, _ in commands)
        fits = all(len(f"  {' ' * width}   {command}") <= self.columns for _, command in commands)
        between = "   " if fits else "\n      "  # each in one row, where a terminal lets one copy it
        for purpose, command in commands:
            self.write(f"  {self.paint.dim(purpose.ljust(width) if fits else purpose)}{between}{command}")

    def _break(self, lines: Iterable[str], indent: int, hanging: str = "") -> list[str]:
        width = max(self.columns - indent, 20)
        pieces = [piece for line in lines for piece in textwrap.wrap(line, width, subsequent_indent=hanging) or [""]]
        return break_lines(pieces, width)  # which knows the characters that take two columns


def _describe_aim(message: BaseMessage) -> str:
    if message.thread_id.startswith("thread:"):
        return f"replies to #{message.reply_to}"
    place = "everyone" if message.to == "broadcast" else clean(message.to.removeprefix("agent:"))
    return f"→ {place}"


def _describe_arguments(arguments: str) -> str:
    try:
        values = json.loads(arguments)
    except ValueError:
        return _shorten(arguments)
    if not isinstance(values, dict):
        return _shorten(arguments)
    return ", ".join(f"{name}={_shorten(json.dumps(value, ensure_ascii=False))}" for name, value in values.items())


def _describe_delay(delay_ms: float) -> str:
    return "under 1 ms" if delay_ms < 1 else f"{delay_ms:.0f} ms"


def _shorten(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 1]}…"
