"""Delays between attempts: they grow by a factor, up to a maximum."""

from __future__ import annotations

from roundelay.network.backoff import Backoff


def test_the_delay_grows_by_its_factor_up_to_the_maximum() -> None:
    doubled, sixfold = Backoff(0.5, 3.0), Backoff(5.0, 3600.0, factor=6.0)
    assert [doubled.delay_s(failures) for failures in range(1, 6)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert [sixfold.delay_s(failures) for failures in range(1, 6)] == [5.0, 30.0, 180.0, 1080.0, 3600.0]


def test_a_loop_that_never_ends_its_failures_keeps_the_maximum() -> None:
    assert Backoff(0.5, 60.0).delay_s(100_000) == 60.0
