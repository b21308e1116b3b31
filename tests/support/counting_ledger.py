"""A ledger that counts its reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable
from typing import Any, TypeVar

from tests.support.random_network import RandomNetwork

T = TypeVar("T")
READS = frozenset(
    {
        "thread",
        "threads",
        "inbox",
        "inbox_heads",
        "newest_heads",
        "first_seqs",
        "messages",
        "heads",
        "search",
        "search_seqs",
        "reaction",
        "rows",
    }
)


class CountingLedger:
    """Ledger that counts calls and the rows, message heads and seqs that they return."""

    def __init__(self, ledger: Any) -> None:
        self._ledger = ledger
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._ledger, name)
        if name not in READS:
            return method

        async def read(*args: Any, **options: Any) -> Any:
            found = await method(*args, **options)
            self.counts["calls"] += 1
            if name == "newest_heads":
                self.counts["heads"] += sum(map(len, found.values()))
            elif name in ("threads", "first_seqs", "search_seqs"):
                self.counts["seqs"] += len(found)
            else:
                kind = "heads" if name == "inbox_heads" else "rows"
                self.counts[kind] += len(found.rows if hasattr(found, "rows") else found)
            return found

        return read


def count_reads(network: RandomNetwork, operation: Awaitable[T]) -> tuple[T, Counter[str]]:
    """Run an operation. Return the operation's value and the number of ledger reads."""
    counting = CountingLedger(network.hub.view.ledger)
    network.hub.view.ledger = counting  # type: ignore[assignment]
    try:
        value = network.stepped.run(operation)
    finally:
        network.hub.view.ledger = counting._ledger
    return value, counting.counts
