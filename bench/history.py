"""Creates a ledger with a long history, written by a node of this checkout.

The node receives the messages from a client, so the file contains everything that a hub writes, including indexes and
state. Of six messages, two are direct messages between others, two go to channels of the reader, one is a broadcast,
and one goes to a channel without the reader. The reader therefore receives half of the messages.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from load import Participant
from servers import Bench, Subject
from wire import LoadError, encode_masked_frame, encode_send, make_message_id

READER, WRITER = "reader", "writer"
READERS_CHANNELS = tuple(f"room-{number}" for number in range(10))
OTHER_CHANNELS = tuple(f"elsewhere-{number}" for number in range(10))
OTHERS = tuple(f"other-{number:02d}" for number in range(50))
SIZE_BYTES = 200
WINDOW = 512
PORTION = 12_000
NODE = Subject("hub normal", "normal")

_SEQ = re.compile(rb'"seq":(\d+)')


@dataclass(frozen=True)
class History:
    """A ledger with a long history, stored on disk."""

    path: Path
    messages: int
    missed: int
    resume: dict[str, object]
    """The reader's resume arguments, with which it gets exactly its last ``missed`` messages."""


def write_history(bench: Bench, messages: int, missed: int) -> History:
    """Let a node write the ledger, and return the ledger. Raises `LoadError`."""
    path = bench.scratch / "history.db"
    targets = _targets()
    readers_seqs: list[int] = []
    with bench.start(NODE, path) as (url, _pid):
        writer = _settle(url)
        readers_seqs += _write(writer, targets, messages)
        network = writer.welcome["network"]
        writer.close()
    os.sync()  # prevent the write-back of these pages from slowing down the next nodes
    assert isinstance(network, dict)
    if len(readers_seqs) <= missed:
        raise LoadError(f"{messages} messages contain fewer than {missed} for the reader")
    return History(path, messages, missed, {"epoch": network["epoch"], "cursor": readers_seqs[-missed - 1]})


def _settle(url: str) -> Participant:
    """Register all participants and create the channels. Return the writer, who is a member of all channels."""
    reader = _join(url, READER)
    writer = _join(url, WRITER)
    _call(writer, [("channels.create", name) for name in (*READERS_CHANNELS, *OTHER_CHANNELS)])
    _call(reader, [("channels.join", name) for name in READERS_CHANNELS])
    reader.close()
    for name in OTHERS:
        _join(url, name).close()
    return writer


def _targets() -> itertools.cycle[tuple[str, bool]]:
    """Yield the address of each message, with whether the reader receives the message."""
    others = itertools.cycle(OTHERS)
    turns = zip(itertools.cycle(READERS_CHANNELS), OTHER_CHANNELS * 5, strict=False)
    return itertools.cycle(
        target
        for readers, elsewhere in turns
        for target in (
            (f"agent:{next(others)}", False),
            (f"channel:{readers}", True),
            ("broadcast", True),
            (f"agent:{next(others)}", False),
            (f"channel:{readers}", True),
            (f"channel:{elsewhere}", False),
        )
    )


def _write(writer: Participant, targets: itertools.cycle[tuple[str, bool]], messages: int) -> list[int]:
    """Send ``messages`` messages. At most `WINDOW` messages are in flight. Return the seqs of the reader's messages,
    ascending.
    """
    readers_seqs: list[int] = []
    while messages > 0:
        portion = list(itertools.islice(targets, min(messages, PORTION)))
        messages -= len(portion)
        filler = os.urandom(SIZE_BYTES).hex().encode()
        frames = [encode_send(make_message_id(), to, filler, SIZE_BYTES) for to, _ in portion]
        stored = _send_frames(writer, frames)
        seqs = [int(match[1]) for frame in stored if (match := _SEQ.search(frame))]
        if len(seqs) != len(portion):
            raise LoadError(f"{len(portion)} messages were sent, and {len(seqs)} of them stored")
        readers_seqs += [seq for seq, (_, is_readers) in zip(seqs, portion, strict=True) if is_readers]
    return readers_seqs


def _send_frames(writer: Participant, frames: Sequence[bytes]) -> list[bytes]:
    """Send frames, and return the hub's answers."""
    writer.forget()
    mask = os.urandom(4)
    masked = [encode_masked_frame(frame, mask) for frame in frames]
    sent = 0
    while writer.received < len(masked):
        until = min(writer.received + WINDOW, len(masked))
        if until - sent >= WINDOW // 2 or until == len(masked):
            writer.socket.sendall(b"".join(masked[sent:until]))
            sent = until
        writer.read()
    return writer.read_frames()


def _call(caller: Participant, calls: Sequence[tuple[str, str]]) -> None:
    frames = [
        b'{"type":"call","call_id":"%s","op":"%s","args":{"name":"%s"}}'
        % (make_message_id(), op.encode(), name.encode())
        for op, name in calls
    ]
    _send_frames(caller, frames)


def _join(url: str, agent_id: str) -> Participant:
    participant = Participant.join(url, agent_id, counted=(b'{"type":"stored"', b'{"type":"result"'))
    participant.socket.settimeout(60)
    return participant
