"""Work of the hub outside its batches: storing ack cursors, ending takeovers, checking the ledger's files, retention,
and maintenance of mods.

Each kind of work is one task. Changes of the network become entries of the next batch, like all other changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from roundelay.network.blobs import BlobStore
from roundelay.network.clock import Clock
from roundelay.network.config import Retain
from roundelay.network.core.due_times import list_due
from roundelay.network.core.entries import EndTakeover, ModEntry, ReachDueTime, SaveAckCursors
from roundelay.network.core.failures import clear_attempts
from roundelay.network.core.mod import Mod, Upkeep, list_blobs_in_use
from roundelay.network.core.questions import remove_dropped_questions
from roundelay.network.core.quiet import close_dropped
from roundelay.network.core.tables import TableWrite
from roundelay.network.core.takeover_control import list_expired
from roundelay.network.errors import LedgerError, RoundelayError
from roundelay.network.ledger import Ledger

from .batch_writer import BatchWriter
from .pending import PendingEntries
from .retention import ClockWatch, run_retention
from .sessions import SessionRegistry
from .status import HubStatus

log = logging.getLogger(__name__)

ACK_FLUSH_S = 0.5
"""Delay in seconds after which acknowledgements are stored. docs/protocol.md allows 1 s."""
VERIFY_S = 0.5
"""Period in seconds of the checks that the ledger's files still exist. docs/operations.md promises that a missing file
is reported within a second."""

MODS_S = 60.0
"""Period in seconds of the mods' ``maintain`` hooks."""


