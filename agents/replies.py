"""Replies that reactions wait for: what `ask` sent, and what comes back to it.

Stands between the runner's deliveries, of which it takes the replies before the wake rule is asked, and the calls that wait. Durable: what is
waited for, and until when, is recorded (``waiting``), so that a restarted agent goes on waiting; a reply that came meanwhile, or that the
hub holds back behind others, is looked up in its thread.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from roundelay.network.clock import system_clock
from roundelay.network.errors import RequestError
from roundelay.network.messages import BaseMessage

from .arguments import ToolError
from .retry import retry_later

if TYPE_CHECKING:
    from roundelay.network.client import NetworkClient

    from .tools import ToolContext

ASK, DECLINED = "ask", "declined"
"""In a message's metadata: a question of `ask` ({``waiting``: who waits for the answer, and for its asker's}), and that there is no answer."""

REMEMBERED = 1024


class Replies:
    """The questions of one agent that are open. ``pause`` and ``resume`` are called around each wait: it takes no place of others."""

    def __init__(self, client: NetworkClient, *, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        self._client = client
        self._pause = pause
        self._resume = resume
        self._open: dict[int, asyncio.Future[BaseMessage]] = {}  # by the seq of the question
        self._taken: OrderedDict[int, None] = OrderedDict()  # seqs of the last replies

    def expect(self, question: int) -> None:
        """A reply to this message is nobody else's from here on."""
        self._open.setdefault(question, asyncio.get_running_loop().create_future())

    def take(self, message: BaseMessage) -> bool:
        """Take a delivered message, if it is a reply that is waited for (or was taken already)."""
        if message.seq in self._taken:
            return True
        reply = self._open.get(message.reply_to) if message.reply_to is not None else None
        if reply is None or reply.done():
            return False
        reply.set_result(message)
        self._taken[message.seq] = None
        if len(self._taken) > REMEMBERED:
            self._taken.popitem(last=False)
        return True

    async def wait(self, questions: Mapping[str, int], until: int, *, look_first: bool) -> dict[str, BaseMessage]:
        """Wait for the reply to each question (by whom it was put to) until a time. ``look_first``: some may have come before."""
        for question in questions.values():
            self.expect(question)
        replies = {agent_id: self._open[question] for agent_id, question in questions.items()}
        try:
            if look_first:
                await self._look_up(questions)
            self._pause()
            try:
                await asyncio.wait(replies.values(), timeout=max(0.0, (until - system_clock()) / 1000))
            finally:
                self._resume()
            await self._look_up(questions)
        finally:
            for question in questions.values():  # what comes from now on is a message like any other
                del self._open[question]
        return {agent_id: reply.result() for agent_id, reply in replies.items() if reply.done()}

    async def _look_up(self, questions: Mapping[str, int]) -> None:
        """Read the threads of those who have not replied."""
        for agent_id, question in questions.items():
            if self._open[question].done():
                continue
            thread_id = "direct:" + "~".join(sorted((self._client.agent_id, agent_id)))
            history = await retry_later(lambda thread_id=thread_id: self._client.history(thread_id, limit=100))  # type: ignore[misc]
            for message in history.messages:
                if message.reply_to == question and message.sender_id == agent_id:
                    self.take(message)


RecordWait = Callable[[Mapping[str, int], int], Awaitable[None]]


class Waiter:
    """The wait of one call. ``until`` is given when it waited before, ``record`` keeps for what it waits and how long."""

    def __init__(self, replies: Replies, *, until: int | None, is_resumed: bool, record: RecordWait) -> None:
        self._replies = replies
        self._until = until
        self._is_resumed = is_resumed
        self._record = record

    def expect(self, question: int) -> None:
        """Say so as soon as the question is sent: a reply may come before the wait begins."""
        self._replies.expect(question)

    async def wait(self, questions: Mapping[str, int], timeout_s: float) -> dict[str, BaseMessage]:
        """Wait for replies, by whom the questions were put to; who has not replied in time is left out."""
        if not questions:
            return {}
        until = self._until
        if until is None:
            until = system_clock() + int(timeout_s * 1000)
            await self._record(questions, until)
        return await self._replies.wait(questions, until, look_first=self._is_resumed)


async def put_question(
    context: ToolContext, asked: Sequence[str], text: str, timeout_s: float
) -> tuple[dict[str, BaseMessage], dict[str, str]]:
    """Ask everybody, for a call, and wait; gives the replies, and why somebody was not asked."""
    if context.waiter is None:
        raise ToolError("To wait for an answer works only inside of a reaction.")
    waiting = [*read_waiting(context.trigger), context.agent_id]
    questions: dict[str, int] = {}
    problems: dict[str, str] = {}
    for number, agent_id in enumerate(asked):
        if agent_id == context.agent_id:
            problems[agent_id] = "that is you."
            continue
        if agent_id in waiting:
            problems[agent_id] = "it waits for your answer itself; give that instead."
            continue
        try:
            stored = await context.client.send_text(
                agent_id, text, requires_response=[agent_id], metadata={ASK: {"waiting": waiting}},
                message_id=f"{context.call_id}-{number}",
            )  # fmt: skip
        except RequestError as error:
            problems[agent_id] = f"{error.code}: {error}"
            continue
        context.waiter.expect(stored.seq)
        questions[agent_id] = stored.seq
    return await context.waiter.wait(questions, timeout_s), problems


def read_waiting(message: BaseMessage) -> list[str]:
    """Give who waits for the answer to a message, directly or through others; nobody if it is no question of `ask`."""
    question = (message.metadata or {}).get(ASK)
    waiting = question.get("waiting") if isinstance(question, dict) else None
    return [it for it in waiting if isinstance(it, str)] if isinstance(waiting, list) else []


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
            told.append(f"{agent_id} was not asked: {problems[agent_id]}")
        elif reply is None:
            told.append(f"{agent_id} has not answered within {timeout_s:g} s. A later answer comes as a message.")
        elif is_declined(reply):
            told.append(f"{agent_id} declined: {reply.text}")
        else:
            told.append(f"{agent_id} answered: {reply.text}")
    return "\n\n".join(told)
