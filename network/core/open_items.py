"""What is open in a conversation: values of the tables ``open_item`` and ``delivery`` (`tables`).

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
