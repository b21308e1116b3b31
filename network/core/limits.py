"""Rates and quotas of participants, checked in step 6. A rate limits how fast a participant may send. A quota limits
how much the hub stores for a participant per day. Pure.

Rates and quotas are counted in memory, in the participant's `Bucket`, so counting a message adds no row. A day is a UTC
day of the entry's timestamp. Only stored messages count against the quota, not refused messages. Whenever the day's sum
passes a step, the sum is stored (`DayStored`) in the same transaction. So a restart loses less than one step. The size
of a step is a ten-thousandth of the quota, but at least 1 byte or message, and at most 1 MiB or 256 messages.
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
    """Count one event at the time ``now`` (ms) against a rate of ``most`` events per window. A burst of one window is
    allowed.

    ``arrival`` is the result of the previous call, or 0.0 for the first event. The result is the time at which the next
    event would be due at exactly the allowed rate (generic cell rate algorithm). Beyond the rate, raise `RateLimited`
    with the time to wait, without counting the event. If ``most`` is 0, the rate is unlimited.
    """
    if most <= 0:
        return 0.0
    # An idle sender saves up at most one window. Idle time before ``now`` grants no further credit.
    due = arrival if arrival > now else now
    if due - now > window_ms:
        raise rate_limited_error(most, what, int(due - now - window_ms) + 1, window_ms)
    return due + window_ms / most


def rate_limited_error(most: int, what: str, wait_ms: int, window_ms: float = 1000.0) -> RateLimited:
    """Return the error for an exceeded rate. ``what`` names the limit in the error text."""
    per = "second" if window_ms == 1000.0 else "minute"
    return RateLimited(f"More than {most} {what} per {per}. Send the same again in {wait_ms} ms.", wait_ms)


def next_rates(limits: Limits, bucket: Bucket, stamp: int, *, is_root: bool) -> Rates:
    """Count one entry of a sender against its rate. If ``is_root``, also count it as a message without a cause. Return
    the new rates. Raise `RateLimited` if a rate is exceeded."""
    sends = next_arrival(bucket.sends, stamp, limits.sends_per_s, SENDS)
    return sends, next_arrival(bucket.roots, stamp, limits.root_messages_per_s, ROOTS) if is_root else bucket.roots


def count_entry(limits: Limits, state: State, agent_id: str) -> TableWrite:
    """Count one entry that is not a message against its sender's rate. Raise `RateLimited` if the rate is exceeded."""
    bucket = state.bucket(agent_id)
    return TableWrite("bucket", agent_id, bucket.at_rates(next_rates(limits, bucket, state.stamp, is_root=False)))


def next_arrival_or_none(arrival: float, now: int, most: int, window_ms: float = 1000.0) -> float | None:
    """Count one event like `next_arrival`, but return None instead of raising `RateLimited`. ``most`` must be
    positive."""
    due = arrival if arrival > now else now
    return due + window_ms / most if due - now <= window_ms else None


ROW_BYTES = 256
"""Number of bytes charged for each message, record, event and result in addition to its JSON. This is roughly the size
of the ids, the head and the index entries in the database."""
MAX_STEP_BYTES, MAX_STEP_MESSAGES = 1 << 20, 256
STEPS = 10_000
NEAR = 0.9
"""Used share of a quota from which on a participant counts as near its limit."""
UNLIMITED = 1 << 62


class Allowance(Struct, frozen=True):
    """Daily amounts that one participant may store, and the steps at which the sums are stored."""

    bytes_per_day: int
    messages_per_day: int
    max_created_channels: int
    step_bytes: int
    step_messages: int


class Quotas:
    """Allowances of all participants: ``default`` applies to most participants, and ``own`` contains individual
    allowances by participant id."""

    def __init__(self, limits: Limits, own: Mapping[str, Quota]) -> None:
        self._names = tuple(Quota.model_fields)
        numbers = {name: getattr(limits, name) for name in self._names}
        self.default = _allow(numbers)
        self.own = {agent_id: _allow(numbers | self._given(quota)) for agent_id, quota in own.items()}

    def of(self, agent_id: str) -> Allowance:
        return self.own.get(agent_id, self.default)

    def describe(self, agent_id: str) -> dict[str, int | None]:
        """Map the name of each limit to its value for one participant. None stands for unlimited."""
        numbers = {name: getattr(self.of(agent_id), name) for name in self._names}
        return {name: None if number == UNLIMITED else number for name, number in numbers.items()}

    def _given(self, quota: Quota) -> dict[str, int]:
        values = {name: getattr(quota, name) for name in self._names}
        return {
            name: UNLIMITED if value == "unlimited" else value for name, value in values.items() if value is not None
        }


