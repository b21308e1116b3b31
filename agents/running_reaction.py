"""One running reaction: its task, the messages that it reads while it runs, its answer and its end. This module also
resumes reactions after a restart.

`reaction_scheduler` creates and cancels running reactions. The method ``react`` of a runner drives each reaction. A
restart may lose the state of this module: the ledger contains every started reaction (`journal`), and a restarted agent
reads the reaction from the ledger. A reaction ends with its answer in the thread of the trigger, followed by the last
record.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

from roundelay.network.client import AnyMessage, Delivery, NetworkClient
from roundelay.network.client.stored_frames import make_send
from roundelay.network.errors import (
    BudgetExhausted,
    ConnectError,
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
from .journal import Journal, find_reporter, open_journal
from .live_activity import ActivityReporter
from .loop_texts import REPORTED
from .models.model import Usage
from .prompt import NO_CONTEXT, PromptContext, render_new_messages
from .reaction import LoopState, Reaction
from .reaction_ids import derived_id, reaction_id
from .record_queue import Write
from .recorded import Recorded, Started
from .replies import Replies
from .text import replace_surrogates, write_stopped
from .values import FAILURE, Finish, NewMessages, Status, StopTrace

_logger = logging.getLogger(__name__)

MAX_REASON_CHARS = 500

MAX_NEW_MESSAGES = 500
"""Maximum number of a thread's newest messages that a running reaction checks for unread messages. Older messages get
separate reactions.
"""


@dataclass(frozen=True, slots=True)
class ReactionResult:
    """End of a reaction. ``text`` is the answer sent to the thread of the trigger, or None."""

    reaction: str
    status: Status
    reason: str
    text: str | None
    turns: int
    usage: Usage


@dataclass(slots=True)
class RunningReaction:
    """A reaction from the time when its message leaves the inbox until its end."""

    id: str
    client: NetworkClient
    message: AnyMessage
    journal: Journal
    reporter: ActivityReporter
    replies: Replies
    recorded: Recorded | None = None
    """Records from before a restart, or None for a new reaction."""

    delivery: Delivery | None = None
    """Delivery to acknowledge or return, or None for a resumed reaction."""

    task: asyncio.Task[Finish] | None = None
    """Task of the run. A stop or a takeover cancels only this task."""

    stopped_by: str | None = None
    is_taken_over: bool = False
    """Whether a person has taken over the thread. The reaction then stays open until another reaction replaces it."""

    reaction: Reaction | None = None
    """The loop of the reaction. None until the loop has started."""

    context: PromptContext = NO_CONTEXT
    """Conversation that the agent may see for this reaction."""

    unsettled: dict[int, BaseMessage] = field(default_factory=dict)
    """Messages that left the inbox to be read in this reaction but are not yet recorded as read, keyed by seq."""

    questions: Sequence[int] = ()
    """Seqs of questions from before a restart. The reaction consumes the replies to these questions while it runs."""

    is_awaited: bool = False
    """Whether somebody waits for this agent's answer."""

    new_messages: NewMessagesSource | None = None
    """Source of messages that the model reads while the reaction runs."""

    stopped: StopTrace | None = None
    """Trace of a person's stop, with the text that had streamed."""

    is_answered: bool = False
    """Whether the answer is in the thread."""

    has_finished: bool = False
    """Whether the end is recorded with the status ``finished``, so that the agent itself ended its work."""

    @property
    def is_silent(self) -> bool:
        """Whether the reaction finished without any message to a person who waits for an answer."""
        message = self.message
        is_asked = message.kind == "direct" or is_addressed(message, self.client.agent_id)
        is_for_person = message.sender_kind == "human" and self.is_awaited
        return self.has_finished and not self.has_spoken and is_for_person and is_asked

    @property
    def has_spoken(self) -> bool:
        """Whether the thread contains the answer, or a message that a tool sent."""
        return self.is_answered or (self.reaction is not None and self.reaction.has_spoken)

    def cancel(self) -> None:
        """Cancel the run, unless it has already ended."""
        if self.task is not None:
            self.task.cancel()

    async def run(self, driver: Driver, config_hash: str, prompt_hash: str) -> ReactionResult:
        """Drive the reaction to its end and conclude it."""
        return await self.conclude(await self._drive(driver, config_hash, prompt_hash))

    async def _drive(self, driver: Driver, config_hash: str, prompt_hash: str) -> Finish:
        """Drive the run in a separate task, so that a person's stop can cancel the run alone."""
        if self.stopped_by is not None or (self.recorded is not None and self.recorded.stopped is not None):
            return await self._stop(driver)
        # Use a separate task: a person's stop ends the run, and this task continues to record and report the stop.
        run = driver.run(self.recorded, config_hash=config_hash, prompt_hash=prompt_hash)
        task = self.task = asyncio.create_task(run)
        try:
            # Use `wait` instead of `await task`, which would raise the run's cancellation here as if the runner were
            # cancelled.
            await asyncio.wait({task})
        except asyncio.CancelledError:
            # The runner ends. Close the journal first: user code may ignore its cancellation, but it must not write
            # records after another process has resumed the reaction.
            self.journal.close()
            await abandon(task)
            if self.client.is_connected:
                await self.journal.queue.drain()  # store the paid replies and the results that are still queued
            # A lost connection is already logged, and the run failed because of it.
            if task.done() and self.client.failure is None:
                self._log_failure(task)
            raise
        # Check for a takeover before reading the result: even an answer that is already complete must not be sent
        # during a takeover.
        if self.is_taken_over:
            # The start record may still be in flight, and the caller needs to know whether the reaction is open.
            await self.journal.settle_start()
            self.journal.close()
            raise ThreadHeld(f"{self.message.thread_id} was taken over while this ran.")
        failure = asyncio.CancelledError() if task.cancelled() else task.exception()
        if failure is None:
            return task.result()
        if self.stopped_by is not None:
            self._log_failure(task)
            return await self._stop(driver)
        # If the task is cancelled here, user code cancelled itself: nobody stopped the run.
        raise CallCrashed(failure) if task.cancelled() else failure

    async def _stop(self, driver: Driver) -> Finish:
        """End a stopped reaction. Record the streamed text before sending it as a message."""
        # A recorded stop has priority. After a restart there is no streamed text, so a second record would lose the
        # text of the first one.
        stopped = self.recorded.stopped if self.recorded is not None else None
        if stopped is None and (trace := driver.find_stopped(self.stopped_by or "a person")) is not None:
            stopped = await self.journal.record_stopped(trace)
        self.stopped = stopped
        by = stopped.by if stopped is not None else self.stopped_by
        return driver.cancel(f"stopped by {by}", stopped.used if stopped is not None else ())

    def _log_failure(self, task: asyncio.Task[Finish]) -> None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            details = {"agent_id": self.client.agent_id, "error": describe_error(failure)}
            _logger.warning("a reaction failed while it was cancelled", extra=details)

    async def conclude(self, finish: Finish) -> ReactionResult:
        """Send the answer, if there is one, and record the end. If the hub refuses the answer, the end contains the
        reason.

        Waits for a busy hub without limit. A reaction has only one answer: after the first answer, no other answer is
        sent.
        """
        if self.stopped is not None and self.message.sender_kind == "human" and not self.is_answered:
            await self.journal.queue.flush()  # store the queued records first, because the notice may fail
            await self._send_stop_notice(self.stopped)
        elif finish.answer is not None and not self.is_answered:
            return await self._finish_with_answer(finish, finish.answer)
        elif not self.has_spoken and is_question(self.message, self.client.agent_id):
            await self.journal.queue.flush()
            await self._decline(finish)
        # Record the end after the answer. If the process is killed in between, the answer is sent again under the same
        # id, and the hub stores it only once.
        await self.journal.record_finished(finish)
        return self._describe_end(finish)

    def _describe_end(self, finish: Finish) -> ReactionResult:
        self.has_finished = finish.status == "finished"
        return ReactionResult(self.id, finish.status, finish.reason, finish.answer, finish.turns, finish.usage)

    async def _finish_with_answer(self, finish: Finish, answer: str) -> ReactionResult:
        """Send the answer and record the end in one commit. The end changes if the hub refuses the answer."""
        keeper = {KEEPER: finish.keeper} if finish.keeper is not None else {}
        failure = {FAILURE: finish.failure} if finish.failure else {}
        # An id conflict means that an answer with another text was sent before a restart.
        write = self._make_answer(answer, {**finish.metadata, **failure, **keeper}, may_conflict=True)
        try:
            await self.journal.record_finished(finish, write)
        except (ConnectError, Superseded, ThreadHeld):
            raise
        except RoundelayError as error:
            if not write.is_refused:
                raise
            _logger.warning("answer refused", extra={"reaction": self.id, "code": error.code})
            status: Status = "stopped" if isinstance(error, LoopStopped | BudgetExhausted) else "failed"
            reason = f"the answer could not be sent ({error.code}): {error}"
            finish = replace(finish, status=status, reason=reason, answer=None, failure="answer_refused")
            await self.journal.record_finished(finish)
        finally:
            self.is_answered |= write.is_stored
        return self._describe_end(finish)

    async def give_up(self, error: BaseException, *, is_told: bool) -> bool:
        """Give up a reaction that failed with ``error``. If the reaction had not started, return its message to the
        hub, which delivers the message again, and return False. If the reaction had started, end it. With ``is_told``,
        the requester who waits for an answer is notified.
        """
        reason = f"{type(error).__name__}: {error}"
        try:
            await self.journal.settle_start()
            if not self.journal.is_started:
                if self.delivery is not None:
                    # If a quota is used up, wait until it is renewed. Without this delay, all attempts would fail
                    # within seconds.
                    retry_after_ms = error.retry_after_ms if isinstance(error, BudgetExhausted) else None
                    cut_reason = replace_surrogates(reason[:MAX_REASON_CHARS])
                    await self.delivery.nack(cut_reason, retry_after_ms=retry_after_ms)
                return False
            await self._fail(error, reason, is_told=is_told)
        except (ConnectError, Superseded, ThreadHeld):
            raise
        except RoundelayError as refused:
            _logger.warning("failed reaction stays open", extra={"reaction": self.id, "code": refused.code})
        except Exception as failure:  # middleware failed on a record; the agent's other threads must continue
            _logger.error("failed reaction stays open", extra={"reaction": self.id}, exc_info=redact_error(failure))
        return True

    async def _fail(self, error: BaseException, reason: str, *, is_told: bool) -> None:
        status: Status = "failed"
        answer, mark = "I could not answer: an error on my side. My log has it.", "error"
        if is_told and (reporter := await find_reporter(self.client)):
            answer = REPORTED.format(agent_id=reporter)
        if isinstance(error, BudgetExhausted):  # the text of this error is from the hub, so people may read it
            status, answer, mark = "stopped", f"I have to stop here. {error}", "stopped"
        end = Finish(status, reason, answer if is_told else None, metadata={FAILURE: mark})
        if (loop := self.reaction) is not None:
            end = replace(end, turns=loop.turn, usage=loop.usage, tool_calls=loop.tool_calls)
        if loop is None or loop.state is not LoopState.FINISHED:  # otherwise the driver has already reported the end
            counts = (end.turns, end.usage, end.tool_calls)
            self.reporter.report(Finished(self.id, end.status, reason, end.answer, *counts))
        await self.conclude(end)

    async def _send_stop_notice(self, stopped: StopTrace) -> None:
        """Report in the thread who stopped the reaction, below the text that had streamed. Log a refusal instead of
        raising it.
        """
        try:
            await self._reply(write_stopped(stopped.text, stopped.by), {STOPPED: {"by": stopped.by}})
            self.is_answered = True
        except (ConnectError, Superseded):
            raise
        except RoundelayError as error:  # the notice was sent before a restart, or the thread is taken over
            _logger.info("stop notice not sent", extra={"reaction": self.id, "code": error.code})

    async def _decline(self, finish: Finish) -> None:
        """Notify the requester who waits for an answer that there is no answer."""
        # The reason is text of the model. Do not send the reason if reviewers must check the model's text first.
        is_reviewed = self.reaction is not None and self.reaction.control.withholds
        text = (finish.reason if finish.status == "finished" and not is_reviewed else "") or "there is no answer"
        try:
            await self._reply(text, {DECLINED: True})
        except (ConnectError, Superseded):
            raise
        except RoundelayError as error:
            # The text was sent before a restart, or the hub refused it. The requester's wait ends at its timeout.
            _logger.info("decline not sent", extra={"reaction": self.id, "code": error.code})

    async def _reply(self, text: str, metadata: dict[str, object]) -> None:
        await self.journal.queue.write(self._make_answer(text, metadata))

    def _make_answer(self, text: str, metadata: dict[str, object], *, may_conflict: bool = False) -> Write:
        client, message = self.client, self.message
        options: dict[str, Any] = {"message_id": derived_id(self.id, "", 0, "answer"), "metadata": metadata or None}
        return Write(
            partial(client.reply, message, text, **options),
            lambda: make_send(
                client.find_reply_address(message), text, reply_to=message.seq, cause=message.seq, **options
            ),
            may_conflict,
        )


