"""WebSocket frames as bytes (RFC 6455, 5.2), as far as the hub writes and splits them itself. Pure.

websockets' own parser and writer do the rest: fragments, control frames, closing. `connection` says when.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable


def join_text_frames(payloads: Iterable[bytes]) -> bytes:
    """Text messages, unmasked and unfragmented, to be sent as one write."""
    parts: list[bytes] = []
    for payload in payloads:
        size = len(payload)
        if size < 126:
            parts.append(b"\x81%c" % size)
        elif size < 65536:
            parts.append(struct.pack("!BBH", 0x81, 126, size))
        else:
            parts.append(struct.pack("!BBQ", 0x81, 127, size))
        parts.append(payload)
    return b"".join(parts)


def read_header(data: bytes, position: int) -> tuple[int, int]:
    """Where the payload of the frame at ``position`` starts, and its length. The start lies past the data if the header does.

    A frame that is not masked has no mask's four bytes here: its length is found all the same, and the parser
    refuses it.
    """
    if len(data) - position < 2:
        return len(data) + 1, 0
    length = data[position + 1]
    start = position + (6 if length & 0x80 else 2)
    length &= 0x7F
    if length == 126:
        start += 2
        length = int.from_bytes(data[position + 2 : position + 4], "big")
    elif length == 127:
        start += 8
        length = int.from_bytes(data[position + 2 : position + 10], "big")
    return start, length
