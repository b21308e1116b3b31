"""What a reader may see of the conversation: a thread's ``history``, the ``window`` of an agent's prompt, ``why`` a
message was said (its causes, up to the root) and its ``impact`` (what followed from it).

A caller is shown what it may read; for a ``trigger``, what may enter the prompt of an agent's reaction to that message.
Both are a `View`. Reads, changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Set
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw

from roundelay.network.addresses import BROADCAST, thread_parties
from roundelay.network.core.rows import MessageHead, Row
from roundelay.network.core.tables import ConversationBudget, ReactionStart, TriggeredReactions
from roundelay.network.core.takeovers import describe_takeover, next_message_head
from roundelay.network.core.visibility import VISIBILITIES, PromptFilter, Visibility, audience, may_read, readable_spans
from roundelay.network.errors import UnknownMessage
from roundelay.network.frames import SEQ_LIMIT, Seq
from roundelay.network.ledger.search import PRIVATE

from .head_cache import HeadGroup, NewestHeads
from .paging import ListPage
from .reading import Reading, reads, reads_as_itself

Limit = Annotated[int, Meta(ge=1, le=500)]
PAGE = 500
"""Rows that are read at a time."""
MAX_WINDOW_THREADS = 100
SCANNED = 4000
"""How far back a window looks for threads beside the incoming one, in messages that the agent may read."""
THREADS_AT_ONCE = 32
"""Threads whose heads a window reads at once."""
ROWS_AT_ONCE = 16
"""Messages that a window reads at once: they may be large."""
DROPPED = Row(seq=0, at=0, type="message", actor="", data=b"")
"""In place of a message that is gone by the time that its row is read."""
SCANNED_ROWS = 2000
"""Rows of the log that one call of `impact` looks through: which messages followed from which is in no index."""


# --- what may be shown


class View:
    """What one call may show: all that the caller may read, or what may enter the prompt of a reaction of its
    agent's."""

    def __init__(self, reading: Reading, trigger: MessageHead | None = None, until: int | None = None) -> None:
        self.trigger = trigger
        self.until = until
        """Nothing later is shown: the trigger, or what was asked for. None without a trigger."""
        self.filters: list[PromptFilter] = []
        self.required: frozenset[str] = frozenset()
        """People who have to be among those of each message that is shown."""
        self._reading = reading
        self._labels: dict[int, MessageHead] = {}
        """Heads of the messages that labels name, each read once per call."""
        self._groups: dict[HeadGroup, bool] = {}
        self._own_thread: str | None = None
        """The trigger's thread, where nothing is shown beside it: `_groups` does not tell threads apart."""

    @property
    def shows_own_thread_alone(self) -> bool:
        """Whether nothing is shown beside the trigger's own thread."""
        return any(rule.visibility == "current" for rule in self.filters)

    async def load(self, heads: Iterable[MessageHead]) -> None:
        """Read what is needed to decide on these messages, at once."""
        if self.trigger is None:
            return
        known = {head.seq: head for head in heads}
        self._labels |= known
        # not a set less the keys: that walks through all that is known
        missing = {head.label for head in known.values() if head.label not in self._labels}
        if missing:
            self._labels |= await self._reading.hub.ledger.heads(missing)

    async def shows(self, head: MessageHead | None) -> bool:
        if head is None or self.trigger is None:
            return reads(self._reading, head)
        label = self._labels.get(head.label)
        if label is None and reads_as_itself(self._reading, head):
            label = await _find_label(self._reading, head)
            if label.seq == head.label:  # else it is gone or damaged, and each message stands for itself
                self._labels[head.label] = label
        return self._admits(head, label or head)

    def _admits(self, head: MessageHead, label: MessageHead) -> bool:
        if not reads_as_itself(self._reading, head):  # what an agent sees is no wider for being an operator's
            return False
        return all(rule.admits(head, label) for rule in self.filters)

    def shows_group(self, group: HeadGroup | None) -> bool:
        """Whether the messages of a group may be shown, as far as their heads say."""
        if self._own_thread is not None and group is not None and group.thread_id != self._own_thread:
            return False
        if group is None or (group.parties is not None and not self.required <= group.parties):
            return False
        shown = self._groups.get(group.alike)
        if shown is None:
            shown = self._groups[group.alike] = self._admits(group.head, group.label)
        return shown

    def excludes_group(self, group: HeadGroup) -> bool:
        """Whether nothing of the thread of a group can be shown."""
        return group.is_settled and group.parties is not None and not self.required <= group.parties

    def excludes(self, thread_id: str) -> bool:
        """Whether nothing of a thread can be shown, as its id says."""
        return any(rule.excludes(thread_id) for rule in self.filters)

    async def choose(self, rows: Iterable[Row]) -> list[Row]:
        """Those of these rows that are messages which may be shown."""
        heads = [(row, row.head) for row in rows if row.head is not None]
        await self.load(head for _, head in heads)
        return [row for row, head in heads if await self.shows(head)]


