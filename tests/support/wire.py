"""A raw client of the wire protocol, for tests that judge a hub by its frames.

The client is written from `docs/protocol.md` alone with plain `websockets` and `json`. The project's own client is
not used, so that mistakes which hub and client share become visible. This client never retries, acks or reconnects on
its own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import socket as sockets
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

TIMEOUT_S = 20.0
SUBPROTOCOL = "roundelay.v1"

_ANSWERS = frozenset({"stored", "batched", "error", "result"})
_ANSWERED_IDS = ("message_id", "call_id", "record_id", "batch_id")
_numbers = itertools.count(1)


class Frame(dict[str, Any]):
    """One decoded frame of the hub. `raw` is its original text."""

    raw: str

    @classmethod
    def decode(cls, raw: str) -> Self:
        frame = cls(json.loads(raw))
        frame.raw = raw
        return frame


def make_token() -> str:
    """Return a new token as a client makes it: 32 random bytes in base64url."""
    return secrets.token_urlsafe(32)


def new_id(prefix: str = "id") -> str:
    """Return an ID that is unique in this test run."""
    return f"{prefix}-{next(_numbers)}"


def hello_frame(agent_id: str, *, kind: str = "agent", token: str | None = None, **fields: Any) -> dict[str, Any]:
    frame: dict[str, Any] = {"type": "hello", "protocol": 1, "agent_id": agent_id, "kind": kind, **fields}
    if token is not None:
        frame["token"] = token
    return frame


class WireSession:
    """One connection, before or after its `hello`. `unread` holds the frames that the test has not read yet, in
    order.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.unread: list[Frame] = []
        self.welcome = Frame()

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        origin: str | None = None,
        headers: Mapping[str, str] | None = None,
        max_queue: int | None = None,
        receive_buffer_bytes: int | None = None,
    ) -> Self:
        """Open a connection without a `hello`. Small values of `max_queue` and `receive_buffer_bytes` simulate a slow
        reader.
        """
        sock = None
        if receive_buffer_bytes is not None:
            sock = await _connect_with_small_buffer(url, receive_buffer_bytes)
        extra = dict(headers or {})
        if origin is not None:
            extra["Origin"] = origin
        socket = await connect(
            url,
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            compression=None,
            proxy=None,
            max_size=None,
            max_queue=max_queue,
            additional_headers=extra,
            ping_interval=None,
            close_timeout=1,
            sock=sock,
        )
        return cls(socket)

    # -- out

    async def send_frame(self, frame: Mapping[str, Any]) -> None:
        await self.socket.send(json.dumps(frame))

    async def send_raw(self, raw: str | bytes | list[bytes], *, text: bool = True) -> None:
        """Send exactly these bytes as one text message, or as a binary one with `text=False`. A list is sent as
        fragments.
        """
        data: Any = raw
        if isinstance(raw, str):
            data = raw.encode("utf-8", "surrogatepass")
        await self.socket.send(data, text=text)

    async def hello(self, agent_id: str, *, kind: str = "agent", token: str | None = None, **fields: Any) -> Frame:
        """Send `hello` and return `welcome`. Any other answer fails the test."""
        await self.send_frame(hello_frame(agent_id, kind=kind, token=token, **fields))
        first = await self.next_frame()
        assert first["type"] == "welcome", first
        self.welcome = first
        return first

    async def submit(self, to: str, content: Any, **fields: Any) -> Frame:
        """Send a message and return its answer, which may be an error."""
        message_id = fields.pop("message_id", None) or new_id("m")
        await self.send_frame({"type": "send", "message_id": message_id, "to": to, "content": content, **fields})
        return await self.answer(message_id)

    async def send(self, to: str, content: Any, **fields: Any) -> Frame:
        """Send a message and return its `stored` frame."""
        answer = await self.submit(to, content, **fields)
        assert answer["type"] == "stored", answer
        return answer

    async def refused(self, code: str, to: str, content: Any = "refused", **fields: Any) -> Frame:
        """Send a message and return its `error` frame, which must have this code."""
        return expect_error(await self.submit(to, content, **fields), code)

    async def submit_call(self, op: str, args: Mapping[str, Any] | None = None, *, call_id: str | None = None) -> Frame:
        call_id = call_id or new_id("c")
        await self.send_frame({"type": "call", "call_id": call_id, "op": op, "args": dict(args or {})})
        return await self.answer(call_id)

    async def call(self, op: str, args: Mapping[str, Any] | None = None, *, call_id: str | None = None) -> Any:
        """Call an operation and return the value of its `result`."""
        answer = await self.submit_call(op, args, call_id=call_id)
        assert answer["type"] == "result", answer
        return answer["value"]

    async def call_refused(
        self, code: str, op: str, args: Mapping[str, Any] | None = None, *, call_id: str | None = None
    ) -> Frame:
        return expect_error(await self.submit_call(op, args, call_id=call_id), code)

    async def submit_record(
        self, reaction: str, kind: str, body: Mapping[str, Any], *, record_id: str | None = None
    ) -> Frame:
        record_id = record_id or new_id("r")
        frame = {"type": "record", "record_id": record_id, "reaction": reaction, "kind": kind, "body": dict(body)}
        await self.send_frame(frame)
        return await self.answer(record_id)

    async def record(self, reaction: str, kind: str, body: Mapping[str, Any], *, record_id: str | None = None) -> Frame:
        """Write a record of a reaction and return its `stored` frame."""
        answer = await self.submit_record(reaction, kind, body, record_id=record_id)
        assert answer["type"] == "stored", answer
        return answer

    async def submit_batch(self, *frames: Mapping[str, Any], batch_id: str | None = None) -> Frame:
        """Send messages and records in one frame and return its answer, which may be an error."""
        batch_id = batch_id or new_id("b")
        await self.send_frame({"type": "batch", "batch_id": batch_id, "frames": frames})
        return await self.answer(batch_id)

    async def ack(self, seq: int, *, only: bool = False) -> None:
        await self.send_frame({"type": "ack", "seq": seq, "only": True} if only else {"type": "ack", "seq": seq})

    async def nack(self, seq: int, *, reason: str = "handler failed", retry_after_ms: int | None = 1) -> None:
        frame: dict[str, Any] = {"type": "nack", "seq": seq, "reason": reason}
        if retry_after_ms is not None:
            frame["retry_after_ms"] = retry_after_ms
        await self.send_frame(frame)

    async def settle(self) -> None:
        """Return when the hub has processed everything that this session has sent."""
        await self.call("network.info")

    # -- in

    async def next_frame(self) -> Frame:
        """Return the next frame in order of arrival."""
        if self.unread:
            return self.unread.pop(0)
        return await self._receive()

    async def expect(self, type_: str, **fields: Any) -> Frame:
        """Return the first frame of this type with these fields. The frames before it stay unread."""
        for index, frame in enumerate(self.unread):
            if _matches(frame, type_, fields):
                return self.unread.pop(index)
        while True:
            frame = await self._receive(f"{type_} {fields}")
            if _matches(frame, type_, fields):
                return frame
            self.unread.append(frame)

    async def answer(self, request_id: str) -> Frame:
        """Return the `stored`, `result` or `error` frame with this message_id, call_id or record_id."""
        for index, frame in enumerate(self.unread):
            if _answers(frame, request_id):
                return self.unread.pop(index)
        while True:
            frame = await self._receive(f"the answer to {request_id}")
            if _answers(frame, request_id):
                return frame
            self.unread.append(frame)

    async def delivery(self) -> Frame:
        """Return the next `deliver` frame."""
        return await self.expect("deliver")

    async def message(self, content: Any) -> dict[str, Any]:
        """Return the message of the next delivery, which must have this content."""
        frame = await self.delivery()
        assert frame["message"]["content"] == content, frame
        message: dict[str, Any] = frame["message"]
        return message

    async def deliveries_until(self, marker: Any) -> list[Frame]:
        """Return the deliveries before the one with the content `marker`, which is removed too."""
        before: list[Frame] = []
        while True:
            frame = await self.delivery()
            if frame["message"]["content"] == marker:
                return before
            before.append(frame)

    async def contents_until(self, marker: Any) -> list[Any]:
        return [frame["message"]["content"] for frame in await self.deliveries_until(marker)]

    async def rest(self) -> list[Frame]:
        """Return all frames until the hub closes the connection."""
        while True:
            try:
                self.unread.append(await self._next_from_socket())
            except ConnectionClosed:
                frames, self.unread = self.unread, []
                return frames

    async def closed(self) -> int:
        """Wait until the hub closes the connection, and return the close code."""
        while True:
            try:
                self.unread.append(await self._next_from_socket())
            except ConnectionClosed as error:
                return 1006 if error.rcvd is None else error.rcvd.code

    # -- end

    async def bye(self) -> None:
        """Send `bye`, and wait until the hub has closed the connection with code 1000."""
        await self.send_frame({"type": "bye"})
        assert await self.closed() == 1000

    async def drop(self) -> None:
        """Drop the connection without a close frame, as a killed process does."""
        self.socket.transport.abort()
        await self.socket.wait_closed()

    async def close(self) -> None:
        await self.socket.close()

    async def _next_from_socket(self) -> Frame:
        async with asyncio.timeout(TIMEOUT_S):
            raw = await self.socket.recv(decode=True)
        assert isinstance(raw, str)
        return Frame.decode(raw)

    async def _receive(self, wanted: str = "a frame") -> Frame:
        try:
            return await self._next_from_socket()
        except TimeoutError:
            raise AssertionError(f"no frame within {TIMEOUT_S} s while waiting for {wanted}; {self.unread=}") from None
        except ConnectionClosed as error:
            raise AssertionError(f"{error} while waiting for {wanted}; {self.unread=}") from None


