"""The newest rows of the log, whose keys and places are not yet in the tables ``key`` and ``place``.

A row is written at the end of the log, beside the rows of the same commit. Where it is found (`rows.hash_key`,
`rows.list_places`) would be written all over the file: a page of 4 KB for nearly each key, and for each place. So that
is kept in memory first, and comes into the tables in their order and thousands of rows at a time, a part with each
commit. ``placed_to`` in ``meta`` says up to which row it has come; a start reads the rows behind it. Some of theirs may
stand in the tables already: what is found there above ``placed_to`` is passed over, and written again without harm.

Rows are added, placed and dropped on the writer's thread, and asked for on any.
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

from .rows import hash_bytes, note_places

PLACED_TO = "placed_to"
"""In ``meta``: the newest row that is found by the tables."""
TOGETHER = 32_768
"""So many rows are placed together. Of twice as many a page of the tables would be written for more, and a start read
more."""
LEAST_PORTION = 32
PORTION_PER_ROW = 8
"""Keys and places that a commit writes of those before it, for each of its rows: a row has three or four, so that it is
done before as many rows have come again."""
PASSED_OVER = 500
"""Where pages cannot be read so many rows are tried one by one."""

Key = tuple[int, int]
"""Hash and seq."""


class Newest(NamedTuple):
    """What was asked for, of the rows above ``placed_to``: their seqs, ascending for each place."""

    placed_to: int
    seqs: list[int]


class Portion(NamedTuple):
    """What one transaction writes of those before it. ``placed_to``: where all is placed then, if that is new."""

    keys: Sequence[int]
    """Hash and seq, one after the other."""
    places: Sequence[str | int]
    """Place and seq, one after the other."""
    placed_to: int | None


NOTHING = Portion((), (), None)


class _Placing:
    """The rows up to ``end``, on their way into the tables, in the order of these."""

    def __init__(self, end: int, keys: list[int], places: list[str | int]) -> None:
        self.end = end
        self.keys = keys
        self.places = places
        self.done = 0
        """Of the keys, and then of the places."""

    def cut(self, entries: int) -> Portion:
        start, stop, keys = self.done, self.done + 2 * entries, len(self.keys)
        places = self.places[max(0, start - keys) : max(0, stop - keys)]
        return Portion(self.keys[start:stop], places, self.end if stop >= keys + len(self.places) else None)


class Unplaced:
    """What is found in memory, of one ledger."""

    def __init__(self, placed_to: int) -> None:
        self.keys: dict[int, int] = {}
        """By hash: the first seq. Of the writer's thread alone."""
        self._more_keys: list[Key] = []
        """Those whose hash another one has."""
        self._placed_to = self._last = placed_to
        self._places: dict[str, list[int]] = {}
        self._lock = Lock()
        """For ``_placed_to`` and ``_places``, which belong together."""
        self._rows = 0
        """How many came since it was begun to place others."""
        self._placing: _Placing | None = None

    # --- asked for

    def find(self, asked: Iterable[tuple[str, int, int]], limit: int = -1, *, newest: bool = False) -> Newest:
        """The rows at these places, each with two seqs between which they are; of each the first ``limit``, or the
        last."""
        found: list[int] = []
        with self._lock:
            for place, after, before in asked:
                seqs = self._places.get(place)
                if seqs is not None:
                    low, high = bisect_right(seqs, after), bisect_left(seqs, before)
                    if 0 <= limit < high - low:
                        low, high = (high - limit, high) if newest else (low, low + limit)
                    found += seqs[low:high]
            return Newest(self._placed_to, found)

    def summarise(self, kind: str, among: Collection[str] | None) -> tuple[int, list[tuple[str, int, int]]]:
        """`Newest.placed_to`, and of each place of a kind (or of these) the newest row, and how many there are."""
        with self._lock:
            named = self._places if among is None else [kind + it for it in among if kind + it in self._places]
            seqs = [(place, self._places[place]) for place in named if place.startswith(kind)]
            return self._placed_to, [(place, it[-1], len(it)) for place, it in seqs]

    # --- the writer's

    def seqs_of(self, number: int) -> list[int]:
        """The rows whose keys have this hash."""
        if number not in self.keys:
            return []
        return [self.keys[number], *(seq for other, seq in self._more_keys if other == number)]

    def add(self, keys: Collection[Key], places: Mapping[str, Sequence[int]], last: int, rows: int) -> None:
        """Rows are stored, up to the seq ``last``."""
        self._add_keys(keys)
        with self._lock:
            for place, seqs in places.items():
                here = self._places.get(place)
                if here is None:
                    self._places[place] = list(seqs)
                else:
                    here += seqs
        self._last = last
        self._rows += rows

    def _add_keys(self, keys: Collection[Key]) -> None:
        known, new = self.keys, dict(keys)
        if len(new) == len(keys) and known.keys().isdisjoint(new):
            known.update(new)
            return
        for number, seq in keys:
            if known.setdefault(number, seq) != seq:
                self._more_keys.append((number, seq))

    def next_portion(self, rows: int) -> Portion:
        """What the next commit writes, of so many rows."""
        if self._placing is None:
            if self._rows < TOGETHER:
                return NOTHING
            self._placing = self._begin()
        return self._placing.cut(max(LEAST_PORTION, PORTION_PER_ROW * rows))

    def all_portions(self) -> Iterator[Portion]:
        """All that is left, in portions of one transaction."""
        if self._last > self._placed_to:
            whole = self._begin()
            yield Portion(whole.keys, whole.places, whole.end)

    def _begin(self) -> _Placing:
        numbers, places = sorted(self.keys), list[str | int]()
        keys = list(chain.from_iterable(zip(numbers, map(self.keys.__getitem__, numbers), strict=True)))
        keys += chain.from_iterable(self._more_keys)
        for place in sorted(self._places):
            places += chain.from_iterable(zip(repeat(place), self._places[place]))
        self._rows = 0
        return _Placing(self._last, keys, places)

    def take(self, portion: Portion) -> None:
        """A portion is stored."""
        placing = self._placing
        if placing is not None:
            placing.done += len(portion.keys) + len(portion.places)
        if portion.placed_to is not None:
            self._placing = None
            self._keep(portion.placed_to, frozenset())

    def drop(self, seqs: Collection[int]) -> None:
        """Rows are gone."""
        gone = frozenset(seq for seq in seqs if seq > self._placed_to)
        if gone:
            self._placing = None  # it has them; what it has written is written again
            self._rows = max(self._rows, TOGETHER)
            self._keep(self._placed_to, gone)

    def _keep(self, placed_to: int, gone: frozenset[int]) -> None:
        """Forget what is placed, or gone."""

        def cut(seqs: list[int]) -> list[int]:
            kept = seqs[bisect_right(seqs, placed_to) :]
            return [seq for seq in kept if seq not in gone] if gone else kept

        keys = [*self.keys.items(), *self._more_keys]
        self.keys, self._more_keys = {}, []
        self._add_keys([it for it in keys if it[1] > placed_to and it[1] not in gone])
        places = {place: kept for place, seqs in self._places.items() if (kept := cut(seqs))}
        with self._lock:
            self._placed_to, self._places = placed_to, places


