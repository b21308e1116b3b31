"""One reaction that a runner has under way: how it is taken up again, what arrives meanwhile, and how it ends.

Used by `runner`, which begins reactions and breaks them off, and by the ``react`` of its subclasses. Nothing here must
survive: a reaction that was begun stands in the ledger (`journal`), and is read back from there before anything new.
Its end is the answer to the incoming thread, then the last record.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

from roundelay.network.client import AnyMessage, Delivery, NetworkClient
from roundelay.network.errors import (
    BudgetExhausted,
    ConnectError,
    IdConflict,
    InternalError,
    LoopStopped,
    RequestError,
    RoundelayError,
    Superseded,
    ThreadHeld,
    UnknownMessage,
)
from roundelay.network.frames import OpenReactionInfo
from roundelay.network.messages import BaseMessage

from .agent import KEEPER
from .driver import Driver, NewMessagesSource
from .events import Finished
from .inbox import ASK, DECLINED, STOPPED, Inbox, Visibility, is_addressed, is_question
from .isolation import CallCrashed, abandon, describe_error, redact_error, retry_later
from .journal import Journal, Recorded, Started, derived_id, find_reporter, open_journal, reaction_id
from .live_activity import ActivityReporter
from .loop_texts import REPORTED
from .models.model import Usage
from .prompt import render_new_messages
from .reaction import LoopState, Reaction
from .replies import Replies
from .text import replace_surrogates, write_stopped
from .values import FAILURE, Finish, NewMessages, Status, StopTrace

_logger = logging.getLogger(__name__)

MAX_REASON_CHARS = 500
MAX_LOOKED_THROUGH = 500
"""Messages of a thread that are looked through for what arrived: what is older waits."""


@dataclass(frozen=True, slots=True)
class ReactionResult:
    """How a reaction ended. ``text`` is what went to the incoming thread as its answer, None if nothing did."""

    reaction: str
    status: Status
    reason: str
    text: str | None
    turns: int
    usage: Usage


@dataclass(slots=True)
class RunningReaction:
    """A reaction that a runner is at, from taking its message out of the inbox to its end."""

    id: str
    client: NetworkClient
    message: AnyMessage
    journal: Journal
    shown: ActivityReporter
    recorded: Recorded | None = None
    """What it had done before, when it is resumed."""

    delivery: Delivery | None = None
    """To ack or nack; None when it is resumed."""

    work: asyncio.Task[Finish] | None = None
    """What a person's stop cancels."""

    stopped_by: str | None = None

    is_overtaken: bool = False
    """Whether a person has taken its thread over: it is broken off, and stays open until another takes its place."""

    reaction: Reaction | None = None
    """The loop, once it has begun: how far it has come."""

    omitted_threads: int = 0
    """How many threads the agent may see and its prompt leaves out."""

    taken: dict[int, BaseMessage] = field(default_factory=dict)
    """Messages that were taken out of the inbox to be read in it, and are not settled yet."""

    questions: Sequence[int] = ()
    """That it had put before a restart: a reply to one is its own, as long as it runs."""

    is_awaited: bool = False
    """Whether somebody waits for an answer of this agent."""

    new_messages: NewMessagesSource | None = None
    """What arrives behind it, or was said before it began, if the model is to read it there."""

    stopped: StopTrace | None = None
    """What a person's stop left of it: the text that was streamed."""

    is_answered: bool = False
    """Whether its answer is in the thread."""

    has_finished: bool = False
    """Whether its end is recorded, and is one that its agent chose."""

    @property
    def is_silent(self) -> bool:
        """Whether it has finished without a word to the person who waits for one: nothing in the thread says so."""
        message = self.message
        is_asked = message.kind == "direct" or is_addressed(message, self.client.agent_id)
        is_persons = message.sender_kind == "human" and self.is_awaited
        return self.has_finished and not self.has_spoken and is_persons and is_asked

    @property
    def has_spoken(self) -> bool:
        """Whether something of it is in the thread: its answer, or what a tool sent there."""
        return self.is_answered or (self.reaction is not None and self.reaction.has_spoken)

    async def run(self, driver: Driver, config_hash: str, prompt_hash: str) -> ReactionResult:
        """Drive it to its end, and conclude it."""
        return await self.conclude(await self._drive(driver, config_hash, prompt_hash))

    async def _drive(self, driver: Driver, config_hash: str, prompt_hash: str) -> Finish:
        """Drive it in a task of its own, so that a person's stop ends it and nothing else."""
        if self.stopped_by is not None or (self.recorded is not None and self.recorded.stopped is not None):
            return await self._stop(driver)
        run = driver.run(self.recorded, config_hash=config_hash, prompt_hash=prompt_hash)
        work = self.work = asyncio.create_task(run)
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            # The runner ends. Whatever the code in it makes of its cancellation, the reaction stays open.
            self.journal.close()
            await abandon(work)
            if work.done() and self.client.failure is None:
                self._log_failure(work)
            raise
        if self.is_overtaken:
            self.journal.close()
            raise ThreadHeld(f"{self.message.thread_id} was taken over while this ran.")
        failure = asyncio.CancelledError() if work.cancelled() else work.exception()
        if failure is None:
            return work.result()
        if self.stopped_by is not None:
            self._log_failure(work)
            return await self._stop(driver)
        raise CallCrashed(failure) if work.cancelled() else failure  # cancelled by what runs in it: nobody stopped it

    async def _stop(self, driver: Driver) -> Finish:
        """End what a person has stopped. What was streamed is recorded before it is said again as a message."""
        stopped = self.recorded.stopped if self.recorded is not None else None
        if stopped is None and (found := driver.find_stopped(self.stopped_by or "a person")) is not None:
            stopped = await self.journal.record_stopped(found)
        self.stopped = stopped
        by = stopped.by if stopped is not None else self.stopped_by
        return driver.cancel(f"stopped by {by}", stopped.used if stopped is not None else ())

    def _log_failure(self, work: asyncio.Task[Finish]) -> None:
        if not work.cancelled() and (failure := work.exception()) is not None:
            told = {"agent_id": self.client.agent_id, "error": describe_error(failure)}
            _logger.warning("a reaction that was broken off failed of it", extra=told)

    async def conclude(self, finish: Finish) -> ReactionResult:
        """Send the answer, if there is one, to the incoming thread, and record the end. An answer that the hub refuses
        is the end's reason.

        A busy hub is waited for without bound. A reaction has one answer: once it is sent, no other one is.
        """
        if self.stopped is not None and self.message.sender_kind == "human" and not self.is_answered:
            await self._tell_stop(self.stopped)
        elif finish.answer is not None and not self.is_answered:
            try:
                kept = {KEEPER: finish.keeper} if finish.keeper is not None else {}
                marked = {FAILURE: finish.failure} if finish.failure else {}
                await self._reply(finish.answer, {**finish.metadata, **marked, **kept})
                self.is_answered = True
            except (ConnectError, Superseded, ThreadHeld):
                raise
            except IdConflict:
                self.is_answered = True  # an earlier run sent it, in words that were made differently there
            except RoundelayError as error:
                _logger.warning("answer refused", extra={"reaction": self.id, "code": error.code})
                status: Status = "stopped" if isinstance(error, LoopStopped | BudgetExhausted) else "failed"
                reason = f"the answer could not be sent ({error.code}): {error}"
                finish = replace(finish, status=status, reason=reason, answer=None, failure="answer_refused")
        elif not self.has_spoken and is_question(self.message, self.client.agent_id):
            await self._decline(finish)
        await self.journal.record_finished(finish)
        self.has_finished = finish.status == "finished"
        return ReactionResult(self.id, finish.status, finish.reason, finish.answer, finish.turns, finish.usage)

    async def give_up(self, error: BaseException, *, is_told: bool) -> bool:
        """Hand a message back whose reaction did not begin; end one that did. ``is_told``: so is who waits. False when
        the message will come again."""
        reason = f"{type(error).__name__}: {error}"
        try:
            if not self.journal.is_started:
                if self.delivery is not None:
                    # Beyond a quota it comes again when that is counted anew, rather than five times within seconds.
                    later_ms = error.retry_after_ms if isinstance(error, BudgetExhausted) else None
                    await self.delivery.nack(replace_surrogates(reason[:MAX_REASON_CHARS]), retry_after_ms=later_ms)
                return False
            status: Status = "failed"
            answer, mark = "I could not answer: an error on my side. My log has it.", "error"
            if is_told and (reporter := await find_reporter(self.client)):
                answer = REPORTED.format(agent_id=reporter)
            if isinstance(error, BudgetExhausted):  # of the hub's: whoever waits may be told of it
                status, answer, mark = "stopped", f"I have to stop here. {error}", "stopped"
            end = Finish(status, reason, answer if is_told else None, metadata={FAILURE: mark})
            if (done := self.reaction) is not None:
                end = replace(end, turns=done.turn, usage=done.usage, tool_calls=done.tool_calls)
            if done is None or done.state is not LoopState.FINISHED:  # else it was told
                self.shown.tell(Finished(self.id, end.status, reason, end.answer, end.turns, end.usage, end.tool_calls))
            await self.conclude(end)
        except (ConnectError, Superseded, ThreadHeld):
            raise
        except RoundelayError as refused:
            _logger.warning("failed reaction stays open", extra={"reaction": self.id, "code": refused.code})
        except Exception as broken:  # of middleware that decides on the records: the other threads go on
            told = {"reaction": self.id}
            _logger.error("failed reaction stays open", extra=told, exc_info=redact_error(broken))
        return True

    async def _tell_stop(self, stopped: StopTrace) -> None:
        """Say in the thread who has stopped it, below what was streamed by then. A refusal changes nothing: it is
        stopped all the same."""
        try:
            await self._reply(write_stopped(stopped.text, stopped.by), {STOPPED: {"by": stopped.by}})
            self.is_answered = True
        except (ConnectError, Superseded):
            raise
        except RoundelayError as error:  # said by an earlier run; or somebody has taken the thread over
            _logger.info("a stop is not told", extra={"reaction": self.id, "code": error.code})

    async def _decline(self, finish: Finish) -> None:
        """Tell who waits for an answer that there is none."""
        is_reviewed = self.reaction is not None and self.reaction.control.withholds  # a reason is the model's own words
        text = (finish.reason if finish.status == "finished" and not is_reviewed else "") or "there is no answer"
        try:
            await self._reply(text, {DECLINED: True})
        except (ConnectError, Superseded):
            raise
        except RoundelayError as error:  # sent by an earlier run, or refused: whoever asked has a timeout
            _logger.info("declined in vain", extra={"reaction": self.id, "code": error.code})

    async def _reply(self, text: str, metadata: dict[str, object]) -> None:
        message_id = derived_id(self.id, "", 0, "answer")
        await retry_later(
            partial(self.client.reply, self.message, text, message_id=message_id, metadata=metadata or None)
        )


