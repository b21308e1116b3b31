"""Tests of promise P19 under `kill -9`: a node is killed while participants upload and attach files. The files of an
acknowledged message exist and are complete.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from random import Random

import pytest

from roundelay.network.blobs import blob_folder, hash_file, list_blobs
from roundelay.network.client import NetworkClient
from roundelay.network.client.files import download_file, upload_file
from roundelay.network.ledger.blob_files import check_blobs
from tests.crash.test_saved_before import Disk
from tests.support.counts import Note
from tests.support.node import ProcessNode, node_process, running_node

UPLOADERS = 4
LONGEST_LIFE_S = 0.4
MAX_SIZE = 300_000


class Sent(dict[str, str]):
    """Checksums of contents in acknowledged messages, by file."""

    def __init__(self) -> None:
        super().__init__()
        self.is_more = asyncio.Event()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Disk:
    return Disk(monkeypatch)


async def _upload(client: NetworkClient, random: Random, sent: Sent) -> None:
    """Upload and attach files until cancelled, even while the node is down. Every third content is also uploaded by
    others.
    """
    number = 0
    while True:
        number += 1
        data = random.randbytes(random.randrange(MAX_SIZE)) if number % 3 else b"common" * (number % 50)
        file = await upload_file(client, data, upload_id=f"{client.agent_id}-{number}")
        await client.send("agent:reader", {"files": [file]}, message_id=f"m{number}")
        sent[file["file"]] = hashlib.sha256(data).hexdigest()
        sent.is_more.set()


async def _kill_once(node: ProcessNode, sent: Sent, random: Random) -> None:
    sent.is_more.clear()
    async with asyncio.timeout(30):
        await sent.is_more.wait()  # the node has acknowledged something since its start
    await asyncio.sleep(random.random() * LONGEST_LIFE_S)
    await node.kill9()
    # Check before the restart: a reader of the folder would see a torn blob at this moment.
    folder = blob_folder(node.db)
    assert [name for name in list_blobs(folder) if hash_file(folder / "blobs" / name[:2] / name) != name] == []
    await node.restart()


async def _prove(db: Path, note: Note, *, kills: int) -> None:
    random, sent = Random(kills), Sent()
    async with node_process(db, env={"ROUNDELAY_MODS": "channels,files"}) as node:
        node.keeps_port = True
        names = [*(f"agent-{number}" for number in range(UPLOADERS)), "reader"]
        clients = [NetworkClient(name, node.url, token=node.token_of(name)) for name in names]
        await asyncio.gather(*(client.connect() for client in clients))
        *uploaders, reader = clients
        uploading = [asyncio.create_task(_upload(client, Random(n), sent)) for n, client in enumerate(uploaders)]
        try:
            for _ in range(kills):
                await _kill_once(node, sent, random)
                failed = [task.exception() for task in uploading if task.done()]
                assert failed == [], node.printed
        finally:
            for task in uploading:
                task.cancel()
            await asyncio.gather(*uploading, return_exceptions=True)
        for file_id, sha256 in sent.items():
            assert hashlib.sha256(await download_file(reader, file_id)).hexdigest() == sha256
        await asyncio.gather(*(client.close() for client in clients))
    found = check_blobs(db)
    note(kills=kills, attached=len(sent), contents=found.count, mib=found.size // 2**20)
    assert found.damaged == ()
    assert len(sent) > kills


async def test_no_attached_file_is_lost_or_torn_by_4_kills(tmp_path: Path, note: Note) -> None:
    await _prove(tmp_path / "team.db", note, kills=4)


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_no_attached_file_is_lost_or_torn_by_200_kills(tmp_path: Path, note: Note) -> None:
    await _prove(tmp_path / "team.db", note, kills=200)


async def test_content_is_on_the_disk_before_its_file_is_acknowledged(disk: Disk, tmp_path: Path) -> None:
    db = tmp_path / "team.db"
    async with (
        running_node(db=db, durability="full", mods=["files"]) as node,
        NetworkClient("ann", node.url, token=node.token_of("ann")) as ann,
    ):
        saved = await ann.call("files.save", {"name": "a", "content": "saved"})
        uploaded = await upload_file(ann, b"uploaded")
        for file in (saved, uploaded):
            assert disk.keeps(blob_folder(db) / "blobs" / file["sha256"][:2] / file["sha256"])