async def open_view(
    reading: Reading, trigger: int | None, visibility: Visibility | None = None, until: int | None = None
) -> View:
    """The view of a call, for the reaction to ``trigger`` if there is one; ``visibility`` narrows what the card and the
    network allow. ``until``: what has come since may be shown too, up to there, to those alone for whom the trigger is.

    Raises `UnknownMessage` for a trigger that the caller may not read.
    """
    if trigger is None:
        return View(reading)
    head = await find_message(reading, trigger, "trigger")
    view = View(reading, head, max(trigger, until or 0))
    rules = {_visibility(reading), *((visibility,) if visibility is not None else ())}
    label = await _find_label(reading, head)
    view.filters = [PromptFilter(reading.hub.state, rule, head, label, view.until) for rule in rules]
    view._own_thread = head.thread_id if view.shows_own_thread_alone else None
    view.required = frozenset().union(*(it.required for it in view.filters))
    return view


async def find_message(reading: Reading, seq: int, field: str, view: View | None = None) -> MessageHead:
    """The head of a message that the caller may read, or see in ``view``. Raises `UnknownMessage`, in the same words
    whether it exists or not."""
    head = (await reading.hub.ledger.heads([seq])).get(seq)
    if head is None or not await (view or View(reading)).shows(head):
        raise UnknownMessage(
            f"There is no message {seq} that {reading.origin.agent_id} may read. {field} must be the seq of a message."
        )
    return head


async def find_audience(reading: Reading, trigger: int | None) -> frozenset[str]:
    """For whom the reaction to a message works: what a tool reads in it they must be allowed to know. Nobody without
    a trigger, and under ``all``.

    Raises `UnknownMessage` for a trigger that the caller may not read.
    """
    if trigger is None:
        return frozenset()
    head = await find_message(reading, trigger, "trigger")
    if _visibility(reading) == "all":
        return frozenset()
    return audience(reading.hub.state, await _find_label(reading, head), head.seq)


async def _find_label(reading: Reading, head: MessageHead) -> MessageHead:
    if head.label == head.seq:
        return head
    return (await reading.hub.ledger.heads([head.label])).get(head.label, head)


def _visibility(reading: Reading) -> Visibility:
    """The agent's own, from its card, else the network's."""
    participant = reading.hub.state.participant(reading.origin.agent_id)
    if participant is not None and participant.card is not UNSET:
        card = msgspec.json.decode(participant.card)
        wish = card.get("visibility") if isinstance(card, dict) else None
        for known in VISIBILITIES:
            if wish == known:
                return known
    return reading.hub.network_visibility


def _take_newest(rows: list[Row], max_bytes: int) -> list[Row]:
    """The newest of ascending rows that fit."""
    start, size = len(rows), 0
    while start and (size := size + len(rows[start - 1].data)) <= max_bytes:
        start -= 1
    return rows[start:]


# --- a thread, and the threads of a prompt


