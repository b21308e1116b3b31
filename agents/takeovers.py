"""Suspends an agent's work in threads that a person has taken over. New messages wait until the takeover ends. After
the takeover, the agent reacts once.

`reaction_scheduler` uses this module together with the inbox. The hub decides on takeovers (`ThreadHeld`), so a restart
may lose the state of this module. An interrupted reaction stays open in the ledger, which marks the reaction as
overtaken. Waiting messages stay unacknowledged, unless a later message makes them context. After the takeover, a new
reaction starts. The id of the new reaction is derived from the interrupted reaction, so that a restarted agent finds it
again. The interrupted reaction ends when the new reaction has ended, or when a later message replaces the trigger.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from functools import partial

from roundelay.network.addresses import answer_threads
from roundelay.network.client import NetworkClient
from roundelay.network.errors import ConnectError, RoundelayError, Superseded, UnknownMessage
from roundelay.network.frames import SEQ_LIMIT
from roundelay.network.messages import BaseMessage, message_from_wire

from .driver import NewMessagesSource
from .inbox import Inbox, wakes
from .isolation import retry_later
from .journal import open_journal
from .prompt import render_new_messages
from .reaction_ids import digest
from .running_reaction import RunningReaction
from .values import Finish, NewMessages

_logger = logging.getLogger(__name__)

SAID_MEANWHILE = "Since the incoming message a person had taken this conversation over. This was said meanwhile:"

MAX_MISSED = 500
"""Maximum number of a thread's newest messages that are searched for messages of the takeover."""


def list_answer_threads(message: BaseMessage) -> tuple[str, ...]:
    """Return the threads in which a message may be answered. The first is the thread of the message, and the last is
    the thread of the answer.
    """
    return answer_threads(message.kind, message.thread_id, message.seq)


class Takeovers:
    """State of the takeovers of one agent's threads, for one ledger. ``ack`` acknowledges a message that waits in the
    inbox.
    """

    def __init__(self, client: NetworkClient, inbox: Inbox, ack: Callable[[int], Awaitable[None]]) -> None:
        self._client = client
        self._inbox = inbox
        self._ack = ack
        self._interrupted: dict[int, str] = {}  # ids of open reactions that may not answer, by the trigger's seq
        self._waiting: set[int] = set()  # seqs of messages that wait, or waited, for the end of a takeover
        self._ends = 0  # number of takeovers that ended, or may have ended

    def find_next_id(self, trigger: int) -> str | None:
        """Return the id of the reaction that replaces the interrupted reaction to ``trigger``. Return None if no
        reaction to this message was interrupted.
        """
        reaction = self._interrupted.get(trigger)
        return None if reaction is None else _derive_next_id(reaction)

    async def add_open_reaction(
        self, message: BaseMessage, reaction: str, open_ids: Collection[str], read: Collection[int]
    ) -> bool:
        """Add a reaction that was interrupted before the agent started.

        ``open_ids``: ids of all open reactions. ``read``: seqs of the messages that this reaction had read. Return
        whether the agent must react to the message again, because no other reaction and no later message replaces the
        interrupted reaction.
        """
        self._interrupted[message.seq] = reaction
        # The successor's id is derived from the interrupted reaction. If a reaction with the successor's id is open,
        # the interrupted reaction was already replaced.
        if _derive_next_id(reaction) in open_ids or await self._has_later(message, read):
            await self.finish_interrupted(message.seq)
            return False
        return True

    async def _has_later(self, message: BaseMessage, read: Collection[int]) -> bool:
        """Return whether a later message of the thread wakes the agent. Messages that the agent had ``read`` together
        with this message do not count. The agent has already reacted to a later message that wakes it, or the hub will
        deliver the message again.
        """
        # Each answer to a broadcast goes to a separate thread, so a later broadcast does not replace an earlier one.
        if len(list_answer_threads(message)) > 1:
            return False
        page = await retry_later(partial(self._client.history, message.thread_id, limit=MAX_MISSED))
        later = (other for other in page.messages if other.seq > message.seq and other.seq not in read)
        return any(wakes(other, self._inbox.agent_id, self._inbox.react_to) for other in later)

    async def start(self, thread_id: str) -> None:
        """Withhold the messages of a thread because a person has taken it over."""
        self._inbox.start_takeover(thread_id)
        await self.drop_superseded()

    def end(self, thread_id: str | None = None) -> None:
        """Release the messages of a thread at the end of its takeover. If ``thread_id`` is None, release the messages
        of all threads, because any takeover may have ended while the connection was lost.
        """
        # Count every end, so that `suspend` detects a takeover that ends during its request.
        self._ends += 1
        for name in [thread_id] if thread_id is not None else self._inbox.taken_over_threads:
            self._waiting |= {message.seq for message in self._inbox.end_takeover(name)}

    async def suspend(self, running: RunningReaction) -> None:
        """Suspend a reaction that may not start or may not answer, because of a takeover.

        The message of the reaction waits for the end of the takeover. If a later message already waits, the agent
        reacts to the later message instead and reads the message of this reaction as context.
        """
        message = running.message
        if running.journal.is_started:
            await self.finish_interrupted(message.seq)
            self._interrupted[message.seq] = running.id
        while True:
            ends = self._ends
            thread_id = await self._find_taken_over(message)
            if ends == self._ends:  # otherwise a takeover ended during the request, and the answer may be outdated
                break
        # Do not await anything between this line and `admit`: after `release`, the inbox may return messages that must
        # wait behind this message.
        is_next = thread_id is not None or not self._inbox.has_later(list_answer_threads(message)[-1], message.seq)
        self._inbox.release(message)
        if thread_id is not None:
            self._inbox.start_takeover(thread_id)
        if is_next:
            self._waiting.add(message.seq)
            self._inbox.admit(message)
            await self.drop_superseded()
        else:
            self._inbox.note_handled(message.seq)
            await self._drop(message.seq)

    async def finish_interrupted(self, trigger: int) -> None:
        """End the interrupted reaction to a message, if there is one, because another reaction has replaced it."""
        reaction = self._interrupted.pop(trigger, None)
        if reaction is None:
            return
        try:
            journal = open_journal(self._client, reaction)
            await journal.record_finished(Finish("cancelled", "a person took the thread over, and gave it back"))
        except (ConnectError, Superseded):
            raise
        except RoundelayError as error:  # at the next start, the hub lists the reaction as open, and the agent ends it
            _logger.warning("an interrupted reaction stays open", extra={"reaction": reaction, "code": error.code})

    def add_missed_messages(self, running: RunningReaction) -> None:
        """Let a reaction that waited for the end of a takeover read the messages of the takeover before its first
        turn.
        """
        if running.message.seq in self._waiting:
            self._waiting.discard(running.message.seq)
            running.new_messages = MessagesDuringTakeover(running, self._inbox, running.new_messages)

    async def drop_superseded(self) -> None:
        """Acknowledge messages that are only context now, because a later message of the thread supersedes them."""
        for message in self._inbox.pop_superseded():
            self._waiting.discard(message.seq)
            await self._drop(message.seq)

    async def _drop(self, seq: int) -> None:
        await self.finish_interrupted(seq)
        await self._ack(seq)

    async def _find_taken_over(self, message: BaseMessage) -> str | None:
        """Return the taken-over thread in which a message would be answered, or None if the takeover has ended."""
        for thread_id in list_answer_threads(message):
            args = {"thread_id": thread_id, "limit": 1}
            try:
                page = await retry_later(partial(self._client.call, "network.history", args))
            except UnknownMessage:  # the thread has no message yet
                continue
            except (ConnectError, Superseded):
                raise
            except RoundelayError as error:
                details = {"seq": message.seq, "code": error.code}
                _logger.warning("the hub did not say whether a thread is taken over", extra=details)
                # If the state is unknown, keep waiting: an answer to a thread that a person controls cannot be
                # withdrawn.
                return message.thread_id
            if "held" in page:
                return thread_id
        return None


