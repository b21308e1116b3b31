"""The memtable: keys and places of the newest rows, before they are written to the index tables ``key`` and ``place``.

A row itself is appended at the end of the log, next to the other rows of its commit. Its key and places, however, are
spread over the whole index tables, so each of them would write another page. Therefore the memtable first holds them in
memory. Later, the keys and places of thousands of rows are sorted in the order of the tables and written together (a
flush), a part with each commit. ``flushed_to`` in ``meta`` is the seq up to which all rows are in the index tables. At
a start, the rows after ``flushed_to`` are read again. Some of their keys and places may already be in the tables.
Readers skip these entries, and writing them again does no harm.

Only the writer's thread adds, flushes and drops rows. Every thread may search.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from threading import Lock
from typing import NamedTuple

from roundelay.network.core.rows import Row, RowType

from .row_encoding import collect_places, hash_bytes

FLUSHED_TO = "placed_to"
"""Key in ``meta`` of the newest seq whose row is in the index tables. Existing files use this name, so it cannot
change."""
FLUSH_ROWS = 32_768
"""Number of rows that are flushed together. With a smaller number, each page of the index tables would be written for
only a few rows. With a larger number, a start would have to read more rows again."""
MIN_FLUSH_ENTRIES = 32
FLUSH_ENTRIES_PER_ROW = 8
"""Number of keys and places that a commit flushes for each of its rows. A row has only three or four, so a flush ends
before enough rows for the next flush have arrived."""
SKIP_ROWS = 500
"""Number of rows that are read one by one after a page of the file could not be read."""

Key = tuple[int, int]
"""Hash of an idempotency key, and the seq of the row that has the key."""
Range = tuple[str, int, int]
"""A place and two seqs. The range contains the rows of the place whose seqs are strictly between the two."""


class MemtableRows(NamedTuple):
    """Result of a search in the memtable. ``seqs`` are rows above ``flushed_to``, ascending for each place."""

    flushed_to: int
    seqs: list[int]


class Flush(NamedTuple):
    """The part of a flush that one transaction writes into the index tables. ``flushed_to`` is set only in the last
    part."""

    keys: Sequence[int]
    """Hash and seq of each key, as a flat sequence."""
    places: Sequence[str | int]
    """Place and seq of each entry, as a flat sequence."""
    flushed_to: int | None


_NOTHING = Flush((), (), None)


class _FlushInProgress:
    """A flush of all rows up to ``end``, sorted like the index tables. Each commit writes a part of it."""

    def __init__(self, end: int, keys: list[int], places: list[str | int]) -> None:
        self.end = end
        self.keys = keys
        self.places = places
        self.written = 0
        """Number of values written so far. Keys are written first, then places."""

    def next_part(self, entries: int) -> Flush:
        start, stop, keys = self.written, self.written + 2 * entries, len(self.keys)
        places = self.places[max(0, start - keys) : max(0, stop - keys)]
        return Flush(self.keys[start:stop], places, self.end if stop >= keys + len(self.places) else None)


class Memtable:
    """The memtable of one ledger. Rows stay in the memtable until their flush is completely written. Only then may
    readers look for these rows in the index tables alone."""

    def __init__(self, flushed_to: int) -> None:
        self.keys: dict[int, int] = {}
        """The first seq of each hash. Only the writer's thread uses this dict."""
        self._more_keys: list[Key] = []
        """Keys whose hash is the same as the hash of an earlier key."""
        self._flushed_to = self._last = flushed_to
        self._places: dict[str, list[int]] = {}
        self._whole_places: set[str] = set()
        """Places whose rows are all in memory. The set may lack some such places."""
        self._lock = Lock()
        """Guards ``_flushed_to``, ``_places`` and ``_whole_places``, which must change together. Otherwise a reader
        could miss rows or find them twice."""
        self._new_rows = 0
        """Number of new rows since the last flush began."""
        self._flush: _FlushInProgress | None = None

    # --- searches

    def find(self, ranges: Iterable[Range], limit: int = -1, *, newest: bool = False) -> MemtableRows:
        """Return the rows in the ranges. For each range, return at most ``limit`` rows: the first ones, or the last
        ones if ``newest`` is true."""
        result: list[int] = []
        # Search all ranges under one lock. If a flush ended between two ranges, the search would find some rows twice
        # and miss others.
        with self._lock:
            for place, after, before in ranges:
                seqs = self._places.get(place)
                if seqs is not None:
                    low, high = bisect_right(seqs, after), bisect_left(seqs, before)
                    if 0 <= limit < high - low:
                        low, high = (high - limit, high) if newest else (low, low + limit)
                    result += seqs[low:high]
            return MemtableRows(self._flushed_to, result)

    def find_all(self, ranges: Iterable[Range], limit: int = -1, *, newest: bool = False) -> list[int] | None:
        """Return the seqs that `find` would return. Return None if the index tables may contain more rows of the
        result."""
        ranges = [*ranges]
        with self._lock:
            flushed_to, whole = self._flushed_to, [place in self._whole_places for place, _, _ in ranges]
        seqs: list[int] = []
        for (place, after, before), is_whole in zip(ranges, whole, strict=True):
            rows = self.find([(place, after, before)], limit, newest=newest)
            # The newest rows are in memory, so a full result needs no rows from the index tables.
            is_full = newest and len(rows.seqs) == limit
            if rows.flushed_to != flushed_to or not (is_whole or is_full or after >= flushed_to):
                return None
            seqs += rows.seqs
        return seqs

    def summarize(self, kind: str, among: Collection[str] | None) -> tuple[int, list[tuple[str, int, int]]]:
        """Return ``flushed_to``, and the newest row and the number of rows of each place. ``among`` names the places,
        or is None for all places of a kind."""
        with self._lock:
            places = self._places if among is None else [kind + name for name in among if kind + name in self._places]
            seqs = [(place, self._places[place]) for place in places if place.startswith(kind)]
            return self._flushed_to, [(place, rows[-1], len(rows)) for place, rows in seqs]

    # --- the writer's thread

    def seqs_of(self, key_hash: int) -> list[int]:
        """Return the seqs of the rows whose keys have this hash."""
        if key_hash not in self.keys:
            return []
        return [self.keys[key_hash], *(seq for other, seq in self._more_keys if other == key_hash)]

    def list_new_places(self, places: Iterable[str]) -> list[str]:
        """Return the given places that have no row in memory."""
        return [place for place in places if place not in self._places]

    def add(
        self,
        keys: Collection[Key],
        places: Mapping[str, Sequence[int]],
        last: int,
        rows: int,
        whole_places: Iterable[str] = (),
    ) -> None:
        """Add stored rows up to the seq ``last``. ``whole_places`` are the places whose rows are now all in memory."""
        self._add_keys(keys)
        with self._lock:
            self._whole_places.update(whole_places)
            for place, seqs in places.items():
                here = self._places.get(place)
                if here is None:
                    self._places[place] = list(seqs)
                else:
                    here += seqs
        self._last = last
        self._new_rows += rows

    def _add_keys(self, keys: Collection[Key]) -> None:
        # Hashes hardly ever repeat. If none repeats, two operations on whole dicts replace a loop over the rows.
        known, new = self.keys, dict(keys)
        if len(new) == len(keys) and known.keys().isdisjoint(new):
            known.update(new)
            return
        for key_hash, seq in keys:
            if known.setdefault(key_hash, seq) != seq:
                self._more_keys.append((key_hash, seq))

    def next_flush(self, rows: int) -> Flush:
        """Return the part of the flush that the next commit must write. ``rows`` is the number of rows in this
        commit."""
        if self._flush is None:
            # Wait for many rows before a flush. Entries that are sorted together fill whole pages of the tables.
            if self._new_rows < FLUSH_ROWS:
                return _NOTHING
            self._flush = self._begin_flush()
        return self._flush.next_part(max(MIN_FLUSH_ENTRIES, FLUSH_ENTRIES_PER_ROW * rows))

    def remaining_flushes(self) -> Iterator[Flush]:
        """Yield everything that has yet to be flushed, in parts for one transaction each."""
        if self._last > self._flushed_to:
            flush = self._begin_flush()
            yield Flush(flush.keys, flush.places, flush.end)

    def _begin_flush(self) -> _FlushInProgress:
        # Sort the entries in the order of the tables, so that each page is written once.
        hashes, places = sorted(self.keys), list[str | int]()
        keys = list(chain.from_iterable(zip(hashes, map(self.keys.__getitem__, hashes), strict=True)))
        keys += chain.from_iterable(self._more_keys)
        for place in sorted(self._places):
            places += chain.from_iterable(zip(repeat(place), self._places[place]))
        # Rows that arrive from now on belong to the next flush.
        self._new_rows = 0
        return _FlushInProgress(self._last, keys, places)

    def complete_flush(self, flush: Flush) -> None:
        """Record that a part of the flush was stored. After the last part, the flushed rows are removed from memory."""
        # Count the part only after the commit. A part that was rolled back is written again with the next commit.
        if self._flush is not None:
            self._flush.written += len(flush.keys) + len(flush.places)
        if flush.flushed_to is not None:
            self._flush = None
            self._retain(flush.flushed_to, frozenset())

    def drop(self, seqs: Collection[int]) -> None:
        """Remove rows that were deleted from the log."""
        gone = frozenset(seq for seq in seqs if seq > self._flushed_to)
        if gone:
            # The flush in progress would write the entries of these rows, so begin the flush again. Entries that it has
            # already written are written a second time, which does no harm.
            self._flush = None
            self._new_rows = max(self._new_rows, FLUSH_ROWS)
            self._retain(self._flushed_to, gone)

    def _retain(self, flushed_to: int, gone: frozenset[int]) -> None:
        """Keep only the rows above ``flushed_to`` that are not deleted."""

        def retain(seqs: list[int]) -> list[int]:
            newer = seqs[bisect_right(seqs, flushed_to) :]
            return [seq for seq in newer if seq not in gone] if gone else newer

        keys = [*self.keys.items(), *self._more_keys]
        self.keys, self._more_keys = {}, []
        self._add_keys([key for key in keys if key[1] > flushed_to and key[1] not in gone])
        places = {place: rows for place, seqs in self._places.items() if (rows := retain(seqs))}
        whole = {place for place in self._whole_places if place in places and self._places[place][0] > flushed_to}
        with self._lock:
            self._flushed_to, self._places, self._whole_places = flushed_to, places, whole


