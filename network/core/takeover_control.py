"""Takeovers: who may take which thread over, and how a takeover ends. Pure.

The module `holds` decides which messages and reactions a taken-over thread refuses. The operations ``network.take`` and
``network.give`` stand in `conversation`. A takeover ends when somebody gives the thread back, when its person is removed, or when its time is
over: then the hub enters `EndTakeover`.
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
    """Raises `Forbidden` for a person who may not silence the agents of a thread. People in a direct thread may. Other
    threads need an operator, the right ``take``, or, without a page of rights, the channel's owner."""
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
            f"Only {who} takes over {head.thread_id}: agents would be silent there for everybody. The page `rights` in "
            f"the node's file lets others do it (rights.ROLE.take: [{name}])."
        )


def may_take(state: State, origin: Origin, head: MessageHead) -> bool:
    """Return whether a reader of the next message of a thread may take the thread over."""
    try:
        check_may_take(state, origin, head)
    except Forbidden:
        return False
    return origin.kind == "human" or origin.is_operator


def list_expired(state: State, now: int) -> Iterator[str]:
    """The threads whose takeover has lasted as long as it may."""
    return (it.head.thread_id for it in state.takeovers.values() if it.by and 0 < it.until <= now)


def apply_end_takeover(rules: Rules, state: State, facts: Facts, entry: EndTakeover) -> Outcome:
    """End a takeover whose time is over, in its person's name: it may have been given back, or prolonged, since."""
    hold = state.takeovers.get(entry.thread_id)
    if hold is None or not hold.by or not 0 < hold.until <= state.stamp:
        return Outcome()
    change = ChangeSet(rules, state, facts, Origin(session_id="", agent_id=hold.by, kind="human"))
    end_takeover(change, hold)
    return change.outcome()


def end_takeover(change: ChangeSet, hold: Takeover) -> int:
    """Let agents answer in a thread again that was taken over; gives the seq of that."""
    row = change.write_row("hold", data=encode_takeover_event("given", hold.head.thread_id, hold.by))
    change.set_value("hold", hold.head.thread_id, msgspec.structs.replace(hold, by="", given=row.seq, until=0))
    notify_readers(change, "given", hold, row.seq)
    return row.seq


def encode_takeover_event(event: str, thread_id: str, by: str) -> bytes:
    return msgspec.json.encode({"event": event, "thread_id": thread_id, "agent_id": by})


def notify_readers(change: ChangeSet, kind: Literal["taken", "given"], hold: Takeover, seq: int) -> None:
    body = {"seq": seq, "agent_id": change.origin.agent_id, **({"by": hold.by} if kind == "given" else {})}
    change.effects.append(
        SendNotice(takeover_readers(change.state, hold), kind, hold.head.thread_id, body, to_operators=True)
    )
