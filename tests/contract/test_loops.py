"""Tests of conversation budgets and their shares, of loops without causes, and of the notices when one stops.
docs/protocol/conversations.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.node import Node, node_process, running_node
from tests.support.wire import Frame, WireSession, expect_error

QUICK: dict[str, Any] = {"root_messages_per_s": 100_000}


async def use_up(session: WireSession, to: str, cause: int, most: int = 300) -> tuple[int, Frame]:
    """Answer one message again and again until the hub refuses. Return the number of accepted answers, and the error."""
    for count in range(most):
        answer = await session.submit(to, f"more {count}", cause=cause)
        if answer["type"] == "error":
            return count, expect_error(answer, "loop_stopped")
    raise AssertionError(f"{most} messages were taken")


async def go_round(ring: list[WireSession], names: list[str], most: int) -> tuple[int, Frame | None]:
    """Let each agent of a ring write to the next one without a cause. Return the number of accepted messages, and the
    first error.
    """
    for count in range(most):
        place = count % len(ring)
        to = names[(place + 1) % len(ring)]
        answer = await ring[place].submit(f"agent:{to}", f"pass it on {count}")
        if answer["type"] == "error":
            return count, answer
    return most, None


# -- shares of a conversation's budget


async def test_who_only_reads_along_cannot_use_up_a_conversation() -> None:
    async with running_node(limits={"max_root_messages": 16}) as node:
        mia, bob, carol = await node.person("mia"), await node.agent("bob"), await node.agent("carol")
        root = (await mia.send("broadcast", "who knows?"))["seq"]
        taken, error = await use_up(carol, "agent:carol", root)
        assert taken == 4  # a quarter of 16
        assert "max_root_messages" in error["message"]
        assert "carol" in error["message"]
        answer = await bob.send(
            "agent:mia", "I do", cause=root
        )  # nobody has addressed bob either, but he has used nothing of the budget
        for number in range(9):
            await mia.send("agent:bob", f"go on {number}", cause=answer["seq"])


async def test_those_who_only_read_along_cannot_do_it_together() -> None:
    async with running_node(limits={"max_root_messages": 16}) as node:
        mia, bob = await node.person("mia"), await node.agent("bob")
        crowd = [await node.agent(f"c{number}") for number in range(4)]
        root = (await mia.send("broadcast", "who knows?"))["seq"]
        asked = (await mia.send("agent:bob", "you?", cause=root))["seq"]
        taken = [(await use_up(each, "broadcast", root))[0] for each in crowd]
        assert taken == [4, 4, 0, 0]  # all strangers together may use half of the 16
        for number in range(4):  # the agent that mia addressed can continue
            await bob.send("agent:mia", f"answer {number}", cause=asked)
        for number in range(2):
            await mia.send("agent:bob", f"thanks {number}", cause=root)


async def test_who_was_addressed_later_leaves_a_part_to_those_between_whom_it_began() -> None:
    async with running_node(limits={"max_root_messages": 32}) as node:
        mia, bob = await node.person("mia"), await node.agent("bob")
        carol, dave = await node.agent("carol"), await node.agent("dave")
        root = (await mia.send("agent:bob", "go"))["seq"]
        asked = (await bob.send("agent:carol", "help", cause=root))["seq"]
        also = (await carol.send("agent:dave", "help", cause=asked))["seq"]
        taken = [(await use_up(carol, "agent:dave", asked))[0], (await use_up(dave, "agent:carol", also))[0]]
        assert taken == [15, 12]  # carol has half of 32, and carol and dave together seven eighths
        taken = [(await use_up(bob, "agent:mia", root))[0]]
        assert taken == [2]  # the root and the question count in that eighth


@pytest.mark.parametrize("to", ["broadcast", "channel:dev"])
async def test_whom_a_root_requires_a_response_of_is_a_party_of_it(to: str) -> None:
    async with running_node(limits={"max_root_messages": 8}) as node:
        mia, bob, carol = await node.person("mia"), await node.agent("bob"), await node.agent("carol")
        await mia.call("channels.create", {"name": "dev"})
        for session in (bob, carol):
            await session.call("channels.join", {"name": "dev"})
        root = (await mia.send(to, "bob?", requires_response=["bob", "nobody"]))["seq"]
        assert (await use_up(carol, to, root))[0] == 2
        assert (await use_up(bob, to, root))[0] == 5  # the whole rest


async def test_a_mods_answers_count_for_whom_it_answers() -> None:
    async with running_node(limits={"max_root_messages": 8}) as node:
        mia, carol = await node.person("mia"), await node.agent("carol")
        await node.agent("bob")
        await carol.call("channels.create", {"name": "own"})
        root = (await mia.send("broadcast", "hello"))["seq"]
        for _ in range(2):
            await carol.call("channels.post", {"name": "own", "text": "more", "cause": root})
        await carol.call_refused("loop_stopped", "channels.post", {"name": "own", "text": "more", "cause": root})
        await mia.send("agent:bob", "go on", cause=root)


# -- false claims in records


async def start(agent: WireSession, trigger: int) -> None:
    await agent.record("r1", "started", {"trigger": trigger, "manifest": [trigger]})


async def test_what_a_record_claims_is_bounded_and_told_by_who_wrote_it() -> None:
    async with running_node(limits={"max_record_tokens": 5000}) as node:
        mia = await node.person("mia")
        bob, carol = await node.agent("bob", role="reactor"), await node.agent("carol", role="reactor")
        root = (await mia.send("broadcast", "hello"))["seq"]
        for agent, tokens in ((bob, 100), (carol, 10**12)):
            await start(agent, root)
            usage = {"prompt_tokens": tokens, "completion_tokens": 1}
            await agent.record("r1", "model_reply", {"reply": {"usage": usage, "model": "m1"}})
        await carol.record("r1", "finished", {"usage": {"prompt_tokens": 10**12}})
        spent = await bob.call("network.spent", {"seq": root})
        by_agent = {name: sum(it["prompt_tokens"] for it in sums.values()) for name, sums in spent["by_agent"].items()}
        assert by_agent == {"bob": 100, "carol": 10_000}
        assert sum(it["prompt_tokens"] for it in spent["of_root"].values()) == 10_100


async def test_who_is_asked_from_a_closed_channel_is_not_told_who_works_there() -> None:
    async with running_node() as node:
        mia, ann = await node.person("mia"), await node.agent("ann")
        bob, eve = await node.agent("bob", role="reactor"), await node.agent("eve", role="reactor")
        await ann.call("channels.create", {"name": "den", "access": "closed"})
        await ann.call("channels.invite", {"name": "den", "agent_id": "bob"})
        await bob.call("channels.join", {"name": "den"})
        root = (await ann.send("channel:den", "at work"))["seq"]
        question = (await ann.send("agent:eve", "and you?", cause=root))["seq"]
        for agent, trigger in ((bob, root), (eve, question)):
            await start(agent, trigger)
            await agent.record("r1", "model_reply", {"reply": {"usage": {"prompt_tokens": 7}, "model": "m1"}})
        assert list((await eve.call("network.spent", {"seq": question}))["by_agent"]) == ["~1", "eve"]
        assert list((await ann.call("network.spent", {"seq": root}))["by_agent"]) == ["bob", "~2"]
        assert list((await mia.call("network.spent", {"seq": root}))["by_agent"]) == ["bob", "eve"]  # an operator


# -- loops without causes


@pytest.mark.parametrize("size", [1, 2, 10])
async def test_a_ring_without_causes_stops_and_says_so(size: int) -> None:
    async with running_node(limits={"max_uncaused_answers": 5, **QUICK}) as node:
        names = [f"a{number}" for number in range(size)]
        ring = [await node.agent(name) for name in names]
        taken, stopped = await go_round(ring, names, 20 * size)
        assert stopped is not None
        assert 5 * (size - 1) <= taken <= max(6 * size, 12)  # the hub counts every second message of an agent to itself
        error = expect_error(stopped, "loop_stopped")
        assert "max_uncaused_answers" in error["message"]
        stopped_by = error["message"].partition(" ")[0]
        mia = await node.person("mia")
        assert (await mia.call("network.stopped"))["agents"] == [
            {"agent_id": stopped_by, "limit": "limits.max_uncaused_answers", "used": 5}
        ]
        page = await mia.call("network.history", {"thread_id": f"mod:network~{stopped_by}"})
        assert [it["content"]["limit"] for it in page["messages"]] == ["limits.max_uncaused_answers"]


@pytest.mark.parametrize("size", [2, 3])
async def test_agents_that_answer_each_other_alone_are_stopped_and_told_of_early(size: int) -> None:
    async with running_node(limits={"max_uncaused_answers": 800, **QUICK}) as node:
        names = [f"a{number}" for number in range(size)]
        ring = [await node.agent(name) for name in names]
        mia = await node.person("mia")
        taken, stopped = await go_round(ring, names, 100 * size)
        error = expect_error(stopped, "loop_stopped")
        assert 40 * (size - 1) <= taken <= 41 * size
        assert "40 times in a row in direct:" in error["message"]
        assert "max_uncaused_answers" in error["message"]
        notice = await mia.expect("notice", kind="loop_stopped")
        assert notice["body"]["limit"] == "limits.max_uncaused_answers"
        stopped_by = error["message"].partition(" ")[0]
        assert [it["agent_id"] for it in (await mia.call("network.stopped"))["agents"]] == [stopped_by]
        await mia.call("network.resume_agent", {"agent_id": stopped_by})
        for name in names:  # a person writes to each of the others
            await mia.send(f"agent:{name}", "go on")
        again, _ = await go_round(
            ring[taken % size :] + ring[: taken % size], names[taken % size :] + names[: taken % size], 10
        )
        assert again == 10


async def test_answers_where_people_read_along_or_in_turns_to_several_are_bounded_by_the_whole_alone() -> None:
    async with running_node(limits={"max_uncaused_answers": 800, **QUICK}) as node:
        alice, bob, carol = await node.agent("alice"), await node.agent("bob"), await node.agent("carol")
        mia = await node.person("mia")
        await mia.call("channels.create", {"name": "dev"})
        for who in (alice, bob):
            await who.call("channels.join", {"name": "dev"})
        for number in range(120):
            await (alice, bob)[number % 2].send("channel:dev", f"{number}")
        for number in range(60):  # each question names its cause
            asker = (bob, carol)[number % 2]
            told = await alice.send(f"agent:{('bob', 'carol')[number % 2]}", f"answer {number}")
            await asker.send("agent:alice", f"{number}", cause=told["seq"])


async def test_who_only_sends_or_only_reads_is_never_stopped() -> None:
    async with running_node(limits={"max_uncaused_answers": 2, **QUICK}) as node:
        alice, bob, carol = await node.agent("alice"), await node.agent("bob"), await node.agent("carol")
        await carol.call("channels.create", {"name": "dev"})
        await bob.call("channels.join", {"name": "dev"})
        for number in range(20):
            await alice.send("agent:bob", number)
            await carol.send("agent:bob", number)
            await carol.send("channel:dev", number, requires_response=["bob"])


@pytest.mark.parametrize("place", ["broadcast", "channel:dev"])
async def test_a_storm_at_a_place_of_many_stops(place: str) -> None:
    async with running_node(limits={"max_uncaused_answers": 3, **QUICK}) as node:
        storm = [await node.agent(f"a{number}") for number in range(3)]
        await storm[0].call("channels.create", {"name": "dev"})
        for session in storm[1:]:
            await session.call("channels.join", {"name": "dev"})
        answers = [await session.submit(place, turn) for turn in range(8) for session in storm]
        refused = [expect_error(it, "loop_stopped") for it in answers if it["type"] == "error"]
        assert 24 - 10 - 4 <= len(refused) <= 24 - 10  # the last agent receives nothing any more, and only sends


async def test_two_channels_make_no_way_around() -> None:
    async with running_node(limits={"max_uncaused_answers": 3, **QUICK}) as node:
        alice, bob = await node.agent("alice"), await node.agent("bob")
        for name in ("one", "two"):
            await alice.call("channels.create", {"name": name})
            await bob.call("channels.join", {"name": name})
        for _ in range(4):
            await alice.submit("channel:one", "there")
            await bob.submit("channel:two", "and back")
        await bob.refused("loop_stopped", "channel:two")


async def test_a_person_who_speaks_to_an_agent_lets_it_go_on() -> None:
    async with running_node(limits={"max_uncaused_answers": 6, **QUICK}) as node:
        mia, alice, bob = await node.person("mia"), await node.agent("alice"), await node.agent("bob")
        for _ in range(2):
            await go_round([alice, bob], ["alice", "bob"], 20)
            await mia.send("agent:alice", "go on")
            await mia.send("agent:bob", "go on")
        assert (await mia.call("network.stopped"))["agents"] == []
        taken, _ = await go_round([alice, bob], ["alice", "bob"], 20)
        assert taken >= 11


async def test_an_operator_lets_an_agent_go_on_and_nobody_else() -> None:
    async with running_node(limits={"max_uncaused_answers": 2, **QUICK}) as node:
        mia, alice, bob = await node.person("mia"), await node.agent("alice"), await node.agent("bob")
        _, error = await go_round([alice, bob], ["alice", "bob"], 20)
        assert error is not None
        name, session, to = (
            ("alice", alice, "agent:bob") if error["message"].startswith("alice") else ("bob", bob, "agent:alice")
        )
        await session.call_refused("forbidden", "network.resume_agent", {"agent_id": name})
        await session.refused("loop_stopped", to)
        for was_stopped in (True, False):
            told = await mia.call("network.resume_agent", {"agent_id": name})
            assert told == {"was_stopped": was_stopped}
        await session.send(to, "again")


async def test_a_person_that_is_a_program_lets_nobody_go_on_for_ever() -> None:
    async with running_node(limits={"max_uncaused_answers": 10, **QUICK}) as node:
        bridge, bob = await node.person("bridge"), await node.agent("bob")
        for taken in range(100):
            await bridge.send("agent:bob", taken)
            await bob.message(taken)
            if (await bob.submit("agent:bridge", taken))["type"] == "error":
                break
        assert 10 <= taken <= 22


# -- notices


async def stop(node: Node, mia: WireSession, bob: WireSession) -> int:
    """Let a conversation of mia with bob use up its budget of 3. Return the conversation's root."""
    root: int = (await mia.send("agent:bob", "go"))["seq"]
    for number in range(2):
        await bob.send("agent:mia", number, cause=root)
    for _ in range(3):
        await bob.refused("loop_stopped", "agent:mia", cause=root)
    return root


