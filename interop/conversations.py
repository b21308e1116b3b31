"""Sends a caller's questions to agents and follows their outcomes. OpenAI's API and A2A share this module.

`Conversations` uses the session of one caller and follows any number of questions on it. The state of a question and
the agent's answers are read from the ledger. Events only trigger a new read: a message to the caller, a signal of the
agent, a notice, or a restored connection. Because signals may be lost, the ledger is also read every `LOOK_EVERY_S`
seconds. A killed node, gateway or agent therefore only delays an answer.

A followed question yields, in this order::

    QuestionStored   once, first: the message is durable (a repeated message_id returns the same seq)
    TextPiece        any number: streamed text; may be lost, may be missing, and may differ from the final answer
    AgentAnswer      each message of the agent to this question, once, ascending by seq; pieces may come between
    QuestionEnded    once, last: no further answer is expected
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
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
"""Maximum time that `FollowedQuestion.stop` waits until a reaction begins, in seconds."""
STOP_LOOK_S = 5.0
"""Interval at which `FollowedQuestion.stop` checks whether a reaction has begun, in seconds. Polling is needed because
the signal of the agent may be lost.
"""
MAX_STREAMED_CHARS = 1 << 20
"""Maximum number of characters that are streamed for one question. Further text is dropped."""
PAGE, KNOWN_PAGE = 100, 10
"""Number of messages per page of a thread. The smaller number applies if most messages of the thread are
already known.
"""

PieceKind: TypeAlias = Literal["text", "reasoning", "tool", "progress"]
EndStatus: TypeAlias = Literal["answered", "silent", "stopped", "cancelled", "failed", "held", "dead", "removed"]
SENTENCES: dict[EndStatus, str] = {
    "answered": "It has answered.",
    "silent": "It has finished without an answer.",
    "stopped": "It has stopped at a limit.",
    "cancelled": "It was stopped.",
    "failed": "It has failed.",
    "held": "A person has taken over this conversation.",
    "dead": "It failed five times at this message, which is now a dead letter. An operator can deliver it again.",
    "removed": "It was removed from the network.",
}
_ENDS: dict[str, EndStatus] = {"stopped": "stopped", "cancelled": "cancelled", "failed": "failed"}


@dataclass(frozen=True, slots=True)
class QuestionStored:
    """The question is stored durably. ``is_repeat`` is true if an earlier request has already stored the question."""

    seq: int
    thread_id: str
    is_repeat: bool


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece of streamed text. The pieces of one ``stream`` follow each other without a gap.

    A stream ends early if a piece is lost, or if the agent starts again with different text. ``turn`` is the number of
    the agent's turn. ``path`` is empty for the agent's own text. For text of another agent, ``path`` names the call to
    that agent.
    """

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
    """A message that the agent sent in the thread of the question."""

    message: AnyMessage


@dataclass(frozen=True, slots=True)
class QuestionEnded:
    """The last event of a question: no further answer is expected.

    ``answered`` and ``silent`` mean that the reaction has finished. With ``stopped`` and ``failed``, an answer may
    already contain the reason. With ``held``, a person has taken over the thread, and the agent may continue
    afterwards.
    """

    status: EndStatus
    reaction: str | None = None

    @property
    def reason(self) -> str:
        return SENTENCES[self.status]


QuestionEvent: TypeAlias = QuestionStored | TextPiece | AgentAnswer | QuestionEnded


