"""Rules for the start and the end of takeovers. `takeovers` decides what a takeover refuses.

The operations ``network.take`` and ``network.give`` are in `conversation`. A takeover ends when someone gives the
thread back, when the person who took over is removed, or when the takeover expires. The hub ends an expired takeover
with the entry `EndTakeover`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from roundelay.network.addresses import BROADCAST, name_of
from roundelay.network.errors import Forbidden

from .access import check_right, owner_of
from .change import ChangeSet
from .entries import EndTakeover, Origin, Outcome, SendNotice
from .rows import MessageHead
from .sending import Rules
from .state import State
from .tables import Facts, Takeover
from .takeovers import takeover_readers


def check_may_take(state: State, origin: Origin, head: MessageHead) -> None:
    """Raise `Forbidden` if a person may not take over a thread. The check matters because a takeover silences the
    agents in the thread.

    People may always take over their direct threads. For other threads, the person must be an operator or have the
    right ``take``. On a node without rights, the owner of a channel may also take over the channel's threads.
    """
    if origin.is_operator or head.kind == "direct":
        return
    name = BROADCAST if head.kind == BROADCAST else name_of(head.to)
    if state.rights is not None:
        check_right(state, origin, "take", name)
        return
    channel = state.channel(name) if head.kind == "channel" else None
    if channel is None or owner_of(state, channel) != origin.agent_id:
        who = "an operator" if channel is None else f"an operator, or {owner_of(state, channel) or 'its owner'},"
        raise Forbidden(
            f"Only {who} may take over {head.thread_id}, because agents would be silent there for everybody. To allow "
            f"others, add rights.ROLE.take: [{name}] to the node's file."
        )


def may_take(state: State, origin: Origin, head: MessageHead) -> bool:
    """Return whether a participant may take over a thread. The caller has already checked that the participant may read
    the thread's next message."""
    try:
        check_may_take(state, origin, head)
    except Forbidden:
        return False
    return origin.kind == "human" or origin.is_operator


def list_expired(state: State, now: int) -> Iterator[str]:
    """Yield the ids of the threads whose takeover has expired."""
    return (
        takeover.head.thread_id for takeover in state.takeovers.values() if takeover.by and 0 < takeover.until <= now
    )


def apply_end_takeover(rules: Rules, state: State, facts: Facts, entry: EndTakeover) -> Outcome:
    """End an expired takeover in the name of the person who started it. Do nothing if the takeover has been ended or
    extended since this entry was created."""
    takeover = state.takeovers.get(entry.thread_id)
    if takeover is None or not takeover.by or not 0 < takeover.until <= state.stamp:
        return Outcome()
    change = ChangeSet(rules, state, facts, Origin(session_id="", agent_id=takeover.by, kind="human"))
    end_takeover(change, takeover)
    return change.outcome()


def end_takeover(change: ChangeSet, takeover: Takeover) -> int:
    """End a takeover, so that agents may answer in the thread again. Return the seq of the row that records the end."""
    row = change.write_row("hold", data=encode_takeover_event("given", takeover.head.thread_id, takeover.by))
    change.set_value("hold", takeover.head.thread_id, msgspec.structs.replace(takeover, by="", given=row.seq, until=0))
    notify_readers(change, "given", takeover, row.seq)
    return row.seq


def encode_takeover_event(event: str, thread_id: str, by: str) -> bytes:
    return msgspec.json.encode({"event": event, "thread_id": thread_id, "agent_id": by})


def notify_readers(change: ChangeSet, kind: Literal["taken", "given"], takeover: Takeover, seq: int) -> None:
    body = {"seq": seq, "agent_id": change.origin.agent_id, **({"by": takeover.by} if kind == "given" else {})}
    change.effects.append(
        SendNotice(takeover_readers(change.state, takeover), kind, takeover.head.thread_id, body, to_operators=True)
    )
