"""Asking an agent in a conversation on behalf of a caller, and following what becomes of it: for the protocols in which
somebody asks and is answered (OpenAI's endpoint, A2A).

`Conversations` stands on the session of one caller, however many questions that follows at a time. What is true is read
from the ledger: how far the message has got, and what the agent has written in the thread. When to look is told by what
happens: a message for the caller, the agent's signals, a notice, a connection that is back; and once in `LOOK_EVERY_S`
whatever happens, since signals may be lost. So a killed node, gateway or agent changes nothing but the time it takes.

What comes of one question, in this order::

    QuestionStored   once, first: the message is durable (asked again under its message_id: the same seq)
    TextPiece        any number: what streams; may be lost, may be nothing, and need not be what is sent in the end
    AgentAnswer      each message of the agent to this question, once, ascending by seq; pieces may come between
    QuestionEnded    once, last: nothing more comes of it by itself
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Container, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from roundelay.network.addresses import agent_address
from roundelay.network.client import AnyMessage, NetworkClient, Notice, Reconnected, Signal
from roundelay.network.errors import RoundelayError
from roundelay.network.frames import is_id
from roundelay.network.messages import message_from_wire

_logger = logging.getLogger(__name__)

LOOK_EVERY_S = 15.0
RECEIVE_S = 25.0
STOP_WAIT_S = 30.0
"""How long `FollowedQuestion.stop` waits for a reaction that has yet to begin."""
STOP_LOOK_S = 5.0
"""So often it looks meanwhile whether that has: the signal that tells it may be lost."""
MAX_STREAMED_CHARS = 1 << 20
"""Of one question; what streams beyond it is left out."""
PAGE, KNOWN_PAGE = 100, 10
"""Messages that are read at a time; where most of them are known."""

PieceKind: TypeAlias = Literal["text", "reasoning", "tool", "progress"]
EndStatus: TypeAlias = Literal["answered", "silent", "stopped", "cancelled", "failed", "held", "dead", "removed"]
SENTENCES: dict[EndStatus, str] = {
    "answered": "It has answered.",
    "silent": "It has finished without an answer.",
    "stopped": "It has stopped at a limit.",
    "cancelled": "It was stopped.",
    "failed": "It has failed.",
    "held": "A person has taken this conversation over.",
    "dead": "It could not handle the message, five times; an operator finds it among the dead letters.",
    "removed": "It was removed from the network.",
}
_ENDS: dict[str, EndStatus] = {"stopped": "stopped", "cancelled": "cancelled", "failed": "failed"}


@dataclass(frozen=True, slots=True)
class QuestionStored:
    """The question is durable. ``is_repeat``: it was before."""

    seq: int
    thread_id: str
    is_repeat: bool


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece of what streams. Those of one ``stream`` follow one another without a gap: where one was lost, or the
    agent began anew with other words, no further piece of that stream comes. ``turn`` is the agent's, ``path`` is empty
    of what it writes itself, and else tells for which call another one does."""

    kind: PieceKind
    text: str
    turn: int
    path: str
    call: int | None
    tool: str

    @property
    def stream(self) -> tuple[str, int, str, int | None]:
        return self.path, self.turn, self.kind, self.call


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """A message of the agent, in the thread of the question."""

    message: AnyMessage


@dataclass(frozen=True, slots=True)
class QuestionEnded:
    """Nothing more comes of it by itself. ``answered`` and ``silent`` are of a reaction that has finished; with
    ``stopped`` and ``failed`` the agent may have said so in an answer; what is ``held`` may go on once it is given
    back."""

    status: EndStatus
    reaction: str | None = None

    @property
    def reason(self) -> str:
        return SENTENCES[self.status]


QuestionEvent: TypeAlias = QuestionStored | TextPiece | AgentAnswer | QuestionEnded


class _PieceBody(Struct):
    """A piece of a signal of kind ``delta`` (docs/protocol.md, "Signals of agents")."""

    kind: PieceKind
    turn: int
    at: int
    text: str
    path: str = ""
    call: int | None = None
    tool: str = ""


