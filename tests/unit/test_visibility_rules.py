"""Tests of the visibility rules in docs/protocol.md, as tables: recipients of a message, its readers, the listed
readers, and the participants who may cite it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random
from typing import Any, Literal

import msgspec
import pytest

from roundelay.network.addresses import direct_thread
from roundelay.network.core.rows import MessageHead
from roundelay.network.core.state import State
from roundelay.network.core.tables import Channel, Member, Participant, TableWrite
from roundelay.network.core.visibility import (
    PromptFilter,
    has_people,
    is_reader,
    is_recipient,
    may_read,
    parties,
    recipients,
    thread_readers,
)

Spans = tuple[tuple[int, int | None], ...]

LATE, REPLY = 15, 20
"""Seqs in a channel that alice creates at 2. Message 10 is the first one, a member joins at 15, and message 20
replies to 10.
"""
STAYS: dict[str, Spans] = {
    "never in": (),
    "in": ((2, None),),
    "in, left": ((2, 25),),
    "in, left before the reply": ((2, 12),),
    "in, away for the reply, came back": ((2, 12), (22, None)),
    "in, away between them, came back": ((2, 12), (15, None)),
    "joined late": ((LATE, None),),
    "joined late, left": ((LATE, 25),),
    "joined after both": ((25, None),),
    "joined after both, left": ((25, 28),),
}


def make_state(history: Literal["since_join", "members"], spans: Spans) -> State:
    """Return a state with alice, a member from the start, dave with the given spans, and erin, who is not a member."""
    state = State(head=30)
    members = {"alice": Member(((2, None),))} | ({"dave": Member(spans)} if spans else {})
    state.apply_writes(
        [
            *(TableWrite("participant", name, Participant(name, "agent", 1)) for name in ("alice", "dave", "erin")),
            TableWrite("channel", "dev", Channel("dev", 2, "alice", history=history)),
            *(TableWrite("member", f"dev/{name}", member) for name, member in members.items()),
        ]
    )
    return state


def head(
    seq: int, *, sender: str = "alice", to: str = "channel:dev", start: int | None = None, **more: object
) -> MessageHead:
    fields: dict[str, Any] = {
        "seq": seq, "sender_id": sender, "sender_kind": "agent", "to": to, "root": seq, "hops": 0, "label": seq,
        "kind": {"agent": "direct"}.get(to.partition(":")[0], to.partition(":")[0]),
        "thread_id": to if start is None else f"thread:{start}",
    }  # fmt: skip
    return MessageHead(**{**fields, **more})


@pytest.mark.parametrize(
    ("history", "stay", "first", "reply"),
    [  # for the first message and for its reply: (delivered, readable)
        ("since_join", "never in", "--", "--"),
        ("since_join", "in", "dr", "dr"),
        ("since_join", "in, left", "dr", "dr"),
        ("since_join", "in, left before the reply", "dr", "--"),
        ("since_join", "in, away for the reply, came back", "dr", "--"),
        ("since_join", "in, away between them, came back", "dr", "dr"),
        ("since_join", "joined late", "--", "--"),
        ("since_join", "joined late, left", "--", "--"),
        ("since_join", "joined after both", "--", "--"),
        ("since_join", "joined after both, left", "--", "--"),
        ("members", "never in", "--", "--"),
        ("members", "in", "dr", "dr"),
        ("members", "in, left", "dr", "dr"),
        ("members", "in, left before the reply", "dr", "--"),
        ("members", "in, away for the reply, came back", "dr", "-r"),
        ("members", "in, away between them, came back", "dr", "dr"),
        ("members", "joined late", "-r", "dr"),
        ("members", "joined late, left", "--", "dr"),
        ("members", "joined after both", "-r", "-r"),
        ("members", "joined after both, left", "--", "--"),
    ],
)
def test_a_channel_is_delivered_and_read_by_its_history(
    history: Literal["since_join", "members"], stay: str, first: str, reply: str
) -> None:
    state = make_state(history, STAYS[stay])
    for message, expected in ((head(10), first), (head(REPLY, start=10), reply)):
        found = "d" if is_recipient(state, "dave", message) else "-"
        found += "r" if may_read(state, "dave", message) else "-"
        assert found == expected, message


def every_message() -> Iterator[MessageHead]:
    for sender, to in product(("alice", "dave"), ("channel:dev", "broadcast")):
        for seq, start in ((10, None), (20, None), (20, 10), (28, 10), (28, 20)):
            for excluded in ((), ("dave",), ("erin",)) if to == "broadcast" else ((),):
                yield head(seq, sender=sender, to=to, start=start, excluded=excluded)
    for sender, to in (
        ("alice", "agent:dave"),
        ("dave", "agent:alice"),
        ("dave", "agent:dave"),
        ("alice", "mod:channels"),
    ):
        yield head(10, sender=sender, to=to)
    yield head(10, sender="channels", to="agent:dave", kind="mod", thread_id="mod:channels~dave")


@pytest.mark.parametrize("registered", [1, 15, 25])
@pytest.mark.parametrize("removed", [None, 29])
@pytest.mark.parametrize(("history", "stay"), list(product(("since_join", "members"), STAYS)))
def test_what_is_delivered_may_be_read_and_who_may_read_is_listed(
    history: Literal["since_join", "members"], stay: str, registered: int, removed: int | None
) -> None:
    state = make_state(history, STAYS[stay])
    state.apply_writes(
        [TableWrite("participant", "dave", Participant("dave", "agent", registered, removed_seq=removed))]
    )
    for message in every_message():
        present = {participant.agent_id for participant in state.participants()}
        reading = {name for name in present if may_read(state, name, message)}
        delivered = {name for name in present if is_recipient(state, name, message)}
        assert delivered <= reading, message
        assert thread_readers(state, message) == reading, message
        assert {name for name in ("alice", "dave", "erin") if is_reader(state, name, message)} == reading, message
        assert set(recipients(state, message)) & present == delivered - {message.sender_id}, message


# --- prompts: participants who may know a message


PEOPLE, PROGRAMS = ("mia", "bob"), ("alice", "ben", "cleo", "planner")
PLACES = ("channel:dev", "broadcast", *(f"agent:{name}" for name in (*PEOPLE, *PROGRAMS)))


def make_network(rng: Random) -> tuple[State, list[MessageHead]]:
    """Return a random state and twelve messages with causes. The state has two people, three agents, a service, and a
    channel with current, former and no members among them.
    """
    state = State(head=60)
    kinds = {**dict.fromkeys(PEOPLE, "human"), **dict.fromkeys(PROGRAMS, "agent"), "planner": "service"}
    removed = {name: 58 if rng.random() < 0.1 else None for name in kinds}
    stays = [(), ((2, None),), ((2, 25),), ((20, None),), ((2, 15), (30, None))]
    members = {name: Member(rng.choice(stays)) for name in kinds}
    state.apply_writes(
        [
            *(
                TableWrite("participant", name, Participant(name, kinds[name], 1, removed_seq=removed[name]))
                for name in kinds
            ),  # type: ignore[arg-type]
            TableWrite("channel", "dev", Channel("dev", 2, "alice", history=rng.choice(("since_join", "members")))),
            *(TableWrite("member", f"dev/{name}", member) for name, member in members.items()),
        ]
    )
    messages: list[MessageHead] = []
    while len(messages) < 12:
        seq, sender, to = 5 + 4 * len(messages), rng.choice(sorted(kinds)), rng.choice(PLACES)
        if to == "channel:dev" and not members[sender].was_in(seq):
            continue
        causes = [it for it in messages if may_read(state, sender, it)]
        cause = rng.choice(causes) if causes and rng.random() < 0.7 else None
        thread = direct_thread(sender, to[6:]) if to.startswith("agent:") else to
        excluded = (rng.choice(sorted(kinds)),) if to == "broadcast" and rng.random() < 0.3 else ()
        made = head(seq, sender=sender, to=to, sender_kind=kinds[sender], thread_id=thread, excluded=excluded)
        if cause is not None and not has_people(state, made):
            made = msgspec.structs.replace(made, label=cause.label)
        messages.append(made)
    return state, messages


def knows(state: State, name: str, message: MessageHead, at: int) -> bool:
    """Whether a participant can follow a message's thread: may read it, is registered, and, in a channel, is still a
    member.
    """
    is_in = message.kind != "channel" or state.member("dev", name).was_in(at)
    return state.present(name) is not None and may_read(state, name, message) and is_in


def test_a_prompt_holds_what_those_may_know_whom_it_is_for() -> None:
    """Compare with an oracle in simple words, in small random networks. A prompt for people stays as narrow as
    before.
    """
    shared = 0
    for seed in range(300):
        state, messages = make_network(Random(seed))
        by_seq = {it.seq: it for it in messages}
        everybody = [*PEOPLE, *PROGRAMS]
        for trigger, message in product(messages, messages):
            if message.seq > trigger.seq:
                continue
            label, its = by_seq[trigger.label], by_seq[message.label]
            rule = PromptFilter(state, "people", trigger, label)
            people = {name for name in PEOPLE if knows(state, name, label, trigger.seq)}
            reading = {name for name in everybody if may_read(state, name, label)}
            # Removed participants count too: the thread was theirs.
            named = parties(label) if label.kind == "direct" else (label.sender_id,)
            reading -= {name for name in PROGRAMS if state.present(name) is None and name not in named}
            if people:
                expected = all(knows(state, name, its, trigger.seq) for name in people)
            else:
                expected = all(
                    knows(state, name, its, trigger.seq) if name in PEOPLE else may_read(state, name, message)
                    for name in reading
                )
                touched = {label.sender_id, its.sender_id} | {
                    name for name in everybody if may_read(state, name, label) or may_read(state, name, its)
                }
                for_all = reading | (set(parties(label)) if label.kind == "direct" else set())
                if not expected and touched.isdisjoint(PEOPLE):  # PEOPLE includes removed people
                    expected = all(knows(state, name, its, trigger.seq) for name in for_all)
                    shared += expected
            assert rule.admits(message, its) == expected, (seed, trigger, message)
    assert shared > 100  # the case occurs