async def history(
    reading: Reading,
    *,
    thread_id: str,
    before: Seq | None = None,
    limit: Limit = 50,
    trigger: Seq | None = None,
    visibility: Visibility | None = None,
    until: Seq | None = None,
) -> dict[str, Any]:
    """Messages of one thread, oldest first. With a `trigger` only what an agent may see in its reaction to
    that message, what has come since included up to `until`."""
    view = await open_view(reading, trigger, visibility, until)
    if view.until is not None:
        before = view.until + 1 if before is None else min(before, view.until + 1)
    room = reading.hub.limits.max_result_bytes
    rows: list[Row] = []
    damaged: list[int] = []
    size, has_more = min(PAGE, limit + 1), True
    while has_more and len(rows) <= limit and sum(len(row.data) for row in rows) <= room:
        read, has_more = await reading.hub.ledger.thread(thread_id, before=before, limit=size, max_bytes=room)
        rows[:0] = await view.choose(read)
        damaged[:0] = [row.seq for row in read if row.is_damaged]
        before, size = read[0].seq if read else before, min(PAGE, size * 4)
    if not rows and not await _is_open_thread(reading, thread_id):
        raise UnknownMessage(
            f"There is no thread {thread_id!r} that {reading.origin.agent_id} may read; "
            "network.list_threads lists those that there are."
        )
    shown = _take_newest(rows[-limit:], room) or rows[-1:]
    is_cut = has_more or len(rows) > len(shown)
    value = {"messages": [Raw(row.data) for row in shown], "has_more": is_cut}
    # whose they are is unknown: they are told of as far as this answer reaches, to who reads what is around them
    missing = [seq for seq in damaged if not is_cut or (shown and seq > shown[0].seq)]
    hold = describe_takeover(reading.hub.state, reading.origin, thread_id) if trigger is None else None
    return {
        **value,
        **({"damaged": missing} if missing else {}),
        **({"held": hold} if hold is not None else {}),
    }


async def _is_open_thread(reading: Reading, thread_id: str) -> bool:
    """Whether an empty history is an answer: the thread of a place that exists and that the caller belongs to."""
    kind, _, name = thread_id.partition(":")
    agent_id, state = reading.origin.agent_id, reading.hub.state
    if thread_id == BROADCAST:
        return True
    if (hold := state.takeovers.get(thread_id)) is not None:
        return reading.origin.is_operator or may_read(state, agent_id, next_message_head(state, hold.head))
    if kind == "channel" and state.channel(name) is not None:
        return reading.origin.is_operator or bool(state.member(name, agent_id).spans)
    if kind == "direct":
        one, other = thread_parties(thread_id)
        are_known = state.participant(one) is not None and state.participant(other) is not None
        return agent_id in (one, other) and are_known and one <= other
    if kind == "mod":
        mod, participant = thread_parties(thread_id)
        return mod in reading.hub.mod_ids and participant == agent_id
    return False


async def window(
    reading: Reading,
    *,
    trigger: Seq,
    threads: Annotated[int, Meta(ge=1, le=100)] | list[str] | None = None,
    per_thread: Limit | None = None,
    visibility: Visibility | None = None,
) -> dict[str, Any]:
    """The conversation that an agent may see for a trigger: threads in a stable order, messages oldest first.

    `threads` is how many (20) or which; the trigger's own thread is always among them. Up to the trigger, nothing
    later. A `visibility` narrows what the agent's card and the network allow. An operator sees here what it reads as
    itself: a prompt is never wider than its agent.
    """
    view = await open_view(reading, trigger, visibility)
    assert view.trigger is not None, "a window has a trigger"
    named = threads if isinstance(threads, list) else None
    most = threads if isinstance(threads, int) else MAX_WINDOW_THREADS if named is not None else 20
    scanned = await _scan(reading, view.trigger) if named is None and not view.shows_own_thread_alone else None
    damaged: set[int] = set()
    while True:
        order = _order_threads(view, view.trigger, named, scanned)
        chosen, looked = await _choose_threads(reading, view, order, most, per_thread or 10, damaged)
        found = await _read_chosen(reading, view, chosen)
        if not found:
            break
        damaged |= found  # others take the places of these
    shown = [(await reading.hub.recent.find_begin(reading.hub.ledger, it.thread_id, it.tail), it) for it in chosen]
    # in the order in which they began, so that a thread keeps its place while the conversation goes on
    ordered = [it.describe(damaged) for _, it in sorted(shown, key=lambda it: (it[0], it[1].thread_id))]
    omitted = _count_threads(view, scanned, looked) if scanned is not None else 0
    return {"threads": ordered, "as_of": trigger, **({"omitted_threads": omitted} if omitted else {})}


