"""`HubConnection`: one WebSocket connection, which passes bytes to the hub and back without a task switch per message.

`HubConnection` hooks into the protocol callback of the `websockets` library. A text message goes straight to
`Hub.receive`. All frames that the hub writes in one tick of the loop are joined into one write. The library still
handles the opening and closing handshakes, and the framing of all other messages. `keepalive` replaces the library's
keepalive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
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
from roundelay.network.errors import PING_UNANSWERED, InvalidFrame
from roundelay.network.frames import SUBPROTOCOL
from roundelay.network.platforms import count_unsent

from .frame_splitter import REFUSED, WAITING, FrameJoiner, FrameSplitter, MessageAssembler
from .handshakes import describe_peer, read_forwarded_address, source_of
from .hub import Hub
from .keepalive import ReaderProgress, StallWatch, Timers
from .session import PauseReason, Session, SessionState

MAX_REQUEST_BYTES = 32 * 1024
"""Maximum size of the head of a request, in bytes. A thousand pending requests need at most 32 MiB."""
MAX_METHOD_CHARS = 16


class UnsupportedMethodError(Exception):
    """Raised for a request whose method is neither GET nor HEAD."""

    def __init__(self, method: str) -> None:
        super().__init__(f"There is no {method} here; use GET or HEAD.")


class RequestHead:
    """Separates the head of a request from the bytes after it."""

    __slots__ = ("_pending", "_size", "is_complete", "method")

    def __init__(self) -> None:
        self.method = b""
        """Method of the request. Empty until the method is complete."""
        self.is_complete = False
        self._pending = b""
        """Bytes that can be interpreted only together with the next bytes: an incomplete method, or the last three
        bytes, which may begin the blank line at the end of the head."""
        self._size = 0

    @property
    def is_too_large(self) -> bool:
        return self._size > MAX_REQUEST_BYTES

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the bytes of the request for the library, and the bytes after the request.

        Raises `UnsupportedMethodError`. The caller must then close the connection.
        """
        given, data = self._pending, self._pending + data
        if not self.method:
            method = data[:MAX_METHOD_CHARS].partition(b" ")[0]
            if len(method) == len(data):  # the method is not complete yet
                self._pending = data
                return b"", b""
            # Pass a head without a valid method to the library, which answers that the request is not HTTP.
            is_method = method.isalpha() and method.isupper() and len(method) < MAX_METHOD_CHARS
            if method not in (b"GET", b"HEAD") and is_method:
                raise UnsupportedMethodError(method.decode())
            given, self.method = b"", method
            # The library accepts only GET. `HubConnection` removes the body of the answer to a HEAD.
            if method == b"HEAD":
                data = b"GET" + data[len(method) :]
        head, blank_line, rest = data.partition(b"\r\n\r\n")
        request = (head + blank_line)[len(given) :]
        self.is_complete = bool(blank_line)
        # The library already has these bytes. They are stored only to find a blank line that arrives in two parts.
        self._pending = b"" if blank_line else data[-3:]
        self._size += len(request)
        return request, rest


log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
"""Maximum duration of the closing handshake, in seconds, before the connection is cut (docs/protocol.md, 4429)."""
UNSENT_BYTES = 1 << 17
"""Maximum number of bytes in the kernel's send buffer that the peer's TCP has not accepted. Without this limit, the
kernel would buffer 4 MB per slow reader, and answers, pings and the close frame would wait behind that data.
Measurements showed no slowdown from this limit."""
UNREAD_BYTES = 1 << 20
"""Number of unsent bytes beyond which the hub stops reading from a peer that sends pings. The hub reads again after the
peer has received the waiting data."""
TURN_FRAMES, TURN_BYTES = 128, 1 << 16
"""Maximum number of frames and bytes that are read from one connection before other connections get their turn. One
read may contain ten thousand frames, and libuv reads up to 32 times in a row while data is available."""
HELLO_BYTES = 8 * 1024
"""Maximum size of a `hello` beyond the maximum size of its card. The hub buffers no larger frame of an unknown peer."""
_joiner = FrameJoiner()
_OPEN = WireState.OPEN
"""Module-level name of the enum member. The hot path uses this name, because looking up a member in its enum costs as
much as a function call."""
_DONE = Request("/", Headers())
"""Empty request that replaces the real request after the hub has read it. Without the replacement, ten thousand idle
connections would keep their requests in memory."""


