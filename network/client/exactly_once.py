"""Exactly-once handling: a handler's own SQLite effect and the cursor that says so, in one transaction.

The hub delivers at least once; what has been handled is kept beside the effect, so that neither a crash between the two
nor a delivery that comes again can double or lose anything (promise P5). The effect must be in the same database: what
the handler does elsewhere (a mail sent) is not taken back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiosqlite

from roundelay.network.errors import RoundelayError

from .acks import Delivery
from .client import NetworkClient
from .values import AnyMessage, Cursor, Notice

log = logging.getLogger(__name__)

Handler = Callable[[aiosqlite.Connection, AnyMessage], Awaitable[None]]

_SCHEMA = (
    # everything up to the cursor is handled, but what is open, and what was there before the first start (up to began)
    # and is not done
    "CREATE TABLE IF NOT EXISTS roundelay_cursor "
    "(agent_id TEXT PRIMARY KEY, epoch TEXT NOT NULL, seq INTEGER NOT NULL, began INTEGER NOT NULL DEFAULT 0)",
    # deliveries at or below the cursor whose handler has failed so far: they come again; a dead letter only if it is
    # taken back
    "CREATE TABLE IF NOT EXISTS roundelay_open "
    "(agent_id TEXT NOT NULL, seq INTEGER NOT NULL, dead INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (agent_id, seq))",
    "CREATE TABLE IF NOT EXISTS roundelay_done "
    "(agent_id TEXT NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY (agent_id, seq))",
)
_ADDED_COLUMNS = (("roundelay_cursor", "began"), ("roundelay_open", "dead"))
"""Columns that a database of an earlier version does not have."""


class HistoryReplaced(RoundelayError):
    """The hub's ledger is another one than the cursor's (lost, restored, forked), or no longer reaches back to it.

    What was handled can no longer be told from what was not. Look into it, then delete the row of ``roundelay_cursor``
    to begin anew with everything that the hub still has, or set it to a place in the new history."""

    code = "history_replaced"


async def handle_exactly_once(
    database: Path | str, agent_id: str, handler: Handler, url: str | None = None, **options: Any
) -> None:
    """Handle each message for ``agent_id`` exactly once, for ever; ``options`` are `NetworkClient`'s.

    ``handler(db, message)`` writes through ``db`` and neither commits nor rolls back. When it raises, its effect is
    rolled back and the message comes again, after the fifth failure it becomes a dead letter. Raises `HistoryReplaced`,
    and whatever ends the client. One process at a time per agent and database."""
    async with aiosqlite.connect(database, isolation_level=None) as db:
        await db.execute("PRAGMA journal_mode = WAL")
        await db.execute("PRAGMA synchronous = FULL")
        await db.execute("PRAGMA fullfsync = ON")  # macOS alone: its fsync leaves data in the drive's cache
        await _prepare_tables(db)
        cursor = await _read_cursor(db, agent_id)
        async with NetworkClient(agent_id, url, resume=cursor, **options) as client:
            replaced = HistoryReplaced(
                f"The hub at {client.url} no longer has the history that {database} stands in; see "
                "roundelay.network.client.exactly_once."
            )
            if client.welcome.resume == "limited" and cursor is not None and cursor.seq:
                raise replaced
            epoch = client.welcome.network.epoch
            await _begin(db, client)
            turn = asyncio.Lock()  # one connection has one transaction at a time
            dead = asyncio.create_task(_keep_dead_letters(db, client, turn))
            try:
                async for delivery in client.deliveries():
                    if delivery.is_stale or client.welcome.network.epoch != epoch:
                        raise replaced
                    async with turn:
                        await _handle(db, client, delivery, handler)
            finally:
                dead.cancel()
                await asyncio.wait([dead])
                if not dead.cancelled() and (failure := dead.exception()) is not None:
                    log.error("dead letters are no longer noted", exc_info=failure)


async def _prepare_tables(db: aiosqlite.Connection) -> None:
    for statement in _SCHEMA:
        await db.execute(statement)
    for table, column in _ADDED_COLUMNS:
        columns = [row[1] for row in await db.execute_fetchall(f"PRAGMA table_info({table})")]
        if column not in columns:
            await db.execute(f"ALTER TABLE {table} ADD COLUMN {column} INTEGER NOT NULL DEFAULT 0")


async def _begin(db: aiosqlite.Connection, client: NetworkClient) -> None:
    """At the very first start, keep where that was: of what is older, some may wait for another attempt that somebody
    else began."""
    welcome = client.welcome
    sql = "INSERT OR IGNORE INTO roundelay_cursor (agent_id, epoch, seq, began) VALUES (?, ?, ?, ?)"
    await db.execute(sql, (client.agent_id, welcome.network.epoch, welcome.cursor, welcome.head))


async def _read_cursor(db: aiosqlite.Connection, agent_id: str) -> Cursor | None:
    """Where to resume: before the oldest delivery that is still open. None at the very first start: from the hub's
    floor."""
    row = await (await db.execute("SELECT epoch, seq FROM roundelay_cursor WHERE agent_id = ?", (agent_id,))).fetchone()
    if row is None:
        return None
    sql = "SELECT min(seq) FROM roundelay_open WHERE agent_id = ? AND dead = 0"
    oldest = await (await db.execute(sql, (agent_id,))).fetchone()
    first_open = oldest[0] if oldest is not None else None
    return Cursor(row[0], row[1] if first_open is None else min(row[1], first_open - 1))


async def _handle(db: aiosqlite.Connection, client: NetworkClient, delivery: Delivery, handler: Handler) -> None:
    message, agent_id = delivery.message, client.agent_id
    if message.sender_id == agent_id or not await _is_open(db, agent_id, message.seq):
        await delivery.ack()
        return
    # what comes out of order (a dead letter that was taken back, say) holds the cursor back from here on: a restart
    # gets it again
    await db.execute(_OPEN_AGAIN, (agent_id, message.seq))
    await db.execute("BEGIN IMMEDIATE")
    try:
        await handler(db, message)
        await db.execute("DELETE FROM roundelay_open WHERE agent_id = ? AND seq = ?", (agent_id, message.seq))
        await db.execute(_KEEP_DONE, (agent_id, message.seq))
        await _advance(db, client, message.seq)
        await db.execute("COMMIT")
    except Exception as error:
        await db.execute("ROLLBACK")
        log.exception("a handler failed", extra={"agent_id": agent_id, "seq": message.seq})
        await db.execute("BEGIN IMMEDIATE")
        await db.execute(
            "INSERT OR REPLACE INTO roundelay_open (agent_id, seq, dead) VALUES (?, ?, 0)", (agent_id, message.seq)
        )
        await _advance(db, client, message.seq)
        await db.execute("COMMIT")
        await delivery.nack(f"{type(error).__name__}: {error}")
    except BaseException:  # cancelled: as if it had not begun
        await db.execute("ROLLBACK")
        raise
    else:
        await delivery.ack()


_OPEN_AGAIN = (
    "INSERT OR REPLACE INTO roundelay_open (agent_id, seq, dead) "
    "SELECT ?1, ?2, 0 WHERE EXISTS (SELECT 1 FROM roundelay_cursor WHERE agent_id = ?1 AND seq >= ?2)"
)
_KEEP_DONE = (
    "INSERT OR IGNORE INTO roundelay_done "
    "SELECT ?1, ?2 WHERE EXISTS (SELECT 1 FROM roundelay_cursor WHERE agent_id = ?1 AND began >= ?2)"
)


async def _is_open(db: aiosqlite.Connection, agent_id: str, seq: int) -> bool:
    sql = (
        "SELECT NOT EXISTS (SELECT 1 FROM roundelay_cursor WHERE agent_id = ?1 AND seq >= ?2) "
        "OR EXISTS (SELECT 1 FROM roundelay_open WHERE agent_id = ?1 AND seq = ?2) "
        "OR (EXISTS (SELECT 1 FROM roundelay_cursor WHERE agent_id = ?1 AND began >= ?2) "
        "AND NOT EXISTS (SELECT 1 FROM roundelay_done WHERE agent_id = ?1 AND seq = ?2))"
    )
    row = await (await db.execute(sql, (agent_id, seq))).fetchone()
    return row is not None and bool(row[0])


async def _advance(db: aiosqlite.Connection, client: NetworkClient, seq: int) -> None:
    sql = (
        "INSERT INTO roundelay_cursor (agent_id, epoch, seq) VALUES (?, ?, ?) ON CONFLICT (agent_id) "
        "DO UPDATE SET epoch = excluded.epoch, seq = max(seq, excluded.seq)"
    )
    await db.execute(sql, (client.agent_id, client.welcome.network.epoch, seq))


async def _keep_dead_letters(db: aiosqlite.Connection, client: NetworkClient, turn: asyncio.Lock) -> None:
    """A dead letter no longer holds the cursor back; should it be taken back, it is still to be handled."""
    sql = "INSERT OR REPLACE INTO roundelay_open (agent_id, seq, dead) VALUES (?, ?, 1)"
    async for event in client.events():
        if isinstance(event, Notice) and event.kind == "dead_letter" and event.body.get("agent_id") == client.agent_id:
            async with turn:
                try:
                    await db.execute(sql, (client.agent_id, event.body["seq"]))
                except aiosqlite.Error:  # then it holds the cursor back, and more than needed comes again
                    log.exception("a dead letter is not noted", extra={"agent_id": client.agent_id})
