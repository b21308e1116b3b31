"""Full text over the messages of a ledger: what a word is, and the index of the durable ledger.

The index is an FTS5 table in a file of its own, ``FILE.search``: the first search makes it, each search brings it up to
date, and a send writes nothing into it. It is no part of the ledger: it is never backed up or migrated, and is thrown
away wherever it is not known to be that of this very log (another epoch, another start of the machine), or cannot be
read. What it finds is read from the log and looked at again, so that an index that is wrong shows nobody anything.
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

from roundelay.network.core.rows import Row, Span
from roundelay.network.errors import LedgerError
from roundelay.network.messages import write_content
from roundelay.network.platforms import CLOSE_ON_EXEC, NO_FOLLOW

T = TypeVar("T")

PRIVATE = frozenset({"direct", "mod"})
"""Kinds of messages that their sender finds by having sent them."""

MAX_WORD_CHARS = 64
"""What is longer is found by its beginning."""

# Scripts that put no space between words: each of their characters is a word.
_WORD = re.compile("[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\\W_\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")


def list_words(text: str) -> list[str]:
    """Give the words of a text in the order in which they stand: runs of letters and digits, whatever their case and
    accents are."""
    if not text.isascii():
        marked = unicodedata.normalize("NFKD", text)
        text = unicodedata.normalize("NFC", "".join(it for it in marked if not unicodedata.combining(it))).casefold()
    return [word[:MAX_WORD_CHARS] for word in _WORD.findall(text.lower())]


def read_terms(query: str) -> list[str]:
    """Give what a query asks for: its words, each once; one that ends in ``*`` asks for words that begin so."""
    terms: dict[str, None] = {}
    for piece in query.split():
        words = list_words(piece)
        if words and piece.endswith("*"):
            words[-1] += "*"
        terms |= dict.fromkeys(words)
    return list(terms)


def holds(row: Row, terms: Iterable[str]) -> bool:
    """Tell whether a message has all of these terms in its text."""
    words = _words_of(row)
    return all(any(it.startswith(term[:-1]) for it in words) if term[-1] == "*" else term in words for term in terms)


def is_within(row: Row, spans: Collection[Span] | None, sender: str, stream: str | None) -> bool:
    """Tell whether a message is one of those that `Ledger.search` is asked about."""
    if row.head is None or stream not in (None, row.stream):
        return False
    if spans is None or (row.actor == sender and row.head.kind in PRIVATE):
        return True
    return any(it.target == row.target and it.after < row.seq < (it.before or 2**63) for it in spans)


def _words_of(row: Row) -> set[str]:
    message = json.loads(row.data)
    return set(list_words(message.get("text_representation") or write_content(message.get("content"))))


_TABLES = """
CREATE TABLE mark (log TEXT NOT NULL, upto INTEGER NOT NULL);
CREATE VIRTUAL TABLE said USING fts5(words, tokenize = 'ascii', detail = 'none', columnsize = 0);
"""
"""The words are made here, as the other ledger makes them: to this tokenizer whatever is no ASCII is a letter."""


class SearchIndex:
    """The index of one ledger's file, from its opening to its closing. It works on a thread of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="roundelay-search")
        self._turn = asyncio.Lock()
        self._is_closed = False

    async def catch_up(self, log: str, first: int, head: int, read: Callable[[int], Awaitable[Sequence[Row]]]) -> None:
        """Bring it up to ``head``; ``log`` is what no other log is called, ``first`` its oldest message, and ``read``
        gives a page of its messages above a seq. Raises `LedgerError`."""
        async with self._turn:
            upto = await self._run(partial(self._begin, log, head))
            await self._run(partial(self._forget, first))
            while upto < head:
                rows = [row for row in await read(upto) if row.seq <= head]
                upto = rows[-1].seq if rows else head
                await self._run(partial(self._add, rows, upto))

    async def find(
        self,
        terms: Sequence[str],
        spans: Sequence[Span] | None,
        sender: str,
        stream: str | None,
        before: int,
        limit: int,
    ) -> list[int]:
        """Give the seqs of the newest messages below ``before`` that may have these terms, descending."""
        sql = "SELECT rowid FROM said WHERE said MATCH ? AND rowid > ? AND rowid < ? ORDER BY rowid DESC LIMIT ?"
        asked = [(match, after, before, limit) for match, after in _write_matches(terms, spans, sender, stream)]
        async with self._turn:
            found = await self._run(lambda: [seq for it in asked for (seq,) in self._open().execute(sql, it)])
        return sorted(set(found), reverse=True)[:limit]

    async def forget(self, first: int) -> None:
        """Take out what is below ``first``, if there is an index. Raises `LedgerError`."""
        async with self._turn:
            await self._run(lambda: self._forget(first) if self._path.exists() else None)

    async def close(self) -> None:
        """Close it behind the step that is under way; a search that is not done yet fails."""
        self._is_closed = True
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)

    async def _run(self, function: Callable[[], T]) -> T:
        """Run a step to its end, also if who awaits it is cancelled; the next one begins behind it."""
        if self._is_closed:
            raise LedgerError(f"The ledger of {self._path} is closed.")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._guard, function)

    # --- on its thread

    def _guard(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except (sqlite3.Error, OSError) as error:
            with suppress(sqlite3.Error, OSError):
                self._discard()
            raise LedgerError(
                f"{self._path}, by which messages are searched, cannot be used ({error}); it was thrown away and the "
                "next search makes it anew. Without SQLite's FTS5 there is no search."
            ) from error

    def _close(self) -> None:
        if self._db is not None:
            with suppress(sqlite3.Error):  # whatever it has lost is made anew
                self._db.close()
            self._db = None

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            if self._path.is_symlink():  # what it leads to is somebody else's
                self._path.unlink()
            # it holds what was said
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR | CLOSE_ON_EXEC | NO_FOLLOW, 0o600))
            self._db = sqlite3.connect(self._path, isolation_level=None)
            self._refuse_foreign(self._db)
            self._db.execute("PRAGMA journal_mode = MEMORY")
            self._db.execute("PRAGMA synchronous = OFF")
            self._db.execute("PRAGMA secure_delete = ON")
        return self._db

    def _refuse_foreign(self, db: sqlite3.Connection) -> None:
        """Raise `LedgerError` for a database with other tables than ours: it is nobody's to throw away."""
        names: list[str] = []
        with suppress(sqlite3.DatabaseError):  # it is no database: an index that was damaged
            names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        if foreign := [name for name in names if name != "mark" and not name.startswith("said")]:
            self._close()
            raise LedgerError(
                f"{self._path} is another database (it has the table {foreign[0]}), so that there is no search: the "
                "index of the messages stands under this name. Move that file away."
            )

    def _discard(self) -> None:
        self._close()
        self._path.unlink(missing_ok=True)

    def _begin(self, log: str, head: int) -> int:
        """Give up to where this log is in it; one that is another's, or half made, is made anew."""
        found = None
        with suppress(sqlite3.DatabaseError):
            found = self._open().execute("SELECT log, upto FROM mark").fetchone()
        if found is not None and found[0] == log and found[1] <= head:
            return int(found[1])
        self._discard()
        db = self._open()
        db.executescript(_TABLES)
        db.execute("INSERT INTO mark VALUES (?, 0)", (log,))
        return 0

    def _add(self, rows: Sequence[Row], upto: int) -> None:
        db = self._open()
        db.execute("BEGIN")
        # one statement: with `executemany` the thread gives up the GIL for each row (`queries`)
        words = json.dumps([(it.seq, _describe(it)) for it in rows])
        db.execute("INSERT INTO said (rowid, words) SELECT value ->> 0, value ->> 1 FROM json_each(?)", (words,))
        db.execute("UPDATE mark SET upto = ?", (upto,))
        db.execute("COMMIT")

    def _forget(self, first: int) -> None:
        db = self._open()
        if db.execute("SELECT 1 FROM said WHERE rowid < ? LIMIT 1", (first,)).fetchone() is None:
            return
        db.execute("DELETE FROM said WHERE rowid < ?", (first,))
        db.execute("INSERT INTO said (said) VALUES ('optimize')")  # else the words stay in older parts of the index


