"""Limit for agents that answer messages without naming a cause. Part of step 6. Pure.

A message without a cause is its own root, so the budget of a conversation does not limit it. An agent that answers
every message without a cause would never be stopped. So this module counts the messages that an agent sends without a
cause, and stops the agent at a limit. A message counts only if the agent has received something since its last counted
message. The count restarts when a person writes to the agent.

`record_message` records each new message once per destination, not once per reader. So even a message with many readers
costs only one or two updates. These records are kept in memory and updated after the commit.
"""

from __future__ import annotations

import msgspec

from roundelay.network.addresses import agent_address, channel_address, parse_address
from roundelay.network.config import Limits
from roundelay.network.units import DAY_MS

from .buckets import AnswerCount, Bucket, RecentMessages
from .conversation_budgets import BudgetExceeded
from .rows import MessageHead
from .state import State
from .visibility import has_people

# Example of the counters of one agent. Seqs grow to the right.
#
#   RecentMessages  delivered, group_posts   4 . . . 8 . . . . 13 . . .     newest message to the agent: set in step 8
#                   from_people              . 5 . . . . . . . . . . .      newest message of a person: set in step 8
#   AnswerCount     since, last              . . |6 . . 9 . . . . . . .     head before the first counted answer, and
#                                                                           newest counted answer: set in step 6
#
# The next message without a cause counts if `delivered` or `group_posts` is above `last`. The count restarts if
# `from_people` is above `since`. Several answers in one batch count once: the first answer moves `last`, and step 6
# sees `RecentMessages` as it was before the batch. Both counters are in memory and become empty together, because a hub
# that starts or reopens its ledger makes a new `State`.

IN_A_ROW_SHARE, MIN_IN_A_ROW = 20, 25
"""Limit for answers without a cause that an agent sends in a row to one thread that no person reads. The limit is
``max_uncaused_answers`` divided by ``IN_A_ROW_SHARE``, but at least ``MIN_IN_A_ROW``. It stops two agents that answer
each other endlessly."""


ANY_CHANNEL = "channel:"
"""Key under which messages in all channels are recorded. It is not the address of any channel."""


def record_message(limits: Limits, state: State, head: MessageHead) -> None:
    """Record a stored broadcast, a message in a channel, or a message from a mod to an agent. The publisher records
    direct messages when it delivers them."""
    recent, to = state.recent_messages, head.to
    if head.kind == "mod":
        kind, name = parse_address(to)
        if kind == "agent":
            recent.delivered[name] = head.seq
        return
    places = (to, ANY_CHANNEL) if head.kind == "channel" else (to,)
    for place in places:
        recent.record_group_post(place, head.seq, head.sender_id)
        if head.sender_kind == "human":
            record_person(limits, state, head, place)


def record_person(limits: Limits, state: State, head: MessageHead, place: str | None = None) -> None:
    """Record that a person wrote to the agents at an address. ``place`` is the address, by default the address of the
    message."""
    # Ignore accounts that send like a program. Otherwise two programs that join as people could reset each other's
    # counts and loop forever.
    bucket: Bucket | None = state.get("bucket", head.sender_id)
    if bucket is None or not sends_like_program(limits, bucket, state.stamp):
        state.recent_messages.from_people[place or head.to] = (head.seq, head.sender_id)


def sends_like_program(limits: Limits, bucket: Bucket, stamp: int) -> bool:
    """Return whether a participant of kind ``human`` has sent more messages today than ``max_uncaused_answers``. Such
    an account probably relays messages of programs, so its answers are counted like answers of an agent."""
    return bucket.messages > limits.max_uncaused_answers and bucket.day == stamp // DAY_MS


def has_unanswered_news(state: State, agent_id: str, last: int) -> bool:
    """Return whether another participant has sent a broadcast, or a message to one of the agent's channels, after the
    seq ``last``."""
    recent = state.recent_messages
    return _has_post_since(recent, "broadcast", agent_id, last) or (
        _has_post_since(recent, ANY_CHANNEL, agent_id, last)
        and any(
            member.is_in and _has_post_since(recent, channel_address(name), agent_id, last)
            for name, member in state.memberships(agent_id).items()
        )
    )


def _has_post_since(recent: RecentMessages, place: str, agent_id: str, last: int) -> bool:
    post = recent.group_posts.get(place)
    return post is not None and (post[2] if post[1] == agent_id else post[0]) > last


def has_person_written(state: State, agent_id: str, since: int) -> bool:
    """Return whether a person has written to an agent after a seq, directly, by broadcast or in a channel."""
    from_people = state.recent_messages.from_people
    if not from_people:
        return False

    def is_at(place: str) -> bool:
        return place in from_people and from_people[place][0] > since

    return (
        is_at(agent_address(agent_id))
        or is_at("broadcast")
        or (
            is_at(ANY_CHANNEL)
            and any(
                member.is_in and is_at(channel_address(name)) for name, member in state.memberships(agent_id).items()
            )
        )
    )


def count_answer(limits: Limits, state: State, bucket: Bucket, head: MessageHead) -> Bucket:
    """Count one more answer without a cause. Return the updated counters. Raise `BudgetExceeded` if the agent has
    reached a limit."""
    agent_id, counted_so_far = head.sender_id, bucket.answer_count
    if counted_so_far.count and has_person_written(state, agent_id, counted_so_far.since):
        counted_so_far = AnswerCount()
    in_a_row = 0
    # Count answers in a row only if no person reads the thread: agents could answer each other endlessly there.
    if not has_people(state, head):
        in_a_row = counted_so_far.in_a_row + 1 if counted_so_far.thread_id == head.thread_id else 1
    most = limits.max_uncaused_answers
    row = min(most, max(MIN_IN_A_ROW, most // IN_A_ROW_SHARE))
    if counted_so_far.count >= most or in_a_row > row:
        count = (
            f"{counted_so_far.count} times"
            if counted_so_far.count >= most
            else f"{row} times in a row in {head.thread_id}"
        )
        raise BudgetExceeded(
            f"{agent_id} has answered others {count} without a cause since a person spoke to it "
            f"(max_uncaused_answers). Answers must name their cause. A person who writes to {agent_id}, or an operator "
            "with network.resume_agent, resumes it. Raise limits.max_uncaused_answers in the node's file to allow more.",
            head,
            "max_uncaused_answers",
            "uncaused",
            agent_id,
            counted_so_far.count,
            f"{agent_id} is stopped: it answered others {count} without naming a cause since a person spoke to "
            f"it. Write to {agent_id}, or type /resume {agent_id} in chat as an operator, to resume it. "
            "Raise limits.max_uncaused_answers in the node's file to allow more.",
        )
    counted = AnswerCount(
        counted_so_far.count + 1,
        head.seq,
        counted_so_far.since or state.head,
        thread_id=head.thread_id if in_a_row else "",
        in_a_row=in_a_row,
    )
    return msgspec.structs.replace(bucket, answer_count=counted)
