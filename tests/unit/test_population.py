"""Tests that the cost of an event does not grow with the network: its work is counted in a hub with few participants
and in one with many.

The work is the number of executed instructions (`tests.support.steps`), from the arrival of the frame until the last
answer is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from roundelay.network.core.rows import MessageHead
from roundelay.network.core.state import State
from roundelay.network.core.tables import Channel, Member, Participant, TableWrite
from roundelay.network.core.visibility import PromptFilter
from roundelay.network.hub.session import Session
from tests.support.stepped_hub import SteppedHub, StubConnection
from tests.support.steps import count_bytes, count_steps

FEW, MANY = 6, 96
FREE = {
    "max_reactions_per_message": 10**6,
    "sends_per_s": 1_000_000_000,
    "root_messages_per_s": 1_000_000_000,
    "max_root_messages": 1_000_000,
}


class Crowd:
    """A hub in memory with ``size`` further participants, and the frames that its sessions received."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.stepped = SteppedHub(FREE)
        self.connections: dict[Session, StubConnection] = {}
        self._ids = itertools.count(1)

    def join(self, agent_id: str, *, kind: str = "agent", role: str = "observer") -> Session:
        connection, session = self.stepped.connect()
        self.connections[session] = connection
        self.tell(session, type="hello", protocol=1, agent_id=agent_id, kind=kind, role=role)
        assert next(frame["type"] for frame in self.heard(session)) == "welcome"
        return session

    def others(self, *, kind: str = "agent", role: str = "observer") -> list[Session]:
        return [self.join(f"other-{number:03d}", kind=kind, role=role) for number in range(self.size)]

    def leave(self, session: Session) -> None:
        self.stepped.hub.disconnect(session)
        self.stepped.loop.step()

    def tell(self, session: Session, **frame: Any) -> None:
        self.stepped.receive(session, frame)
        self.stepped.loop.step()

    def heard(self, session: Session) -> list[dict[str, Any]]:
        return self.connections[session].take_frames()

    def last(self, session: Session) -> dict[str, Any]:
        return self.heard(session)[-1]

    def call(self, session: Session, op: str, **args: Any) -> Any:
        self.tell(session, type="call", call_id=self.new_id(), op=op, args=args)
        [answer] = [frame for frame in self.heard(session) if "call_id" in frame]
        assert answer["type"] == "result", answer
        return answer["value"]

    def send(self, session: Session, to: str, **fields: Any) -> int:
        self.tell(session, type="send", message_id=self.new_id(), to=to, content="hello", **fields)
        answer = self.last(session)
        assert answer["type"] == "stored", answer
        found: int = answer["seq"]
        return found

    def begin(self, session: Session, trigger: int, reaction: str) -> None:
        body = {"trigger": trigger}
        self.tell(session, type="record", record_id=self.new_id(), reaction=reaction, kind="started", body=body)
        assert self.last(session)["type"] == "stored"

    def new_id(self) -> str:
        return f"id-{next(self._ids):06d}"


Event = Callable[[Crowd], Callable[[], object]]
"""Function that prepares a crowd, and returns the function whose work is counted."""
EVENTS: list[Event] = []


def event(function: Event) -> Event:
    EVENTS.append(function)
    return function


@event
def a_channel_message_to_one_of_many_who_are_connected(crowd: Crowd) -> Callable[[], object]:
    ann, ben = crowd.join("ann"), crowd.join("ben")
    crowd.others()
    crowd.call(ann, "channels.create", name="dev")
    crowd.call(ben, "channels.join", name="dev")
    return lambda: crowd.send(ann, "channel:dev")


@event
def a_channel_message_to_the_one_member_of_many_who_is_connected(crowd: Crowd) -> Callable[[], object]:
    ann, ben = crowd.join("ann"), crowd.join("ben")
    crowd.call(ann, "channels.create", name="dev")
    for session in (ben, *crowd.others()):
        crowd.call(session, "channels.join", name="dev")
        if session is not ben:
            crowd.leave(session)
    return lambda: crowd.send(ann, "channel:dev")


