"""Threads that a person has taken over, on the agent's side: what it was at there is set aside, what is said there
waits, and when the thread is given back it reacts once.

Stands between the runner and its inbox. The hub decides (`ThreadHeld`); nothing here must survive. What was set aside
is an open reaction, which the hub knows as overtaken; what waits is not acknowledged but for messages that a later one
makes context. The reaction to what was set aside is a new one, under an id that follows from the old one's, so that a
restarted agent finds it again; the old one ends when that has, or when a later message took its place.
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
from .journal import digest, open_journal
from .prompt import render_new_messages
from .running_reaction import RunningReaction
from .values import Finish, NewMessages

_logger = logging.getLogger(__name__)

SAID_MEANWHILE = "Since the incoming message a person had taken this conversation over. This was said meanwhile:"
MAX_SAID = 500
"""Messages of a thread that are looked through for what was said after the one that an agent reacts to."""


def next_reaction_id(overtaken: str) -> str:
    """Give the id of the reaction that takes the place of one that a person has overtaken."""
    return digest("after", overtaken)


def list_answer_threads(message: BaseMessage) -> tuple[str, ...]:
    """Give the threads in which a message may be answered: its own, and last the one in which the answer would
    stand."""
    return answer_threads(message.kind, message.thread_id, message.seq)


class Takeovers:
    """What a person has taken over of one agent's, on one ledger. ``ack`` acknowledges what waits in the inbox, by its
    seq."""

    def __init__(self, client: NetworkClient, inbox: Inbox, ack: Callable[[int], Awaitable[None]]) -> None:
        self._client = client
        self._inbox = inbox
        self._ack = ack
        self.overtaken: dict[int, str] = {}
        """By the trigger's seq: reactions that are open and may not answer."""
        self.held_back: set[int] = set()
        """Seqs of what waited for a thread to be given back."""
        self._gives = 0  # how often something was given back, or may have been

    def next_reaction(self, trigger: int) -> str:
        """Give the id of the next reaction to a message to which one was `overtaken`."""
        return next_reaction_id(self.overtaken[trigger])

    async def note_open(
        self, message: BaseMessage, reaction: str, begun: Collection[str], read: Collection[int]
    ) -> bool:
        """At the start a reaction is open that may not answer any more; ``begun`` are the ids of all that are open,
        ``read`` the messages that this one had read, which get none of their own.
        Gives whether its message is to be reacted to anew: no other reaction has taken its place, nor a later
        message."""
        self.overtaken[message.seq] = reaction
        if next_reaction_id(reaction) in begun or await self._has_later(message, read):
            await self.end(message.seq)
            return False
        return True

    async def _has_later(self, message: BaseMessage, read: Collection[int]) -> bool:
        """Whether a later message of the thread in which this one is answered wakes the agent, and was not ``read``
        beside it: it is delivered again, or has been reacted to."""
        if len(list_answer_threads(message)) > 1:
            return False
        page = await retry_later(partial(self._client.history, message.thread_id, limit=MAX_SAID))
        later = (it for it in page.messages if it.seq > message.seq and it.seq not in read)
        return any(wakes(it, self._inbox.agent_id, self._inbox.react_to) for it in later)

    async def take(self, thread_id: str) -> None:
        """A person has taken a thread: what is said there waits."""
        self._inbox.hold(thread_id)
        await self.pass_over()

    def give(self, thread_id: str | None = None) -> None:
        """A thread was given back; None: any may have been, while nothing was heard."""
        self._gives += 1
        for name in [thread_id] if thread_id is not None else self._inbox.held:
            self.held_back |= {message.seq for message in self._inbox.give(name)}

    async def set_aside(self, begun: RunningReaction) -> None:
        """A reaction may not begin, or not answer. Its message waits until the thread is given back, or, if it has been
        already, is next again; but where a later one waits, that is reacted to, and this one is read in it."""
        message = begun.message
        if begun.journal.is_started:
            await self.end(message.seq)
            self.overtaken[message.seq] = begun.id
        while True:
            gives = self._gives
            thread_id = await self._find_held(message)
            if gives == self._gives:
                break
        # without an await from here on: what waits behind it is given out as soon as it has left the inbox
        is_first = thread_id is not None or not self._inbox.has_later(list_answer_threads(message)[-1], message.seq)
        self._inbox.release(message)
        if thread_id is not None:
            self._inbox.hold(thread_id)
        if is_first:
            self.held_back.add(message.seq)
            self._inbox.admit(message)
            await self.pass_over()
        else:
            self._inbox.note_handled(message.seq)
            await self._drop(message.seq)

    async def end(self, trigger: int) -> None:
        """End the reaction to a message that was overtaken, if there is one: another has taken its place."""
        reaction = self.overtaken.pop(trigger, None)
        if reaction is None:
            return
        try:
            journal = open_journal(self._client, reaction)
            await journal.record_finished(Finish("cancelled", "a person took the thread over, and gave it back"))
        except (ConnectError, Superseded):
            raise
        except RoundelayError as error:  # it is told as overtaken at the next start, and ended then
            _logger.warning("an overtaken reaction stays open", extra={"reaction": reaction, "code": error.code})

    def follow_up(self, begun: RunningReaction) -> None:
        """Let a reaction to what was `held_back` read, before its first turn, what was said in its thread since."""
        self.held_back.discard(begun.message.seq)
        begun.new_messages = MessagesDuringTakeover(begun, self._inbox, begun.new_messages)

    async def pass_over(self) -> None:
        """What a later message of a held thread has made context needs no reaction of its own."""
        for message in self._inbox.take_passed_over():
            self.held_back.discard(message.seq)
            await self._drop(message.seq)

    async def _drop(self, seq: int) -> None:
        await self.end(seq)
        await self._ack(seq)

    async def _find_held(self, message: BaseMessage) -> str | None:
        """Give which thread is held of those in which a message may be answered; None if none is any more."""
        for thread_id in list_answer_threads(message):
            args = {"thread_id": thread_id, "limit": 1}
            try:
                page = await retry_later(partial(self._client.call, "network.history", args))
            except UnknownMessage:  # nobody has replied yet
                continue
            except (ConnectError, Superseded):
                raise
            except RoundelayError as error:
                _logger.warning("whether a thread is held is not known", extra={"seq": message.seq, "code": error.code})
                return message.thread_id
            if "held" in page:
                return thread_id
        return None


