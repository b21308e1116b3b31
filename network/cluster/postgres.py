"""`PostgresLog`: a shared log in a PostgreSQL table, accessed with asyncpg.

Each network has its own table. A record's position is the primary key, so if two nodes append at the same position, the
server accepts only one record. Row 0 contains a random id of the table. An append checks this id, so it fails if the
table was replaced by another table with the same name. If the answer to an append is lost, the writer checks whether
the next record in the table is its own. NOTIFY carries broadcasts, and hints to followers that new records exist. Hints
can be lost, so followers also poll.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from roundelay.network.clock import random_id
from roundelay.network.errors import ConfigError, LedgerError
from roundelay.network.extras import needs
from roundelay.network.ledger import LeadershipLost, LogFull
from roundelay.network.log_urls import TLS_FILES, PostgresAddress

from .shared_log import LogElectionPending, LogRecord, LogTruncated, LogUnavailable, UnusableLog, missing_log

with needs("cluster"):
    import asyncpg
    from asyncpg.pool import PoolConnectionProxy


OLDEST = 14
"""Oldest supported major version of PostgreSQL."""
CONNECTIONS = 3
"""Maximum number of connections per node, in addition to the connection that listens for notifications."""
CONNECT_S = 5.0
ASK_S = 3.0
"""Timeout of one SQL statement, including its answer, in seconds."""
PATIENCE_S = 10.0
"""Maximum time for all attempts to append a record, in seconds. A server that restarts after a kill needs this time to
replay its journal."""
FOLLOW_S = 0.25
"""Interval at which a follower polls for new records if no hint arrives, in seconds."""
HINT_S = 0.02
"""Minimum time between two hints about new records, in seconds. Each hint takes a lock that all databases of the server
share."""
LISTENING_S = 1.0
"""Interval at which the listening connection is checked, in seconds. A dead connection does not report an error
itself."""
CLOSE_S = 2.0
MAX_BROADCASTS = 64
"""Maximum number of unread broadcasts in memory. If there are more, the oldest ones are dropped."""
RECORD_BYTES = 512 * 1024
PAGE, PAGE_BYTES = 256, 2 * 1024**2
"""Limits of one page: the maximum number of records, and the number of bytes after which no record is added."""
DROPPED = 500
"""Maximum number of old records that one transaction deletes."""
PAGE_S = 10.0
"""Timeout for reading one page, in seconds. It is long, so that slow connections work too."""
SETTINGS = {
    "synchronous_commit": "on",  # set explicitly, because the server's default may differ
    "default_transaction_isolation": "read committed",
    "statement_timeout": "20s",  # ends statements that killed nodes have left behind
    "idle_in_transaction_session_timeout": "10s",
    "tcp_keepalives_idle": "30",
}
SYNCING = ("fsync", "full_page_writes", "synchronous_commit")
"""Server settings on which the durability of acknowledged records depends."""
FAILURES = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
"""Exceptions of the asyncpg client. `OSError` includes `TimeoutError`."""
PASSING = (
    OSError,
    asyncpg.InterfaceError,  # the connection was closed
    asyncpg.InternalClientError,  # the server has just ended the connection, or no server accepts writes
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,  # the server is stopping or starting, or a statement took too long
    asyncpg.TransactionRollbackError,
    asyncpg.TooManyConnectionsError,
    asyncpg.LockNotAvailableError,
    asyncpg.ReadOnlySQLTransactionError,  # another server was promoted to primary
)
ROWS = "position bigint, data bytea, total bigint"
MAKE = """\
CREATE TABLE IF NOT EXISTS {table} (
    position bigint PRIMARY KEY,
    data bytea NOT NULL,
    total bigint NOT NULL, -- bytes of the records up to this one
    CONSTRAINT max_bytes CHECK (total <= {max_bytes})
)"""
MAKE_FIRST = "INSERT INTO {table} (position, data, total) VALUES (0, $1, 0) ON CONFLICT DO NOTHING"
SHAPE = """\
SELECT relkind = 'r' AND relpersistence = 'p' AND EXISTS (
        SELECT FROM pg_index WHERE indrelid = pg_class.oid AND indisprimary AND indimmediate AND indisvalid AND indkey::text = '1'
    ) AS is_guarded,
    (
        SELECT string_agg(attname || ' ' || format_type(atttypid, atttypmod), ', ' ORDER BY attnum)
        FROM pg_attribute WHERE attrelid = pg_class.oid AND attnum > 0 AND NOT attisdropped
    ) AS rows
