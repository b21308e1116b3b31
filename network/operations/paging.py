"""Pages of lists: encoded entries up to `limit` and `max_result_bytes`, and whether more entries follow. No IO, no
clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Raw

from roundelay.network.frames import encode


class ListPage:
    """One page of a list. The first entry is always accepted, even if it is too large, so that every list can be read
    to its end."""

    def __init__(self, limit: int, max_bytes: int) -> None:
        self.entries: list[Raw] = []
        self.has_more = False
        """Whether an entry was refused because the page was full."""
        self._limit = limit
        self._max_bytes = max_bytes
        self._size = 0

    def add(self, entry: object) -> bool:
        """Add an entry if there is room. Return whether the entry was added."""
        data = encode(entry)
        self._size += len(data) + 1
        # Accept the first entry whatever its size. Otherwise the page could be empty, and the client could never
        # continue.
        if self.entries and (len(self.entries) == self._limit or self._size > self._max_bytes):
            self.has_more = True
            return False
        self.entries.append(Raw(data))
        return True


def take_page(entries: Iterable[object], limit: int, max_bytes: int) -> tuple[list[Raw], bool]:
    """Return the first entries that fit on a page, and whether more entries follow. ``entries`` is read up to the first
    entry that does not fit."""
    page = ListPage(limit, max_bytes)
    for entry in entries:
        if not page.add(entry):
            break
    return page.entries, page.has_more
