"""Due times of mods: a mod schedules a time under a key, and the hub calls the mod's ``due`` hook at that time.

The hub adds a `ReachDueTime` entry for each due time that has passed. `apply_due_time` removes the due time and calls
the hook in the same commit, so a kill or an election can neither repeat nor lose the call. Pure.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import islice

from .change import ChangeSet
from .due_time import DueTime
from .entries import NOTHING, Origin, Outcome, ReachDueTime
from .sending import Rules
from .state import State
from .tables import Facts

log = logging.getLogger(__name__)

MAX_DUE_AT_ONCE = 500
"""Maximum number of entries that the hub adds at once for the due times of one mod. The remaining due times follow half
a second later."""


def list_due(state: State, mods: Iterable[str], now: int) -> Iterator[tuple[str, str, DueTime]]:
    """Yield the due times that have passed as ``(mod, key, value)``, earliest first. Due times of a mod that is not
    loaded wait until the mod is loaded again."""
    for mod in mods:
        for key in islice(state.due_keys(mod, now), MAX_DUE_AT_ONCE):
            yield mod, key, state.get("due", f"{mod}/{key}")


def apply_due_time(rules: Rules, state: State, facts: Facts, entry: ReachDueTime) -> Outcome:
    """Return the outcome of a reached due time: the changes of the mod's hook, and the removal of the due time."""
    mod, path = rules.mods.get(entry.mod), f"{entry.mod}/{entry.key}"
    due: DueTime | None = state.get("due", path)
    # An earlier entry of this batch may have removed or moved the due time, or may already have called the hook.
    if mod is None or due is None or due.at > state.stamp:
        return NOTHING
    change = ChangeSet(rules, state, facts, Origin("", entry.mod, "service"), mod_id=entry.mod)
    # Unschedule before the hook runs, because the hook may schedule the same key again.
    change.unschedule(entry.key)
    change.absent_ms, change.payer = entry.absent_ms, due.payer
    try:
        mod.due(change, entry.key)
        if state.participant(due.payer) is not None:
            change.count_stored(is_bounded=False)
    except Exception:
        # Nobody could receive a refusal. If the due time were kept, the same error would occur every half second.
        log.exception("a mod's due hook failed", extra={"mod": entry.mod, "key": entry.key})
        change = ChangeSet(rules, state, facts, change.origin, mod_id=entry.mod)
        change.unschedule(entry.key)
    return change.outcome()
