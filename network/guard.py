"""Bounds on what a participant may send: addresses, rates, the budgets of a root. Pure functions; the caller keeps the numbers."""

from __future__ import annotations

from functools import lru_cache

from .errors import InvalidFrame, LoopStopped, RateLimited
from .frames import is_id
from .tables import RootBudget

SENDS = "sends (sends_per_s)"
_KINDS = ("agent", "channel", "mod")


@lru_cache(maxsize=65536)
def parse_address(to: str) -> tuple[str, str]:
    """Split an address into its kind (``agent``, ``broadcast``, ``channel``, ``mod``) and name. Raises `InvalidFrame`."""
    if to == "broadcast":
        return "broadcast", ""
    kind, colon, name = to.partition(":")
    if not colon or kind not in _KINDS or not is_id(name):
        shown = to if len(to) <= 80 else to[:80] + "…"
        raise InvalidFrame(
            f"{shown!r} is no address; write agent:ID, channel:NAME, mod:ID or broadcast, ids in lower case letters, digits, '.', '_', '-'."
        )
    return kind, name


def next_arrival(arrival: float, now: int, most: int, what: str, window_ms: float = 1000.0) -> float:
    """Count one event against a rate of ``most`` in a window, with a burst of one window's worth, at ``now`` (ms).

    ``arrival`` is what the last call gave (0.0 at first): when the next event would be due at exactly the rate (GCRA). Raises
    `RateLimited` with the time to wait; then nothing is counted. ``most`` 0 means no limit.
    """
    if most <= 0:
        return 0.0
    due = due_next(arrival, now, most, window_ms)
    if due is None:
        raise beyond_rate(most, what, int(arrival - now - window_ms) + 1, window_ms)
    return due


def beyond_rate(most: int, what: str, wait_ms: int, window_ms: float = 1000.0) -> RateLimited:
    """What is said of a rate that is exceeded; ``what`` names its limit."""
    per = "second" if window_ms == 1000.0 else "minute"
    return RateLimited(f"More than {most} {what} a {per}; send the same again in {wait_ms} ms.", wait_ms)


def due_next(arrival: float, now: int, most: int, window_ms: float = 1000.0) -> float | None:
    """As `next_arrival`, for a rate that there is; None where that refuses."""
    due = arrival if arrival > now else now
    return due + window_ms / most if due - now <= window_ms else None


def check_root(budget: RootBudget, root: int, hops: int, max_hops: int, max_messages: int) -> None:
    """Refuse a message that would be one too many, or too far, from its root. Raises `LoopStopped`."""
    allowed_messages = max_messages + budget.extra_messages
    allowed_hops = max_hops + budget.extra_hops
    if budget.messages >= allowed_messages:
        raise LoopStopped(
            f"The conversation from message {root} has used its {allowed_messages} messages; a person in it, or an operator, "
            f"goes on with network.resume_root."
        )
    if hops > allowed_hops:
        raise LoopStopped(
            f"The conversation from message {root} has gone {allowed_hops} hops; a person in it, or an operator, goes on with "
            f"network.resume_root."
        )
