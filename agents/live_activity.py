"""What people see of reactions while they are under way, by signals that may be lost: nothing here is recorded, and
nobody waits for it.

`ActivitySender` sends the signals of one agent; a `ActivityReporter` reaction turns its events into them: that the agent thinks, that a
call begins or is over, and what streams. Pieces of text, reasoning, tool output and progress wait a tenth of a second
for more, and an agent sends at most ten signals of them a second, one for each reaction that has some; what ends sooner
is not worth showing and is dropped. Each piece says where in its stream it stands.

`RemoteActivity` hears the same signals of agents elsewhere, as long as a call waits for their answers, and hands them on as
events of the call's own reaction (`RemoteOutput`, `RemoteCall`): so they pass from agent to agent to the person who
began. Whoever asks while a person watches says so in the question, and only then does the asked one send what streams.
Anybody may send signals: only those of the very reaction to a question are heard, and what is not well formed is passed
over. `read_call` and `read_pieces` say what is; screens read signals by them too (`roundelay.under_way`).
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
from .journal import MAX_PATH_CHARS, is_inside, is_path, path_of_call, reaction_id
from .text import replace_surrogates

_logger = logging.getLogger(__name__)

INTERVAL_S = 0.1
MAX_SIGNALS = 256
"""That wait to be sent."""

MAX_SIGNAL_CHARS = 4000
"""Of text in one signal; what is more loses its beginning."""

PIECE_CHARS = 40
"""What a piece takes of that at least, however short its text is."""

SignalKind = Literal["thinking", "tool", "delta"]
_Stream = tuple[str, int, str, int | None]  # path, turn, kind, call


class ActivitySender:
    """What is seen of an agent's reactions while they run: by ``on_event``, and by signals in their threads. It never
    waits: a full queue of signals drops the newest, since it must never hold up a reaction."""

    def __init__(self, agent_id: str, on_event: OnEvent | None) -> None:
        self.agent_id = agent_id
        self.on_event = on_event
        self._queue: asyncio.Queue[tuple[SignalKind, dict[str, object], ActivityReporter]] = asyncio.Queue(MAX_SIGNALS)
        self._streaming: dict[ActivityReporter, None] = {}  # with pieces that wait
        self._timer: asyncio.TimerHandle | None = None

    async def send(self, client: NetworkClient) -> None:
        """Send the signals as they come, for ever."""
        # A queue belongs to the event loop in which it is waited for.
        waiting, self._queue = self._queue, asyncio.Queue(MAX_SIGNALS)
        while not waiting.empty():
            self._queue.put_nowait(waiting.get_nowait())
        while True:
            kind, body, shown = await self._queue.get()
            try:
                await client.signal(kind, body, thread_id=shown.thread_id, trigger=shown.trigger)
            except RoundelayError as error:
                _logger.debug("signal refused", extra={"kind": kind, "code": error.code})
            except Exception as error:  # of a value that cannot be encoded: a lost signal must not end the agent
                told = {"agent_id": self.agent_id, "kind": kind}
                _logger.error("a signal could not be sent", extra=told, exc_info=redact_error(error))

    def close(self) -> None:
        """Forget what streams: nobody will send it."""
        self._streaming.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def put(self, kind: SignalKind, body: dict[str, object], shown: ActivityReporter, *, is_own: bool = True) -> None:
        """``is_own`` is False of what is only passed on, for which half of the queue is enough."""
        if self._queue.qsize() < (MAX_SIGNALS if is_own else MAX_SIGNALS // 2):
            self._queue.put_nowait((kind, {"reaction": shown.reaction, **body}, shown))

    def note_pieces(self, shown: ActivityReporter) -> None:
        """A reaction has pieces to be sent, together with those that come within the interval."""
        self._streaming[shown] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._flush)

    def drop_pieces(self, shown: ActivityReporter) -> None:
        self._streaming.pop(shown, None)

    def _flush(self) -> None:
        self._timer = None
        streaming, self._streaming = self._streaming, {}
        sent = [shown for shown in streaming if shown.has_pieces]
        for shown in sent:
            self.put("delta", {"pieces": shown.take_pieces()}, shown)
        if sent:  # what comes meanwhile waits: ten signals a second, however many reactions there are
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S * len(sent), self._flush)


@dataclass(slots=True, eq=False)
class ActivityReporter:
    """One reaction as people see it. It is for those alone who may know of its ``trigger``. ``is_watched``: a person
    wants to see more than that the agent is at work."""

    _display: ActivitySender
    reaction: str
    thread_id: str
    trigger: int
    is_watched: bool
    shows_text: Callable[[], bool] = lambda: True
    """Whether the model's own text goes to the thread, so that it may be seen before it is an answer."""

    _pieces: list[_Piece] = field(default_factory=list)
    _size: int = 0  # of the pieces, at least
    _lengths: dict[_Stream, int] = field(default_factory=dict)  # of each stream so far

    def begin(self) -> None:
        self._display.put("thinking", {"active": True}, self)

    def end(self, *, is_silent: bool = False) -> None:
        """The reaction is over. ``is_silent``: without a word to the person who waits for one."""
        self._forget()
        self._display.put("thinking", {"active": False, **({"silent": True} if is_silent else {})}, self)

    def report(self, event: Event) -> None:
        """Pass an event on: calls to the thread's readers, what streams if a person watches."""
        try:
            self._show(event)
        except Exception as error:  # of a value of another type than events have: it must not end the reaction
            told = {"agent_id": self._display.agent_id, "event": type(event).__name__}
            _logger.error("an event could not be shown", extra=told, exc_info=redact_error(error))
        if self._display.on_event is not None:
            try:
                self._display.on_event(event)
            except Exception as error:  # of who listens: it must not end what it listens to
                told = {"agent_id": self._display.agent_id}
                _logger.error("on_event failed", extra=told, exc_info=redact_error(error))

    def _show(self, event: Event) -> None:
        body = describe_call(event, is_watched=self.is_watched) if isinstance(event, CallEvent) else None
        if body is not None:
            self._display.put("tool", body, self, is_own=not isinstance(event, RemoteCall))
        if self.is_watched:  # nobody else does
            self._take(event)

    @property
    def has_pieces(self) -> bool:
        return bool(self._pieces)

    def take_pieces(self) -> list[dict[str, object]]:
        """Give what waits, for a signal."""
        pieces, self._pieces, self._size = _shorten(self._pieces), [], 0
        return [it.to_json() for it in pieces]

    def _take(self, event: Event) -> None:
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
            case ModelRetry():  # the reply will come again from its beginning
                begun = {(event.path, event.turn, kind, None) for kind in ("text", "reasoning")}
                self._pieces = [it for it in self._pieces if it.stream not in begun]
                self._lengths = {stream: length for stream, length in self._lengths.items() if stream not in begun}
            case ToolCallEnd() | RemoteCall(is_active=False):  # what it was at, and an agent inside of it, is done
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
        """``at``: where in the stream the text begins, if it is not where that has come to."""
        if at is None:
            at = self._lengths.get(stream, 0)
            self._lengths[stream] = at + len(text)
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last.stream == stream and last.at + len(last.text) == at and stream[2] != "progress":
            last.text += text
            self._size += len(text)
        else:
            self._pieces.append(_Piece(stream, index, at, text, tool, is_done))
            self._size += max(len(text), PIECE_CHARS)
        if self._size > 2 * MAX_SIGNAL_CHARS:  # it comes faster than it is sent: from elsewhere that may be anything
            self._pieces, self._size = _shorten(self._pieces), MAX_SIGNAL_CHARS
        self._display.note_pieces(self)

    def _forget(self) -> None:
        """What still waits is not worth showing any more."""
        self._pieces, self._size = [], 0
        self._lengths.clear()
        self._display.drop_pieces(self)


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
        made: dict[str, object] = {"index": self.index, "turn": turn, "kind": kind, "at": self.at, "text": self.text}
        optional = {"path": path, "call": call, "tool": self.tool, "is_done": self.is_done}
        return made | {
            name: value for name, value in optional.items() if value is not None and value is not False and value != ""
        }


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


