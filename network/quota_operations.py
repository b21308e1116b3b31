"""Who uses how much of its quota: the operation ``network.quotas``, in the shape of a mod. Read from the state, never from the log."""

from __future__ import annotations

import heapq
from typing import Annotated, Any

from msgspec import Meta

from .errors import Forbidden, UnknownRecipient
from .mod import Mod, Reading, operation
from .quotas import Quotas, stored_today
from .state import State
from .tables import DAY_MS


class QuotaOperations(Mod):
    """Not a mod of its own: an operation of the hub."""

    id = "network"

    @operation("read")
    async def quotas(
        self, reading: Reading, *, agent_id: str | None = None, limit: Annotated[int, Meta(ge=1, le=500)] = 20
    ) -> dict[str, Any]:
        """What participants have stored today and may store, the fullest quota first: one's own; operators name anybody, or nobody for all."""
        origin, hub = reading.origin, reading.hub
        if not origin.is_operator:
            if agent_id not in (None, origin.agent_id):
                raise Forbidden("The quotas of others are for operators.")
            agent_id = origin.agent_id
        if agent_id is not None and hub.state.participant(agent_id) is None:
            raise UnknownRecipient(f"Nobody is registered as {agent_id!r}.")
        names = [agent_id] if agent_id is not None else _who_stored(hub.state)
        shares = [(_used(hub.state, hub.quotas, name), name) for name in names]
        fullest = heapq.nsmallest(limit, ((-used, name) for used, name in shares if used > 0 or agent_id is not None))
        found = [{**_describe(hub.state, hub.quotas, name), "used": round(-used, 4)} for used, name in fullest]
        return {"quotas": found, "next_day_at": (hub.state.stamp // DAY_MS + 1) * DAY_MS}


def count_near(state: State) -> int:
    """How many participants have stored nearly all that they may today, or all of it."""
    day = state.stamp // DAY_MS
    return sum(stored.day == day for stored in state.near_quota().values())


def _used(state: State, quotas: Quotas, agent_id: str) -> float:
    """The share that is used of the quota of which the least is left."""
    allowed = quotas.of(agent_id)
    size, messages = stored_today(state, agent_id)
    counts = (
        (size, allowed.bytes_per_day),
        (messages, allowed.messages_per_day),
        (len(state.channels_by(agent_id)), allowed.max_created_channels),
    )
    return max(count / most if most else float(count > 0) for count, most in counts)


def _describe(state: State, quotas: Quotas, agent_id: str) -> dict[str, Any]:
    size, messages = stored_today(state, agent_id)
    created = len(state.channels_by(agent_id))
    return {"agent_id": agent_id, "bytes": size, "messages": messages, "channels": created, **quotas.describe(agent_id)}


def _who_stored(state: State) -> list[str]:
    """Participants of whom anything is known to be stored."""
    names = {name for table in ("bucket", "stored") for name, _ in state.items(table)}
    names.update(channel.created_by for _, channel in state.items("channel"))
    return [name for name in names if state.participant(name) is not None]