@event
def a_caused_message_between_two_agents_among_many_people(crowd: Crowd) -> Callable[[], object]:
    ann, ben = crowd.join("ann"), crowd.join("ben")
    crowd.others(kind="human")
    asked = crowd.send(ann, "agent:ben")
    return lambda: crowd.send(ben, "agent:ann", cause=asked)


@event
def a_caused_message_in_a_channel_that_many_people_left(crowd: Crowd) -> Callable[[], object]:
    ann = crowd.join("ann")
    crowd.call(ann, "channels.create", name="dev")
    for person in crowd.others(kind="human"):
        crowd.call(person, "channels.join", name="dev")
        crowd.call(person, "channels.leave", name="dev")
        crowd.leave(person)
    asked = crowd.send(ann, "channel:dev")
    return lambda: crowd.send(ann, "channel:dev", cause=asked)


@event
def a_caused_broadcast_in_a_thread_older_than_many_people(crowd: Crowd) -> Callable[[], object]:
    ann = crowd.join("ann")
    asked = crowd.send(ann, "broadcast")
    for person in crowd.others(kind="human"):
        crowd.leave(person)
    return lambda: crowd.send(ann, "broadcast", reply_to=asked, cause=asked)


@event
def a_join_while_many_react(crowd: Crowd) -> Callable[[], object]:
    _let_all_react(crowd)
    return lambda: crowd.join("zoe", role="reactor")


@event
def a_reactor_that_is_lost_while_many_react(crowd: Crowd) -> Callable[[], object]:
    reactors = _let_all_react(crowd)
    return lambda: crowd.leave(reactors[0])


@event
def a_cancelled_reaction_among_many(crowd: Crowd) -> Callable[[], object]:
    reactors = _let_all_react(crowd)
    return lambda: crowd.call(reactors[0], "network.cancel", reaction="reaction-000")


@event
def the_list_of_ones_own_reactions_among_many(crowd: Crowd) -> Callable[[], object]:
    reactors = _let_all_react(crowd)
    return lambda: crowd.call(reactors[0], "network.open_reactions")


@event
def a_tick_after_one_acknowledgement(crowd: Crowd) -> Callable[[], object]:
    ann, ben, *_ = crowd.join("ann"), crowd.join("ben"), crowd.others()
    seq = crowd.send(ann, "agent:ben")
    crowd.stepped.loop.step(2)
    crowd.tell(ben, type="ack", seq=seq)
    return lambda: crowd.stepped.loop.step(0.6)


@event
def a_tick_while_many_who_left_have_not_acknowledged(crowd: Crowd) -> Callable[[], object]:
    ann, others = crowd.join("ann"), crowd.others()
    crowd.send(ann, "broadcast")
    for session in others:
        crowd.leave(session)
    crowd.stepped.loop.step(2)
    return lambda: crowd.stepped.loop.step(0.6)


@event
def a_broadcast_while_many_who_left_have_not_acknowledged(crowd: Crowd) -> Callable[[], object]:
    ann, others = crowd.join("ann"), crowd.others()
    crowd.send(ann, "broadcast")
    for session in others:
        crowd.leave(session)
    return lambda: crowd.send(ann, "broadcast")


@event
def a_dead_letter_told_to_the_one_operator_among_many_sessions(crowd: Crowd) -> Callable[[], object]:
    crowd.join("mia", kind="human")
    ann, ben, *_ = crowd.join("ann"), crowd.join("ben"), crowd.others()
    seq = crowd.send(ann, "agent:ben")
    for _ in range(4):
        crowd.tell(ben, type="nack", seq=seq, reason="failed", retry_after_ms=0)
        crowd.stepped.loop.step(1)
    return lambda: crowd.tell(ben, type="nack", seq=seq, reason="failed", retry_after_ms=0)


@event
def a_question_of_how_many_are_registered(crowd: Crowd) -> Callable[[], object]:
    ann, *_ = crowd.join("ann"), crowd.others()
    return lambda: crowd.call(ann, "network.info")


