"""Tests of the mod `files`: contents are durable before the hub accepts a reference to them, and only readers of the
messages with the file can read them.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from roundelay import Forbidden, InvalidArguments, Network, TooLarge
from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import Action, call, finish
from roundelay.app import serve
from roundelay.mods import files as files_module
from roundelay.mods.files import MAX_ATTACHED, MAX_CHUNK, Files
from roundelay.network.blobs import ORPHAN_TTL_MS, FolderBlobs, blob_folder, list_blobs
from roundelay.network.client import NetworkClient
from roundelay.network.client.files import download_file, upload_file
from roundelay.network.config import NodeConfig
from roundelay.network.core.entries import ModEntry
from roundelay.network.core.mod import list_blobs_in_use
from roundelay.network.errors import ConfigError
from roundelay.network.file_references import normalize_name, read_references
from roundelay.network.mod import Upkeep
from roundelay.network.units import DAY_MS
from roundelay.simulation.network import Simulation, simulate
from tests.support.agents import make_runner, running

NO_FILE = "f-00000000000-00000000"


@pytest.fixture(params=["memory", "disk"])
async def network(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Network]:
    path = None if request.param == "memory" else tmp_path / "net.db"
    async with Network.open(path, mods=["channels", "files"]) as opened:
        yield opened


async def save(client: NetworkClient, content: str = "text", name: str = "a.md", **args: Any) -> dict[str, Any]:
    saved: dict[str, Any] = await client.call("files.save", {"name": name, "content": content, **args})
    return saved


async def is_readable(client: NetworkClient, file: dict[str, Any]) -> bool:
    try:
        await client.call("files.read", {"file": file["file"], "version": file["version"]})
    except InvalidArguments:
        return False
    return True


@pytest.mark.parametrize("size", [0, 1, MAX_CHUNK, MAX_CHUNK * 3 + 7])
async def test_uploaded_bytes_are_downloaded_unchanged(network: Network, size: int) -> None:
    ann, bob, data = await network.join("ann"), await network.join("bob"), os.urandom(size)
    file = await upload_file(ann, data, name="data.bin")
    assert (file["size"], file["sha256"], file["version"]) == (size, hashlib.sha256(data).hexdigest(), 1)
    await ann.send("agent:bob", {"text": "look", "files": [file]})
    assert await download_file(bob, file["file"]) == data


async def test_file_is_private_until_a_message_attaches_it(network: Network) -> None:
    ann, bob, eve = [await network.join(name) for name in ("ann", "bob", "eve")]
    file = await save(ann)
    assert (await is_readable(ann, file), await is_readable(bob, file)) == (True, False)
    await ann.call("files.attach", {"to": "agent:bob", "files": [file["file"]], "text": "look"})
    assert (await is_readable(bob, file), await is_readable(eve, file)) == (True, False)
    assert [it["file"] for it in (await bob.call("files.list"))["files"]] == [file["file"]]
    assert (await eve.call("files.list"))["files"] == []


async def test_late_member_of_a_channel_reads_only_later_files(network: Network) -> None:
    ann, bob, eve = [await network.join(name) for name in ("ann", "bob", "eve")]
    await ann.call("channels.create", {"name": "dev"})
    await bob.call("channels.join", {"name": "dev"})
    early, late = await save(ann, "early"), await save(ann, "late")
    await ann.call("files.attach", {"to": "channel:dev", "files": [early["file"]]})
    await eve.call("channels.join", {"name": "dev"})
    await ann.call("files.attach", {"to": "channel:dev", "files": [late["file"]]})
    assert [await is_readable(bob, it) for it in (early, late)] == [True, True]
    assert [await is_readable(eve, it) for it in (early, late)] == [False, True]


async def test_reader_of_one_version_cannot_read_another(network: Network) -> None:
    ann, bob = await network.join("ann"), await network.join("bob")
    first = await save(ann, "public")
    await ann.call("files.attach", {"to": "bob", "files": [first["file"]]})
    second = await save(ann, "secret", file=first["file"])
    assert (second["file"], second["version"]) == (first["file"], 2)
    assert [await is_readable(bob, it) for it in (first, second)] == [True, False]
    assert (await bob.call("files.read", {"file": first["file"]}))["text"] == "public"
    assert (await ann.call("files.read", {"file": first["file"]}))["text"] == "secret"
    with pytest.raises(InvalidArguments, match="may read"):
        await bob.send("agent:ann", {"files": [{"file": first["file"], "version": 2}]})


async def test_recipient_passes_a_file_on(network: Network) -> None:
    ann, bob, eve = [await network.join(name) for name in ("ann", "bob", "eve")]
    file = await save(ann)
    with pytest.raises(InvalidArguments, match="may read"):
        await bob.send("agent:eve", {"files": [file]})
    await ann.send("agent:bob", {"images": [file]})
    await bob.send("agent:eve", {"files": [file]})
    assert await is_readable(eve, file)


async def test_refused_message_grants_nothing(network: Network) -> None:
    ann, bob = await network.join("ann"), await network.join("bob")
    file = await save(ann)
    with pytest.raises(InvalidArguments):
        await ann.send("agent:bob", {"files": [file, {"file": NO_FILE}]})
    with pytest.raises(InvalidArguments, match="at most"):
        await ann.send("agent:bob", {"files": [{**file, "version": n} for n in range(MAX_ATTACHED + 1)]})
    assert not await is_readable(bob, file)


@pytest.mark.parametrize(
    "content",
    [
        {"files": [{"file": "notes.txt"}, {"file": 7}, {"file": None}, "x", 7]},
        {"files": {"file": NO_FILE}},
        {"files": 7, "images": "file"},
        ["file", {"file": NO_FILE}],
        'say "file"',
    ],
)
async def test_content_that_only_looks_like_a_reference_is_stored(network: Network, content: Any) -> None:
    ann = await network.join("ann")
    assert (await ann.send("broadcast", content)).seq
    assert read_references(content) == []


# --- uploads


async def test_checksum_alone_gives_no_access(network: Network) -> None:
    ann, eve, data = await network.join("ann"), await network.join("eve"), b"secret"
    await upload_file(ann, data, upload_id="mine")
    for upload_id in ("mine", "other"):
        args = {"upload_id": upload_id, "sha256": hashlib.sha256(data).hexdigest(), "name": "a"}
        with pytest.raises(InvalidArguments, match="no such upload"):
            await eve.call("files.create", args)


async def test_upload_with_another_checksum_is_refused(network: Network) -> None:
    ann = await network.join("ann")
    await ann.call("files.upload", {"upload_id": "u", "offset": 0, "data": b64encode(b"text").decode()})
    with pytest.raises(InvalidArguments, match="SHA-256"):
        await ann.call("files.create", {"upload_id": "u", "sha256": "0" * 64, "name": "a"})
    assert (await ann.call("files.list"))["files"] == []
    assert (await upload_file(ann, b"other", upload_id="u"))["size"] == 5


async def test_upload_continues_where_it_stopped(network: Network) -> None:
    ann, data = await network.join("ann"), os.urandom(MAX_CHUNK * 2)
    first = {"upload_id": "u", "offset": 0, "data": b64encode(data[:1000]).decode()}
    assert [await ann.call("files.upload", first) for _ in range(2)] == [{"size": 1000}] * 2
    beyond = {"upload_id": "u", "offset": 5000, "data": "YQ=="}
    assert await ann.call("files.upload", beyond) == {"size": 1000}
    file = await upload_file(ann, data, upload_id="u")
    assert await download_file(ann, file["file"]) == data


async def test_repeated_create_returns_the_first_file(network: Network) -> None:
    ann = await network.join("ann")
    first = await upload_file(ann, b"text", upload_id="u")
    args = {"upload_id": "u", "sha256": first["sha256"], "name": "file"}
    repeated = await ann.call("files.create", {**args, "media_type": ""}, call_id="create:u")
    assert repeated == first
    assert len((await ann.call("files.list"))["files"]) == 1


async def test_concurrent_uploads_of_one_content_store_it_once(tmp_path: Path) -> None:
    data = os.urandom(MAX_CHUNK + 1)
    async with Network.open(tmp_path / "net.db", mods=["files"]) as network:
        clients = [await network.join(f"agent-{number}") for number in range(8)]
        files = await asyncio.gather(*(upload_file(client, data) for client in clients))
        assert len({it["file"] for it in files}) == 8
        assert [*list_blobs(blob_folder(tmp_path / "net.db"))] == [hashlib.sha256(data).hexdigest()]
        for client, file in zip(clients, files, strict=True):
            assert await download_file(client, file["file"]) == data


async def test_hostile_upload_ids_and_checksums_are_refused(network: Network) -> None:
    ann = await network.join("ann")
    for upload_id in ("../x", "a/b", "", "A", "x" * 65, ".."):
        with pytest.raises(InvalidArguments):
            await ann.call("files.upload", {"upload_id": upload_id, "offset": 0, "data": "YQ=="})
    for sha256 in ("../" * 22, "A" * 64, "0" * 63, "0" * 65):
        with pytest.raises(InvalidArguments):
            await ann.call("files.create", {"upload_id": "u", "sha256": sha256, "name": "a"})
    for file_id in ("../../etc/passwd", "f-0", NO_FILE + "\n", ""):
        with pytest.raises(InvalidArguments):
            await ann.call("files.download", {"file": file_id})


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\Windows\\a.txt", "a.txt"),
        ("..", "file"),
        (".bashrc", "bashrc"),
        ("a\nb\x00.txt", "a_b.txt"),
        ("con.txt", "_con.txt"),
        ("report\u202etxt.exe", "reporttxt.exe"),
        ("plan.md", "plan.md"),
        ("x" * 200 + ".md", "x" * 109 + ".md"),
    ],
)
async def test_name_is_reduced_to_a_safe_display_name(name: str, shown: str) -> None:
    assert normalize_name(name) == shown
    async with Network.open(mods=["files"]) as network:
        ann = await network.join("ann")
        assert (await save(ann, name=name[:200]))["name"] == normalize_name(name[:200])


@pytest.mark.parametrize(
    "args", [{"offset": -1}, {"length": MAX_CHUNK + 1}, {"offset": 2**41}, {"length": -1}, {"version": 0}]
)
async def test_download_outside_the_bounds_is_refused(args: dict[str, int]) -> None:
    async with Network.open(mods=["files"]) as network:
        ann = await network.join("ann")
        with pytest.raises(InvalidArguments):
            await ann.call("files.download", {"file": (await save(ann))["file"], **args})


async def test_download_beyond_the_end_is_empty(network: Network) -> None:
    ann = await network.join("ann")
    file = (await save(ann, "text"))["file"]
    assert (await ann.call("files.download", {"file": file, "offset": 4}))["data"] == ""
    assert (await ann.call("files.download", {"file": file, "offset": 2, "length": 1}))["data"] == "eA=="


async def test_slices_of_a_text_never_split_a_character(network: Network) -> None:
    ann, text = await network.join("ann"), "aä€😀" * 50
    file, parts, start = (await save(ann, text))["file"], [], 0
    while start is not None:
        part = await ann.call("files.read", {"file": file, "start": start, "length": 7})
        parts.append(part["text"])
        start = part.get("next")
    assert "".join(parts) == text
    binary = await upload_file(ann, b"\x00\x01")
    with pytest.raises(InvalidArguments, match="not a text"):
        await ann.call("files.read", {"file": binary["file"]})


# --- quotas


async def test_file_beyond_the_maximum_size_is_refused_at_its_chunk() -> None:
    async with Network.open(mods=[Files(max_file_bytes=10)]) as network:
        ann = await network.join("ann")
        await save(ann, "0123456789")
        for call in (save(ann, "01234567890"), upload_file(ann, b"01234567890")):
            with pytest.raises(TooLarge, match="10 bytes"):
                await call


async def test_racing_saves_stay_within_the_quotas() -> None:
    mod = Files(max_bytes_by_one=50, max_bytes=70, max_files_by_one=20)
    async with Network.open(mods=[mod]) as network:
        ann, bob = await network.join("ann"), await network.join("bob")
        saves = [save(client, f"{client.agent_id} {n:06}") for n in range(10) for client in (ann, bob)]
        results = await asyncio.gather(*saves, return_exceptions=True)
        assert sum(isinstance(it, dict) for it in results) == 7
        assert all(isinstance(it, dict | TooLarge) for it in results)
        for client in (ann, bob):
            for file in (await client.call("files.list"))["files"]:
                await client.call("files.delete", {"file": file["file"]})
        assert len(await asyncio.gather(*(save(ann, f"{n}") for n in range(20)))) == 20
        with pytest.raises(InvalidArguments, match="at most 20"):
            await save(ann, "one more")


async def test_unfinished_uploads_are_limited(network: Network) -> None:
    ann = await network.join("ann")
    chunk = {"offset": 0, "data": "YQ=="}
    for number in range(8):
        await ann.call("files.upload", {"upload_id": f"u{number}", **chunk})
    with pytest.raises(InvalidArguments, match="unfinished"):
        await ann.call("files.upload", {"upload_id": "one-more", **chunk})
    bob = await network.join("bob")
    assert await bob.call("files.upload", {"upload_id": "one-more", **chunk}) == {"size": 1}


# --- retention


class Upkeeper:
    """Runs the mod's maintenance at a time that the test chooses."""

    def __init__(self, network: Network, mod: Files) -> None:
        self._network, self._mod = network, mod

    async def run(self, now: int, first_seq: int = 1) -> None:
        hub = self._network.hub

        def submit(payload: object) -> None:
            hub._pending.add(ModEntry("files", payload, cause=0))

        async def list_cold(*_: object) -> list[str]:
            return []

        blobs = hub.view.blobs
        assert blobs is not None
        await self._mod.maintain(Upkeep(hub.state, submit, first_seq, now, list_cold))
        await blobs.collect_garbage(lambda: list_blobs_in_use(hub.state), now)
        await self._network._clients[0].call("channels.list")
        await hub.commit([])


