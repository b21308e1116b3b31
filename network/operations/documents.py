"""Rules for data that belongs to a thread, such as a note: who may see it, and in which prompts it may appear."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from roundelay.network.core.rows import MessageHead
from roundelay.network.core.takeovers import next_message_head

from .reading import Reading, reads, reads_as_itself
from .views import View


async def shows_thread(reading: Reading, view: View, head: MessageHead, labels: Collection[int] = ()) -> bool:
    """Return whether data of a thread may be shown. ``head`` is the head of `Change.thread`. The people in the threads
    of all ``labels`` are the audience of the data. Without labels it is the thread itself."""
    now = next_message_head(reading.hub.state, head)
    if view.trigger is None:
        return reads(reading, now)
    if not reads_as_itself(reading, now):
        return False
    # The data exists now, so judge it as a message at the trigger's position.
    at = msgspec.structs.replace(head, seq=view.trigger.seq, label=view.trigger.seq)
    known = await reading.hub.ledger.heads(labels) if labels else {}
    judged = [known.get(label, at) for label in labels] or [at]
    # Use a new filter for each label, because these labels may share a seq without being the same.
    return all(rule.renewed().admits(at, label) for rule in view.filters for label in judged)
