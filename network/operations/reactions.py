"""Operations about reactions: open reactions, their records, their requests for approval, and the tokens that they
used.

The hub returns the records of agents, and adds up the token counts in them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from heapq import nsmallest
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Raw

from roundelay.network.core.call_progress import MAX_REQUESTS
from roundelay.network.core.change import ChangeSet
from roundelay.network.core.quiet import open_delivery
from roundelay.network.core.reserved_ids import NETWORK
from roundelay.network.core.rows import MessageHead, Row
from roundelay.network.core.sending import mod_message
from roundelay.network.core.state import State
from roundelay.network.core.tables import CallWait, ConversationBudget, OpenReaction, TokenUsage
from roundelay.network.core.takeovers import is_blocked_by_takeover
from roundelay.network.core.usage import USAGE_KINDS, usage_on
from roundelay.network.core.visibility import may_read
from roundelay.network.errors import Forbidden, InternalError, InvalidArguments, UnknownMessage
from roundelay.network.frames import Seq
from roundelay.network.units import DAY_MS

from .paging import ListPage, take_page
from .reading import Reading, UsedTokens, reads, reads_as_itself, resolve_owner
from .views import PAGE, Limit, View, find_message, find_reaction, shows_cause


async def open_reactions(
    reading: Reading,
    *,
    agent_id: str | None = None,
    after: Seq = 0,
    limit: Limit = 100,
) -> dict[str, Any]:
    """Reactions that have started and not finished, by the seq of their start, above `after`. Callers see their own
    reactions. Operators name an agent, or nobody to see all."""
    agent_id = resolve_owner(reading.origin, agent_id, "The reactions of others are for operators.")
    state = reading.hub.state
    named: Iterable[OpenReaction] = (
        (reaction for _, reaction in state.items("reaction"))
        if agent_id is None
        else state.reactions_of(agent_id).values()
    )
    # Select the oldest reactions without sorting all of them, because an operator may ask for the open reactions of the
    # whole network.
    oldest = nsmallest(
        limit + 1, (reaction for reaction in named if reaction.seq > after), key=lambda reaction: reaction.seq
    )
    shown = (
        {
            "reaction": reaction.reaction,
            "agent_id": reaction.agent_id,
            "trigger": reaction.trigger,
            "thread_id": reaction.trigger_head.thread_id,
            "seq": reaction.seq,
            "is_cancelled": reaction.is_cancelled,
        }
        for reaction in oldest
    )
    reactions, has_more = take_page(shown, limit, reading.hub.limits.max_result_bytes)
    return {"reactions": reactions, "has_more": has_more}


async def approvals(reading: Reading, *, after: Seq = 0, limit: Limit = 100) -> dict[str, Any]:
    """Calls that wait for a person's decision, if the caller may read the message that asks for it. Sorted by the seq
    of that message, above `after`. `may_decide` says whether a reply of the caller would decide, `may_call` whether
    `network.decide` would."""
    requests = list_requests(reading, after)
    page = ListPage(limit, reading.hub.limits.max_result_bytes)
    for start in range(0, len(requests), PAGE):
        heads = await reading.hub.ledger.heads({waiting.seq for waiting in requests[start : start + PAGE]})
        for request in requests[start : start + PAGE]:
            head = heads.get(request.seq)
            if head is None or not request.may_be_shown(reading, head):
                continue
            # Read messages one by one, and only for requests that are shown, because messages may be large.
            row = (await reading.hub.ledger.messages([request.seq])).get(request.seq)
            # Skip the request if its message is missing or damaged. Nobody could decide on a request that cannot be
            # shown.
            if row is None or row.is_damaged:
                continue
            thread_id = request.thread_id if request.reads_trigger else head.thread_id
            entry = {**request.details, "thread_id": thread_id, **request.describe_rights(reading, head)}
            if not page.add({**entry, "message": Raw(row.data)}):
                return {"approvals": page.entries, "has_more": True}
    return {"approvals": page.entries, "has_more": False}


class ListedRequest(NamedTuple):
    """A message in which an open reaction asks a person for a decision. Sorted by seq and agent."""

    seq: int
    agent_id: str
    wait: CallWait
    thread_id: str
    """Thread that contains the trigger of the reaction."""

    reads_trigger: bool
    details: Mapping[str, Any]

    def may_be_shown(self, reading: Reading, head: MessageHead) -> bool:
        """Return whether the caller may see the request. Approvers who cannot read the reaction's trigger may see it
        too, because the agent has sent them a copy."""
        if head.sender_id != self.agent_id:
            return False
        if (reading.origin.agent_id, self.seq) in self.wait.copies:
            return reads_as_itself(reading, head)
        return self.reads_trigger and reads(reading, head)

    def describe_rights(self, reading: Reading, head: MessageHead) -> dict[str, Any]:
        """Return whether the caller may decide, and how: with a reply or with an operation."""
        origin, wait = reading.origin, self.wait
        is_person, is_reader = origin.kind == "human", reads_as_itself(reading, head)
        may_decide = partial(wait.may_decide, origin.agent_id, is_reader=is_reader)
        may_call = is_person and may_decide(is_operator=origin.is_operator)
        rights: dict[str, Any] = {
            "may_decide": is_person and is_reader and may_decide(is_operator=False),
            "may_call": may_call,
        }
        if wait.deciders is not None:
            rights["deciders"] = list(wait.deciders)
        return rights | ({"approved_by": list(wait.voters)} if wait.voters else {})


def list_requests(reading: Reading, after: int) -> list[ListedRequest]:
    """Return the messages above ``after`` in which open reactions ask a person for a decision, by seq. Only the current
    waits of open reactions count. Other claims in records are ignored, because an agent may write any number of
    them."""
    requests: dict[tuple[int, str], ListedRequest] = {}
    for _, opened in reading.hub.state.items("reaction"):
        if not opened.awaits or opened.is_cancelled or is_blocked_by_takeover(reading.hub.state, opened):
            continue  # skip the request, because a decision could not continue its reaction
        reads_trigger = reads(reading, opened.trigger_head)
        for call, wait in opened.awaits.items():
            seq = wait.find_request(reading.origin.agent_id)
            if seq is None or seq <= after or not (reads_trigger or seq != wait.request or wait.copies):
                continue
            details = {
                "seq": seq,
                "agent_id": opened.agent_id,
                "reaction": opened.reaction,
                "call": call,
                "trigger": opened.trigger,
                "until": wait.until,
            }
            thread_id = opened.trigger_head.thread_id
            requests[seq, opened.agent_id] = ListedRequest(
                seq, opened.agent_id, wait, thread_id, reads_trigger, details
            )
    return [requests[key] for key in sorted(requests)]


MAX_DECISION_CHARS = 64_000


def decide(
    change: ChangeSet, *, seq: Seq, decision: Annotated[str, Meta(min_length=1, max_length=MAX_DECISION_CHARS)]
) -> dict[str, Any]:
    """Decide on the call that the message `seq` asks about, like a reply to it: `/approve`, `/deny REASON` or `/edit
    ARGUMENTS`. For people who may decide but cannot read that message, such as operators if no approvers are named.
    People who can read the message may add `thread` or `always` to `/approve`."""
    origin, state, head = change.origin, change.state, change.facts.heads.get(seq)
    if head is None or not (origin.is_operator or may_read(state, origin.agent_id, head)):
        raise UnknownMessage(
            f"There is no message {seq} that {origin.agent_id} may read. seq must be the seq of a request for approval."
        )
    if origin.kind != "human":
        raise Forbidden(f"Only people decide on calls, and {origin.agent_id} is registered as {origin.kind}.")
    word, _, rest = decision.strip().partition(" ")
    scope = rest.strip().lower() if word.lower() == "/approve" else ""
    if word.lower() not in DECISIONS or scope not in ("", "thread", "always") or (word.lower() == "/edit" and not rest):
        raise InvalidArguments(
            "decision must be /approve, /approve thread, /approve always, /deny REASON or /edit JSON."
        )
    wait = _find_wait(state, head)
    if wait is None:
        raise InvalidArguments(f"#{seq} does not wait for a decision, or no longer does.")
    is_reader = may_read(state, origin.agent_id, head)
    # Refuse a second vote of the same person, because two approvals must come from two people.
    if origin.agent_id in wait.voters:
        raise InvalidArguments(
            f"{origin.agent_id} has already approved #{seq}. It waits for another person's approval."
        )
    if not wait.may_decide(origin.agent_id, is_reader=is_reader, is_operator=origin.is_operator):
        names = ", ".join(wait.deciders or ())
        raise Forbidden(f"{origin.agent_id} may not decide on #{seq}: its approvers are {names}.")
    # Refuse "thread" and "always": they also approve later calls, which this person could not see.
    if scope and not is_reader:
        raise InvalidArguments(
            f"{origin.agent_id} cannot read the thread of #{seq}, and so may approve only one call at a time. Use /approve "
            "without a scope."
        )
    content = {"kind": "decision", "request": seq, "by": origin.agent_id, "decision": decision.strip()}
    text = f"{origin.agent_id} decides on #{seq}: {decision.strip()}"
    # Send the decision in the name of the network, not of the person. The agent can then trust that the hub has checked
    # the person's right.
    row = mod_message(NETWORK, head.sender_id, content, seq=state.head + 1, stamp=change.stamp, cause=head, text=text)
    change.add_row(row, open_delivery(change.rules.limits, state, row.head) if row.head is not None else ())
    return {"seq": row.seq}


DECISIONS = ("/approve", "/deny", "/edit")


def _find_wait(state: State, request: MessageHead) -> CallWait | None:
    """Return the call that waits for an answer to a request, or None. Only calls of the request's sender count."""
    for opened in state.reactions_of(request.sender_id).values():
        if not opened.is_cancelled and not is_blocked_by_takeover(state, opened):
            for wait in opened.awaits.values():
                if request.seq == wait.request or any(request.seq == seq for _, seq in wait.copies):
                    return wait
    return None


