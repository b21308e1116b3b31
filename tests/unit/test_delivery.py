"""Tests of a session's outbox with redeliveries, and of a session that ends before its welcome."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from roundelay.network.hub.delivery import Outbox
from tests.support.stepped_hub import SteppedHub


def frame(seq: int) -> bytes:
    return b"%d" % seq + b"." * 9


@pytest.fixture
def outbox() -> Outbox:
    """Return a live outbox with a window of four messages and a queue of five frames."""
    outbox = Outbox(max_unacked=4, max_bytes=50)
    outbox.is_behind = False
    return outbox


@pytest.fixture
def hub() -> Iterator[SteppedHub]:
    hub = SteppedHub({})
    yield hub
    hub.close()


def test_a_redelivery_goes_before_what_is_queued(outbox: Outbox) -> None:
    outbox.push((1, frame(1), True))
    outbox.take_frames(1000)
    outbox.release(1)
    outbox.push((2, frame(2), True))
    outbox.push_redelivery(1, frame(1))
    assert outbox.take_frames(1000) == [frame(1), frame(2)]


def test_a_redelivery_that_the_session_has_not_had_comes_in_its_order(outbox: Outbox) -> None:
    for seq in (1, 3):  # message 2 waits for its next attempt
        outbox.push((seq, frame(seq), True))
    outbox.push_redelivery(2, frame(2))
    assert outbox.take_frames(1000) == [frame(1), frame(2), frame(3)]


@pytest.mark.parametrize("is_first", [True, False])
def test_an_overflow_loses_no_redelivery(outbox: Outbox, is_first: bool) -> None:
    outbox.skip_own(1)
    outbox.skip_own(3)
    if not is_first:
        outbox.push((4, frame(4), True))
    outbox.push_redelivery(2, frame(2))
    seq = 4
    while not outbox.is_behind:
        seq += 1
        outbox.push((seq, frame(seq), True))
    assert outbox.take_frames(1000) == [frame(2)]
    assert outbox.position == 3, "pages begin where the queue began"
    assert outbox.is_own(3) is False, "nothing of its own is in those pages"


def test_what_an_overflow_drops_is_left_to_the_pages(outbox: Outbox) -> None:
    outbox.push((1, frame(1), True))
    outbox.push((3, frame(3), True))
    outbox.push_redelivery(2, frame(2))
    for seq in (4, 5, 6):
        outbox.push((seq, frame(seq), True))
    assert outbox.is_behind
    assert (outbox.position, outbox.queued) == (0, 0)
    assert not outbox.has(2), "a page brings it"
    assert outbox.has_or_will_get(2)


def test_a_newer_reactor_that_is_gone_before_its_welcome_supersedes_the_older(hub: SteppedHub) -> None:
    hello = {"type": "hello", "protocol": 1, "agent_id": "bot", "kind": "agent", "role": "reactor"}
    older, session = hub.connect()
    hub.receive(session, hello)
    hub.loop.step()
    assert [frame["type"] for frame in older.take_frames()] == ["welcome"]
    _, newer = hub.connect()
    hub.receive(newer, hello)
    hub.hub.disconnect(newer)
    hub.loop.step()
    assert [frame["kind"] for frame in older.take_frames()] == ["superseded"]
    assert older.closed == 4409


def test_what_is_queued_for_one_session_is_in_no_other() -> None:
    """Sessions without deliveries share an empty queue. Each session gets its own queue with its first delivery."""
    quiet, redelivered, pushed = (Outbox(10, 1000) for _ in range(3))
    pushed.push((1, b"one", True))
    redelivered.push_redelivery(1, b"again")
    assert [it.queued for it in (quiet, redelivered, pushed, Outbox(10, 1000))] == [0, 1, 1, 0]
    assert (quiet.take_frames(1000), redelivered.take_frames(1000), pushed.take_frames(1000)) == (
        [],
        [b"again"],
        [b"one"],
    )
    assert quiet._queue is Outbox(10, 1000)._queue  # a separate empty deque would take 760 bytes
