"""Many results: after a turn with more than some, the model is told to take down what of them matters, as older ones
may be shortened.

Pure. It stands before `context_engine` in an agent's list, so that what it adds is counted.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from roundelay.agents.middleware import CallModel, Middleware
from roundelay.agents.models.model import AssistantMessage, ToolMessage
from roundelay.agents.options import checked
from roundelay.agents.values import TurnState


class ManyResults(Middleware):
    """Adds the sentence to the request that follows a turn with more than ``more_than`` results; it is not kept in the
    history."""

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
            f"Your last turn brought {count} results. Beside what you do next, write down in a few sentences what of "
            "them matters: older results may be shortened."
        )
