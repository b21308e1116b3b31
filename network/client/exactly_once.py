"""Exactly-once handling of messages: a handler's effect in SQLite and the cursor are written in one transaction.

The hub delivers each message at least once. The effect and the cursor are in the same database, so a crash or a
repeated delivery neither repeats nor loses an effect (promise P5). Effects outside of the database, such as a sent
mail, cannot be rolled back."""

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
    # All messages up to the cursor are handled, with two exceptions: open deliveries, and messages from before the
    # first start (up to ``began``) that are not in roundelay_done.
    "CREATE TABLE IF NOT EXISTS roundelay_cursor "
    "(agent_id TEXT PRIMARY KEY, epoch TEXT NOT NULL, seq INTEGER NOT NULL, began INTEGER NOT NULL DEFAULT 0)",
    # Deliveries at or below the cursor whose handler has failed. The hub delivers these messages again, but a dead
    # letter only after it is restored.
    "CREATE TABLE IF NOT EXISTS roundelay_open "
    "(agent_id TEXT NOT NULL, seq INTEGER NOT NULL, dead INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (agent_id, seq))",
    "CREATE TABLE IF NOT EXISTS roundelay_done "
    "(agent_id TEXT NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY (agent_id, seq))",
)
_ADDED_COLUMNS = (("roundelay_cursor", "began"), ("roundelay_open", "dead"))
"""Columns that databases of earlier versions do not have."""


class HistoryReplaced(RoundelayError):
    """The hub's ledger was lost, restored or replaced, or no longer reaches back to the cursor.

    It is unknown which of the hub's messages were handled. Compare the hub's messages with your data. Then delete the
    row of ``roundelay_cursor`` to handle all messages that the hub still has, or set the row's cursor to a position in
    the new history."""

    code = "history_replaced"


async def handle_exactly_once(
    database: Path | str, agent_id: str, handler: Handler, url: str | None = None, **options: Any
) -> None:
    """Handle each message for ``agent_id`` exactly once, without end. ``options`` are passed to `NetworkClient`.

    ``handler(db, message)`` writes through ``db`` and must not commit or roll back. If the handler raises, its effect
    is rolled back and the message is delivered again. After the fifth failure, the message becomes a dead letter.
    Raises `HistoryReplaced`, and the errors that end the client. Run only one process at a time per agent and
    database."""
    async with aiosqlite.connect(database, isolation_level=None) as db:
        await db.execute("PRAGMA journal_mode = WAL")
        # With NORMAL, a power cut could undo a commit after its message was acknowledged. The effect would be lost.
        await db.execute("PRAGMA synchronous = FULL")
        await db.execute("PRAGMA fullfsync = ON")  # only on macOS, where fsync leaves data in the drive's cache
        await _prepare_tables(db)
        cursor = await _read_cursor(db, agent_id)
        async with NetworkClient(agent_id, url, resume=cursor, **options) as client:
            replaced = HistoryReplaced(
                f"The hub at {client.url} no longer has the history that the cursor in {database} belongs to. See "
                "HistoryReplaced in roundelay.network.client.exactly_once."
            )
            # Stop instead of continuing: messages between the cursor and the hub's oldest message may not have been
            # handled.
            if client.welcome.resume == "limited" and cursor is not None and cursor.seq:
                raise replaced
            epoch = client.welcome.network.epoch
            await _begin(db, client)
            turn = asyncio.Lock()  # A database connection has one transaction at a time.
            dead_letters = asyncio.create_task(_record_dead_letters(db, client, turn))
            try:
                async for delivery in client.deliveries():
                    if delivery.is_stale or client.welcome.network.epoch != epoch:
                        raise replaced
                    async with turn:
                        await _handle(db, client, delivery, handler)
            finally:
                dead_letters.cancel()
                # The task may be executing a statement, so wait for the task before closing the database.
                await asyncio.wait([dead_letters])
                if not dead_letters.cancelled() and (failure := dead_letters.exception()) is not None:
                    log.error("Dead letters were no longer recorded, because of an error.", exc_info=failure)


