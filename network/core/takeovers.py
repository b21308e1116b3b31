"""Takeovers: a person controls a thread, and its agents do not answer in it until the takeover ends.

This module decides what a taken-over thread refuses. `sending` calls it before a message, and `reactions` before a
``started`` record. `takeover_control` decides who may start and end a takeover. The operations ``network.take`` and
``network.give`` (`conversation`) change the table. Pure.
"""

# Refusals during one takeover. The position of a reaction is the seq of its `started` record. The position of an
# agent's message is that of the open reaction to its cause:
#
#   log of the thread   10 question   11 started   12 taken   13 note   14 given   15 started   16 answer
#   sent for            10 (by 11): refused after 12, and after 14 too: the reaction does not know what was said
#                       10 or 13 (by 15): accepted, because that reaction could read what was said meanwhile
#   started for         10 or 13: refused between 12 and 14
#
# A message without an open reaction to its cause comes from a program that keeps no records. Its position is that of
# its cause: for 10 it is refused, for 13 it is accepted after 14.

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
    """Return the head of a message that would go to a thread now, without a sender. Participants who could read this
    message are in the thread.

    Raises `UnknownMessage` if the thread does not exist or the caller may not read it. Both cases have the same error
    text. Raises `Forbidden` for a caller in the thread who is not a person.
    """
    head = find_place(state, facts, thread_id)
    if head is None or not (origin.is_operator or may_read(state, origin.agent_id, next_message_head(state, head))):
        raise UnknownMessage(f"There is no thread {thread_id[:80]!r} that {origin.agent_id} may take over.")
    if origin.kind != "human" and not origin.is_operator:
        raise Forbidden("Only people start and end a takeover: a person in the thread, or an operator.")
    return head


def next_message_head(state: State, head: MessageHead) -> MessageHead:
    """Return the head of the next message in the same thread."""
    return msgspec.structs.replace(head, seq=state.head + 1)


def find_place(state: State, facts: Facts, thread_id: str) -> MessageHead | None:
    """Return the head of a message that would go to a thread now, or None if the thread does not exist. It has no sender,
    and its seq is 0."""
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
    """Return the head of `find_place` for the thread of a message."""
    # A sender reads its own messages forever. The next message of a channel is not its own.
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
    """Return the participants who read a taken-over thread now."""
    return frozenset(thread_readers(state, next_message_head(state, takeover.head)))


class TakeoverInfo(Struct, frozen=True, omit_defaults=True):
    """A takeover as the readers of the thread see it: ``seq`` and ``at`` (ms) of its start, and ``until``, the time at
    which it expires."""

    by: str
    seq: int
    at: int
    until: int = 0


def describe_takeover(state: State, origin: Origin, thread_id: str) -> TakeoverInfo | None:
    """Return the takeover of a thread, or None. Shown only to operators and to participants who would receive the
    thread's next message. Others must not learn who joined the thread later."""
    takeover = state.takeovers.get(thread_id)
    if takeover is None or not takeover.by:
        return None
    is_in = origin.is_operator or may_read(state, origin.agent_id, next_message_head(state, takeover.head))
    return TakeoverInfo(takeover.by, takeover.taken, takeover.at, takeover.until) if is_in else None


def check_may_answer(state: State, origin: Origin, thread_id: str, cause: int | None) -> None:
    """Raise `ThreadHeld` if an agent may not answer in a thread. Either the thread is taken over, or the reaction
    started before a takeover ended."""
    takeover = state.takeovers.get(thread_id)
    if takeover is None:
        return
    if takeover.by:
        raise thread_held_error(takeover)
    if cause is None:
        return
    # Take the newest of several reactions to one cause: an answer does not say which reaction sent it.
    started_at = max((reaction.seq for reaction in state.reactions_to(origin.agent_id, cause).values()), default=None)
    is_outdated = cause < takeover.taken if started_at is None else started_at < takeover.given
    if is_outdated:
        raise ThreadHeld(
            f"A person took over {thread_id} and gave it back (#{takeover.given}) after work on #{cause} began. That "
            "work does not know what was said meanwhile. Read the thread, and answer in a new reaction."
        )


def check_may_start(state: State, trigger: MessageHead) -> None:
    """Raise `ThreadHeld` if a reaction may not start, because its message could only be answered in a taken-over
    thread."""
    for takeover in _takeovers_of(state, trigger):
        if takeover.by:
            raise thread_held_error(takeover)


def is_taken_over(state: State, head: MessageHead) -> bool:
    """Return whether a thread in which a message may be answered is taken over."""
    return any(takeover.by for takeover in _takeovers_of(state, head))


def is_blocked_by_takeover(state: State, reaction: OpenReaction) -> bool:
    """Return whether a reaction may no longer answer its trigger."""
    return any(takeover.by or reaction.seq < takeover.given for takeover in _takeovers_of(state, reaction.trigger_head))


def _takeovers_of(state: State, head: MessageHead) -> Iterator[Takeover]:
    """Yield the takeovers of the threads in which a message may be answered."""
    for thread_id in answer_threads(head.kind, head.thread_id, head.seq):
        takeover = state.takeovers.get(thread_id)
        if takeover is not None:
            yield takeover


def thread_held_error(takeover: Takeover) -> ThreadHeld:
    return ThreadHeld(
        f"{takeover.by} has taken over {takeover.head.thread_id} (#{takeover.taken}): agents do not answer there until the "
        "takeover ends, which the notice `given` reports."
    )
