"""What each participant may store a day, and how much of that it has: messages, and bytes of all that is kept for it. Part of step 6. Pure.

A day is one of UTC, by the stamp of the entry. What is stored counts, what is refused does not. The sum is a `Bucket`, in memory, so that a
message costs no row more; it is kept (`DayStored`) in the transaction of whatever brings it over a step, so that a restart forgets less than a
step: nothing of a small quota, a ten-thousandth of a large one.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from .config import Limits, Quota
from .errors import BudgetExhausted
from .state import State
from .tables import DAY_MS, Bucket, DayStored, Put

ROW_BYTES = 256
"""What each message, record, event and result counts beside its JSON: about what its ids, its head and the indices take in the database."""
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
        self._limits = {name: getattr(limits, name) for name in Quota.model_fields}
        self.default = _allow(self._limits)
        self.own = {agent_id: _allow({**self._limits, **_given(quota)}) for agent_id, quota in own.items()}

    def of(self, agent_id: str) -> Allowance:
        return self.own.get(agent_id, self.default)

    def describe(self, agent_id: str) -> dict[str, int | None]:
        """The numbers of one participant by the limits' names; None where it has no limit."""
        allowance = self.of(agent_id)
        numbers = {name: getattr(allowance, name) for name in self._limits}
        return {name: None if number == UNLIMITED else number for name, number in numbers.items()}


def _given(quota: Quota) -> dict[str, int]:
    given = {name: getattr(quota, name) for name in Quota.model_fields}
    return {name: UNLIMITED if it == "unlimited" else it for name, it in given.items() if it is not None}


def _allow(numbers: Mapping[str, int]) -> Allowance:
    step_bytes = min(MAX_STEP_BYTES, max(1, numbers["bytes_per_day"] // STEPS))
    step_messages = min(MAX_STEP_MESSAGES, max(1, numbers["messages_per_day"] // STEPS))
    return Allowance(**numbers, step_bytes=step_bytes, step_messages=step_messages)


def read_bucket(state: State, agent_id: str) -> Bucket:
    """What a participant does just now; after a start, with what was kept of its day."""
    bucket: Bucket | None = state.get("bucket", agent_id)
    if bucket is not None:
        return bucket
    kept: DayStored | None = state.get("stored", agent_id)
    return Bucket(0.0, 0.0, kept.day, kept.bytes, kept.messages) if kept is not None else _EMPTY


_EMPTY = Bucket()


def count_stored(
    quotas: Quotas, agent_id: str, bucket: Bucket, stamp: int, size: int, messages: int, is_bounded: bool = True
) -> list[Put]:
    """Count what is about to be stored for a participant. Raises `BudgetExhausted` when it is more than it may: then nothing is counted."""
    allowed, day = quotas.own.get(agent_id, quotas.default), stamp // DAY_MS
    bytes_now, messages_now = size, messages
    if bucket.day == day:
        bytes_now += bucket.bytes
        messages_now += bucket.messages
    if (bytes_now > allowed.bytes_per_day or messages_now > allowed.messages_per_day) and is_bounded:
        raise _refuse(agent_id, allowed, stamp, (bytes_now - size, size, messages_now - messages))
    put = Put("bucket", agent_id, Bucket(bucket.sends, bucket.roots, day, bytes_now, messages_now))
    if bytes_now % allowed.step_bytes < size or messages_now % allowed.step_messages < messages:  # over a step
        is_near = bytes_now >= NEAR * allowed.bytes_per_day or messages_now >= NEAR * allowed.messages_per_day
        return [put, Put("stored", agent_id, DayStored(day, bytes_now, messages_now, is_near))]
    return [put]


def _refuse(agent_id: str, allowed: Allowance, stamp: int, counts: tuple[int, int, int]) -> BudgetExhausted:
    size, more, messages = counts
    wait_ms = DAY_MS - stamp % DAY_MS
    minutes = -(-wait_ms // 60_000)
    if size + more > allowed.bytes_per_day:
        name, most, has = "bytes_per_day", allowed.bytes_per_day, f"{size} bytes, and this needs {more}, of the"
    else:
        name, most, has = "messages_per_day", allowed.messages_per_day, f"{messages} messages of the"
    return BudgetExhausted(
        f"{agent_id} has stored {has} {most} that {name} allows it a day (UTC); the next day begins in {minutes // 60} h {minutes % 60} min. "
        f"An operator allows more: quotas.{agent_id}.{name} in the node's file.",
        wait_ms,
    )


def stored_today(state: State, agent_id: str) -> tuple[int, int]:
    """The bytes and messages that a participant has stored on the day of the hub's last entry."""
    bucket = read_bucket(state, agent_id)
    return (bucket.bytes, bucket.messages) if bucket.day == state.stamp // DAY_MS else (0, 0)
