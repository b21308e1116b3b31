"""What wakes an agent, and in which order it reacts: one reaction at a time per thread, threads in parallel, bounded.

Stands between the client's deliveries and the runner. Pure: no IO, no clock, no tasks; the runner asks `next_message`
and starts a reaction. Memory is bounded by what the hub leaves unacknowledged (`max_unacked`) and by `REMEMBERED`.
How a message goes through::

    offer -- wakes nobody --------------------------------------------> CONTEXT
      |---- came before, its reaction has ended ----------------------> HANDLED
      |---- came before, waits or is in work -------------------------> PENDING
      v
    idle thread:    _waiting[thread]          the longest waiting thread is next, if at_work < max_parallel (of one
                        |                     pair's conversations one less)
                        | next_message
                        v
    thread at work: _working[thread] = _Line  reactions: 1; what comes meanwhile waits in the line
                        | pause: every reaction of the line only waits for others (paused == reactions)
                        v
                    _asked                    a question of `ask` in the line may pass the others: next_message
                        | finish, release     gives it out, and reactions grows, to MAX_IN_THREAD at most
                        v
                    the line's rest goes back to _waiting, behind the other threads

    thread held:    _held[thread]             hold: all of it that waits, and what comes; of messages that are no
                        | give                questions the newest alone, the others are passed over
                        v
                    _waiting

A question goes ahead because one of the reactions that wait may be waiting for whoever asks, directly or through
others, and both would wait for ever. A reaction that only waits counts in its line (``reactions``) and not in
``at_work``.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from roundelay.network.addresses import agent_address, answer_threads, conversation_of, thread_parties
from roundelay.network.messages import BaseMessage

from .mentions import mentions
from .values import Scope

ReactTo = Literal["mentions", "mentions_only", "all"]
"""What wakes an agent in channels and broadcasts; `wakes` has the rule."""

Visibility = Literal["people", "strict", "all", "current"]

MAX_IN_THREAD = 8
"""Reactions that may wait in one thread at a time, and be passed by a question: whoever asks again and again waits."""

REMEMBERED = 1024
"""Messages already reacted to that are still recognised when a hub delivers them again (an ack may be lost with it)."""


def requires_response_from(message: BaseMessage, agent_id: str) -> bool:
    """Tell whether the sender asked this agent for a response, by name or with everybody else."""
    asked = message.requires_response
    return agent_id in asked if isinstance(asked, list) else asked is True


def is_question(message: BaseMessage, agent_id: str) -> bool:
    """Tell whether the message is a question of `ask` to this agent: somebody waits for the reply to it."""
    return bool(read_waiting(message)) and requires_response_from(message, agent_id)


def wakes(message: BaseMessage, agent_id: str, react_to: ReactTo = "mentions") -> bool:
    """Tell whether the message starts a reaction; one that does not is context for later ones.

    A direct message does, and a mod's that is addressed to the agent. In channels and broadcasts an @mention and a
    required response do, and a person's message unless it names who has to respond: then it is for these alone. With
    ``react_to="all"`` every message does, with ``"mentions_only"`` none but an @mention and a required response. The
    agent's own never do, nor that somebody declines to answer, nor what a person decides on a call, nor what the
    network itself tells (that it has to stop).
    """
    if is_declined(message) or (message.reply_to is not None and read_decision(message) is not None):
        return False
    if message.kind == "mod":  # a mod may have the agent's name, so only the address tells who wrote it
        return message.to == agent_address(agent_id) and message.sender_id != "network"
    if message.sender_id == agent_id:
        return False
    if message.kind == "direct" or react_to == "all":
        return True
    is_for_all = message.sender_kind == "human" and not isinstance(message.requires_response, list)
    return (is_for_all and react_to != "mentions_only") or is_addressed(message, agent_id)


def is_addressed(message: BaseMessage, agent_id: str) -> bool:
    """Return whether the message asks this agent for a response, or mentions it."""
    return requires_response_from(message, agent_id) or mentions(message.text, agent_id)


class Arrival(Enum):
    """What becomes of a delivered message."""

    QUEUED = "queued"
    """It gets a reaction, when `next_message` gives it out."""

    CONTEXT = "context"
    """It is read later, as part of a thread; there is nothing to do now."""

    PENDING = "pending"
    """It came before and waits, or is in work."""

    HANDLED = "handled"
    """It came before and its reaction has ended."""


@dataclass(slots=True)
class _BusyThread:
    """A thread in work: its reactions, those of them that only wait for others, and what waits behind them. ``seq`` is
    that of the message that it began with."""

    seq: int
    waiting: deque[BaseMessage]
    reactions: int = 1
    paused: int = 0


class Inbox:
    """The messages that wait for a reaction, by thread.

    ``offer`` each delivery; start a reaction for each ``next_message`` until it gives none; tell ``finish`` when one
    has ended. After ``release`` a message may come again (it was handed back to the hub).
    """

    def __init__(
        self,
        agent_id: str,
        *,
        react_to: ReactTo = "mentions",
        ignored_sender_ids: Sequence[str] = (),
        max_parallel: int = 8,
    ) -> None:
        self.agent_id = agent_id
        self.react_to: ReactTo = react_to
        self._ignored = tuple(ignored_sender_ids)
        self.max_parallel = max_parallel
        self._waiting: OrderedDict[str, deque[BaseMessage]] = OrderedDict()  # idle threads, the longest waiting first
        self._working: dict[str, _BusyThread] = {}
        self._askable: OrderedDict[str, None] = (
            OrderedDict()
        )  # of these, where all only wait, and a question behind them
        self.at_work = 0
        """How many reactions run; not those that only wait for others."""
        self._waits: Counter[str] = Counter()  # of reactions that wait for others: in how many of their calls
        self._paused: dict[str, tuple[str, _BusyThread]] = {}  # the thread of each
        self._taken_over: dict[str, list[BaseMessage]] = {}  # threads that a person holds
        self.superseded: list[BaseMessage] = []
        """Of these: a later message has come."""
        self._known: set[int] = set()  # seqs that wait or are in work
        self._handled: OrderedDict[int, None] = OrderedDict()  # the last REMEMBERED seqs, oldest first

    def __len__(self) -> int:
        """How many messages wait or are in work."""
        return len(self._known)

    def __contains__(self, seq: int) -> bool:
        """Whether a message waits or is in work."""
        return seq in self._known

    def offer(self, message: BaseMessage) -> Arrival:
        """Take a delivered message in."""
        if message.seq in self._known:
            return Arrival.PENDING
        if message.seq in self._handled:
            return Arrival.HANDLED
        is_ignored = any(fnmatchcase(message.sender_id, it) for it in self._ignored)
        if is_ignored or not wakes(message, self.agent_id, self.react_to):
            return Arrival.CONTEXT
        self.admit(message)
        return Arrival.QUEUED

    def admit(self, message: BaseMessage) -> None:
        """Queue a message that gets a reaction whatever the wake rule says: one that was begun before a restart."""
        self._known.add(message.seq)
        places = answer_threads(message.kind, message.thread_id, message.seq)
        held = next((it for it in places if it in self._taken_over), None)
        if held is not None:
            self._hold_back(held, [message])
            return
        line = self._working.get(message.thread_id)
        queue = self._waiting.setdefault(message.thread_id, deque()) if line is None else line.waiting
        queue.append(message)
        self._update_askable(message.thread_id)

    def has_later(self, thread_id: str, seq: int) -> bool:
        """Whether a later message of a thread is in work, or waits and may be given out, and is no question."""
        line = self._working.get(thread_id)
        if line is not None and line.seq > seq:
            return True
        waiting = [*self._waiting.get(thread_id, ()), *(line.waiting if line is not None else ())]
        return any(it.seq > seq and not is_question(it, self.agent_id) for it in waiting)

    @property
    def taken_over_threads(self) -> list[str]:
        """The threads that are held."""
        return list(self._taken_over)

    def start_takeover(self, thread_id: str) -> None:
        """Give out nothing more of a thread until it is given back. What is in work there is left alone."""
        self._taken_over.setdefault(thread_id, [])
        line = self._working.get(thread_id)
        waiting = [*self._waiting.pop(thread_id, ()), *(line.waiting if line is not None else ())]
        if line is not None:
            line.waiting.clear()
        self._hold_back(thread_id, waiting)
        self._update_askable(thread_id)

    def end_takeover(self, thread_id: str) -> list[BaseMessage]:
        """Let a held thread go on, with what is left of it, which is given."""
        messages = self._taken_over.pop(thread_id, [])
        for message in messages:
            self.admit(message)
        return messages

    def pop_superseded(self) -> list[BaseMessage]:
        """Take out what needs no reaction of its own any more, since a later message of its held thread has come."""
        passed, self.superseded = self.superseded, []
        for message in passed:
            self.note_handled(message.seq)
        return passed

    def _hold_back(self, thread_id: str, messages: Collection[BaseMessage]) -> None:
        """Keep messages of a held thread: of those that are no questions the newest alone."""
        kept = sorted((*self._taken_over[thread_id], *messages), key=lambda it: it.seq)
        newest = max((it.seq for it in kept if not is_question(it, self.agent_id)), default=0)
        held = self._taken_over[thread_id] = [it for it in kept if it.seq == newest or is_question(it, self.agent_id)]
        seqs = {it.seq for it in held}
        self.superseded += [it for it in kept if it.seq not in seqs]

    def next_message(self) -> BaseMessage | None:
        """Give the next message to react to and mark its thread as in work; None when none can start now."""
        if self.at_work >= self.max_parallel:
            return None
        if self._askable:
            thread_id, _ = self._askable.popitem(last=False)
            message = self._take_question(self._working[thread_id])
        elif (found := self._find_next_thread()) is not None:
            thread_id, messages = found, self._waiting.pop(found)
            message = messages.popleft()
            self._working[thread_id] = _BusyThread(message.seq, messages)
        else:
            return None
        self.at_work += 1
        return message

    def _find_next_thread(self) -> str | None:
        """The thread that waits the longest. A pair may have any number of conversations: one place is left for others,
        so that nobody keeps an agent to itself by beginning many."""
        at_work = Counter(_pair_of(it) for it, line in self._working.items() if line.paused < line.reactions)
        most = max(1, self.max_parallel - 1)
        return next((it for it in self._waiting if (pair := _pair_of(it)) is None or at_work[pair] < most), None)

    def withdraw(self, message: BaseMessage) -> list[BaseMessage]:
        """Take out what waits behind this message, which is in work; `note_handled` follows for each. A question
        stays: who asked waits for the reply to it, and for no other."""
        line = self._working.get(message.thread_id)
        waiting = list(line.waiting) if line is not None else []
        if line is not None:
            line.waiting = deque(it for it in waiting if is_question(it, self.agent_id))
        return [it for it in waiting if not is_question(it, self.agent_id)]

    def put_back(self, messages: Collection[BaseMessage]) -> None:
        """Take in again what was withdrawn of a thread: where it was, before what came later."""
        for message in messages:
            self.admit(message)
        for thread_id in {it.thread_id for it in messages}:
            line = self._working[thread_id]
            line.waiting = deque(sorted(line.waiting, key=lambda it: it.seq))

    def note_handled(self, seq: int) -> None:
        """A message needs no reaction of its own."""
        self._known.discard(seq)
        self._handled[seq] = None
        if len(self._handled) > REMEMBERED:
            self._handled.popitem(last=False)

    def pause(self, reaction: str, thread_id: str) -> None:
        """A reaction waits for others in one of its calls: it holds its thread, and nobody else's place."""
        self._waits[reaction] += 1
        if self._waits[reaction] > 1:
            return
        self.at_work -= 1
        line = self._working.get(thread_id)
        if line is not None:
            self._paused[reaction] = (thread_id, line)
            line.paused += 1
            self._update_askable(thread_id)

    def resume(self, reaction: str) -> None:
        """It goes on, at once: for a while there may be more at work than ``max_parallel``."""
        self._waits[reaction] -= 1
        if self._waits[reaction]:
            return
        del self._waits[reaction]
        self.at_work += 1
        thread_id, line = self._paused.pop(reaction, ("", None))
        if line is not None:
            line.paused -= 1
            self._update_askable(thread_id)

    def finish(self, message: BaseMessage) -> None:
        """The reaction to this message has ended, well or not; its thread goes on with the next one."""
        self.note_handled(message.seq)
        self._leave(message)

    def release(self, message: BaseMessage) -> None:
        """The reaction did not begin and the message went back to the hub, which will deliver it again."""
        self._leave(message)

    def _leave(self, message: BaseMessage) -> None:
        line = self._working[message.thread_id]
        self._known.discard(message.seq)
        self.at_work -= 1
        line.reactions -= 1
        if not line.reactions:
            del self._working[message.thread_id]
            if line.waiting:
                # To the end of the line: a busy thread starves no other.
                self._waiting[message.thread_id] = line.waiting
        self._update_askable(message.thread_id)

    def _take_question(self, line: _BusyThread) -> BaseMessage:
        place = next(place for place, it in enumerate(line.waiting) if is_question(it, self.agent_id))
        question = line.waiting[place]
        del line.waiting[place]
        line.reactions += 1
        return question

    def _update_askable(self, thread_id: str) -> None:
        """Note whether a question can be taken out of a thread in work."""
        line = self._working.get(thread_id)
        is_asked = (
            line is not None
            and line.paused == line.reactions < MAX_IN_THREAD
            and any(is_question(it, self.agent_id) for it in line.waiting)
        )
        if is_asked:
            self._askable.setdefault(thread_id)
        else:
            self._askable.pop(thread_id, None)


