"""Tests of the whole system as a user runs it, in separate processes: a hub, agents with the `openai` SDK, and a
person with a pipe. Some processes are killed.

Afterwards, every message must be in the ledger, on the person's screen and in the models' prompts exactly once and in
one order. The hub restarts on its port and database. The provider belongs to the tests and is as strict as the real
one.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from roundelay.network.messages import BaseMessage
from tests.support.command import Command, run
from tests.support.fake_openai import Reply, calls, text
from tests.support.processes import (
    Asked,
    Provider,
    Said,
    agent_run,
    chatting,
    describe,
    hub_up,
    is_ascending,
    read_ledger,
    read_records,
    seen,
    until_seen,
)

# -- kills of the hub

STREAMS = {"ann": True, "bob": False}
"""Whether each agent gets its model's replies as a stream."""


class Team(Provider):
    """Provider for two agents: ann forwards to bob, who writes to everybody. Ann and bob both answer broadcasts."""

    def decide(self, asked: Asked) -> Reply:
        verb, _, word = asked.incoming.partition(" ")
        match verb, asked.agent_id, asked.turn:
            case "relay", "ann", 1:
                return calls([("send_text_message", {"target_agent_id": "bob", "text": f"spread {word}"})])
            case "relay", "ann", 2:
                return text(f"passed {word} on")
            case "spread", "bob", 1:
                wanted = [
                    ("broadcast_text_message", {"text": f"bob tells all {word}"}),
                    ("channels_post", {"name": "dev", "text": f"bob tells dev {word}"}),
                ]
                return calls(wanted, content="Two at once.")
            case "spread", "bob", 2:
                return calls([("send_text_message", {"target_agent_id": "mia", "text": f"bob has spread {word}"})])
            case "spread", "bob", 3:
                return calls([("finish", {"reason": "spread"})])
            case "hello" | "note", _, 1:
                return text(f"{asked.agent_id} heard {word}")
        raise AssertionError(f"nobody should ask this: {asked}")


def lines_of(part: str) -> list[str]:
    """Return the lines that mia types in one part of the conversation."""
    return [
        f"/dm ann relay {part}1",
        f"/broadcast hello {part}2",
        f"/dm ann relay {part}3",
        "/join dev",
        f"note {part}4",
        f"/broadcast hello {part}5",
        f"/dm ann relay {part}6",
    ]


def expect_messages(part: str) -> Iterator[Said]:
    """Yield the messages that result from one part."""
    for word in (f"{part}1", f"{part}3", f"{part}6"):
        yield Said("mia", "agent:ann", "direct:ann~mia", f"relay {word}")
        yield Said("ann", "agent:bob", "direct:ann~bob", f"spread {word}")
        yield Said("ann", "agent:mia", "direct:ann~mia", f"passed {word} on")
        yield Said("bob", "broadcast", "broadcast", f"bob tells all {word}")
        yield Said("bob", "channel:dev", "channel:dev", f"bob tells dev {word}")
        yield Said("bob", "agent:mia", "direct:bob~mia", f"bob has spread {word}")
    for to, line in (
        ("broadcast", f"hello {part}2"),
        ("channel:dev", f"note {part}4"),
        ("broadcast", f"hello {part}5"),
    ):
        yield Said("mia", to, to, line)
        for agent_id in ("ann", "bob"):
            yield Said(agent_id, to, line, f"{agent_id} heard {line.split()[1]}")


def expect_requests(part: str) -> Iterator[Asked]:
    """Yield the requests to the models for one part, each once."""
    for word in (f"{part}1", f"{part}3", f"{part}6"):
        yield from (Asked("ann", f"relay {word}", turn) for turn in (1, 2))
        yield from (Asked("bob", f"spread {word}", turn) for turn in (1, 2, 3))
    for line in (f"hello {part}2", f"note {part}4", f"hello {part}5"):
        yield from (Asked(agent_id, line, 1) for agent_id in ("ann", "bob"))


