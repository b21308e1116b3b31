"""Reactions of one agent on one ledger: starts reactions for delivered messages, resumes open reactions, and stops
reactions.

The scheduler receives messages from the runner's connection. The inbox decides which messages wake the agent, and in
which order. The runner creates a scheduler for each ledger epoch, because seqs and reaction ids of one ledger are
invalid in another. A restart may lose the state of this module: the ledger contains every started reaction, and the
next scheduler resumes the open reactions.
"""

from __future__ import annotations

import asyncio
import logging
from enum import Enum
from typing import Protocol

from roundelay.network.client import AnyMessage, Delivery, NetworkClient, Notice, Reconnected, Signal
from roundelay.network.errors import BudgetExhausted, ThreadHeld
from roundelay.network.messages import BaseMessage, MessageThread

from .approvals import answer_late_decision
from .inbox import Arrival, Inbox, ReactTo, Visibility, find_request, is_watched, read_decision
from .isolation import is_cancelled_by_caller
from .journal import open_journal
from .live_activity import ActivityReporter, ActivitySender
from .policy import AgentPolicy, PromptForm
from .prompt import build_context
from .reaction_ids import reaction_id
from .recorded import Recorded
from .replies import Replies
from .running_reaction import (
    InboxMessages,
    ReactionResult,
    RunningReaction,
    expect_replies,
    is_answer_of_earlier_run,
    read_open_reaction,
    record_as_read,
)
from .takeovers import Takeovers, list_answer_threads

_logger = logging.getLogger(__name__)


class LedgerReplaced(Exception):
    """The hub has another ledger after a reconnect. Ends the scheduler's tasks. The runner catches this error."""


class ReactingAgent(Protocol):
    """The part of `runner.AgentRunner` that the scheduler uses."""

    agent_id: str
    policy: AgentPolicy
    visibility: Visibility
    react_to: ReactTo
    ignored_sender_ids: tuple[str, ...]

    async def react(
        self, message_threads: dict[str, MessageThread], incoming_thread_id: str, incoming_message: BaseMessage
    ) -> ReactionResult: ...

    def should_answer(self, message: BaseMessage) -> bool: ...

    def find_form(self, running: RunningReaction) -> PromptForm: ...

    def can_open_threads(self) -> bool: ...


class _Outcome(Enum):
    """Outcome of an attempt to react."""

    HANDLED = "handled"
    RETURNED = "returned"
    """The message was returned to the hub, which delivers it again."""

    TAKEN_OVER = "taken over"
    """A person has taken over the thread."""


