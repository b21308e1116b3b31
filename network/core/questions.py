"""Questions to people: messages that require a response of a person, until that person has answered or dismissed each.
Pure.

A question is put into its table with the message that asks, and goes with the one that answers: a reply to it, or, in a
direct thread, whatever that person says there next. `sending` asks here; ``network.inbox`` (`needs`) shows them.
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
"""Of so many people does one message ask; those that it names beyond are not told that it waits for them."""
EVICTION_SHARE = 10
"""A tenth of a person's questions is forgotten at once where there are too many, the oldest."""


def add_questions(limits: Limits, state: State, head: MessageHead, asked: bool | list[str]) -> list[TableWrite]:
    """Note whom a new message asks: the people whom it names, or to whom it goes directly, and who are given it."""
    puts = []
    for name in islice(_list_people(state, head, asked), MAX_ASKED):
        known = state.questions_of(name)
        if len(known) >= limits.max_questions:
            oldest = nsmallest(max(1, limits.max_questions // EVICTION_SHARE), known)
            puts += [TableWrite("question", _key(name, seq), None) for seq in oldest]
        puts.append(TableWrite("question", _key(name, head.seq), Question(head.sender_id, head.thread_id)))
    return puts


def _list_people(state: State, head: MessageHead, asked: bool | list[str]) -> Iterator[str]:
    if isinstance(asked, list):
        names = dict.fromkeys(asked)
    else:
        names = dict.fromkeys([name_of(head.to)] if asked and head.kind == "direct" else [])
    for name in names:
        if name != head.sender_id and state.is_person(name) and is_recipient(state, name, head):
            yield name


def remove_answered(state: State, head: MessageHead, parent: MessageHead | None) -> list[TableWrite]:
    """What a person has answered with a new message of its own."""
    agent_id = head.sender_id
    if not state.may_have_questions(agent_id):  # nearly always
        return []
    answered = set(state.questions_in(agent_id, head.thread_id)) if head.kind == "direct" else set()
    if parent is not None and parent.seq in state.questions_of(agent_id):
        answered.add(parent.seq)
    return [TableWrite("question", _key(agent_id, seq), None) for seq in sorted(answered)]


def dismiss_question(state: State, agent_id: str, seq: int) -> list[TableWrite]:
    """A person does not want to be told of a question any more."""
    return [TableWrite("question", _key(agent_id, seq), None)] if seq in state.questions_of(agent_id) else []


def remove_questions_of(state: State, agent_id: str) -> list[TableWrite]:
    """Somebody is removed: nobody asks it any more, and it asks nobody."""
    keys = (key for key, it in state.items("question") if it.sender_id == agent_id or key.startswith(f"{agent_id}/"))
    return [TableWrite("question", key, None) for key in list(keys)]


def remove_dropped_questions(state: State, first_seq: int) -> list[TableWrite]:
    """Questions whose messages retention has dropped."""
    old = (key for key, _ in state.items("question") if int(key.partition("/")[2]) < first_seq)
    return [TableWrite("question", key, None) for key in list(old)]


def _key(agent_id: str, seq: int) -> str:
    return f"{agent_id}/{seq:016d}"
