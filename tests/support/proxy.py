"""A TCP proxy that breaks connections. A seed determines scripts of faults, and each new connection uses the next
script.

A fault fires after a number of bytes in one direction. ``split`` forwards bytes one by one, and ``stall`` forwards
nothing for a while. Then one of three faults ends the connection. ``reset`` sends an RST to both sides. ``cut``
forwards an exact number of bytes, and then sends a FIN to both sides. ``half_open`` forwards nothing more, and at
least one side is not notified. ``log`` lists the faults that have fired. After the last script, the proxy forwards
everything.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Literal
from urllib.parse import urlsplit

Direction = Literal["up", "down"]
Kind = Literal["split", "stall", "reset", "cut", "half_open"]
Side = Literal["client", "hub", "neither"]

ENDINGS: tuple[Kind, ...] = ("reset", "cut", "half_open")
HANDSHAKE_BYTES = 800
READ_BYTES = 1 << 16
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Fault:
    """A fault that fires after ``at_byte`` bytes in ``direction``. The direction "up" leads to the hub."""

    kind: Kind
    direction: Direction
    at_byte: int
    length: float = 0.0
    """Length of a split in bytes, or of a stall in seconds."""
    told: Side = "neither"
    """Side of a half-open connection that is notified of its end."""


Script = tuple[Fault, ...]


@dataclass(frozen=True)
class Fired:
    """A line of the proxy's log: the fault, the connection, and the number of bytes before."""

    connection: int
    fault: Fault
    passed: int


def plan_faults(seed: int, endings: int, *, up_bytes: int, down_bytes: int, stall_s: float) -> list[Script]:
    """Return ``endings`` scripts, each of which ends its connection. Every second script also has a split, and every
    third a stall.

    One fifth of the scripts end the connection within the handshake or the hello, the others after more bytes.
    """
    random = Random(seed)
    return [_plan_script(random, up_bytes, down_bytes, stall_s) for _ in range(endings)]


def _plan_script(random: Random, up_bytes: int, down_bytes: int, stall_s: float) -> Script:
    direction: Direction = random.choice(("up", "down"))
    most = up_bytes if direction == "up" else down_bytes
    end = random.randint(1, HANDSHAKE_BYTES) if random.random() < 0.2 else random.randint(HANDSHAKE_BYTES, most)
    kind = random.choice(ENDINGS)
    told: Side = random.choice(("client", "hub", "neither"))
    faults = [Fault(kind, direction, end, told=told)]
    if random.random() < 0.5:
        at = random.randint(0, end - 1)
        faults.append(Fault("split", direction, at, length=random.randint(2, 600)))
    if random.random() < 0.33:
        faults.append(Fault("stall", direction, random.randint(0, end - 1), length=random.uniform(0.02, stall_s)))
    return tuple(sorted(faults, key=lambda fault: (fault.at_byte, fault.kind in ENDINGS)))