@event
def a_join_of_a_channel_of_many(crowd: Crowd) -> Callable[[], object]:
    ann, *others = crowd.join("ann"), *crowd.others()
    crowd.call(ann, "channels.create", name="dev")
    for session in others:
        crowd.call(session, "channels.join", name="dev")
    zoe = crowd.join("zoe", kind="human")
    return lambda: crowd.call(zoe, "channels.join", name="dev")


@event
def the_fate_of_an_early_broadcast_among_many(crowd: Crowd) -> Callable[[], object]:
    ann, _ = crowd.join("ann"), crowd.join("ben")
    seq = crowd.send(ann, "broadcast")
    crowd.others()
    return lambda: crowd.call(ann, "network.message_status", seq=seq)


@event
def a_signal_to_all_of_whom_one_watches(crowd: Crowd) -> Callable[[], object]:
    ann, ben, *_ = crowd.join("ann"), crowd.join("ben"), crowd.others()
    crowd.call(ben, "network.watch", signals=True)
    return lambda: _signal(crowd, ann, ben, to="broadcast")


@event
def a_signal_in_a_thread_of_a_broadcast_of_whom_one_watches(crowd: Crowd) -> Callable[[], object]:
    ann, ben, *_ = crowd.join("ann"), crowd.join("ben"), crowd.others()
    crowd.call(ben, "network.watch", signals=True)
    first = crowd.send(ann, "broadcast")
    crowd.send(ann, "broadcast", reply_to=first)
    crowd.heard(ben)
    return lambda: _signal(crowd, ann, ben, thread_id=f"thread:{first}")


@event
def a_signal_in_a_channel_of_many_who_are_away(crowd: Crowd) -> Callable[[], object]:
    ann, ben = crowd.join("ann"), crowd.join("ben")
    crowd.call(ann, "channels.create", name="dev")
    for session in (ben, *crowd.others()):
        crowd.call(session, "channels.join", name="dev")
        if session is not ben:
            crowd.leave(session)
    crowd.call(ben, "network.watch", signals=True)
    crowd.send(ann, "channel:dev")
    crowd.heard(ben)
    return lambda: (_signal(crowd, ann, ben, to="channel:dev"), _signal(crowd, ann, ben, thread_id="channel:dev"))


def _signal(crowd: Crowd, sender: Session, watcher: Session, **place: str) -> None:
    crowd.tell(sender, type="signal", kind="typing", body=None, **place)
    assert [frame["type"] for frame in crowd.heard(watcher)] == ["signal"]


def _let_all_react(crowd: Crowd) -> list[Session]:
    ann, reactors = crowd.join("ann"), crowd.others(role="reactor")
    for number, reactor in enumerate(reactors):
        seq = crowd.send(ann, f"agent:other-{number:03d}")
        crowd.heard(reactor)
        crowd.begin(reactor, seq, f"reaction-{number:03d}")
    return reactors


@contextmanager
def a_crowd(size: int) -> Iterator[Crowd]:
    crowd = Crowd(size)
    try:
        yield crowd
    finally:
        crowd.stepped.close()


@pytest.mark.parametrize("prepare", EVENTS, ids=lambda prepare: prepare.__name__)
def test_the_work_is_the_same_among_few_and_many(prepare: Event) -> None:
    steps = []
    for size in (FEW, MANY):
        with a_crowd(size) as crowd:
            steps.append(count_steps(prepare(crowd)))
    few, many = steps
    assert many - few < (MANY - FEW) * 2  # fewer than two instructions for each additional participant


def test_what_became_of_a_message_is_not_looked_for_in_all_that_its_agent_did_since() -> None:
    def ask(reactions: int) -> int:
        with a_crowd(reactions) as crowd:
            ann, ben = crowd.join("ann"), crowd.join("ben", role="reactor")
            unread, trigger = crowd.send(ann, "agent:ben"), crowd.send(ann, "agent:ben")
            crowd.heard(ben)
            for number in range(reactions):
                crowd.begin(ben, trigger, f"reaction-{number}")
            return count_steps(lambda: crowd.call(ann, "network.message_status", seq=unread))

    assert ask(400) - ask(300) < 100


