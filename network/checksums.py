"""The checksum that each row of a ledger's file has, and what was found that does not fit its own.

A checksum is the CRC-32 of every stored column, of the key and of NULLs too. It finds each single flipped bit, each burst of up to 32,
and all but one in four billion of larger damage: what disks, memory and cables do. It is no proof against a person: who can write
the file can write the checksum, and a cryptographic hash without a secret would say no more at ten times the price.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import msgspec

MAX_KEPT = 10_000
"""How many damaged rows one ledger remembers: each of them is told once, those beyond are not told."""

_encode = msgspec.msgpack.Encoder().encode


def checksum(columns: Sequence[object]) -> int:
    """The CRC-32 of a row's columns as MessagePack, in which types and lengths show; a test pins it, since files depend on it."""
    return zlib.crc32(_encode(columns))


class Damage:
    """What was found damaged in one ledger's file: seqs of the log, and ``TABLE/KEY`` of its tables. Used on several threads.

    ``tell`` hears of each once. Rows of the log from ``checked_from`` on have a checksum; older ones are from before there were any.
    """

    def __init__(self, tell: Callable[[int | str], None], checked_from: int = 1) -> None:
        self.checked_from = checked_from
        self.found: set[int | str] = set()
        self._tell = tell

    def begin(self, checked_from: int) -> None:
        """The file is opened: it may be another one than before."""
        self.checked_from = checked_from
        self.found.clear()

    def note(self, row: int | str) -> None:
        """A row is damaged."""
        if row not in self.found and len(self.found) < MAX_KEPT:
            self.found.add(row)
            self._tell(row)

    def fits(self, columns: Sequence[object]) -> bool:
        """Whether a row of the log, its checksum last, is what was stored. An old one without a checksum is taken as it is."""
        if columns[-1] is None:
            return isinstance(columns[0], int) and columns[0] < self.checked_from
        return columns[-1] == checksum(columns[:-1])
