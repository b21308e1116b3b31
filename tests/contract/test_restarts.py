"""Tests of a hub that is killed or stopped and restarted on its database: the state that must survive.
docs/protocol/delivery.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from tests.support.node import node_process, running_node
from tests.support.wire import hello_frame


async def test_nothing_acknowledged_is_lost_by_kill_9(tmp_path: Path) -> None:
    async with node_process(tmp_path / "team.db") as node:
        alice, bob = await node.agent("alice"), await node.agent("bob")
        epoch, start = bob.welcome["network"]["epoch"], bob.welcome["cursor"]
        await alice.call("channels.create", {"name": "dev"}, call_id="c1")
        await bob.call("channels.join", {"name": "dev"})
        stored = [await alice.send("channel:dev", n, message_id=f"m{n}") for n in range(20)]
        await alice.send_frame({"type": "send", "message_id": "last", "to": "channel:dev", "content": "unanswered"})
        await node.kill9()
        await node.restart()

        alice, bob = await node.agent("alice"), await node.agent("bob", resume={"epoch": epoch, "cursor": start})
        assert alice.welcome["network"]["epoch"] == epoch  # durability full: nothing was lost
        assert bob.welcome["resume"] == "full"
        # Repeat this send after the restart to learn its result.
        await alice.send("channel:dev", "unanswered", message_id="last")
        for n, first in enumerate(stored):
            assert await alice.send("channel:dev", n, message_id=f"m{n}") == first | {"duplicate": True}
        await alice.send("channel:dev", "marker")
        frames = await bob.deliveries_until("marker")
        assert [frame["message"]["content"] for frame in frames] == [*range(20), "unanswered"]
        assert [frame["message"]["seq"] for frame in frames][:20] == [first["seq"] for first in stored]
        assert (await alice.submit_call("channels.create", {"name": "dev"}, call_id="c1"))["type"] == "result"
        await alice.call_refused("id_conflict", "channels.create", {"name": "ops"}, call_id="c1")


async def test_a_clean_stop_keeps_floor_attempts_fence_and_open_reactions(tmp_path: Path) -> None:
    async with node_process(tmp_path / "team.db", durability="normal") as node:
        alice = await node.agent("alice")
        bot = await node.agent("bot", role="reactor")
        seqs = [(await alice.send("agent:bot", content))["seq"] for content in ("done", "hard", "trigger", "only")]
        await bot.deliveries_until("only")
        await bot.ack(seqs[0])
        await bot.ack(seqs[3], only=True)
        await bot.nack(seqs[1])
        await bot.expect("deliver", attempt=2)
        started = await bot.record("r1", "started", {"trigger": seqs[2]})
        epoch, fence = bot.welcome["network"]["epoch"], bot.welcome["fence"]
        assert await node.stop() == 0
        for session in (alice, bot):
            frames = await session.rest()
            assert (frames[-1]["type"], frames[-1]["kind"]) == ("notice", "draining")
            assert await session.closed() == 4503
        await node.restart()

        again = await node.agent("bot", role="reactor", fence=fence)
        welcome = again.welcome
        assert (welcome["network"]["epoch"], welcome["resume"]) == (epoch, "full")
        assert seqs[0] <= welcome["cursor"] < seqs[1]
        assert welcome["fence"] > fence
        assert welcome["open_reactions"] == [{"reaction": "r1", "trigger": seqs[2], "seq": started["seq"]}]
        delivery = await again.delivery()
        assert (delivery["message"]["content"], delivery["attempt"]) == ("hard", 2)
        await (await node.agent("alice")).send("agent:bot", "marker")
        assert await again.contents_until("marker") == []
        late = await node.connect()
        await late.send_frame(hello_frame("bot", token=node.token_of("bot"), role="reactor", fence=fence))
        assert await late.closed() == 4409


async def test_identity_and_owner_outlive_a_restart(tmp_path: Path) -> None:
    db = tmp_path / "team.db"
    async with running_node(db=db, durability="normal") as node:
        await node.agent("alice", card={"description": "first"})
        assert (tmp_path / "team.db.owner").stat().st_mode & 0o777 == 0o600
        owner_token, tokens = node.owner_token, node.tokens
    async with running_node(db=db, durability="normal") as node:
        node.tokens = tokens
        assert node.owner_token == owner_token
        assert (await node.agent("alice")).welcome["resume"] == "full"
        await node.person("mia")
        thief = await node.connect()
        await thief.send_frame(hello_frame("alice", token="x" * 43))
        assert (await thief.next_frame())["code"] == "not_authenticated"


@pytest.mark.parametrize("durability", ["normal", "memory"])
async def test_a_killed_process_keeps_the_epoch_unless_its_ledger_was_in_memory(
    tmp_path: Path, durability: Literal["normal", "memory"]
) -> None:
    async with node_process(tmp_path / "team.db", durability=durability) as node:
        alice = await node.agent("alice")
        epoch, cursor = alice.welcome["network"]["epoch"], alice.welcome["cursor"]
        await node.kill9()
        await node.restart()
        again = await node.agent("alice", resume={"epoch": epoch, "cursor": cursor})
        is_kept = durability == "normal"  # the kernel keeps the writes of a killed process
        assert (again.welcome["network"]["epoch"] == epoch) is is_kept
        assert again.welcome["resume"] == ("full" if is_kept else "limited")
        assert is_kept or isinstance(again.welcome["missing_before"], int)
