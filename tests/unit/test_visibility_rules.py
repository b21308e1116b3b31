"""Who is delivered a message, who may read it, who is listed as its reader and who may cite it: one rule, as tables. docs/protocol.md."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, Literal

import pytest

from roundelay.network.state import State
from roundelay.network.tables import Channel, Member, MessageHead, Participant, Put
from roundelay.network.visibility import is_reader, is_recipient, may_read, recipients, thread_readers

Spans = tuple[tuple[int, int | None], ...]

LATE, REPLY = 15, 20
"""A channel that alice made at 2: its first message is 10, somebody joins at 15, and 20 replies to 10."""
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
    """alice, who is in the channel from its beginning, dave, whose spans are given, and erin, who is somewhere else."""
    state = State(head=30)
    members = {"alice": Member(((2, None),))} | ({"dave": Member(spans)} if spans else {})
    state.change(
        [
            *(Put("participant", name, Participant(name, "agent", 1)) for name in ("alice", "dave", "erin")),
            Put("channel", "dev", Channel("dev", 2, "alice", history=history)),
            *(Put("member", f"dev/{name}", member) for name, member in members.items()),
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
    [  # of the first message and of the reply to it: delivered, readable
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
    state.change([Put("participant", "dave", Participant("dave", "agent", registered, removed_seq=removed))])
    for message in every_message():
        present = {participant.agent_id for participant in state.participants()}
        reading = {name for name in present if may_read(state, name, message)}
        delivered = {name for name in present if is_recipient(state, name, message)}
        assert delivered <= reading, message
        assert thread_readers(state, message) == reading, message
        assert {name for name in ("alice", "dave", "erin") if is_reader(state, name, message)} == reading, message
        assert set(recipients(state, message)) & present == delivered - {message.sender_id}, message
