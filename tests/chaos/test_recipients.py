"""Tests of promise P8: a message to nobody or with an unknown cause is refused and leaves nothing, and an absent
recipient gets its messages later. docs/promises.md.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.counts import Note
from tests.support.node import ProcessNode, node_process
from tests.support.wire import WireSession, new_id

LIMITS = {"root_messages_per_s": 1_000_000, "max_root_messages": 1_000_000}
AWAY = ("bye", "lost")


def _wrong_sends(random: Random, unseen: int, own: int, head: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield sends that must fail, as error code, address and fields. Some of the sends are near misses of valid ones."""
    letters = "".join(random.choice("abcdefghij0123456789") for _ in range(random.randint(5, 60)))
    nobody = [
        "agent:bo",
        "agent:bobb",
        "agent:dev",
        "agent:channels",
        "agent:broadcast",
        "agent:gone",
        f"agent:{letters}",
    ]
    no_channel = ["channel:de", "channel:bob", "channel:ann", "channel:channels", f"channel:{letters}"]
    no_mod = ["mod:channel", "mod:bob", "mod:dev", f"mod:{letters}"]
    for to in (random.choice(nobody), random.choice(no_channel), random.choice(no_mod)):
        yield "unknown_recipient", to, {}
        yield "unknown_recipient", to, {"cause": own}
        yield "unknown_recipient", to, {"reply_to": own}
    absent = random.choice((head + 1000, 2**52, unseen))
    for to in ("agent:bob", "broadcast", "channel:dev"):
        for field in ("reply_to", "cause"):
            yield "unknown_message", to, {field: absent}


