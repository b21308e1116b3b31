"""Why something was said, and what came of it: the operations ``network.why`` and ``network.impact``, in the shape of a mod.

Both follow causes: `why` up to the root, `impact` down from a message. They show what the caller may read, or, for a ``trigger``, what an agent
may see in its reaction to that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated, Any

from msgspec import Meta, Raw

from .frames import Seq
from .mod import Mod, Reading, operation
from .tables import Begun, MessageHead, RootBudget, Triggered
from .visibility import Visibility
from .window import View, find_message, open_view

SCANNED_ROWS = 2000
"""Rows of the log that one call of `impact` looks through: which messages followed from which is in no index."""


class Explanations(Mod):
    """Not a mod of its own: operations of the hub."""

    id = "network"

    @operation("read")
    async def why(
        self, reading: Reading, *, seq: Seq, trigger: Seq | None = None, visibility: Visibility | None = None
    ) -> dict[str, Any]:
        """What a message follows from: it, the reaction that sent it, the message before, up to the root.

        With a `trigger` only what an agent may see in its reaction to that message.
        """
        view = await open_view(reading, trigger, visibility)
        chain: list[Any] = []
        size = 0
        head: MessageHead | None = await find_message(reading, seq, "seq", view)
        while head is not None:
            is_seen = await view.shows(head)
            if is_seen:
                row = (await reading.hub.ledger.messages([head.seq])).get(head.seq)
                if row is None or row.is_damaged:  # retention has let it go meanwhile, or it broke
                    break
                size += len(row.data)
                if chain and size > reading.hub.limits.max_result_bytes:
                    return {"chain": chain, "has_more": True}
                chain.append(Raw(row.data))
            if head.cause is None:
                break
            if is_seen and await _shows_cause(view, reading, head):
                sent_in = await find_reaction(reading, head)
                if sent_in is not None:
                    chain.append(sent_in)
            head = (await reading.hub.ledger.heads([head.cause])).get(head.cause)
        return {"chain": chain, "has_more": False}

    @operation("read")
    async def impact(
        self,
        reading: Reading,
        *,
        seq: Seq,
        after: Seq | None = None,
        limit: Annotated[int, Meta(ge=1, le=500)] = 100,
        trigger: Seq | None = None,
        visibility: Visibility | None = None,
    ) -> dict[str, Any]:
        """What followed from a message: messages above `after`, ascending, and the reactions that sent them.

        `next` is the `after` to go on with, as long as there is more to look through. With a `trigger` only what an agent may see in its
        reaction to that message.
        """
        view = await open_view(reading, trigger, visibility)
        start = await find_message(reading, seq, "seq", view)
        head = reading.hub.state.head
        budget: RootBudget | None = await reading.hub.ledger.lookup_cold("root", str(start.root))
        end = min(budget.last_seq, head) if budget is not None else seq
        place = max(seq, after or seq)
        follows = {seq: True}
        messages: list[Any] = []
        reactions: list[dict[str, Any]] = []
        room = reading.hub.limits.max_result_bytes
        scanned = 0
        while place < end and scanned < SCANNED_ROWS:
            size = min(500, SCANNED_ROWS - scanned)
            rows = await reading.hub.ledger.rows(place, size, max_bytes=reading.hub.limits.max_result_bytes)
            if not rows:
                place = end
            for row in rows:
                if row.seq > end:
                    place = end
                    break
                if row.head is not None and row.head.root == start.root and await _follows(reading, row.head, follows):
                    is_full = messages and (len(messages) == limit or len(row.data) > room)
                    if is_full:
                        return {"messages": messages, "reactions": reactions, "next": place, "has_more": True}
                    if await view.shows(row.head):
                        room -= len(row.data)
                        messages.append(Raw(row.data))
                        sent_in = (
                            await find_reaction(reading, row.head)
                            if await _shows_cause(view, reading, row.head)
                            else None
                        )
                        if sent_in is not None and sent_in not in reactions:
                            reactions.append(sent_in)
                place = row.seq
                scanned += 1
        has_more = place < end
        # the last of the conversation may be a message that the caller may not read: it is not named
        return {
            "messages": messages,
            "reactions": reactions,
            "next": place if has_more else max(head, place),
            "has_more": has_more,
        }


def find_open(begun: Iterable[Begun], finished: Collection[tuple[str, int]], seq: int) -> Begun | None:
    """Of an agent's reactions to one message, the one that was open when the agent wrote ``seq``, or None; of several the newest.

    ``finished`` are reactions with the seqs of their ``finished`` records. Files are explained by this rule too.
    """
    is_open = [
        it for it in begun
        if it.seq < seq and not any(it.reaction == name and it.seq < at < seq for name, at in finished)
    ]  # fmt: skip
    return max(is_open, key=lambda it: it.seq, default=None)


async def find_reaction(reading: Reading, head: MessageHead) -> dict[str, Any] | None:
    """The reaction that a message was sent in, as far as there is one."""
    if head.cause is None:
        return None
    agent_id, ledger = head.sender_id, reading.hub.ledger
    triggered: Triggered | None = await ledger.lookup_cold("triggered", f"{agent_id}/{head.cause}")
    begun = [it for it in triggered.all if it.seq < head.seq] if triggered is not None else []
    finished = []
    for it in begun:
        page = await ledger.records(agent_id, "finished", it.seq, 1, reaction=it.reaction)
        finished += [(row.stream, row.seq) for row in page.rows]
    found = find_open(begun, finished, head.seq)
    if found is None:
        return None
    return {"reaction": found.reaction, "agent_id": agent_id, "trigger": head.cause, "seq": found.seq}


async def _shows_cause(view: View, reading: Reading, head: MessageHead) -> bool:
    """Whether the trigger of the reaction that a message was sent in may be shown: its cause."""
    if head.cause is None:
        return False
    return await view.shows((await reading.hub.ledger.heads([head.cause])).get(head.cause))


async def _follows(reading: Reading, head: MessageHead, known: dict[int, bool]) -> bool:
    """Whether a message follows from the one that ``known`` began with, up its causes; every step is remembered."""
    path = []
    first = min(known)
    at: MessageHead | None = head
    answer = False
    while at is not None:
        if at.seq in known:
            answer = known[at.seq]
            break
        path.append(at.seq)
        if at.cause is None or at.cause < first:
            break
        if at.cause in known:
            answer = known[at.cause]
            break
        at = (await reading.hub.ledger.heads([at.cause])).get(at.cause)
    known.update(dict.fromkeys(path, answer))
    return answer