async def test_blob_is_deleted_after_its_message_and_its_grace(tmp_path: Path) -> None:
    mod, path = Files(keep_days=1), tmp_path / "net.db"
    async with Network.open(path, mods=["channels", mod]) as network:
        ann, bob = await network.join("ann"), await network.join("bob")
        upkeeper, now = Upkeeper(network, mod), ann.clock()
        file = await save(ann)
        stored = await ann.send("agent:bob", {"files": [file]})
        await save(ann, "nobody reads this")
        await upkeeper.run(now + 2 * DAY_MS)  # the second file expires, because only the first one is in a message
        assert [it["file"] for it in (await ann.call("files.list"))["files"]] == [file["file"]]
        await upkeeper.run(now + 2 * DAY_MS, stored.seq + 1)  # retention has dropped the message
        assert [await is_readable(it, file) for it in (ann, bob)] == [True, False]
        await upkeeper.run(now + 2 * DAY_MS + 1000, stored.seq + 1)
        assert await is_readable(ann, file)  # the file's grace period starts when the message is dropped
        await upkeeper.run(now + 4 * DAY_MS, stored.seq + 1)
        assert not await is_readable(ann, file)
        assert len([*list_blobs(blob_folder(path))]) == 1
        await upkeeper.run(now + 4 * DAY_MS)
        await upkeeper.run(now + 4 * DAY_MS + ORPHAN_TTL_MS)
        assert [*list_blobs(blob_folder(path))] == []
        assert bytes(network.hub.state.get("mod", "files/total")) == b"[0,0]"


