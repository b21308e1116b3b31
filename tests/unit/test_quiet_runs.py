"""Random runs: a conversation is never quiet while an item is open, and always quiet at the end."""

from __future__ import annotations

import pytest

from tests.support.counts import Note
from tests.support.quiet_runs import QuietRun

RUNS, STEPS = 40, 40
FULL_SHARDS, FULL_RUNS = 20, 5000


def play(seed: int, steps: int = STEPS) -> int:
    """Play one run, and return the number of open conversations, summed over all steps."""
    run = QuietRun(seed)
    try:
        total = 0
        for _ in range(steps):
            run.step()
            total += run.check()
        run.drain()
        return total
    finally:
        run.hub.close()


def test_random_run_is_quiet_only_when_nothing_is_open(note: Note) -> None:
    total = sum(play(seed) for seed in range(RUNS))
    assert total > 10 * RUNS
    note(runs=RUNS, open_conversations=total)


@pytest.mark.full
@pytest.mark.parametrize("shard", range(FULL_SHARDS))
def test_100000_random_runs_are_quiet_only_when_nothing_is_open(note: Note, shard: int) -> None:
    first = 1_000_000 + shard * FULL_RUNS
    total = sum(play(seed) for seed in range(first, first + FULL_RUNS))
    note(runs=FULL_RUNS, open_conversations=total)
