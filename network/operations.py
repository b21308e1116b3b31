"""The ``network.*`` operations that every hub has (docs/protocol.md), written as a mod is.

Changes run in `apply`; reads ask the ledger and never show more than the caller may read. Operators may read everything.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Raw

from .change import ChangeSet, find_budget
from .entries import AskToStop
from .errors import Forbidden, InternalError, InvalidArguments, UnknownMessage
from .explain import Explanations
from .frames import Kind, Seq
from .ledger import Row, ThreadSummary, Wanted, find_newest
from .listing import take_page
from .mod import Mod, Reading, operation
from .open_reactions import OpenReactions
from .operator_operations import OperatorOperations
from .quota_operations import QuotaOperations
from .spending_operations import Spending
from .state import State
from .tables import Attempt, Begun, DeadLetter, OpenReaction, Table, Tried, Triggered
from .visibility import Visibility, may_read, readable_spans, recipients, thread_readers
from .window import MAX_WINDOW_THREADS, PAGE, find_message, open_view, read_window, reads, take_newest

Limit = Annotated[int, Meta(ge=1, le=500)]
PageLimit = Annotated[int, Meta(ge=1, le=1000)]
FATES_AT_ONCE = 64
"""For so many recipients of a message their ends are looked up together."""
REACTIONS_SEARCHED = 256
"""Among so many reactions that an agent began after a message is the one looked for whose prompt holds it."""
LISTED_BYTES = 128
"""About what an entry of a list takes beside what a participant chose the size of."""


class NetworkOperations(Mod):
    """Not a mod of its own: the hub's operations, in the same shape."""

    id = "network"

    # --- changes

    @operation("change")
    def cancel(self, change: ChangeSet, *, reaction: str | None = None, thread_id: str | None = None) -> dict[str, Any]:
        """Ask the reactions of a thread, or one reaction, to stop, and those of the agents that these wrote to directly."""
        if (reaction is None) == (thread_id is None):
            raise InvalidArguments("network.cancel takes either reaction or thread_id.")
        state = change.state
        named = state.reactions_in(thread_id) if thread_id is not None else state.reactions_named(str(reaction))
        chosen = {key: it for key, it in named.items() if _may_cancel(change, it)}
        stopped = []
        for key, found in _with_those_asked(state, chosen).items():
            change.put_row("reaction", key, msgspec.structs.replace(found, is_cancelled=True))
            head, by = found.trigger_head, change.origin.agent_id
            if change.origin.is_operator or found.agent_id == by or may_read(state, by, head):
                stopped.append(found.reaction)
            else:  # neither hears of the other: who asked for it takes it back
                by = head.sender_id
            change.effects.append(AskToStop(found.agent_id, found.reaction, head.thread_id, by))
        return {"reactions": stopped}

    @operation("change")
    def resume_root(self, change: ChangeSet, *, root: Seq) -> dict[str, Any]:
        """Let a conversation that has used its budget go on, with as much again."""
        if change.origin.is_operator:
            head = change.facts.heads.get(root)
        else:
            head = change.head(root)
            if change.origin.kind != "human":
                raise Forbidden("Only a person in the thread, or an operator, lets a stopped conversation go on.")
        if head is None or head.root != root:
            raise UnknownMessage(f"There is no root message {root}; a loop_stopped notice names it.")
        budget = find_budget(change.state, change.facts, root)
        limits = change.rules.limits
        change.write_row("budget", data=msgspec.json.encode({"root": root, "event": "resumed"}))
        extended = msgspec.structs.replace(
            budget,
            extra_messages=budget.extra_messages + limits.max_root_messages,
            extra_hops=budget.extra_hops + limits.max_hops,
            stopped_in=(),
            resumed=budget.resumed + 1,
        )
        change.put_row("root", str(root), extended)
        return {}

    # --- reads

    @operation("read")
    async def info(self, reading: Reading) -> dict[str, Any]:
        """What this network is."""
        hub = reading.hub
        return {
            "name": hub.name, "epoch": hub.epoch, "server": hub.server, "head": hub.state.head,
            "participants": hub.state.count_participants(), "mods": hub.mod_ids,
        }  # fmt: skip

    @operation("read")
    async def list_agents(
        self,
        reading: Reading,
        *,
        kind: Kind | None = None,
        online: bool | None = None,
        after: str = "",
        limit: PageLimit = 1000,
    ) -> dict[str, Any]:
        """Everyone who is registered, by id; those above `after`."""

        def describe() -> Iterator[dict[str, Any]]:
            for agent_id, participant in reading.hub.state.ascending("participant", after):
                is_online = reading.hub.is_online(agent_id)
                if participant.removed_seq is not None:
                    continue
                if kind not in (None, participant.kind) or online not in (None, is_online):
                    continue
                entry: dict[str, Any] = {"agent_id": agent_id, "kind": participant.kind}
                entry["state"] = "online" if is_online else "offline"
                if participant.card is not UNSET:
                    entry["card"] = participant.card
                yield entry

        agents, has_more = take_page(describe(), limit, reading.hub.limits.max_result_bytes)
        return {"agents": agents, "has_more": has_more}

    @operation("read")
    async def list_threads(self, reading: Reading, *, before: Seq | None = None, limit: Limit = 50) -> dict[str, Any]:
        """Threads that the caller may read, newest first; those whose last message is below `before`."""
        found: list[dict[str, Any]] = []
        size = 0
        while True:
            asked = limit - len(found) + 1
            summaries = await _threads(reading, before, asked)
            for summary in summaries:
                before = summary.last_seq
                entry = await _describe_thread(reading, summary)
                if entry is None:
                    continue
                size += LISTED_BYTES + sum(len(agent_id) + 3 for agent_id in entry["readers"])
                if found and (len(found) == limit or size > reading.hub.limits.max_result_bytes):
                    return {"threads": found, "has_more": True}
                found.append(entry)
            if len(summaries) < asked:
                return {"threads": found, "has_more": False}

    @operation("read")
    async def history(
        self,
        reading: Reading,
        *,
        thread_id: str,
        before: Seq | None = None,
        limit: Limit = 50,
        trigger: Seq | None = None,
        visibility: Visibility | None = None,
    ) -> dict[str, Any]:
        """Messages of one thread, oldest first. With a `trigger` only what an agent may see in its reaction to that message."""
        view = await open_view(reading, trigger, visibility)
        if view.until is not None:
            before = view.until + 1 if before is None else min(before, view.until + 1)
        room = reading.hub.limits.max_result_bytes
        rows: list[Row] = []
        damaged: list[int] = []
        size, has_more = min(PAGE, limit + 1), True
        while has_more and len(rows) <= limit and sum(len(row.data) for row in rows) <= room:
            page = await reading.hub.ledger.thread(thread_id, before=before, limit=size, max_bytes=room)
            await view.load(page.rows)
            rows[:0] = [row for row in page.rows if await view.shows(row.head)]
            damaged[:0] = [row.seq for row in page.rows if row.is_damaged]
            has_more = page.has_more
            before, size = page.rows[0].seq if page.rows else before, min(PAGE, size * 4)
        if not rows and not await _is_open_thread(reading, thread_id):
            raise UnknownMessage(f"There is no thread {thread_id!r} that {reading.origin.agent_id} may read.")
        shown = take_newest(rows[-limit:], room) or rows[-1:]
        is_cut = has_more or len(rows) > len(shown)
        value = {"messages": [Raw(row.data) for row in shown], "has_more": is_cut}
        # whose they are is unknown: they are told of as far as this answer reaches, to who reads what is around them
        missing = [seq for seq in damaged if not is_cut or (shown and seq > shown[0].seq)]
        return {**value, "damaged": missing} if missing else value

    @operation("read")
    async def window(
        self,
        reading: Reading,
        *,
        trigger: Seq,
        threads: Annotated[int, Meta(ge=1, le=100)] | list[str] | None = None,
        per_thread: Limit | None = None,
        visibility: Visibility | None = None,
    ) -> dict[str, Any]:
        """The conversation that an agent may see for a trigger: threads in a stable order, messages oldest first.

        `threads` is how many (20) or which; the trigger's own thread is always among them. Up to the trigger, nothing later. A
        `visibility` narrows what the agent's card and the network allow.
        """
        head = await find_message(reading, trigger, "trigger")
        named = threads if isinstance(threads, list) else None
        most = threads if isinstance(threads, int) else MAX_WINDOW_THREADS if named is not None else 20
        windows = await read_window(reading, head, named, most, per_thread or 10, visibility)
        shown = [
            {
                "thread_id": it.thread_id,
                "messages": [Raw(row.data) for row in it.rows],
                "omitted": it.omitted,
                **({"damaged": it.damaged} if it.damaged else {}),
            }
            for it in windows
        ]
        return {"threads": shown, "as_of": trigger}

    @operation("read")
    async def message_status(
        self, reading: Reading, *, seq: Seq, after: str = "", limit: Limit = 500
    ) -> dict[str, Any]:
        """How far a message has got with each of its recipients, by id; those above `after`."""
        head = await find_message(reading, seq, "seq")
        hub = reading.hub
        named = heapq.nsmallest(limit + 1, (name for name in recipients(hub.state, head) if name > after))
        shown, has_more = named[:limit], len(named) > limit
        states: list[dict[str, Any]] = []
        size = 0
        for start in range(0, len(shown), FATES_AT_ONCE):
            chosen = shown[start : start + FATES_AT_ONCE]
            asked: set[tuple[Table, str]] = {("triggered", f"{name}/{seq}") for name in chosen}
            asked |= {("dead", f"{name}/{seq:016d}") for name in chosen}
            asked |= {("tried", f"{name}/{seq:016d}") for name in chosen}
            now = {name: _look_at(reading, name, seq) for name in chosen}  # before the ledger, which is as new at least
            cold = (await hub.ledger.lookup(Wanted(set(), set(), asked))).cold
            for agent_id in chosen:
                entry = await _describe_fate(reading, agent_id, seq, now[agent_id], cold)
                size += LISTED_BYTES + len(agent_id) + len(entry.get("reaction", ""))
                if states and size > hub.limits.max_result_bytes:
                    return {"seq": seq, "recipients": states, "has_more": True}
                states.append(entry)
        return {"seq": seq, "recipients": states, "has_more": has_more}

    @operation("read")
    async def records(
        self, reading: Reading, *, reaction: str, agent_id: str | None = None, after: Seq = 0, limit: Limit = 500
    ) -> dict[str, Any]:
        """The turn records of a reaction above `after`, oldest first; its agent's and operators' to read, who may name the agent."""
        origin = reading.origin
        room = reading.hub.limits.max_result_bytes
        found: list[Row] = []
        size, has_more = 0, True
        while has_more and len(found) <= limit and (size <= room or len(found) < 2):  # one beyond what is shown
            page = await reading.hub.ledger.reaction(reaction, after, limit + 1 - len(found), max_bytes=room)
            damaged = [row.seq for row in page.rows if row.is_damaged]
            if damaged and not origin.is_operator:
                # an agent that goes on from a part of its journal repeats what it has done
                raise InternalError(
                    f"The record {damaged[0]} of the reaction {reaction!r} is damaged in the hub's ledger, so what the reaction had done "
                    "is not known; tell the hub's operator."
                )
            own = [
                row
                for row in page.rows
                if not row.is_damaged
                and (origin.is_operator or row.actor == origin.agent_id)
                and agent_id in (None, row.actor)
            ]
            found += own
            size += sum(len(row.data) for row in own)
            after, has_more = page.rows[-1].seq if page.rows else after, page.has_more
        shown: list[Row] = []
        for row in found[:limit]:
            room -= len(row.data)
            if shown and room < 0:
                break
            shown.append(row)
        records = [
            {
                "seq": row.seq, "agent_id": row.actor, "record_id": row.key[2:], "kind": row.label, "body": Raw(row.data),
                "at": row.at,
            }
            for row in shown
        ]  # fmt: skip
        return {
            "records": records,
            "has_more": len(shown) < len(found),
        }  # others may write under the same id: not by what they wrote

    @operation("read")
    async def watch(
        self, reading: Reading, *, presence: bool | None = None, signals: bool | None = None
    ) -> dict[str, Any]:
        """Choose whether this session is sent presence and signals."""
        reading.hub.watch(reading.origin.session_id, presence, signals)
        return {}