class MessagesDuringTakeover:
    """Source of new messages for the reaction after a takeover. The reaction reads the messages of the takeover before
    its first turn, and later the messages of ``following``.
    """

    def __init__(self, running: RunningReaction, inbox: Inbox, following: NewMessagesSource | None) -> None:
        self._running = running
        self._inbox = inbox
        self._following = following
        self._is_read = False

    async def take(self) -> NewMessages | None:
        """Return the messages of the takeover at the first call, and new messages at later calls. Return None if there
        are no messages.
        """
        if not self._is_read:
            self._is_read = True
            messages = await self._find_messages()
            if messages:
                # Return no seqs: messages of the takeover are only context, so they need not be marked as read and
                # require no answer.
                return NewMessages(render_new_messages(messages, SAID_MEANWHILE), (), answers=False)
        return await self._following.take() if self._following is not None else None

    async def _find_messages(self) -> list[BaseMessage]:
        """Return the newest messages after the trigger that fit into a record. Omit messages that get a separate
        reaction, and messages that the reaction may not read.
        """
        client, trigger = self._running.client, self._running.message
        messages: list[BaseMessage] = []
        for thread_id in list_answer_threads(trigger):
            args = {"thread_id": thread_id, "trigger": trigger.seq, "limit": MAX_MISSED, "until": SEQ_LIMIT - 1}
            with suppress(UnknownMessage):  # the thread has no message yet
                page = await retry_later(partial(client.call, "network.history", args))
                messages += [message_from_wire(it) for it in page["messages"] if it["seq"] > trigger.seq]
        messages.sort(key=lambda message: message.seq)
        fitting: list[BaseMessage] = []
        left = self._running.journal.max_body_bytes // 2
        # Start with the newest message. If not all messages fit into a record, the latest ones matter most.
        for message in reversed([message for message in messages if message.seq not in self._inbox]):
            left -= len(json.dumps(render_new_messages([message], "")))
            if left < 0:
                break
            fitting.insert(0, message)
        return fitting

    async def settle(self, new: NewMessages) -> None:
        """Mark messages as read that arrived while the reaction ran. Messages of the takeover are already handled."""
        if self._following is not None and new.seqs:
            await self._following.settle(new)


def _derive_next_id(interrupted: str) -> str:
    """Return the id of the reaction that replaces an interrupted reaction. Every machine derives the same id."""
    return digest("after", interrupted)
