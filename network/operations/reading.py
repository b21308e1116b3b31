"""The context of a reading operation: the caller, the hub's interface for reads, and the rules for who may read
what."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct

from roundelay.network.blobs import BlobStore
from roundelay.network.config import Limits
from roundelay.network.core.entries import Origin
from roundelay.network.core.limits import Quotas
from roundelay.network.core.mod import Mod
from roundelay.network.core.rows import MessageHead
from roundelay.network.core.state import State
from roundelay.network.core.takeovers import next_message_head
from roundelay.network.core.visibility import Visibility, may_read
from roundelay.network.errors import Forbidden
from roundelay.network.ledger import Ledger

from .head_cache import RecentHeads

TokenCount = Annotated[int, Meta(ge=0, le=2**53 - 1)]
AgentAction: TypeAlias = Literal["start", "stop", "restart", "reload"]
CostGroup: TypeAlias = Literal["agent", "model", "thread", "root", "reaction", "day"]


class CallSelection(Struct, frozen=True):
    """Filter for the model calls to add up. None means all. ``since`` is in milliseconds since the Unix epoch."""

    agent_id: str | None = None
    thread_id: str | None = None
    root: int | None = None
    since: int = 0


class AgentSupervisor(Protocol):
    """Starts and stops the processes of a node's agents."""

    def list_agents(self) -> list[dict[str, Any]]: ...

    async def control(self, agent_id: str, action: AgentAction) -> dict[str, Any]: ...


