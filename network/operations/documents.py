"""Rules for data that belongs to a thread, such as a note: who may see it, and which prompts may contain it."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from roundelay.network.core.rows import MessageHead
from roundelay.network.core.takeovers import next_message_head

from .reading import Reading, reads, reads_as_itself
from .views import View


async def shows_thread(reading: Reading, view: View, head: MessageHead, labels: Collection[int] = ()) -> bool:
    """Return whether a view may show data that belongs to a thread.

    ``head`` is the thread's head, as returned by `Change.thread`. The audience of the data is the people in the threads
    of all ``labels`` or, without labels, the people in the data's own thread.
    """
    now = next_message_head(reading.hub.state, head)
    if view.trigger is None:
        return reads(reading, now)
    if not reads_as_itself(reading, now):
        return False
    # The data has no seq, so treat it like a message at the position of the trigger.
    at = msgspec.structs.replace(head, seq=view.trigger.seq, label=view.trigger.seq)
    known = await reading.hub.ledger.heads(labels) if labels else {}
    judged = [known.get(label, at) for label in labels] or [at]
    # Use a new filter for each label. A filter caches its decisions by seq, and different labels may have the same seq.
    return all(rule.renewed().admits(at, label) for rule in view.filters for label in judged)