def _may_cancel(change: ChangeSet, reaction: OpenReaction) -> bool:
    origin = change.origin
    if origin.is_operator or origin.agent_id == reaction.agent_id:
        return True
    return origin.kind == "human" and may_read(change.state, origin.agent_id, reaction.trigger_head)


def _with_those_asked(state: State, chosen: Mapping[str, OpenReaction]) -> dict[str, OpenReaction]:
    """Add the reactions to what these wrote to others directly, and so on: nobody needs their answers any more."""
    found, more = dict(chosen), dict(chosen)
    while more:
        asked = [state.reactions_asked_by(it.agent_id, it.trigger) for it in more.values()]
        more = {key: it for those in asked for key, it in those.items() if key not in found}
        found |= more
    return found


async def _threads(reading: Reading, before: int | None, limit: int) -> list[ThreadSummary]:
    hub, origin = reading.hub, reading.origin
    if origin.is_operator:
        return await hub.ledger.all_threads(before=before, limit=limit)
    participant = hub.state.participant(origin.agent_id)
    if participant is None:
        return []
    spans = readable_spans(hub.state, participant)
    return await hub.ledger.threads(spans, origin.agent_id, before=before, limit=limit)


async def _describe_thread(reading: Reading, summary: ThreadSummary) -> dict[str, Any] | None:
    """A thread's entry; None for replies to what was said before this participant came."""
    newest = await find_newest(reading.hub.ledger, summary.thread_id, summary.last_seq + 1)
    if newest is None or newest.head is None:
        return None
    if not (reading.origin.is_operator or may_read(reading.hub.state, reading.origin.agent_id, newest.head)):
        return None
    readers = sorted(thread_readers(reading.hub.state, newest.head))
    return {
        "thread_id": summary.thread_id,
        "last_seq": summary.last_seq,
        "messages": summary.messages,
        "readers": readers,
    }


