"""Tests of visibility, the rules that select the messages of a prompt: `network.window` under each rule.
docs/protocol.md and the safety rules in DESIGN.

The people mia and bob talk to the same agents. A `canary` word must never reach a prompt for the other person.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.node import Node, running_node
from tests.support.wire import Frame, WireSession, contents


@dataclass
class Team:
    node: Node
    mia: WireSession
    bob: WireSession
    helper: WireSession
    worker: WireSession


async def gather_team(node: Node, *, card: Mapping[str, Any] | None = None) -> Team:
    hello = {} if card is None else {"card": dict(card)}
    return Team(
        node,
        await node.person("mia"),
        await node.person("bob"),
        await node.agent("helper", **hello),
        await node.agent("worker", **hello),
    )


@pytest.fixture
async def team(node: Node) -> Team:
    return await gather_team(node)


async def window(session: WireSession, trigger: Frame, **args: Any) -> dict[str, list[Any]]:
    """Return the contents of each thread that an agent may see for this trigger."""
    value = await session.call("network.window", {"trigger": trigger["seq"], **args})
    assert set(value) - {"omitted_threads"} == {"threads", "as_of"}
    assert value["as_of"] == trigger["seq"]
    for thread in value["threads"]:
        seqs = [message["seq"] for message in thread["messages"]]
        assert seqs == sorted(seqs)
        assert all(seq <= trigger["seq"] for seq in seqs)
        assert all(message["thread_id"] == thread["thread_id"] for message in thread["messages"])
    return {thread["thread_id"]: contents(thread["messages"]) for thread in value["threads"]}


def words(seen: dict[str, list[Any]]) -> set[Any]:
    return {content for thread in seen.values() for content in thread}


# -- the default rule, people; tests/unit/test_visibility_rules.py covers random networks


async def test_agents_that_work_on_one_request_share_it(team: Team) -> None:
    request = await team.mia.send("agent:helper", "mia's request")
    asked = await team.helper.send("agent:worker", "please do mia's part", cause=request["seq"])
    answered = await team.worker.send("agent:helper", "mia's part is done", cause=asked["seq"])
    seen = await window(team.helper, answered)
    assert words(seen) >= {"mia's request", "please do mia's part"}
    later = await team.mia.send("agent:helper", "how is it going?")
    assert words(await window(team.helper, later)) >= {"mia's request", "please do mia's part", "mia's part is done"}


async def test_one_thread_of_agents_is_split_by_whom_the_work_is_for(team: Team) -> None:
    for_mia = await team.mia.send("agent:helper", "mia's canary")
    for_bob = await team.bob.send("agent:helper", "bob's canary")
    await team.helper.send("agent:worker", "on mia's canary", cause=for_mia["seq"])
    await team.helper.send("agent:worker", "on bob's canary", cause=for_bob["seq"])
    trigger = await team.helper.send("agent:worker", "more for mia", cause=for_mia["seq"])
    seen = words(await window(team.worker, trigger))
    assert "on mia's canary" in seen
    assert "on bob's canary" not in seen
    answer = await team.worker.send("agent:helper", "done for mia", cause=trigger["seq"])
    seen = words(await window(team.helper, answer))
    assert seen >= {"mia's canary", "on mia's canary", "more for mia"}
    assert not seen & {"bob's canary", "on bob's canary"}


async def test_a_shared_root_alone_admits_nothing(team: Team) -> None:
    root = await team.mia.send("broadcast", "a question to all")
    asked = await team.helper.send("agent:bob", "what do you say, bob?", cause=root["seq"])
    secret = await team.bob.send("agent:helper", "bob's canary", cause=asked["seq"])
    await team.helper.send("agent:worker", "work on bob's canary", cause=secret["seq"])
    to_mia = await team.helper.send("agent:mia", "I am collecting answers", cause=root["seq"])
    trigger = await team.mia.send("agent:helper", "so what do they say?", cause=to_mia["seq"])
    seen = words(await window(team.helper, trigger))
    assert seen >= {"a question to all", "I am collecting answers"}
    assert not seen & {"bob's canary", "what do you say, bob?", "work on bob's canary"}


async def test_a_private_word_stays_out_of_a_public_prompt(team: Team) -> None:
    await team.mia.send("agent:helper", "mia's canary")
    trigger = await team.mia.send("broadcast", "helper, tell everybody")
    seen = words(await window(team.helper, trigger))
    assert "mia's canary" not in seen


async def test_a_channels_words_are_for_its_people(team: Team) -> None:
    await team.mia.call("channels.create", {"name": "mias"})
    await team.helper.call("channels.join", {"name": "mias"})
    await team.mia.send("channel:mias", "in mia's channel")
    for_mia = await team.mia.send("agent:helper", "mia asks")
    for_bob = await team.bob.send("agent:helper", "bob asks")
    assert "in mia's channel" in words(await window(team.helper, for_mia))
    assert "in mia's channel" not in words(await window(team.helper, for_bob))
    await team.mia.send("agent:helper", "mia's canary")
    await team.bob.call("channels.join", {"name": "mias"})
    shared = await team.mia.send("channel:mias", "now bob is here")
    assert "mia's canary" not in words(await window(team.helper, shared))


async def test_work_on_a_public_question_is_for_everybody_it_was_public_to(team: Team) -> None:
    root = await team.mia.send("broadcast", "a question to all")
    await team.helper.send("agent:worker", "work on the public question", cause=root["seq"])
    for_bob = await team.bob.send("agent:helper", "bob asks")
    assert "work on the public question" in words(await window(team.helper, for_bob))
    carl = await team.node.person("carl")
    for_carl = await carl.send("agent:helper", "carl asks")
    seen = words(await window(team.helper, for_carl))
    # Carl registered too late to read these messages.
    assert not seen & {"a question to all", "work on the public question"}


async def test_what_came_after_the_trigger_is_not_seen(team: Team) -> None:
    trigger = await team.mia.send("agent:helper", "mia asks")
    await team.mia.send("agent:helper", "an afterthought")
    assert "an afterthought" not in words(await window(team.helper, trigger))


async def test_the_rule_is_judged_at_the_triggers_seq(team: Team) -> None:
    await team.mia.call("channels.create", {"name": "dev"})
    await team.helper.call("channels.join", {"name": "dev"})
    await team.mia.send("agent:helper", "mia's own")
    trigger = await team.mia.send("channel:dev", "only mia is here")
    assert "mia's own" in words(await window(team.helper, trigger))
    await team.bob.call("channels.join", {"name": "dev"})
    assert "mia's own" in words(await window(team.helper, trigger))
    later = await team.mia.send("channel:dev", "now bob is too")
    assert "mia's own" not in words(await window(team.helper, later))


async def test_a_window_is_the_same_when_asked_again(team: Team) -> None:
    await team.mia.send("agent:helper", "one")
    trigger = await team.mia.send("agent:helper", "two")
    before = await window(team.helper, trigger)
    await team.bob.send("broadcast", "three")
    await team.mia.send("agent:helper", "four")
    assert await window(team.helper, trigger) == before


async def test_per_thread_and_threads_narrow_a_window(team: Team) -> None:
    await team.mia.send("broadcast", "public")
    for number in range(5):
        await team.mia.send("agent:helper", f"word {number}")
    trigger = await team.mia.send("agent:helper", "mia asks")
    seen = await window(team.helper, trigger, per_thread=2)
    assert len(seen["direct:helper~mia"]) == 2
    assert seen["broadcast"] == ["public"]
    await team.mia.call("channels.create", {"name": "dev"})
    await team.helper.call("channels.join", {"name": "dev"})
    await team.mia.send("channel:dev", "in the channel")
    trigger = await team.mia.send("agent:helper", "mia asks again")
    assert set(await window(team.helper, trigger)) == {"broadcast", "channel:dev", "direct:helper~mia"}
    named = set(await window(team.helper, trigger, threads=["broadcast"]))
    assert named - {"direct:helper~mia"} == {"broadcast"}  # the trigger's own thread is always allowed
    assert set(await window(team.helper, trigger, threads=["direct:helper~mia"])) == {"direct:helper~mia"}
    assert list(await window(team.helper, trigger, threads=1)) == ["direct:helper~mia"]


async def test_a_window_counts_the_threads_that_it_leaves_out_and_none_that_may_not_be_seen(team: Team) -> None:
    async def omitted(trigger: Frame, **args: Any) -> int | None:
        value = await team.helper.call("network.window", {"trigger": trigger["seq"], **args})
        count: int | None = value.get("omitted_threads")
        return count

    await team.bob.send("agent:helper", "for bob and helper alone")
    await team.mia.send("broadcast", "public")
    first = await team.mia.send("agent:helper", "mia asks")
    await team.helper.send("agent:worker", "for mia", cause=first["seq"])
    trigger = await team.mia.send("agent:helper", "mia asks again")
    assert await omitted(trigger) is None
    assert await omitted(trigger, threads=3) is None
    assert await omitted(trigger, threads=2) == 1
    assert await omitted(trigger, threads=1) == 2  # the broadcast and the work for mia, but nothing of bob
    assert await omitted(trigger, threads=1, visibility="current") is None
    assert await omitted(trigger, threads=["broadcast"]) is None
    assert await omitted(first, threads=1) == 1  # later messages do not count


async def test_naming_a_thread_widens_nothing(team: Team) -> None:
    await team.bob.send("agent:helper", "bob's canary")
    await team.bob.send("agent:worker", "bob's other canary")
    trigger = await team.mia.send("agent:helper", "mia asks")
    for thread_id in ("direct:bob~helper", "direct:bob~worker"):
        args = {"trigger": trigger["seq"], "threads": [thread_id]}
        answer = await team.helper.submit_call("network.window", args)
        assert "canary" not in answer.raw


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"trigger": "1"},
        {"trigger": -1},
        {"trigger": 1, "threads": "all"},
        {"trigger": 1, "per_thread": 0},
        {"trigger": 1, "per_thread": "x"},
        {"trigger": 1, "visibility": "everything"},
        {"trigger": 1, "agent_id": "bob"},
    ],
    ids=str,
)
async def test_wrong_arguments_are_invalid(node: Node, args: dict[str, Any]) -> None:
    helper = await node.agent("helper")
    await helper.call_refused("invalid_arguments", "network.window", args)


# -- the other rules


async def scene(team: Team) -> Frame:
    """Send messages of every kind. Return a trigger by mia."""
    request = await team.mia.send("agent:helper", "mia's own")
    await team.bob.send("agent:helper", "bob's canary")
    await team.bob.send("broadcast", "said to all")
    await team.helper.send("agent:worker", "for mia among agents", cause=request["seq"])
    await team.worker.send("agent:helper", "between us agents")
    return await team.mia.send("agent:helper", "mia asks")


EVERYTHING = {"mia's own", "bob's canary", "said to all", "for mia among agents", "between us agents"}
SEEN = {
    "people": {"mia's own", "said to all", "for mia among agents"},
    "strict": {"mia's own", "said to all"},
    "current": {"mia's own"},
    "all": EVERYTHING,
}


@pytest.mark.parametrize("visibility", ["people", "strict", "current", "all"])
async def test_the_networks_rule(visibility: Any) -> None:
    async with running_node(visibility=visibility) as node:
        team = await gather_team(node)
        trigger = await scene(team)
        seen = words(await window(team.helper, trigger)) - {"mia asks"}
        assert seen == SEEN[visibility]


@pytest.mark.parametrize("visibility", ["strict", "current"])
async def test_an_agents_card_narrows_the_rule(node: Node, visibility: str) -> None:
    team = await gather_team(node, card={"visibility": visibility})
    trigger = await scene(team)
    seen = words(await window(team.helper, trigger)) - {"mia asks"}
    assert seen == SEEN[visibility]


async def test_strict_admits_what_every_reader_of_the_triggers_thread_reads() -> None:
    async with running_node(visibility="strict") as node:
        team = await gather_team(node)
        await team.mia.call("channels.create", {"name": "dev"})
        for session in (team.bob, team.helper):
            await session.call("channels.join", {"name": "dev"})
        await team.bob.send("channel:dev", "in the channel")
        await team.mia.send("agent:helper", "mia's own")
        in_channel = await team.mia.send("channel:dev", "helper?")
        seen = words(await window(team.helper, in_channel))
        assert "in the channel" in seen
        assert "mia's own" not in seen  # bob can read the channel, but not this message
        direct = await team.bob.send("agent:helper", "bob asks")
        assert "in the channel" in words(await window(team.helper, direct))


async def test_an_agent_with_the_id_of_a_mod_reads_nothing_of_the_mods(node: Node) -> None:
    host = await node.service("host")
    namesake = await node.invite(host, "channels", kind="agent")
    await host.bye()
    alice = await node.agent("alice")
    second = await node.agent("alice")
    secret = await alice.send("mod:channels", "secret")
    await second.message("secret")
    await alice.send("agent:channels", "marker")
    assert await namesake.contents_until("marker") == []
    threads = (await namesake.call("network.list_threads"))["threads"]
    assert [thread["thread_id"] for thread in threads] == ["direct:alice~channels"]
    await namesake.call_refused("unknown_message", "network.history", {"thread_id": secret["thread_id"]})
    await namesake.bye()
    back = await node.agent("channels", resume={"epoch": alice.welcome["network"]["epoch"], "cursor": 0})
    assert await back.contents_until("marker") == []


async def test_threads_are_listed_for_those_alone_who_may_read_them(node: Node) -> None:
    left_out, alice, bob = [await node.agent(name) for name in ("leah", "alice", "bob")]
    said = await alice.send("broadcast", "not for leah", exclude_agent_ids=["leah"])
    await bob.send("broadcast", "nor this", reply_to=said["seq"])
    assert (await left_out.call("network.list_threads"))["threads"] == []
    await alice.send("broadcast", "for all")
    [thread] = (await left_out.call("network.list_threads"))["threads"]
    assert (thread["thread_id"], thread["messages"]) == ("broadcast", 1)
    newcomer = await node.agent("nora")
    await bob.send("broadcast", "a reply to what she did not hear", reply_to=said["seq"])
    assert (await newcomer.call("network.list_threads"))["threads"] == []
    assert len((await alice.call("network.list_threads"))["threads"]) == 2


@pytest.mark.parametrize("visibility", ["people", "strict", "current"])
async def test_what_two_agents_say_for_one_person_stays_out_of_their_work_for_another(visibility: Any) -> None:
    """Only agents read their common thread, so a rule that checks only its readers would admit all of it."""
    async with running_node(visibility=visibility) as node:
        team = await gather_team(node)
        for_mia = await team.mia.send("agent:helper", "mia asks")
        for_bob = await team.bob.send("agent:helper", "bob asks")
        await team.helper.send("agent:worker", "mia's canary", cause=for_mia["seq"])
        await team.helper.send("agent:worker", "bob's own", cause=for_bob["seq"])
        trigger = await team.helper.send("agent:worker", "more for bob", cause=for_bob["seq"])
        assert words(await window(team.worker, trigger)) == {"bob's own", "more for bob"}


async def test_the_thread_alone_shows_nobody_what_was_said_before_they_came() -> None:
    async with running_node(visibility="current") as node:
        team = await gather_team(node)
        await team.mia.call("channels.create", {"name": "dev"})
        await team.helper.call("channels.join", {"name": "dev"})
        await team.mia.send("channel:dev", "before bob came")
        await team.mia.send("broadcast", "not for bob", exclude_agent_ids=["bob"])
        await team.bob.call("channels.join", {"name": "dev"})
        for place in ("channel:dev", "broadcast"):
            trigger = await team.bob.send(place, "helper, sum up")
            assert words(await window(team.helper, trigger)) == {"helper, sum up"}


@pytest.mark.parametrize("who", ["mia", "planner"])
async def test_work_for_somebody_who_was_removed_is_for_nobody_else(team: Team, who: str) -> None:
    await team.bob.send("agent:helper", "bob's canary")
    asking = team.mia if who == "mia" else await team.node.agent("planner")
    request = await asking.send("agent:helper", "please")
    asked = await team.helper.send("agent:worker", "do your part", cause=request["seq"])
    await (await team.node.person("host")).call("network.remove", {"agent_id": who})
    answer = await team.worker.send("agent:helper", "done", cause=asked["seq"])
    assert "bob's canary" not in words(await window(team.helper, answer))


# -- later messages


async def read_on(session: WireSession, trigger: Frame, until: Frame, thread_id: str) -> list[Any]:
    args = {"thread_id": thread_id, "trigger": trigger["seq"], "until": until["seq"]}
    return contents((await session.call("network.history", args))["messages"])


async def test_what_came_since_is_read_by_those_for_whom_the_trigger_is(team: Team) -> None:
    trigger = await team.bob.send("broadcast", "bob asks")
    await team.mia.send("broadcast", "mia's canary", exclude_agent_ids=["bob"])
    newest = await team.mia.send("broadcast", "for all")
    await team.mia.send("broadcast", "and later")
    assert await read_on(team.helper, trigger, newest, "broadcast") == ["bob asks", "for all"]
    assert await read_on(team.helper, trigger, {"seq": 1}, "broadcast") == ["bob asks"]  # type: ignore[arg-type]


# -- channels that a reaction may see


@pytest.mark.parametrize("visibility", ["people", "all"])
async def test_a_closed_channel_is_there_for_those_for_whom_the_reaction_is(visibility: Any) -> None:
    async with running_node(visibility=visibility) as node:
        host = await node.person("host")
        mia, bob = [await node.invite(host, name) for name in ("mia", "bob")]
        helper = await node.agent("helper")
        await mia.call("channels.create", {"name": "den", "topic": "mia's canary", "access": "closed"})
        await mia.call("channels.invite", {"name": "den", "agent_id": "helper"})
        await helper.call("channels.join", {"name": "den"})
        for who, is_there in ((mia, True), (bob, visibility == "all")):
            trigger = {"trigger": (await who.send("agent:helper", "which channels are there?"))["seq"]}
            assert bool((await helper.call("channels.list", trigger))["channels"]) == is_there
            asked = {"name": "den", **trigger}
            if is_there:
                assert (await helper.call("channels.members", asked))["members"] == ["helper", "mia"]
            else:
                await helper.call_refused("unknown_recipient", "channels.members", asked)
        await bob.call_refused("unknown_message", "channels.list", {"trigger": 2**40})


async def test_of_those_who_may_not_know_the_first_by_id_is_named_in_every_process(team: Team) -> None:
    host = await team.node.person("host")
    for name in ("zoe", "eve", "cat", "dan", "amy"):
        await team.node.invite(host, name)
    await team.helper.call("channels.create", {"name": "dev"})
    trigger = (await team.bob.send("broadcast", "who is in dev?"))["seq"]
    refused = await team.helper.call_refused("forbidden", "channels.members", {"name": "dev", "trigger": trigger})
    assert refused["message"].startswith("amy is not a member of the channel 'dev'")


# -- conversations that no person started


@pytest.mark.parametrize("visibility", ["people", "strict"])
@pytest.mark.parametrize("kind", ["agent", "service", "human"])
async def test_an_agent_sees_its_own_thread_whoever_began(visibility: Any, kind: str) -> None:
    """The chain is planner -> alice -> ben, three times. Alice's earlier questions to ben also served the planner."""
    async with running_node(visibility=visibility) as node:
        planner = await node.join(
            "planner", kind=kind, token=node.token_of("planner") if kind == "agent" else node.owner_token
        )
        alice, ben = await node.agent("alice"), await node.agent("ben")
        for number in range(3):
            plan = await planner.send("agent:alice", f"plan {number}")
            trigger = await alice.send("agent:ben", f"part {number}", cause=plan["seq"])
            if number < 2:
                done = await ben.send("agent:alice", f"done {number}", cause=trigger["seq"])
                await alice.send("agent:planner", f"all done {number}", cause=done["seq"])
        seen = await window(ben, trigger)
        assert set(seen) == {"direct:alice~ben"}
        assert seen["direct:alice~ben"][:4] == ["part 0", "done 0", "part 1", "done 1"]


async def test_programs_share_no_more_than_the_threads_they_began_in(team: Team) -> None:
    """A planner's prompt must not show another planner's work, a person's work, or talk of the two agents alone."""
    node = team.node
    planner, other = await node.agent("planner"), await node.agent("other")
    for began, word in ((other, "other's canary"), (team.mia, "mia's canary"), (planner, "planner's own")):
        plan = await began.send("agent:helper", f"plan: {word}")
        await team.helper.send("agent:worker", word, cause=plan["seq"])
    plan = await planner.send("agent:helper", "and now")
    trigger = await team.helper.send("agent:worker", "go on", cause=plan["seq"])
    assert words(await window(team.worker, trigger)) - {"go on"} == {"planner's own"}
    alone = await team.helper.send("agent:worker", "between us")
    assert words(await window(team.worker, alone)) >= {
        "other's canary",
        "mia's canary",
        "planner's own",
    }  # the thread of the two agents
    for_mia = await team.helper.send(
        "agent:worker", "more for mia", cause=(await team.mia.send("agent:helper", "mia asks"))["seq"]
    )
    assert words(await window(team.worker, for_mia)) - {"more for mia"} == {"mia's canary"}