class InboxMessages:
    """Messages that arrive in the thread of a running reaction, for ``on_new_message="inject"``. The model reads these
    messages before its next turn.

    The hub decides which of these messages the reaction may read: everybody who gets its answer must be allowed to see
    them. Messages that the reaction may not read get separate reactions.
    """

    def __init__(
        self,
        running: RunningReaction,
        inbox: Inbox,
        *,
        visibility: Visibility,
        should_answer: Callable[[BaseMessage], bool],
        mark_read: Callable[[int, str, str], Awaitable[None]],
    ) -> None:
        self._running = running
        self._inbox = inbox
        self._visibility = visibility
        self._should_answer = should_answer
        self._mark_read = mark_read

    async def take(self) -> NewMessages | None:
        """Return the messages that have arrived, or None if there are none."""
        running = self._running
        waiting = self._inbox.withdraw(running.message)
        if not waiting:
            return None
        # If the reaction ends during the following request, the scheduler puts these messages back into the inbox.
        running.unsettled = {message.seq: message for message in waiting}
        admitted = await self._find_admitted(waiting)
        messages = [message for message in waiting if message.seq in admitted]
        messages = messages[: self._count_fitting(messages)]
        running.unsettled = {message.seq: message for message in messages}
        # The remaining messages get separate reactions, in their order.
        self._inbox.put_back([message for message in waiting if message.seq not in running.unsettled])
        if not messages:
            return None
        answers = any(self._should_answer(message) for message in messages)
        return NewMessages(render_new_messages(messages), tuple(running.unsettled), answers)

    async def settle(self, new: NewMessages) -> None:
        """Mark the messages of a ``new_messages`` record as read, so that they get no reactions of their own."""
        for seq in new.seqs:
            # Remove the message only after it is stored as read. If the message were removed first, a cancellation
            # between the two steps would lose the message.
            await self._mark_read(seq, self._running.message.thread_id, self._running.id)
            del self._running.unsettled[seq]

    async def _find_admitted(self, waiting: Sequence[BaseMessage]) -> set[int]:
        """Ask the hub which messages the reaction may read."""
        trigger, newest = self._running.message, waiting[-1].seq
        args = {"thread_id": trigger.thread_id, "trigger": trigger.seq, "visibility": self._visibility}
        # Limit the page to messages that have left the inbox. A message that arrives during this request is in the
        # inbox and stays there.
        args |= {"until": newest, "limit": MAX_NEW_MESSAGES}
        page = await retry_later(partial(self._running.client.call, "network.history", args))
        return {message["seq"] for message in page["messages"]}

    def _count_fitting(self, messages: Sequence[BaseMessage]) -> int:
        """Return how many messages fit into one record. The other messages wait for the next turn or get a separate
        reaction.
        """
        sizes = (len(json.dumps(render_new_messages([message]))) for message in messages)
        limit = self._running.journal.max_body_bytes // 2
        return sum(1 for total in accumulate(sizes) if total <= limit)