def check_ledger(ledger: dict[str, list[BaseMessage]], parts: Sequence[str]) -> None:
    """Check that the ledger has each expected message once and nothing else. Threads are in ascending order, with
    typed lines and their answers in sequence.
    """
    assert Counter(describe(ledger)) == Counter(it for part in parts for it in expect_messages(part))
    for messages in ledger.values():
        assert is_ascending([it.seq for it in messages])
    typed = [line.removeprefix("/dm ann ") for part in parts for line in lines_of(part)]
    for thread_id, pattern in (
        ("direct:ann~mia", "relay (.*)"),
        ("direct:ann~mia", "passed (.*) on"),
        ("direct:ann~bob", "spread (.*)"),
        ("direct:bob~mia", "bob has spread (.*)"),
        ("broadcast", "bob tells all (.*)"),
        ("channel:dev", "bob tells dev (.*)"),
    ):
        words = [found[1] for it in ledger[thread_id] if (found := re.fullmatch(pattern, it.text))]
        assert words == [line.split()[1] for line in typed if line.startswith("relay")], pattern


def check_screen(chat: Command, ledger: dict[str, list[BaseMessage]]) -> None:
    """Check that the person's screen shows each readable message once with the ledger's number, and messages of
    others in the ledger's order.
    """
    readable = {
        it.seq: (it.sender_id, it.text)
        for thread_id, messages in ledger.items()
        for it in messages
        if thread_id != "direct:ann~bob"
    }
    screen = seen(chat)
    assert {seq: (sender, words) for seq, sender, words in screen} == readable
    assert len(screen) == len(readable)
    assert is_ascending([seq for seq, sender, _ in screen if sender != "mia"])
    assert is_ascending([seq for seq, sender, _ in screen if sender == "mia"])


def check_prompts(provider: Provider, ledger: dict[str, list[BaseMessage]]) -> None:
    """Check that no prompt has a message twice, and that the messages of a thread are in order."""
    places = {words.text: number for number, words in enumerate(describe(ledger))}
    for body in provider.requests:
        contents = re.findall(r"<content>(.*?)</content>", body["messages"][1]["content"])
        assert len(contents) == len(set(contents))
        assert set(contents) <= set(places)
    for agent_id, verb in (("ann", "relay"), ("bob", "spread")):
        heard = [it.incoming for it in provider.asked if it.agent_id == agent_id and it.incoming.startswith(verb)]
        assert is_ascending([places[words] for words in dict.fromkeys(heard)])
    assert provider.refusals() == []


def describe_run(ledger: dict[str, list[BaseMessage]], provider: Provider, chat: Command, kills: str) -> str:
    messages = sum(map(len, ledger.values()))
    return (
        f"{messages} messages in {len(ledger)} threads, {len(provider.requests)} model requests, {len(seen(chat))} lines on the "
        f"screen, {kills}: all once, in order"
    )


def visible_texts(part: str) -> list[str]:
    """Return the texts that mia must see of one part."""
    return [it.text for it in expect_messages(part) if it.thread != "direct:ann~bob"]


