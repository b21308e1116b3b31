"""The hub: accepts, orders, stores and delivers; the only writer of the ledger.

Eight steps (docs/design.md). Per frame, in `intake`: 1 auth, 2 shape (`shape`), 3 the mods' ``before``,
4 into the pending batch. Per batch, here in `Hub.commit`: 5 `Ledger.lookup`, 6 `apply` in order, 7 `Ledger.append`,
durable, 8 merge and publish (`publisher`). Nothing is answered or delivered before step 7 has returned. If it fails,
its outcome is unknown: nothing is answered, sessions are closed with 4503, the ledger is reopened, and the senders'
repeats settle what happened.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec
from msgspec import UNSET

from roundelay.network.backoff import Backoff
from roundelay.network.clock import Clock, NewId, SteadyClock, system_clock
from roundelay.network.config import Limits, Quota, Registration, Retain
from roundelay.network.core.apply import apply, build_lookup
from roundelay.network.core.change import refuse_after_defect, refuse_unstored
from roundelay.network.core.entries import (
    BindCredentials,
    EndTakeover,
    Entry,
    Origin,
    Outcome,
    ProcessEnded,
    SaveAckCursors,
    SessionLost,
)
from roundelay.network.core.failures import clear_attempts
from roundelay.network.core.limits import Quotas
from roundelay.network.core.mod import Mod, Operation
from roundelay.network.core.questions import remove_dropped_questions
from roundelay.network.core.rights import Rights
from roundelay.network.core.rows import Row, StoredKey
from roundelay.network.core.sending import Rules
from roundelay.network.core.state import State
from roundelay.network.core.tables import Facts, Login, LookupRequest, Participant, TableWrite
from roundelay.network.core.takeover_control import list_expired
from roundelay.network.core.visibility import Visibility
from roundelay.network.errors import Forbidden, LedgerError, Overloaded, RoundelayError
from roundelay.network.frames import Follows, format_lost_leadership
from roundelay.network.ledger import KeyTaken, LeadershipLost, Ledger, LogFull, Unstorable
from roundelay.network.operations import list_operations
from roundelay.network.operations.head_cache import RecentHeads
from roundelay.network.operations.reading import AgentSupervisor, PriceList, RunReader
from roundelay.network.platforms import seconds_since_boot

from .handshakes import HandshakeLimiter
from .intake import Intake
from .metrics import CommitStats, Metric, list_metrics
from .publisher import Publisher, SessionRegistry
from .reads import answer_read
from .repeated_errors import RepeatedErrorLog
from .retention import KEEP_ALL, ClockWatch, drop_before, run_retention
from .session import Connection, Session, SessionState

log = logging.getLogger(__name__)

FLOOR_FLUSH_S = 0.5
"""Acknowledgements reach the ledger at most this late (docs/protocol.md allows 1 s)."""
VERIFY_S = 0.5
"""How often a hub makes sure that its ledger's files are still there, also while nothing is stored: it says so within a
second."""
LOADED_AT_ONCE = 20_000
"""Values of tables that are taken into memory in one go: some 40 ms."""
FULL_RETRY_MS = 5000
REOPEN_BACKOFF = Backoff(0.1, 1.0)
"""docs/operations.md says that a hub is ready again within 5 s after a fault: to open a ledger takes its time too."""
COMMIT_PATIENCE_S = 2.0
"""A commit that takes longer makes the hub not ready: SQLite tries for up to 10 s to get a lock that it is refused, and
says nothing."""
NO_QUOTAS: Mapping[str, Quota] = {}
STOPPING = "The hub is stopping; reconnect in a moment."
FAILED = "The hub's ledger failed; reconnect and repeat what was not answered."


class Batch:
    """Entries on their way through steps 5 to 8, and what they have come to so far."""

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self.wanted = build_lookup(entries)
        self.is_guessed = not self.wanted.seqs and not self.wanted.cold
        """No entry is taken for a repeat, and nothing else is to be known: so nothing is looked up."""
        self.is_checked = False
        """Each outcome is first tried for whether the ledger can store it."""
        self.is_appending = False
        """The ledger was asked to store it."""
        self.is_stored = False
        self.facts = Facts()
        self.draft: State
        """What the entries change, on top of the committed state: made by step 6."""
        self.outcomes: list[tuple[Entry, Outcome]] = []
        self.rows: list[Row] = []


class Hub:
    """One network's hub over one ledger. Use: ``start``, then sessions by ``connect`` / ``receive`` / ``disconnect``,
    then ``close``.

    ``quotas`` are what participants may of their own, by their ids, ``rights`` the page of what everybody may.
    ``follows`` tells whom a hub follows that only shows what another node decides: it stores nothing at all.
    ``owner_hash`` is the hash of the owner's token, if there is one. One that ``is_read_only`` lets people join and
    look, and refuses all else. Time and ids come in as arguments. Implements
    `mod.HubView`.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        limits: Limits,
        quotas: Mapping[str, Quota] = NO_QUOTAS,
        retain: Retain = KEEP_ALL,
        mods: Sequence[Mod] = (),
        visibility: Visibility = "people",
        registration: Registration = "local",
        rights: Rights | None = None,
        server: str = "roundelay",
        owner_hash: str | None = None,
        is_read_only: bool = False,
        follows: Callable[[], Follows] | None = None,
        price_list: PriceList | None = None,
        run_reader: RunReader | None = None,
        clock: Clock,
        new_id: NewId,
    ) -> None:
        self.ledger = ledger
        self._follows = follows
        self.server = server
        self.limits = limits
        self.quotas = Quotas(limits, quotas)
        self.public_url: str | None = None
        """Address at which browsers elsewhere reach the page, if the operator sets one."""
        self.supervisor: AgentSupervisor | None = None
        """Controls the agents' processes of the node that runs this hub, if it runs any."""
        self.price_list = price_list
        """The prices that the node's process knows, if it knows any."""
        self.run_reader = run_reader
        """Explains runs for ``network.explain`` and its neighbors, if the node can."""
        self._owner_hash = owner_hash
        self.is_open = False
        """Whether the ledger is open, and no commit's outcome unknown."""
        self.commits = CommitStats()
        self._mods = {mod.id: mod for mod in mods}
        self._visibility: Visibility = visibility
        self._rights = rights
        self._clock = SteadyClock(clock)
        self._wall_clock = clock
        """What is old is so by this one, which somebody may put right."""
        self._new_id = new_id
        self._rules = Rules(
            limits,
            self.quotas,
            list_operations(mods),
            self._mods,
            before_hooks=tuple(mod for mod in mods if mod.overrides("before")),
            apply_hooks=tuple(mod for mod in mods if mod.overrides("apply")),
            ended_hooks=tuple(mod for mod in mods if mod.overrides("ended")),
            registration=registration,
            is_read_only=is_read_only or follows is not None,
            follows=None if follows is None else lambda: follows().leader,
        )
        self.failed = asyncio.Event()
        """Set when the hub cannot go on by itself; whoever runs it closes it then."""
        self._work = asyncio.Event()
        self._trouble: LedgerError | None = None
        """What was found between two batches; the writer recovers from it."""
        self._moved = asyncio.Event()
        self.is_draining = False
        self.opened = asyncio.Event()
        """Set while the ledger is open."""
        self._draining = asyncio.Event()
        self.handshakes: HandshakeLimiter | None = None
        """Of the server that listens for this hub, if one does: its figures."""
        self.list_more_figures: Callable[[], list[Metric]] = list
        """Those of the log that this hub's ledger shares with others, if it does."""
        self._writer: asyncio.Task[None] | None = None
        self._retain = retain
        self._upkeep: list[asyncio.Task[None]] = []
        self.commit_lock = asyncio.Lock()
        """Held by each commit, and by whatever else must not meet one."""
        self.loop = asyncio.get_running_loop()
        seconds = seconds_since_boot if clock is system_clock else self.loop.time
        self._clock_watch = ClockWatch(clock, seconds)
        self._committing_since_s: float | None = None
        self._is_slow = False
        """The ledger does not answer, and that was said."""
        self._questions_from = 0
        """Questions that were asked before it are forgotten."""
        self._outage = RepeatedErrorLog("the ledger failed; reopening it", "the ledger is open again", self.loop.time)
        self._fullness = RepeatedErrorLog("nothing is stored", "there is room again", self.loop.time)
        self.registry = SessionRegistry(limits, ledger, self._clock, new_id, self._lose_reactor)
        self.counts = self.registry.counts
        self._recent = ("", 0, 0.0), RecentHeads(self._is_person)
        self._intake = Intake(
            self.registry,
            self._rules,
            owner_hash=owner_hash,
            clock=self._clock,
            on_work=self._work.set,
            read=self._read,
        )
        self.receive = self._intake.receive
        """One text message, valid UTF-8, has arrived: steps 1 to 4."""
        self._publisher = Publisher(
            self.registry,
            self._rules,
            server=server,
            release=self._intake.release,
            enter=self._intake.enter,
            follows=follows,
        )

    # --- lifetime

    async def start(self) -> None:
        """Open the ledger, load the state and begin to commit. Raises `LedgerError`."""
        await self._load()
        self._writer = asyncio.create_task(self._write_batches(), name="hub-writer")
        self._writer.add_done_callback(self._on_end)
        if self._follows is not None:  # the ledger is another one's, who looks after it
            return
        trimming = run_retention(
            self._retain, self.registry, self.ledger, self._wall_clock, self.commit_lock, self._clock_watch
        )
        self._upkeep = [
            asyncio.create_task(self._flush_floors(), name="hub-floors"),
            asyncio.create_task(trimming, name="hub-retention"),
            asyncio.create_task(self._watch_ledger(), name="hub-ledger-watch"),
        ]
        for task in self._upkeep:
            task.add_done_callback(self._on_end)

    async def apply_followed(self, rows: Sequence[Row], puts: Sequence[TableWrite]) -> None:
        """What another node has stored is in the ledger here: the state and the sessions get it. For a hub that
        follows."""
        async with self.commit_lock:
            board = self.registry
            draft = board.state.draft(max(self._clock(), board.state.stamp))
            outcome = Outcome(rows=rows, writes=puts)
            draft.apply_outcome(outcome)
            for put in puts:  # before anything is shown that was stored after
                if put.table == "participant" and put.value is not None:
                    self._end_those_before(put.value)
                elif put.table == "token" and put.value is not None and put.value.revoked:
                    self._end_those_of(put.key, put.value.agent_id)
            self._publisher.publish(draft, [(BindCredentials(), outcome)])
        self._moved.set()
        self._moved = asyncio.Event()

    async def drop_before(self, first_seq: int) -> None:
        """What is older is in the ledger no more, by what another node has decided. For a hub that follows."""
        async with self.commit_lock:
            drop_before(self.registry, first_seq)

    def _end_those_before(self, participant: Participant) -> None:
        """End the sessions of who was removed, or whose tokens were revoked, since they joined."""
        ended = max(participant.cut_seq, participant.removed_seq or 0)
        for session in self.registry.participants.sessions_of(participant.agent_id):
            if session.joined_at < ended:
                gone = Forbidden(f"{participant.agent_id} was removed, or its token was revoked.")
                self.registry.refuse(session, 4403, gone)

    def _end_those_of(self, token: str, agent_id: str) -> None:
        """End the sessions that joined with a token that is revoked."""
        for session in list(self.registry.participants.sessions_of(agent_id)):
            if session.origin is not None and session.origin.token == token:
                self.registry.refuse(session, 4403, Forbidden(f"This token of {agent_id} was revoked."))

    def count_sessions(self, agent_id: str, token: str) -> int:
        """Return the number of sessions of a participant that joined with a token."""
        sessions = self.registry.participants.sessions_of(agent_id)
        return sum(it.origin is not None and it.origin.token == token for it in sessions)

    async def bind_tokens(self, tokens: Mapping[str, str]) -> None:
        """Bind tokens of agents, their hashes by id, as a first use does; they are on the disk when it returns.
        Raises `LedgerError`."""
        async with self.commit_lock:
            await self.commit([BindCredentials(dict(tokens))])

    def record_process_end(self, agent_id: str, reason: str | None) -> None:
        """Keep, in the next batch, that the process of an agent of this node has ended, and why; None: it is up
        again."""
        if not self.is_draining:
            self._intake.enter(ProcessEnded(agent_id, reason))

    async def wait_until_unserved(self, agent_id: str, grace_s: float) -> None:
        """Wait until no runner serves an agent. One that was lost, without a goodbye, may come back within a grace."""
        await self.registry.wait_until_away(agent_id, grace_s)

    async def add_login(self, login_hash: str, agent_id: str, ttl_ms: int) -> None:
        """Let the code with this hash log a person in once, as an operator: the node's owner. It is on the disk when
        this returns. Raises `LedgerError`."""
        login = Login(agent_id, "human", self._clock() + ttl_ms, operator=True)
        try:
            async with self.commit_lock:
                await self.commit([BindCredentials(logins={login_hash: login})])
        except LedgerError as error:
            if not isinstance(error, LogFull):
                self.reopen_ledger(error)
            raise

    def reopen_ledger(self, error: LedgerError) -> None:
        """Have the ledger opened anew: who is not the writer has met this error. `opened` says when it is."""
        if self.is_open:  # else the writer has met it too, and recovers
            self._trouble = error
            self.opened.clear()
            self._work.set()

    async def close(self, why: str = STOPPING, hand_over: Callable[[], Awaitable[str]] | None = None) -> None:
        """Say ``draining`` to everyone, commit what is pending, close sessions with 4503, which tells ``why``, and the
        ledger cleanly.

        ``hand_over`` is called when all is committed, and gives what the node calls itself that goes on, if there is
        one: then that is what sessions are told."""
        if self.is_draining:
            return
        self.is_draining = True
        self._draining.set()
        everyone = [session for session in self.registry.sessions.values() if session.state is SessionState.LIVE]
        self.registry.notice(everyone, "draining", None, {"reason": why})
        self._intake.is_closed = True
        self._intake.enter(SaveAckCursors(()) if self._follows is not None else self._floors())
        if self._writer is not None:
            await asyncio.wait([self._writer])  # a failure of it has been told
        for task in self._upkeep:
            task.cancel()
        await asyncio.gather(*self._upkeep, return_exceptions=True)
        successor = await hand_over() if hand_over is not None else ""
        self.registry.end_all(format_lost_leadership(successor) if successor else why)
        await self.registry.close()
        await self.ledger.close()

    async def abandon(self) -> None:
        """Stop as a killed process does: nothing more is said, answered or committed. Whoever calls it cuts the
        connections; for simulations."""
        self.is_draining = self._intake.is_closed = True
        tasks = [task for task in (self._writer, *self._upkeep) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.registry.close()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """A task of the hub's own has ended. Unasked, that is a defect: say so, take nobody in, and let `failed` end
        the node."""
        if task.cancelled() or task.exception() is None:
            return
        log.critical(
            "a task of the hub failed; the node has to end", extra={"task": task.get_name()}, exc_info=task.exception()
        )
        self.is_open = False
        self._intake.is_closed = True
        self.registry.end_all(STOPPING)
        self.failed.set()

    async def _load_unless_draining(self) -> None:
        """Load, which may wait until this node leads; a hub that is closed waits no longer."""
        loading, draining = asyncio.create_task(self._load()), asyncio.create_task(self._draining.wait())
        try:
            await asyncio.wait((loading, draining), return_when=asyncio.FIRST_COMPLETED)
        finally:
            draining.cancel()
            if not loading.done():
                loading.cancel()
                await asyncio.wait((loading,))
        if not loading.cancelled():
            loading.result()

    async def _load(self) -> None:
        board = self.registry
        board.meta, puts = await self.ledger.open()
        board.participants.state = State(head=board.meta.head, stamp=board.meta.stamp, rights=self._rights)
        self._clock_watch.check(board.meta.stamp)  # the newest row was stamped then
        self._clock.not_before(board.meta.stamp)
        for start in range(0, len(puts), LOADED_AT_ONCE):
            board.state.apply_writes(puts[start : start + LOADED_AT_ONCE])
            await asyncio.sleep(0)  # who leads a shared log goes on saying so
        self.is_open = True
        self.opened.set()

    @property
    def is_ready(self) -> bool:
        """Whether sessions are accepted: the ledger is open, and answers."""
        since_s = self._committing_since_s
        is_quick = since_s is None or self.loop.time() - since_s < COMMIT_PATIENCE_S
        return self.is_open and is_quick and self.ledger.is_answering

    @property
    def has_operators(self) -> bool:
        """Whether anybody reads what waits for operators: the owner, or who has an operator's token, or the right."""
        if self._owner_hash is not None or any(it.operator and not it.revoked for _, it in self.state.items("token")):
            return True
        rights = self.state.rights
        known = (it for _, it in self.state.items("participant") if it.removed_seq is None)
        return rights is not None and any(rights.decide("administer", it.agent_id, it.kind).allowed for it in known)

    @property
    def has_human_operators(self) -> bool:
        """Whether a person is an operator: only people decide on calls."""
        # Whoever has the owner's token joins as a person. Without one, only the hub's own process joins: any person is
        # an operator there.
        return self._owner_hash is not None or next(self.state.people_before(None), None) is not None

    # --- the seam to transports

    def connect(self, connection: Connection) -> Session:
        """A connection is open; its first frame must be ``hello``."""
        self.counts["connections"] += 1
        return self.registry.open(self._new_id(), connection)

    def refuse(self, session: Session, error: RoundelayError) -> None:
        """The transport refused a frame (a binary one, say)."""
        self._intake.refuse(session, error)

    def resume(self, session: Session) -> None:
        """The connection takes bytes again."""
        self.registry.schedule_flush(session)

    def disconnect(self, session: Session) -> None:
        """The connection is gone. Idempotent."""
        self.registry.lose(session)

    def _lose_reactor(self, origin: Origin) -> None:
        if not self.is_draining:
            self._intake.enter(SessionLost(origin))

    # --- steps 5 to 8, per batch

    async def _write_batches(self) -> None:
        """Commit what is pending, batch by batch, whenever the writer is free."""
        while True:
            await self._work.wait()
            self._work.clear()
            if self._trouble is not None:
                await self._recover(self._trouble)
            batch = self._intake.take_batch()
            if batch:
                self._committing_since_s = self.loop.time()
                try:
                    async with self.commit_lock:
                        await self._commit_or_put_off(batch)
                except LedgerError as error:
                    await self._recover(error)
                except Exception as error:  # a defect: what was committed is in the ledger, so start again from that
                    log.exception("a batch failed; starting again from the ledger")
                    await self._recover(error)
                self._committing_since_s = None
            if self._intake.pending.bytes:
                self._work.set()
                await asyncio.sleep(0)  # sessions are read between two batches, also where the ledger makes nobody wait
            elif self.is_draining:
                return

    async def _commit_or_put_off(self, entries: list[Entry]) -> None:
        """Commit a batch. Where there is no room for it, each entry goes alone, and whoever sent one for which there is
        none is told to come again: everything else goes on. Raises `LedgerError`."""
        batch = Batch(entries)
        try:
            return await self._commit(batch)
        except LogFull as error:
            self._fullness.record(error)
            told = "There is no room to store it, as this node's log says to its operator. Send the same again."
            outcome = refuse_unstored(entries[0], Overloaded(told, FULL_RETRY_MS), 4503)
        except LedgerError:
            raise
        except Exception:  # a defect: where it has stored nothing, its sender alone is told, and the hub goes on
            if not await self._has_stored_nothing(batch):
                raise
            quote = self._new_id()
            log.exception("a batch failed before anything was stored", extra={"quote": quote, "entries": len(entries)})
            outcome = refuse_after_defect(entries[0], quote)
        if len(entries) > 1:
            for entry in entries:
                await self._commit_or_put_off([entry])
            return
        state = self.registry.participants.state
        self._publisher.publish(state.draft(max(self._clock(), state.stamp)), [(entries[0], outcome)])

    async def _has_stored_nothing(self, batch: Batch) -> bool:
        """Whether the ledger holds nothing of a batch for certain; rows show it, other changes do not."""
        if batch.is_stored:
            return False
        if not batch.is_appending:
            return True
        return bool(batch.rows) and not await self.ledger.rows(self.state.head, 1)

    async def _watch_ledger(self) -> None:
        """Look after the ledger's files while nobody writes; the writer looks for itself."""
        while True:
            await asyncio.sleep(VERIFY_S)
            if not self.is_open:
                continue
            try:
                await self.ledger.verify()
            except LedgerError as error:
                self.reopen_ledger(error)

    async def commit(self, entries: list[Entry]) -> None:
        """Commit one batch. Raises `LedgerError`: then its outcome is unknown."""
        await self._commit(Batch(entries))

    async def _commit(self, batch: Batch) -> None:
        while not batch.is_stored:
            await self._look_up(batch)
            await self._apply(batch)
            await self._append(batch)
        self._publisher.publish(batch.draft, batch.outcomes)
        if batch.rows:
            self._moved.set()
            self._moved = asyncio.Event()

    async def _look_up(self, batch: Batch) -> None:
        """Step 5. A repeat is rare, and the ledger's unique key finds it: so where nothing else is asked, the question
        is left out as a guess."""
        batch.facts = Facts() if batch.is_guessed else await self.ledger.lookup(batch.wanted)

    async def _apply(self, batch: Batch) -> None:
        """Step 6. The guess finds no repeat that is refused, which stores nothing: whoever is refused is asked for
        after all, and, if one is a repeat, everything is decided again."""
        self._apply_entries(batch)
        found: dict[tuple[str, str], StoredKey] = {}
        asked: set[tuple[str, str]] = set()
        while batch.is_guessed and (doubted := batch.wanted.keys - batch.facts.stored.keys() - asked):
            asked |= doubted
            known = (await self.ledger.lookup(LookupRequest(doubted, set(), set()))).stored
            if known:
                found |= known
                batch.facts = Facts(stored=dict(found))
                self._apply_entries(batch)

    def _apply_entries(self, batch: Batch) -> None:
        """Apply each entry in order, on a draft that is new; the next ones see what one came to."""
        state, facts = self.registry.participants.state, batch.facts
        draft = batch.draft = state.draft(max(self._clock(), state.stamp))
        batch.outcomes = []
        for entry in batch.entries:
            try:
                outcome = apply(self._rules, draft, facts, entry)
                if batch.is_checked:
                    self.ledger.check(outcome.rows, outcome.writes)
            except Exception:  # a defect: this entry alone is refused
                quote = self._new_id()
                log.exception("apply failed", extra={"quote": quote, "entry": type(entry).__name__})
                outcome = refuse_after_defect(entry, quote)
            batch.outcomes.append((entry, outcome))
            draft.apply_outcome(outcome)
            for row in outcome.rows:
                if row.key:
                    facts.stored[row.actor, row.key] = row
                if row.head is not None:
                    facts.heads[row.seq] = row.head

    async def _append(self, batch: Batch) -> None:
        """Step 7. Where nothing is stored yet, and the batch is to be decided again, it says so in the batch."""
        rows = batch.rows = [row for _, outcome in batch.outcomes for row in outcome.rows]
        puts = list(batch.draft.durable_writes.values())
        started = time.perf_counter()
        try:
            if rows or puts:
                batch.is_appending = True
                await self.ledger.append(rows, puts)
        except KeyTaken:  # somebody repeats what is stored
            if not batch.is_guessed:
                raise
            batch.is_guessed = batch.is_appending = False
        except Unstorable:  # a defect: whose outcome it is is found out, and the others' are stored
            if batch.is_checked:
                raise
            batch.is_checked, batch.is_appending = True, False
        else:
            batch.is_stored = True
            if rows or puts:
                self._fullness.record_success()
                commits, seconds = self.commits, time.perf_counter() - started
                commits.number += 1
                commits.rows += len(rows)
                commits.seconds += seconds
                commits.recent.append((len(rows), seconds))

    # --- reads

    async def _read(
        self, session: Session, operation: Operation, call_id: str, args: msgspec.Struct, asked_bytes: int
    ) -> None:
        """Wait for room for the result, read, and queue what it gave."""
        if session.state is not SessionState.LIVE:
            return
        place = self.registry.place(session)
        try:
            await place.acquire()
            outage = self.registry.read_outage
            as_of = UNSET if self._follows is None else self._follows().as_of  # of before it reads
            origin = session.live_origin()
            data = await answer_read(self, origin, operation, call_id, args, self._new_id, outage, place, as_of)
            if session.state is SessionState.LIVE:
                self.registry.write_result(session, data)
        finally:
            session.reads_under_way -= 1
            session.asked_bytes -= asked_bytes
            place.release()

    @property
    def name(self) -> str:
        """The network's name."""
        return self.registry.meta.name

    @property
    def epoch(self) -> str:
        """Changes exactly when the ledger was lost, replaced or forked."""
        return self.registry.meta.epoch

    @property
    def state(self) -> State:
        """The committed state."""
        return self.registry.state

    @property
    def recent(self) -> RecentHeads:
        """Heads of messages, in memory; read anew when old messages were dropped, or another ledger was opened."""
        meta = self.registry.meta
        if self._recent[0] != (meta.epoch, meta.first_seq, self.counts["recoveries"]):
            self._recent = (meta.epoch, meta.first_seq, self.counts["recoveries"]), RecentHeads(self._is_person)
        return self._recent[1]

    def _is_person(self, agent_id: str) -> bool:
        return self.state.is_person(agent_id)

    @property
    def mod_ids(self) -> list[str]:
        return list(self._mods)

    @property
    def network_visibility(self) -> Visibility:
        return self._visibility

    @property
    def pending(self) -> int:
        """Entries that wait for the writer."""
        return len(self._intake.pending)

    def is_online(self, agent_id: str) -> bool:
        return bool(self.registry.participants.sessions_of(agent_id))

    def delivered_up_to(self, agent_id: str) -> int:
        return self.registry.participants.delivered_up_to(agent_id)

    def is_handled(self, agent_id: str, seq: int) -> bool:
        return self.registry.participants.is_handled(agent_id, seq)

    def is_waiting(self, agent_id: str, seq: int) -> bool:
        return self.registry.participants.is_waiting(agent_id, seq)

    def is_deferred(self, agent_id: str, seq: int) -> bool:
        """Whether a message that failed is not due again yet."""
        attempt = self.registry.participants.find_attempt(agent_id, seq)
        return self.is_waiting(agent_id, seq) and attempt is not None and attempt.due_at > self._clock()

    async def wait_beyond(self, seq: int, timeout_s: float) -> None:
        """Wait until something newer than ``seq`` is committed, or the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.state.head <= seq:
                    await self._moved.wait()
        except TimeoutError:
            return

    async def wait_for_message(self, origin: Origin, after: int, timeout_s: float) -> None:
        """Wait until there may be a message above ``after`` that is delivered to a session's participant, or the time
        is over. Raises `CancelledError` when the session is gone."""
        board = self.registry
        if board.may_have_new(origin.agent_id, after):
            return
        session = board.sessions.get(origin.session_id)
        if session is None:
            raise asyncio.CancelledError
        arrival: asyncio.Future[None] = self.loop.create_future()
        session.arrivals[arrival] = None
        try:
            async with asyncio.timeout(timeout_s):
                await arrival
        except TimeoutError:
            return
        finally:
            session.arrivals.pop(arrival, None)

    def find_ack_cursor(self, agent_id: str) -> tuple[int, list[int]]:
        """A participant's floor, and what of the messages below it is not handled, ascending."""
        participant, mailboxes = self.state.participant(agent_id), self.registry.participants
        if participant is None:
            return 0, []
        mailboxes.find_delivery_start(participant, self.registry.meta.first_seq)  # what retention dropped is given up
        mailbox = mailboxes.activate(participant).mailbox
        return max(mailbox.ack_cursor, participant.registered_seq), sorted(mailbox.open)

    def mark_delivered(self, agent_id: str, up_to: int, given: Sequence[int] | None) -> None:
        """A participant has asked for what is delivered to it, and was given it up to a seq; from its floor on,
        ``given`` are all of that which it has not handled."""
        mailbox = self.registry.participants.find_mailbox(agent_id)
        if mailbox is not None:
            mailbox.delivered = max(mailbox.delivered, up_to)
            mailbox.awaiting_retry.difference_update(given or ())
            if given is not None:
                mailbox.compact_to(up_to, given)

    def figures(self) -> dict[str, float]:
        return {figure.name: figure.value for figure in self.list_figures()}

    def list_figures(self) -> list[Metric]:
        """What `metrics` tells of this hub."""
        figures = list_metrics(
            self.registry,
            self.ledger,
            self.counts,
            self.commits,
            is_ready=self.is_ready,
            pending=self.pending,
            made_room=self.handshakes.evicted if self.handshakes is not None else 0,
        )
        return [*figures, *self.list_more_figures()]

    def watch(self, session_id: str, presence: bool | None, signals: bool | None) -> None:
        session = self.registry.sessions.get(session_id)
        if session is not None:
            self.registry.watch(session, presence, signals)

    # --- floors and failures

    def _floors(self) -> SaveAckCursors:
        """What was handled since the last time; failures of what is handled by now are forgotten."""
        board = self.registry
        puts: list[TableWrite] = []
        for mailbox in board.participants.list_changed():
            agent_id = mailbox.agent_id
            if mailbox.handled_failures:
                kept = board.participants.open_triggers(agent_id)
                # of a dead letter nothing is left to delete, and it may be about to be taken back
                for seq in mailbox.handled_failures:
                    if seq not in kept:
                        puts += clear_attempts(board.state, agent_id, seq)
            puts.append(TableWrite("floor", agent_id, mailbox.snapshot()))
        first_seq = board.meta.first_seq
        if first_seq != self._questions_from:
            self._questions_from = first_seq
            puts += remove_dropped_questions(board.state, first_seq)
        return SaveAckCursors(tuple(puts))

    async def _flush_floors(self) -> None:
        """Keep acknowledgements, soon but not at once: a crash may deliver again what was just handled, never lose
        anything."""
        while True:
            await asyncio.sleep(FLOOR_FLUSH_S)
            floors = self._floors()
            if floors.writes:
                self._intake.enter(floors)
            if self.is_open and not self._rules.is_read_only:
                for thread_id in list_expired(self.state, self._clock()):
                    self._intake.enter(EndTakeover(thread_id))
            self.registry.participants.drop_idle()
            self._watch_writer()

    def _watch_writer(self) -> None:
        """Say when the ledger does not answer, and when it does again."""
        if self.is_open and not self.is_ready and not self._is_slow:
            log.warning("the ledger does not answer: the hub is not ready until it does")
            self._is_slow = True
        elif self.is_ready and self._is_slow:
            log.warning("the ledger answers again")
            self._is_slow = False

    async def _recover(self, cause: Exception) -> None:
        """The outcome of a commit is unknown: answer nothing, close every session, reopen the ledger and start from
        what it holds."""
        self.is_open = False
        self.opened.clear()
        self._trouble = None
        self._committing_since_s = None
        if not isinstance(cause, LeadershipLost):  # which is no failure, and was said
            self._outage.record(cause)
        self.counts["recoveries"] += 1
        self.registry.end_all(format_lost_leadership(cause.leader) if isinstance(cause, LeadershipLost) else FAILED)
        self._intake.drop_batches()
        self.registry.reset()
        failures = 0
        while not self.is_open and not self.is_draining:
            try:
                async with self.commit_lock:  # nothing is cut by a plan from before
                    await self.ledger.close()
                    await self._load_unless_draining()
            except Exception as error:  # noqa: BLE001 (whatever a failing storage raises, it is tried again)
                self._outage.record(error, is_defect=not isinstance(error, LedgerError))
                failures += 1
                await asyncio.sleep(REOPEN_BACKOFF.delay_s(failures))
            else:
                if self.is_open:
                    self._outage.record_success()
