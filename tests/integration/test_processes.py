"""Everything as a user runs it, in processes of its own: hub, agents on the `openai` SDK, a person in a pipe. Some of it is killed.

The hub is killed at four moments of a conversation and comes back on its port and database; agents are killed inside a reaction. What
was said must then stand in the ledger, on the person's screen and in the models' prompts exactly once, in one order. The provider is
the tests' own, as strict as the real one, and lives in the test: what it was asked is evidence too.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import pytest

from roundelay.agents.journal import reaction_id
from roundelay.network.client import NetworkClient
from roundelay.network.messages import BaseMessage
from tests.support.command import TIMEOUT_S, Command, command, run
from tests.support.fake_openai import FakeOpenAI, Reply, calls, text

API_KEY = "key-of-the-tests"
AGENT = """\
id: {agent_id}
description: Does what the test says.
instruction: Pass on what you are told to pass on, and answer who asks.
model: {{openai: {{name: {agent_id}-model, base_url: {base_url}, stream: {stream}}}}}
channels: [dev]
{more}
"""


# -- the provider


@dataclass(frozen=True)
class Asked:
    """What a request was for; the whole conversation is in ``body``."""

    agent_id: str
    incoming: str
    turn: int

    @classmethod
    def read(cls, body: dict[str, Any]) -> Self:
        messages = body["messages"]
        agent_id = re.findall(r'Your id in this network is "([a-z]+)"', messages[0]["content"])[0]
        incoming = re.findall(r"<incoming_message [^>]*>\s*<content>(.*?)</content>", messages[1]["content"])[0]
        return cls(agent_id, incoming, 1 + sum(message["role"] == "assistant" for message in messages))


class Provider(FakeOpenAI):
    """The model of every agent. What it says is computed from what it is asked; it says nothing while ``answers`` is clear."""

    def __init__(self, **options: Any) -> None:
        super().__init__(self._answer, api_key=API_KEY, **options)
        self.answers = asyncio.Event()
        self.answers.set()

    @property
    def asked(self) -> list[Asked]:
        return [Asked.read(body) for body in self.requests]

    async def until_asked(self, asked: Asked, times: int = 1) -> None:
        """Return when this was asked so many times."""
        while self.asked.count(asked) < times:
            await self.until_requests(len(self.requests) + 1)

    async def until_requests(self, count: int) -> None:
        """Return when so many requests have come."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self.wait_for_requests(count)
        except TimeoutError:
            raise AssertionError(f"{count} requests were awaited, and these came: {self.asked}") from None

    def refusals(self) -> list[int]:
        """What it answered to requests that it did not take; 0, an answer that was not waited for, is none."""
        return [item.status for item in self.received if item.status not in (0, 200)]

    def _answer(self, body: dict[str, Any]) -> Reply:
        return replace(self.decide(Asked.read(body)), until=self.answers)

    def decide(self, asked: Asked) -> Reply:
        raise NotImplementedError


# -- the processes


class Hub:
    """`roundelay up` on a port and database of its own; after a kill it is started again with the same command."""

    def __init__(self, folder: Path) -> None:
        self.url = ""
        self.kills = 0
        self._folder = folder
        self._process: Command | None = None

    async def start(self) -> None:
        port = self.url.rpartition(":")[2].strip("/") or "0"
        flags = ("--port", port, "--db", "team.db", "--durability", "full", "--no-agents")
        self._process = await Command.start("up", *flags, cwd=self._folder)
        ready = await self._process.line(r"^Roundelay is ready at (ws://\S+) \(.*durability full")
        assert self.url in ("", ready[1]), "it must come back where its clients look for it"
        self.url = ready[1]

    async def kill(self) -> None:
        assert self._process is not None
        assert self._process.process.returncode is None, self._process.errors
        await self._process.kill()
        assert self._process.process.returncode == -9
        self.kills += 1

    async def end(self) -> None:
        """Stop it in good order, if it runs; it must have had nothing to complain about."""
        if self._process is not None and self._process.process.returncode is None:
            await self._process.stop()
            assert self._process.errors == []


@asynccontextmanager
async def hub_up(folder: Path) -> AsyncIterator[Hub]:
    hub = Hub(folder)
    try:
        await hub.start()
        yield hub
        await hub.end()
    finally:
        if hub._process is not None:
            await hub._process.kill()


