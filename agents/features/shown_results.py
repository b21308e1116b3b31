"""Results that the person has seen already: the model is told so, lest it says them again.

A tool that showed its result itself (it sent a message, or a file) returns `Output(content, {"shown": True},
summary=...)`. The record keeps the content and the summary as they are; only what the model reads is wrapped.
"""

from __future__ import annotations

from roundelay.agents.middleware import Middleware
from roundelay.agents.models.model import ToolCall
from roundelay.agents.values import AfterTool, ToolResult, TurnState

SHOWN = "shown"
"""In a result's data: the person has it."""

_TAG = "shown_to_the_person"
_NOTE = (
    "The person has this result already. Do not give it again, in part or in other words; refer to it, or go on "
    "from it."
)


class ShownResults(Middleware):
    """Wraps the results that are marked as shown."""

    def after_tool(self, state: TurnState, call: ToolCall, result: ToolResult) -> AfterTool | None:
        if not result.ok or result.data.get(SHOWN) is not True:
            return None
        content = result.content.replace(f"</{_TAG}", f"<\\/{_TAG}")  # it must not end its own frame
        return AfterTool(f"{_NOTE}\n<{_TAG}>\n{content}\n</{_TAG}>")
