"""What an agent's reactions are at, for the people who watch: calls, and what streams, gathered: pieces of text,
reasoning, tool output and progress.

Stands between `runner`, which passes its events on, and `signals`. Pieces wait a tenth of a second for more, and an
agent sends at most ten signals of them a second, one for each thread that has some; what ends sooner is not worth
showing and is dropped. Signals may be lost, so each piece says where in its stream it stands. Nothing here is recorded,
and nobody waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from .events import (
    Event,
    Finished,
    ModelOutput,
    ModelRetry,
    Progress,
    RemoteCall,
    RemoteOutput,
    ToolCallEnd,
    ToolCallStart,
    ToolOutput,
    Waiting,
)
from .paths import is_inside, path_of_call

INTERVAL_S = 0.1
MAX_SIGNAL_CHARS = 4000
"""Of text in one signal; what is more loses its beginning."""

PIECE_CHARS = 40
"""What a piece takes of that at least, however short its text is."""

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
    size: int = 0  # of the pieces, at least
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
            case ToolOutput(is_held=False):
                stream: _Stream = (event.path, event.turn, "tool", event.call)
                self._add(event.reaction, thread_id, stream, event.index, event.text, event.tool)
            case Progress():
                stream = (event.path, event.turn, "progress", event.call)
                self._add(event.reaction, thread_id, stream, event.index, event.text, is_done=event.is_done)
            case RemoteOutput(is_held=False) if shows_text or event.kind in ("tool", "progress"):
                stream = (event.path, event.turn, event.kind, event.call)
                self._add(
                    event.reaction,
                    thread_id,
                    stream,
                    event.index,
                    event.text,
                    event.tool,
                    is_done=event.is_done,
                    at=event.at,
                )
            case ModelRetry():
                self._start_over(event)
            case ToolCallEnd() | RemoteCall(is_active=False):
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
        self, reaction: str, thread_id: str, stream: _Stream, index: int, text: str, tool: str | None = None, *,
        is_done: bool = False, at: int | None = None,
    ) -> None:  # fmt: skip
        """``at``: where in the stream the text begins, if it is not where that has come to."""
        known = self._reactions.setdefault(reaction, _Reaction(thread_id))
        if at is None:
            at = known.lengths.get(stream, 0)
            known.lengths[stream] = at + len(text)
        last = known.pieces[-1] if known.pieces else None
        if last is not None and last.stream == stream and last.at + len(last.text) == at and stream[2] != "progress":
            last.text += text
            known.size += len(text)
        else:
            known.pieces.append(_Piece(stream, index, at, text, tool, is_done))
            known.size += max(len(text), PIECE_CHARS)
        if known.size > 2 * MAX_SIGNAL_CHARS:  # it comes faster than it is sent: from elsewhere that may be anything
            known.pieces, known.size = _shorten(known.pieces), MAX_SIGNAL_CHARS
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._flush)

    def _end_call(self, event: ToolCallEnd | RemoteCall) -> None:
        """What a call was at, and an agent inside of it, is done."""
        known = self._reactions.get(event.reaction)
        if known is not None:
            outer, turn, call = event.path, event.turn, event.call
            place = path_of_call(outer, turn, call)
            known.pieces = [
                it
                for it in known.pieces
                if (it.stream[0], it.stream[1], it.stream[3]) != (outer, turn, call)
                and not is_inside(it.stream[0], place)
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
                pieces, known.pieces, known.size = _shorten(known.pieces), [], 0
                self._put({"reaction": reaction, "pieces": [it.to_json() for it in pieces]}, known.thread_id)
                sent += 1
        if sent:  # what comes meanwhile waits: ten signals a second, however many reactions there are
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S * sent, self._flush)


def describe_call(event: Event, *, is_watched: bool) -> dict[str, object] | None:
    """Give the body of the signal that tells of a call; None for what is no news of one. ``is_watched``: a person may
    want to know for whom it waits, and what calls those make."""
    match event:
        case ToolCallStart():
            told: dict[str, object] = {"active": True}
        case ToolCallEnd():
            told = {"active": False, "ok": event.ok}
        case Waiting(is_approval=False) if is_watched:
            told = {"active": True, "asked": list(event.agent_ids)}
        case RemoteCall(is_active=True) if is_watched:
            told = {"active": True, **({"asked": list(event.asked)} if event.asked else {})}
        case RemoteCall() if is_watched:
            told = {"active": False, "ok": event.ok}
        case _:
            return None
    place: dict[str, object] = {"turn": event.turn, "call": event.call, **({"path": event.path} if event.path else {})}
    return {"reaction": event.reaction, "tool": event.tool} | told | place


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
        room -= max(len(piece.text), PIECE_CHARS)
        kept.append(piece)
    return kept[::-1]