class MessagesDuringTakeover:
    """What was said in a thread since the message that a reaction is to, read before its first turn; then what arrives
    while it runs, if that is read in it (``then``)."""

    def __init__(self, begun: RunningReaction, inbox: Inbox, then: NewMessagesSource | None) -> None:
        self._begun = begun
        self._inbox = inbox
        self._then = then
        self._is_read = False

    async def take(self) -> NewMessages | None:
        """Take what was said, the first time; None for nothing."""
        if self._is_read:
            return await self._then.take() if self._then is not None else None
        self._is_read = True
        said = await self._find_said()
        if not said:
            return await self._then.take() if self._then is not None else None
        return NewMessages(render_new_messages(said, SAID_MEANWHILE), (), answers=False)

    async def _find_said(self) -> list[BaseMessage]:
        """The newest that a record holds, of what may be known to all for whom the reaction is and gets none of its
        own."""
        client, trigger = self._begun.client, self._begun.message
        messages: list[BaseMessage] = []
        for thread_id in list_answer_threads(trigger):
            args = {"thread_id": thread_id, "trigger": trigger.seq, "limit": MAX_SAID, "until": SEQ_LIMIT - 1}
            with suppress(UnknownMessage):  # nobody has replied yet
                page = await retry_later(partial(client.call, "network.history", args))
                messages += [message_from_wire(it) for it in page["messages"] if it["seq"] > trigger.seq]
        messages.sort(key=lambda it: it.seq)
        said: list[BaseMessage] = []
        room = self._begun.journal.max_body_bytes // 2
        for message in reversed([it for it in messages if it.seq not in self._inbox]):
            room -= len(json.dumps(render_new_messages([message], "")))
            if room < 0:
                break
            said.insert(0, message)
        return said

    async def settle(self, new: NewMessages) -> None:
        """What was read as having arrived is settled; what was said before is handled already."""
        if self._then is not None and new.seqs:
            await self._then.settle(new)