async def _is_open_thread(reading: Reading, thread_id: str) -> bool:
    """Whether an empty history is an answer: the thread of a place that exists and that the caller belongs to."""
    kind, _, name = thread_id.partition(":")
    agent_id, state = reading.origin.agent_id, reading.hub.state
    if thread_id == "broadcast":
        return True
    if kind == "channel" and state.channel(name) is not None:
        return reading.origin.is_operator or bool(state.member(name, agent_id).spans)
    if kind == "direct":
        one, _, other = name.partition("~")
        return (
            agent_id in (one, other)
            and state.participant(one) is not None
            and state.participant(other) is not None
            and one <= other
        )
    if kind == "mod":
        mod, _, participant = name.partition("~")
        return mod in reading.hub.mod_ids and participant == agent_id
    return False


class _Progress(NamedTuple):
    """How far a message is with one of its recipients, by what the hub holds in memory."""

    is_delivered: bool
    is_handled: bool
    attempts: int
    is_over: bool
    """It is handled, and its failures are forgotten: only how many attempts they were is kept, in the ledger."""


def _look_at(reading: Reading, agent_id: str, seq: int) -> _Progress:
    hub = reading.hub
    attempt: Attempt | None = hub.state.get("attempt", f"{agent_id}/{seq}")
    failures = attempt.failures if attempt is not None else 0
    is_delivered, is_handled = hub.delivered_up_to(agent_id) >= seq, hub.is_handled(agent_id, seq)
    is_here = (is_handled or is_delivered) and not hub.is_waiting(agent_id, seq)
    return _Progress(is_delivered, is_handled, failures + is_here, is_handled and attempt is None)


