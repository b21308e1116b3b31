"""The hub accepts, orders, stores and delivers messages. It is the only writer of the ledger.

`Hub` wires the parts of the eight steps (docs/design.md). Transports and the node's process use only this class.
`intake` does four steps for each frame: 1 auth, 2 shape, 3 the mods' ``before``, 4 add to the pending batch.
`batch_writer` and `publisher` do four steps for each batch: 5 look up, 6 apply, 7 append, 8 merge and publish.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from roundelay.network.blobs import BlobStore, MemoryBlobs
from roundelay.network.clock import Clock, NewId, SteadyClock, system_clock
from roundelay.network.config import Limits, Quota, Registration, Retain
from roundelay.network.core.entries import BindCredentials, Entry, ProcessEnded, SessionLost
from roundelay.network.core.limits import Quotas
from roundelay.network.core.mod import Mod
from roundelay.network.core.rights import Rights
from roundelay.network.core.sending import Rules
from roundelay.network.core.state import State
from roundelay.network.core.tables import Login
from roundelay.network.core.visibility import Visibility
from roundelay.network.errors import LedgerError, RoundelayError
from roundelay.network.frames import Follows, format_lost_leadership
from roundelay.network.ledger import Ledger, LogFull
from roundelay.network.operations import list_operations
from roundelay.network.operations.reading import PriceList, RunReader
from roundelay.network.platforms import seconds_since_boot

from .batch_writer import BatchWriter
from .handshakes import HandshakeLimiter
from .hub_view import LiveHubView
from .intake import Intake
from .maintenance import Maintenance
from .metrics import CommitStats, LogStatusSource
from .pending import PendingEntries
from .publisher import Publisher
from .reads import ReadService
from .retention import KEEP_ALL, ClockWatch
from .session import LIVE, Connection, Session
from .sessions import SessionRegistry
from .status import HubStatus

log = logging.getLogger(__name__)

NO_QUOTAS: Mapping[str, Quota] = {}
STOPPING = "The hub is stopping; reconnect in a moment."


class Hub:
    """The hub of one network, which writes one ledger. Call ``start``, then ``connect``, ``receive`` and ``disconnect``
    for each session, then ``close``.

    ``quotas`` holds the limits of single participants, by id. ``rights`` holds the roles of all participants.
    ``owner_hash`` is the hash of the owner's token, or None if no such token exists. With ``is_read_only``, people can
    join and read, and the hub refuses all changes. ``shared_log`` is the log that the ledger shares with other nodes.
    ``blobs`` stores the contents of files, by default in memory. Tests can pass their own clock and generator of ids.
    Only `ReplicaHub` sets ``follows``.
    """

    view_type = LiveHubView
    intake_type = Intake
    publisher_type = Publisher

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
        public_url: str | None = None,
        shared_log: LogStatusSource | None = None,
        blobs: BlobStore | None = None,
        clock: Clock,
        new_id: NewId,
    ) -> None:
        self.ledger = ledger
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.status = HubStatus(ledger)
        self.handshakes = HandshakeLimiter(limits.max_unauthenticated)
        """Connections before their welcome. The server that listens for this hub adds and removes the connections."""
        self._new_id = new_id
        self._clock = SteadyClock(clock)
        rules = Rules(
            limits,
            Quotas(limits, quotas),
            list_operations(mods),
            {mod.id: mod for mod in mods},
            before_hooks=tuple(mod for mod in mods if mod.overrides("before")),
            apply_hooks=tuple(mod for mod in mods if mod.overrides("apply")),
            ended_hooks=tuple(mod for mod in mods if mod.overrides("ended")),
            undelivered_hooks=tuple(mod for mod in mods if mod.overrides("undelivered")),
            deleted_hooks=tuple(mod for mod in mods if mod.overrides("deleted")),
            removed_hooks=tuple(mod for mod in mods if mod.overrides("removed")),
            registration=registration,
            is_read_only=is_read_only or follows is not None,
            follows=follows,
        )
        clock_watch = ClockWatch(clock, seconds_since_boot if clock is system_clock else self.loop.time)
        stats = CommitStats()
        self._pending = PendingEntries()
        self.registry = SessionRegistry(limits, ledger, self._clock, new_id)
        self.view = self.view_type(
            ledger,
            self.registry,
            rules,
            self._pending,
            self.status,
            stats,
            self.handshakes,
            server=server,
            visibility=visibility,
            has_owner=owner_hash is not None,
            public_url=public_url,
            price_list=price_list,
            run_reader=run_reader,
            shared_log=shared_log,
            clock=self._clock,
        )
        """The view of this hub that reading operations use."""
        self.view.blobs = blobs if blobs is not None or follows is not None else MemoryBlobs()
        self._intake = self.intake_type(
            self.registry,
            rules,
            ledger,
            self._pending,
            ReadService(self.registry, self.view, new_id),
            owner_hash=owner_hash,
            clock=self._clock,
        )
        self._publisher = self.publisher_type(self.registry, rules, ledger, self._intake, self._pending, server=server)
        self._writer = BatchWriter(
            ledger,
            self.registry,
            rules,
            self._intake,
            self._publisher,
            self.status,
            stats,
            rights=rights,
            clock=self._clock,
            clock_watch=clock_watch,
            new_id=new_id,
        )
        self._maintenance = Maintenance(
            ledger,
            self.registry,
            self._pending,
            self._writer,
            self.status,
            due_mods=[mod.id for mod in mods if mod.overrides("due")],
            retain=retain,
            is_read_only=is_read_only,
            mods=tuple(mod for mod in mods if mod.overrides("maintain")),
            blobs=self.view.blobs if any(mod.stores_blobs for mod in mods) and not is_read_only else None,
            clock=self._clock,
            wall_clock=clock,
            clock_watch=clock_watch,
        )
        self._writer_task: asyncio.Task[None] | None = None

    # --- lifetime

    async def start(self) -> None:
        """Open the ledger, load the state and start the writer. Raises `LedgerError`."""
        await self._start_writer()
        self._maintenance.start(self._on_task_end)

    async def _start_writer(self) -> None:
        await self._writer.load()
        self._writer_task = asyncio.create_task(self._writer.run(), name="hub-writer")
        self._writer_task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """Handle the end of one of the hub's own tasks. If the task failed, which is a bug, end every session and set
        `HubStatus.failed`, which ends the node."""
        if task.cancelled() or task.exception() is None:
            return
        log.critical(
            "a task of the hub failed; the node has to end", extra={"task": task.get_name()}, exc_info=task.exception()
        )
        # The hub's state may be wrong after a bug, so accept and answer nothing more.
        self.status.is_open = False
        self._intake.is_closed = True
        self.registry.end_all(STOPPING)
        self.status.failed.set()

    async def close(self, why: str = STOPPING, hand_over: Callable[[], Awaitable[str]] | None = None) -> None:
        """Send ``draining``, commit pending entries, close sessions with 4503 and the reason ``why``, and close the
        ledger.

        ``hand_over`` is called when everything is committed. It returns the name of the node that takes over, or an
        empty string. If it returns a name, the close reason directs the sessions to that node. Idempotent.
        """
        if self.is_draining:
            return
        # Set this first, so that the hub refuses new connections and a recovery that waits for the ledger stops.
        self.status.draining.set()
        live = [session for session in self.registry.sessions.values() if session.state is LIVE]
        self.registry.notice(live, "draining", None, {"reason": why})
        self._intake.is_closed = True  # close the intake first, so that no entry follows the last one
        # The last entry also wakes the writer, which ends when nothing is pending.
        self._pending.add(self._maintenance.collect_handled())
        # Wait for the writer instead of cancelling it: every accepted entry must be answered.
        if self._writer_task is not None:
            await asyncio.wait([self._writer_task])  # `_on_task_end` has logged its error
        await self._maintenance.stop()
        # Everything is committed and the sessions are still open. The close reason will direct them to the successor.
        successor = await hand_over() if hand_over is not None else ""
        self.registry.end_all(format_lost_leadership(successor) if successor else why)
        await self.registry.close()
        await self.ledger.close()

    async def abandon(self) -> None:
        """Stop like a killed process: answer nobody and commit nothing. The caller cuts the connections. Used only by
        simulations."""
        self.status.draining.set()
        self._intake.is_closed = True
        if self._writer_task is not None:
            self._writer_task.cancel()
            await asyncio.gather(self._writer_task, return_exceptions=True)
        await self._maintenance.stop()
        await self.registry.close()

    @property
    def is_draining(self) -> bool:
        return self.status.draining.is_set()

    # --- used by transports

    def connect(self, connection: Connection) -> Session:
        """Open a session for a connection. The first frame of the session must be ``hello``."""
        self.registry.counts["connections"] += 1
        return self.registry.open(self._new_id(), connection)

    def receive(self, session: Session, data: bytes) -> None:
        """Handle one text message, which is valid UTF-8: steps 1 to 4."""
        self._intake.receive(session, data)

    def refuse(self, session: Session, error: RoundelayError) -> None:
        """Answer a frame that the transport refused, such as a binary frame."""
        self._intake.refuse(session, error)

    def resume(self, session: Session) -> None:
        """Continue to write to a session whose connection accepts bytes again."""
        self.registry.schedule_flush(session)

    def disconnect(self, session: Session) -> None:
        """Remove a session after its connection ended. Idempotent."""
        # Read before `leave`, which closes the session.
        was_live = session.state is LIVE
        self.registry.leave(session)
        # Report only a reactor that vanished. `said_bye` is set after a goodbye, and also when the hub ends a session.
        if was_live and not session.said_bye and session.is_reactor and not self.is_draining:
            self._pending.add(SessionLost(session.live_origin()))

    # --- used by the process of the node

    @property
    def lock(self) -> asyncio.Lock:
        """Lock that is held by each commit and by all work that must not run during a commit."""
        return self._writer.lock

    async def commit(self, entries: list[Entry]) -> None:
        """Commit entries that the node itself creates. The entries are durable when this method returns. Raises
        `LedgerError`."""
        async with self.lock:
            await self._writer.commit(entries)

    async def bind_tokens(self, tokens: Mapping[str, str]) -> None:
        """Bind tokens to agents, as the first use of a token does. ``tokens`` maps agent ids to token hashes. Raises
        `LedgerError`."""
        await self.commit([BindCredentials(dict(tokens))])

    async def add_login(self, login_hash: str, agent_id: str, ttl_ms: int) -> None:
        """Store a login code that lets the owner log in once as an operator. ``login_hash`` is the hash of the code.
        Raises `LedgerError`."""
        login = Login(agent_id, "human", self._clock() + ttl_ms, operator=True)
        try:
            await self.commit([BindCredentials(logins={login_hash: login})])
        except LedgerError as error:
            if not isinstance(error, LogFull):
                self.reopen_ledger(error)
            raise

    def reopen_ledger(self, error: LedgerError) -> None:
        """Reopen the ledger because of an error outside the writer. `HubStatus.opened` is set once the ledger is open
        again."""
        self._writer.reopen_ledger(error)

    def record_process_end(self, agent_id: str, reason: str | None) -> None:
        """Record in the next batch why an agent's process on this node ended. A reason of None means that the process
        runs again."""
        if not self.is_draining:
            self._pending.add(ProcessEnded(agent_id, reason))

    async def wait_until_unserved(self, agent_id: str, grace_s: float) -> None:
        """Wait until no runner serves an agent. A runner that vanished without a goodbye may still return within the
        grace period."""
        await self.registry.wait_until_unserved(agent_id, grace_s)

    # --- facts about the hub

    @property
    def is_ready(self) -> bool:
        """Whether the hub accepts sessions: the ledger is open and answers in time."""
        return self.status.is_ready

    @property
    def state(self) -> State:
        """The committed state."""
        return self.registry.state

    @property
    def name(self) -> str:
        """The network's name."""
        return self.view.name

    @property
    def epoch(self) -> str:
        """The id of the ledger's history. The id changes only when the ledger was lost, replaced or forked."""
        return self.view.epoch

    @property
    def pending(self) -> int:
        """Number of entries that wait for the writer."""
        return len(self._pending)

    async def wait_beyond(self, seq: int, timeout_s: float) -> None:
        """Wait until a row with a seq above ``seq`` is committed, or until the timeout."""
        await self.view.wait_beyond(seq, timeout_s)
