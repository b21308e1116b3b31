"""What agents are writing at the moment, as lines for a terminal: answers that grow, what tools give, what is thought. No IO.

Fed with the signals that reach a client; `chat_input` draws it between the messages and the line being typed. Signals may be lost: a
stream of which a piece is missing shows a gap. They are anybody's to send: an agent is shown under its own name whatever it claims, and
all that is kept is bounded. Everything here is the writing of participants, so it goes through `clean`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from roundelay.agents.paths import is_inside, is_path, outer_paths, path_of_call
from roundelay.clean_text import break_lines, clean, clean_lines, display_width, fit
from roundelay.network.client import Signal
from roundelay.terminal import CONTINUED, Paint

MAX_REACTIONS = 32
MAX_STREAMS = 64
MAX_CHARS = 8000
MAX_REPORT_CHARS = 500
MAX_NAME_CHARS = 64
MAX_ID_CHARS = 128
"""Of a reaction's id, as on the wire."""
GAP = " … "
_Reaction = tuple[str, str]  # its agent and its id
_Key = tuple[str, int, str, int | None]  # path, turn, kind, call


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
    """Of the calls under way the tool, or the agent that it waits for, by the path that an agent inside of one has."""


class LiveView:
    """What is being written. A reaction is there from its first piece until it ends; what comes later of it is too late."""

    def __init__(self) -> None:
        self._writings: dict[_Reaction, _Writing] = {}
        self._ended: deque[_Reaction] = deque(maxlen=4 * MAX_REACTIONS)

    def take(self, signal: Signal) -> list[str]:
        """Take a signal; gives what it tells of calls and of what they report, for readers without a screen. What is malformed is passed
        over."""
        match signal.body:
            case {"reaction": str(name)} if len(name) <= MAX_ID_CHARS:
                reaction = (signal.sender_id, name)
            case _:
                return []
        reports: list[str | None] = []
        match signal:
            case Signal(kind="delta", body={"pieces": list(pieces)}):
                if (writing := self._find(reaction, signal.thread_id)) is not None:
                    reports += [_take_piece(writing, it) for it in pieces[:MAX_STREAMS] if isinstance(it, dict)]
            case Signal(kind="tool", body=body) if (place := read_place(body)) is not None:
                if (writing := self._find(reaction, signal.thread_id)) is not None:
                    reports.append(_take_call(writing, place, body))
            case Signal(kind="thinking", body={"active": False}):
                self._writings.pop(reaction, None)  # its message, if there is one, says the rest
                self._ended.append(reaction)
            case Signal(kind="thinking", body={"active": True}) if reaction in self._ended:
                self._ended.remove(reaction)  # it is taken up again
        return [clean(it) for it in reports if it]

    def _find(self, reaction: _Reaction, thread_id: str) -> _Writing | None:
        """What is known of a reaction; None if it has ended."""
        if reaction in self._ended:
            return None
        if reaction not in self._writings:
            if len(self._writings) >= MAX_REACTIONS:  # whoever has the most of them gives one up
                [(most, _)] = Counter(agent_id for agent_id, _ in self._writings).most_common(1)
                del self._writings[next(it for it in self._writings if it[0] == most)]
            self._writings[reaction] = _Writing(reaction[0], thread_id)
        return self._writings[reaction]

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


def read_place(body: Mapping[str, object]) -> str | None:
    """Give the path of the call that a signal is about; None if that can be none. An agent that numbers no calls has one at a time."""
    match body.get("path") or "", body.get("turn") or 0, body.get("call") or 0:
        case str(path), int(turn), int(call) if is_path(place := path_of_call(path, turn, call)):
            return place
    return None


def _take_call(writing: _Writing, place: str, body: Mapping[str, object]) -> str | None:
    """A call begins, or is done: then what was shown of it goes. Gives what to tell of it."""
    outer = place.rpartition("/")[0]
    if body.get("active") is True:
        tool, asked = str(body.get("tool", "a tool"))[:MAX_NAME_CHARS], body.get("asked")
        names = [str(it)[:MAX_NAME_CHARS] for it in asked[:MAX_STREAMS]] if isinstance(asked, list) else []
        for number, name in enumerate(names or [tool]):
            if len(writing.calls) < MAX_STREAMS:
                writing.calls[f"{place}.{number}" if number else place] = name
        if names == [tool]:
            return None  # a tool that is an agent elsewhere: it has been told
        return f"{_name(writing, outer)} " + (f"waits for {', '.join(names)}" if names else f"uses {tool}")
    writing.calls = {inner: name for inner, name in writing.calls.items() if not is_inside(inner, place)}
    if len(writing.done) < 16 * MAX_STREAMS:
        writing.done.add(place)
    writing.streams = {
        key: it
        for key, it in writing.streams.items()
        if not is_inside(key[0], place) and (key[3] is None or path_of_call(key[0], key[1], key[3]) != place)
    }
    return None


