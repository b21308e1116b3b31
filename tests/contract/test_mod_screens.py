"""Tests of mods' screens, which are described as data: `network.screens`, and invalid screens that fail to load."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from roundelay.app import Network
from roundelay.mods.screens import TASK_BOARD
from roundelay.network.core.mod import load_mods
from roundelay.network.errors import ModError
from roundelay.network.mod import Action, Change, Detail, DetailList, Input, Mod, ModScreen, Reading, operation

SHIPPED = ["tasks", "notes", "polls", "timers", "files"]


class Wishes(Mod):
    """A user's mod with one screen."""

    id = "wishes"
    screens = (
        ModScreen(
            id="all", title="Wishes", view="list", op="wishes.list", items="wishes", key="name", heading="name",
            create=Action("wishes.add", "New wish", inputs=(Input("name", "Wish"),)),
        ),
    )  # fmt: skip

    @operation("change")
    def add(self, change: Change, *, name: str) -> dict[str, Any]:
        """Add a wish."""
        change.put("wishes", [*(change.get("wishes") or []), name])
        return {}

    @operation("read")
    async def list(self, reading: Reading) -> dict[str, Any]:
        """List the wishes."""
        return {"wishes": [{"name": name} for name in reading.get("wishes") or []]}


async def test_every_shipped_screen_is_listed_with_its_mod() -> None:
    async with Network.open(mods=["channels", *SHIPPED, Wishes()]) as network:
        ann = await network.join("ann")
        screens = (await ann.call("network.screens", {}))["screens"]
        assert [screen["mod"] for screen in screens] == [*SHIPPED, "wishes"]
        assert screens[0]["columns"] == list(TASK_BOARD.columns)
        assert screens[-1]["create"]["inputs"] == [{"argument": "name", "label": "Wish"}]


async def test_every_shipped_screen_shows_fields_that_its_operation_returns() -> None:
    async with Network.open(mods=["channels", *SHIPPED]) as network:
        mia = await network.join("mia", kind="human")
        await mia.call("tasks.create", {"title": "Fix the pump"})
        await mia.call("channels.create", {"name": "dev"})
        await mia.call("channels.join", {"name": "dev"})
        await mia.call("notes.create", {"name": "plan", "text": "# Plan", "thread_id": "channel:dev"})
        await mia.call("polls.create", {"question": "Tea?", "choices": ["yes", "no"], "thread_id": "channel:dev"})
        await mia.call("timers.create", {"text": "Stand up", "in_minutes": 5})
        await mia.call("files.save", {"name": "a.txt", "content": "hello"})
        for screen in (await mia.call("network.screens", {}))["screens"]:
            value = await mia.call(screen["op"], screen.get("args", {}))
            [item] = value[screen["items"]]
            assert item[screen["key"]]
            assert item[screen["heading"]]
            assert screen.get("column", screen["key"]) in item
            assert screen.get("at", screen["key"]) in item
            if detail := screen.get("detail"):
                opened = await mia.call(detail["op"], {name: item[field] for name, field in detail["args"].items()})
                assert detail["text"] in opened
                for part in detail["parts"]:
                    args = {name: item[field] for name, field in part.get("args", {}).items()}
                    entries = (await mia.call(part["op"], args) if "op" in part else opened)[part["items"]]
                    assert {fact["field"] for fact in part["facts"]} <= entries[0].keys()


LIST = {
    "id": "all",
    "title": "All",
    "view": "list",
    "op": "wishes.list",
    "items": "wishes",
    "key": "name",
    "heading": "name",
}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"op": "wishes.lost"}, "names the operation 'wishes.lost'"),
        ({"op": "tasks.list"}, "names the operation 'tasks.list'"),
        ({"args": {"limit": 5}}, "passes limit to wishes.list, which takes no arguments"),
        ({"view": "board"}, "A board needs `column`"),
        ({"at": "when"}, "is a list. A board needs"),
        ({"actions": (Action("wishes.add", "Add", {"text": "name"}),)}, "passes text to wishes.add, which takes name"),
        (
            {"detail": Detail("wishes.list", {}, parts=(DetailList("Log", "log", (), op="wishes.log"),))},
            "names the operation 'wishes.log'",
        ),
    ],
)
def test_screen_that_cannot_work_refuses_to_load(changes: dict[str, Any], problem: str) -> None:
    class Wrong(Wishes):
        screens: ClassVar = (ModScreen(**{**LIST, **changes}),)

    with pytest.raises(ModError, match=problem):
        load_mods([Wrong()], {})


def test_input_that_is_no_text_refuses_to_load() -> None:
    class Counts(Wishes):
        screens: ClassVar = (
            ModScreen(**LIST, actions=(Action("wishes.repeat", "Repeat", inputs=(Input("times", "Times"),)),)),
        )

        @operation("change")
        def repeat(self, change: Change, *, times: int | None = None) -> dict[str, Any]:
            """Add the wishes again."""
            return {}

    with pytest.raises(ModError, match=r"lets people enter times of wishes\.repeat, which is not text"):
        load_mods([Counts()], {})


def test_two_screens_with_one_id_refuse_to_load() -> None:
    class Twice(Wishes):
        screens: ClassVar = (ModScreen(**LIST), ModScreen(**LIST))

    with pytest.raises(ModError, match="two screens called 'all'"):
        load_mods([Twice()], {})