# --- loading at a start


def load_memtable(db: sqlite3.Connection, flushed_to: int) -> Memtable:
    """Return the memtable with the rows after ``flushed_to``.

    Checksums are not compared here. If the key of a damaged row is readable, the key counts as taken.
    """
    memtable = Memtable(flushed_to)
    keys: list[Key] = []
    places: defaultdict[str, list[int]] = defaultdict(list)
    last, rows = flushed_to, 0
    # Read text as bytes. Otherwise invalid UTF-8 in one damaged row would stop the whole load.
    with _reading_bytes(db):
        for seq, *texts in _walk(db, flushed_to):
            last, rows = seq, rows + 1
            type_, actor, key, target, stream, label = (
                text if isinstance(text, bytes) else str(text or "").encode() for text in texts
            )
            if key:
                keys.append((hash_bytes(actor, key), seq))
            names = [name.decode(errors="replace") for name in (actor, target, stream, label)]
            collect_places(_make_placeholder(seq, type_, *names), places)
    memtable.add(keys, places, last, rows)
    return memtable


def _make_placeholder(seq: int, type_: bytes, actor: str, target: str, stream: str, label: str) -> Row:
    """Return a row with only the fields that `collect_places` reads. For `collect_places`, all types except record and
    message are the same."""
    row_type: RowType = "message" if type_ == b"message" else "record" if type_ == b"record" else "registered"
    return Row(seq=seq, at=0, type=row_type, actor=actor, target=target, stream=stream, label=label, data=b"")


