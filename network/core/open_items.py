"""Open items of a conversation: values of the tables ``open_item`` and ``delivery`` (`tables`).

`quiet` has the rules that open and close these items. No IO, no clock.
"""

from __future__ import annotations

from msgspec import Struct


class OpenItem(Struct, frozen=True, omit_defaults=True):
    """Something that a mod still expects in a conversation, such as an open task or a timer. The key is
    ``MOD/ROOT/KEY``.

    ``agent_id`` is the participant whose turn it is, or empty. ``seq`` is the message whose readers may see the item.
    """

    root: int
    kind: str
    at: int
    seq: int
    agent_id: str = ""
    note: str = ""


class OpenDelivery(Struct, frozen=True, omit_defaults=True):
    """A message that somebody still has to handle. The key is its seq, and ``at`` is its time in ms.

    ``waiting`` are the reactors that have not handled the message. ``answers`` are other programs whose answer the
    message requires. A message has one value, because a broadcast to many agents must not cost a write for each.
    """

    root: int
    at: int
    thread_id: str
    sender_id: str = ""
    waiting: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