def describe_call(event: CallEvent, *, is_watched: bool) -> dict[str, object] | None:
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
    return {"tool": event.tool} | told | place


# --- what agents elsewhere are at

MAX_PIECES = 64
"""Of one signal."""
MAX_TEXT_CHARS = 4000
MAX_NAME_CHARS = 64
MAX_ASKED = 16
MAX_NUMBER = 2**31
"""Of turns, calls and places in a text."""
MAX_SIGNALS_A_SECOND = 100
"""Of one agent that is waited for; what is more is lost, as if the network had lost it."""


@dataclass(frozen=True, slots=True)
class WaitingCall:
    """A call that waits: its reaction, its place in it, who numbers what streams there, and who hears of it.
    ``is_held`` tells whether what may be its answer is not for people's eyes yet."""

    reaction: str
    path: str
    turn: int
    call: int
    tool: str
    is_held: Callable[[], bool]
    pieces: Iterator[int]
    emit: OnEvent


@dataclass(slots=True)
class _Heard:
    """A reaction that is waited for: who takes what comes of it, at which path, and how much that was this second."""

    call: WaitingCall
    path: str
    second: int = 0
    count: int = 0

    def has_room(self) -> bool:
        """Count one more signal; False if it is one too many."""
        second = int(asyncio.get_running_loop().time())
        self.second, self.count = second, self.count + 1 if second == self.second else 1
        return self.count <= MAX_SIGNALS_A_SECOND


