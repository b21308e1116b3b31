"""Tests of the hub's own RFC 6455 code for reading and writing frames, against the writer and parser of `websockets`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode
from websockets.protocol import Protocol, Side, State
from websockets.server import ServerProtocol

from roundelay.network.hub.frame_splitter import (
    BETWEEN,
    IN_FRAME,
    IN_HEADER,
    LARGE_BYTES,
    REFUSED,
    WAITING,
    ForParser,
    FrameJoiner,
    FrameSplitter,
)

SIZES = (0, 1, 2, 3, 125, 126, 127, 300, 65535, 65536, 70000)
MOST = 1 << 20


def write_frame(payload: bytes, *, mask: bool = True, opcode: Opcode = Opcode.TEXT, fin: bool = True) -> bytes:
    return Frame(opcode, payload, fin=fin).serialize(mask=mask)


def take_all(splitter: FrameSplitter) -> list[bytes | ForParser]:
    """Take frames until the splitter has no complete one."""
    taken = []
    while (frame := splitter.next_frame()) is not None:
        taken.append(frame)
        if splitter.state is not WAITING:
            break
    return taken


def split(data: bytes, most: int = MOST) -> FrameSplitter:
    splitter = FrameSplitter(most)
    splitter.feed(data)
    return splitter


@pytest.mark.parametrize("size", SIZES)
def test_whole_text_frames_are_taken_without_the_parser(size: int) -> None:
    payload = bytes(number % 251 for number in range(size))
    splitter = split(write_frame(payload) * 3)
    assert take_all(splitter) == [payload] * 3
    assert splitter.state is BETWEEN


@pytest.mark.parametrize("size", SIZES)
def test_of_a_frame_that_is_cut_anywhere_the_parser_gets_all_bytes(size: int) -> None:
    payload = b"x" * size
    frame = write_frame(payload)
    header = len(frame) - size
    for cut in {*range(1, min(20, len(frame))), len(frame) - 1}:
        splitter = split(frame[:cut])
        begun = take_all(splitter)
        assert splitter.state is (IN_HEADER if cut < header else IN_FRAME), "a header is whole, or not there"
        splitter.feed(frame[cut:] + write_frame(b"next"))
        rest = take_all(splitter)
        assert rest[-1] == b"next"
        if cut < header:  # the parser has received nothing of the frame
            assert [*begun, *rest[:-1]] == [payload]
        else:
            assert b"".join(it.data for it in [*begun, *rest[:-1]] if isinstance(it, ForParser)) == frame


@pytest.mark.parametrize("size", SIZES)
def test_what_is_no_whole_masked_text_frame_is_left_to_the_parser(size: int) -> None:
    payload = b"x" * size
    frames = [
        write_frame(payload, mask=False),
        write_frame(payload, opcode=Opcode.BINARY),
        write_frame(payload, fin=False),
        write_frame(payload, opcode=Opcode.CONT),
    ]
    for frame in frames:
        assert take_all(split(frame)) == [ForParser(frame)]


def test_within_a_message_in_pieces_everything_goes_to_the_parser() -> None:
    pieces = [write_frame(b"a", fin=False), write_frame(b"!", opcode=Opcode.PING), write_frame(b"b")]
    end = write_frame(b"c", opcode=Opcode.CONT)
    splitter = split(b"".join([*pieces[:2], end, write_frame(b"whole")]))
    assert take_all(splitter) == [*map(ForParser, [*pieces[:2], end]), b"whole"]
    assert take_all(split(b"".join(pieces))) == [ForParser(piece) for piece in pieces]


@pytest.mark.parametrize("size", [size for size in SIZES if size])
def test_a_frame_beyond_the_most_is_refused_as_soon_as_its_header_has_come(size: int) -> None:
    frame = write_frame(b"x" * size)
    splitter = split(write_frame(b"") + frame[:14], size - 1)
    assert take_all(splitter) == [b""]
    assert splitter.state is REFUSED


CHUNKS = st.lists(st.integers(1, 40), max_size=60)
FRAMES = st.lists(
    st.tuples(
        st.binary(max_size=200), st.sampled_from([Opcode.TEXT, Opcode.BINARY, Opcode.CONT, Opcode.PING]), st.booleans()
    ),
    max_size=20,
)


@given(FRAMES, CHUNKS)
def test_the_splitter_and_the_parser_together_read_what_the_parser_reads(
    frames: list[tuple[bytes, Opcode, bool]], chunks: list[int]
) -> None:
    data = b"".join(
        write_frame(payload[:125], opcode=opcode, fin=fin or opcode is Opcode.PING) for payload, opcode, fin in frames
    )
    expected = read_all([data])
    splitter, parser, found = FrameSplitter(MOST), open_parser(), []
    for chunk in [*chunks, len(data)]:
        splitter.feed(data[:chunk])
        data = data[chunk:]
        for frame in take_all(splitter):
            if parser.state is not State.OPEN:
                break
            if isinstance(frame, bytes):
                found.append((Opcode.TEXT, True, frame))
            else:
                parser.receive_data(frame.data)
                found += [
                    (it.opcode, it.fin, bytes(it.data)) for it in parser.events_received() if isinstance(it, Frame)
                ]
    assert found == expected


def open_parser() -> ServerProtocol:
    return ServerProtocol(state=State.OPEN, max_size=None)


def read_all(chunks: list[bytes]) -> list[tuple[Opcode, bool, bytes]]:
    parser = open_parser()
    for chunk in chunks:
        parser.receive_data(chunk)
    return [(it.opcode, it.fin, bytes(it.data)) for it in parser.events_received() if isinstance(it, Frame)]


@pytest.mark.parametrize("payloads", [[b"y" * size for size in SIZES], [b"y" * (LARGE_BYTES + 1)]])
def test_joined_frames_are_those_that_a_parser_reads(payloads: list[bytes]) -> None:
    joiner = FrameJoiner()
    # Two readers of the same frames, and a reader of others.
    for told in (payloads, list(payloads), payloads[:1], payloads):
        reader = Protocol(Side.CLIENT, max_size=None)
        for data in joiner.join(told):
            reader.receive_data(data)
        frames = [event for event in reader.events_received() if isinstance(event, Frame)]
        assert [(frame.opcode, frame.fin, bytes(frame.data)) for frame in frames] == [
            (Opcode.TEXT, True, payload) for payload in told
        ]
