"""A real NATS server with JetStream on loopback, for tests of the shared log."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

SERVER = Path(sys.executable).with_name("nats-server")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class NatsServer:
    """One server on a folder and a port of its own; killed and started again it finds what it had stored."""

    def __init__(self, folder: Path, port: int | None = None) -> None:
        self.folder = folder
        self.port = port or free_port()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def hosts(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, stream: str) -> str:
        return f"nats://{self.hosts}/{stream}"

    async def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "server.conf"
        config.write_text(
            f'listen: "127.0.0.1:{self.port}"\njetstream {{ store_dir: "{self.folder}/store", sync_interval: always }}\n'
        )
        self._process = await asyncio.create_subprocess_exec(
            str(SERVER), "-c", str(config), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        assert self._process.stderr is not None
        while b"Server is ready" not in (line := await self._process.stderr.readline()):
            assert line, "the NATS server did not start"
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
async def nats_server(folder: Path) -> AsyncIterator[NatsServer]:
    server = NatsServer(folder)
    await server.start()
    try:
        yield server
    finally:
        await server.kill9()
        shutil.rmtree(folder, ignore_errors=True)