def expect_error(frame: Frame, code: str) -> Frame:
    """Check an `error` frame: the fields that every error has, and the code."""
    assert frame["type"] == "error", frame
    assert frame["code"] == code, frame
    assert isinstance(frame["message"], str)
    assert frame["message"], frame
    assert set(frame) <= {"type", "code", "message", *_ANSWERED_IDS, "retry_after_ms"}, frame
    if code in ("rate_limited", "overloaded"):
        assert isinstance(frame["retry_after_ms"], int), frame
    return frame


def contents(messages: Iterable[Mapping[str, Any]]) -> list[Any]:
    return [message["content"] for message in messages]


async def get_http(url: str, path: str) -> tuple[int, str]:
    """Send a plain HTTP request to the WebSocket port. Return status and body."""
    answer = await ask_http(url, "GET", path)
    return answer.status, answer.body


class HttpAnswer(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: str


async def ask_http(
    url: str, method: str, path: str, body: bytes = b"", *, headers: Mapping[str, str] | None = None
) -> HttpAnswer:
    """Send a plain HTTP request in two parts to the WebSocket port, and return the whole answer. ``headers`` replace
    the default headers of the same name.
    """
    host, port = _host_and_port(url)
    reader, writer = await asyncio.open_connection(host, port)
    said = {"Host": f"{host}:{port}", "Connection": "close", **(headers or {})}
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in said.items())
    if body:
        head += f"Content-Length: {len(body)}\r\n"
    request = f"{head}\r\n".encode() + body
    try:
        writer.write(request[:3])
        await writer.drain()
        writer.write(request[3:])
        async with asyncio.timeout(TIMEOUT_S):
            answer = await reader.read()
    finally:
        writer.close()
    top, _, rest = answer.partition(b"\r\n\r\n")
    status, *lines = top.decode().split("\r\n")
    headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    return HttpAnswer(int(status.split()[1]), headers, rest.decode())


def _matches(frame: Frame, type_: str, fields: Mapping[str, Any]) -> bool:
    return frame["type"] == type_ and all(frame.get(name) == value for name, value in fields.items())


def _answers(frame: Frame, request_id: str) -> bool:
    return frame["type"] in _ANSWERS and any(frame.get(name) == request_id for name in _ANSWERED_IDS)


def _host_and_port(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("ws://").rstrip("/").rpartition(":")
    return host, int(port)


async def _connect_with_small_buffer(url: str, receive_buffer_bytes: int) -> sockets.socket:
    sock = sockets.socket(sockets.AF_INET, sockets.SOCK_STREAM)
    sock.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, receive_buffer_bytes)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, _host_and_port(url))
    return sock
