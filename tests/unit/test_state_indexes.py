"""Tests that the state's indexes find the same as a search of all participants: after table writes, drafts, merges,
deletions and a restart from the ledger.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from roundelay.network.core import visibility
from roundelay.network.core.rows import MessageHead
from roundelay.network.core.state import State
from roundelay.network.core.tables import (
    LOADED_TABLES,
    Attempt,
    Channel,
    Member,
    OpenReaction,
    Participant,
    Table,
    TableWrite,
    Token,
)
from roundelay.network.core.visibility import (
    PromptFilter,
    audience,
    has_people,
    is_reader,
    is_recipient,
    may_read,
    parties,
    recipients,
    thread_readers,
)

NAMES = ("ann", "bob", "cat", "dan")
CHANNELS = ("dev", "ops")
KINDS: tuple[Literal["agent", "human"], ...] = ("agent", "human")


class World:
    """A stack of states. Methods change the top state as commits and entries do."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.levels = [State()]
        for name in CHANNELS:
            history: Literal["since_join", "members"] = chance.choice(("since_join", "members"))
            self.put("channel", name, Channel(name, 0, "ann", history=history))

    @property
    def state(self) -> State:
        return self.levels[-1]

    def put(self, table: Table, key: str, value: Any) -> None:
        self.state.apply_writes([TableWrite(table, key, value)])

    def step(self) -> None:
        """Perform a random event, usually a table write."""
        self.state.head += 1
        happens = (
            self.create, self.register, self.register, self.remove, self.move, self.move, self.move, self.react, self.react, self.finish,
            self.fail, self.settle, self.bind, self.open_draft, self.open_draft, self.close_draft, self.reload,
        )  # fmt: skip
        self.chance.choice(happens)()

    def register(self) -> None:
        name = self.chance.choice(NAMES)
        known = self.state.participant(name)
        kind = self.chance.choice(KINDS)
        fresh = Participant(name, kind, self.state.head)
        self.put(
            "participant", name, fresh if known is None else Participant(name, kind, known.registered_seq, fence=1)
        )

    def remove(self) -> None:
        name = self.chance.choice(NAMES)
        known = self.state.present(name)
        if known is not None:
            gone = Participant(name, known.kind, known.registered_seq, removed_seq=self.state.head)
            self.put("participant", name, self.chance.choice((gone, gone, None)))

    def create(self) -> None:
        name, at = self.chance.choice(("a", "b", "c")), self.state.head
        self.put("channel", name, self.state.channel(name) or Channel(name, at, self.chance.choice(NAMES)))

    def move(self) -> None:
        channel, name = self.chance.choice(CHANNELS), self.chance.choice(NAMES)
        member = self.state.member(channel, name)
        moved = member.left(self.state.head) if member.is_in else member.joined(self.state.head)
        self.put("member", f"{channel}/{name}", None if self.chance.random() < 0.1 else moved)

    def react(self) -> None:
        name, reaction = self.chance.choice(NAMES), self.chance.choice("rst")
        head = self.head()
        self.put(
            "reaction", f"{name}/{reaction}", OpenReaction(reaction, name, head.seq, self.state.head, head, head.seq)
        )

    def finish(self) -> None:
        self.put("reaction", f"{self.chance.choice(NAMES)}/{self.chance.choice('rst')}", None)

    def fail(self) -> None:
        key = f"{self.chance.choice(NAMES)}/{self.chance.randint(1, 4)}"
        self.put("attempt", key, Attempt(self.chance.randint(1, 4), 0, ""))

    def settle(self) -> None:
        self.put("attempt", f"{self.chance.choice(NAMES)}/{self.chance.randint(1, 4)}", None)

    def bind(self) -> None:
        self.put("token", f"hash{self.chance.randint(1, 3)}", Token(self.chance.choice(NAMES), "agent", 0))

    def open_draft(self) -> None:
        if len(self.levels) < 3:
            self.levels.append(self.state.draft())

    def close_draft(self) -> None:
        if len(self.levels) > 1:
            draft = self.levels.pop()
            if self.chance.random() < 0.7:
                self.state.merge(draft)

    def reload(self) -> None:
        """Restart the hub: load the lowest state's tables in random order."""
        bottom = self.levels[0]
        puts = [TableWrite(table, key, value) for table in LOADED_TABLES for key, value in bottom.items(table)]
        self.chance.shuffle(puts)
        self.levels = [State(head=bottom.head)]
        self.state.apply_writes(puts)

    def head(self) -> MessageHead:
        """Return a random message of the past, or one that is just being written."""
        chance, seq = self.chance, self.chance.randint(1, self.state.head + 1)
        kind = chance.choice(("direct", "broadcast", "channel", "mod"))
        to = {
            "direct": f"agent:{chance.choice(NAMES)}",
            "broadcast": "broadcast",
            "channel": f"channel:{chance.choice(CHANNELS)}",
            "mod": chance.choice(("mod:tasks", f"agent:{chance.choice(NAMES)}")),
        }[kind]
        replies = kind in ("broadcast", "channel") and chance.random() < 0.5
        return MessageHead(
            seq=seq, sender_id=chance.choice(NAMES), sender_kind="agent", kind=kind, to=to, root=seq, hops=0, label=seq,
            thread_id=f"thread:{chance.randint(1, seq)}" if replies else to, cause=chance.choice((None, 1, 2)),
            excluded=tuple(chance.sample(NAMES, chance.randint(0, 2))) if kind == "broadcast" else (),
        )  # fmt: skip


