"""Takeovers of threads. During a takeover, a person controls a thread, and agents may not answer in it.

This module decides which messages and reactions a takeover refuses. `sending` calls it for each message of an agent,
and `reactions` calls it for each ``started`` record. `takeover_control` contains the rules for the start and the end of
a takeover. The operations ``network.take`` and ``network.give`` are in `conversation`. Pure.
"""

# Refusals because of one takeover. The position of a reaction is the seq of its `started` record. The position of an
# agent's message is the position of the open reaction to the message's cause:
#
#   log of the thread   10 question   11 started   12 taken   13 note   14 given   15 started   16 answer
#   message             cause 10, from reaction 11: refused after 12, and also after 14, because the reaction has not
#                       read the messages of the takeover
#                       cause 10 or 13, from reaction 15: accepted, because the reaction could read these messages
#   start of reaction   trigger 10 or 13: refused between 12 and 14
#
# If an agent has no open reaction to the cause of its message, the agent is a program without records. Then the
# position of the message is the position of its cause: a message with cause 10 is refused, and a message with cause 13
# is accepted after 14.

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
    """Return the head that a message to a thread would have now. The participants who could read this message are the
    participants in the thread.

    Raise `UnknownMessage` if the thread does not exist or the caller may not read it. The error text is the same in
    both cases, so a caller cannot find out whether a thread exists. Raise `Forbidden` if the caller is neither a person
    nor an operator.
    """
    head = find_place(state, facts, thread_id)
    if head is None or not (origin.is_operator or may_read(state, origin.agent_id, next_message_head(state, head))):
        raise UnknownMessage(f"There is no thread {thread_id[:80]!r} that {origin.agent_id} may take over.")
    if origin.kind != "human" and not origin.is_operator:
        raise Forbidden("Only people start and end a takeover: a person in the thread, or an operator.")
    return head


def next_message_head(state: State, head: MessageHead) -> MessageHead:
    """Return a head with the seq of the next message in the log."""
    return msgspec.structs.replace(head, seq=state.head + 1)


def find_place(state: State, facts: Facts, thread_id: str) -> MessageHead | None:
    """Return the head that a message to a thread would have now, or None if the thread does not exist. The seq of this
    head is 0. Only the head for a direct thread has a sender, namely one of the two participants."""
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


def place_of(head: MessageHead) -> MessageHead:
    """Return a head like the result of `find_place`, for the thread of a given message."""
    # Omit the sender in channels and broadcasts. Senders may always read their own messages, but the next message in
    # the thread may have another sender.
    sender_id = head.sender_id if head.kind in ("direct", "mod") else ""
    return _make_head(head.kind, head.to, head.thread_id, sender_id=sender_id, excluded=head.excluded)


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


def takeover_readers(state: State, takeover: Takeover) -> frozenset[str]:
    """Return the participants who may read the next message of a taken-over thread."""
    return frozenset(thread_readers(state, next_message_head(state, takeover.head)))


class TakeoverInfo(Struct, frozen=True, omit_defaults=True):
    """Active takeover as readers of the thread see it. ``seq`` and ``at`` (ms) describe its start. ``until`` is the
    time in ms at which it expires, or 0."""

    by: str
    seq: int
    at: int
    until: int = 0


def describe_takeover(state: State, origin: Origin, thread_id: str) -> TakeoverInfo | None:
    """Return the active takeover of a thread, or None. Only operators and participants who may read the thread's next
    message get the takeover. Former participants must not learn who joined the thread later."""
    takeover = state.takeovers.get(thread_id)
    if takeover is None or not takeover.by:
        return None
    is_in = origin.is_operator or may_read(state, origin.agent_id, next_message_head(state, takeover.head))
    return TakeoverInfo(takeover.by, takeover.taken, takeover.at, takeover.until) if is_in else None


def check_may_answer(state: State, origin: Origin, thread_id: str, cause: int | None) -> None:
    """Raise `ThreadHeld` if an agent may not answer in a thread: the thread is taken over, or the agent's reaction
    started before a takeover ended."""
    takeover = state.takeovers.get(thread_id)
    if takeover is None:
        return
    if takeover.by:
        raise thread_held_error(takeover)
    if cause is None:
        return
    # An answer does not name its reaction. If several reactions have the same cause, use the newest one.
    started_at = max((reaction.seq for reaction in state.reactions_to(origin.agent_id, cause).values()), default=None)
    is_outdated = cause < takeover.taken if started_at is None else started_at < takeover.given
    if is_outdated:
        raise ThreadHeld(
            f"A person took over {thread_id} and gave it back (#{takeover.given}) after work on #{cause} began. That "
            "work does not know what was said meanwhile. Read the thread, and answer in a new reaction."
        )


def check_may_start(state: State, trigger: MessageHead) -> None:
    """Raise `ThreadHeld` if a reaction to a message may not start, because a thread in which the reaction could answer
    is taken over."""
    for takeover in _takeovers_of(state, trigger):
        if takeover.by:
            raise thread_held_error(takeover)


def is_taken_over(state: State, head: MessageHead) -> bool:
    """Return whether a thread in which a reaction to the message could answer is taken over."""
    return any(takeover.by for takeover in _takeovers_of(state, head))


def is_blocked_by_takeover(state: State, reaction: OpenReaction) -> bool:
    """Return whether a takeover, active or ended, prevents an open reaction from answering its trigger."""
    return any(takeover.by or reaction.seq < takeover.given for takeover in _takeovers_of(state, reaction.trigger_head))


def _takeovers_of(state: State, head: MessageHead) -> Iterator[Takeover]:
    """Yield the takeovers of the threads in which a reaction to a message could answer."""
    for thread_id in answer_threads(head.kind, head.thread_id, head.seq):
        takeover = state.takeovers.get(thread_id)
        if takeover is not None:
            yield takeover


def thread_held_error(takeover: Takeover) -> ThreadHeld:
    return ThreadHeld(
        f"{takeover.by} has taken over {takeover.head.thread_id} (#{takeover.taken}): agents do not answer there until "
        "the takeover ends, which the notice `given` reports."
    )
