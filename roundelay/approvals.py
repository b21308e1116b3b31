"""What a person has to know of an agent's request for approval before deciding it: `agents.approval` makes them."""

from __future__ import annotations

from roundelay.agents.replies import read_decision
from roundelay.clean_text import clean
from roundelay.network.client import NetworkClient
from roundelay.network.messages import BaseMessage

LOOKED_THROUGH = 200
"""Messages, the newest of the request's thread, in which its decision is looked for."""


def read_request(message: BaseMessage) -> str | None:
    """The reaction that waits for this message's decision; None if it asks for none."""
    approval = (message.metadata or {}).get("approval")
    reaction = approval.get("reaction") if isinstance(approval, dict) else None
    return reaction if isinstance(reaction, str) else None


async def find_settled(client: NetworkClient, request: BaseMessage) -> str | None:
    """Why a request is not to be decided any more, to be put behind its number; None if it may be. Raises `RoundelayError`."""
    history = await client.history(request.thread_id, limit=LOOKED_THROUGH)
    for message in history.messages:  # the first decision holds
        if message.reply_to == request.seq and read_decision(message) is not None:
            return f"was decided by {clean(message.sender_id)} in #{message.seq}: {clean(message.said.split(maxsplit=1)[0])}"
    if request.reply_to is None:
        return None
    status = await client.call("network.message_status", {"seq": request.reply_to})
    for it in status["recipients"]:
        is_it = it["agent_id"] == request.sender_id and it.get("reaction") == read_request(request)
        if is_it and it["reaction_status"] != "open":
            return f"waits no more: what {clean(request.sender_id)} was at is {clean(it['reaction_status'])}"
    return None
