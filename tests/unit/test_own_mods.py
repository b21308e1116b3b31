"""Tests of the included mods on a hub in this process: search results, and the right to change a channel."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from roundelay.agents.models.model import ModelRequest, ToolMessage
from roundelay.agents.models.scripted import call
from roundelay.app import Network
from roundelay.network.client import NetworkClient
from roundelay.network.errors import Forbidden, UnknownRecipient
from tests.support.agents import Person, make_runner, running


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with Network.open() as opened:
        yield opened


async def find(client: NetworkClient, query: str, **args: Any) -> list[tuple[str, int]]:
    value = await client.call("discovery.find", {"query": query, **args})
    return [(found["agent_id"], found["score"]) for found in value["participants"]]


async def test_a_search_weighs_tags_before_tools_before_words_and_leaves_out_who_asks(network: Network) -> None:
    await network.join("ann", card={"tags": ["Math"], "tools": ["add_numbers"], "description": "Adds numbers."})
    await network.join("bob", card={"description": "Knows math and numbers"})
    await network.join("math", card={})
    mia = await network.join("mia", kind="human", card={"tags": ["math"]})
    assert await find(mia, "MATH numbers") == [("ann", 6), ("math", 3), ("bob", 2)]
    assert await find(mia, "math", limit=1) == [("ann", 3)]
    assert await find(mia, "cooking") == []


async def test_a_search_sees_the_card_that_was_shown_last(network: Network) -> None:
    mia = await network.join("mia", kind="human")
    bob = await network.join("bob", card={"tags": ["math"]})
    assert await find(mia, "math") == [("bob", 3)]
    await bob.close()
    assert await find(mia, "math", online=True) == []
    await network.join("bob", card={"tags": ["music"]})
    assert await find(mia, "math") == []
    assert await find(mia, "music", online=True) == [("bob", 3)]


async def test_a_topic_is_for_members_to_set(network: Network) -> None:
    ann, bob = await network.join("ann"), await network.join("bob")
    await ann.call("channels.create", {"name": "dev"})
    with pytest.raises(Forbidden):
        await bob.call("channels.set_topic", {"name": "dev", "topic": "mine"})
    with pytest.raises(UnknownRecipient):
        await bob.call("channels.set_topic", {"name": "ops", "topic": "mine"})
    await ann.call("channels.set_topic", {"name": "dev", "topic": "ours"})
    [channel] = (await bob.call("channels.list"))["channels"]
    assert channel == {
        "name": "dev", "topic": "ours", "history": "since_join", "access": "open", "owner": "ann", "members": 1, "is_member": False
    }  # fmt: skip


async def test_what_late_joiners_may_read_is_for_the_creator_or_an_operator_to_say(network: Network) -> None:
    ann, bob, mia = await network.join("ann"), await network.join("bob"), await network.join("mia", kind="human")
    await ann.call("channels.create", {"name": "dev"})
    await ann.post("dev", "before")
    await bob.call("channels.join", {"name": "dev"})
    with pytest.raises(Forbidden):
        await bob.call("channels.set_history", {"name": "dev", "history": "members"})
    assert (await bob.history("channel:dev")).messages == []
    await ann.call("channels.set_history", {"name": "dev", "history": "members"})
    assert [message.text for message in (await bob.history("channel:dev")).messages] == ["before"]
    await mia.call("channels.set_history", {"name": "dev", "history": "since_join"})
    assert (await bob.history("channel:dev")).messages == []


async def test_an_agent_reads_why_it_may_not_join_and_joins_when_it_is_invited(network: Network) -> None:
    mia = await Person.join(network, "mia")
    await mia.client.call("channels.create", {"name": "club", "access": "invite"})

    def script(request: ModelRequest) -> Any:
        done = [message.content for message in request.messages if isinstance(message, ToolMessage)]
        return str(done[-1]) if done else call("channels_join", name="club")

    async with running(network, make_runner("bob", script)):
        refused = await mia.ask("bob", "Join the club.")
        assert (
            "Only invited participants may join the channel 'club'. To join, ask mia for an invitation" in refused.text
        )
        await mia.client.call("channels.invite", {"name": "club", "agent_id": "bob"})
        await mia.ask("bob", "And now?")
    assert (await mia.client.call("channels.members", {"name": "club"}))["members"] == ["bob", "mia"]
