"""What agents elsewhere are at while calls wait for their answers, passed on to the people who watch those calls.

Stands between the signals that the runner hears and the calls that wait (`replies`), which hand what is read here on
as events of their own reaction (`RemoteOutput`, `RemoteCall`): so it passes from agent to agent to the person who
began. Whoever asks while a person watches says so in the question, and only then does the asked one send what streams.
Signals may be lost and anybody may send them: only those of the very reaction to a question are heard, and
what is not well formed is passed over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from roundelay.network.client import NetworkClient, Signal
from roundelay.network.errors import RoundelayError

from .events import PieceKind, RemoteCall, RemoteOutput
from .ids import reaction_id
from .paths import MAX_PATH_CHARS, is_path, path_of_call
from .text import replace_surrogates

MAX_PIECES = 64
"""Of one signal."""
MAX_TEXT_CHARS = 4000
MAX_NAME_CHARS = 64
MAX_ASKED = 16
MAX_NUMBER = 2**31
"""Of turns, calls and places in a text."""
MAX_SIGNALS_A_SECOND = 100
"""Of one agent that is waited for; what is more is lost, as if the network had lost it."""

_logger = logging.getLogger(__name__)

Emit = Callable[[RemoteOutput | RemoteCall], None]


@dataclass(frozen=True, slots=True)
class Listener:
    """A call that waits: its reaction, its place in it, who numbers what streams there, and who takes it."""

    reaction: str
    path: str
    turn: int
    call: int
    pieces: Iterator[int]
    emit: Emit


@dataclass(slots=True)
class _Heard:
    """A reaction that is waited for: who takes what comes of it, at which path, and how much that was this second."""

    listener: Listener
    path: str
    second: int = 0
    count: int = 0

    def has_room(self) -> bool:
        """Count one more signal; False if it is one too many."""
        second = int(asyncio.get_running_loop().time())
        self.second, self.count = second, self.count + 1 if second == self.second else 1
        return self.count <= MAX_SIGNALS_A_SECOND


class Relays:
    """The reactions that calls of one agent wait for, on one connection."""

    def __init__(self, client: NetworkClient) -> None:
        self._client = client
        self._heard: dict[tuple[str, str], _Heard] = {}  # by agent and reaction
        self._wants_signals = False  # once anybody has asked while a person watched
        self._watching = ""  # the session that is sent them

    @contextmanager
    def listen(self, questions: Mapping[str, int], listener: Listener) -> Iterator[None]:
        """Hear the reactions to these questions (seqs, by whom they were put to), as long as the block runs."""
        epoch = self._client.welcome.network.epoch
        heard = {
            (agent_id, reaction_id(agent_id, seq, epoch)): _Heard(
                listener, path_of_call(listener.path, listener.turn, listener.call, number)
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
        """On a new connection: as `watch`, if that was asked before. What is listened to may come only later: a question
        may be on its way."""
        if self._wants_signals:
            await self.watch()

    def hear(self, signal: Signal) -> None:
        """Pass a signal on, if a call waits for the reaction that it is about."""
        match signal.body:
            case {"reaction": str(reaction)} if heard := self._heard.get((signal.sender_id, reaction)):
                if heard.has_room():
                    read = _read_pieces if signal.kind == "delta" else _read_call
                    for event in read(signal, heard.listener, heard.path):
                        heard.listener.emit(event)
            case _:
                return


def _read_pieces(signal: Signal, listener: Listener, path: str) -> Iterator[RemoteOutput]:
    given = signal.body.get("pieces")
    for piece in islice(given if isinstance(given, list) else [], MAX_PIECES):
        match piece:
            case {
                "turn": int(turn),
                "kind": "text" | "reasoning" | "tool" | "progress" as kind,
                "at": int(at),
                "text": str(text),
            }:
                inside = _join(path, piece.get("path", ""))
                call = piece.get("call")
                if inside is None or not all(map(_is_number, (turn, at, 0 if call is None else call))):
                    continue
                known: PieceKind = kind
                tool = replace_surrogates(str(piece.get("tool") or "")[:MAX_NAME_CHARS])
                kept = replace_surrogates(text[-MAX_TEXT_CHARS:])
                yield RemoteOutput(
                    listener.reaction, turn, signal.sender_id, known, at + len(text) - len(kept), kept, call, tool,
                    piece.get("is_done") is True, inside, next(listener.pieces),
                )  # fmt: skip
            case _:
                continue


def _read_call(signal: Signal, listener: Listener, path: str) -> Iterator[RemoteCall]:
    match signal.body:
        case {"turn": int(turn), "call": int(call), "tool": str(tool), "active": bool(is_active)}:
            inside = _join(path, signal.body.get("path", ""))
            asked = signal.body.get("asked")
            names = [it for it in asked if isinstance(it, str)] if isinstance(asked, list) else []
            if inside is not None and _is_number(turn) and _is_number(call):
                yield RemoteCall(
                    listener.reaction, turn, call, signal.sender_id, replace_surrogates(tool[:MAX_NAME_CHARS]), is_active,
                    signal.body.get("ok") is True,
                    tuple(replace_surrogates(it[:MAX_NAME_CHARS]) for it in names[:MAX_ASKED]), inside,
                )  # fmt: skip
        case _:
            return


def _is_number(given: object) -> bool:
    """Whether it is one that can be sent on: others would fail in the middle of this agent's own signals."""
    return type(given) is int and 0 <= given <= MAX_NUMBER


def _join(outer: str, inner: object) -> str | None:
    """Give the path of what runs at ``inner`` of an agent at ``outer``; None for what is no path, or too deep."""
    if not isinstance(inner, str) or (inner and not is_path(inner)):
        return None
    path = f"{outer}/{inner}" if inner else outer
    return path if len(path) <= MAX_PATH_CHARS else None