async def test_who_began_it_is_told_once_in_a_message_that_stays(tmp_path: Path) -> None:
    async with node_process(tmp_path / "node.db", limits={"max_root_messages": 3}) as node:
        mia, bob = await node.person("mia"), await node.agent("bob")
        root = (await mia.send("agent:bob", "go"))["seq"]
        await mia.close()
        for number in range(2):
            await bob.send("agent:mia", number, cause=root)
        for _ in range(3):
            await bob.refused("loop_stopped", "agent:mia", cause=root)
        await node.kill9()
        await node.restart()
        mia = await node.person("mia")
        told = [(await mia.delivery())["message"] for _ in range(3)][-1]
        assert (told["kind"], told["sender_id"], told["thread_id"]) == ("mod", "network", "mod:network~mia")
        content = told["content"]
        assert {key: content[key] for key in ("kind", "root", "limit", "used_by", "used", "began_by")} == {
            "kind": "loop_stopped", "root": root, "limit": "limits.max_root_messages", "used_by": "bob", "used": 2, "began_by": "mia",
        }  # fmt: skip
        assert f"/resume {root}" in told["text_representation"]
        page = await mia.call("network.history", {"thread_id": "mod:network~mia"})
        assert len(page["messages"]) == 1
        followed = await mia.call("network.impact", {"seq": root})
        # The notice does not belong to the conversation.
        assert [it["content"] for it in followed["messages"]] == [0, 1]


