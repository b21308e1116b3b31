"""Live activity: sends and reads signals that show people a running reaction. Signals may be lost. This module records
nothing, and nothing waits for a signal.

`ActivitySender` sends the signals of one agent. An `ActivityReporter` turns the events of one reaction into signals:
the agent is thinking, a call starts or ends, or a text streams. Pieces of text, reasoning, tool output and progress are
collected for a tenth of a second. An agent sends at most ten such signals per second, one for each reaction with new
pieces. Pieces of a stream that ends earlier are dropped. Each piece contains its offset in its stream.

`RemoteActivity` receives such signals from remote agents while a call waits for their answers. It turns the signals
into events of the reaction that made the call (`RemoteOutput`, `RemoteCall`). In this way, signals travel from agent to
agent until they reach the person who asked first. If a person watches, an agent sets a flag in each question that it
asks. Without this flag, the asked agent sends no streams. Anybody may send signals. Only signals of a reaction to a
waiting question count, and malformed signals are skipped. Screens also read signals with `read_call` and `read_pieces`
(`roundelay.live_activity`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeGuard

from roundelay.network.client import NetworkClient, Signal
from roundelay.network.errors import RoundelayError

from .events import (
    CallEvent,
    Event,
    Finished,
    ModelOutput,
    ModelRetry,
    OnEvent,
    PieceKind,
    Progress,
    RemoteCall,
    RemoteOutput,
    ToolCallEnd,
    ToolCallStart,
    ToolOutput,
    Waiting,
)
from .isolation import redact_error
from .reaction_ids import MAX_PATH_CHARS, is_inside, is_path, path_of_call, reaction_id
from .text import replace_surrogates

_logger = logging.getLogger(__name__)

INTERVAL_S = 0.1
"""Minimum interval between two signals with pieces of text, in seconds."""

MAX_SIGNALS = 256
"""Maximum number of signals in the send queue."""

MAX_SIGNAL_CHARS = 4000
"""Maximum characters of text in one signal. The beginning of a longer text is dropped."""

PIECE_CHARS = 40
"""Minimum number of characters charged for a piece, even if its text is shorter."""

SignalKind = Literal["thinking", "tool", "delta"]
_Stream = tuple[str, int, str, int | None]
"""Key of a streaming text: path of the run, turn, kind, and call."""


class ActivitySender:
    """Sends the signals of one agent's reactions, and passes events to ``on_event``. This class never waits: if the
    queue is full, the newest signal is dropped, because a signal must never delay a reaction.
    """

    def __init__(self, agent_id: str, on_event: OnEvent | None) -> None:
        self.agent_id = agent_id
        self.on_event = on_event
        self.is_watched = True
        """Whether anybody is connected to the hub who would receive the signals."""
        self._active: dict[ActivityReporter, None] = {}
        self._queue: asyncio.Queue[tuple[SignalKind, dict[str, object], ActivityReporter]] = asyncio.Queue(MAX_SIGNALS)
        self._streaming: dict[ActivityReporter, None] = {}  # reporters with unsent pieces
        self._timer: asyncio.TimerHandle | None = None

    async def send(self, client: NetworkClient) -> None:
        """Send queued signals until the task is cancelled."""
        # Create a new queue, because a queue belongs to the event loop that awaits it and a new run may use a new loop.
        waiting, self._queue = self._queue, asyncio.Queue(MAX_SIGNALS)
        while not waiting.empty():
            self._queue.put_nowait(waiting.get_nowait())
        while True:
            kind, body, reporter = await self._queue.get()
            try:
                await client.signal(kind, body, thread_id=reporter.thread_id, trigger=reporter.trigger)
            except RoundelayError as error:
                _logger.debug("signal refused", extra={"kind": kind, "code": error.code})
            except Exception as error:  # a value that cannot be encoded: a lost signal must not end the agent
                details = {"agent_id": self.agent_id, "kind": kind}
                _logger.error("a signal could not be sent", extra=details, exc_info=redact_error(error))

    def close(self) -> None:
        """Drop all unsent pieces, because nobody will send them."""
        self._streaming.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def put(
        self, kind: SignalKind, body: dict[str, object], reporter: ActivityReporter, *, is_own: bool = True
    ) -> None:
        """Queue a signal. Signals of remote agents (``is_own`` False) may fill only half of the queue."""
        if self.is_watched and self._queue.qsize() < (MAX_SIGNALS if is_own else MAX_SIGNALS // 2):
            self._queue.put_nowait((kind, {"reaction": reporter.reaction, **body}, reporter))

    @property
    def is_observed(self) -> bool:
        """Whether anybody sees the activity of a reaction, by signals or by ``on_event``."""
        return self.is_watched or self.on_event is not None

    def set_watched(self, *, is_watched: bool) -> None:
        """Turn signals on or off. When they are turned on, the new watcher first gets the current state of the running
        reactions.
        """
        begins, self.is_watched = is_watched and not self.is_watched, is_watched
        for reporter in self._active if begins else ():
            reporter.report_state()

    def begin(self, reporter: ActivityReporter) -> None:
        self._active[reporter] = None
        self.put("thinking", {"active": True}, reporter)

    def end(self, reporter: ActivityReporter, *, is_silent: bool) -> None:
        self._active.pop(reporter, None)
        self.put("thinking", {"active": False, **({"silent": True} if is_silent else {})}, reporter)

    def note_pieces(self, reporter: ActivityReporter) -> None:
        """Schedule a signal with the pieces of a reaction. Pieces that arrive within the interval are sent in the same
        signal.
        """
        self._streaming[reporter] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._flush)

    def drop_pieces(self, reporter: ActivityReporter) -> None:
        self._streaming.pop(reporter, None)

    def _flush(self) -> None:
        # Clear the set first. A reporter with later pieces registers again, for the next signal.
        self._timer = None
        streaming, self._streaming = self._streaming, {}
        sent = [reporter for reporter in streaming if reporter.has_pieces]
        for reporter in sent:
            self.put("delta", {"pieces": reporter.take_pieces()}, reporter)
        if sent:  # stay at ten signals per second, even if many reactions stream
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S * len(sent), self._flush)


@dataclass(slots=True, eq=False)
class ActivityReporter:
    """Reports the activity of one reaction to the people who may see its ``trigger``. ``is_watched`` is set if a person
    wants to see details, not only that the agent is working.
    """

    _sender: ActivitySender
    reaction: str
    thread_id: str
    trigger: int
    is_watched: bool
    shows_text: Callable[[], bool] = lambda: True
    """Function that returns whether the model's own text is sent to the thread. If it is, people may see the text
    before the answer is complete.
    """

    _calls: dict[tuple[object, ...], dict[str, object]] = field(default_factory=dict)  # signals of running calls
    _pieces: list[_Piece] = field(default_factory=list)
    _size: int = 0  # characters of the unsent pieces
    _lengths: dict[_Stream, int] = field(default_factory=dict)  # characters of each stream so far

    def begin(self) -> None:
        self._sender.begin(self)

    def end(self, *, is_silent: bool = False) -> None:
        """Report the end of the reaction. Set ``is_silent`` if a person waits for an answer but gets none."""
        self._forget()
        self._calls.clear()
        self._sender.end(self, is_silent=is_silent)

    def report_state(self) -> None:
        """Report that the reaction is working, and report its running calls."""
        self._sender.put("thinking", {"active": True}, self)
        for body in self._calls.values():
            self._sender.put("tool", body, self)

    def report(self, event: Event) -> None:
        """Report an event. Calls are reported to the readers of the thread, and streams only if a person watches.
        ``on_event`` gets every event.
        """
        try:
            self._show(event)
        except Exception as error:  # user code may create events with values of a wrong type
            details = {"agent_id": self._sender.agent_id, "event": type(event).__name__}
            _logger.error("an event could not be reported", extra=details, exc_info=redact_error(error))
        if self._sender.on_event is not None:
            try:
                self._sender.on_event(event)
            except Exception as error:  # the listener is user code: it must not end the reaction
                details = {"agent_id": self._sender.agent_id}
                _logger.error("on_event failed", extra=details, exc_info=redact_error(error))

    def _show(self, event: Event) -> None:
        body = describe_call(event, is_watched=self.is_watched) if isinstance(event, CallEvent) else None
        if body is not None:
            place = (body.get("path"), body["turn"], body["call"])
            if body["active"]:
                self._calls[place] = body
            else:
                self._calls.pop(place, None)
            self._sender.put("tool", body, self, is_own=not isinstance(event, RemoteCall))
        if self.is_watched:
            self._add_pieces(event)

    @property
    def has_pieces(self) -> bool:
        return bool(self._pieces)

    def take_pieces(self) -> list[dict[str, object]]:
        """Remove and return the unsent pieces as one signal's content."""
        pieces, self._pieces, self._size = _shorten(self._pieces), [], 0
        return [piece.to_json() for piece in pieces]

    def _add_pieces(self, event: Event) -> None:
        match event:
            case ModelOutput(is_held=False) if self.shows_text():
                for kind, text in (("reasoning", event.reasoning), ("text", event.text)):
                    if text:
                        self._add((event.path, event.turn, kind, None), event.index, text)
            case ToolOutput(is_held=False):
                self._add((event.path, event.turn, "tool", event.call), event.index, event.text, event.tool)
            case Progress():
                stream: _Stream = (event.path, event.turn, "progress", event.call)
                self._add(stream, event.index, event.text, is_done=event.is_done)
            case RemoteOutput(is_held=False) if event.kind in ("tool", "progress") or self.shows_text():
                stream = (event.path, event.turn, event.kind, event.call)
                self._add(stream, event.index, event.text, event.tool, is_done=event.is_done, at=event.at)
            case ModelRetry():  # the reply starts again from its beginning
                restarted = {(event.path, event.turn, kind, None) for kind in ("text", "reasoning")}
                self._pieces = [piece for piece in self._pieces if piece.stream not in restarted]
                self._lengths = {stream: length for stream, length in self._lengths.items() if stream not in restarted}
            case ToolCallEnd() | RemoteCall(is_active=False):  # the call and all agents that it called have ended
                place, call = path_of_call(event.path, event.turn, event.call), (event.path, event.turn, event.call)
                self._pieces = [it for it in self._pieces if it.call != call and not is_inside(it.stream[0], place)]
            case Finished(path=""):
                self._forget()

    def _add(
        self,
        stream: _Stream,
        index: int,
        text: str,
        tool: str | None = None,
        *,
        is_done: bool = False,
        at: int | None = None,
    ) -> None:
        """Add a piece. ``at`` is the offset of the piece in its stream; the default is the end of the text so far."""
        if at is None:
            at = self._lengths.get(stream, 0)
            self._lengths[stream] = at + len(text)
        if not self._sender.is_watched:
            return  # only count the offset, for a person who begins to watch later
        last = self._pieces[-1] if self._pieces else None
        # Join adjacent pieces of one stream. Otherwise the overhead of each token would fill the signal.
        if last is not None and last.stream == stream and last.at + len(last.text) == at and stream[2] != "progress":
            last.text += text
            self._size += len(text)
        else:
            self._pieces.append(_Piece(stream, index, at, text, tool, is_done))
            self._size += max(len(text), PIECE_CHARS)
        if self._size > 2 * MAX_SIGNAL_CHARS:  # drop pieces, because remote agents may send any number of them
            self._pieces, self._size = _shorten(self._pieces), MAX_SIGNAL_CHARS
        self._sender.note_pieces(self)

    def _forget(self) -> None:
        """Drop the unsent pieces, because their text is outdated."""
        self._pieces, self._size = [], 0
        self._lengths.clear()
        self._sender.drop_pieces(self)


