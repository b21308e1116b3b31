"""Tests of the repeated-error log: a repeated failure is logged once, and so is its end."""

from __future__ import annotations

import pytest

from roundelay.network.errors import LedgerError
from roundelay.network.hub import repeated_errors
from roundelay.network.hub.repeated_errors import RepeatedErrorLog


class Place:
    """A repeated-error log with a manual clock."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.outage = RepeatedErrorLog("it fails", "it is back", lambda: self.now_s)


def test_each_reason_is_said_once_and_the_end_with_how_long_and_how_often(caplog: pytest.LogCaptureFixture) -> None:
    place = Place()
    for number in range(30):
        place.outage.record(LedgerError("no room" if number % 2 else "no right"))
        place.now_s += 0.5
    place.outage.record_success()
    assert caplog.messages == ["it fails: no right", "it fails: no room", "it is back, after 15.0 s; failures: 30"]
    assert not any(record.exc_info for record in caplog.records)


def test_what_stays_is_said_again_each_minute(caplog: pytest.LogCaptureFixture) -> None:
    place = Place()
    for _ in range(150):
        place.outage.record(LedgerError("no room"))
        place.now_s += 1
    assert caplog.messages == [
        "it fails: no room",
        "it fails, for 60 s and 61 times so far: no room",
        "it fails, for 120 s and 121 times so far: no room",
    ]


def test_it_is_over_when_it_is_for_everybody_and_then_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    place = Place()
    place.outage.record_success("ann")
    for who in ("ann", "bob", "ann"):
        place.outage.record(LedgerError("no room"), who)
    place.outage.record_success("ann")
    assert place.outage.is_failing
    place.outage.record_success("bob")
    assert not place.outage.is_failing
    place.outage.record(LedgerError("no room"), "ann")
    assert caplog.messages == [
        "it fails: no room",
        "it is back, after 0.0 s; failures: 3",
        "it fails: no room",
    ]


def test_it_is_over_for_others_when_somebody_for_whom_it_failed_does_not_come_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = Place()
    for who in ("gone", "ann"):
        place.outage.record(LedgerError("no room"), who)
    place.outage.record_success("ann")
    place.now_s += repeated_errors.REPEAT_AFTER_S
    place.outage.record_success("bob")
    assert place.outage.is_failing
    place.now_s += 1
    place.outage.record_success("bob")
    assert not place.outage.is_failing
    assert caplog.messages == ["it fails: no room", "it is back, after 61.0 s; failures: 2"]


def test_reasons_without_end_are_not_told_apart_without_end(caplog: pytest.LogCaptureFixture) -> None:
    place = Place()
    for number in range(1000):
        place.outage.record(LedgerError(f"page {number} is wrong"))
    assert len(caplog.messages) == repeated_errors.MAX_REASONS + 1


def test_a_defect_is_said_with_its_traceback_and_the_same_reason_has_one_id_to_quote(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ids = iter("abc")
    reading = RepeatedErrorLog("it fails", "it is back", lambda: 0.0, lambda: next(ids))
    assert [reading.record(LedgerError(reason)) for reason in ("one", "two", "one")] == ["a", "b", "a"]
    reading.record(KeyError("x"), is_defect=True)
    assert [bool(record.exc_info) for record in caplog.records] == [False, False, True]
    assert [vars(record)["quote"] for record in caplog.records] == ["a", "b", "c"]
