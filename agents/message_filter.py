"""Which messages of the conversation enter an agent's prompt, beyond what it may see: by kind, by sender, and how many
of each thread. Pure.

A choice of the agent's author, applied to the window that the hub gave (`context`). The incoming message is always
shown, whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from roundelay.network.messages import BaseMessage

MAX_PER_THREAD = 499
"""The hub gives 500 of a thread at most, and one of them may be the incoming message."""

KINDS = frozenset({"direct", "broadcast", "channel", "mod"})

SPARE = 4
"""A filter that leaves messages out is given this many times more to choose from."""


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """Empty ``kinds`` and ``senders`` mean all of them; a sender is an id or a pattern (``build-*``).
    ``exclude_senders`` goes first.

    ``per_thread`` says how many messages of threads whose id fits a pattern (``channel:*``) are shown, 0 for none of
    them; the first pattern that fits counts, and where none does the agent's own ``per_thread``.
    """

    kinds: Collection[str] = ()
    senders: Collection[str] = ()
    exclude_senders: Collection[str] = ()
    per_thread: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("kinds", "senders", "exclude_senders"):
            if isinstance(value := getattr(self, name), str):
                raise ValueError(f"MessageFilter: {name} is a text: write ['{value}']")
        if unknown := sorted({*self.kinds} - KINDS):
            raise ValueError(f"MessageFilter: kinds has {unknown[0]!r} and may have {', '.join(sorted(KINDS))}")
        for pattern, count in self.per_thread.items():
            if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_PER_THREAD:
                raise ValueError(
                    f"MessageFilter: per_thread of {pattern} is {count!r} and must be a whole number from 0 to {MAX_PER_THREAD}"
                )

    def admits(self, message: BaseMessage, reader: str) -> bool:
        """Whether a message may be shown to an agent; its own may, unless they are excluded."""
        if self.kinds and message.kind not in self.kinds:
            return False
        if _fits(message.sender_id, self.exclude_senders):
            return False
        return not self.senders or message.sender_id == reader or _fits(message.sender_id, self.senders)

    def count_for(self, thread_id: str, usual: int) -> int:
        """How many messages of a thread are shown at most."""
        return next((count for pattern, count in self.per_thread.items() if fnmatchcase(thread_id, pattern)), usual)

    def count_to_ask(self, usual: int) -> int:
        """How many messages of each thread to ask the hub for."""
        most = max(usual, *self.per_thread.values()) if self.per_thread else usual
        is_choosing = self.kinds or self.senders or self.exclude_senders
        return min(most * SPARE if is_choosing else most, MAX_PER_THREAD)


ALL = MessageFilter()


def _fits(sender_id: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(sender_id, pattern) for pattern in patterns)
