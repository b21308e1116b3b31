"""The schema of a ledger's file and its history: one step per version, each in a transaction of its own.

``PRAGMA user_version`` says how far a file is; it changes in the step's transaction, so that a step that is killed has
not happened. A file from a newer Roundelay is refused.

Each row of each table has a checksum: the CRC-32 of every stored column, of the key and of NULLs too. It finds each
single flipped bit, each burst of up to 32, and all but one in four billion of larger damage: what disks, memory and
cables do. It is no proof against a person: who can write the file can write the checksum, and a cryptographic hash
without a secret would say no more at ten times the price.
"""

from __future__ import annotations

import logging
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec

from roundelay.network.errors import LedgerError

from .memtable import PLACED_TO
from .rows import hash_bytes

LOG_COLUMNS = "seq, at, type, actor, key, target, stream, label, excluded, digest, head, data"
ROW_COLUMNS = f"{LOG_COLUMNS}, crc"

log = logging.getLogger(__name__)

_packer = msgspec.msgpack.Encoder()


def checksum(columns: Sequence[object], scratch: bytearray | None = None) -> int:
    """The CRC-32 of a row's columns as MessagePack, in which types and lengths show; a test pins it, since files depend
    on it.

    Who computes many hands in one ``scratch``, which is written over each time: that takes a quarter less.
    """
    if scratch is None:
        return zlib.crc32(_packer.encode(columns))
    _packer.encode_into(columns, scratch)
    return zlib.crc32(scratch)


# A step never changes once it was released, not in a space: `list_schema` is compared.
_V1 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE log (
    seq INTEGER PRIMARY KEY,
    at INTEGER NOT NULL,
    type TEXT NOT NULL,
    actor TEXT NOT NULL,
    key TEXT,
    target TEXT,
    stream TEXT,
    label TEXT,
    excluded TEXT,
    digest TEXT,
    head TEXT,
    data TEXT NOT NULL,
    is_private INTEGER GENERATED ALWAYS AS (target IS NOT NULL AND (target GLOB 'agent:*' OR target GLOB 'mod:*')) VIRTUAL
);
CREATE UNIQUE INDEX log_key ON log (actor, key) WHERE key IS NOT NULL;
CREATE INDEX log_target ON log (target, seq) WHERE target IS NOT NULL;
CREATE INDEX log_stream ON log (stream, seq) WHERE stream IS NOT NULL;
CREATE INDEX log_sent ON log (actor, seq) WHERE is_private;
CREATE INDEX log_record ON log (actor, label, seq) WHERE type = 'record';
CREATE TABLE state (tbl TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (tbl, key)) WITHOUT ROWID;
"""

CHECKED_FROM = "checked_from"
# Rows of the log have a checksum from a mark on, the next seq; a missing one is damage from there on. To compute
# those of older rows would write the whole log anew, as much again in the -wal file, and vouch for what it holds now,
# not for what was once stored. The tables' rows have no order that a mark could name; they are few and small, and get
# theirs here.
_V2 = f"""
ALTER TABLE log ADD COLUMN crc INTEGER;
ALTER TABLE state ADD COLUMN crc INTEGER;
ALTER TABLE meta ADD COLUMN crc INTEGER;
INSERT OR REPLACE INTO meta (key, value) SELECT '{CHECKED_FROM}', ifnull(max(seq), 0) + 1 FROM log;
UPDATE state SET crc = checksum(tbl, key, value);
UPDATE meta SET crc = checksum(key, value);
"""

# Nothing of the form changes, but what the tables say of channels (who may join) and participants (which sessions are
# over): who does not know of it must not open the file, for to it every channel is open.
_V3 = ""
# Again only what the tables say: which threads people hold (table ``hold``). To an older one agents answer in all.
_V4 = ""
# And once more: what people have read and keep for themselves of threads (table ``mark``), what waits for them
# (``question``, ``dismissed``, ``undelivered``, ``spent_out``), and logins that work once (``login``).
_V5 = ""
# How far a shared log is in this file (table ``followed``): an older Roundelay would write a history of its own here.
_V6 = ""
# Each fact once (`rows`): the five indexes, each of which held names, give way to two tables that are written sorted.
# The rows stay as they are, and need not be written anew: one that was written before says some things twice. What is
# damaged in them is found by nobody here, so text is handed on as bytes. Where a key has the hash of another one, it is
# in ``key_more``.
_V7 = """
CREATE TABLE key (hash INTEGER PRIMARY KEY, seq INTEGER NOT NULL);
INSERT OR IGNORE INTO key SELECT hash_key(CAST(actor AS BLOB), CAST(key AS BLOB)) AS hash, seq FROM log
    WHERE key IS NOT NULL ORDER BY hash;
CREATE TABLE key_more (hash INTEGER NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY (hash, seq)) WITHOUT ROWID;
INSERT INTO key_more SELECT hash_key(CAST(actor AS BLOB), CAST(key AS BLOB)), seq FROM log
    WHERE key IS NOT NULL AND seq NOT IN (SELECT seq FROM key);
CREATE TABLE place (place TEXT NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY (place, seq)) WITHOUT ROWID;
INSERT INTO place SELECT 'by/' || actor, seq FROM log WHERE is_private ORDER BY actor, seq;
INSERT INTO place SELECT 'in/' || stream, seq FROM log
    WHERE stream IS NOT NULL AND type = 'message' ORDER BY stream, seq;
