"""`Ledger`, the protocol of the append-only log with its state tables, and the types that its methods use.

Three implementations pass one contract suite (tests/contract/test_ledger.py): `sqlite.SQLiteLedger`,
`memory.MemoryLedger`, and the cluster's `ReplicatedLedger`. The hub is the only writer. It calls `append` from one task
at a time.
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
    "TrimStep",
    "Trimmed",
    "Unstorable",
    "collect_page",
    "find_newest_message",
]


class KeyTaken(Exception):
    """Nothing was appended, because the ledger already has a row with one of these idempotency keys."""


class Unstorable(Exception):
    """Nothing was appended, because a row or a table write cannot be encoded. This is a bug in the code that created
    the row or the write. The storage still works."""


class LeadershipLost(LedgerError):
    """Nothing was appended, because another node has become the writer of the shared log. ``leader`` is the HOST:PORT
    of that node, or an empty string."""

    leader = ""


class LogFull(LedgerError):
    """Nothing was appended, because the shared log has no room for the batch. The ledger still accepts smaller
    batches."""


class Meta(Struct, frozen=True, kw_only=True):
    """Identity and extent of a ledger: the epoch that identifies its history, its name, its first and newest seq, and
    its newest timestamp."""

    epoch: str
    name: str
    first_seq: int
    head: int
    stamp: int


class Trim(Struct, frozen=True, kw_only=True):
    """Limits of a trim. Rows with timestamps before ``messages_before`` or ``records_before`` (ms) may be deleted; None
    keeps all rows. The oldest rows may also be deleted while the storage is larger than ``max_bytes``. Rows from seq
    ``pinned`` on are never deleted. Each call deletes at most ``limit`` rows."""

    messages_before: int | None = None
    records_before: int | None = None
    max_bytes: int | None = None
    pinned: int
    limit: int = 5000


class Trimmed(Struct, frozen=True, kw_only=True):
    """Result of a trim: the number of deleted rows, and the lowest seq whose message can still be delivered. The caller
    repeats the trim until no row is deleted."""

    dropped: int
    first_seq: int
    is_pinned: bool
    """Whether rows that are old enough to be deleted are kept because of `Trim.pinned`."""


SeqBound = Annotated[int, Bound(ge=0, le=SEQ_LIMIT)]


class TrimStep(Struct, frozen=True):
    """One step of a trim: delete every record below ``records``, and every other row below ``messages``."""

    messages: SeqBound
    records: SeqBound
    is_last: bool
    """Whether this step ends the trim of messages. Values about deleted messages are deleted only in the last step,
    because this deletion scans whole tables."""
    stamp: int = 0
    """The newest timestamp (ms) that was assigned. The ledger will not assign an older timestamp, even if no row is
    left."""


class Page(NamedTuple):
    """Rows of a range, ascending. ``has_more`` says whether the range contains more rows."""

    rows: list[Row]
    has_more: bool


HeadAt = tuple[int, MessageHead | None]
"""A seq and the head of its message. The head is None if the row is so damaged that its head is unreadable."""


class SearchPage(NamedTuple):
    """Rows that a search found, ascending. ``has_more`` says whether more rows may match. If ``end`` is set, the search
    reached its work limit and did not examine the rows below this seq."""

    rows: list[Row]
    has_more: bool
    end: int | None = None


def collect_page(rows: Iterable[Row], limit: int, max_bytes: int, *, newest: bool = False) -> Page:
    """Collect the first rows that fit into a page. ``newest`` says that the rows descend. The function reads one row
    beyond the page and does not return it."""
    page: list[Row] = []
    size, has_more = 0, False
    for row in rows:
        size += len(row.data)
        if page and (len(page) == limit or size > max_bytes):
            has_more = True
            break
        page.append(row)
    return Page(page[::-1] if newest else page, has_more)


class ThreadSummary(Struct, frozen=True, gc=False):
    thread_id: str
    last_seq: int
    messages: int


MAX_PAGE_BYTES = 4 * 1024 * 1024
RETENTION_FIELDS: dict[Table, str] = {
    "root": "last_seq",
    "given_up": "trigger",
    "stopped": "seq",
    "undelivered": "seq",
    "spent_out": "seq",
}
"""Name of the field that holds a message's seq, for each table about messages. A value is deleted with the message that
it names. For example, a conversation's budget is kept until the last message charged to it is deleted."""
KEYED_BY_SEQ: tuple[Table, ...] = ("triggered", "tried", "dead")
"""Tables about messages. Their keys end in the message's seq."""


def retention_seq(table: Table, key: str, value: Any) -> int:
    """Return the seq of the message to which a table's value belongs. Retention deletes the value with the message."""
    return int(getattr(value, RETENTION_FIELDS[table]) if table in RETENTION_FIELDS else key.partition("/")[2])


