"""Middleware that asks the model to write down the important facts after a turn with many results, because these
results may be shortened later.

This module is pure. Place `ManyResults` before `context_engine` in an agent's list, so that `context_engine` counts the
added sentence.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from roundelay.agents.middleware import CallModel, Middleware
from roundelay.agents.models.model import AssistantMessage, ToolMessage
from roundelay.agents.options import checked
from roundelay.agents.values import TurnState


class ManyResults(Middleware):
    """Adds a sentence to the request after a turn with more than ``more_than`` results. The sentence is not part of the
    history.
    """

    @checked()
    def __init__(self, more_than: Annotated[int, Field(ge=0)] = 2) -> None:
        self._more_than = more_than

    def prepare(self, state: TurnState, step: CallModel) -> CallModel:
        count = 0
        for message in reversed(step.messages):
            if isinstance(message, AssistantMessage):
                break
            count += isinstance(message, ToolMessage)
        if count <= self._more_than:
            return step
        return step.tell(
            f"Your last turn returned {count} results. Along with your next step, write down their important facts in "
            "a few sentences, because older results may be shortened."
        )
