"""`network.why`, `network.impact` and `network.history` for a trigger: what followed from what, as far as one may see. docs/protocol.md."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.node import Node, running_node
from tests.support.wire import Frame, WireSession, contents


class Team:
    """mia and bob, people; helper and worker, agents. What bob said is the canary."""

    def __init__(
        self, node: Node, mia: WireSession, bob: WireSession, helper: WireSession, worker: WireSession
    ) -> None:
        self.node, self.mia, self.bob, self.helper, self.worker = node, mia, bob, helper, worker

    @classmethod
    async def gather(cls, node: Node, visibility: str | None = None) -> Team:
        hello: dict[str, Any] = {} if visibility is None else {"card": {"visibility": visibility}}
        people = await node.person("mia"), await node.person("bob")
        return cls(node, *people, await node.agent("helper", **hello), await node.agent("worker", **hello))

    async def talk(self) -> Frame:
        """bob and mia each have a request; both are worked on in the one thread of the two agents. Gives mia's trigger for the worker."""
        for_bob = await self.bob.send("agent:helper", "bob's canary")
        await self.helper.send("agent:worker", "on bob's canary", cause=for_bob["seq"])
        for_mia = await self.mia.send("agent:helper", "mia's request")
        await self.helper.send("broadcast", "said to all", cause=for_mia["seq"])
        return await self.helper.send("agent:worker", "on mia's request", cause=for_mia["seq"])


@pytest.fixture
async def team(node: Node) -> Team:
    return await Team.gather(node)


async def read_thread(session: WireSession, thread_id: str, trigger: Frame, **args: Any) -> list[Any]:
    value = await session.call("network.history", {"thread_id": thread_id, "trigger": trigger["seq"], **args})
    return contents(value["messages"])


def said(chain: list[Any]) -> list[Any]:
    return [it["content"] for it in chain if "content" in it]


# -- history for a trigger


async def test_history_for_a_trigger_holds_what_its_prompt_may(team: Team) -> None:
    trigger = await team.talk()
    assert contents((await team.worker.call("network.history", {"thread_id": "direct:helper~worker"}))["messages"]) == [
        "on bob's canary",
        "on mia's request",
    ]
    assert await read_thread(team.worker, "direct:helper~worker", trigger) == ["on mia's request"]
    assert await read_thread(team.worker, "broadcast", trigger) == ["said to all"]


async def test_history_for_a_trigger_ends_there(team: Team) -> None:
    trigger = await team.talk()
    later = await team.helper.send("agent:worker", "one more for mia", cause=trigger["seq"])
    assert await read_thread(team.worker, "direct:helper~worker", trigger) == ["on mia's request"]
    assert await read_thread(team.worker, "direct:helper~worker", later) == ["on mia's request", "one more for mia"]
    assert await read_thread(team.worker, "direct:helper~worker", later, before=later["seq"]) == ["on mia's request"]


@pytest.mark.parametrize(
    ("visibility", "direct", "public"),
    [
        ("people", ["on mia's request"], ["said to all"]),
        ("strict", ["on bob's canary", "on mia's request"], ["said to all"]),
        ("current", ["on bob's canary", "on mia's request"], []),
        ("all", ["on bob's canary", "on mia's request"], ["said to all"]),
    ],
)
async def test_history_for_a_trigger_goes_by_the_agents_visibility(
    node: Node, visibility: str, direct: list[str], public: list[str]
) -> None:
    team = await Team.gather(node, visibility)
    trigger = await team.talk()
    assert await read_thread(team.worker, "direct:helper~worker", trigger) == direct
    assert await read_thread(team.worker, "broadcast", trigger) == public


async def test_an_argument_narrows_the_visibility_and_never_widens_it(node: Node) -> None:
    team = await Team.gather(node, "all")
    trigger = await team.talk()
    assert await read_thread(team.worker, "direct:helper~worker", trigger, visibility="people") == ["on mia's request"]
    strict = await Team.gather(node, "people")
    trigger = await strict.talk()
    seen = await read_thread(strict.worker, "direct:helper~worker", trigger, visibility="all")
    assert "on bob's canary" not in seen


async def test_an_operator_sees_for_a_trigger_what_it_reads_as_itself(team: Team) -> None:
    await team.talk()
    trigger = await team.mia.send("broadcast", "mia asks all")
    args = {"thread_id": "direct:helper~worker", "trigger": trigger["seq"]}
    everything = await team.mia.call("network.history", {"thread_id": "direct:helper~worker"})
    assert len(everything["messages"]) == 2
    await team.mia.call_refused("unknown_message", "network.history", args)


async def test_a_trigger_that_one_may_not_read_is_unknown(team: Team) -> None:
    trigger = await team.mia.send("agent:helper", "between us")
    args = {"thread_id": "broadcast", "trigger": trigger["seq"]}
    await team.worker.call_refused("unknown_message", "network.history", args)


# -- why