class ChaosProxy:
    """A proxy in front of a hub. ``planned`` and ``fired`` count faults by kind. ``is_exhausted`` is set after the
    last script.
    """

    def __init__(self, target_url: str, scripts: Sequence[Script]) -> None:
        target = urlsplit(target_url)
        assert target.hostname is not None
        assert target.port is not None
        self.target: tuple[str, int] = (target.hostname, target.port)
        self.url = ""
        self.log: list[Fired] = []
        self.connections = 0
        self.planned = Counter(fault.kind for script in scripts for fault in script)
        self.is_exhausted = asyncio.Event()
        self._scripts = iter(scripts)
        self._running = len(scripts)
        self._open: set[asyncio.StreamWriter] = set()
        self._readers: list[asyncio.StreamReader] = []  # asyncio closes a connection whose reader is garbage-collected
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        if not scripts:
            self.is_exhausted.set()

    @property
    def fired(self) -> Counter[Kind]:
        return Counter(line.fault.kind for line in self.log)

    @property
    def fired_share(self) -> float:
        return len(self.log) / max(1, self.planned.total())

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=READ_BYTES)
        self.url = f"ws://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/"

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open.add(writer)
        task = asyncio.create_task(self._serve(self.connections, next(self._scripts, None), reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End every connection, including half-open ones."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in list(self._open):
            self._abort(writer)
        await asyncio.sleep(0)  # this step lets the callbacks of closed transports run

    async def _serve(
        self, number: int, script: Script | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            hub_reader, hub_writer = await asyncio.open_connection(*self.target, limit=READ_BYTES)
            self._open.add(hub_writer)
            self._readers += (reader, hub_reader)
            passing = _Passing(self, number, script or (), {"client": writer, "hub": hub_writer})
            await passing.run(reader, hub_reader)
        except OSError:
            self._abort(writer)  # the hub does not accept connections
        finally:
            if script is not None:
                self._running -= 1
                if not self._running:
                    self.is_exhausted.set()

    def _end(self, writer: asyncio.StreamWriter) -> None:
        self._open.discard(writer)
        writer.close()

    def _abort(self, writer: asyncio.StreamWriter) -> None:
        self._open.discard(writer)
        sock: socket.socket | None = writer.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        writer.transport.abort()


class _Passing:
    """One connection through the proxy."""

    def __init__(
        self, proxy: ChaosProxy, number: int, script: Script, writers: dict[Side, asyncio.StreamWriter]
    ) -> None:
        self._proxy = proxy
        self._number = number
        self._left = list(script)
        self._writers = writers
        self._may_pass = asyncio.Event()
        self._may_pass.set()

    async def run(self, client: asyncio.StreamReader, hub: asyncio.StreamReader) -> None:
        pumps = [
            asyncio.create_task(self._pump("up", client, self._writers["hub"])),
            asyncio.create_task(self._pump("down", hub, self._writers["client"])),
        ]
        try:
            done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        self._finish(done.pop().result())

    async def _pump(
        self, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Fault | None:
        """Forward data until one side ends (return None) or a fault ends the connection (return the fault)."""
        passed, split_left, data = 0, 0, b""
        try:
            while True:
                fault = self._left[0] if self._left and self._left[0].direction == direction else None
                if fault is not None and passed >= fault.at_byte and (data or fault.kind in ENDINGS):
                    self._fire(fault, passed)
                    if fault.kind == "stall":
                        await self._stall(fault.length)
                    elif fault.kind == "split":
                        split_left = int(fault.length)
                    else:
                        return fault
                    continue
                if not data:
                    data = await reader.read(READ_BYTES)
                    if not data:
                        return None
                    continue
                size = len(data) if fault is None else min(len(data), fault.at_byte - passed)
                if split_left:
                    size, split_left = 1, split_left - 1
                await self._may_pass.wait()
                writer.write(data[:size])
                await writer.drain()
                if split_left:
                    await asyncio.sleep(0)  # so that each byte is a separate TCP segment
                passed, data = passed + size, data[size:]
        except ConnectionError:
            return None

    async def _stall(self, seconds: float) -> None:
        self._may_pass.clear()
        await asyncio.sleep(seconds)
        self._may_pass.set()

    def _fire(self, fault: Fault, passed: int) -> None:
        self._left.remove(fault)
        self._proxy.log.append(Fired(self._number, fault, passed))

    def _finish(self, ending: Fault | None) -> None:
        proxy, writers = self._proxy, self._writers
        match ending:
            case Fault(kind="half_open", told=told):
                if told != "neither":
                    proxy._end(writers[told])
            case Fault(kind="reset"):
                for writer in writers.values():
                    proxy._abort(writer)
            case _:
                for writer in writers.values():
                    proxy._end(writer)


@asynccontextmanager
async def chaos_proxy(target_url: str, scripts: Sequence[Script]) -> AsyncIterator[ChaosProxy]:
    """Run a `ChaosProxy` until the context ends."""
    proxy = ChaosProxy(target_url, scripts)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
