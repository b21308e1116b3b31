"""Live activity in a network: who thinks or types, which calls run, which texts grow. Nothing is drawn here.

`LiveActivity` is fed with a client's events and messages, and holds what a screen shows of the work in progress. The
chat (`terminal.activity_lines`), the full-screen terminal and the page (web/page/core) show the same. No IO; timers
come from the event loop.

Signals may be lost: a text with a missing piece gets a gap, and an agent that goes offline does nothing any more.
Anybody may send signals. So an agent is known by the id of the sender whatever a signal claims, malformed signals are
skipped, and everything that is stored is bounded. When a limit is reached, the sender with the most entries loses one:
a flood cannot push out what others do. Texts are not sanitized here; whoever shows them must do it.
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
"""Maximum number of (thread, person) pairs of people who look at a thread."""
MAX_HEARD = 1000
"""Maximum number of reactions whose ids are remembered, and of pending requests."""
MAX_WORKS, MAX_WRITING = 256, 32
"""Maximum number of active reactions, and of those that have growing texts."""
MAX_CALLS, MAX_DONE, MAX_STREAMS = 32, 256, 64
"""Limits of one reaction: active calls, finished calls, growing texts."""
MAX_CHARS, MAX_REPORT_CHARS = 8000, 500
MAX_ID_CHARS = 128
"""Maximum length of a reaction's id, as on the wire."""
GAP = " … "
_Reaction = tuple[str, str]  # its agent and its id
_StreamKey = tuple[str, int, PieceKind, int | None]  # path, turn, kind, call


@dataclass(frozen=True, slots=True)
class ActiveCall:
    """A call in progress: its tool, and the agents whose answers it waits for."""

    tool: str
    asked: tuple[str, ...] = ()


@dataclass(slots=True)
class GrowingText:
    """A text that grows, at a path of a reaction. For progress, only the newest report is stored."""

    path: str
    kind: PieceKind
    tool: str = ""
    text: str = ""
    end: int = 0
    """Position in the whole text at which the next piece belongs."""


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A call that waits for a person's decision; ``seq`` is the message that asks for it."""

    seq: int
    agent_id: str
    reaction: str
    thread_id: str
    deciders: tuple[str, ...] | None = None
    """The people who may decide, or None if everybody who reads the request may."""


@dataclass(frozen=True, slots=True)
class ActivityNews:
    """A change in one line, for readers without a live display. ``who`` is the agent and the calls inside it, outermost
    first."""

    who: tuple[str, ...]
    verb: Literal["uses", "waits for", "reports", "finished without an answer"]
    object: str