async def test_why_for_a_trigger_leaves_out_what_its_prompt_may_not_hold(team: Team) -> None:
    trigger = await team.talk()
    mine = await team.worker.call("network.why", {"seq": trigger["seq"], "trigger": trigger["seq"]})
    assert said(mine["chain"]) == ["on mia's request"]
    canary = (await team.worker.call("network.history", {"thread_id": "direct:helper~worker"}))["messages"][0]
    await team.worker.call("network.why", {"seq": canary["seq"]})
    args = {"seq": canary["seq"], "trigger": trigger["seq"]}
    await team.worker.call_refused("unknown_message", "network.why", args)


# -- impact


async def test_impact_is_all_that_followed_and_nothing_else(team: Team) -> None:
    root = await team.mia.send("agent:helper", "a request")
    asked = await team.helper.send("agent:worker", "a part of it", cause=root["seq"])
    await team.bob.send("agent:helper", "something else")
    done = await team.worker.send("agent:helper", "the part", cause=asked["seq"])
    await team.helper.send("agent:mia", "on it", cause=root["seq"])
    value = await team.mia.call("network.impact", {"seq": root["seq"]})
    assert said(value["messages"]) == ["a part of it", "the part", "on it"]
    assert value["has_more"] is False
    value = await team.mia.call("network.impact", {"seq": asked["seq"]})
    assert said(value["messages"]) == ["the part"]
    assert (await team.mia.call("network.impact", {"seq": done["seq"]}))["messages"] == []


async def test_impact_pages(team: Team) -> None:
    root = await team.mia.send("agent:helper", "a request")
    expected = [(await team.helper.send("agent:mia", f"answer {n}", cause=root["seq"]))["seq"] for n in range(7)]
    seqs: list[int] = []
    after, has_more = None, True
    while has_more:
        args = {"seq": root["seq"], "limit": 3} | ({"after": after} if after is not None else {})
        page = await team.mia.call("network.impact", args)
        seqs += [message["seq"] for message in page["messages"]]
        after, has_more = page["next"], page["has_more"]
    assert seqs == expected


async def test_impact_names_the_reactions_that_sent_what_followed(team: Team) -> None:
    root = await team.mia.send("agent:helper", "a request")
    started = {"trigger": root["seq"], "thread_id": "direct:helper~mia", "manifest": [root["seq"]]}
    await team.helper.record("r1", "started", started)
    await team.helper.send("agent:mia", "an answer", cause=root["seq"])
    value = await team.mia.call("network.impact", {"seq": root["seq"]})
    assert [(it["reaction"], it["agent_id"], it["trigger"]) for it in value["reactions"]] == [
        ("r1", "helper", root["seq"])
    ]


async def test_impact_shows_what_the_caller_may_read(node: Node, team: Team) -> None:
    root = await team.helper.send("broadcast", "who knows?")
    hidden = await team.worker.send("agent:mia", "a private word", cause=root["seq"])
    await team.mia.send("broadcast", "said to all", cause=hidden["seq"])
    outsider = await node.agent("outsider")
    later = await team.helper.send("broadcast", "who else?")
    answer = await team.worker.send("agent:mia", "another private word", cause=later["seq"])
    await team.mia.send("broadcast", "and this to all", cause=answer["seq"])
    value = await outsider.call("network.impact", {"seq": later["seq"]})
    assert said(value["messages"]) == ["and this to all"]
    await outsider.call_refused("unknown_message", "network.impact", {"seq": root["seq"]})


async def test_a_long_log_is_looked_through_in_parts(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roundelay.network.explain.SCANNED_ROWS", 5)
    root = await team.mia.send("agent:helper", "a request")
    for number in range(12):
        await team.bob.send("agent:helper", f"something else {number}")
    await team.helper.send("agent:mia", "an answer", cause=root["seq"])
    first = await team.mia.call("network.impact", {"seq": root["seq"]})
    assert (first["messages"], first["has_more"]) == ([], True)
    found, after = [], first["next"]
    while not found:
        page = await team.mia.call("network.impact", {"seq": root["seq"], "after": after})
        found, after = said(page["messages"]), page["next"]
    assert found == ["an answer"]


# -- rows


async def test_rows_are_the_whole_log_for_operators() -> None:
    async with running_node() as node:
        mia, helper = await node.person("mia"), await node.agent("helper")
        stored = await mia.send("agent:helper", "a request")
        await helper.record("r1", "started", {"trigger": stored["seq"], "manifest": [stored["seq"]]})
        value = await mia.call("network.rows")
        rows = [json.loads(line) for line in value["rows"]]
        assert [row["type"] for row in rows] == ["registered", "registered", "message", "record"]
        assert [row["seq"] for row in rows] == list(range(1, 5))
        assert rows[2]["data"]["content"] == "a request"
        rest = await mia.call("network.rows", {"after": 3})
        assert (len(rest["rows"]), rest["next"], rest["head"]) == (1, 4, 4)
        await helper.call_refused("forbidden", "network.rows")