@asynccontextmanager
async def agent_run(
    folder: Path, hub: Hub, provider: Provider, agent_id: str, *, stream: bool, more: str = ""
) -> AsyncIterator[Command]:
    """An agent in a process of its own, ready; ended by whoever has it, else killed."""
    file = folder / f"{agent_id}.yaml"
    stream_word = "true" if stream else "false"
    file.write_text(
        AGENT.format(agent_id=agent_id, base_url=provider.base_url, stream=stream_word, more=more), encoding="utf-8"
    )
    async with command("agent", "run", file, "--url", hub.url, OPENAI_API_KEY=API_KEY) as agent:
        await agent.line(f"^Agent {agent_id} is ready at ")
        yield agent


@asynccontextmanager
async def chatting(hub: Hub) -> AsyncIterator[Command]:
    """Mia in the conversation, by a pipe that stays open."""
    async with command("chat", "--as", "mia", "--url", hub.url) as chat:
        await chat.line("^. You are mia in the network")
        yield chat


# -- the evidence


@dataclass(frozen=True)
class Said:
    """One message as the tests expect it. ``thread`` of a reply thread is the text that it answers: seqs differ from run to run."""

    sender: str
    to: str
    thread: str
    text: str


async def read_ledger(url: str) -> dict[str, list[BaseMessage]]:
    """Every thread of the network with its messages, as an operator reads them."""
    found: dict[str, list[BaseMessage]] = {}
    async with NetworkClient("auditor", url, kind="service") as auditor:
        for thread in (await auditor.call("network.list_threads", {"limit": 500}))["threads"]:
            history = await auditor.history(thread["thread_id"], limit=500)
            assert not history.has_more
            found[thread["thread_id"]] = list(history.messages)
    return found


def describe(threads: dict[str, list[BaseMessage]]) -> list[Said]:
    """The ledger's messages in its order."""
    messages = sorted((it for thread in threads.values() for it in thread), key=lambda it: it.seq)
    assert len({it.seq for it in messages}) == len(messages)
    texts = {it.seq: it.text for it in messages}

    def name(thread_id: str) -> str:
        return texts[int(thread_id.removeprefix("thread:"))] if thread_id.startswith("thread:") else thread_id

    return [Said(it.sender_id, it.to, name(it.thread_id), it.text) for it in messages]


def seen(chat: Command) -> list[tuple[int, str, str]]:
    """The messages on the person's screen: seq, sender, text."""
    found = (re.match(r"\d\d:\d\d:\d\d #(\d+) (\S+) → [^:]*(?::[^:]*)*?: (.*)$", line) for line in chat.lines)
    return [(int(it[1]), it[2], it[3]) for it in found if it is not None]


async def until_seen(chat: Command, texts: Iterable[str]) -> None:
    """Wait until all of these are on the screen."""
    wanted = set(texts)
    while not wanted <= {text for _, _, text in seen(chat)}:
        await chat.line(r"^\d\d:\d\d:\d\d #\d+ ")


def is_ascending(numbers: Sequence[int]) -> bool:
    return all(one < other for one, other in pairwise(numbers))


# -- the hub is killed


class Team(Provider):
    """Ann passes on to bob, who tells everybody; both answer what is said to all."""

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
    """What mia types in one part of the conversation."""
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
    """What that comes to."""
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
    """What the models are asked for it, each once."""
    for word in (f"{part}1", f"{part}3", f"{part}6"):
        yield from (Asked("ann", f"relay {word}", turn) for turn in (1, 2))
        yield from (Asked("bob", f"spread {word}", turn) for turn in (1, 2, 3))
    for line in (f"hello {part}2", f"note {part}4", f"hello {part}5"):
        yield from (Asked(agent_id, line, 1) for agent_id in ("ann", "bob"))


