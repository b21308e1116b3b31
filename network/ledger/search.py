"""Full-text search over the messages of a ledger: the definition of a word, and `SearchIndex`, the index of the durable
ledger.

The index is an FTS5 table in a separate file, ``FILE.search``. The first search creates the index, and each search
brings it up to date. Sending a message writes nothing to it. The index is not part of the ledger, so it is never backed
up or migrated. It is deleted if it cannot be read, or if it may not belong to this log (another epoch, or another boot
of the machine). Every row that the index finds is read from the log and checked again, so a wrong index never reveals a
message.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sqlite3
import unicodedata
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from roundelay.network.core.revisions import REVISIONS
from roundelay.network.core.rows import Row, Span
from roundelay.network.errors import LedgerError
from roundelay.network.messages import write_content
from roundelay.network.platforms import CLOSE_ON_EXEC, NO_FOLLOW

from . import Page, SearchPage, collect_page

T = TypeVar("T")

PRIVATE = frozenset({"direct", "mod"})
"""Kinds of messages with a single recipient. A search by the sender finds these messages too."""

MAX_WORD_CHARS = 64
"""Maximum number of characters in an indexed word. A longer word is cut, so a search compares only its beginning."""

MAX_SEARCHED, SEARCH_STEP = 4000, 1000
"""Maximum number of messages that one search examines if few of them are within its spans, and maximum number in one
step of a search."""

# In scripts without spaces between words, each character counts as a word.
_WORD = re.compile("[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\\W_\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")


def list_words(text: str) -> list[str]:
    """Return the words of a text, in order. A word is a run of letters and digits. Case and accents are removed."""
    if not text.isascii():
        decomposed = unicodedata.normalize("NFKD", text)
        # Remove accents, because people type "resume" for "résumé". Messages and queries both pass through this
        # function.
        text = "".join(character for character in decomposed if not unicodedata.combining(character))
        text = unicodedata.normalize("NFC", text).casefold()
    return [word[:MAX_WORD_CHARS] for word in _WORD.findall(text.lower())]


def read_terms(query: str) -> list[str]:
    """Return the terms of a query: its words without repetitions. A term that ends in ``*`` matches all words that
    begin with it."""
    terms: dict[str, None] = {}
    for piece in query.split():
        words = list_words(piece)
        if words and piece.endswith("*"):
            words[-1] += "*"
        terms |= dict.fromkeys(words)
    return list(terms)


def holds(row: Row, terms: Iterable[str]) -> bool:
    """Return whether the text of a message contains all terms."""
    words = _words_of(row)
    return all(
        any(word.startswith(term[:-1]) for word in words) if term[-1] == "*" else term in words for term in terms
    )


def is_within(row: Row, spans: Collection[Span] | None, sender: str, stream: str | None) -> bool:
    """Return whether a message is within the spans and the thread of a search."""
    if row.head is None or stream not in (None, row.stream):
        return False
    if spans is None or (row.actor == sender and row.head.kind in PRIVATE):
        return True
    return any(span.target == row.target and span.after < row.seq < (span.before or 2**63) for span in spans)


async def collect_matches(
    find: Callable[[int, int], Awaitable[Sequence[int]]],
    read: Callable[[Sequence[int], Callable[[Iterable[Row]], Page]], Awaitable[Page]],
    is_match: Callable[[Row], bool],
    before: int,
    limit: int,
    max_bytes: int,
) -> SearchPage:
    """Answer `Ledger.search`. ``find`` returns the newest candidates below a seq, descending. ``read`` reads the rows
    of candidates and passes them to a function."""

    def collect(rows: Iterable[Row]) -> Page:
        return collect_page(filter(is_match, rows), limit + 1, max_bytes, newest=True)

    end, matches, size = before, list[Row](), 0
    searched, step = 0, limit + 1
    while len(matches) <= limit and size <= max_bytes:
        if searched >= MAX_SEARCHED:
            return SearchPage(matches[::-1], True, end)
        # Check each candidate against its row in the log: the index may have got its words from a row that is damaged
        # or was deleted since.
        seqs = await find(end, step)
        if not seqs:
            break
        page = await read(seqs, collect)
        matches += reversed(page.rows)
        size += sum(len(row.data) for row in page.rows)
        end = page.rows[0].seq if page.has_more else seqs[-1]
        # Each `find` scans all matching words again. So ask for more candidates at a time if few of them are within the
        # spans.
        searched, step = searched + len(seqs), min(step * 4, SEARCH_STEP)
    return SearchPage(*collect_page(matches, limit, max_bytes, newest=True))


def _words_of(row: Row) -> set[str]:
    message = json.loads(row.data)
    if message.get("deleted_at"):
        return set()
    return set(list_words(message.get("text_representation") or write_content(message.get("content"))))


_TABLES = """
CREATE TABLE mark (log TEXT NOT NULL, upto INTEGER NOT NULL);
CREATE VIRTUAL TABLE said USING fts5(words, tokenize = 'ascii', detail = 'none', columnsize = 0);
"""
"""SQL of the index. `list_words` splits the words before they are stored, so that searches have the same results as in
the memory ledger. The tokenizer of the table treats every character outside ASCII as a letter."""


class SearchIndex:
    """The search index of one open ledger. All its SQL runs on the index's own thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="roundelay-search")
        self._lock = asyncio.Lock()
        self._is_closed = False

    async def catch_up(self, log: str, first: int, head: int, read: Callable[[int], Awaitable[Sequence[Row]]]) -> None:
        """Bring the index up to date with the log up to ``head``. Raises `LedgerError`.

        ``log`` is a unique name of the log, and ``first`` is the seq of its oldest message. ``read`` returns a page of
        the messages above a seq. The page begins with older messages that rows above this seq have edited or deleted.
        """
        # Hold the lock, so that only one search at a time updates the index. Searches that waited for the lock then
        # find nothing left to update.
        async with self._lock:
            upto = await self._run(partial(self._open_for, log, head))
            await self._run(partial(self._delete_below, first))
            # Read page by page, so that the first search of a long log does not hold all of its words in memory.
            while upto < head:
                rows = [row for row in await read(upto) if row.seq <= head]
                before, upto = upto, rows[-1].seq if rows else head
                await self._run(partial(self._add, rows, before, upto))

    async def find(
        self,
        terms: Sequence[str],
        spans: Sequence[Span] | None,
        sender: str,
        stream: str | None,
        before: int,
        limit: int,
    ) -> list[int]:
        """Return the seqs of the newest messages below ``before`` that may contain these terms, descending."""
        sql = "SELECT rowid FROM said WHERE said MATCH ? AND rowid > ? AND rowid < ? ORDER BY rowid DESC LIMIT ?"
        queries = [(match, after, before, limit) for match, after in _write_matches(terms, spans, sender, stream)]
        async with self._lock:
            # Hold the lock: another search may find the index damaged and delete its file.
            seqs = await self._run(lambda: [seq for values in queries for (seq,) in self._open().execute(sql, values)])
        return sorted(set(seqs), reverse=True)[:limit]

    @property
    def exists(self) -> bool:
        return self._path.exists()

    async def forget(self, first: int) -> None:
        """Remove the messages below ``first`` from the index, if the index exists. Raises `LedgerError`."""
        async with self._lock:
            await self._run(lambda: self._delete_below(first) if self._path.exists() else None)

    async def close(self) -> None:
        """Close the index after the current step has ended. A search that needs further steps fails."""
        self._is_closed = True
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)

    async def _run(self, function: Callable[[], T]) -> T:
        """Run a step on the index's thread. The step runs to its end even if the caller is cancelled. Later steps wait
        for it."""
        if self._is_closed:
            raise LedgerError(f"The ledger of {self._path} is closed.")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._guard, function)

    # --- on the thread of the index

    def _guard(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except (sqlite3.Error, OSError) as error:
            with suppress(sqlite3.Error, OSError):
                self._discard()
            raise LedgerError(
                f"The search index {self._path} cannot be used ({error}). It was deleted, and the next search creates "
                "it again. Search needs SQLite's FTS5."
            ) from error

    def _close(self) -> None:
        if self._db is not None:
            with suppress(sqlite3.Error):  # the next search creates a lost index again
                self._db.close()
            self._db = None

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            if self._path.is_symlink():  # the target of the link does not belong to Roundelay
                self._path.unlink()
            # Use mode 0600, because the index holds the words of all messages.
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR | CLOSE_ON_EXEC | NO_FOLLOW, 0o600))
            self._db = sqlite3.connect(self._path, isolation_level=None)
            self._refuse_foreign(self._db)
            self._db.execute("PRAGMA journal_mode = MEMORY")
            # Do not sync. After a crash of the machine, the index is created again (`_open_for` compares the boot).
            self._db.execute("PRAGMA synchronous = OFF")
            # Overwrite deleted data: the words of deleted messages must disappear from the file, not only from its
            # tables.
            self._db.execute("PRAGMA secure_delete = ON")
        return self._db

    def _refuse_foreign(self, db: sqlite3.Connection) -> None:
        """Raise `LedgerError` for a database with other tables. Such a file must not be deleted as if it were a damaged
        index."""
        names: list[str] = []
        with suppress(sqlite3.DatabaseError):  # the file is not a database, so it is a damaged index
            names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        if foreign := [name for name in names if name != "mark" and not name.startswith("said")]:
            self._close()
            raise LedgerError(
                f"{self._path} is another database (it has the table {foreign[0]}), but the search index needs this "
                "name. Move that file away. Until then, search does not work."
            )

    def _discard(self) -> None:
        self._close()
        self._path.unlink(missing_ok=True)

    def _open_for(self, log: str, head: int) -> int:
        """Return the seq up to which the log is indexed. If the index belongs to another log or cannot be read, create
        it again."""
        mark = None
        with suppress(sqlite3.DatabaseError):
            mark = self._open().execute("SELECT log, upto FROM mark").fetchone()
        # If the index is ahead of the log, the ledger was replaced by an older copy of its file.
        if mark is not None and mark[0] == log and mark[1] <= head:
            return int(mark[1])
        self._discard()
        db = self._open()
        db.executescript(_TABLES)
        db.execute("INSERT INTO mark VALUES (?, 0)", (log,))
        return 0

    def _add(self, rows: Sequence[Row], before: int, upto: int) -> None:
        db = self._open()
        db.execute("BEGIN")
        revised = [row.seq for row in rows if row.seq <= before]
        if revised:
            db.execute("DELETE FROM said WHERE rowid IN (SELECT value FROM json_each(?))", (json.dumps(revised),))
            # Without this statement, the deleted words would stay in older parts of the index.
            db.execute("INSERT INTO said (said) VALUES ('optimize')")
        # Use one statement: with `executemany`, the thread would release the GIL for each row (see `writes`).
        words = json.dumps([(row.seq, _index_words(row)) for row in rows if row.type not in REVISIONS])
        db.execute("INSERT INTO said (rowid, words) SELECT value ->> 0, value ->> 1 FROM json_each(?)", (words,))
        # Update the mark in the same transaction as the rows. Otherwise, after a kill, rows would be indexed twice or
        # never.
        db.execute("UPDATE mark SET upto = ?", (upto,))
        db.execute("COMMIT")

    def _delete_below(self, first: int) -> None:
        db = self._open()
        if db.execute("SELECT 1 FROM said WHERE rowid < ? LIMIT 1", (first,)).fetchone() is None:
            return
        db.execute("DELETE FROM said WHERE rowid < ?", (first,))
        db.execute(
            "INSERT INTO said (said) VALUES ('optimize')"
        )  # without this statement, the deleted words would stay in older parts of the index