INSERT INTO place SELECT 'of/' || actor || '/' || ifnull(label, ''), seq FROM log
    WHERE type = 'record' ORDER BY actor, label, seq;
INSERT INTO place SELECT 're/' || stream, seq FROM log
    WHERE stream IS NOT NULL AND type <> 'message' ORDER BY stream, seq;
INSERT INTO place SELECT 'to/' || target, seq FROM log WHERE target IS NOT NULL ORDER BY target, seq;
DROP INDEX log_key;
DROP INDEX log_target;
DROP INDEX log_stream;
DROP INDEX log_sent;
DROP INDEX log_record;
ALTER TABLE log DROP COLUMN is_private;
"""

# Up to which row these tables say where it is (`unplaced`): to an older Roundelay those behind it would not be there.
_V8 = f"""
INSERT OR REPLACE INTO meta (key, value, crc) SELECT '{PLACED_TO}', seq, checksum('{PLACED_TO}', seq)
    FROM (SELECT CAST(ifnull(max(seq), 0) AS TEXT) AS seq FROM log);
"""

STEPS = (_V1, _V2, _V3, _V4, _V5, _V6, _V7, _V8)
SCHEMA_VERSION = len(STEPS)
CHECKSUMS_SINCE = 2
"""The first schema whose rows have checksums."""
PLACES_SINCE = 7
"""The first schema whose rows are found by the tables ``key``, ``key_more`` and ``place``."""
UNPLACED_SINCE = 8
"""The first whose newest rows may be in neither yet."""
LONG_STEP = 100_000
"""Of so many rows each part of a step is told: together they take seconds."""
COPIED_EPOCH = "copied_epoch"
"""In ``meta`` of a backup: the epoch of the ledger that it is a copy of. It has none of its own until a node opens
it."""


def list_schema(db: sqlite3.Connection) -> set[tuple[str, str]]:
    """Name and text of each table and index."""
    return set(db.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))


def expected_schema(version: int) -> set[tuple[str, str]]:
    """`list_schema` of a file of this version, new or brought up from any earlier one."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        migrate(db, version)
        return list_schema(db)


def refuse_schema(db: sqlite3.Connection) -> int:
    """The version of a file's schema. Raises `LedgerError` for a file of a newer version or of something else."""
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    file: str = db.execute("PRAGMA database_list").fetchone()[2]
    if version > SCHEMA_VERSION:
        raise LedgerError(
            f"The database {file} has schema {version}, this Roundelay knows up to {SCHEMA_VERSION}; upgrade "
            "Roundelay to open it."
        )
    if version == 0 and db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise LedgerError(f"{file} is a database of something else; name another one with --db.")
    # A view in the place of a table can be without end, and a virtual table can be anybody's code.
    sql = "SELECT type, name FROM sqlite_master WHERE type IN ('view', 'trigger') OR sql LIKE 'CREATE VIRTUAL%' LIMIT 1"
    if (odd := db.execute(sql).fetchone()) is not None:
        raise LedgerError(
            f"{file} is no database that Roundelay made: {str(odd[1])[:64]!r} in it is a {odd[0]}, and Roundelay makes "
            "plain tables alone."
        )
    return version


MAX_READ_BYTES = 128 * 1024 * 1024
"""Of a row, where a file is only looked at, which anybody may have made. It bounds the memory that a row takes."""


@contextmanager
def open_to_read(path: Path, timeout_s: float = 5.0) -> Iterator[sqlite3.Connection]:
    """A file that a node may be writing, to be looked at. Raises `sqlite3.Error`.

    Without a write-ahead log beside it nobody has it open: then it is read as it is, and SQLite puts no files there.
    """
    mode = "mode=ro" if Path(f"{path}-wal").exists() else "mode=ro&immutable=1"
    address = f"{path.resolve().as_uri()}?{mode}"
    with closing(sqlite3.connect(address, uri=True, timeout=timeout_s)) as db:
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_READ_BYTES)
        yield db


def count_rows(db: sqlite3.Connection) -> int:
    """About how many rows the log has: seqs are dense, but for what retention has dropped."""
    least, most = db.execute("SELECT (SELECT min(seq) FROM log), (SELECT max(seq) FROM log)").fetchone()
    return int(most - least + 1) if most is not None else 0


def migrate(db: sqlite3.Connection, to: int | None = None) -> None:
    """Bring the schema to `SCHEMA_VERSION`, or to this one. Raises `LedgerError` for a file of a newer version or of
    something else."""
    version, end = refuse_schema(db), SCHEMA_VERSION if to is None else to
    db.create_function("checksum", -1, lambda *columns: checksum(columns), deterministic=True)
    db.create_function("hash_key", 2, hash_bytes, deterministic=True)
    is_long = 0 < version < end and count_rows(db) >= LONG_STEP
    for step in range(version, end):
        db.execute("BEGIN IMMEDIATE")
        try:
            statements = [it for it in STEPS[step].split(";") if it.strip()]
            for number, statement in enumerate(statements, 1):
                if is_long:
                    part = f"{number} of {len(statements)}"
                    log.warning(
                        "the database is brought up to a newer schema", extra={"schema": step + 1, "part": part}
                    )
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {step + 1}")
            db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # a full disk has ended it already; the first reason is the one to tell
                db.execute("ROLLBACK")
            raise
