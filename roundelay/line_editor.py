"""The line that a person types below a conversation: keys in, finished lines out, and what of it is to be seen.

`LineEditor` is pure: it takes what the terminal sent and never reads, draws or waits; `typed_lines` does that (`chat` uses it). A
pasted text stays one line, whatever line breaks it has: each line is a message, and each message may wake agents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roundelay.clean_text import TAB, clean, display_width

MAX_HISTORY = 500
LINE_BREAK = "⏎"
"""Shows a line break inside the line."""


@dataclass(frozen=True, slots=True)
class Line:
    """Enter was pressed."""

    text: str


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Ctrl-C on an empty line; on another it only empties it."""


@dataclass(frozen=True, slots=True)
class EndOfInput:
    """Ctrl-D on an empty line."""


Key = Line | Interrupt | EndOfInput


class LineEditor:
    """One line with its cursor, and those before it."""

    def __init__(self) -> None:
        self._chars: list[str] = []
        self._at = 0
        self._history: list[str] = []
        self._shown = 0  # which of the history is in the line; its length: none
        self._draft = ""
        self._sequence = ""  # an escape sequence that has begun
        self._is_pasting = False
        self._last = ""  # the character before

    @property
    def text(self) -> str:
        return "".join(self._chars)

    def feed(self, data: str) -> list[Key]:
        """Take what was typed or pasted; gives what came of it, in order. An escape sequence may be cut anywhere."""
        keys: list[Key] = []
        for char in data:
            last, self._last = self._last, char
            if self._sequence:
                self._sequence += char
                if _is_complete(self._sequence):
                    sequence, self._sequence = self._sequence, ""
                    self._take_sequence(sequence)
            elif char == "\x1b":
                self._sequence = char
            elif self._is_pasting:
                if char != "\n" or last != "\r":  # one line break, however it is written
                    self._insert("\n" if char == "\r" else char)
            else:
                key = self._take_char(char)
                if key is not None:
                    keys.append(key)
        return keys

    def view(self, width: int) -> tuple[str, int]:
        """The part of the line around the cursor that fits into ``width`` columns, and the cursor's column in it."""
        shown = [LINE_BREAK if char == "\n" else TAB if char == "\t" else clean(char) for char in self._chars]
        widths = [display_width(piece) for piece in shown]
        start = self._at
        room = max(width - 1, 1)  # the cursor stands in a column of its own
        while start > 0 and widths[start - 1] <= room:
            room -= widths[start - 1]
            start -= 1
        end = self._at
        while end < len(shown) and widths[end] <= room:
            room -= widths[end]
            end += 1
        return "".join(shown[start:end]), sum(widths[start : self._at])

    def _take_char(self, char: str) -> Key | None:
        match char:
            case "\r" | "\n":
                return self._finish()
            case "\x03":
                is_empty = not self._chars
                self._set("")
                return Interrupt() if is_empty else None
            case "\x04":
                if not self._chars:
                    return EndOfInput()
                self._delete(self._at, self._at + 1)
            case "\x7f" | "\x08":
                self._delete(self._at - 1, self._at)
            case _ if char in _CONTROLS:
                _CONTROLS[char](self)
            case _ if char == "\t" or char.isprintable() or ord(char) >= 0xA0:
                self._insert(char)
            case _:
                return None
        return None

    def _take_sequence(self, sequence: str) -> None:
        if sequence == "\x1b[200~":
            self._is_pasting = True
        elif sequence == "\x1b[201~":
            self._is_pasting = False
        elif sequence in _SEQUENCES and not self._is_pasting:
            _SEQUENCES[sequence](self)

    def _finish(self) -> Line:
        text = self.text
        if text.strip() and (not self._history or self._history[-1] != text):
            self._history = [*self._history, text][-MAX_HISTORY:]
        self._set("")
        self._shown = len(self._history)
        return Line(text)

    def _insert(self, char: str) -> None:
        self._chars.insert(self._at, char)
        self._at += 1

    def _delete(self, start: int, end: int) -> None:
        start = max(start, 0)
        del self._chars[start:end]
        self._at = min(start, len(self._chars))

    def _set(self, text: str) -> None:
        self._chars = list(text)
        self._at = len(self._chars)

    def _move(self, to: int) -> None:
        self._at = min(max(to, 0), len(self._chars))

    def _delete_word(self) -> None:
        start = self._at
        while start > 0 and self._chars[start - 1].isspace():
            start -= 1
        while start > 0 and not self._chars[start - 1].isspace():
            start -= 1
        self._delete(start, self._at)

    def _recall(self, step: int) -> None:
        if not 0 <= self._shown + step <= len(self._history):
            return
        if self._shown == len(self._history):
            self._draft = self.text
        self._shown += step
        self._set(self._draft if self._shown == len(self._history) else self._history[self._shown])


def _is_complete(sequence: str) -> bool:
    """Whether an escape sequence has its end: ECMA-48, 5.4 (``ESC [`` parameters, final byte), or two or three characters."""
    if sequence.startswith("\x1b["):
        return len(sequence) > 2 and "@" <= sequence[-1] <= "~"
    return len(sequence) == 3 if sequence.startswith("\x1bO") else len(sequence) == 2


_Edit = Callable[[LineEditor], None]


def _left(editor: LineEditor) -> None:
    editor._move(editor._at - 1)


def _right(editor: LineEditor) -> None:
    editor._move(editor._at + 1)


def _home(editor: LineEditor) -> None:
    editor._move(0)


def _end(editor: LineEditor) -> None:
    editor._move(len(editor._chars))


def _older(editor: LineEditor) -> None:
    editor._recall(-1)


def _newer(editor: LineEditor) -> None:
    editor._recall(1)


_CONTROLS: dict[str, _Edit] = {
    "\x01": _home,
    "\x02": _left,
    "\x05": _end,
    "\x06": _right,
    "\x0b": lambda editor: editor._delete(editor._at, len(editor._chars)),
    "\x0e": _newer,
    "\x10": _older,
    "\x15": lambda editor: editor._delete(0, editor._at),
    "\x17": LineEditor._delete_word,
}
_SEQUENCES: dict[str, _Edit] = {
    "\x1b[D": _left,
    "\x1bOD": _left,
    "\x1b[C": _right,
    "\x1bOC": _right,
    "\x1b[A": _older,
    "\x1bOA": _older,
    "\x1b[B": _newer,
    "\x1bOB": _newer,
    "\x1b[H": _home,
    "\x1bOH": _home,
    "\x1b[1~": _home,
    "\x1b[F": _end,
    "\x1bOF": _end,
    "\x1b[4~": _end,
    "\x1b[3~": lambda editor: editor._delete(editor._at, editor._at + 1),
    "\x1b\x7f": LineEditor._delete_word,
}