def load_unplaced(db: sqlite3.Connection, placed_to: int) -> Unplaced:
    """Read the rows that are not yet placed. What is damaged in them is found by nobody here: of a row whose key is
    whole, the key is taken."""
    unplaced = Unplaced(placed_to)
    keys: list[Key] = []
    places: defaultdict[str, list[int]] = defaultdict(list)
    last, rows = placed_to, 0
    with _reading_bytes(db):
        for seq, *texts in _walk(db, placed_to):
            last, rows = seq, rows + 1
            type_, actor, key, target, stream, label = (
                it if isinstance(it, bytes) else str(it or "").encode() for it in texts
            )
            if key:
                keys.append((hash_bytes(actor, key), seq))
            names = [it.decode(errors="replace") for it in (actor, target, stream, label)]
            note_places(_stand_in(seq, type_, *names), places)
    unplaced.add(keys, places, last, rows)
    return unplaced


def _stand_in(seq: int, type_: bytes, actor: str, target: str, stream: str, label: str) -> Row:
    """What `rows.note_places` looks at; of other types it tells none from another."""
    known: RowType = "message" if type_ == b"message" else "record" if type_ == b"record" else "registered"
    return Row(seq=seq, at=0, type=known, actor=actor, target=target, stream=stream, label=label, data=b"")


_UNPLACED = "SELECT seq, type, actor, key, target, stream, label FROM log WHERE seq"


def _walk(db: sqlite3.Connection, after: int) -> Iterator[tuple[int, ...]]:
    """The rows behind a seq, as far as they can be read."""
    while True:
        try:
            for columns in db.execute(f"{_UNPLACED} > ? ORDER BY seq", (after,)):
                if columns[0] <= after:  # pages of the file name each other in a circle
                    raise sqlite3.DatabaseError(f"pages of the log are mixed up: #{columns[0]} is reached twice")
                after = columns[0]
                yield columns
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", None) not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_TOOBIG):
                raise
            yield from _try_each(db, range(after + 1, after + 1 + PASSED_OVER))
            after += PASSED_OVER
        else:
            return


def _try_each(db: sqlite3.Connection, seqs: Iterable[int]) -> Iterator[tuple[int, ...]]:
    for seq in seqs:
        try:
            found = db.execute(f"{_UNPLACED} = ?", (seq,)).fetchone()
        except sqlite3.DatabaseError:
            continue
        if found is not None:
            yield found


@contextmanager
def _reading_bytes(db: sqlite3.Connection) -> Iterator[None]:
    db.text_factory = bytes
    try:
        yield
    finally:
        db.text_factory = str