def _pair_of(thread_id: str) -> tuple[str, str] | None:
    """Whose a named conversation is; None for other threads."""
    return thread_parties(thread_id) if conversation_of(thread_id) else None


ASK = "ask"
"""In a message's metadata: it is a question of `ask`. ``waiting`` names who waits for the answer, and for its asker's;
``watched`` says that a person watches them."""


STOPPED = "stopped"
"""Metadata of the message that a stopped reaction leaves: {"by": who stopped it}."""

DECLINED = "declined"
"""In a message's metadata: there is no answer."""


class Decision(NamedTuple):
    """What a person decided on a call: that it is made, perhaps with other ``arguments``, or denied and why."""

    is_approved: bool
    arguments: str | None = None
    reason: str = ""
    scope: Scope = "once"


def read_decision(message: BaseMessage) -> Decision | None:
    """Give a person's ``/approve``, ``/approve thread``, ``/approve always``, ``/deny REASON`` or ``/edit ARGUMENTS``,
    said by the person or told by the network; None for anything else, and for anybody else."""
    if message.sender_kind != "human":
        return parse_decision(told["decision"]) if (told := _read_told(message)) is not None else None
    return parse_decision(message.said)


def find_request(message: BaseMessage) -> int | None:
    """Give the seq of the message that this one answers: as a reply, or as the network tells of a decision."""
    told = _read_told(message)
    return message.reply_to if told is None else told["request"]


