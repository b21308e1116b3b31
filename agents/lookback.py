"""Tools with which an agent reads the reason for its trigger, and earlier messages. List them in the ``tools`` of an
agent; `features.memory` adds the tools `read_history` and `search_history`.

These tools read only messages that the reaction's prompt may contain (`ToolClient`). If an attacker persuades the model
to search, the model therefore finds nothing that it may not see anyway. Each message is rendered as a separate element
with its ``seq``, so that text in one message cannot look like another message.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from roundelay.network.elements import render_element
from roundelay.network.messages import BaseMessage, message_from_wire
from roundelay.network.text import cut

from .tools import ToolContext, tool

MAX_MESSAGE_CHARS = 1000


@tool(read_only=True)
async def why(context: ToolContext) -> str:
    """Show the messages that led to the incoming message, back to the first one."""
    value = await context.client.call("network.why", {"seq": context.trigger.seq})
    incoming, *before = [_write(message_from_wire(it)) for it in value["chain"] if "message_id" in it]
    return "\n".join(["The incoming message:", incoming, *(["It followed from:", *before] if before else [])])


@tool(read_only=True)
async def read_history(
    context: ToolContext,
    thread_id: Annotated[str, Field(description="The thread, as the conversation names it")],
    limit: Annotated[int, Field(ge=1, le=100, description="How many messages, the newest of them")] = 20,
    before: Annotated[int, Field(ge=0, description="Only messages before the one of this number; 0 for all")] = 0,
) -> str:
    """Read earlier messages of a thread, oldest first, up to the incoming message."""
    history = await context.client.history(thread_id, limit=limit, before=before or None)
    lines = [_write(message) for message in history.messages]
    if history.has_more and history.messages:
        lines.insert(0, f"There are earlier ones: before={history.messages[0].seq}")
    return "\n".join(lines) or "Nothing was said there."


@tool(read_only=True)
async def search_history(
    context: ToolContext,
    query: Annotated[
        str, Field(description="Words that all stand in the message; invoi* stands for all that begin so")
    ],
    thread_id: Annotated[str, Field(description="Only in this thread; empty for all")] = "",
    limit: Annotated[int, Field(ge=1, le=50, description="How many messages, the newest of them")] = 10,
    before: Annotated[int, Field(ge=0, description="Only messages before the one of this number; 0 for all")] = 0,
) -> str:
    """Find earlier messages by the words in them. Old messages are included."""
    args = {"query": query, "limit": limit, "thread_id": thread_id or None, "before": before or None}
    page = await context.client.call("network.search", {k: value for k, value in args.items() if value is not None})
    messages = [message_from_wire(it) for it in page["messages"]]
    lines = [_write(message, thread=message.thread_id) for message in messages]
    if page["has_more"] and messages:
        lines.insert(0, f"There may be earlier ones: before={messages[0].seq}")
    return "\n".join(lines) or "Nothing was found. Fewer words, or others, may find it."


def _write(message: BaseMessage, **more: object) -> str:
    places = {"number": message.seq, "sender": message.sender_id, "to": message.to.removeprefix("agent:"), **more}
    return render_element("message", cut(message.text, MAX_MESSAGE_CHARS), **places)