async def test_a_hub_killed_four_times_loses_repeats_and_reorders_nothing(tmp_path: Path) -> None:
    parts = ["quiet", "writing", "thinking", "answering", "after"]
    async with AsyncExitStack() as stack:
        provider = await stack.enter_async_context(Team(models=("ann-model", "bob-model")))
        hub = await stack.enter_async_context(hub_up(tmp_path))
        agents = [
            await stack.enter_async_context(agent_run(tmp_path, hub, provider, agent_id, stream=stream))
            for agent_id, stream in (("ann", True), ("bob", False))
        ]
        chat = await stack.enter_async_context(chatting(hub))

        for part in parts:
            expected = [it.text for it in expect_messages(part) if it.thread != "direct:ann~bob"]
            if part == "quiet":
                await hub.kill()
                await hub.start()
            if part == "thinking":
                provider.answers.clear()
            asked = len(provider.requests)
            await chat.type(*lines_of(part))
            match part:
                case "writing":  # the first line is stored, the others are anywhere
                    await chat.line(f"relay {part}1")
                    await hub.kill()
                    await hub.start()
                case "thinking":  # the replies come while no hub is there to record them
                    await provider.until_requests(asked + 5)  # one for each agent and thread that mia wrote to
                    await hub.kill()
                    provider.answers.set()
                    await hub.start()
                case "answering":
                    await chat.line(f"passed {part}1 on|(ann|bob) heard {part}")
                    await hub.kill()
                    await hub.start()
            await until_seen(chat, expected)

        chat.close_input()
        await chat.end()
        for agent in agents:
            await agent.stop()
            assert agent.errors == []
        ledger = await read_ledger(hub.url)
        shown = await run("history", "direct:ann~mia", "--limit", "500", "--json", "--url", hub.url)

    expected_all = [it for part in parts for it in expect_messages(part)]
    assert Counter(describe(ledger)) == Counter(expected_all)
    assert provider.refusals() == []
    assert Counter(provider.asked) == Counter(it for part in parts for it in expect_requests(part))
    assert hub.kills == 4

    # one order: every thread ascends; each sender's messages, and the answers to them, stand as they were written
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
    assert [it["seq"] for it in json.loads(shown.out)["messages"]] == [it.seq for it in ledger["direct:ann~mia"]]

    # the person saw what she may read, once, under the ledger's numbers, and what others wrote in the ledger's order
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

    # the models read the ledger: no message twice in a prompt, and those of a thread one after the other
    places = {words.text: number for number, words in enumerate(describe(ledger))}
    for body in provider.requests:
        contents = re.findall(r"<content>(.*?)</content>", body["messages"][1]["content"])
        assert len(contents) == len(set(contents))
        assert set(contents) <= set(places)
    for agent_id, verb in (("ann", "relay"), ("bob", "spread")):
        heard = [it.incoming for it in provider.asked if it.agent_id == agent_id and it.incoming.startswith(verb)]
        assert is_ascending([places[words] for words in dict.fromkeys(heard)])
    print(
        f"{len(expected_all)} messages in {len(ledger)} threads, {len(provider.requests)} model requests, "
        f"{len(screen)} lines on the screen, {hub.kills} kills: all once, in order"
    )


# -- an agent is killed


class Errand(Provider):
    """Bob says a thing in each of four turns. With ``hesitates`` it gives no turn's reply the first time that it is asked."""

    def __init__(self, *, hesitates: bool = False) -> None:
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
        return replace(reply, until=self._never if is_first and self._hesitates else None)


GO = [Asked("bob", "go", turn) for turn in (1, 2, 3, 4)]
ERRAND = [
    Said("mia", "agent:bob", "direct:bob~mia", "go"),
    Said("bob", "agent:mia", "direct:bob~mia", "one"),
    Said("bob", "broadcast", "broadcast", "two"),
    Said("bob", "channel:dev", "channel:dev", "three"),
    Said("bob", "agent:mia", "direct:bob~mia", "four"),
]


async def read_records(url: str, agent_id: str, trigger: str) -> list[dict[str, Any]]:
    """The records of an agent's reaction to the message with this text."""
    ledger = await read_ledger(url)
    [seq] = [it.seq for messages in ledger.values() for it in messages if it.text == trigger]
    async with NetworkClient("auditor", url, kind="service") as auditor:
        reaction = reaction_id(agent_id, seq, auditor.welcome.network.epoch)
        value = await auditor.call("network.records", {"reaction": reaction})
    return list(value["records"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_agent_killed_while_its_model_thinks_says_each_thing_once(tmp_path: Path, stream: bool) -> None:
    async with Errand(hesitates=True) as provider, hub_up(tmp_path) as hub, chatting(hub) as chat:
        await chat.type("/join dev")
        for number in range(len(GO) + 1):
            async with agent_run(tmp_path, hub, provider, "bob", stream=stream) as bob:
                if number == 0:
                    await chat.type("/dm bob go")
                if number < len(GO):  # this turn's reply is on its way, those of the earlier turns are in the ledger
                    await provider.until_asked(GO[number])
                    await bob.kill()
                else:
                    await until_seen(chat, [it.text for it in ERRAND])
                    await bob.stop()
        ledger = await read_ledger(hub.url)
        records = await read_records(hub.url, "bob", "go")
    assert describe(ledger) == ERRAND
    assert Counter(provider.asked) == dict.fromkeys(GO, 2), "asked once more for the kill, and never again"
    kinds = Counter(record["kind"] for record in records)
    assert kinds == {"started": 1, "model_reply": 4, "tool_started": 3, "tool_result": 3, "finished": 1}
    assert provider.refusals() == []


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