def everybody(state: State) -> Iterator[Participant]:
    return (participant for _, participant in state.items("participant"))


def plain_readers(state: State, head: MessageHead) -> set[str]:
    return {
        one.agent_id
        for one in everybody(state)
        if one.removed_seq is None and (may_read(state, one.agent_id, head) or is_recipient(state, one.agent_id, head))
    }


def plain_audience(state: State, label: MessageHead, at_seq: int) -> set[str]:
    def is_in(name: str) -> bool:
        return label.kind != "channel" or state.member(label.to.partition(":")[2], name).was_in(at_seq)

    reading = {it.agent_id: it for it in everybody(state) if it.kind == "human" and may_read(state, it.agent_id, label)}
    inside = {name for name, one in reading.items() if one.removed_seq is None and is_in(name)}
    named = parties(label) if label.kind in ("direct", "mod") else (label.sender_id,)
    return inside or plain_readers(state, label) | {*reading, *named}


def check_rules(state: State, head: MessageHead, at_seq: int) -> None:
    people = [one.agent_id for one in everybody(state) if one.kind == "human"]
    assert has_people(state, head) == any(may_read(state, name, head) for name in people)
    readers = plain_readers(state, head)
    assert thread_readers(state, head) == readers
    assert {one.agent_id for one in everybody(state) if is_reader(state, one.agent_id, head)} == readers
    assert audience(state, head, at_seq) == plain_audience(state, head, at_seq)
    if head.kind in ("broadcast", "channel"):
        found = list(recipients(state, head))
        asked = [one for one in everybody(state) if one.removed_seq is None and one.agent_id != head.sender_id]
        assert sorted(found) == sorted(one.agent_id for one in asked if is_recipient(state, one.agent_id, head))


def check_prompts(state: State, trigger: MessageHead, heads: list[MessageHead]) -> None:
    """Check the prompt filter: its shortcut, which asks only the last arrivals, must agree with a check of the whole
    audience.
    """
    everyone, last = (PromptFilter(state, "people", trigger, trigger) for _ in range(2))
    asked = [everyone.admits(head, head) for head in heads]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visibility, "FEW", 0)
        assert [last.admits(head, head) for head in heads] == asked


def check_indexes(state: State) -> None:
    present = [one for one in everybody(state) if one.removed_seq is None]
    in_order = sorted(present, key=lambda one: (one.registered_seq, one.agent_id))
    assert list(state.participants()) == in_order
    assert state.count_participants() == len(present)
    assert list(state.people_before(None)) == [one.agent_id for one in in_order if one.kind == "human"]
    reactions, members = dict(state.items("reaction")), dict(state.items("member"))
    for name in NAMES:
        assert state.reactions_of(name) == {key: it for key, it in reactions.items() if it.agent_id == name}
        attempts = {key.split("/")[1]: value for key, value in state.items("attempt") if key.startswith(f"{name}/")}
        assert state.attempts(name) == {int(seq): value for seq, value in attempts.items()}
        joined = {key.split("/")[0]: member for key, member in members.items() if key.endswith(f"/{name}")}
        assert state.memberships(name) == joined
        assert state.tokens(name) == {key: token for key, token in state.items("token") if token.agent_id == name}
        made = {key: it for key, it in state.items("channel") if it.created_by == name}
        assert state.channels_by(name) == made
        for trigger in {it.trigger for it in reactions.values()}:
            found = {k: it for k, it in reactions.items() if (it.agent_id, it.trigger) == (name, trigger)}
            assert state.reactions_to(name, trigger) == found
        for cause in (1, 2):
            asked = {
                key: it
                for key, it in reactions.items()
                if (it.trigger_head.kind, it.trigger_head.sender_id, it.trigger_head.cause) == ("direct", name, cause)
            }
            assert state.reactions_asked_by(name, cause) == asked
    for channel in CHANNELS:
        inside = {key.split("/")[1]: member for key, member in members.items() if key.startswith(f"{channel}/")}
        assert state.members(channel) == inside
        assert all(state.member(channel, name) == inside.get(name, Member()) for name in NAMES)
    by_oldest = [it.oldest for it in state.reactions_by_oldest()]
    assert by_oldest == sorted(it.oldest for it in reactions.values())
    for reaction in "rst":
        assert state.reactions_named(reaction) == {k: it for k, it in reactions.items() if it.reaction == reaction}
    for thread_id in {it.trigger_head.thread_id for it in reactions.values()}:
        found = {key: it for key, it in reactions.items() if it.trigger_head.thread_id == thread_id}
        assert state.reactions_in(thread_id) == found
    for table in LOADED_TABLES:
        assert state.count(table) == len(dict(state.items(table)))


@settings(max_examples=30, phases=(Phase.explicit, Phase.generate))  # a smaller seed is not a simpler example
@given(st.integers(0, 2**32))
def test_what_indexes_find_is_what_asking_everybody_gives(seed: int) -> None:
    world = World(random.Random(seed))
    for _ in range(8):
        for _ in range(10):
            world.step()
        for level in world.levels:  # a draft does not change the states below
            check_indexes(level)
            for _ in range(4):
                check_rules(level, world.head(), world.chance.randint(1, level.head + 1))
                check_prompts(level, world.head(), [world.head() for _ in range(10)])