def find_decider(message: BaseMessage) -> str:
    """Return who decided by a message: its sender, or the person that the network names."""
    told = _read_told(message)
    return message.sender_id if told is None else told["by"]


def read_decision_text(message: BaseMessage) -> str:
    """Give the words of a decision."""
    told = _read_told(message)
    return (message.said if told is None else told["decision"]).strip()


def is_told_by_network(message: BaseMessage) -> bool:
    """Whether the network tells of a decision (``network.decide``): it has checked who decides."""
    return _read_told(message) is not None


def _read_told(message: BaseMessage) -> dict[str, Any] | None:
    """What the network tells of a decision; None for any other message. Nobody else sends under its name."""
    if message.kind != "mod" or message.sender_id != "network":
        return None
    match message.content:
        case {"kind": "decision", "request": int(request), "by": str(by), "decision": str(decision)}:
            return {"request": request, "by": by, "decision": decision}
        case _:
            return None


def parse_decision(text: str) -> Decision | None:
    """Give what the words of a person decide; None for any other text."""
    word, *said = text.strip().split(maxsplit=1) or [""]
    rest = said[0] if said else ""
    match word.lower():
        case "/approve":
            chosen = rest.strip().lower()
            return Decision(True, scope="thread" if chosen == "thread" else "always" if chosen == "always" else "once")
        case "/deny":
            return Decision(False, reason=rest.strip())
        case "/edit" if rest.strip():
            return Decision(True, arguments=rest.strip())
        case _:
            return None


def read_waiting(message: BaseMessage) -> list[str]:
    """Give who waits for the answer to a message, directly or through others; nobody if it is no question of `ask`."""
    question = (message.metadata or {}).get(ASK)
    waiting = question.get("waiting") if isinstance(question, dict) else None
    return [it for it in waiting if isinstance(it, str)] if isinstance(waiting, list) else []


def is_watched(message: BaseMessage) -> bool:
    """Whether a person watches how a message is answered: one that wrote it, or for whom an agent asks."""
    question = (message.metadata or {}).get(ASK)
    return message.sender_kind == "human" or (isinstance(question, dict) and question.get("watched") is True)


def is_declined(message: BaseMessage) -> bool:
    """Whether a reply says that there is no answer; it wakes nobody."""
    return (message.metadata or {}).get(DECLINED) is True
