"""The read replica of a follower node: clients can read data that the leader has committed.

`ReplicaHub` serves the node's index and stores nothing. `ReplicaReaders` starts a replica when the node begins to
follow, and stops the replica when the node begins to lead. The node's own hub starts only after that. A failure of the
replica ends only the replica, because a node that cannot serve reads should still take part in elections.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from roundelay.network.cluster.read_replica import ReadOnlyIndex
from roundelay.network.core.apply import describe_follower
from roundelay.network.core.entries import AcceptSession, BindCredentials, Origin, Outcome
from roundelay.network.core.rows import Row
from roundelay.network.core.tables import Participant, TableWrite
from roundelay.network.errors import Forbidden, LedgerError
from roundelay.network.frames import Follows, NackFrame, ResumePoint, SignalFrame
from roundelay.network.ledger import Ledger

from .hub import Hub
from .hub_view import LiveHubView
from .intake import Intake
from .publisher import Publisher
from .retention import drop_before
from .session import Session, SessionState

log = logging.getLogger(__name__)

BEHIND = "This node follows, and has not yet received what this session has already seen; reconnect in a moment."
LEADS_NOW = "This node is no longer a follower; reconnect."
CANNOT_SHOW = "This node cannot serve its copy of the network at the moment; reconnect."


class ReplicaView(LiveHubView):
    """The replica as reading operations see it. Results are complete up to the last row that the node has followed."""

    def as_of(self) -> int | UnsetType:
        assert self._rules.follows is not None
        return self._rules.follows().as_of


class ReplicaIntake(Intake):
    """Refuses the frames that only the leader can handle and that never reach `core.apply`."""

    def _accept_nack(self, session: Session, origin: Origin, frame: NackFrame) -> None:
        self._refuse_change(session)

    def _accept_signal(self, session: Session, origin: Origin, frame: SignalFrame) -> None:
        self._refuse_change(session)

    def _refuse_change(self, session: Session) -> None:
        assert self._rules.follows is not None
        self._count_frame(session)
        raise Forbidden(describe_follower(self._rules.follows()))


class ReplicaPublisher(Publisher):
    """Welcomes sessions to a replica. The mods' ``after`` hooks run only at the leader."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # The leader runs the hooks once. Otherwise every replica would repeat their IO.
        self._after_hooks = ()

    def _welcome(self, effect: AcceptSession) -> None:
        session = self._registry.sessions.get(effect.origin.session_id)
        if session is not None and session.state is SessionState.JOINING and self._is_ahead(effect.hello.resume):
            # End the session. If it started at an earlier cursor, the client would receive messages that it has already
            # seen.
            self._registry.end(session, 4503, BEHIND)
            return
        super()._welcome(effect)

    def _is_ahead(self, resume: ResumePoint | UnsetType) -> bool:
        """Return whether a cursor belongs to this history but lies beyond the replica's data."""
        meta, head = self._registry.meta, self._registry.state.head
        return resume is not UNSET and resume.epoch == meta.epoch and resume.cursor > head

    def _describe_leader(self) -> Follows | UnsetType:
        assert self._rules.follows is not None
        return self._rules.follows()


class ReplicaHub(Hub):
    """A hub over the index of a follower node. ``follows`` describes the leader and how current this node is.

    The replica decides who may join, and refuses every change, by the same rules as the leader. It stores nothing, so
    it needs no maintenance. The leader's acknowledgements, takeovers and trims arrive through `apply_followed` and
    `drop_before`.
    """

    view_type = ReplicaView
    intake_type = ReplicaIntake
    publisher_type = ReplicaPublisher

    def __init__(self, ledger: Ledger, *, follows: Callable[[], Follows], **settings: Any) -> None:
        super().__init__(ledger, follows=follows, **settings)

    async def start(self) -> None:
        """Load the state and begin to serve. Raises `LedgerError`."""
        await self._start_writer()

    async def apply_followed(self, rows: Sequence[Row], writes: Sequence[TableWrite]) -> None:
        """Apply changes that the leader has stored, and deliver the messages among them. The index already contains the
        changes."""
        # Hold the lock: a batch of the replica itself (joins) would have a draft without these writes.
        async with self.lock:
            state = self.state
            draft = state.draft(max(self._clock(), state.stamp))
            outcome = Outcome(rows=rows, writes=writes)
            draft.apply_outcome(outcome)
            # End revoked sessions before anything is published. The same commit may contain messages that these
            # sessions must not see.
            for write in writes:
                if write.table == "participant" and write.value is not None:
                    self._end_cut_sessions(write.value)
                elif write.table == "token" and write.value is not None and write.value.revoked:
                    self._end_token_sessions(write.key, write.value.agent_id)
            # An entry without an origin stands for the leader's commit. No session of the replica is the sender, so the
            # messages go to all recipients.
            self._publisher.publish(draft, [(BindCredentials(), outcome)])

    async def drop_before(self, first_seq: int) -> None:
        """Forget messages below ``first_seq``. The index has deleted them."""
        async with self.lock:
            drop_before(self.registry, first_seq)

    def _end_cut_sessions(self, participant: Participant) -> None:
        """End the sessions that joined before their participant was removed or before its tokens were revoked."""
        cut_seq = max(participant.cut_seq, participant.removed_seq or 0)
        for session in self.registry.participants.sessions_of(participant.agent_id):
            if session.joined_at < cut_seq:
                error = Forbidden(f"{participant.agent_id} was removed, or its token was revoked.")
                self.registry.refuse(session, 4403, error)

    def _end_token_sessions(self, token: str, agent_id: str) -> None:
        """End the sessions that joined with a token that is now revoked."""
        for session in self.registry.participants.sessions_of(agent_id):
            if session.origin is not None and session.origin.token == token:
                self.registry.refuse(session, 4403, Forbidden(f"This token of {agent_id} was revoked."))


class ReplicaReaders:
    """Starts and stops the read replica of a node (`cluster.read_replica.ReadReplica`). ``make_hub`` makes the hub that
    serves an index to readers."""

    def __init__(self, make_hub: Callable[[ReadOnlyIndex], ReplicaHub]) -> None:
        self._make_hub = make_hub
        self.hub: ReplicaHub | None = None
        """The hub that serves readers. None while this node leads or has not yet caught up."""

    @property
    def is_serving(self) -> bool:
        return self.hub is not None

    async def start(self, index: ReadOnlyIndex) -> None:
        hub = self._make_hub(index)
        try:
            await hub.start()
        except LedgerError as error:  # the follower sees this error too, and handles it
            log.warning("the read replica cannot read the node's index: %s", error)
            return
        self.hub = hub

    async def apply(self, rows: Sequence[Row], writes: Sequence[TableWrite]) -> None:
        if self.hub is not None:
            await self._run(self.hub, self.hub.apply_followed(rows, writes))

    async def drop_before(self, first_seq: int) -> None:
        if self.hub is not None:
            await self._run(self.hub, self.hub.drop_before(first_seq))

    async def _run(self, hub: ReplicaHub, work: Awaitable[None]) -> None:
        """Run one update of the replica. If the update fails, stop serving, because the replica's state may differ from
        the index."""
        try:
            await work
        except Exception:
            log.exception("the read replica failed")
            await self._stop(CANNOT_SHOW)
            return
        if hub.status.failed.is_set():
            await self._stop(CANNOT_SHOW)

    async def stop(self) -> None:
        await self._stop(LEADS_NOW)

    async def _stop(self, reason: str) -> None:
        # Clear the hub before `close`, which awaits: no new session may start on this hub.
        hub, self.hub = self.hub, None
        if hub is not None:
            await hub.close(reason)
