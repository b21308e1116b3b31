"""What a reader may see: one message, or the conversation that may enter an agent's prompt (``network.window``). Reads, changes nothing."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from msgspec import UNSET

from .errors import UnknownMessage
from .ledger import Row
from .mod import Reading
from .tables import MessageHead
from .visibility import VISIBILITIES, PromptFilter, Visibility, may_read, readable_spans

PAGE = 500
MAX_WINDOW_THREADS = 100
SCANNED_PAGES = 8
"""How far back a window looks for threads beside the incoming one, in pages of messages that the agent may read."""


async def find_message(reading: Reading, seq: int, field: str, view: View | None = None) -> MessageHead:
    """The head of a message that the caller may read, or see in ``view``. Raises `UnknownMessage`, in the same words whether it exists or not."""
    row = (await reading.hub.ledger.messages([seq])).get(seq)
    if (
        row is None
        or row.head is None
        or not (await view.shows(row.head) if view is not None else reads(reading, row.head))
    ):
        raise UnknownMessage(
            f"There is no message {seq} that {reading.origin.agent_id} may read; {field} is the seq of one."
        )
    return row.head


def reads(reading: Reading, head: MessageHead | None) -> bool:
    """Whether the caller may read a message; operators may read all."""
    return head is not None and (reading.origin.is_operator or _reads_as_itself(reading, head))


def _reads_as_itself(reading: Reading, head: MessageHead) -> bool:
    return may_read(reading.hub.state, reading.origin.agent_id, head)


class View:
    """What one call may show: all that the caller may read, or what may enter the prompt of a reaction of its agent's."""

    def __init__(
        self, reading: Reading, labels: _Labels, filters: list[PromptFilter] | None, until: int | None
    ) -> None:
        self.until = until
        """The trigger: nothing later is shown. None without one."""
        self._reading = reading
        self._labels = labels
        self._filters = filters

    async def load(self, rows: list[Row]) -> None:
        """Read what is needed to decide on these rows, at once."""
        if self._filters is not None:
            await self._labels.load(rows)

    async def shows(self, head: MessageHead | None) -> bool:
        if self._filters is None:
            return reads(self._reading, head)
        # as itself: what an agent sees is no wider for being an operator's
        return (
            head is not None
            and _reads_as_itself(self._reading, head)
            and await _admit(self._filters, head, self._labels)
        )


async def open_view(reading: Reading, trigger: int | None, visibility: Visibility | None = None) -> View:
    """The view of a call, for the reaction to ``trigger`` if there is one; ``visibility`` narrows what the card and the network allow.

    Raises `UnknownMessage` for a trigger that the caller may not read.
    """
    labels = _Labels(reading)
    if trigger is None:
        return View(reading, labels, None, None)
    head = await find_message(reading, trigger, "trigger")
    return View(reading, labels, await _make_filters(reading, head, labels, visibility), trigger)


class ThreadWindow(NamedTuple):
    """What may enter a prompt of one thread, oldest first. ``omitted``: earlier messages that could too, as far as was looked;
    ``damaged``: seqs between them that can no longer be read."""

    began: int
    thread_id: str
    rows: list[Row]
    omitted: int
    damaged: list[int]


async def read_window(
    reading: Reading,
    trigger: MessageHead,
    named: list[str] | None,
    most: int,
    per_thread: int,
    visibility: Visibility | None = None,
) -> list[ThreadWindow]:
    """Threads with what may enter a prompt for ``trigger``: each thread's newest ``per_thread`` messages up to it, oldest first.

    Threads stand in the order in which they began, so that one keeps its place while the conversation goes on. An operator sees
    here what it reads as itself: a prompt is never wider than its agent. ``visibility`` narrows what the card and the network allow.
    """
    labels = _Labels(reading)
    filters = await _make_filters(reading, trigger, labels, visibility)
    windows: list[ThreadWindow] = []
    room = reading.hub.limits.max_result_bytes
    for thread_id in await _choose_threads(reading, trigger, named):
        page = await reading.hub.ledger.thread(thread_id, before=trigger.seq + 1, limit=PAGE)
        seen = [row for row in page.rows if row.head is not None and _reads_as_itself(reading, row.head)]
        await labels.load(seen)
        admitted = [row for row in seen if row.head is not None and await _admit(filters, row.head, labels)]
        if admitted:
            first = (await reading.hub.ledger.thread(thread_id, limit=1, newest=False)) if page.has_more else page
            shown = take_newest(admitted[-per_thread:], room)
            room -= sum(len(row.data) for row in shown)
            damaged = [row.seq for row in page.rows if row.is_damaged and shown and row.seq > shown[0].seq]
            windows.append(ThreadWindow(first.rows[0].seq, thread_id, shown, len(admitted) - len(shown), damaged))
        if len(windows) == most:
            break
    return sorted(windows, key=lambda window: window[:2])


def take_newest(rows: list[Row], max_bytes: int) -> list[Row]:
    """The newest of ascending rows that fit."""
    start, size = len(rows), 0
    while start and (size := size + len(rows[start - 1].data)) <= max_bytes:
        start -= 1
    return rows[start:]


async def _make_filters(
    reading: Reading, trigger: MessageHead, labels: _Labels, visibility: Visibility | None
) -> list[PromptFilter]:
    rules = {_visibility(reading), *((visibility,) if visibility is not None else ())}
    return [PromptFilter(reading.hub.state, rule, trigger, await labels.of(trigger)) for rule in rules]


async def _admit(filters: list[PromptFilter], head: MessageHead, labels: _Labels) -> bool:
    label = await labels.of(head)
    return all(rule.admits(head, label) for rule in filters)


async def _choose_threads(reading: Reading, trigger: MessageHead, named: list[str] | None) -> list[str]:
    """Threads to look into: the trigger's first, then those named, or those with the newest messages before it."""
    if named is not None:
        return list(dict.fromkeys((trigger.thread_id, *named)))
    participant = reading.hub.state.participant(reading.origin.agent_id)
    if participant is None:
        return [trigger.thread_id]
    spans = readable_spans(reading.hub.state, participant)
    chosen = {trigger.thread_id: None}
    until = trigger.seq
    for _ in range(SCANNED_PAGES):
        page = await reading.hub.ledger.inbox(spans, reading.origin.agent_id, 0, until, PAGE, newest=True)
        for row in reversed(page.rows):
            if not row.is_damaged:
                chosen[row.stream] = None
        if not page.has_more:
            break
        until = page.rows[0].seq - 1
    return list(chosen)


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


class _Labels:
    """Heads of the messages that labels name, each read once per call."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._heads: dict[int, MessageHead] = {}

    async def load(self, rows: list[Row]) -> None:
        for row in rows:
            if row.head is not None:
                self._heads[row.seq] = row.head
        missing = {row.head.label for row in rows if row.head is not None} - self._heads.keys()
        if missing:
            self._heads.update(await self._reading.hub.ledger.heads(missing))

    async def of(self, head: MessageHead) -> MessageHead:
        if head.label == head.seq:
            return head
        if head.label not in self._heads:
            found = await self._reading.hub.ledger.heads([head.label])
            self._heads[head.label] = found.get(head.label, head)
        return self._heads[head.label]
