"""Find the inboxes that a batch changes by looking at the tables of the batch's draft, not at each message.

`publisher` calls `find_inbox_changes` before it merges a batch, and then sends the notices.
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
    """The participants whose inboxes changed: ``agent_ids``, the readers of the messages ``heads`` and ``seqs``, and
    the operators."""

    agent_ids: set[str] = set()
    heads: list[MessageHead] = []
    seqs: set[int] = set()
    """Seqs of messages whose heads are not in the batch and must be read from the ledger."""
    operators: bool = False

    def list_people(self, state: State) -> set[str]:
        """Return the participants that can be found without reading the ledger: ``agent_ids`` and the readers of
        ``heads``."""
        return self.agent_ids.union(*(thread_readers(state, head) for head in self.heads))


def find_inbox_changes(state: State, draft: State) -> InboxChanges | None:
    """Compare a draft with the committed state that it extends. Return None if no inbox changes."""
    tables, changes = draft.tables, InboxChanges()
    for table in ("question", "dismissed", "dead", "undelivered"):
        if changed := tables.get(table):  # a table that was only read is in the draft too, but empty
            changes.agent_ids |= {key.partition("/")[0] for key in changed}
            changes.operators |= table == "dead"
    for table in ("stopped", "spent_out"):
        if changed := tables.get(table):
            # `descending_key` stores the seq as its distance from `SEQ_LIMIT`, so listings begin with the newest.
            changes.seqs |= {SEQ_LIMIT - int(key.partition("/")[0]) for key in changed}
            changes.operators = True
    for key, now in tables.get("reaction", {}).items():
        before: OpenReaction | None = state.get("reaction", key)
        reaction = now if now is not None else before
        # Compare only the requests for decisions: the reaction itself changes with every record.
        if reaction is not None and _requests(before) != _requests(now):
            changes.heads.append(reaction.trigger_head)
            changes.agent_ids |= _deciders(before) | _deciders(now)
            changes.operators = True
    # A takeover blocks decisions without changing any reaction. Takeovers are rare, so check all reactions.
    if tables.get("hold"):
        for _, reaction in state.items("reaction"):
            was_blocked, is_blocked = (is_blocked_by_takeover(level, reaction) for level in (state, draft))
            if _requests(reaction) and was_blocked != is_blocked:
                changes.heads.append(reaction.trigger_head)
                changes.agent_ids |= _deciders(reaction)
                changes.operators = True
    for agent_id, now in tables.get("participant", {}).items():
        participant = state.participant(agent_id) or Participant(agent_id, now.kind, now.registered_seq)
        changes.operators |= (participant.fault, participant.is_lost) != (now.fault, now.is_lost)
    for agent_id, now in tables.get("stored", {}).items():
        stored = state.get("stored", agent_id)
        if (stored is not None and stored.is_near) is not (now is not None and now.is_near):
            changes.agent_ids.add(agent_id)
            changes.operators = True
    has_changes = changes.agent_ids or changes.heads or changes.seqs or changes.operators
    return changes if has_changes else None


def _requests(reaction: OpenReaction | None) -> set[CallWait]:
    """Return the decisions for which a reaction waits."""
    if reaction is None or reaction.is_cancelled or not reaction.awaits:
        return set()
    return {wait for wait in reaction.awaits.values() if wait.request is not None}


def _deciders(reaction: OpenReaction | None) -> set[str]:
    """Return the people who are named as deciders of a reaction. Some of these people may not be allowed to read its
    trigger."""
    return {agent_id for wait in _requests(reaction) for agent_id in wait.deciders or ()}
