"""What may stand in for models and tools while a recorded run is replayed: set for a task and all that it starts, asked by the driver.

`Driver` asks it before each model call and each tool call. Outside of a replay there is none, and nothing is asked.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

from .models.model import Model, ModelReply, ModelRequest
from .steps import PlannedCall
from .tools import ToolResult


class StandIn(Protocol):
    """Answers in place of models and tools. ``path`` tells runs inside of a reaction apart, as in the journal."""

    async def complete(self, model: Model, request: ModelRequest, path: str) -> ModelReply:
        """Answer a request that would go to ``model``. Raises `ModelError`."""
        ...

    async def perform(self, reaction: str, path: str, turn: int, planned: PlannedCall) -> ToolResult | None:
        """Give the result of a call; None if it is to be made."""
        ...


STAND_IN: ContextVar[StandIn | None] = ContextVar("roundelay_stand_in", default=None)
