"""Tests of `network.why`, `network.impact` and `network.history` for a trigger: causes and effects, limited to what
the caller may see. docs/protocol.md.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.node import Node, running_node
from tests.support.wire import Frame, WireSession, contents


class Team:
    """The people mia and bob, and the agents helper and worker. Bob's text is the canary."""

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
        """Let the two agents work on a request of bob and on one of mia in their common thread. Return mia's trigger
        for worker.
        """
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
        ("strict", ["on mia's request"], ["said to all"]),
        ("current", ["on mia's request"], []),
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


# -- search


@pytest.mark.parametrize(
    ("visibility", "found"),
    [
        ("people", ["on mia's request", "said to all"]),
        ("strict", ["on mia's request", "said to all"]),
        ("current", ["on mia's request"]),
        ("all", ["on bob's canary", "on mia's request", "said to all"]),
    ],
)
async def test_a_search_for_a_trigger_finds_what_its_prompt_may_hold(
    node: Node, visibility: str, found: list[str]
) -> None:
    team = await Team.gather(node, visibility)
    trigger = await team.talk()
    await team.helper.send("agent:worker", "on and on", cause=trigger["seq"])
    pages: list[list[str]] = []
    for query in ("on", "said"):
        args: dict[str, Any] = {"query": query, "trigger": trigger["seq"], "limit": 1}
        value: dict[str, Any] = {"has_more": True}
        while value["has_more"]:
            value = await team.worker.call("network.search", args)
            pages.append(contents(value["messages"]))
            args["before"] = value.get("next")
    assert sorted(text for page in pages for text in page) == found
    assert all(len(page) <= 1 for page in pages)
    assert contents((await team.worker.call("network.search", {"query": "and ON"}))["messages"]) == ["on and on"]


async def test_a_search_without_a_word_is_refused(team: Team) -> None:
    await team.mia.call_refused("invalid_arguments", "network.search", {"query": " - * "})


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


async def test_what_the_caller_may_not_read_does_not_end_a_page(node: Node) -> None:
    mia, ann, eve = await node.person("mia"), await node.agent("ann"), await node.agent("eve")
    root = (await mia.send("broadcast", "hello"))["seq"]
    first = (await ann.send("broadcast", "for all", cause=root))["seq"]
    pages = []
    for _ in range(2):
        pages.append(await eve.call("network.impact", {"seq": root, "limit": 1}))
        assert [it["seq"] for it in pages[-1]["messages"]] == [first]
        await ann.send("agent:mia", "between us", cause=root)
    assert [page["has_more"] for page in pages] == [False, False]


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
    monkeypatch.setattr("roundelay.network.operations.views.SCANNED_ROWS", 5)
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


# -- several reactions to one message


class Reacting:
    """A request of mia to which helper reacts as the test directs. `say` sends the text of a reaction."""

    def __init__(self, mia: WireSession, helper: WireSession, root: int) -> None:
        self.mia, self.helper, self.root = mia, helper, root

    @classmethod
    async def begin(cls, node: Node) -> Reacting:
        mia, helper = await node.person("mia"), await node.agent("helper")
        return cls(mia, helper, (await mia.send("agent:helper", "a request"))["seq"])

    async def start(self, reaction: str) -> int:
        body = {"trigger": self.root, "manifest": [self.root]}
        return int((await self.helper.record(reaction, "started", body))["seq"])

    async def finish(self, reaction: str) -> None:
        await self.helper.record(reaction, "finished", {"status": "finished"})

    async def say(self, text: str) -> int:
        return int((await self.helper.send("agent:mia", text, cause=self.root))["seq"])

    async def sent_in(self, seq: int) -> tuple[str, int] | None:
        """Return the reaction that `network.why` names for a message, and the seq of the reaction's start."""
        chain = (await self.mia.call("network.why", {"seq": seq}))["chain"]
        return next(((it["reaction"], it["seq"]) for it in chain if "reaction" in it), None)

    async def status(self, seq: int) -> dict[str, Any]:
        (recipient,) = (await self.mia.call("network.message_status", {"seq": seq}))["recipients"]
        return dict(recipient)


@pytest.fixture
async def reacting(node: Node) -> Reacting:
    return await Reacting.begin(node)


async def test_why_names_the_reaction_that_was_open_when_the_message_was_sent(reacting: Reacting) -> None:
    it = reacting
    before = await it.say("before any")
    first = await it.start("r1")
    in_first = await it.say("in the first")
    await it.finish("r1")
    between = await it.say("between them")
    second = await it.start("r2")
    in_second = await it.say("in the second")
    third = await it.start("r3")
    in_newest = await it.say("in the newest of two")
    await it.finish("r3")
    in_older = await it.say("in the second, which is open yet")
    await it.finish("r2")
    again = await it.start("r1")
    in_first_again = await it.say("in the first, begun again")
    found = [
        await it.sent_in(seq) for seq in (before, in_first, between, in_second, in_newest, in_older, in_first_again)
    ]
    assert found == [None, ("r1", first), None, ("r2", second), ("r3", third), ("r2", second), ("r1", again)]
    impact = await it.mia.call("network.impact", {"seq": it.root})
    assert [one["reaction"] for one in impact["reactions"]] == ["r1", "r2", "r3", "r1"]


async def test_a_message_before_the_only_reaction_was_not_sent_in_it(reacting: Reacting) -> None:
    before = await reacting.say("before")
    started = await reacting.start("r1")
    inside = await reacting.say("in it")
    await reacting.finish("r1")
    after = await reacting.say("after")
    assert [await reacting.sent_in(seq) for seq in (before, inside, after)] == [None, ("r1", started), None]


async def test_message_status_names_the_first_reaction_to_the_message(reacting: Reacting) -> None:
    for reaction in ("r1", "r2", "r3"):
        await reacting.start(reaction)
        assert (await reacting.status(reacting.root))["reaction"] == "r1"
    await reacting.finish("r1")
    status = await reacting.status(reacting.root)
    assert (status["reaction"], status["reaction_status"]) == ("r1", "finished")


async def test_the_reaction_to_a_message_goes_before_one_that_merely_shows_it(reacting: Reacting) -> None:
    """A client that waits for the end of the reaction waits for the answer to this message."""
    other = (await reacting.mia.send("agent:helper", "another request"))["seq"]
    await reacting.helper.record("r1", "started", {"trigger": other, "manifest": [reacting.root, other]})
    assert (await reacting.status(reacting.root))["reaction"] == "r1"
    await reacting.start("r2")
    await reacting.start("r3")
    assert (await reacting.status(reacting.root))["reaction"] == "r2"
    assert (await reacting.status(other))["reaction"] == "r1"


async def test_of_many_reactions_to_one_message_the_first_and_the_newest_are_known() -> None:
    async with running_node(limits={"max_reactions_per_message": 100}) as node:
        reacting = await Reacting.begin(node)
        for number in range(70):
            await reacting.start(f"r{number}")
        said = await reacting.say("in the newest")
        assert (await reacting.sent_in(said) or ("", 0))[0] == "r69"
        for number in range(10, 70):
            await reacting.finish(f"r{number}")
        late = await reacting.say("in one of the first ten, which began before the newest")
        assert (await reacting.sent_in(late) or ("", 0))[0] == "r9"
        assert (await reacting.status(reacting.root))["reaction"] == "r0"
