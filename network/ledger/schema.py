"""The schema of a ledger's file and its history. Each version has one migration step, which runs in its own
transaction.

``PRAGMA user_version`` is the version of a file. The version is set in the transaction of the step, so an interrupted
step has no effect. A file of a newer Roundelay is refused.

Each row of each table has a checksum: the CRC-32 of every stored column, including the key and NULLs. The checksum
detects each flipped bit, each burst of up to 32 bits, and all but one in four billion of the larger errors. It detects
errors of disks, memory and cables. It does not protect against people: anyone who can write the file can also write the
checksum. A cryptographic hash without a secret would not help either, at ten times the cost.
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

from .memtable import FLUSHED_TO
from .row_encoding import hash_bytes

LOG_COLUMNS = "seq, at, type, actor, key, target, stream, label, excluded, digest, head, data"
ROW_COLUMNS = f"{LOG_COLUMNS}, crc"

log = logging.getLogger(__name__)

_packer = msgspec.msgpack.Encoder()


def checksum(columns: Sequence[object], scratch: bytearray | None = None) -> int:
    """Return the CRC-32 of a row's columns, encoded as MessagePack, which includes types and lengths. Files depend on
    this encoding, so it must never change. A test checks its values.

    A caller that computes many checksums should pass the same ``scratch`` buffer each time. The buffer is overwritten.
    Sharing it saves a quarter of the time.
    """
    if scratch is None:
        return zlib.crc32(_packer.encode(columns))
    _packer.encode_into(columns, scratch)
    return zlib.crc32(scratch)


# Never change a step after its release, not even by a space: `integrity` compares the text of the tables.
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
# Rows of the log have checksums from the seq in `CHECKED_FROM` on. After that seq, a missing checksum means damage.
# Older rows get no checksum: computing it would rewrite the whole log, write as many bytes to the WAL, and hide any
# damage that the rows already have. The rows of the other tables are few and small, and have no seq. So this step adds
# a checksum to each of them.
_V2 = f"""
ALTER TABLE log ADD COLUMN crc INTEGER;
ALTER TABLE state ADD COLUMN crc INTEGER;
ALTER TABLE meta ADD COLUMN crc INTEGER;
INSERT OR REPLACE INTO meta (key, value) SELECT '{CHECKED_FROM}', ifnull(max(seq), 0) + 1 FROM log;
UPDATE state SET crc = checksum(tbl, key, value);
UPDATE meta SET crc = checksum(key, value);
"""

# Versions 3 to 6 add values, not tables. The new version number prevents older releases from opening the file, because
# they would ignore these values.
_V3 = ""
# Version 4 adds taken-over threads (table ``hold``). Agents of an older release would answer in these threads.
_V4 = ""
# Version 5 adds read state (``mark``), the inbox (``question``, ``dismissed``, ``undelivered``, ``spent_out``), and
# single-use logins (``login``).
_V5 = ""
# Version 6 adds the cursor in a shared log (``followed``). An older release would write its own history into the file.
_V6 = ""
# Version 7 stores each fact once (`row_encoding`). Two tables that are written in order replace five indexes that
# repeated names. Existing rows are not rewritten, so older rows still contain some facts twice. This step does not
# check for damage, so it must handle text as bytes. ``key_more`` holds the keys whose hash is already in ``key``.
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

# Version 8 adds the mark up to which rows are in the index tables (`memtable`). An older release would not find the
# rows after this mark.
_V8 = f"""
INSERT OR REPLACE INTO meta (key, value, crc) SELECT '{FLUSHED_TO}', seq, checksum('{FLUSHED_TO}', seq)
    FROM (SELECT CAST(ifnull(max(seq), 0) AS TEXT) AS seq FROM log);
"""

STEPS = (_V1, _V2, _V3, _V4, _V5, _V6, _V7, _V8)
SCHEMA_VERSION = len(STEPS)
CHECKSUMS_SINCE = 2
"""First schema version whose rows have checksums."""
PLACES_SINCE = 7
"""First schema version with the index tables ``key``, ``key_more`` and ``place``."""
MEMTABLE_SINCE = 8
"""First schema version whose newest rows may be only in the memtable."""
LONG_STEP = 100_000
"""Minimum number of rows for which each part of a migration step is logged. With more rows, a part takes seconds."""
COPIED_EPOCH = "copied_epoch"
"""Key in ``meta`` under which a backup stores the epoch of the original. The backup has no own epoch until a node opens
it."""


def list_schema(db: sqlite3.Connection) -> set[tuple[str, str]]:
    """Return the names and SQL texts of all tables and indexes."""
    return set(db.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))


def expected_schema(version: int) -> set[tuple[str, str]]:
    """Return the expected result of `list_schema` for a file of this version. A new file and a migrated file have the
    same schema."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        migrate(db, version)
        return list_schema(db)