@dataclass(slots=True)
class _Piece:
    stream: _Stream
    index: int
    at: int
    text: str
    tool: str | None = None
    is_done: bool = False

    @property
    def call(self) -> tuple[str, int, int | None]:
        path, turn, _, call = self.stream
        return path, turn, call

    def to_json(self) -> dict[str, object]:
        path, turn, kind, call = self.stream
        piece: dict[str, object] = {"index": self.index, "turn": turn, "kind": kind, "at": self.at, "text": self.text}
        optional = {"path": path, "call": call, "tool": self.tool, "is_done": self.is_done}
        return piece | {
            name: value for name, value in optional.items() if value is not None and value is not False and value != ""
        }


def _shorten(pieces: list[_Piece]) -> list[_Piece]:
    """Return the newest pieces that together fit into one signal."""
    kept: list[_Piece] = []
    room = MAX_SIGNAL_CHARS
    for piece in reversed(pieces):
        if room <= 0:
            break
        if len(piece.text) > room:
            # The beginning of the piece is dropped, so increase its offset. With the old offset, screens would show the
            # text at the wrong position.
            piece.at += len(piece.text) - room
            piece.text = piece.text[-room:]
        room -= max(len(piece.text), PIECE_CHARS)
        kept.append(piece)
    return kept[::-1]


