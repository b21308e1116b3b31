"""Tests of read states: settings of threads for one participant, and unread counts. docs/protocol/read-state.md."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.node import Node, running_node
from tests.support.wire import WireSession

DIRECT = "direct:bob~mia"
NOTHING = {"read_upto": 0, "is_pinned": False, "is_muted": False, "is_archived": False}


async def threads(session: WireSession, **args: Any) -> dict[str, dict[str, Any]]:
    """Return the result of `network.list_threads`, by thread."""
    found = await session.call("network.list_threads", args)
    return {it["thread_id"]: it for it in found["threads"]}


async def test_a_mark_is_kept_and_told_to_the_other_sessions_of_its_owner_alone(node: Node) -> None:
    mia, bob = await node.person("mia"), await node.agent("bob")
    other = await node.person("mia")
    said = (await bob.send("agent:mia", "hello\n  there"))["seq"]
    assert (await threads(mia))[DIRECT]["unread"] == 1
    assert "mark" not in (await threads(mia))[DIRECT]

    kept = await mia.call("network.mark", {"thread_id": DIRECT, "read_upto": said, "is_pinned": True, "title": "Tea"})
    mark = {**NOTHING, "read_upto": said, "is_pinned": True, "title": "Tea"}
    assert kept == {"thread_id": DIRECT, **mark}
    notice = await other.expect("notice", kind="marked")
    assert (notice["thread_id"], notice["body"]) == (DIRECT, mark)
    listed = (await threads(mia))[DIRECT]
    assert (listed["mark"], listed["unread"], listed["last"]["text"]) == (mark, 0, "hello there")

    again = {"thread_id": DIRECT, "read_upto": said - 1, "is_pinned": None, "title": None}
    assert await mia.call("network.mark", again) == kept, "it never goes back, and what is left out stays"
    beyond = await mia.call("network.mark", {"thread_id": DIRECT, "read_upto": 2**50, "is_pinned": False, "title": ""})
    assert beyond == {"thread_id": DIRECT, **NOTHING, "read_upto": mia.welcome["head"] + 2}, "no later one is read yet"
    assert (await other.expect("notice", kind="marked"))["body"] == {**NOTHING, "read_upto": beyond["read_upto"]}
    for session in (mia, bob, other):
        await session.settle()
        assert not [it for it in session.unread if it["type"] == "notice"]
    assert "mark" not in (await threads(bob))[DIRECT]


async def test_marks_outlive_a_restart_and_not_their_owner(tmp_path: Path) -> None:
    db = tmp_path / "team.db"
    async with running_node(db=db, durability="normal") as node:
        host, bob = await node.person("host"), await node.agent("bob")
        mia = await node.invite(host, "mia")
        said = (await bob.send("agent:mia", "hello"))["seq"]
        await mia.call("network.mark", {"thread_id": DIRECT, "read_upto": said, "is_muted": True})
        tokens = node.tokens
    async with running_node(db=db, durability="normal") as node:
        node.tokens = tokens
        host, mia = await node.person("host"), await node.join("mia", kind="human", token=tokens["mia"])
        row = (await threads(mia))[DIRECT]
        assert (row["mark"], row["unread"]) == ({**NOTHING, "read_upto": said, "is_muted": True}, 0)
        await host.call("network.remove", {"agent_id": "mia"})
    async with running_node(db=db, durability="normal") as node:
        assert not _rows_of(db, "mark")


def _rows_of(db: Path, table: str) -> list[str]:
    with closing(sqlite3.connect(db)) as connection:
        return [key for (key,) in connection.execute("SELECT key FROM state WHERE tbl = ?", (table,))]


async def test_an_operator_marks_any_thread_and_is_counted_what_is_written_to_it(node: Node) -> None:
    host, ann, bob = await node.person("host"), await node.agent("ann"), await node.agent("bob")
    await ann.send("agent:bob", "between agents")
    await ann.send("broadcast", "to all")
    shown = await threads(host)
    assert {it: row["unread"] for it, row in shown.items()} == {"direct:ann~bob": 0, "broadcast": 1}
    assert shown["direct:ann~bob"]["last"]["text"] == "between agents"
    await host.call("network.mark", {"thread_id": "direct:ann~bob", "is_archived": True})
    assert (await threads(host))["direct:ann~bob"]["mark"]["is_archived"]
    assert "mark" not in (await threads(bob))["direct:ann~bob"]


async def test_who_has_left_is_shown_the_last_message_that_was_for_it(node: Node) -> None:
    host = await node.person("host")
    mia, zoe = await node.invite(host, "mia"), await node.invite(host, "zoe")
    await mia.call("channels.create", {"name": "dev"})
    for session in (mia, zoe):
        await session.call("channels.join", {"name": "dev"})
    early = (await mia.send("channel:dev", "early"))["seq"]
    await zoe.call("channels.leave", {"name": "dev"})
    await mia.send("channel:dev", "a secret")
    await mia.send("broadcast", "not for zoe", exclude_agent_ids=["zoe"])
    for args in ({}, {"threads": ["channel:dev", "broadcast"]}):
        shown = await threads(zoe, **args)
        assert list(shown) == ["channel:dev"]
        assert (shown["channel:dev"]["last"]["seq"], shown["channel:dev"]["unread"]) == (early, 1)
    await zoe.call("channels.join", {"name": "dev"})
    late = (await mia.send("channel:dev", "late"))["seq"]
    row = (await threads(zoe))["channel:dev"]
    assert (row["last"]["seq"], row["unread"]) == (late, 2), "of what was said meanwhile nothing is counted"


async def test_unread_ends_at_100_and_a_line_at_200_characters(node: Node) -> None:
    mia, bob = await node.person("mia"), await node.agent("bob")
    for number in range(101):
        await bob.send("agent:mia", f"{number}")
    await bob.send("agent:mia", {"text": "word " * 100, "files": [{"name": "a.txt"}]})
    row = (await threads(mia))[DIRECT]
    assert row["unread"] == 100
    assert len(row["last"]["text"]) == 200
    assert row["last"]["text"].endswith("word…")


async def test_of_more_marks_than_there_is_room_for_the_oldest_reading_goes() -> None:
    async with running_node(limits={"max_marks": 10}) as node:
        mia = await node.person("mia")
        agents = [f"bob-{number:02}" for number in range(12)]
        for name in agents:
            bob = await node.agent(name)
            said = (await bob.send("agent:mia", "hello"))["seq"]
            given = {"is_pinned": True} if name == "bob-00" else {}
            await mia.call("network.mark", {"thread_id": f"direct:{name}~mia", "read_upto": said, **given})
        shown = await threads(mia)
        marked = [name for name in agents if "mark" in shown[f"direct:{name}~mia"]]
        assert marked == ["bob-00", *agents[3:]]
        assert [row["unread"] for row in shown.values()] == [0] * 12, "what was read stays read"
        await node.sessions[-1].send("agent:mia", "more")
        assert [row["unread"] for row in (await threads(mia)).values()] == [1, *[0] * 11]


@pytest.mark.parametrize(
    "thread_id",
    ["direct:bob~nobody", "direct:mia~bob", "direct:bob~zoe", "channel:den", "channel:none", "mod:channels~zoe", "mod:none~mia", "thread:1", "x", ""],
)  # fmt: skip
async def test_what_is_no_thread_of_ones_own_is_not_marked(node: Node, thread_id: str) -> None:
    host = await node.person("host")
    mia, zoe, _ = await node.invite(host, "mia"), await node.invite(host, "zoe"), await node.agent("bob")
    await zoe.call("channels.create", {"name": "den"})
    hidden = (await zoe.send("agent:bob", "hidden"))["seq"]
    args = {"thread_id": thread_id, "read_upto": hidden, "is_pinned": True}
    refused = await mia.call_refused("unknown_message", "network.mark", args)
    assert refused["message"] == f"There is no thread {thread_id!r} that mia may read."


async def test_replies_are_marked_by_who_reads_what_they_answer(node: Node) -> None:
    host = await node.person("host")
    mia = await node.invite(host, "mia")
    said = (await host.send("broadcast", "question"))["seq"]
    zoe = await node.invite(host, "zoe")
    reply = await host.send("broadcast", "answer", reply_to=said)
    assert (await threads(mia, threads=[reply["thread_id"]]))[reply["thread_id"]]["unread"] == 1
    await mia.call("network.mark", {"thread_id": reply["thread_id"], "read_upto": reply["seq"]})
    assert (await threads(mia))[reply["thread_id"]]["unread"] == 0
    await zoe.call_refused(
        "unknown_message", "network.mark", {"thread_id": reply["thread_id"], "read_upto": reply["seq"]}
    )


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(it, marks=pytest.mark.full) for it in range(2, 6))])
async def test_what_threads_tell_is_what_reading_all_of_them_gives(seed: int, tmp_path: Path) -> None:
    """The test compares random histories, with a restart in between, with each participant's own history message by
    message.
    """
    chance = random.Random(seed)
    db = tmp_path / "team.db"
    names = ("mia", "zoe", "bob", "cat")
    upto: dict[tuple[str, str], int] = {}
    tokens: dict[str, str] = {}
    for _ in range(2):
        async with running_node(db=db, durability="normal") as node:
            node.tokens = tokens
            host = await node.person("host")
            if not tokens:
                people = {name: await node.invite(host, name) for name in ("mia", "zoe")}
                tokens = node.tokens
            else:
                people = {name: await node.join(name, kind="human", token=tokens[name]) for name in ("mia", "zoe")}
            sessions = people | {name: await node.agent(name) for name in ("bob", "cat")}
            await sessions["mia"].submit_call("channels.create", {"name": "dev"})
            for _ in range(60):
                await _do_something(chance, names, sessions, upto)
            for name, session in sessions.items():
                shown = await threads(session, limit=500)
                for thread_id, row in shown.items():
                    history = (await session.call("network.history", {"thread_id": thread_id, "limit": 500}))[
                        "messages"
                    ]
                    others = [it["seq"] for it in history if it["sender_id"] != name]
                    assert row["unread"] == sum(seq > upto.get((name, thread_id), 0) for seq in others), (name, row)
                    assert (row["last"]["seq"], row["last"]["text"]) == (history[-1]["seq"], history[-1]["content"])
                    assert row.get("mark", NOTHING)["read_upto"] == upto.get((name, thread_id), 0)
                for among in ([thread_id] for thread_id in [*shown, "direct:bob~cat"]):
                    assert await threads(session, threads=among) == {it: shown[it] for it in among if it in shown}


async def _do_something(
    chance: random.Random, names: tuple[str, ...], sessions: dict[str, WireSession], upto: dict[tuple[str, str], int]
) -> None:
    name = chance.choice(names)
    session = sessions[name]
    match chance.choice(("direct", "broadcast", "channel", "move", "reply", "mark", "mark")):
        case "direct":
            await session.submit(f"agent:{chance.choice([it for it in names if it != name])}", "a word")
        case "broadcast":
            other = chance.choice([it for it in names if it != name])
            await session.submit("broadcast", "to all", **chance.choice(({}, {"exclude_agent_ids": [other]})))
        case "channel":
            await session.submit("channel:dev", "in the channel")
        case "move":
            await session.submit_call(chance.choice(("channels.join", "channels.leave")), {"name": "dev"})
        case "reply":
            history = (await session.call("network.history", {"thread_id": "broadcast", "limit": 500}))["messages"]
            if history:
                await session.submit("broadcast", "a reply", reply_to=chance.choice(history)["seq"])
        case _:
            listed = list((await threads(session)).values())
            if listed:
                row = chance.choice(listed)
                seq = chance.randint(0, row["last_seq"])
                await session.call("network.mark", {"thread_id": row["thread_id"], "read_upto": seq})
                key = (name, row["thread_id"])
                upto[key] = max(upto.get(key, 0), seq)
