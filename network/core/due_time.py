"""`DueTime`: value of the state table ``due``."""

from __future__ import annotations

from msgspec import Struct


class DueTime(Struct, frozen=True, omit_defaults=True):
    """Time (ms) at which a mod's ``due`` hook is called, stored under the key ``MOD/KEY``. The messages of the hook may
    name the message ``cause`` as their cause. ``watched`` is a participant whose absence is reported to the hook.
    ``payer`` is the participant who pays for the data that the hook stores."""

    at: int
    cause: int | None = None
    watched: str = ""
    payer: str = ""