class _DeltaBody(Struct):
    pieces: list[_PieceBody]


class FollowedQuestion:
    """One question that is followed; made by `Conversations`. ``async for`` gives what comes of it."""

    def __init__(
        self, client: NetworkClient, agent_id: str, stored: QuestionStored, known: Sequence[AnyMessage] = ()
    ) -> None:
        self.agent_id = agent_id
        self.stored = stored
        self._known = known
        self.reaction = _reaction_id(agent_id, stored.seq, client.welcome.network.epoch)
        """Where its agent is of this package."""
        self._client = client
        self._bell = asyncio.Event()
        self._is_due = True  # to be looked at
        self._streams = _Streams()
        self._told = stored.seq  # answers up to here are given
        self._has_answer = False

    async def __aiter__(self) -> AsyncIterator[QuestionEvent]:
        """Gives the events. Raises what ended the caller's session for good, or refuses it the thread."""
        yield self.stored
        while True:
            for piece in self._streams.take():
                yield piece
            if self._is_due:
                self._is_due = False  # before it looks: what happens meanwhile rings again
                answers, ended = await self.look()
                for message in answers:
                    yield AgentAnswer(message)
                if ended is not None:
                    yield ended
                    return
            await self._wait()

    async def look(self) -> tuple[list[AnyMessage], QuestionEnded | None]:
        """Read what has come of it by now: answers that were not given yet, and how it has ended, if it has."""
        state = await self._read_state()  # before the answers: who has ended has sent them all
        answers, is_held = await self._read_answers(state)
        if answers and "reaction" not in state:
            state = await self._read_state()  # it has begun since, or it keeps no records
        self._has_answer |= bool(answers)
        self._told = max([self._told, *(it.seq for it in answers)])
        return answers, self._judge(state, is_held=is_held)

    async def stop(self, wait_s: float = STOP_WAIT_S) -> bool:
        """End the reaction, and those that it has begun at other agents. Where it has not begun yet (its agent is away,
        or busy with other messages) this waits for that, up to ``wait_s``; False if in vain."""
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    self._bell.clear()
                    state = await self._read_state()
                    status, reaction = _read_newest(state)
                    if status == "open":
                        await self._client.call("network.cancel", {"reaction": reaction})
                    if "is_overtaken" in state:
                        pass  # what follows it is to be stopped
                    elif status is not None or state["state"] in ("dead", "removed", "handled"):
                        return True
                    with suppress(TimeoutError):
                        async with asyncio.timeout(STOP_LOOK_S):
                            await self._bell.wait()
        except TimeoutError:
            return False

    def ring(self) -> None:
        """There may be news of it."""
        self._is_due = True
        self._bell.set()

    def hear(self, signal: Signal) -> None:
        """Take a signal of its agent in its thread, if it is about this question."""
        body = signal.body if isinstance(signal.body, dict) else {}
        if body.get("reaction") != self.reaction:
            return
        if signal.kind == "delta":
            self._streams.add(body)
            self._bell.set()
        elif signal.kind == "thinking":  # it begins, or is done
            self.ring()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(LOOK_EVERY_S):
                await self._bell.wait()
        except TimeoutError:
            self._is_due = True
        self._bell.clear()

    async def _read_state(self) -> dict[str, Any]:
        status = await self._client.call("network.message_status", {"seq": self.stored.seq})
        state: dict[str, Any] = next(iter(status["recipients"]), {"state": "removed"})
        return state

    async def _read_answers(self, state: Mapping[str, Any]) -> tuple[list[AnyMessage], bool]:
        """The answers that were not given yet, ascending, and whether the thread is held."""
        found: list[AnyMessage] = []
        args = {"thread_id": self.stored.thread_id, "limit": KNOWN_PAGE if self._known else PAGE}
        is_held = False
        known_to = max(self._known[-1].seq if self._known else 0, self._told)
        async for page in self._client.pages("network.history", args):
            is_held |= "held" in page
            messages = [message_from_wire(it) for it in page["messages"]]
            found = [it for it in messages if it.seq > known_to] + found
            if not messages or messages[0].seq <= known_to:
                break
        said = (*self._known, *found)
        return [it for it in said if it.seq > self._told and self._is_answer(it, state)], is_held

    def _is_answer(self, message: AnyMessage, state: Mapping[str, Any]) -> bool:
        if message.sender_id != self.agent_id:
            return False
        if self.stored.seq in (message.reply_to, message.cause):
            return True
        # Where the agent has read the question while it was at an earlier one, it answers both by its answer to that.
        is_read_meanwhile = state.get("reaction", self.reaction) != self.reaction and "reaction_status" in state
        return is_read_meanwhile and message.reply_to is not None and message.reply_to < self.stored.seq

    def _judge(self, state: Mapping[str, Any], *, is_held: bool) -> QuestionEnded | None:
        status, reaction = _read_newest(state)
        if state["state"] in ("dead", "removed"):
            return QuestionEnded(state["state"], reaction)
        if is_held and status in (None, "open", "cancelled"):
            return QuestionEnded("held", reaction)
        if "is_overtaken" in state:
            return None  # the thread was given back, and its agent goes on
        if status in _ENDS:
            return QuestionEnded(_ENDS[status], reaction)
        if status == "finished" or (status is None and self._has_answer):  # who keeps no records has no more to say
            return QuestionEnded("answered" if self._has_answer else "silent", reaction)
        return None


