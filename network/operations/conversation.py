"""Operations about participants, threads and the progress of a message, and operations that stop or resume a
conversation.

Operations that change something run in `apply`. Operations that only read use the state and the ledger. They show a
caller only what it may read. Operators may read everything.
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

from .activity import describe_activity, may_see_activity
from .paging import ListPage, take_page
from .read_state import count_unread, describe_read_state, describe_thread_message
from .reading import Reading, reads
from .views import Limit, find_message

PageLimit = Annotated[int, Meta(ge=1, le=1000)]
MAX_TTL_MS = 30 * 24 * 60 * 60 * 1000
"""Maximum duration of a takeover, in ms."""
RECIPIENTS_AT_ONCE = 64
"""Number of recipients whose progress is read in one step."""
THREADS_AT_ONCE = 8
"""Number of threads whose first and newest messages are read in one step. The number is small because messages may be
large."""
FIRST_LOOKED_AT = 8
"""Number of a thread's oldest messages that are searched for one that the caller may read."""
REACTIONS_SEARCHED = 256
"""Maximum number of an agent's later reactions that are searched for a prompt that contained a given message."""


# --- changes


def cancel(change: ChangeSet, *, reaction: str | None = None, thread_id: str | None = None) -> dict[str, Any]:
    """Ask a reaction, or all reactions of a thread, to stop. Reactions to their direct messages to other agents are
    stopped too."""
    if (reaction is None) == (thread_id is None):
        raise InvalidArguments("network.cancel needs either reaction or thread_id, not both.")
    state = change.state
    named = state.reactions_in(thread_id) if thread_id is not None else state.reactions_named(str(reaction))
    chosen = {key: opened for key, opened in named.items() if _may_cancel(change, opened)}
    return {"reactions": _ask_to_stop(change, _with_those_asked(state, chosen))}


def _ask_to_stop(change: ChangeSet, reactions: Mapping[str, OpenReaction]) -> list[str]:
    """Ask the agents to stop these reactions. Return the ids of those reactions that the caller is allowed to know."""
    stopped = []
    for key, reaction in reactions.items():
        change.set_value("reaction", key, msgspec.structs.replace(reaction, is_cancelled=True))
        head, by = reaction.trigger_head, change.origin.agent_id
        if change.origin.is_operator or reaction.agent_id == by or may_read(change.state, by, head):
            stopped.append(reaction.reaction)
        # The caller and the reaction's agent must not learn of each other, so send the cancellation in the name of the
        # trigger's sender.
        else:
            by = head.sender_id
        change.effects.append(RequestCancel(reaction.agent_id, reaction.reaction, head.thread_id, by))
    return stopped


def _may_cancel(change: ChangeSet, reaction: OpenReaction) -> bool:
    origin = change.origin
    if origin.is_operator or origin.agent_id == reaction.agent_id:
        return True
    head = reaction.trigger_head
    # The sender of a direct message may withdraw its request.
    if head.kind == "direct" and head.sender_id == origin.agent_id:
        return True
    return origin.kind == "human" and may_read(change.state, origin.agent_id, head)


def _with_those_asked(state: State, chosen: Mapping[str, OpenReaction]) -> dict[str, OpenReaction]:
    """Return these reactions and, recursively, all reactions to direct messages that were sent in them. The answers of
    the added reactions are no longer needed."""
    # Skip reactions that were already found: agents that ask each other form cycles.
    all_reactions, added = dict(chosen), dict(chosen)
    while added:
        dependents = [state.reactions_asked_by(reaction.agent_id, reaction.trigger) for reaction in added.values()]
        added = {key: reaction for group in dependents for key, reaction in group.items() if key not in all_reactions}
        all_reactions |= added
    return all_reactions


