"""`SharedLog`: the interface of a log that several nodes share, with its records, its errors, and the status of a node.

An engine (modules `jetstream` and `postgres`) stores all records in one order. A writer names the position of the last
record that it knows, and the engine accepts the new record only directly after this position. So if two nodes append at
the same time, one append is refused. The module `records` defines the content of the records. This module does no IO.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol, cast

from roundelay.network.errors import LedgerError
from roundelay.network.ledger import LogFull


class LogUnavailable(LedgerError):
    """The log's engine does not answer now, but may answer later."""


class LogElectionPending(LogUnavailable):
    """The servers of the log's engine are electing their leader. They answer again after the election."""


class LogIncomplete(LogUnavailable):
    """The log's engine reports that records are missing. The report may be wrong shortly after an election of the
    engine's servers. If the engine repeats it, the records are lost."""


class LogTruncated(LedgerError):
    """The requested records were already deleted from the log."""


class UnusableLog(LedgerError):
    """Permanent error: the log belongs to another network, is damaged, or has an unknown format."""


def missing_log(name: str) -> LogIncomplete:
    """Return the error for a log that must exist but does not."""
    return LogIncomplete(
        f"There is no log {name}. A node that already knows a log never creates a new one: the new log would be a "
        "different history. Check the name, or restore the log. A node with a new file for --db creates one."
    )


def describe_wait(error: LedgerError) -> str:
    """Return a text that tells clients why a node waits after an error. The text does not contain the address of the
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
    """Interface of an engine that stores a shared log. Every method raises `LedgerError` with a message for operators,
    or `LogUnavailable` if a later call may succeed."""

    name: str
    """Address of the log for operators, without secrets."""
    network: str
    """Name of the network, without the address of the log."""

    async def open(self, *, create: bool = True) -> None:
        """Connect to the log. If it does not exist, create it or, if ``create`` is false, raise `LogIncomplete`."""

    async def close(self) -> None:
        """Disconnect from the log. Idempotent."""

    @property
    def max_bytes(self) -> int:
        """Maximum size of a record, in bytes."""

    async def end(self) -> int:
        """Return the position of the newest record, or 0 if the log is empty."""

    async def first(self) -> int:
        """Return the position of the oldest record. If the log is empty, return the position that the next record will
        have."""

    async def drop(self, before: int) -> bool:
        """Delete records below a position, oldest first. One call may delete only some of them. Return whether all
        records below the position are deleted now. Only the leader may call this method."""

    async def room(self) -> tuple[int, int]:
        """Return the number of free bytes in the log, and the maximum size of the log in bytes."""

    async def append(self, data: bytes, after: int) -> int:
        """Append a record directly after position ``after``. When the engine has stored it, return its position.

        Raises `LeadershipLost` if another record already has this position, and `LogFull` if the log has no room. After
        any other error, the record may or may not be stored.
        """

    def follow(self, after: int) -> AsyncIterator[LogRecord]:
        """Yield all records above a position in order, and then wait for new records. The caller must close the
        iterator."""

    async def broadcast(self, text: str) -> None:
        """Send a text to all connected nodes. Delivery is not guaranteed."""

    async def next_broadcast(self) -> str:
        """Wait for the next broadcast and return its text. A node also receives its own broadcasts."""

    async def find_sync_risk(self) -> str:
        """Return why an acknowledged record may not be on disk. Return an empty string if the engine's settings
        guarantee that it is on disk."""

    async def describe(self) -> dict[str, Any]:
        """Return a JSON description of the engine for operators: its size, its limits, and its servers."""


def follow_records(shared: SharedLog, after: int) -> aclosing[AsyncGenerator[LogRecord, None]]:
    """Return a context manager whose value is an iterator over the records above a position. The iterator is closed at
    the end of the context."""
    return aclosing(cast(AsyncGenerator[LogRecord, None], shared.follow(after)))


class LogStatus(NamedTuple):
    """Role of a node among the nodes that share its log. ``str()`` returns the text that `/readyz` shows."""

    leads: bool
    leader: str
    """Address of the leader. Empty if this node is the leader or the address is unknown."""
    behind: int | None
    """Number of records that the node had yet to read at the last check, or None before the first check."""
    answered_s: float | None
    """Seconds since the last answer of the log, or None before the first answer."""
    log: str
    durability: str
    waits: str = ""
    """Reason why the node is neither leader nor follower, or an empty string."""

    def __str__(self) -> str:
        if self.waits and not self.leads:
            return f"waiting, {self.waits}, log {self.log}"
        if self.behind is None and not self.leads:
            return "starting"
        leader = f" {self.leader}" if self.leader else ""
        role = "leading" if self.leads else f"following{leader}, {self.behind} records behind"
        return f"{role}, log {self.log}, durability {self.durability}"