def _take_piece(writing: _Writing, piece: Mapping[str, object]) -> str | None:
    match piece:
        case {
            "turn": int(turn),
            "kind": "text" | "reasoning" | "tool" | "progress" as kind,
            "at": int(at),
            "text": str(text),
        }:
            place, call = read_place(piece), piece.get("call")
        case _:
            return None
    if place is None:
        return None
    path = place.rpartition("/")[0]
    key: _Key = (path, turn, kind, call if isinstance(call, int) else None)
    if _is_over(writing, path if key[3] is None else place):
        return None
    if kind == "progress":
        is_done = piece.get("is_done") is True
        if is_done:
            writing.streams.pop(key, None)
        else:
            writing.streams[key] = _Stream(path, kind, "", text[:MAX_REPORT_CHARS])
            _keep_newest(writing)
        return None if is_done else f"{_name(writing, path)}: {text[:MAX_REPORT_CHARS]}"
    known = writing.streams.pop(key, None)
    if known is None:
        known = _Stream(path, kind, str(piece.get("tool", ""))[:MAX_NAME_CHARS])
        writing.streams = {other: it for other, it in writing.streams.items() if not _is_past(other, key)}
    if at < known.end:
        known.text = ""  # it starts over: the first attempt was given up
    elif at > known.end:
        known.text += GAP
    known.text = (known.text + text)[-MAX_CHARS:]
    known.end = at + len(text)
    writing.streams[key] = known
    _keep_newest(writing)
    return None


def _keep_newest(writing: _Writing) -> None:
    while len(writing.streams) > MAX_STREAMS:
        del writing.streams[next(iter(writing.streams))]


def _is_past(stream: _Key, begun: _Key) -> bool:
    """Whether a stream is done with since another one of its run has begun: it is of an earlier turn, or was thought
    before what is written."""
    (path, turn, kind, _), (new_path, new_turn, new_kind, _) = stream, begun
    return path == new_path and (turn < new_turn or (turn == new_turn and (kind, new_kind) == ("reasoning", "text")))


def _lines_of(writing: _Writing, width: int, rows: int, paint: Paint) -> list[str]:
    """The agent's own text in full, as far as there is room; a line for each other thing that it is at."""
    own = [it for it in writing.streams.values() if it.kind == "text" and not it.path][-1:]
    others = [it for it in writing.streams.values() if it.kind != "text" or it.path]
    if own:
        others = others[-max(rows // 3, 0) :] if rows >= 3 else []
    made = [_line_of(writing, it, width, paint) for it in others[-rows:]]
    if own:
        name = fit(clean(writing.agent_id), width // 2)
        room = width - len(CONTINUED)
        end = clean_lines(own[0].text[-2 * rows * width :])  # no more could be shown
        first, *rest = break_lines(end, room, first_width=width - display_width(f"{name} … "))
        # As in a message, no line of it can look like one of ours.
        text = [f"{paint.name(name)}{paint.dim(' … ')}{first}", *(paint.dim(CONTINUED) + it for it in rest)]
        made += text[-max(rows - len(made), 1) :]
    return made


def _line_of(writing: _Writing, stream: _Stream, width: int, paint: Paint) -> str:
    label = {"reasoning": "thinks", "tool": clean(stream.tool) or "tool", "progress": "", "text": "writes"}[stream.kind]
    who = clean(_name(writing, stream.path))
    text = (
        stream.text[: 2 * width] if stream.kind == "progress" else stream.text[-2 * width :]
    )  # no more could be shown
    flat = clean(" ".join(text.split()))
    head = _fit_end(f"{who} · {label}: " if label else f"{who} · ", max(width * 2 // 3, width - display_width(flat)))
    room = width - display_width(head)
    return paint.dim(head + (fit(flat, room) if stream.kind == "progress" else _fit_end(flat, room)))


def _name(writing: _Writing, path: str) -> str:
    """Who is at work at a path: the agent, and what it called, or asked, there."""
    return " › ".join([writing.agent_id, *(writing.calls.get(it) or "…" for it in outer_paths(path))])


def _is_over(writing: _Writing, path: str) -> bool:
    """Whether a call at a path, or around it, is done."""
    calls = [call for place in outer_paths(path) for call in (place, place.rpartition(".")[0])]  # 1.0.1 is in 1.0 too
    return not writing.done.isdisjoint(calls)


def _fit_end(text: str, width: int) -> str:
    """Give as much of the end of a clean text as ``width`` columns hold, with a sign if that is not all; from the beginning of a word where
    there is one near."""
    if display_width(text) <= width:
        return text
    start, room = len(text), width - 1
    while start and (room := room - display_width(text[start - 1])) >= 0:
        start -= 1
    space = text.find(" ", start)
    return f"…{text[space + 1 if start <= space < (start + len(text)) // 2 else start :]}"
