"""`LiveHubView`: the running hub as reading operations see it: the committed state, the ledger, and who is connected.

`reads` passes a `LiveHubView` to each operation. The view never changes the ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from roundelay.network.blobs import BlobStore
from roundelay.network.clock import Clock
from roundelay.network.core.entries import Origin
from roundelay.network.core.mod import Mod
from roundelay.network.core.sending import Rules
from roundelay.network.core.state import State
from roundelay.network.core.visibility import Visibility
from roundelay.network.ledger import Ledger
from roundelay.network.operations.head_cache import RecentHeads
from roundelay.network.operations.reading import AgentSupervisor, PriceList, RunReader

from .handshakes import HandshakeLimiter
from .metrics import CommitStats, LogStatusSource, Metric, list_log_metrics, list_metrics
from .pending import PendingEntries
from .sessions import SessionRegistry
from .status import HubStatus


class LiveHubView:
    """Implements `operations.reading.HubView` for a running hub."""

    def __init__(
        self,
        ledger: Ledger,
        registry: SessionRegistry,
        rules: Rules,
        pending: PendingEntries,
        status: HubStatus,
        stats: CommitStats,
        handshakes: HandshakeLimiter,
        *,
        server: str,
        visibility: Visibility,
        has_owner: bool,
        public_url: str | None,
        price_list: PriceList | None,
        run_reader: RunReader | None,
        shared_log: LogStatusSource | None,
        clock: Clock,
    ) -> None:
        self.ledger = ledger
        self.server = server
        self.limits = rules.limits
        self.quotas = rules.quotas
        self.public_url = public_url
        """Address at which browsers elsewhere reach the page, if the operator has set one."""
        self.supervisor: AgentSupervisor | None = None
        """Controller of the agent processes on the node that runs this hub. None if the node has no agents."""
        self.price_list = price_list
        """Prices of the models, by the names that this node's process knows."""
        self.run_reader = run_reader
        """Reader that explains runs for ``network.explain`` and similar operations. None if the node has no such
        reader."""
        self.blobs: BlobStore | None = None
        """Store with the contents of files. None on a read replica."""
        self.network_visibility: Visibility = visibility
        self._registry = registry
        self._rules = rules
        self._pending = pending
        self._status = status
        self._stats = stats
        self._handshakes = handshakes
        self._has_owner = has_owner
        self._shared_log = shared_log
        self._clock = clock
        self._recent = ("", 0, 0.0), RecentHeads(self._is_person)

    # --- the network

    @property
    def name(self) -> str:
        """The network's name."""
        return self._registry.meta.name

    @property
    def epoch(self) -> str:
        """The id of the ledger's history. The id changes only when the ledger was lost, replaced or forked."""
        return self._registry.meta.epoch

    @property
    def state(self) -> State:
        """The committed state."""
        return self._registry.state

    @property
    def recent(self) -> RecentHeads:
        """Heads of the newest messages. When old messages were deleted or the ledger was reopened, the property returns
        a new cache, because cached heads may no longer be in the log."""
        meta = self._registry.meta
        key = (meta.epoch, meta.first_seq, self._registry.counts["recoveries"])
        if self._recent[0] != key:
            self._recent = key, RecentHeads(self._is_person)
        return self._recent[1]

    def _is_person(self, agent_id: str) -> bool:
        return self.state.is_person(agent_id)

    @property
    def mod_ids(self) -> list[str]:
        return list(self._rules.mods)

    @property
    def mods(self) -> list[Mod]:
        """The hub's mods, in the order of the node's ``mods``."""
        return list(self._rules.mods.values())

    def as_of(self) -> int | UnsetType:
        """Return the time (ms) up to which this node's data is complete. Unset on a leader, whose data is always
        complete."""
        return UNSET

    @property
    def has_operators(self) -> bool:
        """Return whether anyone can read the operators' inbox: the owner, or a participant with an operator's token or
        with the right to administer."""
        if self._has_owner or any(token.operator and not token.revoked for _, token in self.state.items("token")):
            return True
        rights = self.state.rights
        if rights is None:
            return False
        present = (participant for _, participant in self.state.items("participant") if participant.removed_seq is None)
        return any(
            rights.decide("administer", participant.agent_id, participant.kind).allowed for participant in present
        )

    @property
    def has_human_operators(self) -> bool:
        """Return whether any operator is a person. Only people can decide on calls."""
        # The holder of the owner's token joins as a person. Without such a token, only clients in the hub's own process
        # can be operators, and every person among these clients is an operator.
        return self._has_owner or next(self.state.people_before(None), None) is not None

    # --- participants

    def is_online(self, agent_id: str) -> bool:
        return bool(self._registry.participants.sessions_of(agent_id))

    def count_sessions(self, agent_id: str, token: str) -> int:
        """Return how many sessions of a participant joined with the given token."""
        sessions = self._registry.participants.sessions_of(agent_id)
        return sum(session.origin is not None and session.origin.token == token for session in sessions)

    def delivered_up_to(self, agent_id: str) -> int:
        return self._registry.participants.delivered_up_to(agent_id)

    def is_handled(self, agent_id: str, seq: int) -> bool:
        return self._registry.participants.is_handled(agent_id, seq)

    def is_waiting(self, agent_id: str, seq: int) -> bool:
        return self._registry.participants.is_awaiting_retry(agent_id, seq)

    def is_deferred(self, agent_id: str, seq: int) -> bool:
        """Return whether a failed message waits for its next attempt and this attempt is not yet due."""
        attempt = self._registry.participants.find_attempt(agent_id, seq)
        return self.is_waiting(agent_id, seq) and attempt is not None and attempt.due_at > self._clock()

    def find_ack_cursor(self, agent_id: str) -> tuple[int, list[int]]:
        """Return a participant's ack cursor and the unhandled seqs at or below the cursor, ascending."""
        participant, participants = self.state.participant(agent_id), self._registry.participants
        if participant is None:
            return 0, []
        # This call also forgets messages that retention has deleted.
        participants.find_delivery_start(participant, self._registry.meta.first_seq)
        mailbox = participants.activate(participant).mailbox
        return max(mailbox.ack_cursor, participant.registered_seq), sorted(mailbox.open)

    def mark_delivered(self, agent_id: str, up_to: int, given: Sequence[int] | None) -> None:
        """Record that a participant received its messages up to a seq by polling. ``given`` lists all unhandled
        messages that the poll returned, or is None if the poll did not start at the participant's ack cursor."""
        mailbox = self._registry.participants.find_mailbox(agent_id)
        if mailbox is not None:
            mailbox.delivered = max(mailbox.delivered, up_to)
            # The poll counts as another attempt of the returned messages, so their timers must not deliver them again.
            mailbox.awaiting_retry.difference_update(given or ())
            if given is not None:
                mailbox.compact_to(up_to, given)

    # --- waits and subscriptions

    async def wait_beyond(self, seq: int, timeout_s: float) -> None:
        """Wait until a row with a seq above ``seq`` is committed, or until the timeout."""
        await self._registry.participants.wait_beyond(seq, timeout_s)

    async def wait_for_message(self, origin: Origin, after: int, timeout_s: float) -> None:
        """Wait until a message above ``after`` may have arrived for the caller, or until the timeout. Raises
        `CancelledError` if the session has ended."""
        # Do not await between this check and the addition of the future. A message that arrived during the await would
        # be missed.
        if self._registry.recent.may_have_new(origin.agent_id, after):
            return
        session = self._registry.sessions.get(origin.session_id)
        if session is None:
            raise asyncio.CancelledError
        arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        session.arrivals[arrival] = None
        try:
            async with asyncio.timeout(timeout_s):
                await arrival
        except TimeoutError:
            return
        finally:
            # Remove the future. Otherwise the session would store one future for each poll that timed out.
            session.arrivals.pop(arrival, None)

    async def wait_for_change(self, root: int, timeout_s: float) -> None:
        """Wait until the set of open items in a conversation changes, or until the timeout."""
        await self._registry.subscriptions.conversations.wait_for_change(root, timeout_s)

    def watch(self, session_id: str, presence: bool | None, signals: bool | None, quiet: bool | None) -> None:
        """Start (True), end (False) or keep (None) each subscription of a session."""
        session = self._registry.sessions.get(session_id)
        if session is not None:
            self._registry.subscriptions.subscribe(session, presence, signals, quiet)

    # --- metrics

    def figures(self) -> dict[str, float]:
        """Return the metrics by name, as in ``network.status``."""
        return {metric.name: metric.value for metric in self.list_metrics()}

    def list_metrics(self) -> list[Metric]:
        """Return the metrics of this hub, and of the log that it shares with other nodes."""
        metrics = list_metrics(
            self._registry,
            self.ledger,
            self._stats,
            is_ready=self._status.is_ready,
            pending=len(self._pending),
            evicted=self._handshakes.evicted,
        )
        return metrics if self._shared_log is None else [*metrics, *list_log_metrics(self._shared_log.status)]
