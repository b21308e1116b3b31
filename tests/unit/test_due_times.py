"""Tests of mods' due times in simulated time: each fires once, even across kills, and `apply` decides it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.models.scripted import ScriptedModel, send
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.app import Network
from roundelay.network.core import scheduling
from roundelay.network.core.due_times import apply_due_time
from roundelay.network.core.entries import ReachDueTime
from roundelay.network.core.tables import Facts
from roundelay.network.errors import InvalidArguments
from roundelay.network.frames import Seq
from roundelay.network.mod import Change, Mod, operation
from roundelay.simulation.network import Simulation, simulate
from roundelay.terminal.places import find_place

MINUTE = 60_000


class Alarm(Mod):
    """Mod that sends a message at a due time."""

    id = "alarm"

    @operation("change")
    def set(
        self, change: Change, *, key: str, in_ms: int, watched: str = "", cause: Seq | None = None
    ) -> dict[str, int]:
        """Set an alarm."""
        change.put(key, {"by": change.origin.agent_id, "watched": watched, "cause": cause})
        change.schedule(key, change.stamp + in_ms, watched=watched, cause=cause)
        return {"at": change.stamp + in_ms}

    @operation("change")
    def drop(self, change: Change, *, key: str) -> dict[str, str]:
        """Remove an alarm."""
        change.unschedule(key)
        return {"key": key}

    def due(self, change: Change, key: str) -> None:
        alarm = change.get(key)
        change.put(key, None)
        if key.startswith("bad"):
            change.answer(alarm["by"], "never sent")
            raise RuntimeError(key)
        if alarm["watched"]:
            change.answer(alarm["by"], {"absent_ms": change.absent_ms})
        else:
            change.answer(alarm["by"], key, cause=alarm["cause"], conversation="alarms" if key == "own" else "")


def heard(simulation: Simulation, *, by: str = "alarm") -> list[Any]:
    return [message.content for message in simulation.messages if message.sender_id == by]


def test_due_time_calls_the_hook_once_at_its_time() -> None:
    async def main(simulation: Simulation) -> None:
        ann = await simulation.join_person("ann")
        at = (await ann.client.call("alarm.set", {"key": "tea", "in_ms": 5 * MINUTE}))["at"]
        await asyncio.sleep(299)
        assert heard(simulation) == []
        await asyncio.sleep(600)
        assert heard(simulation) == ["tea"]
        assert 0 <= simulation.messages[-1].sent_at - at <= 1000

    simulate(main, mods=[Alarm()])


def test_due_times_survive_kills_and_are_reached_once() -> None:
    async def main(simulation: Simulation) -> None:
        ann = await simulation.join_person("ann")
        for number in range(20):
            await ann.client.call("alarm.set", {"key": f"a{number:02}", "in_ms": number * 1000})
        for _ in range(12):
            await asyncio.sleep(1.7)
            await simulation.kill_hub()
            await asyncio.sleep(0.2)
            await simulation.restart_hub()
        await asyncio.sleep(5)
        assert heard(simulation) == [f"a{number:02}" for number in range(20)]
        assert simulation.hub is not None
        assert simulation.hub.state.count("due") == 0

    simulate(main, mods=[Alarm()])


def test_moved_due_time_is_reached_at_the_later_time_only() -> None:
    async def main(simulation: Simulation) -> None:
        ann = await simulation.join_person("ann")
        for in_ms in (MINUTE, 10 * MINUTE):
            await ann.client.call("alarm.set", {"key": "tea", "in_ms": in_ms})
        await ann.client.call("alarm.set", {"key": "never", "in_ms": MINUTE})
        await ann.client.call("alarm.drop", {"key": "never"})
        await asyncio.sleep(500)
        assert heard(simulation) == []
        await asyncio.sleep(200)
        assert heard(simulation) == ["tea"]

    simulate(main, mods=[Alarm()])


def test_hook_that_raises_is_not_repeated_and_delays_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def main(simulation: Simulation) -> None:
        ann = await simulation.join_person("ann")
        for key in ("bad", "good"):
            await ann.client.call("alarm.set", {"key": key, "in_ms": 1000})
        await asyncio.sleep(60)
        assert heard(simulation) == ["good"]

    simulate(main, mods=[Alarm()])
    assert caplog.text.count("a mod's due hook failed") == 1


def test_entry_for_a_removed_or_later_due_time_changes_nothing() -> None:
    async def main(simulation: Simulation) -> None:
        ann = await simulation.join_person("ann")
        await ann.client.call("alarm.set", {"key": "tea", "in_ms": MINUTE})
        assert simulation.hub is not None
        state, rules = simulation.hub.state, simulation.hub.view._rules
        for key in ("tea", "unknown"):
            assert not apply_due_time(rules, state, Facts(), ReachDueTime("alarm", key)).stores
        later = state.draft(state.stamp + MINUTE)
        first = apply_due_time(rules, later, Facts(), ReachDueTime("alarm", "tea"))
        assert len(first.rows) == 1
        later.apply_outcome(first)
        assert not apply_due_time(rules, later, Facts(), ReachDueTime("alarm", "tea")).stores

    simulate(main, mods=[Alarm()])


def test_due_times_of_one_mod_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "MAX_DUE_TIMES", 2)

    async def main(simulation: Simulation) -> None:
        ann = await simulation.join_person("ann")
        for key in ("a", "b", "a"):
            await ann.client.call("alarm.set", {"key": key, "in_ms": MINUTE})
        with pytest.raises(InvalidArguments, match="maximum"):
            await ann.client.call("alarm.set", {"key": "c", "in_ms": MINUTE})
        await ann.client.call("alarm.drop", {"key": "b"})
        await ann.client.call("alarm.set", {"key": "c", "in_ms": MINUTE})

    simulate(main, mods=[Alarm()])


def test_hook_learns_how_long_the_watched_participant_was_absent() -> None:
    async def main(simulation: Simulation) -> None:
        ann = await simulation.join_person("ann")
        await simulation.join_person("bob")
        for number in range(1, 4):
            await ann.client.call("alarm.set", {"key": f"k{number}", "in_ms": number * MINUTE, "watched": "bob"})
        await asyncio.sleep(90)
        await simulation.leave("bob")
        await asyncio.sleep(60)
        await simulation.restart_hub()
        await asyncio.sleep(60)
        present, left, restarted = (content["absent_ms"] for content in heard(simulation))
        assert present == 0
        assert 29_000 <= left <= 32_000
        assert 29_000 <= restarted <= 32_000  # the hub counts from the restart, not from the disconnect

    simulate(main, mods=[Alarm()])


def test_agent_reacts_to_a_due_message_in_its_own_thread() -> None:
    async def main(simulation: Simulation) -> None:
        ann = await simulation.join_person("ann")
        model = ScriptedModel(lambda request: send("ann", "Good morning.") if request.turn == 1 else "")
        await simulation.start_agent(lambda: SimpleAgentRunner("bob", model=model, instruction="Be kind."))
        client = simulation.members["bob"].client
        await client.call("alarm.set", {"key": "own", "in_ms": 1000})
        heard = await simulation.wait_for(lambda message: message.sender_id == "bob")
        due = next(message for message in simulation.messages if message.sender_id == "alarm")
        assert (due.thread_id, heard.cause, heard.root) == ("mod:alarm~bob:alarms", due.seq, due.seq)
        await ann.client.call("alarm.set", {"key": "own", "in_ms": 1000})
        own = await simulation.wait_for(lambda message: message.thread_id == "mod:alarm~ann:alarms")
        sent = await ann.client.reply(own, "thanks")
        assert sent.thread_id == own.thread_id
        place = await find_place(ann.client, own.thread_id)
        assert (place.to, place.thread_id, place.reply_to) == ("mod:alarm", own.thread_id, sent.seq)
        assert place.conversation is None

    simulate(main, mods=[Alarm()])


def test_cause_of_a_due_time_is_known_to_its_hook() -> None:
    async def main(simulation: Simulation) -> None:
        ann = await simulation.join_person("ann")
        asked = await ann.client.send_text("ann", "remind me")
        await ann.client.call("alarm.set", {"key": "tea", "in_ms": 1000, "cause": asked.seq})
        message = await simulation.wait_for(lambda message: message.content == "tea")
        assert (message.cause, message.root) == (asked.seq, asked.seq)

    simulate(main, mods=[Alarm()])


async def test_due_times_are_in_the_database_and_wait_for_their_mod(tmp_path: Path) -> None:
    now = [1_000_000]
    db = tmp_path / "hub.db"
    async with Network.open(db, mods=[Alarm()], clock=lambda: now[0]) as network:
        ann = await network.join("ann")
        await ann.call("alarm.set", {"key": "tea", "in_ms": MINUTE})
    now[0] += 2 * MINUTE
    async with Network.open(db, clock=lambda: now[0]) as network:
        assert network.hub.state.count("due") == 1
    async with Network.open(db, mods=[Alarm()], clock=lambda: now[0]) as network, asyncio.timeout(20):
        ann = await network.join("ann")
        async with ann.receive() as message:
            assert message.content == "tea"
        assert network.hub.state.count("due") == 0
