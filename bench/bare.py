"""A participant that says just what it is told, on a raw socket: no acknowledgements, no repeats, and it reads only when it is asked to.

Attacks are made of it, and the pair of participants that they may not harm. Built of `wire`; measures nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterable
from typing import Any

from wire import LoadError, encode_masked_frame, find_payload, make_token, open_websocket

READ_BYTES = 1 << 18
TIMEOUT_S = 60.0


class Bare:
    """One connection, welcomed. The socket blocks, for at most `TIMEOUT_S`, until `watch`."""

    def __init__(self, url: str, agent_id: str, **hello: Any) -> None:
        """Join, as an agent with the token that `make_token` gives for the id unless ``hello``, further fields of the frame, says otherwise."""
        self.agent_id = agent_id
        self.socket = open_websocket(url, None)
        self.socket.settimeout(TIMEOUT_S)
        self._tail = b""
        self._frames: list[dict[str, Any]] = []
        self._calls = 0
        self.say(
            **{
                "type": "hello",
                "protocol": 1,
                "agent_id": agent_id,
                "kind": "agent",
                "token": make_token(agent_id),
                **hello,
            }
        )
        welcome = self.hear()
        if welcome["type"] != "welcome":
            raise LoadError(f"{agent_id} was not welcomed: {welcome}")

    def say(self, **frame: Any) -> None:
        self.socket.sendall(encode_frame(frame))

    def say_all(self, frames: Iterable[dict[str, Any]]) -> None:
        """All of these frames, in one write."""
        self.socket.sendall(b"".join(map(encode_frame, frames)))

    def call(self, op: str, **args: Any) -> str:
        """Ask for an operation and do not wait; gives the call's id."""
        self._calls += 1
        call_id = f"{os.getpid():x}-{id(self):x}-{self._calls}"
        self.say(type="call", call_id=call_id, op=op, args=args)
        return call_id

    def hear(self) -> dict[str, Any]:
        """The next frame, in the order of arrival."""
        while not self._frames:
            self._frames += self.take()
        return self._frames.pop(0)

    def hear_answers(self, count: int) -> list[dict[str, Any]]:
        """The next answers, so many; whatever else comes is passed over."""
        found: list[dict[str, Any]] = []
        while len(found) < count:
            frame = self.hear()
            if frame["type"] in ("stored", "result", "error"):
                found.append(frame)
        return found

    def watch(self) -> None:
        """From here on `take` waits for nothing."""
        self.socket.setblocking(False)

    def take(self) -> list[dict[str, Any]]:
        """The frames that have arrived whole, after one read of the socket. Raises `LoadError` at the end of the connection."""
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise LoadError(f"the server closed the connection of {self.agent_id}")
        data, position = self._tail + data, 0
        frames: list[dict[str, Any]] = []
        while len(data) - position >= 2:
            start, end = find_payload(data, position)
            if end > len(data):
                break
            payload = data[start:end]
            if data[position] == 0x81:
                frames.append(json.loads(payload))
            elif data[position] == 0x89:
                self.socket.sendall(encode_masked_frame(payload, os.urandom(4), head=0x8A))
            elif data[position] == 0x88:
                raise LoadError(f"{self.agent_id} was closed: {int.from_bytes(payload[:2])} {payload[2:].decode()}")
            position = end
        self._tail = data[position:]
        return frames

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def encode_frame(frame: dict[str, Any]) -> bytes:
    """One masked text frame of the wire."""
    return encode_masked_frame(json.dumps(frame, separators=(",", ":")).encode(), os.urandom(4))