class Maintenance:
    """The hub's periodic tasks."""

    def __init__(
        self,
        ledger: Ledger,
        registry: SessionRegistry,
        pending: PendingEntries,
        writer: BatchWriter,
        status: HubStatus,
        *,
        due_mods: Sequence[str],
        retain: Retain,
        is_read_only: bool,
        mods: Sequence[Mod],
        blobs: BlobStore | None,
        clock: Clock,
        wall_clock: Clock,
        clock_watch: ClockWatch,
    ) -> None:
        self._ledger = ledger
        self._registry = registry
        self._pending = pending
        self._writer = writer
        self._status = status
        self._due_mods = due_mods
        """Ids of the mods with a ``due`` hook."""
        self._retain = retain
        self._is_read_only = is_read_only
        self._mods = () if is_read_only else mods
        self._blobs = blobs
        self._clock = clock
        self._wall_clock = wall_clock
        """Clock for retention. An operator may set it back while the hub runs, which `SteadyClock` would hide."""
        self._clock_watch = clock_watch
        self._tasks: list[asyncio.Task[None]] = []
        self._is_slow = False
        """Whether the log already contains a warning that the ledger does not respond."""
        self._questions_from = 0
        """Oldest seq in the log at the last removal of old questions."""

    def start(self, on_end: Callable[[asyncio.Task[None]], None]) -> None:
        """Start the tasks. ``on_end`` is called whenever a task ends."""
        retention = run_retention(
            self._retain, self._registry, self._ledger, self._wall_clock, self._writer.lock, self._clock_watch
        )
        self._tasks = [
            asyncio.create_task(self._run_periodic(), name="hub-ack-cursors"),
            asyncio.create_task(retention, name="hub-retention"),
            asyncio.create_task(self._watch_ledger(), name="hub-ledger-watch"),
        ]
        if self._mods or self._blobs is not None:
            self._tasks.append(asyncio.create_task(self._maintain_mods(), name="hub-mods"))
        for task in self._tasks:
            task.add_done_callback(on_end)

    async def stop(self) -> None:
        """Cancel the tasks and wait for their end. ``on_end`` has already reported their errors."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def collect_handled(self) -> SaveAckCursors:
        """Return the ack cursors that changed since the last call, and the table writes for failures that have been
        handled since."""
        registry, state = self._registry, self._registry.state
        writes: list[TableWrite] = []
        for mailbox in registry.participants.list_changed():
            agent_id = mailbox.agent_id
            if mailbox.handled_failures:
                open_triggers = registry.participants.open_triggers(agent_id)
                # Skip open triggers: their failures count until the reaction ends. For a dead letter, `clear_attempts`
                # writes nothing, because a delete could remove the attempts of a letter that is being restored now.
                for seq in mailbox.handled_failures:
                    if seq not in open_triggers:
                        writes += clear_attempts(state, agent_id, seq)
            # Take the snapshot after the loop, because `snapshot` clears `handled_failures`.
            writes.append(TableWrite("floor", agent_id, mailbox.snapshot()))
        # Search for old questions only after a trim. The search scans the whole table.
        first_seq = registry.meta.first_seq
        if first_seq != self._questions_from:
            self._questions_from = first_seq
            writes += remove_dropped_questions(state, first_seq)
            writes += close_dropped(state, first_seq)
        return SaveAckCursors(tuple(writes))

    async def _run_periodic(self) -> None:
        """Every `ACK_FLUSH_S`, store acknowledgements, end expired takeovers and drop idle participants. If the hub
        crashes before acknowledgements are stored, handled messages may be delivered again, but no message is lost."""
        while True:
            # Store acknowledgements together. A commit for each acknowledgement would need one fsync per
            # acknowledgement.
            await asyncio.sleep(ACK_FLUSH_S)
            handled = self.collect_handled()
            if handled.writes:
                self._pending.add(handled)
            if self._status.is_open and not self._is_read_only:
                # End the takeover with an entry in the log, so that a replay ends it at the same position.
                for thread_id in list_expired(self._registry.state, self._clock()):
                    self._pending.add(EndTakeover(thread_id))
                self._add_due_times()
            # Drop idle participants here and not when their last session leaves: many clients reconnect at once.
            self._registry.participants.drop_idle()
            self._log_slow_ledger()

    def _add_due_times(self) -> None:
        """Add an entry for each due time of a mod that has been reached. A second entry for the same due time has no
        effect."""
        # Add nothing while the ledger hangs. Otherwise the same entries would be added again every half second.
        if not self._status.is_ready:
            return
        for mod, key, due in list_due(self._registry.state, self._due_mods, self._clock()):
            is_absent = due.watched and not self._registry.participants.sessions_of(due.watched)
            absent_ms = self._registry.participants.absences.measure(due.watched) if is_absent else 0
            self._pending.add(ReachDueTime(mod, key, due.cause, absent_ms))

    async def _maintain_mods(self) -> None:
        """Run the mods' ``maintain`` hooks, and delete blobs that no mod needs. A failure is logged and does not end
        the hub."""
        while True:
            await asyncio.sleep(MODS_S)
            if not self._status.is_open:
                continue
            registry = self._registry
            for mod in self._mods:
                submit, list_cold = partial(self._submit, mod.id), partial(self._list_cold, mod.id)
                first_seq, now = registry.meta.first_seq, self._wall_clock()
                try:
                    await mod.maintain(Upkeep(registry.state, submit, first_seq, now, list_cold))
                except Exception:
                    log.exception("a mod's maintain hook failed", extra={"mod": mod.id})
            try:
                if self._blobs is not None:
                    await self._blobs.collect_garbage(self._list_blobs_in_use, self._wall_clock())
            except RoundelayError as error:
                log.error("unused blobs could not be deleted: %s", error)

    def _list_blobs_in_use(self) -> set[str]:
        return list_blobs_in_use(self._registry.state)

    async def _list_cold(self, mod_id: str, prefix: str, limit: int, after: str) -> list[str]:
        own = f"{mod_id}/"
        values = await self._ledger.cold("mod_cold", own + prefix, limit, after=own + after)
        return [key.removeprefix(own) for key, _ in values]

    def _submit(self, mod_id: str, payload: object) -> None:
        if not self._status.draining.is_set():
            self._pending.add(ModEntry(mod_id, payload, cause=0))

    def _log_slow_ledger(self) -> None:
        """Log a warning when the ledger stops responding, and when it responds again."""
        if self._status.is_open and not self._status.is_ready and not self._is_slow:
            log.warning("the ledger does not answer: the hub is not ready until it does")
            self._is_slow = True
        elif self._status.is_ready and self._is_slow:
            log.warning("the ledger answers again")
            self._is_slow = False

    async def _watch_ledger(self) -> None:
        """Check the ledger's files every `VERIFY_S`. A write would also detect a missing file, but there may be no
        write for a long time."""
        while True:
            await asyncio.sleep(VERIFY_S)
            # If the ledger is not open, the writer is already recovering and will open it.
            if not self._status.is_open:
                continue
            try:
                await self._ledger.verify()
            except LedgerError as error:
                self._writer.reopen_ledger(error)