def _index_words(row: Row) -> str:
    """Return the words of a message, preceded by marks. A mark is a word that stands for the target, the thread or the
    sender. Marks let FTS5 select only matches within the reader's spans."""
    places = [_mark("t", row.target), _mark("s", row.stream)]
    if row.head is not None and row.head.kind in PRIVATE:
        places.append(_mark("a", row.actor))
    return " ".join([*places, *_words_of(row)]) if row.head is not None else ""


def _mark(kind: str, name: str) -> str:
    """Return a word that stands for a name and cannot occur in a text."""
    return f"§{kind}{name.encode().hex()}"


def _write_matches(
    terms: Sequence[str], spans: Sequence[Span] | None, sender: str, stream: str | None
) -> Iterator[tuple[str, int]]:
    """Yield FTS5 queries, each with the seq above which it applies.

    Targets that the reader may read from the beginning and targets that the reader joined later have separate queries.
    Otherwise the search of a new member would scan all messages from before the join.
    """
    required = [f'"{term[:-1]}" *' if term[-1] == "*" else f'"{term}"' for term in terms]
    if stream is not None:
        required.append(f'"{_mark("s", stream)}"')
    if spans is None:
        yield " AND ".join(required), 0
        return
    joined: dict[str, int] = {}
    for span in spans:
        joined[span.target] = min(span.after, joined.get(span.target, span.after))
    whole = [_mark("a", sender), *(_mark("t", target) for target, after in joined.items() if after <= 0)]
    yield " AND ".join([*required, _any(whole)]), 0
    if late := [_mark("t", target) for target, after in joined.items() if after > 0]:
        yield " AND ".join([*required, _any(late)]), min(after for after in joined.values() if after > 0)


def _any(marks: Iterable[str]) -> str:
    return "(" + " OR ".join(map('"{}"'.format, marks)) + ")"