class UsedTokens(Struct, frozen=True, forbid_unknown_fields=True):
    """The numbers of tokens of one model call on which its price depends."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    prompt_tokens: TokenCount = 0
    completion_tokens: TokenCount = 0
    cached_tokens: TokenCount = 0


class PriceList(Protocol):
    """Prices of models. Called in a worker thread, because the first call reads the whole table."""

    @property
    def has_table(self) -> bool: ...

    def price(self, uses: Sequence[UsedTokens]) -> list[float | None]: ...


Call: TypeAlias = Callable[[str, Mapping[str, object]], Awaitable[Any]]
"""Function that calls a reading operation of ``network.*`` by its name and arguments, with the rights of the caller of
another operation."""


class RunReader(Protocol):
    """Explains runs from their records. The network itself does not interpret the bodies of records.

    The reader reads through ``call``, so that it sees no more than the caller may see. Each method returns a JSON value
    of at most about ``max_bytes``.
    """

    async def explain(self, call: Call, seq: int, max_bytes: int) -> dict[str, Any]: ...

    async def list_effects(self, call: Call, seq: int, limit: int, max_bytes: int) -> dict[str, Any]: ...

    async def read_work(self, call: Call, agent_id: str, reaction: str, max_bytes: int) -> dict[str, Any]: ...

    async def add_up_cost(self, call: Call, by: CostGroup, wanted: CallSelection) -> dict[str, Any]: ...


class ReadPermit(Protocol):
    """The slot of one read in the read budget. A read can release its slot during a wait and take a slot again
    later."""

    async def acquire(self) -> None: ...

    def release(self) -> None: ...


class HubView(Protocol):
    """Interface of the running hub for reading operations."""

    server: str
    ledger: Ledger
    limits: Limits
    quotas: Quotas
    public_url: str | None
    supervisor: AgentSupervisor | None
    price_list: PriceList | None
    run_reader: RunReader | None
    blobs: BlobStore | None

    @property
    def name(self) -> str: ...

    @property
    def epoch(self) -> str: ...

    @property
    def state(self) -> State: ...

    @property
    def mod_ids(self) -> list[str]: ...

    @property
    def mods(self) -> list[Mod]: ...

    @property
    def network_visibility(self) -> Visibility: ...

    @property
    def has_operators(self) -> bool: ...

    @property
    def has_human_operators(self) -> bool: ...

    @property
    def recent(self) -> RecentHeads: ...

    def is_online(self, agent_id: str) -> bool: ...

    def count_sessions(self, agent_id: str, token: str) -> int: ...

    def delivered_up_to(self, agent_id: str) -> int: ...

    def is_handled(self, agent_id: str, seq: int) -> bool: ...

    def is_waiting(self, agent_id: str, seq: int) -> bool: ...

    def is_deferred(self, agent_id: str, seq: int) -> bool: ...

    def figures(self) -> dict[str, float]: ...

    async def wait_beyond(self, seq: int, timeout_s: float) -> None: ...

    async def wait_for_message(self, origin: Origin, after: int, timeout_s: float) -> None: ...

    def find_ack_cursor(self, agent_id: str) -> tuple[int, list[int]]: ...

    def mark_delivered(self, agent_id: str, up_to: int, given: Sequence[int] | None) -> None: ...

    async def wait_for_change(self, root: int, timeout_s: float) -> None: ...

    def watch(self, session_id: str, presence: bool | None, signals: bool | None, quiet: bool | None) -> None: ...


class Reading(Struct, frozen=True):
    """First argument of a reading operation: the caller and the hub."""

    origin: Origin
    hub: HubView
    mod_id: str = ""
    place: ReadPermit | None = None

    @property
    def blobs(self) -> BlobStore:
        """The node's blob store. Raises `Forbidden` on a node without one."""
        if self.hub.blobs is None:
            raise Forbidden("This node follows and has no files. Read them from the node that leads.")
        return self.hub.blobs

    async def wait_beyond(self, seq: int, timeout_s: float) -> None:
        """Wait until something newer than ``seq`` is committed, or until the timeout. Meanwhile other reads may use
        this read's budget."""
        if self.place is not None:
            # A wait may be long. With its slot held, a few waiting callers would block all other reads.
            self.place.release()
        await self.hub.wait_beyond(seq, timeout_s)
        if self.place is not None:
            # Taken again before the read goes on: what follows reads the ledger and makes a result.
            await self.place.acquire()

    async def wait_for_message(self, after: int, timeout_s: float) -> None:
        """Wait until there may be a message above ``after`` for the caller, or until the timeout. Meanwhile other reads
        may use this read's budget."""
        if self.place is not None:
            # As in `wait_beyond`: a wait must not hold a slot.
            self.place.release()
        await self.hub.wait_for_message(self.origin, after, timeout_s)
        if self.place is not None:
            await self.place.acquire()

    async def wait_for_change(self, root: int, timeout_s: float) -> None:
        """Wait until something was opened or closed in a conversation, or until the timeout. Meanwhile other reads may
        use this read's budget."""
        if self.place is not None:
            # As in `wait_beyond`: a wait must not hold a slot.
            self.place.release()
        await self.hub.wait_for_change(root, timeout_s)
        if self.place is not None:
            await self.place.acquire()

    async def take_turns(self) -> None:
        """Let other reads use this read's budget, and wait for it again. Raises `CancelledError` if the caller's
        session has ended, so that an operation of many reads stops with it."""
        if self.place is not None:
            self.place.release()
            await self.place.acquire()

    def get(self, key: str) -> Any:
        """Return the mod's own JSON value under a key, or None."""
        # The mod's id is in the key, so that no mod reads values of another one.
        raw: Raw | None = self.hub.state.get("mod", f"{self.mod_id}/{key}")
        return msgspec.json.decode(raw) if raw is not None else None

    def items(self, prefix: str, after: str = "") -> Iterator[tuple[str, Any]]:
        """Yield the mod's own keys that begin with ``prefix`` and are above ``after``, ascending, with their values. Do
        not await anything during the iteration."""
        own = f"{self.mod_id}/"
        start = own + prefix
        for key, raw in self.hub.state.ascending("mod", max(own + after, start)):
            if not key.startswith(start):
                return
            yield key.removeprefix(own), msgspec.json.decode(raw)

    async def cold(self, key: str) -> Any:
        """Return the mod's own cold JSON value under a key, or None."""
        raw: Raw | None = await self.hub.ledger.lookup_cold("mod_cold", f"{self.mod_id}/{key}")
        return msgspec.json.decode(raw) if raw is not None else None

    async def list_cold(self, prefix: str, limit: int, *, after: str = "") -> list[tuple[str, Any]]:
        """Return the mod's own cold keys that begin with ``prefix`` and are above ``after``, ascending, with their
        values."""
        own = f"{self.mod_id}/"
        values = await self.hub.ledger.cold("mod_cold", own + prefix, limit, after=own + after)
        return [(key.removeprefix(own), msgspec.json.decode(raw)) for key, raw in values]

    def reads_now(self, head: MessageHead) -> bool:
        """Return whether the caller would receive the next message in the thread of ``head`` (`Change.thread`), or is
        an operator."""
        return reads(self, next_message_head(self.hub.state, head))


def reads_as_itself(reading: Reading, head: MessageHead) -> bool:
    """Return whether the caller may read a message without operator rights."""
    return may_read(reading.hub.state, reading.origin.agent_id, head)


def reads(reading: Reading, head: MessageHead | None) -> bool:
    """Return whether the caller may read a message. Operators may read every message."""
    # A missing message is not readable either: callers must not learn which seqs exist.
    return head is not None and (reading.origin.is_operator or reads_as_itself(reading, head))


def resolve_owner(origin: Origin, agent_id: str | None, refusal: str) -> str | None:
    """Return the participant whose data a call is about. This is the caller, unless an operator names a participant.
    None means all participants. Raises `Forbidden` with the given refusal."""
    # An operator without a name asks about everybody, while anyone else asks only about itself.
    if origin.is_operator:
        return agent_id
    if agent_id not in (None, origin.agent_id):
        raise Forbidden(refusal)
    return origin.agent_id
