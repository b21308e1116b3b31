"""What agents are writing at the moment, as lines for a terminal: answers that grow, what tools give, what is thought. No IO.

Fed with the signals of kind ``delta`` that reach a client; `chat_input` draws it between the messages and the line being typed. Signals may
be lost: a stream of which a piece is missing shows a gap. Everything here is the writing of participants, so it goes through `clean`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from roundelay.network.client import Signal
from roundelay.terminal import CONTINUED, Paint, break_lines, clean, clean_lines, fit

MAX_REACTIONS = 32
MAX_STREAMS = 64
MAX_CHARS = 8000
GAP = " … "
_Key = tuple[str, int, str, object]  # path, turn, kind, call


@dataclass(slots=True)
class _Stream:
    path: str
    kind: str
    tool: str
    text: str = ""
    end: int = 0


@dataclass(slots=True)
class _Writing:
    agent_id: str
    thread_id: str
    streams: dict[_Key, _Stream] = field(default_factory=dict)
    """The one that was written last stands last."""
    done: set[str] = field(default_factory=set)
    """The paths of calls that are done: what still comes of them is too late."""
    calls: dict[str, str] = field(default_factory=dict)
    """The tools of the calls under way, by the path that an agent inside of one has."""


class LiveView:
    """What is being written. A reaction is there from its first piece until `end`; what comes later of it is too late."""

    def __init__(self) -> None:
        self._writings: dict[str, _Writing] = {}
        self._ended: deque[str] = deque(maxlen=4 * MAX_REACTIONS)

    def take(self, signal: Signal) -> list[str]:
        """Take the pieces of a signal; gives what agents reported in it, for readers without a screen. What is no piece is passed over."""
        match signal:
            case Signal(kind="delta", body={"reaction": str(reaction), "pieces": list(pieces)}):
                writing = self._find(signal, reaction)
                if writing is not None:
                    reports = [_take_piece(writing, it) for it in pieces if isinstance(it, dict)]
                    return [clean(it) for it in reports if it]
            case Signal(kind="tool", body={"reaction": str(reaction), "turn": int(), "call": int()}):
                writing = self._find(signal, reaction)
                if writing is not None:
                    _take_call(writing, signal.body)
            case Signal(kind="thinking", body={"reaction": str(reaction), "active": False}):
                self.end(reaction)
            case Signal(kind="thinking", body={"reaction": str(reaction), "active": True}) if reaction in self._ended:
                self._ended.remove(reaction)  # it is taken up again
        return []

    def _find(self, signal: Signal, reaction: str) -> _Writing | None:
        """The writing that a signal is about; None for one that has ended, of somebody else, or too much."""
        writing = self._writings.get(reaction)
        if writing is None and reaction not in self._ended and len(self._writings) < MAX_REACTIONS:
            writing = self._writings[reaction] = _Writing(signal.sender_id, signal.thread_id)
        return writing if writing is not None and writing.agent_id == signal.sender_id else None

    def end(self, reaction: str) -> None:
        """A reaction has ended: its message, if there is one, says the rest."""
        self._writings.pop(reaction, None)
        self._ended.append(reaction)

    def end_of(self, agent_id: str, thread_id: str) -> None:
        """An agent has spoken in a thread: what it was writing there is a message now."""
        for writing in self._writings.values():
            if (writing.agent_id, writing.thread_id) == (agent_id, thread_id):
                writing.streams = {key: it for key, it in writing.streams.items() if it.kind != "text" or it.path}

    def drop(self, agent_id: str) -> None:
        """An agent is gone; it may take its reactions up again."""
        self._writings = {name: it for name, it in self._writings.items() if it.agent_id != agent_id}

    def clear(self) -> None:
        self._writings.clear()

    def lines(self, thread_id: str, *, width: int, rows: int, paint: Paint) -> list[str]:
        """What is being written in a thread, at most ``rows`` lines of at most ``width`` columns; the newest of each agent."""
        shown = [it for it in self._writings.values() if it.thread_id == thread_id and it.streams]
        if not shown or rows < 1:
            return []
        each = max(rows // len(shown), 1)
        return [line for it in shown for line in _lines_of(it, width, each, paint)][-rows:]


def _take_call(writing: _Writing, body: dict[str, object]) -> None:
    """A call begins, or is done: then what was shown of it goes."""
    outer, turn, call = str(body.get("path", ""))[:80], body["turn"], body["call"]
    path = f"{outer}/{turn}.{call}".lstrip("/")
    if body.get("active") is True:
        if len(writing.calls) < MAX_STREAMS:
            writing.calls[path] = str(body.get("tool", ""))[:64]
        return
    writing.calls.pop(path, None)
    if len(writing.done) < 16 * MAX_STREAMS:
        writing.done.add(path)

    def is_of_it(key: _Key) -> bool:
        return (key[0], key[1], key[3]) == (outer, turn, call) or f"{key[0]}/".startswith(f"{path}/")

    writing.streams = {key: it for key, it in writing.streams.items() if not is_of_it(key)}


def _take_piece(writing: _Writing, piece: dict[str, object]) -> str | None:
    match piece:
        case {
            "turn": int(turn),
            "kind": "text" | "reasoning" | "tool" | "progress" as kind,
            "at": int(at),
            "text": str(text),
        }:
            path, call = str(piece.get("path", ""))[:80], piece.get("call")
        case _:
            return None
    at_call = f"{path}/{turn}.{call}".lstrip("/")
    if not writing.done.isdisjoint([*_outer_paths(path), at_call]):
        return None
    key: _Key = (path, turn, kind, call if isinstance(call, int) else None)
    if kind == "progress":
        is_done = piece.get("is_done") is True
        if is_done:
            writing.streams.pop(key, None)
        else:
            writing.streams[key] = _Stream(path, kind, "", text[:MAX_CHARS])
        return None if is_done else f"{writing.agent_id}: {text}"
    known = writing.streams.pop(key, None)
    if known is None:
        known = _Stream(path, kind, str(piece.get("tool", ""))[:64])
        if kind == "text" and not path:  # what it thought and looked up before is done with
            writing.streams = {other: it for other, it in writing.streams.items() if other[1] >= turn or it.path}
    if at < known.end:
        known.text = ""  # it starts over: the first attempt was given up
    elif at > known.end:
        known.text += GAP
    known.text = (known.text + text)[-MAX_CHARS:]
    known.end = at + len(text)
    writing.streams[key] = known
    while len(writing.streams) > MAX_STREAMS:
        del writing.streams[next(iter(writing.streams))]
    return None


def _lines_of(writing: _Writing, width: int, rows: int, paint: Paint) -> list[str]:
    """The agent's own text in full, as far as there is room; a line for each other thing that it is at."""
    own = [it for it in writing.streams.values() if it.kind == "text" and not it.path][-1:]
    others = [it for it in writing.streams.values() if it.kind != "text" or it.path]
    # Its thoughts are done with once it writes.
    others = [it for it in others if not (own and it.kind == "reasoning" and not it.path)]
    if own:
        others = others[-max(rows // 3, 0) :] if rows >= 3 else []
    made = [_line_of(writing, it, width, paint) for it in others[-rows:]]
    if own:
        head = f"{clean(writing.agent_id)} … "
        room = width - len(CONTINUED)
        first, *rest = break_lines(clean_lines(own[0].text), room, first_width=max(width - len(head), 8))
        # As in a message, no line of it can look like one of ours.
        text = [f"{paint.name(writing.agent_id)}{paint.dim(' … ')}{first}", *(paint.dim(CONTINUED) + it for it in rest)]
        made += text[-max(rows - len(made), 1) :]
    return made


def _line_of(writing: _Writing, stream: _Stream, width: int, paint: Paint) -> str:
    label = {"reasoning": "thinks", "tool": clean(stream.tool) or "tool", "progress": "", "text": "writes"}[stream.kind]
    inner = [writing.calls.get(path) or "…" for path in _outer_paths(stream.path)]
    who = " › ".join(map(clean, [writing.agent_id, *inner]))
    head = f"{who} · {label}: " if label else f"{who} · "
    flat = clean(" ".join(stream.text.split()))
    room = max(width - len(head), 8)
    if stream.kind == "progress":
        tail = fit(flat, room)
    else:
        tail = flat if len(flat) <= room else f"…{_last_words(flat, room - 1)}"
    return paint.dim(break_lines([f"{head}{tail}"], width)[0])


def _outer_paths(path: str) -> list[str]:
    """A path and those around it, the outermost first: ``1.0/2.1`` gives ``1.0`` and ``1.0/2.1``."""
    parts = path.split("/") if path else []
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]


def _last_words(text: str, room: int) -> str:
    """The end of a text that fits, from the beginning of a word where there is one."""
    rest = text[-(room // 2 if not text.isascii() else room) :]  # wide characters take two columns
    space = rest.find(" ")
    return rest[space + 1 :] if 0 <= space < len(rest) // 2 else rest