# --- reactions from before a restart


async def record_as_read(client: NetworkClient, seq: int, thread_id: str, reader: str) -> None:
    """Record that the reaction ``reader`` has read a message. The record is a separate finished reaction, so the hub
    and a restarted agent know that nothing is left to do.
    """
    # Use the id that the message's own reaction would have. If the hub delivers the message again, ``started`` already
    # exists.
    journal = open_journal(client, reaction_id(client.agent_id, seq, client.welcome.network.epoch))
    await journal.record_started(Started(trigger=seq, thread_id=thread_id, as_of=seq, manifest=[seq], config_hash=""))
    # An id conflict means that an earlier process was killed before this record, and that the message later got its own
    # reaction.
    await journal.record_finished(Finish("finished", f"read in reaction {reader}"), may_conflict=True)


async def read_open_reaction(client: NetworkClient, opened: OpenReactionInfo) -> tuple[BaseMessage, Recorded] | None:
    """Return the trigger and the records of an open reaction. If the trigger or the records cannot be read, end the
    reaction and return None.
    """
    journal = open_journal(client, opened.reaction)
    try:
        recorded = await journal.load()
        return await _find_trigger(client, opened.trigger, recorded), recorded
    except (UnknownMessage, ValueError, TypeError, LookupError) as error:
        # Another program wrote these records under this agent's id, or retention deleted the message. A reaction with
        # unreadable records must not prevent the agent from starting.
        details = {"reaction": opened.reaction, "seq": opened.trigger, "error": type(error).__name__}
        _logger.error("open reaction cannot be resumed", extra=details)
        await journal.record_finished(Finish("failed", "its records or its trigger can no longer be read"))
        return None


