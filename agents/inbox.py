"""Decides which messages wake an agent, and in which order the agent reacts. Each thread has one reaction at a time; a
limited number of threads run in parallel.

The inbox receives the deliveries. `reaction_scheduler` starts a reaction for each message that `next_message` returns.
This module is pure: no IO, no clock, no tasks. Its memory is limited by the number of unacknowledged deliveries
(`max_unacked`) and by `REMEMBERED`. The path of a message::

    offer -- wakes nobody --------------------------------------------> CONTEXT
      |---- came before, its reaction has ended ----------------------> HANDLED
      |---- came before, waits or has a running reaction -------------> PENDING
      v
    idle thread:    _waiting[thread]          the longest waiting thread is next, if at_work < max_parallel (of one
                        |                     pair's conversations one less)
                        | next_message
                        v
    busy thread:    _working[thread]          reactions: 1; later messages wait in the thread's queue
                        | pause: every reaction of the thread only waits for others (paused == reactions)
                        v
                    _askable                  a question of `ask` in the queue may pass the other messages:
                        | finish, release     next_message returns it, and reactions grows, to MAX_IN_THREAD at most
                        v
                    the rest of the queue returns to _waiting, behind the other threads

    taken over:     _taken_over[thread]       start_takeover: all waiting and new messages; of messages that are no
                        | end_takeover        questions only the newest, which supersedes the others
                        v
                    _waiting

A question may pass other messages, because the waiting reaction may be waiting for the sender of that question,
directly or through other agents. If the question had to queue, both would wait forever. A reaction that only waits
counts in its thread (``reactions``), but not in ``at_work``.
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
"""Which messages in channels and broadcasts wake an agent. `wakes` describes each value."""

Visibility = Literal["people", "strict", "all", "current"]

MAX_IN_THREAD = 8
"""Maximum number of reactions in one thread, including waiting reactions. At this number, further questions have to
wait.
"""

REMEMBERED = 1024
"""Number of handled messages that the agent remembers, to recognize repeated deliveries. A hub that crashes may lose an
acknowledgement and deliver the message again.
"""


def requires_response_from(message: BaseMessage, agent_id: str) -> bool:
    """Return whether the sender requires a response from this agent, either by name or from all recipients."""
    required = message.requires_response
    return agent_id in required if isinstance(required, list) else required is True


def is_question(message: BaseMessage, agent_id: str) -> bool:
    """Return whether the message is a question to this agent that was sent with `ask`. The sender of such a question
    waits for the reply.
    """
    return bool(read_waiting(message)) and requires_response_from(message, agent_id)


def wakes(message: BaseMessage, agent_id: str, react_to: ReactTo = "mentions") -> bool:
    """Return whether the message starts a reaction. Other messages are only context for later reactions.

    A direct message wakes its recipient, and so does a mod's message to the agent. In channels and broadcasts, an
    @mention or a required response wakes the agent. A person's message there also wakes the agent, unless the message
    names who has to respond. With ``react_to="all"`` every message wakes the agent; with ``"mentions_only"`` only an
    @mention or a required response does.

    These messages never wake the agent: its own messages, deleted messages, declined answers, a person's decision on a
    call, and reports from the network itself.
    """
    if message.deleted_at is not None or is_declined(message):
        return False
    if message.reply_to is not None and read_decision(message) is not None:
        return False
    if message.kind == "mod":  # a mod and an agent may have the same name, so only the address identifies the author
        return message.to == agent_address(agent_id) and message.sender_id != "network"
    if message.sender_id == agent_id:
        return False
    if message.kind == "direct" or react_to == "all":
        return True
    is_for_all = message.sender_kind == "human" and not isinstance(message.requires_response, list)
    return (is_for_all and react_to != "mentions_only") or is_addressed(message, agent_id)


def is_addressed(message: BaseMessage, agent_id: str) -> bool:
    """Return whether the message requires a response from this agent or mentions it."""
    return requires_response_from(message, agent_id) or mentions(message.text, agent_id)


class Arrival(Enum):
    """Outcome of a delivery."""

    QUEUED = "queued"
    """The message is queued and gets a reaction when `next_message` returns it."""

    CONTEXT = "context"
    """The message is context that a later reaction reads as part of the thread. It needs no action now."""

    PENDING = "pending"
    """The message was delivered before, and it is queued or its reaction is running."""

    HANDLED = "handled"
    """The message was delivered before, and its reaction has ended."""


@dataclass(slots=True)
class _BusyThread:
    """Thread with running reactions. Counts its reactions and those that only wait for others, and holds the queued
    messages. ``seq`` is the seq of the thread's first message.
    """

    seq: int
    waiting: deque[BaseMessage]
    reactions: int = 1
    paused: int = 0


class Inbox:
    """Messages that wait for a reaction, by thread.

    Call ``offer`` for each delivery. Start a reaction for each ``next_message`` until it returns None. Call ``finish``
    when a reaction has ended. After ``release`` the hub may deliver the message again.
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
        self._waiting: OrderedDict[str, deque[BaseMessage]] = OrderedDict()  # idle threads, longest waiting first
        self._working: dict[str, _BusyThread] = {}
        self._askable: OrderedDict[str, None] = (
            OrderedDict()
        )  # busy threads where all reactions only wait and a question is queued
        self.at_work = 0
        """Number of working reactions, not including reactions that only wait for others."""

        self._waits: Counter[str] = Counter()  # number of waiting calls, by reaction
        self._paused: dict[str, tuple[str, _BusyThread]] = {}  # thread of each waiting reaction
        self._taken_over: dict[str, list[BaseMessage]] = {}  # withheld messages, by thread
        self.superseded: list[BaseMessage] = []
        """Messages of taken-over threads that need no reaction of their own, because a later message supersedes them.
        """

        self._known: set[int] = set()  # seqs of messages that are queued or have a running reaction
        # seqs of the last REMEMBERED handled messages, oldest first
        self._handled: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of messages that are queued or have a running reaction."""
        return len(self._known)

    def __contains__(self, seq: int) -> bool:
        """Return whether a message is queued or has a running reaction."""
        return seq in self._known

    def offer(self, message: BaseMessage) -> Arrival:
        """Classify a delivered message and queue it if it wakes the agent."""
        # Check for a known message before applying the wake rule. A resumed reaction may have a trigger that would not
        # wake the agent under the current ``react_to``.
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
        """Queue a message regardless of the wake rule, for example a message that arrived before a restart."""
        self._known.add(message.seq)
        # The answer to a broadcast is sent to another thread. Withhold the message if either thread is taken over.
        places = answer_threads(message.kind, message.thread_id, message.seq)
        held = next((place for place in places if place in self._taken_over), None)
        if held is not None:
            self._hold_back(held, [message])
            return
        # Queue the message behind the running reaction of its thread. Two parallel reactions in one thread would not
        # see each other's work.
        busy = self._working.get(message.thread_id)
        queue = self._waiting.setdefault(message.thread_id, deque()) if busy is None else busy.waiting
        queue.append(message)
        self._update_askable(message.thread_id)

    def has_later(self, thread_id: str, seq: int) -> bool:
        """Return whether the thread has a later message that has a running reaction, or that is queued and not a
        question.
        """
        busy = self._working.get(thread_id)
        if busy is not None and busy.seq > seq:
            return True
        waiting = [*self._waiting.get(thread_id, ()), *(busy.waiting if busy is not None else ())]
        return any(message.seq > seq and not is_question(message, self.agent_id) for message in waiting)

    @property
    def taken_over_threads(self) -> list[str]:
        """Threads that are taken over."""
        return list(self._taken_over)

    def start_takeover(self, thread_id: str) -> None:
        """Withhold all messages of a thread until the takeover ends. Reactions that are already running continue."""
        self._taken_over.setdefault(thread_id, [])
        busy = self._working.get(thread_id)
        waiting = [*self._waiting.pop(thread_id, ()), *(busy.waiting if busy is not None else ())]
        if busy is not None:
            busy.waiting.clear()  # otherwise the end of the reaction would release these messages
        self._hold_back(thread_id, waiting)
        self._update_askable(thread_id)

    def end_takeover(self, thread_id: str) -> list[BaseMessage]:
        """End the takeover of a thread. Queue its withheld messages again and return them."""
        messages = self._taken_over.pop(thread_id, [])
        for message in messages:
            self.admit(message)
        return messages

    def pop_superseded(self) -> list[BaseMessage]:
        """Remove and return the superseded messages, which need no reaction of their own."""
        # Replace the list at once. The caller awaits between messages, and more messages may be superseded in the
        # meantime.
        passed, self.superseded = self.superseded, []
        for message in passed:
            self.note_handled(message.seq)
        return passed

    def _hold_back(self, thread_id: str, messages: Collection[BaseMessage]) -> None:
        """Withhold messages of a taken-over thread. Keep all questions, but only the newest of the other messages."""
        # One reaction after the takeover reads the whole thread, so the newest message is enough. Keep all questions,
        # because each sender waits for a separate reply.
        kept = sorted((*self._taken_over[thread_id], *messages), key=lambda it: it.seq)
        newest = max((message.seq for message in kept if not is_question(message, self.agent_id)), default=0)
        held = self._taken_over[thread_id] = [
            message for message in kept if message.seq == newest or is_question(message, self.agent_id)
        ]
        seqs = {it.seq for it in held}
        self.superseded += [message for message in kept if message.seq not in seqs]

    def next_message(self) -> BaseMessage | None:
        """Return the next message to react to, and mark its thread as busy. Return None if no reaction can start now."""
        if self.at_work >= self.max_parallel:
            return None
        # Take a question that may pass first, because the reactions in its thread may be waiting for its sender.
        if self._askable:
            thread_id, _ = self._askable.popitem(last=False)
            message = self._take_question(self._working[thread_id])
        elif (next_thread := self._find_next_thread()) is not None:
            thread_id, messages = next_thread, self._waiting.pop(next_thread)
            message = messages.popleft()
            self._working[thread_id] = _BusyThread(message.seq, messages)
        else:
            return None
        self.at_work += 1
        return message

    def _find_next_thread(self) -> str | None:
        """Return the thread that has waited longest. Two participants may start any number of conversations and could
        keep the agent busy. While such conversations run, one slot is therefore reserved for other threads.
        """
        at_work = Counter(_pair_of(it) for it, busy in self._working.items() if busy.paused < busy.reactions)
        max_of_pair = max(1, self.max_parallel - 1)
        return next(
            (
                message
                for message in self._waiting
                if (pair := _pair_of(message)) is None or at_work[pair] < max_of_pair
            ),
            None,
        )

    def withdraw(self, message: BaseMessage) -> list[BaseMessage]:
        """Remove and return the messages that are queued behind this message, whose reaction is running. The caller
        calls `note_handled` for each of them. Questions stay in the queue, because each sender waits for a separate
        reply.
        """
        busy = self._working.get(message.thread_id)
        waiting = list(busy.waiting) if busy is not None else []
        if busy is not None:
            busy.waiting = deque(it for it in waiting if is_question(it, self.agent_id))
        return [it for it in waiting if not is_question(it, self.agent_id)]

    def put_back(self, messages: Collection[BaseMessage]) -> None:
        """Return withdrawn messages to the queue, before later messages."""
        for message in messages:
            self.admit(message)
        for thread_id in {it.thread_id for it in messages}:
            busy = self._working[thread_id]
            busy.waiting = deque(sorted(busy.waiting, key=lambda it: it.seq))

    def note_handled(self, seq: int) -> None:
        """Mark a message as handled, so that it starts no further reaction."""
        self._known.discard(seq)
        self._handled[seq] = None
        if len(self._handled) > REMEMBERED:
            self._handled.popitem(last=False)

    def pause(self, reaction: str, thread_id: str) -> None:
        """Record that a reaction waits for others in one of its calls. The reaction still blocks its thread, but frees
        a parallel slot.
        """
        self._waits[reaction] += 1
        if self._waits[reaction] > 1:  # several calls of one turn may wait in parallel; count the reaction only once
            return
        self.at_work -= 1
        busy = self._working.get(thread_id)
        if busy is not None:
            self._paused[reaction] = (thread_id, busy)
            busy.paused += 1
            self._update_askable(thread_id)

    def resume(self, reaction: str) -> None:
        """Record that the reaction continues. More reactions than ``max_parallel`` may run for a while."""
        self._waits[reaction] -= 1
        if self._waits[reaction]:
            return
        del self._waits[reaction]
        # may exceed max_parallel: if a continuing reaction had to wait for a slot, agents could deadlock
        self.at_work += 1
        thread_id, busy = self._paused.pop(reaction, ("", None))
        if busy is not None:
            busy.paused -= 1
            self._update_askable(thread_id)

    def finish(self, message: BaseMessage) -> None:
        """Record that the reaction to this message has ended, successfully or not. The thread continues with its next
        message.
        """
        self.note_handled(message.seq)
        self._leave(message)

    def release(self, message: BaseMessage) -> None:
        """Record that the reaction to this message could not start. The hub will deliver the message again."""
        self._leave(message)

    def _leave(self, message: BaseMessage) -> None:
        busy = self._working[message.thread_id]
        # Forget the seq, because the hub delivers the message again. Otherwise `offer` would return PENDING for it.
        self._known.discard(message.seq)
        self.at_work -= 1
        busy.reactions -= 1
        if not busy.reactions:
            del self._working[message.thread_id]
            if busy.waiting:
                # Queue the thread behind the other threads. A thread with many messages must not block them.
                self._waiting[message.thread_id] = busy.waiting
        self._update_askable(message.thread_id)

    def _take_question(self, busy: _BusyThread) -> BaseMessage:
        place = next(place for place, it in enumerate(busy.waiting) if is_question(it, self.agent_id))
        question = busy.waiting[place]
        del busy.waiting[place]
        busy.reactions += 1
        return question

    def _update_askable(self, thread_id: str) -> None:
        """Update whether a question in a busy thread may pass the other messages."""
        busy = self._working.get(thread_id)
        is_asked = (
            busy is not None
            # A question may pass only if all reactions of the thread wait. A working reaction could write to the
            # thread, and the two reactions would not see each other's work.
            and busy.paused == busy.reactions < MAX_IN_THREAD
            and any(is_question(message, self.agent_id) for message in busy.waiting)
        )
        if is_asked:
            self._askable.setdefault(thread_id)
        else:
            self._askable.pop(thread_id, None)


def _pair_of(thread_id: str) -> tuple[str, str] | None:
    """Return the two parties of a named conversation, or None for other threads."""
    return thread_parties(thread_id) if conversation_of(thread_id) else None


ASK = "ask"
"""Metadata key of a question that was sent with `ask`. ``waiting`` lists the ids of the participants that wait for the
answer, directly or through others. ``watched`` tells whether a person watches the question.
"""


STOPPED = "stopped"
"""Metadata key of the message that a stopped reaction leaves in the thread: {"by": id of the participant who stopped
the reaction}.
"""

DECLINED = "declined"
"""Metadata key of a reply in which an agent declines to answer."""


class Decision(NamedTuple):
    """A person's decision on a call: approved, optionally with other ``arguments``, or denied with a ``reason``."""

    is_approved: bool
    arguments: str | None = None
    reason: str = ""
    scope: Scope = "once"


