"""Tests of a stuck model, with a hub and the real SDK: the number of requests to it, and of messages to a person."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from roundelay.agents.policy import AgentPolicy
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import ToolContext, tool
from roundelay.app import Network
from tests.support.agents import Person, Provider, running
from tests.support.fake_openai import Reply, calls, empty, text
from tests.support.loops import tools_of

SEND = "send_text_message"


def say(who: str, what: str) -> Reply:
    return calls([(SEND, {"target_agent_id": who, "text": what})])


def make_ann(provider: Provider, *tools: Any, **policy: Any) -> SimpleAgentRunner:
    return SimpleAgentRunner(
        "ann", instruction="You help.", model=provider.model(), tools=tools, policy=AgentPolicy(prompt="full", **policy)
    )


@pytest.mark.parametrize(
    "made",
    [
        empty(),
        Reply("half a sent", finish_reason="length"),
        calls([("look_up", {"word": "hi"})]),
        calls([(SEND, '{"text": ')]),
        calls([(SEND, {"text": "to nobody"})]),
        say("nobody-there", "hello"),
    ],
    ids=["empty", "cut", "unknown tool", "broken JSON", "wrong arguments", "refused by the hub"],
)
async def test_a_model_that_gets_nowhere_is_asked_four_times_and_the_person_hears_of_it(
    network: Network, made: Reply
) -> None:
    async with Provider(lambda body: made) as provider:
        mia = await Person.join(network, "mia")
        async with running(network, make_ann(provider)):
            answer = await mia.ask("ann", "hi")
    assert "I stopped after 3 turns in a row without effect" in answer.text or "half a sent" in answer.text
    assert [bool(tools_of(body)) for body in provider.requests] == [True, True, True, False]


async def test_one_recipient_gets_five_messages_of_a_reaction_and_then_the_answer(network: Network) -> None:
    numbers = itertools.count(1)

    def script(body: Any) -> Reply:
        return say("mia", f"news {next(numbers)}") if tools_of(body) else text("That is all.")

    async with Provider(script) as provider:
        mia = await Person.join(network, "mia")
        async with running(network, make_ann(provider)):
            first = await mia.ask("ann", "hi")
            heard = [first.text, *[(await mia.hear()).text for _ in range(5)]]
    assert heard == [*(f"news {number}" for number in range(1, 6)), "That is all."]
    assert len(provider.requests) == 5 + 3 + 1
    told = provider.requests[6]["messages"]
    assert any("mia has got 5 messages in this work already" in str(it["content"]) for it in told)


async def test_the_limit_counts_calls_of_one_turn_and_each_recipient_by_itself(network: Network) -> None:
    many = [(SEND, {"target_agent_id": who, "text": f"{who} {n}"}) for who in ("mia", "joe") for n in range(4)]

    def script(body: Any) -> Reply:
        return calls(many) if len(provider.requests) == 1 else text("done")

    async with Provider(script) as provider:
        mia, joe = await Person.join(network, "mia"), await Person.join(network, "joe")
        async with running(network, make_ann(provider, max_messages_per_recipient=3)):
            await mia.client.send_text("ann", "tell everybody")
            assert {(await mia.hear()).text for _ in range(4)} == {"mia 0", "mia 1", "mia 2", "done"}
            assert {(await joe.hear()).text for _ in range(3)} == {"joe 0", "joe 1", "joe 2"}


async def test_a_resumed_reaction_goes_on_counting_and_another_one_begins_anew(network: Network) -> None:
    is_hanging = True

    def script(body: Any) -> Reply:
        if is_hanging and len(provider.requests) == 4:
            return Reply(fault="silence")
        return say("mia", f"news {len(body['messages'])}") if tools_of(body) else text("That is all.")

    async with Provider(script) as provider:
        mia = await Person.join(network, "mia")
        runner = make_ann(provider)
        task = asyncio.create_task(runner.run(await network.join("ann", role="reactor")))
        await runner.ready()
        await mia.client.send_text("ann", "hi")
        await provider.wait_for_requests(4)
        await runner.stop()
        await task
        is_hanging = False
        async with running(network, make_ann(provider)):
            heard = [(await mia.hear()).text for _ in range(6)]
            assert [it.startswith("news") for it in heard] == [True] * 5 + [False]
            await mia.client.send_text("ann", "again")
            heard = [(await mia.hear()).text for _ in range(6)]
            assert [it.startswith("news") for it in heard] == [True] * 5 + [False]


async def test_messages_of_a_tool_count_and_the_tool_is_told(network: Network) -> None:
    @tool(name="shout")
    async def shout(context: ToolContext) -> str:
        for number in range(9):
            await context.client.send_text("mia", f"news {number}")
        return "all said"

    async with Provider([calls([("shout", {})]), text("done")]) as provider:
        mia = await Person.join(network, "mia")
        async with running(network, make_ann(provider, shout)):
            await mia.client.send_text("ann", "hi")
            heard = [(await mia.hear()).text for _ in range(6)]
    assert heard == [*(f"news {number}" for number in range(5)), "done"]
    assert "Not sent: mia has got 5 messages" in provider.requests[1]["messages"][3]["content"]


async def test_posts_to_a_channel_by_the_mods_tool_count(network: Network) -> None:
    numbers = itertools.count(1)

    def script(body: Any) -> Reply:
        if not tools_of(body):
            return text("That is all.")
        return calls([("channels_post", {"name": "dev", "text": f"news {next(numbers)}"})])

    async with Provider(script) as provider:
        mia = await Person.join(network, "mia")
        await mia.client.call("channels.create", {"name": "dev"})
        ann = SimpleAgentRunner(
            "ann", instruction="You help.", model=provider.model(), channels=["dev"], policy=AgentPolicy(prompt="full")
        )
        async with running(network, ann):
            await mia.client.send_text("ann", "hi")
            heard = [await mia.hear() for _ in range(6)]
    assert [it.text for it in heard] == [*(f"news {number}" for number in range(1, 6)), "That is all."]
