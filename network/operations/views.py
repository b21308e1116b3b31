"""Operations that show views of a conversation. ``history`` shows a thread, and ``window`` shows the messages of an
agent's prompt. ``why`` shows the causes of a message up to the root, and ``impact`` shows its effects.

Without a ``trigger``, a caller sees the messages that it may read. With a ``trigger``, it sees the messages that may
enter the prompt of an agent's reaction to this message. `View` implements both rules.
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
from .standing import describe_standing
from .window_size import WindowSize, is_alone

Limit = Annotated[int, Meta(ge=1, le=500)]
PAGE = 500
"""Number of rows that are read from the ledger in one step."""
MAX_WINDOW_THREADS = 100
SCANNED = 4000
"""Maximum number of readable messages that a window examines to find threads besides the trigger's thread."""
THREADS_AT_ONCE = 32
"""Number of threads whose heads a window reads in one step."""
ROWS_AT_ONCE = 16
"""Number of messages that a window reads in one step. The number is small because messages may be large."""
DROPPED = Row(seq=0, at=0, type="message", actor="", data=b"")
"""Placeholder for a message that was deleted before its row was read."""
SCANNED_ROWS = 2000
"""Maximum number of rows that one call of `impact` scans. There is no index of the messages that follow from a message,
so without this limit, a call could scan the whole log."""


# --- visibility


class View:
    """The rule that decides which messages one call shows: all messages that the caller may read, or only messages that
    may enter the prompt of the caller's reaction."""

    def __init__(self, reading: Reading, trigger: MessageHead | None = None, until: int | None = None) -> None:
        self.trigger = trigger
        self.until = until
        """Newest seq that may be shown: the seq of the trigger, or a later seq that the call has requested. None
        without a trigger."""
        self.filters: list[PromptFilter] = []
        self.required: frozenset[str] = frozenset()
        """People who must be able to read every message that is shown."""
        self._reading = reading
        self._labels: dict[int, MessageHead] = {}
        """Heads of the messages to which labels refer, by seq. Each head is read once per call."""
        self._groups: dict[HeadGroup, bool] = {}
        self._own_thread: str | None = None
        """Thread of the trigger if no other thread may be shown, otherwise None. It is checked separately, because the
        decisions in `_groups` do not depend on it."""

    @property
    def shows_own_thread_alone(self) -> bool:
        """Whether only messages of the trigger's own thread may be shown."""
        return any(rule.visibility == "current" for rule in self.filters)

    async def load(self, heads: Iterable[MessageHead]) -> None:
        """Read everything that is needed to decide on these messages, in one step."""
        if self.trigger is None:
            return
        by_seq = {head.seq: head for head in heads}
        self._labels |= by_seq
        # Do not use a set difference with the keys, because it would iterate over all known labels.
        missing = {head.label for head in by_seq.values() if head.label not in self._labels}
        if missing:
            self._labels |= await self._reading.hub.ledger.heads(missing)

    async def shows(self, head: MessageHead | None) -> bool:
        if head is None or self.trigger is None:
            return reads(self._reading, head)
        label = self._labels.get(head.label)
        if label is None and reads_as_itself(self._reading, head):
            label = await _find_label(self._reading, head)
            # If the seqs differ, the labeled message is missing or damaged. Each message is then its own label.
            if label.seq == head.label:
                self._labels[head.label] = label
        return self._admits(head, label or head)

    def _admits(self, head: MessageHead, label: MessageHead) -> bool:
        # Ignore operator rights, because they must not extend what an agent sees in a prompt.
        if not reads_as_itself(self._reading, head):
            return False
        return all(rule.admits(head, label) for rule in self.filters)

    def shows_group(self, group: HeadGroup | None) -> bool:
        """Return whether the messages of a group may be shown. Only the heads of the messages are checked."""
        if self._own_thread is not None and group is not None and group.thread_id != self._own_thread:
            return False
        if group is None or (group.parties is not None and not self.required <= group.parties):
            return False
        shown = self._groups.get(group.alike)
        if shown is None:
            shown = self._groups[group.alike] = self._admits(group.head, group.label)
        return shown

    def excludes_group(self, group: HeadGroup) -> bool:
        """Return whether certainly no message in the thread of a group can be shown."""
        return group.is_settled and group.parties is not None and not self.required <= group.parties

    def excludes(self, thread_id: str) -> bool:
        """Return whether the id of a thread alone shows that none of its messages can be shown."""
        return any(rule.excludes(thread_id) for rule in self.filters)

    async def choose(self, rows: Iterable[Row]) -> list[Row]:
        """Return those rows that are messages and may be shown."""
        heads = [(row, row.head) for row in rows if row.head is not None]
        await self.load(head for _, head in heads)
        return [row for row, head in heads if await self.shows(head)]