def _describe(row: Row) -> str:
    """The words of a message, and marks of where it stands, by which those that one may read are found among all."""
    places = [_mark("t", row.target), _mark("s", row.stream)]
    if row.head is not None and row.head.kind in PRIVATE:
        places.append(_mark("a", row.actor))
    return " ".join([*places, *_words_of(row)]) if row.head is not None else ""


def _mark(kind: str, name: str) -> str:
    """A word that no text has."""
    return f"§{kind}{name.encode().hex()}"


def _write_matches(
    terms: Sequence[str], spans: Sequence[Span] | None, sender: str, stream: str | None
) -> Iterator[tuple[str, int]]:
    """What is to be matched, and above which seq: apart for the places of which all may be read and for those that a
    reader has come to, so that a newcomer does not look through what was said before."""
    asked = [f'"{term[:-1]}" *' if term[-1] == "*" else f'"{term}"' for term in terms]
    if stream is not None:
        asked.append(f'"{_mark("s", stream)}"')
    if spans is None:
        yield " AND ".join(asked), 0
        return
    came: dict[str, int] = {}
    for it in spans:
        came[it.target] = min(it.after, came.get(it.target, it.after))
    whole = [_mark("a", sender), *(_mark("t", target) for target, after in came.items() if after <= 0)]
    yield " AND ".join([*asked, _any(whole)]), 0
    if late := [_mark("t", target) for target, after in came.items() if after > 0]:
        yield " AND ".join([*asked, _any(late)]), min(after for after in came.values() if after > 0)


def _any(marks: Iterable[str]) -> str:
    return "(" + " OR ".join(map('"{}"'.format, marks)) + ")"
