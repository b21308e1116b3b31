"""Tests of promise P1 under `kill -9`: a real hub process is killed repeatedly while twenty senders are active.
docs/promises.md.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from random import Random

import pytest

from tests.crash.kept import look_through
from tests.crash.peers import Peer
from tests.support.counts import Note
from tests.support.node import ProcessNode, node_process

SENDERS = 20
MESSAGES_PER_S = 500
LONGEST_LIFE_S = 0.3
EAR = "ear"


async def _talk(peer: Peer, random: Random) -> None:
    """Send at a steady rate until cancelled, even while the hub is down."""
    pause_s = SENDERS / MESSAGES_PER_S
    due_at = time.monotonic() + random.random() * pause_s
    number = 0
    while True:
        await asyncio.sleep(max(0.0, due_at - time.monotonic()))
        due_at += pause_s
        number += 1
        await peer.send(f"m{number}", f"agent:{EAR}", number)


async def _prove(db: Path, note: Note, *, kills: int) -> None:
    random = Random(kills)
    began_at = time.monotonic()
    async with node_process(db, limits={"root_messages_per_s": 100_000}) as node:
        ear = Peer(node, EAR, keeps_cursor=True)
        senders = [Peer(node, f"s{number}") for number in range(SENDERS)]
        await asyncio.gather(*(peer.come_back() for peer in (ear, *senders)))
        talking = [asyncio.create_task(_talk(peer, random)) for peer in senders]
        unanswered = 0
        for _ in range(kills):
            unanswered += await _kill_once(node, [ear, *senders], random)
        for task in talking:
            task.cancel()
        await asyncio.gather(*talking, return_exceptions=True)
        elapsed_s = time.monotonic() - began_at
        await asyncio.gather(*(peer.settled() for peer in senders))
        sent = sum(len(peer.answers) for peer in senders)
        await ear.until(lambda: len(ear.heard_seqs) == sent)

    found = await look_through(db, senders, ear)
    note(
        kills=kills, senders=SENDERS, messages_per_s=round(sent / elapsed_s), unanswered_at_a_kill=unanswered, **found.counts()
    )  # fmt: skip
    found.assert_kept()
    assert unanswered > 0, "no kill met a message under way"
    assert {welcome["network"]["epoch"] for peer in senders for welcome in peer.welcomes} == {found.epoch}


async def _kill_once(node: ProcessNode, peers: list[Peer], random: Random) -> int:
    """Kill the hub while it works, and start it again. Return the number of sends without an answer at the kill."""
    before = [len(peer.stored) for peer in peers]
    await peers[1].until(lambda: len(peers[1].stored) > before[1])  # the hub has acknowledged something since its start
    await asyncio.sleep(random.random() * LONGEST_LIFE_S)
    await node.kill9()
    await asyncio.gather(*(peer.lost() for peer in peers))
    unanswered = sum(peer.unanswered for peer in peers)
    await node.restart()
    await asyncio.gather(*(peer.come_back() for peer in peers))
    return unanswered


async def test_no_acknowledged_message_is_lost_by_4_kills(tmp_path: Path, note: Note) -> None:
    await _prove(tmp_path / "team.db", note, kills=4)


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_no_acknowledged_message_is_lost_by_200_kills(tmp_path: Path, note: Note) -> None:
    await _prove(tmp_path / "team.db", note, kills=200)