async def open_view(
    reading: Reading, trigger: int | None, visibility: Visibility | None = None, until: int | None = None
) -> View:
    """Return the view of a call. With a ``trigger``, it is the view of the reaction to this message.

    ``visibility`` can only restrict what the agent's card and the network allow. With ``until``, the view also includes
    later messages up to this seq, for the same audience. Raises `UnknownMessage` for a trigger that the caller may not
    read.
    """
    if trigger is None:
        return View(reading)
    head = await find_message(reading, trigger, "trigger")
    view = View(reading, head, max(trigger, until or 0))
    rules = {_visibility(reading), *((visibility,) if visibility is not None else ())}
    label = await _find_label(reading, head)
    view.filters = [PromptFilter(reading.hub.state, rule, head, label, view.until) for rule in rules]
    view._own_thread = head.thread_id if view.shows_own_thread_alone else None
    view.required = frozenset().union(*(rule.required for rule in view.filters))
    return view


async def find_message(reading: Reading, seq: int, field: str, view: View | None = None) -> MessageHead:
    """Return the head of a message that the caller may read, or that ``view`` shows. Raises `UnknownMessage` if the
    message is missing or hidden. The error text is the same in both cases, so callers cannot learn which seqs exist."""
    head = (await reading.hub.ledger.heads([seq])).get(seq)
    if head is None or not await (view or View(reading)).shows(head):
        raise UnknownMessage(
            f"There is no message {seq} that {reading.origin.agent_id} may read. {field} must be the seq of a message."
        )
    return head


async def find_audience(reading: Reading, trigger: int | None) -> frozenset[str]:
    """Return the participants who may see everything that a tool reads during the reaction to a message. The set is
    empty without a trigger, and if the visibility is ``all``. Raises `UnknownMessage` for a trigger that the caller may
    not read."""
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
    """Return the visibility that the agent's card requests, or else the visibility of the network."""
    participant = reading.hub.state.participant(reading.origin.agent_id)
    if participant is not None and participant.card is not UNSET:
        card = msgspec.json.decode(participant.card)
        wish = card.get("visibility") if isinstance(card, dict) else None
        for visibility in VISIBILITIES:
            if wish == visibility:
                return visibility
    return reading.hub.network_visibility


def _take_newest(rows: list[Row], max_bytes: int) -> list[Row]:
    """Return as many of the newest rows as fit into ``max_bytes``. The rows must be ascending."""
    start, size = len(rows), 0
    while start and (size := size + len(rows[start - 1].data)) <= max_bytes:
        start -= 1
    return rows[start:]


