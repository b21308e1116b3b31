"""Tests of open items: mods, reactions and questions open and close them, and a restart keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roundelay.app import Network
from roundelay.network.core import quiet
from roundelay.network.core.open_items import OpenDelivery
from roundelay.network.core.quiet import MAX_ITEM_KEY
from roundelay.network.core.state import State
from roundelay.network.core.tables import TableWrite, decode_value
from roundelay.network.errors import InvalidArguments
from roundelay.network.frames import Seq
from roundelay.network.mod import Change, Mod, operation


class Errands(Mod):
    """Mod that opens and closes an item for each errand."""

    id = "errands"

    @operation("change")
    def add(self, change: Change, *, seq: Seq, key: str, who: str = "", note: str = "") -> dict[str, Any]:
        """Open an errand."""
        change.open_item(change.head(seq).root, key, "errand", who, note)
        return {}

    @operation("change")
    def end(self, change: Change, *, seq: Seq, key: str) -> dict[str, Any]:
        """Close an errand."""
        change.close_item(change.head(seq).root, key)
        return {}

    @operation("change")
    def claim_root(self, change: Change, *, root: int) -> dict[str, Any]:
        """Open an item of any conversation."""
        change.open_item(root, "a", "errand")
        return {}


async def test_item_of_a_mod_stays_open_until_closed_once() -> None:
    async with Network.open(mods=[Errands()]) as network:
        ann = await network.join("ann")
        root = (await ann.broadcast("hello")).seq
        await ann.call("errands.add", {"seq": root, "key": "a", "who": "bob", "note": "tea"})
        await ann.call("errands.add", {"seq": root, "key": "a", "who": "cat", "note": "cake"})
        [item] = network.hub.state.open_in(root).values()
        assert (item.kind, item.agent_id, item.note) == ("errand", "cat", "cake")
        await ann.call("errands.end", {"seq": root, "key": "a"})
        await ann.call("errands.end", {"seq": root, "key": "a"})
        assert not network.hub.state.open_in(root)


async def test_open_item_survives_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "network.db"
    async with Network.open(file, mods=[Errands()]) as network:
        ann = await network.join("ann")
        root = (await ann.broadcast("hello")).seq
        await ann.call("errands.add", {"seq": root, "key": "a"})
    async with Network.open(file, mods=[Errands()]) as network:
        assert list(network.hub.state.open_in(root)) == [f"open_item errands/{root:016d}/a"]
        ann = await network.join("ann")
        await ann.call("errands.end", {"seq": root, "key": "a"})
    async with Network.open(file, mods=[Errands()]) as network:
        assert not network.hub.state.open_in(root)


async def test_item_without_a_conversation_or_key_is_refused() -> None:
    async with Network.open(mods=[Errands()]) as network:
        ann = await network.join("ann")
        root = (await ann.broadcast("hello")).seq
        for root_tried in (0, root + 100):
            with pytest.raises(InvalidArguments, match=f"no conversation {root_tried}"):
                await ann.call("errands.claim_root", {"root": root_tried})
        for key in ("", "a" * (MAX_ITEM_KEY + 1)):
            with pytest.raises(InvalidArguments, match="key of 1 to"):
                await ann.call("errands.add", {"seq": root, "key": key})
        assert not network.hub.state.open_in(root)


def test_question_of_an_older_release_opens_nothing() -> None:
    """The question's root is unknown. The question itself stays in the inbox."""
    old = decode_value("question", b'{"sender_id":"bob","thread_id":"direct:ann~bob"}')
    state = State()
    state.apply_writes([TableWrite("question", f"ann/{7:016d}", old)])
    assert list(state.questions_of("ann")) == [7]
    assert not state.open_in(0)
    state.apply_writes([TableWrite("question", f"ann/{7:016d}", None)])
    assert not state.questions_of("ann")


async def test_oldest_messages_of_an_absent_agent_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "MAX_DELIVERIES", 10)
    async with Network.open() as network:
        ann = await network.join("ann")
        await (await network.join("bob", role="reactor")).close()
        seqs = [(await ann.send_text("bob", "hello")).seq for _ in range(25)]
        still_open = [seq for seq in seqs if network.hub.state.open_in(seq)]
    assert still_open == seqs[-10:]


def test_deliveries_that_retention_drops_are_closed() -> None:
    state = State()
    for seq in (5, 9):
        delivery = OpenDelivery(root=seq, at=0, thread_id="direct:ann~bob", sender_id="ann", waiting=("bob",))
        state.apply_writes([TableWrite("delivery", f"{seq:016d}", delivery)])
    state.apply_writes(quiet.close_dropped(state, 6))
    assert [bool(state.open_in(root)) for root in (5, 9)] == [False, True]
    assert list(state.deliveries_to("bob")) == [9]
