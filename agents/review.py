"""Reviews of the texts of a run: the answer, and the messages that tools send to the requester.

`Reviewer` calls the ``review`` hooks of middleware for the loop. A review is recorded before its result is used.
Therefore a resumed run neither calls the reviewers again nor sends a text that was blocked.
"""

from __future__ import annotations

import json
from dataclasses import replace

from .events import AnswerReviewed
from .journal import drop_largest
from .model_call import ModelCaller
from .models.model import ModelUse, Usage
from .run_context import RunContext, add_usage
from .values import Review, Reviewed

_ENVELOPE_BYTES = 2048
"""Bytes reserved in a record or message, in addition to the answer and its metadata."""


class Reviewer:
    """Calls the reviewers of one run and records their results."""

    def __init__(self, run: RunContext, models: ModelCaller) -> None:
        self._run = run
        self._models = models

    async def review_answer(self, step: Review) -> Reviewed:
        """Review the answer of a turn."""
        recorded = self._run.recorded.reviews.get(step.turn)
        return await self._review(step.answer, step.turn, recorded, can_correct=step.can_correct)

    async def review_message(self, turn: int, call: int, place: int, text: str, earlier: Reviewed | None) -> Reviewed:
        """Review a message that a tool call sends to the requester, like an answer. ``place`` is the number of the
        message in its call, from 1. ``earlier`` is the review of the same message in an earlier attempt of the call.
        """
        recorded = earlier or self._run.recorded.sent_reviews.get((turn, call, place))
        can_correct = self._run.reaction.can_correct
        return await self._review(text, turn, recorded, can_correct=can_correct, message=(call, place))

    async def _review(
        self,
        text: str,
        turn: int,
        recorded: Reviewed | None,
        *,
        can_correct: bool,
        message: tuple[int, int] | None = None,
    ) -> Reviewed:
        """Return the recorded review, or call the reviewers of this agent, of earlier agents and of outer runs."""
        if recorded is not None and (recorded.correction is not None or not recorded.altered):
            return recorded
        run = self._run
        reviewed = None
        if run.playback is not None:
            reviewed = run.playback.review(run.id, run.path, turn, message)
        if reviewed is None:
            # If an answer has already passed its review but its text was not recorded, do not ask the model to correct
            # it now.
            can_correct = can_correct and recorded is None
            used: list[ModelUse] = []
            around = self._models.make_around(turn, "-".join(map(str, ("review", *(message or ())))), used)
            guards = run.list_guards() if message is not None else run.reaction.control.guards
            reviewed = await run.reaction.agent.chain.review(around, text, can_correct=can_correct, guards=guards)
            usage = add_usage(used, Usage() if recorded is None else recorded.usage)
            reviewed = replace(reviewed, usage=usage, used=tuple(used))
            reviewed = _fit_record(reviewed, run.journal.max_body_bytes - _ENVELOPE_BYTES)
        if recorded is None:
            await run.journal.record_review(turn, reviewed, message)
        verdict = (reviewed.is_accepted, reviewed.correction, reviewed.notes, reviewed.is_blocked)
        run.emit(AnswerReviewed(run.id, turn, *verdict, None if message is None else message[0], path=run.path))
        return reviewed


def _fit_record(reviewed: Reviewed, max_bytes: int) -> Reviewed:
    """Drop the largest metadata until the record and the message fit their limits. A note names the dropped keys."""
    metadata = dict(reviewed.metadata)
    texts_size = len(json.dumps([reviewed.answer, reviewed.correction, *reviewed.notes]))
    dropped = drop_largest(metadata, max_bytes - texts_size)
    if not dropped:
        return reviewed
    note = f"too large for the message's metadata: {', '.join(dropped)}"
    return replace(reviewed, metadata=metadata, notes=(*reviewed.notes, note))