# --- history and window


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
    """Messages of one thread, oldest first. With a `trigger`, only the messages that an agent may see in its reaction
    to that message, and later messages up to `until`."""
    view = await open_view(reading, trigger, visibility, until)
    if view.until is not None:
        before = view.until + 1 if before is None else min(before, view.until + 1)
    room = reading.hub.limits.max_result_bytes
    rows: list[Row] = []
    damaged: list[int] = []
    size, has_more = min(PAGE, limit + 1), True
    while has_more and len(rows) <= limit and sum(len(row.data) for row in rows) <= room:
        read, has_more = await reading.hub.ledger.thread(thread_id, before=before, limit=size, max_bytes=room)
        # Insert the rows at the front, because each page is older than the page before.
        rows[:0] = await view.choose(read)
        damaged[:0] = [row.seq for row in read if row.is_damaged]
        # Read larger pages in each round, because the view of a prompt may hide most of a long thread.
        before, size = read[0].seq if read else before, min(PAGE, size * 4)
    if not rows and not await _is_open_thread(reading, thread_id):
        raise UnknownMessage(
            f"There is no thread {thread_id!r} that {reading.origin.agent_id} may read. "
            "network.list_threads lists the threads."
        )
    shown = _take_newest(rows[-limit:], room) or rows[-1:]
    is_cut = has_more or len(rows) > len(shown)
    value = {"messages": [Raw(row.data) for row in shown], "has_more": is_cut}
    # The readers of a damaged row are unknown. Report a damaged row to callers who may read the messages around the
    # row, if the row is within the range of this answer.
    missing = [seq for seq in damaged if not is_cut or (shown and seq > shown[0].seq)]
    takeover = describe_takeover(reading.hub.state, reading.origin, thread_id) if trigger is None else None
    return {
        **value,
        **({"damaged": missing} if missing else {}),
        **({"held": takeover} if takeover is not None else {}),
    }


async def _is_open_thread(reading: Reading, thread_id: str) -> bool:
    """Return whether a thread without visible messages exists and the caller takes part in it. If so, an empty history
    is the right answer, not an error."""
    kind, _, name = thread_id.partition(":")
    agent_id, state = reading.origin.agent_id, reading.hub.state
    if thread_id == BROADCAST:
        return True
    if (takeover := state.takeovers.get(thread_id)) is not None:
        return reading.origin.is_operator or may_read(state, agent_id, next_message_head(state, takeover.head))
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
    per_other: Limit | None = None,
    after: Seq | None = None,
    visibility: Visibility | None = None,
) -> dict[str, Any]:
    """The conversation that an agent may see for a trigger: threads in a stable order, messages oldest first, nothing
    after the trigger.

    `threads` is the number of threads (20) or their ids; the trigger's own thread is always included. `per_other` is the
    number of messages of threads outside the trigger's place: its direct thread, its channel, or the broadcasts. With
    `after`, the trigger's thread shows only messages after this seq. `visibility` narrows what the agent's card and the
    network allow. Operator rights do not widen a window: a prompt never shows more than its agent may read.
    """
    view = await open_view(reading, trigger, visibility)
    assert view.trigger is not None, "a window has a trigger"
    named = threads if isinstance(threads, list) else None
    most = threads if isinstance(threads, int) else MAX_WINDOW_THREADS if named is not None else 20
    # Scan only if the call names no threads and the window may show other threads than the trigger's.
    scanned = await _scan(reading, view.trigger) if named is None and not view.shows_own_thread_alone else None
    damaged: set[int] = set()
    size = WindowSize(view.trigger, per_thread or 10, per_other, after or 0)
    while True:
        order = _order_threads(view, view.trigger, named, scanned)
        chosen, looked = await _choose_threads(reading, view, order, most, size, damaged)
        damaged_now = await _read_chosen(reading, view, chosen)
        if not damaged_now:
            break
        damaged |= damaged_now  # choose the threads and messages again without the damaged messages
    shown = [
        (await reading.hub.recent.find_begin(reading.hub.ledger, thread.thread_id, thread.tail), thread)
        for thread in chosen
    ]
    # Sort by the first message of each thread, so that a thread keeps its position while the conversation continues.
    ordered = [
        thread.describe(damaged) for _, thread in sorted(shown, key=lambda thread: (thread[0], thread[1].thread_id))
    ]
    omitted = _count_threads(view, scanned, looked) if scanned is not None and per_other is None else 0
    return {
        "threads": ordered,
        "as_of": trigger,
        **({"omitted_threads": omitted} if omitted else {}),
        **({"is_alone": True} if is_alone(reading, view.trigger) else {}),
        **({"standing": standing} if (standing := await describe_standing(reading, view)) else {}),
    }