async def test_a_conversation_that_is_let_go_on_tells_again_when_it_stops_again() -> None:
    async with running_node(limits={"max_root_messages": 3}) as node:
        mia, bob = await node.person("mia"), await node.agent("bob")
        root = await stop(node, mia, bob)
        (stopped,) = (await mia.call("network.stopped"))["conversations"]
        assert (stopped["root"], stopped["limit"], stopped["used_by"], stopped["began_by"]) == (
            root, "limits.max_root_messages", "bob", "mia",
        )  # fmt: skip
        await mia.call("network.resume_root", {"root": root})
        assert (await mia.call("network.stopped"))["conversations"] == []
        for number in range(3):
            await bob.send("agent:mia", number, cause=root)
        await bob.refused("loop_stopped", "agent:mia", cause=root)
        page = await mia.call("network.history", {"thread_id": "mod:network~mia"})
        assert len(page["messages"]) == 2
        assert [it["root"] for it in (await mia.call("network.stopped"))["conversations"]] == [root]


async def test_operators_are_told_live_and_can_list_what_has_stopped_page_by_page() -> None:
    async with running_node(limits={"max_root_messages": 2}) as node:
        alice, bob, operator = await node.agent("alice"), await node.agent("bob"), await node.person("mia")
        roots = []
        for _ in range(3):
            roots.append((await alice.send("agent:bob", "go"))["seq"])
            await bob.send("agent:alice", "1", cause=roots[-1])
            await bob.refused("loop_stopped", "agent:alice", cause=roots[-1])
            notice = await operator.expect("notice", kind="loop_stopped")
            assert (notice["body"]["root"], notice["body"]["limit"]) == (roots[-1], "limits.max_root_messages")
        first = await operator.call("network.stopped", {"limit": 2})
        then = await operator.call("network.stopped", {"limit": 2, "before": roots[1]})
        assert [it["root"] for it in first["conversations"]] == [roots[2], roots[1]]
        assert [it["root"] for it in then["conversations"]] == [roots[0]]
        assert (first["has_more"], then["has_more"]) == (True, False)
        await bob.call_refused("forbidden", "network.stopped")


