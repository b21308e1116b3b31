"""Format messages, events and tables for a terminal, for commands that show a conversation and for the demo.

`format_message` and `format_event` return plain lines, and `Screen` writes lines. Participants' text is sanitized, so
that it cannot move the cursor, change the title, or look like a line of the program. This module reads no input and
uses no network.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol, assert_never

from roundelay.connection import READER_ID
from roundelay.display.activity import describe_activity
from roundelay.display.text import break_lines, display_width, sanitize, sanitize_lines
from roundelay.network.addresses import conversation_of, short_address, thread_start
from roundelay.network.client import Event, Notice, Presence, Reconnected, Reconnecting, Signal
from roundelay.network.messages import BaseMessage

CONTINUED = "  | "
"""Prefix of every line of a message after the first. Without this prefix, a message could contain a line that looks
like another message.
"""

MAX_BESIDE, MAX_BESIDE_CHARS = 50, 300
"""Maximum number of entries below a message (sources, checks, suggested questions), and their maximum length in
characters."""

_NAME_COLORS = (32, 33, 34, 35, 36, 92, 94, 96)  # red is missing because it marks errors


_OPERATIONS = {
    f"that {READER_ID} may read": ("that you may read", "that you may read"),
    "network.list_agents lists": ("`roundelay agents` lists", "/agents lists"),
    "network.list_threads lists": ("`roundelay threads` lists", "/threads lists"),
    "network.info lists its mods": ("`roundelay status` lists its mods", "`roundelay status` lists its mods"),
    "network.list_tokens lists": ("`roundelay token list` lists", "`roundelay token list` lists"),
    "network.resume_root, root": ("`roundelay chat` and /resume", "/resume"),
    " seq must be the seq of a message.": (
        " `roundelay tail --last 20` shows their numbers.",
        " /history shows their numbers.",
    ),
}
"""Names of operations in the hub's sentences. Each has two replacements: one for commands, and one for the chat."""


def tell_person(sentence: str, *, in_chat: bool = False) -> str:
    """Replace the names of operations in a sentence of the hub with the commands that people use."""
    for operation, typed in _OPERATIONS.items():
        sentence = sentence.replace(operation, typed[in_chat])
    return sentence


class Writable(Protocol):
    """Methods of a text stream that this module needs."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


def wants_color(stream: object) -> bool:
    """Return whether to color the output. The stream must be a terminal with colors, and NO_COLOR must not be set
    (https://no-color.org).
    """
    isatty = getattr(stream, "isatty", None)
    is_terminal = bool(isatty is not None and isatty())
    return is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Paint:
    """Colors text. If colors are off, text stays unchanged."""

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on

    def dim(self, text: str) -> str:
        return self._wrap("2", text)

    def bold(self, text: str) -> str:
        return self._wrap("1", text)

    def green(self, text: str) -> str:
        return self._wrap("32", text)

    def yellow(self, text: str) -> str:
        return self._wrap("33", text)

    def red(self, text: str) -> str:
        return self._wrap("31", text)

    def name(self, agent_id: str) -> str:
        """Return a participant's id in color. An id has the same color everywhere."""
        # Do not use `hash`: it differs between processes, so an id would change its color at each start.
        color = _NAME_COLORS[zlib.crc32(agent_id.encode()) % len(_NAME_COLORS)]
        return self._wrap(f"1;{color}", sanitize(agent_id))

    def _wrap(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.is_on else text


PLAIN = Paint(is_on=False)


def format_time(at_ms: int) -> str:
    """Format a time as the local time of day."""
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC).astimezone():%H:%M:%S}"


def describe_place(to: str, thread_id: str) -> str:
    """Return the recipient in a short form, such as ``bob``, ``broadcast`` or ``channel:dev``.

    If the message is in a reply thread or a conversation, append its id.
    """
    place = short_address(to)
    if conversation := conversation_of(thread_id):
        return f"{place} in {conversation}"
    return f"{place} in {thread_id}" if thread_start(thread_id) is not None else place


def format_line(
    at_ms: int,
    seq: int,
    sender_id: str,
    place: str,
    text: str,
    *,
    reply_to: int | None = None,
    paint: Paint = PLAIN,
    width: int | None = None,
) -> str:
    """Return a message as ``12:03:05 #15 bob → mia (re #14): text``, with the other lines of its text below.

    With ``width``, this function breaks the text into lines. If the terminal broke the text, a message could forge a
    line of the program.
    """
    stamp, sender = f"{format_time(at_ms)} #{seq}", sanitize(sender_id)
    aim = f"→ {sanitize(place)}{f' (re #{reply_to})' if reply_to is not None else ''}:"
    lines = sanitize_lines(text)
    if width is not None:
        # Keep some columns for the text, even if the recipient's name is long and the terminal is narrow.
        room = max(width - display_width(f"{stamp} {sender} {aim} "), 8)
        lines = break_lines(lines, width - len(CONTINUED), first_width=room)
    first, *others = lines
    head = f"{paint.dim(stamp)} {paint.name(sender_id)} {paint.dim(aim)} {first}"
    return "\n".join([head, *(paint.dim(CONTINUED) + line for line in others)])


