"""A ledger with a past, as a node has written it: for what a long history costs.

A node of this checkout takes the messages as from any client, so the file is what a hub leaves behind, indexes and state included.
Written once a run, in two sizes. Of six messages two are direct ones between others, two go to the channels that the reader is in,
one is broadcast and one goes to channels that it is not in: half of them are the reader's.
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
    """Two ledgers of one network: ``small`` is ``large`` as it was after a tenth of its messages."""

    path: Path
    messages: int
    missed: int
    resume: dict[str, object]
    """What the reader says to be given exactly the last ``missed`` messages that are its own."""


def write_history(bench: Bench, messages: int, missed: int) -> History:
    """Have a node write both. Raises `LoadError`."""
    path = bench.scratch / "history.db"
    targets = _targets()
    readers_seqs: list[int] = []
    with bench.start(NODE, path) as (url, _pid):
        writer = _settle(url)
        readers_seqs += _write(writer, targets, messages)
        network = writer.welcome["network"]
        writer.close()
    os.sync()  # else what was written goes to the disk while the nodes that come next wait for it
    assert isinstance(network, dict)
    if len(readers_seqs) <= missed:
        raise LoadError(f"{messages} messages hold no {missed} of the reader's")
    return History(path, messages, missed, {"epoch": network["epoch"], "cursor": readers_seqs[-missed - 1]})


def _settle(url: str) -> Participant:
    """Register everybody and make the channels; gives the writer, who is in all of them."""
    reader = _join(url, READER)
    writer = _join(url, WRITER)
    _call(writer, [("channels.create", name) for name in (*READERS_CHANNELS, *OTHER_CHANNELS)])
    _call(reader, [("channels.join", name) for name in READERS_CHANNELS])
    reader.close()
    for name in OTHERS:
        _join(url, name).close()
    return writer


def _targets() -> itertools.cycle[tuple[str, bool]]:
    """Where one message after the other goes, and whether it is the reader's."""
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
    """Send so many messages, at most `WINDOW` not yet stored; gives the seqs of the reader's, ascending."""
    readers_seqs: list[int] = []
    while messages > 0:
        portion = list(itertools.islice(targets, min(messages, PORTION)))
        messages -= len(portion)
        filler = os.urandom(SIZE_BYTES).hex().encode()
        frames = [encode_send(make_message_id(), to, filler, SIZE_BYTES) for to, _ in portion]
        stored = _pour(writer, frames)
        seqs = [int(match[1]) for frame in stored if (match := _SEQ.search(frame))]
        if len(seqs) != len(portion):
            raise LoadError(f"{len(portion)} messages were sent, and {len(seqs)} of them stored")
        readers_seqs += [seq for seq, (_, is_readers) in zip(seqs, portion, strict=True) if is_readers]
    return readers_seqs


def _pour(writer: Participant, frames: Sequence[bytes]) -> list[bytes]:
    """Send frames and give their answers."""
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
    _pour(caller, frames)


def _join(url: str, agent_id: str) -> Participant:
    participant = Participant.join(url, agent_id, counted=(b'{"type":"stored"', b'{"type":"result"'))
    participant.socket.settimeout(60)
    return participant