MAX_CAUSES = 1000
"""Maximum number of causes that are followed from a message back to the people who started its conversation."""


async def approvers(
    reading: Reading,
    *,
    names: Annotated[list[Annotated[str, Meta(min_length=1, max_length=128)]], Meta(min_length=1, max_length=64)],
    seqs: Annotated[list[Seq], Meta(min_length=1, max_length=MAX_CAUSES)],
) -> dict[str, Any]:
    """The people whom ids and roles (`role:NAME`, from the node's `rights`) name. `reads`: the person reads the first
    of these messages. `is_requester`: the person wrote one of these messages, or a cause of one. `unknown` lists names
    without a person or role."""
    hub, state = reading.hub, reading.hub.state
    heads = await hub.ledger.heads(set(seqs))
    for seq in seqs:
        if seq not in heads or not reads(reading, heads[seq]):
            raise UnknownMessage(f"There is no message {seq} that {reading.origin.agent_id} may read.")
    requesters = await _find_requesters(reading, [heads[seq] for seq in seqs])
    people: dict[str, None] = {}
    unknown = []
    for name in names:
        prefix, colon, role_name = name.partition(":")
        if colon:
            is_known = prefix == "role" and state.rights is not None and state.rights.has_role(role_name)
            rights = state.rights if is_known else None
            named = (
                []
                if rights is None
                else [
                    person_id
                    for person_id in state.people_before(None)
                    if role_name in rights.roles_of(person_id, "human")
                ]
            )
        else:
            named = [name] if state.is_person(name) and state.present(name) is not None else []
            is_known = bool(named)
        people |= dict.fromkeys(sorted(named))
        unknown += [] if is_known else [name]
    entries = [
        {
            "agent_id": person_id,
            "reads": may_read(state, person_id, heads[seqs[0]]),
            "is_requester": person_id in requesters,
        }
        for person_id in people
    ]
    page, has_more = take_page(entries, MAX_REQUESTS, hub.limits.max_result_bytes)
    return {"people": page, "unknown": unknown, "has_more": has_more}


