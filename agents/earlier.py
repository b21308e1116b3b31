"""Whether a delivered message is the answer to a question of an earlier run, and nobody's message any more.

What a wait took is acknowledged, but not as durably as the record of what it was for: when hub and agent are killed
together the hub may deliver it again, to a runner that knows nothing of the wait. Nor does that know which waits a
person has stopped. The ledger tells: `runner` asks here about replies that no wait of its own expects.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from roundelay.network.client import NetworkClient
from roundelay.network.errors import InternalError, RequestError
from roundelay.network.messages import BaseMessage

from .records import Recorded
from .replies import ASK
from .retry import retry_later


async def is_answer_of_earlier_run(
    client: NetworkClient, message: BaseMessage, head: int, load: Callable[[str], Awaitable[Recorded]]
) -> bool:
    """Tell whether a reaction of an earlier run has taken this reply, or was stopped while it waited for it. ``head``
    is the ledger's when this run began, ``load`` gives what a reaction has recorded."""
    question = message.reply_to
    if question is None or question > head or message.kind != "direct":
        return False  # questions of calls, and the answers to them, are direct messages
    try:
        chain = (await retry_later(lambda: client.call("network.why", {"seq": question})))["chain"]
        asked, *came_of = chain
        is_own = asked.get("sender_id") == client.agent_id and ASK in (asked.get("metadata") or {})
        if not is_own or not came_of or "reaction" not in came_of[0]:
            return False
        recorded = await load(came_of[0]["reaction"])
    except (RequestError, InternalError, ValueError, TypeError, LookupError):
        return False  # cut by retention, written by another program, or not to be read: a message like any other
    return recorded.has_taken(message.seq) or (
        message.sender_kind != "human" and recorded.finished is not None and recorded.was_waiting_for(question)
    )