async def test_deleted_message_takes_its_files_from_its_readers() -> None:
    async with Network.open(mods=["channels", "messages", "files"]) as network:
        ann, bob, eve = [await network.join(name) for name in ("ann", "bob", "eve")]
        file = await save(ann)
        first, second = [await ann.send("agent:bob", {"text": "look", "files": [file]}) for _ in range(2)]
        await ann.send("agent:eve", {"files": [file]})
        await ann.call("messages.delete", {"seq": second.seq})
        assert await is_readable(bob, file)  # the first message still refers to the file
        await ann.call("messages.delete", {"seq": first.seq})
        assert [await is_readable(it, file) for it in (ann, bob, eve)] == [True, False, True]


async def test_deleted_message_takes_all_its_files_after_one_was_deleted() -> None:
    async with Network.open(mods=["channels", "messages", "files"]) as network:
        ann, bob = await network.join("ann"), await network.join("bob")
        files = [await save(ann, text) for text in ("one", "two")]
        sent = await ann.send("agent:bob", {"files": files})
        await ann.call("files.delete", {"file": files[0]["file"]})
        assert [await is_readable(bob, it) for it in files] == [False, True]
        await ann.call("messages.delete", {"seq": sent.seq})
        assert not await is_readable(bob, files[1])


async def test_content_that_is_stored_again_survives_until_its_commit(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    blob = await blobs.store(b"text")
    assert await blobs.collect_garbage(set, 0) == 0
    await blobs.store(b"text")  # the file's reference is not committed yet
    assert await blobs.collect_garbage(set, ORPHAN_TTL_MS) == 0
    assert await blobs.read(blob.sha256, 0, 4) == b"text"
    assert await blobs.collect_garbage(set, 2 * ORPHAN_TTL_MS) == 1


async def test_content_that_is_saved_again_survives_garbage_collection(tmp_path: Path) -> None:
    mod, path = Files(), tmp_path / "net.db"
    async with Network.open(path, mods=["channels", mod]) as network:
        ann = await network.join("ann")
        upkeeper, now = Upkeeper(network, mod), ann.clock()
        await ann.call("files.delete", {"file": (await save(ann))["file"]})
        await upkeeper.run(now)
        file = await save(ann)
        await upkeeper.run(now + 2 * ORPHAN_TTL_MS)
        assert await is_readable(ann, file)


# --- agents, nodes


async def test_agent_reads_in_a_reaction_only_what_its_requester_may_read() -> None:
    async with Network.open(mods=["channels", "files"]) as network:
        ann, bob = await network.join("ann", kind="human"), await network.join("bob", kind="human")
        helper = await network.join("helper")
        file = await save(ann, "for ann and helper")
        told = await ann.send("agent:helper", {"files": [file]})
        asked = await bob.send("agent:helper", "what did ann send?")
        for args, is_shown in (({"trigger": told.seq}, True), ({"trigger": asked.seq}, False)):
            assert bool((await helper.call("files.list", args))["files"]) is is_shown
        await helper.call("files.read", {"file": file["file"], "trigger": told.seq})
        for op, args in (
            ("files.read", {"file": file["file"], "trigger": asked.seq}),
            ("files.download", {"file": file["file"], "trigger": asked.seq}),
            ("files.attach", {"to": "bob", "files": [file["file"]], "cause": asked.seq}),
        ):
            with pytest.raises(InvalidArguments, match="may read"):
                await helper.call(op, args)
        own = await helper.call("files.save", {"name": "a", "content": "about ann", "cause": told.seq})
        with pytest.raises(InvalidArguments, match="may read"):
            await helper.call("files.read", {"file": own["file"], "trigger": asked.seq})


async def test_agent_attaches_files_within_the_limit_to_one_recipient() -> None:
    def script(request: ModelRequest) -> Action | list[Action]:
        results = read_prompt(request).tool_results
        if not results:
            return call("files_save", name="answer.md", content="# Answer")
        if len(results) < 10:
            file = re.search("f-[0-9a-f]{11}-[0-9a-f]{8}", results[0].content)
            assert file is not None
            return call("files_attach", to="ann", files=[file[0]], text="Here.")
        return finish("done")

    async with Network.open(mods=["channels", "files"]) as network, running(network, make_runner("helper", script)):
        ann = await network.join("ann", kind="human")
        asked = await ann.send("agent:helper", "write it down")
        async with ann.receive() as message:
            assert (message.reply_to, message.text.startswith("Here.\n[file answer.md")) == (asked.seq, True)
            assert await download_file(ann, message.content["files"][0]["file"]) == b"# Answer"
        await ann.wait_until_quiet(asked.seq, 20)
        page = await ann.call("network.history", {"thread_id": "direct:ann~helper", "limit": 100})
        sent = [it for it in page["messages"] if it["sender_id"] == "helper" and "files" in it["content"]]
        assert len(sent) == 5


def test_files_survive_a_kill_in_a_simulation() -> None:
    async def play(simulation: Simulation) -> None:
        ann = (await simulation.join_person("ann")).client
        file = await save(ann, "kept")
        await simulation.kill_hub()
        await simulation.restart_hub()
        assert await download_file(ann, file["file"]) == b"kept"

    simulate(play, mods=["files"])


async def test_only_the_owner_changes_or_deletes_a_file(network: Network) -> None:
    ann, bob = await network.join("ann"), await network.join("bob")
    file = await save(ann)
    await ann.send("agent:bob", {"files": [file]})
    with pytest.raises(Forbidden, match="owner"):
        await bob.call("files.delete", {"file": file["file"]})
    with pytest.raises(InvalidArguments, match="own no file"):
        await save(bob, "changed", file=file["file"])
    await ann.call("files.delete", {"file": file["file"]})
    assert not await is_readable(bob, file)


async def test_files_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "net.db"
    async with Network.open(path, mods=["files"]) as network:
        ann = await network.join("ann")
        file = await save(ann, "kept")
        await ann.call("files.upload", {"upload_id": "u", "offset": 0, "data": "YWI="})
    async with Network.open(path, mods=["files"]) as network:
        ann = await network.join("ann")
        assert (await ann.call("files.read", {"file": file["file"]}))["text"] == "kept"
        assert await ann.call("files.upload", {"upload_id": "u", "offset": 2, "data": "Yw=="}) == {"size": 3}


async def test_node_with_a_shared_log_refuses_the_mod(tmp_path: Path) -> None:
    config = NodeConfig(db=tmp_path / "net.db", log="nats://127.0.0.1:1/x", mods=["files"], port=0)
    with pytest.raises(ConfigError, match="Remove files from `mods`, or remove `log`"):
        async with serve(config):
            pass


async def test_page_of_files_ends_at_a_visible_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "EXAMINED", 2)
    async with Network.open(mods=["files"]) as network:
        ann, bob = await network.join("ann"), await network.join("bob")
        for by in (bob, bob, bob, ann, bob, ann, bob, bob, ann):
            await save(by)
        own = [it["file"] for it in (await ann.call("files.list", {}))["files"]]
        first = await ann.call("files.list", {"limit": 2})
        assert ([it["file"] for it in first["files"]], first["next"]) == (own[:2], own[1])
        rest = await ann.call("files.list", {"limit": 2, "after": first["next"]})
        assert ([it["file"] for it in rest["files"]], rest["has_more"], len(own)) == (own[2:], False, 3)
