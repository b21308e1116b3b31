"""A thread that a person holds: its agents do not answer there until it is given back. Pure.

Who may take a thread, what a hold refuses, and its fence, are decided here; the operations ``network.take`` and
``network.give`` (`conversation`) change the table, `sending` asks before a message, `reactions` before a ``started``.
"""

# The fence of one thread. A reaction is known by the seq of its `started`, and a message of an agent by the open
# reaction to its cause:
#
#   log of the thread   10 question   11 started   12 taken   13 note   14 given   15 started   16 answer
#   sent for            10 (by 11): refused after 12, and after 14 too: it was begun before the thread was given back
#                       10 or 13 (by 15): goes, for that reaction could read what was said meanwhile
#   started for         10 or 13: refused between 12 and 14
#
# Without an open reaction to its cause (a program that keeps no records) a message is as old as that: for 10 it is
# refused, for 13 it goes once the thread is given back.

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Struct

from roundelay.network.addresses import (
    BROADCAST,
    agent_address,
    answer_threads,
    channel_address,
    reply_thread,
    thread_parties,
    thread_start,
)
from roundelay.network.errors import Forbidden, ThreadHeld, UnknownMessage

from .entries import Origin
from .rows import MessageHead
from .state import State
from .tables import Facts, OpenReaction, Takeover
from .visibility import may_read, thread_readers


def find_thread(state: State, facts: Facts, origin: Origin, thread_id: str) -> MessageHead:
    """The head of a message that would be said in a thread now, by nobody: who may read it is in the thread.

    Raises `UnknownMessage`, in the same words whether there is no such thread or one that the caller may not read,
    and `Forbidden` for who is in it and no person.
    """
    head = _describe_thread(state, facts, thread_id)
    if head is None or not (origin.is_operator or may_read(state, origin.agent_id, next_message_head(state, head))):
        raise UnknownMessage(f"There is no thread {thread_id[:80]!r} that {origin.agent_id} may take.")
    if origin.kind != "human" and not origin.is_operator:
        raise Forbidden("Only people take a thread and give it back: a person in it, or an operator.")
    return head


def next_message_head(state: State, head: MessageHead) -> MessageHead:
    """The head of the next message of the same thread."""
    return msgspec.structs.replace(head, seq=state.head + 1)


def _describe_thread(state: State, facts: Facts, thread_id: str) -> MessageHead | None:
    kind, _, name = thread_id.partition(":")
    if thread_id == BROADCAST:
        return _make_head(BROADCAST, BROADCAST, BROADCAST)
    if kind == "channel" and state.channel(name) is not None:
        return _make_head("channel", channel_address(name), thread_id)
    if kind == "direct":
        one, other = thread_parties(thread_id)
        if one <= other and state.present(one) is not None and state.present(other) is not None:
            return _make_head("direct", agent_address(other), thread_id, sender_id=one)
        return None
    seq = thread_start(thread_id)
    start = facts.heads.get(seq) if seq is not None else None
    if start is None or start.kind not in ("broadcast", "channel") or thread_start(start.thread_id) is not None:
        return None
    return _make_head(start.kind, start.to, reply_thread(start.seq), excluded=start.excluded)


def _make_head(
    kind: str, to: str, thread_id: str, *, sender_id: str = "", excluded: tuple[str, ...] = ()
) -> MessageHead:
    return MessageHead(
        seq=0,
        sender_id=sender_id,
        sender_kind="",
        kind=kind,
        to=to,
        thread_id=thread_id,
        root=0,
        hops=0,
        label=0,
        excluded=excluded,
    )


def takeover_readers(state: State, hold: Takeover) -> frozenset[str]:
    """Who reads a held thread now."""
    return frozenset(thread_readers(state, next_message_head(state, hold.head)))


class TakeoverInfo(Struct, frozen=True, omit_defaults=True):
    """What the readers of a held thread are told of it: ``seq`` is that of the taking, ``at`` its time, ``until`` when it
    ends by itself."""

    by: str
    seq: int
    at: int
    until: int = 0


def describe_takeover(state: State, origin: Origin, thread_id: str) -> TakeoverInfo | None:
    """Who holds a thread now, for who would be given its next message, and operators; None if nobody does. Others who
    may read something of it are not told who has come to it since."""
    hold = state.takeovers.get(thread_id)
    if hold is None or not hold.by:
        return None
    is_in = origin.is_operator or may_read(state, origin.agent_id, next_message_head(state, hold.head))
    return TakeoverInfo(hold.by, hold.taken, hold.at, hold.until) if is_in else None


def check_may_answer(state: State, origin: Origin, thread_id: str, cause: int | None) -> None:
    """Raises `ThreadHeld` for what an agent may not say in a thread: somebody holds it, or it is said in a reaction
    that was begun before the thread was given back."""
    hold = state.takeovers.get(thread_id)
    if hold is None:
        return
    if hold.by:
        raise held(hold)
    if cause is None:
        return
    begun = max((it.seq for it in state.reactions_to(origin.agent_id, cause).values()), default=None)
    is_old = cause < hold.taken if begun is None else begun < hold.given
    if is_old:
        raise ThreadHeld(
            f"{thread_id} was taken by a person and given back (#{hold.given}) since work on #{cause} began, and that "
            "knows nothing of what was said meanwhile; read the thread, and answer in a reaction begun after that."
        )


def check_may_start(state: State, trigger: MessageHead) -> None:
    """Raises `ThreadHeld` for a reaction to a message that could not be answered now: somebody holds its thread."""
    for hold in _takeovers_of(state, trigger):
        if hold.by:
            raise held(hold)


def is_taken_over(state: State, head: MessageHead) -> bool:
    """Whether somebody holds a thread in which a message may be answered."""
    return any(hold.by for hold in _takeovers_of(state, head))


def is_blocked_by_takeover(state: State, reaction: OpenReaction) -> bool:
    """Whether what a reaction was begun for may not be answered by it any more."""
    return any(hold.by or reaction.seq < hold.given for hold in _takeovers_of(state, reaction.trigger_head))


def _takeovers_of(state: State, head: MessageHead) -> Iterator[Takeover]:
    """The holds of the threads in which a message may be answered."""
    for thread_id in answer_threads(head.kind, head.thread_id, head.seq):
        hold = state.takeovers.get(thread_id)
        if hold is not None:
            yield hold


def held(hold: Takeover) -> ThreadHeld:
    return ThreadHeld(
        f"{hold.by} has taken over {hold.head.thread_id} (#{hold.taken}): agents do not answer there until it is given "
        "back, which the notice `given` tells."
    )
