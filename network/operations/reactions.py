"""What agents are at, what their reactions wrote down, and what these cost: the hub adds up what records say, and gives
the records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from heapq import nsmallest
from typing import Any

import msgspec
from msgspec import Raw

from roundelay.network.core.holds import is_overtaken
from roundelay.network.core.reactions import CHARGED, spent_on
from roundelay.network.core.tables import DAY_MS, MessageHead, OpenReaction, RootBudget, Row, Spent
from roundelay.network.core.visibility import may_read
from roundelay.network.errors import InternalError
from roundelay.network.frames import Seq

from .listing import ListPage, take_page
from .reading import Reading, reads, reads_as_itself, whose
from .views import PAGE, Limit, View, find_message, find_reaction, shows_cause


async def open_reactions(
    reading: Reading,
    *,
    agent_id: str | None = None,
    after: Seq = 0,
    limit: Limit = 100,
) -> dict[str, Any]:
    """Reactions begun and not finished, by the seq of their beginning, above `after`: one's own; operators name
    anybody, or nobody for all."""
    agent_id = whose(reading.origin, agent_id, "The reactions of others are for operators.")
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


async def approvals(reading: Reading, *, after: Seq = 0, limit: Limit = 100) -> dict[str, Any]:
    """Calls that wait for a person's decision, by the seq of the message that asks for it, above `after`: those whose
    message the caller may read. `may_decide` says whether a reply of the caller's would decide."""
    requests = list_requests(reading, after)
    page = ListPage(limit, reading.hub.limits.max_result_bytes)
    for start in range(0, len(requests), PAGE):
        heads = await reading.hub.ledger.heads({seq for seq, _ in requests[start : start + PAGE]})
        for seq, told in requests[start : start + PAGE]:
            head = heads.get(seq)
            if head is None or head.sender_id != told["agent_id"] or not reads(reading, head):
                continue
            row = (await reading.hub.ledger.messages([seq])).get(seq)
            if row is None or row.is_damaged:
                continue
            may_decide = reading.origin.kind == "human" and reads_as_itself(reading, head)
            if not page.take({**told, "may_decide": may_decide, "message": Raw(row.data)}):
                return {"approvals": page.entries, "has_more": True}
    return {"approvals": page.entries, "has_more": False}


def list_requests(reading: Reading, after: int) -> list[tuple[int, dict[str, Any]]]:
    """The messages above ``after`` that open reactions say they wait on for a person's decision, by seq, with what is
    told of each. What else the records of a reaction claim is never read here: an agent may write any number of
    them."""
    claimed: dict[tuple[int, str], dict[str, Any]] = {}
    for _, opened in reading.hub.state.items("reaction"):
        waits = {place: it for place, it in opened.awaits.items() if it.request is not None and it.request > after}
        if not waits or opened.is_cancelled or is_overtaken(reading.hub.state, opened):
            continue  # no decision would go on with it
        if not reads(reading, opened.trigger_head):
            continue
        for place, wait in waits.items():
            claimed[wait.request, opened.agent_id] = {
                "seq": wait.request,
                "agent_id": opened.agent_id,
                "reaction": opened.reaction,
                "call": place,
                "trigger": opened.trigger,
                "thread_id": opened.trigger_head.thread_id,
                "until": wait.until,
            }
    return [(seq, claimed[seq, agent_id]) for seq, agent_id in sorted(claimed)]


async def records(
    reading: Reading, *, reaction: str, agent_id: str | None = None, after: Seq = 0, limit: Limit = 500
) -> dict[str, Any]:
    """The turn records of a reaction above `after`, oldest first; its agent's and operators' to read, who may name the
    agent."""
    origin, room = reading.origin, reading.hub.limits.max_result_bytes
    page = ListPage(limit, room)
    is_at_end = False
    while not (is_at_end or page.has_more):  # others may write under the same id: it ends by what they did not write
        asked = limit + 1 - len(page.entries)
        rows, is_more = await reading.hub.ledger.reaction(reaction, after, asked, max_bytes=room)
        is_at_end = not is_more
        for row in rows:
            after = row.seq
            if row.is_damaged and not origin.is_operator:
                # an agent that goes on from a part of its journal repeats what it has done
                raise InternalError(
                    f"The record {row.seq} of the reaction {reaction!r} is damaged in the hub's ledger, so what the "
                    "reaction had done is not known; tell the hub's operator."
                )
            is_own = origin.is_operator or row.actor == origin.agent_id
            if row.is_damaged or not is_own or agent_id not in (None, row.actor):
                continue
            if not page.take(_describe_record(row)):
                break
    return {"records": page.entries, "has_more": page.has_more}


def _describe_record(row: Row) -> dict[str, Any]:
    return {
        "seq": row.seq,
        "agent_id": row.actor,
        "record_id": row.key[2:],
        "kind": row.label,
        "body": Raw(row.data),
        "at": row.at,
    }


