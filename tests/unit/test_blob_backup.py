"""Tests that backups and checks include the contents of files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from roundelay import LedgerError, Network
from roundelay.network.blobs import blob_folder, blob_path
from roundelay.network.client.files import download_file, upload_file
from roundelay.network.ledger.backup import back_up
from roundelay.network.ledger.blob_files import check_blobs
from roundelay.nodes.doctor import check_contents


async def make_network(db: Path) -> list[dict[str, str]]:
    async with Network.open(db, mods=["files"]) as network:
        ann = await network.join("ann")
        files = [await upload_file(ann, content) for content in (b"one", b"two", b"one", b"deleted")]
        await ann.call("files.delete", {"file": files[3]["file"]})
        return files[:3]


def status_of(db: Path) -> str:
    checked = check_contents(db)
    assert checked is not None
    return checked.status


async def test_folder_that_is_gone_is_reported(tmp_path: Path) -> None:
    await make_network(tmp_path / "net.db")
    shutil.rmtree(blob_folder(tmp_path / "net.db"))
    assert status_of(tmp_path / "net.db") == "failed"
    async with Network.open(tmp_path / "other.db") as network:
        await network.join("ann")
    assert check_contents(tmp_path / "other.db") is None


async def test_restored_backup_has_every_content(tmp_path: Path) -> None:
    files = await make_network(tmp_path / "net.db")
    made = back_up(tmp_path / "net.db", tmp_path / "copy.db")
    assert (made.blobs.count, made.blobs.size, made.blobs.damaged) == (2, 6, ())
    async with Network.open(tmp_path / "copy.db", mods=["files"]) as network:
        ann = await network.join("ann")
        assert [await download_file(ann, it["file"]) for it in files] == [b"one", b"two", b"one"]


async def test_missing_and_changed_contents_are_reported(tmp_path: Path) -> None:
    db = tmp_path / "net.db"
    files = await make_network(db)
    assert (status_of(db), check_blobs(db).count) == ("ok", 2)
    blob_path(blob_folder(db), files[0]["sha256"]).write_bytes(b"ono")
    blob_path(blob_folder(db), files[1]["sha256"]).unlink()
    damaged = sorted({it["sha256"] for it in files})
    assert [*check_blobs(db).damaged] == damaged
    assert status_of(db) == "failed"
    assert [*back_up(db, tmp_path / "copy.db").blobs.damaged] == damaged
    async with Network.open(db, mods=["files"]) as network:  # storing the same content again repairs the file
        ann = await network.join("ann")
        await upload_file(ann, b"one")
        assert await download_file(ann, files[0]["file"]) == b"one"


async def test_backup_never_overwrites_a_folder_of_contents(tmp_path: Path) -> None:
    await make_network(tmp_path / "net.db")
    blob_folder(tmp_path / "copy.db").mkdir()
    with pytest.raises(LedgerError, match="never overwrites"):
        back_up(tmp_path / "net.db", tmp_path / "copy.db")
    assert not (tmp_path / "copy.db").exists()
