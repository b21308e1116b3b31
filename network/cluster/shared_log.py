"""`SharedLog`, the protocol of a log that several nodes share: its records, its errors, and a node's status.

An engine (`jetstream`, `postgres`) stores records in one order. It accepts a record only directly after the position
that the writer names, so that of two writers one is refused. The module `records` defines their content. No IO.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol, cast

from roundelay.network.errors import LedgerError
from roundelay.network.ledger import LogFull


class LogUnavailable(LedgerError):
    """The engine does not answer now, and may answer later."""


class LogElectionPending(LogUnavailable):
    """The engine's servers are electing their leader. They answer afterwards."""


class LogIncomplete(LogUnavailable):
    """The engine answers as if records were lost. Just after an election of its servers the answer may be wrong; if the
    engine repeats it, the records are lost."""


class LogTruncated(LedgerError):
    """The requested records were dropped: the log begins later now."""


class UnusableLog(LedgerError):
    """The log is not the one that this node knows, or this node cannot read it. Waiting does not help."""


def missing_log(name: str) -> LogIncomplete:
    """Return the error for a log that has to exist and does not."""
    return LogIncomplete(
        f"There is no log {name}. A node that already knows a log never creates a new one: the new log would be a "
        "different history. Check the name, or restore the log. A node with a new file for --db creates one."
    )


def describe_wait(error: LedgerError) -> str:
    """Return why a node waits, for everybody: without the address of the log."""
    match error:
        case LogFull():
            return "the log has no room"
        case LogIncomplete():
            return "the log seems to lack records"
        case LogUnavailable():
            return "the log does not answer"
        case _:
            return "it has said why"


class LogRecord(NamedTuple):
    """One record as the engine stores it. Positions ascend by one."""

    position: int
    data: bytes
    has_more: bool = False
    """Whether the engine has announced further records, which are on their way."""


class SharedLog(Protocol):
    """The operations of an engine. Every method raises `LedgerError` with a sentence for an operator, or
    `LogUnavailable` where a later call may succeed."""

    name: str
    """Address of the log without secrets, for operators."""
    network: str
    """Name of the network alone, without the address."""

    async def open(self, *, create: bool = True) -> None:
        """Connect. Create a missing log, or raise `LogIncomplete` without ``create``."""

    async def close(self) -> None:
        """Disconnect. Idempotent."""

    @property
    def max_bytes(self) -> int:
        """Maximum size of a record, in bytes."""

    async def end(self) -> int:
        """Return the position of the newest record, 0 for an empty log."""

    async def first(self) -> int:
        """Return the position of the oldest record. For an empty log it is the position of the next record."""

    async def drop(self, before: int) -> bool:
        """Drop the records below a position, or some of the oldest. Return whether none is left. For leaders only."""

    async def room(self) -> tuple[int, int]:
        """Return the free bytes and the maximum size of the log."""

    async def append(self, data: bytes, after: int) -> int:
        """Append directly after the record at ``after``. Return the new position once the engine has stored the record.

        Raises `LeadershipLost` or `LogFull`. After any other error the outcome is unknown.
        """

    def follow(self, after: int) -> AsyncIterator[LogRecord]:
        """Yield the records above a position, ascending without a gap, and future ones. Close the iterator."""

    async def broadcast(self, text: str) -> None:
        """Send a text to all connected nodes. Broadcasts may be lost."""

    async def next_broadcast(self) -> str:
        """Wait for the next broadcast. Own broadcasts come back too."""

    async def find_sync_risk(self) -> str:
        """Return why an acknowledged record may not be on disks, in a sentence. Empty where the engine itself shows that
        it is."""

    async def describe(self) -> dict[str, Any]:
        """Describe the engine for operators, as JSON: its size, its limits, its servers."""


def follow_records(shared: SharedLog, after: int) -> aclosing[AsyncGenerator[LogRecord, None]]:
    """Follow the records above a position, in an ``async with``."""
    return aclosing(cast(AsyncGenerator[LogRecord, None], shared.follow(after)))


class LogStatus(NamedTuple):
    """Role of a node among those that share its log. ``str`` gives the text of `/readyz`."""

    leads: bool
    leader: str
    """Address of the leader, where another node leads and its address is known."""
    behind: int | None
    """Records that were left to follow at the last look. None at the start."""
    answered_s: float | None
    """Seconds since the last answer of the log."""
    log: str
    durability: str
    waits: str = ""
    """Why the node neither leads nor follows any more."""

    def __str__(self) -> str:
        if self.waits and not self.leads:
            return f"waiting, {self.waits}, log {self.log}"
        if self.behind is None and not self.leads:
            return "starting"
        leader = f" {self.leader}" if self.leader else ""
        role = "leading" if self.leads else f"following{leader}, {self.behind} records behind"
        return f"{role}, log {self.log}, durability {self.durability}"