@dataclass(slots=True)
class ActiveReaction:
    """One reaction in progress."""

    agent_id: str
    thread_id: str
    is_thinking: bool = False
    """Whether its agent sent a ``thinking`` signal. Some agents send only texts and calls."""
    calls: dict[str, ActiveCall] = field(default_factory=dict)
    """Calls in progress, by path."""
    texts: dict[_StreamKey, GrowingText] = field(default_factory=dict)
    """Growing texts, the one written last at the end."""
    _done: deque[str] = field(
        default_factory=lambda: deque(maxlen=MAX_DONE)
    )  # paths of finished calls: later signals about them are stale
    _said: int = 0  # last turn whose text has become a message

    def name_path(self, path: str) -> tuple[str, ...]:
        """Return who works at a path: the agent, and the tools or agents that it called on the way there.

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
        """Handle a call that starts, waits for agents, or is done; then the work inside it is done too."""
        path = path_of_call(seen.path, seen.turn, seen.call)
        if seen.is_active:
            # A known call may change what it waits for, however many there are.
            if path in self.calls or len(self.calls) < MAX_CALLS:
                self.calls[path] = ActiveCall(seen.tool, seen.asked)
            if seen.asked == (seen.tool,):
                return None  # the tool is itself a remote agent, and was announced already
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
        """Remove the text of the answer: it is a message now. Later pieces of it are stale."""
        # Only the agent's own text becomes the message; the texts of its calls go on growing.
        said = [key for key, it in self.texts.items() if it.kind == "text" and not it.path]
        self._said = max([self._said, *(turn for _, turn, _, _ in said)])
        self.texts = {key: it for key, it in self.texts.items() if key not in said}

    def handle_piece(self, piece: PieceSignal) -> ActivityNews | None:
        """Append a piece to a text. Earlier texts of the same run are complete then, and removed."""
        path, kind = piece.path, piece.kind
        key: _StreamKey = (path, piece.turn, kind, piece.call)
        # Pieces may arrive after the message, and would draw a text that nobody is writing any more.
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
            known.text = ""  # it starts over: the model call was repeated
        elif piece.at > known.end:
            known.text += GAP
        # Only the end is drawn, so the beginning of a long text need not be kept.
        known.text = (known.text + piece.text)[-MAX_CHARS:]
        known.end = piece.at + len(piece.text)
        self._keep(key, known)
        return None

    def _keep(self, key: _StreamKey, stream: GrowingText) -> None:
        self.texts[key] = stream
        if len(self.texts) > MAX_STREAMS:
            del self.texts[next(iter(self.texts))]

    def _is_over(self, key: _StreamKey) -> bool:
        """Whether a text is stale: it is a message by now, or its call or a call around it is done."""
        path, turn, kind, call = key
        if kind == "text" and not path and turn <= self._said:
            return True
        paths = outer_paths(path if call is None else path_of_call(path, turn, call))
        return any(
            it in self._done or it.rpartition(".")[0] in self._done for it in paths
        )  # 1.0.1 belongs to the call 1.0 too

    def _name_run(self, path: str) -> str:
        """Return the name of a run inside a call: 1.0 is the first run of that call, 1.0.2 the third."""
        number = 0
        if path not in self.calls:
            path, _, run = path.rpartition(".")
            number = int(run)
        call = self.calls.get(path)
        names = (call.asked or (call.tool,)) if call is not None else ()
        return names[number] if number < len(names) else "…"


class LiveActivity:
    """The live activity that one client sees. A reaction is listed from its first signal until it ends."""

    def __init__(self, me: str = "") -> None:
        self.me = me
        """The person at the screen; empty if nobody."""
        self.reactions: set[tuple[str, str]] = set()
        """Every reaction with a signal so far, as (id, agent)."""
        self.requests: dict[int, PendingRequest] = {}
        """Calls that wait for a person's decision, by the seq of the request."""
        self._decided: dict[int, PendingRequest] = {}  # the newest ones, by the seq of the decision
        self._refused: deque[tuple[str, int]] = deque(
            maxlen=MAX_WORKS
        )  # (agent, seq) of decisions that the agent rejected
        self.takeovers: dict[str, str] = {}
        """Takeovers in progress: the person, by thread."""
        self.unanswered: dict[str, list[str]] = {}
        """Agents that finished without an answer, by thread, until the next message there."""
        self.is_connected = True
        self.on_change: Callable[[], None] = lambda: None
        self._works: dict[_Reaction, ActiveReaction] = {}
        self._ended: deque[_Reaction] = deque(maxlen=MAX_WORKS)  # later signals about these are stale
        self._typing: dict[str, asyncio.TimerHandle] = {}  # by person: the timer that ends it
        self._viewing: dict[tuple[str, str], asyncio.TimerHandle] = {}  # by (thread, person)
        self._news = asyncio.Event()

    # --- input

    def handle_event(self, event: object) -> list[ActivityNews]:
        """Handle an event of the client. Return its news about calls and progress."""
        news: list[ActivityNews] = []
        match event:
            case Signal(kind="typing"):
                self._stop_typing(event.sender_id)
                loop = asyncio.get_running_loop()
                # There is no signal for the end of typing, so it ends by itself.
                self._typing[event.sender_id] = loop.call_later(TYPING_SHOWN_S, self._stop_typing, event.sender_id)
            case Signal(kind="viewing", body={"active": bool(is_active)}):
                self._take_viewing((event.thread_id, event.sender_id), is_active)
            case Signal(body={"reaction": str(name)}) if len(name) <= MAX_ID_CHARS:
                news = [it for it in self._take_signal((event.sender_id, name), event) if it is not None]
            case Notice(kind="taken", thread_id=str(thread_id), body={"agent_id": str(by)}):
                self.takeovers[thread_id] = by
                # Agents are silent in a thread that a person has taken over, and wait for no decision there.
                self.requests = {seq: it for seq, it in self.requests.items() if it.thread_id != thread_id}
            case Notice(kind="given", thread_id=str(thread_id)):
                self.takeovers.pop(thread_id, None)
            # An agent that was killed sends no end of its work.
            case Presence(state="offline"):
                self._works = {key: it for key, it in self._works.items() if it.agent_id != event.agent_id}
                for key in [it for it in self._viewing if it[1] == event.agent_id]:
                    self._stop_viewing(key)
            case Reconnecting() | Reconnected():
                self.is_connected = isinstance(event, Reconnected)
                self._works.clear()  # the signals that end them may be lost with the connection
        self.notify()
        return news

    def handle_message(self, message: BaseMessage) -> None:
        """Handle a message: it ends the growing text of its sender, and may be a request, a decision or its rejection."""
        # Somebody speaks again in this thread, so the old silence is no news.
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
            ):  # only the agent that asked may say that it was decided
                self.resolve_request(told["request"], message.seq)
        elif message.reply_to is not None and read_decision(message) is not None:
            known = self.requests.get(message.reply_to)
            # Words of somebody who may not decide leave the request open.
            if known is None or known.deciders is None or message.sender_id in known.deciders:
                self.resolve_request(message.reply_to, message.seq)
        elif message.reply_to is not None and isinstance((message.metadata or {}).get(STILL_WAITS), int):
            self._wait_on(message.sender_id, message.reply_to)
        self.notify()

    def add_request(self, request: BaseMessage) -> None:
        """Add a request for a decision, a new one or one from before the client joined."""
        reaction = read_request(request)
        if reaction is not None and len(self.requests) < MAX_HEARD:
            names = read_deciders(request)
            deciders = None if names is None else tuple(names)
            waiting = PendingRequest(request.seq, request.sender_id, reaction, request.thread_id, deciders)
            self.requests[request.seq] = waiting
        self.notify()

    def resolve_request(self, request: int, by: int) -> None:
        """Remove a request that was decided by the message with the seq ``by``."""
        known = self.requests.get(request)
        # The agent's rejection may have come first, and then the request still waits.
        if known is not None and (known.agent_id, by) not in self._refused:
            self._decided[by] = self.requests.pop(request)
        while len(self._decided) > MAX_WORKS:
            del self._decided[next(iter(self._decided))]
        self.notify()

    def _wait_on(self, agent_id: str, decision: int) -> None:
        """Restore a request whose decision the agent rejected: its arguments did not fit, say. The rejection may arrive before
        the decision."""
        self._refused.append((agent_id, decision))
        if decision in self._decided and self._decided[decision].agent_id == agent_id:
            undecided = self._decided.pop(decision)
            self.requests[undecided.seq] = undecided

    def load_work(self, agents: Iterable[Mapping[str, Any]]) -> None:
        """Load the work that began before this client listened, as ``network.list_agents`` returns it."""
        for agent in agents:
            for it in agent.get("work", ()):
                if (
                    it["activity"] in ("works", "stopping")
                    and (key := (agent["agent_id"], it["reaction"])) not in self._ended
                ):
                    self._find(key, it["thread_id"]).is_thinking = True
        self.notify()

    def load_takeovers(self, threads: Iterable[Mapping[str, Any]]) -> None:
        """Load the takeovers, as ``network.list_threads`` returns them."""
        self.takeovers = {it["thread_id"]: it["held"]["by"] for it in threads if "held" in it}
        self.notify()

    def notify(self) -> None:
        """Report a change: whoever waits for quiet starts waiting again."""
        self._news.set()
        self.on_change()

    # --- state

    @property
    def typing(self) -> list[str]:
        """Ids of the people who are typing."""
        return sorted(self._typing)

    def list_viewing(self, thread_id: str) -> list[str]:
        """Return the ids of the people who look at a thread."""
        return sorted(person for thread, person in self._viewing if thread == thread_id)

    def list_busy(self) -> dict[str, list[ActiveCall]]:
        """Return the agents that are thinking, each with its innermost calls."""
        busy: dict[str, list[ActiveCall]] = {
            it: [] for it in sorted({it.agent_id for it in self._list_thinking().values()})
        }
        for work in self._works.values():
            if work.agent_id in busy:
                busy[work.agent_id] += work.list_innermost()
        return busy

    def list_busy_threads(self) -> set[str]:
        """Return the threads in which an agent is thinking."""
        return {it.thread_id for it in self._list_thinking().values()}

    def list_working_threads(self) -> set[str]:
        """Return the threads in which an agent is thinking, without agents that wait for a person's decision."""
        asking = self.list_waiting_reactions()
        return {it.thread_id for key, it in self._list_thinking().items() if key not in asking}

    def list_writing(self, thread_id: str) -> list[ActiveReaction]:
        """Return the reactions in a thread that have growing texts, without those that wait for a decision."""
        asking = self.list_waiting_reactions()
        works = (it for key, it in self._works.items() if key not in asking)
        return [it for it in works if it.thread_id == thread_id and it.texts]

    def list_own_requests(self, thread_id: str | None = None) -> list[PendingRequest]:
        """Return the requests that the person at the screen may decide: in a thread, or in all."""
        mine = (it for it in self.requests.values() if it.deciders is None or not self.me or self.me in it.deciders)
        return [it for it in mine if thread_id is None or it.thread_id == thread_id]

    def list_waiting_reactions(self) -> set[tuple[str, str]]:
        """Return the reactions that wait for a person's decision, as (agent, id)."""
        return {(it.agent_id, it.reaction) for it in self.requests.values()}

    async def wait_until_quiet(self, quiet_s: float) -> None:
        """Wait until nothing has happened for ``quiet_s`` seconds, the hub is connected, and no agent is thinking.

        Agents that wait for a decision do not count: nobody may be there to decide.
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
            # The oldest goes, since its person has not looked here for the longest time.
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
                self._works.pop(reaction, None)  # its answer, if any, comes as a message
                # A reaction that is over waits for nothing, and its requests could not be decided any more.
                ended = [it.seq for it in self.requests.values() if (it.agent_id, it.reaction) == reaction]
                for seq in ended:
                    del self.requests[seq]
                # The end may be told twice, and the news of a silent end must appear once.
                if reaction not in self._ended:
                    self._ended.append(reaction)
                    if body.get("silent") is True:
                        return [self._take_silence(reaction[0], signal.thread_id)]
            case Signal(kind="thinking", body={"active": True}):
                if reaction in self._ended:
                    self._ended.remove(reaction)  # resumed after a restart
                self._find(reaction, signal.thread_id).is_thinking = True
            case Signal() if reaction in self._ended:
                pass
            case Signal(kind="tool") if (seen := read_call(signal.body)) is not None:
                return [self._find(reaction, signal.thread_id).handle_call(seen)]
            case Signal(kind="delta", body={"pieces": list()}):
                work = self._find(reaction, signal.thread_id)
                # Only a reaction that begins to write can go over the limit.
                if not work.texts:
                    self._make_room_to_write()
                return [work.handle_piece(it) for it in read_pieces(signal.body)]
        return []

    def _take_silence(self, agent_id: str, thread_id: str) -> ActivityNews:
        """Note that an agent finished without an answer, so that nobody keeps waiting for one."""
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
    """Return the oldest reaction of the agent with the most: a flood must not push out the work of others."""
    listed = list(reactions)
    [(most, _)] = Counter(agent_id for agent_id, _ in listed).most_common(1)
    return next(it for it in listed if it[0] == most)


def _is_past(stream: _StreamKey, begun: _StreamKey) -> bool:
    """Whether a text is complete because another one of its run has begun: one of a later turn, or the answer after the
    reasoning."""
    (path, turn, kind, _), (new_path, new_turn, new_kind, _) = stream, begun
    return path == new_path and (turn < new_turn or (turn == new_turn and (kind, new_kind) == ("reasoning", "text")))
