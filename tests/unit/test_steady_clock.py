"""Tests of the hub's clock: it never goes back, and soon matches the wall clock again."""

from __future__ import annotations

from roundelay.network.clock import SteadyClock


def test_a_jump_back_is_made_up_for_at_half_speed() -> None:
    now = 10_000
    clock = SteadyClock(lambda: now)
    assert clock() == 10_000
    now = 4_000
    assert clock() == 10_000
    now = 8_000
    assert clock() == 12_000
    now = 16_001
    assert clock() == 16_001


def test_who_waited_for_a_turn_and_goes_on_from_anothers_time_is_not_ahead() -> None:
    now = 10_000
    clock = SteadyClock(lambda: now)
    now = 50_000  # the clock was not used while another node was the leader
    clock.not_before(49_999)
    assert clock() == 50_000
    clock.not_before(60_000)
    assert clock() == 60_000
    now = 52_000
    assert clock() == 61_000
