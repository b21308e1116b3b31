"""Tests of edits and deletions: no answer, file or index contains a deleted text, and a repeated send stays a repeat."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from roundelay import InvalidArguments, Network
from roundelay.app import OWN_MODS
from roundelay.network.client import NetworkClient
from roundelay.network.errors import Forbidden, Overloaded, RequestError, UnknownMessage
from roundelay.network.ledger.backup import back_up
from roundelay.network.ledger.integrity import check
from roundelay.network.mod import Incoming, Mod
from roundelay.network.operations import list_operations
from tests.support.node import Node, node_process

MODS = ["channels", "messages"]
SECRET = "xylophone"


@pytest.fixture(params=["memory", "file"])
async def network(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Network]:
    path = tmp_path / "team.db" if request.param == "file" else None
    async with Network.open(path, mods=MODS) as opened:
        yield opened


def contains(path: Path, words: bytes) -> bool:
    return path.exists() and words in path.read_bytes()


async def call(client: NetworkClient, op: str, **args: Any) -> Any:
    return await client.call(f"messages.{op}", args)


async def history(client: NetworkClient, thread_id: str = "broadcast") -> list[dict[str, Any]]:
    return list((await client.call("network.history", {"thread_id": thread_id}))["messages"])


async def search(client: NetworkClient, query: str) -> list[int]:
    return [it["seq"] for it in (await client.call("network.search", {"query": query}))["messages"]]


async def test_every_reader_gets_the_edited_text(network: Network) -> None:
    ann, bob = await network.join("ann"), await network.join("bob")
    seq = (await ann.broadcast("The old text")).seq
    assert await search(bob, "old") == [seq]
    await call(ann, "edit", seq=seq, text="The new text")
    await call(ann, "edit", seq=seq, text="The newest text")
    [message] = await history(bob)
    assert (message["content"], message["edited_at"] > 0) == ("The newest text", True)
    assert (await search(bob, "old"), await search(bob, "newest")) == ([], [seq])
    [delivered] = (await bob.call("network.receive", {"after": 0}))["messages"]
    assert delivered["content"] == "The newest text"
    versions = (await call(bob, "edits", seq=seq))["edits"]
    assert [it["content"] for it in versions] == ["The old text", "The new text"]


async def test_deleted_text_is_in_no_answer(network: Network) -> None:
    ann, bob = await network.join("ann"), await network.join("bob")
    host = await network.join("host", kind="human")
    seq = (await ann.send("broadcast", {"text": f"The {SECRET}", "files": []}, metadata={"key": SECRET})).seq
    assert await search(bob, SECRET) == [seq]
    await call(ann, "edit", seq=seq, text=f"My {SECRET}")
    await call(ann, "pin", seq=seq)
    await call(bob, "react", seq=seq, emoji="👍")
    await call(ann, "delete", seq=seq)
    asked: dict[str, dict[str, Any]] = {
        "network.history": {"thread_id": "broadcast"}, "network.search": {"query": SECRET}, "network.why": {"seq": seq},
        "network.impact": {"seq": seq}, "network.window": {"trigger": seq}, "network.explain": {"seq": seq},
        "network.effects": {"seq": seq}, "messages.edits": {"seq": seq}, "messages.pins": {"thread_id": "broadcast"},
        "messages.reactions": {"seqs": [seq]}, "network.memory": {"threads": ["broadcast"], "trigger": seq},
    }  # fmt: skip
    for client in (ann, bob, host):
        for op, operation in list_operations(OWN_MODS[name]() for name in MODS).items():
            if operation.is_change:
                continue
            try:
                answer = await client.call(op, asked.get(op, {}))
            except RequestError as error:
                answer = str(error)
            assert SECRET not in str(answer), op
        [message] = await history(client)
        assert (message["content"], message["text_representation"]) == ("", "(deleted)")
        assert message["deleted_at"] > 0
    assert await search(host, "deleted") == []
    assert (await call(bob, "pins", thread_id="broadcast"))["pins"] == []
    assert (await call(bob, "reactions", seqs=[seq]))["reactions"] == {}
    [delivered] = (await bob.call("network.receive", {"after": 0}))["messages"]
    assert (delivered["content"], delivered["text_representation"]) == ("", "(deleted)")
    with pytest.raises(InvalidArguments, match="was deleted"):
        await call(ann, "edit", seq=seq, text="back")
    assert (await call(ann, "delete", seq=seq))["is_deleted"] is True


async def test_deleted_text_is_in_no_file_and_no_backup(tmp_path: Path) -> None:
    path, words = tmp_path / "team.db", SECRET.encode()
    async with Network.open(path, mods=MODS) as network:
        ann = await network.join("ann")
        await ann.broadcast("Something else")
        # The text is large enough for separate pages, which SQLite frees.
        seq = (await ann.broadcast(f"The {SECRET} " * 2000)).seq
        await ann.broadcast("And more")
        assert await search(ann, SECRET) == [seq]
        await call(ann, "edit", seq=seq, text=f"Another {SECRET}")
        await call(ann, "delete", seq=seq)
        back_up(path, tmp_path / "copy.db")
        assert not contains(tmp_path / "copy.db", words)
        assert await search(ann, SECRET) == []
        assert not contains(Path(f"{path}.search"), words)
    assert not contains(path, words)  # closing has copied and deleted the write-ahead log
    assert not contains(Path(f"{path}-wal"), words)
    with sqlite3.connect(path) as db:
        assert check(db) == []


async def test_deletion_without_a_search_leaves_the_index(tmp_path: Path) -> None:
    path = tmp_path / "team.db"
    async with Network.open(path, mods=MODS) as network:
        ann = await network.join("ann")
        seq = (await ann.broadcast(f"The {SECRET}")).seq
        assert await search(ann, SECRET) == [seq]
        await call(ann, "delete", seq=seq)
        async with asyncio.timeout(10):
            while contains(Path(f"{path}.search"), SECRET.encode()):  # noqa: ASYNC110 - written by another thread
                await asyncio.sleep(0.01)


async def test_repeated_send_is_a_repeat_after_edit_and_deletion(network: Network) -> None:
    ann = await network.join("ann")
    first = await ann.broadcast("once", message_id="m1")
    await call(ann, "edit", seq=first.seq, text="twice")
    assert (await ann.broadcast("once", message_id="m1")).seq == first.seq
    await call(ann, "delete", seq=first.seq)
    assert (await ann.broadcast("once", message_id="m1")).seq == first.seq
    assert len(await history(ann)) == 1


async def test_only_the_sender_edits_and_deletes(network: Network) -> None:
    ann, bob, eve = [await network.join(name) for name in ("ann", "bob", "eve")]
    seq = (await ann.send("agent:bob", "private")).seq
    for op, args in (("edit", {"text": "x"}), ("delete", {})):
        with pytest.raises(Forbidden, match="ann sent message"):
            await call(bob, op, seq=seq, **args)
    for client, number in ((eve, seq), (ann, 99_999)):
        for op, args in (
            ("edit", {"text": "x"}), ("delete", {}), ("pin", {}), ("unpin", {}), ("react", {"emoji": "+1"}), ("edits", {}),
        ):  # fmt: skip
            with pytest.raises(UnknownMessage):
                await call(client, op, seq=number, **args)
    assert (await call(eve, "reactions", seqs=[seq]))["reactions"] == {}
    assert (await call(eve, "pins", thread_id="direct:ann~bob"))["pins"] == []


async def test_operator_deletes_the_message_of_another() -> None:
    async with Network.open(mods=MODS) as network:
        ann, host = await network.join("ann"), await network.join("host", kind="human")
        seq = (await ann.send("agent:ann", "note to myself")).seq
        await call(host, "delete", seq=seq)
        assert (await history(ann, "direct:ann~ann"))[0]["content"] == ""
        with pytest.raises(Forbidden):
            await call(host, "edit", seq=(await ann.broadcast("mine")).seq, text="yours")


async def test_who_left_a_channel_deletes_and_edits_not(network: Network) -> None:
    ann, bob = await network.join("ann"), await network.join("bob")
    await ann.call("channels.create", {"name": "dev"})
    await bob.call("channels.join", {"name": "dev"})
    seq = (await bob.send("channel:dev", "from bob")).seq
    await bob.call("channels.leave", {"name": "dev"})
    with pytest.raises(Forbidden, match="has left the thread"):
        await call(bob, "edit", seq=seq, text="from outside")
    await call(bob, "delete", seq=seq)
    assert (await history(ann, "channel:dev"))[0]["deleted_at"]


class Guard(Mod):
    """Mod that refuses a word."""

    id = "guard"

    def before(self, incoming: Incoming) -> None:
        if b"forbidden" in bytes(incoming.frame.content):
            raise InvalidArguments("That word is refused.")


async def test_guarding_mod_also_sees_edits() -> None:
    async with Network.open(mods=[*MODS, Guard()]) as network:
        ann = await network.join("ann")
        seq = (await ann.broadcast("fine")).seq
        with pytest.raises(InvalidArguments, match="That word is refused"):
            await call(ann, "edit", seq=seq, text="forbidden")
        assert (await history(ann))[0]["content"] == "fine"


async def test_edit_keeps_the_files_of_a_message(network: Network) -> None:
    ann = await network.join("ann")
    seq = (await ann.send("broadcast", {"text": "old", "files": [{"name": "a.txt"}]})).seq
    await call(ann, "edit", seq=seq, text="new")
    assert (await history(ann))[0]["content"] == {"text": "new", "files": [{"name": "a.txt"}]}


async def test_concurrent_edits_lose_no_text(network: Network) -> None:
    ann = await network.join("ann")
    seq = (await ann.broadcast("0")).seq

    async def edit(text: str) -> bool:
        try:
            await call(ann, "edit", seq=seq, text=text)
        except Overloaded:
            return False
        return True

    done = await asyncio.gather(*(edit(str(number)) for number in range(1, 9)))
    versions = [it["content"] for it in (await call(ann, "edits", seq=seq))["edits"]]
    now = (await history(ann))[0]["content"]
    assert len(versions) == sum(done)
    assert len({*versions, now}) == len(versions) + 1


async def test_concurrent_edit_reads_no_text_older_than_the_count(tmp_path: Path) -> None:
    """A commit is in the file a moment before the ledger's memory has it. An edit that begins in this moment must not
    combine the new count of edits with the old text."""
    async with Network.open(tmp_path / "edits.db", mods=MODS) as network:
        ann = await network.join("ann")
        seq = (await ann.broadcast("0")).seq
        ledger: Any = network.hub.ledger
        commit, committed, go_on = ledger._change, asyncio.Event(), asyncio.Event()

        async def commit_and_wait(change: Any, **options: Any) -> Any:
            done = await commit(change, **options)
            committed.set()
            await go_on.wait()
            return done

        ledger._change = commit_and_wait
        first = asyncio.create_task(call(ann, "edit", seq=seq, text="1"))
        await committed.wait()
        row = (await ledger.messages([seq]))[seq]
        assert json.loads(row.data)["content"] == "1"
        go_on.set()
        await first
        assert (await call(ann, "edits", seq=seq))["edits"][0]["content"] == "0"


async def test_reactions_show_who_reacted_and_are_bounded(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roundelay.mods.messages.MAX_EMOJI", 2)
    ann, bob = await network.join("ann"), await network.join("bob")
    seq = (await ann.broadcast("Lunch?")).seq
    for client in (bob, ann, bob):
        await call(client, "react", seq=seq, emoji="👍")
    await call(bob, "react", emoji="+1", cause=seq)
    with pytest.raises(InvalidArguments, match="at most 2 emoji"):
        await call(ann, "react", seq=seq, emoji="🎉")
    for wrong in ("a b", "\u202e", "\n"):
        with pytest.raises(InvalidArguments, match="is not an emoji"):
            await call(ann, "react", seq=seq, emoji=wrong)
    assert (await call(ann, "reactions", seqs=[seq]))["reactions"] == {str(seq): {"👍": ["ann", "bob"], "+1": ["bob"]}}
    await call(bob, "react", seq=seq, emoji="👍", remove=True)
    assert (await call(ann, "reactions", seqs=[seq]))["reactions"] == {str(seq): {"👍": ["ann"], "+1": ["bob"]}}


async def test_people_are_notified_of_deletions() -> None:
    async with Network.open(mods=MODS) as network:
        ann, mia = await network.join("ann"), await network.join("mia", kind="human")
        seq = (await ann.broadcast("oops")).seq
        events = mia.events()
        await call(ann, "delete", seq=seq)
        async with asyncio.timeout(5):
            async for event in events:
                if getattr(event, "kind", "") == "mod":
                    assert event.body == {"mod": "messages", "seq": seq, "event": "deleted", "by": "ann"}
                    return


async def test_message_deleted_in_the_same_batch_is_delivered_empty() -> None:
    async with Network.open(mods=MODS) as network:
        ann, bob = await network.join("ann"), await network.join("bob")
        seq = (await ann.broadcast("first")).seq + 1
        sent, _ = await asyncio.gather(ann.broadcast(SECRET), call(ann, "delete", seq=seq))
        assert sent.seq == seq
        for text in ("first", "(deleted)"):
            async with bob.receive() as message:
                assert message.text == text


async def see_nothing(node: Node, seq: int) -> None:
    bob = await node.agent("bob")
    page = await bob.call("network.history", {"thread_id": "broadcast"})
    [message] = [it for it in page["messages"] if it["seq"] == seq]
    assert SECRET not in json.dumps(page)
    assert message["deleted_at"]
    assert (await bob.call("network.search", {"query": SECRET}))["messages"] == []


async def test_deletion_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "team.db"
    async with node_process(path, env={"ROUNDELAY_MODS": ",".join(MODS)}) as node:
        ann, _ = await node.agent("ann"), await node.agent("bob")
        seq = (await ann.send("broadcast", SECRET))["seq"]
        assert len((await ann.call("network.search", {"query": SECRET}))["messages"]) == 1
        await ann.call("messages.delete", {"seq": seq})
        await node.kill9()
        await node.restart()
        await see_nothing(node, seq)
    assert not contains(Path(f"{path}.search"), SECRET.encode())