def _allow(numbers: Mapping[str, int]) -> Allowance:
    step_bytes = min(MAX_STEP_BYTES, max(1, numbers["bytes_per_day"] // STEPS))
    step_messages = min(MAX_STEP_MESSAGES, max(1, numbers["messages_per_day"] // STEPS))
    return Allowance(**numbers, step_bytes=step_bytes, step_messages=step_messages)


# Bytes stored for one participant on one day. Messages are counted in the same way:
#
#   0 . . . . . | step . . . . . | step . . . . . | ...      bytes_per_day
#                     ^ bytes     ^ next_bytes
#
# If a message stays below `next_bytes` on the same day, only `bytes` changes. A message that reaches `next_bytes` is
# checked against the quota, and the sum is stored. Before the first message of a day, and after a start, `next_bytes`
# belongs to another day or is 0.


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
    """Count an amount that is about to be stored for a participant, and set the participant's rates. Beyond the quota,
    raise `BudgetExhausted` without counting the amount.

    If the sums stay below the bucket's ``next_bytes`` and ``next_messages`` on the same day, the result contains only
    the new sums. So callers skip this function for most messages.
    """
    allowed, day = quotas.of(agent_id), stamp // DAY_MS
    # A new UTC day starts at 0, because no timer resets the counters.
    stored_bytes, stored_messages = (bucket.bytes, bucket.messages) if bucket.day == day else (0, 0)
    bytes_now, messages_now = stored_bytes + size, stored_messages + messages
    if (bytes_now > allowed.bytes_per_day or messages_now > allowed.messages_per_day) and is_bounded:
        raise _refuse(agent_id, allowed, stamp, (stored_bytes, size, stored_messages))
    # Keep both thresholds within the quota, so that the message that would exceed the quota reaches this function.
    next_bytes = min((bytes_now // allowed.step_bytes + 1) * allowed.step_bytes, allowed.bytes_per_day + 1)
    next_messages = min(
        (messages_now // allowed.step_messages + 1) * allowed.step_messages, allowed.messages_per_day + 1
    )
    now = Bucket(*rates, day, bytes_now, messages_now, next_bytes, next_messages, bucket.answer_count)
    write = TableWrite("bucket", agent_id, now)
    # A step was passed, so store the sum.
    if bytes_now % allowed.step_bytes < size or messages_now % allowed.step_messages < messages:
        is_near = bytes_now >= NEAR * allowed.bytes_per_day or messages_now >= NEAR * allowed.messages_per_day
        return [write, TableWrite("stored", agent_id, DayStored(day, bytes_now, messages_now, is_near))]
    return [write]


def _refuse(agent_id: str, allowed: Allowance, stamp: int, counts: tuple[int, int, int]) -> BudgetExhausted:
    size, more, messages = counts
    wait_ms = DAY_MS - stamp % DAY_MS
    hours, minutes = divmod(-(-wait_ms // 60_000), 60)
    if size + more > allowed.bytes_per_day:
        name, most, has = "bytes_per_day", allowed.bytes_per_day, f"{size} bytes, and this needs {more}, of the"
    else:
        name, most, has = "messages_per_day", allowed.messages_per_day, f"{messages} messages of the"
    return BudgetExhausted(
        f"{agent_id} has stored {has} {most} that {name} allows per day (UTC). The next day begins in {hours} h "
        f"{minutes} min. An operator can raise quotas.{agent_id}.{name} in the node's file.",
        wait_ms,
    )


def stored_today(state: State, agent_id: str) -> tuple[int, int]:
    """Return the number of bytes and messages stored for a participant on the day of the hub's newest entry."""
    bucket = state.bucket(agent_id)
    return (bucket.bytes, bucket.messages) if bucket.day == state.stamp // DAY_MS else (0, 0)
