"""One page of a list: encoded entries up to `limit` and `max_result_bytes`, and whether there are more. No IO, no
clock."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Raw

from roundelay.network.frames import encode


class ListPage:
    """Entries of one answer. The first entry is always accepted, whatever its size, so that every list can be read to
    the end."""

    def __init__(self, limit: int, max_bytes: int) -> None:
        self.entries: list[Raw] = []
        self.has_more = False
        """Whether an entry was refused because the page is full."""
        self._limit = limit
        self._max_bytes = max_bytes
        self._size = 0

    def add(self, entry: object) -> bool:
        """Add an entry if there is room. Returns whether the entry was added."""
        data = encode(entry)
        self._size += len(data) + 1
        # The first entry is accepted at any size. A page without entries would never advance.
        if self.entries and (len(self.entries) == self._limit or self._size > self._max_bytes):
            self.has_more = True
            return False
        self.entries.append(Raw(data))
        return True


def take_page(entries: Iterable[object], limit: int, max_bytes: int) -> tuple[list[Raw], bool]:
    """Return the first entries that fit, and whether there are more. Stops reading ``entries`` at the first entry that
    does not fit."""
    page = ListPage(limit, max_bytes)
    for entry in entries:
        if not page.add(entry):
            break
    return page.entries, page.has_more
