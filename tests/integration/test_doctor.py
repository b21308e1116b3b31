"""`roundelay doctor` leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

from tests.support.command import run


def list_files(folder: Path) -> list[Path]:
    return list(folder.rglob("*"))


async def test_a_folder_that_a_node_would_make_is_not_made(tmp_path: Path) -> None:
    done = await run("doctor", cwd=tmp_path, ROUNDELAY_PORT="0", ROUNDELAY_DB="new/folder/team.db")
    assert "new/folder/team.db (will be made)" in done.out
    assert list_files(tmp_path) == []


async def test_a_file_where_the_folder_is_to_be_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    done = await run("doctor", cwd=tmp_path, code=1, ROUNDELAY_PORT="0", ROUNDELAY_DB="file/team.db")
    assert "file/team.db cannot be written" in done.out
