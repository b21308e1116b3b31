"""Tests of promise P10: a message that fails five times becomes a visible dead letter, and all others are handled.
docs/promises.md.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.crash.peers import Heard, Peer
from tests.support.counts import Note
from tests.support.node import node_process

SENDERS = 5
ATTEMPTS = 5
MOST_UNANSWERED = 64


async def _send_all(peer: Peer, contents: list[str]) -> None:
    for number, content in enumerate(contents):
        await peer.send(f"m{number}", "agent:bot", content)
        await peer.until(lambda: peer.unanswered < MOST_UNANSWERED)
    await peer.settled()


async def _prove(db: Path, note: Note, *, messages: int, poison: int, leaves: int) -> None:
    random = Random(messages)
    contents = ["poison"] * poison + ["fine"] * (messages - poison)
    random.shuffle(contents)
    attempts: dict[int, list[int]] = {}
    handled: Counter[int] = Counter()

    def handle(heard: Heard) -> dict[str, Any]:
        if heard.content == "poison":
            attempts.setdefault(heard.seq, []).append(heard.attempt)
            return {
                "type": "nack",
                "seq": heard.seq,
                "reason": "cannot be handled",
                "retry_after_ms": random.randint(1, 20),
            }
        handled[heard.seq] += heard.content == "fine"
        return {"type": "ack", "seq": heard.seq, "only": True}

    async with node_process(db, limits={"root_messages_per_s": 1_000_000}) as node:
        bot = Peer(node, "bot", role="reactor")
        bot.on_heard = handle
        senders = [Peer(node, f"s{number}") for number in range(SENDERS)]
        await asyncio.gather(*(peer.come_back() for peer in (bot, *senders)))
        sending = [
            asyncio.create_task(_send_all(peer, contents[number::SENDERS])) for number, peer in enumerate(senders)
        ]
        for leave in range(leaves):
            goal = messages * (leave + 1) // (leaves + 2)
            await bot.until(lambda goal=goal: len(handled) >= goal)  # type: ignore[misc]
            await bot.leave()
            if leave % 2:
                await node.restart()
                await asyncio.gather(*(peer.lost() for peer in senders))
                await asyncio.gather(*(peer.come_back() for peer in senders))
            await bot.come_back()
        await asyncio.gather(*sending)

        def told() -> set[int]:
            return {notice["body"]["seq"] for notice in bot.notices if notice["kind"] == "dead_letter"}

        await bot.until(lambda: len(told()) >= poison and len(handled) >= messages - poison)
        poisoned = {
            peer.stored[f"m{index}"]
            for number, peer in enumerate(senders)
            for index, content in enumerate(contents[number::SENDERS])
            if content == "poison"
        }
        mia = await node.person("mia")
        states: Counter[tuple[str, int]] = Counter()
        for seq in sorted(poisoned):
            (status,) = (await mia.call("network.message_status", {"seq": seq}))["recipients"]
            states[status["state"], status["attempts"]] += 1
        again = len(bot.heard)
        await bot.leave()
        await bot.come_back()
        await senders[0].send("marker", "agent:bot", "marker")
        await bot.until(lambda: bot.heard[-1].content == "marker")
        again = len(bot.heard) - 1 - again
    assert told() == poisoned
    note(
        messages=messages, poison=poison, leaves=leaves, dead_letters=states["dead", ATTEMPTS], dead_letter_notices=len(told()),
        handled=sum(count > 0 for count in handled.values()), handled_twice=sum(count > 1 for count in handled.values()), delivered_after_the_end=again,
    )  # fmt: skip
    assert states == {("dead", ATTEMPTS): poison}
    assert attempts == {seq: list(range(1, ATTEMPTS + 1)) for seq in poisoned}
    assert sum(handled.values()) == messages - poison
    assert max(handled.values()) == 1
    assert again == 0


async def test_poison_becomes_dead_letters_and_the_rest_goes_on(tmp_path: Path, note: Note) -> None:
    await _prove(tmp_path / "team.db", note, messages=1_000, poison=10, leaves=2)


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_100_poison_messages_among_10000_become_100_dead_letters(tmp_path: Path, note: Note) -> None:
    await _prove(tmp_path / "team.db", note, messages=10_000, poison=100, leaves=6)
