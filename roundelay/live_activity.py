"""Live activity in a network: agents that think, people who type, running calls and growing texts. This module draws
nothing.

`LiveActivity` receives the events and messages of a client and stores the work in progress that a screen shows. The
chat (`terminal.activity_lines`), the full-screen terminal and the page (web/page/core) show the same activity. This
module performs no IO, and its timers use the event loop.

Signals may be lost. A text with a missing piece shows a gap, and an agent that goes offline has no activity. Anybody
may send signals. Therefore an agent is identified by the sender of the signal, malformed signals are skipped, and all
stored data has a limit. At a limit, the agent with the most reactions loses its oldest one, so that a flood of signals
cannot remove the activity of others. This module does not sanitize texts, so the screen must sanitize them.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from roundelay.agents.approvals import STILL_WAITS, read_decided, read_deciders, read_request
from roundelay.agents.events import PieceKind
from roundelay.agents.inbox import read_decision
from roundelay.agents.live_activity import CallSignal, PieceSignal, read_call, read_pieces
from roundelay.agents.reaction_ids import is_inside, outer_paths, path_of_call
from roundelay.network.client import Notice, Presence, Reconnected, Reconnecting, Signal
from roundelay.network.messages import BaseMessage

TYPING_SHOWN_S, VIEWING_SHOWN_S = 6.0, 30.0
MAX_VIEWING = 256
"""Maximum number of stored (thread, person) pairs for people who view a thread."""
MAX_HEARD = 1000
"""Maximum number of stored reaction ids, and of stored pending requests."""
MAX_WORKS, MAX_WRITING = 256, 32
"""Maximum number of stored active reactions, and of stored reactions that have growing texts."""
MAX_CALLS, MAX_DONE, MAX_STREAMS = 32, 256, 64
"""Limits for one reaction: active calls, finished calls, and growing texts."""
MAX_CHARS, MAX_REPORT_CHARS = 8000, 500
MAX_ID_CHARS = 128
"""Maximum length of a reaction's id, as in the wire protocol."""
GAP = " … "
_Reaction = tuple[str, str]  # agent id and reaction id
_StreamKey = tuple[str, int, PieceKind, int | None]  # path, turn, kind, call


@dataclass(frozen=True, slots=True)
class ActiveCall:
    """A call in progress, with its tool and the agents whose answers the call waits for."""

    tool: str
    asked: tuple[str, ...] = ()