async def _scan(reading: Reading, trigger: MessageHead) -> NewestHeads | None:
    """Return the newest messages up to the trigger that the agent may read, or None if the agent does not exist."""
    participant = reading.hub.state.participant(reading.origin.agent_id)
    if participant is None:
        return None
    spans = readable_spans(reading.hub.state, participant)
    return await reading.hub.recent.inbox(reading.hub.ledger, spans, participant.agent_id, trigger.seq, SCANNED)


def _order_threads(
    view: View, trigger: MessageHead, named: list[str] | None, scanned: NewestHeads | None
) -> Iterator[tuple[str, int]]:
    """Yield candidate threads for a window, some of them several times. The trigger's thread comes first. It is
    followed by the named threads or by the threads with the newest messages before the trigger. Each thread is yielded
    with the seq up to which it must be read. The thread has no messages between this seq and the trigger."""
    yield trigger.thread_id, trigger.seq
    for thread_id in named or ():
        yield thread_id, trigger.seq
    if scanned is not None:
        is_damaged = None in scanned.groups  # a damaged row may belong to any thread
        seen: set[HeadGroup] = set()
        # Iterate from the newest message. The caller stops when enough threads are found.
        for seq, group in zip(reversed(scanned.seqs), reversed(scanned.groups), strict=True):
            if group is None or group in seen:
                continue
            seen.add(group)
            if not view.excludes_group(group):
                # All private messages of the agent are among the scanned messages.
                is_private = group.head.kind in PRIVATE and not is_damaged
                yield group.thread_id, seq if is_private else trigger.seq


def _count_threads(view: View, scanned: NewestHeads, looked: Set[str]) -> int:
    """Return the number of threads that were not examined although they have messages that may be shown."""
    # Decide once per rule, because thousands of threads may share a few rules.
    alike = {group.alike for group in scanned.groups if group is not None}
    shown = {group for group in alike if view.shows_group(group)}
    threads = {group.thread_id for group in scanned.groups if group is not None and group.alike in shown}
    return len(threads) - len(threads & looked)


class _ChosenThread:
    """A thread of a window, with its newest messages that may be shown, and the messages that are actually shown."""

    def __init__(self, thread_id: str, tail: NewestHeads, view: View, size: WindowSize, damaged: Set[int]) -> None:
        self.thread_id = thread_id
        self.tail = tail
        admitted = {candidate for candidate in set(tail.groups) if view.shows_group(candidate)}
        pairs = zip(tail.seqs, tail.groups, strict=True)
        seqs = [seq for seq, group in pairs if group in admitted and seq not in damaged]
        self.seqs = size.limit(thread_id, _since_landmark(seqs) if seqs and tail.has_older else seqs)
        self.wanted = self.seqs[: -size.count_shown(thread_id, admitted) - 1 : -1]
        """Seqs of the messages that are shown if there is room, newest first."""
        self.rows: list[Row] = []
        """Rows of the messages that are shown, oldest first."""

    def describe(self, damaged: Set[int]) -> dict[str, Any]:
        # Count the earlier messages that were examined and may be shown, but are left out.
        omitted = len(self.seqs) - len(self.rows)
        entry = {"thread_id": self.thread_id, "messages": [Raw(row.data) for row in self.rows], "omitted": omitted}
        start = self.rows[0].seq if self.rows else SEQ_LIMIT
        pairs = zip(self.tail.seqs, self.tail.groups, strict=True)
        missing = [seq for seq, group in pairs if seq > start and (group is None or seq in damaged)]
        return {**entry, "damaged": missing} if missing else entry