def read_decision(message: BaseMessage) -> Decision | None:
    """Return a person's decision (``/approve``, ``/approve thread``, ``/approve always``, ``/deny REASON``, ``/edit
    ARGUMENTS``), or None for any other message. Either the person sends the decision, or the network reports it.
    """
    if message.sender_kind != "human":
        return parse_decision(report["decision"]) if (report := _read_report(message)) is not None else None
    return parse_decision(message.said)


def find_request(message: BaseMessage) -> int | None:
    """Return the seq of the request that this decision answers, as a reply or as a decision reported by the network."""
    report = _read_report(message)
    return message.reply_to if report is None else report["request"]


def find_decider(message: BaseMessage) -> str:
    """Return the person who decided: the sender, or the person named in the network's report."""
    report = _read_report(message)
    return message.sender_id if report is None else report["by"]


def read_decision_text(message: BaseMessage) -> str:
    """Return the text of a decision, which may contain a reason or arguments."""
    report = _read_report(message)
    return (message.said if report is None else report["decision"]).strip()


def is_reported_by_network(message: BaseMessage) -> bool:
    """Return whether the message is the network's report of a decision (``network.decide``). For such a report, the
    network has checked who decided.
    """
    return _read_report(message) is not None


def _read_report(message: BaseMessage) -> dict[str, Any] | None:
    """Return the network's report of a decision, or None for any other message. Only the network can send messages
    under its own name.
    """
    if message.kind != "mod" or message.sender_id != "network":
        return None
    match message.content:
        case {"kind": "decision", "request": int(request), "by": str(by), "decision": str(decision)}:
            return {"request": request, "by": by, "decision": decision}
        case _:
            return None