def _wrong_calls(random: Random, unseen: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield calls that must fail, as error code, operation and arguments."""
    number = random.randint(10**6, 10**9)
    for thread_id in (
        f"thread:{number}",
        "channel:de",
        "direct:ann~nobody",
        "direct:bob~eve",
        "mod:tasks~ann",
        "dev",
        f"x{number}",
    ):
        yield "unknown_message", "network.history", {"thread_id": thread_id}
    for op in ("network.message_status", "network.why"):
        yield "unknown_message", op, {"seq": random.choice((number, unseen))}
    yield "unknown_message", "network.window", {"trigger": random.choice((number, unseen))}
    yield "unknown_operation", f"tasks{number}.list", {}
    yield "unknown_operation", "channels.explode", {}


async def _prove_refusals(db: Path, note: Note, *, rounds: int) -> None:
    random = Random(rounds)
    counts: Counter[str] = Counter()
    refused_ids: list[str] = []
    async with node_process(db, limits=LIMITS) as node:
        ann, bob, eve = [await node.agent(name) for name in ("ann", "bob", "eve")]
        mia = await node.person("mia")
        await (await node.agent("gone")).bye()
        await mia.call("network.remove", {"agent_id": "gone"})
        await ann.call("channels.create", {"name": "dev"})
        unseen = (await bob.send("agent:eve", "not for ann"))["seq"]
        own = (await ann.send("agent:eve", "own"))["seq"]
        for _ in range(rounds):
            head = (await ann.call("network.info"))["head"]
            wrong = [(new_id("wrong"), *each) for each in _wrong_sends(random, unseen, own, head)]
            right = [new_id("right") for _ in wrong]
            # All in one batch or a few batches.
            for (message_id, _, to, fields), good_id in zip(wrong, right, strict=True):
                await _push(ann, message_id, to, **fields)
                await _push(ann, good_id, "agent:bob")
            order = []
            for (message_id, code, to, _), good_id in zip(wrong, right, strict=True):
                answer = await ann.answer(message_id)
                assert (answer["type"], answer["code"]) == ("error", code), (to, answer)
                order += [message_id, good_id]
                assert (await ann.answer(good_id))["type"] == "stored"
                counts[code] += 1
            after = (await ann.call("network.info"))["head"]
            assert after - head == len(right), "a refused send moved the ledger"
            for code, op, args in _wrong_calls(random, unseen):
                await ann.call_refused(code, op, args)
                counts[f"{code}_call"] += 1
            assert (await ann.call("network.info"))["head"] == after, "a refused call moved the ledger"
            refused_ids += [message_id for message_id, *_ in wrong]
            delivered = [(await bob.delivery())["message"] for _ in right]
            assert [message["message_id"] for message in delivered] == right
            await bob.ack(delivered[-1]["seq"])
        free_again = 0
        for message_id in random.sample(refused_ids, 10):
            free_again += (await ann.send("agent:bob", "taken", message_id=message_id))["duplicate"] is False
        assert eve.unread == []
        stored = set(refused_ids) & (await _stop_and_read_ids(node, db))
    note(
        wrong_sends=len(refused_ids), **dict(counts), stored_all_the_same=len(stored) - free_again, ids_free_again=f"{free_again} of 10"
    )  # fmt: skip
    assert (len(stored), free_again) == (10, 10)
    assert sum(counts.values()) > len(refused_ids) == 15 * rounds


async def _push(session: WireSession, message_id: str, to: str, **fields: Any) -> None:
    await session.send_frame({"type": "send", "message_id": message_id, "to": to, "content": 1, **fields})


async def _stop_and_read_ids(node: ProcessNode, db: Path) -> set[str]:
    """Return every key in the log of a stopped node, without the prefix for its kind."""
    await node.close_sessions()
    await node.stop()
    with closing(sqlite3.connect(db)) as connection:
        return {str(key)[2:] for (key,) in connection.execute("SELECT key FROM log") if key is not None}


async def test_what_is_sent_to_nobody_is_refused_and_leaves_nothing(tmp_path: Path, note: Note) -> None:
    await _prove_refusals(tmp_path / "team.db", note, rounds=10)


@pytest.mark.full
async def test_10000_wrong_sends_are_refused_and_leave_nothing(tmp_path: Path, note: Note) -> None:
    await _prove_refusals(tmp_path / "team.db", note, rounds=700)


async def _states(session: WireSession, seq: int) -> dict[str, str]:
    status = await session.call("network.message_status", {"seq": seq})
    return {each["agent_id"]: each["state"] for each in status["recipients"]}


async def _prove_absences(db: Path, note: Note, *, recipients: int, restarts: int) -> None:
    """Let recipients leave with `bye` or lose their connections, send messages to all while they are away, and kill
    the hub. Half of them return and must get everything.
    """
    random = Random(recipients)
    names = [f"r{number}" for number in range(recipients)]
    returning = set(names[::2])
    async with node_process(db, limits=LIMITS) as node:
        ann = await node.agent("ann")
        await ann.call("channels.create", {"name": "dev"})
        for number, name in enumerate(names):
            session = await node.agent(name)
            await session.call("channels.join", {"name": "dev"})
            await (session.bye if number // 2 % 2 else session.drop)()
        direct: dict[str, list[int]] = {name: [] for name in names}
        to_all: list[int] = []
        for turn in range(restarts + 1):
            for name in names:
                for _ in range(random.randint(1, 3)):
                    direct[name].append((await ann.send(f"agent:{name}", f"direct {turn}"))["seq"])
            to_all += [(await ann.send(to, f"all {turn}"))["seq"] for to in ("broadcast", "channel:dev")]
            if turn < restarts:
                await (node.kill9 if turn % 2 == 0 else node.stop)()
                await node.restart()
                ann = await node.agent("ann")
        sent = {name: sorted(direct[name] + to_all) for name in names}
        queued = sum([await _states(ann, seq) == {name: "queued"} for name in names for seq in direct[name]])
        queued_for_all = sum([await _states(ann, seq) == dict.fromkeys(names, "queued") for seq in to_all])
        offline = (await ann.call("network.list_agents", {"online": False}))["agents"]

        missing = 0
        for name in sorted(returning):
            session = await node.agent(name)
            seqs = [(await session.delivery())["message"]["seq"] for _ in sent[name]]
            missing += seqs != sent[name]
            await session.ack(seqs[-1])
            await session.settle()
            await session.bye()
        handled = sum([await _states(ann, seq) == {name: "handled"} for name in returning for seq in direct[name]])
        still_queued = sum(
            [
                await _states(ann, seq) == {name: "queued"}
                for name in names
                if name not in returning
                for seq in direct[name]
            ]
        )
        expected = {name: "handled" if name in returning else "queued" for name in names}
        mixed = sum([await _states(ann, seq) == expected for seq in to_all])
    to_returning = sum(len(direct[name]) for name in returning)
    total = sum(map(len, direct.values()))
    note(
        recipients=recipients, restarts=restarts, sent_to_the_absent=total + len(to_all), queued_while_away=queued + queued_for_all,
        returned=len(returning), returned_without_all=missing, handled_on_return=handled, never_returned=recipients - len(returning),
        still_queued=still_queued,
    )  # fmt: skip
    assert {each["agent_id"] for each in offline} == set(names)
    assert (queued, queued_for_all) == (total, len(to_all))
    assert (missing, handled, still_queued) == (0, to_returning, total - to_returning)
    assert mixed == len(to_all)


async def test_who_is_away_gets_everything_on_return(tmp_path: Path, note: Note) -> None:
    await _prove_absences(tmp_path / "team.db", note, recipients=12, restarts=2)


@pytest.mark.full
async def test_200_who_are_away_get_everything_on_return(tmp_path: Path, note: Note) -> None:
    await _prove_absences(tmp_path / "team.db", note, recipients=200, restarts=4)
