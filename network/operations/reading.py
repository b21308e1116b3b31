"""The context of a reading operation: the caller, the hub's interface for reads, and the rules that decide who may read
what.
"""

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
    """Filter for the model calls whose costs are added up. A field that is None selects all calls. ``since`` is in
    milliseconds since the Unix epoch."""

    agent_id: str | None = None
    thread_id: str | None = None
    root: int | None = None
    since: int = 0


class AgentSupervisor(Protocol):
    """Interface that starts and stops the processes of a node's agents."""

    def list_agents(self) -> list[dict[str, Any]]: ...

    async def control(self, agent_id: str, action: AgentAction) -> dict[str, Any]: ...


class UsedTokens(Struct, frozen=True, forbid_unknown_fields=True):
    """The token counts of one model call, from which its price is computed."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    prompt_tokens: TokenCount = 0
    completion_tokens: TokenCount = 0
    cached_tokens: TokenCount = 0


class PriceList(Protocol):
    """Interface to the prices of models. The hub calls it in a worker thread, because the first call reads the whole
    price table."""

    @property
    def has_table(self) -> bool: ...

    def price(self, uses: Sequence[UsedTokens]) -> list[float | None]: ...


Call: TypeAlias = Callable[[str, Mapping[str, object]], Awaitable[Any]]
"""Function that calls a reading operation of ``network.*``, given its name and its arguments. The call has the rights
of the original caller."""


class RunReader(Protocol):
    """Interface to code that explains runs from their records. The network itself does not interpret the bodies of
    records.

    The reader gets data only through ``call``, so it sees only what the caller may see. Each method returns a JSON
    value of at most about ``max_bytes`` bytes.
    """

    async def explain(self, call: Call, seq: int, max_bytes: int) -> dict[str, Any]: ...

    async def list_effects(self, call: Call, seq: int, limit: int, max_bytes: int) -> dict[str, Any]: ...

    async def read_work(self, call: Call, agent_id: str, reaction: str, max_bytes: int) -> dict[str, Any]: ...

    async def add_up_cost(self, call: Call, by: CostGroup, wanted: CallSelection) -> dict[str, Any]: ...


class ReadPermit(Protocol):
    """The share of one read in the read budget. A read can release its share while it waits, and then acquire it
    again."""

    async def acquire(self) -> None: ...

    def release(self) -> None: ...


class HubView(Protocol):
    """Interface through which reading operations use the running hub."""

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
    """First argument of a reading operation. It contains the caller and the hub."""

    origin: Origin
    hub: HubView
    mod_id: str = ""
    place: ReadPermit | None = None

    @property
    def blobs(self) -> BlobStore:
        """The blob store of the node. Raises `Forbidden` if the node has no blob store."""
        if self.hub.blobs is None:
            raise Forbidden("This node is a follower and has no files. Read the files from the leader.")
        return self.hub.blobs

    async def wait_beyond(self, seq: int, timeout_s: float) -> None:
        """Wait until a row after ``seq`` is committed, or until the timeout. Other reads may use this read's share of
        the read budget during the wait."""
        if self.place is not None:
            # The wait may be long, so release the share. Otherwise a few waiting callers would block all other reads.
            self.place.release()
        await self.hub.wait_beyond(seq, timeout_s)
        if self.place is not None:
            # Acquire the share before the read continues, because the read will use the ledger and create a result.
            await self.place.acquire()

    async def wait_for_message(self, after: int, timeout_s: float) -> None:
        """Wait until there may be a message for the caller after ``after``, or until the timeout. Other reads may use
        this read's share of the read budget during the wait."""
        if self.place is not None:
            # Release the share during the wait, for the same reason as in `wait_beyond`.
            self.place.release()
        await self.hub.wait_for_message(self.origin, after, timeout_s)
        if self.place is not None:
            await self.place.acquire()

    async def wait_for_change(self, root: int, timeout_s: float) -> None:
        """Wait until an item of a conversation was opened or closed, or until the timeout. Other reads may use this
        read's share of the read budget during the wait."""
        if self.place is not None:
            # Release the share during the wait, for the same reason as in `wait_beyond`.
            self.place.release()
        await self.hub.wait_for_change(root, timeout_s)
        if self.place is not None:
            await self.place.acquire()

    async def take_turns(self) -> None:
        """Let other reads use this read's share of the read budget, and then acquire it again. Raises `CancelledError`
        if the caller's session has ended, which stops an operation with many reads."""
        if self.place is not None:
            self.place.release()
            await self.place.acquire()

    def get(self, key: str) -> Any:
        """Return the JSON value that the mod has stored under a key, or None."""
        # The id of the mod is part of the key, so no mod can read the values of another mod.
        raw: Raw | None = self.hub.state.get("mod", f"{self.mod_id}/{key}")
        return msgspec.json.decode(raw) if raw is not None else None

    def items(self, prefix: str, after: str = "") -> Iterator[tuple[str, Any]]:
        """Yield the mod's keys that begin with ``prefix`` and are greater than ``after``, ascending, with their values.
        Do not await anything during the iteration."""
        own = f"{self.mod_id}/"
        start = own + prefix
        for key, raw in self.hub.state.ascending("mod", max(own + after, start)):
            if not key.startswith(start):
                return
            yield key.removeprefix(own), msgspec.json.decode(raw)

    async def cold(self, key: str) -> Any:
        """Return the cold JSON value that the mod has stored under a key, or None."""
        raw: Raw | None = await self.hub.ledger.lookup_cold("mod_cold", f"{self.mod_id}/{key}")
        return msgspec.json.decode(raw) if raw is not None else None

    async def list_cold(self, prefix: str, limit: int, *, after: str = "") -> list[tuple[str, Any]]:
        """Return the mod's cold keys that begin with ``prefix`` and are greater than ``after``, ascending, with their
        values."""
        own = f"{self.mod_id}/"
        values = await self.hub.ledger.cold("mod_cold", own + prefix, limit, after=own + after)
        return [(key.removeprefix(own), msgspec.json.decode(raw)) for key, raw in values]

    def reads_now(self, head: MessageHead) -> bool:
        """Return whether the caller is an operator or would receive the next message in the thread of ``head`` (see
        `Change.thread`)."""
        return reads(self, next_message_head(self.hub.state, head))


def reads_as_itself(reading: Reading, head: MessageHead) -> bool:
    """Return whether the caller may read a message without using operator rights."""
    return may_read(reading.hub.state, reading.origin.agent_id, head)


def reads(reading: Reading, head: MessageHead | None) -> bool:
    """Return whether the caller may read a message. Operators may read every message."""
    # Treat a missing message as unreadable, because callers must not learn which seqs exist.
    return head is not None and (reading.origin.is_operator or reads_as_itself(reading, head))


def resolve_owner(origin: Origin, agent_id: str | None, refusal: str) -> str | None:
    """Return the participant whose data a call may read: the caller, or the participant whom an operator names. None
    stands for all participants. Raises `Forbidden` with the text ``refusal``."""
    # An operator who names no participant gets the data of all participants. Other callers get only their own data.
    if origin.is_operator:
        return agent_id
    if agent_id not in (None, origin.agent_id):
        raise Forbidden(refusal)
    return origin.agent_id