def format_message(
    message: BaseMessage, *, text: str | None = None, paint: Paint = PLAIN, width: int | None = None
) -> str:
    """Format a message as `format_line` does. ``text`` replaces the message's text."""
    place = describe_place(message.to, message.thread_id)
    return format_line(
        message.sent_at,
        message.seq,
        name_sender(message),
        place,
        "\n".join([message.text if text is None else text, *list_beside(message)]),
        reply_to=message.reply_to,
        paint=paint,
        width=width,
    )


def name_sender(message: BaseMessage) -> str:
    """Return the sender's name as shown on the screen. The name of a mod has the prefix ``mod:``."""
    is_from_mod = message.kind == "mod" and message.to.startswith("agent:")
    return f"mod:{message.sender_id}" if is_from_mod else message.sender_id


MAX_FAILURE_CHARS = 40


def list_beside(message: BaseMessage) -> list[str]:
    """Return the lines that are shown below a message's text. These lines are not sanitized.

    They show sources, failed and passed checks, the reason for a missing answer, and suggested questions.
    """
    failed, passed = (
        [_one_line(it) for it in _read_list(message, name) if isinstance(it, str)]
        for name in ("failed_checks", "passed_checks")
    )
    beside = [*_list_sources(message), *([f"! did not pass: {', '.join(failed)}"] if failed else [])]
    beside += [f"✓ passed: {', '.join(passed)}"] if passed else []
    if isinstance(why := (message.metadata or {}).get("failure"), str):
        beside.append(f"! no answer ({_one_line(why)[:MAX_FAILURE_CHARS]})")
    return beside + [f"? {_one_line(it)}" for it in _read_list(message, "follow_ups") if isinstance(it, str)]


def _list_sources(message: BaseMessage) -> list[str]:
    """Return the sources of an answer, one per line.

    Any participant may write this metadata, so entries in a wrong format are skipped.
    """
    return [
        " ".join([f"[{it['n']}]", *(_one_line(it[key]) for key in ("title", "url") if isinstance(it.get(key), str))])
        for it in _read_list(message, "sources")
        if isinstance(it, dict) and isinstance(it.get("n"), int)
    ]


def _read_list(message: BaseMessage, key: str) -> list[object]:
    found = (message.metadata or {}).get(key)
    # Limit the number of entries, which the sender chooses: a thousand entries would hide the conversation.
    return found[:MAX_BESIDE] if isinstance(found, list) else []


def _one_line(text: str) -> str:
    # Each entry must stay on one line: its first characters show whether a check failed, and a text must not imitate
    # them.
    return " ".join(text.split())[:MAX_BESIDE_CHARS]


def format_event(event: Event) -> str | None:
    """Describe an event on one line, without colors.

    Return None for events that need no line: the end of thinking, and events that `LiveActivity` shows.
    """
    match event:
        case Presence():
            return f"{sanitize(event.agent_id)} is {event.state}"
        case Signal():
            return _describe_signal(event)
        case Notice():
            return _describe_notice(event)
        case Reconnecting():
            return f"The connection is lost ({sanitize(event.reason).rstrip(': ')}); trying again"
        case Reconnected():
            return "Connected again"
        case _:
            assert_never(event)


def format_table(head: Sequence[str], rows: Iterable[Sequence[object]], *, paint: Paint = PLAIN) -> str:
    """Format a table whose columns are as wide as their longest cells. Lines have no trailing spaces."""
    cells = [[sanitize(str(cell)) for cell in row] for row in rows]
    widths = [max(map(display_width, column)) for column in zip(head, *cells, strict=True)]
    lines = [_pad(row, widths) for row in (list(head), *cells)]
    return "\n".join([paint.bold(lines[0]), *lines[1:]])


def format_participants(agents: Iterable[Mapping[str, object]], *, paint: Paint = PLAIN) -> str:
    """Format the result of ``network.list_agents`` as a table."""
    rows = []
    for agent in agents:
        card = agent.get("card")
        description = card.get("description", "") if isinstance(card, dict) else ""
        rows.append(
            (agent["agent_id"], agent["kind"], describe_activity(agent), " ".join(str(description).split())[:100])
        )
    return format_table(("ID", "KIND", "STATE", "DESCRIPTION"), rows, paint=paint)


def terminal_width(stream: object) -> int | None:
    """Return the number of columns of a terminal, or None for any other stream."""
    size = _terminal_size(stream)
    # Some programs report a width of 0 or 1 columns, which is too narrow for any output.
    return size.columns if size is not None and size.columns >= 20 else None


def terminal_height(stream: object) -> int | None:
    """Return the number of lines of a terminal, or None for any other stream."""
    size = _terminal_size(stream)
    return size.lines if size is not None and size.lines >= 4 else None


def _terminal_size(stream: object) -> os.terminal_size | None:
    fileno = getattr(stream, "fileno", None)
    try:
        return os.get_terminal_size(fileno()) if fileno is not None else None
    except (OSError, ValueError):
        return None


