"""What streams in an agent's reactions, gathered for the people who watch: pieces of text, reasoning, tool output and
progress.

Stands between `runner`, which passes its events on, and `signals`. Pieces wait a tenth of a second for more, and an
agent sends at most ten signals of them a second, one for each thread that has some; what ends sooner is not worth
showing and is dropped. Signals may be lost, so each piece says where in its stream it stands. Nothing here is recorded,
and nobody waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from .events import Event, Finished, ModelOutput, ModelRetry, Progress, ToolCallEnd, ToolOutput

INTERVAL_S = 0.1
MAX_SIGNAL_CHARS = 4000
"""Of text in one signal; what is more loses its beginning."""

Put = Callable[[dict[str, object], str], None]
_Stream = tuple[str, int, str, int | None]  # path, turn, kind, call


@dataclass(slots=True)
class _Piece:
    stream: _Stream
    index: int
    at: int
    text: str
    tool: str | None = None
    is_done: bool = False

    def to_json(self) -> dict[str, object]:
        path, turn, kind, call = self.stream
        made: dict[str, object] = {"index": self.index, "turn": turn, "kind": kind, "at": self.at, "text": self.text}
        optional = {"path": path, "call": call, "tool": self.tool, "is_done": self.is_done}
        return made | {
            name: value for name, value in optional.items() if value is not None and value is not False and value != ""
        }


@dataclass(slots=True)
class _Reaction:
    thread_id: str
    pieces: list[_Piece] = field(default_factory=list)
    lengths: dict[_Stream, int] = field(default_factory=dict)  # of each stream so far


class LivePieces:
    """Pieces that wait to be shown. ``put`` sends the body of one signal to a thread; it returns at once."""

    def __init__(self, put: Put) -> None:
        self._put = put
        self._reactions: dict[str, _Reaction] = {}
        self._timer: asyncio.TimerHandle | None = None

    def take(self, event: Event, thread_id: str, *, shows_text: bool) -> None:
        """Take note of an event. ``shows_text``: the model's own text and reasoning may be seen, before it is an
        answer."""
        match event:
            case ModelOutput(is_held=False) if shows_text:
                for kind, text in (("reasoning", event.reasoning), ("text", event.text)):
                    if text:
                        self._add(event.reaction, thread_id, (event.path, event.turn, kind, None), event.index, text)
            case ToolOutput():
                stream: _Stream = (event.path, event.turn, "tool", event.call)
                self._add(event.reaction, thread_id, stream, event.index, event.text, event.tool)
            case Progress():
                stream = (event.path, event.turn, "progress", event.call)
                self._add(event.reaction, thread_id, stream, event.index, event.text, is_done=event.is_done)
            case ModelRetry():
                self._start_over(event)
            case ToolCallEnd():
                self._end_call(event)
            case Finished(path=""):
                self.end(event.reaction)
            case _:
                return

    def end(self, reaction: str) -> None:
        """Forget a reaction: what still waits of it is not worth showing any more."""
        self._reactions.pop(reaction, None)

    def close(self) -> None:
        """Forget everything: nobody will send it."""
        self._reactions.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _add(
        self, reaction: str, thread_id: str, stream: _Stream, index: int, text: str, tool: str | None = None, *, is_done: bool = False
    ) -> None:  # fmt: skip
        known = self._reactions.setdefault(reaction, _Reaction(thread_id))
        at = known.lengths.get(stream, 0)
        known.lengths[stream] = at + len(text)
        last = known.pieces[-1] if known.pieces else None
        if last is not None and last.stream == stream and stream[2] != "progress":
            last.text += text
        else:
            known.pieces.append(_Piece(stream, index, at, text, tool, is_done))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._flush)

    def _end_call(self, event: ToolCallEnd) -> None:
        """What a call was at, and an agent inside of it, is done."""
        known = self._reactions.get(event.reaction)
        if known is not None:
            outer, turn, call = event.path, event.turn, event.call
            inside = f"{outer}/{turn}.{call}/".lstrip("/")
            known.pieces = [
                it
                for it in known.pieces
                if (it.stream[0], it.stream[1], it.stream[3]) != (outer, turn, call)
                and not f"{it.stream[0]}/".startswith(inside)
            ]

    def _start_over(self, event: ModelRetry) -> None:
        """The reply will come again from its beginning."""
        known = self._reactions.get(event.reaction)
        if known is not None:
            streams = {(event.path, event.turn, kind, None) for kind in ("text", "reasoning")}
            known.pieces = [it for it in known.pieces if it.stream not in streams]
            known.lengths = {stream: length for stream, length in known.lengths.items() if stream not in streams}

    def _flush(self) -> None:
        self._timer = None
        sent = 0
        for reaction, known in self._reactions.items():
            if known.pieces:
                pieces, known.pieces = _shorten(known.pieces), []
                self._put({"reaction": reaction, "pieces": [it.to_json() for it in pieces]}, known.thread_id)
                sent += 1
        if sent:  # what comes meanwhile waits: ten signals a second, however many reactions there are
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S * sent, self._flush)


def _shorten(pieces: list[_Piece]) -> list[_Piece]:
    """Leave out the beginning of what is too much for one signal."""
    kept: list[_Piece] = []
    room = MAX_SIGNAL_CHARS
    for piece in reversed(pieces):
        if room <= 0:
            break
        if len(piece.text) > room:
            piece.at += len(piece.text) - room
            piece.text = piece.text[-room:]
        room -= max(len(piece.text), 40)  # the piece itself takes some
        kept.append(piece)
    return kept[::-1]