def refuse_schema(db: sqlite3.Connection) -> int:
    """Return the version of a file's schema. Raises `LedgerError` for a newer version, and for the database of another
    program. Raises `sqlite3.Error` for a damaged schema."""
    try:
        return _refuse_schema(db)
    except UnicodeDecodeError as error:
        # SQLite quotes the damaged declaration in its message, and the module sqlite3 cannot decode this message.
        damage = sqlite3.DatabaseError("malformed database schema")
        damage.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise damage from error


def _refuse_schema(db: sqlite3.Connection) -> int:
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    file: str = db.execute("PRAGMA database_list").fetchone()[2]
    if version > SCHEMA_VERSION:
        raise LedgerError(
            f"The database {file} has schema {version}, but this Roundelay supports schemas up to {SCHEMA_VERSION}. "
            "Upgrade Roundelay to open it."
        )
    if version == 0 and db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise LedgerError(f"{file} is a database of another program. Name another file with --db.")
    # Refuse views, triggers and virtual tables: a view in place of a table may be endless, and a virtual table may run
    # other code.
    sql = "SELECT type, name FROM sqlite_master WHERE type IN ('view', 'trigger') OR sql LIKE 'CREATE VIRTUAL%' LIMIT 1"
    if (odd := db.execute(sql).fetchone()) is not None:
        raise LedgerError(
            f"{file} was not made by Roundelay: {str(odd[1])[:64]!r} is a {odd[0]}, and Roundelay makes only plain "
            "tables. Name another file with --db."
        )
    return version


MAX_READ_BYTES = 128 * 1024 * 1024
"""Maximum size in bytes of a row in a file that is only read. The file may come from an attacker, so the memory per row
must be limited."""


@contextmanager
def open_to_read(path: Path, timeout_s: float = 5.0) -> Iterator[sqlite3.Connection]:
    """Open a file for reading, even while a node writes it. Raises `sqlite3.Error`.

    If there is no WAL, no process has the file open. The file is then opened as immutable, so that SQLite creates no
    other files.
    """
    mode = "mode=ro" if Path(f"{path}-wal").exists() else "mode=ro&immutable=1"
    address = f"{path.resolve().as_uri()}?{mode}"
    with closing(sqlite3.connect(address, uri=True, timeout=timeout_s)) as db:
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_READ_BYTES)
        yield db


def count_rows(db: sqlite3.Connection) -> int:
    """Return the approximate number of rows in the log, computed from the first and last seq. Seqs have no gaps except
    where retention has deleted rows."""
    least, most = db.execute("SELECT (SELECT min(seq) FROM log), (SELECT max(seq) FROM log)").fetchone()
    return int(most - least + 1) if most is not None else 0


def migrate(db: sqlite3.Connection, to: int | None = None) -> None:
    """Migrate the file to `SCHEMA_VERSION`, or to the version ``to``. Raises `LedgerError` for a newer version, and for
    the database of another program."""
    version, end = refuse_schema(db), SCHEMA_VERSION if to is None else to
    # Register the Python functions that the steps call from SQL. SQLite itself has no CRC-32.
    db.create_function("checksum", -1, lambda *columns: checksum(columns), deterministic=True)
    db.create_function("hash_key", 2, hash_bytes, deterministic=True)
    is_long = 0 < version < end and count_rows(db) >= LONG_STEP
    for step in range(version, end):
        db.execute("BEGIN IMMEDIATE")
        try:
            statements = [statement for statement in STEPS[step].split(";") if statement.strip()]
            for number, statement in enumerate(statements, 1):
                if is_long:
                    part = f"{number} of {len(statements)}"
                    log.warning("migrating the database", extra={"schema": step + 1, "part": part})
                db.execute(statement)
            # Set the version within the transaction. An interrupted step then leaves the old version, and the whole
            # step runs again.
            db.execute(f"PRAGMA user_version = {step + 1}")
            db.execute("COMMIT")
        except BaseException:
            # After some errors, such as a full disk, SQLite has already ended the transaction.
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise
