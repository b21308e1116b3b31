"""Tools by which an agent looks back: why it got its message, and what was said before. For the ``tools`` of an agent
that needs them.

They read what the reaction's prompt may hold and nothing else (`ToolClient`): a model that is talked into looking finds
no more than it was shown.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from roundelay.network.messages import BaseMessage, message_from_wire

from .text import cut
from .tools import ToolContext, tool

MAX_MESSAGE_CHARS = 1000


@tool(idempotent=True)
async def why(context: ToolContext) -> str:
    """Tell what the incoming message follows from: the messages before it, back to the one that began it all."""
    value = await context.client.call("network.why", {"seq": context.trigger.seq})
    lines = [_describe(entry) for entry in value["chain"] if "message_id" in entry]
    return "\n".join([f"The incoming message: {lines[0]}", *(f"It followed from: {line}" for line in lines[1:])])


@tool(name="read_history", idempotent=True)
async def read_history(
    context: ToolContext,
    thread_id: Annotated[str, Field(description="The thread, as the conversation names it")],
    limit: Annotated[int, Field(ge=1, le=100, description="How many messages, the newest of them")] = 20,
) -> str:
    """Read earlier messages of a thread, oldest first, up to the incoming message."""
    history = await context.client.history(thread_id, limit=limit)
    earlier = "(there are earlier ones)\n" if history.has_more else ""
    return earlier + "\n".join(map(_write, history.messages)) or "Nothing was said there."


def _describe(entry: dict[str, Any]) -> str:
    return _write(message_from_wire(entry))


def _write(message: BaseMessage) -> str:
    return f"{message.sender_id} to {message.to.removeprefix('agent:')}: {cut(message.text, MAX_MESSAGE_CHARS)}"
