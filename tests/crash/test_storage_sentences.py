"""Tests of the errors that commands print for a bad database: the problem, the place and the next step, in the same
words in each command.

The commands run in a separate process whose calls can fail (`faults.c`). The process respects file modes even if its
user is root.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import os
import re
import shutil
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

from roundelay.network.ledger.integrity import check_file
from tests.crash.faulty import DB, PATIENCE_S
from tests.crash.injected import Faults, Kind, faults_at, faults_library
from tests.support.node import running_node

__all__ = ["faults_library"]

WRITING = ("up", "doctor")
READING = ("why", "export", "backup")

_COMMANDS = """
import contextlib, io, json, sys
import roundelay.network.ledger.integrity, roundelay.nodes.doctor, roundelay.nodes.up, roundelay.runs.why
from roundelay.cli import main
print("ready", flush=True)
for line in sys.stdin:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main(json.loads(line))
        except SystemExit as error:
            code = error.code
    print(json.dumps([code, said.getvalue()]), flush=True)
"""
_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 24, 1, 2

Prepare = Callable[[Path, Faults], None]


@dataclass(frozen=True)
class Wrong:
    """A problem, and words of the errors of commands that write and of commands that read. An empty string means that
    the problem does not affect them.
    """

    name: str
    prepare: Prepare
    writing: str
    reading: str
    backup: str = ""
    """Words of the error of `backup`, which reads a file with a write-ahead log as SQLite does, with locks."""

    is_copied: bool = False
    """Whether `backup` still copies the ledger, and creates no other files."""


def _refuse(number: int, *kinds: Kind) -> Prepare:
    def prepare(_: Path, faults: Faults) -> None:
        for kind in kinds:
            faults.refuse(kind, number)

    return prepare


def _mode(mode: int) -> Prepare:
    return lambda db, _: db.chmod(mode)


def _close_folder(db: Path, _: Faults) -> None:
    db.unlink()
    db.with_name(f"{DB}.owner").unlink()
    db.parent.chmod(0o500)


def _file_for_folder(db: Path, _: Faults) -> None:
    shutil.rmtree(db.parent)
    db.parent.write_text("no folder")


def _folder(db: Path, _: Faults) -> None:
    db.unlink()
    db.mkdir()


def _link_to(target: str) -> Prepare:
    def prepare(db: Path, _: Faults) -> None:
        db.unlink()
        db.symlink_to(db.parent / target)

    return prepare


def _garbage(db: Path, _: Faults) -> None:
    db.write_bytes(b"SQLite format 3\0" + b"nothing of the kind " * 100)


def _cut(db: Path, _: Faults) -> None:
    with db.open("r+b") as file:
        file.truncate(db.stat().st_size // 2)


def _sql(sql: str) -> Prepare:
    def prepare(db: Path, _: Faults) -> None:
        with closing(sqlite3.connect(db)) as connection:
            connection.executescript(sql)

    return prepare


TABLE = (
    Wrong("file_for_folder", _file_for_folder, "part of its path is no folder", "part of its path is no folder"),
    Wrong("closed_folder", _close_folder, "this user may not write in the folder", "There is no database"),
    Wrong("mode_444", _mode(0o444), "this user may not write the file (mode 444)", ""),
    Wrong("mode_000", _mode(0), "this user may not read the file (mode 0)", "this user may not read the file (mode 0)"),
    Wrong("folder", _folder, "it is a folder", "it is a folder"),
    Wrong("link_to_nowhere", _link_to("none/x.db"), "there is no folder", "There is no database"),
    Wrong("link_in_a_circle", _link_to(DB), "its link leads back to itself", "its link leads back to itself"),
    Wrong("no_database", _garbage, "is not a database", "is not a database"),
    Wrong("cut", _cut, "malformed", "malformed"),
    Wrong("newer", _sql("PRAGMA user_version = 99"), "has schema 99", "has schema 99"),
    Wrong("of_something_else", _sql("PRAGMA user_version = 0"), "of another program", "of another program"),
    Wrong(
        "read_only",
        _refuse(errno.EROFS, "open", "write", "truncate"),
        "its file system is read-only",
        "",
        is_copied=True,
    ),
    Wrong(
        "no_space",
        _refuse(errno.ENOSPC, "write", "truncate"),
        "no space is left on its disk",
        "",
        "no space is left on its disk",
    ),
    Wrong("no_files", _refuse(errno.EMFILE, "open"), "this process may open no more files", "may open no more files"),
    Wrong(
        "full_file_table", _refuse(errno.ENFILE, "open"), "the system can open no more files", "can open no more files"
    ),
    Wrong("writes_fail", _refuse(errno.EIO, "write"), "its disk reports an error", ""),
    Wrong("syncs_fail", _refuse(errno.EIO, "sync"), "its disk reports an error", ""),
    Wrong("reads_fail", _refuse(errno.EIO, "read"), "its disk reports an error", "its disk reports an error"),
    Wrong("no_locks", _refuse(errno.ENOLCK, "lock"), "its file system refuses locks", ""),
)


def _keep_the_rights_of_files() -> None:
    """Make root's processes respect file modes. The child calls this before it starts."""
    prctl = ctypes.CDLL(None).prctl
    for right in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
        if os.geteuid() == 0 and prctl(_PR_CAPBSET_DROP, right, 0, 0, 0) != 0:
            raise OSError("rights cannot be given up here")