def take(
    change: ChangeSet, *, thread_id: str, ttl_ms: Annotated[int, Meta(ge=1_000, le=MAX_TTL_MS)] | None = None
) -> dict[str, Any]:
    """Take over a thread: agents do not answer in it until it is given back or `ttl_ms` have passed (default: the
    node's `takeover_ms`). Operators may do this, and people in a direct thread. Other threads need the right to take
    over."""
    state, by = change.state, change.origin.agent_id
    head = find_thread(state, change.facts, change.origin, thread_id)
    check_may_take(state, change.origin, head)
    current = state.takeovers.get(thread_id)
    duration_ms = ttl_ms or change.rules.limits.takeover_ms
    until = change.stamp + duration_ms if duration_ms else 0
    if current is not None and current.by:
        if current.by != by:
            raise ThreadHeld(
                f"{current.by} has already taken over {thread_id} (#{current.taken}). Any person in the thread can end that "
                "with network.give."
            )
        if ttl_ms is not None:  # extend the existing takeover
            current = msgspec.structs.replace(current, until=until)
            change.set_value("hold", thread_id, current)
        return {"thread_id": thread_id, "seq": current.taken, **({"until": current.until} if current.until else {})}
    row = change.write_row("hold", data=encode_takeover_event("taken", thread_id, by))
    takeover = Takeover(by, row.seq, change.stamp, head, current.given if current is not None else 0, until)
    change.set_value("hold", thread_id, takeover)
    running = state.reactions_in(thread_id)
    # Stop only the work that the reactions of this thread have requested from other agents, because nobody needs its
    # results now. The reactions of the thread itself need no stop: the takeover refuses their messages (see
    # `takeovers`).
    affected = _with_those_asked(state, running)
    _ask_to_stop(change, {key: reaction for key, reaction in affected.items() if key not in running})
    notify_readers(change, "taken", takeover, row.seq)
    return {"thread_id": thread_id, "seq": row.seq, **({"until": until} if until else {})}


def give(change: ChangeSet, *, thread_id: str) -> dict[str, Any]:
    """End the takeover of a thread, whoever started it. The thread's agents answer again."""
    find_thread(change.state, change.facts, change.origin, thread_id)
    takeover = change.state.takeovers.get(thread_id)
    if takeover is None or not takeover.by:
        raise InvalidArguments(
            f"{thread_id} is not taken over, so there is nothing to give back. network.take takes it over."
        )
    return {"thread_id": thread_id, "seq": end_takeover(change, takeover), "taken": takeover.taken, "by": takeover.by}


