"""A real PostgreSQL server on loopback, for tests of the shared log. The tests use the PostgreSQL installation of the
machine.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.support.nats import free_port

USER, PASSWORD, DATABASE = "roundelay", "p4ss", "lab"
OLDEST = 14
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "shared_buffers": "16MB",
    "max_connections": "60",
}


QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
TEMPLATE = "template"


@functools.cache
def make_template() -> Path:
    """Create the data folder of a new server that has never run. Each test server starts with a copy."""
    folder = Path(tempfile.mkdtemp(prefix="roundelay-pg-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.chmod(folder, 0o755)
    server = PostgresServer(folder / TEMPLATE)
    server.make()
    return server.folder / "data"


def find_programs() -> Path:
    """Return the folder of the server's programs. Skip the test if PostgreSQL is not installed."""
    found = [it for it in Path("/usr/lib/postgresql").glob("*/bin/initdb") if int(it.parts[-3]) >= OLDEST]
    folders = [it.parent for it in sorted(found, key=lambda it: int(it.parts[-3]))]
    beside = shutil.which("initdb")
    if not folders and beside is None:
        pytest.skip(f"no PostgreSQL server here ({OLDEST} or newer)")
    return folders[-1] if folders else Path(str(beside)).resolve().parent


def as_whom() -> dict[str, Any]:
    """Return the user for subprocesses, because PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    try:
        user = pwd.getpwnam("postgres")
    except KeyError:
        pytest.skip("PostgreSQL does not run as root, and there is no user postgres here")
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def kill_children(pid: int) -> None:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)


class PostgresServer:
    """One PostgreSQL server with its own folder and port. After a kill and a restart, it still has its data."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.programs = find_programs()
        self.folder = folder
        self.port = free_port()
        self.settings = SETTINGS | settings
        self._process: asyncio.subprocess.Process | None = None

    @property
    def hosts(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, network: str, *, user: str = USER, password: str = PASSWORD, port: int | None = None) -> str:
        """Return the URL of a log. ``network`` may contain more options after a ``?``."""
        network, _, more = network.partition("?")
        host = f"127.0.0.1:{port or self.port}"
        return f"postgres://{user}:{password}@{host}/{DATABASE}?network={network}" + (f"&{more}" if more else "")

    def make(self) -> None:
        """Create the server's folder with one database, owned by its superuser."""
        if self.folder.name != TEMPLATE:
            shutil.copytree(make_template(), self.folder / "data")
            for path in (self.folder, *self.folder.rglob("*")):
                self.give(path)
            return
        self.folder.mkdir()
        self.give(self.folder)
        password = self.folder / "password"
        password.write_text(PASSWORD)
        self.give(password)
        self._run("initdb", "-N", "-U", USER, "-A", "scram-sha-256", f"--pwfile={password}", "-E", "UTF8", "--locale=C")
        made, sql = [str(self.programs / "postgres"), "--single", "-D"], f"CREATE DATABASE {DATABASE}\n".encode()
        subprocess.run([*made, str(self.folder / "data"), "postgres"], input=sql, check=True, **QUIET, **as_whom())

    def take(self, path: Path) -> None:
        """Copy a file to the server's folder, so that only the server's user can read it."""
        copied = Path(shutil.copy(path, self.folder))
        copied.chmod(0o600)
        self.give(copied)

    def give(self, path: Path) -> None:
        whom = as_whom()
        if whom:
            os.chown(path, whom["user"], whom["group"])

    def _run(self, program: str, *arguments: str, **environment: str) -> None:
        command = [str(self.programs / program), "-D", str(self.folder / "data"), *arguments]
        env = os.environ | environment
        done = subprocess.run(command, capture_output=True, cwd=self.folder, env=env, **as_whom())
        assert done.returncode == 0, done.stderr

    async def copy_to(self, other: PostgresServer) -> None:
        """Make another server a standby of this one."""
        await asyncio.to_thread(other.folder.mkdir)
        other.give(other.folder)
        source = f"host=127.0.0.1 port={self.port} user={USER} application_name={other.folder.name}"
        await asyncio.to_thread(other._run, "pg_basebackup", "-R", "-d", source, PGPASSWORD=PASSWORD)

    async def start(self, *, is_ready: bytes = b"ready to accept", before: Sequence[str] = ()) -> None:
        """Start the server. ``before`` is a command prefix that must become the server process."""
        options = [it for name, value in self.settings.items() for it in ("-c", f"{name}={value}")]
        self._process = await asyncio.create_subprocess_exec(
            *(
                *before,
                str(self.programs / "postgres"),
                "-D",
                str(self.folder / "data"),
                "-p",
                str(self.port),
                *options,
            ),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            cwd=self.folder,
            **as_whom(),
        )
        assert self._process.stderr is not None
        said = b""
        while is_ready not in (line := await self._process.stderr.readline()):
            assert line, f"the server did not start: {said.decode()}"
            said += line
        self._draining = asyncio.create_task(self._drain(self._process.stderr))

    async def kill9(self) -> None:
        """Kill all processes of the server at once, so that their shared memory is lost."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGSTOP)  # a stopped process cannot start new children
                kill_children(process.pid)
                process.kill()
            await process.wait()
            await self._draining

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGINT)  # the server's "fast" shutdown
            await process.wait()
            await self._draining

    async def _drain(self, stream: asyncio.StreamReader) -> None:
        while await stream.read(65536):
            pass

    async def connect(self, database: str = DATABASE) -> asyncpg.Connection[asyncpg.Record]:
        """Connect as the superuser."""
        made: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(
            host="127.0.0.1", port=self.port, user=USER, password=PASSWORD, database=database, ssl=False
        )
        return made

    async def execute(self, sql: str, *values: object, database: str = DATABASE) -> None:
        connection = await self.connect(database)
        try:
            await connection.execute(sql, *values)
        finally:
            await connection.close()

    async def write(self, network: str, data: bytes) -> None:
        """Append to a log without the project's client, as a foreign program does."""
        await self.execute(
            f"INSERT INTO roundelay_{network} SELECT max(position) + 1, $1, max(total) FROM roundelay_{network}", data
        )

    async def drop(self, network: str, *positions: int) -> None:
        await self.execute(f"DELETE FROM roundelay_{network} WHERE position = ANY ($1::bigint[])", positions)

    async def drop_all(self, network: str) -> None:
        await self.execute(f"TRUNCATE roundelay_{network}")

    async def widen(self, network: str, max_bytes: int) -> None:
        bound = f"ADD CONSTRAINT max_bytes CHECK (total <= {max_bytes}) NOT VALID"
        await self.execute(f"ALTER TABLE roundelay_{network} DROP CONSTRAINT max_bytes, {bound}")

    async def make_another(self, name: str) -> None:
        """Create a table with the name of a log and other columns, which is not a log."""
        await self.execute(f"CREATE TABLE roundelay_{name} (id bigint PRIMARY KEY, item text)")


@contextlib.asynccontextmanager
async def postgres_server(**settings: str) -> AsyncIterator[PostgresServer]:
    # Do not use pytest's folder, because the server's own user has no access to it.
    folder = Path(tempfile.mkdtemp(prefix="roundelay-pg-"))
    os.chmod(folder, 0o755)
    server = PostgresServer(folder / "primary", **settings)
    try:
        await asyncio.to_thread(server.make)
        await server.start()
        yield server
    finally:
        await server.kill9()
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
