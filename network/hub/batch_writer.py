"""`BatchWriter`: steps 5 to 8 of each batch, and recovery when a step fails.

One task commits batch after batch: look up, apply, append, publish. The hub answers and delivers nothing before the
append has returned. If an append fails, its outcome is unknown. The writer then answers no client, closes every session
with 4503, reopens the ledger and loads the state from it. Clients send their unanswered frames again. If the ledger
stored an entry after all, step 6 recognizes that the entry is a repeat.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from roundelay.network.backoff import Backoff
from roundelay.network.clock import NewId, SteadyClock
from roundelay.network.core.apply import apply, build_lookup
from roundelay.network.core.change import refuse_after_defect, refuse_unstored
from roundelay.network.core.entries import Entry, Outcome
from roundelay.network.core.rights import Rights
from roundelay.network.core.rows import Row, StoredKey
from roundelay.network.core.sending import Rules
from roundelay.network.core.state import State
from roundelay.network.core.tables import Facts, LookupRequest
from roundelay.network.errors import LedgerError, Overloaded
from roundelay.network.frames import format_lost_leadership
from roundelay.network.ledger import KeyTaken, LeadershipLost, Ledger, LogFull, Unstorable

from .intake import Intake
from .metrics import CommitStats
from .publisher import Publisher
from .repeated_errors import RepeatedErrorLog
from .retention import ClockWatch
from .sessions import SessionRegistry
from .status import HubStatus

log = logging.getLogger(__name__)

MAX_TABLE_WRITES = 20_000
"""Number of table values that are loaded before other tasks get a turn, about 40 ms of work."""
FULL_RETRY_MS = 5000
REOPEN_BACKOFF = Backoff(0.1, 1.0)
"""Delays before the ledger is reopened. docs/operations.md promises a ready hub within 5 s after a fault, and opening
the ledger takes part of these 5 s."""
LEDGER_FAILED = "The hub's ledger failed; reconnect and repeat what was not answered."


class Batch:
    """Entries that go through steps 5 to 8, with the results of the steps so far."""

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self.lookup = build_lookup(entries)
        self.is_guessed = True
        """Whether step 5 skips the lookup of keys, assuming that no entry is a repeat."""
        self.is_checked = False
        """Whether step 6 tests for each outcome that the ledger can store it."""
        self.is_appending = False
        """Whether the ledger was asked to store the batch."""
        self.is_stored = False
        self.recalled = Facts()
        """Heads and values that the ledger found in its memory. Used only if ``is_guessed``."""
        self.facts = Facts()
        self.draft: State
        """Changes that step 6 makes on top of the committed state."""
        self.outcomes: list[tuple[Entry, Outcome]] = []
        self.rows: list[Row] = []

    def assume_stored(self, keys: Mapping[tuple[str, str], StoredKey]) -> None:
        """Set the facts for step 6: the recalled heads and values, and ``keys`` as the only stored idempotency keys."""
        # Copy the heads: step 6 adds the batch's own rows to the facts, and the next round must not treat them as
        # stored.
        self.facts = Facts(stored=dict(keys), heads=dict(self.recalled.heads), cold=self.recalled.cold)


class BatchWriter:
    """The hub's only writer of the ledger, and its recovery.

    Every commit holds ``lock``. Other work that must not run during a commit holds the lock too.
    """

    def __init__(
        self,
        ledger: Ledger,
        registry: SessionRegistry,
        rules: Rules,
        intake: Intake,
        publisher: Publisher,
        status: HubStatus,
        stats: CommitStats,
        *,
        rights: Rights | None,
        clock: SteadyClock,
        clock_watch: ClockWatch,
        new_id: NewId,
    ) -> None:
        self.lock = asyncio.Lock()
        self._ledger = ledger
        self._registry = registry
        self._rules = rules
        self._intake = intake
        self._pending = intake.pending
        self._publisher = publisher
        self._status = status
        self._stats = stats
        self._rights = rights
        self._clock = clock
        self._clock_watch = clock_watch
        self._new_id = new_id
        self._reported_error: LedgerError | None = None
        """Error that another part of the hub reported. The writer recovers from this error before its next batch."""
        now_s = asyncio.get_running_loop().time
        self._now_s = now_s
        self._ledger_errors = RepeatedErrorLog("the ledger failed; reopening it", "the ledger is open again", now_s)
        self._full_errors = RepeatedErrorLog("nothing is stored", "there is room again", now_s)

    async def run(self) -> None:
        """Commit pending entries, batch by batch, until the hub drains and no entry is left."""
        while True:
            await self._pending.has_work.wait()
            # Clear the event before taking the batch: an entry that is added while the batch commits sets the event
            # again.
            self._pending.has_work.clear()
            # Recover before the next batch, because a commit to a failed ledger would only fail too.
            if self._reported_error is not None:
                await self._recover(self._reported_error)
            batch = self._intake.take_batch()
            if batch:
                # A commit that hangs raises no error. `HubStatus.is_ready` detects such a commit by its start time.
                self._status.commit_started_s = self._now_s()
                # Recovery takes the lock itself, so it must run outside the ``async with``.
                try:
                    async with self.lock:
                        await self._commit_or_refuse(batch)
                except LedgerError as error:
                    await self._recover(error)
                # Any other error is a bug. Everything that was committed is in the ledger, so load the state from it.
                except Exception as error:
                    log.exception("a batch failed; starting again from the ledger")
                    await self._recover(error)
                self._status.commit_started_s = None
            if self._pending.bytes:
                self._pending.has_work.set()
                # Give other tasks a turn. A ledger in memory never waits, so otherwise no session would be read between
                # two batches.
                await asyncio.sleep(0)
            # End only when nothing is pending: `Hub.close` adds a last entry, which must be stored before the ledger is
            # closed.
            elif self._status.draining.is_set():
                return

    def reopen_ledger(self, error: LedgerError) -> None:
        """Reopen the ledger because of an error that occurred outside the batches. `HubStatus.opened` is set once the
        ledger is open again."""
        if self._status.is_open:  # otherwise the writer has seen the error too and is already recovering
            self._reported_error = error
            self._status.opened.clear()
            self._pending.has_work.set()

    # --- steps 5 to 8

    async def commit(self, entries: list[Entry]) -> None:
        """Commit one batch. The caller holds ``lock``. Raises `LedgerError` if the outcome is unknown."""
        await self._commit(Batch(entries))

    async def _commit(self, batch: Batch) -> None:
        # At most three rounds: a wrong guess turns guessing off, and an outcome that cannot be stored turns checking
        # on. Each of these happens at most once per batch.
        while not batch.is_stored:
            await self._look_up(batch)
            await self._apply(batch)
            await self._append(batch)
        self._publisher.publish(batch.draft, batch.outcomes)

    async def _look_up(self, batch: Batch) -> None:
        """Do step 5. Skip the lookup if the ledger has all heads and values in memory, because the lookup would then
        only find repeats. Repeats are rare, and the ledger's unique key detects them
        (docs/decisions/guessed-lookups.md)."""
        # Guess only if all heads and cold values are in memory. If one is missing, outcomes could be wrong without any
        # violation of the unique key.
        recalled = self._ledger.recall(batch.lookup) if batch.is_guessed else None
        if recalled is None:
            batch.is_guessed = False
            batch.facts = await self._ledger.lookup(batch.lookup)
        else:
            batch.recalled = recalled
            batch.assume_stored({})

    async def _apply(self, batch: Batch) -> None:
        """Do step 6. A refused entry stores nothing, so the unique key cannot reveal that it is a repeat. Therefore
        look up the keys of refused entries, and apply the batch again if one of them is a repeat."""
        self._apply_entries(batch)
        known: dict[tuple[str, str], StoredKey] = {}
        looked_up: set[tuple[str, str]] = set()
        # The next round may refuse other entries, whose keys must be looked up then. Each round looks up new keys, so
        # the loop ends.
        while batch.is_guessed and (doubted := batch.lookup.keys - batch.facts.stored.keys() - looked_up):
            looked_up |= doubted
            repeats = (await self._ledger.lookup(LookupRequest(doubted, set(), set()))).stored
            if repeats:
                known |= repeats
                batch.assume_stored(known)
                self._apply_entries(batch)

    def _apply_entries(self, batch: Batch) -> None:
        """Apply the entries in order to a new draft. Each entry sees the outcomes of the entries before it."""
        facts = batch.facts
        # Make a new draft each time. The committed state stays unchanged until the ledger has stored the batch.
        draft = batch.draft = self._draft()
        batch.outcomes = []
        for entry in batch.entries:
            try:
                outcome = apply(self._rules, draft, facts, entry)
                if batch.is_checked:
                    self._ledger.check(outcome.rows, outcome.writes)
            except Exception:  # this is a bug, so refuse only this entry
                quote = self._new_id()
                log.exception("apply failed", extra={"quote": quote, "entry": type(entry).__name__})
                outcome = refuse_after_defect(entry, quote)
            batch.outcomes.append((entry, outcome))
            draft.apply_outcome(outcome)
            # The ledger does not know these rows yet, so a repeat or a reply within the batch finds them here.
            for row in outcome.rows:
                if row.key:
                    facts.stored[row.actor, row.key] = row
                if row.head is not None:
                    facts.heads[row.seq] = row.head

    def _draft(self) -> State:
        """Return a draft on the committed state, with a timestamp that never goes back."""
        state = self._registry.state
        return state.draft(max(self._clock(), state.stamp))

    async def _append(self, batch: Batch) -> None:
        """Do step 7. If the ledger refuses the batch, change the batch so that step 6 decides it differently."""
        # Append the whole batch at once, so that one fsync is enough for all of its entries.
        rows = batch.rows = [row for _, outcome in batch.outcomes for row in outcome.rows]
        writes = list(batch.draft.durable_writes.values())
        started_s = time.perf_counter()
        try:
            if rows or writes:
                # If the append fails from here on, nobody knows whether the ledger stored the batch.
                batch.is_appending = True
                await self._ledger.append(rows, writes)
        except KeyTaken:  # the guess was wrong: an entry repeats a stored entry
            # After a real lookup, a taken key means that the ledger and the state disagree. Recover from this.
            if not batch.is_guessed:
                raise
            batch.is_guessed = batch.is_appending = False
        except Unstorable:  # this is a bug: find the outcome that cannot be stored, and store the others
            if batch.is_checked:
                raise
            batch.is_checked, batch.is_appending = True, False
        else:
            batch.is_stored = True
            if rows or writes:
                if self._full_errors.is_failing:
                    self._full_errors.record_success()
                self._stats.record(len(rows), time.perf_counter() - started_s)

    # --- failures

    async def _commit_or_refuse(self, entries: list[Entry]) -> None:
        """Commit a batch. If the log is full, or a bug stored nothing, try each entry alone and refuse those that fail
        again. Raises `LedgerError`."""
        batch = Batch(entries)
        try:
            return await self._commit(batch)
        except LogFull as error:
            self._full_errors.record(error)
            sentence = "This node has no room to store the request (see its log). Send the same request again."
            outcome = refuse_unstored(entries[0], Overloaded(sentence, FULL_RETRY_MS), 4503)
        except LedgerError:
            raise
        except Exception:
            if not await self._has_stored_nothing(batch):
                raise  # rows were stored and must be published, so the caller has to recover
            quote = self._new_id()
            log.exception("a batch failed before anything was stored", extra={"quote": quote, "entries": len(entries)})
            outcome = refuse_after_defect(entries[0], quote)
        # Commit the entries one by one. Otherwise, an entry that is too large or triggers a bug would make all other
        # entries fail too.
        if len(entries) > 1:
            for entry in entries:
                await self._commit_or_refuse([entry])
            return
        # Nothing was stored, so publish an empty draft. Only the refusal is sent.
        self._publisher.publish(self._draft(), [(entries[0], outcome)])

    async def _has_stored_nothing(self, batch: Batch) -> bool:
        """Return whether the ledger certainly stored no part of a batch. Stored rows prove that a batch was stored. A
        batch that contains only table writes leaves no rows, so the result for such a batch is False once the append
        has begun."""
        if batch.is_stored:
            return False
        # The ledger was never asked to store this batch, so the state in memory still equals the stored state.
        if not batch.is_appending:
            return True
        return bool(batch.rows) and not await self._ledger.rows(self._registry.state.head, 1)

    async def _recover(self, cause: Exception) -> None:
        """Recover from a failed step: close every session without answers, reopen the ledger and load the state from
        it."""
        status = self._status
        # Refuse new sessions first: clients that reconnect must not join before the state is loaded again.
        status.is_open = False
        status.opened.clear()
        status.commit_started_s = None
        self._reported_error = None
        has_lost_leadership = isinstance(cause, LeadershipLost)
        if not has_lost_leadership:  # lost leadership is not a failure, and the ledger has already logged it
            self._ledger_errors.record(cause)
        # End every session: no answer and no delivery may depend on a commit whose outcome is unknown.
        self._registry.counts["recoveries"] += 1
        self._registry.end_all(
            format_lost_leadership(cause.leader) if isinstance(cause, LeadershipLost) else LEDGER_FAILED
        )
        # The clients received no answer to the dropped entries, so they will send these entries again.
        self._intake.drop_pending()
        # Timers, mailboxes and recent rows may depend on the batch whose outcome is unknown.
        self._registry.reset()
        failures = 0
        # Retry until the hub drains: the storage may become available again, and a hub that gave up would need an
        # operator.
        while not status.is_open and not status.draining.is_set():
            try:
                async with self.lock:  # a retention trim must not continue with a plan from before the recovery
                    await self._ledger.close()
                    await self._load_unless_draining()
            except Exception as error:  # noqa: BLE001 (a failing storage may raise anything: try again)
                self._ledger_errors.record(error, is_defect=not isinstance(error, LedgerError))
                failures += 1
                await asyncio.sleep(REOPEN_BACKOFF.delay_s(failures))
            else:
                if status.is_open:
                    self._ledger_errors.record_success()

    async def _load_unless_draining(self) -> None:
        """Load the state. Loading may wait until this node becomes the leader. Stop waiting when the hub drains."""
        loading = asyncio.create_task(self.load())
        draining = asyncio.create_task(self._status.draining.wait())
        try:
            await asyncio.wait((loading, draining), return_when=asyncio.FIRST_COMPLETED)
        finally:
            draining.cancel()
            if not loading.done():
                loading.cancel()
                # Wait for the cancelled task, because the task must not use the ledger while `Hub.close` closes the
                # ledger.
                await asyncio.wait((loading,))
        if not loading.cancelled():
            loading.result()

    async def load(self) -> None:
        """Open the ledger and load the state. Raises `LedgerError`."""
        registry = self._registry
        registry.meta, writes = await self._ledger.open()
        stamp = registry.meta.stamp
        registry.participants.state = State(head=registry.meta.head, stamp=stamp, rights=self._rights)
        # Compare the clock with the newest row's time. A clock that is far ahead may be wrong.
        self._clock_watch.check(stamp)
        # New rows must not be older than stored ones, even if the clock was set back between two starts.
        self._clock.not_before(stamp)
        for start in range(0, len(writes), MAX_TABLE_WRITES):
            registry.state.apply_writes(writes[start : start + MAX_TABLE_WRITES])
            await asyncio.sleep(0)  # give the leader of a shared log time to send heartbeats
        # Forget earlier departures: before this node was elected, participants may have been connected to another node.
        registry.participants.absences.restart()
        self._status.is_open = True
        self._status.opened.set()