class StreamedText:
    """Breaks streamed text into lines of at most ``width`` columns, each with the prefix `CONTINUED`.

    A word is held back until it certainly fits on the line, except for the first word of a line. If ``width`` is None,
    lines are not broken.
    """

    def __init__(self, width: int | None) -> None:
        self._width = None if width is None else width - len(CONTINUED)
        self._line = ""
        self._shown = 0  # number of characters of the current line that were returned
        self._has_begun = False

    def add(self, text: str) -> str:
        """Add the next piece of text. Return the text to write now."""
        out = "" if self._has_begun else CONTINUED
        self._has_begun = True
        # Sanitize before measuring, because an escape sequence takes more columns than the character.
        first, *others = sanitize_lines(text)
        out += self._extend(first)
        for line in others:
            out += self.end() + f"\n{CONTINUED}"
            self._line, self._shown = "", 0
            out += self._extend(line)
        return out

    def end(self) -> str:
        """Return the text that is still held back, and end the line."""
        held, self._shown = self._line[self._shown :], len(self._line)
        return held

    def _extend(self, more: str) -> str:
        self._line += more
        if self._width is None:
            return self.end()
        *full, self._line = break_lines([self._line], self._width)
        out = ""
        for line in full:
            out += f"{line[self._shown :]}\n{CONTINUED}"
            self._shown = 0
        known = self._line.rfind(" ") + 1
        sure = known if known > 1 else len(self._line)
        held_from = max(self._shown, sure)
        out += self._line[self._shown : held_from]
        self._shown = held_from
        return out


class Screen:
    """Writes lines and flushes each line. On a terminal, lines are colored and broken at the terminal's width."""

    def __init__(self, stream: Writable, *, paint: Paint | None = None) -> None:
        self.stream = stream
        self.paint = paint if paint is not None else Paint(is_on=wants_color(stream))

    @property
    def width(self) -> int | None:
        """Width of the terminal in columns, or None if lines must not be broken."""
        return terminal_width(self.stream)

    def write(self, line: str) -> None:
        """Write a complete line. Participants' text in the line must already be sanitized."""
        self.stream.write(f"{line}\n")
        self.stream.flush()

    def message(self, message: BaseMessage, text: str | None = None) -> None:
        """Write a message. If given, ``text`` replaces the message's text."""
        self.write(format_message(message, text=text, paint=self.paint, width=self.width))

    def note(self, text: str) -> None:
        """Write a line from the program itself, for example about an event."""
        self.write("\n".join(map(self.paint.dim, self.fold([f"* {text}"]))))

    def error(self, text: str) -> None:
        """Write an error message."""
        self.write("\n".join(map(self.paint.red, self.fold([f"! {sanitize(text)}"]))))

    def fold(self, lines: Sequence[str]) -> list[str]:
        """Break sanitized lines at the terminal's width. All lines except the first get a prefix.

        With the prefix, no line can look like a line of the program.
        """
        width = self.width
        if width is not None:
            lines = break_lines(lines, width - len(CONTINUED), first_width=width)
        first, *others = lines
        return [first, *(CONTINUED + it for it in others)]

    def event(self, event: Event) -> None:
        line = format_event(event)
        if line is not None:
            self.note(line)


def _pad(row: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell + " " * (width - display_width(cell)) for cell, width in zip(row, widths, strict=True)]
    return "  ".join(padded).rstrip()


def _describe_signal(signal: Signal) -> str | None:
    if signal.kind not in ("thinking", "typing") or (
        isinstance(signal.body, dict) and signal.body.get("active") is False
    ):
        return None
    return f"{sanitize(signal.sender_id)} is {signal.kind} ({sanitize(signal.thread_id)})"


def _describe_notice(notice: Notice) -> str | None:
    body: Mapping[str, object] = notice.body if isinstance(notice.body, dict) else {}
    where = sanitize(notice.thread_id or "")
    match notice.kind:
        case "behind":
            return "Many messages are waiting and are being delivered"
        case "loop_stopped" | "budget_exhausted":
            reason = sanitize(str(body.get("reason", notice.kind)))
            if "root" not in body:
                return f"{sanitize(str(body.get('agent_id')))} was stopped in {where}: {reason}"
            reason = tell_person(reason, in_chat=True)
            return f"The conversation that began with #{body.get('root')} was stopped in {where}: {reason}"
        case "dead_letter":
            reason = f": {sanitize(str(body['reason']))}" if "reason" in body else ""
            return f"{sanitize(str(body.get('agent_id')))} could not handle #{body.get('seq')} and gave up{reason}"
        case "dead_letter_withdrawn":
            return f"{sanitize(str(body.get('agent_id')))} has handled #{body.get('seq')} after all"
        case "taken":
            return f"{sanitize(str(body.get('agent_id')))} has taken over {where}: agents are silent there until /give"
        case "given":
            return f"{sanitize(str(body.get('agent_id')))} gave {where} back: agents answer there again"
        case "damaged":
            return f"#{body.get('seq')} cannot be read: the hub's ledger is damaged there"
        case "draining":
            return "The hub is stopping"
        case "superseded":
            return "Another session has taken over"
        case _:
            return sanitize(notice.kind)
