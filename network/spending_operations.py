"""The operations ``network.spent`` and ``network.usage``: the sums of `spending`, and the calls that they are made of. In the shape of a mod."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from .errors import Forbidden
from .frames import Seq
from .ledger import Row
from .mod import Mod, Reading, operation
from .spending import CHARGED, spent_on
from .tables import DAY_MS, OpenReaction, RootBudget, Spent
from .window import find_message, reads


class Spending(Mod):
    """Not a mod of its own: operations of the hub."""

    id = "network"

    @operation("read")
    async def spent(self, reading: Reading, *, seq: Seq, reaction: str | None = None) -> dict[str, Any]:
        """Tokens that models used, by model: in the conversation that a message belongs to, in an open reaction of the caller's, and by the
        caller today."""
        head = await find_message(reading, seq, "seq")
        state, agent_id = reading.hub.state, reading.origin.agent_id
        budget: RootBudget | None = await reading.hub.ledger.lookup_cold("root", str(head.root))
        opened: OpenReaction | None = state.get("reaction", f"{agent_id}/{reaction}")
        day = state.stamp // DAY_MS
        return {
            "root": head.root,
            "resumed": budget.resumed if budget is not None else 0,
            "of_root": _write(budget.spent if budget is not None else {}),
            "of_reaction": _write(opened.spent if opened is not None else {}),
            "of_day": _write(spent_on(day, state.get("day", agent_id))),
            "day": datetime.fromtimestamp(day * DAY_MS / 1000, UTC).date().isoformat(),
        }

    @operation("read")
    async def usage(
        self,
        reading: Reading,
        *,
        agent_id: str | None = None,
        after: Seq = 0,
        limit: Annotated[int, Meta(ge=1, le=500)] = 500,
    ) -> dict[str, Any]:
        """What an agent's records above `after` say of its model calls, ascending: one's own; operators name anybody.

        `next_agent` is who comes next by id, for operators who look at all.
        """
        origin, hub = reading.origin, reading.hub
        if agent_id is None:
            agent_id = _next_agent(reading, "") if origin.is_operator else origin.agent_id
        if agent_id != origin.agent_id and not origin.is_operator:
            raise Forbidden("What other agents used is for operators.")
        if agent_id is None:
            return {"agent_id": None, "calls": [], "reactions": {}, "has_more": False, "next_agent": None}
        rows: list[Row] = []
        until: int | None = None  # beyond the end of a page of one kind nothing is known of that kind
        for kind in sorted(CHARGED):
            max_bytes = hub.limits.max_result_bytes // len(CHARGED)
            page = await hub.ledger.records(agent_id, kind, after, limit, max_bytes=max_bytes)
            rows += page.rows
            if page.has_more:
                last = page.rows[-1].seq
                until = last if until is None else min(until, last)
        rows = sorted(
            (row for row in rows if (until is None or row.seq <= until) and not row.is_damaged), key=lambda row: row.seq
        )
        has_more = until is not None or len(rows) > limit
        calls: list[Any] = []
        room = hub.limits.max_result_bytes // 2  # the other half is for the reactions
        for row in rows[:limit]:
            calls.append(_describe_call(row))
            room -= len(msgspec.json.encode(calls[-1]))
            if room < 0 and len(calls) < len(rows):
                has_more = True
                break
        return {
            "agent_id": agent_id,
            "calls": calls,
            "reactions": await _describe_reactions(reading, agent_id, {call["reaction"] for call in calls}),
            "has_more": has_more,
            "next_agent": _next_agent(reading, agent_id) if origin.is_operator and not has_more else None,
        }


def _write(spent: Mapping[str, Spent]) -> dict[str, Any]:
    return {model: _write_one(used) for model, used in spent.items()}


def _write_one(used: Spent) -> dict[str, int]:
    return {name: getattr(used, name) for name in Spent.__struct_fields__}


def _next_agent(reading: Reading, after: str) -> str | None:
    """The next id of an agent, removed ones included."""
    ids = (key for key, it in reading.hub.state.items("participant") if it.kind == "agent" and key > after)
    return min(ids, default=None)


def _describe_call(row: Row) -> dict[str, Any]:
    """A record without its texts: who, when, which turn, model, tokens, and the names of the tools that were called."""
    body = msgspec.json.decode(row.data)
    body = body if isinstance(body, dict) else {}
    reply = body.get("reply")
    reply = reply if isinstance(reply, dict) else {}
    calls = reply.get("tool_calls")
    names = [it.get("name") for it in calls if isinstance(it, dict)] if isinstance(calls, list) else []
    usage = reply.get("usage") if row.label == "model_reply" else body.get("usage")
    return {
        "seq": row.seq, "at": row.at, "kind": row.label, "reaction": row.stream, "path": _text(body.get("path")),
        "turn": body.get("turn"), "agent": _text(body.get("agent")), "model": _text(reply.get("model")),
        "usage": usage if isinstance(usage, dict) else {}, "tools": [_text(name) for name in names],
    }  # fmt: skip


def _text(value: object) -> str:
    return value[:128] if isinstance(value, str) else ""


async def _describe_reactions(reading: Reading, agent_id: str, reactions: set[str]) -> dict[str, Any]:
    """Where each reaction of an agent belongs: its trigger, the trigger's thread and root, as far as the log still holds them, by the agent's own
    records (anybody may write under any id), and as far as the caller may read the trigger."""
    triggers: dict[str, int] = {}
    for reaction in sorted(reactions):
        page = await reading.hub.ledger.reaction(reaction, 0, 1, actor=agent_id)
        row = page.rows[0] if page.rows else None
        body = msgspec.json.decode(row.data) if row is not None and row.label == "started" else None
        trigger = body.get("trigger") if isinstance(body, dict) else None
        if isinstance(trigger, int):
            triggers[reaction] = trigger
    heads = await reading.hub.ledger.heads(set(triggers.values()))
    return {
        reaction: {"trigger": seq, "thread_id": heads[seq].thread_id, "root": heads[seq].root}
        for reaction, seq in triggers.items()
        if reads(reading, heads.get(seq))
    }