async def spent(reading: Reading, *, seq: Seq, reaction: str | None = None) -> dict[str, Any]:
    """Tokens that models used, by model: in the conversation that a message belongs to, in an open reaction of the
    caller's, and by the caller today."""
    head = await find_message(reading, seq, "seq")
    state, agent_id = reading.hub.state, reading.origin.agent_id
    budget: RootBudget | None = await reading.hub.ledger.lookup_cold("root", str(head.root))
    opened: OpenReaction | None = state.get("reaction", f"{agent_id}/{reaction}")
    day = state.stamp // DAY_MS
    return {
        "root": head.root,
        "resumed": budget.resumed if budget is not None else 0,
        "of_root": _write(budget.spent if budget is not None else {}),
        "by_agent": _write_claims(reading, head, budget.claims if budget is not None else {}),
        "of_reaction": _write(opened.spent if opened is not None else {}),
        "of_day": _write(spent_on(day, state.get("day", agent_id))),
        "day": datetime.fromtimestamp(day * DAY_MS / 1000, UTC).date().isoformat(),
    }


async def usage(
    reading: Reading,
    *,
    agent_id: str | None = None,
    after: Seq = 0,
    limit: Limit = 500,
) -> dict[str, Any]:
    """What an agent's records above `after` say of its model calls, ascending: one's own; operators name anybody.

    `next_agent` is who comes next by id, for operators who look at all.
    """
    origin, hub = reading.origin, reading.hub
    agent_id = whose(origin, agent_id, "What other agents used is for operators.") or _next_agent(reading, "")
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
    calls = ListPage(limit, hub.limits.max_result_bytes // 2)  # the other half is for the reactions
    reactions: set[str] = set()
    for row in rows:
        if not calls.take(describe_call(row, msgspec.json.decode(row.data))):
            break
        reactions.add(row.stream)
    has_more = until is not None or calls.has_more
    return {
        "agent_id": agent_id,
        "calls": calls.entries,
        "reactions": await _describe_reactions(reading, agent_id, reactions),
        "has_more": has_more,
        "next_agent": _next_agent(reading, agent_id) if origin.is_operator and not has_more else None,
    }


def _write_claims(reading: Reading, head: MessageHead, claims: Mapping[str, Mapping[str, Spent]]) -> dict[str, Any]:
    """Each agent's sums. Who reads the message that is asked about has a name; that others are at work is not told of
    them."""
    state, origin = reading.hub.state, reading.origin
    sums: dict[str, Any] = {}
    for number, (agent_id, spent) in enumerate(claims.items(), 1):
        is_named = origin.is_operator or agent_id == origin.agent_id or may_read(state, agent_id, head)
        sums[agent_id if is_named else f"~{number}"] = _write(spent)
    return sums


def _write(spent: Mapping[str, Spent]) -> dict[str, Any]:
    return {model: _write_one(used) for model, used in spent.items()}


def _write_one(used: Spent) -> dict[str, int]:
    return {name: getattr(used, name) for name in Spent.__struct_fields__}


def _next_agent(reading: Reading, after: str) -> str | None:
    """The next id of an agent, removed ones included."""
    ids = (key for key, it in reading.hub.state.items("participant") if it.kind == "agent" and key > after)
    return min(ids, default=None)


def describe_call(row: Row, body: object) -> dict[str, Any]:
    """A record without its texts: who, when, which turn, model, tokens, and the names of the tools that were called."""
    body = body if isinstance(body, dict) else {}
    reply = body.get("reply")
    reply = reply if isinstance(reply, dict) else {}
    calls = reply.get("tool_calls")
    names = [it.get("name") for it in calls if isinstance(it, dict)] if isinstance(calls, list) else []
    used = body.get("used")
    usage = reply.get("usage") if row.label == "model_reply" else body.get("usage")
    return {
        "seq": row.seq,
        "at": row.at,
        "kind": row.label,
        "reaction": row.stream,
        "path": _text(body.get("path")),
        "turn": body.get("turn"),
        "agent": _text(body.get("agent")),
        "model": _text(reply.get("model")),
        "usage": usage if isinstance(usage, dict) else {},
        "tools": [_text(name) for name in names],
        "used": [
            {"model": _text(it.get("model")), "usage": it["usage"]}
            for it in (used if isinstance(used, list) else ())
            if isinstance(it, dict) and isinstance(it.get("usage"), dict)
        ],
    }


def _text(value: object) -> str:
    return value[:128] if isinstance(value, str) else ""


async def _describe_reactions(reading: Reading, agent_id: str, reactions: set[str]) -> dict[str, Any]:
    """Where each reaction of an agent belongs: its trigger, the trigger's thread and root, and the reaction that sent
    the trigger, as far as the log still holds them, by the agent's own records (anybody may write under any id), and as
    far as the caller may read the trigger, and what that follows from."""
    triggers: dict[str, int] = {}
    for reaction in sorted(reactions):
        page = await reading.hub.ledger.reaction(reaction, 0, 1, actor=agent_id)
        row = page.rows[0] if page.rows else None
        body = msgspec.json.decode(row.data) if row is not None and row.label == "started" else None
        trigger = body.get("trigger") if isinstance(body, dict) else None
        if isinstance(trigger, int):
            triggers[reaction] = trigger
    heads = await reading.hub.ledger.heads(set(triggers.values()))
    shown: dict[str, Any] = {}
    for reaction, seq in triggers.items():
        head = heads.get(seq)
        if head is not None and reads(reading, head):
            shown[reaction] = {"trigger": seq, "thread_id": head.thread_id, "root": head.root}
            sent_in = await find_reaction(reading, head) if await shows_cause(View(reading), reading, head) else None
            if sent_in is not None:
                shown[reaction]["sent_in"] = sent_in["reaction"]
    return shown
