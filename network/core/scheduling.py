"""Methods of a change that schedule due times, at which the hub calls the ``due`` hook of a mod. `due_times` finds the
due times that have passed. Pure.
"""

from __future__ import annotations

from typing import Any

from roundelay.network.errors import InvalidArguments

from .due_time import DueTime
from .limits import ROW_BYTES
from .state import State
from .tables import Table

MAX_DUE_TIMES = 10_000
"""Maximum number of scheduled due times of one mod."""


class DueTimeChanges:
    """Methods of `ChangeSet` that schedule and remove a mod's due times."""

    state: State
    mod_id: str
    payer: str
    _unpaid_bytes: int

    def set_value(self, table: Table, key: str, value: Any) -> None:
        raise NotImplementedError

    def schedule(self, key: str, at_ms: int, *, cause: int | None = None, watched: str = "") -> None:
        path, state = f"{self.mod_id}/{key}", self.state
        if state.get("due", path) is None and state.count_due_times(self.mod_id) >= MAX_DUE_TIMES:
            raise InvalidArguments(
                f"The mod {self.mod_id} has {MAX_DUE_TIMES} due times, which is the maximum. Remove some first."
            )
        # Charge bytes only for a new key. A hook that moves its own due time must not use up anyone's quota.
        if state.get("due", path) is None:
            self._unpaid_bytes += len(key.encode()) + ROW_BYTES
        self.set_value("due", path, DueTime(at_ms, cause, watched, self.payer))

    def unschedule(self, key: str) -> None:
        if self.state.get("due", f"{self.mod_id}/{key}") is not None:
            self.set_value("due", f"{self.mod_id}/{key}", None)
