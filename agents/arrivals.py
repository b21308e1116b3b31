"""Messages that arrive in a thread while a reaction runs there, when the model is to read them in it
(``on_new_message="inject"``).

Stands between the inbox, where they wait, and the driver, which tells them to the model before its next turn.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import accumulate

from roundelay.network.client import NetworkClient
from roundelay.network.errors import IdConflict
from roundelay.network.messages import BaseMessage

from .ids import reaction_id
from .inbox import Inbox
from .journal import Journal
from .models.model import Usage
from .ongoing import Ongoing
from .prompt import render_new_messages
from .records import Started
from .steps import Finish, NewMessages


class ThreadArrivals:
    """What waits behind one reaction. ``settle`` says of one message that it was read."""

    def __init__(
        self,
        ongoing: Ongoing,
        inbox: Inbox,
        *,
        should_answer: Callable[[BaseMessage], bool],
        settle: Callable[[int, str, str], Awaitable[None]],
    ) -> None:
        self._ongoing = ongoing
        self._inbox = inbox
        self._should_answer = should_answer
        self._settle = settle

    def take(self) -> NewMessages | None:
        """Take what has arrived; None for nothing."""
        waiting = self._inbox.withdraw(self._ongoing.message)
        messages = waiting[: self._count_fitting(waiting)]
        self._inbox.put_back(waiting[len(messages) :])
        if not messages:
            return None
        self._ongoing.taken = {message.seq: message for message in messages}
        answers = any(self._should_answer(message) for message in messages)
        return NewMessages(render_new_messages(messages), tuple(self._ongoing.taken), answers)

    def _count_fitting(self, messages: Sequence[BaseMessage]) -> int:
        """How many of them one record holds; the others wait for the next turn, or get a reaction of their own."""
        sizes = (len(json.dumps(render_new_messages([message]))) for message in messages)
        limit = self._ongoing.journal.max_body_bytes // 2
        return sum(1 for total in accumulate(sizes) if total <= limit)

    async def settle(self, new: NewMessages) -> None:
        """They are recorded as read: they get no reaction of their own."""
        for seq in new.seqs:
            await self._settle(seq, self._ongoing.message.thread_id, self._ongoing.journal.reaction)
            del self._ongoing.taken[seq]


async def record_as_read(
    client: NetworkClient, make_journal: Callable[[NetworkClient, str], Journal], seq: int, thread_id: str, reader: str
) -> None:
    """Give a message that was read in the reaction ``reader`` one of its own that says so, for the hub and for a
    restarted agent."""
    journal = make_journal(client, reaction_id(client.agent_id, seq, client.welcome.network.epoch))
    await journal.record_started(Started(trigger=seq, thread_id=thread_id, as_of=seq, manifest=[seq], config_hash=""))
    with suppress(IdConflict):  # the other was broken off in the middle of this, and the message got its own after all
        await journal.record_finished(Finish("finished", f"read in reaction {reader}", None, 0, Usage()))