def parse_decision(text: str) -> Decision | None:
    """Return the decision in a person's text, or None for any other text."""
    word, *said = text.strip().split(maxsplit=1) or [""]
    rest = said[0] if said else ""
    match word.lower():
        case "/approve":
            chosen = rest.strip().lower()
            # Any other word after /approve approves the call once. A typing error must never grant a standing approval.
            return Decision(True, scope="thread" if chosen == "thread" else "always" if chosen == "always" else "once")
        case "/deny":
            return Decision(False, reason=rest.strip())
        case "/edit" if rest.strip():
            return Decision(True, arguments=rest.strip())
        case _:
            return None


def read_waiting(message: BaseMessage) -> list[str]:
    """Return the participants that wait for the answer to a message, directly or through others. The list is empty if
    the message is not a question of `ask`.
    """
    question = (message.metadata or {}).get(ASK)
    waiting = question.get("waiting") if isinstance(question, dict) else None
    return [it for it in waiting if isinstance(it, str)] if isinstance(waiting, list) else []


def is_watched(message: BaseMessage) -> bool:
    """Return whether a person watches for the answer to this message: the sender, or a person on whose behalf an agent
    asks.
    """
    question = (message.metadata or {}).get(ASK)
    return message.sender_kind == "human" or (isinstance(question, dict) and question.get("watched") is True)


def is_declined(message: BaseMessage) -> bool:
    """Return whether the message is a reply that declines to answer. Such a reply wakes no agent."""
    return (message.metadata or {}).get(DECLINED) is True