class ReactionScheduler:
    """Starts, resumes and stops the reactions of an agent. The scheduler creates its tasks in ``group``."""

    def __init__(
        self, agent: ReactingAgent, client: NetworkClient, activity: ActivitySender, group: asyncio.TaskGroup
    ) -> None:
        self.inbox = Inbox(
            agent.agent_id,
            react_to=agent.react_to,
            ignored_sender_ids=agent.ignored_sender_ids,
            max_parallel=agent.policy.max_parallel_reactions,
        )
        self.replies = Replies(
            client,
            pause=self._pause,
            resume=self.inbox.resume,
            clock=client.clock,
            is_observed=lambda: activity.is_observed,
        )
        self._agent = agent
        self._client = client
        self._activity = activity
        self._group = group
        activity.is_watched = client.welcome.is_watched
        self._takeovers = Takeovers(client, self.inbox, self._acknowledge)
        self._epoch = client.welcome.network.epoch
        # The ledger's head when this process started. This process sent every question with a higher seq.
        self._first_head = client.welcome.head
        self._deliveries: dict[int, Delivery] = {}  # by seq, for messages that wait in the inbox
        self._resumable: dict[int, tuple[str, Recorded, list[int]]] = {}  # reactions from before the start, by trigger
        self._running: dict[int, RunningReaction] = {}  # by trigger
        self._suspended: set[int] = set()  # triggers of reactions that a takeover has interrupted
        self._stopped_early: dict[str, str] = {}  # who stopped a reaction that is not resumed yet, by reaction id

    # --- deliveries

    async def handle_delivery(self, delivery: Delivery) -> None:
        """Pass a message to the tool call that waits for it, or to the inbox. Start reactions that can start now."""
        await self._route(delivery)
        self.start_reactions()

    async def _route(self, delivery: Delivery) -> None:
        message = delivery.message
        request = find_request(message)
        # Check for an awaited reply before the wake rule. The wake rule would start a second reaction in the same
        # thread for an awaited reply.
        if request is not None and await self._is_awaited_reply(message):
            await delivery.ack()  # if the call is interrupted, it can read the message in its thread
            return
        if request is not None and read_decision(message) is not None:
            await answer_late_decision(self._client, message)
        match self.inbox.offer(message):
            case Arrival.QUEUED:
                self._deliveries[message.seq] = delivery
                if self.inbox.superseded:
                    await self._takeovers.drop_superseded()
            case Arrival.CONTEXT | Arrival.HANDLED:
                await delivery.ack()
            case Arrival.PENDING:
                if self._is_resumed(message.seq):  # a reaction that is not resumed acknowledges its message itself
                    # The record `started` counts as the acknowledgement, but a hub that crashed may have lost it.
                    await delivery.ack()

    async def _is_awaited_reply(self, message: BaseMessage) -> bool:
        """Consume a message if a tool call waits for it, or waited for it before a restart. Return whether the message
        was consumed.
        """
        return self.replies.take(message) or await is_answer_of_earlier_run(self._client, message, self._first_head)

    def _is_resumed(self, seq: int) -> bool:
        running = self._running.get(seq)
        return seq in self._resumable or (running is not None and running.delivery is None)

    async def _acknowledge(self, seq: int) -> None:
        """Acknowledge a message that was waiting and needs no reaction."""
        delivery = self._deliveries.pop(seq, None)
        if delivery is not None:
            await delivery.ack()

    async def _mark_read(self, seq: int, thread_id: str, reader: str) -> None:
        """Record that ``reader``, the reaction to another message, has read this message. The message then needs no
        reaction of its own.
        """
        await record_as_read(self._client, seq, thread_id, reader)
        self.inbox.note_handled(seq)
        await self._acknowledge(seq)

    async def resume_open_reactions(self) -> None:
        """Queue the reactions that an earlier process left open, before any new message."""
        open_reactions = self._client.welcome.open_reactions
        ids = {opened.reaction for opened in open_reactions}
        # Sort the reactions by their start, so that the inbox queues the reactions of a thread in the same order again.
        for opened in sorted(open_reactions, key=lambda it: it.seq):
            found = await read_open_reaction(self._client, opened)
            if found is None or found[1].finished is not None:  # an earlier iteration may have ended the reaction
                continue
            message, recorded = found
            if opened.overtaken:
                if await self._takeovers.add_open_reaction(message, opened.reaction, ids, recorded.read_meanwhile()):
                    self.inbox.admit(message)
                continue
            # Expect replies before any reply is delivered. A reply that is not expected would start a new reaction.
            questions = await expect_replies(recorded, self.replies)
            for seq in recorded.read_meanwhile():
                try:
                    await self._mark_read(seq, message.thread_id, opened.reaction)
                except (BudgetExhausted, ThreadHeld) as error:  # the agent starts anyway; its reaction will report this
                    self.inbox.note_handled(seq)
                    _logger.warning(
                        "a message that was read is not recorded as read", extra={"seq": seq, "code": error.code}
                    )
            self._resumable[message.seq] = (opened.reaction, recorded, questions)
            self.inbox.admit(message)

    # --- one reaction

    def start_reactions(self) -> None:
        """Start every reaction that may start now."""
        while (message := self.inbox.next_message()) is not None:
            self._group.create_task(self._handle_message(message))

    async def _handle_message(self, message: BaseMessage) -> None:
        """React to a message, then start the reactions that waited for this reaction to end."""
        running = self._begin(message)
        try:
            outcome = await self._attempt(running)
        finally:
            # Clean up after a cancellation too: `get_running` must not return a reaction whose task has ended.
            del self._running[message.seq]
            self.replies.forget(running.questions)
        if running.unsettled:  # the reaction ended while it was reading new messages
            self.inbox.put_back(running.unsettled.values())
        match outcome:
            case _Outcome.TAKEN_OVER:
                if running.delivery is not None:
                    self._deliveries[message.seq] = running.delivery
                self._suspended.add(message.seq)
                await self._takeovers.suspend(running)
            case _Outcome.HANDLED:
                self.inbox.finish(message)
                self._suspended.discard(message.seq)
                await self._takeovers.finish_interrupted(message.seq)
            case _Outcome.RETURNED:
                self.inbox.release(message)
        self.start_reactions()

    def _begin(self, message: BaseMessage) -> RunningReaction:
        # A resumed reaction keeps its id and therefore all ids derived from it, so the hub recognizes repeated
        # messages.
        reaction, recorded, questions = self._resumable.pop(message.seq, (None, None, ()))
        running = self._make_running(message, reaction or self._takeovers.find_next_id(message.seq))
        # If a resumed reaction fails, end it instead of returning its trigger to the hub: the trigger already counts as
        # handled.
        running.journal.was_started = recorded is not None
        self._takeovers.add_missed_messages(running)
        running.recorded, running.questions = recorded, questions
        running.delivery = self._deliveries.pop(message.seq, None)
        # After a restart the hub repeats earlier stops. A stop may arrive while the reaction still waits in the inbox.
        running.stopped_by = self._stopped_early.pop(running.id, None)
        self._running[message.seq] = running
        return running

    def _make_running(self, message: BaseMessage, reaction: str | None = None) -> RunningReaction:
        agent, client = self._agent, self._client
        if not isinstance(message, AnyMessage):  # a hub sends no other type
            raise TypeError(f"{type(message).__name__} is not a message of a network")
        reaction = reaction or reaction_id(agent.agent_id, message.seq, self._epoch)
        # A person may watch a question between agents without being able to read its thread. Stream the work on such a
        # question only if the prompt contains nothing that the people of the conversation may not read.
        is_shown = message.sender_kind == "human" or (agent.visibility != "all" and is_watched(message))
        reporter = ActivityReporter(self._activity, reaction, message.thread_id, message.seq, is_watched=is_shown)
        running = RunningReaction(reaction, client, message, open_journal(client, reaction), reporter, self.replies)
        running.is_awaited = agent.should_answer(message)
        if agent.policy.on_new_message == "inject":
            running.new_messages = InboxMessages(
                running,
                self.inbox,
                visibility=agent.visibility,
                should_answer=agent.should_answer,
                mark_read=self._mark_read,
            )
        return running

    async def _attempt(self, running: RunningReaction) -> _Outcome:
        agent, message = self._agent, running.message
        place = {
            "agent_id": agent.agent_id,
            "thread_id": message.thread_id,
            "seq": message.seq,
            "reaction": running.id,
        }
        _logger.debug("a reaction begins", extra=place)
        running.reporter.begin()
        try:
            if running.recorded is not None and running.recorded.started is not None:
                # The hub stores a repeated record only once, but learns that this process now works on the reaction.
                await running.journal.record_started(running.recorded.started)
            form, lists = agent.find_form(running), agent.can_open_threads()
            context = await build_context(
                self._client, message, agent.policy, agent.visibility, form, lists_threads=lists
            )
            if running.recorded is not None and running.recorded.started is not None:
                context = context._replace(is_alone=running.recorded.started.is_alone)
            running.context = context
            await agent.react(context.threads, message.thread_id, message)
            if running.delivery is not None:
                if running.journal.is_new:
                    running.delivery.mark_known()
                else:  # `react` wrote no journal, or the hub may have lost the earlier acknowledgement
                    await running.delivery.ack()
        except BaseException as error:
            if is_cancelled_by_caller(error) or self._client.failure is not None:
                raise  # the runner ends, or records can no longer be written: the reaction stays open
            if isinstance(error, ThreadHeld):
                return _Outcome.TAKEN_OVER
            # Log the error of this reaction here instead of raising it, because it must not end the agent.
            if isinstance(error, BudgetExhausted):
                _logger.warning("reaction stopped: %s", error, extra=place)
            else:
                _logger.exception("reaction failed", extra=place)
            # `react` may have cancelled its own run, for example with a timeout, which closed the journal. Without a
            # recorded end, the reaction would block its thread.
            running.journal.reopen()
            try:
                is_told = agent.policy.on_text != "record" and running.is_awaited
                has_ended = await running.give_up(error, is_told=is_told)
            except ThreadHeld:
                return _Outcome.TAKEN_OVER
            return _Outcome.HANDLED if has_ended else _Outcome.RETURNED
        finally:
            _logger.debug("a reaction is over", extra=place)
            running.reporter.end(is_silent=running.is_silent)
        return _Outcome.HANDLED

    def get_running(self, message: BaseMessage) -> RunningReaction:
        """Return the running reaction to a message. If the scheduler did not call `react`, create a reaction."""
        return self._running.get(message.seq) or self._make_running(message)

    def find_running(self, reaction: str) -> RunningReaction | None:
        """Return the running reaction with this id, or None."""
        return next((running for running in self._running.values() if running.id == reaction), None)

    def _pause(self, reaction: str) -> None:
        """Start other reactions while the reaction with the id ``reaction`` waits for an answer."""
        running = self.find_running(reaction)
        self.inbox.pause(reaction, running.message.thread_id if running is not None else "")
        self.start_reactions()

    # --- events other than deliveries

    async def watch_events(self) -> None:
        """Handle stops, takeovers, a replaced ledger, and the live activity of agents whose answers a tool call waits
        for. Only the hub can send signals of kind ``cancel``. Raises `LedgerReplaced`.
        """
        async for event in self._client.events():
            match event:
                case Signal(kind="cancel", body={"reaction": str(reaction)}):
                    self._stop(reaction, event.sender_id)
                case Signal(kind="delta" | "tool"):
                    self.replies.relays.hear(event)
                case Notice(kind="dead_letter", body={"seq": int(seq)}):
                    self.replies.look_after(seq)
                # In another ledger, the same seqs belong to other messages. With the old seqs, the agent would answer
                # and acknowledge the wrong messages.
                case Reconnected(welcome=welcome) if welcome.network.epoch != self._epoch:
                    raise LedgerReplaced
                case Notice(kind="watched", body={"is_watched": bool(is_watched)}):
                    self._set_watched(is_watched=is_watched)
                case Notice(kind="taken", thread_id=str(thread_id)):
                    await self._interrupt(thread_id)
                case Notice(kind="given", thread_id=str(thread_id)):
                    self._end_takeovers(thread_id)
                case Reconnected(welcome=welcome):
                    self._activity.set_watched(is_watched=welcome.is_watched)
                    self._group.create_task(self.replies.relays.watch_again())
                    self._end_takeovers(None)  # any takeover may have ended while the connection was lost
                case _:
                    continue

    def _set_watched(self, *, is_watched: bool) -> None:
        self._activity.set_watched(is_watched=is_watched)
        if is_watched:  # people who watch this agent also see the activity of the agents that it asked
            self._group.create_task(self.replies.relays.watch_again())

    async def _interrupt(self, thread_id: str) -> None:
        """Cancel the tasks of the reactions in a thread that a person takes over. The reactions stay open."""
        for running in self._running.values():
            if thread_id in list_answer_threads(running.message):
                # Set the flag before the cancellation. The task reads the flag to distinguish a takeover from a stop.
                running.is_taken_over = True
                running.cancel()
        await self._takeovers.start(thread_id)

    def _end_takeovers(self, thread_id: str | None) -> None:
        self._takeovers.end(thread_id)
        self.start_reactions()

    def _stop(self, reaction: str, sender_id: str) -> None:
        """Stop a reaction because a person requested it."""
        # After a restart the hub repeats earlier stops in the agent's own name.
        by = sender_id if sender_id != self._agent.agent_id else "a person"
        running = self.find_running(reaction)
        if running is not None:
            running.stopped_by = by
            running.cancel()
        elif any(reaction == waiting for waiting, *_ in self._resumable.values()):
            self._stopped_early[reaction] = by