def describe_call(event: CallEvent, *, is_watched: bool) -> dict[str, object] | None:
    """Return the body of the signal that reports a call, or None for an event that changes nothing. Set ``is_watched``
    if a person may want to see which agents the call waits for, and which calls those agents make.
    """
    match event:
        case ToolCallStart():
            state: dict[str, object] = {"active": True}
        case ToolCallEnd():
            state = {"active": False, "ok": event.ok}
        case Waiting(is_approval=False) if is_watched:
            state = {"active": True, "asked": list(event.agent_ids)}
        case RemoteCall(is_active=True) if is_watched:
            state = {"active": True, **({"asked": list(event.asked)} if event.asked else {})}
        case RemoteCall() if is_watched:
            state = {"active": False, "ok": event.ok}
        case _:
            return None
    place: dict[str, object] = {"turn": event.turn, "call": event.call, **({"path": event.path} if event.path else {})}
    return {"tool": event.tool} | state | place


# --- activity of remote agents

# Limits on the content of another agent's signal.
MAX_PIECES = 64
MAX_TEXT_CHARS = 4000
MAX_NAME_CHARS = 64
MAX_ASKED = 16
MAX_NUMBER = 2**31
"""Maximum number for turns, calls and text offsets."""

MAX_SIGNALS_A_SECOND = 100
"""Maximum signals per second that are accepted from one agent for which a call waits. Further signals are dropped."""


