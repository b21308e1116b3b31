"""The operations about who and what there is: participants, threads, what became of a message; and those by which a
conversation is stopped and let go on.

Changes run in `apply`; reads ask the state and the ledger, and never show more than the caller may read. Operators may
read everything.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta

from roundelay.network.addresses import name_of, thread_parties, thread_start
from roundelay.network.core.access import is_found
from roundelay.network.core.change import ChangeSet, stopped_key
from roundelay.network.core.entries import RequestCancel
from roundelay.network.core.rows import MessageHead, Row
from roundelay.network.core.sending import find_budget
from roundelay.network.core.state import State
from roundelay.network.core.tables import (
    Attempt,
    AttemptCount,
    DeadLetter,
    LookupRequest,
    OpenReaction,
    ReactionStart,
    ReadState,
    Table,
    Takeover,
    TriggeredReactions,
)
from roundelay.network.core.takeover_control import (
    check_may_take,
    encode_takeover_event,
    end_takeover,
    may_take,
    notify_readers,
)
from roundelay.network.core.takeovers import describe_takeover, find_thread, is_blocked_by_takeover, next_message_head
from roundelay.network.core.visibility import may_read, readable_spans, recipients, thread_readers
from roundelay.network.errors import Forbidden, InvalidArguments, ThreadHeld, UnknownMessage
from roundelay.network.frames import Kind, Seq
from roundelay.network.ledger import ThreadSummary, find_newest_message
from roundelay.network.titles import is_about_something, name_place, write_title

from .activity import describe_activity, tells_activity
from .paging import ListPage, take_page
from .read_state import count_unread, describe_read_state, describe_thread_message
from .reading import Reading, reads
from .views import Limit, find_message

PageLimit = Annotated[int, Meta(ge=1, le=1000)]
MAX_TTL_MS = 30 * 24 * 60 * 60 * 1000
"""Of a takeover."""
FATES_AT_ONCE = 64
"""For so many recipients of a message their ends are looked up together."""
THREADS_AT_ONCE = 8
"""Threads of a list whose first and newest messages are read at once: they may be large."""
FIRST_LOOKED_AT = 8
"""So many messages of a thread, the oldest, are looked at for one that the caller may read."""
REACTIONS_SEARCHED = 256
"""Among so many reactions that an agent began after a message is the one looked for whose prompt holds it."""


# --- changes


def cancel(change: ChangeSet, *, reaction: str | None = None, thread_id: str | None = None) -> dict[str, Any]:
    """Ask the reactions of a thread, or one reaction, to stop, and those of the agents that these wrote to directly."""
    if (reaction is None) == (thread_id is None):
        raise InvalidArguments("network.cancel takes either reaction or thread_id.")
    state = change.state
    named = state.reactions_in(thread_id) if thread_id is not None else state.reactions_named(str(reaction))
    chosen = {key: it for key, it in named.items() if _may_cancel(change, it)}
    return {"reactions": _ask_to_stop(change, _with_those_asked(state, chosen))}


def _ask_to_stop(change: ChangeSet, reactions: Mapping[str, OpenReaction]) -> list[str]:
    """Cancel reactions, by their keys; gives the ids of those that the caller may know of."""
    stopped = []
    for key, found in reactions.items():
        change.set_value("reaction", key, msgspec.structs.replace(found, is_cancelled=True))
        head, by = found.trigger_head, change.origin.agent_id
        if change.origin.is_operator or found.agent_id == by or may_read(change.state, by, head):
            stopped.append(found.reaction)
        else:  # neither hears of the other: who asked for it takes it back
            by = head.sender_id
        change.effects.append(RequestCancel(found.agent_id, found.reaction, head.thread_id, by))
    return stopped


def _may_cancel(change: ChangeSet, reaction: OpenReaction) -> bool:
    origin = change.origin
    if origin.is_operator or origin.agent_id == reaction.agent_id:
        return True
    head = reaction.trigger_head
    if head.kind == "direct" and head.sender_id == origin.agent_id:  # who asked takes it back
        return True
    return origin.kind == "human" and may_read(change.state, origin.agent_id, head)


def _with_those_asked(state: State, chosen: Mapping[str, OpenReaction]) -> dict[str, OpenReaction]:
    """Add the reactions to what these wrote to others directly, and so on: nobody needs their answers any more."""
    found, more = dict(chosen), dict(chosen)
    while more:
        asked = [state.reactions_asked_by(it.agent_id, it.trigger) for it in more.values()]
        more = {key: it for those in asked for key, it in those.items() if key not in found}
        found |= more
    return found


def take(
    change: ChangeSet, *, thread_id: str, ttl_ms: Annotated[int, Meta(ge=1_000, le=MAX_TTL_MS)] | None = None
) -> dict[str, Any]:
    """Take a thread over: agents answer there no more until it is given back, or `ttl_ms` are over (the node's
    `takeover_ms` without). People in a direct thread do, and operators; in others whoever has the right to."""
    state, by = change.state, change.origin.agent_id
    head = find_thread(state, change.facts, change.origin, thread_id)
    check_may_take(state, change.origin, head)
    known = state.takeovers.get(thread_id)
    lasts_ms = ttl_ms or change.rules.limits.takeover_ms
    until = change.stamp + lasts_ms if lasts_ms else 0
    if known is not None and known.by:
        if known.by != by:
            raise ThreadHeld(
                f"{known.by} has taken over {thread_id} already (#{known.taken}); network.give gives it back, which "
                "anybody in it may."
            )
        if ttl_ms is not None:  # prolonged
            known = msgspec.structs.replace(known, until=until)
            change.set_value("hold", thread_id, known)
        return {"thread_id": thread_id, "seq": known.taken, **({"until": known.until} if known.until else {})}
    row = change.write_row("hold", data=encode_takeover_event("taken", thread_id, by))
    hold = Takeover(by, row.seq, change.stamp, head, known.given if known is not None else 0, until)
    change.set_value("hold", thread_id, hold)
    under_way = state.reactions_in(thread_id)
    asked = _with_those_asked(state, under_way)
    _ask_to_stop(change, {key: it for key, it in asked.items() if key not in under_way})
    notify_readers(change, "taken", hold, row.seq)
    return {"thread_id": thread_id, "seq": row.seq, **({"until": until} if until else {})}


def give(change: ChangeSet, *, thread_id: str) -> dict[str, Any]:
    """Give a thread back that was taken over, by whomever: its agents answer there again."""
    find_thread(change.state, change.facts, change.origin, thread_id)
    hold = change.state.takeovers.get(thread_id)
    if hold is None or not hold.by:
        raise InvalidArguments(f"Nobody has taken {thread_id} over, so it is not given back; network.take takes it.")
    return {"thread_id": thread_id, "seq": end_takeover(change, hold), "taken": hold.taken, "by": hold.by}


def resume_root(change: ChangeSet, *, root: Seq) -> dict[str, Any]:
    """Let a conversation that has used its budget go on, with as much again. ``was_stopped``: the hub had stopped it;
    the budgets that its agents keep are not the hub's to know."""
    if change.origin.is_operator:
        head = change.facts.heads.get(root)
    else:
        head = change.head(root)
        if change.origin.kind != "human":
            raise Forbidden(
                "Only people who may read its first message, and operators, let a stopped conversation go on."
            )
    if head is None:
        raise UnknownMessage(f"There is no message #{root}; root is the first message of a conversation.")
    if head.root != root:
        raise UnknownMessage(
            f"Message #{root} belongs to the conversation that began with #{head.root}: name that one."
        )
    budget = find_budget(change.state, change.facts, root, head)
    limits = change.rules.limits
    change.write_row("budget", data=msgspec.json.encode({"root": root, "event": "resumed"}))
    extended = msgspec.structs.replace(
        budget,
        extra_messages=budget.extra_messages + limits.max_root_messages,
        extra_hops=budget.extra_hops + limits.max_hops,
        stopped_in=(),
        told=(),
        resumed=budget.resumed + 1,
    )
    change.set_value("root", str(root), extended)
    change.set_value("stopped", stopped_key(root), None)
    return {"was_stopped": bool(budget.told)}


