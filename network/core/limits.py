"""What a participant may do: how fast (rates), and how much of it is kept a day (quotas). Pure; part of step 6.

Both are counted in the participant's `Bucket`, in memory, so that a message costs no row more. A day is one of UTC, by
the stamp of the entry; what is stored counts, what is refused does not. The day's sum is kept (`DayStored`) in the
transaction of whatever brings it over a step, so that a restart forgets less than a step: nothing of a small quota, a
ten-thousandth of a large one.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from roundelay.network.config import Limits, Quota
from roundelay.network.errors import BudgetExhausted, RateLimited
from roundelay.network.units import DAY_MS

from .buckets import Bucket, Rates
from .state import State
from .tables import DayStored, TableWrite

SENDS = "sends (sends_per_s)"
ROOTS = "messages without a cause (root_messages_per_s)"


def next_arrival(arrival: float, now: int, most: int, what: str, window_ms: float = 1000.0) -> float:
    """Count one event against a rate of ``most`` in a window, with a burst of one window's worth, at ``now`` (ms).

    ``arrival`` is what the last call gave (0.0 at first): when the next event would be due at exactly the rate (GCRA).
    Raises `RateLimited` with the time to wait; then nothing is counted. ``most`` 0 means no limit.
    """
    if most <= 0:
        return 0.0
    due = arrival if arrival > now else now
    if due - now > window_ms:
        raise rate_limited_error(most, what, int(due - now - window_ms) + 1, window_ms)
    return due + window_ms / most


def rate_limited_error(most: int, what: str, wait_ms: int, window_ms: float = 1000.0) -> RateLimited:
    """What is said of a rate that is exceeded; ``what`` names its limit."""
    per = "second" if window_ms == 1000.0 else "minute"
    return RateLimited(f"More than {most} {what} a {per}; send the same again in {wait_ms} ms.", wait_ms)


def next_rates(limits: Limits, bucket: Bucket, stamp: int, *, is_root: bool) -> Rates:
    """When a sender's next entry, and its next message without a cause, would be due at exactly their rates, after
    one more of the first, and of the second if this is one. Raises `RateLimited`."""
    sends = next_arrival(bucket.sends, stamp, limits.sends_per_s, SENDS)
    return sends, next_arrival(bucket.roots, stamp, limits.root_messages_per_s, ROOTS) if is_root else bucket.roots


def count_entry(limits: Limits, state: State, agent_id: str) -> TableWrite:
    """Count one entry that is no message against its sender's rate. Raises `RateLimited`."""
    bucket = state.bucket(agent_id)
    return TableWrite("bucket", agent_id, bucket.at_rates(next_rates(limits, bucket, state.stamp, is_root=False)))


def next_arrival_or_none(arrival: float, now: int, most: int, window_ms: float = 1000.0) -> float | None:
    """As `next_arrival`, for a rate that there is; None where that refuses."""
    due = arrival if arrival > now else now
    return due + window_ms / most if due - now <= window_ms else None


ROW_BYTES = 256
"""What each message, record, event and result counts beside its JSON: about what its ids, its head and the indices take
in the database."""
MAX_STEP_BYTES, MAX_STEP_MESSAGES = 1 << 20, 256
STEPS = 10_000
NEAR = 0.9
"""The share of a quota from which on a participant is near its end."""
UNLIMITED = 1 << 62


class Allowance(Struct, frozen=True):
    """What one participant may store: the limits of all, or its own."""

    bytes_per_day: int
    messages_per_day: int
    max_created_channels: int
    step_bytes: int
    step_messages: int


class Quotas:
    """What everybody may store, ``default``, and who may store more or less."""

    def __init__(self, limits: Limits, own: Mapping[str, Quota]) -> None:
        self._names = tuple(Quota.model_fields)
        numbers = {name: getattr(limits, name) for name in self._names}
        self.default = _allow(numbers)
        self.own = {agent_id: _allow(numbers | self._given(quota)) for agent_id, quota in own.items()}

    def of(self, agent_id: str) -> Allowance:
        return self.own.get(agent_id, self.default)

    def describe(self, agent_id: str) -> dict[str, int | None]:
        """The numbers of one participant by the limits' names; None where it has no limit."""
        numbers = {name: getattr(self.of(agent_id), name) for name in self._names}
        return {name: None if number == UNLIMITED else number for name, number in numbers.items()}

    def _given(self, quota: Quota) -> dict[str, int]:
        given = {name: getattr(quota, name) for name in self._names}
        return {name: UNLIMITED if it == "unlimited" else it for name, it in given.items() if it is not None}


