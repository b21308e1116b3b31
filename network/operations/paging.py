"""One page of a list: entries encoded as far as `limit` and `max_result_bytes` go, and whether there are more. No IO,
no clock."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Raw

from roundelay.network.frames import encode


class ListPage:
    """The entries of one answer; the first is always taken, whatever its size."""

    def __init__(self, limit: int, max_bytes: int) -> None:
        self.entries: list[Raw] = []
        self.has_more = False
        """Whether one was asked for that there was no room for."""
        self._limit = limit
        self._max_bytes = max_bytes
        self._size = 0

    def add(self, entry: object) -> bool:
        """Take one more, if it has room."""
        data = encode(entry)
        self._size += len(data) + 1
        if self.entries and (len(self.entries) == self._limit or self._size > self._max_bytes):
            self.has_more = True
            return False
        self.entries.append(Raw(data))
        return True


def take_page(entries: Iterable[object], limit: int, max_bytes: int) -> tuple[list[Raw], bool]:
    """The first of these entries, and whether there are more. No further ones are asked for."""
    page = ListPage(limit, max_bytes)
    for entry in entries:
        if not page.add(entry):
            break
    return page.entries, page.has_more
