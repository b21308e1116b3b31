"""What a reader may see: one message, or the conversation that may enter an agent's prompt (``network.window``). Reads, changes nothing."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from .errors import UnknownMessage
from .ledger import Row
from .mod import Reading
from .state import MessageHead
from .visibility import VISIBILITIES, PromptFilter, Visibility, may_read, readable_spans

PAGE = 500
MAX_WINDOW_THREADS = 100
SCANNED_ROWS = 4000
"""How far back a window looks for threads beside the incoming one, in messages that the agent may read."""


async def find_message(reading: Reading, seq: int, field: str) -> MessageHead:
    """The head of a message that the caller may read. Raises `UnknownMessage`, in the same words whether it exists or not."""
    row = (await reading.hub.ledger.messages([seq])).get(seq)
    if row is None or row.head is None or not reads(reading, row.head):
        raise UnknownMessage(
            f"There is no message {seq} that {reading.origin.agent_id} may read; {field} is the seq of one."
        )
    return row.head


def reads(reading: Reading, head: MessageHead | None) -> bool:
    """Whether the caller may read a message; operators may read all."""
    return head is not None and (reading.origin.is_operator or _reads_as_itself(reading, head))


def _reads_as_itself(reading: Reading, head: MessageHead) -> bool:
    return may_read(reading.hub.state, reading.origin.agent_id, head)


async def read_window(
    reading: Reading, trigger: MessageHead, named: list[str] | None, most: int, per_thread: int
) -> list[tuple[str, list[Row]]]:
    """Threads with what may enter a prompt for ``trigger``: each thread's newest ``per_thread`` messages up to it, oldest first.

    Threads stand in the order in which they began, so that one keeps its place while the conversation goes on. An operator sees
    here what it reads as itself: a prompt is never wider than its agent.
    """
    labels = _Labels(reading)
    filter_ = PromptFilter(reading.hub.state, _visibility(reading), trigger, await labels.of(trigger))
    windows: list[tuple[int, str, list[Row]]] = []
    for thread_id in await _choose_threads(reading, trigger, named):
        rows = await reading.hub.ledger.thread(thread_id, before=trigger.seq + 1, limit=PAGE)
        seen = [row for row in rows if row.head is not None and _reads_as_itself(reading, row.head)]
        await labels.load(seen)
        admitted = [row for row in seen if row.head is not None and filter_.admits(row.head, await labels.of(row.head))]
        if admitted:
            began = rows if len(rows) < PAGE else await reading.hub.ledger.thread(thread_id, limit=1, newest=False)
            windows.append((began[0].seq, thread_id, admitted[-per_thread:]))
        if len(windows) == most:
            break
    return [(thread_id, rows) for _, thread_id, rows in sorted(windows, key=lambda window: window[:2])]


async def _choose_threads(reading: Reading, trigger: MessageHead, named: list[str] | None) -> list[str]:
    """Threads to look into: the trigger's first, then those named, or those with the newest messages before it."""
    if named is not None:
        return list(dict.fromkeys((trigger.thread_id, *named)))
    participant = reading.hub.state.participant(reading.origin.agent_id)
    if participant is None:
        return [trigger.thread_id]
    spans = readable_spans(reading.hub.state, participant)
    chosen = {trigger.thread_id: None}
    until, scanned = trigger.seq, 0
    while scanned < SCANNED_ROWS:
        page = await reading.hub.ledger.inbox(spans, reading.origin.agent_id, 0, until, PAGE, newest=True)
        for row in reversed(page):
            chosen[row.stream] = None
        if len(page) < PAGE:
            break
        scanned += len(page)
        until = page[0].seq - 1
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
            found = await self._reading.hub.ledger.messages(missing)
            self._heads.update({seq: row.head for seq, row in found.items() if row.head is not None})

    async def of(self, head: MessageHead) -> MessageHead:
        if head.label == head.seq:
            return head
        if head.label not in self._heads:
            found = await self._reading.hub.ledger.messages([head.label])
            row = found.get(head.label)
            self._heads[head.label] = row.head if row is not None and row.head is not None else head
        return self._heads[head.label]
