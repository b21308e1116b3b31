"""Middleware that marks results that the person has already seen, and asks the model not to repeat them.

A tool that has already shown its result to the person, as a message or a file, returns `Output(content, {"shown":
True}, summary=...)`. The record contains the content and the summary unchanged. Only the text for the model is wrapped
in an element.
"""

from __future__ import annotations

from roundelay.agents.middleware import Middleware
from roundelay.agents.models.model import ToolCall
from roundelay.agents.values import AfterTool, ToolResult, TurnState

SHOWN = "shown"
"""Key in a result's data. The value is true if the person has already seen the result."""

_TAG = "shown_to_the_person"
_NOTE = (
    "The person has already seen this result. Do not repeat it, in part or in other words. Refer to it, or continue "
    "from it."
)


class ShownResults(Middleware):
    """Wraps the text of a tool result in an element if the tool marked the result as already shown to the person."""

    def after_tool(self, state: TurnState, call: ToolCall, result: ToolResult) -> AfterTool | None:
        if not result.ok or result.data.get(SHOWN) is not True:
            return None
        # Escape the closing tag, so that the content cannot close the element that contains it.
        content = result.content.replace(f"</{_TAG}", f"<\\/{_TAG}")
        return AfterTool(f"{_NOTE}\n<{_TAG}>\n{content}\n</{_TAG}>")