class InboxMessages:
    """Messages that arrive in a thread while a reaction runs there, when the model is to read them in it
    (``on_new_message="inject"``); `driver` takes them before each turn.

    What may not be known to all for whom the reaction is, the hub says: that waits for a reaction of its own.
    ``settle`` says of one message that it was read.
    """

    def __init__(
        self,
        under_way: RunningReaction,
        inbox: Inbox,
        *,
        visibility: Visibility,
        should_answer: Callable[[BaseMessage], bool],
        settle: Callable[[int, str, str], Awaitable[None]],
    ) -> None:
        self._under_way = under_way
        self._inbox = inbox
        self._visibility = visibility
        self._should_answer = should_answer
        self._settle = settle

    async def take(self) -> NewMessages | None:
        """Take what has arrived; None for nothing."""
        it = self._under_way
        waiting = self._inbox.withdraw(it.message)
        if not waiting:
            return None
        it.taken = {message.seq: message for message in waiting}  # a reaction that ends now puts them back
        admitted = await self._find_admitted(waiting)
        messages = [message for message in waiting if message.seq in admitted]
        messages = messages[: self._count_fitting(messages)]
        it.taken = {message.seq: message for message in messages}
        self._inbox.put_back([message for message in waiting if message.seq not in it.taken])
        if not messages:
            return None
        answers = any(self._should_answer(message) for message in messages)
        return NewMessages(render_new_messages(messages), tuple(it.taken), answers)

    async def settle(self, new: NewMessages) -> None:
        """They are recorded as read: they get no reaction of their own."""
        for seq in new.seqs:
            await self._settle(seq, self._under_way.message.thread_id, self._under_way.id)
            del self._under_way.taken[seq]

    async def _find_admitted(self, waiting: Sequence[BaseMessage]) -> set[int]:
        """Ask the hub which of them the reaction may read: what is read in it, those read for whom it is."""
        trigger, newest = self._under_way.message, waiting[-1].seq
        args = {"thread_id": trigger.thread_id, "trigger": trigger.seq, "visibility": self._visibility}
        args |= {"until": newest, "limit": MAX_LOOKED_THROUGH}
        page = await retry_later(partial(self._under_way.client.call, "network.history", args))
        return {message["seq"] for message in page["messages"]}

    def _count_fitting(self, messages: Sequence[BaseMessage]) -> int:
        """How many of them one record holds; the others wait for the next turn, or get a reaction of their own."""
        sizes = (len(json.dumps(render_new_messages([message]))) for message in messages)
        limit = self._under_way.journal.max_body_bytes // 2
        return sum(1 for total in accumulate(sizes) if total <= limit)