class _Protocol(ServerProtocol):
    """The protocol of the `websockets` library, except for the close code of an oversized message, which Roundelay's
    protocol defines."""

    def fail(self, code: CloseCode | int, reason: str = "") -> None:
        super().fail(4413 if code == CloseCode.MESSAGE_TOO_BIG else code, reason)


class HubConnection(ServerConnection):
    """One WebSocket connection: the `Connection` of its session, and a `PendingConnection` until its welcome."""

    __slots__ = [
        "_accepted",
        "_behind_proxy",
        "_handshakes",
        "_has_heard",
        "_holds",
        "_limits",
        "_message",
        "_request_head",
        "hub",
        "is_head",
    ]
    __slots__ += ["_session", "_splitter", "_stall_watch", "_timers", "_written", "peer", "source"]

    def __init__(
        self, server: Server, *, accepted: socket.socket, address: Any, hub: Hub, limits: Limits, behind_proxy: bool
    ) -> None:
        protocol = _Protocol(
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            max_size=limits.max_frame_bytes,
            logger=logging.getLogger("websockets.server"),
        )
        # Do not use the library's keepalive. The pongs of a slow reader wait behind its long queue, so the library
        # would close the connection (see `keepalive`).
        super().__init__(protocol, server, ping_interval=None, close_timeout=CLOSE_TIMEOUT_S)
        self.peer = Peer()
        self.source = source_of(address)
        self._behind_proxy = behind_proxy
        self._accepted: socket.socket | None = accepted
        """The accepted socket. None once the TLS handshake is complete and the socket has a transport."""
        self.hub = hub
        """The hub that serves the session. The server may replace this hub until the session is opened."""
        self._handshakes = hub.handshakes
        self._limits = limits
        self._splitter = FrameSplitter(min(limits.max_frame_bytes, limits.max_card_bytes + HELLO_BYTES))
        """Splits received bytes into frames. Until the participant is known, no frame may be larger than a `hello`."""
        self._session: Session | None = None
        self._request_head: RequestHead | None = RequestHead()
        """The part of the HTTP request that has arrived. None after the request is complete, when frames follow."""
        self.is_head = False
        """Whether the request is a HEAD, which `RequestHead` turns into a GET for the library."""
        self._message = MessageAssembler()
        self._holds = frozenset({"session"})
        """Reasons for not reading frames: the session does not exist yet (``session``), the hub has paused the session
        (``hub``), pongs wait until the peer reads (``pongs``), or other connections have their turn (``turn``)."""
        self._timers = Timers(self.loop)
        self._stall_watch = StallWatch(limits.stall_timeout_ms / 1000)
        self._written = 0
        self._has_heard = True
        """Whether any data has arrived from the peer since the last ping."""

    # --- methods of `Connection`, which the hub calls

    @property
    def is_paused(self) -> bool:
        return self.paused

    def write(self, payloads: list[bytes]) -> None:
        if self.protocol.state is not _OPEN:
            return
        for data in _joiner.join(payloads):
            self._written += len(data)
            self.transport.write(data)
        self._start_stall_watch()

    def end(self, code: int, reason: str) -> None:
        """Send a close frame. If the peer does not answer in time, abort the connection."""
        if self.protocol.state is _OPEN:
            # A close reason has at most 123 bytes (RFC 6455, 5.5).
            self.protocol.send_close(code, reason.encode()[:120].decode(errors="ignore"))
            self._flush_protocol()
        self._holds = frozenset()
        self.resume_reading()  # the peer's close frame must be read, even if reading was paused
        if self._session is not None and self._session.origin is None:
            # The hub refused a session that it had already admitted, so the handshake limiter must count this
            # connection again.
            self._handshakes.add(self)

    def admit(self) -> None:
        self._handshakes.remove(self)
        # Raise the frame limit only now: an unknown peer must not make the hub buffer a large frame.
        self._splitter.max_bytes = self._limits.max_frame_bytes

    def pause_reading(self, reason: str = "hub") -> None:
        self._holds |= {reason}
        self.transport.pause_reading()

    def resume_reading(self, reason: str = "hub") -> None:
        self._holds -= {reason}
        if self._holds or self.transport.is_closing():
            return
        self._has_heard = True  # data that arrived during the pause, possibly a pong, has not been read yet
        if self._splitter.state is WAITING:
            self.loop.call_soon(self._read_on)
        else:
            self.transport.resume_reading()

    # --- received bytes

    def data_received(self, data: bytes) -> None:
        """Read frames for one turn. Whole text messages go to the hub, and everything else goes to the library."""
        if self._request_head is not None:
            data = self._read_request(self._request_head, data)
        splitter, protocol = self._splitter, self.protocol
        splitter.feed(data)
        frames_left = TURN_FRAMES
        # Handling a frame may pause or end the connection, so check both again before each frame.
        while not self._holds and protocol.state is _OPEN and (frame := splitter.next_frame()) is not None:
            frames_left -= 1
            if isinstance(frame, bytes):
                self._has_heard = True
                self._receive_text(frame)
            else:
                super().data_received(frame.data)
            if splitter.state is not WAITING or not frames_left or splitter.offset > TURN_BYTES:
                break
        if protocol.state is not _OPEN:
            if self._session is not None or protocol.eof_sent:
                # This is the end of a closing handshake, or the body of a refused request.
                super().data_received(splitter.take_rest())
        elif splitter.state is REFUSED:
            self._refuse_size()
        elif (splitter.state is WAITING or len(data) > TURN_BYTES) and not self._holds:
            # Let every other connection with data be read before this one continues.
            self.pause_reading("turn")
            self.loop.call_soon(self.resume_reading, "turn")

    def _read_on(self) -> None:
        """Handle the data that was received while reading was paused, and only then read more. If the hub read more
        first, unhandled data would accumulate in memory."""
        # After the end of the stream, the peer waits for no answer.
        if not self._holds and not self.protocol.reader.eof:
            self.data_received(b"")
        if not self._holds and not self.transport.is_closing():
            self.transport.resume_reading()

    def _read_request(self, head: RequestHead, data: bytes) -> bytes:
        """Pass the bytes of the request to the library. Return the bytes that follow the request."""
        if "close" in self._timers:  # the bytes are the body of a request that was already refused
            return b""
        try:
            request, rest = head.feed(data)
        except UnsupportedMethodError as error:
            response = self.protocol.reject(HTTPStatus.METHOD_NOT_ALLOWED, f"{error}\n")
            response.headers["Allow"] = "GET, HEAD"
            self.transport.write(response.serialize())
            if self.transport.can_write_eof():
                # Do not close the socket: with an unread body, the kernel would reset the connection and the answer
                # would be lost.
                self.transport.write_eof()
            self._timers.start("close", CLOSE_TIMEOUT_S, self.transport.abort)
            return b""
        self.is_head = head.method == b"HEAD"
        if head.is_complete:
            self._request_head = None
        if request:
            super().data_received(request)
        if self.request is None and head.is_too_large:
            self.cut()
        return rest

    def process_event(self, event: Any) -> None:
        """Handle an event that the library parsed: the request, or a frame that is not a whole text message."""
        if not isinstance(event, Frame):
            super().process_event(event)
            return
        self._has_heard = True
        if event.opcode is Opcode.PONG:
            self.acknowledge_pings(bytes(event.data))
        elif event.opcode is Opcode.PING:
            if self.transport.get_write_buffer_size() > UNREAD_BYTES:
                # Stop reading from a peer that sends many pings and does not read the pongs.
                self.pause_reading("pongs")
        elif event.opcode is Opcode.TEXT and event.fin:
            self._receive_text(bytes(event.data))
        elif event.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            self._receive_fragment(event)

    def _receive_fragment(self, frame: Frame) -> None:
        message = self._message
        message.add(frame.data, is_start=frame.opcode is not Opcode.CONT, is_text=frame.opcode is Opcode.TEXT)
        # The splitter checks each frame alone. Without this sum, fragments could form a message of any size.
        if message.size > self._splitter.max_bytes:
            self._refuse_size()
        elif frame.fin:
            data = message.take()
            if message.is_text:
                self._receive_text(data)
            elif self._session is not None:
                self.hub.refuse(
                    self._session, InvalidFrame("A binary frame says nothing here; send JSON in text frames.")
                )

    def _receive_text(self, data: bytes) -> None:
        if not data.isascii():
            try:
                data.decode()
            except UnicodeDecodeError as error:
                self._fail(CloseCode.INVALID_DATA, f"invalid UTF-8 at byte {error.start}")
                return
        if self._session is not None:
            self.hub.receive(self._session, data)

    def _refuse_size(self) -> None:
        max_bytes = self._splitter.max_bytes
        is_hello = max_bytes < self._limits.max_frame_bytes
        what, limit = ("hello", f"max_card_bytes and {HELLO_BYTES}") if is_hello else ("frame", "max_frame_bytes")
        self._fail(CloseCode.MESSAGE_TOO_BIG, f"a {what} has at most {max_bytes} bytes ({limit})")

    def _fail(self, code: CloseCode, reason: str) -> None:
        """Close the connection with an error. Further data from the peer is ignored."""
        self.protocol.fail(code, reason)
        self._flush_protocol()

    # --- lifetime of the connection

    def start_handshake(self) -> None:
        """Add this connection to the pending connections, and start the timer that limits the wait for its hello."""
        self._handshakes.add(self)
        self._timers.start("hello", self._limits.hello_timeout_ms / 1000, self._check_hello)

    def read_address(self, headers: Headers) -> None:
        """Count the connection under the address of its client. Behind a proxy, the address of every connection is the
        proxy's, so read the client's address from the headers."""
        host = read_forwarded_address(headers) if self._behind_proxy else None
        if host is not None:
            self._handshakes.move(self, source_of((host,)))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Skip the library's `ServerConnection`, which would start a second handler.
        Connection.connection_made(self, transport)
        self._accepted = None
        # Pause at the first byte that the socket does not accept. Later messages then wait in the session's queue,
        # where sessions share frames. A TLS transport pauses when its limit is reached, a plain transport only when its
        # limit is exceeded.
        is_tls = transport.get_extra_info("sslcontext") is not None
        self.transport.set_write_buffer_limits(high=1 if is_tls else 0)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # Each tick is already one joined write, so Nagle's algorithm would only add a delay.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)

    async def run(self) -> None:
        """Open the session and wait until the connection ends."""
        self.peer = describe_peer(self, behind_proxy=self._behind_proxy)
        self.request, self.response = _DONE, None
        self._session = self.hub.connect(self)
        if self.hub.is_draining:  # the read replica stopped during the handshake
            self.end(4503, "This node follows no longer, or stops; reconnect.")
        # When the limit is reached, the handshake limiter evicts the connection that has made no progress for the
        # longest time. So record that this connection has just made progress.
        self._handshakes.record_progress(self)
        self._timers.start("ping", self._limits.ping_interval_ms / 1000, self._ping)
        self.resume_reading("session")
        try:
            await self.wait_closed()
        finally:
            self.close_session()

    def _check_hello(self) -> None:
        if self._session is None:
            self.cut()
        elif self._session.state is SessionState.OPENING:
            # Set the state before `end`: a hello that is read during `end` must not open the session.
            self._session.state = SessionState.CLOSED
            self.end(4408, "hello was awaited for hello_timeout_ms; send it first.")

    def evict(self) -> None:
        """End the connection at once. A client that has requested a session receives the reason, unless sending it
        would block."""
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
        """Abort the connection. Idempotent."""
        if self._accepted is None:
            self.transport.abort()
            return
        with contextlib.suppress(OSError):  # already closed
            # The event loop owns the socket, so do not close the socket here. The loop notices the shutdown.
            self._accepted.shutdown(socket.SHUT_RDWR)

    def close_session(self) -> None:
        """Remove the session of a connection that has ended. Idempotent."""
        self._handshakes.remove(self)
        self._timers.cancel_all()
        if self._session is not None:
            self.hub.disconnect(self._session)
            self._session = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.close_session()
        # Break reference cycles. Without this step, the garbage collector would pause the whole process for a long time
        # after thousands of connections have ended.
        self.protocol.parser.close()
        # The traceback of an error keeps its stack frames alive, so drop the errors too.
        self.protocol.parser_exc = self.protocol.handshake_exc = self.connection_exc = None

    def resume_writing(self) -> None:
        super().resume_writing()
        self.resume_reading("pongs")
        if self._session is not None:
            self.hub.resume(self._session)

    def _flush_protocol(self) -> None:
        try:
            self.send_data()
        except (OSError, RuntimeError) as error:  # the socket is closed; `connection_lost` follows
            self.set_connection_exc(error)
        self._timers.start("close", CLOSE_TIMEOUT_S, self.transport.abort)

    # --- keepalive

    def _start_stall_watch(self) -> None:
        if "stall" not in self._timers:
            self._timers.start("stall", self._stall_watch.period_s, self._check_stall)

    def _check_stall(self) -> None:
        """Close the connection of a stalled reader. Otherwise schedule the next check while data still waits for the
        reader, in this process or in the kernel."""
        self._timers.cancel("stall")
        session = self._session
        if session is None or self.protocol.state is not _OPEN:
            return
        if PauseReason.OVERLOAD in session.pauses or PauseReason.RATE in session.pauses:
            # The hub does not read acknowledgements during these pauses, so the reader cannot show progress.
            self._stall_watch.reset()
        waiting = _count_waiting(self.transport)
        # Count the bytes that have left the kernel. The bytes that the hub wrote prove nothing: the kernel buffers data
        # even for a peer that reads nothing.
        taken, unacked = self._written - waiting, session.outbox.unacked
        match self._stall_watch.check(self.loop.time(), waiting=waiting, taken=taken, unacked=unacked):
            case ReaderProgress.MOVING:
                self._start_stall_watch()
            case ReaderProgress.STALLED:
                log.info("a stalled reader is closed", extra={"session_id": session.session_id})
                self.end(4429, "Nothing was read for stall_timeout_ms; reconnect and resume.")
                self.hub.disconnect(session)  # drops the session's queue
            case ReaderProgress.IDLE:
                pass

    def _ping(self) -> None:
        """Send a ping. If nothing arrived since the last ping, end the connection, because the peer is unreachable."""
        if self.protocol.state is not _OPEN:
            return
        # Do not ping now: a ping would wait behind other data, and no pong is read while reading is paused.
        # `_check_stall` checks such a reader instead.
        if _count_waiting(self.transport) or self._holds:
            self._has_heard = True
            self._start_stall_watch()
        elif self._has_heard:
            self._has_heard = False
            self.protocol.send_ping(b"")
            self.send_data()
        else:
            self._fail(CloseCode.INTERNAL_ERROR, PING_UNANSWERED)
            return
        self._timers.start("ping", self._limits.ping_interval_ms / 1000, self._ping)


def _count_waiting(transport: asyncio.Transport) -> int:
    """Return the number of bytes that wait for the peer's TCP, in this process and in the kernel's send queue."""
    return int(transport.get_write_buffer_size()) + count_unsent(transport.get_extra_info("socket"))