async def expect_replies(recorded: Recorded, replies: Replies) -> list[int]:
    """Expect the replies that a reaction waited for before a restart. Return the seqs of the reaction's questions.
    Called before any reply is delivered.
    """
    # Every question of the reaction was sent after its trigger, so the search in a thread can end there.
    since = recorded.started.trigger if recorded.started is not None else 0
    questions = [seq for messages in recorded.open_askings() for seq in await replies.expect_sent(messages, since)]
    for wait in recorded.open_waits():
        for question in wait.questions.values():
            replies.expect(question, is_approval=wait.is_approval)
            questions.append(question)
    return questions


async def _find_trigger(client: NetworkClient, seq: int, recorded: Recorded) -> BaseMessage:
    if recorded.started is None:
        raise LookupError("the reaction has no record of its start")
    thread_id = recorded.started.thread_id
    # ``before`` is exclusive. With ``seq + 1`` and a limit of 1, the hub returns the trigger itself if it still exists.
    history = await retry_later(partial(client.history, thread_id, before=seq + 1, limit=1))
    for message in history.messages:
        if message.seq == seq:
            return message
    raise LookupError(f"message {seq} is not in {thread_id}")


async def is_answer_of_earlier_run(client: NetworkClient, message: BaseMessage, first_head: int) -> bool:
    """Return whether a reaction of an earlier process consumed this reply, or ended while it waited for the reply.
    ``first_head`` is the ledger's head when this process started.

    The acknowledgement of a reply is less durable than the record of the call that consumed the reply. If hub and agent
    are killed together, the hub may deliver the reply again, to a process that does not know about the wait. The
    records in the ledger show whether there was a wait.
    """
    question = message.reply_to
    if question is None or question > first_head or message.kind != "direct":
        return False  # the questions of tool calls, and the answers to them, are always direct messages
    try:
        chain = (await retry_later(partial(client.call, "network.why", {"seq": question})))["chain"]
        asked, *causes = chain
        is_own = asked.get("sender_id") == client.agent_id and ASK in (asked.get("metadata") or {})
        if not is_own or not causes or "reaction" not in causes[0]:
            return False
        recorded = await open_journal(client, causes[0]["reaction"]).load()
    except (RequestError, InternalError, ValueError, TypeError, LookupError):
        # The records were deleted by retention, or written by another program. Treat the reply like any other message.
        return False
    # A person's late message to an ended reaction is a new request. A program's late reply is not a request, because
    # nobody reads it any more.
    return recorded.has_taken(message.seq) or (
        message.sender_kind != "human" and recorded.finished is not None and recorded.was_waiting_for(question)
    )
