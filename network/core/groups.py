"""Step 6 for a ``batch``: several messages and records of one session, in one commit.

The entries are decided in order, and each entry sees the outcomes of the entries before it. The first refusal ends the
batch. So no entry depends on an entry that was not stored. The client gets one answer. Pure.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
from typing import TypeAlias

from roundelay.network.frames import encode

from .entries import Effect, Group, Outcome, Record, RefusedFrame, Send, SessionReply
from .rows import Row
from .sending import Rules
from .state import State
from .tables import Facts, TableWrite

_Decide: TypeAlias = Callable[[Rules, State, Facts, Send | Record | RefusedFrame], Outcome]
_STORED = b'{"type":"stored"'


def apply_group(rules: Rules, state: State, facts: Facts, group: Group, decide: _Decide) -> Outcome:
    """Return the outcome of a batch. ``decide`` returns the outcome of a single entry, even if the entry is refused."""
    draft = state.draft()
    # Overlay the maps: a repeated id or a reply within the batch must find the rows of earlier entries.
    keys, heads = ChainMap({}, facts.stored), ChainMap({}, facts.heads)
    seen = Facts(keys, heads, facts.cold, facts.damaged)
    rows: list[Row] = []
    writes: list[TableWrite] = []
    effects: list[Effect] = []
    stored: list[bytes] = []
    refusal = b""
    for entry in group.entries:
        outcome = decide(rules, draft, seen, entry)
        draft.apply_outcome(outcome)
        for row in outcome.rows:
            if row.key:
                keys[row.actor, row.key] = row
            if row.head is not None:
                heads[row.seq] = row.head
        rows += outcome.rows
        writes += outcome.writes
        for effect in outcome.effects:
            if not isinstance(effect, SessionReply):
                effects.append(effect)
            elif effect.data.startswith(_STORED):
                stored.append(effect.data)
            else:
                refusal = b',"error":' + effect.data
        if refusal:
            break
    answer = b'{"type":"batched","batch_id":%b,"stored":[%b]%b}' % (encode(group.batch_id), b",".join(stored), refusal)
    return Outcome(rows, writes, (SessionReply(group.origin.session_id, answer), *effects))
