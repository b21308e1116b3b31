"""Value of the state table ``due``."""

from __future__ import annotations

from msgspec import Struct


class DueTime(Struct, frozen=True, omit_defaults=True):
    """A time (ms) at which a mod's ``due`` hook is called, under the key ``MOD/KEY``. ``cause`` is the message that the
    hook's messages follow from. ``watched`` is a participant whose absence the hook learns, and
    ``payer`` pays for what the hook stores."""

    at: int
    cause: int | None = None
    watched: str = ""
    payer: str = ""
