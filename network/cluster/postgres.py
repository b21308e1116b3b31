"""`PostgresLog`: the shared log in a table of PostgreSQL, by asyncpg.

One table for a network; a record stands at its position, the primary key, so that of two writers one is refused. Row 0
has the table's own random id: an append into a table that was made anew in its place finds another one. What an append
came to whose answer was lost is seen by looking whether the record behind the guard is one's own. NOTIFY says that
there is something to read, and carries what nodes tell each other; it is a hint, and whoever follows also looks by
itself.
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

from .shared_log import LogElectionPending, LogRecord, LogTruncated, LogUnavailable, UnusableLog, find_no_log

with needs("cluster"):
    import asyncpg
    from asyncpg.pool import PoolConnectionProxy


OLDEST = 14
"""The first release of the server that is used."""
CONNECTIONS = 3
"""At most so many of a node, and one that listens."""
CONNECT_S = 5.0
ASK_S = 3.0
"""How long the server may take for one statement, and for its answer to arrive."""
PATIENCE_S = 10.0
"""How long a record is tried: a server that was killed reads its journal before it serves."""
FOLLOW_S = 0.25
"""A follower to whom nothing was said for so long looks whether there is anything."""
HINT_S = 0.02
"""Between two words that there is something to read: each passes a lock that all databases of the server share."""
LISTENING_S = 1.0
"""How often the connection that listens is tried: one that is dead says nothing."""
CLOSE_S = 2.0
HEARD = 64
"""What was said and not listened to yet: of more the oldest is dropped."""
RECORD_BYTES = 512 * 1024
PAGE, PAGE_BYTES = 256, 2 * 1024**2
"""A follower reads so many records at once, and no further one where they have so many bytes."""
DROPPED = 500
"""So many records are dropped in one transaction."""
PAGE_S = 10.0
"""How long that may take, on a slow line too."""
SETTINGS = {
    "synchronous_commit": "on",  # whatever the server's own default is
    "default_transaction_isolation": "read committed",
    "statement_timeout": "20s",  # of a statement whose node is gone
    "idle_in_transaction_session_timeout": "10s",
    "tcp_keepalives_idle": "30",
}
SYNCING = ("fsync", "full_page_writes", "synchronous_commit")
"""What the server shows of how it keeps what it has acknowledged."""
FAILURES = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
"""What its client raises; a `TimeoutError` is an `OSError`."""
PASSING = (
    OSError,
    asyncpg.InterfaceError,  # of a connection that was closed
    asyncpg.InternalClientError,  # also of one that the server has just ended, and where no server takes writes
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,  # it is stopped, or starts; or a statement took too long
    asyncpg.TransactionRollbackError,
    asyncpg.TooManyConnectionsError,
    asyncpg.LockNotAvailableError,
    asyncpg.ReadOnlySQLTransactionError,  # another server has taken its place
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
# A write, so that it ends only once the server has kept it, on its standbys too, and with it the record.
IS_OURS = "UPDATE {table} SET total = total WHERE position = $1 AND data = $2 RETURNING position"
END = "SELECT max(position), (SELECT data FROM {table} WHERE position = 0) AS id FROM {table}"
FIRST = "SELECT position FROM {table} WHERE position > 0 ORDER BY position LIMIT 1"
# What is gone counts no longer: each record's total is made of the newest one's.
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
    """A `SharedLog` in one table. Raises `ConfigError` where its address names a file that is not there."""

    def __init__(self, address: PostgresAddress) -> None:
        for name in TLS_FILES:
            if name in address.tls and not Path(address.tls[name]).is_file():
                raise ConfigError(f"{name} of a shared log's address names no file: {address.tls[name]}.")
        self._address = address
        self.name, self.network = address.shown, address.table.removeprefix("roundelay_")
        self.max_bytes = RECORD_BYTES
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None
        self._id = b""
        self._heard: deque[str] = deque(maxlen=HEARD)
        self._hearing = asyncio.Event()
        self._hinted = asyncio.Event()
        self._listener: asyncpg.Connection[asyncpg.Record] | None = None
        self._is_deaf = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None
        self._hinting: asyncio.Task[None] | None = None
        self._is_hint_due = False

    # --- lifetime

    async def open(self, *, is_made: bool = True) -> None:
        try:
            self._pool = await asyncpg.create_pool(
                self._address.dsn,
                min_size=0,  # of more it would say by itself that a server is away
                max_size=CONNECTIONS,
                max_inactive_connection_lifetime=0,
                reset=_keep_settings,
                **self._connecting(),
            )
            async with self._connection() as connection:
                await self._check_server(connection)
                await self._find_table(connection, is_made=is_made)
            await self._listen()
        except (*FAILURES, ValueError) as error:  # its client takes a file with certificates that is none as a value
            await self.close()
            raise self._not_opened(error) from error
        except BaseException:
            await self.close()
            raise
        self._listening = asyncio.create_task(self._keep_listening(), name="shared-log-listens")

    async def close(self) -> None:
        tasks = [it for it in (self._listening, self._hinting) if it is not None]
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

    def _connecting(self) -> dict[str, Any]:
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
                f"The server of {self.name} is PostgreSQL {version.major}; a shared log needs {OLDEST} or newer: "
                "upgrade it."
            )

    async def _find_table(self, connection: PoolConnectionProxy[asyncpg.Record], *, is_made: bool) -> None:
        """Find the table, or make it. Raises `LedgerError` where it is another's."""
        table = self._address.table
        oid = await connection.fetchval("SELECT to_regclass($1)::oid", table)
        if oid is None:
            if not is_made:
                raise find_no_log(self.name)
            async with connection.transaction():  # one node makes it, and the others find it made
                await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", table)
                await connection.execute(self._sql(MAKE))
                await connection.execute(self._sql(MAKE_FIRST), random_id().encode())
            oid = await connection.fetchval("SELECT to_regclass($1)::oid", table)
        shape = await connection.fetchrow(SHAPE, oid)
        if shape is None or (shape["is_guarded"], shape["rows"]) != (True, ROWS):
            raise UnusableLog(
                f"The table {table} of {self.name} is there, and is no log of a Roundelay network; name another "
                "network."
            )
        found = await connection.fetchval(f"SELECT data FROM {table} WHERE position = 0")
        if found is None:
            raise UnusableLog(
                f"The table {table} of {self.name} has lost its first row: records are missing. Restore it, or begin "
                "with a new one."
            )
        self._id = found

    # --- records

    async def end(self) -> int:
        try:
            async with self._connection() as connection:
                row = await connection.fetchrow(self._sql(END))
        except FAILURES as error:
            raise self._failed(error) from error
        if row is None or row["id"] != self._id:
            raise UnusableLog(f"The table of {self.name} was made anew, or has lost its first row: restore it.")
        return int(row["max"])

    async def first(self) -> int:
        try:
            async with self._connection() as connection:
                found = await connection.fetchval(self._sql(FIRST))
        except FAILURES as error:
            raise self._failed(error) from error
        return int(found) if found is not None else await self.end() + 1

    async def drop(self, before: int) -> bool:
        try:
            async with self._connection() as connection:
                return int(await connection.fetchval(self._sql(DROP), before, DROPPED, self._id)) < DROPPED
        except FAILURES as error:
            raise self._failed(error) from error

    async def room(self) -> tuple[int, int]:
        try:
            async with self._connection() as connection:
                found = await connection.fetchrow(self._sql(DESCRIBE), self._address.table)
        except FAILURES as error:
            raise self._failed(error) from error
        assert found is not None  # it was found when it was opened
        of = found["max_bytes"] or 1 << 62  # somebody has taken the bound away
        return max(0, of - found["total"]), of

    async def append(self, data: bytes, after: int) -> int:
        until = asyncio.get_running_loop().time() + PATIENCE_S
        while True:
            try:
                if not await self._is_taken(data, after):
                    raise LeadershipLost(f"Somebody else has written to the shared log {self.name}.")
                self._hint()
                return after + 1
            except FAILURES as error:
                if not isinstance(error, PASSING) or asyncio.get_running_loop().time() > until:
                    raise self._failed(error) from error
            await asyncio.sleep(0.05)

    async def _is_taken(self, data: bytes, after: int) -> bool:
        """Whether the log has the record there; one try."""
        async with self._connection() as connection:
            with suppress(asyncpg.UniqueViolationError):  # another one, or an earlier try, was under way
                if await connection.fetchval(self._sql(APPEND), after, data, self._id) is not None:
                    return True
            return await connection.fetchval(self._sql(IS_OURS), after + 1, data) is not None

    async def follow(self, after: int) -> AsyncIterator[LogRecord]:
        while True:
            self._hinted.clear()
            try:
                async with self._connection() as connection:
                    page = await connection.fetch(self._sql(READ), after, PAGE, PAGE_BYTES, timeout=PAGE_S)
            except FAILURES as error:
                raise self._failed(error) from error
            for left, (position, data) in zip(range(len(page) - 1, -1, -1), page, strict=True):
                if position != after + 1:
                    if position == await self.first():  # dropped, and not lost
                        raise LogTruncated(
                            f"The shared log {self.name} begins at {position} by now, and {after + 1} was to be read."
                        )
                    raise UnusableLog(
                        f"The shared log {self.name} goes on at {position}, and {after + 1} is to be read: records are "
                        "missing. Restore it, or begin with a new one."
                    )
                yield LogRecord(position, data, has_more=left > 0)
                after = position
            if not page:
                with suppress(TimeoutError):
                    async with asyncio.timeout(FOLLOW_S):
                        await self._hinted.wait()

    async def find_doubt(self) -> str:
        try:
            async with self._connection() as connection:
                shown = [(name, await connection.fetchval(f"SHOW {name}")) for name in SYNCING]
        except FAILURES as error:
            raise self._failed(error) from error
        for name, value in shown:
            if value not in ("on", "remote_apply"):
                return f"its server has {name} = {value}: set {name} = on in its postgresql.conf, and reload it"
        return ""

    async def describe(self) -> dict[str, Any]:
        doubt = await self.find_doubt()
        try:
            async with self._connection() as connection:
                found = await connection.fetchrow(self._sql(DESCRIBE), self._address.table)
                standbys = await connection.fetch(STANDBYS)
        except FAILURES as error:
            raise self._failed(error) from error
        assert found is not None  # it was found when it was opened
        return {
            "durability": "replicated" if doubt else "full",
            "doubt": doubt,
            "engine": " ".join(found["version"].split()[:2]),
            "records": found["records"],
            "bytes": found["total"],
            "max_bytes": found["max_bytes"] or 0,
            "replicas": 1 + sum(it["is_waited_for"] for it in standbys),
            "servers": [
                {"name": it["application_name"], "leads": False, "is_current": it["is_current"]} for it in standbys
            ],
        }

    # --- what is said

    async def say(self, text: str) -> None:
        try:
            async with self._connection() as connection:
                await connection.execute("SELECT pg_notify($1, $2)", self._channel, text)
        except FAILURES as error:
            raise self._failed(error) from error

    async def listen(self) -> str:
        while not self._heard:
            self._hearing.clear()
            await self._hearing.wait()
        return self._heard.popleft()

    @property
    def _channel(self) -> str:
        return f"roundelay_{self._id.hex()}"

    def _hear(self, connection: object, process: int, channel: str, payload: object) -> None:
        if payload:
            self._heard.append(str(payload))
            self._hearing.set()
        else:
            self._hinted.set()

    def _hint(self) -> None:
        """Say that there is something to read: soon, and without a transaction that syncs waiting for it."""
        self._is_hint_due = True
        if self._hinting is None or self._hinting.done():
            self._hinting = asyncio.create_task(self._give_hints(), name="shared-log-hints")

    async def _give_hints(self) -> None:
        while self._is_hint_due:
            self._is_hint_due = False
            with suppress(LedgerError):
                await self.say("")
            await asyncio.sleep(HINT_S)

    async def _listen(self) -> None:
        self._is_deaf.clear()
        self._listener = await asyncpg.connect(self._address.dsn, **self._connecting())
        self._listener.add_termination_listener(lambda _: self._is_deaf.set())
        await self._listener.add_listener(self._channel, self._hear)

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.terminate()

    async def _keep_listening(self) -> None:
        while True:
            while self._listener is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LISTENING_S):
                        await self._is_deaf.wait()
                try:
                    await self._listener.execute("SELECT 1")
                except FAILURES:
                    self._stop_listening()
            try:
                await self._listen()
            except FAILURES:
                self._stop_listening()
                await asyncio.sleep(FOLLOW_S)

    # --- asking

    def _sql(self, text: str) -> str:
        return text.format(table=self._address.table, max_bytes=self._address.max_bytes)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[PoolConnectionProxy[asyncpg.Record]]:
        """One that is free; after anything but an answer of the server it is not used again."""
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
            is_answered = not isinstance(error, PASSING)
            raise
        finally:
            if not is_answered:
                connection.terminate()
            with suppress(asyncpg.InterfaceError):  # the log was closed meanwhile
                await pool.release(connection)

    def _not_opened(self, error: BaseException) -> LedgerError:
        """Why it could not be opened, and what to do."""
        told, address = _tell(error), self._address
        match error:
            case asyncpg.CannotConnectNowError():
                return LogElectionPending(f"The server of {self.name} is there, and does not serve yet ({told}).")
            case asyncpg.TargetServerAttributeNotMatched():
                return LogUnavailable(
                    f"No server of {self.name} takes what is written: it is a standby, or read-only. Name the primary; "
                    "several hosts may stand with commas between them."
                )
            case asyncpg.InvalidAuthorizationSpecificationError():
                return LedgerError(
                    f"The server of {self.name} refuses who connects ({told}): name a user and a password that it "
                    "knows, as in postgres://USER:PASSWORD@HOST/DATABASE, and let its pg_hba.conf admit them from here."
                )
            case asyncpg.InvalidCatalogNameError():
                return LedgerError(
                    f"The server of {self.name} has no database {address.database}: make it, as with `createdb "
                    f"{address.database}`."
                )
            case asyncpg.InsufficientPrivilegeError() | asyncpg.InvalidSchemaNameError():
                return LedgerError(
                    f"The user of {self.name} may not make or use its table ({told}): let it own the database, or as "
                    f"its owner say `GRANT CREATE ON SCHEMA public TO ...` before the table {address.table} is there, "
                    f"and `GRANT SELECT, INSERT, UPDATE, DELETE ON {address.table} TO ...` after."
                )
            case ssl.SSLCertVerificationError():
                return LedgerError(
                    f"The server of {self.name} shows a certificate that is not trusted ({told}): name who issued it "
                    "with sslrootcert=FILE, and the host as it stands in it."
                )
            case ValueError():  # also asyncpg.ClientConfigurationError
                return LedgerError(f"The address of {self.name} cannot be used: {told}.")
            case OSError() | asyncpg.InterfaceError() | asyncpg.PostgresConnectionError():
                return LogUnavailable(f"No PostgreSQL server of {self.name} can be reached ({told}); is one running?")
            case _:
                return self._failed(error)

    def _failed(self, error: BaseException) -> LedgerError:
        if isinstance(error, asyncpg.CheckViolationError):
            return LogFull(
                f"The shared log {self.name} is full: its table has a constraint max_bytes. Widen it, as "
                "docs/cluster.md says."
            )
        kind = LogUnavailable if isinstance(error, PASSING) else LedgerError
        return kind(f"The shared log {self.name} failed: {_tell(error)}.")


async def _keep_settings(connection: object) -> None:
    """Nothing is set on a connection after it was made, so nothing is put back."""


def _tell(error: BaseException) -> str:
    first = (str(error) or type(error).__name__).splitlines()[0]
    return first.rstrip(".")