async def _scan(reading: Reading, trigger: MessageHead) -> NewestHeads | None:
    """The newest messages that the agent may read, up to the trigger."""
    participant = reading.hub.state.participant(reading.origin.agent_id)
    if participant is None:
        return None
    spans = readable_spans(reading.hub.state, participant)
    return await reading.hub.recent.inbox(reading.hub.ledger, spans, participant.agent_id, trigger.seq, SCANNED)


def _order_threads(
    view: View, trigger: MessageHead, named: list[str] | None, scanned: NewestHeads | None
) -> Iterator[tuple[str, int]]:
    """Threads to look into, some more than once: the trigger's first, then those named, or those with the newest
    messages before it. With each, the seq up to which it has to be read: from there to the trigger nothing is in it."""
    yield trigger.thread_id, trigger.seq
    for thread_id in named or ():
        yield thread_id, trigger.seq
    if scanned is not None:
        is_damaged = None in scanned.groups  # such a row may be of any thread
        known: set[HeadGroup] = set()
        # newest first, and no further than threads are wanted
        for seq, group in zip(reversed(scanned.seqs), reversed(scanned.groups), strict=True):
            if group is None or group in known:
                continue
            known.add(group)
            if not view.excludes_group(group):
                # whatever is said in private to the agent, or by it, is among what was scanned
                is_private = group.head.kind in PRIVATE and not is_damaged
                yield group.thread_id, seq if is_private else trigger.seq


def _count_threads(view: View, scanned: NewestHeads, looked: Set[str]) -> int:
    """How many further threads there are of which something may be shown."""
    alike = {it.alike for it in scanned.groups if it is not None}  # thousands of threads may have a few rules
    shown = {it for it in alike if view.shows_group(it)}
    threads = {it.thread_id for it in scanned.groups if it is not None and it.alike in shown}
    return len(threads) - len(threads & looked)


class _ChosenThread:
    """A thread of a window: its newest messages that may be shown, and those of them that are."""

    def __init__(self, thread_id: str, tail: NewestHeads, view: View, per_thread: int, damaged: Set[int]) -> None:
        self.thread_id = thread_id
        self.tail = tail
        admitted = {it for it in set(tail.groups) if view.shows_group(it)}
        pairs = zip(tail.seqs, tail.groups, strict=True)
        seqs = [seq for seq, group in pairs if group in admitted and seq not in damaged]
        self.seqs = _since_landmark(seqs) if seqs and tail.has_older else seqs
        self.wanted = self.seqs[: -per_thread - 1 : -1]
        """What is shown as far as there is room, newest first."""
        self.rows: list[Row] = []
        """What is shown, oldest first."""

    def describe(self, damaged: Set[int]) -> dict[str, Any]:
        # omitted: earlier messages that could be shown too, as far as was looked
        omitted = len(self.seqs) - len(self.rows)
        entry = {"thread_id": self.thread_id, "messages": [Raw(row.data) for row in self.rows], "omitted": omitted}
        start = self.rows[0].seq if self.rows else SEQ_LIMIT
        pairs = zip(self.tail.seqs, self.tail.groups, strict=True)
        missing = [seq for seq, group in pairs if seq > start and (group is None or seq in damaged)]
        return {**entry, "damaged": missing} if missing else entry