async def test_an_answer_to_what_the_network_tells_is_refused_as_all_others_are() -> None:
    async with running_node(limits={"max_root_messages": 2}) as node:
        alice, bob = await node.agent("alice"), await node.agent("bob")
        root = (await alice.send("agent:bob", "go"))["seq"]
        await bob.send("agent:alice", "1", cause=root)
        await bob.refused("loop_stopped", "agent:alice", cause=root)
        await alice.message("1")
        told = (await alice.delivery())["message"]
        assert (told["sender_id"], told["root"]) == ("network", root)
        await alice.refused("loop_stopped", "agent:bob", cause=told["seq"])
        await alice.refused("unknown_recipient", "mod:network", cause=told["seq"])
        assert len((await alice.call("network.history", {"thread_id": "mod:network~alice"}))["messages"]) == 1


async def test_a_stop_by_hops_names_its_limit_and_does_not_silence_a_later_one() -> None:
    async with running_node(limits={"max_hops": 2, "max_root_messages": 6}) as node:
        mia, bob = await node.person("mia"), await node.agent("bob")
        seq = root = (await mia.send("agent:bob", "go"))["seq"]
        for _ in range(2):
            seq = (await bob.send("agent:bob", "on", cause=seq))["seq"]
        error = await bob.refused("loop_stopped", "agent:bob", cause=seq)
        assert "limits.max_hops" in error["message"]
        await use_up(bob, "agent:mia", root)
        page = await mia.call("network.history", {"thread_id": "mod:network~mia"})
        assert [it["content"]["limit"] for it in page["messages"]] == ["limits.max_hops", "limits.max_root_messages"]
