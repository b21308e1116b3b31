"""`FrameSplitter`: the part of WebSocket framing (RFC 6455, 5.2) that the hub does itself. Pure: no IO.

Nearly all frames are whole text messages. `FrameSplitter` extracts these messages from the received bytes. All other
frames (fragments, control frames, invalid frames) go to the parser of the `websockets` library, frame by frame.
`connection` feeds the received bytes to the splitter and the results to the hub or the parser.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

try:
    from websockets.speedups import apply_mask
except ImportError:  # the installed websockets has no C extension
    from websockets.utils import apply_mask

# The bytes that `feed` gets, the results of `next_frame` one by one, and the state afterwards:
#
#   | text, whole | text, whole | ping | text, FIN=0 | continuation | two thirds of a text .. | IN_FRAME, `_owed`: rest
#     bytes         bytes         ForParser ----------------------- | ForParser: its beginning
#   WAITING ------------------------------------------------------> | 5 of a header's 8 bytes | IN_HEADER: they stay
#                                                                   | over `max_bytes` ...... | REFUSED
#                                                                   | (nothing)               | BETWEEN
#
#   BETWEEN, IN_HEADER, IN_FRAME --feed--> WAITING --next_frame--> any;  REFUSED is final
#
# The parser is a generator with five steps per frame. These steps cost half as much time as relaying a message without
# the parser. So frames bypass the parser if possible. A frame may bypass the parser only between two frames and between
# two messages. Therefore the parser receives all parts of a frame that arrives in parts, and everything from a text
# without FIN to the end of that message (`_is_bypassed` is False meanwhile).

LARGE_BYTES = 1 << 17
_first_four = struct.Struct("!HH").unpack_from
"""Function that reads two 16-bit numbers. For a masked text message in one frame, the first number is 0x8180 to 0x81FF.
Up to 0x81FD, its lowest seven bits are the length. With 0x81FE, the second number is the length. With 0x81FF, the
length is in the eight bytes after the first number."""


class SplitterState(Enum):
    """Where the splitter stands after the last frame that `next_frame` returned."""

    BETWEEN = "between two frames, with nothing left"
    WAITING = "before bytes that were received"
    IN_HEADER = "before an incomplete header"
    IN_FRAME = "in a frame whose beginning the parser has"
    REFUSED = "before a frame that is too large"


BETWEEN, WAITING, IN_HEADER, IN_FRAME, REFUSED = SplitterState
"""Module-level names of the enum members. The hot path uses these names, because looking up a member in its enum costs
as much as a function call."""


class ForParser(NamedTuple):
    """Bytes for the library's parser: a whole frame or a part of a frame."""

    data: bytes


class FrameSplitter:
    """Splits the bytes of one connection into frames with payloads of at most ``max_bytes``. The connection may change
    ``max_bytes`` between two turns of the loop."""

    __slots__ = ("_data", "_is_bypassed", "_is_fragmented", "_owed", "max_bytes", "offset", "state")

    def __init__(self, most: int) -> None:
        self.max_bytes = most
        self.state = BETWEEN
        self.offset = 0
        """Number of bytes consumed since the last `feed`."""
        self._data = b""
        self._owed = 0
        """Number of missing bytes in a frame whose first bytes the parser already has."""
        self._is_fragmented = False
        """Whether the parser is in the middle of a message that has several frames."""
        self._is_bypassed = True
        """Whether the parser is between two messages, so that text messages may bypass it."""

    def feed(self, data: bytes) -> None:
        """Append received bytes to the bytes that are not yet consumed."""
        if self.state is not BETWEEN:
            data = self._data[self.offset :] + data
        if data:
            self.state = WAITING
        self._data, self.offset = data, 0

    def next_frame(self) -> bytes | ForParser | None:
        """Return the payload of the next text message, or the next bytes for the parser. If the result is None, `state`
        says why."""
        data, at = self._data, self.offset
        # For nearly all frames, one unpack reads both fields. A masked header with a 16-bit length takes eight bytes.
        head, length = _first_four(data, at) if len(data) - at > 7 else (0, 0)
        if head == 0x81FE:
            start = at + 8
        elif 0x8180 <= head < 0x81FE:
            start, length = at + 6, head & 0x7F
        else:
            return self._take_other()
        end = start + length
        if end > len(data) or length > self.max_bytes or not self._is_bypassed:
            return self._take_other()
        self.offset = end
        if end == len(data):
            self.state = BETWEEN
        return apply_mask(data[start:end], data[start - 4 : start])

    def _take_other(self) -> bytes | ForParser | None:
        """Return the next frame, like `next_frame`. Handles all frames except whole text messages of less than 64
        KiB."""
        data, at, size = self._data, self.offset, len(self._data)
        if self._owed:
            # The parser already has the first bytes of this frame. It also needs the rest, to find the next frame.
            end = self._owed
        else:
            start, length = read_header(data, at)
            end = start + length
            if start > size:
                self.state = IN_HEADER
            elif length > self.max_bytes:
                self.state = REFUSED
            if self.state is not WAITING:
                return None
            if data[at] == 0x81 and data[at + 1] & 0x80 and end <= size and self._is_bypassed:
                self.offset, self.state = end, BETWEEN if end == size else WAITING
                return apply_mask(data[start:end], data[start - 4 : start])
            # Control frames may come between the fragments of a message, and must not end the message.
            if not data[at] & 0x08:  # not a control frame
                self._is_fragmented = not data[at] & 0x80
        self.offset = min(end, size)
        self._owed = end - self.offset
        self._is_bypassed = not (self._owed or self._is_fragmented)
        if self.offset == size:
            self.state = IN_FRAME if self._owed else BETWEEN
        return ForParser(data[at : self.offset])

    def take_rest(self) -> bytes:
        """Return all bytes that are not yet consumed, such as the end of a closing handshake. The caller passes them to
        the parser."""
        rest, self._data, self.offset = self._data[self.offset :], b"", 0
        return rest


