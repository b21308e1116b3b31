"""Waiting for others: the replies that calls wait for, and what each wait does until it has them or gives up.

`Replies` are an agent's open questions: what `ask` sent, and requests for a person's approval. It stands between the
runner's deliveries, of which it takes the replies before the wake rule is asked, and the calls that wait (`Waiter`).
Waits are durable: what is waited for, and until when, is recorded (``waiting``), so that a restarted agent goes on
waiting; a reply that came meanwhile, or that the hub holds back behind others, is looked up in its thread.

Whether an answer can still come is asked of the hub now and then (`find_unanswerable`). Only what is certain ends a wait
early: whoever was asked is no participant any more, the question is a dead letter, or the very reaction to it has
ended. A reply is stored before its reaction ends, so who then looks for it and finds none waits in vain: the hub has
refused it, at the limit of the conversation for example, or it was never made. Of programs that keep no records
nothing is known, and they are waited for to the end.
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
from .journal import Journal, reaction_id
from .live_activity import RemoteActivity, WaitingCall
from .values import Wait

FIRST_LOOK_S, LAST_LOOK_S = 2.0, 300.0
"""How long to wait before the first look, and between two at most; each is twice as long as the one before."""


async def find_unanswerable(client: NetworkClient, questions: Mapping[str, int]) -> dict[str, str]:
    """Give who will send no answer but what is stored by now, and why: of those to whom these questions (seqs) were
    put."""
    found: dict[str, str] = {}
    for agent_id, seq in questions.items():
        try:
            status = await retry_later(partial(client.call, "network.message_status", {"seq": seq}))
        except ConnectError:
            raise
        except RoundelayError:
            continue  # an older hub, or a message that is not kept any more: nothing is known
        own = reaction_id(agent_id, seq, client.welcome.network.epoch)
        for recipient in status["recipients"]:
            if recipient["agent_id"] == agent_id and (why := _explain(recipient, own)):
                found[agent_id] = why
    return found


def _explain(recipient: Mapping[str, Any], own: str) -> str:
    """Say why no answer will come; empty if one may."""
    if recipient["state"] == "removed":
        return "it was removed from the network."
    if recipient["state"] == "dead":
        return "it failed to take the question, again and again, and does not get it any more."
    if recipient.get("reaction") != own or recipient.get("is_overtaken"):
        return ""  # a person took the thread over: another reaction follows when it is given back
    newest: Mapping[str, object] = recipient.get("again", recipient)
    ended = newest.get("reaction_status")
    if ended not in (None, "open"):
        return f"its work on the question has ended ({ended}), and no answer came of it."
    return ""


REMEMBERED = 1024
FIRST_PAGE, PAGE = 10, 100
MAX_WAIT_S = 10 * 365 * 86_400.0
"""For those who want to wait for ever: a time that can be written down."""


class Replies:
    """The questions of one agent that are open. ``pause`` and ``resume`` are called around each wait, with the
    reaction: it takes no place of others.

    ``clock`` gives the time until which somebody waits.
    """

    def __init__(
        self,
        client: NetworkClient,
        *,
        pause: Callable[[str], None],
        resume: Callable[[str], None],
        clock: Clock = system_clock,
    ) -> None:
        self.clock = clock
        self.relays = RemoteActivity(client)
        self._client = client
        self._pause = pause
        self._resume = resume
        self._open: dict[int, asyncio.Future[BaseMessage]] = {}  # by the seq of the question
        self._approvals: set[int] = set()  # of these, the requests for approval: only a person's decision is a reply
        self._taken: OrderedDict[int, None] = OrderedDict()  # seqs of the last replies
        self._dropped: OrderedDict[int, None] = OrderedDict()  # questions whose wait was stopped
        self._early: OrderedDict[int, None] = OrderedDict()  # messages that were answered while nobody expected it
        self._hint: asyncio.Future[None] | None = None  # done when one of them may never be answered

    def expect(self, question: int, *, is_approval: bool = False) -> None:
        """A reply to this message is nobody else's from here on."""
        self._open.setdefault(question, asyncio.get_running_loop().create_future())
        if is_approval:
            self._approvals.add(question)

    def forget(self, questions: Iterable[int]) -> None:
        """Expect no reply to these any more, if that was never waited for: it is a message like any other."""
        for question in questions:
            self._open.pop(question, None)
            self._approvals.discard(question)

    def look_after(self, question: int) -> None:
        """The hub says that a message is a dead letter: who waits for the answer to it looks now."""
        if question in self._open and self._hint is not None and not self._hint.done():
            self._hint.set_result(None)

    def take(self, message: BaseMessage) -> bool:
        """Take a delivered message, if it is a reply that is waited for (or was taken already, or is a program's that
        nobody waits for since a person stopped who did)."""
        if message.seq in self._taken or (message.reply_to in self._dropped and message.sender_kind != "human"):
            return True
        question = find_request(message)
        reply = self._open.get(question) if question is not None else None
        if question is not None and reply is None:
            _remember(self._early, question)
        if reply is None or reply.done():
            return False
        if question in self._approvals:
            if read_decision(message) is None:
                return False
        elif message.reply_to is None:  # a decision on what is no request for approval
            return False
        reply.set_result(message)
        _remember(self._taken, message.seq)
        return True

    async def wait(
        self, wait: Wait, *, reaction: str, look_first: bool, left_s: float
    ) -> tuple[dict[str, BaseMessage], dict[str, str]]:
        """Wait for the reply to each question, by whom it was put to, for ``left_s`` at most, however the clock jumps.
        ``look_first``: some may have come before. Gives also who will not reply any more, and why."""
        ends_at = asyncio.get_running_loop().time() + left_s
        for question in wait.questions.values():
            self.expect(question, is_approval=wait.is_approval)
        replies = {to: self._open[question] for to, question in wait.questions.items()}
        try:
            if look_first or not self._early.keys().isdisjoint(wait.questions.values()):
                await self._look_up(wait)
            self._pause(reaction)
            try:
                hopeless = await self._await(replies, wait, ends_at)
            finally:
                self._resume(reaction)
            await self._look_up(wait)
        except asyncio.CancelledError:
            for question in wait.questions.values():
                if not wait.is_approval:  # what people say beside a decision is a message like any other
                    _remember(self._dropped, question)
            raise
        finally:
            for question in wait.questions.values():  # what comes from now on is a message like any other
                del self._open[question]
                self._approvals.discard(question)
        return {to: reply.result() for to, reply in replies.items() if reply.done()}, hopeless

    async def _await(
        self, replies: Mapping[str, asyncio.Future[BaseMessage]], wait: Wait, ends_at: float
    ) -> dict[str, str]:
        """Wait for all of them, until a time of the loop's; looks now and then whether each can still come."""
        loop, look_s = asyncio.get_running_loop(), FIRST_LOOK_S
        look_at, hint = loop.time() + look_s, self._await_hint()
        hopeless: dict[str, str] = {}
        while (now := loop.time()) < ends_at:
            missing = {to: reply for to, reply in replies.items() if not reply.done() and to not in hopeless}
            if not missing or (wait.is_approval and len(missing) < len(replies)):
                break  # of several requests for one approval, a decision on any is enough to go on
            wakes_at = ends_at if wait.is_approval else min(ends_at, look_at)
            waited: set[asyncio.Future[Any]] = {*missing.values(), hint}
            await asyncio.wait(waited, timeout=max(0.0, wakes_at - now), return_when=asyncio.FIRST_COMPLETED)
            is_due, hint = hint.done() or loop.time() >= look_at, self._await_hint()
            late = {to: wait.questions[to] for to, reply in missing.items() if not reply.done()}
            if late and is_due and not wait.is_approval and loop.time() < ends_at:
                look_s = min(2 * look_s, LAST_LOOK_S)
                found = await find_unanswerable(self._client, late)
                if found:
                    await self._look_up(wait)  # what came before that was known
                hopeless |= {to: why for to, why in found.items() if not replies[to].done()}
                look_at = loop.time() + look_s
        return hopeless

    def _await_hint(self) -> asyncio.Future[None]:
        if self._hint is None or self._hint.done():
            self._hint = asyncio.get_running_loop().create_future()
        return self._hint

    async def expect_sent(self, messages: Mapping[str, str], since: int) -> list[int]:
        """Expect replies to those of these messages (ids, by whom they are to) that were sent after a seq; gives their
        seqs."""
        sent: list[int] = []
        for agent_id, message_id in messages.items():
            thread_id = direct_thread(self._client.agent_id, agent_id)
            try:
                async for it in self._read_back(thread_id, since):
                    if it.message_id == message_id and it.sender_id == self._client.agent_id:
                        self.expect(it.seq)
                        sent.append(it.seq)
            except RequestError:
                continue  # there is nobody of that id
        return sent

    async def _look_up(self, wait: Wait) -> None:
        """Read the threads of what has no reply."""
        own = self._client.agent_id
        told: list[BaseMessage] = []
        if wait.is_approval:  # decisions of people who do not read the request are told by the network
            with suppress(RequestError):  # it has told nothing yet
                there = self._read_back(mod_thread("network", own), min(wait.questions.values()))
                told = [it async for it in there if read_decision(it) is not None]
        for to, question in wait.questions.items():
            if not self._open[question].done():
                there = self._read_back(wait.threads[to], question)
                replies = [it async for it in there if it.reply_to == question and it.sender_id != own]
                replies += [it for it in told if find_request(it) == question]
                for message in sorted(replies, key=lambda it: it.seq):  # of several decisions the first one holds
                    self.take(message)

    async def _read_back(self, thread_id: str, seq: int) -> AsyncIterator[BaseMessage]:
        """Give what the thread holds after a seq, newest first."""
        before: int | None = None
        limit = FIRST_PAGE  # nearly always it is among the last few
        while True:
            page = await retry_later(partial(self._client.history, thread_id, before=before, limit=limit))
            for message in reversed(page.messages):
                if message.seq <= seq:
                    return
                yield message
            if not page.has_more:
                return
            before, limit = page.messages[0].seq, PAGE


