"""Tests of the mod `timers`: each due time fires once, time zones with daylight saving work, and missed times run
late or are skipped.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

pytest.importorskip("cronsim")
import itertools

from roundelay.agents.models.scripted import ScriptedModel, send
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.app import Network
from roundelay.mods import timers as timers_module
from roundelay.mods.timers import next_time
from roundelay.network.errors import InvalidArguments, UnknownRecipient
from roundelay.simulation.network import START_MS, Simulation, simulate

MODS = ["channels", "timers"]
HOUR_MS = 3_600_000
ZONES = ("Europe/Berlin", "America/New_York", "Australia/Sydney", "Australia/Lord_Howe")


def texts(simulation: Simulation) -> list[Any]:
    return [message.content for message in simulation.messages if message.sender_id == "timers"]


def list_times(cron: str, zone: ZoneInfo, days: int) -> list[datetime]:
    """Return the times of a year from 2026-01-01 in a zone."""
    now = round(datetime(2026, 1, 1, tzinfo=zone).timestamp() * 1000) - 1
    end, found = now + days * 86_400_000, []
    while (now := next_time(cron, zone, now)) < end:
        found.append(datetime.fromtimestamp(now / 1000, zone))
    return found


@pytest.mark.parametrize("name", ZONES)
def test_daily_timer_comes_once_a_day_through_both_clock_changes(name: str) -> None:
    zone = ZoneInfo(name)
    offsets = {datetime(2026, month, 15, tzinfo=zone).utcoffset() for month in range(1, 13)}
    assert len(offsets) == 2
    for hour, minute in ((8, 0), (2, 15), (1, 45)):
        times = list_times(f"{minute} {hour} * * *", zone, 364)
        per_day = Counter(time.date() for time in times)
        assert set(per_day.values()) == {1}
        assert len(per_day) == 364
        on_time = [time for time in times if (time.hour, time.minute) == (hour, minute)]
        # In spring, the time may not exist. The timer then fires right after the change.
        assert len(times) - len(on_time) <= (hour == 2)
        assert all(time.hour in (hour, hour + 1) for time in times)


@pytest.mark.parametrize(("name", "spring", "autumn"), [
    ("Europe/Berlin", "2026-03-29T03:00+02:00", "2026-10-25T02:30+02:00"),
    ("America/New_York", "2026-03-08T03:00-04:00", "2026-11-01T01:30-04:00"),
    ("Australia/Sydney", "2026-10-04T03:00+11:00", "2026-04-05T02:30+11:00"),
    ("Australia/Lord_Howe", "2026-10-04T02:30+11:00", "2026-04-05T01:45+11:00"),
])  # fmt: skip
def test_skipped_time_comes_after_the_change_and_a_double_one_once(name: str, spring: str, autumn: str) -> None:
    zone, gap, double = ZoneInfo(name), datetime.fromisoformat(spring), datetime.fromisoformat(autumn)
    minute = 15 if name.endswith("Howe") else 30
    assert gap.timestamp() in {time.timestamp() for time in list_times(f"{minute} 2 * * *", zone, 364)}
    found = list_times(f"{double.minute} {double.hour} * * *", zone, 364)
    # Compare timestamps: a local time that occurs twice never equals a time of another zone.
    assert [time.timestamp() for time in found if time.date() == double.date()] == [double.timestamp()]


CRONS = ("30 2 * * *", "0 3 * * *", "*/7 * * * *", "5 */2 * * *", "*/20 2 * * *", "10,50 1,2 * * *", "30 2 * * SUN")


@pytest.mark.parametrize(("name", "changes"), [
    ("Europe/Berlin", ("2026-03-29T03:00+02:00", "2026-10-25T02:00+01:00")),
    ("America/New_York", ("2026-03-08T03:00-04:00", "2026-11-01T01:00-05:00")),
    ("Australia/Sydney", ("2026-10-04T03:00+11:00", "2026-04-05T02:00+10:00")),
    ("Australia/Lord_Howe", ("2026-10-04T02:30+11:00", "2026-04-05T01:30+10:30")),
])  # fmt: skip
def test_next_time_near_a_clock_change_is_the_same_until_it_comes(name: str, changes: tuple[str, str]) -> None:
    zone = ZoneInfo(name)
    for change, cron in itertools.product(changes, CRONS):
        moment, due = round(datetime.fromisoformat(change).timestamp() * 1000), 0
        for now in range(moment - 3 * 3_600_000, moment + 3 * 3_600_000, 10 * 60_000):
            earlier, due = due, next_time(cron, zone, now)
            assert due > now
            assert due == earlier or (earlier <= now and due > earlier), (
                cron,
                datetime.fromtimestamp(now / 1000, zone),
            )


def test_hourly_timer_comes_every_real_hour() -> None:
    times = list_times("0 * * * *", ZoneInfo("Europe/Berlin"), 364)
    stamps = [time.timestamp() for time in times]
    assert {later - earlier for earlier, later in itertools.pairwise(stamps)} == {3600.0}


def test_reminder_comes_once_and_keeps_its_conversation_open_until_then() -> None:
    async def main(simulation: Simulation) -> None:
        ann, bob = [(await simulation.join_person(name)).client for name in ("ann", "bob")]
        asked = await ann.send_text("bob", "Call me in five minutes.")
        await bob.call("timers.create", {"text": "call ann", "in_minutes": 5, "cause": asked.seq})
        assert simulation.hub is not None
        assert simulation.hub.state.count("open_item") == 1
        await asyncio.sleep(290)
        assert texts(simulation) == []
        await asyncio.sleep(3600)
        assert texts(simulation) == ["Reminder 1: call ann"]
        assert simulation.messages[-1].root == asked.seq
        assert simulation.hub.state.count("open_item") == simulation.hub.state.count("due") == 0
        assert (await bob.call("timers.list", {}))["timers"] == []

    simulate(main, mods=MODS)


def test_routine_wakes_an_agent_every_day_in_a_thread_of_its_own() -> None:
    async def main(simulation: Simulation) -> None:
        mia = (await simulation.join_person("mia")).client
        model = ScriptedModel(lambda request: send("mia", "Here is the report.") if request.turn == 1 else "")
        await simulation.start_agent(lambda: SimpleAgentRunner("bob", model=model, instruction="Report."))
        args = {"text": "Write the report.", "cron": "30 1 * * *", "timezone": "Europe/Berlin", "to": "bob"}
        made = await mia.call("timers.create", args)
        assert made["local_time"] == "2026-01-01T01:30+01:00"  # the simulation starts at 01:00 in Berlin
        await asyncio.sleep(2000)
        [listed] = (await mia.call("timers.list", {}))["timers"]
        assert listed["local_time"] == "2026-01-02T01:30+01:00"
        reports = [message for message in simulation.messages if message.sender_id == "bob"]
        [routine] = [message for message in simulation.messages if message.sender_id == "timers"]
        assert routine.text == "Routine 1 from mia: Write the report."
        assert [(it.text, it.cause) for it in reports] == [("Here is the report.", routine.seq)]
        assert routine.thread_id == "mod:timers~bob:timer-1"

    simulate(main, mods=MODS)


@pytest.mark.parametrize("missed", ["run", "skip"])
def test_missed_times_are_run_once_late_or_skipped(missed: str) -> None:
    async def main(simulation: Simulation) -> None:
        ann = (await simulation.join_person("ann")).client
        await ann.call("timers.create", {"text": "tick", "cron": "*/10 * * * *", "missed": missed})
        await ann.call("timers.create", {"text": "once", "at": "2026-01-01T00:15", "missed": missed})
        await asyncio.sleep(605)
        await simulation.kill_hub()
        await asyncio.sleep(3000)
        await simulation.restart_hub()
        await asyncio.sleep(5)
        late = ["Routine 1 (late: it was due 40 min ago): tick", "Reminder 2 (late: it was due 45 min ago): once"]
        assert sorted(texts(simulation)) == sorted(["Routine 1: tick", *(late if missed == "run" else [])])
        await asyncio.sleep(600)
        assert texts(simulation)[-1] == "Routine 1: tick"
        assert [it["timer"] for it in (await ann.call("timers.list", {}))["timers"]] == [1]

    simulate(main, mods=MODS)


def test_timers_fire_once_across_kills_of_the_hub() -> None:
    async def main(simulation: Simulation) -> None:
        ann = (await simulation.join_person("ann")).client
        chance = simulation.chance("kills")
        for number in range(60):
            await ann.call("timers.create", {"text": f"t{number}", "in_minutes": chance.uniform(0.1, 1)})
        for _ in range(15):
            await asyncio.sleep(chance.uniform(0.5, 6))
            await simulation.kill_hub()
            await asyncio.sleep(chance.uniform(0, 1))
            await simulation.restart_hub()
        await asyncio.sleep(60)
        assert Counter(text.partition(": ")[2] for text in texts(simulation)) == Counter(f"t{it}" for it in range(60))

    simulate(main, mods=MODS, seed=5)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_timers_fire_once_while_the_clock_jumps(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    ahead_ms, read = [0], Simulation.clock
    monkeypatch.setattr(Simulation, "clock", lambda self: read(self) + ahead_ms[0])

    async def main(simulation: Simulation) -> None:
        ann = (await simulation.join_person("ann")).client
        chance = simulation.chance("jumps")
        for number in range(40):
            await ann.call("timers.create", {"text": f"t{number}", "in_minutes": chance.uniform(0.1, 90)})
        await ann.call("timers.create", {"text": "tick", "cron": "*/5 * * * *"})
        for _ in range(20):
            ahead_ms[0] += chance.choice((-HOUR_MS, HOUR_MS, -5000, 60_000))
            await asyncio.sleep(chance.uniform(1, 300))
            if chance.random() < 0.3:
                await simulation.kill_hub()
                await simulation.restart_hub()
        await asyncio.sleep(4 * 3600)  # a clock that was set back is caught up at half speed
        sent = [it for it in simulation.messages if it.sender_id == "timers"]
        once = Counter(it.text.rpartition(": ")[2] for it in sent if not it.text.endswith("tick"))
        assert once == Counter(f"t{number}" for number in range(40))
        ticks = [it.sent_at // 300_000 for it in sent if it.text.endswith("tick")]
        assert ticks == sorted(set(ticks))
        assert len(ticks) > 20

    simulate(main, mods=MODS, seed=seed)


async def test_wrong_timers_are_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers_module, "MAX_TIMERS_BY_ONE", 2)
    async with Network.open(mods=MODS, clock=lambda: START_MS) as network:
        ann, bob, eve = [await network.join(name) for name in ("ann", "bob", "eve")]
        wrong: list[tuple[dict[str, Any], str]] = [
            ({}, "exactly one"),
            ({"in_minutes": 1, "cron": "0 8 * * *"}, "exactly one"),
            ({"in_minutes": -1}, "next five years"),
            ({"in_minutes": 1e12}, "next five years"),
            ({"at": "2025-12-31T23:59"}, "next five years"),
            ({"at": "9999-12-31T23:59:59-23:59"}, "next five years"),
            ({"at": "tomorrow"}, "is not a time"),
            ({"cron": "every day"}, "is not a cron expression"),
            ({"cron": "* * * * * *"}, "is not a cron expression"),
            ({"cron": "0 0 31 2 *"}, "is not a cron expression"),
            ({"cron": "0 8 * * *", "timezone": "../../etc/passwd"}, "no time zone"),
        ]
        for args, problem in wrong:
            with pytest.raises(InvalidArguments, match=problem):
                await ann.call("timers.create", {"text": "x", **args})
        with pytest.raises(UnknownRecipient):
            await ann.call("timers.create", {"text": "x", "in_minutes": 1, "to": "nobody"})
        for _ in range(2):
            await ann.call("timers.create", {"text": "x", "in_minutes": 1, "to": "bob"})
        with pytest.raises(InvalidArguments, match="Too many timers"):
            await ann.call("timers.create", {"text": "x", "in_minutes": 1})
        assert (await eve.call("timers.list", {}))["timers"] == []
        with pytest.raises(InvalidArguments, match="no timer 1 of yours"):
            await eve.call("timers.cancel", {"timer": 1})
        page = await bob.call("timers.list", {"limit": 1})
        assert (len(page["timers"]), page["has_more"], page["after"]) == (1, True, 1)
        await bob.call("timers.cancel", {"timer": 1})
        await ann.call("timers.create", {"text": "x", "at": "2026-01-01T01:01", "timezone": "Europe/Berlin"})
        assert network.hub.state.count("due") == 2


def test_routine_ends_when_its_recipient_was_removed() -> None:
    async def main(simulation: Simulation) -> None:
        ann = (await simulation.join_person("ann")).client
        await simulation.join_person("bob")
        await ann.call("timers.create", {"text": "x", "cron": "* * * * *", "to": "bob"})
        await ann.call("network.remove", {"agent_id": "bob"})
        await asyncio.sleep(timedelta(minutes=3).total_seconds())
        assert texts(simulation) == []
        assert simulation.hub is not None
        assert simulation.hub.state.count("due") == 0

    simulate(main, mods=MODS, operators=["ann"])


@pytest.mark.parametrize("was_removed_before", [False, True])
def test_timers_of_a_removed_participant_are_removed(monkeypatch: pytest.MonkeyPatch, was_removed_before: bool) -> None:
    if was_removed_before:
        monkeypatch.delattr(timers_module.TimersMod, "removed")  # a clock that was set back catches up at half speed

    async def main(simulation: Simulation) -> None:
        ann = (await simulation.join_person("ann")).client
        bob = (await simulation.join_person("bob")).client
        for args in ({"cron": "* * * * *"}, {"in_minutes": 2}):
            await bob.call("timers.create", {"text": "x", "to": "ann", **args})
        await ann.call("network.remove", {"agent_id": "bob"})
        await asyncio.sleep(timedelta(minutes=3).total_seconds())
        assert texts(simulation) == []
        assert await ann.call("timers.list") == {"timers": [], "after": 0, "has_more": False}

    simulate(main, mods=MODS, operators=["ann"])


async def test_page_of_timers_ends_at_a_visible_timer() -> None:
    async with Network.open(mods=MODS) as network:
        ann, bob = await network.join("ann"), await network.join("bob")
        for by in (ann, bob, ann, bob, bob):
            await by.call("timers.create", {"text": "x", "in_minutes": 5})
        first = await ann.call("timers.list", {"limit": 1})
        rest = await ann.call("timers.list", {"after": first["after"]})
        assert [(page["after"], page["has_more"]) for page in (first, rest)] == [(1, True), (3, False)]
