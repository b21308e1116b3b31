"""Questions to people: messages that require a response. A question is open until the person answers or dismisses it.

A question is stored in the same commit as the message that asks it, and removed in the commit of the answer. An answer
is a reply to the question or, in a direct thread, the person's next message. `sending` calls this module, and
``network.inbox`` (`operations.inbox`) shows the questions. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nsmallest
from itertools import islice

from roundelay.network.addresses import name_of
from roundelay.network.config import Limits

from .rows import MessageHead
from .state import State
from .tables import Question, TableWrite
from .visibility import is_recipient

MAX_ASKED = 64
"""Maximum number of people for whom one message can be a question."""
EVICTION_SHARE = 10
"""Fraction of the questions that is evicted at once when a person has too many: the oldest tenth."""


def add_questions(limits: Limits, state: State, head: MessageHead, required: bool | list[str]) -> list[TableWrite]:
    """Return the writes that store a new message as a question for each person whom it asks."""
    writes = []
    question = Question(head.sender_id, head.thread_id, head.root, state.stamp)
    for name in islice(_list_people(state, head, required), MAX_ASKED):
        questions = state.questions_of(name)
        if len(questions) >= limits.max_questions:
            # Evict several questions at once. Evicting one at a time would mean searching all questions for each new
            # question.
            oldest = nsmallest(max(1, limits.max_questions // EVICTION_SHARE), questions)
            writes += [TableWrite("question", _key(name, seq), None) for seq in oldest]
        writes.append(TableWrite("question", _key(name, head.seq), question))
    return writes


def _list_people(state: State, head: MessageHead, required: bool | list[str]) -> Iterator[str]:
    if isinstance(required, list):
        names = dict.fromkeys(required)
    else:
        names = dict.fromkeys([name_of(head.to)] if required and head.kind == "direct" else [])
    for name in names:
        if name != head.sender_id and state.is_person(name) and is_recipient(state, name, head):
            yield name


def remove_answered(state: State, head: MessageHead, parent: MessageHead | None) -> list[TableWrite]:
    """Return the writes that remove the questions that a person's new message answers."""
    agent_id = head.sender_id
    if not state.may_have_questions(agent_id):  # almost every message returns here
        return []
    answered = set(state.questions_in(agent_id, head.thread_id)) if head.kind == "direct" else set()
    if parent is not None and parent.seq in state.questions_of(agent_id):
        answered.add(parent.seq)
    return [TableWrite("question", _key(agent_id, seq), None) for seq in sorted(answered)]


def dismiss_question(state: State, agent_id: str, seq: int) -> list[TableWrite]:
    """Return the writes that remove a question because the person has dismissed it."""
    return [TableWrite("question", _key(agent_id, seq), None)] if seq in state.questions_of(agent_id) else []


def remove_questions_of(state: State, agent_id: str) -> list[TableWrite]:
    """Return the writes that remove all questions from and to a removed participant."""
    keys = (
        key
        for key, question in state.items("question")
        if question.sender_id == agent_id or key.startswith(f"{agent_id}/")
    )
    return [TableWrite("question", key, None) for key in list(keys)]


def remove_dropped_questions(state: State, first_seq: int) -> list[TableWrite]:
    """Return the writes that remove the questions whose messages retention has deleted."""
    old = (key for key, _ in state.items("question") if int(key.partition("/")[2]) < first_seq)
    return [TableWrite("question", key, None) for key in list(old)]


def _key(agent_id: str, seq: int) -> str:
    return f"{agent_id}/{seq:016d}"
