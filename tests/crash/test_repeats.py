"""Tests of promise P2: sending is idempotent by (sender, message_id), across kills and restarts, whatever has changed
in between. docs/promises.md.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from roundelay.network.ledger.sqlite import SQLiteLedger
from tests.crash.peers import Peer
from tests.support.counts import Note
from tests.support.node import ProcessNode, node_process

SENDERS = 10
REPEATED_SHARE = 0.3
MOST_REPEATS = 5
PLACES = ("agent:ear", "agent:gone", "broadcast")


@dataclass(frozen=True)
class Saying:
    """One message of a sender with the phases of its first send and its repeats. A phase ends with a restart."""

    message_id: str
    to: str
    text: str
    phases: tuple[int, ...]
    has_conflict: bool


def _plan(random: Random, *, messages: int, conflicts: int, phases: int) -> list[Saying]:
    conflicting = set(random.sample(range(messages), conflicts))
    sayings = []
    for number in range(messages):
        # The last phase has only repeats. By then, the participant `gone` is removed.
        first = random.randrange(phases - 1)
        repeats = random.randint(1, MOST_REPEATS) if random.random() < REPEATED_SHARE else 0
        later = sorted(random.randint(first, phases - 1) for _ in range(repeats))
        sayings.append(
            Saying(f"m{number}", random.choice(PLACES), f"{number} of many", (first, *later), number in conflicting)
        )
    return sayings


async def _say_phase(peer: Peer, sayings: list[Saying], phase: int, random: Random) -> int:
    """Send the messages of this phase, first sends and repeats mixed. Return the number of repeats."""
    due = [(saying, turn) for saying in sayings for turn, when in enumerate(saying.phases) if when == phase]
    random.shuffle(due)
    started: set[str] = {saying.message_id for saying in sayings if saying.phases[0] < phase}
    repeats = 0
    for saying, turn in due:
        repeats += saying.message_id in started
        started.add(saying.message_id)
        # Metadata does not affect whether two messages are equal.
        await peer.send(saying.message_id, saying.to, saying.text, metadata={"turn": turn})
        if random.random() < 0.05:
            await asyncio.sleep(0)
    return repeats


async def _contradict(peer: Peer, saying: Saying, random: Random) -> None:
    """Send another body under an id that was stored."""
    text, to = saying.text, saying.to
    if random.random() < 0.5:
        text += "!"
    else:
        to = random.choice([place for place in PLACES if place != to])
    await peer.send(saying.message_id, to, text)


async def _restart(node: ProcessNode, peers: list[Peer], *, is_kill: bool) -> None:
    if is_kill:
        await node.kill9()
    await node.restart()
    await asyncio.gather(*(peer.lost() for peer in peers))
    await asyncio.gather(*(peer.come_back() for peer in peers))


async def _prove(db: Path, note: Note, *, messages: int, conflicts: int, phases: int) -> None:
    random = Random(messages)
    each = messages // SENDERS
    repeats = 0
    async with node_process(db, limits={"root_messages_per_s": 1_000_000}) as node:
        for name in ("ear", "gone"):
            await (await node.agent(name)).bye()
        peers = [Peer(node, f"s{number}", ack_every=0) for number in range(SENDERS)]
        plans = {
            peer.agent_id: _plan(random, messages=each, conflicts=conflicts // SENDERS, phases=phases) for peer in peers
        }
        await asyncio.gather(*(peer.come_back() for peer in peers))
        for phase in range(phases):
            if phase == phases - 1:
                mia = await node.person("mia")
                await mia.call("network.remove", {"agent_id": "gone"})
            repeats += sum(
                await asyncio.gather(*(_say_phase(peer, plans[peer.agent_id], phase, random) for peer in peers))
            )
            if phase < phases - 1:
                await _restart(node, peers, is_kill=phase % 2 == 0)
        await asyncio.gather(*(peer.settled() for peer in peers))
        for peer in peers:
            for saying in plans[peer.agent_id]:
                if saying.has_conflict:
                    await _contradict(peer, saying, random)
        await asyncio.gather(*(peer.leave() for peer in peers))

    ledger = SQLiteLedger(db, new_epoch=lambda: "renewed")
    await ledger.open()
    rows = [row for row in await ledger.rows(0, 10_000_000) if row.type == "message"]
    await ledger.close()
    rows_of: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        rows_of.setdefault((row.actor, row.key[2:]), []).append(row.seq)
    answered = duplicates = refused = doubled = moved = 0
    for peer in peers:
        for saying in plans[peer.agent_id]:
            answers = peer.answers[saying.message_id]
            stored = [answer for answer in answers if answer["type"] == "stored"]
            errors = [answer["code"] for answer in answers if answer["type"] == "error"]
            seqs = rows_of.pop((peer.agent_id, saying.message_id), [])
            answered += len(stored)
            duplicates += sum(answer["duplicate"] for answer in stored)
            doubled += len(seqs) != 1
            moved += {answer["seq"] for answer in stored} != set(seqs)
            refused += len(errors)
            assert errors == (["id_conflict"] if saying.has_conflict else [])
    note(
        sends=messages, repeats=repeats, restarts=phases - 1, stored_answers=answered, duplicates=duplicates, doubled=doubled,
        moved=moved, conflicts=conflicts, conflicts_refused=refused,
    )  # fmt: skip
    assert (doubled, moved, rows_of) == (0, 0, {})
    assert refused == conflicts
    assert duplicates > repeats / 2  # some answers were lost in kills


async def test_a_repeated_send_has_one_row_and_one_seq(tmp_path: Path, note: Note) -> None:
    await _prove(tmp_path / "team.db", note, messages=1_000, conflicts=20, phases=4)


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_a_repeated_send_has_one_row_and_one_seq_among_10000(tmp_path: Path, note: Note) -> None:
    await _prove(tmp_path / "team.db", note, messages=10_000, conflicts=200, phases=11)
