"""What a participant keeps of a thread for itself: how far it has read, and whether the thread is pinned, muted,
archived or has a title of its own. Nobody else is shown it. Pure.

The operation ``network.mark`` (`marking`) changes the table; which threads may be marked, and which marks make room for
further ones, are decided here.
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
"""A tenth of a participant's marks goes at once where they are too many, so that not each further one looks through
all of them."""


def check_may_mark(change: ChangeSet, thread_id: str, read_upto: int | None) -> None:
    """Raises `UnknownMessage`, in the same words whether there is no such thread or one of which the caller may read
    nothing."""
    if not _is_own(change, thread_id):
        known = change.facts.heads.get(read_upto) if read_upto is not None else None
        if known is None or known.thread_id != thread_id or not _reads(change, known):
            raise UnknownMessage(f"There is no thread {thread_id[:80]!r} that {change.origin.agent_id} may read.")


def _is_own(change: ChangeSet, thread_id: str) -> bool:
    """Whether a thread is one of a place that the caller belongs to or did, or of replies to what it may read."""
    state, origin = change.state, change.origin
    agent_id, is_operator = origin.agent_id, origin.is_operator
    kind, _, name = thread_id.partition(":")
    if thread_id in state.read_states_of(agent_id):  # it was then; what it began with may be dropped by now
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


def store_read_state(change: ChangeSet, thread_id: str, mark: ReadState) -> None:
    """Keep a mark of the caller's, and let those go that say least where there are too many: the ones that were read
    the longest ago, before those with anything else. All up to there counts as read in threads without a mark."""
    agent_id = change.origin.agent_id
    known = change.state.read_states_of(agent_id)
    most = change.rules.limits.max_marks
    others = [(name, it) for name, it in known.items() if name not in ("", thread_id)]
    if thread_id not in known and len(others) >= most:
        count = max(1, most // EVICTION_SHARE)
        gone = nsmallest(count, others, key=lambda item: (has_preferences(item[1]), item[1].read_upto))
        upto = max(it.read_upto for it in (known.get("", ReadState()), *(it for _, it in gone)))
        for name, _ in gone:
            change.set_value("mark", f"{agent_id}/{name}", None)
        change.set_value("mark", f"{agent_id}/", ReadState(upto))
    change.set_value("mark", f"{agent_id}/{thread_id}", mark)


def has_preferences(mark: ReadState) -> bool:
    """Whether a mark says anything beside how far its thread is read."""
    return mark.is_pinned or mark.is_muted or mark.is_archived or bool(mark.title)
