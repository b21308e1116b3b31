"""Replies that tool calls wait for: the open questions of an agent, and the wait of each call.

`Replies` contains the open questions of `ask` and the open requests for approval. `Replies` passes delivered replies to
the waiting calls (`Waiter`), before the wake rule could start a reaction to a reply. Waits are durable: the record
``waiting`` contains the recipients and the deadline, so a restarted agent continues to wait. If a reply arrives while
the agent is down, or if the hub holds the reply back behind other messages, the wait reads the reply from its thread.

While a call waits, it regularly asks the hub whether an answer can still arrive (`find_unanswerable`). A wait ends
early only if an answer is impossible: the recipient was removed, the question is a dead letter, or the reaction to the
question has ended. An agent stores its reply before its reaction ends. If the thread has no reply after the reaction
has ended, there will be no reply. If a recipient keeps no records, the hub cannot know that its reaction has ended, so
the wait lasts until its deadline.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from roundelay.network.addresses import direct_thread, mod_thread
from roundelay.network.client import NetworkClient, Stored
from roundelay.network.clock import Clock, system_clock
from roundelay.network.errors import ConnectError, RequestError, RoundelayError
from roundelay.network.messages import BaseMessage

from .events import Waiting
from .inbox import find_request, read_decision
from .isolation import retry_later
from .journal import Journal
from .live_activity import RemoteActivity, WaitingCall
from .reaction_ids import reaction_id
from .values import Wait

FIRST_LOOK_S, MAX_LOOK_S = 2.0, 300.0
"""Delay before a wait first asks the hub whether an answer can still arrive, and maximum delay between two checks, in
seconds. Each delay is twice the previous delay.
"""


IsEnough = Callable[[Mapping[str, BaseMessage]], bool]
"""Returns whether the replies so far, keyed by recipient, are enough to end a wait."""


def never_enough(_: Mapping[str, BaseMessage]) -> bool:
    """Return False, so that a wait lasts until every reply has arrived."""
    return False


async def find_unanswerable(client: NetworkClient, questions: Mapping[str, int]) -> dict[str, str]:
    """Return the agents that will never answer these questions, with the reason for each agent. ``questions`` maps
    agents to the seqs of their questions.
    """
    reasons: dict[str, str] = {}
    for agent_id, seq in questions.items():
        try:
            status = await retry_later(partial(client.call, "network.message_status", {"seq": seq}))
        except ConnectError:
            raise
        except RoundelayError:
            continue  # the state is unknown, because the hub is older or the message was deleted
        # Agents derive the reaction's id from the question. A reaction with another id belongs to another program, so
        # its state does not show whether this agent will answer.
        own = reaction_id(agent_id, seq, client.welcome.network.epoch)
        for recipient in status["recipients"]:
            if recipient["agent_id"] == agent_id and (reason := _explain(recipient, own)):
                reasons[agent_id] = reason
    return reasons


def _explain(recipient: Mapping[str, Any], own: str) -> str:
    """Return why no answer will arrive, or an empty string if an answer is still possible."""
    if recipient["state"] == "removed":
        return "it was removed from the network."
    if recipient["state"] == "dead":
        return "it failed to take the question, again and again, and does not get it any more."
    if recipient.get("reaction") != own or recipient.get("is_overtaken"):
        return ""  # after a takeover, another reaction may still answer
    # ``again`` is set if the message later got another reaction, which may still answer.
    newest: Mapping[str, object] = recipient.get("again", recipient)
    ended = newest.get("reaction_status")
    if ended not in (None, "open"):
        return f"its work on the question has ended ({ended}), and no answer came of it."
    return ""


MAX_REMEMBERED = 1024
"""Maximum number of past replies, and of past questions, whose seqs `Replies` remembers."""

FIRST_PAGE, PAGE = 10, 100
"""Number of messages on the first page that is read from a thread, and on each later page. The first page is small,
because a reply is nearly always among the last few messages.
"""

MAX_WAIT_S = 10 * 365 * 86_400.0
"""Maximum time of a wait, in seconds. An infinite wait could not be recorded."""


class Replies:
    """Open questions of one agent. ``pause`` and ``resume`` are called with the reaction's id before and after each
    wait, so that a waiting reaction does not count toward the maximum of parallel reactions. ``clock`` returns the time
    in milliseconds since the Unix epoch.
    """

    def __init__(
        self,
        client: NetworkClient,
        *,
        pause: Callable[[str], None],
        resume: Callable[[str], None],
        clock: Clock = system_clock,
        is_observed: Callable[[], bool] = lambda: True,
    ) -> None:
        self.clock = clock
        self.relays = RemoteActivity(client, is_observed)
        self._client = client
        self._pause = pause
        self._resume = resume
        self._open: dict[int, asyncio.Future[BaseMessage]] = {}  # by the seq of the question
        self._approvals: set[int] = set()  # open requests for approval: only a person's decision is a reply
        self._taken: OrderedDict[int, None] = OrderedDict()  # seqs of the last replies that calls received
        self._dropped: OrderedDict[int, None] = OrderedDict()  # questions whose replies nobody needs any more
        # questions whose reply arrived before `expect` was called
        self._early: OrderedDict[int, None] = OrderedDict()
        self._hint: asyncio.Future[None] | None = None  # done when a question may be a dead letter

    def expect(self, question: int, *, is_approval: bool = False) -> None:
        """Intercept the reply to the message ``question`` from now on, so that the reply starts no reaction."""
        # Keep an existing future: a reply may have resolved it between sending the question and waiting for it.
        self._open.setdefault(question, asyncio.get_running_loop().create_future())
        if is_approval:
            self._approvals.add(question)

    def forget(self, questions: Iterable[int]) -> None:
        """Stop intercepting replies to these questions. A later reply is treated like any other message."""
        for question in questions:
            self._open.pop(question, None)
            self._approvals.discard(question)

    def look_after(self, question: int) -> None:
        """Make the wait check the state of a question at once, because the question may be a dead letter."""
        if question in self._open and self._hint is not None and not self._hint.done():
            self._hint.set_result(None)

    def take(self, message: BaseMessage) -> bool:
        """Consume a delivered message if it is a reply that a call waits for, and return True. Also return True for a
        reply that was consumed before, and for a program's reply that nobody needs any more.
        """
        if message.seq in self._taken or (message.reply_to in self._dropped and message.sender_kind != "human"):
            return True
        question = find_request(message)
        reply = self._open.get(question) if question is not None else None
        if question is not None and reply is None:
            # A fast recipient can answer before the sender knows the seq of its question. The wait will then read the
            # reply from the thread.
            _remember(self._early, question)
        if reply is None or reply.done():
            return False
        if question in self._approvals:
            if read_decision(message) is None:
                return False
        elif message.reply_to is None:  # a decision, but the question is not a request for approval
            return False
        reply.set_result(message)
        # Remember the reply: if its acknowledgement is lost, the hub delivers it again, and it must not start a
        # reaction.
        _remember(self._taken, message.seq)
        return True

    async def wait(
        self, wait: Wait, *, reaction: str, look_first: bool, left_s: float, is_enough: IsEnough = never_enough
    ) -> tuple[dict[str, BaseMessage], dict[str, str]]:
        """Wait for the reply to each question, for at most ``left_s`` seconds even if the wall clock jumps.

        ``look_first``: first read the threads, because replies may have arrived before this call. If ``is_enough``
        accepts the replies so far, the wait ends early, and later replies start no reaction. Return the replies by
        recipient, and the reasons by recipient why other recipients will never reply.
        """
        # Use the loop's clock, because the wall clock may be corrected while a call waits for days.
        ends_at = asyncio.get_running_loop().time() + left_s
        for question in wait.questions.values():
            self.expect(question, is_approval=wait.is_approval)
        replies = {to: self._open[question] for to, question in wait.questions.items()}
        try:
            # A reply in `_early` was delivered before `expect`, so it will not be delivered again. Read such a reply
            # from the thread.
            if look_first or not self._early.keys().isdisjoint(wait.questions.values()):
                await self._look_up(wait)
            # Pause the reaction after the lookup: if the reply is already there, no other reaction needs to start.
            self._pause(reaction)
            try:
                unanswerable = await self._await_all(replies, wait, ends_at, is_enough)
            finally:
                self._resume(reaction)
            if is_enough(_read_done(replies)):
                for to, reply in replies.items():
                    if not reply.done():  # nobody needs this reply any more
                        _remember(self._dropped, wait.questions[to])
            else:
                # The hub may hold a reply back behind other messages. Look for missing replies before reporting a
                # timeout.
                await self._look_up(wait)
        except asyncio.CancelledError:
            for question in wait.questions.values():
                if not wait.is_approval:  # a person's later message is treated like any other message
                    # A reply that arrives after the stop would otherwise start an unwanted reaction.
                    _remember(self._dropped, question)
            raise
        finally:
            for question in wait.questions.values():  # a later reply is treated like any other message
                del self._open[question]
                self._approvals.discard(question)
        return _read_done(replies), unanswerable

    async def _await_all(
        self, replies: Mapping[str, asyncio.Future[BaseMessage]], wait: Wait, ends_at: float, is_enough: IsEnough
    ) -> dict[str, str]:
        """Wait for all replies until ``ends_at``, in the time of the event loop. Check regularly whether each missing
        reply can still arrive. Return the recipients that will never reply, with the reason.
        """
        loop, look_s = asyncio.get_running_loop(), FIRST_LOOK_S
        look_at, hint = loop.time() + look_s, self._get_hint()
        unanswerable: dict[str, str] = {}
        while (now := loop.time()) < ends_at:
            missing = {to: reply for to, reply in replies.items() if not reply.done() and to not in unanswerable}
            if not missing or (wait.is_approval and len(missing) < len(replies)):
                break  # one decision is enough, even if several requests for the same approval are open
            if is_enough(_read_done(replies)):
                break
            wakes_at = ends_at if wait.is_approval else min(ends_at, look_at)
            waited: set[asyncio.Future[Any]] = {*missing.values(), hint}
            await asyncio.wait(waited, timeout=max(0.0, wakes_at - now), return_when=asyncio.FIRST_COMPLETED)
            is_due, hint = hint.done() or loop.time() >= look_at, self._get_hint()
            late = {to: wait.questions[to] for to, reply in missing.items() if not reply.done()}
            if late and is_due and not wait.is_approval and loop.time() < ends_at:
                # Double the delay between two checks. The first checks soon find an early failure, and a wait of days
                # costs the hub few requests.
                look_s = min(2 * look_s, MAX_LOOK_S)
                reasons = await find_unanswerable(self._client, late)
                if reasons:
                    await self._look_up(wait)  # a reply may have been stored before its reaction ended
                unanswerable |= {to: reason for to, reason in reasons.items() if not replies[to].done()}
                look_at = loop.time() + look_s
        return unanswerable

    def _get_hint(self) -> asyncio.Future[None]:
        if self._hint is None or self._hint.done():
            self._hint = asyncio.get_running_loop().create_future()
        return self._hint

    async def expect_sent(self, messages: Mapping[str, str], since: int) -> list[int]:
        """Expect replies to those of the ``messages`` (ids by recipient) that were actually sent. Search the threads
        after the seq ``since``. Return the seqs of the sent messages.
        """
        sent: list[int] = []
        for agent_id, message_id in messages.items():
            thread_id = direct_thread(self._client.agent_id, agent_id)
            try:
                async for message in self._read_back(thread_id, since):
                    if message.message_id == message_id and message.sender_id == self._client.agent_id:
                        self.expect(message.seq)
                        sent.append(message.seq)
            except RequestError:
                continue  # the thread does not exist, so this question was never sent
        return sent

    async def _look_up(self, wait: Wait) -> None:
        """Read the threads of the questions, and consume missing replies that they contain."""
        own = self._client.agent_id
        reported: list[BaseMessage] = []
        if wait.is_approval:  # the network reports decisions of people who cannot read the thread of the request
            with suppress(RequestError):  # there is no report yet
                messages = self._read_back(mod_thread("network", own), min(wait.questions.values()))
                reported = [message async for message in messages if read_decision(message) is not None]
        for to, question in wait.questions.items():
            if not self._open[question].done():
                messages = self._read_back(wait.threads[to], question)
                replies = [
                    message async for message in messages if message.reply_to == question and message.sender_id != own
                ]
                replies += [it for it in reported if find_request(it) == question]
                for reply in sorted(replies, key=lambda it: it.seq):  # the first decision counts
                    self.take(reply)

    async def _read_back(self, thread_id: str, seq: int) -> AsyncIterator[BaseMessage]:
        """Yield the messages of a thread after a seq, newest first."""
        before: int | None = None
        limit = FIRST_PAGE
        while True:
            page = await retry_later(partial(self._client.history, thread_id, before=before, limit=limit))
            for message in reversed(page.messages):
                if message.seq <= seq:
                    return
                yield message
            if not page.has_more:
                return
            before, limit = page.messages[0].seq, PAGE


def _read_done(replies: Mapping[str, asyncio.Future[BaseMessage]]) -> dict[str, BaseMessage]:
    return {to: reply.result() for to, reply in replies.items() if reply.done()}


def _remember(seqs: OrderedDict[int, None], seq: int) -> None:
    """Add a seq. Remove the oldest seq if there are more than `MAX_REMEMBERED`."""
    seqs[seq] = None
    if len(seqs) > MAX_REMEMBERED:
        seqs.popitem(last=False)


@dataclass(slots=True)
class Waiter:
    """The wait of one tool call. ``known`` is the wait that was recorded before a restart, and ``is_begun`` states
    whether the call had started before the restart. ``taken`` collects the seqs of the replies that the call received.
    """

    _replies: Replies
    _journal: Journal
    _call: WaitingCall
    known: Wait | None
    is_begun: bool
    taken: list[int]
    unanswerable: Mapping[str, str] = field(default_factory=dict)
    """Recipients that will never reply, with the reason. Set at the end of the wait."""

    _last_recorded: Wait | None = None
    """The last wait that this process recorded."""

    async def prepare(self, messages: Mapping[str, str], *, is_watched: bool) -> None:
        """Record the recipients and message ids of questions before they are sent, so that a restarted agent finds
        the questions again. ``is_watched``: a person wants to see the recipients' activity.
        """
        if is_watched:
            await self._replies.relays.watch()
        if self.known is None:  # after a restart, the questions are already recorded
            await self._journal.record_asking(self._call.turn, self._call.call, messages)

    def expect(self, question: int, *, is_approval: bool = False) -> None:
        """Expect the reply as soon as the question is sent, because the reply may arrive before the wait begins."""
        self._replies.expect(question, is_approval=is_approval)

    def forget(self, questions: Iterable[int]) -> None:
        """Stop expecting replies to questions whose wait does not begin."""
        self._replies.forget(questions)

    async def wait(
        self,
        questions: Mapping[str, Stored],
        timeout_s: float,
        *,
        is_watched: bool = False,
        is_enough: IsEnough = never_enough,
    ) -> dict[str, BaseMessage]:
        """Wait for replies to these questions. Return the replies by recipient, without the recipients that have not
        replied in time. The wait ends early when ``is_enough`` accepts the replies so far.
        """
        if not questions:
            return {}
        call = self._call
        wait, left_s = self.known, min(timeout_s, MAX_WAIT_S)
        # The reply to a new question is always delivered. After a restart, read the thread first, because the reply may
        # have arrived while the agent was down.
        look_first = self.is_begun or wait is not None
        if wait is not None:
            # Limit a resumed wait to the length of a new wait, because the clock may have been set back.
            left_s = max(0.0, min(left_s, (wait.until - self._replies.clock()) / 1000))
        else:
            wait = Wait(
                questions={to: stored.seq for to, stored in questions.items()},
                threads={to: stored.thread_id for to, stored in questions.items()},
                until=self._replies.clock() + int(left_s * 1000),
            )
            self.known = wait  # a repeated wait ends at the same time
        listening = self._replies.relays.listen(wait.questions, call) if is_watched else nullcontext()
        with listening:  # listen before any other step, because the recipients may already be working
            # Record a wait from before a restart again, so that the hub knows that the call waits.
            await self._journal.record_waiting(call.turn, call.call, wait)
            self._emit_waiting(wait)
            replies, self.unanswerable = await self._replies.wait(
                wait, reaction=call.reaction, look_first=look_first, left_s=left_s, is_enough=is_enough
            )
            self.taken += [reply.seq for reply in replies.values()]
            return replies

    async def wait_for_decisions(self, wait: Wait, timeout_s: float) -> list[BaseMessage]:
        """Wait for people's decisions on the requests of an approval, for at most ``timeout_s`` seconds. Return the
        decisions in the order of the log, or an empty list at the timeout. Decisions are intercepted until `forget` is
        called.
        """
        await self.keep(wait)
        left_s = max(0.0, min(timeout_s, MAX_WAIT_S, (wait.until - self._replies.clock()) / 1000))
        self._emit_waiting(wait)
        # Read the threads first, because a person may have decided before the wait or while the agent was not running.
        replies, _ = await self._replies.wait(wait, reaction=self._call.reaction, look_first=True, left_s=left_s)
        for question in wait.questions.values():  # do this before the next await, because another decision may arrive
            self._replies.expect(question, is_approval=True)
        decisions = sorted(replies.values(), key=lambda it: it.seq)
        self.taken += [decision.seq for decision in decisions]
        return decisions

    async def keep(self, wait: Wait) -> None:
        """Record the wait for an approval once per process, so that the hub knows that the call waits."""
        self.known = wait
        if wait != self._last_recorded:
            await self._journal.record_waiting(self._call.turn, self._call.call, wait)
            self._last_recorded = wait

    def find_until(self, timeout_s: float) -> int:
        """Return the deadline of a wait that begins now, in milliseconds since the Unix epoch."""
        return self._replies.clock() + int(min(timeout_s, MAX_WAIT_S) * 1000)

    def _emit_waiting(self, wait: Wait) -> None:
        call, to = self._call, tuple(wait.questions)
        call.emit(
            Waiting(call.reaction, call.turn, call.call, call.tool, to, wait.until, wait.is_approval, path=call.path)
        )