async def _find_requesters(reading: Reading, heads: list[MessageHead]) -> set[str]:
    """Return the people who wrote one of these messages or one of the messages that caused them."""
    requesters: set[str] = set()
    visited: set[int] = set()
    waiting = {head.seq: head for head in heads}
    while waiting and len(visited) < MAX_CAUSES:
        requesters |= {head.sender_id for head in waiting.values() if head.sender_kind == "human"}
        # Remember visited messages, so that a shared cause is read only once.
        visited |= set(waiting)
        causes = {head.cause for head in waiting.values() if head.cause is not None} - visited
        causes |= {
            head.root for head in waiting.values()
        } - visited  # the chain may be too long, or retention may have deleted a part of it
        waiting = await reading.hub.ledger.heads(causes) if causes else {}
    return requesters


async def records(
    reading: Reading, *, reaction: str, agent_id: str | None = None, after: Seq = 0, limit: Limit = 500
) -> dict[str, Any]:
    """The turn records of a reaction above `after`, oldest first. For the reaction's agent and for operators, who may
    name the agent."""
    origin, room = reading.origin, reading.hub.limits.max_result_bytes
    page = ListPage(limit, room)
    is_at_end = False
    # Other agents may use the same reaction id, so skip their rows and continue to read.
    while not (is_at_end or page.has_more):
        wanted = limit + 1 - len(page.entries)
        rows, is_more = await reading.hub.ledger.reaction(reaction, after, wanted, max_bytes=room)
        is_at_end = not is_more
        for row in rows:
            after = row.seq
            if row.is_damaged and not origin.is_operator:
                # Raise an error. An agent that continued with an incomplete journal would repeat actions.
                raise InternalError(
                    f"The record {row.seq} of the reaction {reaction!r} is damaged in the hub's ledger, so the progress "
                    "of the reaction is unknown. Tell the hub's operator."
                )
            is_own = origin.is_operator or row.actor == origin.agent_id
            if row.is_damaged or not is_own or agent_id not in (None, row.actor):
                continue
            if not page.add(_describe_record(row)):
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
    """Tokens by model: in the conversation of a message, in an open reaction of the caller, and of the caller today."""
    head = await find_message(reading, seq, "seq")
    state, agent_id = reading.hub.state, reading.origin.agent_id
    budget: ConversationBudget | None = await reading.hub.ledger.lookup_cold("root", str(head.root))
    opened: OpenReaction | None = state.get("reaction", f"{agent_id}/{reaction}")
    day = state.stamp // DAY_MS
    return {
        "root": head.root,
        "resumed": budget.resumed if budget is not None else 0,
        "of_root": _write(budget.spent if budget is not None else {}),
        "by_agent": _describe_claims(reading, head, budget.claims if budget is not None else {}),
        "of_reaction": _write(opened.spent if opened is not None else {}),
        "of_day": _write(usage_on(day, state.get("day", agent_id))),
        "day": datetime.fromtimestamp(day * DAY_MS / 1000, UTC).date().isoformat(),
    }


