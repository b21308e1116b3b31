"""What agents are at now: the operation ``network.open_reactions``, in the shape of a mod. Read from the state, never from the log."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from typing import Annotated, Any

from msgspec import Meta

from .errors import Forbidden
from .frames import Seq
from .listing import take_page
from .mod import Mod, Reading, operation
from .tables import OpenReaction


class OpenReactions(Mod):
    """Not a mod of its own: an operation of the hub."""

    id = "network"

    @operation("read")
    async def open_reactions(
        self,
        reading: Reading,
        *,
        agent_id: str | None = None,
        after: Seq = 0,
        limit: Annotated[int, Meta(ge=1, le=500)] = 100,
    ) -> dict[str, Any]:
        """Reactions begun and not finished, by the seq of their beginning, above `after`: one's own; operators name anybody, or nobody for all."""
        origin = reading.origin
        if not origin.is_operator:
            if agent_id not in (None, origin.agent_id):
                raise Forbidden("The reactions of others are for operators.")
            agent_id = origin.agent_id
        state = reading.hub.state
        named: Iterable[OpenReaction] = (
            (it for _, it in state.items("reaction")) if agent_id is None else state.reactions_of(agent_id).values()
        )
        found = nsmallest(limit + 1, (it for it in named if it.seq > after), key=lambda it: it.seq)
        shown = (
            {
                "reaction": it.reaction,
                "agent_id": it.agent_id,
                "trigger": it.trigger,
                "thread_id": it.trigger_head.thread_id,
                "seq": it.seq,
                "is_cancelled": it.is_cancelled,
            }
            for it in found
        )
        reactions, has_more = take_page(shown, limit, reading.hub.limits.max_result_bytes)
        return {"reactions": reactions, "has_more": has_more}