@dataclass(slots=True)
class GrowingText:
    """A text that grows while an agent works, at a path of a reaction. For progress reports, only the newest report is
    stored."""

    path: str
    kind: PieceKind
    tool: str = ""
    text: str = ""
    end: int = 0
    """Position in the whole text at which the next piece belongs."""


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A call that waits for a person's decision. ``seq`` is the sequence number of the message that requests the
    decision."""

    seq: int
    agent_id: str
    reaction: str
    thread_id: str
    deciders: tuple[str, ...] | None = None
    """People who may decide, or None if everybody who can read the request may decide."""


@dataclass(frozen=True, slots=True)
class ActivityNews:
    """A change in one line, for output without a live display. ``who`` lists the agent and then the calls inside it,
    outermost first."""

    who: tuple[str, ...]
    verb: Literal["uses", "waits for", "reports", "finished without an answer"]
    object: str


@dataclass(slots=True)
class ActiveReaction:
    """One reaction in progress."""

    agent_id: str
    thread_id: str
    is_thinking: bool = False
    """Whether the agent sent a ``thinking`` signal. Some agents send only texts and calls."""
    calls: dict[str, ActiveCall] = field(default_factory=dict)
    """Calls in progress, by path."""
    texts: dict[_StreamKey, GrowingText] = field(default_factory=dict)
    """Growing texts; the most recently written text is last."""
    _done: deque[str] = field(
        default_factory=lambda: deque(maxlen=MAX_DONE)
    )  # paths of finished calls, whose later signals are stale
    _said: int = 0  # last turn whose text is now part of a message

    def name_path(self, path: str) -> tuple[str, ...]:
        """Return the chain of callers at a path: the agent, then each tool or agent called on the way.

        A call whose signal was lost is shown as ``…``.
        """
        return (self.agent_id, *map(self._name_run, outer_paths(path)))

    def list_innermost(self) -> list[ActiveCall]:
        """Return the active calls that have no other active call inside them."""
        return [
            call
            for path, call in self.calls.items()
            if not any(other != path and is_inside(other, path) for other in self.calls)
        ]

    def handle_call(self, seen: CallSignal) -> ActivityNews | None:
        """Handle a call that starts, waits for agents, or ends. The end of a call also ends the calls inside it."""
        path = path_of_call(seen.path, seen.turn, seen.call)
        if seen.is_active:
            # Update a known call even at the limit: the agents that it waits for may change.
            if path in self.calls or len(self.calls) < MAX_CALLS:
                self.calls[path] = ActiveCall(seen.tool, seen.asked)
            if seen.asked == (seen.tool,):
                return None  # the tool is a remote agent itself and has been announced already
            who = self.name_path(path.rpartition("/")[0])
            return (
                ActivityNews(who, "waits for", ", ".join(seen.asked))
                if seen.asked
                else ActivityNews(who, "uses", seen.tool)
            )
        self.calls = {other: call for other, call in self.calls.items() if not is_inside(other, path)}
        self._done.append(path)
        self.texts = {key: it for key, it in self.texts.items() if not self._is_over(key)}
        return None

    def end_answer_text(self) -> None:
        """Remove the growing text of the answer, because the answer is now a message. Later pieces of the text are
        stale."""
        # Only the agent's own text becomes the message. The texts of its calls continue to grow.
        said = [key for key, it in self.texts.items() if it.kind == "text" and not it.path]
        self._said = max([self._said, *(turn for _, turn, _, _ in said)])
        self.texts = {key: it for key, it in self.texts.items() if key not in said}

    def handle_piece(self, piece: PieceSignal) -> ActivityNews | None:
        """Append a piece to a text. When a new text begins, the earlier texts of its run are complete and
        are removed."""
        path, kind = piece.path, piece.kind
        key: _StreamKey = (path, piece.turn, kind, piece.call)
        # Skip pieces that arrive after the message: they would show a text that nobody is writing.
        if self._is_over(key):
            return None
        known = self.texts.pop(key, None)
        if kind == "progress":
            if piece.is_done:
                return None
            self._keep(key, GrowingText(path, kind, text=piece.text[:MAX_REPORT_CHARS]))
            return ActivityNews(self.name_path(path), "reports", piece.text[:MAX_REPORT_CHARS])
        if known is None:
            known = GrowingText(path, kind, piece.tool)
            self.texts = {other: it for other, it in self.texts.items() if not _is_past(other, key)}
        if piece.at < known.end:
            known.text = ""  # the model call was repeated, so the text starts again
        elif piece.at > known.end:
            known.text += GAP
        # Screens show only the end, so the beginning of a long text is dropped.
        known.text = (known.text + piece.text)[-MAX_CHARS:]
        known.end = piece.at + len(piece.text)
        self._keep(key, known)
        return None

    def _keep(self, key: _StreamKey, stream: GrowingText) -> None:
        self.texts[key] = stream
        if len(self.texts) > MAX_STREAMS:
            del self.texts[next(iter(self.texts))]

    def _is_over(self, key: _StreamKey) -> bool:
        """Whether a text is stale because it is part of a message, or because its call or an enclosing call has
        ended."""
        path, turn, kind, call = key
        if kind == "text" and not path and turn <= self._said:
            return True
        paths = outer_paths(path if call is None else path_of_call(path, turn, call))
        return any(
            it in self._done or it.rpartition(".")[0] in self._done for it in paths
        )  # the path 1.0.1 belongs to the call 1.0 too

    def _name_run(self, path: str) -> str:
        """Return the name of a run inside a call. The path 1.0 is the first run of that call, and 1.0.2 the third."""
        number = 0
        if path not in self.calls:
            path, _, run = path.rpartition(".")
            number = int(run)
        call = self.calls.get(path)
        names = (call.asked or (call.tool,)) if call is not None else ()
        return names[number] if number < len(names) else "…"


class LiveActivity:
    """Live activity that one client sees. A reaction is listed from its first signal until its end."""

    def __init__(self, me: str = "") -> None:
        self.me = me
        """Id of the person at the screen, or empty."""
        self.reactions: set[tuple[str, str]] = set()
        """All reactions that have sent a signal so far, as (id, agent)."""
        self.requests: dict[int, PendingRequest] = {}
        """Calls that wait for a person's decision, by the sequence number of the request."""
        self._decided: dict[int, PendingRequest] = {}  # newest decided requests, by the sequence number of the decision
        self._refused: deque[tuple[str, int]] = deque(
            maxlen=MAX_WORKS
        )  # (agent, sequence number) of decisions that the agent rejected
        self.takeovers: dict[str, str] = {}
        """Active takeovers: the person in control, by thread."""
        self.unanswered: dict[str, list[str]] = {}
        """Agents that finished without an answer since the last message, by thread."""
        self.is_connected = True
        self.on_change: Callable[[], None] = lambda: None
        self._works: dict[_Reaction, ActiveReaction] = {}
        self._ended: deque[_Reaction] = deque(maxlen=MAX_WORKS)  # ended reactions, whose later signals are stale
        self._typing: dict[str, asyncio.TimerHandle] = {}  # timers that end the typing state, by person
        # timers that end the viewing state, by (thread, person)
        self._viewing: dict[tuple[str, str], asyncio.TimerHandle] = {}
        self._news = asyncio.Event()

    # --- input

    def handle_event(self, event: object) -> list[ActivityNews]:
        """Handle an event of the client. Return one-line descriptions of new calls and progress."""
        news: list[ActivityNews] = []
        match event:
            case Signal(kind="typing"):
                self._stop_typing(event.sender_id)
                loop = asyncio.get_running_loop()
                # No signal announces the end of typing, so a timer ends it.
                self._typing[event.sender_id] = loop.call_later(TYPING_SHOWN_S, self._stop_typing, event.sender_id)
            case Signal(kind="viewing", body={"active": bool(is_active)}):
                self._take_viewing((event.thread_id, event.sender_id), is_active)
            case Signal(body={"reaction": str(name)}) if len(name) <= MAX_ID_CHARS:
                news = [it for it in self._take_signal((event.sender_id, name), event) if it is not None]
            case Notice(kind="taken", thread_id=str(thread_id), body={"agent_id": str(by)}):
                self.takeovers[thread_id] = by
                # Agents neither answer nor wait for decisions in a thread that a person has taken over.
                self.requests = {seq: it for seq, it in self.requests.items() if it.thread_id != thread_id}
            case Notice(kind="given", thread_id=str(thread_id)):
                self.takeovers.pop(thread_id, None)
            # A killed agent cannot send a signal that its work has ended.
            case Presence(state="offline"):
                self._works = {key: it for key, it in self._works.items() if it.agent_id != event.agent_id}
                for key in [it for it in self._viewing if it[1] == event.agent_id]:
                    self._stop_viewing(key)
            case Reconnecting() | Reconnected():
                self.is_connected = isinstance(event, Reconnected)
                self._works.clear()  # the signals that would end this work may be lost with the connection
        self.notify()
        return news

    def handle_message(self, message: BaseMessage) -> None:
        """Handle a message. The message ends the sender's growing text, and may be a request, a decision, or the
        rejection of a decision."""
        # A new message in this thread makes the note about a missing answer obsolete.
        self.unanswered.pop(message.thread_id, None)
        for work in self._works.values():
            if (work.agent_id, work.thread_id) == (message.sender_id, message.thread_id):
                work.end_answer_text()
        if read_request(message) is not None:
            self.add_request(message)
        elif (told := read_decided(message)) is not None:
            known = self.requests.get(told["request"])
            if (
                known is not None and known.agent_id == message.sender_id
            ):  # only the agent that asked may report that the request was decided
                self.resolve_request(told["request"], message.seq)
        elif message.reply_to is not None and read_decision(message) is not None:
            known = self.requests.get(message.reply_to)
            # A message from a person who may not decide leaves the request open.
            if known is None or known.deciders is None or message.sender_id in known.deciders:
                self.resolve_request(message.reply_to, message.seq)
        elif message.reply_to is not None and isinstance((message.metadata or {}).get(STILL_WAITS), int):
            self._wait_on(message.sender_id, message.reply_to)
        self.notify()

    def add_request(self, request: BaseMessage) -> None:
        """Add a request for a decision. The request may be older than this client's connection."""
        reaction = read_request(request)
        if reaction is not None and len(self.requests) < MAX_HEARD:
            names = read_deciders(request)
            deciders = None if names is None else tuple(names)
            waiting = PendingRequest(request.seq, request.sender_id, reaction, request.thread_id, deciders)
            self.requests[request.seq] = waiting
        self.notify()

    def resolve_request(self, request: int, by: int) -> None:
        """Remove a request that the message with the sequence number ``by`` decided."""
        known = self.requests.get(request)
        # The agent's rejection of this decision may arrive before the decision. In that case the request stays open.
        if known is not None and (known.agent_id, by) not in self._refused:
            self._decided[by] = self.requests.pop(request)
        while len(self._decided) > MAX_WORKS:
            del self._decided[next(iter(self._decided))]
        self.notify()

    def _wait_on(self, agent_id: str, decision: int) -> None:
        """Restore a request whose decision the agent rejected, for example because its arguments did not fit. The
        rejection may arrive before the decision."""
        self._refused.append((agent_id, decision))
        if decision in self._decided and self._decided[decision].agent_id == agent_id:
            undecided = self._decided.pop(decision)
            self.requests[undecided.seq] = undecided

    def load_work(self, agents: Iterable[Mapping[str, Any]]) -> None:
        """Load the work that began before this client connected, from the result of ``network.list_agents``."""
        for agent in agents:
            for it in agent.get("work", ()):
                if (
                    it["activity"] in ("works", "stopping")
                    and (key := (agent["agent_id"], it["reaction"])) not in self._ended
                ):
                    self._find(key, it["thread_id"]).is_thinking = True
        self.notify()

    def load_takeovers(self, threads: Iterable[Mapping[str, Any]]) -> None:
        """Load the active takeovers from the result of ``network.list_threads``."""
        self.takeovers = {it["thread_id"]: it["held"]["by"] for it in threads if "held" in it}
        self.notify()

    def notify(self) -> None:
        """Report a change. `wait_until_quiet` starts its waiting time again."""
        self._news.set()
        self.on_change()

    # --- state

    @property
    def typing(self) -> list[str]:
        """Ids of the people who are typing."""
        return sorted(self._typing)

    def list_viewing(self, thread_id: str) -> list[str]:
        """Return the ids of the people who view a thread."""
        return sorted(person for thread, person in self._viewing if thread == thread_id)

    def list_busy(self) -> dict[str, list[ActiveCall]]:
        """Return the agents that are thinking, with their innermost calls."""
        busy: dict[str, list[ActiveCall]] = {
            it: [] for it in sorted({it.agent_id for it in self._list_thinking().values()})
        }
        for work in self._works.values():
            if work.agent_id in busy:
                busy[work.agent_id] += work.list_innermost()
        return busy

    def list_busy_threads(self) -> set[str]:
        """Return the ids of the threads in which an agent is thinking."""
        return {it.thread_id for it in self._list_thinking().values()}

    def list_working_threads(self) -> set[str]:
        """Return the ids of the threads in which an agent is thinking and does not wait for a person's decision."""
        asking = self.list_waiting_reactions()
        return {it.thread_id for key, it in self._list_thinking().items() if key not in asking}

    def list_writing(self, thread_id: str) -> list[ActiveReaction]:
        """Return the reactions in a thread that have growing texts and do not wait for a decision."""
        asking = self.list_waiting_reactions()
        works = (it for key, it in self._works.items() if key not in asking)
        return [it for it in works if it.thread_id == thread_id and it.texts]

    def list_own_requests(self, thread_id: str | None = None) -> list[PendingRequest]:
        """Return the requests that the person at the screen may decide, in one thread or in all threads."""
        mine = (it for it in self.requests.values() if it.deciders is None or not self.me or self.me in it.deciders)
        return [it for it in mine if thread_id is None or it.thread_id == thread_id]

    def list_waiting_reactions(self) -> set[tuple[str, str]]:
        """Return the reactions that wait for a person's decision, as (agent, id)."""
        return {(it.agent_id, it.reaction) for it in self.requests.values()}

    async def wait_until_quiet(self, quiet_s: float) -> None:
        """Wait until nothing has happened for ``quiet_s`` seconds, the hub is connected, and no agent is thinking.

        Agents that wait for a decision do not count, because perhaps no person is there to decide.
        """
        while True:
            self._news.clear()
            try:
                async with asyncio.timeout(quiet_s):
                    await self._news.wait()
            except TimeoutError:
                if self._list_thinking().keys() <= self.list_waiting_reactions() and self.is_connected:
                    return

    def _list_thinking(self) -> dict[_Reaction, ActiveReaction]:
        return {key: it for key, it in self._works.items() if it.is_thinking}

    def _stop_typing(self, person: str) -> None:
        timer = self._typing.pop(person, None)
        if timer is not None:
            timer.cancel()
        self.on_change()

    def _take_viewing(self, key: tuple[str, str], is_active: bool) -> None:
        self._stop_viewing(key)
        if is_active:
            # At the limit, remove the oldest entry: its person looked at the thread longest ago.
            if len(self._viewing) >= MAX_VIEWING:
                self._stop_viewing(next(iter(self._viewing)))
            loop = asyncio.get_running_loop()
            self._viewing[key] = loop.call_later(VIEWING_SHOWN_S, self._stop_viewing, key)

    def _stop_viewing(self, key: tuple[str, str]) -> None:
        timer = self._viewing.pop(key, None)
        if timer is not None:
            timer.cancel()
        self.on_change()

    def _take_signal(self, reaction: _Reaction, signal: Signal) -> Iterable[ActivityNews | None]:
        if signal.kind in ("thinking", "tool") and len(self.reactions) < MAX_HEARD:
            self.reactions.add((reaction[1], reaction[0]))
        match signal:
            case Signal(kind="thinking", body={"active": False} as body):
                self._works.pop(reaction, None)  # the answer, if any, arrives as a message
                # Remove the requests of the ended reaction, because they can no longer be decided.
                ended = [it.seq for it in self.requests.values() if (it.agent_id, it.reaction) == reaction]
                for seq in ended:
                    del self.requests[seq]
                # The end may be signaled twice, but a silent end must be shown once.
                if reaction not in self._ended:
                    self._ended.append(reaction)
                    if body.get("silent") is True:
                        return [self._take_silence(reaction[0], signal.thread_id)]
            case Signal(kind="thinking", body={"active": True}):
                if reaction in self._ended:
                    self._ended.remove(reaction)  # the agent resumed the reaction after a restart
                self._find(reaction, signal.thread_id).is_thinking = True
            case Signal() if reaction in self._ended:
                pass
            case Signal(kind="tool") if (seen := read_call(signal.body)) is not None:
                return [self._find(reaction, signal.thread_id).handle_call(seen)]
            case Signal(kind="delta", body={"pieces": list()}):
                work = self._find(reaction, signal.thread_id)
                # Only a reaction that starts to write can exceed the limit.
                if not work.texts:
                    self._make_room_to_write()
                return [work.handle_piece(it) for it in read_pieces(signal.body)]
        return []

    def _take_silence(self, agent_id: str, thread_id: str) -> ActivityNews:
        """Store that an agent finished without an answer, so that people stop waiting for one."""
        while len(self.unanswered) >= MAX_WORKS:
            del self.unanswered[next(iter(self.unanswered))]
        named = self.unanswered.setdefault(thread_id, [])
        if agent_id not in named:
            named[:] = [*named, agent_id][-MAX_CALLS:]
        return ActivityNews((agent_id,), "finished without an answer", "")

    def _find(self, reaction: _Reaction, thread_id: str) -> ActiveReaction:
        if reaction not in self._works:
            if len(self._works) >= MAX_WORKS:
                del self._works[_choose_one(self._works)]
            self._works[reaction] = ActiveReaction(reaction[0], thread_id)
        return self._works[reaction]

    def _make_room_to_write(self) -> None:
        writing = [key for key, it in self._works.items() if it.texts]
        if len(writing) >= MAX_WRITING:
            self._works[_choose_one(writing)].texts.clear()


def _choose_one(reactions: Iterable[_Reaction]) -> _Reaction:
    """Return the oldest reaction of the agent that has the most reactions. A flood of signals then cannot remove the
    activity of other agents."""
    listed = list(reactions)
    [(most, _)] = Counter(agent_id for agent_id, _ in listed).most_common(1)
    return next(it for it in listed if it[0] == most)


def _is_past(stream: _StreamKey, begun: _StreamKey) -> bool:
    """Whether a text is complete because a later text of its run has begun. A later turn completes earlier turns, and
    the answer completes the reasoning."""
    (path, turn, kind, _), (new_path, new_turn, new_kind, _) = stream, begun
    return path == new_path and (turn < new_turn or (turn == new_turn and (kind, new_kind) == ("reasoning", "text")))
