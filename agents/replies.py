"""Replies that reactions wait for: to what `ask` sent, and to a request for a person's approval.

Stands between the runner's deliveries, of which it takes the replies before the wake rule is asked, and the calls that
wait. Durable: what is waited for, and until when, is recorded (``waiting``), so that a restarted agent goes on waiting;
a reply that came meanwhile, or that the hub holds back behind others, is looked up in its thread.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel, JsonValue

from roundelay.network.clock import Clock, system_clock
from roundelay.network.errors import RequestError
from roundelay.network.messages import BaseMessage

from . import awaited
from .arguments import ToolError
from .relays import Listener, Relays
from .retry import retry_later

if TYPE_CHECKING:
    from roundelay.network.client import NetworkClient, Stored

    from .tools import ToolContext

ASK, DECLINED = "ask", "declined"
"""In a message's metadata: a question of `ask` ({``waiting``: who waits for the answer, and for its asker's;
``watched``: a person watches them}), and that there is no answer."""

REMEMBERED = 1024
PAGE = 100
MAX_WAIT_S = 10 * 365 * 86_400.0
"""For those who want to wait for ever: a time that can be written down."""


class Wait(BaseModel):
    """For what a call waits, until a time: the messages that it sent, by whom they are to, and their threads."""

    questions: dict[str, int]
    threads: dict[str, str] = {}
    until: int
    is_approval: bool = False


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
        self.relays = Relays(client)
        self._client = client
        self._pause = pause
        self._resume = resume
        self._open: dict[int, asyncio.Future[BaseMessage]] = {}  # by the seq of the question
        self._approvals: set[int] = set()  # of these, the requests for approval: only a person's decision is a reply
        self._taken: OrderedDict[int, None] = OrderedDict()  # seqs of the last replies
        self._dropped: OrderedDict[int, None] = OrderedDict()  # questions whose wait was stopped

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

    def take(self, message: BaseMessage) -> bool:
        """Take a delivered message, if it is a reply that is waited for (or was taken already, or is a program's that
        nobody waits for since a person stopped who did)."""
        if message.seq in self._taken or (message.reply_to in self._dropped and message.sender_kind != "human"):
            return True
        reply = self._open.get(message.reply_to) if message.reply_to is not None else None
        if reply is None or reply.done():
            return False
        if message.reply_to in self._approvals and read_decision(message) is None:
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
            if look_first:
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
        loop, look_s = asyncio.get_running_loop(), awaited.FIRST_LOOK_S
        hopeless: dict[str, str] = {}
        while (left_s := ends_at - loop.time()) > 0:
            missing = {to: reply for to, reply in replies.items() if not reply.done() and to not in hopeless}
            if not missing:
                break
            _, late = await asyncio.wait(missing.values(), timeout=left_s if wait.is_approval else min(left_s, look_s))
            look_s = min(2 * look_s, awaited.LAST_LOOK_S)
            if late and not wait.is_approval and loop.time() < ends_at:
                found = await awaited.find_hopeless(self._client, {to: wait.questions[to] for to in missing})
                if found:
                    await self._look_up(wait)  # what came before that was known
                hopeless |= {to: why for to, why in found.items() if not replies[to].done()}
        return hopeless

    async def expect_sent(self, messages: Mapping[str, str], since: int) -> list[int]:
        """Expect replies to those of these messages (ids, by whom they are to) that were sent after a seq; gives their
        seqs."""
        sent: list[int] = []
        for agent_id, message_id in messages.items():
            thread_id = "direct:" + "~".join(sorted((self._client.agent_id, agent_id)))
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
        for to, question in wait.questions.items():
            if not self._open[question].done():
                there = self._read_back(wait.threads[to], question)
                replies = [it async for it in there if it.reply_to == question and it.sender_id != own]
                for message in reversed(replies):  # of several decisions the first one holds
                    self.take(message)

    async def _read_back(self, thread_id: str, seq: int) -> AsyncIterator[BaseMessage]:
        """Give what the thread holds after a seq, newest first."""
        before: int | None = None
        while True:
            page = await retry_later(partial(self._client.history, thread_id, before=before, limit=PAGE))
            for message in reversed(page.messages):
                if message.seq <= seq:
                    return
                yield message
            if not page.has_more:
                return
            before = page.messages[0].seq


def _remember(seqs: OrderedDict[int, None], seq: int) -> None:
    """Put a seq behind the others, of which the oldest are forgotten."""
    seqs[seq] = None
    if len(seqs) > REMEMBERED:
        seqs.popitem(last=False)


class Waiter:
    """The wait of one call. ``known`` is what it waited for before, ``record`` keeps what it waits for, ``tell`` is
    called when a wait begins or goes on, ``take`` with the seqs of the replies that it had, ``listener`` takes what those who were asked are at meanwhile."""

    def __init__(
        self,
        replies: Replies,
        *,
        known: Wait | None,
        reaction: str,
        is_resumed: bool,
        prepare: Callable[[Mapping[str, str]], Awaitable[None]],
        record: Callable[[Wait], Awaitable[None]],
        tell: Callable[[Wait], None],
        take: Callable[[Iterable[int]], None],
        listener: Listener,
    ) -> None:
        self._replies = replies
        self._known = known
        self._reaction = reaction
        self._is_resumed = is_resumed or known is not None
        self._prepare = prepare
        self._record = record
        self._tell = tell
        self._take = take
        self._listener = listener
        self.hopeless: Mapping[str, str] = {}
        """Who will not reply any more, and why, once it has waited."""

    async def prepare(self, messages: Mapping[str, str], *, is_watched: bool) -> None:
        """Record to whom questions are about to go, under which message ids: a restarted agent finds by it what it had
        sent. ``is_watched``: a person wants to see what becomes of them."""
        if is_watched:
            await self._replies.relays.watch()
        if self._known is None:  # an earlier run may have ended before it did this; to the hub a repeat is one record
            await self._prepare(messages)

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
        is_approval: bool = False,
        is_watched: bool = False,
    ) -> dict[str, BaseMessage]:
        """Wait for replies, by whom the questions were put to; who has not replied in time is left out."""
        if not questions:
            return {}
        wait, left_s = self._known, min(timeout_s, MAX_WAIT_S)
        if wait is not None:
            # At most as long as a new one: the clock may have been set back.
            left_s = max(0.0, min(left_s, (wait.until - self._replies.clock()) / 1000))
        else:
            wait = Wait(
                questions={to: stored.seq for to, stored in questions.items()},
                threads={to: stored.thread_id for to, stored in questions.items()},
                until=self._replies.clock() + int(left_s * 1000),
                is_approval=is_approval,
            )
        listening = self._replies.relays.listen(wait.questions, self._listener) if is_watched else nullcontext()
        with listening:  # before anything else: who was asked may be at work already
            if wait is not self._known:
                await self._record(wait)
            self._tell(wait)
            # Whoever approves may be quick, or have done it while nobody was there to hear.
            look_first = self._is_resumed or is_approval
            replies, self.hopeless = await self._replies.wait(
                wait, reaction=self._reaction, look_first=look_first, left_s=left_s
            )
            self._take(reply.seq for reply in replies.values())
            return replies


async def put_question(
    context: ToolContext, asked: Sequence[str], text: str, timeout_s: float
) -> tuple[dict[str, BaseMessage], dict[str, str]]:
    """Ask everybody, for a call, and wait; gives the replies, and why somebody was not asked or will not answer."""
    if context.waiter is None:
        raise ToolError("To wait for an answer works only inside of a reaction.")
    question: dict[str, JsonValue] = {"waiting": [*read_waiting(context.trigger), context.agent_id]}
    is_seen = is_watched(context.trigger)
    if is_seen:
        question["watched"] = True
    questions: dict[str, Stored] = {}
    problems: dict[str, str] = {}
    ids = {agent_id: f"{context.call_id}-{number}" for number, agent_id in enumerate(asked)}
    await context.waiter.prepare(ids, is_watched=is_seen)
    try:
        for agent_id, message_id in ids.items():
            if agent_id == context.agent_id:
                problems[agent_id] = "was not asked: that is you."
                continue
            if agent_id in read_waiting(context.trigger):
                problems[agent_id] = "was not asked: it waits for your answer itself; give that instead."
                continue
            try:
                stored = await context.client.send_text(
                    agent_id, text, requires_response=[agent_id], metadata={ASK: question},
                    message_id=message_id,
                )  # fmt: skip
            except RequestError as error:
                problems[agent_id] = f"was not asked: {error.code}: {error}"
                continue
            context.waiter.expect(stored.seq)
            questions[agent_id] = stored
        replies = await context.waiter.wait(questions, timeout_s, is_watched=is_seen)
        hopeless = {agent_id: f"will not answer: {why}" for agent_id, why in context.waiter.hopeless.items()}
        return replies, problems | hopeless
    except BaseException:  # stopped before it waited: a reply is for nobody here
        context.waiter.forget(stored.seq for stored in questions.values())
        raise


class Decision(NamedTuple):
    """What a person decided on a call: that it is made, perhaps with other ``arguments``, or denied and why."""

    is_approved: bool
    arguments: str | None = None
    reason: str = ""


def read_decision(message: BaseMessage) -> Decision | None:
    """Give a person's ``/approve``, ``/deny REASON`` or ``/edit ARGUMENTS``; None for anything else, and for anybody
    else."""
    if message.sender_kind != "human":
        return None
    word, *said = message.said.strip().split(maxsplit=1) or [""]
    rest = said[0] if said else ""
    match word.lower():
        case "/approve":
            return Decision(True)
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


def describe_replies(
    agent_ids: Iterable[str], replies: Mapping[str, BaseMessage], problems: Mapping[str, str], timeout_s: float
) -> str:
    """Give what came of a question, for the model: a paragraph for each that was asked."""
    told = []
    for agent_id in agent_ids:
        reply = replies.get(agent_id)
        if agent_id in problems:
            told.append(f"{agent_id} {problems[agent_id]}")
        elif reply is None:
            told.append(f"{agent_id} has not answered within {timeout_s:g} s. A later answer comes as a message.")
        elif is_declined(reply):
            told.append(f"{agent_id} declined: {reply.text}")
        else:
            told.append(f"{agent_id} answered: {reply.text}")
    return "\n\n".join(told)