async def _choose_threads(
    reading: Reading, view: View, order: Iterator[tuple[str, int]], most: int, size: WindowSize, damaged: Set[int]
) -> tuple[list[_ChosenThread], set[str]]:
    """Return the threads of a window, and the ids of all threads that were examined to find them."""
    assert view.trigger is not None, "a window has a trigger"
    own, until = view.trigger.thread_id, view.trigger.seq
    chosen: list[_ChosenThread] = []
    examined: set[str] = set()
    # Read several threads at once. Each read waits for the ledger's worker thread, and some threads show nothing.
    while len(chosen) < most and (batch := _take_new(order, max(most - len(chosen), THREADS_AT_ONCE), examined)):
        wanted = {name: seq for name, seq in batch.items() if name == own or not view.excludes(name)}
        tails = await reading.hub.recent.threads(reading.hub.ledger, wanted, until, PAGE)
        for thread_id in batch:
            if len(chosen) == most:
                break
            examined.add(thread_id)
            if thread_id in tails:
                thread = _ChosenThread(thread_id, tails[thread_id], view, size, damaged)
                if thread.seqs:
                    chosen.append(thread)
    return chosen, examined


def _take_new(order: Iterator[tuple[str, int]], limit: int, examined: Set[str]) -> dict[str, int]:
    """Return the next threads of ``order`` that were not examined yet, at most ``limit``."""
    batch: dict[str, int] = {}
    while len(batch) < limit and (following := next(order, None)) is not None:
        thread_id, seq = following
        if thread_id not in examined:
            batch.setdefault(thread_id, seq)
    return batch


async def _read_chosen(reading: Reading, view: View, chosen: list[_ChosenThread]) -> set[int]:
    """Read the chosen messages of each thread, newest first, while there is room. Return the seqs of damaged messages.
    If there are any, the caller chooses again."""
    room = reading.hub.limits.max_result_bytes
    wanted = [seq for thread in chosen for seq in thread.wanted]
    positions = {seq: position for position, seq in enumerate(wanted)}
    rows: dict[int, Row] = {}
    damaged: set[int] = set()
    for thread in chosen:
        thread.rows = []
        for seq in thread.wanted:
            if seq not in rows:
                page = wanted[positions[seq] : positions[seq] + ROWS_AT_ONCE]
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
    # Check the messages again, now with the complete heads from their rows.
    admitted = {row.seq for row in await view.choose(row for thread in chosen for row in thread.rows)}
    for thread in chosen:
        thread.rows = [row for row in thread.rows if row.seq in admitted]
    return damaged


