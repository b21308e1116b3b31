"""Open items of a conversation: values of the tables ``open_item`` and ``delivery`` (`tables`).

The module `quiet` defines the rules that open and close these items. No IO, no clock.
"""

from __future__ import annotations

from msgspec import Struct


class OpenItem(Struct, frozen=True, omit_defaults=True):
    """Something that a mod still expects in a conversation, such as an open task or a timer. Its key is
    ``MOD/ROOT/KEY``.

    ``agent_id`` is the participant who has to act next, or empty. ``seq`` is a message: whoever may read it may see the
    item.
    """

    root: int
    kind: str
    at: int
    seq: int
    agent_id: str = ""
    note: str = ""


class OpenDelivery(Struct, frozen=True, omit_defaults=True):
    """A message that at least one participant still has to handle. Its key is the message's seq, and ``at`` is its time
    in ms.

    ``waiting`` lists the reactors that have not handled the message. ``answers`` lists other programs whose answer the
    message requires. Each message has only one value, because a broadcast to many agents must not cost one write per
    agent.
    """

    root: int
    at: int
    thread_id: str
    sender_id: str = ""
    waiting: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
