"""One WebSocket connection: from bytes to the hub and back, without a task switch per message.

`HubConnection` hooks into websockets' protocol callback: a text message goes straight to `Hub.receive`, and what the hub writes in
one tick leaves as one joined write. The library keeps the handshake, framing, and closing. Keepalive is our own, since the
library's would end a slow client, whose pongs stand behind a long queue; `stall` tells it from one that does not read.
"""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import logging
import socket
import struct
import termios
from collections.abc import Callable
from typing import Any, cast

from websockets.asyncio.server import Server, ServerConnection
from websockets.datastructures import Headers
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State as WireState
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from .config import Limits
from .entries import Peer
from .errors import InvalidFrame
from .frames import SUBPROTOCOL
from .gate import Gate
from .hub import Hub
from .session import Pause, Session, SessionState
from .stall import Reading, StallWatch

try:
    from websockets.speedups import apply_mask
except ImportError:  # a websockets without its C extension
    from websockets.utils import apply_mask

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
"""How long a closed connection may take to say goodbye before it is cut; docs/protocol.md names it for 4429."""
UNSENT_BYTES = 1 << 17
"""What the kernel takes of a connection beyond what the other end's TCP does. Without this limit it buffers 4 MB for each slow
reader, which answers, pings and the close frame would stand behind. No cost was measured."""
UNREAD_BYTES = 1 << 20
"""What may wait for a connection here when it asks for another pong; beyond that it is not read until it has read."""
_FORWARDING_HEADERS = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP", "Via")


class _Protocol(ServerProtocol):
    """websockets' protocol with this contract's code for an oversized message."""

    def fail(self, code: CloseCode | int, reason: str = "") -> None:
        super().fail(4413 if code == CloseCode.MESSAGE_TOO_BIG else code, reason)


_DONE = Request("/", Headers())
"""Stands for the handshake's request once it was read: ten thousand of them would be kept for nothing."""


