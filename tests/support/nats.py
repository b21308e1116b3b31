"""A real NATS server with JetStream on loopback, for tests of the shared log."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import nats
import nats.errors

SERVER = Path(sys.executable).with_name("nats-server")


MAX_PORT = 60_000
"""Highest port that ``roundelay cluster start --port`` accepts."""


def free_port() -> int:
    """Return a port that no program uses, up to `MAX_PORT`."""
    with ExitStack() as probes:  # a port above the maximum stays in use, so that it is not offered again
        while True:
            probe = probes.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            if port <= MAX_PORT:
                return port


class NotStartedError(Exception):
    """A NATS server ended at its start, for example because another program has taken its port meanwhile."""


class NatsServer:
    """One NATS server with its own folder and port. After a kill and a restart, it still has its data."""

    def __init__(
        self, folder: Path, port: int | None = None, cluster: str = "", sync: str = "always", text: str = ""
    ) -> None:
        self.folder = folder
        self.port = port or free_port()
        self.monitor = free_port()
        self._text = text
        self._more = f'server_name: "{folder.name}"\n{cluster}'
        self.sync = sync
        self._process: asyncio.subprocess.Process | None = None

    @property
    def hosts(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, stream: str) -> str:
        return f"nats://{self.hosts}/{stream}"

    def shown_url(self, stream: str) -> str:
        """Return the URL of a log with the server's monitoring port, through which a node checks how the server
        syncs.
        """
        return f"{self.url(stream)}?monitor={self.monitor}"

    async def write(self, stream: str, data: bytes) -> None:
        """Append to a log without the project's client, as a foreign program does."""
        async with await nats.connect(f"nats://{self.hosts}") as client:
            await client.jetstream().publish(f"roundelay.{stream}.log", data)

    async def drop(self, stream: str, *positions: int) -> None:
        async with await nats.connect(f"nats://{self.hosts}") as client:
            for position in positions:
                await client.jetstream().delete_msg(stream, position)

    async def drop_all(self, stream: str) -> None:
        async with await nats.connect(f"nats://{self.hosts}") as client:
            await client.jetstream().purge_stream(stream)

    async def widen(self, stream: str, max_bytes: int) -> None:
        await self.change(stream, max_bytes=max_bytes)

    async def change(self, stream: str, **fields: Any) -> None:
        """Change the configuration of a log's stream."""
        async with await nats.connect(f"nats://{self.hosts}") as client:
            config = (await client.jetstream().stream_info(stream)).config
            await client.jetstream().update_stream(config.evolve(**fields))

    async def make_another(self, name: str) -> None:
        """Create a stream with the name of a log and other subjects, which is not a log."""
        async with await nats.connect(f"nats://{self.hosts}") as client:
            await client.jetstream().add_stream(name=name, subjects=[f"{name}.*"])

    async def start(self, *before: str) -> None:
        """Start the server. ``before`` is a command prefix that runs the server."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "server.conf"
        own = self._text or f'jetstream {{ store_dir: "{self.folder}/store", sync_interval: {self.sync} }}'
        ports = f'listen: "127.0.0.1:{self.port}"\nhttp: "127.0.0.1:{self.monitor}"\n'
        config.write_text(f"{ports}{own}\n{self._more}\n")
        self._process = await asyncio.create_subprocess_exec(
            *before, str(SERVER), "-c", str(config), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        assert self._process.stderr is not None
        while b"Server is ready" not in (line := await self._process.stderr.readline()):
            if not line:
                await self._process.wait()
                self._process = None
                raise NotStartedError("the NATS server did not start")
        self._draining = asyncio.create_task(self._drain(self._process.stderr))

    async def kill9(self) -> None:
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        await self._end(signal.SIGTERM)

    async def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            await process.wait()
            await self._draining

    async def _drain(self, stream: asyncio.StreamReader) -> None:
        while await stream.read(65536):
            pass


@contextlib.asynccontextmanager
async def nats_server(folder: Path, *, sync: str = "always", text: str = "") -> AsyncIterator[NatsServer]:
    """Run one server. ``text`` is the part of its configuration file about JetStream and users."""
    [server] = await _repeat(lambda: _start([NatsServer(folder, sync=sync, text=text)]))
    try:
        yield server
    finally:
        await server.kill9()
        shutil.rmtree(folder, ignore_errors=True)


async def _start(servers: list[NatsServer]) -> list[NatsServer]:
    """Start servers together. If one of them does not start, kill the others and raise its error."""
    done = await asyncio.gather(*(server.start() for server in servers), return_exceptions=True)
    errors = [it for it in done if it is not None]
    if errors:
        await asyncio.gather(*(server.kill9() for server, error in zip(servers, done, strict=True) if error is None))
        raise errors[0]
    return servers


async def _repeat(start: Callable[[], Awaitable[list[NatsServer]]]) -> list[NatsServer]:
    """Start servers on new ports, up to three times."""
    for _ in range(2):
        with contextlib.suppress(NotStartedError):
            return await start()
    return await start()


def _plan_cluster(folder: Path, count: int) -> list[NatsServer]:
    ports = [free_port() for _ in range(count)]
    routes = ", ".join(f'"nats-route://127.0.0.1:{port}"' for port in ports)
    return [
        NatsServer(
            folder / f"n{port}", cluster=f'cluster {{ name: c, listen: "127.0.0.1:{port}", routes: [{routes}] }}'
        )
        for port in ports
    ]


@contextlib.asynccontextmanager
async def nats_servers(folder: Path, count: int = 3) -> AsyncIterator[list[NatsServer]]:
    """Run the servers of one cluster. On entry, the servers have elected a leader."""
    servers = await _repeat(lambda: _start(_plan_cluster(folder, count)))
    try:
        await wait_until_chosen([f"nats://{server.hosts}" for server in servers])
        yield servers
    finally:
        await asyncio.gather(*(server.kill9() for server in servers))
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def run_together(
    servers: Sequence[NatsServer], before: Callable[[NatsServer], Sequence[str]] = lambda _: ()
) -> AsyncIterator[None]:
    """Run these servers. At the end, kill them and keep their folders."""
    try:
        await asyncio.gather(*(server.start(*before(server)) for server in servers))
        yield
    finally:
        await asyncio.gather(*(server.kill9() for server in servers))


async def wait_until_chosen(urls: list[str]) -> None:
    """Wait until the servers at these addresses can create a stream with a replica on each server."""
    client = None
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(nats.errors.Error, OSError):
                client = client or await nats.connect(urls, allow_reconnect=True, max_reconnect_attempts=2)
                await client.jetstream(timeout=1).add_stream(name="probe", num_replicas=len(urls))
                break
            await asyncio.sleep(0.1)
    await client.close()


class Cable:
    """Connection between a node and its server. While it is cut, no data passes, and neither side gets an error."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._whole = asyncio.Event()
        self._whole.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    @contextlib.asynccontextmanager
    async def laid(self) -> AsyncIterator[int]:
        """Accept connections, and yield the port."""
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        for ends in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pass(*ends))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._whole.wait()
                writer.write(data)
                await writer.drain()
        writer.close()
