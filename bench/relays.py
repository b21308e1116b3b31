"""Relays with which the hub is compared. The relays show the cost of the WebSocket layer alone.

    plain        `async for message in websocket: await receiver.send(message)`, like most `websockets` programs
    broadcast    the same with `websockets.broadcast()` to the receivers
    bare         routes in the protocol callback and writes once per connection and loop tick: only the frame parser
                 of `websockets` and the socket remain
    forward      `plain` without answers to the sender
    forward-all  the same with `websockets.broadcast()`

Each relay is a separate process that prints one ready line. The first frame of a connection is a `hello`, as with the
hub. A participant whose id starts with `receiver` gets every message. The first three relays answer each message with a
frame of the size of `stored`. All relays read acks and drop them. The relays' work is therefore comparable with the
hub's work. The relays never parse, store, order or check messages.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import struct
from collections.abc import Awaitable, Callable
from typing import ClassVar

import uvloop
from websockets.asyncio.server import ServerConnection, broadcast, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.protocol import Event
from websockets.typing import Subprotocol

SUBPROTOCOL = Subprotocol("roundelay.v1")
WELCOME = '{"type":"welcome","protocol":1}'
STORED = (
    '{{"type":"stored","message_id":"{0:032d}","seq":{0},"thread_id":"direct:receiver-000~sender","duplicate":false}}'
)

Handler = Callable[[ServerConnection], Awaitable[None]]


def make_plain_handler(*, uses_broadcast: bool, answers: bool) -> Handler:
    """Return a handler that awaits `recv()` and `send()` for each message."""
    receivers: list[ServerConnection] = []

    async def relay(sender: ServerConnection) -> None:
        count = 0
        async for message in sender:
            if uses_broadcast:
                broadcast(receivers, message)
            else:
                for receiver in receivers:
                    await receiver.send(message)
            count += 1
            if answers:
                await sender.send(STORED.format(count))

    async def handle(connection: ServerConnection) -> None:
        is_receiver = _is_receiver(await connection.recv())
        await connection.send(WELCOME)
        try:
            if not is_receiver:
                await relay(connection)
                return
            receivers.append(connection)
            try:
                async for _ack in connection:
                    pass
            finally:
                receivers.remove(connection)
        except ConnectionClosed:
            pass  # the load generator closes its connections without a handshake

    return handle


class BareConnection(ServerConnection):
    """Routes messages inside `data_received`, without a task switch, queue or await per message."""

    receivers: ClassVar[list[BareConnection]] = []
    written_this_tick: ClassVar[list[BareConnection]] = []

    is_greeted = False
    is_receiver = False
    count = 0
    pending: list[bytes] | None = None

    def process_event(self, event: Event) -> None:
        if not isinstance(event, Frame) or event.opcode is not Opcode.TEXT:
            super().process_event(event)
        elif not self.is_greeted:
            self.is_greeted = True
            self.is_receiver = _is_receiver(bytes(event.data))
            if self.is_receiver:
                self.receivers.append(self)
            self.put(encode_text_frame(WELCOME.encode()))
        elif not self.is_receiver:
            self.route(bytes(event.data))

    def route(self, payload: bytes) -> None:
        frame = encode_text_frame(payload)
        for receiver in self.receivers:
            receiver.put(frame)
        self.count += 1
        self.put(encode_text_frame(STORED.format(self.count).encode()))

    def put(self, frame: bytes) -> None:
        if self.pending is not None:
            self.pending.append(frame)
            return
        self.pending = [frame]
        if not self.written_this_tick:
            self.loop.call_soon(_write_pending)
        self.written_this_tick.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.is_receiver:
            self.receivers.remove(self)
        super().connection_lost(exc)


async def wait_until_closed(connection: ServerConnection) -> None:
    """Wait until a bare connection is closed. The connection's callback processes all frames."""
    await connection.wait_closed()


def encode_text_frame(payload: bytes) -> bytes:
    """Return an unmasked, unfragmented text frame, as servers send it (RFC 6455, section 5.2)."""
    length = len(payload)
    if length < 126:
        return struct.pack("!BB", 0x81, length) + payload
    if length < 65536:
        return struct.pack("!BBH", 0x81, 126, length) + payload
    return struct.pack("!BBQ", 0x81, 127, length) + payload


async def run_relay(name: str, port: int) -> None:
    """Serve the relay with this name until the process ends."""
    if name == "bare":
        server = serve(
            wait_until_closed,
            "127.0.0.1",
            port,
            compression=None,
            subprotocols=[SUBPROTOCOL],
            create_connection=BareConnection,
        )
    else:
        handler = make_plain_handler(
            uses_broadcast=name in ("broadcast", "forward-all"), answers=not name.startswith("forward")
        )
        server = serve(handler, "127.0.0.1", port, compression=None, subprotocols=[SUBPROTOCOL])
    async with server as running:
        bound_port = next(iter(running.sockets)).getsockname()[1]
        print(f"ready ws://127.0.0.1:{bound_port}/", flush=True)
        await asyncio.get_running_loop().create_future()


def _is_receiver(hello: str | bytes) -> bool:
    return str(json.loads(hello)["agent_id"]).startswith("receiver")


def _write_pending() -> None:
    written, BareConnection.written_this_tick = BareConnection.written_this_tick, []
    for connection in written:
        frames, connection.pending = connection.pending, None
        if frames and not connection.transport.is_closing():
            connection.transport.write(b"".join(frames))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=["plain", "broadcast", "bare", "forward", "forward-all"])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--loop", choices=["uvloop", "asyncio"], default="uvloop")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if options.loop == "uvloop" else None) as runner:
        runner.run(run_relay(options.name, options.port))


if __name__ == "__main__":
    main()