async def _describe_fate(
    reading: Reading, agent_id: str, seq: int, now: _Progress, cold: Mapping[tuple[str, str], Any]
) -> dict[str, Any]:
    """How far a message has got with one of its recipients."""
    triggered: Triggered | None = cold.get(("triggered", f"{agent_id}/{seq}"))
    letter: DeadLetter | None = cold.get(("dead", f"{agent_id}/{seq:016d}"))
    tried: Tried | None = cold.get(("tried", f"{agent_id}/{seq:016d}"))
    begun, is_in_prompt = triggered.first if triggered is not None else None, triggered is not None
    if begun is None:
        begun, is_in_prompt = await _reaction_with(reading, agent_id, seq)
    attempts = now.attempts
    if tried is not None and now.is_over:
        attempts = tried.attempts
    if letter is not None:
        state, attempts = "dead", letter.failures
    elif is_in_prompt:
        state = "in_prompt"
    else:
        state = "handled" if now.is_handled else "delivered" if now.is_delivered else "queued"
    if reading.hub.state.present(agent_id) is None:
        state = "removed"  # whatever it had begun, it goes on with nothing
    entry: dict[str, Any] = {"agent_id": agent_id, "state": state, "attempts": attempts}
    if begun is not None:
        entry["reaction"] = begun.reaction
        entry["reaction_status"] = await _reaction_status(reading, agent_id, begun)
    return entry