async def _choose_threads(
    reading: Reading, view: View, order: Iterator[tuple[str, int]], most: int, per_thread: int, damaged: Set[int]
) -> tuple[list[_ChosenThread], set[str]]:
    """The threads of a window, and all that were looked into for them."""
    assert view.trigger is not None, "a window has a trigger"
    own, until = view.trigger.thread_id, view.trigger.seq
    chosen: list[_ChosenThread] = []
    looked: set[str] = set()
    # several at once: each read is a turn of the ledger's thread, and of some threads nothing may be shown
    while len(chosen) < most and (batch := _take_new(order, max(most - len(chosen), THREADS_AT_ONCE), looked)):
        asked = {it: seq for it, seq in batch.items() if it == own or not view.excludes(it)}
        tails = await reading.hub.recent.threads(reading.hub.ledger, asked, until, PAGE)
        for thread_id in batch:
            if len(chosen) == most:
                break
            looked.add(thread_id)
            if thread_id in tails:
                thread = _ChosenThread(thread_id, tails[thread_id], view, per_thread, damaged)
                if thread.seqs:
                    chosen.append(thread)
    return chosen, looked


def _take_new(order: Iterator[tuple[str, int]], limit: int, known: Set[str]) -> dict[str, int]:
    """The next threads that are not known."""
    batch: dict[str, int] = {}
    while len(batch) < limit and (following := next(order, None)) is not None:
        thread_id, seq = following
        if thread_id not in known:
            batch.setdefault(thread_id, seq)
    return batch


async def _read_chosen(reading: Reading, view: View, chosen: list[_ChosenThread]) -> set[int]:
    """Read what is shown of each thread, newest first, as far as there is room. Gives those that are damaged: then
    others are to be chosen."""
    room = reading.hub.limits.max_result_bytes
    wanted = [seq for it in chosen for seq in it.wanted]
    places = {seq: place for place, seq in enumerate(wanted)}
    rows: dict[int, Row] = {}
    damaged: set[int] = set()
    for thread in chosen:
        thread.rows = []
        for seq in thread.wanted:
            if seq not in rows:
                page = wanted[places[seq] : places[seq] + ROWS_AT_ONCE]
                rows |= dict.fromkeys(page, DROPPED) | await reading.hub.ledger.messages(page)
            row = rows[seq]
            if row.is_damaged:
                damaged.add(seq)
            elif row.data:
                room -= len(row.data)
                if room < 0:
                    room += len(row.data)
                    break
                thread.rows.insert(0, row)
    # by their whole heads now, compared with what was stored
    admitted = {row.seq for row in await view.choose(row for it in chosen for row in it.rows)}
    for thread in chosen:
        thread.rows = [row for row in thread.rows if row.seq in admitted]
    return damaged


