"""Threads that a person has taken over, seen from the agent: its work there is suspended, new messages wait, and at the
end of the takeover the agent reacts once.

Stands between `reaction_scheduler` and the inbox. The hub decides (`ThreadHeld`); nothing here has to survive. An
interrupted reaction stays open in the ledger, which marks it as overtaken. Waiting messages stay unacknowledged, unless a
later message makes them context. The reaction after the takeover is a new one, whose id derives from the interrupted
one's, so that a restarted agent finds it again. The interrupted one ends when the new one has, or when a later message
replaces it.
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
"""Maximum number of a thread's newest messages that are checked for messages of the takeover."""


def list_answer_threads(message: BaseMessage) -> tuple[str, ...]:
    """Return the threads in which a message may be answered: its own first, the one with the answer last."""
    return answer_threads(message.kind, message.thread_id, message.seq)


class Takeovers:
    """Takeovers of one agent's threads, on one ledger. ``ack`` acknowledges a message that waits in the inbox."""

    def __init__(self, client: NetworkClient, inbox: Inbox, ack: Callable[[int], Awaitable[None]]) -> None:
        self._client = client
        self._inbox = inbox
        self._ack = ack
        self._interrupted: dict[int, str] = {}  # open reactions that may not answer, by the trigger's seq
        self._waiting: set[int] = set()  # seqs of messages that wait, or waited, for the end of a takeover
        self._ends = 0  # number of takeovers that ended, or may have

    def find_next_id(self, trigger: int) -> str | None:
        """Return the id of the reaction that replaces an interrupted one, or None if none was interrupted."""
        reaction = self._interrupted.get(trigger)
        return None if reaction is None else _derive_next_id(reaction)

    async def add_open_reaction(
        self, message: BaseMessage, reaction: str, open_ids: Collection[str], read: Collection[int]
    ) -> bool:
        """Add a reaction that was interrupted before the agent started. ``open_ids``: all open reactions; ``read``: the
        messages that this one had read.

        Return whether the agent has to react to the message again: no other reaction and no later message replaces it.
        """
        self._interrupted[message.seq] = reaction
        # The successor's id derives from the interrupted one, so an open successor proves that the reaction was
        # replaced already.
        if _derive_next_id(reaction) in open_ids or await self._has_later(message, read):
            await self.finish_interrupted(message.seq)
            return False
        return True

    async def _has_later(self, message: BaseMessage, read: Collection[int]) -> bool:
        """Return whether a later message of the thread wakes the agent and was not ``read`` together with this one. The
        hub delivers that message again, or the agent has reacted to it."""
        # The answer to a broadcast stands in a thread of its own, so later messages of the broadcast replace nothing.
        if len(list_answer_threads(message)) > 1:
            return False
        page = await retry_later(partial(self._client.history, message.thread_id, limit=MAX_MISSED))
        later = (other for other in page.messages if other.seq > message.seq and other.seq not in read)
        return any(wakes(other, self._inbox.agent_id, self._inbox.react_to) for other in later)

    async def start(self, thread_id: str) -> None:
        """Let the messages of a thread wait, because a person has taken it over."""
        self._inbox.start_takeover(thread_id)
        await self.drop_superseded()

    def end(self, thread_id: str | None = None) -> None:
        """Release the messages of a thread at the end of its takeover; None: of all threads, since any takeover may
        have ended while the connection was lost."""
        # Count every end: `suspend` compares the counter to notice one that happened during its request.
        self._ends += 1
        for name in [thread_id] if thread_id is not None else self._inbox.taken_over_threads:
            self._waiting |= {message.seq for message in self._inbox.end_takeover(name)}

    async def suspend(self, running: RunningReaction) -> None:
        """Suspend a reaction that may not start, or not answer.

        Its message waits for the end of the takeover. If a later message waits already, the agent reacts to that one
        instead, and reads this one as context.
        """
        message = running.message
        if running.journal.is_started:
            await self.finish_interrupted(message.seq)
            self._interrupted[message.seq] = running.id
        while True:
            ends = self._ends
            thread_id = await self._find_taken_over(message)
            if ends == self._ends:  # otherwise a takeover ended while the hub was asked: the answer may be outdated
                break
        # No await from here to `admit`: once released, the inbox gives out what waits behind this message.
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
        """End the interrupted reaction to a message, if there is one: another has replaced it."""
        reaction = self._interrupted.pop(trigger, None)
        if reaction is None:
            return
        try:
            journal = open_journal(self._client, reaction)
            await journal.record_finished(Finish("cancelled", "a person took the thread over, and gave it back"))
        except (ConnectError, Superseded):
            raise
        except RoundelayError as error:  # the hub lists it again at the next start, and it ends then
            _logger.warning("an interrupted reaction stays open", extra={"reaction": reaction, "code": error.code})

    def add_missed_messages(self, running: RunningReaction) -> None:
        """Let a reaction that waited for the end of a takeover read what was said meanwhile, before its first turn."""
        if running.message.seq in self._waiting:
            self._waiting.discard(running.message.seq)
            running.new_messages = MessagesDuringTakeover(running, self._inbox, running.new_messages)

    async def drop_superseded(self) -> None:
        """Acknowledge messages that a later message of their thread has made context."""
        for message in self._inbox.pop_superseded():
            self._waiting.discard(message.seq)
            await self._drop(message.seq)

    async def _drop(self, seq: int) -> None:
        await self.finish_interrupted(seq)
        await self._ack(seq)

    async def _find_taken_over(self, message: BaseMessage) -> str | None:
        """Return the taken-over thread in which a message would be answered, or None if there is none any more."""
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
                _logger.warning("cannot find out whether a thread is taken over", extra=details)
                # When in doubt keep waiting: an answer into a thread that a person controls cannot be taken back.
                return message.thread_id
            if "held" in page:
                return thread_id
        return None


class MessagesDuringTakeover:
    """Messages of a takeover, which the reaction after it reads before its first turn; then those of ``following``."""

    def __init__(self, running: RunningReaction, inbox: Inbox, following: NewMessagesSource | None) -> None:
        self._running = running
        self._inbox = inbox
        self._following = following
        self._is_read = False

    async def take(self) -> NewMessages | None:
        """Take the messages of the takeover the first time, then what arrives, or None if there is nothing."""
        if not self._is_read:
            self._is_read = True
            messages = await self._find_messages()
            if messages:
                # No seqs: these messages are context that nobody has to mark as read, and none of them asks for an
                # answer.
                return NewMessages(render_new_messages(messages, SAID_MEANWHILE), (), answers=False)
        return await self._following.take() if self._following is not None else None

    async def _find_messages(self) -> list[BaseMessage]:
        """Return the newest messages after the trigger that fit into a record. Leave out those that get a separate
        reaction, and those that the reaction may not read."""
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
        # From the newest back: if not all fit into a record, the latest words matter most.
        for message in reversed([message for message in messages if message.seq not in self._inbox]):
            left -= len(json.dumps(render_new_messages([message], "")))
            if left < 0:
                break
            fitting.insert(0, message)
        return fitting

    async def settle(self, new: NewMessages) -> None:
        """Mark messages as read that arrived while the reaction ran. Those of the takeover are handled already."""
        if self._following is not None and new.seqs:
            await self._following.settle(new)


def _derive_next_id(interrupted: str) -> str:
    """Return the id of the reaction that replaces an interrupted one; the same on every machine."""
    return digest("after", interrupted)