@dataclass(frozen=True, slots=True)
class WaitingCall:
    """A waiting call: its position, the counter of its stream pieces, and the listener for its events. ``is_held``
    returns whether the call's answer must be reviewed before people see it.
    """

    reaction: str
    path: str
    turn: int
    call: int
    tool: str
    is_held: Callable[[], bool]
    pieces: Iterator[int]
    emit: OnEvent


@dataclass(slots=True)
class _AwaitedReaction:
    """A reaction for which a call waits: the path of its events, and the number of its signals in the current second."""

    call: WaitingCall
    path: str
    second: int = 0
    count: int = 0

    def has_room(self) -> bool:
        """Count one more signal. Return False if this signal exceeds the limit."""
        second = int(asyncio.get_running_loop().time())
        self.second, self.count = second, self.count + 1 if second == self.second else 1
        return self.count <= MAX_SIGNALS_A_SECOND


class RemoteActivity:
    """Activity of the remote reactions for which the calls of one agent wait, on one connection."""

    def __init__(self, client: NetworkClient, is_observed: Callable[[], bool] = lambda: True) -> None:
        self._client = client
        self._is_observed = is_observed
        self._awaited: dict[tuple[str, str], _AwaitedReaction] = {}  # by agent id and reaction id
        self._wants_signals = False  # true after a call has asked an agent while a person watched
        self._watching = ""  # id of the session that receives the signals

    @contextmanager
    def listen(self, questions: Mapping[str, int], call: WaitingCall) -> Iterator[None]:
        """Report the activity of the reactions to these questions (seqs by recipient) until the block ends."""
        epoch = self._client.welcome.network.epoch
        awaited = {
            (agent_id, reaction_id(agent_id, seq, epoch)): _AwaitedReaction(
                call, path_of_call(call.path, call.turn, call.call, number)
            )
            for number, (agent_id, seq) in enumerate(questions.items())
        }
        self._awaited |= awaited
        try:
            yield
        finally:
            for key in awaited:
                self._awaited.pop(key, None)

    async def watch(self) -> None:
        """Subscribe to signals until the connection closes."""
        self._wants_signals = True
        if not self._is_observed():
            return  # `watch_again` subscribes as soon as somebody watches
        session = self._client.welcome.session_id
        if self._watching != session:
            # Set this before the await, so that parallel calls subscribe only once. It is reset below if the hub
            # refuses.
            self._watching = session
            try:
                await self._client.call("network.watch", {"signals": True})
            except RoundelayError as error:  # people see fewer details, but the wait continues
                self._watching = ""
                _logger.debug("signals cannot be watched", extra={"code": error.code})

    async def watch_again(self) -> None:
        """Subscribe to signals on a new connection if `watch` was called before. Subscribe before `listen`, because a
        question may already have been sent.
        """
        if self._wants_signals:
            await self.watch()

    def hear(self, signal: Signal) -> None:
        """Handle a signal. The signal is reported if a call waits for the reaction that it belongs to."""
        match signal.body:
            case {"reaction": str(reaction)} if awaited := self._awaited.get((signal.sender_id, reaction)):
                if awaited.has_room():
                    read_events = _read_piece_events if signal.kind == "delta" else _read_call_event
                    for event in read_events(signal, awaited.call, awaited.path):
                        awaited.call.emit(event)
            case _:
                return


