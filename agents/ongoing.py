"""A reaction that a runner is at, and how it ends: the answer to the incoming thread, then the last record.

Used by `runner`, which begins reactions and breaks them off, and by the `react` of its subclasses. Holds nothing that
must survive.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from roundelay.network.client import AnyMessage, Delivery, NetworkClient
from roundelay.network.errors import (
    BudgetExhausted,
    ConnectError,
    IdConflict,
    LoopStopped,
    RoundelayError,
    Superseded,
)
from roundelay.network.messages import BaseMessage

from .agent import KEEPER
from .events import Finished, OnEvent
from .ids import derived_id
from .journal import Journal
from .models.model import Usage
from .reaction import Reaction
from .records import Recorded
from .replies import DECLINED
from .retry import retry_later
from .steps import Finish, State, Status
from .text import replace_surrogates

_logger = logging.getLogger(__name__)

MAX_REASON_CHARS = 500


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

    reaction: Reaction | None = None
    """The loop, once it has begun: how far it has come."""

    taken: dict[int, BaseMessage] = field(default_factory=dict)
    """Messages that were taken out of the inbox to be read in it, and are not settled yet."""

    expected: Sequence[int] = ()
    """Questions of it, put before a restart: a reply to one is its own, as long as it runs."""

    is_asked: bool = False
    """Whether its message is a question of `ask` to this agent."""

    is_answered: bool = False
    """Whether its answer is in the thread."""


async def conclude(ongoing: Ongoing, finish: Finish) -> ReactionResult:
    """Send the answer, if there is one, to the incoming thread, and record the end. An answer that the hub refuses is
    the end's reason.

    A busy hub is waited for without bound. A reaction has one answer: once it is sent, no other one is.
    """
    if finish.answer is not None and not ongoing.is_answered:
        try:
            await _send_answer(ongoing, finish, finish.answer)
            ongoing.is_answered = True
        except (ConnectError, Superseded):
            raise
        except IdConflict:
            ongoing.is_answered = True  # an earlier run sent it, in words that were made differently there
        except RoundelayError as error:
            _logger.warning("answer refused", extra={"reaction": ongoing.journal.reaction, "code": error.code})
            status: Status = "stopped" if isinstance(error, LoopStopped | BudgetExhausted) else "failed"
            reason = f"the answer could not be sent ({error.code}): {error}"
            finish = replace(finish, status=status, reason=reason, answer=None)
    elif ongoing.is_asked and not (
        ongoing.is_answered or (ongoing.reaction is not None and ongoing.reaction.has_spoken)
    ):
        await _decline(ongoing, finish)
    await ongoing.journal.record_finished(finish)
    return ReactionResult(
        ongoing.journal.reaction, finish.status, finish.reason, finish.answer, finish.turns, finish.usage
    )


async def give_up(ongoing: Ongoing, error: BaseException, *, is_told: bool, tell: OnEvent) -> bool:
    """Hand a message back whose reaction did not begin; end one that did, which ``tell`` is told. ``is_told``: so is
    who waits. False when it will come again."""
    reason = f"{type(error).__name__}: {error}"
    try:
        if not ongoing.journal.is_started:
            if ongoing.delivery is not None:
                # Beyond a quota it comes again when that is counted anew, rather than five times within seconds.
                later_ms = error.retry_after_ms if isinstance(error, BudgetExhausted) else None
                await ongoing.delivery.nack(replace_surrogates(reason[:MAX_REASON_CHARS]), retry_after_ms=later_ms)
            return False
        is_spent = isinstance(error, BudgetExhausted)  # of the hub's: whoever waits may be told of it
        status: Status = "stopped" if is_spent else "failed"
        told = (
            f"I have to stop here. {error}" if is_spent else "I could not answer: an error on my side. My log has it."
        )
        answer = told if is_told else None
        done = ongoing.reaction
        turns, usage, calls = (done.turn, done.usage, done.tool_calls) if done is not None else (0, Usage(), 0)
        if done is None or done.state is not State.FINISHED:  # else it was told
            tell(Finished(ongoing.journal.reaction, status, reason, answer, turns, usage, tool_calls=calls))
        await conclude(ongoing, Finish(status, reason, answer, turns, usage, calls))
    except (ConnectError, Superseded):
        raise
    except RoundelayError as refused:
        _logger.warning(
            "failed reaction stays open", extra={"reaction": ongoing.journal.reaction, "code": refused.code}
        )
    except Exception:  # of middleware that decides on the records: the other threads go on
        _logger.exception("failed reaction stays open", extra={"reaction": ongoing.journal.reaction})
    return True


async def _send_answer(ongoing: Ongoing, finish: Finish, answer: str) -> None:
    message_id = derived_id(ongoing.journal.reaction, "", 0, "answer")
    metadata = {**finish.metadata, **({KEEPER: finish.keeper} if finish.keeper is not None else {})} or None
    await retry_later(lambda: ongoing.client.reply(ongoing.message, answer, message_id=message_id, metadata=metadata))


async def _decline(ongoing: Ongoing, finish: Finish) -> None:
    """Tell who waits for an answer that there is none."""
    text = (finish.reason if finish.status == "finished" else "") or "there is no answer"
    message_id = derived_id(ongoing.journal.reaction, "", 0, "answer")
    try:
        await retry_later(
            lambda: ongoing.client.reply(ongoing.message, text, message_id=message_id, metadata={DECLINED: True})
        )
    except (ConnectError, Superseded):
        raise
    except RoundelayError as error:  # sent by an earlier run, or refused: whoever asked has a timeout
        _logger.info("declined in vain", extra={"reaction": ongoing.journal.reaction, "code": error.code})
