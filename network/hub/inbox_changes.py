"""Find the inboxes that a batch changes, from the tables of the batch's draft. So no single message has to be checked.

`publisher` calls this before it merges a batch, and then sends the notices.
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
    """Participants whose inboxes changed: the participants in ``agent_ids``, the readers of ``heads``, the readers of
    the messages ``seqs``, and operators."""

    agent_ids: set[str] = set()
    heads: list[MessageHead] = []
    seqs: set[int] = set()
    """Seqs of messages whose heads are not in the batch and must be read from the ledger."""
    operators: bool = False

    def list_people(self, state: State) -> set[str]:
        """Return the participants whose inbox changed, as far as they can be found without reading the ledger."""
        return self.agent_ids.union(*(thread_readers(state, head) for head in self.heads))


def find_inbox_changes(state: State, draft: State) -> InboxChanges | None:
    """Compare a draft with the committed state below it. Return None if no inbox changes."""
    tables, changes = draft.tables, InboxChanges()
    for table in ("question", "dismissed", "dead", "undelivered"):
        if changed := tables.get(table):  # a table that was only read is present too, but empty
            changes.agent_ids |= {key.partition("/")[0] for key in changed}
            changes.operators |= table == "dead"
    for table in ("stopped", "spent_out"):
        if changed := tables.get(table):
            # Keys descend (`descending_key`), so that listings begin with the newest.
            changes.seqs |= {SEQ_LIMIT - int(key.partition("/")[0]) for key in changed}
            changes.operators = True
    for key, now in tables.get("reaction", {}).items():
        before: OpenReaction | None = state.get("reaction", key)
        reaction = now if now is not None else before
        # Compare the requests, not the reactions, because reactions change with every record.
        if reaction is not None and _requests(before) != _requests(now):
            changes.heads.append(reaction.trigger_head)
            changes.agent_ids |= _deciders(before) | _deciders(now)
            changes.operators = True
    # A takeover blocks decisions without changing the reactions themselves. Takeovers are rare, so all are compared.
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
    """Return the decisions that a reaction waits for."""
    if reaction is None or reaction.is_cancelled or not reaction.awaits:
        return set()
    return {wait for wait in reaction.awaits.values() if wait.request is not None}


def _deciders(reaction: OpenReaction | None) -> set[str]:
    """Return the people who are named as deciders of a reaction. Some of them may not have the right to read its
    trigger."""
    return {agent_id for wait in _requests(reaction) for agent_id in wait.deciders or ()}