@pytest.mark.full
async def test_a_hub_killed_four_times_loses_repeats_and_reorders_nothing(tmp_path: Path) -> None:
    parts = ["quiet", "writing", "thinking", "answering", "after"]
    async with AsyncExitStack() as stack:
        provider = await stack.enter_async_context(Team(models=("ann-model", "bob-model")))
        hub = await stack.enter_async_context(hub_up(tmp_path))
        agents = [
            await stack.enter_async_context(agent_run(tmp_path, hub, provider, agent_id, stream=stream))
            for agent_id, stream in STREAMS.items()
        ]
        chat = await stack.enter_async_context(chatting(hub))

        for part in parts:
            if part == "quiet":
                await hub.restart()
            if part == "thinking":
                provider.answers.clear()
            asked = len(provider.requests)
            await chat.type(*lines_of(part))
            match part:
                case "writing":  # the first line is stored, the other lines may be anywhere
                    await chat.line(f"relay {part}1")
                    await hub.restart()
                case "thinking":  # the replies arrive while no hub can record them
                    await provider.until_requests(asked + 5)  # one for each agent and thread that mia wrote to
                    await hub.kill()
                    provider.answers.set()
                    await hub.start()
                case "answering":
                    await chat.line(f"passed {part}1 on|(ann|bob) heard {part}")
                    await hub.restart()
            await until_seen(chat, visible_texts(part))

        chat.close_input()
        await chat.end()
        for agent in agents:
            await agent.stop()
            assert agent.errors == []
        ledger = await read_ledger(hub.url)
        shown = await run("history", "direct:ann~mia", "--limit", "500", "--json", "--url", hub.url)

    assert hub.kills == 4
    check_ledger(ledger, parts)
    check_screen(chat, ledger)
    check_prompts(provider, ledger)
    assert Counter(provider.asked) == Counter(it for part in parts for it in expect_requests(part))
    assert [it["seq"] for it in json.loads(shown.out)["messages"]] == [it.seq for it in ledger["direct:ann~mia"]]
    print(describe_run(ledger, provider, chat, f"{hub.kills} kills"))


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4))
async def test_kills_of_hub_and_agents_at_any_moment_lose_repeat_and_reorder_nothing(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    parts = [f"part{number}x" for number in range(8)]
    kills: Counter[str] = Counter()
    async with AsyncExitStack() as stack:
        provider = await stack.enter_async_context(Team())
        hub = await stack.enter_async_context(hub_up(tmp_path))
        agents: dict[str, Command] = {}
        for agent_id, stream in STREAMS.items():
            running = agent_run(tmp_path, hub, provider, agent_id, stream=stream)
            agents[agent_id] = await stack.enter_async_context(running)
        chat = await stack.enter_async_context(chatting(hub))

        for part in parts:
            await chat.type(*lines_of(part))
            for _ in range(chance.randint(1, 3)):
                await asyncio.sleep(chance.uniform(0, 0.6))  # any moment is valid, because the rules always hold
                target = chance.choice(["hub", "hub", "hub", *agents])
                kills[target] += 1
                if target == "hub":
                    await hub.restart()
                else:
                    await agents[target].kill()
                    running = agent_run(tmp_path, hub, provider, target, stream=STREAMS[target])
                    agents[target] = await stack.enter_async_context(running)
            await until_seen(chat, visible_texts(part))

        chat.close_input()
        await chat.end()
        for agent in agents.values():
            await agent.stop()
            assert agent.errors == []
        ledger = await read_ledger(hub.url)

    check_ledger(ledger, parts)
    check_screen(chat, ledger)
    check_prompts(provider, ledger)
    again = Counter(provider.asked) - Counter(it for part in parts for it in expect_requests(part))
    # For each agent, at most one call per thread is in progress.
    assert again.total() <= 3 * (kills["ann"] + kills["bob"])
    print(describe_run(ledger, provider, chat, f"kills {dict(kills)}, {again.total()} requests asked again"))


# -- kills of an agent


class Errand(Provider):
    """Provider with which bob sends a message in each of four turns. A turn in ``hesitates`` gets no reply at its
    first request.
    """

    def __init__(self, *, hesitates: Collection[int] = ()) -> None:
        super().__init__()
        self._hesitates = hesitates
        self._never = asyncio.Event()

    def decide(self, asked: Asked) -> Reply:
        reply = [
            calls([("send_text_message", {"target_agent_id": "mia", "text": "one"})]),
            calls([("broadcast_text_message", {"text": "two"})]),
            calls([("channels_post", {"name": "dev", "text": "three"})]),
            text("four"),
        ][asked.turn - 1]
        is_first = self.asked.count(asked) == 1
        return replace(reply, until=self._never if is_first and asked.turn in self._hesitates else None)


GO = [Asked("bob", "go", turn) for turn in (1, 2, 3, 4)]
ERRAND = [
    Said("mia", "agent:bob", "direct:bob~mia", "go"),
    Said("bob", "agent:mia", "direct:bob~mia", "one"),
    Said("bob", "broadcast", "broadcast", "two"),
    Said("bob", "channel:dev", "channel:dev", "three"),
    Said("bob", "agent:mia", "direct:bob~mia", "four"),
]


@pytest.mark.parametrize(
    ("stream", "turns"),
    [
        pytest.param(True, (2, 4), id="streamed"),
        pytest.param(True, (1, 2, 3, 4), id="streamed_in_each_turn", marks=pytest.mark.full),
        pytest.param(False, (1, 2, 3, 4), id="whole_in_each_turn", marks=pytest.mark.full),
    ],
)
async def test_an_agent_killed_while_its_model_thinks_says_each_thing_once(
    tmp_path: Path, stream: bool, turns: tuple[int, ...]
) -> None:
    async with Errand(hesitates=turns) as provider, hub_up(tmp_path) as hub, chatting(hub) as chat:
        await chat.type("/join dev")
        for turn in turns:
            async with agent_run(tmp_path, hub, provider, "bob", stream=stream) as bob:
                if turn == turns[0]:
                    await chat.type("/dm bob go")
                # The reply of this turn is on its way, and the ledger has those of the earlier turns.
                await provider.until_asked(GO[turn - 1])
                await bob.kill()
        async with agent_run(tmp_path, hub, provider, "bob", stream=stream) as bob:
            await until_seen(chat, [it.text for it in ERRAND])
            await bob.stop()
        ledger = await read_ledger(hub.url)
        records = await read_records(hub.url, "bob", "go")
    assert describe(ledger) == ERRAND
    wanted = {asked: 2 if asked.turn in turns else 1 for asked in GO}
    assert Counter(provider.asked) == wanted, "asked once more for each kill, and never again"
    # The process may be stopped before that record.
    kinds = Counter(record["kind"] for record in records if record["kind"] != "finished")
    assert kinds == {"started": 1, "model_reply": 4, "tool_started": 3, "tool_result": 3}
    assert provider.refusals() == []


@pytest.mark.full  # `crash/test_agent_kills` kills at every boundary in each run
async def test_an_agent_killed_when_it_has_spoken_says_nothing_again(tmp_path: Path) -> None:
    async with Errand() as provider, hub_up(tmp_path) as hub, chatting(hub) as chat:
        await chat.type("/join dev")
        settled: Counter[Asked] = Counter()
        for number, said in enumerate(ERRAND[1:]):
            async with agent_run(tmp_path, hub, provider, "bob", stream=False) as bob:
                if number == 0:
                    await chat.type("/dm bob go")
                await until_seen(chat, [said.text])
                await bob.kill()
            assert settled.items() <= Counter(provider.asked).items(), "what was said had its reply recorded before"
            settled = Counter(it for it in provider.asked if it.turn <= number + 1)
        async with agent_run(tmp_path, hub, provider, "bob", stream=False) as bob:
            await chat.type("/dm bob and now")
            await provider.until_asked(Asked("bob", "and now", 4))
            await chat.line("four")
            await bob.stop()
        ledger = await read_ledger(hub.url)
    assert settled.items() <= Counter(provider.asked).items()
    assert describe(ledger)[: len(ERRAND)] == ERRAND
    assert len(describe(ledger)) == 2 * len(ERRAND)
    assert provider.refusals() == []


RING = """\
import asyncio
from roundelay.agents.tools import ToolContext, tool

@tool(once=True)
async def ring(context: ToolContext) -> str:
    "Ring the bell."
    await context.client.send_text("mia", "ding")
    await asyncio.Event().wait()
    return "rung"
"""


class Ringer(Provider):
    def decide(self, asked: Asked) -> Reply:
        return calls([("ring", {})]) if asked.turn == 1 else text("I cannot tell whether it rang.")


async def test_a_once_tool_that_was_under_way_when_its_agent_was_killed_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "bells.py").write_text(RING, encoding="utf-8")
    more = "tools: ['bells:ring']"
    async with Ringer() as provider, hub_up(tmp_path) as hub, chatting(hub) as chat:
        async with agent_run(tmp_path, hub, provider, "bob", stream=False, more=more) as bob:
            await chat.type("/dm bob ring, please")
            await until_seen(chat, ["ding"])
            await bob.kill()
        async with agent_run(tmp_path, hub, provider, "bob", stream=False, more=more) as bob:
            await until_seen(chat, ["I cannot tell whether it rang."])
            await bob.stop()
        ledger = await read_ledger(hub.url)
    assert [it.text for it in describe(ledger)] == ["ring, please", "ding", "I cannot tell whether it rang."]
    assert provider.asked == [Asked("bob", "ring, please", turn) for turn in (1, 2)]
    [result] = [it["content"] for it in provider.requests[1]["messages"] if it["role"] == "tool"]
    assert "unknown" in result