class _PieceBody(Struct):
    """One piece of text in a signal of kind ``delta`` (docs/protocol/signals.md)."""

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
    """One question and its progress. `Conversations` creates the object, and ``async for`` yields the events of the
    question.
    """

    def __init__(
        self, client: NetworkClient, agent_id: str, stored: QuestionStored, known: Sequence[AnyMessage] = ()
    ) -> None:
        self.agent_id = agent_id
        self.stored = stored
        self._known = known
        self.reaction = _reaction_id(agent_id, stored.seq, client.welcome.network.epoch)
        """Id of the reaction, if the agent is a Roundelay agent. Other agents may use any id."""
        self._client = client
        self._news = asyncio.Event()
        self._is_due = True
        """Whether the ledger may contain new data about this question, so that it must be read again."""
        self._streams = _StreamedText()
        self._last_answer = stored.seq
        """Seq of the last answer that was yielded, or of the question before the first answer."""
        self._has_answer = False

    async def __aiter__(self) -> AsyncIterator[QuestionEvent]:
        """Yield the events of the question. Raises the error that ended the caller's session or that denies access to
        the thread.
        """
        yield self.stored
        while True:
            for piece in self._streams.drain():
                yield piece
            if self._is_due:
                # Reset the flag before reading. An event that arrives during the read must cause another read.
                self._is_due = False
                answers, ended = await self.read_outcome()
                for message in answers:
                    yield AgentAnswer(message)
                if ended is not None:
                    yield ended
                    return
            await self._wait()

    async def read_outcome(self) -> tuple[list[AnyMessage], QuestionEnded | None]:
        """Read the ledger. Return the answers that were not returned before. Also return the end of the question, or
        None if the question is still open.
        """
        # Read the state before the answers. A reaction that has ended has already sent all its answers, so the second
        # read includes all of them.
        state = await self._read_state()
        answers, is_taken_over = await self._read_answers(state)
        if answers and "reaction" not in state:
            state = await self._read_state()  # the reaction began meanwhile, or the agent writes no records
        self._has_answer |= bool(answers)
        self._last_answer = max([self._last_answer, *(answer.seq for answer in answers)])
        return answers, self._find_end(state, is_taken_over=is_taken_over)

    async def stop(self, wait_s: float = STOP_WAIT_S) -> bool:
        """Cancel the reaction, and all reactions of other agents that it caused.

        If the reaction has not begun, wait up to ``wait_s`` seconds until it begins, because the agent may be offline
        or busy. Return False if no reaction was cancelled.
        """
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    # Clear the event before reading the state. An event during the read then ends the wait at once.
                    self._news.clear()
                    state = await self._read_state()
                    status, reaction = _read_newest(state)
                    if status == "open":
                        await self._client.call("network.cancel", {"reaction": reaction})
                    if "is_overtaken" in state:
                        pass  # a takeover ended this reaction, so cancel the reaction that replaces it
                    elif status is not None or state["state"] in ("dead", "removed", "handled"):
                        return True
                    with suppress(TimeoutError):
                        async with asyncio.timeout(STOP_LOOK_S):
                            await self._news.wait()
        except TimeoutError:
            return False

    def notify(self) -> None:
        """Schedule another read of the ledger, because there may be new data about this question."""
        self._is_due = True
        self._news.set()

    def handle_signal(self, signal: Signal) -> None:
        """Handle a signal that the agent sent in the thread of the question. Signals about other questions
        are ignored.
        """
        body = signal.body if isinstance(signal.body, dict) else {}
        if body.get("reaction") != self.reaction:
            return
        if signal.kind == "delta":
            # Do not read the ledger for a piece of text. Pieces arrive many times per second, and the final answer
            # arrives as a message.
            self._streams.add(body)
            self._news.set()
        elif signal.kind == "thinking":  # a reaction has begun or ended
            self.notify()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(LOOK_EVERY_S):
                await self._news.wait()
        except TimeoutError:
            self._is_due = True
        self._news.clear()

    async def _read_state(self) -> dict[str, Any]:
        status = await self._client.call("network.message_status", {"seq": self.stored.seq})
        state: dict[str, Any] = next(iter(status["recipients"]), {"state": "removed"})
        return state

    async def _read_answers(self, state: Mapping[str, Any]) -> tuple[list[AnyMessage], bool]:
        """Return the answers that were not returned before, ascending by seq. Also return whether a person has taken
        over the thread.
        """
        newer: list[AnyMessage] = []
        args = {"thread_id": self.stored.thread_id, "limit": KNOWN_PAGE if self._known else PAGE}
        is_taken_over = False
        known_up_to = max(self._known[-1].seq if self._known else 0, self._last_answer)
        async for page in self._client.pages("network.history", args):
            is_taken_over |= "held" in page
            messages = list(map(message_from_wire, page["messages"]))
            # Insert each page before the earlier ones, because pages arrive from the newest to the oldest.
            newer = [message for message in messages if message.seq > known_up_to] + newer
            if not messages or messages[0].seq <= known_up_to:
                break
        thread = (*self._known, *newer)
        answers = [message for message in thread if message.seq > self._last_answer and self._is_answer(message, state)]
        return answers, is_taken_over

    def _is_answer(self, message: AnyMessage, state: Mapping[str, Any]) -> bool:
        if message.sender_id != self.agent_id:
            return False
        if self.stored.seq in (message.reply_to, message.cause):
            return True
        # An agent may read this question while it works on an earlier question. The reply to the earlier question then
        # answers both questions.
        is_read_meanwhile = state.get("reaction", self.reaction) != self.reaction and "reaction_status" in state
        return is_read_meanwhile and message.reply_to is not None and message.reply_to < self.stored.seq

    def _find_end(self, state: Mapping[str, Any], *, is_taken_over: bool) -> QuestionEnded | None:
        status, reaction = _read_newest(state)
        # Check the final states of the message first. A dead letter also has a failed reaction.
        if state["state"] in ("dead", "removed"):
            return QuestionEnded(state["state"], reaction)
        if is_taken_over and status in (None, "open", "cancelled"):
            return QuestionEnded("held", reaction)
        if "is_overtaken" in state:
            return None  # the takeover has ended, and the agent continues in another reaction
        if status in _ENDS:
            return QuestionEnded(_ENDS[status], reaction)

        # If the agent writes no records, its answer ends the question.
        if status == "finished" or (status is None and self._has_answer):
            return QuestionEnded("answered" if self._has_answer else "silent", reaction)
        return None


