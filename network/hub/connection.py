"""One WebSocket connection: from bytes to the hub and back, without a task switch per message.

`HubConnection` hooks into websockets' protocol callback: a text message goes straight to `Hub.receive`, and what the
hub writes in one tick leaves as one joined write. The library keeps the handshake, framing, and closing. Keepalive is
our own, since the library's would end a slow client, whose pongs stand behind a long queue; `stall` tells it from one
that does not read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from websockets.asyncio.connection import Connection
from websockets.asyncio.server import Server, ServerConnection
from websockets.datastructures import Headers
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State as WireState
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from roundelay.network.config import Limits
from roundelay.network.core.entries import Peer
from roundelay.network.errors import InvalidFrame
from roundelay.network.frames import SUBPROTOCOL
from roundelay.network.platforms import count_unsent

from .frame_splitter import REFUSED, WAITING, FrameJoiner, FrameSplitter
from .handshakes import HandshakeLimiter, describe_peer, read_forwarded_address, source_of
from .hub import Hub
from .session import PauseReason, Session, SessionState
from .stall import Look, StallWatch

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
"""How long a closed connection may take to say goodbye before it is cut; docs/protocol.md names it for 4429."""
UNSENT_BYTES = 1 << 17
"""What the kernel takes of a connection beyond what the other end's TCP does. Without this limit it buffers 4 MB for
each slow reader, which answers, pings and the close frame would stand behind. No cost was measured."""
UNREAD_BYTES = 1 << 20
"""What may wait for a connection here when it asks for another pong; beyond that it is not read until it has read."""
MAX_REQUEST_BYTES = 32 * 1024
"""What a request may hold before it is complete; of a thousand at once that is 32 MiB."""
TURN_FRAMES, TURN_BYTES = 128, 1 << 16
"""What is taken of one connection before every other one has its turn. What is read at once may hold ten thousand
frames, and libuv reads up to 32 times at once while there is something to read."""
HELLO_BYTES = 8 * 1024
"""What a `hello` may have beside its card: who has not said who it is makes the hub keep no more than that."""
MAX_METHOD = 16
_joiner = FrameJoiner()
_OPEN = WireState.OPEN
"""Asked for each message; to look it up in its enum costs as much as a call."""


class _Protocol(ServerProtocol):
    """websockets' protocol with this contract's code for an oversized message."""

    def fail(self, code: CloseCode | int, reason: str = "") -> None:
        super().fail(4413 if code == CloseCode.MESSAGE_TOO_BIG else code, reason)


_DONE = Request("/", Headers())
"""Stands for the handshake's request once it was read: ten thousand of them would be kept for nothing."""


