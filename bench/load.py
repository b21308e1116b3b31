"""The load generator consists of plain clients of docs/protocol.md on raw sockets, which use much less CPU time than
any measured server.

Frames are encoded and masked before the timed section, and are sent in large slices. During the timed section, received
bytes are only split at frame boundaries. The frames are checked afterwards. Each receiver must have every sent id
exactly once, in order, and the sender must have one `stored` for each id. Otherwise the measurement fails. This module
starts no servers, prints nothing, and does not decide how much to measure.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from machine import read_machine_cpu_s
from wire import (
    LoadError,
    encode_masked_frame,
    encode_send,
    find_payload,
    leading_run,
    make_message_id,
    make_token,
    open_websocket,
)

READ_BYTES = 1 << 18
ACK_EVERY = 64
TIMEOUT_S = 120.0

# All participants share one buffer, because only one of them reads at a time. `recv` would allocate the largest
# possible answer on each call.
_read_buffer = bytearray(READ_BYTES)
_read_view = memoryview(_read_buffer)

_SEQ = re.compile(rb'"seq":(\d+)')
_MESSAGE_ID = re.compile(rb'"message_id":"([^"]*)"')


@dataclass(frozen=True)
class Throughput:
    messages: int
    receivers: int
    elapsed_s: float
    generator_cpu_s: float
    machine_cpu_s: float  # CPU seconds of all processes, including this generator and the server

    @property
    def messages_per_s(self) -> float:
        return self.messages / self.elapsed_s

    @property
    def generator_busy(self) -> float:
        """Share of one core that the load generator used."""
        return self.generator_cpu_s / self.elapsed_s


@dataclass(frozen=True)
class Latency:
    """Time from sending a message to its response in microseconds, while no other message is in flight."""

    delivered_p50_us: float
    delivered_p99_us: float
    stored_p50_us: float


class Participant:
    """A connected participant. The participant counts the frames that start with a prefix in `counted`, and keeps all
    bytes for `read_frames`.
    """

    def __init__(self, url: str, agent_id: str, *, counted: Sequence[bytes], source: str | None = None) -> None:
        """Open the connection, from the local address ``source`` unless it is None. The caller must then call
        `say_hello` and `await_welcome`.
        """
        self.agent_id = agent_id
        self.welcome: dict[str, object] = {}
        self.received = 0
        self._counted = tuple(counted)
        self._acked_at = 0
        self._whole: list[bytes] = []
        self._tail = b""
        self._last_frame = b""
        self.socket = open_websocket(url, source)

    @classmethod
    def join(cls, url: str, agent_id: str, *, counted: Sequence[bytes]) -> Participant:
        """Open a connection, and wait for the welcome."""
        participant = cls(url, agent_id, counted=counted)
        participant.say_hello()
        participant.await_welcome()
        return participant

    def say_hello(self, resume: dict[str, object] | None = None) -> None:
        hello = {
            "protocol": 1,
            "agent_id": self.agent_id,
            "kind": "agent",
            "token": make_token(self.agent_id),
            "client": "bench/1",
        }
        self.write({"type": "hello"} | hello | ({"resume": resume} if resume is not None else {}))

    def await_welcome(self) -> None:
        self.welcome = self._read_greeting()
        if self.welcome.get("type") != "welcome":
            raise LoadError(f"{self.agent_id} was not welcomed: {self.welcome}")
        self.socket.setblocking(False)

    def write(self, frame: dict[str, object]) -> None:
        """Send one small frame at once."""
        # The socket buffer always has room for these frames, because a client has at most a few unread acks in flight.
        self.socket.sendall(encode_masked_frame(json.dumps(frame, separators=(",", ":")).encode(), os.urandom(4)))

    def read(self) -> bool:
        """Read from the socket. Return whether frames arrived that are counted."""
        try:
            size = self.socket.recv_into(_read_buffer)
        except BlockingIOError:
            return False
        data = bytes(_read_view[:size])
        if not data:
            raise LoadError(f"the server closed the connection of {self.agent_id}")
        before = self.received
        self._split(self._tail + data if self._tail else data)
        return self.received > before

    def ack_if_due(self, every: int = ACK_EVERY) -> None:
        """Acknowledge all deliveries with one ack if at least ``every`` deliveries were not acknowledged yet."""
        if self.received - self._acked_at >= every:
            self.ack()

    def ack(self) -> None:
        match = _SEQ.search(self._last_frame)
        # Use the count for a relay, which forwards frames without a seq. A relay then gets as many acks as the hub.
        self.write({"type": "ack", "seq": int(match[1]) if match else self.received})
        self._acked_at = self.received

    def forget(self) -> None:
        """Drop all bytes that were read so far, and restart the count at 0."""
        self._whole.clear()
        self.received = self._acked_at = 0

    def read_frames(self) -> list[bytes]:
        """Return the payloads of all counted frames since the last call of `forget`, oldest first."""
        frames: list[bytes] = []
        for block in self._whole:
            position = 0
            while position < len(block):
                start, end = find_payload(block, position)
                if block[start : start + 24].startswith(self._counted):
                    frames.append(block[start:end])
                position = end
        return frames

    def close(self) -> None:
        self.socket.close()

    def _split(self, data: bytes) -> None:
        """Count the complete frames in `data`, and keep the rest for the next read.

        Consecutive frames usually have the same length, so a run of them can be recognized at once. The header bytes at
        every multiple of the length are compared by slices. A run of equal headers is valid by induction: each frame
        begins where the previous frame ends, and has the compared header.
        """
        position, size = 0, len(data)
        while size - position >= 2:
            payload, end = find_payload(data, position)
            if end > size or payload > size:
                break
            length = end - position
            run = 1
            if (size - position) // length > 1:
                limit = position + (size - position) // length * length
                run = min(leading_run(data[position + offset : limit : length]) for offset in range(payload - position))
            if data[position] != 0x81:
                self._take_control_frame(data[position], data[payload:end])
            elif data[payload : payload + 24].startswith(self._counted):
                self.received += run
                last = position + (run - 1) * length
                self._last_frame = data[last : last + length]
            else:
                self._take_other(data[payload:end])
                run = 1
            position += run * length
        self._whole.append(data[:position])
        self._tail = data[position:]

    def _take_control_frame(self, head: int, payload: bytes) -> None:
        if head == 0x89:
            self.socket.sendall(encode_masked_frame(payload, os.urandom(4), head=0x8A))
        elif head == 0x88:
            raise LoadError(f"{self.agent_id} was closed: {payload[:2].hex()} {payload[2:].decode(errors='replace')}")

    def _take_other(self, payload: bytes) -> None:
        if payload.startswith((b'{"type":"error"', b'{"type": "error"')):
            raise LoadError(f"{self.agent_id} was refused: {payload.decode()}")

    def _read_greeting(self) -> dict[str, object]:
        data = b""
        while True:
            chunk = self.socket.recv(READ_BYTES)
            if not chunk:
                raise LoadError(f"the server closed the connection of {self.agent_id} before welcome")
            data += chunk
            if len(data) < 2 or len(data) < find_payload(data, 0)[1]:
                continue
            start, end = find_payload(data, 0)
            self._split(data[end:])
            greeting: dict[str, object] = json.loads(data[start:end])
            return greeting


class Fleet:
    """One sender and its connected receivers, with one selector for all sockets."""

    def __init__(
        self,
        url: str,
        receivers: int,
        *,
        names_stored: bool,
        make_id: Callable[[], bytes] = make_message_id,
        ack_every: int = ACK_EVERY,
        is_answered: bool = True,
    ) -> None:
        """Connect the sender and the receivers.

        `names_stored` means that a `stored` frame contains the id of its message. The relays cannot include the id,
        because they never parse messages. `ack_every` is the number of deliveries after which a receiver acknowledges.
        The value 1 means once per read with deliveries, like the network's client. Without `is_answered`, the server
        only forwards messages.
        """
        self._names_stored = names_stored
        self._make_id = make_id
        self._ack_every = ack_every
        self._is_answered = is_answered
        self.receivers = [
            Participant.join(url, f"receiver-{number:03d}", counted=(b'{"type":"deliver"', b'{"type":"send"'))
            for number in range(receivers)
        ]
        self.sender = Participant.join(url, "sender", counted=(b'{"type":"stored"',))
        self._selector = selectors.DefaultSelector()
        for participant in (self.sender, *self.receivers):
            self._selector.register(participant.socket, selectors.EVENT_READ, participant)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._selector.close()
        for participant in (self.sender, *self.receivers):
            participant.close()

    def send_pipelined(self, messages: int, *, to: str, size_bytes: int, window: int) -> Throughput:
        """Send ``messages`` messages, and verify the result. At most `window` messages are not yet stored and delivered
        to all receivers.
        """
        ids, frames = self._encode_messages(messages, to, size_bytes)
        frame_bytes = len(frames) // messages
        view = memoryview(frames)
        written_bytes = 0
        for participant in (self.sender, *self.receivers):
            participant.forget()
        machine_cpu_s, cpu_s = read_machine_cpu_s(), time.process_time()
        started_s = time.perf_counter()
        deadline_s = started_s + TIMEOUT_S
        completed = 0
        while completed < messages:
            allowed_bytes = min(completed + window, messages) * frame_bytes
            if written_bytes < allowed_bytes:
                with contextlib.suppress(BlockingIOError):
                    written_bytes += self.sender.socket.send(view[written_bytes:allowed_bytes])
            # Do not wait for a write event. A full socket buffer empties when the server reads, and the server then
            # sends an answer.
            events = self._selector.select(1.0)
            if not events and time.perf_counter() > deadline_s:
                raise LoadError(f"stalled: {self._describe_progress(messages)}")
            for key, _ in events:
                participant = key.data
                if participant.read() and participant is not self.sender:
                    participant.ack_if_due(self._ack_every)
            completed = min(self._stored(), *(receiver.received for receiver in self.receivers))
        elapsed_s = time.perf_counter() - started_s
        machine_cpu_s, cpu_s = read_machine_cpu_s() - machine_cpu_s, time.process_time() - cpu_s
        for receiver in self.receivers:
            receiver.ack()
        self._verify(ids)
        return Throughput(messages, len(self.receivers), elapsed_s, cpu_s, machine_cpu_s)

    def send_one_by_one(self, messages: int, *, to: str, size_bytes: int) -> Latency:
        """Send each message after the previous one was stored and delivered, and verify the result."""
        ids, frames = self._encode_messages(messages, to, size_bytes)
        frame_bytes = len(frames) // messages
        for participant in (self.sender, *self.receivers):
            participant.forget()
        (receiver,) = self.receivers
        delivered_us: list[float] = []
        stored_us: list[float] = []
        for number in range(messages):
            frame = frames[number * frame_bytes : (number + 1) * frame_bytes]
            started_ns = time.perf_counter_ns()
            self.sender.socket.sendall(frame)
            while receiver.received <= number or self._stored() <= number:
                events = self._selector.select(TIMEOUT_S)
                if not events:
                    raise LoadError(f"stalled: {self._describe_progress(messages)}")
                for key, _ in events:
                    if key.data.read():
                        elapsed_us = (time.perf_counter_ns() - started_ns) / 1000
                        (stored_us if key.data is self.sender else delivered_us).append(elapsed_us)
            receiver.ack_if_due(self._ack_every)
        receiver.ack()
        self._verify(ids)
        delivered_us.sort()
        stored_us.sort()
        stored_p50_us = stored_us[messages // 2] if stored_us else 0.0
        return Latency(delivered_us[messages // 2], delivered_us[int(messages * 0.99)], stored_p50_us)

    def _stored(self) -> int:
        """Return the number of messages that the server has confirmed as stored."""
        return self.sender.received if self._is_answered else self.receivers[0].received

    def _encode_messages(self, messages: int, to: str, size_bytes: int) -> tuple[list[bytes], bytes]:
        """Return new ids, and the frames that contain them. All frames have the same length."""
        ids = [self._make_id() for _ in range(messages)]
        filler = os.urandom(size_bytes).hex().encode()
        frames = [encode_send(message_id, to, filler, size_bytes) for message_id in ids]
        mask = os.urandom(4)
        return ids, b"".join(encode_masked_frame(frame, mask) for frame in frames)

    def _verify(self, ids: list[bytes]) -> None:
        stored = self.sender.read_frames()
        stored_ids = [match[1] for frame in stored if (match := _MESSAGE_ID.search(frame))]
        if len(stored) != len(ids) * self._is_answered or (self._names_stored and stored_ids != ids):
            raise LoadError(f"{len(ids)} messages were sent, and {len(set(stored_ids))} of them stored")
        for receiver in self.receivers:
            frames = receiver.read_frames()
            found = [match[1] for frame in frames if (match := _MESSAGE_ID.search(frame))]
            if found != ids:
                raise LoadError(
                    f"{receiver.agent_id} got {len(found)} messages, {len(set(found))} distinct, for {len(ids)} sent"
                    f"{', out of order' if sorted(found) == sorted(ids) else ''}"
                )
            seqs = [int(match[1]) for frame in frames if (match := _SEQ.search(frame))]
            if any(later <= earlier for earlier, later in itertools.pairwise(seqs)):
                raise LoadError(f"{receiver.agent_id} got sequence numbers that do not ascend")

    def _describe_progress(self, messages: int) -> str:
        slowest = min(self.receivers, key=lambda receiver: receiver.received)
        return f"{messages} messages, {self.sender.received} stored, {slowest.received} delivered to {slowest.agent_id}"
