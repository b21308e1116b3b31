"""A reaction that a runner is at, and how it ends: the answer to the incoming thread, then the last record.

Used by `runner`, which begins reactions and breaks them off, and by the `react` of its subclasses. Holds nothing that must survive.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace

from roundelay.network.client import AnyMessage, Delivery, NetworkClient
from roundelay.network.errors import (
    BudgetExhausted,
    ConnectError,
    IdConflict,
    LoopStopped,
    RoundelayError,
    Superseded,
)

from .journal import Journal, Recorded, derived_id
from .models.model import Usage
from .reaction import Finish, Status
from .retry import retry_later

_logger = logging.getLogger(__name__)


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
class Ongoing:
    """A reaction that a runner is at, from taking its message out of the inbox to its end."""

    client: NetworkClient
    message: AnyMessage
    journal: Journal
    recorded: Recorded | None = None
    """What it had done before, when it is resumed."""

    delivery: Delivery | None = None
    """To ack or nack; None when it is resumed."""

    work: asyncio.Task[Finish] | None = None
    """What a person's stop cancels."""

    stopped_by: str | None = None


async def conclude(ongoing: Ongoing, finish: Finish, *, attempts: int) -> ReactionResult:
    """Send the answer, if there is one, to the incoming thread, and record the end. An answer that the hub refuses is the end's reason."""
    if finish.answer is not None:
        try:
            await _send_answer(ongoing, finish, finish.answer, attempts)
        except (ConnectError, Superseded):
            raise
        except IdConflict:
            pass  # an earlier run sent it, in words that were made differently there
        except RoundelayError as error:
            _logger.warning("answer refused", extra={"reaction": ongoing.journal.reaction, "code": error.code})
            status: Status = "stopped" if isinstance(error, LoopStopped | BudgetExhausted) else "failed"
            reason = f"the answer could not be sent ({error.code}): {error}"
            finish = replace(finish, status=status, reason=reason, answer=None)
    await ongoing.journal.record_finished(finish)
    return ReactionResult(
        ongoing.journal.reaction, finish.status, finish.reason, finish.answer, finish.turns, finish.usage
    )


async def _send_answer(ongoing: Ongoing, finish: Finish, answer: str, attempts: int) -> None:
    # The words of a failure depend on the moment, so it has an id of its own.
    key = "failure" if finish.status == "failed" else "answer"
    message_id = derived_id(ongoing.journal.reaction, finish.turns, key)
    await retry_later(lambda: ongoing.client.reply(ongoing.message, answer, message_id=message_id), attempts=attempts)