class HubConnection(ServerConnection):
    """One WebSocket connection; the `Connection` of its session."""

    __slots__ = [
        "_accepted",
        "_behind_proxy",
        "_fragments",
        "_gate",
        "_holds",
        "_hub",
        "_is_heard",
        "_is_text",
        "_limits",
    ]
    __slots__ += [
        "_method",
        "_request",
        "_requested",
        "_session",
        "_splitter",
        "_stall",
        "_timers",
        "_written",
        "crowd",
        "peer",
    ]

    def __init__(
        self,
        server: Server,
        *,
        accepted: socket.socket,
        address: Any,
        hub: Hub,
        limits: Limits,
        gate: HandshakeLimiter,
        behind_proxy: bool,
    ) -> None:
        checked = _Protocol(
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            max_size=limits.max_frame_bytes,
            logger=logging.getLogger("websockets.server"),
        )
        super().__init__(checked, server, ping_interval=None, close_timeout=CLOSE_TIMEOUT_S)
        self.peer = Peer()
        self.source = source_of(address)
        self._behind_proxy = behind_proxy
        self._accepted: socket.socket | None = accepted
        """The socket until it has a transport: as long as TLS has not come about."""
        self._hub = hub
        self._limits = limits
        self._splitter = FrameSplitter(min(limits.max_frame_bytes, limits.max_card_bytes + HELLO_BYTES))
        """Takes no frame larger than a `hello` until the participant is known."""
        self._session: Session | None = None
        self._gate = gate
        self._method = b""
        """The request's, once it is known."""
        self._request: bytes | None = b""
        """What came of the request before its method was known, then its last bytes; None once it is whole: frames
        follow."""
        self._requested = 0
        self._fragments: bytearray | None = None
        """A message that arrives in pieces; None between two messages."""
        self._is_text = True
        self._holds = frozenset({"session"})
        """Why no frame is taken: there is no session yet, or the hub wants nothing for now, pongs wait for the other
        end to read, or others have their turn."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._stall = StallWatch(limits.stall_timeout_ms / 1000)
        self._written = 0
        self._is_heard = True

    def choose_hub(self, hub: Hub) -> None:
        """This hub's session it is to be, if any."""
        self._hub = hub

    # --- Connection, for the hub

    @property
    def is_paused(self) -> bool:
        return self.paused

    def write(self, payloads: list[bytes]) -> None:
        if self.protocol.state is not _OPEN:
            return
        for data in _joiner.join(payloads):
            self._written += len(data)
            self.transport.write(data)
        self._watch_stall()

    def end(self, code: int, reason: str) -> None:
        """Write a close frame, and cut the connection if the other end does not answer it in time."""
        if self.protocol.state is _OPEN:
            self.protocol.send_close(code, reason.encode()[:120].decode(errors="ignore"))
            self._flush_protocol()
        self._holds = frozenset()
        self.resume_reading()  # the other end's close frame has to be seen, also where reading was suspended
        if self._session is not None and self._session.origin is None:
            self._gate.add(self)  # known, and refused for all that

    def admit(self) -> None:
        self._gate.remove(self)
        self._splitter.max_bytes = self._limits.max_frame_bytes

    def pause_reading(self, why: str = "hub") -> None:
        self._holds |= {why}
        self.transport.pause_reading()

    def resume_reading(self, why: str = "hub") -> None:
        self._holds -= {why}
        if self._holds or self.transport.is_closing():
            return
        self._is_heard = True  # what it said meanwhile is yet to come in
        if self._splitter.state is WAITING:
            self.loop.call_soon(self._go_on)
        else:
            self.transport.resume_reading()

    # --- bytes come in

    @property
    def is_head(self) -> bool:
        """Whether the request is a HEAD, which the library knows as a GET."""
        return self._method == b"HEAD"

    def data_received(self, data: bytes) -> None:
        """The request goes to the library, what follows it to the splitter: this connection has its turn, and then the
        others."""
        if self._request is not None:
            data = self._take_request(data)
        splitter, protocol = self._splitter, self.protocol
        splitter.feed(data)
        left = TURN_FRAMES
        while not self._holds and protocol.state is _OPEN and (frame := splitter.next_frame()) is not None:
            left -= 1
            if isinstance(frame, bytes):
                self._is_heard = True
                self._take_text(frame)
            else:
                super().data_received(frame.data)
            if splitter.state is not WAITING or not left or splitter.offset > TURN_BYTES:
                break
        if protocol.state is not _OPEN:
            if self._session is not None or protocol.eof_sent:
                super().data_received(splitter.take_rest())  # the end of a closing handshake, or of a refused request
        elif splitter.state is REFUSED:
            self._refuse_size()
        elif (splitter.state is WAITING or len(data) > TURN_BYTES) and not self._holds:
            self._wait_for_turn()

    def _wait_for_turn(self) -> None:
        """Read on when every connection that has something to say was read."""
        self.pause_reading("turn")
        self.loop.call_soon(self.resume_reading, "turn")

    def _go_on(self) -> None:
        """Take what was received while nothing was read; only then is more read, or it would pile up here."""
        if not self._holds and not self.protocol.reader.eof:  # at its end nobody waits for what would be answered
            self.data_received(b"")
        if not self._holds and not self.transport.is_closing():
            self.transport.resume_reading()

    def _refuse_size(self) -> None:
        most = self._splitter.max_bytes
        is_hello = most < self._limits.max_frame_bytes
        what, limit = ("hello", f"max_card_bytes and {HELLO_BYTES}") if is_hello else ("frame", "max_frame_bytes")
        self._fail(CloseCode.MESSAGE_TOO_BIG, f"a {what} has at most {most} bytes ({limit})")

    def _fail(self, code: CloseCode, reason: str) -> None:
        """End the connection; what it sends is not looked at any more."""
        self.protocol.fail(code, reason)
        self._flush_protocol()

    def _take_request(self, data: bytes) -> bytes:
        """Hand the request to the library as it comes; gives what follows it.

        The library takes GET alone: HEAD becomes one, others are answered here.
        """
        if "close" in self._timers:  # the body of a request that was refused
            return b""
        assert self._request is not None
        known, data = self._request, self._request + data
        if not self._method:
            method = data[:MAX_METHOD].partition(b" ")[0]
            if len(method) == len(data):  # to be continued
                self._request = data
                return b""
            if method not in (b"GET", b"HEAD") and method.isalpha() and method.isupper() and len(method) < MAX_METHOD:
                self._refuse_method(method.decode())
                return b""
            known, self._method = b"", method
            data = b"GET" + data[len(method) :] if self.is_head else data
        before, blank_line, after = data.partition(b"\r\n\r\n")
        request = (before + blank_line)[len(known) :]
        self._request = None if blank_line else data[-3:]
        self._requested += len(request)
        super().data_received(request)
        if self.request is None and self._requested > MAX_REQUEST_BYTES:
            self.cut()
        return after

    def _refuse_method(self, method: str) -> None:
        answer = self.protocol.reject(HTTPStatus.METHOD_NOT_ALLOWED, f"There is no {method} here; use GET or HEAD.\n")
        answer.headers["Allow"] = "GET, HEAD"
        self.transport.write(answer.serialize())
        if self.transport.can_write_eof():
            self.transport.write_eof()  # not closed: with its body unread the answer would be lost on the way
        self._after("close", CLOSE_TIMEOUT_S, self.transport.abort)

    def process_event(self, event: Any) -> None:
        if not isinstance(event, Frame):
            super().process_event(event)
            return
        self._is_heard = True
        if event.opcode is Opcode.PONG:
            self.acknowledge_pings(bytes(event.data))
        elif event.opcode is Opcode.PING:
            if self.transport.get_write_buffer_size() > UNREAD_BYTES:
                self.pause_reading("pongs")
        elif event.opcode is Opcode.TEXT and event.fin:
            self._take_text(bytes(event.data))
        elif event.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            self._take_fragment(event)

    def _take_fragment(self, frame: Frame) -> None:
        if frame.opcode is not Opcode.CONT or self._fragments is None:
            self._is_text = frame.opcode is Opcode.TEXT
            self._fragments = bytearray()
        # in one piece: thousands of small ones, or of empty ones, would cost more than they hold
        self._fragments += frame.data
        if len(self._fragments) > self._splitter.max_bytes:
            self._refuse_size()
            return
        if not frame.fin:
            return
        data, self._fragments = bytes(self._fragments), None
        if self._is_text:
            self._take_text(data)
        elif self._session is not None:
            self._hub.refuse(self._session, InvalidFrame("A binary frame says nothing here; send JSON in text frames."))

    def _take_text(self, data: bytes) -> None:
        if not data.isascii():
            try:
                data.decode()
            except UnicodeDecodeError as error:
                self._fail(CloseCode.INVALID_DATA, f"invalid UTF-8 at byte {error.start}")
                return
        if self._session is not None:
            self._hub.receive(self._session, data)

    def arrive(self) -> None:
        """The connection was accepted: until it has said hello its time runs, and its place may go to others."""
        self._gate.add(self)
        self._after("hello", self._limits.hello_timeout_ms / 1000, self._check_hello)

    def read_address(self, headers: Headers) -> None:
        """The request has come. Behind a proxy everybody has the proxy's address, and whose connection it is
        stands there."""
        host = read_forwarded_address(headers) if self._behind_proxy else None
        if host is not None:
            self._gate.move(self, source_of((host,)))

    def close_session(self) -> None:
        """The connection is gone. Idempotent."""
        self._gate.remove(self)
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if self._session is not None:
            self._hub.disconnect(self._session)
            self._session = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.close_session()
        # What refers to itself is found by the garbage collector alone, which stops everything for long when
        # thousands have come and gone.
        self.protocol.parser.close()
        # An error's traceback holds the frames that it came through.
        self.protocol.parser_exc = self.protocol.handshake_exc = self.connection_exc = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        Connection.connection_made(self, transport)  # not the library's server, which would run it: ours does
        self._accepted = None
        # any byte that the socket does not take pauses: what waits then waits in the session's queue, shared between
        # sessions (a TLS transport pauses at its limit, not beyond it)
        is_tls = transport.get_extra_info("sslcontext") is not None
        self.transport.set_write_buffer_limits(high=1 if is_tls else 0)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)

    def evict(self) -> None:
        """End the connection at once: who has asked for a session is told, if that takes no time."""
        is_plain = self._accepted is None and self.transport.get_extra_info("sslcontext") is None
        if self._session is None or not is_plain or self.transport.get_write_buffer_size():
            self.cut()
            return
        if self.protocol.state is _OPEN:
            self.protocol.send_close(
                4408, "Others came while hello was awaited, and max_unauthenticated is reached; try again."
            )
            self.send_data()
        self.transport.close()

    def cut(self) -> None:
        if self._accepted is None:
            self.transport.abort()
            return
        with contextlib.suppress(OSError):  # it is gone
            self._accepted.shutdown(socket.SHUT_RDWR)  # the loop has it, and finds its end

    def resume_writing(self) -> None:
        super().resume_writing()
        self.resume_reading("pongs")
        if self._session is not None:
            self._hub.resume(self._session)

    # --- life of the session

    async def run(self) -> None:
        """Open the session and wait for the connection's end."""
        self.peer = describe_peer(self, behind_proxy=self._behind_proxy)
        self.request, self.response = _DONE, None
        self._session = self._hub.connect(self)
        if self._hub.is_draining:  # the one that readers were let in to has ended while they shook hands
            self.end(4503, "This node follows no longer, or stops; reconnect.")
        self._gate.record_progress(self)
        self._after("ping", self._limits.ping_interval_ms / 1000, self._ping)
        self.resume_reading("session")
        try:
            await self.wait_closed()
        finally:
            self.close_session()

    def _check_hello(self) -> None:
        if self._session is None:
            self.cut()
        elif self._session.state is SessionState.OPENING:
            self._session.state = SessionState.CLOSED
            self.end(4408, "hello was awaited for hello_timeout_ms; send it first.")

    def _watch_stall(self) -> None:
        if "stall" not in self._timers:
            self._after("stall", self._stall.period_s, self._check_stall)

    def _check_stall(self) -> None:
        """Close a reader that is stalled; look again while anything waits for it, here or in the kernel."""
        self._cancel("stall")
        if self._session is None or self.protocol.state is not _OPEN:
            return
        if PauseReason.OVERLOAD in self._session.pauses or PauseReason.RATE in self._session.pauses:
            self._stall.forget()  # its acknowledgements are not read, and that is not its fault
        waiting = self._waiting()
        unacked = self._session.outbox.unacked
        match self._stall.look(self.loop.time(), waiting=waiting, taken=self._written - waiting, unacked=unacked):
            case Look.MOVING:
                self._watch_stall()
            case Look.STALLED:
                log.info("a stalled reader is closed", extra={"session_id": self._session.session_id})
                self.end(4429, "Nothing was read for stall_timeout_ms; reconnect and resume.")
                self._hub.disconnect(self._session)  # drops its queue

    def _ping(self) -> None:
        """Ping, unless the last one was not answered and nothing else was heard: then it is over."""
        if self.protocol.state is not _OPEN:
            return
        # A ping would stand behind what waits; whether this reader moves is judged by `_check_stall`. Where nothing
        # is read, no pong is.
        if self._waiting() or self._holds:
            self._is_heard = True
            self._watch_stall()
        elif self._is_heard:
            self._is_heard = False
            self.protocol.send_ping(b"")
            self.send_data()
        else:
            self._fail(CloseCode.INTERNAL_ERROR, "the last ping was not answered")
            return
        self._after("ping", self._limits.ping_interval_ms / 1000, self._ping)

    def _waiting(self) -> int:
        """How many bytes the other end's TCP has not taken: those that wait here, and in the kernel's send queue."""
        return int(self.transport.get_write_buffer_size()) + count_unsent(self.transport.get_extra_info("socket"))

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