def read_header(data: bytes, at: int) -> tuple[int, int]:
    """Return the start and the length of the payload of the frame at ``at``. If the header is incomplete, the start is
    beyond the received bytes.

    An unmasked frame has no mask, so its payload starts four bytes earlier. The parser refuses such a frame.
    """
    left = len(data) - at
    if left < 2:
        return len(data) + 1, 0
    length = data[at + 1]
    start = at + (6 if length & 0x80 else 2)
    length &= 0x7F
    if length == 126:
        start += 2
        length = data[at + 2] << 8 | data[at + 3] if left >= 4 else 0
    elif length == 127:
        start += 8
        length = int.from_bytes(data[at + 2 : at + 10], "big")
    return start, length


class MessageAssembler:
    """Assembles a message that arrives in several frames."""

    __slots__ = ("_data", "is_text")

    def __init__(self) -> None:
        self._data: bytearray | None = None
        """The part of the message that has arrived. None between two messages."""
        self.is_text = True

    @property
    def size(self) -> int:
        return len(self._data) if self._data is not None else 0

    def add(self, data: bytes | bytearray | memoryview, *, is_start: bool, is_text: bool) -> None:
        if is_start or self._data is None:
            self.is_text, self._data = is_text, bytearray()
        # Collect the fragments in one buffer. A list of thousands of small or empty fragments would need more memory
        # than their content.
        self._data += data

    def take(self) -> bytes:
        """Return the whole message and clear the assembler for the next one."""
        data, self._data = bytes(self._data or b""), None
        return data


class FrameJoiner:
    """Joins unmasked, unfragmented text messages into one write.

    The readers of a broadcast get the same messages one after the other, so the joiner stores its newest result and
    returns it to all of them.
    """

    def __init__(self) -> None:
        self._newest: tuple[Sequence[bytes], list[bytes]] = ((), [])

    def join(self, payloads: Sequence[bytes]) -> list[bytes]:
        """Return the byte strings to write. The caller must not change ``payloads`` afterwards. A single large message
        stays in two parts, because joining them would copy the message."""
        newest, joined = self._newest
        if newest == payloads:  # compares by identity if the same frames go to several readers
            return joined
        parts: list[bytes] = []
        for payload in payloads:
            parts.append(_text_header(len(payload)))
            parts.append(payload)
        joined = parts if len(payloads) == 1 and len(payloads[0]) > LARGE_BYTES else [b"".join(parts)]
        # Store only the newest result. A broadcast writes the same list to many sessions in a row, so older results
        # would only take memory.
        self._newest = (payloads, joined)
        return joined


@lru_cache(maxsize=4096)
def _text_header(size: int) -> bytes:
    if size < 126:
        return b"\x81%c" % size
    if size < 65536:
        return struct.pack("!BBH", 0x81, 126, size)
    return struct.pack("!BBQ", 0x81, 127, size)