def _since_landmark(seqs: list[int]) -> list[int]:
    """Of the newest messages of a longer thread, those from one on that stays the first for a while: the one in their
    older half whose seq is divisible by the highest power of two. Were they counted from the oldest that was looked at,
    that would be another one with each message, and the count would never grow."""
    half = seqs[: max(1, len(seqs) // 2)]
    return seqs[seqs.index(max(half, key=lambda seq: (seq & -seq, seq))) :]


# --- why something was said, and what came of it


async def why(
    reading: Reading, *, seq: Seq, trigger: Seq | None = None, visibility: Visibility | None = None
) -> dict[str, Any]:
    """What a message follows from: it, the reaction that sent it, the message before, up to the root.

    With a `trigger` only what an agent may see in its reaction to that message.
    """
    view = await open_view(reading, trigger, visibility)
    chain: list[Any] = []
    messages = ListPage(PAGE * PAGE, reading.hub.limits.max_result_bytes)
    head: MessageHead | None = await find_message(reading, seq, "seq", view)
    while head is not None:
        is_seen = await view.shows(head)
        if is_seen:
            row = (await reading.hub.ledger.messages([head.seq])).get(head.seq)
            if row is None or row.is_damaged or not messages.add(Raw(row.data)):  # gone meanwhile, broken, or no room
                break
            chain.append(messages.entries[-1])
        if head.cause is None:
            break
        if is_seen and await shows_cause(view, reading, head):
            sent_in = await find_reaction(reading, head)
            if sent_in is not None:
                chain.append(sent_in)
        head = (await reading.hub.ledger.heads([head.cause])).get(head.cause)
    return {"chain": chain, "has_more": messages.has_more}


async def impact(
    reading: Reading,
    *,
    seq: Seq,
    after: Seq | None = None,
    limit: Limit = 100,
    trigger: Seq | None = None,
    visibility: Visibility | None = None,
) -> dict[str, Any]:
    """What followed from a message: messages above `after`, ascending, and the reactions that sent them.

    `next` is the `after` to go on with, as long as there is more to look through. With a `trigger` only what an agent
    may see in its reaction to that message.
    """
    view = await open_view(reading, trigger, visibility)
    start = await find_message(reading, seq, "seq", view)
    head, room = reading.hub.state.head, reading.hub.limits.max_result_bytes
    budget: ConversationBudget | None = await reading.hub.ledger.lookup_cold("root", str(start.root))
    end = min(budget.last_seq, head) if budget is not None else seq
    place = max(seq, after or seq)
    follows = {seq: True}
    messages = ListPage(limit, room)
    reactions: list[dict[str, Any]] = []
    scanned = 0
    while place < end and scanned < SCANNED_ROWS and not messages.has_more:
        rows = await reading.hub.ledger.rows(place, min(PAGE, SCANNED_ROWS - scanned), max_bytes=room)
        scanned += len(rows)
        for row in rows:
            if row.seq > end:
                break
            found = row.head if row.head is not None and row.head.root == start.root else None
            # what is not shown ends no page either: its place would be told
            if found is not None and await _follows(reading, found, follows) and await view.shows(found):
                if not messages.add(Raw(row.data)):
                    break
                sent_in = await find_reaction(reading, found) if await shows_cause(view, reading, found) else None
                if sent_in is not None and sent_in not in reactions:
                    reactions.append(sent_in)
            place = row.seq
        if not rows or rows[-1].seq > end:
            place = place if messages.has_more else end
    has_more = place < end
    # the last of the conversation may be a message that the caller may not read: it is not named
    following = place if has_more else max(head, place)
    return {"messages": messages.entries, "reactions": reactions, "next": following, "has_more": has_more}


def find_open(begun: Iterable[ReactionStart], finished: Collection[tuple[str, int]], seq: int) -> ReactionStart | None:
    """Of an agent's reactions to one message, the one that was open when the agent wrote ``seq``, or None; of several
    the newest.

    ``finished`` are reactions with the seqs of their ``finished`` records. Files are explained by this rule too.
    """
    is_open = [
        it
        for it in begun
        if it.seq < seq and not any(it.reaction == name and it.seq < at < seq for name, at in finished)
    ]
    return max(is_open, key=lambda it: it.seq, default=None)


async def find_reaction(reading: Reading, head: MessageHead) -> dict[str, Any] | None:
    """The reaction that a message was sent in, as far as there is one."""
    agent_id, ledger = head.sender_id, reading.hub.ledger
    triggered: TriggeredReactions | None = await ledger.lookup_cold("triggered", f"{agent_id}/{head.cause}")
    begun = [it for it in triggered.all if it.seq < head.seq] if triggered is not None else []
    finished = []
    for it in begun:
        page = await ledger.records(agent_id, "finished", it.seq, 1, reaction=it.reaction)
        finished += [(row.stream, row.seq) for row in page.rows]
    found = find_open(begun, finished, head.seq)
    if found is None:
        return None
    return {"reaction": found.reaction, "agent_id": agent_id, "trigger": head.cause, "seq": found.seq}


async def shows_cause(view: View, reading: Reading, head: MessageHead) -> bool:
    """Whether the trigger of the reaction that a message was sent in may be shown: its cause."""
    if head.cause is None:
        return False
    return await view.shows((await reading.hub.ledger.heads([head.cause])).get(head.cause))


async def _follows(reading: Reading, head: MessageHead, known: dict[int, bool]) -> bool:
    """Whether a message follows from the one that ``known`` began with, up its causes; every step is remembered."""
    path: list[int] = []
    first = min(known)
    answer = known.get(head.seq)
    at: MessageHead | None = head
    while answer is None and at is not None:
        path.append(at.seq)
        if at.cause is None or at.cause < first:
            break
        answer = known.get(at.cause)
        if answer is None:
            at = (await reading.hub.ledger.heads([at.cause])).get(at.cause)
    known.update(dict.fromkeys(path, bool(answer)))
    return bool(answer)