def _remember(seqs: OrderedDict[int, None], seq: int) -> None:
    """Put a seq behind the others, of which the oldest are forgotten."""
    seqs[seq] = None
    if len(seqs) > REMEMBERED:
        seqs.popitem(last=False)


@dataclass(slots=True)
class Waiter:
    """The wait of one call. ``known`` is what it waited for before a restart, ``is_begun`` whether the call was begun
    then; ``taken`` takes the seqs of the replies that it has."""

    _replies: Replies
    _journal: Journal
    _call: WaitingCall
    known: Wait | None
    is_begun: bool
    taken: list[int]
    hopeless: Mapping[str, str] = field(default_factory=dict)
    """Who will not reply any more, and why, once it has waited."""

    _last_recorded: Wait | None = None
    """The wait that this process recorded last."""

    async def prepare(self, messages: Mapping[str, str], *, is_watched: bool) -> None:
        """Record to whom questions are about to go, under which message ids: a restarted agent finds by it what it had
        sent. ``is_watched``: a person wants to see what becomes of them."""
        if is_watched:
            await self._replies.relays.watch()
        if self.known is None:  # an earlier run may have ended before it did this; to the hub a repeat is one record
            await self._journal.record_asking(self._call.turn, self._call.call, messages)

    def expect(self, question: int, *, is_approval: bool = False) -> None:
        """Say so as soon as the question is sent: a reply may come before the wait begins."""
        self._replies.expect(question, is_approval=is_approval)

    def forget(self, questions: Iterable[int]) -> None:
        """Expect nothing any more, where the wait does not come to pass."""
        self._replies.forget(questions)

    async def wait(
        self,
        questions: Mapping[str, Stored],
        timeout_s: float,
        *,
        is_watched: bool = False,
    ) -> dict[str, BaseMessage]:
        """Wait for replies, by whom the questions were put to; who has not replied in time is left out."""
        if not questions:
            return {}
        call = self._call
        wait, left_s = self.known, min(timeout_s, MAX_WAIT_S)
        # Of a question sent a moment ago each reply is delivered; others may have come while nobody was there to hear.
        look_first = self.is_begun or wait is not None
        if wait is not None:
            # At most as long as a new one: the clock may have been set back.
            left_s = max(0.0, min(left_s, (wait.until - self._replies.clock()) / 1000))
        else:
            wait = Wait(
                questions={to: stored.seq for to, stored in questions.items()},
                threads={to: stored.thread_id for to, stored in questions.items()},
                until=self._replies.clock() + int(left_s * 1000),
            )
            self.known = wait  # to wait once more is to wait as long as that
        listening = self._replies.relays.listen(wait.questions, call) if is_watched else nullcontext()
        with listening:  # before anything else: who was asked may be at work already
            # Also what is known is recorded: the hub is told that the call waits again.
            await self._journal.record_waiting(call.turn, call.call, wait)
            self._emit_waiting(wait)
            replies, self.hopeless = await self._replies.wait(
                wait, reaction=call.reaction, look_first=look_first, left_s=left_s
            )
            self.taken += [reply.seq for reply in replies.values()]
            return replies

    async def wait_for_decisions(self, wait: Wait, timeout_s: float) -> list[BaseMessage]:
        """Wait for people's decisions on the requests of an approval, at most as long as a new wait of ``timeout_s``.
        Gives them in the order of the log; none if the time is over. The requests stay expected: `forget` ends that."""
        await self.keep(wait)
        left_s = max(0.0, min(timeout_s, MAX_WAIT_S, (wait.until - self._replies.clock()) / 1000))
        self._emit_waiting(wait)
        # Look first: a person may be quick, or have decided while nobody was there to hear.
        replies, _ = await self._replies.wait(wait, reaction=self._call.reaction, look_first=True, left_s=left_s)
        for question in wait.questions.values():  # before anything is awaited: the next decision may come at once
            self._replies.expect(question, is_approval=True)
        decisions = sorted(replies.values(), key=lambda it: it.seq)
        self.taken += [it.seq for it in decisions]
        return decisions

    async def keep(self, wait: Wait) -> None:
        """Record the wait for an approval: once in a process, which tells the hub that the call waits again."""
        self.known = wait
        if wait != self._last_recorded:
            await self._journal.record_waiting(self._call.turn, self._call.call, wait)
            self._last_recorded = wait

    def find_until(self, timeout_s: float) -> int:
        """Give when a wait that begins now ends, in milliseconds since the Unix epoch."""
        return self._replies.clock() + int(min(timeout_s, MAX_WAIT_S) * 1000)

    def _emit_waiting(self, wait: Wait) -> None:
        call, to = self._call, tuple(wait.questions)
        call.emit(
            Waiting(call.reaction, call.turn, call.call, call.tool, to, wait.until, wait.is_approval, path=call.path)
        )