# --- what was begun before


async def record_as_read(client: NetworkClient, seq: int, thread_id: str, reader: str) -> None:
    """Give a message that was read in the reaction ``reader`` one of its own that says so, for the hub and for a
    restarted agent."""
    journal = open_journal(client, reaction_id(client.agent_id, seq, client.welcome.network.epoch))
    await journal.record_started(Started(trigger=seq, thread_id=thread_id, as_of=seq, manifest=[seq], config_hash=""))
    with suppress(IdConflict):  # the other was broken off in the middle of this, and the message got its own after all
        await journal.record_finished(Finish("finished", f"read in reaction {reader}"))


async def read_open_reaction(client: NetworkClient, opened: OpenReactionInfo) -> tuple[BaseMessage, Recorded] | None:
    """Give the message that a reaction was begun for, and what it had recorded; None, and it is ended, if these can no
    longer be read."""
    journal = open_journal(client, opened.reaction)
    try:
        recorded = await journal.load()
        return await _find_trigger(client, opened.trigger, recorded), recorded
    except (UnknownMessage, ValueError, TypeError, LookupError) as error:
        # Written by another program under this agent's id, or no longer to be read. It must not keep the agent from
        # starting.
        told = {"reaction": opened.reaction, "seq": opened.trigger, "error": type(error).__name__}
        _logger.error("open reaction cannot be resumed", extra=told)
        await journal.record_finished(Finish("failed", "its records or its trigger can no longer be read"))
        return None


