"""`roundelay gateway` as a separate process that a test can kill."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.forks import Process, start_roundelay


class GatewayProcess:
    """`roundelay gateway` as a process. After a restart, it listens on the same port."""

    def __init__(self, node_url: str, *options: str) -> None:
        self._node_url = node_url
        self._options = options
        self._process: Process | None = None
        self.port = "0"

    async def start(self) -> None:
        command = ("gateway", "--node", self._node_url, "--port", self.port)
        command += self._options
        self._process = await start_roundelay(*command, stdout=asyncio.subprocess.PIPE)
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
        assert found is not None, line
        self.port = found[1]

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def gateway_process(node_url: str, *options: str) -> AsyncIterator[GatewayProcess]:
    gateway = GatewayProcess(node_url, *options)
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.kill()
