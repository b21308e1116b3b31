"""Tests of moving all shared state: tasks, notes, files, timers, polls and edits are in a backup, in a shared log,
and on another node.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cronsim")
from tests.crash.test_takeovers import OWNER, cluster, find_leader
from tests.support.command import invoke
from tests.support.nats import NatsServer, nats_server
from tests.support.node import Node, running_node
from tests.support.wire import WireSession

THREAD = "direct:bob~mia"
MODS = ["channels", "discovery", "tasks", "notes", "timers", "polls", "messages"]


pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with nats_server(tmp_path / "nats") as running:
        yield running


async def fill(node: Node) -> dict[str, int]:
    """Fill a network with state of every mod. Return the numbers that `go_on` needs."""
    mia, bob = await node.person("mia"), await node.agent("bob")
    asked = (await mia.send("agent:bob", "Write the raport."))["seq"]
    await mia.call("messages.edit", {"seq": asked, "text": "Write the report."})
    await bob.call("messages.react", {"seq": asked, "emoji": "👍"})
    await mia.call("messages.pin", {"seq": asked})
    gone = (await mia.send("agent:bob", "secret draft"))["seq"]
    await mia.call("messages.delete", {"seq": gone})
    task = (await mia.call("tasks.create", {"title": "Report", "assignee": "bob", "cause": asked}))["task"]
    await mia.call("tasks.create", {"title": "Print", "assignee": "bob", "depends_on": [task]})
    await bob.call("tasks.claim", {"task": task, "minutes": 1440})
    note = (await bob.call("notes.create", {"name": "Report", "text": "One.", "thread_id": THREAD}))["note"]
    await bob.call("notes.append", {"note": note, "text": "Two."})
    in_ms = int(time.time() * 1000)
    poll = (
        await mia.call(
            "polls.create",
            {"question": "When?", "choices": ["a", "b"], "thread_id": THREAD, "closes_at": in_ms + 3_600_000},
        )
    )["poll"]
    secret = (
        await mia.call(
            "polls.create",
            {"question": "Who?", "choices": ["a", "b"], "thread_id": THREAD, "secret": True},
        )
    )["poll"]
    for number in (poll, secret):
        await bob.call("polls.vote", {"poll": number, "choice": "b"})
    await mia.call("timers.create", {"text": "soon", "in_minutes": 0.05, "to": "bob"})
    await mia.call("timers.create", {"text": "later", "cron": "0 8 * * *", "timezone": "Europe/Berlin"})
    return {"asked": asked, "gone": gone, "task": task, "note": note, "poll": poll, "secret": secret}


async def observe(node: Node, made: dict[str, int]) -> list[Any]:
    """Return the state that people and agents see."""
    found = []
    for session in (await node.person("mia"), await node.agent("bob")):
        found += [
            await session.call(op, args)
            for op, args in (
                ("tasks.list", {"state": ""}),
                ("tasks.get", {"task": made["task"]}),
                ("notes.read", {"note": made["note"]}),
                ("notes.history", {"note": made["note"]}),
                ("polls.list", {}),
                ("messages.edits", {"seq": made["asked"]}),
                ("messages.reactions", {"seqs": [made["asked"]]}),
                ("messages.pins", {"thread_id": THREAD}),
                ("network.open_items", {"root": made["asked"]}),
                ("network.history", {"thread_id": THREAD}),
            )
        ]
        timers = (await session.call("timers.list", {}))["timers"]
        found.append([it for it in timers if it["text"] != "soon"])  # the timer may have fired in between
    return found


async def go_on(node: Node, made: dict[str, int]) -> None:
    """Continue to work with the state, and check that each part still follows its rules."""
    mia, bob = await node.person("mia"), await node.agent("bob")
    await bob.call("tasks.complete", {"task": made["task"], "result": "See the note."})
    assert [it["title"] for it in (await bob.call("tasks.list", {"state": "open"}))["tasks"]] == ["Print"]
    written = await bob.call("notes.write", {"note": made["note"], "text": "New.", "expected_version": 2})
    assert written["version"] == 3
    await mia.call("polls.vote", {"poll": made["secret"], "choice": "a"})
    assert (
        "final"
        in (await bob.call_refused("invalid_arguments", "polls.vote", {"poll": made["secret"], "choice": "a"}))[
            "message"
        ]
    )
    sums = (await mia.call("polls.close", {"poll": made["secret"]}))["choices"]
    assert [it["votes"] for it in sums] == [1, 1]
    async with asyncio.timeout(20):
        while "soon" not in await reminders(bob):  # noqa: ASYNC110 (sent by the hub)
            await asyncio.sleep(0.2)
    await asyncio.sleep(0.6)
    assert await reminders(bob) == ["soon"]
    assert [it["text"] for it in (await mia.call("timers.list", {}))["timers"]] == ["later"]


async def reminders(session: WireSession) -> list[str]:
    page = await session.call("network.receive", {"after": 0})
    return [it["content"].partition(": ")[2] for it in page["messages"] if it["sender_id"] == "timers"]


async def test_backup_contains_the_state_of_every_mod(tmp_path: Path) -> None:
    lab, copy, mods = tmp_path / "lab.db", tmp_path / "copy.db", [*MODS, "files"]
    async with running_node(db=lab, durability="normal", mods=mods) as node:
        made, tokens = await fill(node), node.tokens
        mia = await node.person("mia")
        file = (await mia.call("files.save", {"name": "f.txt", "content": "figures"}))["file"]
        before = await observe(node, made)
        await invoke("backup", copy, "--db", lab)
    async with running_node(db=copy, durability="normal", mods=mods) as node:
        node.tokens = tokens
        assert await observe(node, made) == before
        mia = await node.person("mia")
        assert (await mia.call("files.read", {"file": file}))["text"] == "figures"
        await go_on(node, made)


async def test_state_of_every_mod_moves_into_a_log_and_back(server: NatsServer, tmp_path: Path) -> None:
    lab, back, log = tmp_path / "lab.db", tmp_path / "back.db", server.url("lab")
    async with running_node(db=lab, durability="full", mods=MODS) as node:
        made, tokens = await fill(node), node.tokens
        before = await observe(node, made)
    assert json.loads((await invoke("cluster", "migrate", "--from", lab, "--to", log, "--json")).out)["is_equal"]
    async with running_node(db=tmp_path / "one.db", log=log, durability="normal", mods=MODS) as node:
        node.tokens = tokens
        assert await observe(node, made) == before
        await go_on(node, made)
        after = await observe(node, made)
    # Another node takes over with an index that it builds from the log.
    async with running_node(db=tmp_path / "two.db", log=log, durability="normal", mods=MODS) as node:
        node.tokens = tokens
        assert await observe(node, made) == after
    await invoke("cluster", "migrate", "--from", log, "--to", back)
    async with running_node(db=back, durability="full", mods=MODS) as node:
        node.tokens = tokens
        assert await observe(node, made) == after


@pytest.mark.full
async def test_state_of_every_mod_survives_killed_leaders(tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "roundelay.yaml").write_text(f"mods: {json.dumps(MODS)}\n", encoding="utf-8")
    async with cluster(tmp_path, "a", "b") as (_, nodes):
        leader = await find_leader(nodes)
        node = Node(leader.url, OWNER)
        made, tokens = await fill(node), node.tokens
        before = await observe(node, made)
        for _ in range(4):
            await leader.end()
            await leader.start()
            leader = await find_leader(nodes)
            node = Node(leader.url, OWNER)
            node.tokens = tokens
            assert await observe(node, made) == before
        await go_on(node, made)
        await node.close_sessions()
