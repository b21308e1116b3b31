"""What the hub splits and writes itself of RFC 6455, against websockets' own writer and parser."""

from __future__ import annotations

import pytest
from websockets.frames import Frame, Opcode
from websockets.protocol import Protocol, Side

from roundelay.network.raw_frames import LARGE_BYTES, join_text_frames, read_header, take_text

SIZES = (0, 1, 125, 126, 127, 300, 65535, 65536, 70000)
MOST = 1 << 20


def write_frame(payload: bytes, *, mask: bool = True, opcode: Opcode = Opcode.TEXT, fin: bool = True) -> bytes:
    return Frame(opcode, payload, fin=fin).serialize(mask=mask)


@pytest.mark.parametrize("size", SIZES)
def test_a_whole_text_frame_is_taken_with_its_end(size: int) -> None:
    payload = bytes(number % 251 for number in range(size))
    frame = write_frame(payload)
    before, after = b"before", write_frame(b"{}")
    assert take_text(before + frame + after, len(before), MOST) == (payload, len(before) + len(frame))


@pytest.mark.parametrize("size", SIZES)
def test_a_frame_that_is_cut_anywhere_is_not_taken(size: int) -> None:
    frame = write_frame(b"x" * size)
    for end in {*range(min(20, len(frame))), len(frame) - 1}:
        assert take_text(frame[:end], 0, MOST) is None
        start, length = read_header(frame[:end], 0)
        assert start > end or start + length == len(frame), "a header is whole, or not there"


@pytest.mark.parametrize("size", SIZES)
def test_what_is_no_whole_masked_text_frame_is_left_to_the_parser(size: int) -> None:
    payload = b"x" * size
    assert take_text(write_frame(payload, mask=False), 0, MOST) is None
    assert take_text(write_frame(payload, opcode=Opcode.BINARY), 0, MOST) is None
    assert take_text(write_frame(payload, fin=False), 0, MOST) is None
    assert take_text(write_frame(payload, opcode=Opcode.CONT), 0, MOST) is None
    if size:
        assert take_text(write_frame(payload), 0, size - 1) is None


@pytest.mark.parametrize("payloads", [[b"y" * size for size in SIZES], [b"y" * (LARGE_BYTES + 1)]])
def test_joined_frames_are_those_that_a_parser_reads(payloads: list[bytes]) -> None:
    reader = Protocol(Side.CLIENT, max_size=None)
    for data in join_text_frames(payloads):
        reader.receive_data(data)
    frames = [event for event in reader.events_received() if isinstance(event, Frame)]
    assert [(frame.opcode, frame.fin, bytes(frame.data)) for frame in frames] == [
        (Opcode.TEXT, True, payload) for payload in payloads
    ]
