"""`SharedLog`: the interface of a log that several nodes share, with its records, its errors, and the status of a node.

An engine (modules `jetstream` and `postgres`) stores all records in one order. A writer names the position of the last
record, and the engine accepts the new record only directly after this position. If two nodes append at the same time,
one append is refused. The module `records` defines the content of the records. This module does no IO.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol, cast

from roundelay.network.errors import LedgerError
from roundelay.network.ledger import LogFull


class LogUnavailable(LedgerError):
    """Error if the engine does not answer now but may answer later."""


class LogElectionPending(LogUnavailable):
    """Error while the servers of the engine are electing their leader. The servers answer again after the election."""


class LogIncomplete(LogUnavailable):
    """Error if the engine reports that records are missing. The report may be wrong shortly after an election of the
    engine's servers. If the engine repeats the report, the records are lost."""


class LogTruncated(LedgerError):
    """Error if the requested records were already deleted from the log."""


class UnusableLog(LedgerError):
    """Permanent error: the log belongs to another network, is damaged, or has an unknown format."""


def missing_log(name: str) -> LogIncomplete:
    """Return the error for a log that must exist but does not."""
    return LogIncomplete(
        f"There is no log {name}. A node that already knows a log never creates a new one: the new log would be a "
        "different history. Check the name, or restore the log. A node with a new file for --db creates one."
    )


def describe_wait(error: LedgerError) -> str:
    """Convert an error into a text that tells clients why a node waits. The text does not contain the address of the
    log."""
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
    """One record as the engine stores it. Positions are consecutive numbers."""

    position: int
    data: bytes
    has_more: bool = False
    """Whether the engine has announced more records that have not arrived yet."""


class SharedLog(Protocol):
    """Interface of an engine that stores a shared log. Every method raises `LedgerError` with a message for an
    operator, or `LogUnavailable` if a later call may succeed."""

    name: str
    """Address of the log without secrets, for operators."""
    network: str
    """Name of the network, without the address."""

    async def open(self, *, create: bool = True) -> None:
        """Connect to the log. If the log does not exist, create it, or raise `LogIncomplete` if ``create`` is false."""

    async def close(self) -> None:
        """Disconnect from the log. Closing a closed log has no effect."""

    @property
    def max_bytes(self) -> int:
        """Maximum size of a record, in bytes."""

    async def end(self) -> int:
        """Return the position of the newest record. Return 0 if the log is empty."""

    async def first(self) -> int:
        """Return the position of the oldest record. If the log is empty, return the position that the next record will
        have."""

    async def drop(self, before: int) -> bool:
        """Delete records below a position, oldest first. One call may delete only some of these records. Return whether
        all records below the position are deleted. Only the leader may call this method."""

    async def room(self) -> tuple[int, int]:
        """Return the number of free bytes in the log, and the maximum size of the log in bytes."""

    async def append(self, data: bytes, after: int) -> int:
        """Append a record directly after position ``after``. Return the new record's position after the engine has
        stored it.

        Raises `LeadershipLost` if another record already has the new position, or `LogFull` if the log has no room.
        After any other error, the record may or may not be stored.
        """

    def follow(self, after: int) -> AsyncIterator[LogRecord]:
        """Yield all records above a position in order, and then wait for new records. The caller must close the
        iterator."""

    async def broadcast(self, text: str) -> None:
        """Send a text to all connected nodes. Delivery is not guaranteed."""

    async def next_broadcast(self) -> str:
        """Wait for the next broadcast and return its text. A node also receives its own broadcasts."""

    async def find_sync_risk(self) -> str:
        """Return the reason why an acknowledged record may not be on disk. Return an empty string if the engine's
        settings guarantee that it is on disk."""

    async def describe(self) -> dict[str, Any]:
        """Return a JSON description of the engine for operators: its size, its limits, and its servers."""


def follow_records(shared: SharedLog, after: int) -> aclosing[AsyncGenerator[LogRecord, None]]:
    """Return a context manager that yields an iterator over the records above a position, and closes the iterator at
    the end."""
    return aclosing(cast(AsyncGenerator[LogRecord, None], shared.follow(after)))


class LogStatus(NamedTuple):
    """Role of a node among the nodes that share its log. ``str()`` returns the text that `/readyz` shows."""

    leads: bool
    leader: str
    """Address of the leader, or an empty text if this node is the leader or the address is unknown."""
    behind: int | None
    """Number of records that the node had not read at its last check, or None before the first check."""
    answered_s: float | None
    """Seconds since the last answer of the log, or None before the first answer."""
    log: str
    durability: str
    waits: str = ""
    """Reason why the node is neither leader nor follower, or an empty text."""

    def __str__(self) -> str:
        if self.waits and not self.leads:
            return f"waiting, {self.waits}, log {self.log}"
        if self.behind is None and not self.leads:
            return "starting"
        leader = f" {self.leader}" if self.leader else ""
        role = "leading" if self.leads else f"following{leader}, {self.behind} records behind"
        return f"{role}, log {self.log}, durability {self.durability}"
