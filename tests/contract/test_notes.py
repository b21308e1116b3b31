"""Tests of notes as clients see them: versions, conflicts, sources, proposals, limits, and the state after a kill."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from roundelay import InvalidArguments, Network
from roundelay.mods import note_store
from roundelay.network.client import NetworkClient
from roundelay.network.errors import Forbidden, UnknownMessage
from tests.support.node import node_process

MODS = ["channels", "notes"]
PLAN = "channel:dev/plan"


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with Network.open(mods=MODS) as opened:
        yield opened


async def join_dev(network: Network, *names: str) -> list[NetworkClient]:
    clients = [await network.join(name) for name in names]
    await clients[0].call("channels.create", {"name": "dev"})
    for client in clients[1:]:
        await client.call("channels.join", {"name": "dev"})
    return clients


async def call(client: NetworkClient, op: str, **args: Any) -> Any:
    return await client.call(f"notes.{op}", args)


async def create(client: NetworkClient, text: str, **args: Any) -> Any:
    return await call(client, "create", **{"name": "plan", "thread_id": "channel:dev", "text": text, **args})


async def read(client: NetworkClient, note: str = PLAN, **args: Any) -> Any:
    return await call(client, "read", note=note, **args)


async def test_outdated_write_stores_nothing_and_shows_both_texts(network: Network) -> None:
    ann, bob = await join_dev(network, "ann", "bob")
    await create(ann, "one\ntwo\n")
    await call(ann, "write", note=PLAN, text="one\n2\n", expected_version=1)
    conflict = await call(bob, "write", note=PLAN, text="1\ntwo\n", expected_version=1)
    assert (conflict["is_conflict"], conflict["version"]) == (True, 2)
    assert (conflict["current"], conflict["yours"]) == ("one\n2\n", "1\ntwo\n")
    assert conflict["diff"].splitlines()[2:] == ["@@ -1,2 +1,2 @@", "-one", "-2", "+1", "+two"]
    assert (await read(bob))["text"] == "one\n2\n"


async def test_each_paragraph_shows_its_author_and_cause(network: Network) -> None:
    ann, bob = await join_dev(network, "ann", "bob")
    asked = await bob.send("channel:dev", "Is it safe?")
    await create(ann, "# Risks\nNone.\n")
    await call(bob, "append", note=PLAN, text="The pump leaks.", heading="risks", cause=asked.seq)
    value = await read(ann, sources=True)
    assert value["text"] == "# Risks\nNone.\n\nThe pump leaks."
    assert [(it["by"], it.get("cause"), it["version"]) for it in value["sources"]] == [
        ("ann", None, 1),
        ("bob", asked.seq, 2),
    ]


async def test_reverted_note_has_the_old_authors_again(network: Network) -> None:
    ann, bob = await join_dev(network, "ann", "bob")
    await create(ann, "one\n\ntwo")
    await call(bob, "write", note=PLAN, text="three", expected_version=1)
    await call(bob, "patch", note=PLAN, find="three", replace="four")
    assert (await call(bob, "revert", note=PLAN, version=1, expected_version=3))["version"] == 4
    value = await read(ann, sources=True)
    assert (value["text"], {it["by"] for it in value["sources"]}) == ("one\n\ntwo", {"ann"})
    assert (await read(ann, version=2))["text"] == "three"
    history = (await call(ann, "history", note=PLAN))["versions"]
    assert [(it["version"], it["by"], it["action"]) for it in history] == [
        (4, "bob", "reverted"),
        (3, "bob", "patched"),
        (2, "bob", "written"),
        (1, "ann", "created"),
    ]
    assert (await call(ann, "diff", note=PLAN, version=2))["diff"].splitlines()[3:] == ["-three", "+one", "+", "+two"]


async def test_only_the_newest_versions_are_kept(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    [ann] = await join_dev(network, "ann")
    await create(ann, "version 1")
    for version in range(1, note_store.MAX_VERSIONS + 5):
        await call(ann, "write", note=PLAN, text=f"version {version + 1}", expected_version=version)
    newest = note_store.MAX_VERSIONS + 5
    oldest = newest - note_store.MAX_VERSIONS + 1
    assert (await read(ann, version=oldest))["text"] == f"version {oldest}"
    with pytest.raises(InvalidArguments, match=f"It has {oldest} to {newest}"):
        await read(ann, version=oldest - 1)
    with pytest.raises(InvalidArguments, match=f"It has {oldest} to {newest}"):
        await call(ann, "revert", note=PLAN, version=oldest - 1, expected_version=newest)
    pages, before = [], newest + 1
    while versions := (await call(ann, "history", note=PLAN, before=before, limit=150))["versions"]:
        pages += [it["version"] for it in versions]
        before = versions[-1]["version"]
    assert pages == [*range(newest, oldest - 1, -1)]
    assert (await call(ann, "revert", note=PLAN, version=oldest, expected_version=newest))["version"] == newest + 1


async def test_owned_note_is_changed_by_accepted_proposals(network: Network) -> None:
    ann, bob, eve = await join_dev(network, "ann", "bob", "eve")
    await create(ann, "mine", access="owner")
    for op, args in (("append", {"text": "x"}), ("write", {"text": "x", "expected_version": 1})):
        with pytest.raises(Forbidden, match="ann owns channel:dev/plan"):
            await call(bob, op, note=PLAN, **args)
    assert (await call(bob, "propose", note=PLAN, text="ours", expected_version=1))["proposal"] == 1
    async with ann.receive() as notice:
        assert notice.content == f"bob proposes a change of your note {PLAN} (proposal 1)."
    for client in (bob, eve):
        with pytest.raises(Forbidden):
            await call(client, "decide", note=PLAN, proposal=1, accept=True)
    with pytest.raises(Forbidden):
        await call(eve, "decide", note=PLAN, proposal=1, accept=False)
    await call(ann, "append", note=PLAN, text="and more")
    stale = await call(ann, "decide", note=PLAN, proposal=1, accept=True)
    assert (stale["is_conflict"], stale["yours"]) == (True, "ours")
    await call(ann, "decide", note=PLAN, proposal=1, accept=True, anyway=True)
    value = await read(eve, sources=True)
    assert [(it["text"], it["by"]) for it in value["sources"]] == [("ours", "bob")]
    assert (await call(ann, "proposals", note=PLAN))["proposals"] == []
    await call(bob, "propose", note=PLAN, text="again", expected_version=3)
    assert (await call(bob, "decide", note=PLAN, proposal=2, accept=False))["accepted"] is False


async def test_links_lead_back_from_readable_notes_alone(network: Network) -> None:
    ann, bob = await join_dev(network, "ann", "bob")
    await create(ann, "see [[risks]]")
    await create(ann, "x", name="risks")
    await ann.call("channels.create", {"name": "den"})
    await create(ann, "also [[channel:dev/risks]]", thread_id="channel:den", name="secret")
    risks = "channel:dev/risks"
    assert (await read(ann, risks))["backlinks"] == ["channel:den/secret", PLAN]
    assert (await read(bob, risks))["backlinks"] == [PLAN]
    await call(ann, "patch", note=PLAN, find="[[risks]]", replace="nothing")
    assert (await read(bob, risks))["backlinks"] == []


async def test_search_finds_readable_notes_page_by_page(network: Network) -> None:
    ann, bob = await join_dev(network, "ann", "bob")
    await ann.call("channels.create", {"name": "den"})
    for number in range(5):
        await create(ann, f"# Pump {number}\nIt leaks água.", name=f"n{number}")
    await create(ann, "the pump leaks", thread_id="channel:den")
    found, after = [], ""
    while True:
        page = await call(bob, "search", query="PUMP leaks agua", limit=2, after=after)
        found += [it["note"] for it in page["notes"]]
        if not page["has_more"]:
            break
        after = page["next"]
    assert found == [f"channel:dev/n{number}" for number in range(5)]
    assert (await call(bob, "search", query="pump den"))["notes"] == []
    listed = await call(bob, "list", limit=3, after="channel:dev/n0")
    assert ([it["note"] for it in listed["notes"]], listed["has_more"]) == (
        [f"channel:dev/n{n}" for n in (1, 2, 3)],
        True,
    )


async def test_note_of_a_direct_thread_is_for_its_two(network: Network) -> None:
    ann, bob = await join_dev(network, "ann", "bob")
    eve = await network.join("eve")
    sent = await ann.send("agent:bob", "Let us write it down.")
    note = (await call(bob, "create", name="draft", text="x", cause=sent.seq))["note"]
    assert note == "direct:ann~bob/draft"
    await call(ann, "append", note=note, text="y")
    assert (await read(bob, note))["text"] == "x\n\ny"
    for op, args in (("read", {}), ("history", {}), ("append", {"text": "z"}), ("delete", {})):
        with pytest.raises(UnknownMessage) as refused:
            await call(eve, op, note=note, **args)
        with pytest.raises(UnknownMessage) as missing:
            await call(eve, op, note="direct:ann~bob/nothing", **args)
        assert str(refused.value).replace("draft", "nothing") == str(missing.value)
    assert (await call(eve, "list"))["notes"] == []


async def test_who_left_the_channel_reads_no_note_of_it(network: Network) -> None:
    ann, bob = await join_dev(network, "ann", "bob")
    sent = await bob.send("channel:dev", "I was here.")
    await call(bob, "create", name="plan", text="x", cause=sent.seq)
    await bob.call("channels.leave", {"name": "dev"})
    for op, args in (("read", {}), ("append", {"text": "y"}), ("set_access", {"access": "open"})):
        with pytest.raises(UnknownMessage):
            await call(bob, op, note=PLAN, **args)
    zoe = await network.join("zoe")
    await zoe.call("channels.join", {"name": "dev"})
    assert (await read(zoe))["text"] == "x"
    del ann


async def test_reaction_finds_no_note_that_its_requester_may_not_read(network: Network) -> None:
    ann, bob, desk = [
        await network.join(name, kind=kind) for name, kind in (("ann", "human"), ("bob", "human"), ("desk", "agent"))
    ]
    helper = await network.join("helper")
    private = (await ann.send("agent:desk", "Keep this private.")).seq
    asked = (await bob.send("agent:desk", "What is private?")).seq
    secret = (await call(desk, "create", name="secret", text="the secret", cause=private))["note"]
    # Only agents read this thread. The notes of this thread belong to the people that the agents work for.
    passed = (await desk.send("agent:helper", "Please help.", cause=private)).seq
    shared = (await call(helper, "create", name="shared", text="the secret", cause=passed))["note"]
    assert shared == "direct:desk~helper/shared"
    for note in (secret, shared):
        assert (await read(desk, note, trigger=private))["text"] == "the secret"
        with pytest.raises(UnknownMessage, match="There is no note"):
            await read(desk, note, trigger=asked)
        assert (await call(desk, "search", query="secret", trigger=asked))["notes"] == []
        assert (await call(desk, "list", trigger=asked))["notes"] == []
        conflict = await call(desk, "write", note=note, text="x", expected_version=9, cause=asked)
        assert conflict.keys() == {"note", "version", "is_conflict", "hint"}
    assert [it["note"] for it in (await call(desk, "list", trigger=private))["notes"]] == [secret, shared]


async def test_reply_thread_has_notes_of_its_own(network: Network) -> None:
    ann, bob = await join_dev(network, "ann", "bob")
    sent = await ann.send("channel:dev", "Topic")
    note = (await call(bob, "create", name="plan", text="x", thread_id=f"thread:{sent.seq}"))["note"]
    assert (await read(ann, note))["text"] == "x"
    for thread in ("thread:1", "thread:99999", "channel:nope", "direct:ann~eve", "mod:notes~ann", "nonsense"):
        with pytest.raises(UnknownMessage, match="There is no thread"):
            await create(bob, "x", thread_id=thread)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"text": "é" * 40_000}, "has at most 65536"),
        ({"text": "x\n\n" * 1001}, "at most 1000"),
        ({"name": "a/b"}, "name"),
        ({"name": "plan\n"}, "exists"),
        ({"name": "plan"}, "exists"),
    ],
)
async def test_wrong_note_is_refused_with_its_limit(network: Network, args: dict[str, Any], problem: str) -> None:
    [ann] = await join_dev(network, "ann")
    await create(ann, "x")
    with pytest.raises(InvalidArguments, match=problem):
        await create(ann, **{"text": "y", "name": "other", **args})


async def test_deleted_notes_make_room(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roundelay.mods.notes.MAX_NOTES_BY_ONE", 2)
    ann, bob = await join_dev(network, "ann", "bob")
    for name in ("a", "b"):
        await create(ann, "see [[c]]", name=name)
    with pytest.raises(InvalidArguments, match="at most 2 per participant"):
        await create(ann, "x", name="c")
    with pytest.raises(Forbidden):
        await call(bob, "delete", note="channel:dev/a")
    await call(ann, "delete", note="channel:dev/a")
    await create(ann, "x", name="c")
    assert (await read(ann, "channel:dev/c"))["backlinks"] == ["channel:dev/b"]
    await create(bob, "anew", name="a")
    assert len((await call(bob, "history", note="channel:dev/a"))["versions"]) == 1


async def test_people_are_notified_of_a_new_version(network: Network) -> None:
    ann, bob = await join_dev(network, "ann", "bob")
    mia = await network.join("mia", kind="human")
    await mia.call("channels.join", {"name": "dev"})
    events = mia.events()
    await create(ann, "x")
    async with asyncio.timeout(5):
        async for event in events:
            if getattr(event, "kind", "") == "mod":
                assert event.body == {"mod": "notes", "note": PLAN, "version": 1, "by": "ann"}
                break
    del bob


async def test_notes_and_answers_to_repeats_survive_a_kill(tmp_path: Path) -> None:
    async with node_process(tmp_path / "team.db", env={"ROUNDELAY_MODS": ",".join(MODS)}) as node:
        ann = await node.agent("ann")
        made = {"name": "plan", "text": "one", "thread_id": "broadcast"}
        first = await ann.call("notes.create", made, call_id="c1")
        await ann.call("notes.append", {"note": "broadcast/plan", "text": "two"}, call_id="c2")
        await node.kill9()
        await node.restart()
        ann = await node.agent("ann")
        assert await ann.call("notes.create", made, call_id="c1") == first
        await ann.call("notes.append", {"note": "broadcast/plan", "text": "two"}, call_id="c2")
        value = await ann.call("notes.read", {"note": "broadcast/plan"})
        assert (value["text"], value["version"]) == ("one\n\ntwo", 2)
        host = await node.person("host")
        rows = (await host.call("network.rows", {"limit": 500}))["rows"]
        logged = [json.loads(row)["data"] for row in rows if json.loads(row)["type"] == "mod"]
        assert [(it["op"], it["args"]["text"]) for it in logged] == [("notes.create", "one"), ("notes.append", "two")]
