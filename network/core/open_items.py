"""Open items of a conversation: values of the tables ``open_item`` and ``delivery`` (`tables`).

The module `quiet` defines the rules that open and close these items. No IO, no clock.
"""

from __future__ import annotations

from msgspec import Struct


class OpenItem(Struct, frozen=True, omit_defaults=True):
    """Unfinished item that a mod has reported for a conversation, such as an open task or a timer. The key is
    ``MOD/ROOT/KEY``.

    ``agent_id`` is the participant who has to act next, or an empty string. ``seq`` is a message: participants who may
    read this message may see the item.
    """

    root: int
    kind: str
    at: int
    seq: int
    agent_id: str = ""
    note: str = ""


class OpenDelivery(Struct, frozen=True, omit_defaults=True):
    """Message that at least one participant still has to handle. The key is the message's seq, and ``at`` is the
    message's time in ms.

    ``waiting`` lists the reactors that have not handled the message. ``answers`` lists the other programs from which
    the message requires an answer. Each message has only one value, because a broadcast to many agents must not cost
    one write per agent.
    """

    root: int
    at: int
    thread_id: str
    sender_id: str = ""
    waiting: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
