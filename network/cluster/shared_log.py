"""`SharedLog`, the protocol of a log that several nodes share: its records, its errors, and a node's status.

An engine (`jetstream`, `postgres`) stores records in one order. It accepts a record only directly after the position
that the writer names, so if two nodes write at the same time, one is refused. The module `records` defines the content
of records. No IO.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol, cast

from roundelay.network.errors import LedgerError
from roundelay.network.ledger import LogFull


class LogUnavailable(LedgerError):
    """The engine does not answer now, but may answer later."""


class LogElectionPending(LogUnavailable):
    """The engine's servers are electing their leader, and will answer afterwards."""


class LogIncomplete(LogUnavailable):
    """The engine reports that records are missing. Just after an election of the engine's servers, this report may be
    wrong. If the engine repeats the report, the records are lost."""


class LogTruncated(LedgerError):
    """The requested records are no longer in the log, because the log was trimmed."""


class UnusableLog(LedgerError):
    """The log at this address is not this node's log, or this node cannot read the log. Waiting does not help."""


def missing_log(name: str) -> LogIncomplete:
    """Return the error for a required log that does not exist."""
    return LogIncomplete(
        f"There is no log {name}. A node that already knows a log never creates a new one: the new log would be a "
        "different history. Check the name, or restore the log. A node with a new file for --db creates one."
    )


def describe_wait(error: LedgerError) -> str:
    """Return the reason why a node waits, as text for clients, without the address of the log."""
    match error:
        case LogFull():
            return "the log has no room"
        case LogIncomplete():
            return "the log seems to lack records"
        case LogUnavailable():
            return "the log does not answer"
        case _:
            return "its log has the reason"


class LogRecord(NamedTuple):
    """One record as the engine stores it. Positions ascend by one."""

    position: int
    data: bytes
    has_more: bool = False
    """Whether the engine has announced further records that have not arrived yet."""


class SharedLog(Protocol):
    """The operations of an engine. Every method raises `LedgerError` with a sentence for an operator, or
    `LogUnavailable` if a later call may succeed."""

    name: str
    """Address of the log without secrets, for operators."""
    network: str
    """Name of the network, without the address."""

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
        """Drop the records below a position, or only some of the oldest. Return whether none is left. Only for
        leaders."""

    async def room(self) -> tuple[int, int]:
        """Return the free bytes and the maximum size of the log."""

    async def append(self, data: bytes, after: int) -> int:
        """Append directly after the record at ``after``. Return the new position once the engine has stored the record.

        Raises `LeadershipLost` or `LogFull`. After any other error the outcome is unknown.
        """

    def follow(self, after: int) -> AsyncIterator[LogRecord]:
        """Yield the records above a position, ascending without a gap, and future records. The caller must close the
        iterator."""

    async def broadcast(self, text: str) -> None:
        """Send a text to all connected nodes. A broadcast may be lost."""

    async def next_broadcast(self) -> str:
        """Wait for the next broadcast, which may be the node's own, and return its text."""

    async def find_sync_risk(self) -> str:
        """Return a sentence that explains why an acknowledged record may not be on disks. The text is empty if the
        engine's own settings show that every acknowledged record is on disks."""

    async def describe(self) -> dict[str, Any]:
        """Describe the engine for operators, as JSON: its size, its limits, its servers."""


def follow_records(shared: SharedLog, after: int) -> aclosing[AsyncGenerator[LogRecord, None]]:
    """Context manager that yields an iterator over the records above a position, and closes the iterator."""
    return aclosing(cast(AsyncGenerator[LogRecord, None], shared.follow(after)))


class LogStatus(NamedTuple):
    """Role of a node among the nodes that share its log. ``str`` returns the text of `/readyz`."""

    leads: bool
    leader: str
    """Address of the leader, if another node leads and its address is known."""
    behind: int | None
    """Number of records that the node had not read yet at the last check. None at the start."""
    answered_s: float | None
    """Seconds since the last answer of the log."""
    log: str
    durability: str
    waits: str = ""
    """Reason why the node is neither leader nor follower."""

    def __str__(self) -> str:
        if self.waits and not self.leads:
            return f"waiting, {self.waits}, log {self.log}"
        if self.behind is None and not self.leads:
            return "starting"
        leader = f" {self.leader}" if self.leader else ""
        role = "leading" if self.leads else f"following{leader}, {self.behind} records behind"
        return f"{role}, log {self.log}, durability {self.durability}"