FROM pg_class WHERE oid = $1"""
APPEND = """\
INSERT INTO {table} (position, data, total)
SELECT position + 1, $2::bytea, total + length($2::bytea) FROM {table}
WHERE position = $1 AND $1 = (SELECT max(position) FROM {table}) AND $3 = (SELECT data FROM {table} WHERE position = 0)
RETURNING position"""
# Use an UPDATE instead of a SELECT: it returns only after the server and its synchronous standbys have stored it. The
# earlier record that it checks is then stored too.
IS_OURS = "UPDATE {table} SET total = total WHERE position = $1 AND data = $2 RETURNING position"
END = "SELECT max(position), (SELECT data FROM {table} WHERE position = 0) AS id FROM {table}"
FIRST = "SELECT position FROM {table} WHERE position > 0 ORDER BY position LIMIT 1"
# Subtract the dropped bytes from the total of the newest row, because each later total is computed from this row.
DROP = """\
WITH gone AS (
    DELETE FROM {table} WHERE position IN (
        SELECT position FROM {table} WHERE position > 0 AND position < $1 ORDER BY position LIMIT $2
    ) AND $3 = (SELECT data FROM {table} WHERE position = 0) RETURNING length(data) AS bytes
), freed AS (SELECT count(*) AS records, coalesce(sum(bytes), 0)::bigint AS bytes FROM gone), newest AS (
    UPDATE {table} SET total = total - (SELECT bytes FROM freed)
    WHERE position = (SELECT max(position) FROM {table}) AND position >= $1 RETURNING position
)
SELECT records FROM freed"""
READ = """\
SELECT position, data FROM (
    SELECT position, data, sum(length(data)) OVER (ORDER BY position) - length(data) AS bytes_before
    FROM (SELECT position, data FROM {table} WHERE position > $1 ORDER BY position LIMIT $2) AS page
) AS sized WHERE bytes_before < $3 ORDER BY position"""
DESCRIBE = """\
SELECT position, total, (SELECT count(*) FROM {table} WHERE position > 0) AS records, version() AS version, (
    SELECT substring(pg_get_constraintdef(oid) FROM '[0-9]+')::bigint
    FROM pg_constraint WHERE conrelid = $1::text::regclass AND conname = 'max_bytes'
) AS max_bytes FROM {table} ORDER BY position DESC LIMIT 1"""
STANDBYS = """\
SELECT application_name, state = 'streaming' AS is_current, sync_state IN ('sync', 'quorum') AS is_waited_for
FROM pg_stat_replication WHERE sync_state IS NOT NULL ORDER BY application_name"""


class PostgresLog:
    """A `SharedLog` in one PostgreSQL table. The constructor raises `ConfigError` if the address names a TLS file that
    does not exist."""

    def __init__(self, address: PostgresAddress) -> None:
        for name in TLS_FILES:
            if name in address.tls and not Path(address.tls[name]).is_file():
                raise ConfigError(
                    f"{name} in a shared log's address names a missing file: {address.tls[name]}. Correct the path."
                )
        self._address = address
        self.name, self.network = address.shown, address.table.removeprefix("roundelay_")
        self.max_bytes = RECORD_BYTES
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None
        self._id = b""
        self._broadcasts: deque[str] = deque(maxlen=MAX_BROADCASTS)
        self._has_broadcast = asyncio.Event()
        self._hinted = asyncio.Event()
        self._listener: asyncpg.Connection[asyncpg.Record] | None = None
        self._is_disconnected = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None
        self._hinting: asyncio.Task[None] | None = None
        self._is_hint_due = False

    # --- lifetime

    async def open(self, *, create: bool = True) -> None:
        try:
            self._pool = await asyncpg.create_pool(
                self._address.dsn,
                min_size=0,  # with a minimum above 0, creating the pool would fail while a server is unreachable
                max_size=CONNECTIONS,
                # With 0, idle connections stay open. Opening a new connection would delay a commit.
                max_inactive_connection_lifetime=0,
                reset=_skip_reset,
                **self._connect_options(),
            )
            async with self._connection() as connection:
                await self._check_server(connection)
                await self._find_table(connection, create=create)
            await self._listen()
        except (*FAILURES, ValueError) as error:  # asyncpg raises ValueError for an invalid certificate file
            await self.close()
            raise self._explain_failed_open(error) from error
        except BaseException:
            await self.close()
            raise
        self._listening = asyncio.create_task(self._keep_listening(), name="shared-log-listens")

    async def close(self) -> None:
        tasks = [task for task in (self._listening, self._hinting) if task is not None]
        self._listening = self._hinting = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._stop_listening()
        pool, self._pool = self._pool, None
        if pool is not None:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await pool.close()
            except FAILURES:
                pool.terminate()

    def _connect_options(self) -> dict[str, Any]:
        return {
            "timeout": CONNECT_S,
            "command_timeout": ASK_S,
            "target_session_attrs": "read-write",
            "server_settings": {"application_name": self._address.table, **SETTINGS},
        }

    async def _check_server(self, connection: PoolConnectionProxy[asyncpg.Record]) -> None:
        version = connection.get_server_version()
        if version.major < OLDEST:
            raise LedgerError(
                f"The server of {self.name} is PostgreSQL {version.major}. A shared log needs {OLDEST} or newer: "
                "upgrade the server."
            )

    async def _find_table(self, connection: PoolConnectionProxy[asyncpg.Record], *, create: bool) -> None:
        """Find the table of the log, or create it. Raises `LedgerError` if a table with this name exists but is not a
        log."""
        table = self._address.table
        oid = await connection.fetchval("SELECT to_regclass($1)::oid", table)
        if oid is None:
            if not create:
                raise missing_log(self.name)
            async with connection.transaction():  # the lock lets only one of several starting nodes create the table
                # CREATE TABLE IF NOT EXISTS alone may fail when two sessions run it at the same moment.
                await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", table)
                await connection.execute(self._sql(MAKE))
                await connection.execute(self._sql(MAKE_FIRST), random_id().encode())
            oid = await connection.fetchval("SELECT to_regclass($1)::oid", table)
        shape = await connection.fetchrow(SHAPE, oid)
        if shape is None or (shape["is_guarded"], shape["rows"]) != (True, ROWS):
            raise UnusableLog(
                f"The table {table} of {self.name} exists, but is not a log of a Roundelay network. Name another "
                "network."
            )
        table_id = await connection.fetchval(f"SELECT data FROM {table} WHERE position = 0")
        if table_id is None:
            raise UnusableLog(
                f"The table {table} of {self.name} has lost its first row: records are missing. Restore the table, or "
                "start with a new one."
            )
        self._id = table_id

    # --- records

    async def end(self) -> int:
        async with self._query() as connection:
            row = await connection.fetchrow(self._sql(END))
        # Compare the id. A table that was dropped and created again has the same name but another history.
        if row is None or row["id"] != self._id:
            raise UnusableLog(f"The table of {self.name} was replaced, or has lost its first row. Restore the table.")
        return int(row["max"])

    async def first(self) -> int:
        async with self._query() as connection:
            position = await connection.fetchval(self._sql(FIRST))
        return int(position) if position is not None else await self.end() + 1

    async def drop(self, before: int) -> bool:
        async with self._query() as connection:
            return int(await connection.fetchval(self._sql(DROP), before, DROPPED, self._id)) < DROPPED

    async def room(self) -> tuple[int, int]:
        async with self._query() as connection:
            row = await connection.fetchrow(self._sql(DESCRIBE), self._address.table)
        assert row is not None  # Row 0 exists, because opening the log checks or creates it.
        total = row["max_bytes"] or 1 << 62  # an operator may have removed the size constraint
        return max(0, total - row["total"]), total

    async def append(self, data: bytes, after: int) -> int:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_S
        while True:
            try:
                if not await self._try_append(data, after):
                    raise LeadershipLost(f"Another node has written to the shared log {self.name}.")
                self._hint()
                return after + 1
            except FAILURES as error:
                if not isinstance(error, PASSING) or loop.time() > deadline:
                    raise self._failed(error) from error
            await asyncio.sleep(0.05)

    async def _try_append(self, data: bytes, after: int) -> bool:
        """Make one attempt to append a record. Return whether the log now contains the record at its position. An
        earlier attempt may have appended it."""
        async with self._connection() as connection:
            # If the position is taken, another writer or an earlier attempt has used it.
            with suppress(asyncpg.UniqueViolationError):
                if await connection.fetchval(self._sql(APPEND), after, data, self._id) is not None:
                    return True
            return await connection.fetchval(self._sql(IS_OURS), after + 1, data) is not None

    async def follow(self, after: int) -> AsyncIterator[LogRecord]:
        while True:
            # Clear the event before reading, so that a hint that arrives during the read causes another read.
            self._hinted.clear()
            async with self._query() as connection:
                page = await connection.fetch(self._sql(READ), after, PAGE, PAGE_BYTES, timeout=PAGE_S)
            for left, (position, data) in zip(range(len(page) - 1, -1, -1), page, strict=True):
                if position != after + 1:
                    if position == await self.first():  # the log now begins at this record, so no record was lost
                        raise LogTruncated(
                            f"The shared log {self.name} now begins at record {position}, but record {after + 1} was "
                            "requested."
                        )
                    raise UnusableLog(
                        f"The shared log {self.name} continues at {position} instead of {after + 1}: records are "
                        "missing. Restore the log, or start with a new one."
                    )
                yield LogRecord(position, data, has_more=left > 0)
                after = position
            # Wait only after an empty page. A follower that is behind reads the next page at once.
            if not page:
                with suppress(TimeoutError):
                    async with asyncio.timeout(FOLLOW_S):
                        await self._hinted.wait()

    async def find_sync_risk(self) -> str:
        async with self._query() as connection:
            settings = [(name, await connection.fetchval(f"SHOW {name}")) for name in SYNCING]
        for name, value in settings:
            if value not in ("on", "remote_apply"):
                return f"its server has {name} = {value}: set {name} = on in its postgresql.conf, and reload it"
        return ""

    async def describe(self) -> dict[str, Any]:
        risk = await self.find_sync_risk()
        async with self._query() as connection:
            row = await connection.fetchrow(self._sql(DESCRIBE), self._address.table)
            standbys = await connection.fetch(STANDBYS)
        assert row is not None  # Row 0 exists, because opening the log checks or creates it.
        return {
            "durability": "replicated" if risk else "full",
            "doubt": risk,
            "engine": " ".join(row["version"].split()[:2]),
            "records": row["records"],
            "bytes": row["total"],
            "max_bytes": row["max_bytes"] or 0,
            "replicas": 1 + sum(standby["is_waited_for"] for standby in standbys),
            "servers": [
                {"name": standby["application_name"], "leads": False, "is_current": standby["is_current"]}
                for standby in standbys
            ],
        }

    # --- broadcasts

    async def broadcast(self, text: str) -> None:
        async with self._query() as connection:
            await connection.execute("SELECT pg_notify($1, $2)", self._channel, text)

    async def next_broadcast(self) -> str:
        while not self._broadcasts:
            self._has_broadcast.clear()
            await self._has_broadcast.wait()
        return self._broadcasts.popleft()

    @property
    def _channel(self) -> str:
        return f"roundelay_{self._id.hex()}"

    def _receive(self, connection: object, process: int, channel: str, payload: object) -> None:
        if payload:
            self._broadcasts.append(str(payload))
            self._has_broadcast.set()
        else:
            self._hinted.set()

    def _hint(self) -> None:
        """Schedule a notification to followers that there are new records. The notification is not part of the append's
        transaction, because NOTIFY would then hold a lock of the whole server until the record is synced."""
        self._is_hint_due = True
        if self._hinting is None or self._hinting.done():
            self._hinting = asyncio.create_task(self._send_hints(), name="shared-log-hints")

    async def _send_hints(self) -> None:
        while self._is_hint_due:
            self._is_hint_due = False
            with suppress(LedgerError):
                await self.broadcast("")
            # Hints that are requested during this pause are combined into one.
            await asyncio.sleep(HINT_S)

    async def _listen(self) -> None:
        self._is_disconnected.clear()
        self._listener = await asyncpg.connect(self._address.dsn, **self._connect_options())
        self._listener.add_termination_listener(lambda _: self._is_disconnected.set())
        await self._listener.add_listener(self._channel, self._receive)

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.terminate()

    async def _keep_listening(self) -> None:
        while True:
            while self._listener is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LISTENING_S):
                        await self._is_disconnected.wait()
                try:
                    # Probe the connection. Otherwise a TCP connection that was cut without a FIN would report no error.
                    await self._listener.execute("SELECT 1")
                except FAILURES:
                    self._stop_listening()
            try:
                await self._listen()
            except FAILURES:
                self._stop_listening()
                await asyncio.sleep(FOLLOW_S)

    # --- connections and errors

    def _sql(self, text: str) -> str:
        return text.format(table=self._address.table, max_bytes=self._address.max_bytes)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[PoolConnectionProxy[asyncpg.Record]]:
        """Borrow a connection from the pool. If the server does not answer, the connection is closed instead of being
        reused."""
        pool = self._pool
        if pool is None:
            raise LedgerError(f"The shared log {self.name} is closed.")
        async with asyncio.timeout(CONNECT_S):
            connection = await pool.acquire()
        is_answered = False
        try:
            yield connection
            is_answered = True
        except (asyncpg.PostgresError, LedgerError) as error:
            # If the server reports an error in the statement, it has answered, so the connection still works.
            is_answered = not isinstance(error, PASSING)
            raise
        finally:
            if not is_answered:
                # Terminate the connection. A regular close would wait for the server, which does not answer.
                connection.terminate()
            with suppress(asyncpg.InterfaceError):  # another task may have closed the log
                await pool.release(connection)

    @asynccontextmanager
    async def _query(self) -> AsyncIterator[PoolConnectionProxy[asyncpg.Record]]:
        """Borrow a connection for statements that are not retried. A failure is raised as `LedgerError`."""
        try:
            async with self._connection() as connection:
                yield connection
        except FAILURES as error:
            raise self._failed(error) from error

    def _explain_failed_open(self, error: BaseException) -> LedgerError:
        """Convert an error into a `LedgerError` that says why the log could not be opened and what the operator can
        do."""
        reason, address = _describe(error), self._address
        match error:
            case asyncpg.CannotConnectNowError():
                return LogElectionPending(
                    f"The server of {self.name} can be reached, and does not serve yet ({reason})."
                )
            case asyncpg.TargetServerAttributeNotMatched():
                return LogUnavailable(
                    f"No server of {self.name} accepts writes: it is a standby, or read-only. Name the primary. "
                    "Several hosts are separated by commas."
                )
            case asyncpg.InvalidAuthorizationSpecificationError():
                return LedgerError(
                    f"The server of {self.name} refuses who connects ({reason}). Name a user and a password that it "
                    "knows, as in postgres://USER:PASSWORD@HOST/DATABASE, and let its pg_hba.conf admit them from here."
                )
            case asyncpg.InvalidCatalogNameError():
                return LedgerError(
                    f"The server of {self.name} has no database {address.database}. Create it, as with `createdb "
                    f"{address.database}`."
                )
            case asyncpg.InsufficientPrivilegeError() | asyncpg.InvalidSchemaNameError():
                return LedgerError(
                    f"The user of {self.name} may not create or use its table ({reason}). Let the user own the "
                    f"database. Or let its owner run `GRANT CREATE ON SCHEMA public TO ...` before the table "
                    f"{address.table} exists, and then `GRANT SELECT, INSERT, UPDATE, DELETE ON {address.table} TO ...`."
                )
            case ssl.SSLCertVerificationError():
                return LedgerError(
                    f"The server of {self.name} shows a certificate that is not trusted ({reason}). Name its issuer "
                    "with sslrootcert=FILE, and the host as the certificate names it."
                )
            case ValueError():  # asyncpg.ClientConfigurationError is a ValueError too
                return LedgerError(f"The address of {self.name} cannot be used: {reason}.")
            case OSError() | asyncpg.InterfaceError() | asyncpg.PostgresConnectionError():
                return LogUnavailable(f"No PostgreSQL server of {self.name} can be reached ({reason}); is one running?")
            case _:
                return self._failed(error)

    def _failed(self, error: BaseException) -> LedgerError:
        if isinstance(error, asyncpg.CheckViolationError):
            return LogFull(
                f"The shared log {self.name} is full: its table has the constraint max_bytes. Widen it as "
                "docs/cluster.md says."
            )
        kind = LogUnavailable if isinstance(error, PASSING) else LedgerError
        return kind(f"The shared log {self.name} failed: {_describe(error)}.")


async def _skip_reset(connection: object) -> None:
    """Do nothing. asyncpg calls this function instead of its own connection reset, which would cost a request. No reset
    is needed, because the node never changes settings of an open connection."""


def _describe(error: BaseException) -> str:
    first = (str(error) or type(error).__name__).splitlines()[0]
    return first.rstrip(".")