class HubConnection(ServerConnection):
    """One WebSocket connection; the `Connection` of its session."""

    __slots__ = (
        "_early", "_fragments", "_gate", "_has_failed", "_header", "_holds", "_hub", "_is_heard", "_is_let_in", "_is_split", "_is_text",
        "_limits", "_owed", "_session", "_stall", "_timers", "_unread", "_written", "peer",
    )  # fmt: skip

    def __init__(
        self, protocol: ServerProtocol, server: Server, *, hub: Hub, limits: Limits, gate: Gate, **options: Any
    ) -> None:
        checked = _Protocol(
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            max_size=limits.max_frame_bytes,
            logger=logging.getLogger("websockets.server"),
        )
        super().__init__(checked, server, **options)
        self.peer = Peer()
        self._hub = hub
        self._limits = limits
        self._session: Session | None = None
        self._gate = gate
        self._is_let_in = False
        self._fragments: bytearray | None = None
        """A message that arrives in pieces; None between two messages."""
        self._is_text = True
        self._is_split = False
        self._header = b""
        self._owed = 0
        self._has_failed = False
        self._holds: frozenset[str] = frozenset()
        """Why nothing is read: the hub wants nothing for now, or pongs wait for the other end to read."""
        self._early: list[Frame] = []
        """Frames that were parsed and must wait: for the session, or until something is read again."""
        self._unread = b""
        """What was received when reading was suspended, from the next frame on."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._stall = StallWatch(limits.stall_timeout_ms / 1000)
        self._written = 0
        self._is_heard = True

    # --- Connection, for the hub

    @property
    def is_paused(self) -> bool:
        return self.paused

    def write(self, payloads: list[bytes]) -> None:
        if self.protocol.state is not WireState.OPEN:
            return
        parts: list[bytes] = []
        for payload in payloads:
            size = len(payload)
            if size < 126:
                parts.append(b"\x81%c" % size)
            elif size < 65536:
                parts.append(struct.pack("!BBH", 0x81, 126, size))
            else:
                parts.append(struct.pack("!BBQ", 0x81, 127, size))
            parts.append(payload)
        data = b"".join(parts)
        self._written += len(data)
        self.transport.write(data)
        self._watch_stall()

    def end(self, code: int, reason: str) -> None:
        """Write a close frame, and cut the connection if the other end does not answer it in time."""
        if self.protocol.state is WireState.OPEN:
            self.protocol.send_close(code, reason.encode()[:120].decode(errors="ignore"))
            self._flush_protocol()
        self._holds = frozenset()
        self._resume("hub")  # the other end's close frame has to be seen, also where reading was suspended

    def pause_reading(self) -> None:
        self._pause("hub")

    def resume_reading(self) -> None:
        self._resume("hub")

    def _pause(self, why: str) -> None:
        self._holds |= {why}
        self.transport.pause_reading()

    def _resume(self, why: str) -> None:
        self._holds -= {why}
        if self._holds or self.transport.is_closing():
            return
        self.transport.resume_reading()
        self._is_heard = True  # what it said meanwhile is yet to come in
        if self._early or self._unread:
            self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Take what was received before reading was suspended."""
        early, self._early = self._early, []
        for frame in early:
            self.process_event(frame)
        if self._unread and not self._holds:
            data, self._unread = self._unread, b""
            self.data_received(data)

    # --- websockets' callbacks

    def data_received(self, data: bytes) -> None:
        """Take whole, unfragmented text frames here; everything else goes to the library's parser, frame by frame.

        The parser is a generator with five steps a frame: half of what a bare relay costs. It always stands between two frames
        when bytes are taken past it: of a frame that arrives in pieces it gets them all (``_owed``); only a header in pieces, at
        most 13 bytes, waits here.
        """
        if self._unread or (self._early and self._session is not None):
            self._unread += data
            self._go_on()
            return
        if self._session is None or not self._is_split:
            # An honest client waits for the answer to its handshake: then the parser's buffer is empty when the session opens.
            self._is_split = self._session is None and data.endswith(b"\r\n\r\n")
            super().data_received(data)
            return
        if self._owed:
            super().data_received(data[: self._owed])
            data, self._owed = data[self._owed :], max(0, self._owed - len(data))
        elif self._header:
            data, self._header = self._header + data, b""
        position, size = 0, len(data)
        while position < size and self.protocol.state is WireState.OPEN:
            if self._holds:
                self._unread = data[position:]
                return
            start, length = _read_header(data, position)
            if start > size:
                self._header = data[position:]
                return
            end = start + length
            if (
                data[position] == 0x81
                and data[position + 1] & 0x80  # masked; the parser refuses what is not
                and end <= size
                and self._fragments is None
                and length <= self._limits.max_frame_bytes
            ):
                self._is_heard = True
                self._take_text(apply_mask(data[start:end], data[start - 4 : start]))
            else:
                super().data_received(data[position:end])
                self._owed = max(0, end - size)
            position = end
        if position < size:
            super().data_received(data[position:])  # the end of a closing handshake

    def process_event(self, event: Any) -> None:
        if self.request is None or not isinstance(event, Frame):
            super().process_event(event)
            return
        self._is_heard = True
        if event.opcode is Opcode.PONG:
            self.acknowledge_pings(bytes(event.data))
        elif event.opcode is Opcode.PING:
            if self.transport.get_write_buffer_size() > UNREAD_BYTES:
                self._pause("pongs")
        elif self._session is None or self._holds:
            self._early.append(event)
        elif event.opcode is Opcode.TEXT and event.fin:
            self._take_text(bytes(event.data))
        elif event.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            self._take_fragment(event)

    def _take_fragment(self, frame: Frame) -> None:
        if frame.opcode is not Opcode.CONT or self._fragments is None:
            self._is_text = frame.opcode is Opcode.TEXT
            self._fragments = bytearray()
        self._fragments += (
            frame.data
        )  # in one piece: thousands of small ones, or of empty ones, would cost more than they hold
        if not frame.fin:
            return
        data, self._fragments = bytes(self._fragments), None
        if self._is_text:
            self._take_text(data)
        elif self._session is not None and not self._has_failed:
            self._hub.refuse(self._session, InvalidFrame("A binary frame says nothing here; send JSON in text frames."))

    def _take_text(self, data: bytes) -> None:
        if self._has_failed or self._session is None:
            return
        if not data.isascii():
            try:
                data.decode()
            except UnicodeDecodeError as error:
                self._has_failed = True
                self.protocol.fail(CloseCode.INVALID_DATA, f"invalid UTF-8 at byte {error.start}")
                self._flush_protocol()
                return
        self._hub.receive(self._session, data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_let_in:
            return
        self._gate.leave(was_waiting=self._session is None)
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        super().connection_lost(exc)
        if self._session is not None:
            self._hub.disconnect(self._session)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._is_let_in = self._gate.enter()
        if not self._is_let_in:
            cast("asyncio.Transport", transport).abort()  # uvloop's are no subclass
            return
        super().connection_made(transport)
        # any byte that the socket does not take pauses: what waits then waits in the session's queue, shared between sessions
        # (a TLS transport pauses at its limit, not beyond it)
        is_tls = transport.get_extra_info("sslcontext") is not None
        self.transport.set_write_buffer_limits(high=1 if is_tls else 0)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._resume("pongs")
        if self._session is not None:
            self._hub.resume(self._session)

    # --- life of the session

    async def run(self) -> None:
        """Open the session and wait for the connection's end."""
        self.peer = _describe_peer(self)
        self.request, self.response = _DONE, None
        self._session = self._hub.connect(self)
        self._gate.pass_on()
        self._after("hello", self._limits.hello_timeout_ms / 1000, self._check_hello)
        self._after("ping", self._limits.ping_interval_ms / 1000, self._ping)
        self._go_on()
        try:
            await self.wait_closed()
        finally:
            self._hub.disconnect(self._session)

    def _check_hello(self) -> None:
        if self._session is not None and self._session.state in (SessionState.OPENING, SessionState.JOINING):
            self._session.state = SessionState.CLOSED
            self.end(4408, "hello was awaited for hello_timeout_ms; send it first.")

    def _watch_stall(self) -> None:
        if "stall" not in self._timers:
            self._after("stall", self._stall.period_s, self._check_stall)

    def _check_stall(self) -> None:
        """Close a reader that is stalled; look again while anything waits for it, here or in the kernel."""
        self._cancel("stall")
        if self._session is None or self.protocol.state is not WireState.OPEN:
            return
        if Pause.OVERLOAD in self._session.pauses:
            self._stall.forget()  # its acknowledgements are not read, and that is not its fault
        waiting = self._waiting()
        unacked = self._session.outbox.unacked
        match self._stall.look(self.loop.time(), waiting=waiting, taken=self._written - waiting, unacked=unacked):
            case Reading.MOVING:
                self._watch_stall()
            case Reading.STALLED:
                log.info("a stalled reader is closed", extra={"session_id": self._session.session_id})
                self.end(4429, "Nothing was read for stall_timeout_ms; reconnect and resume.")
                self._hub.disconnect(self._session)  # drops its queue

    def _ping(self) -> None:
        """Ping, unless the last one was not answered and nothing else was heard: then it is over."""
        if self.protocol.state is not WireState.OPEN:
            return
        # A ping would stand behind what waits; whether this reader moves is judged by `_check_stall`. Where nothing is read, no pong is.
        if self._waiting() or self._holds:
            self._is_heard = True
            self._watch_stall()
        elif self._is_heard:
            self._is_heard = False
            self.protocol.send_ping(b"")
            self.send_data()
        else:
            self.protocol.fail(CloseCode.INTERNAL_ERROR, "the last ping was not answered")
            self._flush_protocol()
            return
        self._after("ping", self._limits.ping_interval_ms / 1000, self._ping)

    def _waiting(self) -> int:
        """How many bytes the other end's TCP has not taken: those that wait here, and in the kernel's send queue."""
        waiting: int = self.transport.get_write_buffer_size()
        try:
            (queued,) = struct.unpack(
                "i", fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
            )
        except (OSError, AttributeError, ValueError):  # closed, or a system that does not tell
            return waiting
        return waiting + int(queued)

    def _flush_protocol(self) -> None:
        try:
            self.send_data()
        except (OSError, RuntimeError) as error:  # the socket is gone: connection_lost says so
            self.set_connection_exc(error)
        self._after("close", CLOSE_TIMEOUT_S, self.transport.abort)

    def _after(self, name: str, delay_s: float, act: Callable[[], object]) -> None:
        self._cancel(name)
        self._timers[name] = self.loop.call_later(delay_s, act)

    def _cancel(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()


def _read_header(data: bytes, position: int) -> tuple[int, int]:
    """Where the payload of the frame at ``position`` starts, and its length. The start lies past the data if the header does.

    RFC 6455, 5.2. A frame that is not masked has no mask's four bytes here: its length is found all the same, and the parser
    refuses it.
    """
    if len(data) - position < 2:
        return len(data) + 1, 0
    length = data[position + 1]
    start = position + (6 if length & 0x80 else 2)
    length &= 0x7F
    if length == 126:
        start += 2
        length = int.from_bytes(data[position + 2 : position + 4], "big")
    elif length == 127:
        start += 8
        length = int.from_bytes(data[position + 2 : position + 10], "big")
    return start, length


def _describe_peer(connection: ServerConnection) -> Peer:
    headers: Headers = connection.request.headers if connection.request is not None else Headers()
    is_forwarded = any(name in headers for name in ("Origin", *_FORWARDING_HEADERS))
    is_loopback = all(_is_loopback(address) for address in (connection.local_address, connection.remote_address))
    return Peer(is_loopback=is_loopback, has_browser_headers=is_forwarded)


def _is_loopback(address: Any) -> bool:
    try:
        return ipaddress.ip_address(address[0].partition("%")[0]).is_loopback
    except (TypeError, ValueError, IndexError):
        return False
