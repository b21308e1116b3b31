"""Takes up what an agent had begun before it was stopped: its open reactions, read back from the ledger before anything
new."""

from __future__ import annotations

import logging

from roundelay.network.client import NetworkClient
from roundelay.network.errors import UnknownMessage
from roundelay.network.frames import OpenReactionInfo
from roundelay.network.messages import BaseMessage

from .journal import Journal
from .models.model import Usage
from .records import Recorded
from .replies import Replies
from .retry import retry_later
from .steps import Finish

_logger = logging.getLogger(__name__)


async def read_open_reaction(
    client: NetworkClient, opened: OpenReactionInfo, journal: Journal
) -> tuple[BaseMessage, Recorded] | None:
    """Give the message that a reaction was begun for, and what it had recorded; None, and it is ended, if these can no
    longer be read."""
    try:
        recorded = await journal.load()
        return await _find_trigger(client, opened.trigger, recorded), recorded
    except (UnknownMessage, ValueError, TypeError, LookupError) as error:
        # Written by another program under this agent's id, or no longer to be read. It must not keep the agent from
        # starting.
        _logger.error(
            "open reaction cannot be resumed",
            extra={"reaction": opened.reaction, "seq": opened.trigger, "error": type(error).__name__},
        )
        reason = "its records or its trigger can no longer be read"
        await journal.record_finished(Finish("failed", reason, None, 0, Usage()))
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
    history = await retry_later(lambda: client.history(thread_id, before=seq + 1, limit=1))
    for message in history.messages:
        if message.seq == seq:
            return message
    raise LookupError(f"message {seq} is not in {thread_id}")
