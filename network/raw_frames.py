"""WebSocket frames as bytes (RFC 6455, 5.2), as far as the hub writes and splits them itself. Pure.

websockets' own parser and writer do the rest: fragments, control frames, closing. `connection` says when.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

try:
    from websockets.speedups import apply_mask
except ImportError:  # a websockets without its C extension
    from websockets.utils import apply_mask


LARGE_BYTES = 1 << 17


def join_text_frames(payloads: Sequence[bytes]) -> list[bytes]:
    """Text messages, unmasked and unfragmented, to be sent as one write; a large one alone as two, for to join it would copy it."""
    parts: list[bytes] = []
    for payload in payloads:
        parts.append(_text_header(len(payload)))
        parts.append(payload)
    return parts if len(payloads) == 1 and len(payloads[0]) > LARGE_BYTES else [b"".join(parts)]


@lru_cache(maxsize=4096)
def _text_header(size: int) -> bytes:
    if size < 126:
        return b"\x81%c" % size
    if size < 65536:
        return struct.pack("!BBH", 0x81, 126, size)
    return struct.pack("!BBQ", 0x81, 127, size)


def take_text(data: bytes, position: int, most: int) -> tuple[bytes, int] | None:
    """The payload of a whole, masked text frame at ``position``, and where it ends. None for everything else, also for more than ``most`` bytes."""
    size = len(data)
    if size - position < 6 or data[position] != 0x81:
        return None
    length = data[position + 1] - 0x80  # below 0: not masked
    if length < 126:
        start = position + 6
    elif length == 126:
        start, length = position + 8, data[position + 2] << 8 | data[position + 3]
    else:
        start, length = read_header(data, position)
    end = start + length
    if end > size or not 0 <= length <= most:
        return None
    return apply_mask(data[start:end], data[start - 4 : start]), end


def read_header(data: bytes, position: int) -> tuple[int, int]:
    """Where the payload of the frame at ``position`` starts, and its length. The start lies past the data if the header does.

    A frame that is not masked has no mask's four bytes here: its length is found all the same, and the parser
    refuses it.
    """
    left = len(data) - position
    if left < 2:
        return len(data) + 1, 0
    length = data[position + 1]
    start = position + (6 if length & 0x80 else 2)
    length &= 0x7F
    if length == 126:
        start += 2
        length = data[position + 2] << 8 | data[position + 3] if left >= 4 else 0
    elif length == 127:
        start += 8
        length = int.from_bytes(data[position + 2 : position + 10], "big")
    return start, length