class RemoteActivity:
    """The reactions that calls of one agent wait for, on one connection."""

    def __init__(self, client: NetworkClient) -> None:
        self._client = client
        self._heard: dict[tuple[str, str], _Heard] = {}  # by agent and reaction
        self._wants_signals = False  # once anybody has asked while a person watched
        self._watching = ""  # the session that is sent them

    @contextmanager
    def listen(self, questions: Mapping[str, int], call: WaitingCall) -> Iterator[None]:
        """Hear the reactions to these questions (seqs, by whom they were put to), as long as the block runs."""
        epoch = self._client.welcome.network.epoch
        heard = {
            (agent_id, reaction_id(agent_id, seq, epoch)): _Heard(
                call, path_of_call(call.path, call.turn, call.call, number)
            )
            for number, (agent_id, seq) in enumerate(questions.items())
        }
        self._heard |= heard
        try:
            yield
        finally:
            for key in heard:
                self._heard.pop(key, None)

    async def watch(self) -> None:
        """Be sent signals, from now on as long as the connection lasts."""
        self._wants_signals = True
        session = self._client.welcome.session_id
        if self._watching != session:
            self._watching = session
            try:
                await self._client.call("network.watch", {"signals": True})
            except RoundelayError as error:  # a person sees less; the wait is not to end by that
                self._watching = ""
                _logger.debug("signals cannot be watched", extra={"code": error.code})

    async def watch_again(self) -> None:
        """On a new connection: as `watch`, if that was asked before. What is listened to may come only later: a
        question may be on its way."""
        if self._wants_signals:
            await self.watch()

    def hear(self, signal: Signal) -> None:
        """Pass a signal on, if a call waits for the reaction that it is about."""
        match signal.body:
            case {"reaction": str(reaction)} if heard := self._heard.get((signal.sender_id, reaction)):
                if heard.has_room():
                    read = _tell_pieces if signal.kind == "delta" else _tell_call
                    for event in read(signal, heard.call, heard.path):
                        heard.call.emit(event)
            case _:
                return


@dataclass(frozen=True, slots=True)
class CallSignal:
    """What a signal tells of a call; ``asked`` are those for whose answers it waits."""

    path: str
    turn: int
    call: int
    tool: str
    is_active: bool
    ok: bool
    asked: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PieceSignal:
    """A piece of a text that grows, as a signal has it; ``at`` is where in the whole text it begins."""

    path: str
    turn: int
    kind: PieceKind
    call: int | None
    at: int
    text: str
    tool: str
    is_done: bool


def read_call(body: Mapping[str, object]) -> CallSignal | None:
    """Read what a signal of kind ``tool`` tells; None for what is not well formed."""
    place, tool, is_active = _read_place(body), body.get("tool", "a tool"), body.get("active")
    if place is None or not isinstance(tool, str) or not isinstance(is_active, bool):
        return None
    path, turn, call = place
    asked = body.get("asked")
    names = [it for it in asked if isinstance(it, str)] if isinstance(asked, list) else []
    told = (_read_name(tool), is_active, body.get("ok") is True, tuple(map(_read_name, names[:MAX_ASKED])))
    return CallSignal(path, turn, call or 0, *told)


def read_pieces(body: Mapping[str, object]) -> Iterator[PieceSignal]:
    """Read what a signal of kind ``delta`` brings; a piece that is not well formed is passed over."""
    given = body.get("pieces")
    for piece in given[:MAX_PIECES] if isinstance(given, list) else ():
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
    """The path of the run, the turn and the call that a signal is about; None if there can be none there. An agent that
    numbers no calls has one at a time."""
    path, turn, call = body.get("path") or "", body.get("turn") or 0, body.get("call")
    if not isinstance(path, str) or not _is_number(turn) or not (call is None or _is_number(call)):
        return None
    return (path, turn, call) if is_path(path_of_call(path, turn, call or 0)) else None


def _read_name(given: object) -> str:
    return replace_surrogates(given[:MAX_NAME_CHARS]) if isinstance(given, str) else "…"


def _tell_pieces(signal: Signal, waiting: WaitingCall, path: str) -> Iterator[RemoteOutput]:
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
                is_held=piece.kind != "progress" and waiting.is_held(),  # a tool's output may be the answer too
                path=inside,
            )


def _tell_call(signal: Signal, waiting: WaitingCall, path: str) -> Iterator[RemoteCall]:
    seen = read_call(signal.body)
    inside = _join(path, seen.path) if seen is not None else None
    if seen is not None and inside is not None:
        told = (seen.tool, signal.sender_id, seen.is_active)
        yield RemoteCall(waiting.reaction, seen.turn, seen.call, *told, ok=seen.ok, asked=seen.asked, path=inside)


def _is_number(given: object) -> TypeGuard[int]:
    """Whether it is one that can be sent on: others would fail in the middle of this agent's own signals."""
    return type(given) is int and 0 <= given <= MAX_NUMBER


def _join(outer: str, inner: str) -> str | None:
    """Give the path of what runs at ``inner`` of an agent at ``outer``; None where that is too deep."""
    path = f"{outer}/{inner}" if inner else outer
    return path if len(path) <= MAX_PATH_CHARS else None