def resume_root(change: ChangeSet, *, root: Seq) -> dict[str, Any]:
    """Resume a conversation that has used up its budget. It gets the same budget again. ``was_stopped``: the hub had
    stopped the conversation. The hub does not know budgets that agents set themselves."""
    if change.origin.is_operator:
        head = change.facts.heads.get(root)
    else:
        head = change.head(root)
        if change.origin.kind != "human":
            raise Forbidden("Only operators, and people who may read its first message, can resume a conversation.")
    if head is None:
        raise UnknownMessage(f"There is no message #{root}. root must be the first message of a conversation.")
    if head.root != root:
        raise UnknownMessage(
            f"Message #{root} belongs to the conversation that began with #{head.root}. Pass that seq as root."
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


# --- participants and threads


async def info(reading: Reading) -> dict[str, Any]:
    """Facts about this network."""
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


async def watch(
    reading: Reading, *, presence: bool | None = None, signals: bool | None = None, quiet: bool | None = None
) -> dict[str, Any]:
    """Choose whether this session receives presence, signals, and a notice when a conversation that the caller began
    becomes quiet."""
    reading.hub.watch(reading.origin.session_id, presence, signals, quiet)
    return {}


async def list_agents(
    reading: Reading,
    *,
    kind: Kind | None = None,
    online: bool | None = None,
    after: str = "",
    limit: PageLimit = 1000,
) -> dict[str, Any]:
    """Every registered participant, by id. Only those above `after`."""

    def describe() -> Iterator[dict[str, Any]]:
        for agent_id, participant in reading.hub.state.ascending("participant", after):
            is_online = reading.hub.is_online(agent_id)
            if participant.removed_seq is not None:
                continue
            if kind not in (None, participant.kind) or online not in (None, is_online):
                continue
            entry: dict[str, Any] = {"agent_id": agent_id, "kind": participant.kind}
            entry["state"] = "online" if is_online else "offline"
            if participant.kind == "agent" and may_see_activity(reading):
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
    """Threads that the caller may read, newest first, with a last message below `before`. All threads, or only those in
    `threads`. Each has the number of unread messages and the caller's read state."""
    among = frozenset(threads) if threads is not None else None
    page = ListPage(limit, reading.hub.limits.max_result_bytes)
    is_at_end = False
    while not (is_at_end or page.has_more):
        wanted = limit - len(page.entries) + 1
        # Read in several rounds, because threads whose newest message the caller may not read are skipped.
        summaries = await _threads(reading, before, wanted, among)
        # One thread more than fits on the page was requested. If fewer were found, the list has ended.
        is_at_end = len(summaries) < wanted
        # Copy the read states once, so that all entries show the same moment.
        marks = dict(reading.hub.state.read_states_of(reading.origin.agent_id))
        unread = await count_unread(reading, {summary.thread_id: summary.last_seq for summary in summaries}, marks)
        first = await _find_first(reading, (summary.thread_id for summary in summaries), marks)
        for start in range(0, len(summaries), THREADS_AT_ONCE):
            chosen = summaries[start : start + THREADS_AT_ONCE]
            last = {summary.thread_id: summary.last_seq for summary in chosen}
            ends = await _read_ends(reading, last, {name: first[name] for name in last if name in first})
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
    """For several threads, by thread id: the newest message, and the message that the title may quote. Missing and
    damaged messages are left out."""

    newest: dict[str, Row]
    first: dict[str, Row]


async def _find_first(reading: Reading, thread_ids: Iterable[str], marks: Mapping[str, ReadState]) -> dict[str, int]:
    """Return the seq of the message that the title of each thread may quote. All threads are read at once."""
    own = {name for name, mark in marks.items() if mark.title}
    quoted = [name for name in thread_ids if name not in own and _is_quoted(reading, name)]
    starts = {name: seq for name in quoted if (seq := thread_start(name)) is not None}
    return starts | await reading.hub.ledger.first_seqs([name for name in quoted if name not in starts])


async def _read_ends(reading: Reading, last: Mapping[str, int], first: Mapping[str, int]) -> _Ends:
    """Read the first and the newest message of several threads at once. One read per thread would make a long list
    slow."""
    rows = await reading.hub.ledger.messages({*last.values(), *first.values()})
    whole = {seq: row for seq, row in rows.items() if not row.is_damaged}
    return _Ends(*({name: whole[seq] for name, seq in seqs.items() if seq in whole} for seqs in (last, first)))


async def _describe_thread(
    reading: Reading, summary: ThreadSummary, ends: _Ends, unread: int, mark: ReadState | None
) -> dict[str, Any] | None:
    """Return the list entry of a thread. Return None for a reply thread that began before the caller joined."""
    newest = ends.newest.get(summary.thread_id)
    if newest is None:  # the newest message is damaged, so use the message before it
        newest = await find_newest_message(reading.hub.ledger, summary.thread_id, summary.last_seq + 1)
    if newest is None or newest.head is None:
        return None
    if not (reading.origin.is_operator or may_read(reading.hub.state, reading.origin.agent_id, newest.head)):
        return None
    takeover = describe_takeover(reading.hub.state, reading.origin, summary.thread_id)
    return {
        "thread_id": summary.thread_id,
        "title": await _write_title(reading, newest.head, ends, mark.title if mark is not None else ""),
        "last_seq": summary.last_seq,
        "messages": summary.messages,
        "readers": sorted(_shown_readers(reading, newest.head)),
        "last": describe_thread_message(newest),
        "unread": unread,
        **({"mark": describe_read_state(mark)} if mark is not None else {}),
        **({"held": takeover} if takeover is not None else {}),
        **({"may_take": True} if _may_take(reading, newest.head) else {}),
    }


def _may_take(reading: Reading, newest: MessageHead) -> bool:
    """Return whether the caller may take over a thread. ``newest`` is the newest message of this thread."""
    state, origin = reading.hub.state, reading.origin
    # Check who could read the next message, not the newest one. A member who has left may read the newest message but
    # is no longer in the thread.
    is_in = origin.is_operator or may_read(state, origin.agent_id, next_message_head(state, newest))
    return newest.kind != "mod" and is_in and may_take(state, origin, newest)


async def _write_title(reading: Reading, newest: MessageHead, ends: _Ends, own: str) -> str:
    """Return the title of a thread as the caller sees it. ``own`` is the title that the caller has set, or an empty
    string."""
    thread_id, me, state = newest.thread_id, reading.origin.agent_id, reading.hub.state
    start = thread_start(thread_id)
    place = name_place(thread_id if start is None else newest.to, me)
    if newest.kind == "channel":
        channel = state.channel(name_of(newest.to))
        is_known = channel is not None and is_found(state, reading.origin, channel)
        place = f"#{channel.title}" if channel is not None and is_known and channel.title else place
    quotes = not own and _is_quoted(reading, thread_id)
    words = await _first_words(reading, thread_id, ends.first.get(thread_id)) if quotes else ""
    return write_title(place, words or ("" if start is None else f"replies to #{start}"), own)


def _is_quoted(reading: Reading, thread_id: str) -> bool:
    """Return whether the title of a thread quotes the thread's first message."""
    parties = thread_parties(thread_id) if thread_id.startswith("direct:") else ()
    participants = [reading.hub.state.participant(agent_id) for agent_id in parties]
    return is_about_something(
        thread_id, has_agent=any(member is not None and member.kind == "agent" for member in participants)
    )


async def _first_words(reading: Reading, thread_id: str, first: Row | None) -> str:
    """Return the first text of a thread that the caller may read: in a reply thread the text of the message that was
    replied to, and otherwise the text of the thread's first message."""
    row = first if first is not None and reads(reading, first.head) else None
    if row is None:  # read more messages only if the first one may not be shown, because messages may be large
        page = await reading.hub.ledger.thread(thread_id, limit=FIRST_LOOKED_AT, newest=False)
        row = next(
            (candidate for candidate in page.rows if not candidate.is_damaged and reads(reading, candidate.head)), None
        )
    return describe_thread_message(row)["text"] if row is not None else ""


def _shown_readers(reading: Reading, head: MessageHead) -> set[str]:
    """Return the readers of a thread whom the caller may know. A caller who is not in the channel must not learn who
    joined later, so such a caller sees only recipients of the newest message."""
    state, origin = reading.hub.state, reading.origin
    readers = thread_readers(state, head)
    if origin.is_operator or head.kind != "channel" or state.member(name_of(head.to), origin.agent_id).is_in:
        return readers
    return readers & {head.sender_id, *recipients(state, head)}


# --- progress of a message


async def message_status(reading: Reading, *, seq: Seq, after: str = "", limit: Limit = 500) -> dict[str, Any]:
    """Progress of a message at each of its recipients, by recipient id. Only ids above `after`."""
    head = await find_message(reading, seq, "seq")
    hub = reading.hub
    named = heapq.nsmallest(limit + 1, (name for name in recipients(hub.state, head) if name > after))
    page = ListPage(limit, hub.limits.max_result_bytes)
    while named and not page.has_more:
        chosen, named = named[:RECIPIENTS_AT_ONCE], named[RECIPIENTS_AT_ONCE:]
        wanted: set[tuple[Table, str]] = {("triggered", f"{name}/{seq}") for name in chosen}
        wanted |= {("dead", f"{name}/{seq:016d}") for name in chosen}
        wanted |= {("tried", f"{name}/{seq:016d}") for name in chosen}
        # Read the state in memory before the ledger, so that the ledger's data is at least as new.
        now = {name: _read_progress(reading, name, seq) for name in chosen}
        cold = (await hub.ledger.lookup(LookupRequest(set(), set(), wanted))).cold
        for agent_id in chosen:
            if not page.add(await _describe_recipient(reading, agent_id, seq, now[agent_id], cold)):
                break
    return {"seq": seq, "recipients": page.entries, "has_more": page.has_more}


class _RecipientProgress(NamedTuple):
    """Progress of a message at one recipient, as far as the hub's memory shows it."""

    is_delivered: bool
    is_handled: bool
    attempts: int
    is_over: bool
    """Whether the message is handled and its failures are no longer in memory. If so, only the ledger knows the number
    of attempts."""


def _read_progress(reading: Reading, agent_id: str, seq: int) -> _RecipientProgress:
    hub = reading.hub
    attempt: Attempt | None = hub.state.get("attempt", f"{agent_id}/{seq}")
    failures = attempt.failures if attempt is not None else 0
    is_delivered, is_handled = hub.delivered_up_to(agent_id) >= seq, hub.is_handled(agent_id, seq)
    is_here = (is_handled or is_delivered) and not hub.is_waiting(agent_id, seq)
    return _RecipientProgress(is_delivered, is_handled, failures + is_here, is_handled and attempt is None)


async def _describe_recipient(
    reading: Reading, agent_id: str, seq: int, now: _RecipientProgress, cold: Mapping[tuple[str, str], Any]
) -> dict[str, Any]:
    """Return the progress of a message at one of its recipients."""
    triggered: TriggeredReactions | None = cold.get(("triggered", f"{agent_id}/{seq}"))
    letter: DeadLetter | None = cold.get(("dead", f"{agent_id}/{seq:016d}"))
    tried: AttemptCount | None = cold.get(("tried", f"{agent_id}/{seq:016d}"))
    started, is_in_prompt = triggered.first if triggered is not None else None, triggered is not None
    if started is None:
        # No reaction has this message as its trigger, but a later reaction may have it in its prompt.
        started, is_in_prompt = await _reaction_with(reading, agent_id, seq)
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
        state = "removed"  # a removed agent does not continue its reactions
    entry: dict[str, Any] = {"agent_id": agent_id, "state": state, "attempts": attempts}
    if started is not None:
        entry["reaction"] = started.reaction
        status = entry["reaction_status"] = await _reaction_status(reading, agent_id, started)
        newest = triggered.all[-1] if triggered is not None else started
        # A takeover cancelled the first reaction, and the agent has started another one.
        if status == "cancelled" and newest != started:
            again = await _reaction_status(reading, agent_id, newest)
            entry["again"] = {"reaction": newest.reaction, "reaction_status": again}
        opened: OpenReaction | None = reading.hub.state.get("reaction", f"{agent_id}/{newest.reaction}")
        if opened is not None and is_blocked_by_takeover(reading.hub.state, opened):
            entry["is_overtaken"] = True
    return entry


async def _reaction_with(reading: Reading, agent_id: str, seq: int) -> tuple[ReactionStart | None, bool]:
    """Return the first reaction of an agent whose prompt contained a message that was not its trigger, and whether such
    a reaction exists. The reaction itself is returned only if the caller may read its trigger."""
    after = seq
    # Read only a few reactions first. In nearly all cases, the very next reaction is the wanted reaction, or there is
    # no such reaction.
    for size in (4, REACTIONS_SEARCHED - 4):
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


async def _reaction_status(reading: Reading, agent_id: str, started: ReactionStart) -> str:
    """Return how a reaction ended, or ``open``. Readers of its trigger learn nothing else from the records of the
    reaction."""
    opened: OpenReaction | None = reading.hub.state.get("reaction", f"{agent_id}/{started.reaction}")
    if opened is not None:
        return "cancelled" if is_blocked_by_takeover(reading.hub.state, opened) else "open"
    page = await reading.hub.ledger.records(agent_id, "finished", started.seq, 1, reaction=started.reaction)
    for row in page.rows:
        body = msgspec.json.decode(row.data) if not row.is_damaged else None
        status = body.get("status") if isinstance(body, dict) else None
        return status if status in ("stopped", "cancelled", "failed") else "finished"
    return "finished"  # retention has deleted the records of the reaction


async def screens(reading: Reading) -> dict[str, Any]:
    """List the screens that this hub's mods describe, in the order of the node's `mods`. A client draws them with the
    operations that they name."""
    return {
        "screens": [
            {**msgspec.to_builtins(screen), "mod": mod.id} for mod in reading.hub.mods for screen in mod.screens
        ]
    }