async def _prepare_tables(db: aiosqlite.Connection) -> None:
    for statement in _SCHEMA:
        await db.execute(statement)
    for table, column in _ADDED_COLUMNS:
        # Check first, because SQLite does not support ADD COLUMN IF NOT EXISTS.
        columns = [row[1] for row in await db.execute_fetchall(f"PRAGMA table_info({table})")]
        if column not in columns:
            await db.execute(f"ALTER TABLE {table} ADD COLUMN {column} INTEGER NOT NULL DEFAULT 0")


async def _begin(db: aiosqlite.Connection, client: NetworkClient) -> None:
    """Store the position of the first start. Older messages may still arrive, because another program may have failed
    to handle them."""
    welcome = client.welcome
    # IGNORE keeps the position of the first start. If ``began`` moved with each restart, old messages would count as
    # handled.
    sql = "INSERT OR IGNORE INTO roundelay_cursor (agent_id, epoch, seq, began) VALUES (?, ?, ?, ?)"
    await db.execute(sql, (client.agent_id, welcome.network.epoch, welcome.cursor, welcome.head))


async def _read_cursor(db: aiosqlite.Connection, agent_id: str) -> Cursor | None:
    """Return the cursor to resume from, which is before the oldest open delivery. Return None at the very first start,
    so that the client resumes at the hub's ack cursor."""
    row = await (await db.execute("SELECT epoch, seq FROM roundelay_cursor WHERE agent_id = ?", (agent_id,))).fetchone()
    if row is None:
        return None
    sql = "SELECT min(seq) FROM roundelay_open WHERE agent_id = ? AND dead = 0"
    oldest = await (await db.execute(sql, (agent_id,))).fetchone()
    first_open = oldest[0] if oldest is not None else None
    return Cursor(row[0], row[1] if first_open is None else min(row[1], first_open - 1))


async def _handle(db: aiosqlite.Connection, client: NetworkClient, delivery: Delivery, handler: Handler) -> None:
    message, agent_id = delivery.message, client.agent_id
    # The message is the agent's own or was already handled. Acknowledge it, so that the hub stops delivering it.
    if message.sender_id == agent_id or not await _is_open(db, agent_id, message.seq):
        await delivery.ack()
        return
    # A restored dead letter is below the cursor. Mark it as open before its handler runs. Otherwise a crash of the
    # handler would lose the message, because a restart resumes before the oldest open delivery.
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
        log.exception("A handler failed.", extra={"agent_id": agent_id, "seq": message.seq})
        await db.execute("BEGIN IMMEDIATE")
        await db.execute(
            "INSERT OR REPLACE INTO roundelay_open (agent_id, seq, dead) VALUES (?, ?, 0)", (agent_id, message.seq)
        )
        await _advance(db, client, message.seq)
        await db.execute("COMMIT")
        # Send the nack after the commit. If the nack is lost, the committed row makes the next start receive the
        # message again.
        await delivery.nack(f"{type(error).__name__}: {error}")
    except BaseException:  # the task was cancelled
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


async def _record_dead_letters(db: aiosqlite.Connection, client: NetworkClient, turn: asyncio.Lock) -> None:
    """Mark dead letters in the database, so that the next start does not resume before them. A dead letter is handled
    only after it is restored."""
    sql = "INSERT OR REPLACE INTO roundelay_open (agent_id, seq, dead) VALUES (?, ?, 1)"
    async for event in client.events():
        if isinstance(event, Notice) and event.kind == "dead_letter" and event.body.get("agent_id") == client.agent_id:
            async with turn:
                try:
                    await db.execute(sql, (client.agent_id, event.body["seq"]))
                except aiosqlite.Error:
                    # The next start resumes before this dead letter, and receives more messages than necessary.
                    log.exception("A dead letter could not be recorded.", extra={"agent_id": client.agent_id})
