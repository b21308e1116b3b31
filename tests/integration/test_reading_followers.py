"""Tests of a read replica, which shows its data with their time and stores nothing. docs/protocol/nodes.md."""

from __future__ import annotations

import asyncio
import hashlib
import re
import signal
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.crash.test_takeovers import OWNER, ClusterNode
from tests.integration.test_cluster_told import leader_and_follower, told_by
from tests.support.forks import start_roundelay
from tests.support.node import Node
from tests.support.wire import WireSession, expect_error, make_token

READS: list[tuple[str, dict[str, Any]]] = [
    ("network.history", {"thread_id": "direct:ann~mia"}),
    ("network.list_threads", {}),
    ("network.inbox", {}),
    ("network.search", {"query": "two"}),
    ("network.list_agents", {}),
]


async def look(node: ClusterNode, agent_id: str, token: str, *, kind: str = "human") -> tuple[WireSession, Any]:
    """Open a session that reads at a node. Return it and its welcome."""
    session = await WireSession.open(f"{node.url}?read_only=1")
    return session, await session.hello(agent_id, kind=kind, token=token)


async def ask(session: WireSession, op: str, args: dict[str, Any]) -> tuple[Any, int]:
    """Return the value of a read and its time."""
    frame = await session.submit_call(op, args)
    assert frame["type"] == "result", frame
    return frame["value"], frame["as_of"]