async def expect_replies(recorded: Recorded, replies: Replies) -> list[int]:
    """Expect the replies that it waited for, before any is delivered; gives the questions."""
    since = recorded.started.trigger if recorded.started is not None else 0
    questions = [it for messages in recorded.open_askings() for it in await replies.expect_sent(messages, since)]
    for wait in recorded.open_waits():
        for question in wait.questions.values():
            replies.expect(question, is_approval=wait.is_approval)
            questions.append(question)
    return questions


async def _find_trigger(client: NetworkClient, seq: int, recorded: Recorded) -> BaseMessage:
    if recorded.started is None:
        raise LookupError("the reaction has no record of its beginning")
    thread_id = recorded.started.thread_id
    history = await retry_later(partial(client.history, thread_id, before=seq + 1, limit=1))
    for message in history.messages:
        if message.seq == seq:
            return message
    raise LookupError(f"message {seq} is not in {thread_id}")


async def is_answer_of_earlier_run(client: NetworkClient, message: BaseMessage, head: int) -> bool:
    """Tell whether a reaction of an earlier run has taken this reply, or was stopped while it waited for it. ``head``
    is the ledger's when this run began.

    What a wait took is acknowledged, but not as durably as the record of what it was for: when hub and agent are killed
    together the hub may deliver it again, to a runner that knows nothing of the wait. Nor does that know which waits a
    person has stopped. The ledger tells.
    """
    question = message.reply_to
    if question is None or question > head or message.kind != "direct":
        return False  # questions of calls, and the answers to them, are direct messages
    try:
        chain = (await retry_later(partial(client.call, "network.why", {"seq": question})))["chain"]
        asked, *came_of = chain
        is_own = asked.get("sender_id") == client.agent_id and ASK in (asked.get("metadata") or {})
        if not is_own or not came_of or "reaction" not in came_of[0]:
            return False
        recorded = await open_journal(client, came_of[0]["reaction"]).load()
    except (RequestError, InternalError, ValueError, TypeError, LookupError):
        return False  # cut by retention, written by another program, or not to be read: a message like any other
    return recorded.has_taken(message.seq) or (
        message.sender_kind != "human" and recorded.finished is not None and recorded.was_waiting_for(question)
    )