def _read_newest(state: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The status and id of the newest reaction to a question, of those that take the place of one another."""
    newest = state.get("again", state)
    return newest.get("reaction_status"), newest.get("reaction")


class _Streams:
    """What streams of one question, put together: what comes twice is left out, what does not fit ends its stream."""

    def __init__(self) -> None:
        self._texts: dict[tuple[str, int, str, int | None], str | None] = {}  # None: it is broken
        self._waiting: deque[TextPiece] = deque()
        self._room = MAX_STREAMED_CHARS

    def add(self, body: object) -> None:
        try:
            pieces = msgspec.convert(body, _DeltaBody).pieces
        except msgspec.ValidationError:  # anybody may send signals
            return
        for piece in pieces:
            self._add(TextPiece(piece.kind, piece.text, piece.turn, piece.path, piece.call, piece.tool), piece.at)

    def _add(self, piece: TextPiece, at: int) -> None:
        known = self._texts.get(piece.stream, "")
        if piece.kind == "progress":  # each holds until the next
            known, at = "", 0
        elif known is None or not 0 <= at <= len(known) or not _overlaps(known[at:], piece.text):
            self._texts[piece.stream] = None
            return
        new = piece.text[len(known) - at :]
        if not new or len(new) > self._room:
            return
        self._room -= len(new)
        self._texts[piece.stream] = known + new
        self._waiting.append(replace(piece, text=new))

    def take(self) -> Iterator[TextPiece]:
        while self._waiting:
            yield self._waiting.popleft()


def _overlaps(known: str, text: str) -> bool:
    return known.startswith(text) or text.startswith(known)


async def find_agent(client: NetworkClient, agent_id: str) -> dict[str, Any] | None:
    """An agent of the network, as `network.list_agents` tells of it; None if there is no such one."""
    if not is_id(agent_id):
        return None
    before = f"{agent_id[:-1]}{chr(ord(agent_id[-1]) - 1)}\x7f"  # behind it comes the id itself, if it is there
    page = await client.call("network.list_agents", {"kind": "agent", "after": before, "limit": 1})
    return next((dict(it) for it in page["agents"] if it["agent_id"] == agent_id), None)


class Conversations:
    """The questions of one caller, on its session. Needs no closing: what runs ends with the session."""

    def __init__(self, client: NetworkClient) -> None:
        self.client = client
        self._questions: dict[FollowedQuestion, None] = {}
        self._wanted = asyncio.Event()  # set as long as there are questions
        self._listeners: set[asyncio.Task[None]] = set()
        self._watching = ""  # the session that is sent signals

    @asynccontextmanager
    async def ask(
        self,
        agent_id: str,
        content: Any,
        *,
        conversation: str,
        message_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[FollowedQuestion]:
        """Put a question in a conversation and follow it for the length of the block. Asked again under its
        ``message_id``, with the same content and metadata, it is followed and not sent twice. Raises what refuses
        it."""
        await self._listen()  # before it is sent: what streams comes once
        given: dict[str, Any] = dict(metadata or {})
        if self.client.kind != "human":  # an agent streams to people, and to whom a person is behind
            given["ask"] = {"watched": True}
        stored = await self.client.send(
            agent_address(agent_id),
            content,
            conversation=conversation,
            requires_response=True,
            metadata=given or None,
            message_id=message_id,
        )
        async with self.follow(agent_id, QuestionStored(stored.seq, stored.thread_id, stored.duplicate)) as question:
            yield question

    @asynccontextmanager
    async def follow(self, agent_id: str, stored: QuestionStored) -> AsyncIterator[FollowedQuestion]:
        """Follow a question that was put to an agent before, for the length of the block."""
        await self._listen()
        question = self.find(agent_id, stored)
        self._questions[question] = None
        self._wanted.set()
        try:
            yield question
        finally:
            del self._questions[question]
            if not self._questions:
                self._wanted.clear()

    def find(self, agent_id: str, stored: QuestionStored, known: Sequence[AnyMessage] = ()) -> FollowedQuestion:
        """A question to look at once (`FollowedQuestion.look`), or to stop. ``known`` is what its thread has from there
        on, ascending and without a gap, up to some message: only what came later is read."""
        return FollowedQuestion(self.client, agent_id, stored, known)

    async def _listen(self) -> None:
        """Hear signals and messages from now on, on this connection."""
        if not self._listeners:
            for work in (self._hear(), self._receive()):
                task = asyncio.create_task(work, name="conversations")
                self._listeners.add(task)
                task.add_done_callback(self._listeners.discard)
        session = self.client.welcome.session_id
        if self._watching != session:
            await self.client.call("network.watch", {"signals": True})
            self._watching = session

    async def _hear(self) -> None:
        """Pass on what the session is told, until it ends."""
        async for event in self.client.events():
            match event:
                case Signal():
                    for it in list(self._questions):
                        if (it.agent_id, it.stored.thread_id) == (event.sender_id, event.thread_id):
                            it.hear(event)
                case Notice(kind="taken" | "given" | "dead_letter"):
                    self._ring()
                case Reconnected():
                    try:
                        await self._listen()
                    except RoundelayError as error:  # what streams is not seen; the answers are
                        _logger.debug("signals cannot be watched", extra={"code": error.code})
                    self._ring()
                case _:
                    pass
        self._ring()  # each looks, and raises what ended the session
        self._wanted.set()  # who waits for questions need not: it ends as well

    async def _receive(self) -> None:
        """Wait for messages to the caller as long as it has questions; those who look find them in their threads."""
        after = self.client.welcome.head
        while self.client.failure is None:
            await self._wanted.wait()
            try:
                # Waits to its end: the hub would hold a read of this session for each wait that is given up.
                async for message in self.client.follow(after=after, timeout_s=RECEIVE_S):
                    after = message.seq
                    self._ring({message.thread_id})
            except RoundelayError:
                break  # the session has ended
        self._ring()

    def _ring(self, threads: Container[str] | None = None) -> None:
        for it in self._questions:
            if threads is None or it.stored.thread_id in threads:
                it.ring()


def _reaction_id(agent_id: str, seq: int, epoch: str) -> str:
    """As docs/protocol.md has it ("Signals of agents")."""
    return hashlib.sha256("\x1f".join(("reaction", agent_id, str(seq), epoch)).encode()).hexdigest()[:32]
