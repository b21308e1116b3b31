"""`NewestRows`: a cache of the newest rows, and of the newest values about conversations and triggers.

A reaction needs its trigger, the messages of its thread, and the budget of its conversation. Nearly always, all of
these were stored a moment ago. An answer from this cache needs no switch to another thread, which would cost as much as
the read itself.

The cache has every row above `_since`, and every value about a message above `_since`. So a row or value above `_since`
that is not in the cache does not exist. A value about an older message is in the cache only if it was written recently.
Only the event loop uses the cache. No IO.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from roundelay.network.core.rows import Row
from roundelay.network.core.tables import ConversationBudget, Facts, LookupRequest, Table, TableWrite

from .row_reader import Damage

MAX_ROWS, MAX_ROW_BYTES = 8192, 8 << 20
"""Maximum number of cached rows, and their maximum size in bytes."""
MAX_VALUE_BYTES = 4 << 20
"""Maximum memory of the cached values, in bytes. The size of each value is estimated."""
_VALUE_BYTES, _ITEM_BYTES = 600, 100
_UNKNOWN = 2**62
"""Value of ``_since`` while the cache cannot answer any request."""


class NewestRows:
    """The cache of the newest rows of one ledger. It is empty until `restart`. Rows and values in ``damage`` are always
    read from the file, so that every reader gets the same answer."""

    def __init__(self, damage: Damage) -> None:
        self._damage = damage
        self._since = _UNKNOWN
        self._head = 0
        """Newest cached seq. The same as ``_since`` if no row is cached."""
        self._rows: dict[int, Row] = {}
        """Cached rows by seq, ascending."""
        self._revising: set[int] = set()
        """Seqs of rows that a commit in progress is rewriting. The file may already have the new versions."""
        self._row_bytes = 0
        self._values: dict[tuple[Table, str], Any] = {}
        """Cached values, least recently written first. None stands for a deleted value."""
        self._value_bytes = 0

    def restart(self, head: int) -> None:
        """Empty the cache. From now on, rows after the seq ``head`` are cached."""
        self.forget()
        self._since = self._head = head

    def forget(self) -> None:
        """Empty the cache, because the stored rows may differ from the cached rows. The next added row restarts the
        cache."""
        self._since = self._head = _UNKNOWN
        self._rows.clear()
        self._values.clear()
        self._revising.clear()
        self._row_bytes = self._value_bytes = 0

    def add(self, rows: Sequence[Row], writes: Iterable[TableWrite]) -> None:
        """Add a batch that the ledger has stored."""
        # An earlier batch is missing in the cache, because the outcome of its commit was unknown.
        if rows and rows[0].seq != self._head + 1:
            self.restart(rows[0].seq - 1)
        for row in rows:
            self._rows[row.seq] = row
            self._row_bytes += len(row.data)
            self._head = row.seq
        for write in writes:
            if write.table in _CACHED_TABLES and self._since != _UNKNOWN:
                self._add_value((write.table, write.key), write.value)
        while self._row_bytes > MAX_ROW_BYTES or len(self._rows) > MAX_ROWS:
            self._drop_oldest_row()

    def begin_revising(self, seqs: Iterable[int]) -> None:
        """Read these rows from the file, not from the cache, until `end_revising`."""
        self._revising.update(seqs)

    def end_revising(self, seqs: Iterable[int], rows: Iterable[Row]) -> None:
        """Replace the cached rows that an edit or a deletion has rewritten. ``rows`` are the new versions of these
        rows."""
        self._revising.difference_update(seqs)
        for row in rows:
            if row.seq in self._rows:
                self._row_bytes += len(row.data) - len(self._rows[row.seq].data)
                self._rows[row.seq] = row

    def _add_value(self, name: tuple[Table, str], value: Any) -> None:
        if name in self._values:
            self._value_bytes -= _estimate_bytes(self._values.pop(name))
        self._values[name] = value
        self._value_bytes += _estimate_bytes(value)
        while self._value_bytes > MAX_VALUE_BYTES:
            oldest = next(iter(self._values))
            self._value_bytes -= _estimate_bytes(self._values.pop(oldest))
            # The dropped value may still be in the file. Raise `_since`, so that the missing cache entry does not mean
            # that the value does not exist.
            while self._since < _read_seq(*oldest):
                self._drop_oldest_row()

    def _drop_oldest_row(self) -> None:
        if self._rows:
            seq = next(iter(self._rows))
            self._row_bytes -= len(self._rows.pop(seq).data)
            self._since = seq
        else:
            self.forget()

    # --- answers; None means that the file must be read

    def find(self, seqs: Iterable[int]) -> dict[int, Row] | None:
        """Return the rows with these seqs. Return None if the file must be read."""
        rows: dict[int, Row] = {}
        for seq in seqs:
            if seq <= self._since or seq in self._damage.rows or seq in self._revising:
                return None
            if (row := self._rows.get(seq)) is not None:
                rows[seq] = row
        return rows

    def knows_value(self, table: Table, key: str) -> bool:
        """Return whether `value` would return the stored value without a read of the file."""
        if f"{table}/{key}" in self._damage.rows:
            return False
        return (table, key) in self._values or (table in _CACHED_TABLES and _read_seq(table, key) > self._since)

    def value(self, table: Table, key: str) -> Any:
        """Return a value for which `knows_value` is true. Return None if the value does not exist."""
        return self._values.get((table, key))

    def recall(self, request: LookupRequest) -> Facts | None:
        """Answer a request as `Ledger.recall` does. Return None if the file must be read."""
        rows = self.find(request.seqs)
        if rows is None:
            return None
        heads = {seq: row.head for seq, row in rows.items() if row.head is not None}
        names = {*request.cold, *(("root", str(head.root)) for head in heads.values())}
        if not all(self.knows_value(*name) for name in names):
            return None
        values = ((name, self.value(*name)) for name in names)
        return Facts(heads=heads, cold={name: value for name, value in values if value is not None})


_CACHED_TABLES = frozenset({"root", "triggered"})
"""Tables with values about messages, whose keys end in the message's seq. Each message and each start of a reaction
needs these values."""


def _read_seq(table: Table, key: str) -> int:
    seq = key if table == "root" else key.rpartition("/")[2]
    return int(seq) if seq.isdecimal() else 0  # a request that will be refused may contain an invalid seq


def _estimate_bytes(value: Any) -> int:
    if not isinstance(value, ConversationBudget):
        return _VALUE_BYTES
    items = len(value.spent) + len(value.parties) + len(value.others) + len(value.claims) + len(value.stopped_in)
    return _VALUE_BYTES + _ITEM_BYTES * items
