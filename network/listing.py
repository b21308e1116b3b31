"""One page of a list: entries encoded as far as `limit` and `max_result_bytes` go, and whether there are more. No IO, no clock."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Raw

from .frames import encode


def take_page(entries: Iterable[object], limit: int, max_bytes: int) -> tuple[list[Raw], bool]:
    """The first of these entries, and whether there are more. No further ones are asked for; one is always given, whatever its size."""
    page: list[Raw] = []
    size = 0
    for entry in entries:
        data = encode(entry)
        size += len(data) + 1
        if page and (len(page) == limit or size > max_bytes):
            return page, True
        page.append(Raw(data))
    return page, False
