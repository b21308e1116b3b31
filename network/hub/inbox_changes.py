"""Whose inbox a batch has changed (`needs`): found where a batch is published, by the tables that it changed, and not
asked of each message. Decides, and tells nobody itself.
"""

from __future__ import annotations

from msgspec import Struct

from roundelay.network.core.rows import MessageHead
from roundelay.network.core.state import State
from roundelay.network.core.tables import CallWait, OpenReaction, Participant
from roundelay.network.core.takeovers import is_blocked_by_takeover
from roundelay.network.core.visibility import thread_readers
from roundelay.network.frames import SEQ_LIMIT


class InboxChanges(Struct):
    """Who has to be told: participants, the readers of what asks for a decision, and the readers of messages of which
    the seq alone is known."""

    agent_ids: set[str] = set()
    heads: list[MessageHead] = []
    seqs: set[int] = set()
    operators: bool = False

    def list_people(self, state: State) -> set[str]:
        """All who are known without the ledger."""
        return self.agent_ids.union(*(thread_readers(state, head) for head in self.heads))


def find_inbox_changes(state: State, draft: State) -> InboxChanges | None:
    """What the tables of a draft, which the committed state does not hold yet, change of inboxes; None for nothing."""
    tables, found = draft.tables, InboxChanges()
    for table in ("question", "dismissed", "dead", "undelivered"):
        if changed := tables.get(table):  # a table that was only read is there too, and empty
            found.agent_ids |= {key.partition("/")[0] for key in changed}
            found.operators |= table == "dead"
    for table in ("stopped", "spent_out"):
        if changed := tables.get(table):
            found.seqs |= {SEQ_LIMIT - int(key.partition("/")[0]) for key in changed}
            found.operators = True
    for key, now in tables.get("reaction", {}).items():
        before: OpenReaction | None = state.get("reaction", key)
        known = now if now is not None else before
        if known is not None and _requests(before) != _requests(now):
            found.heads.append(known.trigger_head)
            found.agent_ids |= _deciders(before) | _deciders(now)
            found.operators = True
    if tables.get("hold"):
        for _, opened in state.items("reaction"):
            if _requests(opened) and is_blocked_by_takeover(state, opened) != is_blocked_by_takeover(draft, opened):
                found.heads.append(opened.trigger_head)
                found.agent_ids |= _deciders(opened)
                found.operators = True
    for agent_id, now in tables.get("participant", {}).items():
        known = state.participant(agent_id) or Participant(agent_id, now.kind, now.registered_seq)
        found.operators |= (known.fault, known.is_lost) != (now.fault, now.is_lost)
    for agent_id, now in tables.get("stored", {}).items():
        stored = state.get("stored", agent_id)
        if (stored is not None and stored.is_near) is not (now is not None and now.is_near):
            found.agent_ids.add(agent_id)
            found.operators = True
    is_any = found.agent_ids or found.heads or found.seqs or found.operators
    return found if is_any else None


def _requests(opened: OpenReaction | None) -> set[CallWait]:
    """The decisions that a reaction waits for."""
    if opened is None or opened.is_cancelled or not opened.awaits:
        return set()
    return {it for it in opened.awaits.values() if it.request is not None}


def _deciders(opened: OpenReaction | None) -> set[str]:
    """The people who are named as those who may decide: not all of them read the message that the reaction is to."""
    return {agent_id for it in _requests(opened) for agent_id in it.deciders or ()}
