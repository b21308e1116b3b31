"""Snapshots: the leader writes all values of all tables to the log again, so that older records can be deleted.

A snapshot consists of a begin record, chunks, and an end record. Commits may be written between these records. The
leader reads and writes each chunk under its lock. So a chunk contains the state at its own position in the log, and
later commits override it. A snapshot without an end record is ignored. A snapshot contains only tables, not rows of the
log. So the log may begin at a complete snapshot only after every row before the snapshot was deleted.
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
    """Delete the records before the newest snapshot, or write a new snapshot if one is due."""
    indexed = leader.log
    first, (free, total) = await indexed.shared.first(), await indexed.shared.room()
    records = indexed.reader.end - first
    # If there is an unused complete snapshot, use it before writing another one.
    if indexed.reader.snapshot > first:
        await drop_before_snapshot(indexed, first, leader)
        return
    is_filling_up = records >= settings.SNAPSHOT_MIN_RECORDS and total - free >= total // settings.SNAPSHOT_FILL_DIVISOR
    # Write no snapshot of a damaged index. The snapshot would lack the damaged values, and every node would lose them
    # after the older records were deleted.
    if (records >= settings.SNAPSHOT_EVERY_RECORDS or is_filling_up) and not indexed.index.damaged:
        await _write_snapshot(leader)


async def drop_before_snapshot(indexed: IndexedLog, first: int, leader: Leader | None) -> None:
    """Delete the records before the newest snapshot if no node needs them any more.

    If the call fails or the node is killed, the log stays valid, and a later call tries again. A node that is about to
    claim the log has no term yet. It also calls this function to make room for its claim, with None as ``leader``.
    """
    reader = indexed.reader
    snapshot, head = reader.snapshot, reader.snapshot_head
    # Keep the older records while any of their rows is kept. Snapshots contain no rows, so new nodes read the rows from
    # the older records.
    if snapshot <= first or await indexed.index.holds_up_to(head):
        return
    if await indexed.first_kept() <= head:
        # The rows before the snapshot are deleted, but the marks for the first kept message and record are still lower.
        # A node that begins at the snapshot would consider these rows missing. So first write a trim, which raises the
        # marks.
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
                # A kill between two steps does no harm: dropping can be repeated, and the snapshot itself is kept.
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
        # A node that begins at this snapshot must know which rows were already deleted.
        await indexed.append_trim(begin, leader.token)
    for table in (*LOADED_TABLES, *sorted(COLD_TABLES - VOLATILE_TABLES - {"followed"})):
        await _write_table(leader, cast(Table, table))
    async with leader.exclusive():
        # Write the end record last. Without the end record, readers ignore the chunks, and a reader that begins at the
        # snapshot knows that the snapshot is incomplete.
        await indexed.append("based", leader.token, base=position, head=head)
        # Store the cursor now, because `drop` must not delete the record at the cursor's position.
        await indexed.index.append([], [indexed.cursor_write()])


async def _write_table(leader: Leader, table: Table) -> None:
    """Write the values of one table in chunks. Each chunk is read and written under the lock. Otherwise its old values
    could override a commit that was written in between."""
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
