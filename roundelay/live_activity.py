"""What is under way in a network: who thinks or types, which calls run, what is being written. Nothing here is drawn.

`LiveActivity` takes what a client is told (messages, and beside them signals, presence, the connection's loss) and keeps
what a screen shows meanwhile: `roundelay.terminal.activity_lines` draws it for the chat, and any other screen may read the same.
No IO; its clock is the event loop's.

Signals may be lost: a text of which a piece is missing has a gap, and an agent that goes offline is at nothing any
more. Signals are anybody's to send: an agent is known by its own id whatever it claims, what is malformed is passed
over, and all that is kept is bounded; where there is too much, whoever has the most of it loses some. Every text is a
participant's own writing: whoever shows it cleans it.
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
"""People who look at a thread, each counted once for each."""
MAX_HEARD = 1000
"""Reactions that are remembered by their ids alone."""
MAX_WORKS, MAX_WRITING = 256, 32
"""Reactions under way, and those of them that write."""
MAX_CALLS, MAX_DONE, MAX_STREAMS = 32, 256, 64
"""Of one reaction: calls under way, calls that are done, texts that grow."""
MAX_CHARS, MAX_REPORT_CHARS = 8000, 500
MAX_ID_CHARS = 128
"""Of a reaction's id, as on the wire."""
GAP = " … "
_Reaction = tuple[str, str]  # its agent and its id
_StreamKey = tuple[str, int, PieceKind, int | None]  # path, turn, kind, call


@dataclass(frozen=True, slots=True)
class ActiveCall:
    """A call under way: its tool, and the agents whose answers it waits for."""

    tool: str
    asked: tuple[str, ...] = ()


@dataclass(slots=True)
class GrowingText:
    """A text that grows, at a path of a reaction; of progress only the newest report. ``tool`` is that of its call."""

    path: str
    kind: PieceKind
    tool: str = ""
    text: str = ""
    end: int = 0
    """Where in the whole text the next piece belongs."""


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A call that waits for a person's decision on the message with this seq, in a thread."""

    seq: int
    agent_id: str
    reaction: str
    thread_id: str
    deciders: tuple[str, ...] | None = None
    """The people who alone may decide; None: whoever reads the request."""


@dataclass(frozen=True, slots=True)
class ActivityNews:
    """What a signal tells to who sees no text grow. ``who`` is the agent, and what it called, or asked, on the way
    there."""

    who: tuple[str, ...]
    verb: Literal["uses", "waits for", "reports", "finished without an answer"]
    object: str


@dataclass(slots=True)
class ActiveReaction:
    """One reaction under way."""

    agent_id: str
    thread_id: str
    is_thinking: bool = False
    """Whether its agent has said so: some stream, or tell of calls, and never say that they think."""
    calls: dict[str, ActiveCall] = field(default_factory=dict)
    """By path."""
    texts: dict[_StreamKey, GrowingText] = field(default_factory=dict)
    """The one that was written last stands last."""
    _done: deque[str] = field(
        default_factory=lambda: deque(maxlen=MAX_DONE)
    )  # paths: what still comes of these is too late
    _said: int = 0  # the last turn whose text is a message

    def name_path(self, path: str) -> tuple[str, ...]:
        """Who is at work at a path: the agent, and what it called, or asked, on the way there; … for what was not heard
        of."""
        return (self.agent_id, *map(self._name_run, outer_paths(path)))

    def list_innermost(self) -> list[ActiveCall]:
        """The calls under way that have no other one inside of them."""
        return [
            call
            for path, call in self.calls.items()
            if not any(other != path and is_inside(other, path) for other in self.calls)
        ]

    def handle_call(self, seen: CallSignal) -> ActivityNews | None:
        """A call begins, or waits for agents now; or it is done, and what was at work inside of it too."""
        path = path_of_call(seen.path, seen.turn, seen.call)
        if seen.is_active:
            if path in self.calls or len(self.calls) < MAX_CALLS:
                self.calls[path] = ActiveCall(seen.tool, seen.asked)
            if seen.asked == (seen.tool,):
                return None  # a tool that is an agent elsewhere: it has been told
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
        """What its agent was writing is a message now; what still comes of it is too late."""
        said = [key for key, it in self.texts.items() if it.kind == "text" and not it.path]
        self._said = max([self._said, *(turn for _, turn, _, _ in said)])
        self.texts = {key: it for key, it in self.texts.items() if key not in said}

    def handle_piece(self, piece: PieceSignal) -> ActivityNews | None:
        """A text grows by a piece; what came before it in the same run has then come to its end."""
        path, kind = piece.path, piece.kind
        key: _StreamKey = (path, piece.turn, kind, piece.call)
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
            known.text = ""  # it starts over: the first attempt was given up
        elif piece.at > known.end:
            known.text += GAP
        known.text = (known.text + piece.text)[-MAX_CHARS:]
        known.end = piece.at + len(piece.text)
        self._keep(key, known)
        return None

    def _keep(self, key: _StreamKey, stream: GrowingText) -> None:
        self.texts[key] = stream
        if len(self.texts) > MAX_STREAMS:
            del self.texts[next(iter(self.texts))]

    def _is_over(self, key: _StreamKey) -> bool:
        """Whether the call that a text is of, or one around it, is done; or the text is a message."""
        path, turn, kind, call = key
        if kind == "text" and not path and turn <= self._said:
            return True
        paths = outer_paths(path if call is None else path_of_call(path, turn, call))
        return any(it in self._done or it.rpartition(".")[0] in self._done for it in paths)  # 1.0.1 is in 1.0 too

    def _name_run(self, path: str) -> str:
        """What runs in a call: at 1.0 its first run, at 1.0.2 the third."""
        number = 0
        if path not in self.calls:
            path, _, run = path.rpartition(".")
            number = int(run)
        call = self.calls.get(path)
        names = (call.asked or (call.tool,)) if call is not None else ()
        return names[number] if number < len(names) else "…"