MAX_USES = 500
"""Maximum number of entries in the argument `uses` of one `network.costs` call."""


async def costs(reading: Reading, *, uses: Annotated[list[UsedTokens], Meta(max_length=MAX_USES)]) -> dict[str, Any]:
    """Costs of these uses by the prices that the node knows: dollars in the same order, null if no price is known."""
    price_list = reading.hub.price_list
    if price_list is None:
        return {"usd": [None] * len(uses), "has_prices": False}
    # Use a worker thread, because the first call reads the whole price table.
    usd = await asyncio.to_thread(price_list.price, uses)
    return {"usd": usd, "has_prices": price_list.has_table}


async def usage(
    reading: Reading,
    *,
    agent_id: str | None = None,
    after: Seq = 0,
    limit: Limit = 500,
) -> dict[str, Any]:
    """Model calls reported by an agent's records above `after`, ascending. Callers see their own calls. Operators may
    name any agent.

    `next_agent` is the next agent by id, for operators who read all agents.
    """
    origin, hub = reading.origin, reading.hub
    agent_id = resolve_owner(origin, agent_id, "The usage of other agents is for operators.") or _next_agent(
        reading, ""
    )
    if agent_id is None:
        return {"agent_id": None, "calls": [], "reactions": {}, "has_more": False, "next_agent": None}
    rows: list[Row] = []
    # The pages of the record kinds end at different seqs. Report only up to the lowest of these seqs.
    until: int | None = None
    for kind in sorted(USAGE_KINDS):
        # Divide the available size among the kinds, because the pages of all kinds are in memory at the same time.
        max_bytes = hub.limits.max_result_bytes // len(USAGE_KINDS)
        page = await hub.ledger.records(agent_id, kind, after, limit, max_bytes=max_bytes)
        rows += page.rows
        if page.has_more:
            last = page.rows[-1].seq
            until = last if until is None else min(until, last)
    # Each kind was read separately, so merge the pages by seq.
    rows = sorted(
        (row for row in rows if (until is None or row.seq <= until) and not row.is_damaged), key=lambda row: row.seq
    )
    # Use only half of the size for the calls. The other half is for the reactions.
    calls = ListPage(limit, hub.limits.max_result_bytes // 2)
    reactions: set[str] = set()
    for row in rows:
        if not calls.add(describe_call(row, msgspec.json.decode(row.data))):
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


def _describe_claims(
    reading: Reading, head: MessageHead, claims: Mapping[str, Mapping[str, TokenUsage]]
) -> dict[str, Any]:
    """Return the token counts of each agent. Agents who can read the given message are named. Other agents get a number
    instead, because the caller must not learn that they take part."""
    state, origin = reading.hub.state, reading.origin
    sums: dict[str, Any] = {}
    for number, (agent_id, spent) in enumerate(claims.items(), 1):
        is_named = origin.is_operator or agent_id == origin.agent_id or may_read(state, agent_id, head)
        # Number the agents in the order of their first report, so that later calls use the same numbers.
        sums[agent_id if is_named else f"~{number}"] = _write(spent)
    return sums


def _write(spent: Mapping[str, TokenUsage]) -> dict[str, Any]:
    return {model: _write_one(used) for model, used in spent.items()}


def _write_one(used: TokenUsage) -> dict[str, int]:
    return {name: getattr(used, name) for name in TokenUsage.__struct_fields__}


def _next_agent(reading: Reading, after: str) -> str | None:
    """Return the id of the next agent after the given id, or None. Removed agents are included."""
    ids = (key for key, it in reading.hub.state.items("participant") if it.kind == "agent" and key > after)
    return min(ids, default=None)


def describe_call(row: Row, body: object) -> dict[str, Any]:
    """Return a description of a model call without its texts: its time, turn, model, tokens, and the names of the tools
    that it called."""
    body = body if isinstance(body, dict) else {}
    reply = body.get("reply")
    reply = reply if isinstance(reply, dict) else {}
    calls = reply.get("tool_calls")
    names = [item.get("name") for item in calls if isinstance(item, dict)] if isinstance(calls, list) else []
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
            {"model": _text(item.get("model")), "usage": item["usage"]}
            for item in (used if isinstance(used, list) else ())
            if isinstance(item, dict) and isinstance(item.get("usage"), dict)
        ],
    }


def _text(value: object) -> str:
    return value[:128] if isinstance(value, str) else ""


async def _describe_reactions(reading: Reading, agent_id: str, reactions: set[str]) -> dict[str, Any]:
    """Return, for each of these reactions, its trigger, the trigger's thread and root, and the reaction that sent the
    trigger.

    The result contains only data that is still in the log, and only if the caller may read the trigger and its cause.
    Only the agent's own records are used, because any agent may write records under any reaction id.
    """
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