@pytest.mark.parametrize("kind", ["broadcast", "channel"])
def test_a_message_enters_a_prompt_without_asking_each_of_many_people(kind: str) -> None:
    def admit(size: int) -> int:
        state = State(head=size + 3)
        state.apply_writes([TableWrite("channel", "dev", Channel("dev", 0, "ann"))])
        for number in range(size):
            name = f"person-{number}"
            state.apply_writes([TableWrite("participant", name, Participant(name, "human", number))])
            state.apply_writes([TableWrite("member", f"dev/{name}", Member(((number, None),)))])
        to = "broadcast" if kind == "broadcast" else "channel:dev"
        first, second, trigger = (
            MessageHead(
                seq=seq, sender_id="person-0", sender_kind="human", kind=kind, to=to, thread_id=to, root=seq, hops=0, label=seq,
            )
            for seq in range(size + 1, size + 4)
        )  # fmt: skip
        prompt = PromptFilter(state, "people", trigger, trigger)
        assert prompt.admits(first, first)  # the first message of a prompt checks all people
        return count_steps(lambda: prompt.admits(second, second))

    assert admit(500) == admit(50)


def test_a_change_of_the_state_takes_no_memory_for_those_who_are_there() -> None:
    def change(size: int) -> int:
        state = State(head=size)
        for number in range(size):
            name = f"person-{number}"
            state.apply_writes([TableWrite("participant", name, Participant(name, "human", number))])
            state.apply_writes([TableWrite("member", f"dev/{name}", Member(((number, None),)))])

        def draft() -> None:
            zoe = Participant("zoe", "human", size)
            draft = state.draft()
            draft.apply_writes(
                [TableWrite("participant", "zoe", zoe), TableWrite("member", "dev/zoe", Member(((size, None),)))]
            )
            assert draft.member("dev", "zoe").is_in
            assert draft.count_participants() == size + 1
            state.merge(draft)

        return count_bytes(draft)

    # The state's own tables may grow; a copy of one takes more than 100,000 bytes.
    assert change(5000) - change(5) < 50_000


REFUSED: dict[str, dict[str, Any]] = {
    "beyond what may wait": {"type": "send", "to": "agent:ben"},
    "to no address": {"type": "send", "to": "ben"},
    "with an unknown field": {"type": "send", "to": "agent:ben", "colour": "red"},
    "of a reaction without a trigger": {"type": "record", "reaction": "r", "kind": "started", "body": {}},
}


@pytest.mark.parametrize("frame", REFUSED.values(), ids=REFUSED)
def test_frames_that_were_refused_are_not_held_until_they_are_answered(frame: dict[str, Any]) -> None:
    """The limit of pending bytes also covers refused frames that wait for their answer while the disk is slow."""
    most, size = 1 << 20, 100_000
    stepped = SteppedHub(FREE | {"max_pending_bytes": most})
    connection, ann = stepped.connect()
    stepped.receive(ann, {"type": "hello", "protocol": 1, "agent_id": "ann", "kind": "agent"})
    stepped.loop.step()
    connection.take_frames()
    try:
        text = {"body": {"x": "y" * size}} if frame["type"] == "record" else {"content": "x" * size}

        def receive() -> None:
            for number in range(100):
                one = {"record_id" if frame["type"] == "record" else "message_id": f"m{number}"}
                stepped.receive(ann, text | frame | one)

        if frame["type"] == "record":  # the body is the text, and does not name a trigger
            frame = {**frame, "body": text["body"]}
        assert count_bytes(receive) < 5 * most  # ten times that many bytes arrived; some garbage is not collected yet
        stepped.loop.step()
        assert [it["type"] for it in connection.take_frames()].count("error") >= 80
    finally:
        stepped.close()
