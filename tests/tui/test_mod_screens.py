"""Tests of mods' screens in the terminal UI: people read, open, create and change items without code of the mod."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from roundelay.app import Network
from roundelay.network.mod import Action, Change, Detail, Fact, Input, Mod, ModScreen, Reading, operation
from tests.support.full_screen import full_screen


async def test_a_person_claims_a_task_and_reads_a_note_in_the_terminal() -> None:
    async with Network.open(mods=["channels", "tasks", "notes"]) as network:
        mia = await network.join("mia", kind="human")
        await mia.call("channels.create", {"name": "dev"})
        await mia.call("channels.join", {"name": "dev"})
        await mia.call("tasks.create", {"title": "Fix the pump\x1b[31m"})
        await mia.call("notes.create", {"name": "plan", "thread_id": "channel:dev", "text": "# Plan\n\nBuy teapots."})
        async with full_screen(mia, (100, 30)) as screen:
            await screen.press("g", "m")
            await screen.shows("Which screen?")
            await screen.type("tasks")
            await screen.press("enter")
            await screen.shows("Tasks: 1")
            shown = await screen.shows("Fix the pump")
            assert "\x1b" not in shown
            await screen.press("x")
            await screen.shows("What do you want to do?")
            await screen.press("enter")
            await screen.shows("Claimed by mia")
            await screen.press("c")
            for text in ("Call zoe", "Ask about tea.", "", "", ""):
                await screen.type(text)
                await screen.press("enter")
            await screen.shows("Tasks: 2")
            await screen.press("g", "m")
            await screen.shows("Which screen?")
            await screen.type("notes")
            await screen.press("enter")
            await screen.shows("channel:dev/plan")
            await screen.press("enter")
            await screen.shows("Buy teapots.")
            await screen.shows("History")


async def test_thread_names_what_its_conversation_waits_for() -> None:
    async with Network.open(mods=["channels", "tasks"]) as network:
        mia, tom = await network.join("mia", kind="human"), await network.join("tom", kind="human")
        asked = await mia.send("agent:tom", "Which pump?", requires_response=["tom"])
        async with full_screen(mia, (100, 30), "tom") as screen:
            await screen.shows(r"Waiting for tom \(")
            made = await mia.call("tasks.create", {"title": "Fix\x1b[31m", "assignee": "tom", "cause": asked.seq})
            await tom.send_text("mia", "The left one.", reply_to=asked.seq, cause=asked.seq)
            assert "\x1b" not in await screen.shows("Waiting for task “Fix")
            await tom.call("tasks.complete", {"task": made["task"]})
            await screen.shows("All done")


class Odd(Mod):
    """Mod that returns values which a screen cannot display normally."""

    id = "odd"
    screens = (
        ModScreen(
            id="all", title="Odd", view="timeline", op="odd.list", items="items", key="name", heading="name", at="at",
            facts=(Fact("due", "Due", "time"),),
            detail=Detail("odd.get", {"name": "name"}),
            actions=tuple(
                Action("odd.pick", label, {"name": "name"}, (Input("choice", "Choice", choices_from="choices.name"),))
                for label in ("Pick", "Choose")
            ),
        ),
    )  # fmt: skip

    @operation("read")
    async def list(self, reading: Reading) -> dict[str, Any]:
        """List odd items."""
        return {"items": [{"name": "late", "at": 2**62, "due": -(2**62)}, {"name": "early", "at": 0, "due": "\x1b[1m"}]}

    @operation("read")
    async def get(self, reading: Reading, *, name: str) -> Any:
        """Return no item, or an item with equal choices."""
        return {"early": None, "late": {"choices": [{"name": "x"}, {"name": "x"}, {}]}}[name]

    @operation("change")
    def pick(self, change: Change, *, name: str, choice: str) -> dict[str, Any]:
        """Pick a choice."""
        change.put("picked", f"{name} {choice}")
        return {}


@pytest.mark.full
async def test_odd_values_of_a_mod_do_not_end_the_terminal() -> None:
    async with Network.open(mods=["channels", Odd()]) as network:
        mia = await network.join("mia", kind="human")
        async with full_screen(mia, (100, 30)) as screen:
            await screen.press("g", "m")
            await screen.shows("Which screen?")
            await screen.type("odd")
            await screen.press("enter")
            await screen.shows("Odd: 2")
            assert "\x1b" not in await screen.shows(str(2**62))
            await screen.press("enter")
            await screen.shows("The mod odd returned something that cannot be drawn")
            await screen.press("r")
            await screen.shows("Odd: 2")
            await screen.press("j", "x")
            await screen.shows("What do you want to do?")
            await screen.type("pick")
            await screen.press("enter")
            await screen.shows("Choice")
            await screen.press("enter")
            await screen.shows("Odd: 2")
            while not [raw for key, raw in network.hub.state.items("mod") if key == "odd/picked"]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
