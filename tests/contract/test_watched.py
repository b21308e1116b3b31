"""Tests of `welcome.is_watched` and the notice `watched`, which report whether anybody receives signals.
docs/protocol/notices.md.
"""

from __future__ import annotations

import pytest

from roundelay.network.hub import subscriptions
from tests.support.node import running_node


async def test_a_reactor_learns_when_somebody_begins_to_watch_and_nobody_does_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subscriptions, "UNWATCHED_S", 0.0)
    async with running_node() as node:
        bob = await node.agent("bob", role="reactor")
        assert bob.welcome["is_watched"] is False
        mia, zoe = await node.person("mia"), await node.person("zoe")
        for person in (mia, zoe):
            await person.call("network.watch", {"signals": True})
        assert (await bob.expect("notice", kind="watched"))["body"] == {"is_watched": True}
        # The field is omitted if it is true.
        assert "is_watched" not in (await node.agent("ann", role="reactor")).welcome
        await mia.bye()
        await zoe.call("network.watch", {"presence": True})  # this call keeps her signals
        await bob.settle()
        assert not [it for it in bob.unread if it["type"] == "notice"]
        await zoe.call("network.watch", {"signals": False})
        assert (await bob.expect("notice", kind="watched"))["body"] == {"is_watched": False}


async def test_only_reactors_are_told_and_a_short_absence_is_not() -> None:
    async with running_node() as node:
        bob, observer = await node.agent("bob", role="reactor"), await node.agent("ann")
        mia = await node.person("mia")
        await mia.call("network.watch", {"signals": True})
        assert (await bob.expect("notice", kind="watched"))["body"] == {"is_watched": True}
        for is_wanted in (False, True, False, True):
            await mia.call("network.watch", {"signals": is_wanted})
        for session in (bob, observer):
            await session.settle()
            assert not [it for it in session.unread if it["type"] == "notice"]