# --- what there is


async def info(reading: Reading) -> dict[str, Any]:
    """What this network is."""
    hub = reading.hub
    return {
        "name": hub.name,
        "epoch": hub.epoch,
        "server": hub.server,
        "head": hub.state.head,
        "participants": hub.state.count_participants(),
        "mods": hub.mod_ids,
        "has_operators": hub.has_operators,
        "has_human_operators": hub.has_human_operators,
        **({"public_url": hub.public_url} if hub.public_url is not None else {}),
    }


async def watch(reading: Reading, *, presence: bool | None = None, signals: bool | None = None) -> dict[str, Any]:
    """Choose whether this session is sent presence and signals."""
    reading.hub.watch(reading.origin.session_id, presence, signals)
    return {}


async def list_agents(
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
            if participant.kind == "agent" and tells_activity(reading):
                entry |= describe_activity(reading, participant, is_online=is_online)
            if participant.card is not UNSET:
                entry["card"] = participant.card
            yield entry

    agents, has_more = take_page(describe(), limit, reading.hub.limits.max_result_bytes)
    return {"agents": agents, "has_more": has_more}


async def list_threads(
    reading: Reading,
    *,
    before: Seq | None = None,
    limit: Limit = 50,
    threads: Annotated[list[str], Meta(max_length=100)] | None = None,
) -> dict[str, Any]:
    """Threads that the caller may read, newest first; those whose last message is below `before`, of all or of these
    `threads`, with what is unread in them and what the caller keeps of them for itself."""
    among = frozenset(threads) if threads is not None else None
    page = ListPage(limit, reading.hub.limits.max_result_bytes)
    is_at_end = False
    while not (is_at_end or page.has_more):
        asked = limit - len(page.entries) + 1
        summaries = await _threads(reading, before, asked, among)
        is_at_end = len(summaries) < asked
        marks = dict(reading.hub.state.read_states_of(reading.origin.agent_id))  # as of one moment, as each entry is
        unread = await count_unread(reading, {it.thread_id: it.last_seq for it in summaries}, marks)
        first = await _find_first(reading, (it.thread_id for it in summaries), marks)
        for start in range(0, len(summaries), THREADS_AT_ONCE):
            chosen = summaries[start : start + THREADS_AT_ONCE]
            last = {it.thread_id: it.last_seq for it in chosen}
            ends = await _read_ends(reading, last, {it: first[it] for it in last if it in first})
            for summary in chosen:
                before = summary.last_seq
                thread_id = summary.thread_id
                entry = await _describe_thread(reading, summary, ends, unread[thread_id], marks.get(thread_id))
                if entry is not None and not page.add(entry):
                    break
            if page.has_more:
                break
    return {"threads": page.entries, "has_more": page.has_more}


async def _threads(
    reading: Reading, before: int | None, limit: int, among: Collection[str] | None
) -> list[ThreadSummary]:
    hub, origin = reading.hub, reading.origin
    if origin.is_operator:
        return await hub.ledger.all_threads(before=before, limit=limit, among=among)
    participant = hub.state.participant(origin.agent_id)
    if participant is None:
        return []
    spans = readable_spans(hub.state, participant)
    return await hub.ledger.threads(spans, origin.agent_id, before=before, limit=limit, among=among)


class _Ends(NamedTuple):
    """The newest message of each of some threads, and the one that its title may quote: by the thread's id, as far as
    they are stored and whole."""

    newest: dict[str, Row]
    first: dict[str, Row]


async def _find_first(reading: Reading, thread_ids: Iterable[str], marks: Mapping[str, ReadState]) -> dict[str, int]:
    """Return the seq of the message that the title of each of these threads may quote, in one read."""
    own = {it for it, mark in marks.items() if mark.title}
    quoted = [it for it in thread_ids if it not in own and _is_quoted(reading, it)]
    starts = {it: seq for it in quoted if (seq := thread_start(it)) is not None}
    return starts | await reading.hub.ledger.first_seqs([it for it in quoted if it not in starts])


async def _read_ends(reading: Reading, last: Mapping[str, int], first: Mapping[str, int]) -> _Ends:
    """Read the ends of these threads at once: a read for each of them would make a long list slow."""
    rows = await reading.hub.ledger.messages({*last.values(), *first.values()})
    whole = {seq: row for seq, row in rows.items() if not row.is_damaged}
    return _Ends(*({it: whole[seq] for it, seq in seqs.items() if seq in whole} for seqs in (last, first)))


async def _describe_thread(
    reading: Reading, summary: ThreadSummary, ends: _Ends, unread: int, mark: ReadState | None
) -> dict[str, Any] | None:
    """A thread's entry; None for replies to what was said before this participant came."""
    newest = ends.newest.get(summary.thread_id)
    if newest is None:  # damaged: the one before it takes its place
        newest = await find_newest_message(reading.hub.ledger, summary.thread_id, summary.last_seq + 1)
    if newest is None or newest.head is None:
        return None
    if not (reading.origin.is_operator or may_read(reading.hub.state, reading.origin.agent_id, newest.head)):
        return None
    hold = describe_takeover(reading.hub.state, reading.origin, summary.thread_id)
    return {
        "thread_id": summary.thread_id,
        "title": await _write_title(reading, newest.head, ends, mark.title if mark is not None else ""),
        "last_seq": summary.last_seq,
        "messages": summary.messages,
        "readers": sorted(_shown_readers(reading, newest.head)),
        "last": describe_thread_message(newest),
        "unread": unread,
        **({"mark": describe_read_state(mark)} if mark is not None else {}),
        **({"held": hold} if hold is not None else {}),
        **({"may_take": True} if _may_take(reading, newest.head) else {}),
    }


def _may_take(reading: Reading, newest: MessageHead) -> bool:
    """Whether the caller may take a thread over, as far as its newest message tells."""
    state, origin = reading.hub.state, reading.origin
    is_in = origin.is_operator or may_read(state, origin.agent_id, next_message_head(state, newest))
    return newest.kind != "mod" and is_in and may_take(state, origin, newest)


async def _write_title(reading: Reading, newest: MessageHead, ends: _Ends, own: str) -> str:
    """What a thread is called for the caller, who has its ``own`` name for it or none."""
    thread_id, me, state = newest.thread_id, reading.origin.agent_id, reading.hub.state
    start = thread_start(thread_id)
    place = name_place(thread_id if start is None else newest.to, me)
    if newest.kind == "channel":
        channel = state.channel(name_of(newest.to))
        is_known = channel is not None and is_found(state, reading.origin, channel)
        place = f"#{channel.title}" if channel is not None and is_known and channel.title else place
    is_told = not own and _is_quoted(reading, thread_id)
    words = await _first_words(reading, thread_id, ends.first.get(thread_id)) if is_told else ""
    return write_title(place, words or ("" if start is None else f"replies to #{start}"), own)


def _is_quoted(reading: Reading, thread_id: str) -> bool:
    """Return whether the title of a thread quotes what the thread began with."""
    parties = thread_parties(thread_id) if thread_id.startswith("direct:") else ()
    found = [reading.hub.state.participant(it) for it in parties]
    return is_about_something(thread_id, has_agent=any(it is not None and it.kind == "agent" for it in found))


async def _first_words(reading: Reading, thread_id: str, first: Row | None) -> str:
    """Return the text that a thread began with, as far as the caller may read it: of the message that replies answer,
    or of the first one in the thread."""
    row = first if first is not None and reads(reading, first.head) else None
    if row is None:  # messages may be long: several are read only where the first one may not be shown
        page = await reading.hub.ledger.thread(thread_id, limit=FIRST_LOOKED_AT, newest=False)
        row = next((it for it in page.rows if not it.is_damaged and reads(reading, it.head)), None)
    return describe_thread_message(row)["text"] if row is not None else ""


def _shown_readers(reading: Reading, head: MessageHead) -> set[str]:
    """The readers of a thread. Who is not in its channel is not told who came after: of its newest message, those
    whom it was delivered to."""
    state, origin = reading.hub.state, reading.origin
    readers = thread_readers(state, head)
    if origin.is_operator or head.kind != "channel" or state.member(name_of(head.to), origin.agent_id).is_in:
        return readers
    return readers & {head.sender_id, *recipients(state, head)}


# --- what became of a message


async def message_status(reading: Reading, *, seq: Seq, after: str = "", limit: Limit = 500) -> dict[str, Any]:
    """How far a message has got with each of its recipients, by id; those above `after`."""
    head = await find_message(reading, seq, "seq")
    hub = reading.hub
    named = heapq.nsmallest(limit + 1, (name for name in recipients(hub.state, head) if name > after))
    page = ListPage(limit, hub.limits.max_result_bytes)
    while named and not page.has_more:
        chosen, named = named[:FATES_AT_ONCE], named[FATES_AT_ONCE:]
        asked: set[tuple[Table, str]] = {("triggered", f"{name}/{seq}") for name in chosen}
        asked |= {("dead", f"{name}/{seq:016d}") for name in chosen}
        asked |= {("tried", f"{name}/{seq:016d}") for name in chosen}
        now = {name: _look_at(reading, name, seq) for name in chosen}  # before the ledger, which is as new at least
        cold = (await hub.ledger.lookup(LookupRequest(set(), set(), asked))).cold
        for agent_id in chosen:
            if not page.add(await _describe_fate(reading, agent_id, seq, now[agent_id], cold)):
                break
    return {"seq": seq, "recipients": page.entries, "has_more": page.has_more}


class _RecipientProgress(NamedTuple):
    """How far a message is with one of its recipients, by what the hub holds in memory."""

    is_delivered: bool
    is_handled: bool
    attempts: int
    is_over: bool
    """It is handled, and its failures are forgotten: only how many attempts they were is kept, in the ledger."""


def _look_at(reading: Reading, agent_id: str, seq: int) -> _RecipientProgress:
    hub = reading.hub
    attempt: Attempt | None = hub.state.get("attempt", f"{agent_id}/{seq}")
    failures = attempt.failures if attempt is not None else 0
    is_delivered, is_handled = hub.delivered_up_to(agent_id) >= seq, hub.is_handled(agent_id, seq)
    is_here = (is_handled or is_delivered) and not hub.is_waiting(agent_id, seq)
    return _RecipientProgress(is_delivered, is_handled, failures + is_here, is_handled and attempt is None)


async def _describe_fate(
    reading: Reading, agent_id: str, seq: int, now: _RecipientProgress, cold: Mapping[tuple[str, str], Any]
) -> dict[str, Any]:
    """How far a message has got with one of its recipients."""
    triggered: TriggeredReactions | None = cold.get(("triggered", f"{agent_id}/{seq}"))
    letter: DeadLetter | None = cold.get(("dead", f"{agent_id}/{seq:016d}"))
    tried: AttemptCount | None = cold.get(("tried", f"{agent_id}/{seq:016d}"))
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
        status = entry["reaction_status"] = await _reaction_status(reading, agent_id, begun)
        newest = triggered.all[-1] if triggered is not None else begun
        if status == "cancelled" and newest != begun:  # a person had taken the thread over
            again = await _reaction_status(reading, agent_id, newest)
            entry["again"] = {"reaction": newest.reaction, "reaction_status": again}
        opened: OpenReaction | None = reading.hub.state.get("reaction", f"{agent_id}/{newest.reaction}")
        if opened is not None and is_blocked_by_takeover(reading.hub.state, opened):
            entry["is_overtaken"] = True
    return entry


async def _reaction_with(reading: Reading, agent_id: str, seq: int) -> tuple[ReactionStart | None, bool]:
    """The first reaction of an agent whose manifest holds a message, among those that it began next after it, and
    whether there is one: it is not named to who may not read what it is a reaction to."""
    after = seq
    for size in (4, REACTIONS_SEARCHED - 4):  # nearly always it is the next one, or there is none
        page = await reading.hub.ledger.records(agent_id, "started", after, size)
        for row in page.rows:
            body = msgspec.json.decode(row.data) if not row.is_damaged else None
            started = body if isinstance(body, dict) else {}
            manifest, trigger = started.get("manifest"), started.get("trigger")
            if isinstance(manifest, list) and seq in manifest and isinstance(trigger, int):
                is_shown = reads(reading, (await reading.hub.ledger.heads([trigger])).get(trigger))
                return (ReactionStart(row.stream, row.seq) if is_shown else None), True
        if not page.has_more:
            break
        after = page.rows[-1].seq
    return None, False


async def _reaction_status(reading: Reading, agent_id: str, begun: ReactionStart) -> str:
    """How a reaction ended, or that it is ``open``: all that readers of the message get to know of its records."""
    opened: OpenReaction | None = reading.hub.state.get("reaction", f"{agent_id}/{begun.reaction}")
    if opened is not None:
        return "cancelled" if is_blocked_by_takeover(reading.hub.state, opened) else "open"
    page = await reading.hub.ledger.records(agent_id, "finished", begun.seq, 1, reaction=begun.reaction)
    for row in page.rows:
        body = msgspec.json.decode(row.data) if not row.is_damaged else None
        status = body.get("status") if isinstance(body, dict) else None
        return status if status in ("stopped", "cancelled", "failed") else "finished"
    return "finished"  # its records are no longer kept