def _since_landmark(seqs: list[int]) -> list[int]:
    """Return the newest messages of a list, starting at a landmark: the message in the older half whose seq is
    divisible by the highest power of two. The landmark stays the first message for some time. If the window began at
    the oldest examined message instead, its start would change with each message, and a model's prompt cache would
    never match."""
    half = seqs[: max(1, len(seqs) // 2)]
    return seqs[seqs.index(max(half, key=lambda seq: (seq & -seq, seq))) :]


# --- causes and effects of a message


async def why(
    reading: Reading, *, seq: Seq, trigger: Seq | None = None, visibility: Visibility | None = None
) -> dict[str, Any]:
    """The causes of a message, up to the root. They alternate: the message, the reaction that sent it, the trigger of
    that reaction, and so on.

    With a `trigger`, only what an agent may see in its reaction to that message.
    """
    view = await open_view(reading, trigger, visibility)
    chain: list[Any] = []
    # Limit only the size, so that a chain of causes is cut only if the answer would be too large.
    messages = ListPage(PAGE * PAGE, reading.hub.limits.max_result_bytes)
    head: MessageHead | None = await find_message(reading, seq, "seq", view)
    while head is not None:
        is_seen = await view.shows(head)
        if is_seen:
            row = (await reading.hub.ledger.messages([head.seq])).get(head.seq)
            # Stop at a message that is missing, damaged or too large for the rest of the page.
            if row is None or row.is_damaged or not messages.add(Raw(row.data)):
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
    """The effects of a message: later messages above `after` that follow from it, ascending, and the reactions that
    sent them.

    Continue with `next` as `after`. With a `trigger`, only what an agent may see in its reaction to that message.
    """
    view = await open_view(reading, trigger, visibility)
    start = await find_message(reading, seq, "seq", view)
    head, room = reading.hub.state.head, reading.hub.limits.max_result_bytes
    budget: ConversationBudget | None = await reading.hub.ledger.lookup_cold("root", str(start.root))
    # Scan only up to the conversation's last message, whose seq is in the budget, not up to the end of the log.
    end = min(budget.last_seq, head) if budget is not None else seq
    position = max(seq, after or seq)
    follows = {seq: True}
    messages = ListPage(limit, room)
    reactions: list[dict[str, Any]] = []
    scanned = 0
    while position < end and scanned < SCANNED_ROWS and not messages.has_more:
        rows = await reading.hub.ledger.rows(position, min(PAGE, SCANNED_ROWS - scanned), max_bytes=room)
        scanned += len(rows)
        for row in rows:
            if row.seq > end:
                break
            follower = row.head if row.head is not None and row.head.root == start.root else None
            # A hidden message must not end a page, because the caller would learn its position.
            if follower is not None and await _follows(reading, follower, follows) and await view.shows(follower):
                if not messages.add(Raw(row.data)):
                    break
                sent_in = await find_reaction(reading, follower) if await shows_cause(view, reading, follower) else None
                if sent_in is not None and sent_in not in reactions:
                    reactions.append(sent_in)
            position = row.seq
        if not rows or rows[-1].seq > end:
            position = position if messages.has_more else end
    has_more = position < end
    # Do not return the seq of the last message, because the caller may not be allowed to read it.
    following = position if has_more else max(head, position)
    return {"messages": messages.entries, "reactions": reactions, "next": following, "has_more": has_more}


def find_open(
    started: Iterable[ReactionStart], finished: Collection[tuple[str, int]], seq: int
) -> ReactionStart | None:
    """Return the reaction to a message that was open when its agent wrote the row ``seq``. If several were open, return
    the newest one. If none was open, return None.

    ``started`` contains reactions of the agent to the same message. ``finished`` contains ids of reactions with the
    seqs of their ``finished`` records. `roundelay why` uses the same rule for recordings in a file.
    """
    is_open = [
        start
        for start in started
        if start.seq < seq and not any(start.reaction == name and start.seq < at < seq for name, at in finished)
    ]
    return max(is_open, key=lambda start: start.seq, default=None)


async def find_reaction(reading: Reading, head: MessageHead) -> dict[str, Any] | None:
    """Return the reaction that sent a message, or None."""
    agent_id, ledger = head.sender_id, reading.hub.ledger
    triggered: TriggeredReactions | None = await ledger.lookup_cold("triggered", f"{agent_id}/{head.cause}")
    started = [start for start in triggered.all if start.seq < head.seq] if triggered is not None else []
    finished = []
    for start in started:
        page = await ledger.records(agent_id, "finished", start.seq, 1, reaction=start.reaction)
        finished += [(row.stream, row.seq) for row in page.rows]
    newest = find_open(started, finished, head.seq)
    if newest is None:
        return None
    return {"reaction": newest.reaction, "agent_id": agent_id, "trigger": head.cause, "seq": newest.seq}


async def shows_cause(view: View, reading: Reading, head: MessageHead) -> bool:
    """Return whether the cause of a message may be shown. The cause is the trigger of the reaction that sent the
    message."""
    if head.cause is None:
        return False
    return await view.shows((await reading.hub.ledger.heads([head.cause])).get(head.cause))


async def _follows(reading: Reading, head: MessageHead, results: dict[int, bool]) -> bool:
    """Return whether a message follows, through its chain of causes, from the first message in ``results``. The result
    for each message of the chain is stored in ``results``."""
    path: list[int] = []
    first = min(results)
    answer = results.get(head.seq)
    at: MessageHead | None = head
    while answer is None and at is not None:
        path.append(at.seq)
        if at.cause is None or at.cause < first:
            break
        answer = results.get(at.cause)
        if answer is None:
            at = (await reading.hub.ledger.heads([at.cause])).get(at.cause)
    results.update(dict.fromkeys(path, bool(answer)))
    return bool(answer)
