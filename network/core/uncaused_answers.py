"""Agents that answer without naming a cause, again and again: counted and stopped. Pure; part of step 6."""

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

IN_A_ROW_SHARE, LEAST_IN_A_ROW = 20, 25
"""Of the answers without a cause that an agent may give, this share in a row in one thread that no person reads, but at
least so many: two agents that answer each other for ever are told so early."""


ANY_CHANNEL = "channel:"
"""No address: under it stands what was said in any channel."""


def record_message(limits: Limits, state: State, head: MessageHead) -> None:
    """A message that is not direct is stored (of a direct one whoever delivers it says so itself)."""
    heard, to = state.recent_messages, head.to
    if head.kind == "mod":
        kind, name = parse_address(to)
        if kind == "agent":
            heard.delivered[name] = head.seq
        return
    places = (to, ANY_CHANNEL) if head.kind == "channel" else (to,)
    for place in places:
        heard.record_group_post(place, head.seq, head.sender_id)
        if head.sender_kind == "human":
            record_person(limits, state, head, place)


def record_person(limits: Limits, state: State, head: MessageHead, place: str | None = None) -> None:
    """A person has spoken to agents, at a place (where the message goes to, if it is not said)."""
    bucket: Bucket | None = state.get("bucket", head.sender_id)
    if bucket is None or not sends_like_program(limits, bucket, state.stamp):
        state.recent_messages.from_people[place or head.to] = (head.seq, head.sender_id)


def sends_like_program(limits: Limits, bucket: Bucket, stamp: int) -> bool:
    """Whether somebody of kind ``human`` has sent more today than a person does: it passes on what others say, and
    counts as an agent does."""
    return bucket.messages > limits.max_uncaused_answers and bucket.day == stamp // DAY_MS


def has_unanswered_news(state: State, agent_id: str, last: int) -> bool:
    """Whether somebody else has said something since a seq at a place of many where this agent is."""
    heard = state.recent_messages
    return _is_told_at(heard, "broadcast", agent_id, last) or (
        _is_told_at(heard, ANY_CHANNEL, agent_id, last)
        and any(
            member.is_in and _is_told_at(heard, channel_address(name), agent_id, last)
            for name, member in state.memberships(agent_id).items()
        )
    )


def _is_told_at(heard: RecentMessages, place: str, agent_id: str, last: int) -> bool:
    known = heard.group_posts.get(place)
    return known is not None and (known[2] if known[1] == agent_id else known[0]) > last


def has_person_written(state: State, agent_id: str, since: int) -> bool:
    """Whether a person has spoken to an agent since a seq."""
    people = state.recent_messages.from_people
    if not people:
        return False

    def is_at(place: str) -> bool:
        return place in people and people[place][0] > since

    return (
        is_at(agent_address(agent_id))
        or is_at("broadcast")
        or (
            is_at(ANY_CHANNEL)
            and any(it.is_in and is_at(channel_address(name)) for name, it in state.memberships(agent_id).items())
        )
    )


def count_answer(limits: Limits, state: State, bucket: Bucket, head: MessageHead) -> Bucket:
    """Count one more answer without a cause. Raises `BudgetExceeded`."""
    agent_id, known = head.sender_id, bucket.answer_count
    if known.count and has_person_written(state, agent_id, known.since):
        known = AnswerCount()
    in_a_row = 0
    if not has_people(state, head):  # nobody looks on there, and two that answer each other look just so
        in_a_row = known.in_a_row + 1 if known.thread_id == head.thread_id else 1
    most = limits.max_uncaused_answers
    row = min(most, max(LEAST_IN_A_ROW, most // IN_A_ROW_SHARE))
    if known.count >= most or in_a_row > row:
        count = f"{known.count} times" if known.count >= most else f"{row} times in a row in {head.thread_id}"
        raise BudgetExceeded(
            f"{agent_id} has answered others {count} without a cause since a person spoke to it "
            f"(max_uncaused_answers): name the cause of an answer. A person who writes to {agent_id}, or an operator "
            "with network.resume_agent, lets it go on; limits.max_uncaused_answers in the node's file allows more.",
            head,
            "max_uncaused_answers",
            "uncaused",
            agent_id,
            known.count,
            f"{agent_id} is stopped: it answered others {count} without naming a cause since a person spoke to "
            f"it. Write to {agent_id}, or type /resume {agent_id} in chat as an operator, to let it go on; "
            "limits.max_uncaused_answers in the node's file allows more.",
        )
    counted = AnswerCount(
        known.count + 1,
        head.seq,
        known.since or state.head,
        thread_id=head.thread_id if in_a_row else "",
        in_a_row=in_a_row,
    )
    return msgspec.structs.replace(bucket, answer_count=counted)