_SELECT_NEWEST = "SELECT seq, type, actor, key, target, stream, label FROM log WHERE seq"


def _walk(db: sqlite3.Connection, after: int) -> Iterator[tuple[int, ...]]:
    """Yield the readable rows after a seq."""
    while True:
        try:
            for columns in db.execute(f"{_SELECT_NEWEST} > ? ORDER BY seq", (after,)):
                if columns[0] <= after:  # damaged pages of the file may form a circle
                    raise sqlite3.DatabaseError(f"pages of the log are mixed up: #{columns[0]} is reached twice")
                after = columns[0]
                yield columns
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", None) not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_TOOBIG):
                raise
            yield from _read_each(db, range(after + 1, after + 1 + SKIP_ROWS))
            after += SKIP_ROWS
        else:
            return


def _read_each(db: sqlite3.Connection, seqs: Iterable[int]) -> Iterator[tuple[int, ...]]:
    for seq in seqs:
        try:
            columns = db.execute(f"{_SELECT_NEWEST} = ?", (seq,)).fetchone()
        except sqlite3.DatabaseError:
            continue
        if columns is not None:
            yield columns


@contextmanager
def _reading_bytes(db: sqlite3.Connection) -> Iterator[None]:
    db.text_factory = bytes
    try:
        yield
    finally:
        db.text_factory = str
