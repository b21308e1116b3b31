"""Read state of threads: how far a participant has read each thread, and whether the participant has pinned, muted,
archived or renamed it.

Each participant sees only its own read state. The operation ``network.mark`` (`operations.read_state`) changes the
table. This module decides which threads may have a read state, and which old entries are evicted for new ones. Pure.
"""

from __future__ import annotations

from heapq import nsmallest

from roundelay.network.addresses import BROADCAST, thread_parties, thread_start
from roundelay.network.errors import UnknownMessage

from .change import ChangeSet
from .reserved_ids import NETWORK
from .rows import MessageHead
from .tables import ReadState
from .visibility import may_read

EVICTION_SHARE = 10
"""Fraction of the entries that is evicted at once when a participant has too many: a tenth. Evicting one entry at a
time would mean scanning all entries for each new entry."""


def check_may_mark(change: ChangeSet, thread_id: str, read_upto: int | None) -> None:
    """Raise `UnknownMessage` if the thread does not exist, or if the caller may not read any of it. The error text is
    the same in both cases."""
    if not _is_own(change, thread_id):
        head = change.facts.heads.get(read_upto) if read_upto is not None else None
        if head is None or head.thread_id != thread_id or not _reads(change, head):
            raise UnknownMessage(f"There is no thread {thread_id[:80]!r} that {change.origin.agent_id} may read.")


def _is_own(change: ChangeSet, thread_id: str) -> bool:
    """Return whether the caller may store a read state for a thread. The caller must be or have been a reader of the
    thread, or the thread must be a reply thread below a message that the caller may read."""
    state, origin = change.state, change.origin
    agent_id, is_operator = origin.agent_id, origin.is_operator
    kind, _, name = thread_id.partition(":")
    # The thread was readable before. The first message of the thread may have been deleted since.
    if thread_id in state.read_states_of(agent_id):
        return True
    if thread_id == BROADCAST:
        return True
    one, other = thread_parties(thread_id)
    match kind:
        case "channel":
            return state.channel(name) is not None and (is_operator or bool(state.member(name, agent_id).spans))
        case "direct":
            are_known = one <= other and state.participant(one) is not None and state.participant(other) is not None
            return are_known and (is_operator or agent_id in (one, other))
        case "mod":
            is_mod = one in change.rules.mods or one == NETWORK
            return is_mod and (other == agent_id or (is_operator and state.participant(other) is not None))
    start = thread_start(thread_id)
    head = change.facts.heads.get(start) if start is not None else None
    if head is None or head.kind not in ("broadcast", "channel") or thread_start(head.thread_id) is not None:
        return False
    return _reads(change, head)


def _reads(change: ChangeSet, head: MessageHead) -> bool:
    return change.origin.is_operator or may_read(change.state, change.origin.agent_id, head)


def store_read_state(change: ChangeSet, thread_id: str, read_state: ReadState) -> None:
    """Store a read state of the caller. If the caller has too many read states, evict those with the lowest read
    positions, but evict read states with preferences last. Threads without a read state count as read up to the highest
    evicted position."""
    agent_id = change.origin.agent_id
    states = change.state.read_states_of(agent_id)
    most = change.rules.limits.max_marks
    others = [(name, state) for name, state in states.items() if name not in ("", thread_id)]
    if thread_id not in states and len(others) >= most:
        count = max(1, most // EVICTION_SHARE)
        evicted = nsmallest(count, others, key=lambda item: (has_preferences(item[1]), item[1].read_upto))
        read_upto = max(state.read_upto for state in (states.get("", ReadState()), *(state for _, state in evicted)))
        for name, _ in evicted:
            change.set_value("mark", f"{agent_id}/{name}", None)
        change.set_value("mark", f"{agent_id}/", ReadState(read_upto))
    change.set_value("mark", f"{agent_id}/{thread_id}", read_state)


def has_preferences(read_state: ReadState) -> bool:
    """Return whether a read state contains more than a read position."""
    return read_state.is_pinned or read_state.is_muted or read_state.is_archived or bool(read_state.title)
