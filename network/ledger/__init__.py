"""The ledger's seam: the append-only log with its tables, and what the hub asks of it.

Three implementations, `sqlite.SQLiteLedger`, `memory.MemoryLedger` and `replicated.ReplicatedLedger`, pass one contract
suite (tests/contract/test_ledger.py); `followed.ReadOnlyIndex` reads alone. The hub is the only writer and calls `append` from one task at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Protocol

from msgspec import Meta as Bound
from msgspec import Struct

from roundelay.network.core.rows import MessageHead, Row, Span
from roundelay.network.core.tables import Facts, LookupRequest, Table, TableWrite
from roundelay.network.errors import LedgerError
from roundelay.network.frames import SEQ_LIMIT

__all__ = [
    "MAX_PAGE_BYTES",
    "Cut",
    "HeadAt",
    "KeyTaken",
    "LeadershipLost",
    "Ledger",
    "LogFull",
    "Meta",
    "Page",
    "Row",
    "Span",
    "ThreadSummary",
    "Trim",
    "Trimmed",
    "Unstorable",
    "Wanted",
    "find_newest",
    "take_page",
]


class KeyTaken(Exception):
    """Nothing was appended: a row with the idempotency key of one of them is stored already."""


class Unstorable(Exception):
    """Nothing was appended: a row or a put holds what cannot be encoded. A defect of whoever made it; the storage is
    sound."""


class LeadershipLost(LedgerError):
    """Nothing was appended: another record is where this one was to be. Somebody else writes. ``leader`` is the node
    that leads now, as HOST:PORT, where that is known."""

    leader = ""


class LogFull(LedgerError):
    """Nothing was appended, for want of room. The ledger goes on, and takes what there is room for."""


class Meta(Struct, frozen=True, kw_only=True):
    """What identifies a ledger."""

    epoch: str
    name: str
    first_seq: int
    head: int
    stamp: int


class Trim(Struct, frozen=True, kw_only=True):
    """What may be dropped: rows stamped before these times (ms; None keeps all), or the oldest while the storage is
    larger than ``max_bytes``; never a row from ``pinned`` on. At most ``limit`` rows a call."""

    messages_before: int | None = None
    records_before: int | None = None
    max_bytes: int | None = None
    pinned: int
    limit: int = 5000


class Trimmed(Struct, frozen=True, kw_only=True):
    """What a trim came to: how many rows went, the smallest seq whose message can still be delivered, and whether more
    was to go but for the pin. Call again until nothing went."""

    dropped: int
    first_seq: int
    is_held: bool


SeqBound = Annotated[int, Bound(ge=0, le=SEQ_LIMIT)]


class Cut(Struct, frozen=True):
    """What one step of a trim drops: every record below ``records``, and every other row below ``messages``."""

    messages: SeqBound
    records: SeqBound
    is_last: bool
    """Whether messages are dropped as far as they may be: what is kept about those that are gone goes then, since that
    looks through whole tables."""
    stamp: int = 0
    """The newest time (ms) that was given out: none older is, also where no row is left."""


class Page(NamedTuple):
    """Rows of a range, ascending, and whether the range holds more beyond them."""

    rows: list[Row]
    has_more: bool


HeadAt = tuple[int, MessageHead | None]
"""A seq and the head of its message; None where the row is damaged so much that it has none."""


class Found(NamedTuple):
    """What a search found, ascending, as a `Page` is; with an ``end`` it has looked at enough, and not at what is below
    that seq."""

    rows: list[Row]
    has_more: bool
    end: int | None = None


def take_page(rows: Iterable[Row], limit: int, max_bytes: int, *, newest: bool = False) -> Page:
    """The first of these rows, as far as a page goes; ``newest`` says that they descend. What does not fit is never
    kept."""
    found: list[Row] = []
    size, has_more = 0, False
    for row in rows:
        size += len(row.data)
        if found and (len(found) == limit or size > max_bytes):
            has_more = True
            break
        found.append(row)
    return Page(found[::-1] if newest else found, has_more)


class ThreadSummary(Struct, frozen=True, gc=False):
    thread_id: str
    last_seq: int
    messages: int


MAX_PAGE_BYTES = 4 * 1024 * 1024
KEPT_WITH: dict[Table, str] = {
    "root": "last_seq",
    "given_up": "trigger",
    "stopped": "seq",
    "undelivered": "seq",
    "spent_out": "seq",
}
"""Of tables about messages, the field with the seq of the message until whose end a value is kept: a root's budget
counts until the last message that it was charged for is gone."""
KEYED_BY_SEQ: tuple[Table, ...] = ("triggered", "tried", "dead")
"""Those whose keys end in that seq."""


def seq_of(table: Table, key: str, value: Any) -> int:
    """The seq of the message until whose end a value of one of these tables is kept."""
    return int(getattr(value, KEPT_WITH[table]) if table in KEPT_WITH else key.partition("/")[2])


class Ledger(Protocol):
    """The log and its tables. Every method raises `LedgerError` when the storage fails; after a failed `append` its
    outcome is unknown and the ledger must be reopened. A page ends at ``limit`` rows or before ``max_bytes`` of data;
    one row is always given.

    A row that is found not to be what was stored never fails a read: pages, messages, rows and known keys hold its
    stand-in (`damaged_row`) in its place; heads and values of tables leave it out."""

    @property
    def damaged(self) -> int:
        """How many rows were found damaged so far, each once; as many were told in the log."""

    @property
    def is_answering(self) -> bool:
        """Whether others who hold a part of it answer; what is stored meanwhile may have to wait."""

    async def open(self) -> tuple[Meta, list[TableWrite]]:
        """Open or create; give what it is and the rows of `LOADED_TABLES`. Raises `LedgerError` also when one of these
        is damaged."""

    async def close(self) -> None:
        """Close cleanly. Idempotent."""

    async def verify(self) -> None:
        """Make sure that what is stored is still where the next start looks for it. Raises `LedgerError`: then it must
        be reopened."""

    async def lookup(self, wanted: LookupRequest) -> Facts:
        """Answer a batch's questions. With each head that is found comes its root's ``root`` row, if there is one."""

    async def append(self, rows: Sequence[Row], puts: Sequence[TableWrite]) -> None:
        """Store all of it in one transaction; durable, as configured, when it returns.

        Raises `KeyTaken`, `Unstorable` or `LogFull`: then nothing is stored.
        """

    def check(self, rows: Sequence[Row], puts: Sequence[TableWrite]) -> None:
        """Encode these as `append` does, and store nothing. Raises `Unstorable`."""

    async def inbox(
        self,
        spans: Sequence[Span],
        sender: str,
        after: int,
        until: int,
        limit: int,
        *,
        newest: bool = False,
        max_bytes: int = MAX_PAGE_BYTES,
    ) -> Page:
        """Messages with ``after`` < seq <= ``until`` that lie in a span, or were sent by ``sender`` to one participant
        or mod; ascending: the oldest of them, or the newest."""

    async def thread(
        self,
        stream: str,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int,
        newest: bool = True,
        max_bytes: int = MAX_PAGE_BYTES,
    ) -> Page:
        """Messages of one thread, ascending: the newest of the range, or its oldest."""

    async def reaction(
        self, reaction: str, after: int, limit: int, *, actor: str | None = None, max_bytes: int = MAX_PAGE_BYTES
    ) -> Page:
        """Records under one reaction's id with seq > ``after``, ascending; of one who wrote them, or of all."""

    async def inbox_heads(self, spans: Sequence[Span], sender: str, after: int, until: int, limit: int) -> list[HeadAt]:
        """The heads of the newest ``limit`` messages that `inbox` would give, newest first. Not compared with what was
        stored: who shows a message reads its row."""

    async def newest_heads(
        self, after: Mapping[str, int], limit: int, *, before: int | None = None
    ) -> dict[str, list[HeadAt]]:
        """Of each of these threads the heads of its newest ``limit`` messages above a seq and below ``before``, newest
        first. Not compared with what was stored, as those of `inbox_heads`."""

    async def first_seqs(self, threads: Collection[str]) -> dict[str, int]:
        """Return the seq of the first message of each of these threads that has one, damaged or not."""

    async def threads(
        self,
        spans: Sequence[Span],
        sender: str,
        *,
        before: int | None = None,
        limit: int = 2**31,
        among: Collection[str] | None = None,
    ) -> list[ThreadSummary]:
        """Threads of the messages that `inbox` would give and that may be read (`visibility.may_read`), newest first,
        each with how many there are; the first
        ``limit`` of those whose last seq is below ``before``, of all or ``among`` these."""

    async def search(
        self,
        terms: Sequence[str],
        spans: Sequence[Span] | None,
        sender: str,
        *,
        stream: str | None = None,
        before: int | None = None,
        limit: int,
        max_bytes: int = MAX_PAGE_BYTES,
    ) -> Found:
        """Messages whose text has all of these terms (`search.read_terms`), ascending: the newest below ``before``, of
        those that `inbox` would give, or of all without spans; of one thread, or of all. Of many that have these terms
        and are not within the spans it looks at a part, and gives the ``end`` of it."""

    async def search_seqs(
        self,
        terms: Sequence[str],
        spans: Sequence[Span],
        sender: str,
        *,
        stream: str | None = None,
        before: int,
        limit: int,
    ) -> list[int]:
        """Return the seqs of the newest ``limit`` messages below ``before`` that `search` would look at, descending. No
        row is read: whoever shows one checks it (`search.is_within`, `search.holds`)."""

    async def forget_dropped(self) -> None:
        """Take what `trim` has dropped out of what is kept beside the log for searches."""

    async def all_threads(
        self, *, before: int | None = None, limit: int = 2**31, among: Collection[str] | None = None
    ) -> list[ThreadSummary]:
        """Every thread of the log, newest first, as in `threads`."""

    async def messages(self, seqs: Iterable[int]) -> dict[int, Row]:
        """The messages under these seqs, as far as they exist."""

    async def heads(self, seqs: Iterable[int]) -> dict[int, MessageHead]:
        """The heads of the messages under these seqs, as far as they exist."""

    async def cold(self, table: Table, prefix: str, limit: int, *, after: str = "") -> list[tuple[str, Any]]:
        """Keys and values of a table that is not loaded, whose keys begin with ``prefix`` and are above ``after``;
        ascending by key."""

    async def lookup_cold(self, table: Table, key: str) -> Any:
        """One value of a table that is not loaded, or None."""

    async def expire_calls(self, before: int) -> None:
        """Forget the results of calls that are older than ``before`` (ms), in steps between which others write."""

    async def trim(self, trim: Trim) -> Trimmed:
        """Drop old rows."""

    async def records(
        self,
        agent_id: str,
        kind: str,
        after: int,
        limit: int,
        *,
        reaction: str | None = None,
        max_bytes: int = MAX_PAGE_BYTES,
    ) -> Page:
        """Records of one agent and kind with seq > ``after``, ascending; of one of its reactions, or of all."""

    async def rows(self, after: int, limit: int, *, max_bytes: int | None = None) -> list[Row]:
        """Every row with seq > ``after``, ascending, at most ``limit``: the export. Empty at the end only."""


async def find_newest(ledger: Ledger, thread_id: str, before: int | None = None) -> Row | None:
    """The newest message of a thread that can be read; what is damaged is passed over."""
    while rows := (await ledger.thread(thread_id, before=before, limit=1)).rows:
        if not rows[0].is_damaged:
            return rows[0]
        before = rows[0].seq
    return None