class LiveActivity:
    """What is under way, from what a client is told. A reaction is there from the first that is heard of it until it
    ends."""

    def __init__(self, me: str = "") -> None:
        self.me = me
        """Whose screen it is; empty: nobody's."""
        self.reactions: set[tuple[str, str]] = set()
        """Every reaction that was heard of: its id and its agent's."""
        self.requests: dict[int, PendingRequest] = {}
        """The calls that wait for a person's decision, by the seqs of their requests."""
        self._decided: dict[int, PendingRequest] = {}  # by the seq of the decision, the newest of them
        self._refused: deque[tuple[str, int]] = deque(
            maxlen=MAX_WORKS
        )  # decisions that did not fit, and for which agent
        self.takeovers: dict[str, str] = {}
        """Who has taken over which thread, by thread."""
        self.unanswered: dict[str, list[str]] = {}
        """The agents that have finished without an answer, by thread, until something is said there."""
        self.is_connected = True
        self.on_change: Callable[[], None] = lambda: None
        self._works: dict[_Reaction, ActiveReaction] = {}
        self._ended: deque[_Reaction] = deque(maxlen=MAX_WORKS)  # what still comes of these is too late
        self._typing: dict[str, asyncio.TimerHandle] = {}  # a person -> when that is over
        self._viewing: dict[tuple[str, str], asyncio.TimerHandle] = {}  # a thread and a person -> when that is over
        self._news = asyncio.Event()

    # --- what is told

    def handle_event(self, event: object) -> list[ActivityNews]:
        """Take what a client is told beside the messages; gives what to tell of calls and their reports."""
        news: list[ActivityNews] = []
        match event:
            case Signal(kind="typing"):
                self._stop_typing(event.sender_id)
                loop = asyncio.get_running_loop()
                self._typing[event.sender_id] = loop.call_later(TYPING_SHOWN_S, self._stop_typing, event.sender_id)
            case Signal(kind="viewing", body={"active": bool(is_active)}):
                self._take_viewing((event.thread_id, event.sender_id), is_active)
            case Signal(body={"reaction": str(name)}) if len(name) <= MAX_ID_CHARS:
                news = [it for it in self._take_signal((event.sender_id, name), event) if it is not None]
            case Notice(kind="taken", thread_id=str(thread_id), body={"agent_id": str(by)}):
                self.takeovers[thread_id] = by
                self.requests = {seq: it for seq, it in self.requests.items() if it.thread_id != thread_id}
            case Notice(kind="given", thread_id=str(thread_id)):
                self.takeovers.pop(thread_id, None)
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
        """What its sender was writing there is a message now; and it may ask for a person's decision."""
        self.unanswered.pop(message.thread_id, None)
        for work in self._works.values():
            if (work.agent_id, work.thread_id) == (message.sender_id, message.thread_id):
                work.end_answer_text()
        if read_request(message) is not None:
            self.add_request(message)
        elif (told := read_decided(message)) is not None:
            known = self.requests.get(told["request"])
            if known is not None and known.agent_id == message.sender_id:  # another agent may claim anything
                self.resolve_request(told["request"], message.seq)
        elif message.reply_to is not None and read_decision(message) is not None:
            known = self.requests.get(message.reply_to)
            if known is None or known.deciders is None or message.sender_id in known.deciders:
                self.resolve_request(message.reply_to, message.seq)
        elif message.reply_to is not None and isinstance((message.metadata or {}).get(STILL_WAITS), int):
            self._wait_on(message.sender_id, message.reply_to)
        self.notify()

    def add_request(self, request: BaseMessage) -> None:
        """A call waits for a person's decision; also one that was asked for earlier."""
        reaction = read_request(request)
        if reaction is not None and len(self.requests) < MAX_HEARD:
            names = read_deciders(request)
            deciders = None if names is None else tuple(names)
            waiting = PendingRequest(request.seq, request.sender_id, reaction, request.thread_id, deciders)
            self.requests[request.seq] = waiting
        self.notify()

    def resolve_request(self, request: int, by: int) -> None:
        """A person has decided a request by a message; both are seqs."""
        known = self.requests.get(request)
        if known is not None and (known.agent_id, by) not in self._refused:
            self._decided[by] = self.requests.pop(request)
        while len(self._decided) > MAX_WORKS:
            del self._decided[next(iter(self._decided))]
        self.notify()

    def _wait_on(self, agent_id: str, decision: int) -> None:
        """What was decided by this message did not fit, its agent says, perhaps before the decision is known here."""
        self._refused.append((agent_id, decision))
        if decision in self._decided and self._decided[decision].agent_id == agent_id:
            undecided = self._decided.pop(decision)
            self.requests[undecided.seq] = undecided

    def load_work(self, agents: Iterable[Mapping[str, Any]]) -> None:
        """Take what agents were at before anything was heard of them, as ``network.list_agents`` tells it."""
        for agent in agents:
            for it in agent.get("work", ()):
                if (
                    it["activity"] in ("works", "stopping")
                    and (key := (agent["agent_id"], it["reaction"])) not in self._ended
                ):
                    self._find(key, it["thread_id"]).is_thinking = True
        self.notify()

    def load_takeovers(self, threads: Iterable[Mapping[str, Any]]) -> None:
        """Take who holds which thread, as ``network.list_threads`` tells it."""
        self.takeovers = {it["thread_id"]: it["held"]["by"] for it in threads if "held" in it}
        self.notify()

    def notify(self) -> None:
        """Something was said or done; whoever waits for quiet waits on."""
        self._news.set()
        self.on_change()

    # --- what there is

    @property
    def typing(self) -> list[str]:
        """Who is typing, by their ids."""
        return sorted(self._typing)

    def list_viewing(self, thread_id: str) -> list[str]:
        """Who looks at a thread, by their ids."""
        return sorted(person for thread, person in self._viewing if thread == thread_id)

    def list_busy(self) -> dict[str, list[ActiveCall]]:
        """Who thinks, by their ids, each with its innermost calls."""
        busy: dict[str, list[ActiveCall]] = {
            it: [] for it in sorted({it.agent_id for it in self._list_thinking().values()})
        }
        for work in self._works.values():
            if work.agent_id in busy:
                busy[work.agent_id] += work.list_innermost()
        return busy

    def list_busy_threads(self) -> set[str]:
        """The threads in which somebody thinks."""
        return {it.thread_id for it in self._list_thinking().values()}

    def list_writing(self, thread_id: str) -> list[ActiveReaction]:
        """The reactions in a thread that have texts which grow; what waits for a decision writes nothing more."""
        asking = self.list_waiting_reactions()
        works = (it for key, it in self._works.items() if key not in asking)
        return [it for it in works if it.thread_id == thread_id and it.texts]

    def list_own_requests(self, thread_id: str | None = None) -> list[PendingRequest]:
        """The calls that wait for the decision of who looks at the screen: in a thread, or everywhere."""
        mine = (it for it in self.requests.values() if it.deciders is None or not self.me or self.me in it.deciders)
        return [it for it in mine if thread_id is None or it.thread_id == thread_id]

    def list_waiting_reactions(self) -> set[tuple[str, str]]:
        """The reactions that wait for a person's decision: each one's agent and its id."""
        return {(it.agent_id, it.reaction) for it in self.requests.values()}

    async def wait_until_quiet(self, quiet_s: float) -> None:
        """Wait until the hub is there, nobody thinks who is not waiting for a decision, and nothing has happened for
        ``quiet_s``."""
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
                self._works.pop(reaction, None)  # its message, if there is one, says the rest
                ended = [it.seq for it in self.requests.values() if (it.agent_id, it.reaction) == reaction]
                for seq in ended:
                    del self.requests[seq]
                if reaction not in self._ended:
                    self._ended.append(reaction)
                    if body.get("silent") is True:
                        return [self._take_silence(reaction[0], signal.thread_id)]
            case Signal(kind="thinking", body={"active": True}):
                if reaction in self._ended:
                    self._ended.remove(reaction)  # it is taken up again
                self._find(reaction, signal.thread_id).is_thinking = True
            case Signal() if reaction in self._ended:
                pass
            case Signal(kind="tool") if (seen := read_call(signal.body)) is not None:
                return [self._find(reaction, signal.thread_id).handle_call(seen)]
            case Signal(kind="delta", body={"pieces": list()}):
                work = self._find(reaction, signal.thread_id)
                if not work.texts:
                    self._make_room_to_write()
                return [work.handle_piece(it) for it in read_pieces(signal.body)]
        return []

    def _take_silence(self, agent_id: str, thread_id: str) -> ActivityNews:
        """An agent has nothing to say to who waits for it: else one would wait on."""
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
    """The oldest reaction of whoever has the most: nobody's flood takes another one's away."""
    listed = list(reactions)
    [(most, _)] = Counter(agent_id for agent_id, _ in listed).most_common(1)
    return next(it for it in listed if it[0] == most)


def _is_past(stream: _StreamKey, begun: _StreamKey) -> bool:
    """Whether a text has come to its end since another one of its run has begun: it is of an earlier turn, or was
    thought before what is written."""
    (path, turn, kind, _), (new_path, new_turn, new_kind, _) = stream, begun
    return path == new_path and (turn < new_turn or (turn == new_turn and (kind, new_kind) == ("reasoning", "text")))
