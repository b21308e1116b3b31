"""Demo screen: shows each message under its thread, the agents' tool calls, and the summary.

The module only formats lines. It sanitizes all text of participants, makes no decisions and reads no data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from roundelay.display.screen import Screen
from roundelay.display.text import break_lines, sanitize, sanitize_lines
from roundelay.network.messages import BaseMessage
from roundelay.network.text import count

PLAIN_WIDTH = 96
"""Line width in columns for an output that is not a terminal."""
MAX_WIDTH = 110
BAR = "  │ "
SHOWN_CHARS = 60
"""Maximum number of characters of a tool's arguments or result."""


class DemoScreen(Screen):
    """`Screen` with a layout for a small number of messages and for new users."""

    @property
    def columns(self) -> int:
        """Line width in columns."""
        return min(self.width or PLAIN_WIDTH, MAX_WIDTH)

    def node(self, url: str) -> None:
        """Report that the node is running."""
        self._hang(
            f"{self.paint.bold('Roundelay')}: ", 11, [f"a node at {url} and three agents on WebSockets"], below=""
        )

    def member(self, agent_id: str, pid: int, description: str) -> None:
        """Report that an agent has joined."""
        padding, process = " " * (8 - len(agent_id)), f"process {pid:<8}"
        lead = f"  {self.paint.name(agent_id)}{padding} {self.paint.dim(process)} "
        self._hang(lead, len(f"  {agent_id}{padding} {process} "), [description])

    def message(self, message: BaseMessage, text: str | None = None) -> None:
        """Write a message with its thread. A bar precedes the text, so that no text can look like another message."""
        head = f"{self.paint.bold(f'#{message.seq}')} {self.paint.name(message.sender_id)} {_describe_aim(message)}"
        self.write(f"{head}   {self.paint.dim('in')} {self.paint.name(message.thread_id)}")
        bar = self.paint.dim(BAR)
        self._hang(bar, len(BAR), sanitize_lines(message.text), below=bar)
        self.write("")

    def tool_call(self, agent_id: str, tool: str, arguments: str, result: str) -> None:
        """Write a tool call with its result."""
        call = sanitize(f"{tool}({_describe_arguments(arguments)}) → {_shorten(result)}")
        self._hang(f"  {self.paint.name(agent_id)} ", 3 + len(agent_id), [call], paint=self.paint.dim)
        self.write("")

    def incident(self, text: str) -> None:
        """Show an incident of an agent's process, such as a kill or a restart."""
        mark = self.paint.yellow("! ")
        self._hang(mark, 2, [sanitize(text)], paint=self.paint.yellow, below=mark)
        self.write("")

    def summary(self, threads: Mapping[str, int], turns: int, tool_calls: int, duration_s: float) -> None:
        """Write the totals of a run. ``threads`` counts the messages of each thread."""
        said = f"{count(sum(threads.values()), 'message')} in {count(len(threads), 'thread')}"
        done = f"{count(turns, 'turn')}, {count(tool_calls, 'tool call')}"
        self.write(self.paint.bold(f"{said}, {done}, {duration_s:.1f} s"))
        counts = ", ".join(f"{sanitize(thread_id)} {number}" for thread_id, number in threads.items())
        self._hang(self.paint.dim("  threads   "), 12, [counts], paint=self.paint.dim)
        self.write("")

    def suggest(self, title: str, commands: Sequence[tuple[str, str]]) -> None:
        """Write commands to try, with a description of each."""
        self.write(self.paint.bold(title))
        width = max(len(purpose) for purpose, _ in commands)
        fits = all(len(f"  {' ' * width}   {command}") <= self.columns for _, command in commands)
        between = "   " if fits else "\n      "  # a command on a separate line can be copied from a terminal
        for purpose, command in commands:
            self.write(f"  {self.paint.dim(purpose.ljust(width) if fits else purpose)}{between}{command}")

    def _hang(
        self,
        lead: str,
        width: int,
        lines: Sequence[str],
        *,
        paint: Callable[[str], str] = str,
        below: str | None = None,
    ) -> None:
        """Write lines after a lead of ``width`` columns, wrapped at the line width. The lines after the first begin
        with ``below``, or with spaces if it is None.
        """
        for number, line in enumerate(break_lines(lines, max(self.columns - width, 20))):
            self.write(f"{(lead if number == 0 else ' ' * width if below is None else below)}{paint(line)}")


def _describe_aim(message: BaseMessage) -> str:
    if message.thread_id.startswith("thread:"):
        return f"replies to #{message.reply_to}"
    place = "everyone" if message.to == "broadcast" else sanitize(message.to.removeprefix("agent:"))
    return f"→ {place}"


def _describe_arguments(arguments: str) -> str:
    try:
        values = json.loads(arguments)
    except ValueError:
        return _shorten(arguments)
    if not isinstance(values, dict):
        return _shorten(arguments)
    return ", ".join(f"{name}={_shorten(json.dumps(value, ensure_ascii=False))}" for name, value in values.items())


def _shorten(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 1]}…"