@dataclass(frozen=True, slots=True)
class CallSignal:
    """Content of a signal about a call. ``asked`` names the agents whose answers this call waits for."""

    path: str
    turn: int
    call: int
    tool: str
    is_active: bool
    ok: bool
    asked: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PieceSignal:
    """A piece of a streaming text, read from a signal. ``at`` is the offset of the piece in the whole text."""

    path: str
    turn: int
    kind: PieceKind
    call: int | None
    at: int
    text: str
    tool: str
    is_done: bool


def read_call(body: Mapping[str, object]) -> CallSignal | None:
    """Read a signal of kind ``tool``. Return None if the signal is malformed."""
    place, tool, is_active = _read_place(body), body.get("tool", "a tool"), body.get("active")
    if place is None or not isinstance(tool, str) or not isinstance(is_active, bool):
        return None
    path, turn, call = place
    listed = body.get("asked")
    names = [it for it in listed if isinstance(it, str)] if isinstance(listed, list) else []
    is_ok, asked_ids = body.get("ok") is True, tuple(map(_read_name, names[:MAX_ASKED]))
    return CallSignal(path, turn, call or 0, _read_name(tool), is_active, is_ok, asked_ids)


def read_pieces(body: Mapping[str, object]) -> Iterator[PieceSignal]:
    """Read the pieces in a signal of kind ``delta``. Malformed pieces are skipped."""
    pieces = body.get("pieces")
    for piece in pieces[:MAX_PIECES] if isinstance(pieces, list) else ():
        match piece:
            case {
                "kind": "text" | "reasoning" | "tool" | "progress" as kind,
                "at": at,
                "text": str(text),
                "turn": int(),
            }:
                place = _read_place(piece)
                if place is not None and _is_number(at):
                    path, turn, call = place
                    is_done = piece.get("is_done") is True
                    yield PieceSignal(path, turn, kind, call, at, text, _read_name(piece.get("tool", "")), is_done)


def _read_place(body: Mapping[str, object]) -> tuple[str, int, int | None] | None:
    """Return the path of the run, the turn and the call of a signal, or None if they are malformed. If an agent does
    not number its calls, assume that it runs one call at a time.
    """
    path, turn, call = body.get("path") or "", body.get("turn") or 0, body.get("call")
    if not isinstance(path, str) or not _is_number(turn) or not (call is None or _is_number(call)):
        return None
    return (path, turn, call) if is_path(path_of_call(path, turn, call or 0)) else None


def _read_name(name: object) -> str:
    return replace_surrogates(name[:MAX_NAME_CHARS]) if isinstance(name, str) else "…"


def _read_piece_events(signal: Signal, waiting: WaitingCall, path: str) -> Iterator[RemoteOutput]:
    for piece in read_pieces(signal.body):
        inside = _join(path, piece.path)
        if inside is not None:
            kept = replace_surrogates(piece.text[-MAX_TEXT_CHARS:])
            yield RemoteOutput(
                waiting.reaction,
                piece.turn,
                signal.sender_id,
                piece.kind,
                piece.at + len(piece.text) - len(kept),
                kept,
                piece.call,
                piece.tool,
                is_done=piece.is_done,
                index=next(waiting.pieces),
                # a reviewer must see tool output too, because it may become the answer
                is_held=piece.kind != "progress" and waiting.is_held(),
                path=inside,
            )


def _read_call_event(signal: Signal, waiting: WaitingCall, path: str) -> Iterator[RemoteCall]:
    seen = read_call(signal.body)
    inside = _join(path, seen.path) if seen is not None else None
    if seen is not None and inside is not None:
        details = (seen.tool, signal.sender_id, seen.is_active)
        yield RemoteCall(waiting.reaction, seen.turn, seen.call, *details, ok=seen.ok, asked=seen.asked, path=inside)


def _is_number(value: object) -> TypeGuard[int]:
    """Return whether a number is within the limits of a signal. Any other number would fail later, when this agent
    sends it in a signal.
    """
    return type(value) is int and 0 <= value <= MAX_NUMBER


def _join(outer: str, inner: str) -> str | None:
    """Return the path of a run. ``outer`` is the path of the remote agent, and ``inner`` the path within that agent.
    Return None if the path is too deep.
    """
    path = f"{outer}/{inner}" if inner else outer
    return path if len(path) <= MAX_PATH_CHARS else None