def _read_newest(state: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the status and the id of the newest reaction to a question. After a takeover, a second reaction replaces
    the first.
    """
    newest = state.get("again", state)
    return newest.get("reaction_status"), newest.get("reaction")


class _StreamedText:
    """Streamed text of one question. Repeated text is dropped. A stream ends at the first piece that does not fit the
    text before it.
    """

    def __init__(self) -> None:
        self._texts: dict[tuple[str, int, str, int | None], str | None] = {}
        """Text of each stream so far. The value is None after a gap."""
        self._waiting: deque[TextPiece] = deque()
        self._room = MAX_STREAMED_CHARS

    def add(self, body: object) -> None:
        try:
            pieces = msgspec.convert(body, _DeltaBody).pieces
        except msgspec.ValidationError:  # any participant may send a malformed signal
            return
        for piece in pieces:
            self._add(TextPiece(piece.kind, piece.text, piece.turn, piece.path, piece.call, piece.tool), piece.at)

    def _add(self, piece: TextPiece, at: int) -> None:
        # ``at`` is the offset of the piece in the agent's text. Signals may be repeated after a reconnect, so the
        # overlap with the known text must be equal. End the stream after a gap or a difference, because the client
        # would see wrong text.
        streamed = self._texts.get(piece.stream, "")
        if piece.kind == "progress":  # each progress text replaces the previous one
            streamed, at = "", 0
        elif streamed is None or not 0 <= at <= len(streamed) or not _overlaps(streamed[at:], piece.text):
            self._texts[piece.stream] = None
            return
        # Keep only the new part. The client has already received the beginning of the piece.
        new = piece.text[len(streamed) - at :]
        if not new or len(new) > self._room:
            return
        self._room -= len(new)
        self._texts[piece.stream] = streamed + new
        self._waiting.append(replace(piece, text=new))

    def drain(self) -> Iterator[TextPiece]:
        while self._waiting:
            yield self._waiting.popleft()


def _overlaps(streamed: str, text: str) -> bool:
    return streamed.startswith(text) or text.startswith(streamed)


async def find_agent(client: NetworkClient, agent_id: str) -> dict[str, Any] | None:
    """Return the entry of an agent in `network.list_agents`, or None if the agent does not exist."""
    if not is_id(agent_id):
        return None
    # The list is sorted by id. ``before`` sorts directly before the agent's id, so the agent is the first entry after
    # ``before``.
    before = f"{agent_id[:-1]}{chr(ord(agent_id[-1]) - 1)}\x7f"
    page = await client.call("network.list_agents", {"kind": "agent", "after": before, "limit": 1})
    return next((dict(agent) for agent in page["agents"] if agent["agent_id"] == agent_id), None)


class Conversations:
    """The questions that one caller follows on its session. This object need not be closed, because its tasks end with
    the session.
    """

    def __init__(self, client: NetworkClient) -> None:
        self.client = client
        self._questions: dict[FollowedQuestion, None] = {}
        self._has_questions = asyncio.Event()
        self._listeners: set[asyncio.Task[None]] = set()
        self._watching = ""
        """Id of the session for which signals were requested. The request ends with the session."""

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
        """Send a question, and follow it until the block ends. A repeated ``message_id`` with the same content and
        metadata follows the stored question instead. Raises the hub's refusal.
        """
        await self._listen()  # listen before sending: streamed text is not sent again
        sent_metadata: dict[str, Any] = dict(metadata or {})
        if self.client.kind != "human":
            sent_metadata["ask"] = {"watched": True}  # agents stream to programs only if this flag is set
        stored = await self.client.send(
            agent_address(agent_id),
            content,
            conversation=conversation,
            requires_response=True,
            metadata=sent_metadata or None,
            message_id=message_id,
        )
        async with self.follow(agent_id, QuestionStored(stored.seq, stored.thread_id, stored.duplicate)) as question:
            yield question

    @asynccontextmanager
    async def follow(self, agent_id: str, stored: QuestionStored) -> AsyncIterator[FollowedQuestion]:
        """Follow a stored question until the block ends."""
        await self._listen()
        question = self.open(agent_id, stored)
        self._questions[question] = None
        self._has_questions.set()
        try:
            yield question
        finally:
            del self._questions[question]
            if not self._questions:
                self._has_questions.clear()

    def open(self, agent_id: str, stored: QuestionStored, known: Sequence[AnyMessage] = ()) -> FollowedQuestion:
        """Return a stored question. The caller can then read its outcome once, or stop it.

        ``known`` contains the messages of the thread from the question on, ascending and without a gap. Only later
        messages are read from the ledger.
        """
        return FollowedQuestion(self.client, agent_id, stored, known)

    async def _listen(self) -> None:
        """Start listening for signals and messages in the current session."""
        if not self._listeners:
            for work in (self._listen_to_events(), self._listen_to_messages()):
                task = asyncio.create_task(work, name="conversations")
                self._listeners.add(task)
                # Keep the task in a set. The event loop has only weak references to tasks, so the task could be garbage
                # collected.
                task.add_done_callback(self._listeners.discard)
        # Request signals again after a reconnect, because the hub sends signals only to the session that requested
        # them.
        session = self.client.welcome.session_id
        if self._watching != session:
            await self.client.call("network.watch", {"signals": True})
            # Set this field only after the hub has accepted. If the call fails, the next question must request signals
            # again.
            self._watching = session

    async def _listen_to_events(self) -> None:
        """Pass the events of the session to the questions until the session ends."""
        async for event in self.client.events():
            match event:
                case Signal():
                    for question in list(self._questions):
                        if (question.agent_id, question.stored.thread_id) == (event.sender_id, event.thread_id):
                            question.handle_signal(event)
                case Notice(kind="taken" | "given" | "dead_letter"):
                    self._notify()
                case Reconnected():
                    try:
                        await self._listen()
                    except RoundelayError as error:  # only streamed text is lost; answers still arrive
                        _logger.debug("signals cannot be watched", extra={"code": error.code})
                    self._notify()
                case _:
                    pass
        self._notify()  # each question now raises the error that ended the session
        self._has_questions.set()  # wakes `_listen_to_messages`, so that it ends too

    async def _listen_to_messages(self) -> None:
        """Notify the questions when the caller gets a message. Each question reads the message from its thread."""
        after = self.client.welcome.head
        while self.client.failure is None:
            # Do not wait at the hub while there are no questions. Each wait counts as a read, and the hub limits the
            # reads of a session.
            await self._has_questions.wait()
            try:
                # Never cancel this wait. The hub does not notice that a wait was abandoned, and would keep one read of
                # the session occupied.
                async for message in self.client.follow(after=after, timeout_s=RECEIVE_S):
                    after = message.seq
                    self._notify(message.thread_id)
            except RoundelayError:
                break  # the session has ended
        self._notify()

    def _notify(self, thread_id: str | None = None) -> None:
        for question in self._questions:
            if thread_id in (None, question.stored.thread_id):
                question.notify()


def _reaction_id(agent_id: str, seq: int, epoch: str) -> str:
    """Return the id of an agent's first reaction to a message (docs/protocol/signals.md)."""
    return hashlib.sha256("\x1f".join(("reaction", agent_id, str(seq), epoch)).encode()).hexdigest()[:32]