async def read_by_command(node: ClusterNode, agent_id: str) -> str:
    """Run `roundelay threads`, and return its messages on stderr."""
    command = ["threads", "--url", f"{node.url}?read_only=1", "--as", agent_id, "--token", OWNER]
    done = await start_roundelay(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    out, told = await done.communicate()
    assert done.returncode == 0, told.decode()
    assert b"ann" in out
    return told.decode()


async def until_as_of(session: WireSession, beyond: int) -> None:
    async with asyncio.timeout(20):
        while (await ask(session, "network.list_threads", {}))[1] <= beyond:  # noqa: ASYNC110 (it tells nobody)
            await asyncio.sleep(0.05)


async def test_what_is_read_at_a_follower_is_what_the_leader_has_and_nothing_is_stored_there(tmp_path: Path) -> None:
    async with leader_and_follower(tmp_path) as (server, leader, follower):
        there = Node(leader.url, OWNER)
        mia, ann = await there.person("mia"), await there.agent("ann")
        eve = await there.invite(mia, "eve")
        first_token = there.tokens["eve"]
        eve_again = await there.invite(mia, "eve")  # eve now has a second token
        await there.invite(mia, "kim")
        await mia.send("agent:ann", "one")
        reader, welcome = await look(follower, "mia", OWNER)
        assert (welcome["is_read_only"], welcome["follows"]["leader"]) == (True, f"127.0.0.1:{leader.port}")
        await mia.send("agent:ann", "two")  # this message arrives while a reader is connected there
        assert await reader.contents_until("two") in ([], ["one"])
        sent_at = (await mia.call("network.history", {"thread_id": "direct:ann~mia"}))["messages"][-1]["sent_at"]
        await until_as_of(reader, sent_at)
        for op, args in READS:
            expected, (found, as_of) = await mia.call(op, args), await ask(reader, op, args)
            assert sent_at < as_of <= time.time() * 1000
            if op != "network.list_agents":  # presence differs between nodes
                assert found == expected, op

        strange, _ = await look(follower, "eve", first_token)
        hidden, _ = await ask(strange, "network.list_threads", {})
        assert "ann" not in str(hidden)
        removed, _ = await look(follower, "kim", there.tokens["kim"])
        assert (await strange.submit_call("network.history", {"thread_id": "direct:ann~mia"}))["type"] == "error"

        end = (await ann.call("network.history", {"thread_id": "direct:ann~mia"}))["messages"][-1]["seq"]
        expect_error(await reader.submit("agent:ann", "three"), "forbidden")
        expect_error(await reader.submit_call("channels.create", {"name": "dev"}), "forbidden")
        expect_error(await reader.submit_record("r", "started", {"trigger": end}), "forbidden")
        await reader.send_frame({"type": "nack", "seq": end, "reason": "no"})
        await reader.send_frame({"type": "signal", "thread_id": "direct:ann~mia", "kind": "typing", "body": {}})
        for _ in range(2):
            told = expect_error(await reader.expect("error"), "forbidden")
            assert f"127.0.0.1:{leader.port}" in told["message"]
        for agent_id, kind, token, more in (
            ("new", "agent", make_token(), {}),  # a node that accepts this join would register the agent
            ("ann", "agent", there.tokens["ann"], {"role": "reactor"}),  # this join would replace another session
            ("mia", "human", OWNER, {"card": {"about": "another"}}),
        ):
            refused = await WireSession.open(f"{follower.url}?read_only=1")
            await refused.send_frame({
                "type": "hello", "protocol": 1, "agent_id": agent_id, "kind": kind, "token": token, **more,
            })  # fmt: skip
            expect_error(await refused.next_frame(), "forbidden")
            assert await refused.closed() == 4403
        await mia.send("agent:ann", "last")
        rows = (await mia.call("network.history", {"thread_id": "direct:ann~mia"}))["messages"]
        assert [it["content"] for it in rows] == ["one", "two", "last"]
        assert "new" not in str(await mia.call("network.list_agents", {}))

        told, asked_at = await read_by_command(follower, "mia"), datetime.now(UTC)
        found = re.search(rf"follows 127\.0\.0\.1:{leader.port}, as of (\S+ \S+)\.", told)
        assert found, told
        assert abs((datetime.fromisoformat(found[1]).astimezone(UTC) - asked_at).total_seconds()) < 10

        second, _ = await look(follower, "eve", there.tokens["eve"])
        digest = hashlib.sha256(first_token.encode()).hexdigest()
        await mia.call("network.revoke_token", {"agent_id": "eve", "token_hash": digest})
        assert await strange.closed() == 4403
        await ask(second, "network.list_threads", {})
        await mia.call("network.revoke_token", {"agent_id": "eve"})
        assert await second.closed() == 4403
        await mia.call("network.remove", {"agent_id": "kim"})
        assert await removed.closed() == 4403
        again = await WireSession.open(f"{follower.url}?read_only=1")
        await again.send_frame({
            "type": "hello", "protocol": 1, "agent_id": "eve", "kind": "human", "token": there.tokens["eve"],
        })  # fmt: skip
        assert (await again.next_frame())["type"] == "error"

        assert server._process is not None
        # The log is silent, so the data becomes old, and the command reports this.
        server._process.send_signal(signal.SIGSTOP)
        _, before = await ask(reader, "network.list_threads", {})
        await asyncio.sleep(1.5)  # the test is about elapsed time
        _, after = await ask(reader, "network.list_threads", {})
        assert after - before < 1000
        await there.close_sessions()
        assert leader.process is not None
        leader.process.kill()
        server._process.send_signal(signal.SIGCONT)
        assert await reader.closed() == 4503
        await told_by(follower, "ready")
        writer, welcome = await look(follower, "mia", OWNER)
        assert "follows" not in welcome
        assert (await writer.send("agent:ann", "at the new one"))["type"] == "stored"
        for session in (reader, strange, second, removed, writer, eve, eve_again):
            await session.close()


async def test_who_resumes_beyond_what_a_follower_has_comes_again_and_is_shown_nothing_twice(tmp_path: Path) -> None:
    async with leader_and_follower(tmp_path) as (_, leader, follower):
        there = Node(leader.url, OWNER)
        mia = await there.person("mia")
        await there.agent("ann")
        seen = (await mia.send("agent:ann", "seen at the leader"))["seq"]
        reader, welcome = await look(follower, "mia", OWNER)
        early = await WireSession.open(f"{follower.url}?read_only=1")
        point = {"epoch": welcome["network"]["epoch"], "cursor": seen + 1}  # the session knows more than the replica
        hello = {"type": "hello", "protocol": 1, "agent_id": "mia", "kind": "human", "token": OWNER, "resume": point}
        await early.send_frame(hello)
        assert await early.closed() == 4503
        await mia.send("agent:ann", "seen too")
        await reader.contents_until("seen too")
        late = await WireSession.open(f"{follower.url}?read_only=1")
        await late.send_frame(hello)
        again = await late.expect("welcome")
        assert (again["resume"], again["cursor"]) == ("full", seen + 1)
        await mia.send("agent:ann", "new")
        assert await late.contents_until("new") == []
        await there.close_sessions()
        for session in (reader, early, late):
            await session.close()
