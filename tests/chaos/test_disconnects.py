"""Tests of promise P4 on bad networks: clients connect through a proxy that resets, cuts, stalls and half-opens their
connections. docs/promises.md.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from random import Random

import pytest

from roundelay.network.backoff import Backoff
from roundelay.network.client import Cursor, link, transport
from roundelay.network.ledger.sqlite import SQLiteLedger
from tests.chaos.peers import ChaosPeer, Received
from tests.support.counts import Note
from tests.support.node import node_process
from tests.support.proxy import ENDINGS, chaos_proxy, plan_faults

SENDS_AT_ONCE = 2
STALL_S = 0.25
LIMITS = {
    "ping_interval_ms": 400,  # with this interval, the hub detects half-open connections too
    "stall_timeout_ms": 2_000,
    "session_queue_bytes": 64 * 1024,
    "root_messages_per_s": 1_000_000,
    "max_root_messages": 1_000_000,
}


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients detect lost connections and reconnect quickly."""
    monkeypatch.setattr(link, "RECONNECT_BACKOFF", Backoff(0.1, 0.3))
    monkeypatch.setattr(transport, "PING_INTERVAL_S", 0.3)
    monkeypatch.setattr(transport, "PING_TIMEOUT_S", 0.7)


async def _prove(
    db: Path, note: Note, *, seed: int, disconnects: int, peers: int, timeout_s: float, settle_timeout_s: float = 30
) -> None:
    """Let the clients send until the planned faults have fired or ``timeout_s`` expires. Then every send gets an
    answer, and every message arrives, within ``settle_timeout_s`` each.
    """
    random = Random(seed)
    scripts = plan_faults(seed, disconnects, up_bytes=6_000, down_bytes=40_000, stall_s=STALL_S)
    names = [f"p{number}" for number in range(peers)]
    began_at = time.monotonic()
    async with node_process(db, limits=LIMITS) as node, chaos_proxy(node.url, scripts) as proxy:
        cursors: dict[str, Cursor] = {}
        for name in names:  # everybody is registered and in the channel before the first message
            session = await node.agent(name)
            await session.call("channels.join" if cursors else "channels.create", {"name": "dev"})
            cursors[name] = Cursor(session.welcome["network"]["epoch"], session.welcome["head"])
            await session.bye()
        received = Received()
        members = []
        for number, name in enumerate(names):
            resume = cursors[name] if number % 2 else None  # from its own cursor, or from the hub's ack cursor
            members.append(ChaosPeer(name, proxy.url, node.token_of(name), received, Random(random.random()), resume))
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*(member.connect() for member in members))
        listening = [asyncio.create_task(member.listen()) for member in members]
        addresses = ["broadcast", "channel:dev"]
        sending = [
            asyncio.create_task(
                member.send_until(
                    proxy.is_exhausted,
                    f"{member.agent_id}.{part}",
                    addresses + [f"agent:{other}" for other in names if other != member.agent_id],
                    pause_s=peers * 0.008,
                )
            )
            for member in members
            for part in range(SENDS_AT_ONCE)
        ]
        try:
            async with asyncio.timeout(timeout_s):
                await proxy.is_exhausted.wait()
        except TimeoutError:
            proxy.is_exhausted.set()  # the checks below count the faults that have fired
        async with asyncio.timeout(settle_timeout_s):
            await asyncio.gather(*sending)  # every send gets an answer
        expected: dict[str, set[int]] = {name: set() for name in names}
        for member in members:
            for to, _, seq in member.stored.values():
                for name in expected.keys() - {member.agent_id}:
                    if to in ("broadcast", "channel:dev", f"agent:{name}"):
                        expected[name].add(seq)
        lacking = await received.until(expected, settle_timeout_s)
        assert not [task for task in listening if task.done()]
        await asyncio.gather(*(member.client.close() for member in members))
        await asyncio.gather(*listening)

    rows = await _read_messages(db)
    sent = {(member.agent_id, key): value for member in members for key, value in member.stored.items()}
    not_once = sum(len(rows.get(key, [])) != 1 or rows[key][0] != sent[key][2] for key in sent) + len(
        rows.keys() - sent.keys()
    )
    contents = {seq: content for _, content, seq in sent.values()}
    own = {member.agent_id: {seq for *_, seq in member.stored.values()} for member in members}
    strange = sum(  # own messages go to the sender's other sessions
        seq not in expected[name] | own[name] or content != contents[seq]
        for name, mine in received.by_agent.items()
        for seq, content in mine.items()
    )
    sessions = [session for member in members for session in member.transport.sessions]
    repeats = sum(session.repeats() for session in sessions)
    disordered = sum(not session.is_in_order() for session in sessions)
    limited = sum(session.welcome["resume"] == "limited" for session in sessions)
    fired = proxy.fired
    note(
        seconds=round(time.monotonic() - began_at, 1), disconnects=sum(fired[kind] for kind in ENDINGS), connections=proxy.connections,
        faults_planned=proxy.planned.total(), faults_fired=len(proxy.log), **dict(sorted(fired.items())),
        sent=len(sent), not_once_in_the_ledger=not_once, expected=sum(map(len, expected.values())),
        delivered=sum(len(session.delivered) for session in sessions), missing=sum(lacking.values()), strange=strange,
        repeated_in_a_session=repeats, sessions_out_of_order=disordered, given_to_the_program_again=received.again,
    )  # fmt: skip
    assert proxy.fired_share >= 0.9, proxy.planned - proxy.fired
    assert (lacking, not_once, strange, repeats, disordered, limited) == ({}, 0, 0, 0, 0, 0)
    assert all(expected.values())


async def _read_messages(db: Path) -> dict[tuple[str, str], list[int]]:
    """Return the seqs in a ledger by (sender, message_id)."""
    ledger = SQLiteLedger(db, new_epoch=lambda: "renewed")
    await ledger.open()
    found: dict[tuple[str, str], list[int]] = {}
    for row in await ledger.rows(0, 10_000_000):
        if row.type == "message":
            found.setdefault((row.actor, row.key[2:]), []).append(row.seq)
    await ledger.close()
    return found


@pytest.mark.usefixtures("_soon")
async def test_everyone_gets_everything_across_40_disconnects(tmp_path: Path, note: Note) -> None:
    await _prove(tmp_path / "team.db", note, seed=60, disconnects=40, peers=8, timeout_s=80)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_soon")
async def test_everyone_gets_everything_across_1000_disconnects(tmp_path: Path, note: Note) -> None:
    await _prove(tmp_path / "team.db", note, seed=1000, disconnects=1000, peers=20, timeout_s=600, settle_timeout_s=120)