class Commands:
    """The process that runs the commands."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def run(self, *args: object) -> tuple[int, str]:
        """Run a command, and return its exit code and output."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps([str(arg) for arg in args]).encode() + b"\n")
        async with asyncio.timeout(PATIENCE_S):
            code, output = json.loads(await stdout.readline())
        return code, output


@asynccontextmanager
async def _commands(folder: Path, faults: Faults) -> AsyncIterator[Commands]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _COMMANDS, stdin=pipe, stdout=pipe, cwd=folder, env={**os.environ, **faults.env},
        preexec_fn=_keep_the_rights_of_files,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        yield Commands(process)
    finally:
        process.kill()
        await process.wait()


def _arguments(command: str, db: Path, copy: Path) -> list[object]:
    return {
        "up": ["up", "--port", "0", "--db", db],
        "doctor": ["doctor", "roundelay.yaml"],
        "why": ["why", "2", "--db", db],
        "export": ["export", "--db", db],
        "backup": ["backup", copy, "--db", db],
    }[command]


async def test_each_command_says_what_is_wrong_with_a_database_in_the_same_words(
    tmp_path: Path, faults_library: Path
) -> None:
    home, intact = tmp_path / "home", tmp_path / "intact"
    intact.mkdir()
    async with running_node(db=intact / DB, durability="full") as node:
        await (await node.agent("alice")).send("broadcast", "hello")
    (tmp_path / "roundelay.yaml").write_text(json.dumps({"db": str(home / DB), "port": 0}))
    with faults_at(faults_library, home / DB, tmp_path) as faults:
        async with _commands(tmp_path, faults) as commands:
            for wrong in TABLE:
                shutil.copytree(intact, home)
                wrong.prepare(home / DB, faults)
                for command in (*WRITING, *READING):
                    words = wrong.writing if command in WRITING else wrong.reading
                    words = wrong.backup or words if command == "backup" else words
                    if command == "backup" and wrong.is_copied:
                        before = sorted(home.iterdir())
                        code, said = await commands.run(*_arguments(command, home / DB, tmp_path / "copy"))
                        assert code == 0, (wrong.name, said)
                        assert sorted(home.iterdir()) == before, wrong.name
                        assert check_file(tmp_path / "copy") == []
                        (tmp_path / "copy").unlink()
                    elif words:
                        code, said = await commands.run(*_arguments(command, home / DB, tmp_path / "copy"))
                        assert code in (1, 2), (wrong.name, command, said)
                        _assert_one_sentence(said, home / DB, words)
                faults.lift()
                if home.is_dir():
                    home.chmod(0o700)
                    shutil.rmtree(home)
                else:
                    home.unlink()
        assert not (tmp_path / "copy").exists()


def _assert_one_sentence(said: str, db: Path, words: str) -> None:
    """Check that one line names the problem and the place, and (after a semicolon or a period) the next step.
    `doctor` prints other lines.
    """
    (line,) = [line for line in said.splitlines() if line.startswith(("Error: ", "failed "))]
    assert str(db) in line, said
    assert words in line, said
    assert re.search(r"[;.] [A-Za-z]", line.partition(words)[2]), said
    assert line.endswith("."), said
    assert "Traceback" not in said