async def _reaction_with(reading: Reading, agent_id: str, seq: int) -> tuple[Begun | None, bool]:
    """The first reaction of an agent whose manifest holds a message, among those that it began next after it, and whether there is one: it
    is not named to who may not read what it is a reaction to."""
    after = seq
    for size in (4, REACTIONS_SEARCHED - 4):  # nearly always it is the next one, or there is none
        page = await reading.hub.ledger.records(agent_id, "started", after, size)
        for row in page.rows:
            body = msgspec.json.decode(row.data) if not row.is_damaged else None
            started = body if isinstance(body, dict) else {}
            manifest, trigger = started.get("manifest"), started.get("trigger")
            if isinstance(manifest, list) and seq in manifest and isinstance(trigger, int):
                is_shown = reads(reading, (await reading.hub.ledger.heads([trigger])).get(trigger))
                return (Begun(row.stream, row.seq) if is_shown else None), True
        if not page.has_more:
            break
        after = page.rows[-1].seq
    return None, False


async def _reaction_status(reading: Reading, agent_id: str, begun: Begun) -> str:
    """How a reaction ended, or that it is ``open``: all that readers of the message get to know of its records."""
    if reading.hub.state.get("reaction", f"{agent_id}/{begun.reaction}") is not None:
        return "open"
    page = await reading.hub.ledger.records(agent_id, "finished", begun.seq, 1, reaction=begun.reaction)
    for row in page.rows:
        body = msgspec.json.decode(row.data) if not row.is_damaged else None
        status = body.get("status") if isinstance(body, dict) else None
        return status if status in ("stopped", "cancelled", "failed") else "finished"
    return "finished"  # its records are no longer kept


def network_operations() -> list[Mod]:
    """What every hub has, in the shape of mods."""
    return [NetworkOperations(), OpenReactions(), Explanations(), Spending(), QuotaOperations(), OperatorOperations()]
