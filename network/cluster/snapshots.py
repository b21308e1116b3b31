"""Snapshots: the leader writes every value of every table to the log again, so that older records can be dropped.

A snapshot consists of a begin record, chunks, and an end record. Commits may be written between them. The leader reads
and writes a chunk under its lock, so a chunk contains the state at its own position in the log, and later commits
override it. A snapshot without its end is ignored. Snapshots contain no rows of the log. Therefore the log may begin at
a complete snapshot only if every row up to the snapshot's head has been deleted.
"""

from __future__ import annotations

import asyncio
import logging
from typing import cast

from roundelay.network.core.tables import COLD_TABLES, LOADED_TABLES, VOLATILE_TABLES, Table, TableWrite
from roundelay.network.errors import LedgerError
from roundelay.network.ledger import TrimStep

from . import settings
from .indexed_log import IndexedLog
from .leader import Leader
from .records import write_commit, write_records

log = logging.getLogger(__name__)


async def shorten_log(leader: Leader) -> None:
    """Drop the records before the newest snapshot, or write a snapshot if one is due."""
    indexed = leader.log
    first, (free, total) = await indexed.shared.first(), await indexed.shared.room()
    records = indexed.reader.end - first
    # There is a complete snapshot. Use it before writing another one.
    if indexed.reader.snapshot > first:
        await drop_before_snapshot(indexed, first, leader)
        return
    is_filling_up = records >= settings.SNAPSHOT_MIN_RECORDS and total - free >= total // settings.SNAPSHOT_FILL_DIVISOR
    # damaged values would be missing in the snapshot, and without the older records every node would lose them
    if (records >= settings.SNAPSHOT_EVERY_RECORDS or is_filling_up) and not indexed.index.damaged:
        await _write_snapshot(leader)


async def drop_before_snapshot(indexed: IndexedLog, first: int, leader: Leader | None) -> None:
    """Drop the records before the newest snapshot if none of these records is needed any more.

    If the drop fails or the node is killed, the log is still valid, and a later call tries again. A candidate that does
    not lead yet (``leader`` is None) also calls this function, to make room for its claim.
    """
    reader = indexed.reader
    snapshot, head = reader.snapshot, reader.snapshot_head
    # Snapshots contain no rows of the log. While a row from before the snapshot is kept, a new node must read this row
    # from the older records.
    if snapshot <= first or await indexed.index.holds_up_to(head):
        return
    if await indexed.first_kept() <= head:
        # No row up to the head is left, but the marks are still lower. A node that begins at the snapshot would
        # consider the rows missing, so a trim moves the marks first.
        if leader is None or not leader.token:
            return
        async with leader.exclusive():
            begin = await indexed.index.read_beginning()
            step = TrimStep(
                max(begin.messages, head + 1), max(begin.records, head + 1), is_last=False, stamp=begin.stamp
            )
            await indexed.append_trim(step, leader.token)
            await indexed.drop(step)
    lock = asyncio.Lock() if leader is None else leader.lock
    is_done = False
    while not is_done:
        async with lock:  # release the lock after each step, so that commits can be written in between
            try:
                # Dropping is idempotent and keeps the snapshot itself, so a kill between two steps does no harm.
                is_done = await indexed.shared.drop(snapshot)
            except LedgerError as error:
                log.warning("old records stay in the shared log: %s", error)
                return
    await indexed.refresh_room()
    log.info("the shared log begins later", extra={"log": indexed.name, "position": snapshot})


async def _write_snapshot(leader: Leader) -> None:
    indexed, reader = leader.log, leader.log.reader
    async with leader.exclusive():
        position, head = reader.end + 1, indexed.index.head
        begin = await indexed.index.read_beginning()
        await indexed.append("base", leader.token, epoch=reader.epoch, name=reader.name, head=head)
        # a node that begins here has to know which rows are already deleted
        await indexed.append_trim(begin, leader.token)
    for table in (*LOADED_TABLES, *sorted(COLD_TABLES - VOLATILE_TABLES - {"followed"})):
        await _write_table(leader, cast(Table, table))
    async with leader.exclusive():
        # Last: without this record the chunks do not count, and a reader that begins there knows that the snapshot is
        # incomplete.
        await indexed.append("based", leader.token, base=position, head=head)
        # Store the cursor now: a drop must not remove the record at the index's position.
        await indexed.index.append([], [indexed.cursor_write()])


async def _write_table(leader: Leader, table: Table) -> None:
    """Write the values of a table in chunks. Reading and writing a chunk is one step under the lock. Otherwise a commit
    between them would be overridden by older values."""
    indexed, after = leader.log, ""
    while True:
        async with leader.exclusive():
            page = await indexed.index.cold(table, "", settings.SNAPSHOT_PAGE, after=after)
            if not page:
                return
            body = write_commit([], [TableWrite(table, key, value) for key, value in page])
            last_digest, max_bytes = indexed.reader.end_digest, indexed.shared.max_bytes
            for record in write_records(body, leader.token, last_digest, max_bytes, "values"):
                await indexed.append_record(record)
        after = page[-1][0]
