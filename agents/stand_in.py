"""What stands in for models, tools and reviewers while a recorded run is replayed: set for a task and all that it
starts.

`model_calls`, `tool_calls` and `driver` ask it in place of each. It is no middleware: it has to reach what middleware
itself asks of a model (`Around.complete`), to take the place of reviewers, and to hold in runners that are made by
others' code. Outside of a replay there is none.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

from .models.model import Model, ModelReply, ModelRequest
from .steps import ModelFailed, PlannedCall, Reviewed
from .tools import ToolResult


class StandIn(Protocol):
    """Answers in place of models, tools and reviewers. ``path`` tells runs inside of a reaction apart, as in the
    journal."""

    async def complete(self, model: Model, request: ModelRequest, path: str, *, is_own: bool) -> ModelReply:
        """Answer a request that would go to ``model``; not the turn's own one but one of middleware's, if not
        ``is_own``. Raises `ModelError`."""
        ...

    def settle(
        self, reaction: str, path: str, turn: int, outcome: ModelReply | ModelFailed
    ) -> ModelReply | ModelFailed:
        """Give what came of a turn's request then, whatever models and middleware make of it now."""
        ...

    async def perform(self, reaction: str, path: str, turn: int, planned: PlannedCall) -> ToolResult | None:
        """Give the result of a call; None if it is to be made."""
        ...

    def review(self, reaction: str, path: str, turn: int) -> Reviewed | None:
        """Give what reviewers made of an answer; None if they are to be asked."""
        ...

    def reads_arrivals(self, reaction: str) -> bool:
        """Tell whether a reaction reads now what has arrived in its thread meanwhile."""
        ...


STAND_IN: ContextVar[StandIn | None] = ContextVar("roundelay_stand_in", default=None)