def _allow(numbers: Mapping[str, int]) -> Allowance:
    step_bytes = min(MAX_STEP_BYTES, max(1, numbers["bytes_per_day"] // STEPS))
    step_messages = min(MAX_STEP_MESSAGES, max(1, numbers["messages_per_day"] // STEPS))
    return Allowance(**numbers, step_bytes=step_bytes, step_messages=step_messages)


# The bytes of one participant's day; its messages are counted in the same way beside them:
#
#   0 . . . . . | step . . . . . | step . . . . . | ...      bytes_per_day
#                     ^ bytes     ^ next_bytes
#
# A message that stays below next_bytes, on the same day, moves `bytes` alone; one that reaches it is asked about, and
# what was stored by then is kept. Before the first message of a day, and after a start, next_bytes is of another day,
# or 0.


def count_stored(
    quotas: Quotas,
    agent_id: str,
    bucket: Bucket,
    rates: Rates,
    stamp: int,
    size: int,
    messages: int,
    is_bounded: bool = True,
) -> list[TableWrite]:
    """Count what is about to be stored for a participant, and its rates on to these. Raises `BudgetExhausted` when
    it is more than it may: then nothing is counted.

    Below the bucket's ``next_bytes`` and ``next_messages`` of the same day it comes to the new sums alone, so that
    who counts messages need not ask.
    """
    allowed, day = quotas.of(agent_id), stamp // DAY_MS
    has, had = (bucket.bytes, bucket.messages) if bucket.day == day else (0, 0)
    bytes_now, messages_now = has + size, had + messages
    if (bytes_now > allowed.bytes_per_day or messages_now > allowed.messages_per_day) and is_bounded:
        raise _refuse(agent_id, allowed, stamp, (has, size, had))
    next_bytes = min((bytes_now // allowed.step_bytes + 1) * allowed.step_bytes, allowed.bytes_per_day + 1)
    next_messages = min(
        (messages_now // allowed.step_messages + 1) * allowed.step_messages, allowed.messages_per_day + 1
    )
    now = Bucket(*rates, day, bytes_now, messages_now, next_bytes, next_messages, bucket.answer_count)
    put = TableWrite("bucket", agent_id, now)
    if bytes_now % allowed.step_bytes < size or messages_now % allowed.step_messages < messages:  # over a step
        is_near = bytes_now >= NEAR * allowed.bytes_per_day or messages_now >= NEAR * allowed.messages_per_day
        return [put, TableWrite("stored", agent_id, DayStored(day, bytes_now, messages_now, is_near))]
    return [put]


def _refuse(agent_id: str, allowed: Allowance, stamp: int, counts: tuple[int, int, int]) -> BudgetExhausted:
    size, more, messages = counts
    wait_ms = DAY_MS - stamp % DAY_MS
    hours, minutes = divmod(-(-wait_ms // 60_000), 60)
    if size + more > allowed.bytes_per_day:
        name, most, has = "bytes_per_day", allowed.bytes_per_day, f"{size} bytes, and this needs {more}, of the"
    else:
        name, most, has = "messages_per_day", allowed.messages_per_day, f"{messages} messages of the"
    return BudgetExhausted(
        f"{agent_id} has stored {has} {most} that {name} allows it a day (UTC); the next day begins in {hours} h "
        f"{minutes} min. An operator allows more: quotas.{agent_id}.{name} in the node's file.",
        wait_ms,
    )


def stored_today(state: State, agent_id: str) -> tuple[int, int]:
    """The bytes and messages that a participant has stored on the day of the hub's last entry."""
    bucket = state.bucket(agent_id)
    return (bucket.bytes, bucket.messages) if bucket.day == state.stamp // DAY_MS else (0, 0)