class Ledger(Protocol):
    """The log and its state tables. Every method raises `LedgerError` if the storage fails. After a failed `append`,
    its outcome is unknown, and the ledger must be reopened.

    A page has at most ``limit`` rows and about ``max_bytes`` of data, but at least one row if the range is not empty. A
    damaged row never makes a read fail. Pages, messages, rows and known keys contain a placeholder instead
    (`damaged_row`). Heads and values of tables leave the damaged row out.
    """

    @property
    def damaged(self) -> int:
        """Number of damaged rows found so far. Each damaged row is logged once."""

    @property
    def is_answering(self) -> bool:
        """Whether the servers of a shared log respond. While they do not respond, an append has to wait."""

    async def open(self) -> tuple[Meta, list[TableWrite]]:
        """Open or create the ledger. Return its identity and the values of `LOADED_TABLES`. Raises `LedgerError` if the
        storage fails or one of these values is damaged."""

    async def close(self) -> None:
        """Close the ledger cleanly. Idempotent."""

    async def verify(self) -> None:
        """Check that the next start will find the stored data. Raises `LedgerError` if not; the ledger must then be
        reopened."""

    def recall(self, request: LookupRequest) -> Facts | None:
        """Answer a batch's lookup request from memory, except for its keys. Return None if the storage must be read."""

    async def lookup(self, request: LookupRequest) -> Facts:
        """Answer a batch's lookup request. For each head that is found, the answer also contains the ``root`` value of
        its conversation if this value exists."""

    async def append(self, rows: Sequence[Row], writes: Sequence[TableWrite]) -> None:
        """Store the rows and writes in one transaction. When this method returns, they are durable at the configured
        level.

        Raises `KeyTaken`, `Unstorable` or `LogFull` if nothing was stored.
        """

    def check(self, rows: Sequence[Row], writes: Sequence[TableWrite]) -> None:
        """Encode rows and table writes like `append`, but store nothing. Raises `Unstorable`."""

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
        """Return messages with ``after`` < seq <= ``until`` that are in a span, or that ``sender`` sent to one
        participant or mod. The page contains the oldest of these messages, or the newest, in ascending order."""

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
        """Return messages of one thread in ascending order: the newest ones of the range, or the oldest ones."""

    async def reaction(
        self, reaction: str, after: int, limit: int, *, actor: str | None = None, max_bytes: int = MAX_PAGE_BYTES
    ) -> Page:
        """Return records of one reaction with seq > ``after``, ascending. ``actor`` limits the result to records of
        this writer."""

    async def inbox_heads(self, spans: Sequence[Span], sender: str, after: int, until: int, limit: int) -> list[HeadAt]:
        """Return the heads of the newest ``limit`` messages that `inbox` would return, newest first.

        Heads are not compared with their checksums. A caller that shows a message must read the row, which is compared.
        """

    async def newest_heads(
        self, after: Mapping[str, int], limit: int, *, before: int | None = None
    ) -> dict[str, list[HeadAt]]:
        """Return the heads of the newest ``limit`` messages of each thread, newest first. ``after`` maps each thread to
        a seq. Only messages above this seq and below ``before`` are read. Heads are not compared with their
        checksums."""

    async def first_seqs(self, threads: Collection[str]) -> dict[str, int]:
        """Return the seq of the first message of each thread, even if this message is damaged. Threads without messages
        are left out."""

    async def threads(
        self,
        spans: Sequence[Span],
        sender: str,
        *,
        before: int | None = None,
        limit: int = 2**31,
        among: Collection[str] | None = None,
    ) -> list[ThreadSummary]:
        """Return the threads of the readable messages of an inbox (`visibility.may_read`), newest first. Each summary
        counts only these messages. Return at most ``limit`` threads whose last seq is below ``before``. ``among``
        limits the result to these threads."""

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
    ) -> SearchPage:
        """Return the newest messages below ``before`` whose text has all terms (`search.read_terms`), ascending.

        ``spans`` limits the search to messages that `inbox` would return, ``stream`` to messages of one thread. If many
        messages with these terms are outside the spans, the search examines only some of them, and the page has an
        ``end``.
        """

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
        """Return the seqs of the newest ``limit`` messages below ``before`` that `search` would examine, descending.

        No row is read. A caller that shows a message must check the message first (`search.is_within`, `search.holds`).
        """

    async def forget_dropped(self) -> None:
        """Remove the rows that `trim` has deleted from the search index."""

    async def all_threads(
        self, *, before: int | None = None, limit: int = 2**31, among: Collection[str] | None = None
    ) -> list[ThreadSummary]:
        """Return every thread of the log, newest first, in the form of `threads`."""

    async def messages(self, seqs: Iterable[int]) -> dict[int, Row]:
        """Return the messages with these seqs. Missing messages are left out."""

    async def heads(self, seqs: Iterable[int]) -> dict[int, MessageHead]:
        """Return the heads of the messages with these seqs. Missing messages are left out."""

    async def cold(self, table: Table, prefix: str, limit: int, *, after: str = "") -> list[tuple[str, Any]]:
        """Return keys and values of a cold table, ascending by key. Only keys that begin with ``prefix`` and are above
        ``after`` are returned."""

    async def lookup_cold(self, table: Table, key: str) -> Any:
        """Return one value of a cold table, or None if the value does not exist."""

    async def expire_calls(self, before: int) -> None:
        """Delete the results of calls that are older than ``before`` (ms). The deletion runs in steps, so other writes
        are possible in between."""

    async def trim(self, trim: Trim) -> Trimmed:
        """Delete old rows within the limits of a `Trim`."""

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
        """Return records of one agent and kind with seq > ``after``, ascending. ``reaction`` limits the result to
        records of this reaction."""

    async def rows(self, after: int, limit: int, *, max_bytes: int | None = None) -> list[Row]:
        """Return at most ``limit`` rows with seq > ``after``, ascending. The result is empty only at the end of the
        log. Exports use this method."""


async def find_newest_message(ledger: Ledger, thread_id: str, before: int | None = None) -> Row | None:
    """Return the newest undamaged message of a thread, or None if the thread has no such message."""
    while rows := (await ledger.thread(thread_id, before=before, limit=1)).rows:
        if not rows[0].is_damaged:
            return rows[0]
        before = rows[0].seq
    return None
