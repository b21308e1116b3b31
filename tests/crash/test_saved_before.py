"""Tests of files that must be on the disk before anything depends on them: first the content, then the name, then the
names of new folders, and only then the announcement. An agent that has lost its token still has a way to return.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roundelay.network.client import NetworkClient
from roundelay.network.client.transport import WebSocketWire
from roundelay.network.durable_files import replace_file
from roundelay.network.errors import NotAuthenticated
from roundelay.network.home import agent_token, owner_token
from roundelay.network.ledger.backup import back_up
from roundelay.network.ledger.sqlite import SQLiteLedger
from tests.contract.test_ledger import message
from tests.support.command import run
from tests.support.node import running_node


class Disk:
    """The files and names that survive a power loss, according to this process's syncs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.contents: set[int] = set()
        """Inodes of files whose content is on the disk."""
        self.names: dict[Path, int] = {}
        """Names that are on the disk, and their inodes."""
        self._new: dict[Path, int] = {}
        self._watch(monkeypatch, "link", self._name)
        self._watch(monkeypatch, "replace", self._name)
        self._watch(monkeypatch, "mkdir", lambda path, *_, **__: self._name("", path))
        self._watch(monkeypatch, "fsync", self._sync)

    def keeps(self, path: Path) -> bool:
        """Whether a file survives a power loss under its name and with its full content."""
        named = [path, *(folder for folder in path.parents if folder in self._new)]
        return path.stat().st_ino in self.contents and all(self.names.get(it) == it.stat().st_ino for it in named)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, name: str, hear: Callable[..., None]) -> None:
        original = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            hear(*arguments, **options)
            return result

        monkeypatch.setattr(os, name, call)

    def _name(self, _: object, path: str | Path) -> None:
        inode = os.stat(path).st_ino
        if not Path(path).is_dir():
            assert inode in self.contents, f"{path} has its name before its content is on the disk"
        self._new[Path(path)] = inode

    def _sync(self, descriptor: int) -> None:
        inode = os.fstat(descriptor).st_ino
        self.contents.add(inode)
        self.names |= {path: it for path, it in self._new.items() if path.parent.stat().st_ino == inode}


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Disk:  # requested after the folder of the test exists
    return Disk(monkeypatch)


async def test_an_agents_token_is_on_the_disk_before_the_hub_can_bind_it(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "new" / "home"
    monkeypatch.setenv("ROUNDELAY_HOME", str(home))
    kept: list[bool] = []
    send = WebSocketWire.send

    def note_and_send(wire: WebSocketWire, data: bytes) -> None:
        if b'"hello"' in data:
            (path,) = home.glob("tokens/*/ann")
            kept.append(disk.keeps(path))
        send(wire, data)

    monkeypatch.setattr(WebSocketWire, "send", note_and_send)
    async with running_node() as node:
        for _ in range(2):
            async with NetworkClient("ann", node.url):
                pass
    (path,) = home.glob("tokens/*/ann")
    assert (kept, path.stat().st_mode & 0o777) == ([True, True], 0o600)
    assert os.listdir(path.parent) == ["ann"]


def test_a_token_that_another_process_has_just_named_is_synced_before_it_is_used(disk: Disk) -> None:
    token = agent_token("ws://127.0.0.1:1/", "ann")
    disk.names.clear()  # this state is as if the process had been killed before the last step
    assert agent_token("ws://127.0.0.1:1/", "ann") == token
    assert [path.name for path in disk.names] == ["ann"]


async def test_an_owners_token_a_backup_and_an_export_are_on_the_disk_when_they_are_told_of(
    disk: Disk, tmp_path: Path
) -> None:
    owner_token(tmp_path / "team.db")
    ledger = SQLiteLedger(tmp_path / "team.db", new_epoch=lambda: "e")
    await ledger.open()
    await ledger.append([message(1, "ann", "agent:bob")], [])
    back_up(tmp_path / "team.db", tmp_path / "backup.db")
    await ledger.close()
    exported = tmp_path / "run.jsonl"
    for _ in range(2):  # the first pass creates a file, the second one replaces it
        with replace_file(exported) as file:
            file.write("all of it")
    for path in (tmp_path / "team.db.owner", tmp_path / "backup.db", exported):
        assert disk.keeps(path), path
    assert (tmp_path / "team.db.owner").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "backup.db").stat().st_mode & 0o777 == 0o600


def _lose_token(agent_id: str) -> str:
    (path,) = Path(os.environ["ROUNDELAY_HOME"]).glob(f"tokens/*/{agent_id}")
    token = path.read_text().strip()
    path.unlink()
    return token


@pytest.mark.usefixtures("real_processes")
async def test_an_agent_that_lost_its_token_comes_back_the_way_that_the_error_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_node() as node:
        monkeypatch.setenv("ROUNDELAY_URL", node.url)
        monkeypatch.setenv("ROUNDELAY_OWNER_TOKEN", node.owner_token)
        async with NetworkClient("ann", node.url) as ann:
            await ann.send_text("ann", "before")
        lost = _lose_token("ann")
        with pytest.raises(NotAuthenticated) as refused:
            await NetworkClient("ann", node.url).connect()
        revoke, create = "roundelay token revoke ann", "roundelay token create ann"
        assert revoke in str(refused.value)
        assert create in str(refused.value)
        await run(*revoke.split()[1:])
        token = (await run(*create.split()[1:])).out.strip()
        monkeypatch.setenv("ROUNDELAY_TOKEN", token)
        async with NetworkClient("ann", node.url) as ann:
            history = await ann.history("direct:ann~ann")
            assert [it.content for it in history.messages] == ["before"]
        stranger = NetworkClient("ann", node.url, token=lost)
        with pytest.raises(Exception, match="revoked"):
            await stranger.connect()
